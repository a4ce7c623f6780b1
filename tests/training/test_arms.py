"""Every arm of the experiments about the recipe trains: four steps of a narrow model."""

from itertools import islice
from typing import Any

import pytest
import torch
import yaml

from adlm.config import load_config
from adlm.distributed import DistributedContext
from adlm.models.language_model import LanguageModel
from adlm.training.distributed import LossModule, parallelize
from adlm.training.optim import build_optimizers
from adlm.training.text import TextTask
from adlm.training.train import train_steps
from tests.training.runs import ROOT, data

NARROW = {
    "model.dim": 16,
    "model.heads": 2,
    "batch": 2,
    "steps": 4,
    "valid.rows": 2,
    "optimizer.warmup": 0,
}


def list_arms() -> list[Any]:
    arms = []
    for name in ("2b", "2d", "best-changes", "best", "speedrun"):
        experiment = yaml.safe_load((ROOT / "experiments" / f"{name}.yaml").read_text("utf-8"))
        arms += [
            pytest.param(experiment["overrides"], arm, id=f"{name}: {each}")
            for each, arm in experiment["arms"].items()
        ]
    return arms


@pytest.mark.parametrize(("overrides", "arm"), list_arms())
def test_an_arm_takes_its_steps(overrides: dict[str, Any], arm: dict[str, Any]) -> None:
    settings = (
        overrides | arm.get("overrides", {}) | NARROW | {"data.path": data(), "folder": "unused"}
    )
    config, context = (
        load_config(arm["recipe"], **settings),
        DistributedContext(torch.device("cpu")),
    )
    task = TextTask(config, context)
    model = LanguageModel(task.shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner = LossModule(model, task.objective)
    optimizers = build_optimizers(learner, config.optimizer)
    parallel, batches = (
        parallelize(learner, context, config.parallel),
        islice(task.open_batches(), 4),
    )
    metrics = list(
        train_steps(parallel, task.objective, batches, optimizers, steps=4, context=context)
    )
    assert all(torch.isfinite(each.values).all() for each in metrics) and len(metrics) == 4
    still = [
        name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])
    ]
    is_short = (
        config.objective.anchor_rule == "frequent_in_sequence"
    )  # no token is frequent in rows of this length
    idle = (
        ".condition.",
        "anchor_head." if config.objective.anchor_weight == 0 or is_short else ".condition.",
    )
    assert not [name for name in still if not any(part in name for part in idle)], still
