"""Rows from a source as it comes, for text that does not fit a disk: tokenized, packed and shuffled on the way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from adlm.data.batches import Batch, whole_batch
from adlm.data.packing import Framing, Packed, Packer
from adlm.data.sources import Source
from adlm.data.tokenizers import Tokenizer

CHUNK = 64  # documents that are tokenized at a time
BEGINNING: dict[str, Any] = {"epoch": 0, "start": [0, 0, 0], "block": 0, "taken": 0, "rows": 0}


class StreamedRows(IterableDataset[Any]):
    """This process's share of the documents, for ever: blocks of rows, each shuffled, a batch at a time.

    Its state names where the block begins in the source and how many of its rows were taken, so it stays a few numbers.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        length: int,
        rows: int,
        *,
        is_wrapped: bool = True,
        block: int = 1024,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        state: Mapping[str, Any] = BEGINNING,
    ) -> None:
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise ValueError("a stream is cut into rows between BOS and EOS, and this tokenizer has none")
        pad = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
        self.framing = Framing(length, tokenizer.bos_id, tokenizer.eos_id, pad)
        self.source, self.tokenizer, self.rows, self.is_wrapped = source, tokenizer, rows, is_wrapped
        self.block, self.seed, self.rank, self.size, self.state = block, seed, rank, size, dict(state)

    def __iter__(self) -> Iterator[tuple[Any, Any, Any, dict[str, Any]]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this is a process or a thread of its own
        rows = self._rows()
        while True:
            picked = list(islice(rows, self.rows))
            tokens, lengths, number = (np.stack(column) for column in list(zip(*picked, strict=True))[:3])
            has_lengths = not self.is_wrapped
            yield tokens, lengths if has_lengths else None, number, picked[-1][3]

    def _rows(self) -> Iterator[tuple[Any, Any, Any, dict[str, Any]]]:
        """Row after row with its length, its number and the state behind it."""
        state = dict(self.state)
        while True:
            found_any = False
            for packed, following in self._blocks(state["start"]):
                found_any = True
                key = np.random.SeedSequence([self.seed, state["epoch"], state["block"], self.rank])
                order = np.random.Generator(np.random.Philox(key)).permutation(len(packed.rows))
                for taken in range(state["taken"], len(order)):
                    place, is_last = order[taken], taken == len(order) - 1
                    number = state["rows"] * self.size + self.rank
                    state |= {"taken": taken + 1, "rows": state["rows"] + 1}
                    if is_last:
                        state |= {"start": following, "block": state["block"] + 1, "taken": 0}
                    length = self.framing.length if packed.lengths is None else packed.lengths[place]
                    yield packed.rows[place].astype(np.int64), np.int64(length), np.int64(number), dict(state)
            if not found_any and state["start"] == [0, 0, 0]:
                raise ValueError(
                    f"{self.source.name} fills not one row of {self.framing.length} tokens"
                    + (f" for each of {self.size} processes" if self.size > 1 else "")
                )
            state |= {"epoch": state["epoch"] + 1, "start": [0, 0, 0], "block": 0, "taken": 0}

    def _blocks(self, start: list[int]) -> Iterator[tuple[Packed, list[int]]]:
        """Blocks of rows from a place in the source on, each with the place behind it; the last may be shorter."""
        packer = Packer(self.framing, is_wrapped=self.is_wrapped, start=start)
        texts = (text for text, _ in islice(self.source.read(), self.rank, None, self.size))
        documents = islice(texts, start[0], None)
        waiting: list[Packed] = []
        while chunk := list(islice(documents, CHUNK)):
            ids, lengths = self.tokenizer.encode_batch(chunk)
            sizes = np.array([len(text.encode("utf-8")) for text in chunk])
            waiting.append(packer.feed(ids, lengths, sizes))
            while sum(len(packed.rows) for packed in waiting) >= self.block:
                joined = _joined(waiting)
                yield _cut(joined, 0, self.block), joined.ends[self.block - 1].tolist()
                waiting = [_cut(joined, self.block, len(joined.rows))]
        if waiting and len((rest := _joined(waiting)).rows):
            yield rest, rest.ends[-1].tolist()


def _joined(parts: list[Packed]) -> Packed:
    lengths = None if parts[0].lengths is None else np.concatenate([p.lengths for p in parts if p.lengths is not None])
    return Packed(np.concatenate([p.rows for p in parts]), lengths, np.concatenate([p.ends for p in parts]))


def _cut(packed: Packed, first: int, last: int) -> Packed:
    lengths = None if packed.lengths is None else packed.lengths[first:last]
    return Packed(packed.rows[first:last], lengths, packed.ends[first:last])


class StreamedBatches:
    """Batches of a stream, made ahead in a process of their own if there may be workers.

    Every process reads its share of the documents, so which rows are in a batch depends on their number; a run must
    go on with as many as it began with.
    """

    def __init__(self, rows: StreamedRows, batch: int, *, workers: int = 0) -> None:
        self.rows, self.batch, self.workers = rows, batch, workers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that had this state."""
        self.rows.state = dict(state)

    def __iter__(self) -> Iterator[Batch]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            loader = StatefulDataLoader(
                self.rows,
                batch_size=None,
                num_workers=min(self.workers, 1),  # one: the order is the stream's
                collate_fn=whole_batch,
                prefetch_factor=4 if self.workers else None,
                multiprocessing_context="fork" if self.workers else None,
            )
        place = torch.arange(self.rows.rows) * self.rows.size + self.rows.rank
        for tokens, lengths, number, state in loader:
            known = None if lengths is None else torch.as_tensor(lengths)
            yield Batch(torch.as_tensor(tokens), known, torch.as_tensor(number), place, self.batch, state)
