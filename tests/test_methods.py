"""Names become functions once: unknown names list the known ones, the lineage's names work, wrong options fail."""

import re

import pytest
import torch

from adlm import methods
from adlm.diffusion.masking import ForwardProcess, corrupt, shift_tokens
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.diffusion.rng import CounterRng
from adlm.methods import ANCHOR_RULES, METHODS, SAMPLERS, SCHEDULES, build_config, build_sampler
from adlm.models.language_model import PRESETS, LanguageModel

TABLES = {
    "sampler": SAMPLERS,
    "schedule": SCHEDULES,
    "rule": ANCHOR_RULES,
    "method": METHODS,
    "preset": PRESETS,
}
NEEDS_NO_STEPS = {"first_hitting", "entropy_bounded"}


@pytest.mark.parametrize("kind", TABLES)
def test_the_error_of_an_unknown_name_lists_the_known_ones(kind):
    expected = f"unknown {kind} 'nonsense': expected one of {', '.join(TABLES[kind])}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        methods.look_up(TABLES[kind], "nonsense", kind)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_can_be_built_and_checks_its_options(name):
    options = {} if name in NEEDS_NO_STEPS else {"steps": 4}
    sampler = build_sampler(name, **options)
    assert isinstance(sampler, Plan | Order) and sampler.name == name
    wrong = {"speed": 3} if name not in NEEDS_NO_STEPS else {"steps": 4}
    with pytest.raises(
        ValueError, match=f"unknown {name} option '{next(iter(wrong))}': expected one of "
    ):
        build_sampler(name, **options, **wrong)
    for steps in (0, -3, 2.5) if options else ():
        with pytest.raises(ValueError, match=f"steps must be at least 1 and whole, got {steps}"):
            build_sampler(name, steps=steps)


@pytest.mark.parametrize(
    ("build", "name", "options", "message"),
    [
        (build_sampler, "remask_cap", {"steps": 8, "eta": 1.5}, "eta must be between 0 and 1"),
        (build_sampler, "remask_rescale", {"steps": 8, "eta": -0.1}, "eta must be between 0 and 1"),
        (
            build_sampler,
            "remask_loop",
            {"steps": 8, "alpha_on": 1.2},
            "alpha_on must be between 0 and 1",
        ),
        (build_sampler, "remask_loop", {"steps": 8, "t_on": 0.1, "t_off": 0.2}, "t_off < t_on"),
        (build_sampler, "remask_loop", {"steps": 8, "t_on": 1.0}, "t_on < 1"),
        (build_sampler, "entropy_bounded", {"bound": -1.0}, "must not be negative"),
        (build_sampler, "ancestral", {}, "sampler 'ancestral' needs steps: give steps=VALUE"),
        (methods.build_anchor_rule, "listed", {}, "anchor rule 'listed' needs ids, vocab_size"),
        (
            methods.build_schedule,
            "cosine",
            {"low": 1},
            "unknown cosine option 'low': expected one of ",
        ),
    ],
)
def test_wrong_options_are_refused(build, name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


def test_plans_can_be_printed():
    table = str(build_sampler("remask_cap", steps=3, eta=0.5))
    assert len(table.splitlines()) == 5 and table.startswith("remask_cap: 3 steps")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_a_config_for_every_corner(method, preset):
    """One stage has the anchor network's depth; causal models have no modulation; the rest is the preset's."""
    shape, size = METHODS[method], PRESETS[preset]
    config = build_config(method, preset, vocab_size=100, mask_id=99)
    assert config.is_causal == shape.is_causal == (method in ("ar", "a2r"))
    assert bool(config.anchor_layers) == shape.two_stages == (method in ("adlm", "a2r"))
    assert (config.dim, config.heads, config.bridge) == (
        size["dim"],
        size["heads"],
        size.get("bridge", "factored"),
    )
    assert (
        config.denoiser_layers == size["denoiser_layers" if shape.two_stages else "anchor_layers"]
    )
    assert config.cond_dim == (None if shape.is_causal else size.get("cond_dim", 128))
    assert shape.score_entropy == (method == "sedd")


def test_schedules_and_rules_have_names():
    assert methods.build_schedule("cosine_squared").alpha(torch.tensor(0.0)) == 1
    rule = methods.build_anchor_rule("rare_in_sequence", max_count=1)
    assert rule(torch.tensor([[1, 1, 2]]), None).tolist() == [[False, False, True]]


def test_a_batch_must_fit_its_model():
    x0 = torch.randint(10, (2, 6), generator=torch.Generator().manual_seed(0))
    noisy = corrupt(x0, ForwardProcess(11), CounterRng.from_seed(0, 2), 0)
    size = {"vocab_size": 12, "mask_id": 11, "dim": 8, "heads": 2, "length": 6}
    masked, causal = (LanguageModel(build_config(name, "nano", **size)) for name in ("mdlm", "ar"))
    for model, batch in ((masked, shift_tokens(x0)), (causal, noisy)):
        with pytest.raises(ValueError, match="from batches of"):
            training_loss(model, batch)
    with pytest.raises(ValueError, match="no anchor term"):
        training_loss(masked, noisy, score_entropy=True, anchor_weight=0.1)
    with pytest.raises(ValueError, match="padding or fixed"):
        corrupt(
            x0, ForwardProcess(11), CounterRng.from_seed(0, 2), 0, valid=torch.zeros_like(x0).bool()
        )


def test_changes_win_over_the_preset():
    config = build_config(
        "adlm", "small", vocab_size=12, mask_id=3, dim=48, bridge="softmax", length=7
    )
    assert (config.dim, config.bridge, config.length, config.mask_id) == (48, "softmax", 7, 3)
    with pytest.raises(
        ValueError, match="unknown model setting 'depth': expected one of vocab_size"
    ):
        build_config("adlm", "small", vocab_size=12, mask_id=3, depth=4)


def test_samplers_answer_to_their_names_in_other_code() -> None:
    for other, name in methods.OTHER_NAMES.items():
        assert (
            methods.look_up(SAMPLERS, other, "sampler") is SAMPLERS[name] and other not in SAMPLERS
        )
    with pytest.raises(ValueError, match="unknown method 'remdm-cap'"):
        methods.look_up(METHODS, "remdm-cap", "method")
