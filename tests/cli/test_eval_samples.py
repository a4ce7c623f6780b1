"""`adlm eval samples`: all metrics of generated or given texts, in one table or one JSON object."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adlm.bundled import DEFAULT
from adlm.cli.output import SEPARATOR
from adlm.evaluate import cache as caches
from adlm.evaluate.cache import read_entries
from adlm.evaluate.sample_metrics import read_texts
from tests.cli.eval_answers import held_out
from tests.cli.terminal import assert_error, invoke, trained
from tests.evaluate.scorers import PROSE, causal_folder, documents, encoder_folder, needs, numbers
from tests.evaluate.test_cache import max_file_size
from tests.training.runs import shelf

FEW = (
    "--n",
    12,
    "--length",
    24,
    "--steps",
    4,
    "--seed",
    3,
    "--device",
    "cpu",
    "--reference",
    PROSE,
)


@pytest.fixture(autouse=True)
def _extras() -> None:
    needs("transformers", "mauve")


def words(*more: object) -> tuple[object, ...]:
    return ("eval", "samples", *more, "--judge", causal_folder(positions=256))


def evaluate(*more: object, given: str | None = None) -> dict[str, Any]:
    result = invoke(*words(*more), "--mauve-seeds", 2, "--json", given=given)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def write_texts(path: Path, texts: list[str]) -> tuple[object, ...]:
    """Texts in a file, and the options that measure it."""
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text(
        SEPARATOR.join(texts) + "\n" if path.suffix == ".txt" else "".join(lines),
        "utf-8",
        newline="",
    )
    return ("--texts", path, "--reference", PROSE, "--device", "cpu", "--seed", 3)


def test_samples_of_a_model_are_measured(tmp_path: Path) -> None:
    found = evaluate(DEFAULT, *FEW, "--out", tmp_path)
    assert set(found) == {"task", "samples", "reference", "settings", "warnings", "provenance"}
    for side in ("samples", "reference"):
        assert found[side]["gen_ppl"]["value"] > 1 and found[side]["gen_ppl"]["stderr"] > 0
        low, high = found[side]["mauve"]["interval"]
        assert 0 <= low <= high <= 1 and found[side]["texts"] == 12
    settings = found["settings"]
    assert (
        settings["samples"]["steps"] == 4
        and settings["samples"]["seed"] == 3
        and settings["samples"]["nfe"] <= 4
    )
    assert settings["scorer"]["dtype"] == "float32" and settings["mauve"]["seeds"] == [0, 1]
    assert settings["reference"]["identity"]["files"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "cache.jsonl",
        "samples.json",
        "samples.jsonl",
    ]
    assert json.loads((tmp_path / "samples.json").read_text("utf-8")) == found
    again, alone = evaluate(DEFAULT, *FEW, "--out", tmp_path), evaluate(DEFAULT, *FEW)
    assert numbers(again) == numbers(alone) == numbers(found)
    texts = read_texts(tmp_path / "samples.jsonl")
    assert len(texts) == 12
    for name in ("texts.jsonl", "texts.txt"):
        given = write_texts(tmp_path / name, texts)
        assert numbers(evaluate(*given)) == numbers(found), name


def test_a_full_disk_and_a_wrong_judge_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file or the judge; the same command with space and a good judge resumes."""
    monkeypatch.setattr(caches, "FLUSH_SECONDS", 0.0)
    out, given = tmp_path / "out", (DEFAULT, *FEW, "--batch", 1, "--out", tmp_path / "out")
    command = words(*given)
    with max_file_size(2000):
        assert_error(
            invoke(*command),
            "cannot be written (File too large): free space on its disk",
            "resumes",
        )
    kept = read_entries(out / "cache.0.jsonl")
    assert 2 <= len(kept) < 12
    broken = shutil.copytree(causal_folder(positions=256), tmp_path / "judge")
    weights = load_file(broken / "model.safetensors")
    weights["transformer.wte.weight"] *= torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert_error(invoke(*command, "--judge", broken), f"nats by {broken} are not finite")
    samples = read_entries(out / "cache.jsonl")
    assert (
        kept.items() <= samples.items() and sum(key.startswith("sample-") for key in samples) == 12
    )
    assert numbers(evaluate(*given)) == numbers(evaluate(*given[:-2]))
    assert samples.items() <= read_entries(out / "cache.jsonl").items()


def test_a_judge_with_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    judge = shutil.copytree(causal_folder(positions=256), tmp_path / "judge")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_positions=256, n_embd=8, n_layer=1, n_head=1)
    ).save_pretrained(judge)
    assert_error(
        invoke(*words(trained(), *FEW), "--judge", judge),
        "tokenizer of 400 tokens, but its model knows 100",
    )


def test_texts_of_sample_are_read_back(tmp_path: Path) -> None:
    done = invoke(
        "sample",
        DEFAULT,
        "--n",
        8,
        "--length",
        20,
        "--steps",
        4,
        "--out",
        tmp_path / "out.txt",
        "--json",
    )
    assert read_texts(tmp_path / "out.txt") == json.loads(done.stdout)["texts"]


def test_the_table_has_the_values_of_the_json(tmp_path: Path) -> None:
    result = invoke(*words(DEFAULT, *FEW, "--out", tmp_path), "--mauve-seeds", 2)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "samples.json").read_text("utf-8"))
    header, *rows = (line for line in result.stdout.splitlines() if "│" in line or "┃" in line)
    assert [name.strip() for name in header.strip("┃").split("┃")] == [
        "metric",
        "samples",
        "real text",
    ]
    shown = {name.strip(): cells for name, *cells in (row.strip("│").split("│") for row in rows)}
    assert len(shown) == 8
    for name, key, digits in [("Gen-PPL", "gen_ppl", 1), ("entropy (nats)", "entropy", 3), ("MAUVE (95%)", "mauve", 3),
                              ("distinct-2", "distinct_2", 3)]:  # fmt: skip
        for side, cell in zip(("samples", "reference"), shown[name], strict=True):
            assert cell.strip().startswith(f"{found[side][key]['value']:,.{digits}f} ")
    assert (
        "near those of real text" in result.stdout.replace("\n", " ") and "buckets" in result.stderr
    )
    assert f"wrote {tmp_path / 'samples.json'}" in result.stderr.replace("\n", "")


def test_texts_take_no_options_of_sampling(tmp_path: Path) -> None:
    given = write_texts(tmp_path / "texts.jsonl", ["a text", "another"])
    for more in (("--option", "eta=1"), ("--deterministic",)):
        assert_error(invoke(*words(*given, *more)), "leave them out")


def test_settings_name_window_passages_and_features(tmp_path: Path) -> None:
    """For short texts the shortest passage is shorter than usual."""
    given = write_texts(
        tmp_path / "texts.jsonl", [*(text[:30] for text in documents()[:3]), "long " * 400]
    )
    settings = evaluate(*given, "--window", 100, "--features", encoder_folder())["settings"]
    assert settings["stride"] == 50 and settings["reference"]["shortest"] == "32 characters"
    assert settings["features"]["kind"] == "encoder" and settings["scorer"]["kind"] == "causal LM"
    given = write_texts(tmp_path / "texts.jsonl", [text[:30] for text in documents()[:3]])
    about = evaluate(*given)["settings"]["reference"]
    shortest, longest = (
        int(about[name].removesuffix(" characters")) for name in ("shortest", "longest")
    )
    assert shortest == longest // 4 < 32


BASE: dict[str, Any] = {
    "samples": lambda: (DEFAULT, *FEW, "--judge", causal_folder(positions=256)),
    "frontier": lambda: (trained(), "--n", 3, "--length", 12),
    "anchors": lambda: (trained(), "--data", held_out(), "--limit", 8),
    "code": lambda: (trained(),),
    "report": lambda: (trained(), "--data", held_out(), "--out", shelf() / "no-report"),
}
PROBLEMS = Path(__file__).parents[1] / "apps/code_eval/problems.jsonl"


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("samples", ("--texts", "x.txt"), "--texts x.txt needs no MODEL"),
        ("samples", ("--reference", "nowhere.txt"), "no file or folder 'nowhere.txt'"),
        ("samples", ("--judge", "nowhere.gguf"), "nowhere.gguf does not exist: give a folder"),
        ("samples", ("--judge", encoder_folder), "is an encoder"),
        ("samples", ("--option", "eta=much"), "eta='much': expected a number"),
        ("frontier", ("--steps", "a"), "--steps 'a': 'a' is not a whole number"),
        ("frontier", ("--steps", ""), "is empty: give at least one"),
        ("frontier", ("--length", 500), "--length=500: expected at most"),
        ("anchors", ("--perturb", "loud"), "--perturb 'loud': 'loud' is not a number"),
        ("anchors", ("--samples", 1), "samples must be 0 or at least 2"),
        ("anchors", ("--judge", "anyone"), "give samples too"),
        ("anchors", ("--samples", 2, "--sampler", "fast"), "unknown sampler 'fast'"),
        ("code", ("--candidates", PROBLEMS), "give problems too"),
        (
            "code",
            ("--problems", PROBLEMS, "--k", "2"),
            "pass@2 needs at least 2 candidates for each problem, n is 1",
        ),
        ("code", ("--problems", PROBLEMS, "--k", "0"), "k=[0]: pass@k needs whole numbers from 1"),
        ("code", ("--problems", "nowhere.jsonl", "--unsafe"), "nowhere.jsonl"),
        ("code", ("--problems", PROBLEMS, "--unsafe"), "make the prompt shorter"),
        ("code", ("--infills", "2000", "--texts", "0"), "held-out functions fit into"),
        ("report", ("--out", held_out), "is a file"),
        ("report", ("--samplers", "slow"), "slow"),
    ],
)
def test_mistakes_are_one_line(command: str, more: tuple[Any, ...], message: str) -> None:
    given = (word() if callable(word) else word for word in more)
    assert_error(invoke("eval", command, *BASE[command](), *given, "--json"), message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("samples", DEFAULT), "--judge is required: a causal LM that computes Gen-PPL"),
        (("samples", DEFAULT, "--judge", "x"), "--reference is required"),
        (("anchors", DEFAULT), "--data is required"),
        (("report", DEFAULT), "--data is required"),
        (("report", "novel", "--data", PROBLEMS), "there is no model 'novel'"),
        (("anchors", "mdlm-prose", "--data", PROBLEMS), "one stage"),
    ],
)
def test_what_is_required(given: tuple[object, ...], message: str) -> None:
    assert_error(invoke("eval", *given), message)
