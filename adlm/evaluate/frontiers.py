"""Quality against network evaluations, time and entropy, over samplers, steps, temperatures and nuclei."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.data.tokenizers import Tokenizer
from adlm.devices import get_device_name
from adlm.diffusion.samplers import takes_steps
from adlm.evaluate.cache import (
    ProgressCallback,
    hash_settings,
    ignore_progress,
    lock_output,
    open_cache,
)
from adlm.evaluate.data import load_eval_data
from adlm.evaluate.ppl import list_models
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn, shorten_names
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.scorer import BATCH, ScoringModel, load_scorer
from adlm.settings import DEFAULT_TOP_P
from adlm.text.generation import TextRow, check_whole_numbers
from adlm.text.lm import LM

LEFT_TO_RIGHT = "left_to_right"
ENTROPY_TOLERANCE = 0.1  # nats from held-out text, within which the best setting is looked for
Point = dict[
    str, Any
]  # the flat JSON form: model, setting, nfe, seconds, and the metrics with NAME_se
NOTE = (
    "A low Gen-PPL at a low entropy is repetition; texts that end early have less entropy. ± is a standard error over "
    "texts; of seconds, the standard deviation over timings."
)


@lock_output
def frontier(
    models: LM | Sequence[LM],
    *,
    scorer: str | Path | ScoringModel | None = None,
    reference: str | Path | None = None,
    samplers: Sequence[str] = ("ancestral", "remask_loop", "confidence"),
    steps: Sequence[int] = (16, 32, 64, 128),
    temperatures: Sequence[float] = (1.0,),
    top_p: Sequence[float] = (1.0, 0.9, DEFAULT_TOP_P),
    n: int = 64,
    length: int = 128,
    seed: int = 0,
    batch: int = 16,
    repeats: int = 3,
    scorer_batch: int = BATCH,
    out: str | Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure Gen-PPL (with a `scorer`), entropy, NFE and time of every combination of sampler settings.

    `reference` is held-out text, measured like the samples. `out` keeps the points; the same call resumes there.
    """
    models = list_models(models)
    check_whole_numbers(2, n=n, repeats=repeats)
    check_whole_numbers(1, batch=batch)
    if not all(grids := [build_grid(lm, samplers, steps, temperatures, top_p) for lm in models]):
        raise ValueError(
            "samplers, steps, temperatures or top_p is empty: give at least one of each"
        )
    for lm, own in zip(
        models, grids, strict=True
    ):  # wrong settings are refused before anything runs
        for setting in own:
            lm.layout_rows(**get_arguments(setting, length, seed))
    tokenizer = models[0].tokenizer  # counts the tokens of all models
    texts, about = (
        draw_reference_texts(reference, tokenizer, length, n) if reference else (None, None)
    )
    loaded = None if scorer is None else load_scorer(scorer, device=models[0].device)
    measure = TextScorer(tokenizer, loaded, scorer_batch)
    baseline = measure(texts).as_row() if texts else None
    size = {"n": n, "length": length, "seed": seed, "batch": batch, "repeats": repeats}
    machine = {"device": str(models[0].device), "threads": torch.get_num_threads()}
    cache, points, described = open_cache(out), list[Point](), list[dict[str, Any]]()
    for lm, own in zip(models, grids, strict=True):
        identity = {
            "model": lm.name,
            "method": lm.method,
            "step": lm.step,
            "weights_sha256": hash_weights(lm.model),
        }
        described.append(
            identity | {"parameters": sum(each.numel() for each in lm.model.parameters())}
        )
        is_warm = False
        for setting in own:
            on_progress(f"{lm.name}: {setting['sampler']}", len(points), sum(map(len, grids)))
            # The machine is part of the key, because time is one of the metrics.
            parts = (
                described[-1],
                setting,
                size,
                measure.settings,
                machine,
                get_device_name(lm.device),
            )
            key = f"point-{hash_settings(parts)}"
            if key not in cache:
                arguments = get_arguments(setting, length, seed)
                # The first texts of a process take longer; on a GPU the first of every setting, which may have batch
                # sizes that no graph was captured of.
                if not is_warm or lm.device.type == "cuda":
                    time_batch(lm, arguments, min(batch, n))
                    is_warm = True
                point = {"model": lm.name, "method": lm.method, **setting}
                cache.put(
                    key,
                    point | measure_point(lm, arguments, n, batch, repeats, measure),
                    is_flushed=True,
                )
            points.append(cache.get(key))
    cache.merge()
    settings = {"models": described, **size, **measure.settings, **machine, "reference": about}
    settings |= {"samplers": samplers, "steps": steps, "temperatures": temperatures, "top_p": top_p}
    warnings = []
    if short := sum(point["short"] for point in points):
        every = short + sum(point["texts"] for point in points)
        warnings = [
            f"{short} of {every} texts have fewer than four tokens: they count in NFE and time only"
        ]
    best = choose_settings(points, baseline)
    tables = [tabulate_points(points, baseline, settings, best)]
    figures = {"frontier": ("frontier", {"points": points, "reference": baseline})}
    metrics = {"points": points, "reference": baseline, "best": best}
    return EvalResult(
        "frontier",
        metrics,
        settings,
        collect_provenance(models[0].device),
        tables,
        warnings,
        figures,
    )


def choose_settings(points: Sequence[Point], reference: Point | None) -> dict[str, Point]:
    """Choose each model's point of lowest Gen-PPL among those with the entropy of held-out text, if there is one."""
    best: dict[str, Point] = {}
    if reference is None or reference["gen_ppl"] is None:
        return best
    for point in points:
        is_close = (
            abs(point["entropy"] - reference["entropy"]) <= ENTROPY_TOLERANCE
            and point["gen_ppl"] is not None
        )
        if is_close and point["gen_ppl"] < best.get(point["model"], {"gen_ppl": np.inf})["gen_ppl"]:
            best[point["model"]] = point
    return best


def tabulate_points(
    points: Sequence[Point],
    reference: Point | None,
    settings: dict[str, Any],
    best: dict[str, Point],
) -> Table:
    """One row for each point, the held-out text last."""
    names = shorten_names([point["model"] for point in points])
    columns = [TableColumn(name, is_text=True) for name in ("model", "sampler")]
    columns += [
        TableColumn("steps"),
        TableColumn("T"),
        TableColumn("p"),
        TableColumn("NFE", 1),
        TableColumn("s/text", is_optional=True),
    ]
    columns += [
        TableColumn("tokens", 1, is_optional=True),
        TableColumn("Gen-PPL", 1),
        TableColumn("entropy"),
    ]
    columns += [
        TableColumn("distinct-2", is_optional=True),
        TableColumn("repeated-4", is_optional=True),
    ]
    rows: list[list[Any]] = []
    for point in points:
        speed = f"{point['seconds']:.3g} ± {point['seconds_sd']:.1g}"
        rows.append([names[point["model"]], point["sampler"], point["steps"]])
        rows[-1] += [f"{point['temperature']:g}", f"{point['top_p']:g}", point["nfe"], speed]
    rows += [] if reference is None else [["held-out text", "", *[None] * 5]]
    for row, values in zip(
        rows, [*points, *([] if reference is None else [reference])], strict=True
    ):
        metrics = ("gen_ppl", "entropy", "distinct_2", "repetition_4")
        row += [values["tokens"], *(Estimate.from_row(values, name) for name in metrics)]
    size = f"Batches of {min(settings['batch'], settings['n'])} texts on {settings['device']}"
    notes = [f"{NOTE} {size}, {settings['threads']} threads."]
    notes += (
        [] if settings["scorer"] else ["There is no Gen-PPL without a scoring model (--judge)."]
    )
    for model, point in best.items():
        chosen = ", ".join(
            f"{name} {point[name]}" for name in ("sampler", "steps", "temperature", "top_p")
        )
        rule = f"lowest Gen-PPL at an entropy within {ENTROPY_TOLERANCE} nats of held-out text"
        notes.append(f"{names[model]}, {rule}: {chosen}.")
    return Table(columns, rows, notes=notes)


def get_arguments(setting: Point, length: int, seed: int) -> dict[str, Any]:
    """The keyword arguments of `LM.generate`."""
    given = {name: value for name, value in setting.items() if value not in (None, LEFT_TO_RIGHT)}
    return {"length": length, "seed": seed, **given}


def build_grid(
    lm: LM,
    samplers: Sequence[str],
    steps: Sequence[int],
    temperatures: Sequence[float],
    top_p: Sequence[float],
) -> list[Point]:
    """The settings in the order of the lists; a causal model has no samplers, and some samplers have no steps."""
    own: list[tuple[str, int | None]] = [(LEFT_TO_RIGHT, None)] if lm.row_format.is_causal else []
    for sampler in samplers if not own else ():
        has_steps = takes_steps(sampler, allow_import=True)
        own += [(sampler, count) for count in steps] if has_steps else [(sampler, None)]
    names = ("sampler", "steps", "temperature", "top_p")
    return [
        dict(zip(names, (*each, *others))) for each, *others in product(own, temperatures, top_p)
    ]


def measure_point(
    lm: LM, arguments: dict[str, Any], n: int, batch: int, repeats: int, measure: TextScorer
) -> dict[str, Any]:
    """Generate `n` texts with these arguments of `LM.generate`, measure and time them."""
    rows, seconds, batch = list[TextRow](), list[float](), min(batch, n)
    for first in range(0, n, batch):
        generated, duration = time_batch(lm, arguments, min(batch, n - first), first)
        rows += generated
        if len(generated) == batch:  # a smaller batch takes longer for a text
            seconds.append(duration / batch)
    while len(seconds) < repeats:  # the same texts again, for the time alone
        seconds.append(time_batch(lm, arguments, batch)[1] / batch)
    # NFE and seconds are those of a text.
    point = {"nfe": float(np.mean([row.nfe for row in rows])), "timings": len(seconds)}
    point |= {"seconds": float(np.mean(seconds)), "seconds_sd": float(np.std(seconds, ddof=1))}
    return point | measure([row.text for row in rows]).as_row()


def time_batch(
    lm: LM, arguments: dict[str, Any], count: int, first: int = 0
) -> tuple[list[TextRow], float]:
    """Generate texts from number `first` on in one batch; the texts and the seconds that it takes."""
    rows = lm.layout_rows(n=first + count, batch=count, **arguments)[first:]
    # When their tokens are on the host, a GPU has nothing left to do.
    return rows, lm.fill_rows(rows).seconds


def draw_reference_texts(
    source: str | Path, tokenizer: Tokenizer, length: int, n: int
) -> tuple[list[str], dict[str, Any]]:
    """`n` texts of `length` tokens evenly spaced over a held-out text, and a description of them."""
    data = load_eval_data(source, tokenizer, length + 2, rows="wrapped")
    if len(data.rows) < n:
        size = f"{len(data.rows)} texts of {length} tokens"
        raise ValueError(
            f"{source} has {size}, but {n} are needed: give more text, or a smaller n or length"
        )
    places = np.linspace(0, len(data.rows) - 1, n).round().astype(np.int64)
    tokens, _ = data.rows.fetch(torch.from_numpy(places))
    texts = [tokenizer.decode(row, skip_special=True) for row in tokens.tolist()]
    return texts, {"source": str(source), "rows_hash": data.rows_hash, "texts": n, "tokens": length}
