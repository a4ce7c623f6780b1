"""Reported figures: the authors' totals, and a loss that is not finite never vanishes."""

import math

import pytest
import torch

from adlm.diffusion.masking import collect_batch
from adlm.diffusion.objectives import token_nll
from adlm.diffusion.schedules import LogLinear, loss_weight, noise_level
from adlm.diffusion.selected import selected_loss
from adlm.evaluate.metrics import Likelihood, noise_variance
from adlm.methods import training_loss
from tests.goldens import MASK, arrays, model


def test_figures_are_the_authors():
    golden, figures = arrays("metrics"), Likelihood()
    for i in (0, 1):
        figures.add(golden[f"nlls{i}"], golden[f"mask{i}"])
    assert figures.nll == pytest.approx(float(golden["out_nll"]), rel=1e-6)
    assert figures.bpt == pytest.approx(float(golden["out_bpd"]), rel=1e-6)
    assert figures.ppl == pytest.approx(float(golden["out_ppl"]), rel=1e-5)


def test_a_nan_is_raised_where_theirs_is_dropped():
    golden, figures = arrays("metrics"), Likelihood()
    assert torch.isnan(golden["nan_nlls"]).any() and math.isfinite(float(golden["out_nll_nan_dropped"]))
    row, position = torch.isnan(golden["nan_nlls"]).nonzero()[0].tolist()
    with pytest.raises(FloatingPointError, match=f"row {row}, position {position} is nan"):
        figures.add(golden["nan_nlls"])
    assert figures.tokens == 0  # nothing of the batch was counted


def test_what_is_masked_out_may_be_anything():
    figures = Likelihood()
    figures.add(torch.tensor([[1.0, math.nan], [3.0, math.inf]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert figures.nll == 2.0 and figures.tokens == 2


def test_long_sums_stay_exact():
    """Ten million tokens of 0.1 nats: a float32 sum would be off in the third digit."""
    figures = Likelihood()
    nll = torch.full((1000, 1000), 0.1)
    for _ in range(10):
        figures.add(nll)
    assert figures.nll == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


def test_tokens_and_rows_add_up_to_the_same():
    """The lineage's figure of token losses and the bound of rows are one sum."""
    golden, figures, rows = arrays("metrics"), Likelihood(), Likelihood()
    for i in (0, 1):
        nll, mask = golden[f"nlls{i}"], golden[f"mask{i}"]
        figures.add(nll, mask)
        rows.add_rows((nll * mask).double().sum(1), mask.sum(1))
    bound = rows.bound()
    assert bound.nll == pytest.approx(figures.nll, rel=1e-6) == pytest.approx(float(golden["out_nll"]), rel=1e-6)
    assert bound.tokens == figures.tokens and bound.ppl == pytest.approx(figures.ppl, rel=1e-6)
    assert bound.stderr == pytest.approx(figures.stderr(), rel=1e-5) and bound.stderr > 0


def test_the_error_is_that_of_a_ratio():
    """By hand: three units of nats and tokens."""
    figures = Likelihood()
    figures.add_rows(torch.tensor([1.0, 2.0, 6.0, 3.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]))
    mean = 12 / 6
    apart = [1 - mean * 1 + 2 - mean * 1, 6 - mean * 2, 3 - mean * 2]
    expected = math.sqrt(3 / 2 * sum(x * x for x in apart)) / 6
    assert figures.stderr(torch.tensor([5, 5, 7, 9])) == pytest.approx(expected, rel=1e-12)
    bound = figures.bound(variance=torch.tensor([1.0, 1.0, 1.0, 6.0]), draws=4)
    assert bound.noise_stderr == pytest.approx(3 / 6) and bound.draws == 4
    with pytest.raises(FloatingPointError, match="2 held-out rows is not finite, row 5 among them"):
        figures.add_rows(torch.tensor([1.0, math.nan, math.inf]), torch.ones(3))
    assert figures.tokens == 6


def test_what_has_no_token_is_no_unit():
    """A row of marks alone says nothing: it must not make the error look like one of more units."""
    figures, more = Likelihood(), Likelihood()
    nats, counts = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 1.0, 2.0])
    figures.add_rows(nats, counts)
    more.add_rows(torch.cat([nats, torch.zeros(40)]), torch.cat([counts, torch.zeros(40)]))
    assert more.stderr() == figures.stderr()
    alone = Likelihood()
    alone.add_rows(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="tokens that count in at least 2 of 2 units"):
        alone.stderr()


@pytest.mark.parametrize(("rows", "draws"), [(24, 2), (24, 4), (200, 2), (200, 8)])
def test_what_all_rows_cost_at_a_time_is_no_noise(rows, draws):
    """Rows cost more, the more of them is hidden; the noise on top is what the error is to be of."""
    rng, found, plain = torch.Generator().manual_seed(0), [], []
    counts = torch.randint(20, 200, (rows,), generator=rng).double()
    level = 1 + 0.1 * torch.randn(rows, 1, generator=rng, dtype=torch.float64)
    for _ in range(50):
        turn = float(torch.rand((), generator=rng))
        times = (torch.arange(rows)[:, None] / rows + torch.arange(draws) / draws + turn).double() % 1
        noise = 0.5 * torch.randn(rows, draws, generator=rng, dtype=torch.float64)
        nats = counts[:, None] * (level * (2 + 5 * times) + noise)
        found.append(noise_variance(nats, counts, times).sum())
        plain.append(noise_variance(nats, counts).sum())
    expected = float((counts.square() * 0.25 / draws).sum())
    assert 0.85 * expected < float(torch.stack(found).mean()) < 1.6 * expected
    assert float(torch.stack(plain).mean()) > 5 * expected


def test_draws_that_have_no_time_are_as_they_are():
    nats = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    assert noise_variance(nats, torch.ones(2)).tolist() == [1.0, 0.0]
    assert noise_variance(nats, torch.ones(2), torch.tensor([[0.1, 0.6], [0.6, 0.1]])).tolist() == [1.0, 0.0]  # too few


def test_no_tokens_no_figure():
    with pytest.raises(ValueError, match="no tokens were counted"):
        _ = Likelihood().nll


@pytest.mark.parametrize("multiple", [1, 32])
def test_a_validation_pass_is_the_authors(multiple):
    """Two batches of their validation loop through the golden model, padding read as they read it."""
    golden, ours, figures = arrays("validation_pass"), model("adlm"), Likelihood()
    schedule, mask = LogLinear(), golden["attention_mask"]
    x0, total, tokens = golden["x0"], 0.0, 0.0
    for i in (0, 1):
        t = golden[f"t{i}"]
        batch = collect_batch(
            x0, golden[f"xt{i}"], t, loss_weight(schedule, t), noise_level(schedule, t),
            mask_id=MASK, valid=mask.bool(), attend_padding=True, multiple=multiple,
        )  # fmt: skip
        with torch.no_grad():
            final = ours(batch.xt, batch.noise_level, valid=batch.valid).final
            each = selected_loss(final, ours.head, x0, batch.hidden, without=MASK)
            loss = training_loss(ours, batch)
        figures.add(token_nll(each, batch.hidden, x0.shape), mask)
        total, tokens = total + float(loss.nll * batch.tokens), tokens + float(batch.tokens)
    assert figures.nll == pytest.approx(float(golden["out_nll"]), rel=1e-5)
    assert figures.bpt == pytest.approx(float(golden["out_bpd"]), rel=1e-5)
    assert figures.ppl == pytest.approx(float(golden["out_ppl"]), rel=1e-4)
    assert total / tokens == pytest.approx(float(golden["out_nll"]), rel=1e-5)
