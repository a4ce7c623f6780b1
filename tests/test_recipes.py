"""The recipes of the paper have the paper's numbers (METHOD, section 3), whatever the defaults become."""

import pytest

from adlm.config import list_recipes, load_config
from adlm.methods import METHODS

PAPER = [f"{data}-{method}" for data in ("owt", "lm1b") for method in METHODS]


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_is_the_papers(name: str) -> None:
    data, method = name.split("-")
    config = load_config(list_recipes()[name], folder="run", data={"path": "data"})
    how, asked = config.optimizer, config.objective
    assert (config.method, config.batch, config.ema) == (method, 512, 0.9999)
    assert config.steps == (500_000 if METHODS[method].is_causal else 1_000_000)
    assert (how.name, how.lr, how.betas, how.eps, how.weight_decay) == ("adamw", 3e-4, (0.9, 0.999), 1e-8, 0)
    assert (how.warmup, how.decay, how.clip) == (2500, "constant", 1.0)
    assert (asked.schedule, asked.anchor_rule, asked.max_count) == ("loglinear", "rare_in_sequence", 5)
    assert (asked.anchor_weight, asked.anchor_ramp, asked.anchor_scope) == (3e-3, True, "all")
    assert asked.attend_padding == (data == "lm1b" and not METHODS[method].is_causal)
    changes = {key for key, value in vars(config.model).items() if value is not None}
    assert changes == {"preset"} | ({"time_conditioning"} if method == "sedd" else set())
    assert config.model.preset == "small"
