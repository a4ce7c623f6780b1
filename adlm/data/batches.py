"""Rows in shuffled order, a global batch at a time, spread over processes; where they stand is a plain dict."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset


class RowDataset(Protocol):
    """Rows by number: tokens (n, L) and, where rows are padded, their lengths (n,)."""

    def __len__(self) -> int: ...
    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]: ...


def is_valid(lengths: Tensor, length: int) -> Tensor:
    """(n, L), False at padding."""
    return torch.arange(length) < lengths[:, None]


@dataclass(frozen=True)
class Batch:
    """This process's rows of a global batch."""

    tokens: Tensor  # (n, L)
    lengths: Tensor | None  # (n,)
    number: Tensor  # (n,): what each row's noise is known by
    place: Tensor  # (n,): where each row stands in the global batch
    total: int  # rows of the global batch
    state: dict[str, Any]  # to be loaded to go on after this batch

    def valid(self) -> Tensor | None:
        """(n, L), False at padding; None if there is none."""
        return None if self.lengths is None else is_valid(self.lengths, self.tokens.shape[1])

    def split(self, rows: int) -> list[Batch]:
        """Pieces of at most so many rows."""
        if rows >= len(self.tokens):
            return [self]
        cuts = [slice(first, first + rows) for first in range(0, len(self.tokens), rows)]
        return [
            Batch(
                self.tokens[cut],
                None if self.lengths is None else self.lengths[cut],
                self.number[cut],
                self.place[cut],
                self.total,
                self.state,
            )
            for cut in cuts
        ]


class _Numbered(Dataset[Any]):
    """Rows with their numbers, a whole batch at a call; `repeats` times over if a batch is more than there is."""

    def __init__(self, rows: RowDataset, repeats: int) -> None:
        self.rows, self.repeats = rows, repeats

    def __len__(self) -> int:
        return len(self.rows) * self.repeats

    def __getitems__(self, numbers: list[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        number = torch.tensor(numbers)
        return *self.rows.fetch(number % len(self.rows)), number


def whole_batch(batch: Any) -> Any:
    """What a loader hands on as it is."""
    return batch


class ShuffledBatches:
    """Every row once before any comes twice, for ever; the last rows of an epoch that fill no batch are left out.

    The k-th global batch is the same set of rows in the same places whatever the number of processes, so a run can go
    on with more or fewer of them.
    """

    def __init__(
        self, rows: RowDataset, batch: int, *, seed: int = 0, rank: int = 0, size: int = 1, workers: int = 0
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        if len(rows) == 0:
            raise ValueError("there are no rows to train on")
        if batch % size:
            raise ValueError(f"a batch of {batch} rows cannot be shared evenly by {size} processes")
        self.batch, self.rank, self.size = batch, rank, size
        numbered = _Numbered(rows, repeats=-(-batch // len(rows)))
        self.sampler = StatefulDistributedSampler(numbered, size, rank, shuffle=True, seed=seed, drop_last=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self.loader = StatefulDataLoader(
                numbered,
                batch_size=batch // size,
                sampler=self.sampler,
                drop_last=True,
                num_workers=workers,
                collate_fn=whole_batch,
                prefetch_factor=4 if workers else None,
                persistent_workers=workers > 0,
                generator=torch.Generator().manual_seed(seed),  # not the caller's
            )
        self.epoch, self.taken = 0, 0  # batches taken of this epoch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that had this state."""
        if state["rows"] % self.batch:
            raise ValueError(
                f"{state['rows']} rows of epoch {state['epoch']} are no whole number of batches of {self.batch}: "
                "resume with the batch size that the run began with"
            )
        self.epoch, self.taken = state["epoch"], state["rows"] // self.batch

    def __iter__(self) -> Iterator[Batch]:
        share = self.batch // self.size
        place = torch.arange(share) * self.size + self.rank  # the sampler deals rows out in turn
        while True:
            self.sampler.set_epoch(self.epoch)
            self.sampler.load_state_dict({"yielded": self.taken * share})
            for tokens, lengths, number in self.loader:
                self.taken += 1
                state = {"epoch": self.epoch, "rows": self.taken * self.batch}
                yield Batch(tokens, lengths, number, place, self.batch, state)
            self.epoch, self.taken = self.epoch + 1, 0


@dataclass(frozen=True)
class TensorRows:
    """Rows that are in memory already."""

    tokens: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        index = torch.as_tensor(indices)
        return self.tokens[index], None if self.lengths is None else self.lengths[index]
