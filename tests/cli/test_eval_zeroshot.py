"""`adlm eval zeroshot`: one table, one JSON object, the same for any number of processes."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from adlm.cli.main import app
from adlm.evaluate.ppl import SETS
from tests.cli.eval_answers import evaluate, narrow_table
from tests.cli.terminal import assert_error, invoke, trained
from tests.evaluate.test_zeroshot import write_sets
from tests.training.runs import torchrun

METRICS = ("nll", "se", "se_noise", "ppl", "bits_per_byte", "bits_per_byte_se", "tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


def run_zeroshot(*words: object) -> dict[str, Any]:
    return evaluate("zeroshot", trained(), *words)


def test_one_object_with_every_set(folder: Path) -> None:
    found = run_zeroshot("--data-dir", folder, "--limit", 12)
    assert [row["set"] for row in found["sets"]] == list(SETS) and found["missing"] == {}
    assert (
        found["settings"]["draws"] == 2
        and found["settings"]["length"] == 32
        and found["provenance"]["versions"]
    )
    for row in found["sets"]:
        assert (
            row["se"] > 0
            and row["se_noise"] > 0
            and len(row["rows_hash"]) == 64
            and row["rows"] <= 12
        )
        assert row["bits_per_byte"] == pytest.approx(
            row["nll"] * row["tokens"] / row["bytes"] / math.log(2)
        )
        assert (
            row["settings"]["length"] == 32
            and row["settings"]["rows"] == "wrapped"
            and not row["is_comparable"]
        )
        assert any("not gpt2" in reason for reason in row["deviations"])
    assert [row["set"] for row in found["sets"] if row["paper"] is None] == ["pubmed"]


@pytest.mark.slow
def test_two_processes_evaluate_the_sets_that_rank_0_finds(folder: Path, tmp_path: Path) -> None:
    """As where the Hub answers only one of them: they would add up nats of different sets."""
    (tmp_path / "ag_news").symlink_to(folder / "ag_news")
    words = ("--sets", "ptb,ag_news", "--limit", 12, "--device", "cpu", "--skip-missing", "--json")
    done = torchrun(
        2,
        "-m",
        "tests.cli.test_eval_zeroshot",
        str(folder),
        str(tmp_path),
        trained(),
        *map(str, words),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    for row, alone in zip(
        found["sets"], run_zeroshot("--data-dir", folder, *words[:-1])["sets"], strict=True
    ):
        assert row == alone | {name: pytest.approx(alone[name], rel=1e-5) for name in METRICS}
    assert (
        found["missing"] == {} and len(found["sets"]) == 2 and found["provenance"]["processes"] == 2
    )


def main(*words: str) -> None:
    """What the processes of the test above run: each looks for the sets in a folder of its own."""
    app(["eval", "zeroshot", "--data-dir", words[int(os.environ["RANK"])], *words[2:]])


def test_several_models_are_paired(folder: Path) -> None:
    models = [trained(), trained("ar")]
    found = run_zeroshot(models[1], "--data-dir", folder, "--sets", "ptb,ag_news")
    assert [(row["set"], row["model"]) for row in found["sets"]] == [
        (s, m) for s in ("ptb", "ag_news") for m in models
    ]
    assert [each["model"] for each in found["models"]] == models and "model" not in found
    assert [each["data"] for each in found["differences"]] == ["ptb", "ag_news"]
    causal = found["sets"][1]
    assert not causal["is_bound"] and causal["settings"]["draws"] == 1 and causal["se_noise"] == 0


def test_the_table_has_the_numbers_of_the_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--data-dir", folder, "--sets", "lambada", "--sets", "pubmed")
    _, pubmed = sets = run_zeroshot(*words)["sets"]
    result = invoke("eval", "zeroshot", trained(), *words)
    assert (
        "(44.32/47.52/51.28)" in result.stdout
        and "Bits per byte compare across tokenizers" in result.stdout
    )
    assert all(row["rows_hash"][:8] in result.stdout for row in sets)
    assert (
        "warning: all: tokenizer" in result.stderr
        and "warning: pubmed: stand-in: abstracts" in result.stderr
    )
    assert f"standard error estimated from only {pubmed['se_count']} documents" in result.stderr
    for columns in (80, 60):
        shown = "".join(narrow_table(monkeypatch, columns, "eval", "zeroshot", trained(), *words))
        for text in (result.stdout, shown):
            for row in sets:
                assert (
                    f"{row['nll']:.3f} " in text
                    and f"± {row['se']:.3f} " in text
                    and f"{row['ppl']:,.2f} " in text
                )
                assert f"{row['bits_per_byte']:.3f}" in text
            assert (
                all(each in text for each in ("44.32", "47.52", "51.28", "stand-in"))
                and "37.56" not in text
            )


def test_missing_sets_are_skipped(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ptb").symlink_to(folder / "ptb")
    found = run_zeroshot("--data-dir", tmp_path, "--sets", "ptb,lm1b", "--skip-missing")
    assert [row["set"] for row in found["sets"]] == ["ptb"] and list(found["missing"]) == ["lm1b"]
    assert (
        found["warnings"][-1].startswith("missing: lm1b is not in")
        and "--skip" not in found["warnings"][-1]
    )


def test_documents_longer_than_a_row_are_counted(folder: Path) -> None:
    (row,) = run_zeroshot(
        "--data-dir", folder, "--sets", "pubmed", "--rows", "documents", "--length", 16
    )["sets"]
    assert (
        row["settings"]["documents_cut"] > 0 and "rows documents, not wrapped" in row["deviations"]
    )
    assert row["label"] == "stand-in: abstracts, in place of full articles" and row["paper"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sets", "c4"), "unknown set 'c4': expected one of lambada, ptb"),
        (("--data-dir", "nowhere"), "is not a folder"),
        (("--sets", "ptb", "--data-dir", "SETS", "--length", "64"), "is more than the 32 tokens"),
        (
            ("--sets", "ptb", "--data-dir", "SETS", "--rows", "lines"),
            "unknown rows 'lines': expected one of wrapped",
        ),
        (("--out", "README.md"), "is a file"),
        (("--data-dir", "EMPTY", "--sets", "lm1b"), "put its files into a folder 'lm1b' there"),
        (("--data-dir", "EMPTY", "--sets", "lm1b", "--skip-missing"), "none of the sets was found"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    places = {"SETS": str(folder), "EMPTY": str(tmp_path)}
    assert_error(
        invoke("eval", "zeroshot", trained(), *(places.get(word, word) for word in words)), message
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
