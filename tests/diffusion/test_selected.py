"""Fused equals plain: losses, every gradient, score entropy as SEDD writes it, and the law of a sampling step."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from adlm.diffusion import selected
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.masking import ForwardProcess, Selection, collect_batch, corrupt, select
from adlm.diffusion.objectives import diffusion_loss, score_entropy_loss, token_nll, training_loss
from adlm.diffusion.plans import ancestral, remask_cap, reverse_distribution
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, loss_weight, noise_level
from adlm.diffusion.selected import selected_loss
from adlm.models.evaluator import build_evaluator
from bench.plain import plain_law, plain_logits, plain_loss, subs
from tests.world import MASK, VOCAB, compute_probs, random_tokens, small_model


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(dim=6, vocab=9):
    head = nn.Linear(dim, vocab, dtype=torch.float64)
    head.load_state_dict({"weight": normal(vocab, dim), "bias": normal(vocab, seed=9)})
    return head


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("chunk", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("method", "bridge"), [("adlm", "factored"), ("adlm", "direct"), ("mdlm", "factored")]
)
def test_fused_is_plain_in_value_and_every_gradient(method, bridge, chunk, multiple, monkeypatch):
    """Whatever the chunk, with and without positions that only pad the selection."""
    monkeypatch.setitem(selected.MAX_LOGIT_ROWS, "cpu", chunk)
    model, x0, rule = small_model(method, bridge=bridge), random_tokens(5), rare_in_sequence(1)
    batch = corrupt(
        x0, ForwardProcess(MASK, anchor_rule=rule, multiple=multiple), CounterRng.from_seed(1, 5), 0
    )
    gamma = 0.3 if method == "adlm" else None

    model.zero_grad()
    loss = training_loss(model, batch, anchor_weight=gamma)
    loss.total.backward()
    fused = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    plain = plain_loss(
        model, batch, loss_weight(LogLinear(), batch.t), rule(x0, None), gamma or 0.0
    )
    plain.backward()
    assert float(loss.total.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            fused[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert fused[name].any(), f"{name} has no gradient to compare"


@pytest.mark.parametrize("offset", [None, 0.7])
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_gradients_agree_with_finite_differences(chunk, offset, monkeypatch):
    monkeypatch.setitem(selected.MAX_LOGIT_ROWS, "cpu", chunk)
    features, head = normal(1, 5, 4, seed=1).requires_grad_(), linear(4, 6)
    targets = torch.tensor([[0, 5, 2, 2, 1]])
    weight = torch.tensor([1.0, 0.3, 2.0, 0.0, 5.0], dtype=torch.float64)
    selection = Selection(torch.arange(5), weight)

    def total(features, matrix, bias):  # the head's own parameters, which gradcheck varies in place
        return selected_loss(features, head, targets, selection, offset=offset).total

    assert torch.autograd.gradcheck(total, (features, head.weight, head.bias))


@pytest.mark.parametrize("frozen", ["features", "weight", "bias", "no bias"])
def test_any_of_the_inputs_may_be_frozen(frozen, monkeypatch):
    """What needs no gradient gets none, and the others keep theirs; a graph that is kept gives them again."""
    monkeypatch.setitem(selected.MAX_LOGIT_ROWS, "cpu", 2)
    head, x = linear(), normal(2, 3, 6, seed=1).requires_grad_(frozen != "features")
    head.weight.requires_grad_(frozen != "weight")
    head.bias.requires_grad_(frozen != "bias")
    if frozen == "no bias":
        head.bias = None
    target = random_tokens(2, 3, 8)
    where = select(
        torch.ones(2, 3, dtype=torch.bool), torch.tensor([1.0, 2.0], dtype=torch.float64)
    )
    inputs = [p for p in (x, head.weight, head.bias) if p is not None and p.requires_grad]
    total = selected_loss(x, head, target, where, without=8).total
    logits = head(x).flatten(0, 1).index_fill(-1, torch.tensor(8), -torch.inf)
    each = nn.functional.cross_entropy(logits, target.flatten(), reduction="none")
    plain = torch.autograd.grad((each * where.weight).sum(), inputs)
    for _ in range(2):
        fused = torch.autograd.grad(total, inputs, retain_graph=True)
        for ours, theirs in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_empty_selection_costs_nothing(frozen):
    """Loss zero, gradients zero (not missing, not NaN), of the head alone and of a model."""
    head, x = linear(), normal(2, 3, 6).requires_grad_()
    head.weight.requires_grad_(not frozen)
    where = select(torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, dtype=torch.float64))
    loss = selected_loss(x, head, torch.zeros(2, 3, dtype=torch.long), where, without=8)
    assert float(loss.total.detach()) == 0 and loss.each.numel() == 0
    loss.total.backward()
    model, x0, ones = small_model(), random_tokens(2), torch.ones(2)
    batch = collect_batch(
        x0, x0, ones, ones, 0 * ones, ForwardProcess(MASK, anchor_rule=rare_in_sequence(0))
    )
    loss = training_loss(model, batch, anchor_weight=0.1)
    loss.total.backward()
    assert float(loss.total.detach()) == 0 and not loss.row_nll.any()
    for parameter in [x, head.bias, *model.parameters()] + ([] if frozen else [head.weight]):
        assert parameter.grad is not None and not parameter.grad.any()


def test_padding_of_a_selection_may_point_anywhere():
    """Padded entries repeat position 0: even if that token is impossible there, nothing of it is felt."""
    head, x = linear(), normal(1, 3, 6, seed=3).requires_grad_()
    target = torch.tensor(
        [[8, 2, 1]]
    )  # position 0 asks for the ruled-out token: infinite if it counted
    is_selected = torch.tensor([[False, True, True]])
    results = []
    for multiple in (1, 16):
        where = select(is_selected, torch.tensor([1.5], dtype=torch.float64), multiple)
        loss = selected_loss(x, head, target, where, without=8)
        grads = torch.autograd.grad(loss.total, [x, head.weight, head.bias])
        results.append((loss.total.detach(), *grads, token_nll(loss, where, target.shape)))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(other).all()
        torch.testing.assert_close(other, one)


def score_entropy_as_written(logits, x0, level, rate):
    """SEDD, absorbing, at a hidden position: Σ_y s_y - r log s_x + r (log r - 1), with r = 1 / (e^σ - 1), times σ'.

    The score is exp(logit) / ((e^σ - 1) (V - 1)); the mask itself is no y.
    """
    vocab = logits.shape[-1]
    log_score = logits - torch.log(torch.expm1(level))[:, None] - math.log(vocab - 1)
    possible = log_score.index_fill(-1, torch.tensor(MASK), -torch.inf)
    ratio = 1 / torch.expm1(level)
    picked = log_score.gather(-1, x0[:, None])[:, 0]
    return rate * (possible.exp().sum(-1) - ratio * picked + ratio * (ratio.log() - 1))


def test_score_entropy_is_sedds_in_value_and_gradient():
    model, x0 = small_model("mdlm", seed=5).double(), random_tokens(6)
    schedule = LogLinear()
    t = torch.linspace(0.1, 0.95, 6, dtype=torch.float64)
    xt = torch.where(
        torch.rand(x0.shape, generator=torch.Generator().manual_seed(1)) < 0.5, MASK, x0
    )
    batch = collect_batch(
        x0, xt, t, loss_weight(schedule, t), noise_level(schedule, t), ForwardProcess(MASK)
    )
    features = model(xt).final.detach().requires_grad_()
    head = model.head
    ours = score_entropy_loss(features, head, batch, mask_id=MASK, vocab_size=VOCAB)
    grads = torch.autograd.grad(ours.total, [features, head.weight, head.bias])

    is_hidden = xt == MASK
    row = is_hidden.nonzero()[:, 0]
    level, rate = noise_level(schedule, t)[row], (-schedule.dalpha(t) / schedule.alpha(t))[row]
    written = score_entropy_as_written(head(features)[is_hidden], x0[is_hidden], level, rate)
    torch.testing.assert_close(
        ours.total.detach(), (written.sum() / x0.numel()).detach(), rtol=1e-6, atol=1e-6
    )
    expected = torch.autograd.grad(written.sum() / x0.numel(), [features, head.weight, head.bias])
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_score_entropy_is_at_least_the_nelbo():
    """And equal to it where the logits' mass is V - 1."""
    model, x0 = small_model("mdlm"), random_tokens(4)
    batch = corrupt(x0, ForwardProcess(MASK), CounterRng.from_seed(2, 4), 0)
    score_entropy = partial(score_entropy_loss, vocab_size=VOCAB)
    with torch.no_grad():
        final = model(batch.xt).final
        nelbo = diffusion_loss(final, model.head, batch, mask_id=MASK)
        entropy = score_entropy(final, model.head, batch, mask_id=MASK)
        assert (entropy.row_nll > nelbo.row_nll - 1e-5).all() and entropy.total > nelbo.total + 1e-3
        # A head without weights says the same everywhere: its bias can have any mass.
        model.head.weight.zero_()
        model.head.bias += math.log(VOCAB - 1) - float(model.head.bias[:MASK].logsumexp(0))
        one, other = (
            loss(final, model.head, batch, mask_id=MASK) for loss in (score_entropy, diffusion_loss)
        )
        torch.testing.assert_close(one.row_nll, other.row_nll, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("step", [0, 3, 6])
def test_the_law_of_a_sampling_step_is_the_plain_one(step, top_p):
    model, xt = small_model(), random_tokens(4)
    xt[:, ::2] = MASK
    for plan in (ancestral(7), remask_cap(7, eta=0.3)):
        with torch.no_grad():
            plain = plain_law(model, xt, plan[step], top_p)
            logits = build_evaluator(model).logits_at(model(xt).final)
        probs = compute_probs(logits.flatten(0, 1), SamplingParams(top_p=top_p)).view(logits.shape)
        ours = reverse_distribution(xt, probs, plan[step], MASK)
        torch.testing.assert_close(ours, plain.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_log_probs_are_the_plain_ones(method):
    """SUBS: the mask impossible, a visible token certain of itself."""
    model, xt = small_model(method), random_tokens(3)
    xt[:, 1::3] = MASK
    with torch.no_grad():
        anchor, log_probs = model.log_probs(xt)
        anchor_logits, logits = plain_logits(model, xt)
    torch.testing.assert_close(log_probs.exp(), subs(logits, xt, MASK).exp(), atol=1e-6, rtol=1e-5)
    if anchor is not None:
        torch.testing.assert_close(anchor, anchor_logits.log_softmax(-1), atol=1e-5, rtol=0)
    assert (log_probs.exp()[..., MASK] == 0).all()
    assert (log_probs.exp().gather(-1, xt[..., None])[xt != MASK] == 1).all()


def test_measuring_is_training_without_the_products_of_the_gradient() -> None:
    """The same losses under no_grad, for a third of the work: the logits alone, whose gradients take as much each."""
    head, features, targets = linear(), normal(2, 5, 6), torch.tensor([[1, 2, 3, 4, 5]] * 2)
    selection = Selection(torch.arange(10), torch.ones(10, dtype=torch.float64))
    features.requires_grad_()
    with FlopCounterMode(display=False) as training:
        trained = selected_loss(features, head, targets, selection, without=0)
    with torch.no_grad(), FlopCounterMode(display=False) as measuring:
        measured = selected_loss(features, head, targets, selection, without=0)
    assert torch.equal(measured.total, trained.total) and torch.equal(measured.each, trained.each)
    assert training.get_total_flops() == 3 * measuring.get_total_flops() > 0
