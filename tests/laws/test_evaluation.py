"""Evaluation does not depend on the batch; causal models are exact; every byte is accounted for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws import adapter
from tests.laws.commands import run_command, run_json
from tests.laws.texts import CAUSAL, FIXTURES, folder, model

HELD_OUT = FIXTURES / "held-out.txt"
NUMBERS = ("nll", "se", "ppl", "bits_per_byte", "tokens", "bytes", "rows")


def evaluate(*words: object) -> dict[str, Any]:
    """Run `adlm eval ppl` on the held-out text."""
    return run_json("eval", "ppl", *words, "--data", HELD_OUT, "--device", "cpu")


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
@pytest.mark.parametrize("name", ["adlm", "timed", "sedd", "a2r"])
def test_the_batch_changes_nothing(name: str, rows: str) -> None:
    words = (folder(name), "--rows", rows, "--draws", 2, "--seed", 5)
    whole = evaluate(*words)
    for batch in (1, 5):
        found = evaluate(*words, "--batch", batch)
        for key in NUMBERS:
            assert found[key] == pytest.approx(whole[key], rel=1e-5), key
    other = evaluate(folder(name), "--rows", rows, "--draws", 2, "--seed", 6)
    if adapter.is_causal(model(name).method):
        assert other["nll"] == whole["nll"]
    else:
        assert other["nll"] != whole["nll"]


@pytest.mark.parametrize("count", ["text", "lineage"])
@pytest.mark.parametrize("name", ["adlm", "ar"])
def test_bits_are_per_byte_of_the_text(name: str, count: str) -> None:
    """The bytes are those of the documents, whatever the tokens are."""
    documents = HELD_OUT.read_text("utf-8").split("<|endoftext|>")
    size = sum(len(each.strip("\n").encode("utf-8")) for each in documents)
    found = evaluate(folder(name), "--rows", "documents", "--count", count)
    assert found["bytes"] == size
    bits = found["nll"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(found["nll"]), rel=1e-5)
    assert found["is_bound"] == (name == "adlm")
    if count == "text":
        # A token of this model is a byte, and marks are not counted.
        assert found["tokens"] == size


def test_bits_are_per_byte_where_tokens_are_words(tmp_path: Path) -> None:
    """Of the bundled model, whose tokens are longer than a byte."""
    text = tmp_path / "text.txt"
    text.write_text("The river was wide.\n<|endoftext|>\nNobody had seen the old boat.\n", "utf-8")
    words = ("--data", text, "--rows", "documents", "--count", "text", "--draws", 2)
    found = run_json("eval", "ppl", *words, "--device", "cpu")
    assert found["bytes"] == len("The river was wide.") + len("Nobody had seen the old boat.")
    assert found["tokens"] < found["bytes"] / 2
    bits = found["nll"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"], rel=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_evaluation_is_the_product_of_the_conditionals(name: str) -> None:
    """Document by document, the end being given."""
    lm, nats, tokens = model(name), 0.0, 0
    for document in HELD_OUT.read_text("utf-8").split("<|endoftext|>"):
        ids = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(document.strip("\n"))]])
        log_probs = adapter.predict(lm.model, ids)[1].double().log_softmax(-1)[0, :-1]
        nats -= float(log_probs.gather(-1, ids[0, 1:, None]).sum())
        tokens += ids.shape[1] - 1
    found = evaluate(folder(name), "--rows", "documents", "--count", "text")
    assert found["tokens"] == tokens
    assert found["nll"] == pytest.approx(nats / tokens, rel=1e-5)


def test_another_models_presence_changes_nothing(tmp_path: Path) -> None:
    """Models of one command are measured as each alone; stored results are used again."""
    names = [folder("adlm"), folder("ar")]
    words = ("--rows", "documents", "--draws", 2)
    together = evaluate(*names, *words, "--out", tmp_path)["models"]
    again = evaluate(*names, *words, "--out", tmp_path)["models"]
    for number, name in enumerate(names):
        alone = evaluate(name, *words)
        for key in NUMBERS:
            assert together[number][key] == pytest.approx(alone[key], rel=1e-9)
            assert again[number][key] == together[number][key]


def test_texts_of_an_evaluation_are_those_of_the_model(tmp_path: Path) -> None:
    """A seed's texts are the same whichever command samples them, in whatever batch."""
    words = ("sample", folder("timed"), "--n", 6, "--length", 16, "--steps", 4, "--seed", 2)
    texts = [run_json(*words, "--device", "cpu", "--batch", batch)["texts"] for batch in (1, 4, 16)]
    assert texts[0] == texts[1] == texts[2]
    out = tmp_path / "texts.txt"
    answer = run_command(*words, "--device", "cpu", "--out", out)
    assert answer.code == 0
    assert out.read_text("utf-8").removesuffix("\n") == "\n<|endoftext|>\n".join(texts[0])
