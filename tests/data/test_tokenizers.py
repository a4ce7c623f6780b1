"""Any text comes back as it went in; the mask is never text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adlm.data.sources import excerpt
from adlm.data.tokenizers import Tokenizer, train_bpe

TOKENIZER = train_bpe([excerpt()[:20_000]], 400)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.mask_id not in ids


def test_vocabulary_counts_the_mask() -> None:
    assert TOKENIZER.vocab_size == 400
    assert TOKENIZER.mask_id == 399


def test_training_twice_gives_the_same_ids() -> None:
    text = excerpt()[:20_000]
    assert train_bpe([text], 400).encode(text) == TOKENIZER.encode(text)


def test_merges_shorten_the_text() -> None:
    text = excerpt()[:20_000]
    assert len(TOKENIZER.encode(text)) < 0.8 * len(text.encode())


@pytest.mark.parametrize(("token", "what"), [(399, "mask"), (400, "outside"), (-1, "outside")])
def test_decoding_what_is_no_text_names_the_place(token: int, what: str) -> None:
    with pytest.raises(ValueError, match=f"position 1 is .*{what}"):
        TOKENIZER.decode([5, token])


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="above 256"):
        train_bpe(["text"], 256)
    assert isinstance(train_bpe(["text"], 257), Tokenizer)
