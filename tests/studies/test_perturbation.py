"""Changed anchor features: nothing changed is the model itself, bit for bit, in its bound and in its texts."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.evaluate.likelihood import held_out_bound
from adlm.studies.perturbation import (
    LEVELS,
    NONE,
    Change,
    Turn,
    blur,
    changed_texts,
    gaussian,
    perturbed_losses,
    shuffles,
)
from adlm.studies.stages import first_stage, require_two_stages, second_stage
from tests.studies.small import LENGTH, LENGTHS, PADDED, ROWS, VOCAB, small, trained
from tests.text.models import lm


@pytest.mark.parametrize("changes", [{}, {"bridge": "direct"}, {"bridge": "softmax"}, {"positions": "learned"},
                                     {"time_conditioning": True}])  # fmt: skip
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_stages_together_are_the_model(changes: dict[str, Any], is_padded: bool) -> None:
    model = small(**changes)
    for each in (model, model.fold()):
        valid, level = is_valid(LENGTHS, LENGTH) if is_padded else None, torch.linspace(0.1, 2, len(ROWS))
        expected = each(ROWS, level, valid=valid)
        anchor = first_stage(each, ROWS, level, valid)
        torch.testing.assert_close(anchor, expected.anchor, atol=0, rtol=0)
        torch.testing.assert_close(second_stage(each, anchor, level, valid), expected.final, atol=0, rtol=0)


def test_one_stage_and_causal_models_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"plain has one stage.*method=adlm"):
        require_two_stages(small("mdlm"), "plain")
    with pytest.raises(ValueError, match=r"later writes from left to right.*masked two-stage"):
        require_two_stages(small("a2r"), "later")


# What a change costs.


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
def test_the_model_as_it_is_has_the_held_out_bound(rows: TensorRows) -> None:
    model = small()
    bound = held_out_bound(model, rows, draws=3, seed=5)
    (found,) = perturbed_losses(model, rows, [], draws=3, seed=5)
    assert (found.nll, found.nll_se) == pytest.approx((bound.nll, bound.stderr), abs=1e-6)
    assert (found.cost, found.cost_se, found.tokens) == (0, 0, bound.tokens)


def test_no_noise_changes_nothing_and_more_costs_more() -> None:
    model = trained()
    changes = [Change("noise", s) for s in (0, 0.3, 3)]
    zero, some, much = perturbed_losses(model, TensorRows(ROWS), changes, draws=32)[1:]
    assert zero.cost == pytest.approx(0, abs=1e-6)
    assert 0 < some.cost < much.cost
    assert much.cost > 4 * much.cost_se


CHANGES = [NONE, Change("noise", 0.5), Change("permuted"), Change("other_row"), Change("stale", 4)]


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
def test_the_batch_size_changes_nothing_but_rounding(rows: TensorRows) -> None:
    model = small()
    whole, parts = (perturbed_losses(model, rows, CHANGES, draws=2, batch=size) for size in (24, 7))
    for one, other in zip(whole, parts, strict=True):
        assert (one.nll, one.cost, one.cost_se) == pytest.approx((other.nll, other.cost, other.cost_se), abs=1e-5)
    assert len({round(each.nll, 6) for each in whole}) == len(CHANGES)


def test_padding_is_not_read() -> None:
    other = TensorRows(torch.where(is_valid(LENGTHS, LENGTH), ROWS, 7), LENGTHS)
    both = (perturbed_losses(small(), rows, CHANGES, draws=2) for rows in (PADDED, other))
    for one, two in zip(*both, strict=True):
        assert one.nll == pytest.approx(two.nll, abs=1e-6)


def test_order_is_nothing_to_a_model_whose_anchor_features_are_all_alike() -> None:
    """Permuted, or of another row: the same features. Noise is another matter."""
    model = small()
    assert model.anchor is not None
    with torch.no_grad():
        model.anchor.norm.weight.zero_()  # what is left of the features is the modulation's shift
    changes = [Change("permuted"), Change("other_row"), Change("stale", 8), Change("noise", 0.5)]
    *alike, noise = perturbed_losses(model, TensorRows(ROWS), changes, draws=2)[1:]
    assert all(abs(each.cost) < 1e-6 for each in alike)
    assert abs(noise.cost) > 1e-4


def test_what_was_seen_earlier_was_seen_through_more_masks() -> None:
    model = small()
    turn = Turn(model, ROWS, None, ROWS.roll(1, 0), torch.arange(24), (0, 1), 3, 24)
    seen: list[Tensor] = []
    turn._first = lambda tokens, level: seen.append(tokens) or turn.own  # type: ignore[assignment,func-returns-value]
    for steps in (1, 8, LEVELS):
        turn.features(Change("stale", steps))
    hidden = [turn.noised.xt == VOCAB - 1, *(tokens == VOCAB - 1 for tokens in seen)]
    for later, earlier in pairwise(hidden):
        assert bool((earlier | ~later).all()) and int(earlier.sum()) > int(later.sum())
    assert float(hidden[-1].float().mean()) > 0.99  # as far back as there is: all but all of it


def test_noise_has_the_size_it_is_said_to_have() -> None:
    anchor = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(6, 40, 1)
    moved = blur(anchor, 0.3, gaussian(0, range(6), 0, (40, 64))) - anchor
    assert float((moved.norm(dim=-1) / anchor.norm(dim=-1)).mean()) == pytest.approx(0.3, rel=0.02)


def test_a_shuffle_is_one_and_leaves_padding() -> None:
    found = shuffles(0, [3, 4], 0, [5, 8], 8)
    assert sorted(found[0, :5].tolist()) == list(range(5)) and found[0, 5:].tolist() == [5, 6, 7]
    assert sorted(found[1].tolist()) == list(range(8))
    assert torch.equal(found[1], shuffles(0, [4], 0, [8], 8)[0])


@pytest.mark.parametrize(
    ("kind", "amount", "said"),
    [("louder", 1, "not one of none"), ("noise", -1, "negative"), ("stale", 1.5, "whole"), ("stale", 0, "from 1 on")],
)
def test_changes_are_checked(kind: str, amount: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Change(kind, amount)


# Texts written with a change.


@pytest.mark.parametrize("sampler", ["ancestral", "remask_loop", "confidence", "entropy_bounded"])
def test_without_a_change_the_texts_are_the_models_own(sampler: str) -> None:
    writer = lm("adlm")
    steps = {} if sampler == "entropy_bounded" else {"steps": 6}
    job = writer.job(n=5, length=20, batch=3, seed=2, sampler=sampler, **steps)
    expected = [(row.text, row.nfe) for row in writer.rows(job)]
    for change in (NONE, Change("noise", 0), Change("stale", 1)):
        assert [(row.text, row.nfe) for row in changed_texts(writer, job, change)] == expected


@pytest.mark.parametrize("change", [Change("noise", 1), Change("permuted"), Change("stale", 4)])
def test_a_change_changes_texts_and_batches_do_not(change: Change) -> None:
    writer = lm("adlm")
    job = writer.job(n=5, length=20, batch=3, seed=2, sampler="confidence", steps=8)
    texts = [row.text for row in changed_texts(writer, job, change)]
    assert texts != [row.text for row in writer.rows(job)]
    assert texts == [row.text for row in changed_texts(writer, replace(job, batch=1), change)]


def test_a_text_has_no_other_row() -> None:
    writer = lm("adlm")
    with pytest.raises(ValueError, match="no other row"):
        list(changed_texts(writer, writer.job(n=1, length=4, steps=2), Change("other_row")))
