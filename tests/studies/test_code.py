"""Python as a domain: sources that are the same everywhere, and shares that count what parses."""

import ast
from pathlib import Path

import pytest

from adlm.data.sources import open_source
from adlm.evaluate.programs import Problem
from adlm.studies.code import (
    Gap,
    Source,
    completions,
    function_body,
    functions_of,
    gaps,
    hash_of,
    infilling,
    parse_shares,
    parses,
    parsing_lines,
    standard_library,
    template_of,
    write_sources,
    written_code,
)
from tests.text.models import lm, rigged, tokenizer

SOURCES = standard_library()
PROBLEM = Problem("x", "def f(a: int) -> int:\n", "f", "    return a\n", "def check(f):\n    assert f(1) == 1\n")


def test_the_standard_library_is_the_same_twice_and_sorted() -> None:
    again = standard_library()
    names = [source.name for source in SOURCES]
    assert names == sorted(names) and hash_of(again) == hash_of(SOURCES)
    assert len(SOURCES) > 300 and "json/decoder.py" in names and "site.py" in names
    assert not [name for name in names if "site-packages" in name or "/test" in name or "sysconfigdata" in name]
    assert hash_of(SOURCES[1:]) != hash_of(SOURCES)
    joined = [Source("a", "bc"), Source("d", "e")]
    assert hash_of(joined) != hash_of([Source("ab", "c"), Source("d", "e")])  # names and texts do not run together


def test_held_out_files_are_about_a_tenth_by_name_alone() -> None:
    held = [source for source in SOURCES if source.is_held_out]
    assert 0.05 < len(held) / len(SOURCES) < 0.15
    assert all(Source(source.name, "other").is_held_out for source in held)


def test_a_folder_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no Python sources"):
        standard_library(tmp_path)


def test_what_is_written_is_what_prepare_reads(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    said = write_sources(file, SOURCES[:20])
    read = [document for document, _ in open_source(file).read()]
    assert read == [source.text for source in SOURCES[:20]]
    assert said["sha256"] == hash_of(SOURCES[:20]) and said["license"].startswith("PSF-2.0")
    assert said["bytes"] == sum(len(text.encode()) for text in read)


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("x = 1\n", True),
        ("", False),
        ("# only a remark\n", False),
        ("def f(:\n", False),
        ("\x00", False),
        ("(" * 500 + ")" * 500, False),
        ("'\\d'\n", True),
        ("It was the best of times.", False),
    ],
)
def test_a_program_is_what_the_parser_takes(text: str, does: bool) -> None:
    assert parses(text) is does


def test_lines_up_to_where_it_breaks_off() -> None:
    assert parsing_lines("a = 1\nb = 2\nc = (\n") == pytest.approx(2 / 3)
    assert parsing_lines("a = 1\nb = 2") == 1.0 and parsing_lines("no no") == 0.0 and parsing_lines("") == 0.0


def test_shares_are_counts_with_an_interval() -> None:
    found = parse_shares(["a = 1", "b =", "c", "def"])
    assert found["parses"].value == 0.5 and found["parses"].count == 4
    assert found["parses"].low < 0.5 < found["parses"].high and found["parses"].stderr > 0
    with pytest.raises(ValueError, match="there are no texts"):
        parse_shares([])


def test_every_source_parses_and_so_do_its_functions() -> None:
    some = [source for source in SOURCES if source.is_held_out][:8]
    assert all(parses(source.text) for source in some)
    functions = [each for source in some for each in functions_of(source)]
    assert len(functions) > 30
    for _, text in functions:
        assert isinstance(ast.parse(text).body[0], ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize("kind", ["lines", "expression"])
def test_a_gap_and_what_was_taken_out_are_the_function(kind: str) -> None:
    model = lm("mdlm", length=200)
    chosen = gaps(SOURCES, model, 6, kind=kind, seed=3)
    assert chosen == gaps(SOURCES, model, 6, kind=kind, seed=3)
    assert chosen != gaps(SOURCES, model, 6, kind=kind, seed=4)
    held = {source.name for source in SOURCES if source.is_held_out}
    for gap in chosen:
        assert parses(gap.whole) and gap.removed.strip() and gap.name.partition(":")[0] in held
        assert gap.whole.startswith(gap.before) and "def " in gap.before
        if kind == "expression":
            assert "\n" not in gap.removed and parses(f"({gap.removed})")
        else:
            assert gap.after[:1] in ("\n", "")
        job = model.build_request(template=template_of(model, gap))
        assert job.settings["length"] <= 200


def test_infilling_counts_what_is_right() -> None:
    """A model that always writes `a`: every hole of one name is filled so, and equals the original where it was `a`."""
    model = rigged("mdlm", {tokenizer("bytes").encode("a")[0]: 60.0}, length=64)
    right = Gap("x", "def f(a):\n    return ", "a", "\n", "expression")
    wrong = Gap("y", "def f(a):\n    return ", "b", "\n", "expression")
    broken = Gap("z", "def f(a):\n    return x", "+b", "\n", "expression")
    found = infilling(model, [right, wrong, broken], steps=2)
    shares = {name: each["value"] for name, each in found["shares"].items()}
    assert shares == pytest.approx({"parses": 1.0, "equal": 1 / 3, "same_tree": 1 / 3, "parses_if_left_empty": 1.0})
    assert found["examples"][2]["written"] == "def f(a):\n    return xaa\n"


def test_infilling_does_not_depend_on_the_batch() -> None:
    model = lm("adlm", length=200)
    chosen = gaps(SOURCES, model, 4, seed=1)
    texts = [[row["written"] for row in infilling(model, chosen, batch=b)["examples"]] for b in (1, 4)]
    assert texts[0] == texts[1]


def test_gaps_that_cannot_be_had_are_told() -> None:
    with pytest.raises(ValueError, match=r"only \d+ of 5 functions of \d+ held-out files fit into 23 tokens"):
        gaps(SOURCES[:60], lm("mdlm", length=24), 5)
    with pytest.raises(ValueError, match="kind 'word' is not one of lines, expression"):
        gaps(SOURCES, lm("mdlm"), 1, kind="word")


def test_a_function_ends_where_a_line_is_not_indented() -> None:
    assert function_body("    return 1\n\n\ndef g():\n    pass\n") == "    return 1\n\n\n"
    assert function_body("return 1\n    x\nprint(2)") == "return 1\n    x\n"
    assert function_body("    a\n\n    b\n") == "    a\n\n    b\n"


@pytest.mark.parametrize("method", ["mdlm", "ar"])
def test_completions_follow_the_prompt(method: str) -> None:
    model = lm(method)
    how = {} if method == "ar" else {"steps": 4}
    found = completions(model, [PROBLEM], 3, most=8, **how)
    assert [each.task_id for each in found] == ["x"] * 3
    assert all(not each.completion.startswith("def f") for each in found)
    with pytest.raises(ValueError, match=r"the prompt of x has \d+ tokens"):
        completions(model, [Problem("x", "def f(a): # " + "a" * 99, "f", "", "")], 1)


def test_code_is_written_after_def() -> None:
    texts = written_code(lm("mdlm"), 2, steps=2)
    assert len(texts) == 2 and all(text.startswith("def ") for text in texts)
