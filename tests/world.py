"""A world small enough to be counted: three tokens and a mask, two or three positions, every state enumerated.

But for `ancestral_law`, nothing here calls the sampling code: the laws are written down a second time, naively, from
the paper's Algorithm 1.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.diffusion.categorical import (
    SamplingParams,
    apply_temperature,
    drop_unlikely,
    find_candidates,
)
from adlm.diffusion.features import Features
from adlm.diffusion.plans import Plan, ancestral, reverse_distribution
from adlm.diffusion.samplers import ByScore, EntropyBounded, FirstHitting, RemaskByConfidence
from adlm.diffusion.sampling import Evaluator, Row, Sampler, fill_rows
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.methods import METHODS, build_config
from adlm.models.transformer import SlotCache, SlotWindow

VOCAB, MASK = 12, 11  # of `small_model`
# Every sampler with few steps and, where it can, much remasking.
OPTIONS: dict[str, dict[str, Any]] = {
    "ancestral": {"steps": 6}, "forward_backward": {"steps": 6}, "remask_cap": {"steps": 6, "eta": 0.3},
    "remask_rescale": {"steps": 6, "eta": 0.3}, "remask_conf": {"steps": 6}, "remask_loop": {"steps": 8, "eta": 0.3},
    "ddpm": {"steps": 6}, "dfm": {"steps": 4}, "first_hitting": {}, "confidence": {"steps": 5},
    "margin": {"steps": 5}, "entropy_bounded": {"bound": 2.0},
}  # fmt: skip


def as_settings(sampler: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a sampler with its steps and options as the settings of `LM.generate`."""
    own = {name: value for name, value in options.items() if name != "steps"}
    settings: dict[str, Any] = {"sampler": sampler, "steps": options.get("steps")}
    return settings | {"options": own or None}


SAMPLING = {name: as_settings(name, options) for name, options in OPTIONS.items()}


def open_windows(caches: Sequence[SlotCache], rows: int, start: int, size: int) -> None:
    """Let the next call read tokens start … start + size - 1 of each of the first rows."""
    position = torch.arange(start, start + size).expand(rows, -1)
    window = SlotWindow.open(None, position, start + size)
    for cache in caches:
        cache.window = window


def read_in_parts(model: LanguageModel, tokens: Tensor, sizes: Sequence[int]) -> list[Features]:
    """Features of rows (B, L) that are read in parts, with a cache."""
    caches = model.new_slot_cache(*tokens.shape)
    parts = []
    start = 0
    for part in tokens.split(list(sizes), 1):
        open_windows(caches, len(part), start, part.shape[1])
        parts.append(model(part, cache=caches))
        start += part.shape[1]
    return parts


def random_model(
    method: str = "adlm", *, seed: int = 0, scale: float = 1.0, **changes: object
) -> LanguageModel:
    """A small model in which nothing is zero: predictions are not uniform and differ by context."""
    shape = METHODS[method]
    small: dict = {
        "vocab_size": 4,
        "mask_id": 3,
        "dim": 8,
        "heads": 2,
        "denoiser_layers": 1,
        "length": 3,
    }
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


def small_model(method: str = "adlm", **changes: object) -> LanguageModel:
    """A random model of 12 tokens and length 20: large enough for contexts to differ."""
    size = {"vocab_size": VOCAB, "mask_id": MASK, "length": 20, "dim": 16, "seed": 3, "scale": 0.6}
    return random_model(method, **(size | changes))  # type: ignore[arg-type]


def fill(
    evaluator: Evaluator,
    xt: Tensor,
    sampler: Plan | Sampler,
    *,
    numbers: Tensor | None = None,
    is_fixed: Tensor | None = None,
    banned: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The tokens (B, L) of rows that are sampled together."""
    rows = [
        Row(
            x,
            sampler,
            None if is_fixed is None else is_fixed[k],
            number=k if numbers is None else int(numbers[k]),
            **options,
        )
        for k, x in enumerate(xt)
    ]
    return torch.stack(fill_rows(evaluator, rows, banned=banned))


def random_tokens(rows: int, length: int = 16, vocab: int = MASK, seed: int = 0) -> Tensor:
    """Rows (B, L) of tokens below `vocab`."""
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def shapes_only(config: ModelConfig) -> LanguageModel:
    """A model on the meta device: shapes without memory."""
    model = LanguageModel(config, seed=None)
    if config.tied:
        model.head.weight = model.embed.weight
    return model


def count_weights(*modules: nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def compute_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The probabilities (N, V) that `draw` draws from, in float64."""
    if params.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    cooled = drop_unlikely(apply_temperature(logits, params.temperature), params.min_p)
    probs, ids, _ = find_candidates(cooled, params, logits.shape[-1])
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, ids, probs)


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
        return None if anchor is None else anchor.double().log_softmax(
            -1
        ), final.double().log_softmax(-1)

    def probs(
        self, level: float | Tensor | None = None, sampling: SamplingParams | None = None
    ) -> Tensor:
        """What every state predicts for every position, after temperature, top-k and top-p."""
        probs = self.log_probs(level)[1].exp()
        return (
            torch.stack([torch.stack([filter_probs(p, sampling) for p in row]) for row in probs])
            if sampling
            else probs
        )

    def hidings(self, x0: Tensor) -> Tensor:
        """x0 under each of the 2^L patterns of hidden positions."""
        patterns = torch.tensor(list(itertools.product([False, True], repeat=self.length)))
        return torch.where(patterns, self.mask, x0)

    def windows(self, is_free: Tensor, block: int | None) -> list[list[int]]:
        """The free positions of each block."""
        size = block or self.length
        return [
            [i for i in range(s, min(s + size, self.length)) if is_free[i]]
            for s in range(0, self.length, size)
        ]


def filter_probs(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """One distribution (V,) after temperature, min-p, top-k, top-p in this order, token by token."""
    if sampling.temperature == 0:
        return nn.functional.one_hot(probs.argmax(), len(probs)).double()
    weights = {i: p ** (1 / sampling.temperature) for i, p in enumerate(probs.tolist()) if p > 0}
    least = sampling.min_p * max(weights.values())
    weights = {i: weight for i, weight in weights.items() if weight >= least}
    ranked = sorted(weights, key=lambda i: -weights[i])[: sampling.top_k]
    whole = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        after = mass + weights[i] / whole
        if kept and (
            mass >= sampling.top_p
            if sampling.nucleus == "usual"
            else after > sampling.top_p + 1e-12
        ):
            break
        kept.append(i)
        mass = after
    out = torch.zeros(len(probs), dtype=torch.float64)
    for i in kept:
        out[i] = weights[i] / whole / mass
    return out


def ancestral_law(world: TinyWorld, steps: int) -> Tensor:
    """The law (S,) of the ancestral sampler by the package's `reverse_distribution`, by matrices (S, S)."""
    reach, probs = world.point(), world.probs()
    for step in ancestral(steps):
        law = reverse_distribution(world.states, probs, step, world.mask)
        reach = reach @ math.prod(law[:, i, world.states[:, i]] for i in range(world.length))
    return reach


def plan_law(
    world: TinyWorld,
    sampler: Plan | RemaskByConfidence,
    sampling: SamplingParams,
    start: Tensor,
    is_free: Tensor,
    block: int | None,
) -> Tensor:
    """The law (S,) of what a plan leaves behind, through every transition of every position.

    A state is its tokens and, for conf, the probability with which each of them was drawn.
    """
    by_confidence = isinstance(sampler, RemaskByConfidence)
    plan = sampler.plan if isinstance(sampler, RemaskByConfidence) else sampler
    if not plan.nucleus:
        sampling = SamplingParams(temperature=sampling.temperature)
    fill = SamplingParams(temperature=0.0) if plan.fill_argmax else sampling
    here = {(tuple(start.tolist()), (0.0,) * world.length): 1.0}
    for free, step in itertools.product(world.windows(is_free, block), range(len(plan) + 1)):
        if is_fill := step == len(plan):
            sigma, reveal, table = 0.0, 1.0, world.probs(0.0, fill)
        else:
            alpha_t, alpha_s, sigma = (
                float(x[step]) for x in (plan.alpha_t, plan.alpha_s, plan.remask_prob)
            )
            kept = (
                alpha_t if by_confidence else (1 - sigma) * alpha_t
            )  # conf remasks by its own shares
            reveal = min(1.0, max(0.0, (alpha_s - kept) / (1 - alpha_t)))
            table = world.probs(float(plan.noise_level[step]), sampling)
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
                    remask = sigma * math.exp(-drawn_with[i]) / doubt if by_confidence else sigma
                    choices.append(
                        [(tokens[i], drawn_with[i], 1 - remask), (world.mask, 0.0, remask)]
                    )
                else:
                    drawn = [
                        (v, p if by_confidence else 0.0, reveal * p) for v, p in enumerate(probs[i])
                    ]
                    choices.append([*drawn, (world.mask, 0.0, 1 - reveal)])
            for combination in itertools.product(*choices):
                chance = mass * math.prod(c[2] for c in combination)
                if chance > 0:
                    after[tuple(c[0] for c in combination), tuple(c[1] for c in combination)] += (
                        chance
                    )
        here = after
    return sum(
        (mass * world.point(torch.tensor(tokens)) for (tokens, _), mass in here.items()),
        0 * world.point(),
    )


def choose_positions(
    order: ByScore | EntropyBounded, probs: list[list[float]], hidden: list[int], step: int
) -> list[int]:
    """The hidden positions that a scored order reveals next."""
    ordered = {i: sorted(probs[i], reverse=True) for i in hidden}
    entropies = {i: -sum(p * math.log(p) for p in ordered[i] if p > 0) for i in hidden}
    score = {
        "confidence": lambda i: -ordered[i][0],
        "margin": lambda i: -(ordered[i][0] - ordered[i][1]),
        "entropy_bounded": lambda i: entropies[i],
    }[order.name]
    ranked = sorted(hidden, key=score)
    if isinstance(order, ByScore):
        return ranked[: math.ceil(len(hidden) / max(order.steps - step, 1))]
    count = 1
    for n in range(2, len(ranked) + 1):
        costs = [entropies[i] for i in ranked[:n]]
        if sum(costs) - max(costs) <= order.bound:
            count = n
    return ranked[:count]


def order_law(
    world: TinyWorld,
    order: Sampler,
    sampling: SamplingParams,
    start: Tensor,
    is_free: Tensor,
    block: int | None,
) -> Tensor:
    """The law (S,) of ordered unmasking: all orders and all tokens, one reveal after the other."""
    plain, filtered = world.probs().tolist(), world.probs(sampling=sampling).tolist()
    here = {tuple(start.tolist()): 1.0}
    for window in world.windows(is_free, block):
        step = 0
        while any(state[i] == world.mask for state in here for i in window):
            after: dict = defaultdict(float)
            for state, mass in here.items():
                hidden = [i for i in window if state[i] == world.mask]
                number = int(world.number(torch.tensor(state)))
                if isinstance(order, FirstHitting):
                    sets = [[i] for i in hidden] or [[]]
                else:
                    assert isinstance(order, ByScore | EntropyBounded)
                    sets = [choose_positions(order, plain[number], hidden, step)]
                for chosen in sets:
                    for tokens in itertools.product(range(world.vocab), repeat=len(chosen)):
                        new = dict(zip(chosen, tokens, strict=True))
                        if (
                            chance := math.prod(filtered[number][i][v] for i, v in new.items())
                        ) > 0:
                            after[tuple(new.get(i, v) for i, v in enumerate(state))] += (
                                mass * chance / len(sets)
                            )
            here, step = after, step + 1
    return sum(
        (mass * world.point(torch.tensor(state)) for state, mass in here.items()), 0 * world.point()
    )


def exact_law(
    world: TinyWorld,
    sampler: Plan | Sampler,
    sampling: SamplingParams | None = None,
    start: Tensor | None = None,
    is_free: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """The exact law (S,) of any sampler's final tokens."""
    start = world.start() if start is None else start
    is_free = start == world.mask if is_free is None else is_free
    sampling = sampling or SamplingParams()
    if isinstance(sampler, Plan | RemaskByConfidence):
        return plan_law(world, sampler, sampling, start, is_free, block)
    return order_law(world, sampler, sampling, start, is_free, block)


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """Probability of a chi-square at least this large if the counts follow the law; rare outcomes are pooled."""
    assert not counts[law <= 0].any(), "something impossible was drawn"
    expected = law * counts.sum()
    is_common = expected >= 5
    seen, mean = (
        torch.cat([x[is_common].double(), x[~is_common].sum()[None].double()])
        for x in (counts, expected)
    )
    seen, mean = seen[mean > 1e-3], mean[mean > 1e-3]
    assert len(seen) > 1, "a law with one outcome has nothing to test"
    statistic, freedom = ((seen - mean) ** 2 / mean).sum(), torch.tensor(len(seen) - 1.0).double()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
