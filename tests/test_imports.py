"""Imports point downwards: the core knows no app, and no app another one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import adlm

PACKAGE = Path(adlm.__file__).parent
# A room may import its own files and those of lower layers; a module can have a layer of its own
# (`training.train`).
LAYERS = [
    "errors",
    "registry",
    "settings defaults",
    "files devices",
    "distributed",
    "diffusion",
    "models data",
    "models.folder bundled",
    "generate likelihood view convert",
    "training text",
    "config",
    "training.setup training.task",
    "training.text",
    "training.train",
    "evaluate interop",
    "serve",
    "cli",
    "apps",
    "__main__",
]
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms.split()}


def find_room(name: str) -> str | None:
    """The part of a dotted name, without `adlm.`, that has a layer: the longest one."""
    while name and name not in LEVELS:
        name = name.rpartition(".")[0]
    return name or None


# Apps that import another one, and why.
BETWEEN_APPS = {
    ("experiments", "reasoning"): "verdicts of arms over seeds, which both compare",
}


def list_imports(path: Path) -> Iterator[str]:
    """The names of the package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("adlm."))


def find_wrong_imports(part: Path) -> Iterator[str]:
    """The imports of a file of the package that point upwards, or to another app."""
    room = find_room(".".join(part.with_suffix("").parts))
    assert room is not None, f"{part} has no layer: add its room to LAYERS"
    for name in list_imports(PACKAGE / part):
        target = find_room(name.removeprefix("adlm."))
        if target is None:  # a public name
            is_allowed = LEVELS[room] >= LEVELS["serve"]
        elif room == target == "apps":
            pair = (part.parts[1], name.split(".")[2])
            is_allowed = pair[0] == pair[1] or pair in BETWEEN_APPS
        else:
            is_allowed = room == target or LEVELS[target] < LEVELS[room]
        if not is_allowed:
            yield f"{part} imports {name}"


def test_imports_point_downwards() -> None:
    parts = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    parts.remove(Path("__init__.py"))  # the public names come from everywhere
    assert [wrong for part in parts for wrong in find_wrong_imports(part)] == []


def test_known_imports_between_apps_exist() -> None:
    pairs = {
        (path.relative_to(PACKAGE / "apps").parts[0], name.split(".")[2])
        for path in (PACKAGE / "apps").rglob("*.py")
        for name in list_imports(path)
        if name.startswith("adlm.apps.")
    }
    assert {pair for pair in pairs if pair[0] != pair[1]} == set(BETWEEN_APPS)
