"""Measure how many samples tabular AR, diffusion and anchored models need, and check the paper's toy and its bound.

    python docs/theory/sample_complexity.py

prints tables and writes results.json and sample_complexity.svg next to this file (docs/theory.md explains them).
Needs matplotlib and, for the bound, pytest: the enumerated world is that of tests/diffusion/test_tiny_world.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table as TextTable

from adlm.diffusion.plans import ancestral, reverse_distribution
from adlm.evaluate.plots import MARKERS, new_figure
from adlm.view.look import COLORS, GRAY

GAP = 0.05  # nats per sequence
DRAWS, SEED, SMOOTHING, FIRST_SAMPLES = 20, 0, 0.5, 4
LENGTHS = {
    2: range(3, 9),
    3: range(3, 7),
    4: range(3, 6),
    5: range(3, 5),
}  # by the number of states
POINTS = [
    (k, length, d)
    for k, lengths in LENGTHS.items()
    for length in lengths
    for d in (1, 2, 3)
    if d < length - 1
]
LONG_POINTS = [(2, length, 2) for length in range(9, 15)]  # too long for a table of each mask
CONCENTRATIONS = (1.0, 2.0, 5.0)  # of the Dirichlet distribution of every row of a network's tables
PLOTTED = 1.0  # Dirichlet(1) is uniform over all rows
# The paper's order of each estimator. `all_masks`, a control that the paper does not have, is diffusion that learns
# from all masks of every sample; its order is AR's.
ORDERS = {
    "ar": ("K^L", lambda k, length, d: k**length),
    "diffusion": ("L K^L", lambda k, length, d: length * k**length),
    "anchored": ("L K^(d+1)", lambda k, length, d: length * k ** (d + 1)),
    "all_masks": ("K^L", lambda k, length, d: k**length),
}
CLAIMED = ("ar", "diffusion", "anchored")
MASK = 2  # of the toy chain, whose tokens are 0 and 1


@dataclass(frozen=True)
class Conditional:
    """A table of p(x_child | x_visible), learned from the samples under one mask."""

    child: int
    visible: tuple[int, ...]
    mask: int = 0
    weight: float = 1.0  # of its divergence in the gap

    def marginalize(self, joint: np.ndarray) -> np.ndarray:
        """Sum joint values (K, ..., K, draws) over all positions that the table does not contain."""
        others = set(range(joint.ndim - 1)) - {self.child, *self.visible}
        return joint.sum(tuple(others))

    def log_conditional(self, values: np.ndarray) -> np.ndarray:
        """Return the logarithms of marginal values, normalized over the child."""
        axis = sum(position < self.child for position in self.visible)
        return np.log(values) - np.log(values.sum(axis, keepdims=True))


@dataclass(frozen=True)
class Estimator:
    """A set of tables; each sample is seen under one mask, drawn from `mask_probs`."""

    states: int
    tables: tuple[Conditional, ...]
    mask_probs: tuple[float, ...] = (1.0,)

    @property
    def free_parameters(self) -> int:
        return sum((self.states - 1) * self.states ** len(table.visible) for table in self.tables)

    def predict_samples(self, gap: float = GAP) -> float:
        """Return n* as it is for many samples, when a row with K - 1 free parameters costs (K - 1) / 2n nats."""
        rows = (
            (self.states - 1) * self.states ** len(x.visible) * x.weight / self.mask_probs[x.mask]
            for x in self.tables
        )
        return sum(rows) / (2 * gap)

    def prepare(self, truth: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each table's true marginal probabilities and conditional log-probabilities."""
        marginals = [table.marginalize(truth) for table in self.tables]
        return [
            (p, table.log_conditional(p)) for p, table in zip(marginals, self.tables, strict=True)
        ]

    def compute_gap(
        self, targets: list[tuple[np.ndarray, np.ndarray]], counts: np.ndarray
    ) -> np.ndarray:
        """Return the exact gap (draws,) in nats per sequence, from `prepare` and counts (masks, K, ..., K, draws)."""
        gap = np.zeros(counts.shape[-1])
        for table, (p, log_p) in zip(self.tables, targets, strict=True):
            log_q = table.log_conditional(table.marginalize(counts[table.mask]) + SMOOTHING)
            gap += table.weight * (p * (log_p - log_q)).reshape(-1, len(gap)).sum(0)
        return gap


def draw_network(
    rng: np.random.Generator,
    states: int,
    length: int,
    parents: int,
    concentration: float,
    draws: int,
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Draw one graph and `draws` sets of tables; return p(x) (K, ..., K, draws) and the parents of each position."""
    graph = [
        tuple(sorted(rng.choice(x, min(x, parents), replace=False).tolist())) for x in range(length)
    ]
    truth = np.ones((*[1] * length, draws))
    for child, visible in enumerate(graph):
        rows = rng.dirichlet([concentration] * states, (draws, states ** len(visible)))
        shape = (states if x in (*visible, child) else 1 for x in range(length))
        truth = truth * np.moveaxis(rows, 0, -1).reshape(*shape, draws)
    return truth, graph


def build_ordered(states: int, graph: Sequence[tuple[int, ...]]) -> dict[str, Estimator]:
    """Return AR and the anchored estimator, whose gap is the KL divergence of q from the truth."""
    ar = tuple(Conditional(child, tuple(range(child))) for child in range(len(graph)))
    anchored = tuple(Conditional(child, visible) for child, visible in enumerate(graph))
    return {"ar": Estimator(states, ar), "anchored": Estimator(states, anchored)}


def build_masked(states: int, length: int) -> dict[str, Estimator]:
    """Return diffusion and the control, whose gap is the difference of NELBOs.

    A pattern with h of L positions hidden weighs 1 / (h C(L, h)) in the NELBO. Diffusion draws one for each sample: h
    uniformly from 1..L, then the positions.
    """
    patterns = [visible for size in range(length) for visible in combinations(range(length), size)]
    masked, probs = [], []
    for mask, visible in enumerate(patterns):
        hidden = set(range(length)) - set(visible)
        choices = math.comb(length, len(hidden))
        probs.append(1 / (length * choices))
        masked += [
            Conditional(child, visible, mask, 1 / (len(hidden) * choices))
            for child in sorted(hidden)
        ]
    unmasked = tuple(replace(table, mask=0) for table in masked)
    return {
        "diffusion": Estimator(states, tuple(masked), tuple(probs)),
        "all_masks": Estimator(states, unmasked),
    }


def find_samples(
    estimator: Estimator, truth: np.ndarray, rng: np.random.Generator
) -> tuple[float, float]:
    """Return n*, at which the mean gap over draws is `GAP`, and its standard error.

    The data of every draw doubles until the mean gap is small enough; n* is interpolated between the last two sizes,
    linearly in logarithms.
    """
    draws, targets = truth.shape[-1], estimator.prepare(truth)
    probs = truth.reshape(-1, draws) / truth.reshape(-1, draws).sum(0)
    counts = np.zeros((len(estimator.mask_probs), *truth.shape))
    samples, gap = 0, math.inf
    while gap > GAP:
        before, gap_before = samples, gap
        new = max(samples, FIRST_SAMPLES)
        for draw in range(draws):
            seen = rng.multinomial(rng.multinomial(new, estimator.mask_probs), probs[:, draw])
            counts[..., draw] += seen.reshape(counts.shape[:-1])
        samples += new
        gaps = estimator.compute_gap(targets, counts)
        gap = float(gaps.mean())
    if not before:
        raise ValueError(
            f"the gap of {FIRST_SAMPLES} samples is {gap:.3g}, below {GAP}: use a larger network"
        )
    slope = math.log(gap / gap_before) / math.log(samples / before)
    n_star = before * (GAP / gap_before) ** (1 / slope)
    error = float(gaps.std(ddof=1)) / math.sqrt(draws) / gap / abs(slope)
    return n_star, n_star * error


def measure_point(
    states: int,
    length: int,
    parents: int,
    concentration: float,
    draws: int = DRAWS,
    with_masks: bool = True,
) -> dict[str, Any]:
    """Return n* of the estimators on networks of one kind."""
    rng = np.random.default_rng([SEED, states, length, parents, round(100 * concentration)])
    truth, graph = draw_network(rng, states, length, parents, concentration, draws)
    point: dict[str, Any] = {
        "states": states,
        "length": length,
        "parents": parents,
        "concentration": concentration,
    }
    estimators = build_ordered(states, graph) | (build_masked(states, length) if with_masks else {})
    for name, estimator in estimators.items():
        n_star, error = find_samples(estimator, truth, rng)
        point[name] = {
            "free_parameters": estimator.free_parameters,
            "order": ORDERS[name][1](states, length, parents),
            "n_star": n_star,
            "stderr": error,
            "predicted": estimator.predict_samples(),
        }
    return point


def fit_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope of log y against log x and its standard error."""
    log_x, log_y = np.log(x), np.log(y)
    centered = log_x - log_x.mean()
    slope = float((centered * log_y).sum() / (centered**2).sum())
    rest = log_y - log_y.mean() - slope * centered
    return slope, math.sqrt(float((rest**2).sum() / (len(rest) - 2) / (centered**2).sum()))


def fit_points(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each estimator the slopes against free parameters and against the paper's order, and the ratios."""
    fits = {}
    for name in [name for name in ORDERS if name in points[0]]:
        n_star, free, order = (
            [p[name][key] for p in points] for key in ("n_star", "free_parameters", "order")
        )
        ratios = np.divide(n_star, order)
        fits[name] = {
            "slope": fit_slope(free, n_star),
            "order_slope": fit_slope(order, n_star),
            "order_ratio": [float(ratios.min()), float(ratios.max())],
            "prediction_ratio": [
                float(f(np.divide(n_star, [p[name]["predicted"] for p in points])))
                for f in (min, max)
            ],
        }
    return fits


def compute_toy() -> dict[str, float]:
    """Return the probability that a step from all-masked reveals position 2 alone, as 0, in the paper's toy chain.

    x = (1, 0, 0) with probability 0.9, (0, 1, 1) with 0.1; the step is t = 2/3 to s = 1/3. `certain` replaces the
    prediction at position 2 by one for 0: an anchor network that knows it, which is the paper's assumption. `formula`
    is the product by hand; `mean` is the probability of the right token at position 2, averaged over both texts.
    """
    texts, chances = (
        torch.tensor([[1, 0, 0], [0, 1, 1]]),
        torch.tensor([0.9, 0.1], dtype=torch.float64),
    )
    marginals = (torch.nn.functional.one_hot(texts, 3) * chances[:, None, None]).sum(0)
    certain = marginals.clone()
    certain[1] = torch.tensor([1.0, 0.0, 0.0])
    hidden, step = torch.full((1, 3), MASK), ancestral(3)[1]
    result = {"t": float(step.t), "reveal_prob": float(step.reveal_prob)}
    for name, probs in {"marginals": marginals, "certain": certain}.items():
        each = reverse_distribution(hidden, probs[None], step, MASK)[0]
        states = {
            state: float(math.prod(each[i, x] for i, x in enumerate(state)))
            for state in product(range(3), repeat=3)
        }
        assert math.isclose(sum(states.values()), 1)
        result[name] = states[MASK, 0, MASK]
        result[f"{name}_formula"] = 0.5 * (0.5 * float(probs[1, 0])) * 0.5
        result[f"{name}_mean"] = sum(
            chance * states[MASK, text[1], MASK]
            for text, chance in zip(texts.tolist(), chances.tolist(), strict=True)
        )
    return result


def compute_bounds(
    weights: Sequence[float] = (0.0, 3e-3, 0.5), steps: int = 3, rule: str = "rare"
) -> list[dict[str, float]]:
    """Return both sides of -log p(x) + γ L_anchor ≤ ANELBO for every text of an enumerated world of three tokens."""
    from tests.diffusion.test_tiny_world import RULES, WORLDS, anelbo, divergences, texts
    from tests.world import exact_law

    world, rows = WORLDS[3], []
    law = exact_law(world, ancestral(steps))
    for gamma, x0 in product(weights, texts(world)):
        nll = -math.log(float(law[world.number(x0)]))
        anchor = divergences(world, x0, RULES[rule](x0[None], None)[0], steps)[1]
        bound = anelbo(world, x0, RULES[rule], gamma, steps, "masked")[0]
        row = {
            "gamma": gamma,
            "nll": nll,
            "anchor": anchor,
            "left": nll + gamma * anchor,
            "anelbo": bound,
        }
        rows.append({"text": "".join(map(str, x0.tolist())), **row})
    return rows


def round_numbers(value: Any) -> Any:
    """Round every float to five digits, so that equal computations give equal files."""
    if isinstance(value, dict):
        return {key: round_numbers(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [round_numbers(x) for x in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def compute_results(
    points: Sequence[tuple[int, int, int]] = tuple(POINTS),
    long_points: Sequence[tuple[int, int, int]] = tuple(LONG_POINTS),
    concentrations: Sequence[float] = CONCENTRATIONS,
    draws: int = DRAWS,
) -> dict[str, Any]:
    """Return everything that is printed, plotted and written."""
    jobs = [
        (*x, c, draws, x in points) for c in concentrations for x in sorted({*points, *long_points})
    ]
    measured = [measure_point(*job) for job in track(jobs, "points", console=Console(stderr=True))]
    groups = {
        "points": [x for x in measured if "diffusion" in x],
        "long_points": [x for x in measured if "diffusion" not in x],
    }
    fits = {
        key: {
            str(c): fit_points([x for x in group if x["concentration"] == c])
            for c in concentrations
        }
        for key, group in groups.items()
    }
    settings = {
        "gap": GAP,
        "unit": "nats per sequence",
        "draws": draws,
        "smoothing": SMOOTHING,
        "seed": SEED,
    }
    tables = {
        "fits": fits["points"],
        "long_fits": fits["long_points"],
        "toy": compute_toy(),
        "bounds": compute_bounds(),
    }
    return round_numbers({"settings": settings, **tables, **groups})


def print_results(results: dict[str, Any], console: Console) -> None:
    points = TextTable("K", "L", "d", *ORDERS, title=f"n* ± standard error, Dirichlet({PLOTTED:g})")
    for p in results["points"]:
        if p["concentration"] == PLOTTED:
            cells = (f"{p[name]['n_star']:,.0f} ± {p[name]['stderr']:,.0f}" for name in ORDERS)
            points.add_row(*(str(p[key]) for key in ("states", "length", "parents")), *cells)
    columns = ("", "", "slope", "order", "its slope", "n*/order", "n*/pred.")
    fits, long_fits = (
        TextTable(*columns, title=f"Slopes of log n*{where}", collapse_padding=True)
        for where in ("", ", K = 2, L > 8")
    )
    for table, key in ((fits, "fits"), (long_fits, "long_fits")):
        for concentration, group in results[key].items():
            for name, fit in group.items():
                slope, order_slope = (
                    "{:.3f}±{:.3f}".format(*fit[x]) for x in ("slope", "order_slope")
                )
                ratio, predicted = (
                    "{:.3g}–{:.3g}".format(*fit[x]) for x in ("order_ratio", "prediction_ratio")
                )
                table.add_row(
                    concentration, name, slope, ORDERS[name][0], order_slope, ratio, predicted
                )
    toy = TextTable(
        "",
        "enumerated",
        "formula",
        "mean over texts",
        title="Toy chain: only position 2 revealed, correctly",
    )
    for name in ("marginals", "certain"):
        toy.add_row(
            name,
            *(f"{results['toy'][key]:.4f}" for key in (name, f"{name}_formula", f"{name}_mean")),
        )
    bounds = TextTable(
        "γ",
        "text",
        "-log p",
        "L_anchor",
        "left",
        "ANELBO",
        title="left = -log p + γ L_anchor ≤ ANELBO",
    )
    for gamma in sorted({row["gamma"] for row in results["bounds"]}):
        rows = sorted(
            (x for x in results["bounds"] if x["gamma"] == gamma),
            key=lambda x: x["anelbo"] - x["left"],
        )
        for row in (rows[0], rows[-1]):  # the tightest and the loosest
            sides = (f"{row[key]:.4f}" for key in ("nll", "anchor", "left", "anelbo"))
            bounds.add_row(f"{gamma:g}", row["text"], *sides)
    for table in (points, fits, long_fits, toy, bounds):
        table.box = SIMPLE_HEAD
        console.print(table)
    violations = [row for row in results["bounds"] if row["left"] > row["anelbo"] + 1e-5]
    console.print(f"violated for {len(violations)} of {len(results['bounds'])} pairs of γ and text")


def write_results(results: dict[str, Any], path: Path) -> None:
    """Write JSON with one line for each point and text."""
    parts = {
        key: "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        if isinstance(value, list)
        else json.dumps(value)
        for key, value in results.items()
    }
    text = ",\n".join(f"{json.dumps(key)}: {part}" for key, part in parts.items())
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def draw_plot(results: dict[str, Any], path: Path) -> None:
    """Draw n* against free parameters, and n* over the paper's order against the length."""
    points = [p for p in results["points"] if p["concentration"] == PLOTTED]
    fits = results["fits"][str(PLOTTED)]
    lines = {2: "-", 3: "--", 4: ":"}  # by the number of states
    with new_figure(path, 9, 4) as figure:
        left, right = figure.subplots(1, 2)
        for name, color, marker in zip(CLAIMED, COLORS, MARKERS, strict=False):
            title = "AR" if name == "ar" else name
            look: Any = {"color": color, "marker": marker, "markersize": 4}
            x, y = ([p[name][key] for p in points] for key in ("free_parameters", "n_star"))
            slope = "{:.2f} ± {:.2f}".format(*fits[name]["slope"])
            left.plot(x, y, linestyle="none", label=f"{title}: slope {slope}", **look)
            for states, line in lines.items():
                kept = [p for p in points if p["states"] == states and p["parents"] == 1]
                ratio = [p[name]["n_star"] / p[name]["order"] for p in kept]
                label = f"{title} / {ORDERS[name][0]}" if states == 2 else None
                right.plot([p["length"] for p in kept], ratio, linestyle=line, label=label, **look)
        for states, line in lines.items():
            right.plot([], [], color=GRAY, linestyle=line, label=f"K = {states}")
        ends = np.array(left.get_xlim()).clip(min=1)
        left.plot(
            ends,
            ends / (2 * GAP),
            color=GRAY,
            linewidth=0.8,
            zorder=0,
            label=f"free parameters / {2 * GAP:g}",
        )
        left.set(
            xscale="log",
            yscale="log",
            xlabel="free parameters",
            ylabel=f"n*: samples for a gap of {GAP} nats",
        )
        right.set(
            yscale="log", ylim=(1, 1000), xlabel="length L (d = 1)", ylabel="n* / the paper's order"
        )
        for axis in (left.xaxis, left.yaxis, right.yaxis):
            axis.set_major_formatter("{x:,g}")
        left.legend(loc="lower right")
        right.legend(loc="upper left", ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    folder = Path(__file__).parent
    parser.add_argument(
        "--out",
        type=Path,
        default=folder,
        help="folder of results.json and the plot [default: this file's]",
    )
    out = parser.parse_args().out
    results = compute_results()
    out.mkdir(parents=True, exist_ok=True)
    write_results(results, out / "results.json")
    draw_plot(results, out / "sample_complexity.svg")
    print_results(results, Console())


if __name__ == "__main__":
    main()
