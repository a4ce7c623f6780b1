"""Schedules, times, anchors, losses and every gradient, against the authors' numbers."""

import pytest
import torch

from adlm.convert import map_names
from adlm.diffusion import schedules
from adlm.diffusion.anchors import anchor_weight, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, collect_batch, shift_tokens, stratify_times
from adlm.diffusion.objectives import token_nll, training_loss
from adlm.diffusion.schedules import Cosine, Linear, LogLinear, loss_weight, noise_level
from adlm.diffusion.selected import selected_loss
from tests.goldens import MASK, arrays, facts, model

SCHEDULES = {
    "loglinear": LogLinear(),
    "cosine": Cosine(),
    "cosinesqr": schedules.CosineSquared(),
    "linear_1e-3_7": Linear(1e-3, 7.0),
    "geometric_1e-3_1": schedules.Geometric(1e-3, 1.0),
    "geometric_1e-4_20": schedules.Geometric(1e-4, 20.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name):
    golden, schedule = arrays("noise_schedules"), SCHEDULES[name]
    t = golden["t"]
    torch.testing.assert_close(schedule.alpha(t), golden[f"{name}/alpha"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        noise_level(schedule, t), golden[f"{name}/sigma"], atol=1e-6, rtol=1e-5
    )
    # Below t = 0.01 their float32 loses 1 - alpha to cancellation; ours is computed in float64.
    usable = t >= 0.05
    weight = loss_weight(schedule, t)
    torch.testing.assert_close(
        weight[usable], golden[f"{name}/loss_weight"][usable], atol=1e-5, rtol=1e-4
    )
    rate = -schedule.dalpha(t) / schedule.alpha(t)
    torch.testing.assert_close(rate[usable], golden[f"{name}/dsigma"][usable], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_dalpha_is_the_derivative_of_alpha(name):
    t, schedule = (
        torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True),
        SCHEDULES[name],
    )
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.dalpha(t), slope)


def test_times():
    golden = arrays("sample_t")
    torch.testing.assert_close(stratify_times(golden["u"]), golden["t_anti1_imp0"])
    # The rows of one process among two get the times that they have in the whole batch.
    half = stratify_times(golden["u"][4:], index=torch.arange(4, 8), total=8)
    torch.testing.assert_close(half, golden["t_anti1_imp0"][4:])


def test_anchor_masks_and_ramp():
    golden = arrays("loss_adlm_gpt2like")
    for max_count in (0, 1, 5, 10):
        is_anchor = rare_in_sequence(max_count)(golden["x0"], None)
        assert torch.equal(is_anchor.long(), golden[f"anchor_mask_th{max_count}"])
    for step, gamma in zip(golden["gamma_steps"].tolist(), golden["gamma"].tolist(), strict=True):
        assert anchor_weight(step, 1_000_000) == pytest.approx(gamma, rel=1e-9)


def golden_batch(kind, multiple=1):
    golden = arrays(f"loss_{kind}_gpt2like")
    x0, xt, t, valid = (golden[name] for name in ("x0", "xt", "t", "attention_mask"))
    process = ForwardProcess(
        MASK, anchor_rule=rare_in_sequence(5), attend_padding=True, multiple=multiple
    )
    weight, level = loss_weight(LogLinear(), t), noise_level(LogLinear(), t)
    return golden, collect_batch(x0, xt, t, weight, level, process, valid=valid.bool())


def read_gamma(case):
    if "gamma0.5" in case:
        return 0.5
    return (
        anchor_weight(int(case.split("step")[1].split("_")[0]), 1_000_000)
        if "step" in case
        else None
    )


CASES = [
    (kind, case) for kind in ("adlm", "mdlm") for case in facts(f"loss_{kind}_gpt2like")["losses"]
]


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_losses(kind, case, multiple):
    golden, batch = golden_batch(kind, multiple)
    loss = training_loss(model(kind, case.endswith("tc1")), batch, anchor_weight=read_gamma(case))
    torch.testing.assert_close(loss.total.detach(), golden[f"{case}/loss"], atol=1e-4, rtol=1e-5)
    nelbo = golden[f"nelbo_{'val_' if kind == 'adlm' else ''}{case[-3:]}/nlls"]
    torch.testing.assert_close(
        loss.nll.detach(), nelbo.sum() / golden["attention_mask"].sum(), atol=1e-4, rtol=1e-5
    )
    torch.testing.assert_close(loss.row_nll, nelbo.sum(-1), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adlm", "mdlm"])
def test_token_losses_and_discrete_time(kind):
    golden, batch = golden_batch(kind)
    ours = model(kind)
    with torch.no_grad():
        final = ours(batch.xt).final
    each = selected_loss(final, ours.head, batch.x0, batch.hidden, without=MASK)
    expected = golden[f"nelbo_{'val_' if kind == 'adlm' else ''}tc0/nlls"]
    torch.testing.assert_close(
        token_nll(each, batch.hidden, batch.x0.shape), expected, atol=1e-4, rtol=1e-4
    )

    t = schedules.discrete_time(golden["t"], 100)
    torch.testing.assert_close(t, golden["discrete_T100/t_used"])
    weight = schedules.discrete_loss_weight(LogLinear(), t, 100)
    discrete = collect_batch(
        golden["x0"], golden["xt"], t, weight, golden["sigma"], ForwardProcess(MASK)
    )
    each = selected_loss(final, ours.head, discrete.x0, discrete.hidden, without=MASK)
    per_token = token_nll(each, discrete.hidden, discrete.x0.shape)
    torch.testing.assert_close(per_token, golden["discrete_T100/per_token"], atol=1e-4, rtol=1e-4)


GRADIENTS = [
    ("adlm", "anelbo_gamma0.5_tc0"),
    ("adlm", "anelbo_step3000_tc0"),
    ("adlm", "nelbo_train_noanchor_tc0"),
]


@pytest.mark.parametrize(("kind", "case"), [*GRADIENTS, ("mdlm", "nelbo_tc0")])
def test_every_gradient(kind, case):
    golden = arrays(f"grads_{kind}_gpt2like_{case}")
    ours = model(kind)
    ours.zero_grad()
    training_loss(ours, golden_batch(kind)[1], anchor_weight=read_gamma(case)).total.backward()
    parameters, names = dict(ours.named_parameters()), map_names(ours.config)
    for theirs, expected in golden.items():
        grad = parameters.pop(names[theirs]).grad
        torch.testing.assert_close(
            grad, expected, atol=2e-5, rtol=1e-3, msg=lambda m, n=theirs: f"{n}: {m}"
        )
    assert not parameters
    ours.zero_grad()


def test_next_token_loss():
    golden = arrays("ar_gpt2like")
    batch = shift_tokens(golden["x0"], valid=golden["attention_mask"].bool())
    loss = training_loss(model("ar"), batch)
    torch.testing.assert_close(loss.total.detach(), golden["loss"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.row_nll, golden["nlls"].sum(-1), atol=1e-3, rtol=1e-5)
