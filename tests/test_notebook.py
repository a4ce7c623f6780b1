"""The notebook of the documentation runs from top to bottom."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path) -> None:
    if os.environ.get("ADLM_ALL") != "1":
        pytest.importorskip("nbclient", reason="needs nbclient: make test-all installs it")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    for cell in notebook.cells:  # fewer steps and rows: here it only has to run
        cell.source = cell.source.replace("steps=100", "steps=4").replace(
            "draws=4", "limit=4, draws=2"
        )
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "The " in text and "the rain." in text and "run − adlm-prose" in text
    assert any("text/html" in output.get("data", {}) for output in outputs)  # the player
