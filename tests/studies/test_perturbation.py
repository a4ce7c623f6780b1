"""Changed anchor features: nothing changed is the model itself, bit for bit, in its bound and in its texts."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.objectives import diffusion_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate.likelihood import held_out_bound
from adlm.generate import compile_for_sampling
from adlm.models.language_model import LanguageModel
from adlm.studies.noising import TOKENS_AT_ONCE, noised_rows, pieces
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
    taken,
)
from adlm.studies.stages import first_stage, require_two_stages, second_stage
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows
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
    assert (found.nll, found.nll_se) == pytest.approx((bound.nll, bound.stderr), abs=2e-6)
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


def test_what_a_change_needs_is_computed_row_by_row_alike() -> None:
    """A second, naive computation, one row at a time and without folding, of every change but those by other noise."""
    model, draws, seed = small(), 2, 3
    found = perturbed_losses(model, PADDED, CHANGES, draws=draws, seed=seed, batch=5)
    nats = torch.zeros(len(CHANGES))
    for row, length in enumerate(LENGTHS.tolist()):
        x0, other = ROWS[row : row + 1, :length], PADDED.tokens[(row + 1) % 24, : LENGTHS[(row + 1) % 24]]
        for draw in range(draws):
            how: dict[str, Any] = {"mask_id": VOCAB - 1, "draw": draw, "draws": draws, "seed": seed, "total": 24}
            noised = noised_rows(x0, torch.tensor([row]), None, **how)
            hidden, own = noised.xt == VOCAB - 1, first_stage(model, noised.xt)
            told = torch.where(hidden, VOCAB - 1, other.repeat(LENGTH)[:length])
            u = CounterRng.of(seed, torch.tensor([row])).uniform(draw, length, Purpose.MASK)
            earlier = torch.where(u < 1 - LogLinear().alpha((noised.t + 4 / LEVELS).clamp(max=1)), VOCAB - 1, x0)
            seen = [
                own,
                blur(own, 0.5, gaussian(seed, [row], [draw], (length, 16))),
                taken(own, shuffles(seed, [row], [draw], [length], length)),
                first_stage(model, told),
                first_stage(model, earlier),
            ]
            for place, anchor in enumerate(seen):
                final = second_stage(model, anchor)
                nats[place] += diffusion_loss(final, model.head, noised, mask_id=VOCAB - 1).row_nll.sum() / draws
    assert [loss.nll for loss in found] == pytest.approx((nats / LENGTHS.sum()).tolist(), abs=1e-5)


@pytest.mark.parametrize("rows", [TensorRows(ROWS), PADDED])
@pytest.mark.parametrize("most", [None, 40])
def test_pieces_are_all_rows_once_as_wide_as_they_must_be(
    rows: TensorRows, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adlm.studies.noising.TOKENS_AT_ONCE", {} if most is None else {"cpu": most})
    assert TOKENS_AT_ONCE["cpu"] > 1000
    found = list(pieces(rows, 5, torch.device("cpu")))
    assert sorted(torch.cat([piece.number for piece in found]).tolist()) == list(range(24))
    for piece in found:
        expected, lengths = rows.fetch(piece.number)
        width = LENGTH if lengths is None else int(lengths.max())
        assert torch.equal(piece.x0, expected[:, :width]) and (most is None or piece.x0.numel() <= most)
        valid = torch.ones_like(piece.x0, dtype=torch.bool) if piece.valid is None else piece.valid
        assert valid.sum(-1).tolist() == piece.lengths.tolist()
        assert len(piece.number) <= 5
    if rows.lengths is not None:
        assert [int(n) for piece in found for n in piece.lengths] == sorted(LENGTHS.tolist())


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
    (piece,) = pieces(TensorRows(ROWS), 24, torch.device("cpu"))
    turn = Turn(model, TensorRows(ROWS), piece, 0, 1, 3)
    seen: list[Tensor] = []
    turn._first = lambda tokens, level: seen.append(tokens) or turn.own  # type: ignore[assignment,func-returns-value]
    for steps in (1, 8, LEVELS):
        turn.features(Change("stale", steps))
    hidden = [turn.corrupt.xt == VOCAB - 1, *(tokens == VOCAB - 1 for tokens in seen)]
    for later, earlier in pairwise(hidden):
        assert bool((earlier | ~later).all()) and int(earlier.sum()) > int(later.sum())
    assert float(hidden[-1].float().mean()) > 0.99  # as far back as there is: all but all of it


def test_noise_has_the_size_it_is_said_to_have() -> None:
    anchor = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(6, 40, 1)
    moved = blur(anchor, 0.3, gaussian(0, range(6), [0] * 6, (40, 64))) - anchor
    assert float((moved.norm(dim=-1) / anchor.norm(dim=-1)).mean()) == pytest.approx(0.3, rel=0.02)


def test_a_shuffle_is_one_and_leaves_padding() -> None:
    found = shuffles(0, [3, 4], [0, 1], [5, 8], 8)
    assert sorted(found[0, :5].tolist()) == list(range(5)) and found[0, 5:].tolist() == [5, 6, 7]
    assert sorted(found[1].tolist()) == list(range(8))
    assert torch.equal(found[1], shuffles(0, [4], [1], [8], 8)[0])


@pytest.mark.parametrize(
    ("kind", "amount", "said"),
    [
        ("louder", 1, "not one of none"),
        ("noise", -1, "negative"),
        ("noise", float("inf"), "infinite"),
        ("stale", 1.5, "whole"),
        ("stale", 0, "from 1 on"),
    ],
)
def test_changes_are_checked(kind: str, amount: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Change(kind, amount)


# Texts written with a change.


@pytest.mark.parametrize("sampler", ["ancestral", "remask_loop", "first_hitting"])
def test_who_listens_hears_before_every_evaluation_which_rows_it_is_for(sampler: str) -> None:
    writer = lm("adlm")
    steps = {} if sampler == "first_hitting" else {"steps": 6}
    job = writer.build_request(prompt=["the cat", "where did you go"], n=2, length=20, seed=2, sampler=sampler, **steps)
    predictor, heard, state = compile_for_sampling(writer.model), list[Tensor](), Tensor()
    own = predictor.final

    def final(tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        assert torch.equal(tokens, state[heard[-1]])
        return own(tokens, noise_level, valid)

    predictor.final, predictor.on_rows = final, heard.append
    for frame in denoise_rows(predictor, job, job.rows, with_start=True):
        state = frame.tokens
    assert torch.equal(torch.bincount(torch.cat(heard), minlength=4), frame.nfe)
    assert min(map(len, heard)) < 4


@pytest.mark.parametrize("sampler", ["ancestral", "remask_loop", "confidence", "entropy_bounded"])
def test_without_a_change_the_texts_are_the_models_own(sampler: str) -> None:
    writer = lm("adlm")
    steps = {} if sampler == "entropy_bounded" else {"steps": 6}
    job = writer.build_request(n=5, length=20, batch=3, seed=2, sampler=sampler, **steps)
    expected = [(row.text, row.nfe) for row in writer.rows(job)]
    for change in (NONE, Change("noise", 0), Change("stale", 1)):
        assert [(row.text, row.nfe) for row in changed_texts(writer, job, change)] == expected


@dataclass
class Alone:
    """A changed network for one row: every call is a turn, and what is kept is the last that was computed."""

    model: LanguageModel
    change: Change
    number: int
    seed: int
    calls: int = 0

    def final(self, tokens: Tensor, noise_level: Tensor | None, valid: Tensor | None) -> Tensor:
        assert len(tokens) == 1
        turn, width, self.calls = [self.calls], tokens.shape[1], self.calls + 1
        if self.change.kind != "stale" or turn[0] % int(self.change.amount) == 0:
            self.anchor = first_stage(self.model, tokens, noise_level, valid)
        anchor = self.anchor
        if self.change.kind == "noise":
            anchor = blur(anchor, self.change.amount, gaussian(self.seed, [self.number], turn, (width, 16)))
        elif self.change.kind == "permuted":
            anchor = taken(anchor, shuffles(self.seed, [self.number], turn, [width], width))
        return second_stage(self.model, anchor, noise_level, valid)


def written_alone(writer: LM, job: GenerationRequest, change: Change) -> list[tuple[str, int]]:
    """The texts of a job, written one at a time."""
    found, predictor = [], compile_for_sampling(writer.model)
    for layout, number in job.rows:
        predictor.final = Alone(predictor.model, change, number, job.seed).final
        *_, frame = denoise_rows(predictor, job, [(layout, number)])
        found.append((GeneratedRow(layout, frame.tokens[0].tolist(), 0).text, int(frame.nfe)))
    return found


JOBS: list[dict[str, Any]] = [
    {"sampler": "ancestral", "steps": 8},
    {"sampler": "remask_loop", "steps": 8},
    {"sampler": "remask_loop", "steps": 6, "prompt": ["the cat", "a", "where did you go"]},
    {"sampler": "confidence", "steps": 6},
    {"sampler": "confidence", "steps": 3, "block": 6},
    {"sampler": "entropy_bounded"},
]


@pytest.mark.parametrize("how", JOBS, ids=lambda how: "-".join(map(str, how.values()))[:30])
@pytest.mark.parametrize("change", [NONE, Change("noise", 1), Change("permuted"), Change("stale", 3)])
def test_texts_are_those_that_are_written_one_at_a_time(change: Change, how: dict[str, Any]) -> None:
    """Rows pause, end early and differ in length; a row's turns and what it keeps are its own all the same."""
    writer = lm("adlm", time_conditioning="block" in how)
    job = writer.build_request(n=2 if "prompt" in how else 4, length=17, seed=2, **how)
    expected = written_alone(writer, job, change)
    for size in (1, 3, 32):
        found = [(row.text, row.nfe) for row in changed_texts(writer, replace(job, batch=size), change)]
        assert found == expected, size
    assert (expected == [(row.text, row.nfe) for row in writer.rows(job)]) == (change == NONE)


def test_a_text_has_no_other_row() -> None:
    writer = lm("adlm")
    with pytest.raises(ValueError, match="no other row"):
        list(changed_texts(writer, writer.build_request(n=1, length=4, steps=2), Change("other_row")))
