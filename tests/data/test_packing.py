"""Rows are the stream, cut: the authors' rows where they cut as we do, independent of the chunks."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.data.packing import PackedRows, Packer
from tests.goldens import arrays, facts

GOLDEN = facts("packing")
ARRAYS = {name: array.numpy() for name, array in arrays("packing").items()}
NONE = np.empty(0, dtype=np.int64)
LENGTH = 7


def special(bos_id: int | None, eos_id: int, pad_id: int | None = None) -> Any:
    """A tokenizer, as far as a packer sees it."""
    return SimpleNamespace(name="ids", bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)


IDS = special(90, 91, 92)


def wrap_rows(
    stream: list[int], length: int, bos_id: int | None, eos_id: int | None
) -> tuple[np.ndarray, int]:
    """The rows of a stream, and the number of tokens that are left."""
    count, rest = divmod(len(stream), length - 2)
    inside = np.array(stream[: len(stream) - rest], dtype=np.int64).reshape(count, length - 2)
    return np.pad(
        inside, ((0, 0), (1, 1)), constant_values=((0, 0), (bos_id or 0, eos_id or 0))
    ), rest


@pytest.mark.parametrize("case", GOLDEN["small_cases"], ids=range(len(GOLDEN["small_cases"])))
def test_small_streams_are_wrapped_as_the_authors_do(case: dict) -> None:
    stream = np.array(
        [token for document in case["input_ids"] for token in document], dtype=np.int64
    )
    packer = Packer(special(case["bos"], case["eos"]), case["block_size"], is_wrapped=True)
    rows = packer.feed(stream, np.array([len(stream)]), np.array([0]), is_whole=False).rows
    assert rows.tolist() == case["blocks"]
    assert len(rows) * (case["block_size"] - 2) + len(packer.carry) == len(stream)


def test_a_fresh_packer_for_every_thousand_documents_gives_the_authors_rows() -> None:
    lengths, eos_id = ARRAYS["doc_lengths"], GOLDEN["eos_id_appended_to_each_document"]
    stops = np.cumsum(lengths)
    framing = special(GOLDEN["bos_id"], eos_id), GOLDEN["block_size_wrapped"]
    rows = []
    for first in range(0, len(lengths), 1000):
        here = slice(first, first + 1000)
        ids = ARRAYS["doc_tokens"][stops[here][0] - lengths[first] : stops[here][-1]]
        rows.append(Packer(*framing, is_wrapped=True).feed(ids, lengths[here], lengths[here]).rows)
    assert np.array_equal(np.concatenate(rows), ARRAYS["blocks_num_proc1"])
    # One packer for all loses one remainder in place of three.
    whole = Packer(*framing, is_wrapped=True).feed(ARRAYS["doc_tokens"], lengths, lengths).rows
    assert (
        len(whole)
        == (lengths.sum() + len(lengths)) // (framing[1] - 2)
        >= len(ARRAYS["blocks_num_proc1"])
    )


def test_one_document_a_row_is_padded_and_cut_as_the_authors_do() -> None:
    lengths = ARRAYS["doc_lengths"][: len(ARRAYS["unwrapped_input_ids"])]
    ids = ARRAYS["doc_tokens"][: lengths.sum()]
    length = GOLDEN["block_size_unwrapped"]
    packer = Packer(special(GOLDEN["bos_id"], GOLDEN["sep_id"], 0), length, is_wrapped=False)
    packed = packer.feed(ids, lengths, lengths)
    assert np.array_equal(packed.rows, ARRAYS["unwrapped_input_ids"]) and packed.lengths is not None
    assert np.array_equal(
        np.arange(length) < packed.lengths[:, None], ARRAYS["unwrapped_attention_mask"].astype(bool)
    )
    assert (lengths > length - 2).any() and (
        lengths < length - 2
    ).any()  # the golden has both kinds


DOCUMENTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=30)


Documents = list[tuple[int, int]]  # tokens and bytes of each


def make_ids(lengths: np.ndarray) -> np.ndarray:
    return np.arange(lengths.sum(), dtype=np.uint16) % 80  # never one of the special ids


def pack(
    documents: Documents, cuts: set[int], is_wrapped: bool, start: tuple[int, ...] = (0, 0, 0)
) -> PackedRows:
    """All rows of the documents from `start` on, fed in the chunks that the cuts make."""
    lengths, sizes = (np.array(column, dtype=np.int64) for column in zip(*documents))
    ids, stops = make_ids(lengths), np.cumsum(lengths)
    packer = Packer(IDS, LENGTH, is_wrapped=is_wrapped, start=start)
    edges = sorted(
        {start[0], len(documents)} | {cut for cut in cuts if start[0] < cut < len(documents)}
    )
    no_lengths = None if is_wrapped else NONE
    parts = [PackedRows(np.empty((0, LENGTH), np.uint16), no_lengths, np.empty((0, 3), np.int64))]
    for first, last in pairwise(edges):
        begin = stops[first] - lengths[first]
        parts.append(
            packer.feed(ids[begin : stops[last - 1]], lengths[first:last], sizes[first:last])
        )
    return PackedRows.concatenate(parts)


def same(one: PackedRows, other: PackedRows) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("rows", "lengths", "ends")
    )


@given(DOCUMENTS, st.sets(st.integers(1, 29)), st.booleans(), st.integers(0, 100))
def test_rows_do_not_depend_on_chunks_and_packing_resumes_after_any_row(
    documents: Documents, cuts: set[int], is_wrapped: bool, which: int
) -> None:
    whole = pack(documents, set(), is_wrapped)
    assert same(pack(documents, cuts, is_wrapped), whole)
    if len(whole.rows):
        row = which % len(whole.rows)
        rest = pack(documents, cuts, is_wrapped, start=tuple(whole.ends[row].tolist()))
        assert same(rest, whole[row + 1 :])


def pack_parts(
    documents: Documents, pieces: list[int], is_wrapped: bool, start: tuple[int, ...]
) -> PackedRows:
    """All rows from `start` on, with every document in parts of these sizes, in turn."""
    lengths = np.array([tokens for tokens, _ in documents], dtype=np.int64)
    ids, stops = make_ids(lengths), np.cumsum(lengths)
    packer = Packer(IDS, LENGTH, is_wrapped=is_wrapped, start=start)
    packed = []
    for number in range(start[0], len(documents)):
        (tokens, size), begin, turn = documents[number], stops[number] - lengths[number], 0
        while tokens > (piece := pieces[turn % len(pieces)]):
            part = ids[begin : begin + piece], np.array([piece]), np.array([size // 2])
            packed.append(packer.feed(*part, is_whole=False))
            tokens, size, begin, turn = tokens - piece, size - size // 2, begin + piece, turn + 1
        packed.append(
            packer.feed(ids[begin : begin + tokens], np.array([tokens]), np.array([size]))
        )
    return PackedRows.concatenate(packed)


@given(
    DOCUMENTS,
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 100),
)
def test_documents_in_parts_give_the_same_rows_and_resume(
    documents: Documents, pieces: list[int], is_wrapped: bool, which: int
) -> None:
    whole, parts = (
        pack(documents, set(), is_wrapped),
        pack_parts(documents, pieces, is_wrapped, (0, 0, 0)),
    )
    assert np.array_equal(whole.rows, parts.rows) and np.array_equal(whole.lengths, parts.lengths)
    assert (
        np.array_equal(whole.ends[:, :2], parts.ends[:, :2])
        and (np.diff(parts.ends[:, 2]) >= 0).all()
    )
    if len(parts.rows) and (row := which % len(parts.rows)) + 1 < len(parts.rows):
        rest = pack_parts(documents, pieces, is_wrapped, tuple(parts.ends[row].tolist()))
        assert same(rest, parts[row + 1 :])


@given(DOCUMENTS)
def test_wrapped_rows_hold_the_stream_and_lose_only_its_remainder(documents: Documents) -> None:
    lengths = np.array([tokens for tokens, _ in documents])
    stream = np.insert(make_ids(lengths), np.cumsum(lengths), IDS.eos_id)
    assert (stream[np.cumsum(lengths + 1) - 1] == IDS.eos_id).all() and len(stream) == (
        lengths + 1
    ).sum()
    packed = pack(documents, set(), is_wrapped=True)
    assert (packed.rows[:, 0] == IDS.bos_id).all() and (packed.rows[:, -1] == IDS.eos_id).all()
    inside = packed.rows[:, 1:-1].ravel()
    assert np.array_equal(inside, stream[: len(inside)])
    assert len(stream) - len(inside) < LENGTH - 2


@given(DOCUMENTS, st.booleans())
def test_the_bytes_of_all_rows_are_the_text_that_is_in_them(
    documents: Documents, is_wrapped: bool
) -> None:
    packed = pack(documents, set(), is_wrapped)
    assert (np.diff(packed.ends[:, 2]) >= 0).all()
    total = sum(size for _, size in documents)
    if not is_wrapped and all(tokens <= 5 for tokens, _ in documents if tokens):
        assert packed.ends[-1, 2] == sum(size for tokens, size in documents if tokens)
    if len(packed.rows):
        assert packed.ends[-1, 2] <= total
        documents_done, tokens_inside, _ = packed.ends[-1]
        if is_wrapped and (documents_done, tokens_inside) == (len(documents), 0):
            assert packed.ends[-1, 2] == total


def test_a_row_without_room_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        Packer(IDS, 2, is_wrapped=True)
