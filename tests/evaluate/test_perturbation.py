"""Perturbed anchor features: without a perturbation the model itself, bit for bit, in its bound and in its texts."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate import perturbation
from adlm.evaluate.perturbation import (
    LEVELS,
    NONE,
    NoisyRows,
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

EVERY = [
    NONE, Perturbation("noise", 0.5), Perturbation("permuted"), Perturbation("other_row"), Perturbation("stale", 4)
]  # fmt: skip


def test_one_stage_and_causal_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"plain has one stage.*method=adlm"):
        check_two_stages(small("mdlm"), "plain")
    with pytest.raises(ValueError, match=r"later is causal.*two-stage masked"):
        check_two_stages(small("a2r"), "later")


@pytest.mark.parametrize(
    ("kind", "amount", "message"),
    [
        ("noise", -1, "not negative"),
        ("noise", float("inf"), "finite"),
        ("stale", 1.5, "whole"),
        ("stale", 0, "at least 1"),
    ],
)
def test_perturbations_are_checked(kind: str, amount: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Perturbation(kind, amount)


# Costs.


def values(loss: dict[str, Any], *names: str) -> tuple[float, ...]:
    return tuple(loss[name] for name in names)


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
def test_the_unperturbed_model_has_the_held_out_bound(rows: TensorRows) -> None:
    model = small()
    bound = estimate_nll(model, rows, draws=3, seed=5)
    (loss,) = measure_losses(model, rows, [], draws=3, seed=5)
    assert values(loss, "nll", "nll_se") == pytest.approx((bound.nll, bound.stderr), abs=2e-6)
    assert values(loss, "cost", "cost_se", "tokens") == (0, 0, bound.tokens)


def test_no_noise_changes_nothing_and_more_costs_more() -> None:
    noise = [Perturbation("noise", amount) for amount in (0, 0.3, 3)]
    zero, some, much = measure_losses(train_small(), TensorRows(ROWS), noise, draws=32)[1:]
    assert zero["cost"] == pytest.approx(0, abs=1e-6)
    assert 0 < some["cost"] < much["cost"] and much["cost"] > 4 * much["cost_se"]


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
def test_the_batch_size_changes_nothing_but_rounding(rows: TensorRows) -> None:
    whole, parts = (measure_losses(small(), rows, EVERY, draws=2, batch=size) for size in (24, 7))
    for one, other in zip(whole, parts, strict=True):
        names = ("nll", "cost", "cost_se")
        assert values(one, *names) == pytest.approx(values(other, *names), abs=1e-5)
    assert len({round(each["nll"], 6) for each in whole}) == len(EVERY)


def test_losses_agree_with_a_naive_computation_row_by_row() -> None:
    """One row at a time, without folding and without padding."""
    model, draws, seed, mask_id = small(), 2, 3, VOCAB - 1
    losses = measure_losses(model, PADDED, EVERY, draws=draws, seed=seed, batch=5)
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
            perturbed = [
                own,
                EVERY[1].apply(own, seed, [row], draw, [length]),
                EVERY[2].apply(own, seed, [row], draw, [length]),
                model.anchor_features(mixed),
                model.anchor_features(earlier),
            ]
            for place_of_kind, anchor in enumerate(perturbed):
                loss = diffusion_loss(model.denoise_features(anchor), model.head, noisy, mask_id=mask_id)
                nats[place_of_kind] += loss.row_nll.sum() / draws
    assert [loss["nll"] for loss in losses] == pytest.approx((nats / LENGTHS.sum()).tolist(), abs=1e-5)


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
@pytest.mark.parametrize("max_tokens", [None, 40])
def test_batches_hold_all_rows_once_by_length(
    rows: TensorRows, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perturbation, "MAX_CPU_TOKENS", max_tokens or 2048)
    batches = split_by_length(rows, 5, torch.device("cpu"))
    assert sorted(torch.cat(batches).tolist()) == list(range(24)) and max(map(len, batches)) <= 5
    for number in batches:
        noisy, (expected, lengths) = NoisyRows(small(), rows, number, 0, 1, 0), rows.fetch(number)
        x0, width = noisy.on_host.x0, LENGTH if lengths is None else int(lengths.max())
        assert torch.equal(x0, expected[:, :width]) and (max_tokens is None or x0.numel() <= max_tokens)
        valid = torch.ones_like(x0, dtype=torch.bool) if noisy.on_host.valid is None else noisy.on_host.valid
        assert valid.sum(-1).tolist() == noisy.lengths.tolist()
    if rows.lengths is not None:
        assert LENGTHS[torch.cat(batches)].tolist() == sorted(LENGTHS.tolist())


def test_padding_is_not_read() -> None:
    other = TensorRows(torch.where(is_valid(LENGTHS, LENGTH), ROWS, 7), LENGTHS)
    both = (measure_losses(small(), rows, EVERY, draws=2) for rows in (PADDED, other))
    for one, two in zip(*both, strict=True):
        assert one["nll"] == pytest.approx(two["nll"], abs=1e-6)


def test_order_does_not_matter_to_a_model_with_constant_anchor_features() -> None:
    """Permuted or of another row, the features are the same; noise changes them."""
    model = small()
    assert model.anchor is not None
    with torch.no_grad():
        model.anchor.norm.weight.zero_()  # only the modulation's shift is left
    kinds = [Perturbation("permuted"), Perturbation("other_row"), Perturbation("stale", 8), Perturbation("noise", 0.5)]
    *same, noise = measure_losses(model, TensorRows(ROWS), kinds, draws=2)[1:]
    assert all(abs(each["cost"]) < 1e-6 for each in same) and abs(noise["cost"]) > 1e-4


def test_stale_features_saw_more_masks() -> None:
    noisy = NoisyRows(small(), TensorRows(ROWS), torch.arange(24), 0, 1, 3)
    seen: list[Tensor] = []
    noisy.run_anchor = lambda tokens, level: seen.append(tokens) or noisy.anchor  # type: ignore[method-assign,func-returns-value]
    for steps in (1, 8, LEVELS):
        noisy.perturb_anchor(Perturbation("stale", steps))
    masked = [noisy.on_host.xt == VOCAB - 1, *(tokens == VOCAB - 1 for tokens in seen)]
    for later, earlier in pairwise(masked):
        assert bool((earlier | ~later).all()) and int(earlier.sum()) > int(later.sum())
    assert float(masked[-1].float().mean()) > 0.99


def test_noise_has_the_requested_norm() -> None:
    features = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(6, 40, 1)
    moved = Perturbation("noise", 0.3).apply(features, 0, range(6), 0, [40] * 6) - features
    assert float((moved.norm(dim=-1) / features.norm(dim=-1)).mean()) == pytest.approx(0.3, rel=0.02)


def test_a_permutation_leaves_padding_and_follows_from_seed_row_and_turn() -> None:
    places = torch.arange(8.0)[None, :, None].expand(2, 8, 1)
    moved = Perturbation("permuted").apply(places, 0, [3, 4], 1, [5, 8])[..., 0]
    assert sorted(moved[0, :5].tolist()) == list(range(5)) and moved[0, 5:].tolist() == [5, 6, 7]
    assert sorted(moved[1].tolist()) == list(range(8))
    assert torch.equal(moved[1:], Perturbation("permuted").apply(places[:1], 0, [4], 1, [8])[..., 0])


# Texts.


def texts(rows: Any) -> list[tuple[str, int]]:
    return [(row.text, row.nfe) for row in rows]


@pytest.mark.parametrize("sampler", ["ancestral", "remask_loop", "confidence", "entropy_bounded"])
def test_without_a_perturbation_the_texts_are_the_models_own(sampler: str) -> None:
    model = lm("adlm")
    steps = {} if sampler == "entropy_bounded" else {"steps": 6}
    request = model.build_request(n=5, length=20, batch=3, seed=2, sampler=sampler, **steps)
    expected = texts(model.generate_rows(request))
    for each in (NONE, Perturbation("noise", 0), Perturbation("stale", 1)):
        assert texts(sample_rows(model, request, each)) == expected


REQUESTS: list[dict[str, Any]] = [
    {"sampler": "ancestral", "steps": 8},
    {"sampler": "remask_loop", "steps": 6, "prompt": ["the cat", "a", "where did you go"]},
    {"sampler": "confidence", "steps": 3, "block": 6},
    {"sampler": "entropy_bounded"},
]


@pytest.mark.parametrize("options", REQUESTS, ids=lambda options: options["sampler"])
@pytest.mark.parametrize("each", [NONE, Perturbation("noise", 1), Perturbation("permuted"), Perturbation("stale", 3)])
def test_texts_do_not_depend_on_the_other_rows(each: Perturbation, options: dict[str, Any]) -> None:
    """Rows pause, end early and differ in length; a row's turns and stale features are its own."""
    model = lm("adlm", time_conditioning="block" in options)
    request = model.build_request(n=2 if "prompt" in options else 4, length=17, seed=2, **options)
    expected = texts(sample_rows(model, replace(request, batch=1), each))
    assert texts(sample_rows(model, request, each)) == expected
    first = replace(request, layouts=request.layouts[-1:], n=1)
    assert texts(sample_rows(model, first, each)) == [expected[-request.n]]
    assert (expected == texts(model.generate_rows(request))) == (each == NONE)


def test_stale_features_are_computed_at_every_third_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm("adlm")
    request = model.build_request(n=2, length=17, steps=8, sampler="ancestral")
    calls, anchor_features = list[Tensor](), LanguageModel.anchor_features
    spy = lambda self, tokens, *more, **options: calls.append(tokens) or anchor_features(self, tokens, *more, **options)  # noqa: E731
    monkeypatch.setattr(LanguageModel, "anchor_features", spy)
    rows = list(sample_rows(model, request, Perturbation("stale", 3)))
    assert len(calls) == sum(-(-row.nfe // 3) for row in rows)


def test_a_text_has_no_other_row() -> None:
    model = lm("adlm")
    with pytest.raises(ValueError, match="no other row"):
        list(sample_rows(model, model.build_request(n=1, length=4, steps=2), Perturbation("other_row")))
