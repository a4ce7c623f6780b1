"""A model folder never causes an import, whatever its name fields say."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import adlm
from tests.text.models import lm

TARGET = "evil:run"
EVIL = """
from pathlib import Path

MARK = Path(__file__).with_name("evil_was_here")
MARK.write_text("imported")


def run(*args, **options):
    MARK.write_text("called")
"""
MODEL_NAMES = ("bridge", "positions", "network", "sampler")
NAMES = {
    "config.json": [
        "method",
        "network",
        "objective",
        "schedule",
        "rows",
        "anchor_rule",
        "sampler",
        "tokenizer",
        "tokenizer_class",
        "model_type",
        "architectures",
        "auto_map",
        "plugin",
    ],
    "tokenizer_config.json": ["tokenizer_class", "auto_map", "backend", "name", "chat_template"],
    "tokenizer.json": ["model", "pre_tokenizer", "decoder", "normalizer", "post_processor"],
}
CASES = [(file, key) for file, keys in NAMES.items() for key in keys]
CASES += [("config.json", f"model.{key}") for key in MODEL_NAMES]
# What the folder needs to be loaded at all, or cannot be of this kind.
REFUSED = {"method", "network", "objective", "rows"}
REFUSED |= {f"model.{key}" for key in MODEL_NAMES}
REFUSED |= {"model", "pre_tokenizer", "post_processor"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm("adlm").save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def hostile(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the model beside an evil.py that can be imported; it must not have been."""
    (tmp_path / "evil.py").write_text(EVIL, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = shutil.copytree(saved, tmp_path / "model")
    (folder / "checksums.json").unlink()
    (folder / "evil.py").write_text(EVIL, "utf-8")
    yield folder
    assert "evil" not in sys.modules
    assert not list(tmp_path.rglob("evil_was_here"))


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    *path, last = key.split(".")
    for each in path:
        content = content[each]
    content[last] = value


def change(folder: Path, changes: Mapping[str, list[str]], value: Any = TARGET) -> None:
    """Set keys of JSON files to a value."""
    for file, keys in changes.items():
        path = folder / file
        content = json.loads(path.read_text("utf-8"))
        for key in keys:
            put(content, key, value)
        path.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize(("file", "key"), CASES)
def test_a_name_in_a_folder_is_never_imported(hostile: Path, file: str, key: str) -> None:
    for value in (TARGET, {"AutoModel": TARGET, "type": TARGET, "class": TARGET}, [TARGET]):
        change(hostile, {file: [key]}, value)
        if key in REFUSED:
            with pytest.raises(ValueError, match=r"(model|tokenizer)"):
                adlm.load(hostile, device="cpu")
        else:
            try:
                text = adlm.load(hostile, device="cpu").generate(length=4, steps=1)
            except ValueError:
                continue  # it may be refused as well
            assert len(text) == 1


def test_a_network_that_is_not_built_in_is_asked_for(hostile: Path) -> None:
    for key, remedy in (
        ("network", "give network=MODULE:OBJECT, or --network MODULE:OBJECT"),
        ("objective", "give objective=MODULE:OBJECT, or --objective MODULE:OBJECT"),
    ):
        change(hostile, {"config.json": [key]})
        with pytest.raises(ValueError, match=f"{key} 'evil:run' is not built in.*{remedy}"):
            adlm.load(hostile, device="cpu")
        change(hostile, {"config.json": [key]}, None)


@pytest.mark.parametrize(
    "words", ["sample model --length 4", "score hi --model model", "eval ppl model --data text.txt"]
)
def test_no_command_imports_what_a_folder_names(hostile: Path, words: str) -> None:
    every_name = NAMES | {
        "config.json": NAMES["config.json"] + [f"model.{key}" for key in MODEL_NAMES]
    }
    del every_name["tokenizer.json"]
    change(hostile, every_name)
    (hostile.parent / "text.txt").write_text("a b c " * 100, "utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-m", "adlm", *words.split()],
        cwd=hostile.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2 and "error:" in result.stderr
    assert "Traceback" not in result.stderr
