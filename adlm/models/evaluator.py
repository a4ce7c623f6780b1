"""The network as samplers see it: folded, on its device, in fixed shapes on a GPU, with caches where it is causal."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.diffusion.features import FeatureModel, compute_features, reads_time
from adlm.diffusion.sampling import Positions, Row
from adlm.models.network import fold_network
from adlm.models.transformer import SlotCache, SlotWindow

ALIGN = 64  # half-precision products on a GPU are fastest when rows start on this boundary
# Positions on a GPU are padded to a multiple of it, so that few shapes of logits exist.
HEAD_ROWS = 64
MAX_LOGIT_ROWS = {"cuda": 4096, "cpu": 256, "mps": 256}
ROW_BUCKETS = (1, 2, 3, 4, 6, 8)  # numbers of rows; above, four between a power of two and the next
LENGTH_BUCKET = 64  # lengths on a GPU are multiples of it, up to the model's
WARMUP_RUNS = 3  # before a graph is captured

Inputs = tuple[Tensor | None, ...]


def round_rows(rows: int) -> int:
    """Return the smallest bucket that holds a number of rows."""
    if rows <= ROW_BUCKETS[-1]:
        return next(size for size in ROW_BUCKETS if size >= rows)
    unit = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // unit) * unit


def choose_rows(count: int, *, is_compiled: bool, has_one: bool, has_more: bool) -> int:
    """Return how many rows a call of `count` rows has on a GPU.

    One compilation serves all numbers of rows but one, which torch compiles apart, for about ten seconds. So one row
    is computed as two where graphs of more rows exist (`has_more`), and none of this row's shape (`has_one`).
    """
    if count == 1 and is_compiled and has_more and not has_one:
        return 2
    return round_rows(count)


def round_length(length: int, max_length: int) -> int:
    """Return the smallest bucket that holds a length."""
    return min(max_length, -(-length // LENGTH_BUCKET) * LENGTH_BUCKET)


class CudaGraph:
    """A CUDA graph of a function for one set of shapes; the next call overwrites its output."""

    def __init__(self, function: Callable[..., Tensor], inputs: Inputs, pool: Any) -> None:
        self.inputs = tuple(None if x is None else x.clone() for x in inputs)
        for x in self.inputs:
            if x is not None and x.shape[0] > 1:
                torch._dynamo.mark_dynamic(x, 0)  # one compilation for every number of rows
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and warm up outside the capture
            for _ in range(WARMUP_RUNS):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that prepares the next batch of a training, go on meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.output = function(*self.inputs)

    def __call__(self, inputs: Inputs) -> Tensor:
        for static, fresh in zip(self.inputs, inputs, strict=True):
            if static is not None and fresh is not None:
                static.copy_(fresh, non_blocking=True)
        self.graph.replay()
        return self.output


class ModelEvaluator:
    """A masked model as the sampling loop sees it.

    By default it is in bfloat16 on a GPU. There, calls have few shapes (buckets of rows and lengths), each of which is
    captured as a CUDA graph (`uses_graphs`); with `is_compiled` the model is compiled before, which takes a while and
    pays when many texts are sampled. With `fixed_batch` every call has exactly that many rows, of one bucket of lengths
    (more are split, fewer padded), and the head always as many positions, so that even on a GPU, whose kernels round
    differently at different sizes, a row's text does not depend on its batch.
    """

    def __init__(
        self,
        model: FeatureModel,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        fixed_batch: int | None = None,
        is_compiled: bool = False,
        uses_graphs: bool = True,
    ) -> None:
        self.device = torch.device(device)
        is_cuda = self.device.type == "cuda"
        check_finite(model)
        dtype = dtype or (torch.bfloat16 if is_cuda else torch.float32)
        self.model: Any = fold_network(model).to(self.device, dtype)
        config = model.config
        self.config = config
        self.mask_id: int | None = None if config.is_causal else config.mask_id
        self.max_length: int = config.length
        self.reads_time = reads_time(model)
        self.fixed_batch = fixed_batch
        self.max_logit_rows = MAX_LOGIT_ROWS[self.device.type]
        if fixed_batch is not None:
            self.max_logit_rows = HEAD_ROWS
        self.logits = build_head(self.model.head, config.mask_id, is_cuda=is_cuda)
        self.run = self._run_model
        self.is_compiled = is_cuda and is_compiled
        self.uses_graphs = is_cuda and uses_graphs
        self.graphs: dict[tuple[int, ...], CudaGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.uses_graphs else None
        if self.is_compiled:
            # Makes tables such as rotary angles before compiling, which would compute them in every layer.
            token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            level = torch.zeros(1, device=self.device) if self.reads_time else None
            self._run_model(token, level, None)
            self.run = torch.compile(self._run_model)

    def open(self) -> Self:
        """Return this evaluator: it remembers nothing."""
        return self

    def features(
        self,
        tokens: Tensor,
        noise_level: Tensor,
        valid: Tensor | None = None,
        rows: Sequence[Row] = (),
        next_position: Positions | None = None,
    ) -> Tensor:
        """Return features (n, L or more, dim) of n rows; on a GPU they hold until the next call."""
        level = self._send(noise_level) if self.reads_time else None
        if self.fixed_batch is not None:
            return self._run_fixed(tokens, level, valid, self.fixed_batch)
        count, length = tokens.shape
        valid = None if valid is None else self._send(valid)
        if not self.uses_graphs:
            return self.run(tokens, level, valid)
        width = round_length(length, self.max_length)
        if width > length and valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        has_one = (1, width, int(valid is not None)) in self.graphs
        has_more = any(rows > 1 for rows, *_ in self.graphs)
        compiled = self.is_compiled
        size = choose_rows(count, is_compiled=compiled, has_one=has_one, has_more=has_more)
        return self._run_padded(tokens, level, valid, size, width)

    def _run_fixed(
        self, tokens: Tensor, level: Tensor | None, valid: Tensor | None, size: int
    ) -> Tensor:
        """Run the model on exactly `size` rows at a time, whose width depends on the length of each alone."""
        count, length = tokens.shape
        lengths = [length] * count if valid is None else valid.sum(1).tolist()
        groups: dict[tuple[int, bool], list[int]] = {}
        for row, own in enumerate(lengths):
            width = round_length(own, self.max_length)
            groups.setdefault((width, own == width), []).append(row)
        whole = max(length, *(width for width, _ in groups))
        features = None
        for (width, is_full), rows in groups.items():
            for start in range(0, len(rows), size):
                part = self._send(torch.tensor(rows[start : start + size]))
                is_text = None
                if not is_full:
                    ends = torch.tensor([lengths[row] for row in rows[start : start + size]])
                    is_text = self._send(torch.arange(width) < ends[:, None])
                own_level = None if level is None else level[part]
                made = self._run_padded(tokens[part, :width], own_level, is_text, size, width)
                if features is None:
                    features = made.new_zeros(count, whole, made.shape[-1])
                features[part, :width] = made
        assert features is not None
        return features

    def _run_padded(
        self, tokens: Tensor, level: Tensor | None, valid: Tensor | None, size: int, width: int
    ) -> Tensor:
        """Run the model on rows that are padded to `size` rows of `width` tokens, on a GPU as a graph."""
        count, length = tokens.shape
        if width > length:
            tokens = F.pad(tokens, (0, width - length))
        if valid is not None and width > valid.shape[1]:
            valid = F.pad(valid, (0, width - valid.shape[1]))
        if size > count:
            tokens = repeat_last(tokens, size)
            level = None if level is None else repeat_last(level, size)
            valid = None if valid is None else repeat_last(valid, size)
        if not self.uses_graphs:
            return self.run(tokens, level, valid)[:count]
        shape = (size, width, int(valid is not None))
        if shape not in self.graphs:
            self.graphs[shape] = CudaGraph(self.run, (tokens, level, valid), self.pool)
        return self.graphs[shape]((tokens, level, valid))[:count]

    def logits_at(self, features: Tensor) -> Tensor:
        """Return logits (N, V) of features (N, dim), on a GPU padded; the mask and the padding are impossible."""
        missing = -len(features) % HEAD_ROWS if self.device.type == "cuda" else 0
        if not missing:
            return self.logits(features)
        return self.logits(F.pad(features, (0, 0, 0, missing)))[: len(features)]

    def _run_model(self, tokens: Tensor, level: Tensor | None, valid: Tensor | None) -> Tensor:
        return compute_features(self.model, tokens, level, valid=valid).final

    def _send(self, x: Tensor) -> Tensor:
        """Copy to the device, to a GPU without waiting."""
        if self.device.type == "cuda" and not x.is_cuda:
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)


@dataclass
class ReadWindow:
    """Tokens of a causal model that are read in one call."""

    slots: Positions  # (n,); those between others are computed too, and keep what they have
    rows: Positions  # (n,): the row in each slot, any where there is none
    counts: Positions  # (n,): tokens to be read


class CausalEvaluator(ModelEvaluator):
    """A causal model with key-value caches, in which each row of a running batch has a slot and its own length.

    Rows that have one token to be read are evaluated together, and apart from them rows that have more (prompts). The
    features of a row are those of its next position; they stand at all positions.
    """

    def __init__(self, model: FeatureModel, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._forget()

    def _forget(self) -> None:
        """Begin with no slots."""
        self.caches: list[SlotCache] = []
        self.slots: dict[Row, int] = {}
        self.read = np.zeros(0, np.int64)  # tokens read by slot
        self.width = 0  # positions of a slot

    def open(self) -> Self:
        """Return an evaluator with caches of its own."""
        opened = copy.copy(self)
        opened._forget()
        return opened

    def features(
        self,
        tokens: Tensor,
        noise_level: Tensor,
        valid: Tensor | None = None,
        rows: Sequence[Row] = (),
        next_position: Positions | None = None,
    ) -> Tensor:
        """Return the features (n, L, dim) of the next position of each of n rows, expanded over its positions."""
        assert next_position is not None
        if not hasattr(self.model, "new_slot_cache"):
            return self._read_all(tokens, next_position)
        slots = self._assign_slots(rows, tokens.shape[1])
        windows = self._choose_windows(slots, next_position - self.read[slots])
        parts = [self._read_window(tokens, rows, window) for window in windows]
        self.read[slots] = next_position
        place = np.zeros_like(self.read)  # of a slot's features: those of the last window count
        place[np.concatenate([x.slots for x in windows])] = np.arange(sum(map(len, parts)))
        features = torch.cat(parts)[self._send(torch.from_numpy(place[slots]))]
        return features[:, None].expand(-1, tokens.shape[1], -1)

    def _read_all(self, tokens: Tensor, next_position: Positions) -> Tensor:
        """Read each row from its beginning: the network has no cache."""
        end = self._send(torch.from_numpy(next_position))[:, None]
        is_read = torch.arange(tokens.shape[1], device=self.device) < end
        x = torch.where(is_read, tokens, tokens[:, :1])  # what follows changes nothing
        features = compute_features(self.model, x).final
        index = (end - 1)[..., None].expand(-1, -1, features.shape[-1])
        return features.gather(1, index).expand(-1, tokens.shape[1], -1)

    def _assign_slots(self, rows: Sequence[Row], width: int) -> Positions:
        """Return the slot of each row; rows that are not there any more have lost theirs."""
        self.slots = {row: self.slots[row] for row in rows if row in self.slots}
        kept = list(self.slots.values())
        read = np.zeros_like(self.read)
        read[kept] = self.read[kept]
        self.read = read
        free = (slot for slot in itertools.count() if slot not in kept)
        joining = [row for row in rows if row not in self.slots]
        self.slots |= zip(joining, free, strict=False)
        count = 1 + max(self.slots.values())
        unit = self.fixed_batch or 1
        count = -(-count // unit) * unit
        width = self.max_length if self.fixed_batch else max(width, self.width)
        if count > len(self.read) or width > self.width:
            self._grow(max(count, len(self.read)), width)
        return np.array([self.slots[row] for row in rows], np.int64)

    def _grow(self, count: int, width: int) -> None:
        """Make room for more slots, or longer ones."""
        if self.caches:
            for cache in self.caches:
                cache.grow(count, width)
        else:
            self.caches = self.model.new_slot_cache(count, width)
        self.read = np.pad(self.read, (0, count - len(self.read)))
        self.width = width

    def _choose_windows(self, slots: Positions, counts: Positions) -> list[ReadWindow]:
        """Choose slots that are read together: up to the last that lacks one token, and then prompts.

        In a fixed batch prompts are read alone, and the others in parts of its size: their shapes
        must not depend on each other.
        """
        row = np.zeros_like(self.read)  # by slot
        row[slots] = np.arange(len(slots))
        is_next = (counts == 1) & (self.read[slots] > 0)
        size = self.fixed_batch or 1 + slots[is_next].max(initial=0)
        windows = []
        for start in np.unique(slots[is_next] // size) * size:
            between = np.arange(start, start + size)
            windows.append(ReadWindow(between, row[between], np.ones_like(between)))

        prompts = (~is_next).nonzero()[0]
        groups = prompts[:, None] if self.fixed_batch else [prompts]
        windows += [ReadWindow(slots[own], own, counts[own]) for own in groups if len(own)]
        return windows

    def _read_window(self, tokens: Tensor, rows: Sequence[Row], window: ReadWindow) -> Tensor:
        """Read a window's tokens and return the features (n, dim) of the last of each slot."""
        start = self.read[window.slots][:, None]
        last = start + window.counts[:, None] - 1
        size = int(window.counts.max())
        if self.fixed_batch and size > 1:
            size = round_length(size, self.max_length)
        position = np.minimum(start + np.arange(size), self.width - 1)
        column = np.minimum(np.minimum(position, last), tokens.shape[1] - 1)
        length = self.width if self.fixed_batch else 1 + int(position.max())

        row = self._send(torch.from_numpy(window.rows))
        x = tokens[row[:, None], self._send(torch.from_numpy(column))]
        if not start.any():
            x = self.embed_prompts(x, [rows[i] for i in window.rows])
        is_first = np.array_equal(window.slots, np.arange(len(window.slots)))
        slots = None if is_first else self._send(torch.from_numpy(window.slots))
        opened = SlotWindow.open(slots, self._send(torch.from_numpy(position)), length)
        for cache in self.caches:
            cache.window = opened
        features = self.model(x, cache=self.caches).final
        last_read = self._send(torch.from_numpy(window.counts - 1))
        return features[torch.arange(len(x), device=self.device), last_read]

    def embed_prompts(self, tokens: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return the network's input for the tokens (n, L) of prompts: here the tokens."""
        return tokens


def build_evaluator(
    model: FeatureModel,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    fixed_batch: int | None = None,
    is_compiled: bool = False,
    uses_graphs: bool = True,
) -> ModelEvaluator:
    """Prepare a model for sampling: make it once, use it for many calls."""
    kind = CausalEvaluator if model.config.is_causal else ModelEvaluator
    return kind(
        model,
        device,
        dtype,
        fixed_batch=fixed_batch,
        is_compiled=is_compiled,
        uses_graphs=uses_graphs,
    )


def repeat_last(x: Tensor, size: int) -> Tensor:
    """Repeat the last row until there are as many as `size`."""
    return torch.cat([x, x[-1:].expand(size - len(x), *x.shape[1:])])


def build_head(
    head: Callable[[Tensor], Tensor], mask_id: int | None, *, is_cuda: bool
) -> Callable[[Tensor], Tensor]:
    """Return a head whose logits rule the mask out; a linear one is padded on a GPU."""
    if not isinstance(head, nn.Linear):

        def apply(features: Tensor) -> Tensor:
            logits = head(features)
            if mask_id is not None:
                logits[..., mask_id] = -torch.inf
            return logits

        return apply
    bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias.clone()
    if mask_id is not None:
        bias[mask_id] = -torch.inf
    missing = -len(bias) % ALIGN if is_cuda else 0
    weight = F.pad(head.weight, (0, 0, 0, missing))
    bias = F.pad(bias, (0, missing), value=-torch.inf)
    return lambda features: F.linear(features, weight, bias)


def check_finite(model: FeatureModel) -> None:
    """Raise if a parameter is not finite."""
    assert isinstance(model, nn.Module)
    broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if broken:
        problem = f"{len(broken)} parameters are not finite, for example {broken[0]}"
        raise ValueError(
            f"{problem}: training of this model has diverged; use an earlier checkpoint"
        )
