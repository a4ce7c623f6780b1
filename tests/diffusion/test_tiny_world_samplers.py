"""What the laws of samplers (`tests/laws/test_sampler_laws.py`) leave out: min_p, and a plan's step as a map."""

import pytest
import torch

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import Plan, reverse_distribution
from adlm.diffusion.samplers import RemaskByConfidence, build_sampler
from adlm.models.evaluator import build_evaluator
from tests.world import TinyWorld, chi_square_p, exact_law, fill, random_model

ROWS = 20_000
PLANS = (
    "ancestral",
    "ddpm",
    "dfm",
    "forward_backward",
    "remask_cap",
    "remask_conf",
    "remask_loop",
    "remask_rescale",
)


def build_world():
    return TinyWorld(random_model(seed=113, positions="learned"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("remask_cap", {"steps": 3, "eta": 0.3}),
        ("remask_conf", {"steps": 3}),
        ("first_hitting", {}),
        ("confidence", {"steps": 2}),
    ],
)
def test_the_least_probability_shapes_the_law(name, options):
    world = build_world()
    sampler = build_sampler(name, **options)
    sampling = SamplingParams(min_p=0.4)
    start = world.start()
    evaluator = build_evaluator(world.model)
    evaluator.max_logit_rows = 4096  # of four tokens: they are small
    tokens = fill(evaluator, start.expand(ROWS, -1), sampler, seed=5, sampling=sampling)
    counts = torch.bincount(world.number(tokens), minlength=len(world.states))
    law = exact_law(world, sampler, sampling, start, None, None)
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    assert chi_square_p(counts, law) > 1e-3
    assert chi_square_p(counts, exact_law(world, sampler)) < 1e-3, "it makes a difference"


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_one_step_of_every_plan_is_the_reverse_distribution(name, compat):
    """`reverse_distribution` and the enumeration push a distribution to the same place, step by step."""
    world = build_world()
    sampler = build_sampler(name, steps=6, compat=compat)
    by_confidence = isinstance(sampler, RemaskByConfidence)
    plan = sampler.plan if by_confidence else sampler
    assert isinstance(plan, Plan)
    eye = torch.eye(world.vocab, dtype=torch.float64)
    for step in plan:
        law = reverse_distribution(world.states, world.probs(), step, world.mask)
        torch.testing.assert_close(law.sum(-1), torch.ones_like(law[..., 0]))
        remask = float(step.remask_prob)
        visible = (1 - remask) * eye[world.states] + remask * eye[world.mask]
        is_hidden = world.states == world.mask
        torch.testing.assert_close(law[~is_hidden], visible[~is_hidden])
        if not by_confidence and not compat:  # the visible share after the step is alpha_s
            visible_after = step.alpha_t * (1 - remask) + (1 - step.alpha_t) * float(
                step.reveal_prob
            )
            assert float(visible_after) == pytest.approx(float(step.alpha_s), abs=1e-9)
