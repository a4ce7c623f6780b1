"""A line is the held-out bound of its rows, however many share the work; a known line is not measured again."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.evaluate.likelihood import Walk, held_out_bound
from adlm.evaluate.lines import OnProgress, Settings, Subject, figures, lines
from adlm.evaluate.reading import Reading, read
from tests.text.models import lm, tokenizer
from tests.training.runs import TEXT


def small(method: str = "adlm", name: str = "small", words: str = "bytes", **changes: Any) -> Subject:
    """A model with random weights on rows of 32 tokens."""
    settings = Settings(name, method, f"weights of {method}", **({"draws": 2, "seed": 3} | changes))
    writer = lm(method, words, dim=16, length=32)
    return Subject(writer.model, writer.tokenizer, settings, 32)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two files of several documents, and one of one."""
    folder, found = tmp_path_factory.mktemp("texts"), {}
    for number, name in enumerate(("first", "second")):
        found[name] = folder / f"{name}.txt"
        pieces = TEXT[3000 * number :][:1200].split(". ")
        found[name].write_text("\n<|endoftext|>\n".join(pieces), "utf-8")
    found["one"] = folder / "one.txt"
    found["one"].write_text(" ".join(TEXT[:900].split()), "utf-8")
    return found


def table(
    subjects: list[Subject], texts: dict[str, Path], *names: str, **how: Any
) -> list[tuple[dict[str, Any], bool]]:
    limit = how.pop("limit", None)

    def rows(name: str, subject: Subject, on_progress: OnProgress) -> Reading:
        return read(texts[name], subject.tokenizer, subject.length, limit=limit)

    return list(lines(subjects, names, rows, kind="text", **how))


@pytest.mark.parametrize("method", ["adlm", "ar", "sedd"])
def test_a_line_is_the_held_out_bound(texts: dict[str, Path], method: str) -> None:
    subject = small(method)
    reading = read(texts["first"], tokenizer("bytes"), 32)
    found = figures(subject, reading, Walk(batch=7))
    how: dict[str, Any] = {"draws": 2, "seed": 3, "score_entropy": method == "sedd", "documents": reading.documents}
    bound = held_out_bound(subject.network, reading.rows, **how)
    assert found["nll"] == pytest.approx(bound.nll, abs=1e-5) and found["se"] == pytest.approx(bound.stderr, abs=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(found["nll"])) and found["tokens"] == bound.tokens
    assert found["bits_per_byte"] == pytest.approx(bound.bits_per_byte(reading.bytes), rel=1e-5)
    assert found["bits_per_byte_se"] / found["bits_per_byte"] == pytest.approx(found["se"] / found["nll"])
    assert found["is_bound"] == (method != "ar") and found["rows"] == len(reading.rows)
    assert found["error_over"] == "documents" and found["error_units"] == len(reading.documents.unique())
    assert found["rows_hash"] == reading.rows_hash and json.loads(json.dumps(found)) == found


def test_one_document_has_an_error_over_its_rows(texts: dict[str, Path]) -> None:
    ((line, _),) = table([small()], texts, "one")
    assert line["error_over"] == "rows" and line["error_units"] == line["rows"] and line["se"] > 0


def test_processes_that_share_the_rows_find_the_same(texts: dict[str, Path]) -> None:
    """Each computes its own pieces of rows, and what they have together is what one has alone."""
    reading = read(texts["first"], tokenizer("bytes"), 32)

    def summed(rank: int, size: int) -> list[Tensor]:
        """What a process would add up with the others."""
        found: list[Tensor] = []

        def total(values: Tensor) -> Tensor:
            found.append(values.clone())
            return torch.ones_like(values)

        figures(small(), reading, Walk(batch=7, rank=rank, size=size, total=total))
        return found

    for whole, first, second in zip(summed(0, 1), summed(0, 2), summed(1, 2), strict=True):
        assert torch.allclose(first + second, whole, rtol=1e-6)
        assert first.any() and second.any() and not (first * second).any()


def test_models_of_one_tokenizer_share_the_rows(texts: dict[str, Path]) -> None:
    readings: list[str] = []
    subjects = [small(), small("mdlm", "one stage"), small(name="of words", words="gpt2")]

    def rows(name: str, subject: Subject, on_progress: OnProgress) -> Reading:
        readings.append(f"{name} {subject.tokenizer.name}")
        return read(texts[name], subject.tokenizer, subject.length)

    told: list[str] = []
    found = list(
        lines(subjects, ["first", "second"], rows, kind="text", on_rows=lambda what, done, total: told.append(what))
    )
    assert readings == ["first bytes", "first gpt2", "second bytes", "second gpt2"]
    names = [subject.settings.model for subject in subjects]
    assert [(line["text"], line["model"]) for line, _ in found] == [
        (text, name) for text in ("first", "second") for name in names
    ]
    assert list(dict.fromkeys(told))[:4] == ["first: reading", "first: small", "first: one stage", "first: of words"]
    alone = [line for subject in subjects for line, _ in table([subject], texts, "first")]
    assert [line for line, _ in found[:3]] == alone  # beside others a model's figures are its own
    assert alone[0]["rows_hash"] == alone[1]["rows_hash"] != alone[2]["rows_hash"]


def test_rows_are_shared_by_models_whose_texts_begin_and_end_alike(texts: dict[str, Path]) -> None:
    """One tokenizer.json, and what begins and ends a text said beside it: other rows."""
    one = small(words="characters")
    marks = (one.tokenizer.bos_id, one.tokenizer.eos_id)
    ways = (("usual", *marks), ("turned round", *reversed(marks)), ("again", *marks))
    tokenizers = [replace(one.tokenizer, name=name, bos_id=bos, eos_id=eos) for name, bos, eos in ways]
    subjects = [replace(one, tokenizer=each, settings=replace(one.settings, model=each.name)) for each in tokenizers]
    assert len({each.sha256 for each in tokenizers}) == 1
    found = [line for line, _ in table(subjects, texts, "first")]
    assert found == [line for subject in subjects for line, _ in table([subject], texts, "first")]
    assert found[0]["rows_hash"] == found[2]["rows_hash"] != found[1]["rows_hash"]
    assert [line["settings"]["tokenizer"] for line in found] == ["usual", "turned round", "again"]


def test_a_known_line_has_todays_names(texts: dict[str, Path], tmp_path: Path) -> None:
    """A model that was moved has a tokenizer of another name, and a text another place: neither changes a figure."""
    ((line, _),) = table([small()], texts, "first")
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(texts["first"].read_bytes())
    subject = replace(small(), tokenizer=replace(small().tokenizer, name="of the moved"))
    how: dict[str, Any] = {"about": lambda name, reading: {"said": reading.settings["tokenizer"]}}
    ((again, is_new),) = table([subject], {"first": moved}, "first", known=[line | {"nll": -1.0}], **how)
    ((fresh, _),) = table([subject], {"first": moved}, "first", **how)
    assert not is_new and again == fresh | {"nll": -1.0}
    assert again["said"] == "of the moved" and again["settings"]["source"] == str(moved)


@pytest.mark.parametrize(
    ("change", "limit"),
    [({}, None), ({"seed": 4}, None), ({"draws": 3}, None), ({"weights_sha256": "1"}, None), ({}, 3)],
)
def test_a_known_line_is_done_again_only_if_it_would_be_another(
    texts: dict[str, Path], change: dict[str, Any], limit: int | None
) -> None:
    first = table([small()], texts, "first", "second")
    assert [(line["text"], is_new) for line, is_new in first] == [("first", True), ("second", True)]
    known = [line | {"nll": -1.0} for line, _ in first]
    known[1]["rows_hash"] = "other rows"
    subject = small()
    settings = Settings(**(subject.settings.as_dict() | {"model": "under another name"} | change))
    how: dict[str, Any] = {"known": known, "limit": limit, "walk": Walk(batch=5)}
    again = table([replace(subject, settings=settings)], texts, "first", "second", **how)
    is_same = not change and limit is None
    assert [(line["text"], line["nll"] == -1, is_new) for line, is_new in again] == [
        ("first", is_same, not is_same),
        ("second", False, True),
    ]
    assert {line["model"] for line, _ in again} == {line["settings"]["model"] for line, _ in again}
    assert {line["model"] for line, _ in again} == {"under another name"}


def test_what_is_wrong_names_model_and_text(texts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"first \(.*first\.txt\) makes one row of 32 tokens.*a smaller --length"):
        table([small()], texts, "first", limit=1)
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 100, "utf-8")
    with pytest.raises(ValueError, match=r"blank \(.*blank\.jsonl\) has 3 rows without any text: give another text"):
        table([small()], {"blank": tmp_path / "blank.jsonl"}, "blank")
    broken = replace(small(), network=deepcopy(small().network))
    with torch.no_grad():
        broken.network.head.bias[0] = math.nan
    with pytest.raises(FloatingPointError, match="small has no figure on second: the loss is nan"):
        table([broken], texts, "second")
