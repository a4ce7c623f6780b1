"""`adlm eval ppl`: one figure however it is computed, equal to the API's and, for GPT-2's weights, to transformers'."""

import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import adlm
from adlm.bundled import DEFAULT
from adlm.checkpoint import described, write_json
from adlm.data.batches import is_valid
from adlm.data.prepare import prepare
from adlm.evaluate.likelihood import Walk, held_out_bound
from adlm.evaluate.reading import read
from adlm.evaluate.unmasking import ORDERS, unmasking_likelihood
from adlm.evaluate.zeroshot import weights_hash
from tests.cli.terminal import assert_told, invoke, process, trained
from tests.training.runs import TEXT, data, shelf, torchrun

KEYS = {"nll", "ppl", "se", "se_noise", "bits_per_byte", "tokens", "is_bound", "settings", "rows_hash", "provenance"}


@cache
def text() -> Path:
    """Documents of 3 to 40 words, <|endoftext|> between them."""
    path, words, documents = shelf() / "documents.txt", TEXT[:12_000].split(), []
    while words:
        count = 3 + 7 * len(documents) % 38
        documents.append(" ".join(words[:count]))
        words = words[count:]
    path.write_text("\n<|endoftext|>\n".join(documents), "utf-8")
    return path


def answered(*words: object, source: Path | str | None = None) -> dict[str, Any]:
    result = invoke("eval", "ppl", *words, "--data", source or text(), "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same figures, to 1e-5, of the same rows with the same settings."""
    for name in ("nll", "ppl", "se", "se_noise", "bits_per_byte", "tokens"):
        if expected[name] is None:
            assert found[name] is None
        else:
            assert math.isclose(found[name], expected[name], rel_tol=1e-5), name
    assert ("unmasking" in found) == ("unmasking" in expected)
    if "unmasking" in expected:
        assert_same({**found["unmasking"], **RIGHT}, {**expected["unmasking"], **RIGHT})
    assert found["rows_hash"] == expected["rows_hash"] and found["settings"] == expected["settings"]


RIGHT: dict[str, Any] = {"rows_hash": "", "settings": {}}


def test_the_bundled_model_in_a_process_of_its_own() -> None:
    words = ("eval", "ppl", "--data", text(), "--limit", 6, "--length", 24, "--draws", 2, "--device", "cpu", "--json")
    done = process(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS
    settings = found["settings"]
    assert settings["model"] == DEFAULT and settings["draws"] == 2 and settings["count"] == "lineage"
    assert settings["weights_sha256"] == weights_hash(adlm.load(DEFAULT, device="cpu").model)
    assert settings["data"]["length"] == 24 and settings["data"]["rows"] == "wrapped" and found["rows"] == 6
    assert found["is_bound"] is True and found["tokens"] == 6 * 24
    assert math.isclose(found["ppl"], math.exp(found["nll"]), rel_tol=1e-9)
    assert found["provenance"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("method", "count", "rows"),
    [
        *itertools.product(("adlm", "ar"), ("lineage", "text"), ("wrapped", "documents")),
        ("mdlm", "text", "documents"),
        ("a2r", "lineage", "wrapped"),
    ],
)
def test_the_figures_are_the_apis(method: str, count: str, rows: Any) -> None:
    found = answered(trained(method), "--count", count, "--rows", rows, "--draws", 3, "--seed", 5, "--limit", 40)
    lm = adlm.load(trained(method), device="cpu")
    reading = read(text(), lm.tokenizer, 32, rows=rows, limit=40)
    marks = (lm.tokenizer.bos_id, lm.tokenizer.eos_id) if count == "text" else ()
    bound = held_out_bound(lm.model, reading.rows, draws=3, seed=5, marks=marks, documents=reading.documents)  # type: ignore[arg-type]
    assert found["rows_hash"] == reading.rows_hash and found["bytes"] == reading.bytes
    for name, expected in (("nll", bound.nll), ("se", bound.stderr), ("se_noise", bound.noise_stderr)):
        assert math.isclose(found[name], expected or 0, rel_tol=1e-5), name
    assert found["tokens"] == bound.tokens
    assert math.isclose(found["bits_per_byte"], bound.nll * bound.tokens / math.log(2) / reading.bytes, rel_tol=1e-5)
    assert found["is_bound"] is (method in ("adlm", "mdlm"))
    assert found["settings"]["error_over"] == "documents"
    tokens, lengths = reading.rows.fetch(range(40))
    counted = torch.ones_like(tokens, dtype=torch.bool) if lengths is None else is_valid(lengths, 32)
    if count == "text":
        counted &= ~torch.isin(tokens, torch.tensor([lm.tokenizer.bos_id, lm.tokenizer.eos_id]))
    elif method in ("ar", "a2r"):
        counted[:, 0] = False
    assert found["tokens"] == int(counted.sum())


@cache
def figure(method: str, *words: object) -> dict[str, Any]:
    return answered(trained(method), "--draws", 2, "--limit", 50, *words)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
@pytest.mark.parametrize("change", [("--batch", 1), ("--batch", 7), ("--workers", 4)])
@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_batch_and_workers_change_nothing(method: str, change: tuple[object, ...], rows: str) -> None:
    assert_same(figure(method, "--rows", rows, *change), figure(method, "--rows", rows))


@pytest.mark.parametrize("order", ORDERS)
def test_the_batch_changes_nothing_in_an_order(order: str) -> None:
    words = (trained(), "--limit", 9, "--draws", 2, "--order", order, "--tokens-a-step", 4, "--rows", "documents")
    assert_same(answered(*words, "--batch", 2), answered(*words))


def test_two_processes_are_one() -> None:
    """Both tokenize, each measures half of the pieces, one answers."""
    words = ("--draws", 2, "--limit", 50, "--rows", "documents", "--order", "confidence", "--tokens-a-step", 8)
    expected = answered(trained(), *words, "--batch", 7)
    given = ["eval", "ppl", trained(), *map(str, words), "--batch", "7", "--data", str(text())]
    done = torchrun(2, "-m", "adlm", *given, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["provenance"]["processes"] == 2
    assert_same(found, expected)


def test_an_order_is_a_second_figure_beside_the_bound() -> None:
    words = (trained(), "--limit", 10, "--draws", 2, "--count", "text")
    plain, found = answered(*words), answered(*words, "--order", "margin", "--tokens-a-step", 3)
    assert found["nll"] == plain["nll"] and found["figure"] == "nelbo" and "unmasking" not in plain
    second = found["unmasking"]
    assert second["figure"] == "unmasking_exact" and second["is_bound"] is False and second["se_noise"] == 0
    assert (second["order"], second["tokens_a_step"], second["draws"]) == ("margin", 3, 1)
    assert second["tokens"] == found["tokens"]
    lm = adlm.load(trained(), device="cpu")
    reading = read(text(), lm.tokenizer, 32, limit=10)
    assert lm.tokenizer.bos_id is not None and lm.tokenizer.eos_id is not None
    walk = Walk(marks=(lm.tokenizer.bos_id, lm.tokenizer.eos_id), documents=reading.documents)
    expected = unmasking_likelihood(lm.model, reading.rows, "margin", tokens_a_step=3, walk=walk)
    assert math.isclose(second["nll"], expected.nll, rel_tol=1e-5)
    assert math.isclose(second["se"], expected.stderr, rel_tol=1e-4)
    random = answered(*words, "--order", "random", "--tokens-a-step", 8)["unmasking"]
    assert random["is_bound"] is True and random["figure"] == "unmasking_bound" and random["se_noise"] > 0


def test_discrete_time_is_said() -> None:
    found = figure("adlm", "--steps", 8)
    assert found["figure"] == "discrete_nelbo" and found["settings"]["steps"] == 8
    assert found["nll"] != figure("adlm")["nll"]


def test_one_draw_does_not_know_its_noise() -> None:
    assert answered(trained(), "--limit", 20, "--draws", 1)["se_noise"] is None
    assert figure("ar")["se_noise"] == 0 and figure("ar")["settings"]["draws"] == 1


def test_a_prepared_folder_is_its_text(tmp_path: Path) -> None:
    tokenizer = data() / "tokenizer.json"
    prepare(text(), tmp_path / "data", tokenizer=tokenizer, length=32, valid=text(), workers=1)
    found, expected = answered(trained("ar"), source=tmp_path / "data"), answered(trained("ar"))
    assert found["rows_hash"] == expected["rows_hash"]
    assert math.isclose(found["nll"], expected["nll"], rel_tol=1e-6)
    assert math.isclose(found["bits_per_byte"], expected["bits_per_byte"], rel_tol=1e-3)


def test_one_document_has_its_error_over_rows(tmp_path: Path) -> None:
    source = tmp_path / "one.txt"
    source.write_text(" ".join(TEXT[:3000].split()), "utf-8")
    found = answered(trained("ar"), source=source)
    assert found["documents"] == 1 and found["rows"] > 10
    assert found["settings"]["error_over"] == "rows" and found["se"] > 0


def test_padding_is_read_only_if_it_is_told() -> None:
    words = ("--rows", "documents", "--limit", 30, "--draws", 2)
    found, plain = answered(trained(), *words, "--attend-padding"), answered(trained(), *words)
    lm = adlm.load(trained(), device="cpu")
    reading = read(text(), lm.tokenizer, 32, rows="documents", limit=30)
    bound = held_out_bound(lm.model, reading.rows, draws=2, attend_padding=True, documents=reading.documents)
    assert math.isclose(found["nll"], bound.nll, rel_tol=1e-5) and found["tokens"] == plain["tokens"]
    assert found["nll"] != plain["nll"] and found["settings"]["attend_padding"] is True
    assert plain["settings"]["attend_padding"] is False
    causal = answered(trained("ar"), *words, "--attend-padding")  # what lies behind is never read
    assert causal["settings"]["attend_padding"] is False


def test_a_note_says_what_to_do_about_the_rows(tmp_path: Path) -> None:
    """A book is wrapped: nobody is sent to a row a document, of which a book has one. Few units are said to be few."""
    lm = adlm.load(trained(), device="cpu")
    lm.tokenizer.save(tmp_path)
    save_file(dict(lm.model.state_dict()), tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", described(lm.model.config, "adlm", 0, "documents"))
    book = tmp_path / "book.txt"
    book.write_text(" ".join(TEXT[:3000].split()), "utf-8")
    words = ("eval", "ppl", tmp_path, "--draws", 1, "--data")
    framed = "learned from rows of one document each, these are wrapped"
    assert framed in invoke(*words, text()).stderr and framed not in invoke(*words, book).stderr
    assert "the error is over 3 rows only, too few to lean on" in invoke(*words, book, "--limit", 3).stderr
    assert "too few" not in invoke(*words, text()).stderr


def test_the_table_says_what_json_says() -> None:
    words = (trained(), "--draws", 2, "--limit", 20, "--order", "left_to_right", "--tokens-a-step", 8)
    result, found = invoke("eval", "ppl", *words, "--data", text()), answered(*words)
    assert result.exit_code == 0, result.output
    header, first, second = result.stdout.splitlines()
    assert header.split()[:2] == ["figure", "nats/token"]
    assert "NELBO, continuous time" in first and f"≤ {found['nll']:.4f}" in first and f"{found['se']:.4f}" in first
    assert f"≤ {found['ppl']:,.2f}" in first and f"{found['se_noise']:.4f}" in first
    assert "unmasking, left_to_right: exact" in second and f" {found['unmasking']['nll']:.4f}" in second
    assert "≤" not in second
    assert "a bound from above" in result.stderr and found["rows_hash"][:12] in result.stderr


def test_what_is_cut_is_said() -> None:
    result = invoke("eval", "ppl", trained(), "--data", text(), "--rows", "documents", "--draws", 1)
    assert "documents are longer than a row" in result.stderr


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_gpt2_weights_give_transformers_figure(tmp_path: Path, rows: str) -> None:
    """Every row by itself through GPT2LMHeadModel, its own loss over what follows the first token."""
    from adlm.interop.gpt2 import from_state_dict
    from tests.interop.test_gpt2 import gpt2

    tokenizer = adlm.Tokenizer.load(data())
    theirs = gpt2(vocab_size=tokenizer.vocab_size, n_positions=32)
    ours = from_state_dict(theirs.state_dict(), heads=2)
    tokenizer.save(tmp_path)
    save_file({k: v for k, v in ours.state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", described(ours.config, "ar", 0, rows))
    nats = tokens = 0.0
    every, lengths = read(text(), tokenizer, 32, rows=rows).rows.fetch(range(60))  # type: ignore[arg-type]
    with torch.no_grad():
        for number, row in enumerate(every):
            row = row if lengths is None else row[: lengths[number]]
            nats += float(theirs(row[None], labels=row[None]).loss) * (len(row) - 1)
            tokens += len(row) - 1
    found = answered(tmp_path, "--rows", rows, "--limit", 60)
    assert found["tokens"] == tokens and found["is_bound"] is False and found["figure"] == "exact"
    assert math.isclose(found["nll"], nats / tokens, rel_tol=1e-5)
    assert math.isclose(found["ppl"], math.exp(nats / tokens), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --data FILE"),
        (("--data", "nowhere.txt"), "nowhere.txt"),
        (("--data", "EMPTY"), "holds no document"),
        (("--data", "SHORT"), "fills no row of 32 tokens"),
        (("--data", "SHORT", "--rows", "documents"), "takes at least 2: give more text, or leave --rows documents out"),
        (("--data", "-"), "write it to a file first"),
        (("--data", "TEXT", "--order", "random", "--attend-padding"), "leave --attend-padding out"),
        (("--data", "TEXT", "--length", "33"), "--length 33 is more than the 32 tokens of"),
        (("--data", "TEXT", "--rows", "columns"), "--rows is one of wrapped, documents, got 'columns'"),
        (("--data", "TEXT", "--count", "words"), "--count is one of lineage, text, got 'words'"),
        (("--data", "TEXT", "--order", "sideways"), "--order is one of left_to_right, confidence, margin, entropy"),
        (("--data", "TEXT", "--tokens-a-step", "2"), "give --order too"),
        (("--data", "TEXT", "--draws", "0"), "--draws"),
        (("--data", "OTHER"), "was prepared with the tokenizer"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    places = {"TEXT": text(), "EMPTY": tmp_path / "empty.txt", "SHORT": tmp_path / "short.txt"}
    places["EMPTY"].write_text("\n", "utf-8")
    places["SHORT"].write_text("few words", "utf-8")
    if "OTHER" in words:
        places["OTHER"] = tmp_path / "data"
        prepare(text(), places["OTHER"], tokenizer="bytes", length=32, workers=1)
    given = [places.get(word, word) for word in words]
    assert_told(invoke("eval", "ppl", trained(), *given, "--json"), said)
    assert_told(invoke("eval", "ppl", trained(), *given), said)


def test_a_causal_model_has_no_order_to_choose() -> None:
    assert_told(invoke("eval", "ppl", trained("ar"), "--data", text(), "--order", "confidence"), "leave --order out")


def test_weights_that_are_no_numbers_are_no_figure(tmp_path: Path) -> None:
    lm = adlm.load(trained(), device="cpu")
    weights = {name: value.clone() for name, value in lm.model.state_dict().items()}
    weights["head.bias"][:] = math.nan
    lm.tokenizer.save(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", described(lm.model.config, "adlm", 0, "wrapped"))
    assert_told(invoke("eval", "ppl", tmp_path, "--data", text()), "has no figure: the loss is nan")
