"""Code: sources that are the same everywhere, shares that count what parses, pass@k without bias."""

import ast
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.apps.code_eval import evaluation as code_eval
from adlm.apps.code_eval.evaluation import (
    Gap,
    can_parse,
    code,
    estimate_share,
    hash_sources,
    read_problems,
)
from adlm.data.sources import open_source
from adlm.text.lm import LM
from tests.apps.code_eval.test_sandbox import require_sandbox
from tests.cli.terminal import assert_error, invoke, trained
from tests.text.models import lm, rigged, tokenizer

FILE = Path(__file__).with_name("problems.jsonl")
PROBLEMS = read_problems(FILE)
SOURCES = code_eval.load_standard_library()
SHORT = {
    "task_id": "s",
    "prompt": "def f(a):\n",
    "entry_point": "f",
    "canonical_solution": "    return a\n",
}
SHORT |= {"test": "def check(f):\n    assert f(1) == 1\n"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


# The standard library


def test_the_standard_library_is_the_same_twice_and_sorted() -> None:
    names = list(SOURCES)
    code_eval.load_standard_library.cache_clear()
    again = code_eval.load_standard_library()
    assert names == sorted(names) and hash_sources(again) == hash_sources(SOURCES)
    assert len(SOURCES) > 300 and "json/decoder.py" in names and "site.py" in names
    assert not [
        name
        for name in names
        if "site-packages" in name or "/test" in name or "sysconfigdata" in name
    ]
    assert hash_sources({"a": "bc", "d": "e"}) != hash_sources(
        {"ab": "c", "d": "e"}
    )  # names and texts apart
    assert 0.05 < sum(map(code_eval.is_held_out, names)) / len(names) < 0.15


def test_the_standard_library_as_data(tmp_path: Path) -> None:
    result = invoke("eval", "code", "--write-data", tmp_path / "python.jsonl", "--json")
    written = json.loads(result.stdout)["datasets"]
    train, held_out = (
        [json.loads(line) for line in (tmp_path / each["file"]).open()] for each in written
    )
    assert (
        len(train) == written[0]["files"] > 5 * len(held_out)
        and len(held_out) == written[1]["files"] > 10
    )
    assert not {row["name"] for row in train} & {row["name"] for row in held_out}
    assert "PSF-2.0" in result.stderr and written[0]["sha256"] in result.stderr
    read = [document for document, _ in open_source(tmp_path / "python.jsonl").read()]
    assert read == [text for name, text in SOURCES.items() if not code_eval.is_held_out(name)]
    assert written[0]["bytes"] == sum(len(text.encode()) for text in read)


# Parsing


@pytest.mark.parametrize(
    "text", ["", "# only a remark\n", "def f(:\n", "\x00", "(" * 500 + ")" * 500, "It was so."]
)
def test_a_program_is_what_the_parser_accepts(text: str) -> None:
    assert not can_parse(text) and can_parse("x = 1\n") and can_parse("'\\d'\n")


def test_a_gap_and_what_was_taken_out_are_the_function() -> None:
    model = lm("mdlm", length=200)
    gaps, again, others = (code_eval.choose_gaps(model, 6, seed) for seed in (3, 3, 4))
    assert gaps == again != others
    for gap in gaps:
        assert (
            can_parse(gap.whole)
            and gap.removed.strip()
            and code_eval.is_held_out(gap.name.partition(":")[0])
        )
        assert isinstance(ast.parse(gap.whole).body[0], ast.FunctionDef | ast.AsyncFunctionDef)
        assert gap.after[:1] in ("\n", "")
        rows = model.layout_rows(template=code_eval.build_template(model, gap))
        assert model.describe(rows)["length"] <= 200


def test_infilling_counts_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always generates `a`: a gap of one name is filled so, and equals the original where it was `a`."""
    model = rigged("mdlm", {tokenizer("bytes").encode("a")[0]: 60.0}, length=64)
    removed = {"return ": "a", "return": " b", "return x": "+b"}
    gaps = [Gap(each, f"def f(a):\n    {before}", each, "\n") for before, each in removed.items()]
    gaps[1] = Gap("y", "def f(a):\n    return ", "b", "\n")
    monkeypatch.setattr(code_eval, "choose_gaps", lambda *_, **__: gaps)
    found = code(model, texts=0, infills=3, steps=2)["infilled"]["lines"]
    values = {name: each["value"] for name, each in found["shares"].items()}
    assert values == pytest.approx({"parses": 1.0, "equal": 1 / 3, "parses_if_left_empty": 1.0})
    assert found["examples"][2]["completion"] == "def f(a):\n    return xaa\n"


def test_generated_and_filled_in_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results, the cache, batches that change nothing, and two models on the same gaps."""
    models = [lm(method, length=128) for method in ("mdlm", "adlm")]
    settings: dict[str, Any] = {"texts": 4, "infills": 2, "steps": 2, "seed": 5}
    found = code(models[0], **settings, out=str(tmp_path / "out"))
    assert found["generated"]["parses"]["count"] == len(found["texts"]) == 4
    assert all(text.startswith("def ") for text in found["texts"])
    assert found.settings["seed"] == 5 and len(found.settings["sources_sha256"]) == 64
    for each in found["infilled"].values():
        assert set(each["shares"]) == {"parses", "equal", "parses_if_left_empty"}
        assert len(each["examples"]) == 2
    assert "parses_if_left_empty" in str(found)
    monkeypatch.setattr(LM, "fill_rows", None)  # everything is in the cache
    assert code(models[0], **settings, out=tmp_path / "out").as_dict() == found.as_dict()
    monkeypatch.undo()
    for model, name in zip(models, "ab", strict=True):
        model.name = name
    both = code(models, **settings, batch=1)
    assert [each["model"] for each in both["models"]] == ["a", "b"]
    for key in ("texts", "generated", "infilled"):
        assert both["models"][0][key] == found[key]


def test_a_causal_model_fills_no_gap() -> None:
    result = invoke("eval", "code", trained("ar"), "--texts", 2, "--infills", 2, "--json")
    assert (
        json.loads(result.stdout)["infilled"] is None
        and "sees only what is before a gap" in result.stderr
    )


# Problems


def test_given_candidates(tmp_path: Path) -> None:
    require_sandbox()
    rows = [
        {"task_id": task, "completion": text}
        for task, each in PROBLEMS.items()
        for text in (each["canonical_solution"], "    return None\n")
    ]
    words = (
        "--problems",
        FILE,
        "--candidates",
        write_lines(tmp_path / "c.jsonl", rows),
        "--k",
        "1,2",
        "--workers",
        2,
    )
    result = invoke("eval", "code", *words, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["pass"]["pass@1"]["value"] == 0.5 and found["pass"]["pass@2"]["value"] == 1.0
    assert found["pass"]["pass@1"]["count"] == 5 and found["statuses"] == {"passed": 5, "failed": 5}
    assert (
        found["settings"]["isolation"] == "bubblewrap"
        and len(found["settings"]["problems_sha256"]) == 64
    )
    again = invoke("eval", "code", *words, "--out", tmp_path / "out")
    assert "0.500" in again.stdout and "5 passed, 5 failed" in again.stdout
    seconds = [
        each["seconds"]
        for each in json.loads((tmp_path / "out/code.json").read_text("utf-8"))["candidates"]
    ]
    assert seconds == [each["seconds"] for each in found["candidates"]]  # resumed, not run again


@pytest.mark.parametrize("method", ["mdlm", "ar"])
def test_a_model_completes_problems(tmp_path: Path, method: str) -> None:
    file = write_lines(tmp_path / "short.jsonl", [SHORT])
    settings: dict[str, Any] = {"problems": file, "n": 2, "k": [1, 2], "unsafe": True, "steps": 4}
    found = code(lm(method), **settings)
    assert found["pass"]["pass@2"]["value"] == 0.0 and found["pass"]["pass@1"]["interval"][1] > 0.5
    completions = [each["completion"] for each in found["candidates"]]
    assert len(completions) == 2 and not completions[0].startswith("def f")
    assert [
        each["completion"] for each in code(lm(method), **settings, batch=1)["candidates"]
    ] == completions
    assert found.settings["isolation"] == "none" and "protects nothing" in found.warnings[0]


def test_without_a_sandbox_nothing_runs_unless_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        code_eval, "find_sandbox_problem", lambda: "the sandbox cannot run: use --unsafe"
    )
    assert_error(
        invoke("eval", "code", trained(), "--problems", FILE),
        "the sandbox cannot run: use --unsafe",
    )


def test_problems_that_cannot_be_judged_are_a_warning(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [SHORT | {"test": "def check(f):\n    f(print)\n"}])
    candidates = write_lines(
        tmp_path / "c.jsonl", [{"task_id": "s", "completion": "    return a\n"}]
    )
    found = code(problems=file, candidates=candidates, unsafe=True)
    assert (
        found["statuses"] == {"unsupported": 1}
        and "1 unsupported candidates count as failed" in found.warnings[1]
    )


def test_a_function_ends_where_a_line_is_not_indented() -> None:
    assert (
        code_eval.cut_function_body("    return 1\n\n\ndef g():\n    pass\n")
        == "    return 1\n\n\n"
    )
    assert code_eval.cut_function_body("return 1\n    x\nprint(2)") == "return 1\n    x\n"
    assert code_eval.cut_function_body("    a\n\n    b\n") == "    a\n\n    b\n"


def test_pass_at_k_is_the_share_of_draws_with_a_hit() -> None:
    for n, passed, k in [(5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 0, 4), (4, 4, 1), (5, 3, 5)]:
        draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert code_eval.estimate_pass_at_k(n, passed, k) == pytest.approx(
            sum(map(any, draws)) / len(draws)
        )
    rng, p = (
        np.random.default_rng(0),
        0.3,
    )  # unbiased: over many sets of 4 candidates the mean is 1 − (1 − p)^k
    values = [code_eval.estimate_pass_at_k(4, int(c), 2) for c in rng.binomial(4, p, 20_000)]
    assert abs(np.mean(values) - (1 - (1 - p) ** 2)) < 4 * np.std(values) / np.sqrt(len(values))


def test_an_interval_covers_the_share_as_often_as_it_says() -> None:
    rng, p, count = np.random.default_rng(1), 0.1, 40
    intervals = [
        estimate_share([1] * hits + [0] * (count - hits)).interval for hits in range(count + 1)
    ]
    inside = [
        intervals[hits][0] <= p <= intervals[hits][1] for hits in rng.binomial(count, p, 2000)
    ]  # type: ignore[index]
    assert 0.92 < np.mean(inside) < 0.99
    low, high = estimate_share([0] * 10).interval or (1, 0)
    assert low == 0 and high > 0.2  # nothing seen is not nothing there
    half = estimate_share([0.5, 0.0, 0.25, 0.5])
    assert (
        half.interval
        and half.interval[0] < half.value < half.interval[1]
        and half.stderr
        and half.stderr > 0
    )


def as_candidates(*tasks: str) -> str:
    return "".join(json.dumps({"task_id": task, "completion": "x"}) + "\n" for task in tasks)


@pytest.mark.parametrize(
    ("text", "k", "message"),
    [
        ("", 0, "is empty"),
        (
            "{\n",
            0,
            "line 1 is not a JSON object with task_id, prompt, entry_point, canonical_solution, test",
        ),
        ('{"task_id": 1}', 0, "KeyError.*prompt"),
        ("3", 0, "line 1 is not a JSON object"),
        (FILE.read_text("utf-8") * 2, 0, "task_id twice"),
        (
            as_candidates(*PROBLEMS, "x"),
            1,
            "1 candidates for 'x': pass@1 needs at least 1 for each of the 5 problems",
        ),
        (
            as_candidates("own/1"),
            1,
            "0 candidates for 'own/0'",
        ),  # a share over the others would be too high
        (as_candidates(*PROBLEMS), 2, "1 candidates for 'own/0': pass@2 needs at least 2"),
    ],
)
def test_files_that_are_not_problems_or_candidates(
    tmp_path: Path, text: str, k: int, message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        code(problems=FILE, candidates=path, k=[k], unsafe=True) if k else read_problems(path)


def test_candidates_need_problems() -> None:
    with pytest.raises(ValueError, match="n=2 is for problems"):
        code(lm(), n=2)
