"""One server for all tests that ask it, and a place where runs of the fixtures can go on."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.laws.commands import Server, serve
from tests.laws.texts import FIXTURES, folder


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Serve a masked and a causal model of texts that may end, and one of whole documents."""
    if os.environ.get("ADLM_ALL") != "1":
        for extra in ("fastapi", "uvicorn", "prometheus_client"):
            pytest.importorskip(extra)
    with serve(folder("timed"), folder("ar"), folder("adlm")) as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that copies files of the fixtures to a new working directory."""
    monkeypatch.chdir(tmp_path)

    def copy(*names: str) -> Path:
        for name in names:
            source = FIXTURES / name
            if source.is_dir():
                shutil.copytree(source, tmp_path / name, symlinks=True)
            else:
                shutil.copy(source, tmp_path / name)
        return tmp_path

    return copy
