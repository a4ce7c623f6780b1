"""Bounds and likelihoods on a world that can be counted: every text, every mask, every order, every step."""

import itertools
import math

import numpy as np
import pytest
import torch

from adlm.diffusion.anchors import every_token, listed_tokens, random_positions, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, collect_batch, corrupt
from adlm.diffusion.objectives import MaskedDiffusion, training_loss
from adlm.diffusion.plans import ancestral, reverse_distribution
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import first_hitting
from adlm.diffusion.schedules import Cosine, LogLinear, discrete_loss_weight, discrete_time
from adlm.likelihood import estimate_nll
from tests.world import TinyWorld, ancestral_law, exact_law, random_model

WORLDS = {
    2: TinyWorld(random_model(seed=39, length=2)),
    3: TinyWorld(random_model(seed=113, positions="learned")),
}
LENGTHS = tuple(WORLDS)
EXACT = LogLinear(eps=0.0)


def texts(world):
    return world.states[world.texts]


def hidden_costs(world, x0):
    """Σ over hidden positions of -log p(x0 | xt) for every pattern of hidden positions, and how many are hidden."""
    xt = world.hidings(x0)
    log_probs = world.log_probs()[1][world.number(xt)].gather(-1, x0.expand_as(xt)[..., None])[
        ..., 0
    ]
    return -(log_probs * (xt == world.mask)).sum(-1), (xt == world.mask).sum(-1)


def pattern_weights(hidden, length):
    """∫ (1/t) t^h (1 - t)^(L - h) dt = 1 / (h C(L, h)): what a pattern with h hidden positions weighs in the NELBO."""
    return torch.tensor(
        [1 / (h * math.comb(length, h)) if h else 0.0 for h in hidden.tolist()], dtype=torch.float64
    )


def pattern_chances(t, hidden, length):
    """t^h (1 - t)^(L - h): how likely a pattern with h hidden positions is at each time t, (times, patterns)."""
    return t[:, None] ** hidden * (1 - t[:, None]) ** (length - hidden)


def nelbo(world, x0):
    cost, hidden = hidden_costs(world, x0)
    return float((cost * pattern_weights(hidden, world.length)).sum())


def discrete_nelbo(world, x0, steps):
    """Σ over steps of (alpha_s - alpha_t) / (1 - alpha_t) E Σ_hidden -log p, with alpha = 1 - t."""
    cost, hidden = hidden_costs(world, x0)
    t = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    return float(((pattern_chances(t, hidden, world.length) * cost).sum(-1) / t).sum() / steps)


def compute_loss(world, x0, xt, weight, anchor_weight=None, **anchors):
    """The library's loss and its number of tokens, for hiding patterns with given weights."""
    ones, process = torch.ones(len(xt)), ForwardProcess(world.mask, **anchors)
    batch = collect_batch(x0.expand(len(xt), -1), xt, ones, weight.float(), 0 * ones, process)
    with torch.no_grad():
        return training_loss(world.model, batch, anchor_weight=anchor_weight), batch.tokens


@pytest.mark.parametrize("length", LENGTHS)
def test_nelbo_is_the_weighted_sum_over_all_masks(length):
    world = WORLDS[length]
    for x0 in texts(world):
        xt = world.hidings(x0)
        weight = pattern_weights((xt == world.mask).sum(-1), length)
        loss, tokens = compute_loss(world, x0, xt, weight)
        assert float(loss.nll * tokens) == pytest.approx(nelbo(world, x0), rel=1e-5)
        assert float(loss.total) == float(loss.nll)
        torch.testing.assert_close(
            loss.row_nll.double(), hidden_costs(world, x0)[0] * weight, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("schedule", [LogLinear(), EXACT, Cosine()], ids=["eps", "exact", "cosine"])
@pytest.mark.parametrize("length", LENGTHS)
def test_corruption_estimates_the_nelbo(length, schedule):
    """The mean over many noises lies within four standard errors of the integral over t in [1e-3, 1)."""
    world, rows = WORLDS[length], 20_000
    nodes, node_weights = np.polynomial.legendre.leggauss(60)
    t = torch.from_numpy((nodes + 1) / 2 * (1 - 1e-3) + 1e-3)
    hidden_prob = 1 - schedule.alpha(t)
    for number, x0 in enumerate(texts(world)[::5]):
        cost, hidden = hidden_costs(world, x0)
        chance = pattern_chances(hidden_prob, hidden, length)
        each_time = -schedule.dalpha(t) / hidden_prob * (chance * cost).sum(-1)
        expected = float((torch.from_numpy(node_weights) / 2 * each_time).sum())
        process = ForwardProcess(world.mask, schedule=schedule)
        batch = corrupt(x0.expand(rows, -1), process, CounterRng.from_seed(7, rows), number)
        with torch.no_grad():
            row_nll = training_loss(world.model, batch).row_nll.double()
        error = float(row_nll.std()) / math.sqrt(rows)
        assert error < 0.05 * expected
        assert abs(float(row_nll.mean()) - expected) < 4 * error
    if schedule is EXACT:  # the integral from 1e-3 is the closed form but for the first thousandth
        assert expected == pytest.approx(nelbo(world, x0), rel=2e-3)


@pytest.mark.parametrize("steps", [1, 2, 5, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_discrete_time_is_the_sum_over_its_steps(length, steps):
    world = WORLDS[length]
    t = torch.arange(1, steps + 1) / steps
    weight = discrete_loss_weight(EXACT, t.double(), steps) / steps
    for x0 in texts(world):
        xt = world.hidings(x0)
        hidden = (xt == world.mask).sum(-1)
        chance = pattern_chances(t, hidden, length)
        loss, tokens = compute_loss(
            world, x0, xt.repeat(steps, 1), (chance * weight[:, None]).flatten()
        )
        assert float(loss.nll * tokens) == pytest.approx(discrete_nelbo(world, x0, steps), rel=1e-5)
    uniform = (torch.arange(steps * 100) + 0.5) / (steps * 100)
    times, count = discrete_time(uniform, steps).unique(return_counts=True)
    torch.testing.assert_close(times, t)
    assert count.tolist() == [100] * steps


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_held_out_bound_in_discrete_time(steps):
    """`corrupt(steps=)` draws every step alike, the first and the last too; the bound is the enumerated one."""
    world = WORLDS[2]
    x0 = texts(world)[1]
    rows = x0.expand(4000, -1)
    batch = corrupt(rows, ForwardProcess(world.mask, steps=steps), CounterRng.from_seed(0, 4000), 0)
    times, count = (batch.t * steps).round().unique(return_counts=True)
    assert times.tolist() == list(range(1, steps + 1))
    assert count.max() - count.min() <= 2
    objective = MaskedDiffusion(ForwardProcess(world.mask, steps=steps))
    bound = estimate_nll(world.model, rows, objective, batch=1000, draws=4)
    # LogLinear hides (1 - eps) t: a thousandth less than the enumeration's alpha = 1 - t
    expected = discrete_nelbo(world, x0, steps) / world.length
    assert bound.nll == pytest.approx(expected, abs=4 * bound.stderr + 2e-3 * expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_discrete_bound_tends_to_the_continuous_one(length):
    """Twice the steps, half the difference."""
    world = WORLDS[length]
    for x0 in texts(world):
        far, near = (
            abs(discrete_nelbo(world, x0, steps) - nelbo(world, x0)) for steps in (128, 256)
        )
        assert near == pytest.approx(far / 2, rel=0.1, abs=1e-4)
        assert near < 0.01 * nelbo(world, x0)


@pytest.mark.parametrize("length", LENGTHS)
def test_any_order_likelihood_is_below_the_nelbo(length):
    """First-hitting: p(x) is the mean over orders of products of conditionals, and the NELBO bounds -log p(x)."""
    world = WORLDS[length]
    log_probs, total = world.log_probs()[1], 0.0
    law = exact_law(world, first_hitting())
    for x0 in texts(world):
        chances = []
        for order in itertools.permutations(range(length)):
            xt, chance = world.start(), 0.0
            for position in order:
                chance += float(log_probs[world.number(xt), position, x0[position]])
                xt[position] = x0[position]
            chances.append(chance)
        likelihood = sum(map(math.exp, chances)) / len(chances)
        assert float(law[world.number(x0)]) == pytest.approx(likelihood, rel=1e-9)
        # The NELBO is the same mean taken over logarithms, hence the bound (Jensen).
        assert nelbo(world, x0) == pytest.approx(-sum(chances) / len(chances), rel=1e-9)
        assert -math.log(likelihood) <= nelbo(world, x0) + 1e-12
        total += likelihood
    assert total == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_ancestral_likelihood_is_below_its_nelbo(length, steps):
    world = WORLDS[length]
    law = ancestral_law(world, steps)
    assert float(law[world.texts].sum()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(law, exact_law(world, ancestral(steps)), atol=1e-12, rtol=0)
    gaps = [
        discrete_nelbo(world, x0, steps) + math.log(law[world.number(x0)]) for x0 in texts(world)
    ]
    assert min(gaps) >= -1e-9
    assert (
        max(gaps) == pytest.approx(0, abs=1e-9) if steps == 1 else max(gaps) > 1e-3
    )  # one step is exact


RULES = {
    "every": every_token(),
    "rare": rare_in_sequence(1),
    "listed": listed_tokens([0, 2], 4),
    "random": random_positions(0.5, seed=3),
}


def reverse_divergence(xt, x0, probs, step, mask_id):
    """KL (B, L) of one step's distribution with the true tokens from that with `probs`; summed it is a bound."""
    truth = torch.nn.functional.one_hot(x0, probs.shape[-1]).to(probs.dtype)
    q, p = (reverse_distribution(xt, law, step, mask_id) for law in (truth, probs))
    return torch.where(q > 0, q * (q / p).log(), 0.0).sum(-1)


def divergences(world, x0, is_anchor, steps):
    """Σ over steps of the expected KL of the denoiser's and of the anchor network's reverse transitions."""
    xt = world.hidings(x0)
    number, hidden = world.number(xt), (xt == world.mask).sum(-1)
    anchor, final = (x.exp()[number] for x in world.log_probs())
    truth = x0.expand_as(xt)
    of_denoiser = of_anchor = 0.0
    for step in ancestral(steps):
        chance = (1 - step.alpha_t) ** hidden * step.alpha_t ** (world.length - hidden)
        denoised, anchored = (
            reverse_divergence(xt, truth, p, step, world.mask) for p in (final, anchor)
        )
        of_denoiser += float((chance * denoised.sum(-1)).sum())
        of_anchor += float((chance * (anchored * is_anchor).sum(-1)).sum())
    return of_denoiser, of_anchor


def anelbo(world, x0, rule, gamma, steps, scope):
    t = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    xt = world.hidings(x0)
    chance = pattern_chances(t, (xt == world.mask).sum(-1), world.length)
    weight = (chance * discrete_loss_weight(EXACT, t, steps)[:, None] / steps).flatten()
    anchors = {"anchor_rule": rule, "anchor_scope": scope}
    loss, tokens = compute_loss(world, x0, xt.repeat(steps, 1), weight, gamma, **anchors)
    return tuple(float(part * tokens) for part in (loss.total, loss.nll, loss.anchor))


def silent_world(length):
    """A world whose anchor network never names the mask, as its theory assumes."""
    world = TinyWorld(random_model(seed=39 if length == 2 else 48, length=length))
    with torch.no_grad():
        world.model.anchor_head.bias[world.mask] = -1e4
        world.model.bridge.weight[:, world.mask] = 0  # so that the denoiser does not hear the -1e4
    return world


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", LENGTHS)
def test_anelbo_is_the_sum_of_both_divergences(length, rule):
    """With an anchor network that never names the mask, in the scope of the text: what is hidden."""
    world, steps, compared = silent_world(length), 4, 0
    for x0 in texts(world):
        is_anchor = RULES[rule](x0[None], None)[0]
        of_denoiser, of_anchor = divergences(world, x0, is_anchor, steps)
        total, nll, anchor = anelbo(world, x0, RULES[rule], 0.7, steps, "masked")
        assert nll == pytest.approx(of_denoiser, rel=1e-5)
        assert anchor == pytest.approx(of_anchor, rel=1e-5, abs=1e-6)
        assert total == pytest.approx(of_denoiser + 0.7 * of_anchor, rel=1e-5)
        compared += of_anchor > 0.01
    assert compared


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("gamma", [0.0, 3e-3, 0.5, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_anelbo_bounds_likelihood_and_anchor_loss(rule, gamma, steps):
    """-log p(x) + γ L_anchor ≤ ANELBO (the paper's theorem) for every text; the lineage's scope only adds to it."""
    world = WORLDS[3]
    law = exact_law(world, ancestral(steps))
    for x0 in texts(world)[::2]:
        _, of_anchor = divergences(world, x0, RULES[rule](x0[None], None)[0], steps)
        left = -math.log(float(law[world.number(x0)])) + gamma * of_anchor
        total, nll, anchor = anelbo(world, x0, RULES[rule], gamma, steps, "masked")
        assert left <= total + 1e-5
        assert nll == pytest.approx(discrete_nelbo(world, x0, steps), rel=1e-5)
        assert total <= anelbo(world, x0, RULES[rule], gamma, steps, "all")[0] + 1e-5
        if (
            gamma > 0 and anchor > 0
        ):  # an anchor network that names the mask loses more than the divergence
            assert anchor > of_anchor - 1e-6
