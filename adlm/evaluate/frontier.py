"""Quality against network evaluations, time and entropy, over samplers, steps, temperatures and nuclei.

A point is one setting of the sampler: `n` texts, measured and timed. Settings that give the same texts are one point: a
causal model has no steps, an order takes at most one step a token, some samplers have no steps or no nucleus.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.evaluate.cache import hash_settings, open_cache
from adlm.evaluate.data import load_eval_data
from adlm.evaluate.provenance import collect_provenance, hardware_name, hash_weights
from adlm.evaluate.results import Column, Estimate, EvalResult, ProgressCallback, Table, ignore_progress
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.sampling import takes_steps
from adlm.evaluate.scorer import ScoringModel, load_scorer
from adlm.evaluate.scoring import BATCH
from adlm.methods import ALIASES, SAMPLERS, look_up
from adlm.text.lm import LM, GeneratedRow

LEFT_TO_RIGHT = "left_to_right"
Point = dict[str, Any]  # the flat JSON form: model, setting, nfe, seconds, and the metrics with NAME_se
NOTE = (
    "★: no other point has as few evaluations (NFE), as low a Gen-PPL and as high an entropy (up to that of the "
    "held-out text) and is better in one of them. A low Gen-PPL at a low entropy is repetition. ± is a standard error "
    "over texts; of seconds, the standard deviation over timings. Entropy grows with the tokens in a text: a model "
    "that ends texts early has less."
)


@dataclass(frozen=True)
class SamplerSetting:
    """A sampler with its steps, temperature and nucleus."""

    sampler: str
    steps: int | None  # None: the sampler has no steps
    temperature: float
    top_p: float

    def as_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `LM.generate`."""
        return {name: value for name, value in asdict(self).items() if value not in (None, LEFT_TO_RIGHT)}


def frontier(
    models: LM | Sequence[LM],
    *,
    scorer: str | Path | ScoringModel | None = None,
    reference: str | Path | None = None,
    samplers: Sequence[str] = ("ancestral", "remask_loop", "confidence"),
    steps: Sequence[int] = (16, 32, 64, 128),
    temperatures: Sequence[float] = (1.0,),
    top_p: Sequence[float] = (1.0, 0.9),
    n: int = 64,
    length: int = 128,
    seed: int = 0,
    batch: int = 16,
    repeats: int = 3,
    window: int | None = None,
    scorer_batch: int = BATCH,
    out: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure Gen-PPL (with a `scorer`), entropy, NFE and time of every combination of sampler settings.

    `reference` is held-out text, measured like the samples. `out` keeps the points; the same call resumes there.
    """
    models = [models] if isinstance(models, LM) else list(models)
    if not models:
        raise ValueError("frontier measures at least one model, got none")
    for name, value, smallest in (("n", n, 2), ("batch", batch, 1), ("repeats", repeats, 2)):
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")
    size = {"n": n, "length": length, "seed": seed, "batch": batch, "repeats": repeats}
    grids = [build_grid(lm, length, samplers, steps, temperatures, top_p) for lm in models]
    for lm, grid in zip(models, grids, strict=True):  # wrong settings are refused before anything runs
        for setting in grid:
            lm.build_request(length=length, n=1, seed=seed, **setting.as_arguments())
    tokenizer = models[0].tokenizer  # counts the tokens of all models
    texts, about = draw_reference_texts(reference, tokenizer, length, n) if reference else (None, None)
    if isinstance(scorer, str | Path):
        scorer = load_scorer(scorer, device=models[0].device)
    measure = TextScorer(tokenizer, scorer, window, scorer_batch)
    baseline = measure(texts).as_row() if texts else None
    machine = {"device": str(models[0].device), "threads": torch.get_num_threads()}
    cache, points, described = open_cache(out), list[Point](), list[dict[str, Any]]()
    for lm, grid in zip(models, grids, strict=True):
        about_model = {"model": lm.name, "method": lm.method, "step": lm.step, "weights_sha256": hash_weights(lm.model)}
        described.append(about_model | {"parameters": sum(each.numel() for each in lm.model.parameters())})
        is_warm = False
        for setting in grid:
            on_progress(f"{lm.name}: {setting.sampler}", len(points), sum(map(len, grids)))
            # The machine is part of the key, because time is one of the metrics.
            parts = (described[-1], asdict(setting), size, measure.settings, machine, hardware_name(lm.device))
            key = f"point-{hash_settings(parts)}"
            if key not in cache:
                arguments = {"length": length, "seed": seed, **setting.as_arguments()}
                # The first texts of a process take longer; on a GPU the first of every setting, which may have batch
                # sizes that no graph was captured of.
                if not is_warm or lm.device.type == "cuda":
                    time_batch(lm, arguments, min(batch, n))
                    is_warm = True
                point = {"model": lm.name, "method": lm.method, **asdict(setting)}
                cache.put(key, point | measure_point(lm, arguments, n, batch, repeats, measure))
                cache.flush()
            points.append(cache.get(key))
    cache.merge()
    points = mark_pareto(points, baseline)
    settings = {"models": described, **size, **measure.settings, **machine, "window": window, "reference": about}
    settings |= {"samplers": samplers, "steps": steps, "temperatures": temperatures, "top_ps": top_p}
    settings |= {"timing": "whole batches after an untimed one (GPU: one for every setting); causal: a key-value cache"}
    warnings = []
    if short := sum(point["short"] for point in points):
        every = short + sum(point["texts"] for point in points)
        warnings = [f"{short} of {every} texts have fewer than four tokens: they count in NFE and time only"]
    metrics = {"points": points, "reference": baseline}
    tables, figures = [build_table(points, baseline, settings)], {"frontier": {"kind": "frontier", **metrics}}
    return EvalResult("frontier", metrics, settings, collect_provenance(models[0].device), tables, warnings, figures)


def build_table(points: Sequence[Point], reference: Point | None, settings: dict[str, Any]) -> Table:
    """One row for each point, the held-out text last."""
    from adlm.evaluate.plots import shorten_name

    def format_metrics(row: Point) -> list[Any]:
        names = ("gen_ppl", "entropy", "distinct_2", "repetition_4")
        return [
            row["tokens"],
            *(row[name] if row[name] is None else Estimate(row[name], row[f"{name}_se"]) for name in names),
        ]

    columns = [Column(name, is_text=True) for name in ("", "model", "sampler")]
    columns += [Column("steps"), Column("T"), Column("p"), Column("NFE", 1), Column("s/text", is_optional=True)]
    columns += [Column("tokens", 1, is_optional=True), Column("Gen-PPL", 1), Column("entropy")]
    columns += [Column("distinct-2", is_optional=True), Column("repeated-4", is_optional=True)]
    rows: list[list[Any]] = []
    for point in points:
        title = ["★" if point["is_pareto"] else "", shorten_name(point["model"]), point["sampler"], point["steps"]]
        speed = f"{point['seconds']:.3g} ± {point['seconds_sd']:.1g}"
        rows.append([*title, f"{point['temperature']:g}", f"{point['top_p']:g}", point["nfe"], speed])
        rows[-1] += format_metrics(point)
    if reference is not None:
        rows.append(["", "held-out text", "", *[None] * 5, *format_metrics(reference)])
    size = f"Batches of {min(settings['batch'], settings['n'])} texts on {settings['device']}"
    notes = [f"{NOTE} {size}, {settings['threads']} threads."]
    notes += [] if settings["judge"] else ["There is no Gen-PPL without a scoring model (--judge)."]
    return Table(columns, rows, notes=notes)


def build_grid(
    lm: LM,
    length: int,
    samplers: Sequence[str],
    steps: Sequence[int],
    temperatures: Sequence[float],
    top_p: Sequence[float],
) -> list[SamplerSetting]:
    """The settings that differ, in the order of the lists."""
    for name, values in (("samplers", samplers), ("steps", steps), ("temperatures", temperatures), ("top_p", top_p)):
        if not values:
            raise ValueError(f"{name} is empty: give at least one")
    names = [LEFT_TO_RIGHT] if lm.row_format.is_causal else samplers
    every = starmap(SamplerSetting, product(names, steps, temperatures, top_p))
    return list(dict.fromkeys(simplify_setting(setting, length) for setting in every))


def simplify_setting(setting: SamplerSetting, length: int) -> SamplerSetting:
    """The setting with everything that makes no difference at its default."""
    if setting.temperature == 0:  # greedy
        setting = replace(setting, top_p=1.0)
    if setting.sampler == LEFT_TO_RIGHT:
        return replace(setting, steps=None)
    factory, has_steps = look_up(SAMPLERS, setting.sampler, "sampler"), takes_steps(setting.sampler)
    setting = replace(setting, sampler=ALIASES.get(setting.sampler, setting.sampler))
    if not has_steps:
        return replace(setting, steps=None)
    sampler = factory(setting.steps)
    if isinstance(sampler, Order):
        return replace(setting, steps=min(setting.steps or length, length))
    assert isinstance(sampler, Plan)
    return setting if sampler.nucleus else replace(setting, top_p=1.0)


def measure_point(
    lm: LM, arguments: dict[str, Any], n: int, batch: int, repeats: int, measure: TextScorer
) -> dict[str, Any]:
    """Generate `n` texts with these arguments of `LM.generate`, measure and time them."""
    rows: list[GeneratedRow] = []
    seconds: list[float] = []
    batch = min(batch, n)
    for first in range(0, n, batch):
        count = min(batch, n - first)
        generated, duration = time_batch(lm, arguments, count, first)
        rows += generated
        if count == batch:  # a smaller batch takes longer for a text
            seconds.append(duration / count)
    while len(seconds) < repeats:  # the same texts again, for the time alone
        seconds.append(time_batch(lm, arguments, batch)[1] / batch)
    return {
        "nfe": float(np.mean([row.nfe for row in rows])),  # evaluations of the network for a text
        "seconds": float(np.mean(seconds)),  # for a text
        "seconds_sd": float(np.std(seconds, ddof=1)),
        "timings": len(seconds),
        **measure([row.text for row in rows]).as_row(),
    }


def time_batch(lm: LM, arguments: dict[str, Any], count: int, first: int = 0) -> tuple[list[GeneratedRow], float]:
    """Generate texts from number `first` on in one batch; the texts and the seconds that it takes."""
    request = lm.build_request(n=first + count, batch=count, **arguments)
    synchronize = torch.cuda.synchronize if lm.device.type == "cuda" else lambda device: None
    synchronize(lm.device)
    start = time.perf_counter()
    rows = list(lm.generate_rows(request, first))
    synchronize(lm.device)
    return rows, time.perf_counter() - start


def find_pareto(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of (n, k) costs no other beats: none is as good in all and better in one. Equal points stay together."""
    no_worse = (costs[:, None, :] <= costs[None, :, :]).all(-1)
    better = (costs[:, None, :] < costs[None, :, :]).any(-1)
    return np.logical_not((no_worse & better).any(0))


def mark_pareto(points: Sequence[Point], reference: Point | None = None) -> list[Point]:
    """The points with `is_pareto`: not beaten in evaluations, Gen-PPL and entropy together.

    More entropy is better up to that of the held-out text, if it is known: beyond it is noise.
    """
    if not points:
        return []
    limit = math.inf if reference is None else reference["entropy"]
    columns = [[point["nfe"] for point in points], [-min(point["entropy"], limit) for point in points]]
    if all(point["gen_ppl"] is not None for point in points):
        columns.append([point["gen_ppl"] for point in points])
    best = find_pareto(np.array(columns, dtype=np.float64).T)
    return [point | {"is_pareto": bool(is_best)} for point, is_best in zip(points, best, strict=True)]


def draw_reference_texts(
    source: str | Path, tokenizer: Tokenizer, length: int, n: int
) -> tuple[list[str], dict[str, Any]]:
    """`n` texts of `length` tokens evenly spaced over a held-out text, and a description of them."""
    data = load_eval_data(source, tokenizer, length + 2, rows="wrapped")
    if len(data.rows) < n:
        raise ValueError(
            f"{source} has {len(data.rows)} texts of {length} tokens, but {n} are needed: give more text, or a smaller "
            "n or length"
        )
    places = np.linspace(0, len(data.rows) - 1, n).round().astype(np.int64)
    tokens, _ = data.rows.fetch(torch.from_numpy(places))
    texts = [tokenizer.decode(row, skip_special=True) for row in tokens.tolist()]
    return texts, {"source": str(source), "rows_hash": data.rows_hash, "stretches": n, "tokens": length}
