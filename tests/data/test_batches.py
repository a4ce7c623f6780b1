"""Batches: every row once an epoch, the same global batch for any number of processes, exact resumption."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import Batch, ShuffledBatches, TensorRows, is_valid

ROWS = TensorRows(torch.arange(22)[:, None].expand(22, 3).contiguous(), torch.arange(22) % 3 + 1)


def take_batches(
    count: int, batch: int = 6, state: dict[str, Any] | None = None, **options: Any
) -> list[Batch]:
    source = ShuffledBatches(ROWS, batch, **options)
    if state is not None:
        source.load_state_dict(state)
    return list(islice(iter(source), count))


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [batch.number.tolist() for batch in batches]


def rows_by_place(parts: list[Batch]) -> dict[int, int]:
    places = torch.cat([part.place for part in parts]).tolist()
    assert len(set(places)) == len(places), "two rows in one place"
    return dict(zip(places, torch.cat([part.number for part in parts]).tolist()))


def test_every_row_comes_at_most_once_an_epoch_with_its_tokens_and_length() -> None:
    batches = take_batches(6)  # 22 rows are 3 batches of 6 and 4 rows left over
    for epoch in (batches[:3], batches[3:]):
        assert len({number for batch in epoch for number in batch.number.tolist()}) == 18
    assert [batch.state for batch in batches[2:4]] == [
        {"epoch": 0, "rows": 18},
        {"epoch": 1, "rows": 6},
    ]
    assert numbers(batches[:3]) != numbers(batches[3:])
    assert sorted(
        torch.cat([batch.number for batch in take_batches(2, batch=11)]).tolist()
    ) == list(range(22))
    for batch in batches:
        valid = batch.valid()
        assert batch.lengths is not None and valid is not None
        assert torch.equal(batch.tokens, batch.number[:, None].expand(6, 3))
        assert torch.equal(batch.lengths, batch.number % 3 + 1) and torch.equal(
            valid.sum(1), batch.lengths
        )
    assert is_valid(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]


def test_the_order_follows_from_the_seed() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert (
        numbers(take_batches(5, seed=1))
        == numbers(take_batches(5, seed=1))
        != numbers(take_batches(5, seed=2))
    )
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was used"


@pytest.mark.parametrize(("workers", "stop"), [(0, 1), (0, 2), (0, 3), (0, 4), (2, 2), (2, 3)])
def test_resume_in_the_middle_of_an_epoch(stop: int, workers: int) -> None:
    straight = take_batches(8)
    first = take_batches(stop, workers=workers)
    again = take_batches(8 - stop, state=first[-1].state, workers=workers)
    assert numbers(first + again) == numbers(straight)
    assert [batch.state for batch in first + again] == [batch.state for batch in straight]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_global_batch_does_not_depend_on_the_processes(size: int) -> None:
    whole = take_batches(5)
    shares = [take_batches(5, rank=rank, size=size) for rank in range(size)]
    for k, batch in enumerate(whole):
        parts = [share[k] for share in shares]
        assert rows_by_place(parts) == rows_by_place([batch])
        assert all(
            len(part.tokens) == 6 // size and part.total == 6 and part.state == batch.state
            for part in parts
        )


def test_resume_with_another_number_of_processes() -> None:
    straight = [rows_by_place([batch]) for batch in take_batches(6)]
    state = take_batches(2, rank=1, size=3)[-1].state
    shares = [take_batches(4, state=state, rank=rank, size=2) for rank in range(2)]
    assert [rows_by_place([share[k] for share in shares]) for k in range(4)] == straight[2:]


def test_a_batch_larger_than_the_data_repeats_rows_with_other_noise() -> None:
    batch = take_batches(1, batch=40)[0]
    assert len(set(batch.number.tolist())) == 40  # they key the noise
    rows = batch.tokens[:, 0]
    assert torch.equal(rows, batch.number % 22)
    assert int(torch.bincount(rows, minlength=22).max()) == 2


def test_the_parts_of_a_batch_are_the_batch() -> None:
    batch = take_batches(1)[0]
    parts = batch.split(4)
    assert [len(part.tokens) for part in parts] == [4, 2] and batch.split(6) == [
        batch
    ] == batch.split(100)
    for name in ("tokens", "lengths", "number", "place"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert all(part.total == 6 and part.state == batch.state for part in parts)


def test_errors() -> None:
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
def test_an_error_while_reading_is_raised(workers: int) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(ShuffledBatches(Broken(ROWS.tokens), 4, workers=workers)))
