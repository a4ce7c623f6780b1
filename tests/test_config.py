"""Settings: unknown keys are refused with a suggestion, changes apply in order, and a saved config is the config."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from adlm.config import (
    Config,
    compare_configs,
    flatten,
    list_recipes,
    load_config,
    save_config,
)
from adlm.models.methods import METHODS, ModelSettings
from adlm.training.text import build_model_config
from tests.training.runs import ROOT, data, limit_file_size

GIVEN: dict[str, Any] = {"folder": "run", "data": {"path": "data"}}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("step=5", "step='5': unknown name; did you mean steps?"),
        ("optimizer.lrr=1", "optimizer.lrr='1': unknown name; did you mean optimizer.lr?"),
        ("optimiser.lr=1", "did you mean optimizer"),
        ("zzzzzzzz=1", "expected one of folder, init, method, steps"),
        ("steps=many", "steps='many': expected a whole number above 0"),
        ("data.verify=perhaps", "data.verify='perhaps': expected true or false"),
        ("log.track=3", "log.track='3': expected a list"),
        ("steps", "write key=value"),
        ("=3", "write key=value"),
        ("method=]", "method=']' is no YAML value: put quotes around it"),
        ("model.bridge==", "model.bridge='=': expected one of factored, direct"),
        (f"objective.ids={'[' * 90_000}", "objective.ids is nested more than 20 levels deep"),
        (
            f"objective.ids={'[' * 200}{']' * 200}",
            "objective.ids is nested more than 20 levels deep",
        ),
        (f"objective.ids={'- ' * 50_000}", "objective.ids is nested more than 20 levels deep"),
        (f"objective.ids={'{a: ' * 21}", "objective.ids is nested more than 20 levels deep"),
        ("steps=0", "steps='0': expected a whole number above 0"),
        ("ema=1.0", "ema='1.0': expected a number at least 0 and below 1 or null"),
        ("seed=-1", "seed='-1': expected a whole number at least 0 and below"),
        ("valid.rows=1", "valid.rows='1': expected a whole number at least 2"),
        ("data.workers=-1", "data.workers='-1': expected a whole number at least 0"),
        ("optimizer.name=sgd", "optimizer.name='sgd': expected one of adamw, muon; leave it out"),
        (
            "optimizer.decay_share=0",
            "optimizer.decay_share='0': expected a number above 0 and at most 1",
        ),
        ("precision=float16", "precision='float16': expected one of auto, float32, bfloat16"),
    ],
)
def test_a_wrong_change_is_named(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_config(GIVEN, change)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="write key=value"):
        load_config(GIVEN, [change])  # type: ignore[arg-type]


DEEP = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100))])
WIDE = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}x]" for i in range(1, 9))])
TOO_DEEP = "is nested more than 20 levels deep"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("ids:\n" + "- " * 50_000, TOO_DEEP),
        ("- " * 50_000, TOO_DEEP),
        ("? " * 50_000, TOO_DEEP),
        ("a: " + "[" * 200, TOO_DEEP),
        (DEEP, TOO_DEEP),
        (WIDE, "has more than 1,048,576 values"),
        ("a: &a [*a]", "is not YAML"),
        ("a: *b", "is not YAML"),
        ("steps: 1\nsteps: 2", "steps is there twice"),
        ("objective: {ids: [1], ids: [2]}", "ids is there twice"),
        ("steps: \udcff", "is not YAML"),
        ("a: !!python/object/apply:os.system [x]", "unknown name"),
    ],
)
def test_a_hostile_recipe_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=rf"config\.yaml.*{problem}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    path.write_text("objective: {ids: [1, 2]}", "utf-8")
    assert load_config(path, **GIVEN).objective.ids == [1, 2]


def test_missing_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"folder=None: expected a text; give the run folder"):
        load_config(data={"path": "data"})
    with pytest.raises(ValueError, match=r"data\.path=None: .* give a folder written by"):
        load_config("cpu-nano", folder="run")


def test_changes_go_over_the_recipe_and_keywords_over_changes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nbatch: 2\nseed: 3\nmodel:\n  dim: 4\n  heads: 2\n", "utf-8")
    config = load_config(recipe, "batch=20", "seed=30", "model.dim=40", seed=300, **GIVEN)
    assert (config.steps, config.batch, config.seed) == (1, 20, 300)
    assert (config.model.dim, config.model.heads) == (40, 2)  # the rest of a section stays
    assert load_config(GIVEN, "seed=1", "seed=2").seed == 2


def test_keywords_may_be_sections_dotted_paths_or_path_objects() -> None:
    one = load_config(
        folder=Path("run"),
        data={"path": Path("data"), "workers": 2},
        optimizer={"betas": [0.8, 0.9]},
    )
    other = load_config(
        folder="run", **{"data.path": "data", "data.workers": 2, "optimizer.betas": (0.8, 0.9)}
    )
    assert one == other
    assert isinstance(one.folder, str) and isinstance(one.data.path, str)
    assert one.optimizer.betas == (0.8, 0.9)


def test_null_and_numbers_are_read_as_such() -> None:
    config = load_config(
        GIVEN,
        "ema=null",
        "guard.spike=null",
        "optimizer.lr=1e-3",
        "compile=false",
        "model.tied=true",
    )
    assert config.ema is None and config.guard.spike is None
    assert config.optimizer.lr == 1e-3 and config.compile is False and config.model.tied is True
    listed = load_config(
        GIVEN,
        "log.track=[tensorboard]",
        "objective.ids=[1,2]",
        "objective.schedule_options.eps=0.1",
    )
    assert listed.log.track == ["tensorboard"] and listed.objective.ids == [1, 2]
    assert listed.objective.schedule_options == {"eps": 0.1}


def test_a_saved_config_is_the_config(tmp_path: Path) -> None:
    changes = (
        "ema=null",
        "optimizer.betas=[0.9,0.95]",
        "log.track=[wandb]",
        "objective.ids=[3]",
        "model.dropout=0.1",
    )
    config = load_config(GIVEN, *changes, objective={"schedule_options": {"a": 1}})
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(config) == config
    assert pickle.loads(pickle.dumps(config)) == config  # experiments send it to processes
    assert load_config(config, "steps=7") == config.replace(steps=7)


def test_a_config_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """A run reads its config when it resumes, so no end of a process may leave half of it."""
    config, path = load_config(GIVEN), tmp_path / "config.yaml"
    save_config(config, path)
    with limit_file_size(100), pytest.raises(OSError, match="too large"):
        save_config(config.replace(steps=7), path)
    assert load_config(path) == config


def test_only_what_changes_the_run_is_a_difference() -> None:
    config = load_config(GIVEN)
    free = (
        "folder=x",
        "steps=2",
        "data.path=y",
        "log.every=3",
        "parallel.kind=fsdp",
        "micro_batch=1",
        "resume=z",
    )
    assert compare_configs(config, load_config(config, *free)) == []
    changed = load_config(config, "seed=1", "objective.max_count=3", "model.dim=8")
    assert compare_configs(config, changed) == [
        "seed: 0 then, 1 now",
        "model.dim: None then, 8 now",
        "objective.max_count: 5 then, 3 now",
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_run_on_any_data(path: Path) -> None:
    from adlm.data.shards import open_data

    assert list_recipes()[path.stem].read_text("utf-8") == path.read_text("utf-8")
    prepared = open_data(data())
    config = load_config(path, folder="run", **{"data.path": data()})
    if config.init is not None:  # the data must fit it: tests/training/test_init.py
        assert (config.method, config.model) == (None, ModelSettings())
        config = load_config(path, "init=null", folder="run", **{"data.path": data()})
    assert isinstance(config, Config) and config.method in METHODS
    shape = build_model_config(config, prepared)
    assert (shape.vocab_size, shape.mask_id, shape.length) == (
        prepared.vocab_size,
        prepared.mask_id,
        32,
    )
    assert bool(shape.anchor_layers) == METHODS[config.method].two_stages


def test_recipes_have_the_values_that_they_had() -> None:
    """The file was written when OmegaConf read the recipes: what differs from the defaults."""
    golden = json.loads((ROOT / "tests/golden/recipes.json").read_text("utf-8"))
    since = {"model.network": None, "model.options": None, "objective.name": None}
    since |= {"objective.anchor_options": {}}
    for name, own in golden["recipes"].items():
        config = load_config(name, folder="run", **{"data.path": "data"})
        expected = golden["defaults"] | since | own
        if not hasattr(config, "reasoning"):
            expected = {k: v for k, v in expected.items() if not k.startswith("reasoning.")}
        assert json.loads(json.dumps(flatten(config))) == expected, name


def test_a_recipe_is_found_by_name_and_by_its_usual_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = load_config(ROOT / "recipes/cpu-nano.yaml", **GIVEN)
    for name in ("cpu-nano", "cpu-nano.yaml", "recipes/cpu-nano.yaml"):
        assert load_config(name, **GIVEN) == expected
    with pytest.raises(
        ValueError,
        match=r"unknown recipe 'cpu-nono' \(did you mean cpu-nano\?\): expected a file or one of .*cpu-nano",
    ):
        load_config("cpu-nono", **GIVEN)
    for content, message in (
        ("- 1\n", r"bad\.yaml is not a recipe"),
        ("steps: [1\n", r"bad\.yaml is not YAML"),
        (
            "optimizer:\n  lr_: 1\n",
            r"optimizer\.lr_='1': unknown name; did you mean optimizer\.lr\?",
        ),
    ):
        (tmp_path / "bad.yaml").write_text(content, "utf-8")
        with pytest.raises(ValueError, match=message):
            load_config("bad.yaml", **GIVEN)


def test_the_environment_stays_out_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is what was written: nothing is resolved."""
    monkeypatch.setenv("TOKEN", "secret-value")
    config = load_config(GIVEN, "folder=${oc.env:TOKEN}", "log.track=['${TOKEN}', $TOKEN]")
    assert (config.folder, config.log.track) == ("${oc.env:TOKEN}", ["${TOKEN}", "$TOKEN"])


@pytest.mark.parametrize("name", ["2026-11-15", "1e3", "true", "007", "a=b", "a #2", "[x", "a: b"])
def test_a_folders_name_is_taken_as_it_is(name: str) -> None:
    config = load_config(
        "cpu-nano", f"data.path={name}", f"folder={name}", f"init={name}", "data.stream=null"
    )
    assert (config.folder, config.data.path, config.init, config.data.stream) == (
        name,
        name,
        name,
        None,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("corpus", ["owt", "lm1b"])
def test_a_recipe_of_the_paper_has_the_papers_settings(corpus: str, method: str) -> None:
    """The numbers of METHOD, section 3, whatever the defaults become."""
    config = load_config(f"{corpus}-{method}", **GIVEN)
    optimizer, objective = config.optimizer, config.objective
    assert (config.method, config.batch, config.ema) == (method, 512, 0.9999)
    assert config.steps == (500_000 if METHODS[method].is_causal else 1_000_000)
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", 3e-4, (0.9, 0.999))
    assert (optimizer.eps, optimizer.weight_decay, optimizer.clip) == (1e-8, 0, 1.0)
    assert (optimizer.warmup, optimizer.decay) == (2500, "constant")
    assert (objective.schedule, objective.anchor_rule, objective.max_count) == (
        "loglinear",
        "rare_in_sequence",
        5,
    )
    assert (objective.anchor_weight, objective.anchor_ramp, objective.anchor_scope) == (
        3e-3,
        True,
        "all",
    )
    assert objective.attend_padding == (corpus == "lm1b" and not METHODS[method].is_causal)
    changes = {key for key, value in vars(config.model).items() if value is not None}
    assert changes == {"preset"} | ({"time_conditioning"} if method == "sedd" else set())
    assert config.model.preset == "small"
