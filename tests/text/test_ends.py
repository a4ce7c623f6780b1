"""Where a text ends: at its length in a model of whole documents, elsewhere at EOS; given text is only text."""

from typing import Any

import pytest

from adlm import LM
from tests.text.models import lm, rigged, tokenizer
from tests.world import SAMPLING

BYTES = tokenizer("bytes")
EOS = BYTES.eos_id
assert EOS is not None


def last_tokens(model: LM, **settings: Any) -> tuple[list[list[int]], list[str]]:
    *_, step = model.stream(**settings)
    return step.tokens.tolist(), step.texts


def find_eos(row: list[int]) -> list[int]:
    return [place for place, token in enumerate(row) if token == EOS]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_document_has_the_requested_length(name: str) -> None:
    """Between BOS and EOS, which stand nowhere else, however likely the model finds EOS."""
    model, sampling = (
        rigged("adlm", {EOS: 30.0}, rows="documents"),
        SAMPLING[name],
    )
    for length in (1, 9, 62):
        ids, texts = last_tokens(model, prompt="", length=length, n=2, **sampling)
        assert all(len(row) == length + 2 and find_eos(row) == [0, length + 1] for row in ids)
        assert texts == model.generate(length=length, n=2, **sampling).texts
    ids, _ = last_tokens(model, template=["a ___{3}b", "___{5}"], n=2, **sampling)
    assert [find_eos(row) for row in ids] == [[0, 7]] * 2 + [[0, 6]] * 2


@pytest.mark.parametrize("method", ["mdlm", "adlm", "sedd", "ar", "a2r"])
@pytest.mark.parametrize("bias", [2.0, 30.0])
def test_other_texts_end_at_the_first_eos(method: str, bias: float) -> None:
    model, prompt = rigged(method, {EOS: bias}), "ab "
    ids, texts = last_tokens(model, prompt=prompt, length=40, n=12, top_p=1.0, seed=3)
    ends = [row.index(EOS, 1) if EOS in row[1:] else len(row) for row in ids]
    assert len(set(ends)) > 3 if bias == 2.0 else set(ends) == {4}
    assert min(ends) >= 4, "the end is never inside the prompt"
    for row, end, text in zip(ids, ends, texts, strict=True):
        assert len(row) == 41 and text == prompt + BYTES.decode(row[4:end])
    assert texts == model.generate(prompt, length=40, n=12, top_p=1.0, seed=3).texts


def test_a_hole_ends_a_text_only_if_nothing_is_given_after_it() -> None:
    ids, texts = last_tokens(
        rigged("mdlm", {EOS: 30.0}), template=["a___{3}b___{4}", "a___{3}b"], n=3
    )
    assert all(row[6:10] == [EOS] * 4 for row in ids[:3]) and all(
        EOS not in row[1:6] for row in ids
    )
    assert all(text.endswith("b") for text in texts)


@pytest.mark.parametrize("method", ["mdlm", "ar"])
def test_the_name_of_eos_in_a_prompt_is_only_text(method: str) -> None:
    model, prompt = rigged(method, {EOS: 30.0}, length=64), "x<|endoftext|>y"
    assert model.generate(prompt, length=30).texts == [prompt]
    assert EOS not in model.layout_rows(prompt, length=30)[0].layout.ids[1:]


def test_a_word_is_generated_before_the_end() -> None:
    """After a blank a word begins, even where EOS is likelier: the text may end after it."""
    words = tokenizer("prose")
    assert words.eos_id is not None
    model = rigged("mdlm", {words.eos_id: 30.0}, "prose")
    (text,) = model.generate("The ", length=20).texts
    assert len(text) > len("The ") and text[4] != " "
    assert model.generate("The", length=20).texts == ["The"]


def test_a_vocabulary_without_eos_never_ends() -> None:
    model = lm("mdlm", "bare", "documents")
    ids, texts = last_tokens(model, prompt="the cat", length=30)
    assert len(ids[0]) == 30 and model.row_format.longest == 64
    assert texts[0] == model.tokenizer.decode(ids[0])


@pytest.mark.parametrize(
    ("method", "rows", "longest"),
    [("adlm", "documents", 62), ("adlm", "wrapped", 63), ("ar", "documents", 63)],
)
def test_the_longest_text(method: str, rows: str, longest: int) -> None:
    model = lm(method, "bytes", rows)
    assert model.row_format.longest == longest
    ids, _ = last_tokens(
        model, prompt="", **({"sampler": "ancestral", "steps": 2} if method == "adlm" else {})
    )
    assert len(ids[0]) == 64
