"""Perturbed anchor features: without a perturbation the model itself, bit for bit, in its bound and in its texts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate import perturbation
from adlm.evaluate.perturbation import (
    LEVELS,
    NONE,
    Perturbation,
    check_two_stages,
    measure_losses,
    sample_rows,
    split_by_length,
)
from adlm.likelihood import draw_position, estimate_nll
from adlm.models.language_model import LanguageModel
from tests.evaluate.anchor_models import LENGTH, LENGTHS, PADDED, ROWS, VOCAB, small, train_small
from tests.text.models import lm

NOISE, PERMUTED, OTHER_ROW = Perturbation("noise", 0.5), Perturbation("permuted"), Perturbation("other_row")
EVERY = [NONE, NOISE, PERMUTED, OTHER_ROW, Perturbation("stale", 4)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: check_two_stages(small("mdlm"), "plain"), r"plain has one stage.*method=adlm"),
        (lambda: check_two_stages(small("a2r"), "later"), r"later is causal.*two-stage masked"),
        (lambda: Perturbation("noise", -1), "not negative"),
        (lambda: Perturbation("noise", float("inf")), "finite"),
        (lambda: Perturbation("stale", 1.5), "whole"),
        (lambda: Perturbation("stale", 0), "at least 1"),
        (lambda: list(sample_rows(lm("adlm"), lm("adlm").build_request(n=1, steps=2), OTHER_ROW)), "no other row"),
        (lambda: measure_losses(small(), TensorRows(ROWS[:1]), []), "standard error needs"),
    ],
)
def test_what_cannot_be_perturbed_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


# Costs.


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
def test_the_unperturbed_model_has_the_held_out_bound(rows: TensorRows) -> None:
    bound = estimate_nll(small(), rows, draws=3, seed=5)
    (loss,) = measure_losses(small(), rows, [], draws=3, seed=5)
    assert (loss["nll"], loss["nll_se"]) == pytest.approx((bound.nll, bound.stderr), abs=2e-6)
    assert (loss["cost"], loss["cost_se"], loss["tokens"]) == (0, 0, bound.tokens)


def test_no_noise_changes_nothing_and_more_costs_more() -> None:
    noise = [Perturbation("noise", amount) for amount in (0, 0.3, 3)]
    zero, some, much = measure_losses(train_small(), TensorRows(ROWS), noise, draws=32)[1:]
    assert zero["cost"] == pytest.approx(0, abs=1e-6)
    assert 0 < some["cost"] < much["cost"] and much["cost"] > 4 * much["cost_se"]


@pytest.mark.parametrize("batch", [5, 24])
def test_losses_agree_with_a_naive_computation_row_by_row(batch: int) -> None:
    """One row at a time, without folding and without padding."""
    model, draws, seed, mask_id = small(), 2, 3, VOCAB - 1
    losses = measure_losses(model, PADDED, EVERY, draws=draws, seed=seed, batch=batch)
    nats = torch.zeros(len(EVERY))
    for row, length in enumerate(LENGTHS.tolist()):
        x0, other = ROWS[row : row + 1, :length], PADDED.tokens[(row + 1) % 24, : LENGTHS[(row + 1) % 24]]
        rng = CounterRng.from_seed(seed, torch.tensor([row]))
        for draw in range(draws):
            place = draw_position(torch.tensor([row]), 24, draw, draws, seed)
            noisy = corrupt(x0, ForwardProcess(mask_id), rng, draw, index=place, total=24)
            own = model.anchor_features(noisy.xt)
            mixed = torch.where(noisy.xt == mask_id, mask_id, other.repeat(LENGTH)[:length])
            u = rng.uniform(draw, length, Purpose.MASK)
            earlier = torch.where(u < 1 - LogLinear().alpha((noisy.t + 4 / LEVELS).clamp(max=1)), mask_id, x0)
            moved = [each.apply(own, seed, [row], [draw], [length]) for each in (NONE, NOISE, PERMUTED)]
            for number, anchor in enumerate([*moved, model.anchor_features(mixed), model.anchor_features(earlier)]):
                loss = diffusion_loss(model.denoise_features(anchor), model.head, noisy, mask_id=mask_id)
                nats[number] += loss.row_nll.sum() / draws
    assert [loss["nll"] for loss in losses] == pytest.approx((nats / LENGTHS.sum()).tolist(), abs=1e-5)
    assert len({round(each["nll"], 6) for each in losses}) == len(EVERY)


@pytest.mark.parametrize("max_tokens", [40, 2048])
def test_batches_hold_all_rows_once_by_length(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturbation, "MAX_CPU_TOKENS", max_tokens)
    batches = split_by_length(PADDED, 5, torch.device("cpu"))
    order = torch.cat(batches)
    assert sorted(order.tolist()) == list(range(24)) and LENGTHS[order].tolist() == sorted(LENGTHS.tolist())
    assert all(len(number) <= 5 and len(number) * LENGTHS[number].max() <= max_tokens for number in batches)


def test_noise_has_the_requested_norm() -> None:
    features = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(6, 40, 1)
    moved = Perturbation("noise", 0.3).apply(features, 0, range(6), [0] * 6, [40] * 6) - features
    assert float((moved.norm(dim=-1) / features.norm(dim=-1)).mean()) == pytest.approx(0.3, rel=0.02)


def test_a_permutation_leaves_padding_and_follows_from_seed_row_and_turn() -> None:
    places = torch.arange(8.0)[None, :, None].expand(2, 8, 1)
    moved = PERMUTED.apply(places, 0, [3, 4], [1, 1], [5, 8])[..., 0]
    assert sorted(moved[0, :5].tolist()) == list(range(5)) and moved[0, 5:].tolist() == [5, 6, 7]
    assert sorted(moved[1].tolist()) == list(range(8))
    assert torch.equal(moved[1:], PERMUTED.apply(places[:1], 0, [4], [1], [8])[..., 0])


# Texts.


def texts(rows: Any) -> list[tuple[str, int]]:
    return [(row.text, row.nfe) for row in rows]


REQUESTS: list[dict[str, Any]] = [
    {"sampler": "ancestral", "steps": 8},
    {"sampler": "remask_loop", "steps": 6, "prompt": ["the cat", "a", "where did you go"]},
    {"sampler": "confidence", "steps": 3, "block": 6},
    {"sampler": "entropy_bounded"},
]


@pytest.mark.parametrize("options", REQUESTS, ids=lambda options: options["sampler"])
def test_texts_do_not_depend_on_the_other_rows(options: dict[str, Any]) -> None:
    """Rows pause, end early and differ in length; a row's turns and stale features are its own."""
    model = lm("adlm", time_conditioning="block" in options)
    request = model.build_request(n=2 if "prompt" in options else 4, length=17, seed=2, **options)
    last = replace(request, layouts=request.layouts[-1:], config=replace(request.config, n=1))
    own, alone = texts(model.run_request(request).rows), replace(request, config=replace(request.config, batch=1))
    for each in (NONE, Perturbation("noise", 0), Perturbation("stale", 1), NOISE, PERMUTED, Perturbation("stale", 3)):
        expected = texts(sample_rows(model, alone, each))
        assert texts(sample_rows(model, request, each)) == expected
        assert texts(sample_rows(model, last, each)) == [expected[-request.config.n]]
        assert (expected == own) == (each not in (NOISE, PERMUTED, Perturbation("stale", 3)))


def test_stale_features_are_computed_at_every_third_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm("adlm")
    request = model.build_request(n=2, length=17, steps=8, sampler="ancestral")
    evaluated, anchor_features = list[Tensor](), LanguageModel.anchor_features

    def spy(self: LanguageModel, tokens: Tensor, *more: Any, **options: Any) -> Tensor:
        evaluated.extend(tokens)
        return anchor_features(self, tokens, *more, **options)

    monkeypatch.setattr(LanguageModel, "anchor_features", spy)
    assert sum(-(-row.nfe // 3) for row in sample_rows(model, request, Perturbation("stale", 3))) == len(evaluated)
