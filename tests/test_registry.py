"""Names become functions once: unknown names list the known ones, the lineage's names work, wrong options fail."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.diffusion.anchors import ANCHOR_RULES, build_anchor_rule, every_token
from adlm.diffusion.masking import ForwardProcess, corrupt, shift_tokens
from adlm.diffusion.objectives import OBJECTIVES, ScoreEntropy, training_loss
from adlm.diffusion.plans import Plan
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import (
    SAMPLERS,
    RemaskByConfidence,
    build_sampler,
    choose_sampler,
    takes_steps,
)
from adlm.diffusion.sampling import Sampler
from adlm.diffusion.schedules import SCHEDULES
from adlm.models.language_model import LanguageModel
from adlm.models.methods import METHODS, PRESETS, build_config
from adlm.registry import Registry, build
from adlm.settings import SamplingSettings

TABLES = {
    "sampler": SAMPLERS,
    "schedule": SCHEDULES,
    "anchor rule": ANCHOR_RULES,
    "method": METHODS,
    "preset": PRESETS,
}
NEEDS_NO_STEPS = {"first_hitting", "entropy_bounded"}


@pytest.mark.parametrize("kind", TABLES)
def test_the_error_of_an_unknown_name_lists_the_known_ones(kind):
    expected = f"unknown {kind} 'nonsense': expected one of {', '.join(TABLES[kind])}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        TABLES[kind].resolve("nonsense")


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_can_be_built_and_checks_its_options(name):
    options = {} if name in NEEDS_NO_STEPS else {"steps": 4}
    sampler = build_sampler(name, **options)
    assert isinstance(sampler, Plan | Sampler) and sampler.name == name
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
        (build_anchor_rule, "listed", {}, "anchor rule 'listed' needs ids, vocab_size"),
    ],
)
def test_wrong_options_are_refused(build, name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


def test_wrong_options_of_a_schedule_are_refused():
    with pytest.raises(ValueError, match="unknown cosine option 'low': expected one of "):
        build(SCHEDULES, "cosine", {"low": 1})


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
    own = {"ar": "causal", "a2r": "causal", "sedd": "score_entropy"}
    assert shape.objective == own.get(method, "masked")
    assert OBJECTIVES[shape.objective](ForwardProcess(11)).is_causal == shape.is_causal


def test_schedules_and_rules_have_names():
    assert build(SCHEDULES, "cosine_squared", {}).alpha(torch.tensor(0.0)) == 1
    rule = build_anchor_rule("rare_in_sequence", max_count=1)
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
        ScoreEntropy(ForwardProcess(11, anchor_rule=every_token()))
    with pytest.raises(ValueError, match="padding or fixed"):
        corrupt(
            x0, ForwardProcess(11), CounterRng.from_seed(0, 2), 0, valid=torch.zeros_like(x0).bool()
        )


def test_changes_win_over_the_preset():
    config = build_config(
        "adlm", "small", vocab_size=12, mask_id=3, dim=48, bridge="softmax", length=7
    )
    assert (config.dim, config.bridge, config.length, config.mask_id) == (48, "softmax", 7, 3)
    with pytest.raises(ValueError, match="depth=4: unknown name; expected one of vocab_size"):
        build_config("adlm", "small", vocab_size=12, mask_id=3, depth=4)


def test_samplers_answer_to_their_names_in_other_code() -> None:
    assert SAMPLERS.resolve("remdm-cap") is SAMPLERS["remask_cap"]
    for other, name in SAMPLERS.aliases.items():
        assert SAMPLERS.resolve(other) is SAMPLERS[name] and other not in SAMPLERS
    with pytest.raises(ValueError, match="unknown method 'remdm-cap'"):
        METHODS.resolve("remdm-cap")


USER_FILE = """
from pathlib import Path
from adlm.diffusion.samplers import build_sampler
from adlm.diffusion.sampling import Move, Sampler
from adlm.diffusion.schedules import LogLinear

Path(__file__).with_suffix(".imported").touch()


def short(steps, eta=0.5):
    return build_sampler("remask_cap", steps=steps, eta=eta)


def any_options(steps, *rest, **options):
    return build_sampler("remask_cap", steps=steps, **options)


class Whole(Sampler):
    def move(self, view):
        return Move(view.is_hidden)


plan = short(3)
number = 3
"""


def write_user_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into the current folder, under a name of its own; return the name."""
    name = f"users_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(USER_FILE, "utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_an_object_of_a_users_file_is_built_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_user_file(tmp_path, monkeypatch)
    built = build(SAMPLERS, f"{module}:short", {"steps": 4}, allow_import=True)
    assert str(built) == str(build_sampler("remask_cap", steps=4, eta=0.5))
    assert str(build(SAMPLERS, f"{module}:plan", {}, allow_import=True)) == str(
        build_sampler("remask_cap", steps=3, eta=0.5)
    )
    assert str(
        build(SAMPLERS, f"{module}:any_options", {"steps": 4, "eta": 0.5}, allow_import=True)
    ) == str(built)
    settings = SamplingSettings(sampler=f"{module}:any_options", steps=4, options={"eta": 0.5})
    chosen, described = choose_sampler(settings, hidden=4, allow_import=True)
    assert str(chosen) == str(built) and described["eta"] == 0.5
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (f"{module}:short", {}, f"sampler '{module}:short' needs steps: give steps=VALUE"),
        (f"{module}:short", {"etaa": 1}, "unknown .* option 'etaa' .did you mean eta"),
        (f"{module}:plan", {"steps": 4}, "is an object and takes no steps"),
        (f"{module}:shrot", {}, f"{module} has no 'shrot': define it there"),
        ("nowhere_to_be_found:short", {}, "there is no module 'nowhere_to_be_found'"),
        (f"{module}:", {}, "is not module:object"),
    ]
    for name, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            build(SAMPLERS, name, options, allow_import=True)


def test_whether_a_users_sampler_takes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_user_file(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="is not imported from here"):
        takes_steps(f"{module}:short")
    assert takes_steps(f"{module}:short", allow_import=True)
    assert not takes_steps(f"{module}:plan", allow_import=True)
    assert not takes_steps(f"{module}:Whole", allow_import=True)
    with pytest.raises(ValueError, match=r"sampler=3: expected a name, .* as adlm\.build_sampler"):
        choose_sampler(SamplingSettings(sampler=f"{module}:number"), hidden=4, allow_import=True)


def test_options_of_the_command_line_are_read_by_the_samplers_own_types() -> None:
    def tell(
        steps: int, eta: float = 0.0, label: str = "", untyped=None, **others: object
    ) -> Plan | Sampler:
        seen.update(eta=eta, label=label, untyped=untyped, **others)
        return build_sampler("ancestral", steps=steps)

    seen: dict[str, Any] = {}
    pairs = ["eta=1", "label=5", "untyped=5", "other=true"]
    settings = SamplingSettings.parse("cli", None, **{"--option": pairs})
    SAMPLERS.register("test:tell", tell)
    try:
        choose_sampler(settings.replace(sampler="test:tell"), hidden=4)
        exact = SamplingSettings(sampler="test:tell", options={"eta": "1"})
        with pytest.raises(ValueError, match="eta='1': expected a number"):
            choose_sampler(exact, hidden=4)
    finally:
        del SAMPLERS.table["test:tell"]
    assert seen == {"eta": 1.0, "label": "5", "untyped": 5, "other": True}
    assert type(seen["eta"]) is float


def test_nothing_is_imported_unless_the_caller_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_user_file(tmp_path, monkeypatch)
    for registry in TABLES.values():
        with pytest.raises(ValueError, match="is not imported from here: expected one of"):
            registry.resolve(f"{module}:short")
    assert not (tmp_path / f"{module}.imported").exists()
    assert SAMPLERS.resolve(f"{module}:short", allow_import=True).__module__ == module
    assert (tmp_path / f"{module}.imported").exists()


def test_a_missing_import_of_a_users_file_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_broken.py").write_text("import nowhere_to_be_found\n", "utf-8")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere_to_be_found'"):
        SAMPLERS.resolve("users_broken:anything", allow_import=True)


def test_a_registered_name_is_known_like_the_others() -> None:
    registry = Registry("shape", {"round": 1})
    registry.register("mine:square", 4)
    registry.register("mine:square", 4)
    assert registry.resolve("mine:square") == 4 and list(registry) == ["round", "mine:square"]
    with pytest.raises(ValueError, match="shape 'round' exists already"):
        registry.register("round", 2)


@pytest.mark.parametrize("name", ["remask_cap", "remask_conf"])
def test_a_change_of_a_built_plan_changes_no_other_request(name: str) -> None:
    settings = SamplingSettings(sampler=name, steps=8)
    expected = build_sampler(name, steps=8)
    for _ in range(2):
        sampler, _ = choose_sampler(settings, hidden=4)
        assert sampler == expected and hash(sampler) == hash(expected)
        plan = sampler.plan if isinstance(sampler, RemaskByConfidence) else sampler
        table = expected.plan if isinstance(expected, RemaskByConfidence) else expected
        assert isinstance(plan, Plan) and isinstance(table, Plan)
        for column in ("t", "alpha_t", "alpha_s", "remask_prob", "noise_level", "reveal_prob"):
            values = getattr(plan, column)
            assert torch.equal(values, getattr(table, column))
            values.zero_()
        plan.table.zero_()


def test_a_sampler_is_built_once_for_equal_requests() -> None:
    settings = SamplingSettings(sampler="remask_cap", steps=8, options={"eta": 0.1})
    plan, _ = choose_sampler(settings, hidden=4)
    assert choose_sampler(settings.replace(seed=1), hidden=5)[0] == plan
    assert len({plan, choose_sampler(settings, hidden=4)[0]}) == 1
    for changes in ({"steps": 9}, {"options": {"eta": 0.2}}, {"sampler": "remask_rescale"}):
        assert choose_sampler(settings.replace(**changes), hidden=4)[0] != plan

    def make_own(steps: int) -> Plan | Sampler:
        return build_sampler("ancestral", steps=steps)

    SAMPLERS.register("test:own", make_own)
    try:
        own = settings.replace(sampler="test:own", options=None)
        assert choose_sampler(own, hidden=4)[0] is not choose_sampler(own, hidden=4)[0]
    finally:
        del SAMPLERS.table["test:own"]
