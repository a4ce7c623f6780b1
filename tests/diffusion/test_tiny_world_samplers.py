"""Every sampler's law: the final tokens of 20,000 rows against the exactly enumerated distribution."""

from itertools import pairwise

import pytest
import torch

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import Plan, ancestral, reverse_distribution
from adlm.diffusion.samplers import SAMPLERS, RemaskByConfidence, build_sampler, first_hitting
from adlm.models.evaluator import build_evaluator
from tests.world import (
    OPTIONS,
    TinyWorld,
    ancestral_law,
    chi_square_p,
    exact_law,
    fill,
    random_model,
)

ROWS = 20_000
WORLDS = {
    "two": TinyWorld(random_model(seed=39, length=2)),
    # Rotary positions are relative: from a start that is all hidden every position predicts the same.
    "rotary": TinyWorld(random_model(seed=39)),
    "learned": TinyWorld(random_model(seed=113, positions="learned")),
    "timed": TinyWorld(random_model(seed=113, positions="learned", time_conditioning=True)),
    "inside": TinyWorld(random_model(seed=39, mask_id=1)),  # the mask is not the last token
    "direct": TinyWorld(random_model(seed=69, bridge="direct")),
    "mdlm": TinyWorld(random_model("mdlm", seed=4, positions="learned", denoiser_layers=2)),
}


def count_texts(world, sampler, start, **options):
    """How often each state (S,) is the last of 20,000 rows."""
    evaluator = build_evaluator(world.model)
    evaluator.max_logit_rows = 4096  # of four tokens: they are small
    tokens = fill(evaluator, start.expand(ROWS, -1), sampler, seed=5, **options)
    assert not (tokens == world.mask).any()
    return torch.bincount(world.number(tokens), minlength=len(world.states))


def p_value(world, sampler, *, sampling=None, start=None, is_free=None, block=None):
    """How likely counts as far from the exact law as ours are."""
    start = world.start() if start is None else start
    is_fixed = None if is_free is None else ~is_free.expand(ROWS, -1)
    options = {} if sampling is None else {"sampling": sampling}
    counts = count_texts(world, sampler, start, is_fixed=is_fixed, block=block, **options)
    law = exact_law(world, sampler, sampling, start, is_free, block)
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    assert float(law.max()) < 0.9  # a law without choice would test nothing
    return chi_square_p(counts, law)


LOOP = {"steps": 8, "eta": 0.3, "t_on": 0.7, "t_off": 0.2, "alpha_on": 0.6}
PLANS = [
    ("ancestral", "two", {"steps": 1}), ("ancestral", "rotary", {"steps": 3}), ("ancestral", "learned", {"steps": 8}),
    ("ancestral", "timed", {"steps": 4}), ("ancestral", "inside", {"steps": 4}), ("ancestral", "direct", {"steps": 4}),
    ("forward_backward", "two", {"steps": 4}), ("forward_backward", "learned", {"steps": 5}),
    ("forward_backward", "timed", {"steps": 3}), ("remask_cap", "two", {"steps": 5, "eta": 0.008}),
    ("remask_cap", "learned", {"steps": 4, "eta": 0.4}), ("remask_cap", "inside", {"steps": 6, "eta": 1.0}),
    ("remask_rescale", "two", {"steps": 5, "eta": 0.5}), ("remask_rescale", "learned", {"steps": 4, "eta": 1.0}),
    ("remask_rescale", "timed", {"steps": 4, "eta": 0.3}), ("remask_conf", "two", {"steps": 6}),
    ("remask_conf", "learned", {"steps": 3}), ("remask_conf", "mdlm", {"steps": 4}),
    ("remask_loop", "two", LOOP), ("remask_loop", "learned", {"steps": 10}),
    ("remask_loop", "timed", {"steps": 6, "eta": 0.5, "t_on": 0.6, "t_off": 0.3, "alpha_on": 0.5}),
    ("ddpm", "two", {"steps": 2}), ("ddpm", "learned", {"steps": 5}),
    ("dfm", "two", {"steps": 3}), ("dfm", "learned", {"steps": 5}),
]  # fmt: skip


ORDERS = [
    ("first_hitting", "two", {}), ("first_hitting", "rotary", {}), ("first_hitting", "mdlm", {}),
    ("confidence", "learned", {"steps": 1}), ("confidence", "learned", {"steps": 2}),
    ("confidence", "mdlm", {"steps": 3}), ("margin", "learned", {"steps": 2}), ("margin", "mdlm", {"steps": 5}),
    ("entropy_bounded", "learned", {"bound": 0.0}), ("entropy_bounded", "learned", {"bound": 0.9}),
    ("entropy_bounded", "mdlm", {"bound": 0.7}),
]  # fmt: skip


COMPATIBLE = [
    (name, world, options | {"compat": True})
    for name, world, options in PLANS
    if world in ("two", "timed")
]


@pytest.mark.parametrize(("name", "world", "options"), PLANS + COMPATIBLE + ORDERS)
def test_samplers_have_their_law(name, world, options):
    assert p_value(WORLDS[world], build_sampler(name, **options)) > 1e-3


def test_every_sampler_is_counted():
    assert {name for name, *_ in PLANS + ORDERS} == set(SAMPLERS) == set(OPTIONS)


DRAWS = {
    "cool": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=2.5),
    "two best": SamplingParams(top_k=2),
    "not unlikely": SamplingParams(min_p=0.4),
    "nucleus": SamplingParams(top_p=0.8),
    "lineage": SamplingParams(top_p=0.95, nucleus="lineage"),
    "all": SamplingParams(temperature=1.5, top_k=2, top_p=0.7),
}


CAP, ORDERED = (
    ("remask_cap", {"steps": 3, "eta": 0.3}),
    [("first_hitting", {}), ("confidence", {"steps": 2})],
)


@pytest.mark.parametrize("sampling", DRAWS)
@pytest.mark.parametrize(
    ("name", "options"), [CAP, ("remask_conf", {"steps": 3}), ("ddpm", {"steps": 3}), *ORDERED]
)
def test_draws_shape_the_law(name, options, sampling):
    """Temperature, top-k and top-p act on every draw; ddpm heeds the temperature alone."""
    assert (
        p_value(WORLDS["learned"], build_sampler(name, **options), sampling=DRAWS[sampling]) > 1e-3
    )


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(
    ("name", "options"), [CAP, ("ddpm", {"steps": 2, "compat": True}), *ORDERED]
)
def test_blocks_go_from_left_to_right(name, options, block):
    assert p_value(WORLDS["learned"], build_sampler(name, **options), block=block) > 1e-3


@pytest.mark.parametrize("tokens", [(None, 2, None), (1, None, None), (0, None, 2)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ancestral", {"steps": 3}), ("remask_rescale", {"steps": 4, "eta": 0.6}), ("remask_conf", {"steps": 4}),
        ("first_hitting", {}), ("margin", {"steps": 2}), ("entropy_bounded", {"bound": 0.5}),
    ],
)  # fmt: skip
def test_infilling_has_its_law(name, options, tokens):
    """What is given is conditioned on and never drawn."""
    world = WORLDS["learned"]
    start = world.start(*tokens)
    assert p_value(world, build_sampler(name, **options), start=start) > 1e-3


def test_a_draft_that_is_not_fixed_may_be_hidden_again():
    """Tokens that are visible at the start but free are remasked like any other."""
    world = WORLDS["learned"]
    start, is_free = world.start(0, 1, None), torch.tensor([False, True, True])
    for name, options in (("remask_cap", {"steps": 4, "eta": 0.5}), ("remask_conf", {"steps": 4})):
        sampler = build_sampler(name, **options)
        assert p_value(world, sampler, start=start, is_free=is_free) > 1e-3


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("name", sorted({name for name, *_ in PLANS}))
def test_one_step_of_every_plan_is_the_reverse_distribution(name, compat):
    """`reverse_distribution` and the enumeration push a distribution to the same place, step by step."""
    world, sampler = WORLDS["learned"], build_sampler(name, steps=6, compat=compat)
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


def test_ancestral_tends_to_first_hitting():
    """In total variation, as the steps grow: enumerated exactly."""
    world = WORLDS["learned"]
    limit = exact_law(world, first_hitting())
    distances = [
        float((ancestral_law(world, steps) - limit).abs().sum() / 2)
        for steps in (1, 4, 16, 64, 256)
    ]
    assert all(after < before / 2 for before, after in pairwise(distances)), distances
    assert distances[0] > 0.05 and distances[-1] < 2e-3


def test_the_count_notices_a_wrong_law():
    """The chi-square is sharp enough: a neighbouring setting's law is refused."""
    world = WORLDS["learned"]
    for right, wrong in ((ancestral(2), ancestral(3)), (first_hitting(), ancestral(4))):
        counts = count_texts(world, right, world.start())
        assert chi_square_p(counts, exact_law(world, right)) > 1e-3
        assert chi_square_p(counts, exact_law(world, wrong)) < 1e-3
