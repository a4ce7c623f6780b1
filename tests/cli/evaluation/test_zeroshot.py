"""`adlm eval zeroshot`: one table, one JSON object, and a file that a stopped run goes on from."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from adlm.cli.main import app
from adlm.evaluate.zeroshot import SETS
from tests.cli.evaluation import answers
from tests.cli.evaluation.test_domains import assert_same
from tests.cli.terminal import assert_told, invoke, trained
from tests.evaluate.test_zeroshot import write_sets
from tests.training.runs import torchrun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


def answered(*words: object) -> dict[str, Any]:
    return answers.answered("zeroshot", trained(), *words)


def test_one_object_with_every_set(folder: Path) -> None:
    found = answered("--data-dir", folder, "--limit", 12)
    assert [row["set"] for row in found["sets"]] == list(SETS) and found["missing"] == {}
    assert found["settings"]["draws"] == 2 and found["settings"]["length"] == 32 and found["provenance"]["versions"]
    for row in found["sets"]:
        assert row["ppl"] == pytest.approx(math.exp(row["nll"])) and row["se"] > 0 and row["se_noise"] > 0
        assert row["bits_per_byte"] == pytest.approx(row["nll"] * row["tokens"] / row["bytes"] / math.log(2))
        assert len(row["rows_hash"]) == 64 and row["rows"] <= 12 and not row["is_comparable"]
        assert row["settings"]["length"] == 32 and row["settings"]["rows"] == "wrapped"
        assert any("not gpt2" in reason for reason in row["differs"])
    assert [row["set"] for row in found["sets"] if row["paper"] is None] == ["pubmed"]


def test_figures_do_not_depend_on_batch_and_workers(folder: Path) -> None:
    words = ("--data-dir", folder, "--sets", "ptb,ag_news")
    one, other = answered(*words, "--batch", 1), answered(*words, "--batch", 7, "--workers", 4)
    assert_same(one["sets"], other["sets"])


@pytest.mark.slow
def test_two_processes_are_one(folder: Path, tmp_path: Path) -> None:
    words = (trained("ar"), "--data-dir", folder, "--sets", "ptb,pubmed", "--batch", 3, "--skip-missing")
    expected = answered(*words, "--device", "cpu")
    out = tmp_path / "figures.json"
    given = [trained(), *map(str, words), "--device", "cpu", "--out", str(out), "--json"]
    done = torchrun(2, "-m", "adlm", "eval", "zeroshot", *given)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["provenance"]["processes"] == 2 and done.stderr.count(": measured") == 4
    assert_same(found["sets"], expected["sets"])
    assert json.loads(out.read_text("utf-8")) == found


@pytest.mark.slow
def test_processes_that_find_other_sets_measure_the_firsts(folder: Path, tmp_path: Path) -> None:
    """As where the Hub answers one of them and not the other: they would add up figures of different sets."""
    (tmp_path / "ag_news").symlink_to(folder / "ag_news")
    words = ("--sets", "ptb,ag_news", "--limit", 12, "--device", "cpu", "--skip-missing", "--json")
    done = torchrun(
        2, "-m", "tests.cli.evaluation.test_zeroshot", str(folder), str(tmp_path), trained(), *map(str, words)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert_same(found["sets"], answered("--data-dir", folder, *words[:-1])["sets"])
    assert found["missing"] == {} and len(found["sets"]) == 2


def main(*words: str) -> None:
    """What processes of these tests run: each looks for the sets in a folder of its own."""
    app(["eval", "zeroshot", "--data-dir", words[int(os.environ["RANK"])], *words[2:]])


def test_several_models_are_each_alone(folder: Path) -> None:
    words, models = ("--data-dir", folder, "--sets", "ptb,ag_news"), [trained(), trained("ar")]
    found = answered(models[1], *words)
    assert [(line["set"], line["model"]) for line in found["sets"]] == [
        (s, m) for s in ("ptb", "ag_news") for m in models
    ]
    assert [each["model"] for each in found["models"]] == models and "model" not in found
    for model in models:
        alone = answers.answered("zeroshot", model, *words)
        assert [line for line in found["sets"] if line["model"] == model] == alone["sets"]
        assert alone["model"] == model and alone["method"] == alone["models"][0]["method"]
    header, *rows = invoke("eval", "zeroshot", *models, *words).stdout.splitlines()
    assert header.split()[:2] == ["set", "model"] and [row.split()[1] for row in rows[:4]] == ["run-adlm", "run-ar"] * 2
    assert ["≤" in row for row in rows[:4]] == [True, False] * 2 and rows[0].index("(95.37") == rows[1].index("(95.37")


def test_the_table_says_what_json_says(folder: Path) -> None:
    words = ("--data-dir", folder, "--sets", "lambada", "--sets", "pubmed")
    result = invoke("eval", "zeroshot", trained(), *words)
    assert result.exit_code == 0, result.output
    lambada, pubmed = answered(*words)["sets"]
    header, first, second, *reasons = result.stdout.splitlines()
    assert header.split()[:4] == ["set", "tokens", "nats/token", "ppl"]
    for line, row in ((first, lambada), (second, pubmed)):
        assert f"{row['nll']:.3f} ± {row['se']:.3f}" in line and f"{row['bits_per_byte']:.3f}" in line
        assert row["rows_hash"][:8] in line and f"{row['ppl']:,.2f}" in line
    assert "(44.32/47.52/51.28)" in first
    assert second.startswith("pubmed*") and "stand-in" in second and "37.56" not in second
    assert any(line.startswith("all: tokenizer") and "not gpt2" in line for line in reasons)
    assert any(line.startswith("pubmed: stand-in: abstracts") for line in reasons)
    few = f"pubmed: the error is over {pubmed['error_units']} documents only"
    assert 2 <= pubmed["error_units"] <= 12 and any(line.startswith(few) for line in reasons)
    assert "bits per byte compare across tokenizers" in result.stderr


def test_a_causal_models_figures_are_exact(folder: Path) -> None:
    result = invoke("eval", "zeroshot", trained("ar"), "--data-dir", folder, "--sets", "ptb", "--json")
    (row,) = json.loads(result.stdout)["sets"]
    assert not row["is_bound"] and row["settings"]["draws"] == 1 and row["se_noise"] == 0


def test_finished_sets_are_not_done_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    words: tuple[object, ...] = ("--data-dir", folder, "--out", out)
    first = answered(*words, "--sets", "ptb")
    assert json.loads(out.read_text())["sets"] == first["sets"]
    stored = json.loads(out.read_text())
    stored["sets"][0]["nll"] = -1.0
    out.write_text(json.dumps(stored))
    again = invoke("eval", "zeroshot", trained(), *words, "--sets", "ptb,ag_news", "--json")
    assert again.exit_code == 0, again.output
    assert [row["nll"] == -1 for row in json.loads(again.stdout)["sets"]] == [True, False]
    assert "ptb: known from" in again.stderr and "ag_news: measured" in again.stderr
    assert [row["set"] for row in json.loads(out.read_text())["sets"]] == ["ptb", "ag_news"]
    # Other rows under the same name are measured again.
    (row,) = answered(*words, "--sets", "ptb", "--limit", 2)["sets"]
    assert row["nll"] > 0 and [row["set"] for row in json.loads(out.read_text())["sets"]] == ["ptb", "ag_news"]
    # Another seed, another file.
    result = invoke("eval", "zeroshot", trained(), *words, "--sets", "ptb", "--seed", 1)
    assert_told(result, f"holds figures of {trained()} with seed 0, and 1 is asked for: give another name")


@pytest.mark.parametrize(
    "content",
    ["not JSON", "[]", '{"sets": 1}', '{"format": 2, "models": [], "sets": [1]}', '{"format": 2, "sets": []}'],
)
def test_a_file_of_something_else_is_not_written_over(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    words = ("--data-dir", folder, "--sets", "ptb", "--out", tmp_path / "mine.json")
    assert_told(invoke("eval", "zeroshot", trained(), *words), "is no file of this command: give another name")
    assert (tmp_path / "mine.json").read_text() == content


def test_a_file_of_an_older_form_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"format": 1, "sets": []}')
    words = ("--data-dir", folder, "--sets", "ptb", "--out", tmp_path / "old.json")
    assert_told(invoke("eval", "zeroshot", trained(), *words), "has format 1, this version writes 2: give another name")


def test_missing_sets_are_told_and_listed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ptb").symlink_to(folder / "ptb")
    words = ("--data-dir", tmp_path, "--sets", "ptb,lm1b")
    assert_told(
        invoke("eval", "zeroshot", trained(), *words),
        "lm1b is not in",
        "put its files there as lm1b or",
        "--skip-missing",
    )
    found = answered(*words, "--skip-missing")
    assert [row["set"] for row in found["sets"]] == ["ptb"] and list(found["missing"]) == ["lm1b"]
    result = invoke("eval", "zeroshot", trained(), *words, "--skip-missing")
    assert "missing: lm1b is not in" in result.stdout and "--skip-missing" not in result.stdout
    none = invoke("eval", "zeroshot", trained(), "--data-dir", tmp_path, "--sets", "lm1b", "--skip-missing")
    assert_told(none, "none of the sets is there")


def test_a_set_may_lie_anywhere(folder: Path) -> None:
    words = ("--set", f"arxiv={folder / 'pubmed'}", "--stand-in", "arxiv=made-up abstracts")
    found = answered(*words)
    (row,) = found["sets"]
    assert row["set"] == "arxiv" and row["label"] == "stand-in: made-up abstracts" and row["paper"] is None
    documents = answered(*words, "--rows", "documents", "--length", 16)["sets"][0]
    assert documents["settings"]["documents_cut"] > 0 and "rows documents, not wrapped" in documents["differs"]


def test_empty_data(tmp_path: Path) -> None:
    (tmp_path / "ptb.valid.txt").write_text("\n")
    words = ("eval", "zeroshot", trained(), "--set", f"ptb={tmp_path / 'ptb.valid.txt'}")
    assert_told(invoke(*words), "holds no document")
    (tmp_path / "ptb.valid.txt").write_text("one word\n")
    assert_told(invoke(*words, "--length", 32), "fills no row of 32 tokens", "a smaller --length")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sets", "c4"), "no set is called 'c4'; there are lambada, ptb"),
        (("--set", "c4=x"), "no set is called 'c4'"),
        (("--set", "ptb"), "--set 'ptb' is not NAME=VALUE"),
        (("--set", "ptb=a", "--set", "ptb=b"), "names ptb twice"),
        (("--set", "ptb=nowhere"), "no file or folder 'nowhere'"),
        (("--sets", "lambada", "--set", "ptb=x"), "ptb is described and not asked for"),
        (("--data-dir", "nowhere"), "is no folder"),
        (("--length", "64"), "is more than the 32 tokens"),
        (("--rows", "lines"), "--rows is wrapped or documents, got 'lines'"),
        (("--out", "."), "is a folder"),
    ],
)
def test_what_is_wrong_is_told(words: tuple[str, ...], said: str) -> None:
    assert_told(invoke("eval", "zeroshot", trained(), *words), said)


if __name__ == "__main__":
    main(*sys.argv[1:])
