"""`adlm eval ppl`: one estimate however it is computed, equal to the API's and, for GPT-2's weights, transformers'."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import adlm
from adlm.bundled import DEFAULT
from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.data import load_eval_data
from adlm.evaluate.provenance import hash_weights
from adlm.files import write_json
from adlm.likelihood import estimate_nll
from adlm.models.folder import LoadedModel
from adlm.models.language_model import LanguageModel
from tests.cli.eval_answers import documents, evaluate, narrow_table
from tests.cli.terminal import assert_error, invoke, process, trained
from tests.training.runs import TEXT, data, torchrun

KEYS = {"nll", "ppl", "se", "se_noise", "bits_per_byte", "tokens", "is_bound", "rows", "documents", "bytes", "settings",
        "rows_hash", "provenance", "seconds"}  # fmt: skip
DIGITS = {"nll": 4, "se": 4, "ppl": 2, "bits_per_byte": 4}
METRICS = ("nll", "ppl", "se", "se_noise", "bits_per_byte", "bits_per_byte_se", "tokens")


def run_ppl(*words: object, source: Path | str | None = None) -> dict[str, Any]:
    return evaluate("ppl", *words, "--data", source or documents())


def test_the_bundled_model_in_a_process_of_its_own() -> None:
    words = (
        "eval",
        "ppl",
        "--data",
        documents(),
        "--limit",
        6,
        "--length",
        24,
        "--draws",
        2,
        "--device",
        "cpu",
    )
    done = process(*words, "--json")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS and found["provenance"]["versions"]["torch"] == torch.__version__
    settings = found["settings"]
    assert (
        settings["model"] == DEFAULT and settings["draws"] == 2 and settings["count"] == "lineage"
    )
    assert settings["weights_sha256"] == hash_weights(adlm.load(DEFAULT, device="cpu").model)
    assert (
        settings["data"]["length"] == 24
        and settings["data"]["rows"] == "wrapped"
        and found["rows"] == 6
    )
    assert (
        settings["data"]["tokenizer_sha256"]
        and found["is_bound"] is True
        and found["tokens"] == 6 * 24
    )


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Both tokenize, each computes half of the batches, one prints and writes; stored estimates are known to both."""
    models = (trained(), trained("mdlm"))
    words = ("--draws", 2, "--limit", 50, "--rows", "documents", "--order", "confidence")
    words = (*words, "--batch", 7, "--device", "cpu")
    expected = run_ppl(*models, *words)
    run_ppl(models[0], *words, "--out", tmp_path)
    given = (
        *models,
        *map(str, words),
        "--data",
        str(documents()),
        "--out",
        str(tmp_path),
        "--json",
    )
    done = torchrun(2, "-m", "adlm", "eval", "ppl", *given)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (
        found["provenance"]["processes"] == 2
        and json.loads((tmp_path / "perplexity.json").read_text()) == found
    )
    for mine, theirs in zip(found["models"], expected["models"], strict=True):
        assert mine["rows_hash"] == theirs["rows_hash"] and mine["settings"] == theirs["settings"]
        for part, whole in ((mine, theirs), (mine["unmasking"], theirs["unmasking"])):
            assert [part[name] for name in METRICS] == pytest.approx(
                [whole[name] for name in METRICS], rel=1e-5
            )
    assert found["differences"][0]["se"] == pytest.approx(
        expected["differences"][0]["se"], rel=1e-4
    )
    assert (
        len((tmp_path / "cache.0.jsonl").read_text().splitlines()) == 2
    )  # the other two are in cache.jsonl


def test_several_models_and_texts(tmp_path: Path) -> None:
    (second := tmp_path / "second.txt").write_text(TEXT[:8000], "utf-8")
    words = (trained(), trained("ar"), "--limit", 12, "--draws", 2)
    words = (*words, "--data", f"docs={documents()}", "--data", f"book={second}")
    found = evaluate("ppl", *words)
    expected = list(itertools.product(("docs", "book"), words[:2]))
    assert [(each["data"], each["model"]) for each in found["models"]] == expected
    assert found["models"][3].keys() >= KEYS - {"provenance"}
    result = invoke("eval", "ppl", *words)
    rows = [
        line.strip("│").split("│") for line in result.stdout.splitlines() if line.startswith("│")
    ]
    shown = [(row[0].strip(), row[1].strip()) for row in rows[:4]]
    assert shown == [(name, Path(str(run)).name) for name, run in expected]
    assert ["≤" in row[3] for row in rows[:4]] == [True, False] * 2
    assert (
        rows[4][1].strip() == "run-ar − run-adlm"
        and f"{found['differences'][0]['difference']:.4f} ±" in rows[4][3]
    )


def test_an_order_is_a_second_estimate() -> None:
    words = (trained(), "--limit", 10, "--draws", 2)
    plain, found = run_ppl(*words), run_ppl(*words, "--order", "margin")
    assert found["nll"] == plain["nll"] and found["kind"] == "nelbo" and "unmasking" not in plain
    second, lm = found["unmasking"], adlm.load(trained(), device="cpu")
    assert (
        second["kind"] == "unmasking_exact"
        and second["is_bound"] is False
        and second["se_noise"] == 0
    )
    assert (second["order"], second["draws"]) == ("margin", 1)
    rows = load_eval_data(documents(), lm.tokenizer, 32, limit=10).rows
    expected = estimate_nll(lm.model, rows, order="margin")
    assert (
        math.isclose(second["nll"], expected.nll, rel_tol=1e-5)
        and second["tokens"] == expected.tokens
    )
    random = run_ppl(*words, "--order", "random")["unmasking"]
    assert (
        random["is_bound"] is True
        and random["kind"] == "unmasking_bound"
        and random["se_noise"] > 0
    )


def test_settings_are_those_of_the_estimate() -> None:
    few = (trained(), "--limit", 20)
    discrete, single = run_ppl(*few, "--steps", 8), run_ppl(*few, "--draws", 1)
    assert discrete["kind"] == "discrete_nelbo" and discrete["settings"]["steps"] == 8
    assert discrete["nll"] != run_ppl(*few)["nll"] and single["se_noise"] is None
    words = ("--rows", "documents", "--limit", 30, "--draws", 2, "--seed", 5, "--count", "text")
    found, plain = run_ppl(trained(), *words, "--attend-padding"), run_ppl(trained(), *words)
    assert (
        plain["settings"]["count"] == "text"
        and plain["settings"]["seed"] == 5
        and found["nll"] != plain["nll"]
    )
    assert found["tokens"] == plain["tokens"] and found["settings"] == plain["settings"] | {
        "attend_padding": True
    }
    causal = run_ppl(
        trained("ar"), *words, "--attend-padding"
    )  # padding comes after the text and is never read
    assert causal["settings"]["attend_padding"] is False and causal["settings"]["draws"] == 1


def write_model(
    folder: Path, model: LanguageModel, tokenizer: Tokenizer, method: str, rows: str
) -> None:
    tokenizer.save(folder)
    tied = {"head.weight"} if model.config.tied else set()
    save_file(
        {k: v for k, v in model.state_dict().items() if k not in tied}, folder / "model.safetensors"
    )
    file = LoadedModel(model, tokenizer, method, 0, rows).describe(model)
    write_json(folder / "config.json", file.model_dump())


def test_warnings(tmp_path: Path) -> None:
    lm = adlm.load(trained(), device="cpu")
    write_model(tmp_path, lm.model, lm.tokenizer, "adlm", "documents")
    book = tmp_path / "book.txt"
    book.write_text(" ".join(TEXT[:3000].split()), "utf-8")
    words = ("eval", "ppl", tmp_path, "--draws", 1, "--data")
    framed = "trained on rows of one document each, these are wrapped"
    assert (
        framed in invoke(*words, documents()).stderr and framed not in invoke(*words, book).stderr
    )
    assert (
        "warning: standard error estimated from only 3 rows"
        in invoke(*words, book, "--limit", 3).stderr
    )
    assert "estimated from only" not in invoke(*words, documents()).stderr
    cut = invoke(
        "eval", "ppl", trained(), "--data", documents(), "--rows", "documents", "--draws", 1
    )
    assert "documents are longer than a row and cut" in cut.stderr


def test_the_table_has_the_numbers_of_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (trained(), "--draws", 2, "--limit", 20, "--order", "left_to_right")
    result, found = invoke("eval", "ppl", *words, "--data", documents()), run_ppl(*words)
    first, second = (line for line in result.stdout.splitlines() if line.startswith("│"))
    assert "NELBO " in first and f"≤ {found['nll']:.4f} ± {found['se']:.4f}" in first
    assert f"≤ {found['ppl']:,.2f}" in first and f"{found['se_noise']:.4f}" in first
    assert (
        "left_to_right order: exact" in second and f" {found['unmasking']['nll']:.4f} ±" in second
    )
    assert "≤" not in second and found["rows_hash"][:8] in second
    assert "an upper bound" in result.stdout and "every token but padding" in result.stdout
    found = run_ppl(trained("mdlm"), *words[:5])
    for columns in (80, 60):  # no number is cut on a narrow terminal
        lines = narrow_table(
            monkeypatch, columns, "eval", "ppl", trained("mdlm"), *words[:5], "--data", documents()
        )
        for entry in found["models"]:
            assert all(
                any(f"{entry[name]:,.{digits}f} " in line for line in lines)
                for name, digits in DIGITS.items()
            )
        assert any(f"{found['differences'][0]['difference']:.4f} ± " in line for line in lines)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_gpt2_weights_give_transformers_nll(tmp_path: Path, rows: Any) -> None:
    """Every row by itself through GPT2LMHeadModel, its own loss over what follows the first token."""
    from adlm.interop.gpt2 import from_state_dict
    from tests.interop.test_gpt2 import gpt2

    tokenizer = Tokenizer.load(data())
    theirs = gpt2(vocab_size=tokenizer.vocab_size, n_positions=32)
    ours = from_state_dict(theirs.state_dict(), heads=2)
    write_model(tmp_path, ours, tokenizer, "ar", rows)
    nats = tokens = 0.0
    every, lengths = load_eval_data(documents(), tokenizer, 32, rows=rows).rows.fetch(range(60))
    with torch.no_grad():
        for number, row in enumerate(every):
            row = row if lengths is None else row[: lengths[number]]
            nats += float(theirs(row[None], labels=row[None]).loss) * (len(row) - 1)
            tokens += len(row) - 1
    found = run_ppl(tmp_path, "--rows", rows, "--limit", 60)
    assert found["tokens"] == tokens and found["is_bound"] is False and found["kind"] == "exact"
    assert math.isclose(found["nll"], nats / tokens, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--data is required: a text file, a folder or a dataset name"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--data", "a=x", "--data", "a=y"), "--data names a twice"),
        (("--data", "a="), "--data 'a=' is not NAME=DATA"),
        (("--data", "SHORT", "--rows", "documents"), "a standard error needs more than 1 rows"),
        (("--data", "TEXT", "--order", "random", "--attend-padding"), "leave attend_padding out"),
        (("--data", "TEXT", "--length", "33"), "length 33 is more than the 32 tokens of"),
        (
            ("--data", "TEXT", "--rows", "columns"),
            "unknown rows 'columns': expected one of wrapped, documents",
        ),
        (
            ("--data", "TEXT", "--count", "words"),
            "unknown count 'words': expected one of lineage, text",
        ),
        (
            ("--data", "TEXT", "--order", "sideways"),
            "unknown order 'sideways': expected one of left_to_right,",
        ),
        (("--data", "TEXT", "--draws", "0"), "--draws"),
        (("--data", "TEXT", "--out", "TEXT"), "is a file: give the name of a folder"),
        (("nobody", "--data", "TEXT"), "'nobody'"),
        (("CAUSAL", "--data", "TEXT", "--order", "margin"), "leave order out"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    places = {"TEXT": documents(), "SHORT": tmp_path / "short.txt", "CAUSAL": trained("ar")}
    (tmp_path / "short.txt").write_text("few words", "utf-8")
    assert_error(
        invoke("eval", "ppl", trained(), *(places.get(word, word) for word in words), "--json"),
        message,
    )
