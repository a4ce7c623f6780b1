"""Copies of the package as a commit or a folder has it, and processes that import them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("adlm", "recipes", "pyproject.toml")  # of a tree
IGNORED = shutil.ignore_patterns("__pycache__")


def copy_tree(name: str, folder: Path) -> None:
    """Write the package of a commit, or of a folder that has one, and the benchmarks from here."""
    folder.mkdir(parents=True)
    if (Path(name) / "adlm").is_dir():
        for part in PARTS:
            source = Path(name, part)
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=IGNORED)
            else:
                shutil.copy2(source, folder / part)
    else:
        command = ["git", "-C", str(ROOT), "archive", name, *PARTS]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=IGNORED)


def name_tree(name: str) -> str:
    """Return what a commit or a folder is called: HEAD is another commit tomorrow."""
    if (Path(name) / "adlm").is_dir():
        return name
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", name]
    return subprocess.check_output(command, text=True).strip()


def build_environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process (`python -P`) that imports the package from a tree.

    Folders of PYTHONPATH come after it: there a commit finds what only it requires.
    """
    own = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    folders = [str(tree), os.environ.get("PYTHONPATH", "")]
    own["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return os.environ | own
