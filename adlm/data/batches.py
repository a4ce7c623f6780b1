"""Global batches for training, shared over processes: shuffled from prepared rows, or streamed from a source."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Protocol, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import IterableDataset

from adlm.data.packing import PackedRows, Packer, iterate_blocks
from adlm.data.sources import Source
from adlm.data.tokenizers import Tokenizer
from adlm.settings import RESUMABLE, PathText, Settings

DOCUMENT_CHUNK = 64  # documents that a stream tokenizes at a time
# The start of a block in the source, and the rows taken from the block.
STREAM_START: dict[str, Any] = {"epoch": 0, "start": [0, 0, 0], "block": 0, "taken": 0, "rows": 0}


class RowDataset(Protocol):
    """Rows by number: tokens (n, L) and, where rows are padded, their lengths (n,)."""

    def __len__(self) -> int: ...
    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class TensorRows:
    """Rows in memory."""

    tokens: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def fetch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        index = torch.as_tensor(indices)
        return self.tokens[index].long(), None if self.lengths is None else self.lengths[index]


def is_valid(lengths: Tensor, length: int) -> Tensor:
    """Return a mask (n, L) that is False at padding."""
    return torch.arange(length) < lengths[:, None]


class DataSettings(Settings):
    """The training data; vocabulary, mask id and length are in its manifest."""

    path: Annotated[PathText, RESUMABLE]
    """A folder written by `adlm prepare`."""
    stream: PathText | None = None
    """A source to stream instead of the train split of data.path."""
    stream_options: dict[str, str] = Field(default_factory=dict)
    """Options of the source: split, column, documents, detokenizer."""
    shuffle: PositiveInt = 1024
    """Rows in the shuffle buffer of a stream."""
    workers: Annotated[NonNegativeInt, RESUMABLE] = 0
    """Processes that load data."""
    verify: Annotated[bool, RESUMABLE] = True
    """Compare the shards with their checksums at the start."""


@dataclass(frozen=True)
class Batch:
    """The rows of a global batch that belong to this process."""

    tokens: Tensor  # (n, L)
    lengths: Tensor | None  # (n,)
    number: Tensor  # (n,): row numbers, which key the noise
    place: Tensor  # (n,): positions in the global batch
    total: int  # rows of the global batch
    state: dict[str, Any]  # the position after this batch; loading it resumes exactly

    def valid(self) -> Tensor | None:
        """Return a mask (n, L) that is False at padding, or None without padding."""
        return None if self.lengths is None else is_valid(self.lengths, self.tokens.shape[1])

    def split(self, rows: int) -> list[Self]:
        """Split into batches of at most so many rows."""
        if rows >= len(self.tokens):
            return [self]
        names = [
            each.name
            for each in fields(self)
            if isinstance(getattr(self, each.name), Tensor | list)
        ]
        parts = [slice(start, start + rows) for start in range(0, len(self.tokens), rows)]
        return [
            replace(self, **{name: getattr(self, name)[part] for name in names}) for part in parts
        ]


def _build_loader(rows: Any, **options: Any) -> Any:
    """Build a loader that makes four batches ahead in each of its workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            rows, prefetch_factor=4 if options["num_workers"] else None, **options
        )


def _fetch_batch(rows: RowDataset, numbers: list[int]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Fetch a whole batch with its numbers; rows are repeated where a batch is larger than the data."""
    number = torch.tensor(numbers)
    return *rows.fetch(number % len(rows)), number


class ShuffledBatches:
    """Endless shuffled batches: the k-th has the same rows in the same places for any number of processes."""

    def __init__(
        self,
        rows: RowDataset,
        batch: int,
        *,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        workers: int = 0,
    ) -> None:
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        if len(rows) == 0:
            raise ValueError("the data has 0 rows: prepare data with at least one training row")
        if batch % size:
            raise ValueError(
                f"batch {batch} is not a multiple of {size} processes: choose one that is"
            )
        self.batch, self.rank, self.size = batch, rank, size
        numbers: Any = range(len(rows) * -(-batch // len(rows)))
        self.sampler = StatefulDistributedSampler(
            numbers, size, rank, shuffle=True, seed=seed, drop_last=True
        )
        self.loader = _build_loader(
            numbers,
            collate_fn=partial(_fetch_batch, rows),
            batch_size=batch // size,
            sampler=self.sampler,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(seed),  # not the caller's
        )
        self.epoch, self.taken = 0, 0  # batches taken of this epoch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that had this state."""
        if state["rows"] % self.batch:
            problem = f"{state['rows']} rows of an epoch were taken, which is no multiple of the batch {self.batch}"
            raise ValueError(f"{problem}: resume with the batch size that the run began with")
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


class _StreamedRows(IterableDataset[Any]):
    """The rows of a stream as a dataset."""

    def __init__(self, iterate: Callable[[], Iterator[Any]]) -> None:
        self.iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()


@dataclass
class StreamedBatches:
    """Endless batches of this process's share of a source's documents: packed, and shuffled within blocks of rows."""

    source: Source
    tokenizer: Tokenizer
    length: int
    batch: int
    is_wrapped: bool = True
    block: int = 1024
    seed: int = 0
    rank: int = 0
    size: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        self.state = STREAM_START
        Packer(
            self.tokenizer, self.length, is_wrapped=self.is_wrapped
        )  # raises here, not in a worker

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that had this state."""
        self.state = dict(state)

    def __iter__(self) -> Iterator[Batch]:
        yield from _build_loader(
            _StreamedRows(self._iterate_rows),
            collate_fn=self._collect_batch,
            batch_size=self.batch // self.size,
            num_workers=min(self.workers, 1),  # one: the order is the stream's
            multiprocessing_context="fork" if self.workers else None,
        )

    def _collect_batch(self, rows: list[tuple[Any, Any, Any, dict[str, Any]]]) -> Batch:
        *columns, states = zip(*rows, strict=True)
        tokens, lengths, number = (torch.from_numpy(np.stack(column)) for column in columns)
        place = torch.arange(len(rows)) * self.size + self.rank
        return Batch(
            tokens, None if self.is_wrapped else lengths, number, place, self.batch, states[-1]
        )

    def _iterate_rows(self) -> Iterator[tuple[Any, Any, Any, dict[str, Any]]]:
        """Yield rows with their length, their number and the state after them."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this is a process or a thread of its own
        state = dict(self.state)
        while True:
            is_empty = True
            for packed in iterate_blocks(self._pack_documents(state["start"]), self.block):
                is_empty = False
                key = np.random.SeedSequence([self.seed, state["epoch"], state["block"], self.rank])
                order = np.random.Generator(np.random.Philox(key)).permutation(len(packed.rows))
                for taken in range(state["taken"], len(order)):
                    place, number = order[taken], state["rows"] * self.size + self.rank
                    state |= {"taken": taken + 1, "rows": state["rows"] + 1}
                    if taken == len(order) - 1:
                        state |= {
                            "start": packed.ends[-1].tolist(),
                            "block": state["block"] + 1,
                            "taken": 0,
                        }
                    length = self.length if packed.lengths is None else packed.lengths[place]
                    yield (
                        packed.rows[place].astype(np.int64),
                        np.int64(length),
                        np.int64(number),
                        dict(state),
                    )
            if is_empty and state["start"] == [0, 0, 0]:
                problem = f"{self.source.name} does not fill one row of {self.length} tokens for each process"
                raise ValueError(f"{problem}: give more text or a smaller length")
            state |= {"epoch": state["epoch"] + 1, "start": [0, 0, 0], "block": 0, "taken": 0}

    def _pack_documents(self, start: list[int]) -> Iterator[PackedRows]:
        """Yield the rows of the documents from a position in the source on."""
        packer = Packer(self.tokenizer, self.length, is_wrapped=self.is_wrapped, start=start)
        own = islice(self.source.read(), self.rank + start[0] * self.size, None, self.size)
        while chunk := [text for text, _ in islice(own, DOCUMENT_CHUNK)]:
            ids, lengths = self.tokenizer.encode_batch(chunk)
            yield packer.feed(ids, lengths, np.array([len(text.encode("utf-8")) for text in chunk]))
