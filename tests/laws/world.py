"""A world small enough to be counted: three tokens and a mask, two or three positions.

Every state is enumerated, and the laws of the samplers are written down a second time, naively,
from the paper's Algorithm 1. Only a plan's table and the network's predictions are the package's.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm import LanguageModel
from tests.laws import adapter
from tests.laws.adapter import Draw, Table

# Of `small_model`.
VOCAB = 12
MASK = 11

State = tuple[int, ...]
Law = dict[State, float]


def tiny_model(method: str = "adlm", *, seed: int = 0, **changes: Any) -> LanguageModel:
    """Make a model of three tokens and a mask, in rows of three."""
    return _make_model(
        method, seed, {"vocab_size": 4, "mask_id": 3, "dim": 8, "length": 3}, changes
    )


def small_model(method: str = "adlm", **changes: Any) -> LanguageModel:
    """Make a model of eleven tokens and a mask, in rows of 20: contexts differ."""
    shape = {"vocab_size": VOCAB, "mask_id": MASK, "dim": 16, "length": 20, "scale": 0.6}
    return _make_model(method, changes.pop("seed", 3), shape, changes)


def _make_model(
    method: str, seed: int, shape: Mapping[str, Any], changes: Mapping[str, Any]
) -> LanguageModel:
    settings = {**shape, "heads": 2, "denoiser_layers": 1, "dropout": 0.0, "bridge": "factored"}
    settings["anchor_layers"] = int(adapter.has_two_stages(method))
    if not adapter.is_causal(method):
        settings["cond_dim"] = 8
    return adapter.make_model(method, seed=seed, **{**settings, **changes})


def random_tokens(rows: int, length: int = 16, vocab: int = MASK, seed: int = 0) -> Tensor:
    """Return rows (B, L) of tokens below `vocab`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (rows, length), generator=rng)


def filter_probs(probs: Tensor, draw: Draw) -> Tensor:
    """Return one distribution (V,) after temperature, top-k and top-p in this order."""
    if draw.temperature == 0:
        return F.one_hot(probs.argmax(), len(probs)).double()
    weights = {}
    for token, prob in enumerate(probs.tolist()):
        if prob > 0:
            weights[token] = prob ** (1 / draw.temperature)
    ranked = sorted(weights, key=lambda token: -weights[token])[: draw.top_k]
    whole = sum(weights[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        after = mass + weights[token] / whole
        if draw.nucleus == "usual":
            is_out = mass >= draw.top_p
        else:
            is_out = after > draw.top_p + 1e-12
        if kept and is_out:
            break
        kept.append(token)
        mass = after
    law = torch.zeros(len(probs), dtype=torch.float64)
    for token in kept:
        law[token] = weights[token] / whole / mass
    return law


@dataclass
class TinyWorld:
    """A masked model and everything it can say."""

    model: LanguageModel

    def __post_init__(self) -> None:
        config = self.model.config
        assert config.mask_id is not None
        self.length, self.vocab, self.mask = config.length, config.vocab_size, config.mask_id

    @cached_property
    def states(self) -> Tensor:
        """All V^L rows of tokens and masks (S, L), in the order of their numbers."""
        return torch.tensor(list(itertools.product(range(self.vocab), repeat=self.length)))

    @cached_property
    def text_numbers(self) -> Tensor:
        """The numbers of the states without a mask."""
        return (self.states != self.mask).all(-1).nonzero()[:, 0]

    @cached_property
    def texts(self) -> Tensor:
        """The states without a mask."""
        return self.states[self.text_numbers]

    def number(self, tokens: Tensor) -> Tensor:
        """Return the numbers of states (…, L)."""
        place = self.vocab ** torch.arange(self.length - 1, -1, -1)
        return (tokens * place).sum(-1)

    def start(self, *tokens: int | None) -> Tensor:
        """Return a row to be filled, None where hidden; by default everywhere."""
        given = tokens or (None,) * self.length
        return torch.tensor([self.mask if token is None else token for token in given])

    def log_probs(self, level: float | None = None) -> tuple[Tensor | None, Tensor]:
        """Return the anchor network's and the model's log-probabilities of all states (S, L, V).

        The model never says the mask, and a visible token predicts itself.
        """
        levels = None if level is None else torch.full((len(self.states),), level)
        anchor, logits = adapter.predict(self.model, self.states, levels)
        logits = logits.double()
        logits[..., self.mask] = -torch.inf
        itself = torch.full_like(logits, -torch.inf).scatter_(-1, self.states[..., None], 0.0)
        is_hidden = (self.states == self.mask)[..., None]
        final = torch.where(is_hidden, logits, itself).log_softmax(-1)
        return None if anchor is None else anchor.double().log_softmax(-1), final

    def probs(self, level: float | None = None, draw: Draw | None = None) -> Tensor:
        """Return what every state predicts for every position, after temperature and nucleus."""
        probs = self.log_probs(level)[1].exp()
        if draw is None:
            return probs
        flat = [filter_probs(each, draw) for each in probs.flatten(0, 1)]
        return torch.stack(flat).view(probs.shape)

    def hidings(self, x0: Tensor) -> Tensor:
        """Return x0 under each of the 2^L patterns of hidden positions."""
        patterns = torch.tensor(list(itertools.product([False, True], repeat=self.length)))
        return torch.where(patterns, self.mask, x0)

    def windows(self, is_free: Tensor, block: int | None) -> list[list[int]]:
        """Return the free positions of each block."""
        size = block or self.length
        starts = range(0, self.length, size)
        return [[i for i in range(s, min(s + size, self.length)) if is_free[i]] for s in starts]

    def tabulate(self, law: Mapping[State, float]) -> Tensor:
        """Return a law as probabilities (S,) of all states."""
        found = torch.zeros(len(self.states), dtype=torch.float64)
        for state, chance in law.items():
            found[self.number(torch.tensor(state))] += chance
        return found


def exact_law(
    world: TinyWorld,
    name: str,
    options: Mapping[str, Any],
    draw: Draw | None = None,
    start: Tensor | None = None,
    is_free: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Return the exact law (S,) of a sampler's final tokens."""
    start = world.start() if start is None else start
    is_free = start == world.mask if is_free is None else is_free
    draw = draw or Draw()
    table = adapter.plan_table(name, **options)
    if table is None:
        return order_law(world, name, options, draw, start, is_free, block)
    return plan_law(world, table, draw, start, is_free, block)


def plan_law(
    world: TinyWorld, table: Table, draw: Draw, start: Tensor, is_free: Tensor, block: int | None
) -> Tensor:
    """Return the law (S,) of what a plan leaves behind.

    A state is its tokens and, where remasking goes by confidence, the probability with which each
    of them was drawn.
    """
    if not table.has_nucleus:
        draw = Draw(temperature=draw.temperature)
    fill = draw
    if table.has_lineage_fill:
        draw = Draw(draw.temperature, draw.top_k, draw.top_p, "lineage")
        fill = Draw(temperature=0.0)
    steps = len(table.t)
    here = {(tuple(start.tolist()), (0.0,) * world.length): 1.0}
    for free in world.windows(is_free, block):
        # A block begins without memory of how its tokens were drawn.
        here = _forget_draws(here)
        for step in range(steps + 1):
            is_fill = step == steps
            if is_fill:
                sigma, reveal, probs = 0.0, 1.0, world.probs(0.0, fill)
            else:
                alpha_t, alpha_s = float(table.alpha_t[step]), float(table.alpha_s[step])
                sigma = float(table.remask_prob[step])
                # By confidence, sigma is shared out by other shares than the plan's.
                kept = alpha_t if table.is_by_confidence else (1 - sigma) * alpha_t
                reveal = (
                    1.0 if alpha_t == 1 else min(1.0, max(0.0, (alpha_s - kept) / (1 - alpha_t)))
                )
                probs = world.probs(float(table.noise_level[step]), draw)
            here = _take_step(
                world, here, free, probs, sigma, reveal, table.is_by_confidence, is_fill
            )
    return world.tabulate(_forget_confidence(here))


Annotated = dict[tuple[State, tuple[float, ...]], float]


def _take_step(
    world: TinyWorld,
    here: Annotated,
    free: list[int],
    probs: Tensor,
    sigma: float,
    reveal: float,
    is_by_confidence: bool,
    is_fill: bool,
) -> Annotated:
    after: Annotated = defaultdict(float)
    for (tokens, drawn_with), mass in here.items():
        predicted = probs[world.number(torch.tensor(tokens))].tolist()
        visible = [i for i in free if tokens[i] != world.mask]
        doubt = sum(math.exp(-drawn_with[i]) for i in visible)
        choices: list[list[tuple[int, float, float]]] = []
        for i in range(world.length):
            if i not in free or (is_fill and i in visible):
                choices.append([(tokens[i], drawn_with[i], 1.0)])
            elif i in visible:
                share = math.exp(-drawn_with[i]) / doubt if is_by_confidence else 1.0
                choices.append(
                    [
                        (tokens[i], drawn_with[i], 1 - sigma * share),
                        (world.mask, 0.0, sigma * share),
                    ]
                )
            else:
                drawn = [
                    (v, p if is_by_confidence else 0.0, reveal * p)
                    for v, p in enumerate(predicted[i])
                ]
                choices.append([*drawn, (world.mask, 0.0, 1 - reveal)])
        for combination in itertools.product(*choices):
            chance = mass * math.prod(choice[2] for choice in combination)
            if chance > 0:
                state = tuple(choice[0] for choice in combination)
                after[state, tuple(choice[1] for choice in combination)] += chance
    return after


def _forget_draws(here: Annotated) -> Annotated:
    after: Annotated = defaultdict(float)
    for (state, drawn_with), mass in here.items():
        after[state, (0.0,) * len(drawn_with)] += mass
    return after


def _forget_confidence(here: Annotated) -> Law:
    law: Law = defaultdict(float)
    for (state, _), mass in here.items():
        law[state] += mass
    return law


def choose_positions(
    name: str, options: Mapping[str, Any], probs: list[list[float]], hidden: list[int], step: int
) -> list[int]:
    """Return the hidden positions that a sampler with a score reveals next."""
    ordered = {i: sorted(probs[i], reverse=True) for i in hidden}
    entropies = {i: -sum(p * math.log(p) for p in ordered[i] if p > 0) for i in hidden}
    scores = {
        "confidence": lambda i: -ordered[i][0],
        "margin": lambda i: -(ordered[i][0] - ordered[i][1]),
        "entropy_bounded": lambda i: entropies[i],
    }
    ranked = sorted(hidden, key=scores[name])
    if name != "entropy_bounded":
        return ranked[: math.ceil(len(hidden) / max(options["steps"] - step, 1))]
    count = 1
    for n in range(2, len(ranked) + 1):
        costs = [entropies[i] for i in ranked[:n]]
        if sum(costs) - max(costs) <= options["bound"]:
            count = n
    return ranked[:count]


def order_law(
    world: TinyWorld,
    name: str,
    options: Mapping[str, Any],
    draw: Draw,
    start: Tensor,
    is_free: Tensor,
    block: int | None,
) -> Tensor:
    """Return the law (S,) of ordered unmasking: all orders and tokens, one reveal after another."""
    plain, filtered = world.probs().tolist(), world.probs(draw=draw).tolist()
    here: Law = {tuple(start.tolist()): 1.0}
    for window in world.windows(is_free, block):
        step = 0
        while any(state[i] == world.mask for state in here for i in window):
            after: Law = defaultdict(float)
            for state, mass in here.items():
                hidden = [i for i in window if state[i] == world.mask]
                number = int(world.number(torch.tensor(state)))
                sets = [[i] for i in hidden] or [[]]
                if name != "first_hitting":
                    sets = [choose_positions(name, options, plain[number], hidden, step)]
                for chosen in sets:
                    for tokens in itertools.product(range(world.vocab), repeat=len(chosen)):
                        new = dict(zip(chosen, tokens, strict=True))
                        chance = math.prod(filtered[number][i][v] for i, v in new.items())
                        if chance > 0:
                            revealed = tuple(new.get(i, v) for i, v in enumerate(state))
                            after[revealed] += mass * chance / len(sets)
            here, step = after, step + 1
    return world.tabulate(here)


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """Return the probability of a chi-square at least this large if the counts follow the law.

    Rare outcomes are pooled.
    """
    assert not counts[law <= 0].any(), "something impossible was drawn"
    expected = law * counts.sum()
    is_common = expected >= 5
    seen, mean = (
        torch.cat([x[is_common].double(), x[~is_common].sum()[None].double()])
        for x in (counts, expected)
    )
    seen, mean = seen[mean > 1e-3], mean[mean > 1e-3]
    assert len(seen) > 1, "a law with one outcome has nothing to test"
    statistic = ((seen - mean) ** 2 / mean).sum()
    freedom = torch.tensor(len(seen) - 1.0).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
