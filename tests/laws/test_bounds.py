"""Losses, bounds and likelihoods in a world that can be counted: every text, mask and order."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws import adapter
from tests.laws.adapter import Anchors, Loss
from tests.laws.world import TinyWorld, exact_law, small_model, tiny_model

WORLDS = {
    2: TinyWorld(tiny_model(seed=39, length=2)),
    3: TinyWorld(tiny_model(seed=113, positions="learned")),
}
LENGTHS = tuple(WORLDS)
EXACT = adapter.make_schedule("loglinear", eps=0.0)


def hidden_costs(world: TinyWorld, x0: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ over hidden positions of -log p(x0 | xt) of every pattern, and their number."""
    xt = world.hidings(x0)
    log_probs = world.log_probs()[1][world.number(xt)]
    nats = -log_probs.gather(-1, x0.expand_as(xt)[..., None])[..., 0]
    is_hidden = xt == world.mask
    return torch.where(is_hidden, nats, 0.0).sum(-1), is_hidden.sum(-1)


def pattern_weights(hidden: Tensor, length: int) -> Tensor:
    """Return ∫ (1/t) t^h (1 - t)^(L - h) dt = 1 / (h C(L, h)), a pattern's weight in the NELBO."""
    weights = [1 / (h * math.comb(length, h)) if h else 0.0 for h in hidden.tolist()]
    return torch.tensor(weights, dtype=torch.float64)


def pattern_chances(t: Tensor, hidden: Tensor, length: int) -> Tensor:
    """Return t^h (1 - t)^(L - h), how likely each pattern is at each time (times, patterns)."""
    return t[:, None] ** hidden * (1 - t[:, None]) ** (length - hidden)


def count_nelbo(world: TinyWorld, x0: Tensor) -> float:
    """Return the NELBO of a text by all patterns, for alpha = 1 - t."""
    cost, hidden = hidden_costs(world, x0)
    return float((cost * pattern_weights(hidden, world.length)).sum())


def count_discrete_nelbo(world: TinyWorld, x0: Tensor, steps: int) -> float:
    """Return Σ over steps of (alpha_s - alpha_t) / (1 - alpha_t) E Σ_hidden -log p."""
    cost, hidden = hidden_costs(world, x0)
    t = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    expected = (pattern_chances(t, hidden, world.length) * cost).sum(-1)
    return float((expected / t).sum() / steps)


def loss_of_patterns(
    world: TinyWorld,
    x0: Tensor,
    xt: Tensor,
    weight: Tensor,
    gamma: float | None = None,
    anchors: Anchors | None = None,
) -> tuple[Loss, float]:
    """Return the loss, and its number of tokens, of rows of one text with given weights."""
    ones = torch.ones(len(xt))
    batch = adapter.known_rows(
        x0.expand(len(xt), -1), xt, world.mask, t=ones, weight=weight.float(),
        noise_level=0 * ones, anchors=anchors,
    )  # fmt: skip
    with torch.no_grad():
        return adapter.compute_loss(world.model, batch, gamma=gamma), batch.tokens


@pytest.mark.parametrize("length", LENGTHS)
def test_the_nelbo_is_the_weighted_sum_over_all_masks(length: int) -> None:
    world = WORLDS[length]
    for x0 in world.texts:
        cost, hidden = hidden_costs(world, x0)
        weight = pattern_weights(hidden, length)
        loss, tokens = loss_of_patterns(world, x0, world.hidings(x0), weight)
        assert float(loss.nll) * tokens == pytest.approx(count_nelbo(world, x0), rel=1e-5)
        assert float(loss.total) == float(loss.nll)
        expected = cost * weight
        torch.testing.assert_close(loss.row_nll.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("loglinear", {}), ("loglinear", {"eps": 0.0}), ("cosine", {}), ("cosine_squared", {})],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_corruption_estimates_the_nelbo(length: int, name: str, options: dict[str, Any]) -> None:
    """The mean over many noises lies within four standard errors of the integral over t."""
    world, rows = WORLDS[length], 20_000
    schedule = adapter.make_schedule(name, **options)
    nodes, node_weights = np.polynomial.legendre.leggauss(60)
    t = torch.from_numpy((nodes + 1) / 2 * (1 - 1e-3) + 1e-3)
    hidden_prob = 1 - schedule.alpha(t)
    for number, x0 in enumerate(world.texts[::9]):
        cost, hidden = hidden_costs(world, x0)
        chance = pattern_chances(hidden_prob, hidden, length)
        each_time = -schedule.dalpha(t) / hidden_prob * (chance * cost).sum(-1)
        expected = float((torch.from_numpy(node_weights) / 2 * each_time).sum())
        batch = adapter.corrupt_rows(
            x0.expand(rows, -1), world.mask, seed=7, step=number, schedule=name,
            schedule_options=options,
        )  # fmt: skip
        with torch.no_grad():
            row_nll = adapter.compute_loss(world.model, batch).row_nll.double()
        error = float(row_nll.std()) / math.sqrt(rows)
        assert error < 0.05 * expected
        assert abs(float(row_nll.mean()) - expected) < 4 * error


def test_bell_shaped_times_change_no_bound() -> None:
    """Times around 1/2 are weighed so that the reported nll stays an estimate of the NELBO."""
    world, rows = WORLDS[3], 40_000
    x0 = world.texts[4]
    means = []
    for time_std in (None, 0.4):
        batch = adapter.corrupt_rows(
            x0.expand(rows, -1), world.mask, seed=3, step=1, time_std=time_std
        )
        with torch.no_grad():
            row_nll = adapter.compute_loss(world.model, batch).row_nll.double()
        means.append((float(row_nll.mean()), float(row_nll.std()) / math.sqrt(rows)))
    (plain, error), (bell, bell_error) = means
    assert abs(plain - bell) < 4 * math.hypot(error, bell_error)


@pytest.mark.parametrize("steps", [1, 2, 5, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_discrete_time_is_the_sum_over_its_steps(length: int, steps: int) -> None:
    world = WORLDS[length]
    t = torch.arange(1, steps + 1) / steps
    weight = EXACT.discrete_loss_weight(t.double(), steps) / steps
    for x0 in world.texts:
        xt = world.hidings(x0)
        hidden = (xt == world.mask).sum(-1)
        weights = (pattern_chances(t, hidden, length) * weight[:, None]).flatten()
        loss, tokens = loss_of_patterns(world, x0, xt.repeat(steps, 1), weights)
        expected = count_discrete_nelbo(world, x0, steps)
        assert float(loss.nll) * tokens == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_a_held_out_bound_in_discrete_time(steps: int) -> None:
    """Every step is drawn alike, the first and the last too; the bound is the enumerated one."""
    world = WORLDS[2]
    x0 = world.texts[1]
    rows = x0.expand(4000, -1)
    batch = adapter.corrupt_rows(rows, world.mask, seed=0, step=0, steps=steps)
    times, count = (batch.t * steps).round().unique(return_counts=True)
    assert times.tolist() == list(range(1, steps + 1))
    assert count.max() - count.min() <= 2
    bound = adapter.row_nats(world.model, rows, batch=1000, draws=4, steps=steps)
    # The schedule hides a thousandth less than the enumeration's alpha = 1 - t.
    expected = count_discrete_nelbo(world, x0, steps) / world.length
    assert bound.nll == pytest.approx(expected, abs=4 * bound.stderr + 2e-3 * expected)


def chain_chances(world: TinyWorld, x0: Tensor) -> list[float]:
    """Return log p of a text under every permutation, as the product of its conditionals."""
    log_probs, chances = world.log_probs()[1], []
    for order in itertools.permutations(range(world.length)):
        xt, chance = world.start(), 0.0
        for position in order:
            chance += float(log_probs[world.number(xt), position, x0[position]])
            xt[position] = x0[position]
        chances.append(chance)
    return chances


@pytest.mark.parametrize("length", LENGTHS)
def test_the_likelihood_of_any_order_is_below_the_nelbo(length: int) -> None:
    """First-hitting is the mixture over orders; the NELBO takes the mean over logarithms."""
    world, total = WORLDS[length], 0.0
    law = exact_law(world, "first_hitting", {})
    for x0 in world.texts:
        chances = chain_chances(world, x0)
        likelihood = sum(map(math.exp, chances)) / len(chances)
        assert float(law[world.number(x0)]) == pytest.approx(likelihood, rel=1e-9)
        bound = count_nelbo(world, x0)
        assert bound == pytest.approx(-sum(chances) / len(chances), rel=1e-9)
        assert -math.log(likelihood) <= bound + 1e-12
        total += likelihood
    assert total == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_ancestral_likelihood_is_below_its_nelbo(length: int, steps: int) -> None:
    world = WORLDS[length]
    law = exact_law(world, "ancestral", {"steps": steps})
    assert float(law[world.text_numbers].sum()) == pytest.approx(1, abs=1e-9)
    gaps = []
    for x0 in world.texts:
        log_prob = math.log(law[world.number(x0)])
        gaps.append(count_discrete_nelbo(world, x0, steps) + log_prob)
    assert min(gaps) >= -1e-9
    if steps == 1:
        assert max(gaps) == pytest.approx(0, abs=1e-9)
    else:
        assert max(gaps) > 1e-3


# Two stages

RULES = {
    "every": Anchors("every"),
    "rare": Anchors("rare_in_sequence", {"max_count": 1}),
    "listed": Anchors("listed", {"ids": [0, 2], "vocab_size": 4}),
    "random": Anchors("random", {"fraction": 0.5, "seed": 3}),
}


def step_divergence(
    world: TinyWorld, xt: Tensor, x0: Tensor, probs: Tensor, alpha_t: float, alpha_s: float
) -> Tensor:
    """Return KL (S, L) of one step's true reverse distribution from that with `probs`."""
    reveal = (alpha_s - alpha_t) / (1 - alpha_t)
    truth = torch.nn.functional.one_hot(x0, world.vocab).double()
    mask = torch.nn.functional.one_hot(torch.tensor(world.mask), world.vocab).double()
    q, p = (reveal * each + (1 - reveal) * mask for each in (truth, probs))
    each_token = torch.where(q > 0, q * (q / p).log(), 0.0).sum(-1)
    return torch.where(xt == world.mask, each_token, 0.0)


def sum_divergences(
    world: TinyWorld, x0: Tensor, is_anchor: Tensor, steps: int
) -> tuple[float, float]:
    """Return Σ over steps of the expected KL of the denoiser's and the anchor network's steps."""
    xt = world.hidings(x0)
    hidden, truth = (xt == world.mask).sum(-1), x0.expand_as(xt)
    anchor, final = world.log_probs()
    assert anchor is not None
    numbers = world.number(xt)
    of_denoiser = of_anchor = 0.0
    for step in range(steps):
        alpha_t, alpha_s = step / steps, (step + 1) / steps
        chance = (1 - alpha_t) ** hidden * alpha_t ** (world.length - hidden)
        denoised, anchored = (
            step_divergence(world, xt, truth, probs.exp()[numbers], alpha_t, alpha_s)
            for probs in (final, anchor)
        )
        of_denoiser += float((chance * denoised.sum(-1)).sum())
        of_anchor += float((chance * (anchored * is_anchor).sum(-1)).sum())
    return of_denoiser, of_anchor


def compute_anelbo(
    world: TinyWorld, x0: Tensor, rule: Anchors, gamma: float, steps: int, scope: str
) -> tuple[float, float, float]:
    """Return total, nll and anchor term of the discrete-time ANELBO of a text."""
    t = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    xt = world.hidings(x0)
    chance = pattern_chances(t, (xt == world.mask).sum(-1), world.length)
    weight = (chance * EXACT.discrete_loss_weight(t, steps)[:, None] / steps).flatten()
    anchors = Anchors(rule.rule, rule.options, scope)
    loss, tokens = loss_of_patterns(world, x0, xt.repeat(steps, 1), weight, gamma, anchors)
    return float(loss.total) * tokens, float(loss.nll) * tokens, float(loss.anchor) * tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_anelbo_is_the_sum_of_both_divergences(length: int, rule: str) -> None:
    """With an anchor network that never names the mask, in the paper's scope: what is hidden."""
    world = TinyWorld(tiny_model(seed=39 if length == 2 else 48, length=length))
    adapter.silence_mask_of_anchors(world.model)
    compared = 0
    for x0 in world.texts:
        is_anchor = adapter.find_anchors(RULES[rule], x0[None])[0]
        of_denoiser, of_anchor = sum_divergences(world, x0, is_anchor, 4)
        total, nll, anchor = compute_anelbo(world, x0, RULES[rule], 0.7, 4, "masked")
        assert nll == pytest.approx(of_denoiser, rel=1e-5)
        assert anchor == pytest.approx(of_anchor, rel=1e-5, abs=1e-6)
        assert total == pytest.approx(of_denoiser + 0.7 * of_anchor, rel=1e-5)
        compared += of_anchor > 0.01
    assert compared


@pytest.mark.parametrize("gamma", [0.0, 3e-3, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_the_anelbo_bounds_likelihood_and_anchor_loss(rule: str, gamma: float) -> None:
    """-log p(x) + γ L_anchor ≤ ANELBO (the paper's theorem); the lineage's scope only adds."""
    world, steps = WORLDS[3], 3
    law = exact_law(world, "ancestral", {"steps": steps})
    for x0 in world.texts[::3]:
        is_anchor = adapter.find_anchors(RULES[rule], x0[None])[0]
        _, of_anchor = sum_divergences(world, x0, is_anchor, steps)
        left = -math.log(float(law[world.number(x0)])) + gamma * of_anchor
        total, nll, _ = compute_anelbo(world, x0, RULES[rule], gamma, steps, "masked")
        assert left <= total + 1e-5
        assert nll == pytest.approx(count_discrete_nelbo(world, x0, steps), rel=1e-5)
        everywhere = compute_anelbo(world, x0, RULES[rule], gamma, steps, "all")[0]
        assert total <= everywhere + 1e-5


# Held-out rows


def integrate_nelbo(world: TinyWorld, rows: Tensor) -> float:
    """Return the NELBO's nats of rows by all patterns of hidden tokens and 20,000 times."""
    schedule = adapter.make_schedule("loglinear")
    t = 1e-3 + (1 - 1e-3) * (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    weight, hides = schedule.loss_weight(t), 1 - schedule.alpha(t)
    log_probs, nats = world.log_probs()[1], 0.0
    for pattern in itertools.product([False, True], repeat=world.length):
        is_hidden = torch.tensor(pattern)
        n = int(is_hidden.sum())
        share = float((weight * hides**n * (1 - hides) ** (world.length - n)).mean())
        scores = log_probs[world.number(torch.where(is_hidden, world.mask, rows))]
        chosen = scores.gather(2, rows[..., None])[..., 0]
        nats -= share * float(torch.where(is_hidden, chosen, 0.0).sum())
    return nats


@pytest.mark.parametrize("draws", [1, 4, 16])
def test_the_bound_is_the_enumerated_nelbo_and_above_the_likelihood(draws: int) -> None:
    """Texts of a tiny world by its own law: both sides are counted, the bound is estimated."""
    world = WORLDS[3]
    law = exact_law(world, "first_hitting", {})[world.text_numbers]
    rng = torch.Generator().manual_seed(1)
    picks = torch.multinomial(law, 3000, replacement=True, generator=rng)
    rows = world.texts[picks]
    exact = -float(law[picks].log().sum()) / rows.numel()
    expected = integrate_nelbo(world, rows) / rows.numel()
    bound = adapter.row_nats(world.model, rows, batch=1000, draws=draws)
    assert expected > exact + 1e-3
    assert bound.nll > exact
    assert abs(bound.nll - expected) < 3 * (bound.noise_stderr or bound.stderr) < 0.15 * expected


ORDERED_SAMPLERS: list[tuple[str, dict[str, Any], int | None, str]] = [
    ("confidence", {"steps": 3}, None, "confidence"),
    ("margin", {"steps": 3}, None, "margin"),
    ("entropy_bounded", {"bound": 0.0}, None, "entropy"),
    ("confidence", {"steps": 1}, 1, "left_to_right"),
]


@pytest.mark.parametrize(("sampler", "options", "block", "order"), ORDERED_SAMPLERS)
def test_the_likelihood_of_an_order_is_the_law_of_its_sampler(
    sampler: str, options: dict[str, Any], block: int | None, order: str
) -> None:
    world = WORLDS[3]
    law = exact_law(world, sampler, options, block=block)[world.text_numbers]
    nats = adapter.row_nats(world.model, world.texts, order=order).row_nats
    torch.testing.assert_close((-nats).exp(), law, atol=1e-6, rtol=1e-5)
    assert float((-nats).exp().sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_random_order_is_a_bound_from_above(length: int) -> None:
    """Its expectation is the mean over permutations."""
    world = WORLDS[length]
    means = [-sum(chain_chances(world, x0)) / math.factorial(length) for x0 in world.texts]
    expected = sum(means) / len(means) / length
    bound = adapter.row_nats(world.model, world.texts, order="random", draws=60, batch=1000)
    assert bound.noise_stderr is not None
    assert 0 < bound.noise_stderr < 0.05
    assert abs(bound.nll - expected) < 4 * bound.noise_stderr


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_nll_is_the_product_of_its_conditionals(method: str) -> None:
    """Exact: the first token is given, every other has its log-probability."""
    model = small_model(method)
    rows = torch.randint(11, (6, 15), generator=torch.Generator().manual_seed(4))
    logits = adapter.predict(model, rows)[1].double()
    logits[..., 11] = -torch.inf
    log_probs = logits.log_softmax(-1)[:, :-1]
    expected = -log_probs.gather(-1, rows[:, 1:, None])[..., 0].sum(-1)
    found = adapter.row_nats(model, rows)
    torch.testing.assert_close(found.row_nats, expected, atol=1e-4, rtol=1e-5)
    assert found.tokens == 6 * 14
    assert found.nll == pytest.approx(float(expected.sum()) / (6 * 14), rel=1e-5)
    assert found.noise_stderr == 0


@pytest.mark.parametrize("is_score_entropy", [False, True])
def test_score_entropy_is_the_nelbo_and_a_penalty(is_score_entropy: bool) -> None:
    """Its weighted form is exp(lse - c) - z_x + c - 1 with c = log(V - 1), by hand."""
    model = small_model("sedd")
    x0 = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(2))
    xt = x0.clone()
    xt[:, ::2] = 11
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0])
    ones = torch.ones(4)
    batch = adapter.known_rows(x0, xt, 11, t=ones, weight=weight, noise_level=0 * ones)
    with torch.no_grad():
        loss = adapter.compute_loss(model, batch, is_score_entropy=is_score_entropy)
    logits = adapter.predict(model, xt)[1].double()
    logits[..., 11] = -torch.inf
    lse, chosen = logits.logsumexp(-1), logits.gather(-1, x0[..., None])[..., 0]
    each = lse - chosen
    if is_score_entropy:
        c = math.log(11)
        each = (lse - c).exp() - chosen + c - 1
    expected = (each * (xt == 11)).sum(-1) * weight
    torch.testing.assert_close(loss.row_nll.double(), expected, atol=1e-4, rtol=1e-5)
