"""Wrong command lines end with one line and an exit code: no traceback, no hang, no gigabytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from adlm.cli.commands import COMMANDS as TABLE
from adlm.cli.commands import load_command
from adlm.config import Config
from adlm.settings import list_fields
from tests.attacks.commands import Outcome, attack, count_cases, draw_examples, run_command

# A cheap call of each command, from which the wrong ones are made; those of convert, demo, experiment, reason
# and zeroshot fail early.
CALLS = {
    "convert": "nowhere.ckpt --out new --raw",
    "demo": "--steps 0 --out text.txt/demo",
    "doctor": "",
    "experiment": "recipe.yaml --dry-run",
    "export": "model --out new",
    "infill": "The|___{2}|sat. --model model --steps 2",
    "models": "adlm-prose",
    "plot": "run",
    "prepare": "text.txt --out new --train-tokenizer 300 --length 32 --workers 1",
    "recipes": "cpu-nano",
    "sample": "model --length 8 --steps 2 --n 1",
    "score": "Some|text. --model model --draws 2",
    "train": "recipe.yaml data.path=data folder=new",
    "eval anchors": "model --data text.txt --limit 2 --draws 1 --perturb 0.1 --stale 1",
    "eval code": "model --texts 1 --infills 1 --steps 2",
    "eval frontier": "model --n 2 --length 8 --samplers ancestral --steps 2 --top-p 1.0 --repeats 2",
    "eval ppl": "model --data text.txt --limit 2 --draws 1",
    "eval report": "model --data text.txt --n 2 --length 8 --limit 2 --out empty.txt",
    "eval samples": "model --judge nowhere --reference text.txt --n 2 --length 8 --steps 2",
    "eval zeroshot": "model --data-dir nowhere",
    "reason ask": "run question",
    "reason eval": "run --tests 2",
    "reason table": "run",
    "reason train": "sudoku no_cot --out new",
}
NUMBERS = [
    "-1",
    "0",
    "x",
    "",
    "1.5",
    "1e9",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0x10",
    " ",
    "-0.0",
    "½",
    "--",
    "9" * 30,
]
HUGE_NUMBERS = ["999999999", "2147483648", "9223372036854775807"]
NAMES = [
    "", " ", ".", "..", "-", "--", "=", "a=b=c", "nowhere/x", "text.txt", "text.txt/x", "a folder", "empty.txt", "~/no",
    "binary.bin", "run", "data", "model", "{}", "[", "]", "null", "true", "*", "owner/name", "http://127.0.0.1:9/x",
    "../../../../../etc/passwd", "file\x1b[31mred\x07", "a\nb", "🦊", "é" * 300, "x" * 5000, "\udcff\udcfe",
    "${oc.env:HOME}", "${x}", "___", "___{-1}", "___{9999999999}", "/dev/null", "/dev/full", "/proc/self/mem",
    "remask_lop", "adlm-pros", "cpu-nanoo",
]  # fmt: skip
# A huge value of these is a long job, not a mistake.
COUNTS = {
    "--n",
    "--draws",
    "--repeats",
    "--mauve-seeds",
    "--samples",
    "--texts",
    "--infills",
    "--seconds",
    "--memory",
}
Words = list[str]


def list_commands() -> dict[str, Any]:
    """The commands of the program by name, as click knows them."""
    listed = {words: load_command(words) for words in TABLE}
    for group in ("eval", "reason"):
        for name, command in listed.pop(group).commands.items():
            listed.setdefault(f"{group} {name}", command)
    return listed


COMMANDS = list_commands()
OPTIONS = {
    name: [param.opts[0] for param in command.params if param.opts[0].startswith("--")]
    for name, command in COMMANDS.items()
}
KEYS = [key for key in list_fields(Config) if key not in ("steps", "folder", "data.workers")]


def set_option(draw: Callable[..., Any], name: str, words: Words) -> Words:
    option = draw(st.sampled_from(OPTIONS[name]))
    value = draw(
        st.sampled_from(NUMBERS if option in COUNTS else NUMBERS + HUGE_NUMBERS)
        | st.sampled_from(NAMES)
    )
    return [*words, f"{option}={value}"] if draw(st.booleans()) else [*words, option, value]


def replace_word(draw: Callable[..., Any], name: str, words: Words) -> Words:
    place = draw(st.integers(0, len(words)))
    return [*words[:place], draw(st.sampled_from(NAMES)), *words[place + 1 :]]


def insert_word(draw: Callable[..., Any], name: str, words: Words) -> Words:
    place = draw(st.integers(0, len(words)))
    return [*words[:place], draw(st.sampled_from(NAMES)), *words[place:]]


def drop_word(draw: Callable[..., Any], name: str, words: Words) -> Words:
    place = draw(st.integers(0, len(words)))
    return [*words[:place], *words[place + 1 :]]


def repeat_word(draw: Callable[..., Any], name: str, words: Words) -> Words:
    return [*words, *words[draw(st.integers(0, len(words))) :][:1]]


def misspell(draw: Callable[..., Any], name: str, words: Words) -> Words:
    place = draw(st.integers(0, len(words)))
    return [
        *words[:place],
        *(word[:-1] + "q" for word in words[place : place + 1]),
        *words[place + 1 :],
    ]


def end_with_option(draw: Callable[..., Any], name: str, words: Words) -> Words:
    return [*words, draw(st.sampled_from(OPTIONS[name]))]


def override(draw: Callable[..., Any], name: str, words: Words) -> Words:
    if name != "train":
        return set_option(draw, name, words)
    return [
        *words,
        f"{draw(st.sampled_from(KEYS))}={draw(st.sampled_from(NUMBERS + HUGE_NUMBERS + NAMES))}",
    ]


CHANGES = [set_option] * 4 + [override] * 4 + [replace_word] * 2
CHANGES += [insert_word, drop_word, repeat_word, misspell, end_with_option]


@st.composite
def command_lines(draw: Callable[..., Any], name: str) -> tuple[str, ...]:
    """A call of a command with one or two mistakes; some of them may be none."""
    words = [word.replace("|", " ") for word in CALLS[name].split()]
    for change in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2)):
        words = change(draw, name, words)
    return (*name.split(), *words)


def test_every_command_is_attacked() -> None:
    assert set(CALLS) | {"serve"} == set(COMMANDS)  # serve runs until it is stopped: tests/serve


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"code": 1, "stderr": "Traceback (most recent call last)"}, "traceback"),
        ({"code": -11}, "exit code -11"),
        ({"stderr": "no such file"}, "0 error lines"),
        ({"seconds": 10.1}, "10.1 s"),
        ({"peak": 3 * 2**30}, "3.0 GB"),
        ({"stderr": "error: \x1b[31m"}, "control characters"),
    ],
)
def test_an_outcome_has_its_problem(changes: dict[str, Any], problem: str) -> None:
    refusal = Outcome((), 2, "", "error: no such file\n", 1.0, 2**29)
    assert refusal.problems == [] and replace(refusal, **changes).problems == [problem]


def name_command(words: tuple[str, ...]) -> str:
    return " ".join(words[: 1 + (words[0] in ("eval", "reason"))])


@pytest.mark.slow
def test_wrong_command_lines_are_refused(tmp_path: Path) -> None:
    strategies = {name: command_lines(name) for name in sorted(CALLS)}
    simple = st.one_of([strategies.pop(name) for name in ("demo", "doctor", "models", "recipes")])
    lines = draw_examples(strategies | {"others": simple}, count_cases(6))
    assert attack(lines, tmp_path, name_command, run_command) == []
