"""A world small enough to be counted: three tokens and a mask, two or three positions, every state enumerated.

Nothing here calls the sampling code: the laws are written down a second time, naively, from the paper's Algorithm 1.
"""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.methods import METHODS, build_config
from adlm.models.language_model import LanguageModel

# Every sampler with few steps and, where it can, much remasking.
OPTIONS: dict[str, dict[str, Any]] = {
    "ancestral": {"steps": 6}, "forward_backward": {"steps": 6}, "remask_cap": {"steps": 6, "eta": 0.3},
    "remask_rescale": {"steps": 6, "eta": 0.3}, "remask_conf": {"steps": 6}, "remask_loop": {"steps": 8, "eta": 0.3},
    "ddpm": {"steps": 6}, "dfm": {"steps": 4}, "first_hitting": {}, "confidence": {"steps": 5},
    "margin": {"steps": 5}, "entropy_bounded": {"bound": 2.0},
}  # fmt: skip


def random_model(method: str = "adlm", *, seed: int = 0, scale: float = 1.0, **changes: object) -> LanguageModel:
    """A small model in which nothing is zero: predictions are not uniform and differ by context."""
    shape = METHODS[method]
    small: dict = {"vocab_size": 4, "mask_id": 3, "dim": 8, "heads": 2, "denoiser_layers": 1, "length": 3}
    small |= {"anchor_layers": int(shape.two_stages), "dropout": 0.0, "bridge": "factored"}
    small |= {} if shape.is_causal else {"cond_dim": 8}
    config = build_config(method, "nano", **(small | changes))
    model, rng = LanguageModel(config, seed=seed), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if name.endswith("head.weight"):
                parameter.copy_(noise * 1.5 * scale / config.dim**0.5)
            elif name.startswith(("embed", "positions")) or "qkv" in name or "out" in name:
                parameter.copy_(noise * scale)  # loud enough for every token to hear the others
            else:
                parameter.add_(noise * 0.2 * scale)
    return model.eval()


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
    def texts(self) -> Tensor:
        """The numbers of the states without a mask."""
        return (self.states != self.mask).all(-1).nonzero()[:, 0]

    def number(self, tokens: Tensor) -> Tensor:
        place = self.vocab ** torch.arange(self.length - 1, -1, -1)
        return (tokens * place).sum(-1)

    def start(self, *tokens: int | None) -> Tensor:
        """A row to be filled, None where hidden; by default everywhere."""
        given = tokens or (None,) * self.length
        return torch.tensor([self.mask if token is None else token for token in given])

    def point(self, start: Tensor | None = None) -> Tensor:
        """The law (S,) that is certain of one state, by default of the one with everything hidden."""
        reach = torch.zeros(len(self.states), dtype=torch.float64)
        reach[self.number(self.start() if start is None else start)] = 1
        return reach

    def log_probs(self, level: float | Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """(anchor log-softmax, SUBS log-probabilities) of all states, (S, L, V) each."""
        if level is not None:
            level = torch.as_tensor(level).float().expand(len(self.states))
        with torch.no_grad():
            anchor, final = self.model.log_probs(self.states, level)
        # Normalized once more: a float32 softmax sums to 1 only to 1e-7.
        return None if anchor is None else anchor.double().log_softmax(-1), final.double().log_softmax(-1)

    def probs(self, level: float | Tensor | None = None, how: SamplingParams | None = None) -> Tensor:
        """What every state predicts for every position, after temperature, top-k and top-p."""
        probs = self.log_probs(level)[1].exp()
        return torch.stack([torch.stack([filtered(p, how) for p in row]) for row in probs]) if how else probs

    def hidings(self, x0: Tensor) -> Tensor:
        """x0 under each of the 2^L patterns of hidden positions."""
        patterns = torch.tensor(list(itertools.product([False, True], repeat=self.length)))
        return torch.where(patterns, self.mask, x0)


def filtered(probs: Tensor, how: SamplingParams) -> Tensor:
    """One distribution (V,) after temperature, top-k, top-p in this order, token by token."""
    if how.temperature == 0:
        return torch.nn.functional.one_hot(probs.argmax(), len(probs)).double()
    weights = {i: p ** (1 / how.temperature) for i, p in enumerate(probs.tolist()) if p > 0}
    ranked = sorted(weights, key=lambda i: -weights[i])[: how.top_k]
    whole = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        after = mass + weights[i] / whole
        if kept and (mass >= how.top_p if how.nucleus == "usual" else after > how.top_p + 1e-12):
            break
        kept.append(i)
        mass = after
    out = torch.zeros(len(probs), dtype=torch.float64)
    for i in kept:
        out[i] = weights[i] / whole / mass
    return out


def windows(world: TinyWorld, is_free: Tensor, block: int | None) -> list[Tensor]:
    position = torch.arange(world.length)
    starts = range(0, world.length, block) if block else [0]
    return [is_free & (position >= s) & (position < s + (block or world.length)) for s in starts]


def joint(world: TinyWorld, law: Tensor) -> Tensor:
    """Independent positions (S, L, V) -> transition matrix (S, S)."""
    matrix = torch.ones(len(world.states), len(world.states), dtype=torch.float64)
    for position in range(world.length):
        matrix *= law[:, position, world.states[:, position]]
    return matrix


def reveal_prob(alpha_t: float, alpha_s: float, remask: float) -> float:
    return min(1.0, max(0.0, (alpha_s - (1 - remask) * alpha_t) / (1 - alpha_t)))


def plan_law(
    world: TinyWorld, plan: Plan, how: SamplingParams, start: Tensor, is_free: Tensor, block: int | None = None
) -> Tensor:
    """The law (S,) of what a plan leaves behind: a distribution over all states, pushed through every transition."""
    if not plan.nucleus:
        how = SamplingParams(temperature=how.temperature)
    eye = torch.eye(world.vocab, dtype=torch.float64)
    stay, mask, is_hidden = eye[world.states], eye[world.mask], (world.states == world.mask)[..., None]
    reach = world.point(start)

    def move(reach: Tensor, window: Tensor, reveal: float, remask: float, level: Tensor, how: SamplingParams) -> Tensor:
        hidden = reveal * world.probs(level, how) + (1 - reveal) * mask
        law = torch.where(is_hidden, hidden, (1 - remask) * stay + remask * mask)
        return reach @ joint(world, torch.where(window[None, :, None], law, stay))

    for window in windows(world, is_free, block):
        for step in range(len(plan)):
            alpha_t, alpha_s, remask = (float(x[step]) for x in (plan.alpha_t, plan.alpha_s, plan.remask_prob))
            reveal = reveal_prob(alpha_t, alpha_s, remask)
            reach = move(reach, window, reveal, remask, plan.noise_level[step], how)
        fill = SamplingParams(temperature=0.0) if plan.fill_argmax else how
        reach = move(reach, window, 1.0, 0.0, torch.zeros(()), fill)
    return reach


def conf_law(world: TinyWorld, plan: Plan, how: SamplingParams, start: Tensor, is_free: Tensor) -> Tensor:
    """As `plan_law` where a state is its tokens and the probability with which each of them was drawn."""
    here = {(tuple(start.tolist()), (0.0,) * world.length): 1.0}
    free = [i for i in range(world.length) if is_free[i]]
    fill = SamplingParams(temperature=0.0) if plan.fill_argmax else how
    for step in range(len(plan) + 1):
        is_fill = step == len(plan)
        level = 0.0 if is_fill else float(plan.noise_level[step])
        table = world.probs(level, fill if is_fill else how)
        after: dict = defaultdict(float)
        for (tokens, drawn_with), mass in here.items():
            probs = table[world.number(torch.tensor(tokens))].tolist()
            visible = [i for i in free if tokens[i] != world.mask]
            doubt = sum(math.exp(-drawn_with[i]) for i in visible)
            choices = []
            for i in range(world.length):
                if i not in free or (is_fill and i in visible):
                    choices.append([(tokens[i], drawn_with[i], 1.0)])
                elif i in visible:
                    remask = float(plan.remask_prob[step]) * math.exp(-drawn_with[i]) / doubt
                    kept = (tokens[i], drawn_with[i], 1 - remask)
                    choices.append([kept, (world.mask, 0.0, remask)])
                else:
                    reveal = 1.0 if is_fill else reveal_prob(float(plan.alpha_t[step]), float(plan.alpha_s[step]), 0.0)
                    drawn = [(v, p, reveal * p) for v, p in enumerate(probs[i])]
                    choices.append([*drawn, (world.mask, 0.0, 1 - reveal)])
            for combination in itertools.product(*choices):
                chance = mass * math.prod(c[2] for c in combination)
                if chance > 0:
                    after[tuple(c[0] for c in combination), tuple(c[1] for c in combination)] += chance
        here = after
    return sum((mass * world.point(torch.tensor(tokens)) for (tokens, _), mass in here.items()), 0 * world.point())


def chosen_by(order: Order, probs: list[list[float]], hidden: list[int], step: int) -> list[int]:
    """The hidden positions that a scored order reveals next."""
    ordered = {i: sorted(probs[i], reverse=True) for i in hidden}
    entropies = {i: -sum(p * math.log(p) for p in ordered[i] if p > 0) for i in hidden}
    score = {
        "confidence": lambda i: -ordered[i][0],
        "margin": lambda i: -(ordered[i][0] - ordered[i][1]),
        "entropy_bounded": lambda i: entropies[i],
    }[order.name]
    ranked = sorted(hidden, key=score)
    if order.entropy_bound is None:
        assert order.steps is not None
        return ranked[: math.ceil(len(hidden) / max(order.steps - step, 1))]
    count = 1
    for n in range(2, len(ranked) + 1):
        costs = [entropies[i] for i in ranked[:n]]
        if sum(costs) - max(costs) <= order.entropy_bound:
            count = n
    return ranked[:count]


def order_law(
    world: TinyWorld, order: Order, how: SamplingParams, start: Tensor, is_free: Tensor, block: int | None = None
) -> Tensor:
    """The law (S,) of ordered unmasking: all orders and all tokens, one reveal after the other."""
    plain, drawn = world.probs().tolist(), world.probs(how=how).tolist()
    here = {tuple(start.tolist()): 1.0}
    for window in windows(world, is_free, block):
        step = 0
        while any(state[i] == world.mask and window[i] for state in here for i in range(world.length)):
            after: dict = defaultdict(float)
            for state, mass in here.items():
                hidden = [i for i in range(world.length) if window[i] and state[i] == world.mask]
                number = int(world.number(torch.tensor(state)))
                if not hidden:
                    sets = [[]]
                elif order.score is None:
                    sets = [[i] for i in hidden]
                else:
                    sets = [chosen_by(order, plain[number], hidden, step)]
                for chosen in sets:
                    for tokens in itertools.product(range(world.vocab), repeat=len(chosen)):
                        chance = math.prod(drawn[number][i][v] for i, v in zip(chosen, tokens, strict=True))
                        if chance > 0:
                            new = list(state)
                            for i, v in zip(chosen, tokens, strict=True):
                                new[i] = v
                            after[tuple(new)] += mass * chance / len(sets)
            here, step = after, step + 1
    return sum((mass * world.point(torch.tensor(state)) for state, mass in here.items()), 0 * world.point())


def law_of(
    world: TinyWorld,
    sampler: Plan | Order,
    how: SamplingParams | None = None,
    start: Tensor | None = None,
    is_free: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """The exact law (S,) of any sampler's final tokens."""
    start = world.start() if start is None else start
    is_free = start == world.mask if is_free is None else is_free
    if isinstance(sampler, Order):
        return order_law(world, sampler, how or SamplingParams(), start, is_free, block)
    if sampler.by_confidence:
        assert block is None
        return conf_law(world, sampler, how or SamplingParams(), start, is_free)
    return plan_law(world, sampler, how or SamplingParams(), start, is_free, block)


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """Probability of a chi-square at least this large if the counts follow the law; rare outcomes are pooled."""
    assert not counts[law <= 0].any(), "something impossible was drawn"
    expected = law * counts.sum()
    is_common = expected >= 5
    seen = torch.cat([counts[is_common].double(), counts[~is_common].sum()[None].double()])
    wanted = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    seen, wanted = seen[wanted > 1e-3], wanted[wanted > 1e-3]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = len(seen) - 1
    assert freedom > 0, "a law with one outcome has nothing to test"
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
