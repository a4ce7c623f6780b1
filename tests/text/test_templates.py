"""What is given comes back to the byte, whatever it is and whatever the tokenizer does to it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm import Hole
from adlm.text.templates import (
    BLOCK,
    WORD,
    build_layout,
    classify_tokens,
    parse_template,
    tokenize_piece,
)
from tests.text.models import (
    TOKENIZERS,
    any_template,
    any_text,
    given_in,
    holds_in_order,
    lm,
    tokenizer,
)

COUNT = 260  # templates for each tokenizer: more than 1,000 in all
ROWS = {
    "gpt2": "documents",
    "bert-base-uncased": "wrapped",
    "bytes": "wrapped",
    "prose": "documents",
}


@pytest.mark.parametrize("words", TOKENIZERS)
def test_fixed_text_comes_back_to_the_byte(words: str) -> None:
    """Over random templates: in every frame and at the end; holes have the requested lengths."""
    rng = random.Random(words)
    templates = [any_template(rng) for _ in range(COUNT)]
    model = lm("adlm", words, ROWS[words], length=256)
    known, special = model.tokenizer, classify_tokens(model.tokenizer).special
    sampling = {
        "sampler": "remask_cap",
        "steps": 4,
        "options": {"eta": 0.5},
        "top_p": 1.0,
        "seed": 3,
    }
    rows = model.layout_rows(template=templates, **sampling)
    layouts = [row.layout for row in rows]
    steps = list(model.stream_rows(rows))
    assert len(steps) == 5
    given_pieces = [given_in(template) for template in templates]
    for step in steps:
        for row, (layout, pieces) in enumerate(zip(layouts, given_pieces, strict=True)):
            fixed, ids = torch.tensor(layout.is_fixed), torch.tensor(layout.ids)
            assert torch.equal(step.tokens[row, : len(layout)][fixed], ids[fixed])
            assert holds_in_order(step.trajectory_frame(row).text, pieces)
        assert all(
            holds_in_order(text, pieces)
            for text, pieces in zip(step.texts, given_pieces, strict=True)
        )

    texts = model.infill(templates, **sampling).texts
    assert texts == steps[-1].texts
    for row, (layout, template, text) in enumerate(zip(layouts, templates, texts, strict=True)):
        ids = steps[-1].tokens[row].tolist()
        found = layout.pieces(ids)
        assert "".join(piece for piece, _ in found) == text == steps[-1].trajectory_frame(row).text
        assert [piece for piece, is_given in found if is_given] == given_pieces[row]
        asked = [piece.min_tokens for piece in template if isinstance(piece, Hole)]
        holes = [span for span in layout.spans if span.texts is None]
        assert [span.end - span.start for span in holes] == asked
        for span in holes:
            for place in range(span.start, span.end):
                is_end = layout.may_end and span is layout.spans[-1] and ids[place] == known.eos_id
                assert is_end or not special[ids[place]]


@pytest.mark.parametrize("words", TOKENIZERS)
def test_a_prompt_comes_back_to_the_byte(words: str) -> None:
    rng = random.Random(words)
    prompts = ["", " ", "\n", *(any_text(rng) + rng.choice(["", " "]) for _ in range(16))]
    for method in ("mdlm", "ar"):
        model = lm(method, words, length=200)
        sampling = {"sampler": "ancestral", "steps": 3} if method == "mdlm" else {}
        texts = model.generate(prompts, length=80, batch=64, top_p=1.0, **sampling).texts
        assert [text[: len(prompt)] for prompt, text in zip(prompts, texts, strict=True)] == prompts


@pytest.mark.parametrize("words", TOKENIZERS)
def test_a_hole_after_a_blank_begins_a_word(words: str) -> None:
    """The blank is given once, not twice and not never; words are told apart by it."""
    model = lm("mdlm", words, "documents")
    templates = ["The ___{2} sat", "a___{1} ___{1}  ___{2}", " ___{3}", "x ___{1}___{1}."]
    layouts = [row.layout for row in model.layout_rows(template=templates)]
    last = model.infill(templates, n=20, temperature=2.0, top_p=1.0, steps=4)
    *_, step = model.stream(template=templates, n=20, temperature=2.0, top_p=1.0, steps=4)
    firsts = 0
    for row, layout in enumerate(layout for layout in layouts for _ in range(20)):
        ids = step.tokens[row].tolist()
        for before, span in zip(layout.spans, layout.spans[1:]):
            if span.texts is not None:
                continue
            follows_blank = before.texts is not None and before.text.endswith(" ")
            joins_blanks = classify_tokens(model.tokenizer).joins_blanks
            assert (layout.kinds[span.start] == WORD) == (follows_blank and joins_blanks)
            if layout.kinds[span.start] == WORD:
                firsts += 1
                name = model.tokenizer.bpe.id_to_token(ids[span.start])
                assert (
                    not name.startswith("##")
                    if words.startswith("bert")
                    else name[0] == "Ġ" != name[1]
                )
                assert not "".join(text or "" for text in layout.decode_hole(span, ids)).startswith(
                    " "
                )
    assert (firsts > 0) == (words != "bytes")
    assert step.texts == last.texts
    assert all(text.startswith("The ") and text.endswith(" sat") for text in last.texts[:20])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.sampled_from([*TOKENIZERS, "characters", "bare"]))
def test_the_shares_of_tokens_are_the_text(text: str, words: str) -> None:
    ids, shares = tokenize_piece(tokenizer(words), text)
    assert "".join(shares) == text
    assert len(shares) == (len(ids) or bool(text))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=12), st.integers(1, 3).map(Hole.of_length)), max_size=6),
    st.data(),
)
def test_any_tokens_in_the_holes_leave_what_is_given(
    pieces: list[str | Hole], data: st.DataObject
) -> None:
    """Also tokens that no limits would let stand: half characters, marks, hashes."""
    words = tokenizer(data.draw(st.sampled_from(TOKENIZERS)))
    layout = build_layout(parse_template(pieces), words, ends=data.draw(st.booleans()))
    drawn = iter(
        data.draw(st.lists(st.integers(0, words.vocab_size - 1), min_size=20, max_size=20))
    )
    ids = [
        token if fixed else next(drawn)
        for token, fixed in zip(layout.ids, layout.is_fixed, strict=True)
    ]
    found = layout.pieces(ids)
    assert [piece for piece, is_given in found if is_given] == given_in(pieces)
    assert layout.text(ids).replace(BLOCK, "") == "".join(piece for piece, _ in found).replace(
        BLOCK, ""
    )


@pytest.mark.parametrize("words", ["gpt2", "bytes", "prose"])
def test_a_text_without_anything_given_is_what_its_tokens_say(words: str) -> None:
    """Of byte-level vocabularies: half characters and all, as the tokenizer itself reads the whole row."""
    model = lm("mdlm", words, "documents")
    *_, step = model.stream(n=30, sampler="ancestral", steps=3, top_p=1.0)
    for text, ids in zip(step.texts, step.tokens.tolist(), strict=True):
        assert text == model.tokenizer.decode(ids, skip_special=True)


def test_the_parser_finds_holes_and_leaves_lists_alone() -> None:
    expected = ("The ", Hole(), " sat on ", Hole.of_length(2), ", ", Hole(2, 8))
    assert parse_template("The ___ sat on ___{2}, ____{2,8}") == expected
    assert parse_template("___{ 2 , 8 }") == (Hole(2, 8),)
    assert parse_template("a__b_") == ("a__b_",)
    assert parse_template("___ {x}") == (Hole(), " {x}")
    for wrong in ("___{x}", "___{-1}", "___{}", "___{2,}", "____{1", "___{1.5}"):
        with pytest.raises(
            ValueError, match=r"^'_+{.* is not a hole: write ___ for any length, ___.5. for five"
        ):
            parse_template(f"a {wrong} b")
    assert parse_template(["a", "___", "", Hole.of_length(3), "b", "c"]) == (
        "a___",
        Hole.of_length(3),
        "bc",
    )
    assert parse_template("") == ()
    for hole in (Hole(), Hole.of_length(4), Hole(2, 5)):
        assert parse_template(str(hole)) == (hole,)


def test_the_classes_of_a_vocabulary() -> None:
    """Marks are no text; a blank alone begins no word; hashes are hashes where blanks are written."""
    words = tokenizer("gpt2")
    special, banned, joins_blanks, is_continued = classify_tokens(words)
    assert special.nonzero()[:, 0].tolist() == [words.eos_id, words.mask_id]
    assert [bool(banned[WORD, words.encode(text)[0]]) for text in (" cat", " ", "cat")] == [
        False,
        True,
        True,
    ]
    assert joins_blanks and not is_continued
    bert = tokenizer("bert-base-uncased")
    special, banned, joins_blanks, is_continued = classify_tokens(bert)
    names = {bert.bpe.id_to_token(i) for i in special.nonzero()[:, 0].tolist()}
    assert names == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert (
        banned[WORD, bert.bpe.token_to_id("##ing")]
        and not banned[WORD, bert.bpe.token_to_id("cat")]
    )
    assert joins_blanks and is_continued


@pytest.mark.parametrize("words", TOKENIZERS)
def test_only_an_end_may_stand_where_a_text_may_end(words: str) -> None:
    known = tokenizer(words)
    text, word, ended = classify_tokens(known).banned
    assert torch.equal(text, classify_tokens(known).special)
    assert (text ^ ended).nonzero()[:, 0].tolist() == [known.eos_id]
    assert bool((word >= text).all()) and not bool(word.all())
