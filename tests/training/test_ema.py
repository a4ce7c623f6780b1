"""The moving average: the authors' warm-up, number for number; saved and resumed bit for bit."""

import pytest
import torch
from torch import nn

from adlm.training.ema import EMA
from tests.goldens import arrays, facts


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.p0, self.p1 = nn.Parameter(first.clone()), nn.Parameter(second.clone())


GOLDEN, DECAYS = arrays("ema"), facts("ema")["effective_decay"]


def build() -> Pair:
    return Pair(GOLDEN["p0_init"], GOLDEN["p1_init"])


def set_weights(model: Pair, step: int) -> None:
    with torch.no_grad():
        model.p0.copy_(GOLDEN[f"param0_{step}"])


def test_the_shadow_follows_the_authors() -> None:
    model = build()
    ema = EMA(model, decay=facts("ema")["decay"])
    torch.testing.assert_close(ema.shadow["p0"], GOLDEN["p0_init"], atol=0, rtol=0)
    for i in range(len(DECAYS)):
        set_weights(model, i)
        ema.update(model)
        torch.testing.assert_close(ema.shadow["p0"], GOLDEN[f"shadow0_{i}"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ema.shadow["p1"], GOLDEN["p1_init"])  # what does not move stays
    assert ema.updates == len(DECAYS)


def test_the_warm_up_ends_at_the_decay() -> None:
    """An average of zero and a parameter of one: what is left is the product of the decays."""
    model = Pair(torch.zeros(1), torch.zeros(1))
    ema, left = EMA(model, decay=0.5), 1.0
    with torch.no_grad():
        model.p0.fill_(1.0)
    for decay in [*DECAYS[:7], 0.5, 0.5, 0.5]:  # 0.18, 0.25, … until the decay itself
        ema.update(model)
        left *= min(decay, 0.5)
        assert float(1 - ema.shadow["p0"]) == pytest.approx(left, abs=1e-6)


def test_a_resumed_average_is_the_average() -> None:
    model = build()
    straight, halved = EMA(model), EMA(model)
    for i in range(len(DECAYS)):
        set_weights(model, i)
        if i == 5:
            shadow, count = {name: v.clone() for name, v in halved.shadow.items()}, halved.updates
            halved = EMA(Pair(torch.ones(3), torch.ones(2, 2)))
            halved.load(shadow, count)
        straight.update(model)
        halved.update(model)
    assert halved.decay == straight.decay and halved.updates == straight.updates
    for name, value in straight.shadow.items():
        assert torch.equal(halved.shadow[name], value)


def test_the_average_is_swapped_in_and_out() -> None:
    """Frozen parameters are not averaged and do not change."""
    model = build()
    model.p1.requires_grad_(False)
    ema = EMA(model)
    assert set(ema.shadow) == {"p0"}
    with torch.no_grad():
        model.p0.add_(1.0)
    ema.update(model)
    weights, average = model.p0.detach().clone(), ema.shadow["p0"].clone()
    with ema.swap_in(model):
        assert torch.equal(model.p0, average) and not torch.equal(average, weights)
    assert torch.equal(model.p0, weights) and torch.equal(ema.shadow["p0"], average)
