"""Batches: every row once an epoch, the same global batch whatever the processes, exact resumption."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import Batch, ShuffledBatches, TensorRows, is_valid

ROWS = TensorRows(torch.arange(22)[:, None].expand(22, 3).contiguous(), torch.arange(22) % 3 + 1)


def batches(count: int, batch: int = 6, state: dict[str, Any] | None = None, **how: Any) -> list[Batch]:
    source = ShuffledBatches(ROWS, batch, **how)
    if state is not None:
        source.load_state_dict(state)
    return list(islice(iter(source), count))


def numbers(found: list[Batch]) -> list[list[int]]:
    return [batch.number.tolist() for batch in found]


def all_gather(parts: list[Batch]) -> dict[int, int]:
    """Place in the global batch -> row."""
    places = torch.cat([part.place for part in parts]).tolist()
    assert len(set(places)) == len(places), "two rows in one place"
    return dict(zip(places, torch.cat([part.number for part in parts]).tolist()))


def test_every_row_comes_at_most_once_an_epoch() -> None:
    found = batches(6)  # 22 rows are 3 batches of 6 and 4 rows left over
    for epoch in (found[:3], found[3:]):
        rows = [number for batch in epoch for number in batch.number.tolist()]
        assert len(set(rows)) == 18
    assert [batch.state for batch in found[2:4]] == [{"epoch": 0, "rows": 18}, {"epoch": 1, "rows": 6}]
    assert numbers(found[:3]) != numbers(found[3:])
    assert sorted(torch.cat([batch.number for batch in batches(2, batch=11)]).tolist()) == list(range(22))


def test_a_row_brings_its_tokens_and_its_length() -> None:
    for batch in batches(4):
        assert batch.lengths is not None
        assert torch.equal(batch.tokens, batch.number[:, None].expand(6, 3))
        assert torch.equal(batch.lengths, batch.number % 3 + 1)
        valid = batch.valid()
        assert valid is not None and torch.equal(valid.sum(1), batch.lengths)
    assert is_valid(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]


def test_the_order_follows_from_the_seed() -> None:
    assert numbers(batches(5, seed=1)) == numbers(batches(5, seed=1)) != numbers(batches(5, seed=2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches(5)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was used"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_it_goes_on_in_the_middle_of_an_epoch(stop: int, workers: int) -> None:
    straight = batches(8)
    first = batches(stop, workers=workers)
    again = batches(8 - stop, state=first[-1].state, workers=workers)
    assert numbers(first + again) == numbers(straight)
    assert [b.state for b in first + again] == [b.state for b in straight]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_processes(size: int) -> None:
    whole = [all_gather([batch]) for batch in batches(5)]
    shares = [batches(5, rank=rank, size=size) for rank in range(size)]
    assert [all_gather([share[k] for share in shares]) for k in range(5)] == whole
    assert all(len(share[0].tokens) == 6 // size and share[0].total == 6 for share in shares)
    assert {tuple(share[k].state.items()) for share in shares for k in range(1)} == {(("epoch", 0), ("rows", 6))}


def test_it_goes_on_with_another_number_of_processes() -> None:
    straight = [all_gather([batch]) for batch in batches(6)]
    state = batches(2, rank=1, size=3)[-1].state
    shares = [batches(4, state=state, rank=rank, size=2) for rank in range(2)]
    assert [all_gather([share[k] for share in shares]) for k in range(4)] == straight[2:]


def test_a_batch_larger_than_the_data_repeats_rows_with_other_noise() -> None:
    batch = batches(1, batch=40)[0]
    assert len(set(batch.number.tolist())) == 40  # noise is known by these
    rows = batch.tokens[:, 0]
    assert torch.equal(rows, batch.number % 22)
    assert int(torch.bincount(rows, minlength=22).max()) == 2


def test_pieces_are_the_batch() -> None:
    batch = batches(1)[0]
    pieces = batch.split(4)
    assert [len(piece.tokens) for piece in pieces] == [4, 2] and batch.split(6) == [batch] == batch.split(100)
    for name in ("tokens", "lengths", "number", "place"):
        assert torch.equal(torch.cat([getattr(piece, name) for piece in pieces]), getattr(batch, name))
    assert all(piece.total == 6 and piece.state == batch.state for piece in pieces)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="the data has 0 rows"):
        ShuffledBatches(TensorRows(torch.zeros(0, 3, dtype=torch.int64)), 4)
    with pytest.raises(ValueError, match="batch 6 is not a multiple of 4 processes"):
        ShuffledBatches(ROWS, 6, size=4)
    with pytest.raises(ValueError, match="resume with the batch size"):
        ShuffledBatches(ROWS, 4).load_state_dict({"epoch": 0, "rows": 6})


class Broken(TensorRows):
    def fetch(self, indices: Any) -> tuple[Tensor, Tensor | None]:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_reading_is_told(workers: int) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(ShuffledBatches(Broken(ROWS.tokens), 4, workers=workers)))
