"""`adlm eval samples`: all metrics of generated or given texts, in one table or one JSON object."""

import json
from pathlib import Path
from typing import Any

import pytest

from adlm.bundled import DEFAULT
from adlm.cli.output import SEPARATOR
from adlm.evaluate import scoring
from adlm.evaluate.sampling import cut_passages, read_texts
from tests.cli.terminal import assert_told, invoke, process
from tests.evaluate.scorers import PROSE, causal_folder, documents, encoder_folder, needs
from tests.training.runs import torchrun

FEW = ("--count", 12, "--length", 24, "--steps", 4, "--seed", 3, "--device", "cpu", "--reference", PROSE)


@pytest.fixture(autouse=True)
def _extras() -> None:
    needs("transformers", "mauve")


def words(*more: object) -> tuple[object, ...]:
    return ("eval", "samples", *more, "--judge", causal_folder(positions=256))


def evaluate(*more: object, last: tuple[object, ...] = ()) -> dict[str, Any]:
    result = invoke(*words(*more), "--mauve-seeds", 2, "--json", *last)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def write_texts(path: Path, texts: list[str]) -> tuple[object, ...]:
    """Texts in a file, and the options that measure it."""
    lines = SEPARATOR.join(texts) + "\n" if path.suffix == ".txt" else "".join(
        json.dumps({"text": text}) + "\n" for text in texts
    )  # fmt: skip
    path.write_text(lines, "utf-8", newline="")
    return ("--texts", path, "--reference", PROSE, "--device", "cpu", "--seed", 3)


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """Every number of every metric, of samples and of real text."""
    return {
        f"{side} {name} {key}": value
        for side in ("samples", "reference")
        for name, metric in found[side].items()
        for key, value in (metric.items() if isinstance(metric, dict) else [("", metric)])
        if isinstance(value, int | float)
    }


def test_samples_of_a_model_are_measured(tmp_path: Path) -> None:
    found = evaluate(DEFAULT, *FEW, "--out", tmp_path)
    assert set(found) == {"task", "samples", "reference", "settings", "warnings", "provenance"}
    for side in ("samples", "reference"):
        assert found[side]["gen_ppl"]["value"] > 1 and found[side]["gen_ppl"]["stderr"] > 0
        low, high = found[side]["mauve"]["interval"]
        assert 0 <= low <= high <= 1 and found[side]["texts"] == 12
    settings = found["settings"]
    assert settings["samples"]["steps"] == 4 and settings["samples"]["seed"] == 3 and settings["samples"]["nfe"] <= 4
    assert settings["judge"]["dtype"] == "float32" and settings["mauve"]["seeds"] == [0, 1]
    assert settings["reference"]["identity"]["files"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.jsonl", "samples.json", "samples.jsonl"]
    assert json.loads((tmp_path / "samples.json").read_text("utf-8")) == found
    again, alone = evaluate(DEFAULT, *FEW, "--out", tmp_path), evaluate(DEFAULT, *FEW)
    assert numbers(again) == numbers(alone) == numbers(found)
    texts = read_texts(tmp_path / "samples.jsonl")
    assert len(texts) == 12
    for name in ("texts.jsonl", "texts.txt"):
        given = evaluate(*write_texts(tmp_path / name, texts))
        assert numbers(given) == numbers(found), name
    stdin = invoke(*words("--texts", "-", *given_options()), "--mauve-seeds", 2, "--json", given=SEPARATOR.join(texts))
    assert numbers(json.loads(stdin.stdout)) == numbers(found)


def given_options() -> tuple[object, ...]:
    return ("--reference", PROSE, "--device", "cpu", "--seed", 3)


def test_texts_of_sample_are_read_back(tmp_path: Path) -> None:
    done = invoke("sample", DEFAULT, "--n", 8, "--length", 20, "--steps", 4, "--out", tmp_path / "out.txt", "--json")
    assert read_texts(tmp_path / "out.txt") == json.loads(done.stdout)["texts"]


def test_the_table_has_the_values_of_the_json(tmp_path: Path) -> None:
    result = invoke(*words(DEFAULT, *FEW, "--out", tmp_path), "--mauve-seeds", 2)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "samples.json").read_text("utf-8"))
    header, *rows = (line for line in result.stdout.splitlines() if "│" in line or "┃" in line)
    assert [name.strip() for name in header.strip("┃").split("┃")] == ["metric", "samples", "real text"]
    shown = {name.strip(): cells for name, *cells in (row.strip("│").split("│") for row in rows)}
    assert len(shown) == 8
    for name, key, digits in [("Gen-PPL", "gen_ppl", 1), ("entropy (nats)", "entropy", 3), ("MAUVE (95%)", "mauve", 3),
                              ("distinct-2", "distinct_2", 3)]:  # fmt: skip
        for side, cell in zip(("samples", "reference"), shown[name], strict=True):
            assert cell.strip().startswith(f"{found[side][key]['value']:,.{digits}f} ")
    assert "near those of real text" in result.stdout.replace("\n", " ") and "buckets" in result.stderr
    assert f"wrote {tmp_path / 'samples.json'}" in result.stderr.replace("\n", "")


def test_an_encoder_gives_the_features(tmp_path: Path) -> None:
    given = write_texts(tmp_path / "texts.txt", [text[:80] for text in cut_passages(documents(), 10, 240, seed=9)])
    settings = evaluate(*given, "--features", encoder_folder())["settings"]
    assert settings["features"]["kind"] == "encoder" and settings["judge"]["kind"] == "causal LM"


def test_scores_are_kept_and_only_missing_ones_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored, run_scorer = list[int](), scoring.run_scorer
    monkeypatch.setattr(scoring, "run_scorer", lambda *given: scored.append(len(given[1])) or run_scorer(*given))
    given, out = write_texts(tmp_path / "texts.jsonl", cut_passages(documents(), 12, 90, seed=9)), tmp_path / "out"
    alone, first = evaluate(*given, "--judge-batch", 1), evaluate(*given, "--out", out)
    assert sum(scored) == 2 * 36 and numbers(first) == pytest.approx(numbers(alone), abs=1e-5, rel=1e-6)
    assert numbers(evaluate(*given, "--out", out)) == numbers(first) and sum(scored) == 2 * 36
    other = ("--judge", causal_folder(bos=False, positions=256))  # the last --judge counts
    changed = evaluate(*given, "--out", out, last=other)
    assert sum(scored) == 3 * 36 and numbers(changed) == numbers(evaluate(*given, last=other))
    assert changed["samples"]["gen_ppl"]["nll"] != first["samples"]["gen_ppl"]["nll"]


@pytest.mark.slow
def test_two_processes_need_a_folder_and_print_once(tmp_path: Path) -> None:
    command = [str(word) for word in words(DEFAULT, *FEW, "--mauve-seeds", 2, "--json")]
    done = torchrun(2, "-m", "adlm", *command, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(json.loads(done.stdout)) == pytest.approx(numbers(evaluate(DEFAULT, *FEW)), abs=1e-5, rel=1e-6)
    done = torchrun(2, "-m", "adlm", *command)
    assert done.returncode != 0 and "in a folder that all of them see: give out" in done.stderr


@pytest.mark.slow
def test_stdout_is_json_alone() -> None:
    done = process(*words(DEFAULT, *FEW), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1 and json.loads(done.stdout)["settings"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--n", 1), "n=1: metrics of a set need at least 2 texts"),
        (("--texts", "x.txt"), "--texts x.txt needs no MODEL"),
        (("--reference", "nowhere.txt"), "no file or folder 'nowhere.txt'"),
        (("--judge", "nowhere.gguf"), "nowhere.gguf does not exist: give a folder"),
        (("--judge", "numpy"), "package numpy holds no model"),
        (("--option", "eta=much"), "not a number"),
        (("--sampler", "nosuch"), "nosuch"),
        (("--out", __file__), "is a file: give the name of a folder"),
    ],
)
def test_wrong_options_are_errors_of_one_line(more: tuple[object, ...], said: str) -> None:
    assert_told(invoke(*words(DEFAULT, *FEW), *more), said)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["one text of some length"], "at least 2 texts, got 1: in a file, <|endoftext|>"),
        (["one text of some length", ""], "1 of 2 samples are empty (number 1 first)"),
        (["one text of some length", "a"], "1 of 2 samples have fewer than 4 tokens"),
        (["long " * 400] * 2, "2 of 2 texts are longer than the 255 tokens of this model's context"),
    ],
)
def test_texts_that_cannot_be_measured(texts: list[str], said: str, tmp_path: Path) -> None:
    given = write_texts(tmp_path / "texts.jsonl", texts)
    assert_told(invoke(*words(*given)), said)
    if "long" in texts[0]:
        assert evaluate(*given, "--window", 100)["settings"]["stride"] == 50


def test_a_reference_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text(documents()[0][:3000], "utf-8")
    assert_told(invoke(*words(DEFAULT, *FEW, "--reference", tmp_path / "small.txt")), "passages", "24 are needed")


def test_sampling_options_are_refused_with_texts(tmp_path: Path) -> None:
    given = write_texts(tmp_path / "texts.jsonl", cut_passages(documents(), 12, 90, seed=9))
    for more in (
        ("--length", 5),
        ("--sampler", "nosuch"),
        ("--top-p", 0.5),
        ("--option", "eta=1"),
        ("--deterministic",),
    ):
        assert_told(invoke(*words(*given, *more)), "leave them out")


def test_the_lengths_of_passages_are_in_the_settings(tmp_path: Path) -> None:
    """For short texts the shortest passage is shorter than usual."""
    found = []
    for size in (30, 90):
        given = write_texts(tmp_path / "texts.jsonl", [text[:size] for text in documents()[:4]])
        about = evaluate(*given)["settings"]["reference"]
        found.append([int(about[name].removesuffix(" characters")) for name in ("shortest", "longest")])
    (least, most), (usual, more) = found
    assert least == most // 4 < 32 == usual and most < more


def test_judge_and_reference_are_required() -> None:
    assert_told(invoke("eval", "samples", DEFAULT), "--judge is required: a causal LM that computes Gen-PPL")
    assert_told(invoke("eval", "samples", DEFAULT, "--judge", "x"), "--reference is required")
    encoder = ("eval", "samples", DEFAULT, *FEW, "--judge", encoder_folder())
    assert_told(invoke(*encoder), "is an encoder")
