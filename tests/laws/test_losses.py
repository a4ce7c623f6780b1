"""Neighbors, padding, processes and fixed tokens change no loss; anchors act where they should."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws import adapter
from tests.laws.adapter import Anchors, Batch, Loss
from tests.laws.world import MASK, VOCAB, random_tokens, small_model

LENGTH = 16
METHODS = ("mdlm", "adlm", "ar", "a2r")
ONCE = Anchors("rare_in_sequence", {"max_count": 1})


def build_batch(method: str, x0: Tensor, **where: Any) -> Batch:
    """Return a method's batch; anchors are the tokens that occur once."""
    if adapter.is_causal(method):
        return adapter.next_token_rows(x0, valid=where.get("valid"), anchors=ONCE)
    return adapter.corrupt_rows(x0, MASK, seed=5, step=2, anchors=ONCE, **where)


def choose_gamma(method: str) -> float | None:
    """Return a weight of the anchor term, where there is one."""
    return 0.4 if adapter.has_two_stages(method) else None


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_see_each_other(method: str) -> None:
    """A batch's losses are those of its rows alone, wherever they stand."""
    model, x0, gamma = small_model(method), random_tokens(8), choose_gamma(method)

    def compute(numbers: list[int]) -> tuple[Batch, Loss]:
        rows = torch.tensor(numbers)
        batch = build_batch(method, x0[rows], rows=rows, index=rows, total=len(x0))
        with torch.no_grad():
            return batch, adapter.compute_loss(model, batch, gamma=gamma)

    whole, losses = compute(list(range(8)))
    total = 0.0
    for numbers in ([0], [1], [2, 3], [7, 5, 6, 4]):
        part, loss = compute(numbers)
        assert torch.equal(part.xt, whole.xt[numbers])
        torch.testing.assert_close(loss.row_nll, losses.row_nll[numbers], atol=1e-5, rtol=1e-5)
        total += float(loss.total) * part.tokens
    assert total == pytest.approx(float(losses.total) * whole.tokens, rel=1e-5)


def pad_rows(x: Tensor, extra: int, value: int) -> tuple[Tensor, Tensor]:
    """Return rows with padding behind them, and which of their tokens are valid."""
    wide = torch.nn.functional.pad(x, (0, extra), value=value)
    return wide, torch.arange(wide.shape[1]).expand(len(x), -1) < x.shape[1]


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_no_loss(method: str, is_timed: bool, value: int) -> None:
    changes = {"time_conditioning": True, "cond_dim": 8} if is_timed else {}
    model, x0 = small_model(method, **changes), random_tokens(4, 10)
    wide, valid = pad_rows(x0, 6, value)
    short, long = build_batch(method, x0), build_batch(method, wide, valid=valid)
    assert torch.equal(long.xt[:, : short.xt.shape[1]], short.xt)
    with torch.no_grad():
        one, other = (
            adapter.compute_loss(model, batch, gamma=choose_gamma(method))
            for batch in (short, long)
        )
    for name in ("total", "nll", "anchor", "row_nll"):
        found, expected = getattr(other, name), getattr(one, name)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_padding_is_read_where_the_lineage_reads_it(method: str) -> None:
    model, (wide, valid) = small_model(method), pad_rows(random_tokens(4, 10), 6, 7)
    plain = adapter.corrupt_rows(wide, MASK, seed=5, step=2, valid=valid)
    read = adapter.corrupt_rows(wide, MASK, seed=5, step=2, valid=valid, attend_padding=True)
    assert plain.tokens == read.tokens == 40
    assert (read.xt[:, 10:] == MASK).any()
    assert not (plain.xt[:, 10:] == MASK).any()
    with torch.no_grad():
        one, other = (adapter.compute_loss(model, batch).row_nll for batch in (plain, read))
    assert not torch.allclose(one, other, atol=1e-3)


RULES = {
    "rare": ONCE,
    "fraction": Anchors("rare_in_sequence", {"max_fraction": 0.2}),
    "random": Anchors("random", {"fraction": 0.5, "seed": 1}),
}


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_no_anchor(rule: str, value: int) -> None:
    x0 = random_tokens(6, 10)
    wide, valid = pad_rows(x0, 6, value)
    plain = adapter.find_anchors(RULES[rule], x0)
    assert plain.any()
    assert not plain.all()
    is_anchor = adapter.find_anchors(RULES[rule], wide, valid)
    assert torch.equal(is_anchor[:, :10], plain)
    assert not is_anchor[:, 10:].any()


def test_anchors_are_the_tokens_that_occur_so_often() -> None:
    x0 = random_tokens(20, 30)
    for most in (1, 2, 5):
        anchors = Anchors("rare_in_sequence", {"max_count": most})
        found = adapter.find_anchors(anchors, x0)
        for row, is_anchor in zip(x0.tolist(), found.tolist(), strict=True):
            assert is_anchor == [row.count(token) <= most for token in row]


def test_the_scope_of_anchors() -> None:
    is_anchor = torch.tensor([[True, True, False, False]])
    is_hidden = torch.tensor([[True, False, True, False]])
    expected = {
        "all": [True, True, False, False],
        "masked": [True, False, False, False],
        "visible": [False, True, False, False],
    }
    for scope, kept in expected.items():
        assert adapter.limit_anchors(is_anchor, is_hidden, scope).tolist() == [kept]


@pytest.mark.parametrize("scope", ["all", "masked", "visible"])
def test_the_anchor_term_is_the_mean_of_the_anchors_costs(scope: str) -> None:
    """By hand: weight · 1{anchor} · -log softmax(anchor logits) over all tokens."""
    model, x0 = small_model(), random_tokens(5)
    xt = torch.where(
        torch.rand(x0.shape, generator=torch.Generator().manual_seed(1)) < 0.5, MASK, x0
    )
    weight, ones = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1]), torch.ones(5)
    anchors = Anchors(ONCE.rule, ONCE.options, scope)
    batch = adapter.known_rows(
        x0, xt, MASK, t=ones, weight=weight, noise_level=0 * ones, anchors=anchors
    )
    with torch.no_grad():
        loss = adapter.compute_loss(model, batch, gamma=0.3)
    logits, _ = adapter.predict(model, xt)
    assert logits is not None
    costs = -logits.double().log_softmax(-1).gather(-1, x0[..., None])[..., 0]
    is_anchor = torch.tensor([[row.count(token) <= 1 for token in row] for row in x0.tolist()])
    counted = {
        "all": is_anchor,
        "masked": is_anchor & (xt == MASK),
        "visible": is_anchor & (xt != MASK),
    }
    expected = float((costs * counted[scope] * weight[:, None]).sum()) / x0.numel()
    assert float(loss.anchor) == pytest.approx(expected, rel=1e-5)
    assert float(loss.total) == pytest.approx(float(loss.nll) + 0.3 * expected, rel=1e-5)


@pytest.mark.parametrize("bridge", ["factored", "direct", "softmax"])
@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_an_anchor_weight_of_zero_is_the_nelbo(method: str, bridge: str) -> None:
    """In value and in every gradient."""
    model = small_model(method, bridge=bridge)
    batch, found = build_batch(method, random_tokens(4)), []
    for gamma in (None, 0.0):
        model.zero_grad()
        loss = adapter.compute_loss(model, batch, gamma=gamma)
        loss.total.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradient += parameter.grad
            gradients[name] = gradient
        found.append((float(loss.total.detach()), gradients))
    (plain, without), (zero, with_zero) = found
    assert plain == zero
    for name, gradient in without.items():
        torch.testing.assert_close(with_zero[name], gradient)


def test_bridges_differ() -> None:
    """Reading the logits, their softmax or the features makes three models."""
    xt = random_tokens(3)
    xt[:, ::3] = MASK
    logits = [adapter.predict(small_model(bridge=name), xt)[1] for name in ("factored", "softmax")]
    assert (logits[0] - logits[1]).abs().max() > 0.1
    model = small_model(bridge="softmax")
    anchor_logits, read = adapter.bridge_tokens(model, xt)
    expected = adapter.bridge_logits(model, anchor_logits.softmax(-1))
    torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-5)


def test_fixed_tokens_are_neither_hidden_nor_counted() -> None:
    x0 = random_tokens(5)
    is_fixed = torch.arange(LENGTH).expand(5, -1) < 6
    batch = adapter.corrupt_rows(x0, MASK, seed=5, step=2, is_fixed=is_fixed)
    assert torch.equal(batch.xt[is_fixed], x0[is_fixed])
    assert (batch.xt[~is_fixed] == MASK).any()
    assert batch.tokens == 5 * (LENGTH - 6)


def test_the_share_that_is_hidden_is_one_minus_alpha() -> None:
    """Of many rows, at the time of each; times are spread evenly over the rows."""
    x0 = random_tokens(4000, 20)
    for name in ("loglinear", "cosine"):
        schedule = adapter.make_schedule(name)
        batch = adapter.corrupt_rows(x0, MASK, seed=1, step=3, schedule=name)
        expected = 1 - schedule.alpha(batch.t.double())
        share = (batch.xt == MASK).double().mean(-1)
        error = (expected * (1 - expected) / 20).mean().sqrt() / 4000**0.5
        assert abs(float((share - expected).mean())) < 4 * float(error)
        gaps = batch.t.sort().values.diff()
        assert float(gaps.max()) < 2.1 / 4000
        # A row's time and what is hidden in it are independent: residuals do not follow the time.
        residual = (share - expected) / (expected * (1 - expected) / 20).sqrt()
        halves = residual[batch.t < 0.5].mean(), residual[batch.t >= 0.5].mean()
        assert all(abs(float(half)) < 4 / 2000**0.5 for half in halves)


def test_which_tokens_are_hidden_does_not_follow_from_the_time() -> None:
    """In batches of one row, where the time is the row's own number: at every position alike."""
    rows = 4000
    x0 = random_tokens(rows, 6)
    alone = torch.zeros(rows, dtype=torch.int64)
    batch = adapter.corrupt_rows(x0, MASK, seed=1, step=3, index=alone, total=1)
    expected = (1 - adapter.make_schedule("loglinear").alpha(batch.t.double()))[:, None]
    assert 0.45 < float(batch.t.mean()) < 0.55
    residual = (batch.xt == MASK).double() - expected
    for weight in (torch.ones(rows, 1), (batch.t - 0.5)[:, None]):
        error = (expected * (1 - expected) * weight**2).sum().sqrt()
        assert ((residual * weight).sum(0).abs() < 4 * error).all()


def test_a_steps_noise_is_its_own() -> None:
    """Other seeds, steps and row numbers hide other tokens."""
    x0 = random_tokens(6)
    plain = adapter.corrupt_rows(x0, MASK, seed=1, step=3)
    others: list[dict[str, Any]] = [{"seed": 2}, {"step": 4}, {"rows": torch.arange(6) + 1}]
    for changes in others:
        settings: dict[str, Any] = {"seed": 1, "step": 3, **changes}
        other = adapter.corrupt_rows(x0, MASK, **settings)
        assert not torch.equal(other.xt, plain.xt)
    again = adapter.corrupt_rows(x0, MASK, seed=1, step=3)
    assert torch.equal(again.xt, plain.xt)
    assert torch.equal(again.t, plain.t)


# Estimates over rows


def padded_rows(filler: int) -> tuple[Tensor, Tensor]:
    """Return rows of 3 to 16 tokens with fillers behind them, and their lengths."""
    lengths = torch.arange(20) % 14 + 3
    rows = random_tokens(20, 16, seed=3)
    is_text = torch.arange(16) < lengths[:, None]
    return torch.where(is_text, rows, filler), lengths


@pytest.mark.parametrize("method", METHODS)
def test_batch_and_padding_change_no_estimate(method: str) -> None:
    model = small_model(method)
    rows, lengths = padded_rows(0)
    whole = adapter.row_nats(model, rows, lengths=lengths, draws=2, seed=3)
    other, _ = padded_rows(7)
    for batch in (1, 7, 32):
        found = adapter.row_nats(model, other, lengths=lengths, draws=2, seed=3, batch=batch)
        torch.testing.assert_close(found.row_nats, whole.row_nats, rtol=1e-5, atol=1e-5)
        assert found.tokens == whole.tokens == int(lengths.sum()) - 20 * adapter.is_causal(method)
        assert found.stderr == pytest.approx(whole.stderr, rel=1e-5)
    assert whole.nll * whole.tokens == pytest.approx(float(whole.row_nats.sum()), rel=1e-9)


@pytest.mark.parametrize("order", ["left_to_right", "confidence", "margin", "entropy", "random"])
def test_batch_and_padding_change_no_estimate_under_an_order(order: str) -> None:
    model = small_model()
    rows, lengths = padded_rows(0)
    whole = adapter.row_nats(model, rows, lengths=lengths, order=order)
    other, _ = padded_rows(7)
    found = adapter.row_nats(model, other, lengths=lengths, order=order, batch=3)
    torch.testing.assert_close(found.row_nats, whole.row_nats, rtol=1e-5, atol=1e-5)
    if order != "random":
        alone = adapter.row_nats(model, rows[4, : lengths[4]].expand(2, -1), order=order)
        assert float(alone.row_nats[0]) == pytest.approx(float(whole.row_nats[4]), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_given_tokens_are_visible_and_not_counted(method: str) -> None:
    model = small_model(method)
    rows, lengths = padded_rows(0)
    rows = torch.where(rows < 2, 2, rows)
    rows[:, 0] = 0
    rows[torch.arange(20), lengths - 1] = 1
    found = adapter.row_nats(model, rows, lengths=lengths, draws=2, given_tokens=(0, 1))
    everything = adapter.row_nats(model, rows, lengths=lengths, draws=2)
    assert found.tokens == int((lengths - 2).sum())
    assert found.nll * found.tokens < everything.nll * everything.tokens
    small = adapter.row_nats(model, rows, lengths=lengths, draws=2, given_tokens=(0, 1), batch=3)
    torch.testing.assert_close(found.row_nats, small.row_nats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_the_error_from_noise_is_the_spread_over_seeds(method: str) -> None:
    model, rows = small_model(method), random_tokens(12, 12)
    bounds = [adapter.row_nats(model, rows, batch=12, draws=4, seed=seed) for seed in range(30)]
    spread = float(torch.tensor([bound.nll for bound in bounds]).std())
    squares = torch.tensor([bound.noise_stderr or 0.0 for bound in bounds]).square()
    assert 0.65 * spread < float(squares.mean().sqrt()) < 1.5 * spread


def test_a_uniform_predictor_costs_the_logarithm_of_its_tokens() -> None:
    """The bound of a model that knows nothing is log(V - 1): the mask is not among its tokens."""
    model = small_model("mdlm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    rows = random_tokens(60, 20)
    bound = adapter.row_nats(model, rows, draws=64)
    assert abs(bound.nll - float(torch.tensor(VOCAB - 1.0).log())) < 4 * bound.stderr
