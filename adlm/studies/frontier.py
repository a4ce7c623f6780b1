"""Quality against the number of evaluations, time and entropy, over samplers, steps, temperatures and nuclei.

One point is one way of writing: `n` texts of it, judged and timed. Points that would be the same are one: a causal
model has no steps, an order takes at most a step a token, some samplers have no steps or no nucleus of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.evaluate.provenance import hardware_name
from adlm.evaluate.zeroshot import weights_hash
from adlm.methods import ALIASES, SAMPLERS, named
from adlm.studies.ledger import Ledger
from adlm.studies.writing import Assessor, TextFigures, takes_steps
from adlm.text.lm import LM, GeneratedRow

LEFT_TO_RIGHT = "left_to_right"
REPEATS = 3  # timings of a point at least


@dataclass(frozen=True)
class Setting:
    """A way of writing."""

    sampler: str
    steps: int | None  # None: the sampler has none of its own
    temperature: float
    top_p: float

    def how(self) -> dict[str, Any]:
        """As `LM.generate` takes it."""
        found: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        if self.sampler != LEFT_TO_RIGHT:
            found["sampler"] = self.sampler
        return found if self.steps is None else found | {"steps": self.steps}

    @property
    def name(self) -> str:
        steps = "" if self.steps is None else f", {self.steps} steps"
        return f"{self.sampler}{steps}, T {self.temperature:g}, p {self.top_p:g}"


@dataclass(frozen=True)
class Point:
    """A way of writing and what came of it. Never a Gen-PPL without its entropy; ± is a standard error over texts."""

    model: str
    method: str
    sampler: str
    steps: int | None
    temperature: float
    top_p: float
    nfe: float  # evaluations of the network for a text, on average
    seconds: float  # for a text, `batch` of them at a time, on average over timings
    seconds_sd: float  # between timings
    timings: int
    quality: TextFigures
    is_pareto: bool = False

    @property
    def label(self) -> str:
        return Setting(self.sampler, self.steps, self.temperature, self.top_p).name

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        found = asdict(self)
        return found | found.pop("quality")


def grid(
    lm: LM,
    length: int,
    samplers: Sequence[str],
    steps: Sequence[int],
    temperatures: Sequence[float],
    top_ps: Sequence[float],
) -> list[Setting]:
    """The ways of writing that differ, in the order of the lists."""
    for name, values in (("samplers", samplers), ("steps", steps), ("temperatures", temperatures), ("top-p", top_ps)):
        if not values:
            raise ValueError(f"there are no {name}: give at least one")
    found: dict[Setting, None] = {}
    for sampler in [LEFT_TO_RIGHT] if lm.row_format.is_causal else samplers:
        for count in steps:
            for temperature in temperatures:
                for top_p in top_ps:
                    found[_collapsed(Setting(sampler, count, temperature, top_p), length)] = None
    return list(found)


def _collapsed(asked: Setting, length: int) -> Setting:
    """The setting with what makes no difference at its usual value."""
    if asked.temperature == 0:  # the likeliest token alone
        asked = replace(asked, top_p=1.0)
    if asked.sampler == LEFT_TO_RIGHT:
        return replace(asked, steps=None)
    factory, has_steps = named(SAMPLERS, asked.sampler, "sampler"), takes_steps(asked.sampler)
    asked = replace(asked, sampler=ALIASES.get(asked.sampler, asked.sampler))
    if not has_steps:
        return replace(asked, steps=None)
    made = factory(asked.steps)
    if isinstance(made, Order):
        return replace(asked, steps=min(asked.steps or length, length))
    assert isinstance(made, Plan)
    return asked if made.nucleus else replace(asked, top_p=1.0)


def pareto(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of (n, k) costs no other beats: none is as good in all and better in one. Equal points stay together."""
    no_worse = (costs[:, None, :] <= costs[None, :, :]).all(-1)
    better = (costs[:, None, :] < costs[None, :, :]).any(-1)
    return np.logical_not((no_worse & better).any(0))


def marked(points: Sequence[Point], reference: TextFigures | None = None) -> list[Point]:
    """The points with those marked that nothing beats in evaluations, Gen-PPL and entropy together.

    More entropy is better up to the held-out text's, if that is known: beyond it is noise, no variety.
    """
    if not points:
        return []
    most = math.inf if reference is None else reference.entropy
    columns = [[point.nfe for point in points], [-min(point.quality.entropy, most) for point in points]]
    if all(point.quality.gen_ppl is not None for point in points):
        columns.append([point.quality.gen_ppl or math.nan for point in points])
    best = pareto(np.array(columns, dtype=np.float64).T)
    return [replace(point, is_pareto=bool(is_best)) for point, is_best in zip(points, best, strict=True)]


@dataclass(frozen=True)
class Amount:
    """How much is written for a point, and how."""

    n: int = 64
    length: int = 128
    seed: int = 0
    batch: int = 16
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        for name, value, least in (("n", self.n, 2), ("batch", self.batch, 1), ("repeats", self.repeats, 2)):
            if value < least:
                raise ValueError(f"{name} must be at least {least} for a mean with its spread, got {value}")


def measure_points(
    lm: LM,
    settings: Sequence[Setting],
    amount: Amount,
    assess: Assessor,
    *,
    ledger: Ledger | None = None,
    on_texts: Callable[[int], None] | None = None,
) -> Iterator[Point]:
    """A model's points, one after the other; those that the ledger has are not measured again."""
    ledger, weights, is_warm = ledger or Ledger(None), weights_hash(lm.model), False
    for setting in settings:
        depends = depends_on(lm, setting, amount, assess, weights)
        kept = ledger.get(depends)
        if kept is None:
            # The first texts of a process take longer, whatever they are; on a GPU the first of every setting, which
            # may have batch sizes that no graph was captured of.
            if not is_warm or lm.device.type == "cuda":
                _write(lm, setting, amount, min(amount.batch, amount.n), seed=amount.seed)
                is_warm = True
            kept = asdict(_measured(lm, setting, amount, assess, on_texts))
            ledger.put(depends, kept)
        elif on_texts:
            on_texts(amount.n)
        yield Point(**(kept | {"quality": TextFigures(**kept["quality"])}))


def depends_on(lm: LM, setting: Setting, amount: Amount, assess: Assessor, weights: str) -> dict[str, Any]:
    """Everything that a point's figures follow from; the machine among it, because time is one of them."""
    return {
        "model": lm.name,
        "weights": weights,
        **asdict(setting),
        **asdict(amount),
        "assessor": assess.settings,
        "device": str(lm.device),
        "hardware": hardware_name(lm.device),
        "threads": torch.get_num_threads(),
    }


def settings_of(models: Sequence[LM], amount: Amount, assess: Assessor) -> dict[str, Any]:
    """What the figures of several models depend on, said once."""
    told = [
        {"model": lm.name, "method": lm.method, "step": lm.step, "weights_sha256": weights_hash(lm.model)}
        | {"parameters": sum(p.numel() for p in lm.model.parameters())}
        for lm in models
    ]
    timing = "whole batches, after one that is not counted (on a GPU: of every setting); causal: a key-value cache"
    here = {"device": str(models[0].device), "threads": torch.get_num_threads(), "timing": timing}
    return {"models": told, **asdict(amount), **assess.settings, **here}


def _measured(
    lm: LM, setting: Setting, amount: Amount, assess: Assessor, on_texts: Callable[[int], None] | None
) -> Point:
    rows: list[GeneratedRow] = []
    seconds: list[float] = []
    size = min(amount.batch, amount.n)
    for first in range(0, amount.n, size):
        count = min(size, amount.n - first)
        written, took = _write(lm, setting, amount, count, seed=amount.seed, first=first)
        rows += written
        if count == size:  # a smaller batch takes longer for a text
            seconds.append(took / count)
        if on_texts:
            on_texts(count)
    while len(seconds) < amount.repeats:  # the same texts again, for the time alone
        seconds.append(_write(lm, setting, amount, size, seed=amount.seed)[1] / size)
    return Point(
        lm.name,
        lm.method,
        **asdict(setting),
        nfe=float(np.mean([row.nfe for row in rows])),
        seconds=float(np.mean(seconds)),
        seconds_sd=float(np.std(seconds, ddof=1)),
        timings=len(seconds),
        quality=assess([row.text for row in rows]),
    )


def _write(
    lm: LM, setting: Setting, amount: Amount, count: int, *, seed: int, first: int = 0
) -> tuple[list[GeneratedRow], float]:
    """Texts number `first` and following of a seed, in one batch, and the seconds that they took."""
    job = lm.build_request(length=amount.length, n=first + count, seed=seed, batch=count, **setting.how())
    _synchronize(lm)
    began = time.perf_counter()
    rows = list(lm.generate_rows(job, first))
    _synchronize(lm)
    return rows, time.perf_counter() - began


def _synchronize(lm: LM) -> None:
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def counted_by(models: Sequence[LM]) -> Tokenizer:
    """The tokenizer whose tokens entropy and repetition are counted in: the first model's, for all alike."""
    if not models:
        raise ValueError("there is no model to measure: give at least one")
    return models[0].tokenizer
