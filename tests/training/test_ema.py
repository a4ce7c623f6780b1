"""The moving average: the authors' warm-up, number for number; saved and resumed bit for bit."""

import pytest
import torch
from torch import Tensor, nn

from adlm.training.ema import EMA
from tests.goldens import arrays, facts

GOLDEN, DECAYS = arrays("ema"), facts("ema")["effective_decay"]


def build() -> nn.ParameterDict:
    return nn.ParameterDict({name: GOLDEN[f"{name}_init"].clone() for name in ("p0", "p1")})


def set_weights(model: nn.ParameterDict, weights: Tensor) -> None:
    with torch.no_grad():
        model["p0"].copy_(weights)


def test_the_shadow_follows_the_authors() -> None:
    model = build()
    ema = EMA(model, decay=facts("ema")["decay"])
    torch.testing.assert_close(ema.shadow["p0"], GOLDEN["p0_init"], atol=0, rtol=0)
    for i in range(len(DECAYS)):
        set_weights(model, GOLDEN[f"param0_{i}"])
        ema.update(model)
        torch.testing.assert_close(ema.shadow["p0"], GOLDEN[f"shadow0_{i}"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ema.shadow["p1"], GOLDEN["p1_init"])  # what does not move stays
    assert ema.updates == len(DECAYS)


def test_the_warm_up_ends_at_the_decay() -> None:
    """An average of zero and a parameter of one: what is left is the product of the decays."""
    model = nn.ParameterDict({"p0": torch.zeros(1)})
    ema, left = EMA(model, decay=0.5), 1.0
    set_weights(model, torch.ones(1))
    for decay in [*DECAYS[:7], 0.5, 0.5, 0.5]:  # 0.18, 0.25, … until the decay itself
        ema.update(model)
        left *= min(decay, 0.5)
        assert float(1 - ema.shadow["p0"]) == pytest.approx(left, abs=1e-6)


def test_a_resumed_average_is_the_average() -> None:
    model = build()
    straight, halved = EMA(model), EMA(model)
    for i in range(len(DECAYS)):
        set_weights(model, GOLDEN[f"param0_{i}"])
        if i == 5:
            shadow, count = {name: v.clone() for name, v in halved.shadow.items()}, halved.updates
            halved = EMA(build())
            halved.load(shadow, count)
        straight.update(model)
        halved.update(model)
    assert halved.decay == straight.decay and halved.updates == straight.updates
    for name, value in straight.shadow.items():
        assert torch.equal(halved.shadow[name], value)


def test_the_average_is_swapped_in_and_out() -> None:
    """Frozen parameters are not averaged and do not change."""
    model = build()
    model["p1"].requires_grad_(False)
    ema = EMA(model)
    assert set(ema.shadow) == {"p0"}
    set_weights(model, GOLDEN["p0_init"] + 1)
    ema.update(model)
    weights, average = model["p0"].detach().clone(), ema.shadow["p0"].clone()
    with ema.swap_in(model):
        assert torch.equal(model["p0"], average) and not torch.equal(average, weights)
    assert torch.equal(model["p0"], weights) and torch.equal(ema.shadow["p0"], average)
