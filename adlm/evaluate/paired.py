"""Runs on the same rows with the same noise: stored nats, paired differences over seeds, verdicts, tables, plots."""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from adlm.bundled import MODELS, find_bundled_model
from adlm.checkpoint import find_latest_checkpoint, load_model, read_state
from adlm.evaluate.data import RowLayout, load_eval_data
from adlm.evaluate.plots import LINE_LOOKS, add_legend, new_figure
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import Column, Estimate, Table, render_markdown
from adlm.evaluate.stats import estimate_ratio_difference
from adlm.likelihood import estimate_nll
from adlm.methods import METHODS
from adlm.models.costs import count_parameters
from adlm.training.logging import read_metrics
from adlm.view.look import COLORS, GRAY

MAX_UINT16 = 65535
SUPPORTED, NOT_SUPPORTED, NOT_TESTABLE = "supported", "not supported", "not testable here"
Record = dict[str, Any]  # of a run: row_nats, row_tokens, documents, curve; or error, if it diverged


@dataclass(frozen=True)
class MeasureSettings:
    """The held-out rows and the noise that runs share."""

    data: str | None = None  # text or prepared data; null: the valid split of the run's data
    rows: int = 2048
    draws: int = 2
    seed: int = 0
    batch: int = 64


def measure_run(model: str, data: str, measure: MeasureSettings, device: str) -> Record:
    """Compute the nats of every held-out row under a model, in float32, with noise that follows from the row alone."""
    folder = find_bundled_model(model) if model in MODELS else Path(model)
    loaded, latest = load_model(folder), find_latest_checkpoint(folder / "checkpoints")
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json: copy the one of its data into its folder")
    shape, layout = loaded.model.config, cast(RowLayout, loaded.rows)
    rows = load_eval_data(data, loaded.tokenizer, shape.length, rows=layout, limit=measure.rows)
    options: Record = {"draws": measure.draws, "seed": measure.seed, "batch": measure.batch}
    options["score_entropy"] = METHODS[loaded.method].score_entropy
    estimate = estimate_nll(loaded.model.to(device), rows.rows, **options)
    metrics = read_metrics(folder / "metrics.jsonl") if latest is not None else []
    return {
        "step": loaded.step,
        "parameters": count_parameters(shape),
        "seconds": round(read_state(latest)["seconds"], 1) if latest is not None else 0.0,
        "curve": [[each["step"], round(each["val/nll"], 5)] for each in metrics if "val/nll" in each],
        "rows_sha256": rows.rows_hash,
        "documents": encode_rows(rows.documents.numpy(), 1.0),
        "row_tokens": encode_rows(estimate.row_tokens.numpy(), 1.0),
        "row_nats": encode_rows(estimate.row_nats.numpy(), float(estimate.row_nats.max()) / MAX_UINT16),
        "provenance": collect_provenance(device),
    }


def encode_rows(values: NDArray[Any], unit: float) -> Record:
    """Encode numbers as 16-bit multiples of a unit, compressed, in base64."""
    content = np.round(values / unit).astype("<u2").tobytes()
    return {"unit": unit, "zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def decode_rows(encoded: Record) -> NDArray[Any]:
    """Decode what `encode_rows` returned."""
    return np.frombuffer(zlib.decompress(base64.b64decode(encoded["zlib"])), "<u2") * float(encoded["unit"])


def compute_nll(run: Record) -> float:
    """Compute the nats per token of a run; infinite if it diverged."""
    if "error" in run:
        return math.inf
    try:
        return float(decode_rows(run["row_nats"]).sum() / decode_rows(run["row_tokens"]).sum())
    except (zlib.error, ValueError) as error:
        raise ValueError(f"the stored rows of {run['name']} are damaged ({error}): restore the file") from error


def find_interval(values: Sequence[float]) -> list[float] | None:
    """Return Student's 95% interval of the mean of independent values; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    # With t = √ν · tan θ the probability of |T| < t is the integral of cos^(ν-1) up to θ, divided by that up to π/2.
    angle = np.linspace(0, np.pi / 2, 100_001)
    share = np.cumsum(np.cos((angle[1:] + angle[:-1]) / 2) ** (count - 2))
    quantile = math.sqrt(count - 1) * math.tan(np.interp(0.95, share / share[-1], angle[1:]))
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(count)
    return [float(np.mean(values)) - half, float(np.mean(values)) + half]


def compare_seeds(pairs: Sequence[tuple[Record, Record]]) -> Record:
    """Compare pairs of runs of equal seeds: differences of nll, their mean, Student's 95% interval over the seeds.

    `document_se` is the standard error of the mean that the choice of documents causes.
    """
    by_seed = [compute_nll(one) - compute_nll(other) for one, other in pairs]
    unit = np.unique(decode_rows(pairs[0][0]["documents"]), return_inverse=True)[1]
    sums = []
    for runs in zip(*pairs):
        for name in ("row_nats", "row_tokens"):
            sums.append(np.bincount(unit, np.mean([decode_rows(run[name]) for run in runs], axis=0)))
    document_se = estimate_ratio_difference(*sums)[1]
    mean, interval = float(np.mean(by_seed)), find_interval(by_seed)
    return {"by_seed": by_seed, "mean": mean, "interval": interval, "document_se": document_se}


def summarize(results: Record) -> Record:
    """Compute nll by arm, paired differences over seeds (of the claims, and from the first arm), and verdicts.

    Of the variants of an arm that a scout tried, the one that is best at the first seed is compared.
    """
    rows = {(run["corpus"], run["rows_sha256"]) for run in results["runs"] if "error" not in run}
    if len(rows) > len({corpus for corpus, _ in rows}):
        raise ValueError(f"the runs were measured on different rows of one corpus: {sorted(rows)}; measure them again")
    groups: dict[tuple[str, str, str], dict[int, Record]] = {}
    chosen: dict[tuple[str, str], dict[int, Record]] = {}
    for run in results["runs"]:
        groups.setdefault((run["corpus"], run["arm"], run["variant"]), {})[run["seed"]] = run
    arms: list[Record] = []
    for (corpus, arm, variant), runs in groups.items():
        nll = [compute_nll(run) for run in runs.values()]
        mean = float(np.mean(nll))
        about = {"corpus": corpus, "arm": arm, "variant": variant, "seeds": list(runs), "nll": nll}
        arms.append(about | {"mean": mean, "interval": find_interval(nll), "ppl": math.exp(min(mean, 700))})
        best = next(iter(chosen.get((corpus, arm), {0: {"error": ""}}).values()))
        if nll[0] < compute_nll(best):
            chosen[corpus, arm] = {seed: run for seed, run in runs.items() if "error" not in run}
    first = dict(reversed(chosen))
    claims = [rule | {"corpus": rule["corpus"] or next(iter(first), "")} for rule in results["rules"]]
    pairs = [(claim["corpus"], claim["arm"], claim["than"]) for claim in claims]
    others = [(corpus, arm, first[corpus]) for corpus, arm in chosen if arm != first[corpus]]
    pairs += [(corpus, arm, than) for corpus, arm, than in others if (corpus, than, arm) not in pairs]
    comparisons: dict[tuple[str, str, str], Record] = {}
    for corpus, arm, than in dict.fromkeys(pairs):
        one, other = chosen.get((corpus, arm), {}), chosen.get((corpus, than), {})
        if seeds := [seed for seed in one if seed in other]:
            about = {"corpus": corpus, "arm": arm, "than": than, "seeds": seeds}
            comparisons[corpus, arm, than] = about | compare_seeds([(one[seed], other[seed]) for seed in seeds])
    claims = [claim | comparisons.get(pair, {"by_seed": []}) for claim, pair in zip(claims, pairs)]
    spread = [np.var(claim["by_seed"], ddof=1) for claim in claims if len(claim["by_seed"]) > 1]
    claims = [claim | {"verdict": judge_claim(claim, float(np.mean(spread or [0.0])))} for claim in claims]
    return {"arms": arms, "comparisons": list(comparisons.values()), "claims": claims}


def judge_claim(claim: Record, pooled_variance: float) -> str:
    """Judge a claim by its own rule (`adlm.experiment.ExperimentClaim`)."""
    differences = claim["by_seed"]
    if len(differences) < max(2, claim["min_seeds"]):
        return NOT_TESTABLE
    if claim["within"] is not None:
        low, high = claim["interval"]
        return SUPPORTED if -claim["within"] < low and high < claim["within"] else NOT_SUPPORTED
    variance = pooled_variance if claim["is_pooled"] else float(np.var(differences, ddof=1))
    margin = max(claim["at_least"], claim["errors"] * math.sqrt(variance / len(differences)))
    is_below = claim["mean"] < -margin and (max(differences) < 0 or not claim["same_sign"])
    return SUPPORTED if is_below else NOT_SUPPORTED


def build_tables(results: Record) -> list[Table]:
    """Build the tables of arms, of paired differences and of claims."""

    def join(values: Sequence[float | None], sign: str = "") -> str:
        return ", ".join("diverged" if value is None else f"{value:{sign}.4f}" for value in values)

    def build(title: str, texts: str, numbers: Mapping[str, int], rows: list[list[Any]]) -> Table:
        columns = [Column(name, is_text=True) for name in texts.split(", ")]
        return Table([*columns, *(Column(name, digits) for name, digits in numbers.items())], rows, title=title)

    def estimate(each: Record) -> Estimate:
        return Estimate(math.nan if each["mean"] is None else each["mean"], None, each["interval"])

    arms, differences = [], []
    for each in results["arms"]:
        name = f"{each['arm']} {each['variant']}".strip()
        arms.append([each["corpus"], name, join(each["nll"]), estimate(each), each["ppl"]])
    for each in results["comparisons"]:
        pair = f"{each['arm']} − {each['than']}"
        differences.append([each["corpus"], pair, join(each["by_seed"], "+"), estimate(each), each["document_se"]])
    claims = [[claim["text"], claim["verdict"]] for claim in results["claims"]]
    below = "Paired differences of nll, nats per token; below 0 the first arm is better"
    return [
        build("Held-out nll, nats per token", "corpus, arm, by seed", {"mean": 4, "ppl": 2}, arms),
        build(
            below, "corpus, difference, by seed", {"mean (95% over seeds)": 4, "s.e. over documents": 4}, differences
        ),
        build("Claims", "claim, verdict", {}, claims),
    ]


def write_report(results: Record, folder: Path) -> list[Table]:
    """Write the tables as results.md and, with matplotlib, the plots into a folder; return the tables."""
    tables = build_tables(results)
    parts = [f"# {results['question']}", f"{len(results['runs'])} of {results['planned_runs']} runs."]
    parts += [f"**{table.title}**\n\n{render_markdown(table)}" for table in tables]
    curves: dict[str, dict[str, list[Record]]] = {}
    for run in results["runs"]:
        name = f"{run['arm']} {run['variant']}".strip()
        if run.get("curve"):
            curves.setdefault(run["corpus"], {}).setdefault(name, []).append(run)
    if find_spec("matplotlib") is not None:
        drawn = [draw_curves(curves, folder / "curves.svg")] if curves else []
        drawn += (
            [draw_differences(results["comparisons"], folder / "differences.svg")] if results["comparisons"] else []
        )
        parts += [f"![{path.stem}]({path.name})" for path in drawn]
    (folder / "results.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    return tables


def draw_curves(runs: Mapping[str, Mapping[str, Sequence[Record]]], path: Path) -> Path:
    """Plot validation during training by corpus and arm: the mean over seeds, and their range."""
    looks = dict(zip(dict.fromkeys(arm for arms in runs.values() for arm in arms), LINE_LOOKS))
    with new_figure(path, 3.9 * len(runs) + 2.2, max(3.4, 0.2 * len(looks) + 0.6)) as figure:
        for axes, (corpus, arms) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
            top = -math.inf
            for arm, own in arms.items():
                shared = sorted(set.intersection(*({step for step, _ in run["curve"]} for run in own)))
                values = np.array([[dict(map(tuple, run["curve"]))[step] for step in shared] for run in own])
                axes.plot(shared, values.mean(0), **looks[arm], marker=".")
                axes.fill_between(
                    shared, values.min(0), values.max(0), color=looks[arm]["color"], alpha=0.2, linewidth=0
                )
                top = max(top, values[:, min(1, len(shared) - 1) :].max())
            axes.set(xlabel="step", ylabel="validation nll (nats per token)", title=corpus)
            axes.set_ylim(top=top + 0.02)  # the first validation, far above the others, is cut off
        add_legend(figure, list(looks.items()))
    return path


def draw_differences(comparisons: Sequence[Record], path: Path) -> Path:
    """Plot paired differences by corpus: the mean and Student's interval over seeds, and a dot for each seed."""
    corpora = list(dict.fromkeys(each["corpus"] for each in comparisons))
    labels = list(dict.fromkeys(f"{each['arm']} − {each['than']}" for each in comparisons))[::-1]
    with new_figure(path, 3.6 * len(corpora) + 0.075 * max(map(len, labels)), 0.36 * len(labels) + 1.1) as figure:
        panels = figure.subplots(1, len(corpora), squeeze=False, sharey=True)[0]
        for axes, corpus, color in zip(panels, corpora, COLORS * len(corpora)):
            axes.axvline(0, color=GRAY, linewidth=1)
            for each in (each for each in comparisons if each["corpus"] == corpus):
                up = labels.index(f"{each['arm']} − {each['than']}")
                axes.plot(each["interval"] or [], [up + 0.1] * len(each["interval"] or []), color=color, linewidth=2)
                axes.plot([each["mean"]], [up + 0.1], "D", color=color, markersize=4)
                axes.plot(each["by_seed"], [up - 0.2] * len(each["by_seed"]), "o", color=color, alpha=0.5, markersize=3)
                place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 7}
                axes.annotate(f"{each['mean']:+.4f}", (1.02, up), **place)
            axes.set(xlabel="difference, nats per token", title=corpus, ylim=(-0.6, len(labels) - 0.4))
            axes.set_yticks(range(len(labels)), labels)
    return path
