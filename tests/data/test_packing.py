"""Rows are the stream, cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.data.packing import pack_rows
from adlm.data.sources import excerpt


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
def test_row_i_begins_at_i_strides(tokens: int, length: int, stride: int) -> None:
    stream = torch.arange(tokens)
    if tokens < length:
        with pytest.raises(ValueError, match=f"one row takes {length} tokens"):
            pack_rows(stream, length, stride=stride)
        return
    rows = pack_rows(stream, length, stride=stride)
    assert rows.shape == ((tokens - length) // stride + 1, length)
    for i, row in enumerate(rows):
        assert torch.equal(row, stream[i * stride : i * stride + length])


def test_by_default_rows_do_not_overlap_and_only_the_tail_is_lost() -> None:
    rows = pack_rows(list(range(103)), 10)
    assert rows.flatten().tolist() == list(range(100))


@pytest.mark.parametrize(("length", "stride"), [(0, 1), (4, 0), (4, -1)])
def test_sizes_below_one_are_refused(length: int, stride: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack_rows([1, 2, 3, 4, 5], length, stride=stride)


def test_the_excerpt_is_readable_prose() -> None:
    text = excerpt()
    assert text.startswith("CHAPTER 1\n\nAlthough I am an old man, night is generally my time for walking.")
    assert 300_000 < len(text) < 600_000
    assert "\ufffd" not in text
