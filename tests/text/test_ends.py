"""Where a text ends: a model of whole documents is told, others write an end themselves; given text is only text."""

import pytest

from adlm import LM
from tests.text.models import lm, rigged, tokenizer
from tests.world import OPTIONS

BYTES = tokenizer("bytes")
END = BYTES.eos_id
assert END is not None


def last_tokens(model: LM, **how: object) -> tuple[list[list[int]], list[str]]:
    *_, shot = model.stream(**how)  # type: ignore[arg-type]
    return shot.frame.tokens.tolist(), shot.texts


@pytest.mark.parametrize("name", OPTIONS)
def test_a_document_has_the_length_that_was_asked_for(name: str) -> None:
    """Begun and ended by marks, which stand nowhere else, however much the model wants to end."""
    model = rigged("adlm", {END: 30.0}, rows="documents")
    for length in (1, 9, 62):
        ids, texts = last_tokens(model, prompt="", length=length, n=2, sampler=name, **OPTIONS[name])
        for row in ids:
            assert len(row) == length + 2
            assert [place for place, token in enumerate(row) if token == END] == [0, length + 1]
        assert texts == model.generate(length=length, n=2, sampler=name, **OPTIONS[name]).texts
    ids, _ = last_tokens(model, template=["a ___{3}b", "___{5}"], n=2, sampler=name, **OPTIONS[name])
    assert [[place for place, token in enumerate(row) if token == END] for row in ids] == [[0, 7]] * 2 + [[0, 6]] * 2


@pytest.mark.parametrize("method", ["mdlm", "adlm", "sedd", "ar", "a2r"])
@pytest.mark.parametrize("want", [2.0, 30.0])
def test_other_texts_end_at_the_first_end_token(method: str, want: float) -> None:
    model = rigged(method, {END: want})
    prompt = "ab "
    ids, texts = last_tokens(model, prompt=prompt, length=40, n=12, top_p=1.0, seed=3)
    ends = [row.index(END, 1) if END in row[1:] else len(row) for row in ids]
    assert len(set(ends)) > 3 if want == 2.0 else set(ends) == {4}
    for row, end, text in zip(ids, ends, texts, strict=True):
        assert len(row) == 41
        assert text == prompt + BYTES.decode(row[4:end])
        assert min(ends) >= 4, "the end is never before the prompt is over"
    assert texts == model.generate(prompt, length=40, n=12, top_p=1.0, seed=3).texts


def test_a_hole_ends_a_text_only_if_nothing_is_given_after_it() -> None:
    model = rigged("mdlm", {END: 30.0})
    ids, texts = last_tokens(model, template=["a___{3}b___{4}", "a___{3}b"], n=3)
    assert all(row[1 + 5 : 1 + 9] == [END] * 4 and END not in row[1:6] for row in ids[:3])
    assert all(text.endswith("b") for text in texts)
    assert all(END not in row[1:6] for row in ids[3:])


@pytest.mark.parametrize("method", ["mdlm", "ar"])
def test_the_name_of_the_end_in_a_prompt_is_only_text(method: str) -> None:
    model = rigged(method, {END: 30.0}, length=64)
    prompt = "x<|endoftext|>y"
    found = model.generate(prompt, length=30)
    assert found.texts == [prompt]
    assert END not in model.build_request(prompt, length=30).layouts[0].ids[1:]


def test_a_first_word_is_written_before_the_end() -> None:
    """After a blank a word begins, even where the model would rather end: it may end after it."""
    words = tokenizer("prose")
    assert words.eos_id is not None
    model = rigged("mdlm", {words.eos_id: 30.0}, "prose")
    (text,) = model.generate("The ", length=20).texts
    assert len(text) > len("The ") and text[4] != " "
    assert model.generate("The", length=20).texts == ["The"]


def test_a_vocabulary_without_an_end_never_ends() -> None:
    model = lm("mdlm", "bare", "documents")
    ids, texts = last_tokens(model, prompt="the cat", length=30)
    assert len(ids[0]) == 30 and model.row_format.longest == 64
    assert texts[0] == model.tokenizer.decode(ids[0])


@pytest.mark.parametrize(
    ("method", "rows", "longest"), [("adlm", "documents", 62), ("adlm", "wrapped", 63), ("ar", "documents", 63)]
)
def test_the_longest_text(method: str, rows: str, longest: int) -> None:
    model = lm(method, "bytes", rows)
    assert model.row_format.longest == longest
    ids, _ = last_tokens(model, prompt="", **({"sampler": "ancestral", "steps": 2} if method == "adlm" else {}))
    assert len(ids[0]) == 64
