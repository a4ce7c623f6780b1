"""Reverse distributions and whole trajectories of the samplers, against the authors' numbers."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import (
    LINEAGE_END,
    Transition,
    confidence_remask_prob,
    dfm_step,
    reverse_distribution,
)
from adlm.diffusion.samplers import LeftToRight, RemaskByConfidence, build_sampler
from adlm.diffusion.sampling import Row
from adlm.models.evaluator import build_evaluator
from tests.goldens import MASK, arrays, facts, model
from tests.world import compute_probs

OPTIONS = {
    "mdlm": ("ancestral", {}),
    "forward-backward": ("forward_backward", {}),
    "remdm-cap": ("remask_cap", {"eta": 0.008}),
    "remdm-cap-eta0.3": ("remask_cap", {"eta": 0.3}),
    "remdm-rescale": ("remask_rescale", {"eta": 0.015}),
    "remdm-rescale-eta0.5": ("remask_rescale", {"eta": 0.5}),
    "remdm-conf": ("remask_conf", {}),
    "remdm-loop": ("remask_loop", {"eta": 0.02, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9}),
    "ddpm": ("ddpm", {}),
}


@lru_cache
def evaluator(kind, time_conditioning=False):
    return build_evaluator(model(kind, time_conditioning))


def build_plan(name, steps):
    """The plan of a sampler, and whether it splits its remasking."""
    name, options = OPTIONS[name]
    sampler = build_sampler(name, steps=steps, compat=True, **options)
    by_confidence = isinstance(sampler, RemaskByConfidence)
    return sampler.plan if by_confidence else sampler, by_confidence


def predict_probs(xt, level, sampling, kind=("adlm", False)):
    """p(x0 | xt) of every position after the nucleus: what the shipped sampler draws from."""
    ours = evaluator(*kind)
    with torch.no_grad():
        logits = ours.logits_at(ours.features(xt, torch.zeros(len(xt)) if level is None else level))
    return compute_probs(logits.flatten(0, 1), sampling).view(logits.shape)


def step_law(plan, step, xt, probs, confidence=None, *, by_confidence=False):
    """Our per-position law; conf shares its remasking out as the sampler does."""
    transition = plan[step]
    if by_confidence:
        remask = confidence_remask_prob(transition.remask_prob, confidence.double(), xt == MASK)
        transition = replace(transition, remask_prob=remask)
    return reverse_distribution(xt, probs, transition, MASK)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("name", OPTIONS)
def test_reverse_distributions(name, top_p):
    golden, (plan, by_confidence) = arrays(f"reverse_adlm_p{top_p}"), build_plan(name, 64)
    xt = golden["xt"]
    sampling = SamplingParams(top_p=top_p if plan.nucleus else 1.0, nucleus="lineage")
    probs = predict_probs(xt, None, sampling)
    assert len(golden["t"]) == 9
    for i, t in enumerate(golden["t"].double()):
        step = int((plan.t - t).abs().argmin())
        assert abs(plan.t[step] - t) < 1e-5
        ours = step_law(plan, step, xt, probs, -golden["conf_in"], by_confidence=by_confidence)
        torch.testing.assert_close(ours, golden[f"{name}/{i}/dist"], atol=1e-4, rtol=0)
        if name == "remdm-conf":
            sigma = confidence_remask_prob(
                plan[step].remask_prob, -golden["conf_in"].double(), xt == MASK
            )
            torch.testing.assert_close(
                sigma.float(), golden[f"{name}/{i}/sigma"], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_reverse_distribution_of_flow_matching(top_p):
    """dfm's steps depend on where it stands: its rule is asked at each golden time, and the plan follows the rule."""
    golden = arrays(f"reverse_adlm_p{top_p}")
    xt, probs = (
        golden["xt"],
        predict_probs(golden["xt"], None, SamplingParams(top_p=top_p, nucleus="lineage")),
    )
    for i, t in enumerate(golden["t"].double()):
        dt, remask = dfm_step(float(t), 64)
        step = Transition(t, 1 - t, 1 - t + dt, torch.tensor(remask, dtype=torch.float64), t)
        ours = reverse_distribution(xt, probs, step, MASK)
        torch.testing.assert_close(ours, golden[f"dfm/{i}/dist"], atol=1e-4, rtol=0)
    plan = build_sampler("dfm", steps=64, compat=True)
    assert plan.t[0] == 1
    for now, after in zip(plan, list(plan)[1:], strict=False):
        dt, remask = dfm_step(float(now.t), 64)
        assert after.t == pytest.approx(float(now.t) - dt, abs=1e-12)
        assert now.remask_prob == pytest.approx(remask, abs=1e-12)
    assert plan.t[-1] > (1 - LINEAGE_END) / 64 >= 1 - plan.alpha_s[-1]


def test_confidences_in_half_precision():
    """The authors hold confidences in bfloat16: their remasking probabilities are ours, rounded."""
    golden, (plan, _) = arrays("reverse_adlm_conf_bf16"), build_plan("remdm-conf", 64)
    for i, t in enumerate(golden["t"].double()):
        most = plan.remask_prob[int((plan.t - t).abs().argmin())]
        ours = confidence_remask_prob(most, -golden["conf_in"].double(), golden["xt"] == MASK)
        torch.testing.assert_close(ours.float(), golden[f"{i}/sigma"], atol=1e-3, rtol=1.5e-2)


RUNS = facts("trajectory_adlm")["runs"]


@pytest.mark.parametrize("run", RUNS)
def test_trajectories(run):
    """Their noise is a (B, L, V) slab per step and its argmax includes the mask: this driver draws so, from our law."""
    golden, noise, info = arrays("trajectory_adlm"), arrays("trajectory_noise")["u"], RUNS[run]
    plan, by_confidence = build_plan(run.split("_")[0], 32)
    kind = ("adlm", info["time_conditioning"])
    sampling = SamplingParams(top_p=info["nucleus_p"] if plan.nucleus else 1.0, nucleus="lineage")
    xt = torch.full_like(golden[f"{run}/final"], MASK)
    confidence = torch.zeros(xt.shape, dtype=torch.float64)
    calls, probs = 0, None
    is_cached = info["predictor"] == "ddpm_cache" and not info["time_conditioning"]
    for step in range(32):
        if probs is None or not is_cached:
            level = plan.noise_level[step].float().expand(len(xt))
            probs, calls = predict_probs(xt, level, sampling, kind), calls + 1
        law = step_law(plan, step, xt, probs, confidence, by_confidence=by_confidence)
        drawn = (law / (1e-10 - torch.log(noise[step] + 1e-10))).argmax(-1)
        is_certain = law.gather(-1, xt[..., None])[..., 0] == 1
        xs = torch.where(is_certain, xt, drawn)
        revealed = (xt == MASK) & (xs != MASK)
        confidence[revealed] = probs.gather(-1, xs[..., None])[..., 0][revealed]
        if not torch.equal(xs, xt):
            probs = None
        xt = xs
        assert torch.equal(xt, golden[f"{run}/x"][step]), f"step {step}"
    final = predict_probs(
        xt, torch.full((len(xt),), 1e-5), SamplingParams(temperature=0.0), kind
    ).argmax(-1)
    assert torch.equal(torch.where(xt == MASK, final, xt), golden[f"{run}/final"])
    assert calls + 1 == info["network_calls"]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_autoregressive_sampling(top_p):
    """Their Gumbel noise on our cached logits; their sampler overwrites the last position by BOS, ours never does."""
    golden, ours = arrays(f"ar_sample_gpt2like_p{top_p}"), evaluator("ar").open()
    expected = golden["x"]
    rows = [Row(tokens, LeftToRight(), torch.arange(16) < 1) for tokens in expected]
    x = expected[:, :1]
    for i in range(14):
        with torch.no_grad():
            end = np.full(2, i + 1)
            features = ours.features(x, torch.zeros(2), rows=rows, next_position=end)
            logits = ours.logits_at(features[:, -1])
        law = compute_probs(logits, SamplingParams(top_p=top_p, nucleus="lineage"))
        x = torch.cat([x, (law.log() + golden["gumbel"][:, i]).argmax(-1, keepdim=True)], 1)
    assert torch.equal(x, expected[:, :15])
