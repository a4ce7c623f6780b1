"""What a model loses when the anchor network's features are noisy, permuted, of another row or out of date.

Only the features between the two stages change. The noise on the text is the same for every perturbation, so
differences have small standard errors even where the values themselves do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.batches import RowDataset, is_valid
from adlm.diffusion.masking import ForwardProcess, corrupt, mask_tokens
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear, noise_level
from adlm.evaluate.results import ProgressCallback, ignore_progress
from adlm.evaluate.stats import estimate_ratio
from adlm.generate import Predictor
from adlm.likelihood import draw_position
from adlm.models.language_model import LanguageModel
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows
from adlm.text.templates import Layout

SCHEDULE = LogLinear()
LEVELS = 32  # of masking: features that are k levels stale saw the text at time t + k / LEVELS
MAX_TOKENS = {"cpu": 2048}  # in a batch: features of more do not fit a core's cache and are slower by a fifth
KINDS = ("none", "noise", "permuted", "other_row", "stale")


@dataclass(frozen=True)
class Perturbation:
    """A change of the anchor features before the bridge.

    none; noise: Gaussian, its norm `amount` times that of the features; permuted: over the row's positions; other_row:
    of another row with the same positions masked; stale: of the text `amount` masking levels earlier (in sampling:
    computed once for every `amount` evaluations).
    """

    kind: str = "none"
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"perturbation {self.kind!r} is not one of {', '.join(KINDS)}")
        if not 0 <= self.amount < math.inf:
            raise ValueError(f"the amount of {self.kind} must be finite and not negative, got {self.amount}")
        if self.kind == "stale" and (self.amount != int(self.amount) or self.amount < 1):
            raise ValueError(f"stale must be a whole number of steps, at least 1, got {self.amount}")

    def as_dict(self) -> dict[str, Any]:
        """The first keys of a JSON row."""
        name = f"{self.kind} {self.amount:g}" if self.kind in ("noise", "stale") else self.kind
        return {"change": name, "kind": self.kind, "amount": self.amount}


NONE = Perturbation()


def require_two_stages(model: LanguageModel, name: str) -> None:
    """Refuse models without an anchor network, and causal ones, which mask nothing."""
    if model.anchor is None or model.config.is_causal:
        reason = "has one stage and no anchor network" if model.anchor is None else "is causal and has no masked tokens"
        raise ValueError(f"{name} {reason}: give a two-stage masked model (trained with method=adlm)")


# Perturbations of features (B, L, dim). Random numbers follow from the seed, the row's number and its turn.


def add_noise(features: Tensor, scale: float, noise: Tensor) -> Tensor:
    """Add standard normal noise, scaled to an expected norm of about `scale` times that of each position."""
    size = features.float().norm(dim=-1, keepdim=True) / features.shape[-1] ** 0.5
    return (features.float() + scale * size * noise.to(features.device)).to(features.dtype)


def draw_normal(seed: int, rows: Sequence[int], turns: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """Draw standard normal numbers (n, *shape); fewer positions have the first of more."""
    parts = [
        np.random.default_rng([seed, row, turn]).standard_normal(shape, dtype=np.float32)
        for row, turn in zip(rows, turns, strict=True)
    ]
    return torch.from_numpy(np.stack(parts))


def permute_positions(
    features: Tensor, seed: int, rows: Sequence[int], turns: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Permute each row's first `length` positions; padding stays where it is."""
    places = np.tile(np.arange(features.shape[1]), (len(rows), 1))
    for i, (row, turn, length) in enumerate(zip(rows, turns, lengths, strict=True)):
        places[i, :length] = np.random.default_rng([seed, row, turn]).permutation(length)
    return features.gather(1, torch.from_numpy(places).to(features.device)[..., None].expand_as(features))


# The held-out bound.


def split_by_length(rows: RowDataset, batch: int, device: torch.device) -> list[Tensor]:
    """Split the numbers of all rows into batches of at most `batch`, from the shortest row to the longest."""
    fetched = (rows.fetch(number) for number in torch.arange(len(rows)).split(1024))
    lengths = torch.cat([torch.full((len(x0),), x0.shape[1]) if n is None else n for x0, n in fetched])
    order, batches = lengths.argsort(stable=True), list[Tensor]()
    while len(order):
        number = order[:batch]
        if device.type in MAX_TOKENS:  # the last row is the widest
            tokens = lengths[number] * torch.arange(1, len(number) + 1)
            number = number[: max(1, int((tokens <= MAX_TOKENS[device.type]).sum()))]
        batches.append(number)
        order = order[len(number) :]
    return batches


@torch.no_grad()
def measure_losses(
    model: LanguageModel,
    rows: RowDataset,
    perturbations: Sequence[Perturbation],
    *,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    on_batch: Callable[[NoisyRows], None] | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> list[dict[str, Any]]:
    """Measure the NELBO of held-out rows under each perturbation, and its cost against the first, the model itself.

    The model itself has the bound and the noise of `estimate_nll`. `on_batch` receives every batch under every
    noise, for other measurements on the same features.
    """
    require_two_stages(model, "this model")
    perturbations = [NONE, *(each for each in perturbations if each != NONE)]
    count, done = len(rows), 0
    if count < 2:
        raise ValueError(f"a standard error needs at least 2 rows, got {count}: give more text")
    folded = model.fold()
    nats, tokens = np.zeros((len(perturbations), count)), np.zeros(count)
    for number in split_by_length(rows, batch, model.embed.weight.device):
        for draw in range(draws):
            noisy = NoisyRows(folded, rows, number, draw, draws, seed)
            tokens[number] = noisy.lengths
            for place, each in enumerate(perturbations):
                nats[place, number] += noisy.loss(each).double().cpu().numpy() / draws
            if on_batch:
                on_batch(noisy)
        done += len(number)
        on_progress("rows", done, count)
    losses = []
    for each, total in zip(perturbations, nats, strict=True):
        values = flatten_estimates(nll=estimate_ratio(total, tokens), cost=estimate_ratio(total - nats[0], tokens))
        losses.append(each.as_dict() | values | {"tokens": int(tokens.sum())})
    return losses


def flatten_estimates(**estimates: tuple[float, float]) -> dict[str, float]:
    """Values and standard errors as `NAME` and `NAME_se`, as in JSON."""
    return {key: each for name, pair in estimates.items() for key, each in zip((name, f"{name}_se"), pair, strict=True)}


class NoisyRows:
    """Rows by number (n,) under one noise: the features of both stages, and the loss under every perturbation."""

    def __init__(
        self, model: LanguageModel, rows: RowDataset, number: Tensor, draw: int, draws: int, seed: int
    ) -> None:
        assert model.config.mask_id is not None
        self.mask_id = model.config.mask_id
        x0, lengths = rows.fetch(number)
        self.lengths = torch.full((len(x0),), x0.shape[1]) if lengths is None else lengths
        x0 = x0[:, : int(self.lengths.max())]
        valid = None if bool((self.lengths == x0.shape[1]).all()) else is_valid(self.lengths, x0.shape[1])
        self.model, self.rows, self.number, self.draw, self.seed = model, rows, number, draw, seed
        process, self.rng = ForwardProcess(self.mask_id, SCHEDULE), CounterRng.from_seed(seed, number)
        index = draw_position(number, len(rows), draw, draws, seed)
        self.on_host = corrupt(x0, process, self.rng, draw, index=index, total=len(rows), valid=valid)
        self.noisy = self.on_host.to(model.embed.weight.device)
        self.anchor = self._run_anchor(self.noisy.xt, self.noisy.noise_level)

    @cached_property
    def final(self) -> Tensor:
        """The denoiser's unperturbed features."""
        return self.model.denoise_features(self.anchor, self.noisy.noise_level, valid=self.noisy.valid)

    @cached_property
    def _normal(self) -> Tensor:  # shared by all amounts of noise
        return draw_normal(self.seed, *self._row_turns, (self.anchor.shape[1], self.anchor.shape[2])).to(
            self.anchor.device
        )

    @property
    def _row_turns(self) -> tuple[list[int], list[int]]:
        return self.number.tolist(), [self.draw] * len(self.number)

    def _run_anchor(self, tokens: Tensor, level: Tensor) -> Tensor:
        device = self.noisy.xt.device
        return self.model.anchor_features(tokens.to(device), level.to(device), valid=self.noisy.valid)

    def perturb_anchor(self, each: Perturbation) -> Tensor:
        """The anchor network's features under a perturbation."""
        if each.kind == "noise":
            return add_noise(self.anchor, each.amount, self._normal)
        if each.kind == "permuted":
            return permute_positions(self.anchor, self.seed, *self._row_turns, self.lengths.tolist())
        if each.kind == "other_row":
            other, lengths = self.rows.fetch((self.number + 1) % len(self.rows))
            period = torch.full((len(other),), other.shape[1]) if lengths is None else lengths
            other = other.gather(1, torch.arange(self.on_host.x0.shape[1]) % period[:, None])  # a shorter row repeats
            xt = torch.where(self.on_host.xt == self.mask_id, self.mask_id, other)
            return self._run_anchor(xt, self.noisy.noise_level)
        if each.kind == "stale":
            earlier = (self.on_host.t + each.amount / LEVELS).clamp(max=1.0)
            # The same random numbers: what is masked now was masked then.
            u = self.rng.uniform(self.draw, self.on_host.x0.shape[1], Purpose.MASK)
            padding = None if self.on_host.valid is None else ~self.on_host.valid
            xt = mask_tokens(self.on_host.x0, 1 - SCHEDULE.alpha(earlier.double()), u, self.mask_id, padding)
            return self._run_anchor(xt, noise_level(SCHEDULE, earlier))
        return self.anchor

    def loss(self, each: Perturbation) -> Tensor:
        """Each row's nats (n,)."""
        final = self.final
        if each != NONE:
            anchor = self.perturb_anchor(each)
            final = self.model.denoise_features(anchor, self.noisy.noise_level, valid=self.noisy.valid)
        return diffusion_loss(final, self.model.head, self.noisy, mask_id=self.mask_id).row_nll


# Texts.


class PerturbedPredictor(Predictor):
    """A predictor with perturbed anchor features, for one row at a time: turns and stale features are the row's own."""

    def __init__(self, lm: LM, perturbation: Perturbation, seed: int) -> None:
        require_two_stages(lm.model, lm.name)
        if perturbation.kind == "other_row":
            raise ValueError("other_row: a text that is being generated has no other row; use noise, permuted or stale")
        super().__init__(lm.model, lm.device, is_compiled=False)
        self.perturbation, self.seed = perturbation, seed

    def start_row(self, number: int) -> None:
        """Begin a row; its noise follows from this number and its count of evaluations."""
        self.number, self.turn = number, 0

    def predict(self, tokens: Tensor, noise_level: Tensor, valid: Tensor | None) -> Tensor:
        """The denoiser's features (1, L, dim)."""
        assert len(tokens) == 1
        kind, amount, row_turns = self.perturbation.kind, self.perturbation.amount, ([self.number], [self.turn])
        level = noise_level.to(self.device) if self.config.time_conditioning else None
        if kind != "stale" or self.turn % int(amount) == 0:
            self.anchor = self.model.anchor_features(tokens, level, valid=valid)
        self.turn += 1
        anchor = self.anchor
        if kind == "noise":
            anchor = add_noise(anchor, amount, draw_normal(self.seed, *row_turns, (anchor.shape[1], anchor.shape[2])))
        elif kind == "permuted":
            anchor = permute_positions(anchor, self.seed, *row_turns, [anchor.shape[1]])
        return self.model.denoise_features(anchor, level, valid=valid)


@dataclass(frozen=True)
class TracedRow:
    """A generated row, and the step in which each of its tokens was revealed for the last time."""

    row: GeneratedRow
    steps: NDArray[np.int64]

    @property
    def is_generated(self) -> NDArray[np.bool_]:
        """Which tokens were generated and stand before the end of the text."""
        layout = self.row.layout
        is_generated, last = ~np.array(layout.is_fixed), layout.spans[-1]
        ends = [i for i in range(last.start, last.end) if self.row.ids[i] == layout.tokenizer.eos_id]
        if layout.may_end and ends:
            is_generated[ends[0] :] = False
        return is_generated


def sample_rows(lm: LM, request: GenerationRequest, perturbation: Perturbation = NONE) -> Iterator[TracedRow]:
    """Generate the rows of `lm.generate_rows(request)`, or the same with perturbed anchor features."""
    if perturbation == NONE:
        for first in range(0, len(request.rows), request.batch):
            yield from _trace_rows(lm.predictor, request, request.rows[first : first + request.batch])
        return
    predictor = PerturbedPredictor(lm, perturbation, request.seed)
    for layout, number in request.rows:
        predictor.start_row(number)
        yield from _trace_rows(predictor, request, [(layout, number)])


def _trace_rows(
    predictor: Predictor, request: GenerationRequest, rows: Sequence[tuple[Layout, int]]
) -> Iterator[TracedRow]:
    """Generate rows in one batch."""
    steps = torch.zeros(len(rows), max(len(layout) for layout, _ in rows), dtype=torch.int64)
    for frame in denoise_rows(predictor, request, rows):
        steps[(frame.changed & ~frame.is_masked).cpu()] = frame.step
    for (layout, _), ids, nfe, row_steps in zip(rows, frame.tokens.tolist(), frame.nfe.tolist(), steps, strict=True):
        yield TracedRow(GeneratedRow(layout, ids[: len(layout)], nfe), row_steps[: len(layout)].numpy())
