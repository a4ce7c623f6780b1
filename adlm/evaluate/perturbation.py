"""What a model loses when the anchor network's features are noisy, permuted or out of date.

The noise on the text is the same for every perturbation, so differences have small standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from adlm.evaluate.data import fetch_rows, iterate_rows
from adlm.evaluate.stats import estimate_ratio, flatten_estimates
from adlm.generate import Predictor
from adlm.likelihood import draw_position, group_rows
from adlm.models.language_model import LanguageModel
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows
from adlm.text.templates import Layout

SCHEDULE = LogLinear()
LEVELS = 32  # of masking: features that are k levels stale saw the text at time t + k / LEVELS


@dataclass(frozen=True)
class Perturbation:
    """A change of the anchor features before the bridge.

    none; noise: Gaussian, its norm `amount` times that of the features; permuted: over the row's positions; stale: of
    the text `amount` masking levels earlier (in sampling: computed once for every `amount` evaluations).
    """

    kind: str = "none"
    amount: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf:
            raise ValueError(f"the amount of {self.kind} must be finite and not negative, got {self.amount}")
        if self.kind == "stale" and (self.amount != int(self.amount) or self.amount < 1):
            raise ValueError(f"stale must be a whole number of steps, at least 1, got {self.amount}")

    def as_dict(self) -> dict[str, Any]:
        """The first keys of a JSON row."""
        name = f"{self.kind} {self.amount:g}" if self.kind in ("noise", "stale") else self.kind
        return {"perturbation": name, "kind": self.kind, "amount": self.amount}

    def apply(
        self, features: Tensor, seed: int, rows: Sequence[int], turns: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        """Add noise to features (n, L, dim) or permute their first `lengths`, at random by seed, number and turn."""
        if self.kind == "noise":
            noise = draw_normal(seed, tuple(rows), tuple(turns), tuple(features.shape[1:])).to(features.device)
            size = features.float().norm(dim=-1, keepdim=True) / features.shape[-1] ** 0.5
            return (features.float() + self.amount * size * noise).to(features.dtype)
        if self.kind == "permuted":
            places = np.tile(np.arange(features.shape[1]), (len(rows), 1))
            for place, row, turn, length in zip(places, rows, turns, lengths, strict=True):
                place[:length] = np.random.default_rng([seed, row, turn]).permutation(length)
            return features.gather(1, torch.from_numpy(places).to(features.device)[..., None].expand_as(features))
        return features


NONE = Perturbation()


@lru_cache(maxsize=1)  # all amounts of noise share it
def draw_normal(seed: int, rows: tuple[int, ...], turns: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers (n, *shape); fewer positions have the first of more."""
    streams = [np.random.default_rng([seed, *pair]) for pair in zip(rows, turns, strict=True)]
    return torch.from_numpy(np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in streams]))


def check_two_stages(model: LanguageModel, name: str) -> None:
    """Refuse models without an anchor network, and causal ones, which mask nothing."""
    if model.anchor is None or model.config.is_causal:
        reason = "has one stage and no anchor network" if model.anchor is None else "is causal and has no masked tokens"
        raise ValueError(f"{name} {reason}: give a two-stage masked model (trained with method=adlm)")


# The held-out bound.


@torch.no_grad()
def measure_losses(
    model: LanguageModel,
    rows: RowDataset,
    perturbations: Sequence[Perturbation],
    *,
    draws: int = 1,
    seed: int = 0,
    batch: int = 16,
    on_batch: Callable[[NoisyRows], None] = lambda noisy: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Measure the NELBO of held-out rows under each perturbation, and its cost against the first, the model itself.

    The model itself has the bound and the noise of `estimate_nll`. `on_batch` receives every batch under every noise.
    """
    perturbations = [NONE, *(each for each in perturbations if each != NONE)]
    group_rows(len(rows))  # raises where there are too few for a standard error
    folded = model.fold()
    nats, tokens = np.zeros((len(perturbations), len(rows))), np.concatenate([size for _, size in iterate_rows(rows)])
    order = np.argsort(tokens, kind="stable")  # rows of similar length together
    for start in range(0, len(order), batch):
        index = order[start : start + batch]
        for draw in range(draws):
            noisy = NoisyRows(folded, rows, torch.from_numpy(index), draw, draws, seed)
            for place, each in enumerate(perturbations):
                nats[place, index] += noisy.loss(each).cpu().double().numpy() / draws
            on_batch(noisy)
        on_progress(start + len(index), len(rows))
    losses = []
    for each, total in zip(perturbations, nats, strict=True):
        values = flatten_estimates(nll=estimate_ratio(total, tokens), cost=estimate_ratio(total - nats[0], tokens))
        losses.append(each.as_dict() | values | {"tokens": int(tokens.sum())})
    return losses


class NoisyRows:
    """Rows by number (n,) under one noise: the features of both stages, and the loss under every perturbation."""

    def __init__(
        self, model: LanguageModel, rows: RowDataset, number: Tensor, draw: int, draws: int, seed: int
    ) -> None:
        assert model.config.mask_id is not None
        self.model, self.number, self.draw, self.seed = model, number, draw, seed
        self.mask_id, self.rng = model.config.mask_id, CounterRng.from_seed(seed, number)
        x0, self.lengths = fetch_rows(rows, number)
        x0 = x0[:, : int(self.lengths.max())]
        valid = None if bool((self.lengths == x0.shape[1]).all()) else is_valid(self.lengths, x0.shape[1])
        process, index = ForwardProcess(self.mask_id, SCHEDULE), draw_position(number, len(rows), draw, draws, seed)
        self.on_host = corrupt(x0, process, self.rng, draw, index=index, total=len(rows), valid=valid)
        self.noisy = self.on_host.to(model.embed.weight.device)
        self.anchor = self.run_anchor(self.noisy.xt, self.noisy.noise_level)
        self.final = self.run_denoiser(self.anchor)

    def run_anchor(self, tokens: Tensor, level: Tensor) -> Tensor:
        """The anchor network's features of other tokens in these rows."""
        device = self.noisy.xt.device
        return self.model.anchor_features(tokens.to(device), level.to(device), valid=self.noisy.valid)

    def run_denoiser(self, anchor: Tensor) -> Tensor:
        """The denoiser's features for features of the anchor network."""
        return self.model.denoise_features(anchor, self.noisy.noise_level, valid=self.noisy.valid)

    def perturb_anchor(self, each: Perturbation) -> Tensor:
        """The anchor network's features under a perturbation."""
        x0, valid = self.on_host.x0, self.on_host.valid
        if each.kind == "stale":
            earlier = (self.on_host.t + each.amount / LEVELS).clamp(max=1.0)
            # The same random numbers: what is masked now was masked then.
            u, padding = self.rng.uniform(self.draw, x0.shape[1], Purpose.MASK), None if valid is None else ~valid
            tokens = mask_tokens(x0, 1 - SCHEDULE.alpha(earlier.double()), u, self.mask_id, padding)
            return self.run_anchor(tokens, noise_level(SCHEDULE, earlier))
        turns = [self.draw] * len(self.number)
        return each.apply(self.anchor, self.seed, self.number.tolist(), turns, self.lengths.tolist())

    def loss(self, each: Perturbation) -> Tensor:
        """Each row's nats (n,)."""
        final = self.final if each == NONE else self.run_denoiser(self.perturb_anchor(each))
        return diffusion_loss(final, self.model.head, self.noisy, mask_id=self.mask_id).row_nll


# Texts.


class PerturbedPredictor(Predictor):
    """A predictor with perturbed anchor features, for one batch after another: see `begin_batch`."""

    def __init__(self, lm: LM, perturbation: Perturbation, seed: int) -> None:
        super().__init__(lm.model, lm.device, is_compiled=False)
        self.perturbation, self.seed = perturbation, seed

    def begin_batch(self, rows: Sequence[tuple[Layout, int]]) -> None:
        """Take the numbers and lengths of a batch; a row's count of evaluations and stale features are its own."""
        self.numbers = torch.tensor([number for _, number in rows])
        self.lengths = torch.tensor([len(layout) for layout, _ in rows])
        shape = (len(rows), int(self.lengths.max()), self.config.dim)
        self.turns, self.anchor = torch.zeros_like(self.numbers), self.head[0].new_zeros(shape)

    def predict(
        self, tokens: Tensor, noise_level: Tensor, valid: Tensor | None, places: Tensor | None = None
    ) -> Tensor:
        """The denoiser's features (n, L, dim); noise follows from a row's number and its count of evaluations."""
        assert places is not None
        each, level = self.perturbation, noise_level.to(self.device) if self.config.time_conditioning else None
        turns, at = self.turns[places], places.to(self.device)
        due = (turns % (int(each.amount) if each.kind == "stale" else 1) == 0).nonzero()[:, 0].to(self.device)
        if len(due):
            some = [None if x is None else x[due] for x in (level, valid)]
            self.anchor[at[due]] = self.model.anchor_features(tokens[due], some[0], valid=some[1])
        self.turns[places] += 1
        numbers, lengths = self.numbers[places].tolist(), self.lengths[places].tolist()
        anchor = each.apply(self.anchor[at], self.seed, numbers, turns.tolist(), lengths)
        return self.model.denoise_features(anchor, level, valid=valid)


@dataclass(frozen=True)
class TracedRow(GeneratedRow):
    """A generated row, and the step in which each of its tokens was revealed for the last time."""

    steps: NDArray[np.int64]

    @property
    def is_generated(self) -> NDArray[np.bool_]:
        """Which tokens were generated and stand before the end of the text."""
        is_generated, last = ~np.array(self.layout.is_fixed), self.layout.spans[-1]
        hole, eos_id = self.ids[last.start : last.end], self.layout.tokenizer.eos_id
        if self.layout.may_end and eos_id in hole:
            is_generated[last.start + hole.index(eos_id) :] = False
        return is_generated


def sample_rows(lm: LM, request: GenerationRequest, perturbation: Perturbation = NONE) -> Iterator[TracedRow]:
    """Generate the rows of `lm.run_request(request)`, or the same with perturbed anchor features."""
    perturbed = None if perturbation == NONE else PerturbedPredictor(lm, perturbation, request.config.seed)
    batch = 1 if perturbed and lm.deterministic else request.config.batch
    for first in range(0, len(request.rows), batch):
        rows = request.rows[first : first + batch]
        if perturbed:
            perturbed.begin_batch(rows)
        steps = torch.zeros(len(rows), max(len(layout) for layout, _ in rows), dtype=torch.int64)
        for frame in denoise_rows(perturbed or lm.predictor, request, rows):
            steps[(frame.changed & ~frame.is_masked).cpu()] = frame.step
        for (layout, _), ids, nfe, own in zip(rows, frame.tokens.tolist(), frame.nfe.tolist(), steps, strict=True):
            yield TracedRow(layout, ids[: len(layout)], nfe, own[: len(layout)].numpy())
