"""The final tokens of 20,000 rows against the exactly enumerated law, for every sampler."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws import adapter
from tests.laws.adapter import Draw
from tests.laws.world import TinyWorld, chi_square_p, exact_law, tiny_model

ROWS = 20_000
WORLDS = {
    "two": TinyWorld(tiny_model(seed=39, length=2)),
    # Rotary positions are relative: of a row that is all hidden every position predicts the same.
    "rotary": TinyWorld(tiny_model(seed=39)),
    "learned": TinyWorld(tiny_model(seed=113, positions="learned")),
    "timed": TinyWorld(tiny_model(seed=113, positions="learned", time_conditioning=True)),
    # The mask is not the last token.
    "inside": TinyWorld(tiny_model(seed=39, mask_id=1)),
    "direct": TinyWorld(tiny_model(seed=69, bridge="direct")),
    "one stage": TinyWorld(tiny_model("mdlm", seed=4, positions="learned", denoiser_layers=2)),
}
LOOP = {"steps": 8, "eta": 0.3, "t_on": 0.7, "t_off": 0.2, "alpha_on": 0.6}
SHORT_LOOP = {"steps": 6, "eta": 0.5, "t_on": 0.6, "t_off": 0.3, "alpha_on": 0.5}
PLANS: list[tuple[str, str, dict[str, Any]]] = [
    ("ancestral", "two", {"steps": 1}),
    ("ancestral", "rotary", {"steps": 3}),
    ("ancestral", "learned", {"steps": 8}),
    ("ancestral", "timed", {"steps": 4}),
    ("ancestral", "inside", {"steps": 4}),
    ("ancestral", "direct", {"steps": 4}),
    ("forward_backward", "two", {"steps": 4}),
    ("forward_backward", "learned", {"steps": 5}),
    ("forward_backward", "timed", {"steps": 3}),
    ("remask_cap", "two", {"steps": 5, "eta": 0.008}),
    ("remask_cap", "learned", {"steps": 4, "eta": 0.4}),
    ("remask_cap", "inside", {"steps": 6, "eta": 1.0}),
    ("remask_rescale", "two", {"steps": 5, "eta": 0.5}),
    ("remask_rescale", "learned", {"steps": 4, "eta": 1.0}),
    ("remask_rescale", "timed", {"steps": 4, "eta": 0.3}),
    ("remask_conf", "two", {"steps": 6}),
    ("remask_conf", "learned", {"steps": 3}),
    ("remask_conf", "one stage", {"steps": 4}),
    ("remask_loop", "two", LOOP),
    ("remask_loop", "learned", {"steps": 10}),
    ("remask_loop", "timed", SHORT_LOOP),
    ("ddpm", "two", {"steps": 2}),
    ("ddpm", "learned", {"steps": 5}),
    ("dfm", "two", {"steps": 3}),
    ("dfm", "learned", {"steps": 5}),
]
COMPATIBLE = [
    (name, world, {**options, "compat": True})
    for name, world, options in PLANS
    if world in ("two", "timed")
]
ORDERS: list[tuple[str, str, dict[str, Any]]] = [
    ("first_hitting", "two", {}),
    ("first_hitting", "rotary", {}),
    ("first_hitting", "one stage", {}),
    ("confidence", "learned", {"steps": 1}),
    ("confidence", "learned", {"steps": 2}),
    ("confidence", "one stage", {"steps": 3}),
    ("margin", "learned", {"steps": 2}),
    ("margin", "one stage", {"steps": 5}),
    ("entropy_bounded", "learned", {"bound": 0.0}),
    ("entropy_bounded", "learned", {"bound": 0.9}),
    ("entropy_bounded", "one stage", {"bound": 0.7}),
]


def count_texts(
    world: TinyWorld, name: str, options: dict[str, Any], start: Tensor, **settings: Any
) -> Tensor:
    """Count how often each state (S,) is the last of 20,000 rows."""
    with adapter.small_vocabulary():
        rows = start.expand(ROWS, -1)
        *_, last = adapter.sample_frames(world.model, rows, name, options, seed=5, **settings)
    assert not (last.tokens == world.mask).any()
    assert not last.is_hidden.any()
    return torch.bincount(world.number(last.tokens), minlength=len(world.states))


def compute_p_value(
    world: TinyWorld,
    name: str,
    options: dict[str, Any],
    *,
    draw: Draw | None = None,
    start: Tensor | None = None,
    is_free: Tensor | None = None,
    block: int | None = None,
) -> float:
    """Return how likely counts as far from the exact law as the sampler's are."""
    start = world.start() if start is None else start
    is_fixed = None if is_free is None else ~is_free.expand(ROWS, -1)
    counts = count_texts(world, name, options, start, draw=draw, is_fixed=is_fixed, block=block)
    law = exact_law(world, name, options, draw, start, is_free, block)
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    assert float(law.max()) < 0.9, "a law without choice would test nothing"
    return chi_square_p(counts, law)


@pytest.mark.parametrize(("name", "world", "options"), PLANS + COMPATIBLE + ORDERS)
def test_a_sampler_has_its_law(name: str, world: str, options: dict[str, Any]) -> None:
    assert compute_p_value(WORLDS[world], name, options) > 1e-3


def test_every_sampler_is_counted() -> None:
    assert {name for name, *_ in PLANS + ORDERS} >= set(adapter.sampler_names())


DRAWS = {
    "cool": Draw(temperature=0.6),
    "hot": Draw(temperature=2.5),
    "two best": Draw(top_k=2),
    "nucleus": Draw(top_p=0.8),
    "lineage": Draw(top_p=0.95, nucleus="lineage"),
    "all": Draw(temperature=1.5, top_k=2, top_p=0.7),
}
CAP: tuple[str, dict[str, Any]] = ("remask_cap", {"steps": 3, "eta": 0.3})
FIRST: tuple[str, dict[str, Any]] = ("first_hitting", {})
CONFIDENT: tuple[str, dict[str, Any]] = ("confidence", {"steps": 2})
CONF: tuple[str, dict[str, Any]] = ("remask_conf", {"steps": 3})
DDPM: tuple[str, dict[str, Any]] = ("ddpm", {"steps": 3})


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("name", "options"), [CAP, CONF, DDPM, FIRST, CONFIDENT])
def test_draws_shape_the_law(name: str, options: dict[str, Any], draw: str) -> None:
    """Temperature, top-k and top-p act on every draw; ddpm heeds the temperature alone."""
    assert compute_p_value(WORLDS["learned"], name, options, draw=DRAWS[draw]) > 1e-3


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [CAP, CONF, ("ddpm", {"steps": 2, "compat": True}), FIRST, CONFIDENT],
)
def test_blocks_go_from_left_to_right(name: str, options: dict[str, Any], block: int) -> None:
    assert compute_p_value(WORLDS["learned"], name, options, block=block) > 1e-3


@pytest.mark.parametrize("tokens", [(None, 2, None), (1, None, None), (0, None, 2)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ancestral", {"steps": 3}),
        ("remask_rescale", {"steps": 4, "eta": 0.6}),
        ("remask_conf", {"steps": 4}),
        ("first_hitting", {}),
        ("margin", {"steps": 2}),
        ("entropy_bounded", {"bound": 0.5}),
    ],
)
def test_infilling_has_its_law(
    name: str, options: dict[str, Any], tokens: tuple[int | None, ...]
) -> None:
    """What is given is conditioned on and never drawn."""
    world = WORLDS["learned"]
    assert compute_p_value(world, name, options, start=world.start(*tokens)) > 1e-3


@pytest.mark.parametrize(
    ("name", "options"), [("remask_cap", {"steps": 4, "eta": 0.5}), ("remask_conf", {"steps": 4})]
)
def test_a_draft_that_is_free_may_be_hidden_again(name: str, options: dict[str, Any]) -> None:
    world = WORLDS["learned"]
    start, is_free = world.start(0, 1, None), torch.tensor([False, True, True])
    assert compute_p_value(world, name, options, start=start, is_free=is_free) > 1e-3


def test_banned_tokens_leave_the_rest_of_the_law() -> None:
    """Where a token may not stand the others share its probability."""
    world = WORLDS["learned"]
    banned = torch.zeros(ROWS, world.length, world.vocab, dtype=torch.bool)
    banned[:, 1, 2] = True
    counts = count_texts(world, "ancestral", {"steps": 1}, world.start(), banned=banned)
    probs = world.probs()[world.number(world.start())].clone()
    probs[1, 2] = 0
    probs[1] /= probs[1].sum()
    law = torch.zeros(len(world.states), dtype=torch.float64)
    for text in world.texts:
        law[world.number(text)] = probs[torch.arange(world.length), text].prod()
    assert chi_square_p(counts, law) > 1e-3


def test_ancestral_tends_to_first_hitting() -> None:
    """In total variation, as the steps grow."""
    world = WORLDS["learned"]
    limit = exact_law(world, "first_hitting", {})
    distances = []
    for steps in (1, 4, 16, 64):
        law = exact_law(world, "ancestral", {"steps": steps})
        distances.append(float((law - limit).abs().sum() / 2))
    assert all(after < before / 2 for before, after in pairwise(distances)), distances
    assert distances[0] > 0.05
    assert distances[-1] < 8e-3


def test_the_count_notices_a_wrong_law() -> None:
    """The chi-square is sharp enough: a neighboring setting's law is refused."""
    world = WORLDS["learned"]
    for name, options, wrong, wrong_options in (
        ("ancestral", {"steps": 2}, "ancestral", {"steps": 3}),
        ("first_hitting", {}, "ancestral", {"steps": 4}),
    ):
        counts = count_texts(world, name, options, world.start())
        assert chi_square_p(counts, exact_law(world, name, options)) > 1e-3
        assert chi_square_p(counts, exact_law(world, wrong, wrong_options)) < 1e-3


def test_a_causal_model_has_its_law() -> None:
    """Each token by the ones before it, in one pass or from a cache."""
    model = tiny_model("ar", seed=7, length=3)
    start = torch.zeros(ROWS, 3, dtype=torch.int64)
    is_fixed = torch.tensor([True, False, False]).expand(ROWS, -1)
    with adapter.small_vocabulary():
        *_, last = adapter.sample_frames(model, start, None, seed=5, is_fixed=is_fixed)
    world = TinyWorld(model)
    _, logits = adapter.predict(model, world.states)
    logits = logits.double()
    logits[..., world.mask] = -torch.inf
    probs, law = logits.softmax(-1), torch.zeros(len(world.states), dtype=torch.float64)
    for number, state in enumerate(world.states):
        if state[0] == 0:
            law[number] = probs[number, 0, state[1]] * probs[number, 1, state[2]]
    assert float(law.sum()) == pytest.approx(1, abs=1e-6)
    counts = torch.bincount(world.number(last.tokens), minlength=len(world.states))
    assert chi_square_p(counts, law) > 1e-3


PLAN_NAMES = ("ancestral", "forward_backward", "remask_cap", "remask_rescale", "remask_loop", "dfm")


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("name", PLAN_NAMES)
def test_tables_hold_probabilities_and_meet_at_their_ends(name: str, compat: bool) -> None:
    """Every step begins where the last one ended, from nothing visible to everything."""
    for steps in (1, 2, 3, 10, 128):
        table = adapter.plan_table(name, steps=steps, compat=compat)
        assert table is not None
        for column in (table.alpha_t, table.remask_prob, table.reveal_prob):
            assert ((column >= 0) & (column <= 1)).all()
        assert table.alpha_t[0] == 0
        assert table.has_lineage_fill == compat
        assert table.has_nucleus
        assert not table.is_by_confidence
        assert (table.alpha_s >= table.alpha_t - 1e-12).all()
        # The lineage's loop leaps where its phases meet.
        if not (name == "remask_loop" and compat):
            torch.testing.assert_close(table.alpha_s[:-1], table.alpha_t[1:], atol=1e-12, rtol=0)
        if not compat:
            assert table.alpha_s[-1] == 1
            assert table.reveal_prob[-1] == 1
        # A time-conditioned network is given how much is visible, on its training schedule.
        visible = 1 - table.t if compat else table.alpha_t
        expected = 1e-3 + 0.999 * visible
        torch.testing.assert_close(torch.exp(-table.noise_level), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", PLAN_NAMES)
def test_a_step_leaves_the_planned_share_visible(name: str) -> None:
    """What stays visible and what is revealed add up to alpha_s."""
    table = adapter.plan_table(name, steps=9)
    assert table is not None
    kept = table.alpha_t * (1 - table.remask_prob)
    revealed = (1 - table.alpha_t) * table.reveal_prob
    torch.testing.assert_close(kept + revealed, table.alpha_s, atol=1e-9, rtol=0)


def test_the_remasking_probabilities_are_the_formulas() -> None:
    """ReMDM's table of sigma, written down by hand on a grid of ten steps."""
    t = torch.linspace(1, 0, 11, dtype=torch.float64)
    alpha_t, alpha_s = 1 - t[:-1], 1 - t[1:]
    most = torch.where(alpha_t > 0, ((1 - alpha_s) / alpha_t).clamp(max=1), 1.0)
    zero = torch.zeros(10, dtype=torch.float64)
    backward = torch.where(alpha_t > 0, (alpha_s - alpha_t) / alpha_t, 1.0)
    expected = {
        "ancestral": zero,
        "forward_backward": torch.minimum(backward, most),
        "remask_cap": most.clamp(max=0.3),
        "remask_rescale": 0.3 * most,
        "remask_conf": most,
    }
    for name, sigma in expected.items():
        options = {"eta": 0.3} if name in ("remask_cap", "remask_rescale") else {}
        table = adapter.plan_table(name, steps=10, **options)
        assert table is not None
        torch.testing.assert_close(table.remask_prob, sigma, atol=1e-12, rtol=0)
    loop = adapter.plan_table("remask_loop", steps=20, eta=0.02, t_on=0.525, t_off=0.075)
    assert loop is not None
    is_in = (loop.t <= 0.525) & (loop.t > 0.075)
    assert int(is_in.sum()) == 9
    expected_loop = torch.where(is_in, 0.02, 0.0).double()
    torch.testing.assert_close(loop.remask_prob, expected_loop, atol=1e-12, rtol=0)
    inside = loop.alpha_s[is_in][:-1]
    torch.testing.assert_close(inside, torch.full_like(inside, 0.9), atol=1e-12, rtol=0)
