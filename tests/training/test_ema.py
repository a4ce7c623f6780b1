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


def build():
    golden = arrays("ema")
    return golden, Pair(golden["p0_init"], golden["p1_init"])


def updates(golden):
    return len(facts("ema")["effective_decay"])


def test_the_shadow_follows_the_authors():
    golden, model = build()
    ema = EMA(model, decay=facts("ema")["decay"])
    torch.testing.assert_close(ema.shadow["p0"], golden["p0_init"], atol=0, rtol=0)
    for i in range(updates(golden)):
        with torch.no_grad():
            model.p0.copy_(golden[f"param0_{i}"])
        ema.update(model)
        torch.testing.assert_close(ema.shadow["p0"], golden[f"shadow0_{i}"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ema.shadow["p1"], golden["p1_init"])  # what does not move stays
    assert ema.updates == updates(golden)


def test_the_warm_up_is_one_plus_n_over_ten_plus_n():
    """A shadow of zero and a parameter of one: what is left is the product of the decays."""
    model = Pair(torch.zeros(1), torch.zeros(1))
    ema, left = EMA(model, decay=0.5), 1.0
    with torch.no_grad():
        model.p0.fill_(1.0)
    expected = [*facts("ema")["effective_decay"][:7], 0.5, 0.5, 0.5]  # 0.18, 0.25, … until the decay itself
    for decay in expected:
        ema.update(model)
        left *= min(decay, 0.5)
        assert float(1 - ema.shadow["p0"]) == pytest.approx(left, abs=1e-6)


def test_saved_and_resumed_it_goes_on_as_if_nothing_happened():
    golden, model = build()
    straight, halved = EMA(model), EMA(model)
    for i in range(updates(golden)):
        with torch.no_grad():
            model.p0.copy_(golden[f"param0_{i}"])
        if i == 5:
            shadow, count = {name: v.clone() for name, v in halved.shadow.items()}, halved.updates
            halved = EMA(Pair(torch.ones(3), torch.ones(2, 2)))
            halved.load(shadow, count)
        straight.update(model)
        halved.update(model)
    assert halved.decay == straight.decay and halved.updates == straight.updates
    for name, value in straight.shadow.items():
        assert torch.equal(halved.shadow[name], value)


def test_the_average_is_swapped_in_and_out():
    """Frozen parameters are not averaged and do not change."""
    _, model = build()
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
