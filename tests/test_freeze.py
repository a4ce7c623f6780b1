"""The scripts that compare two commits: they notice what differs, and allow only what is listed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.freeze.compare import ALLOWED, GONE, Allowed, Change, Comparison, compare_probe
from bench.freeze.probes import PROBES, write_cases
from bench.freeze.server import Reply, iter_stream
from bench.trace import Function, count
from bench.trees import build_environment, copy_tree, name_tree
from tests.training.runs import ROOT

CASES = {"tokens": [1, [2, 3]], "texts": {"a": "b", "n": 1}, "weights": np.array([1.0, np.nan])}


def compare_with(
    folder: Path, *listed: Allowed, is_quick: bool = False, **changes: object
) -> Comparison:
    """Compare the cases with changed ones; None leaves one out."""
    changed = {name: value for name, value in (CASES | changes).items() if value is not None}
    for name, cases in (("old", CASES), ("new", changed)):
        (folder / name).mkdir(exist_ok=True)
        write_cases(iter(cases.items()), folder / name)
    return compare_probe("probe", folder / "old", folder / "new", listed, is_quick=is_quick)


def test_equal_cases_are_equal_and_any_bit_differs(tmp_path: Path) -> None:
    same = compare_with(tmp_path)
    assert same.is_fine and same.cases == 3 and not same.differing
    changes: list[tuple[str, object, float]] = [
        ("tokens", [1, [2, 5]], 2),
        ("tokens", [1, [2]], np.inf),
        ("texts", {"a": "c", "n": 1}, np.inf),
        ("texts", {"a": "b", "n": True}, np.inf),
        ("texts", {"a": "b"}, np.inf),
        ("weights", np.array([1.0 + 1e-15, np.nan]), 1e-15),
        ("weights", np.array([1.0, 2.0]), np.inf),
        ("weights", np.array([1.0, np.nan], np.float32), np.inf),
        ("weights", np.array([[1.0, np.nan]]), np.inf),
        ("weights", None, np.inf),
        ("another", 1, np.inf),
    ]
    for name, value, size in changes:
        found = compare_with(tmp_path, **{name: value})
        assert list(found.differing) == [name] and not found.is_fine
        assert "1 differ without" in found.describe()
        assert found.differing[name].size == pytest.approx(size, rel=0.2, abs=0)


def test_only_what_is_listed_may_differ(tmp_path: Path) -> None:
    whole = Allowed("probe", "tok*", "a reason")
    keys = Allowed("probe", "texts", "another", (Change("more", GONE, 2), Change("n")))
    elsewhere = Allowed("other probe", "weights", "none here")
    more = {"a": "b", "n": 5, "more": 2}
    changed = compare_with(tmp_path, whole, keys, elsewhere, tokens=[4], texts=more)
    assert changed.is_fine and not changed.unused
    assert changed.group_by_reason() == {"a reason": ["tokens"], "another": ["texts"]}
    for other in ({"a": "c"}, {"more": 3}, {"less": 1}):
        assert not compare_with(tmp_path, keys, texts=more | other).is_fine
    assert not compare_with(tmp_path, elsewhere, weights=np.array([2.0, 1.0])).is_fine


def test_what_is_listed_must_happen(tmp_path: Path) -> None:
    number = Allowed("probe", "tokens", "a reason")
    gone = Allowed("probe", "no such case", "another")
    elsewhere = Allowed("other probe", "weights", "none here")
    found = compare_with(tmp_path, number, gone, elsewhere)
    assert not found.is_fine and found.unused == [number, gone] and not found.differing
    quick = compare_with(tmp_path, number, gone, is_quick=True)
    assert quick.unused == [number]


def test_every_listed_probe_exists_with_a_reason() -> None:
    assert {each.probe for each in ALLOWED} <= PROBES.keys()
    assert all(len(each.reason.split()) > 4 for each in ALLOWED)


def test_a_change_of_a_key_is_left_out_where_it_is_as_said() -> None:
    change = Change("a.b", False, None)
    old = [{"a": {"b": False, "c": 1}}, {"a": {"b": True}}, {"b": False}, 1]
    new = [{"a": {"b": None, "c": 2}}, {"a": {"b": None}}, {"b": None}, 1]
    assert change.leave_out(old, new) == (
        [{"a": {"c": 1}}, {"a": {"b": True}}, {"b": False}, 1],
        [{"a": {"c": 2}}, {"a": {"b": None}}, {"b": None}, 1],
    )
    assert change.leave_out(old, new[1:]) == (old, new[1:])
    gone = Change("a", 1, GONE)
    assert gone.leave_out({"a": 1}, {}) == ({}, {})
    assert gone.leave_out({"a": 2}, {}) == ({"a": 2}, {})
    assert gone.leave_out({"a": True}, {}) == ({"a": True}, {})


def event(index: int, text: str, end: str | None = None, **fields: object) -> dict[str, object]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": end, **fields}
    return {"id": 1, "choices": [choice], "usage": None}


def read_stream(*events: object) -> dict[str, object]:
    usage = {"id": 1, "choices": [], "usage": {"nfe": 3}}
    return dict(iter_stream("a", Reply(200, "text/event-stream", [*events, usage, "[DONE]"])))


def test_of_a_stream_only_the_order_and_ends_apart_are_compared_by_themselves() -> None:
    apart = read_stream(event(1, "c"), event(0, "a"), event(0, "b"), event(0, "", "stop", fills=[]))
    merged = read_stream(event(0, "a"), event(1, "c"), event(0, "b", "stop", fills=[]))
    differing = {name for name in apart if apart[name] != merged[name]}
    assert differing == {"a: order", "a: ends apart"}
    assert merged["a: order"] == [0, 1, 0, None, None] and merged["a: ends apart"] == []
    others = (
        [event(0, "a"), event(1, "c"), event(0, "b", "length", fills=[])],
        [event(0, "a"), event(1, "c"), event(0, "b", "stop")],
        [event(0, "ab", "stop", fills=[]), event(1, "c")],
        [event(0, "a"), event(0, ""), event(1, "c"), event(0, "b", "stop", fills=[])],
    )
    for events in others:
        assert read_stream(*events)["a: events"] != merged["a: events"]


@pytest.mark.slow
def test_a_planted_change_of_a_recipe_is_noticed(tmp_path: Path) -> None:
    for part in ("adlm", "recipes"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    recipe = tmp_path / "recipes" / "cpu-nano.yaml"
    recipe.write_text(recipe.read_text("utf-8").replace("batch: 16", "batch: 17"), "utf-8")
    for folder, code in ((tmp_path, 1), (ROOT, 0)):
        command = [sys.executable, "-m", "bench.freeze", str(ROOT), str(folder)]
        command += ["--only", "recipes"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("cpu-nano.yaml: batch: 16 became 17" in done.stdout) == bool(code)


def test_comprehensions_are_no_functions() -> None:
    names = ["run", "run.<locals>.<lambda>", "run.<locals>.<listcomp>"]
    functions = [Function("a.py", line, name) for line, name in enumerate(names)]
    assert count([*functions, Function("b.py", 1, "run.<locals>.<genexpr>")]) == (2, 2)


@pytest.mark.slow
def test_a_trace_names_the_functions_of_a_call() -> None:
    command = [sys.executable, "-m", "bench.trace", "generate", "cold-sample", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LanguageModel.forward" in done.stdout and "Layer.forward" in done.stdout
    assert "<module>" not in done.stdout


@pytest.mark.slow
def test_a_commit_compared_with_itself_takes_the_same_time() -> None:
    command = [sys.executable, "-m", "bench.host_time", str(ROOT), str(ROOT)]
    command += ["--only", "confidence", "--rows", "1", "--repeats", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert case["nfe"] == 16 and 0.3 < case["ratio"] < 3


def test_a_tree_is_what_a_process_imports(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_tree(str(ROOT), tree)
    code = "import adlm, bench.trees; print(adlm.__file__, bench.trees.__file__)"
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.check_output(command, env=build_environment(tree), cwd=ROOT, text=True)
    assert printed.split() == [str(tree / "adlm/__init__.py"), str(tree / "bench/trees.py")]
    assert name_tree(str(tree)) == str(tree)
