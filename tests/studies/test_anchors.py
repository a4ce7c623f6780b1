"""Anchors: known guessers have known figures, known orders known ranks."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adlm.data.batches import TensorRows
from adlm.diffusion.anchors import every_token, rare_in_sequence
from adlm.evaluate.tallies import calibration_error, ratio, ratio_gap
from adlm.models.language_model import Features, LanguageModel
from adlm.studies.anchors import Extent, Study, study_anchors
from adlm.studies.guesses import Guess, measure_guesses
from adlm.studies.perturbation import Change, changed_texts
from adlm.studies.portraits import draw_anchors
from adlm.studies.reveals import measure_reveals, ranks, watched
from adlm.studies.writing import Assessor
from adlm.text.templates import classes_of
from tests.studies.drawn import pixels, with_matplotlib
from tests.studies.small import LENGTHS, PADDED, ROWS, RULE, VOCAB, held_out, small, studied
from tests.text.models import lm, rigged

# Guesses.


class Oracle(LanguageModel):
    """An anchor network that knows every row, and a denoiser that knows nothing."""

    def forward(self, tokens: Tensor, noise_level: Tensor | None = None, **_: Any) -> Features:
        assert len(tokens) == len(TRUTH)
        known = nn.functional.one_hot(TRUTH, VOCAB).float() * 60
        return Features(known, torch.zeros_like(known))


TRUTH = ROWS[:8]


def of(found: list[Guess], head: str, state: str, kind: str = "every", rate: tuple[float, float] = (0, 1)) -> Guess:
    (one,) = (g for g in found if (g.head, g.state, g.kind, g.mask_rate) == (head, state, kind, rate))
    return one


def test_a_perfect_anchor_network_is_always_right_and_a_blank_denoiser_never_surely() -> None:
    model = Oracle(small(dim=VOCAB, heads=1, cond_dim=None).config)
    assert model.anchor_head is not None
    with torch.no_grad():
        model.anchor_head.weight.copy_(torch.eye(VOCAB))
        model.anchor_head.bias.zero_()
        model.head.weight.zero_()
        model.head.bias.zero_()
    found = measure_guesses(model, TensorRows(TRUTH), RULE, draws=8, batch=8)
    for state in ("hidden", "visible"):
        for kind in ("anchors", "others", "every"):
            mine = of(found, "anchor", state, kind)
            assert mine.tokens > 0 and mine.accuracy == 1 and mine.accuracy_se == 0
            assert mine.nll == pytest.approx(0, abs=1e-5) and mine.calibration_error == pytest.approx(0, abs=1e-5)
            assert mine.reliability[-1][0] == mine.tokens
    blank = of(found, "final", "hidden")
    assert blank.nll == pytest.approx(math.log(VOCAB - 1), abs=1e-5)  # the mask is ruled out
    assert blank.reliability[0][1] == pytest.approx(1 / (VOCAB - 1), abs=1e-6)


def test_kinds_and_mask_rates_are_parts_of_the_whole() -> None:
    found = measure_guesses(small(), PADDED, RULE, draws=4)
    for head, state in (("anchor", "hidden"), ("anchor", "visible"), ("final", "hidden")):
        whole = of(found, head, state)
        parts = [of(found, head, state, kind) for kind in ("anchors", "others")]
        by_rate = [g for g in found if (g.head, g.state, g.kind) == (head, state, "every") and g.mask_rate != (0, 1)]
        for each in (parts, by_rate):
            assert sum(g.tokens for g in each) == whole.tokens
            mean = sum(g.accuracy * g.tokens for g in each if g.tokens) / whole.tokens
            assert mean == pytest.approx(whole.accuracy)
        assert sum(n for n, _, _ in whole.reliability) == whole.tokens
    hidden, visible = of(found, "anchor", "hidden"), of(found, "anchor", "visible")
    assert hidden.tokens + visible.tokens == 4 * int(LENGTHS.sum())
    assert {g.state for g in found if g.head == "final"} == {"hidden"}
    low, high = of(found, "anchor", "hidden", rate=(0, 0.2)), of(found, "anchor", "hidden", rate=(0.8, 1))
    assert low.tokens < high.tokens


def test_batches_change_no_guess_and_tokens_can_be_left_out() -> None:
    one, other = (measure_guesses(small(), PADDED, RULE, draws=2, batch=size) for size in (24, 5))
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.tokens, mine.accuracy) == (theirs.tokens, theirs.accuracy)
        assert mine.nll == pytest.approx(theirs.nll, abs=1e-5, nan_ok=True)
    left_out = torch.zeros(VOCAB, dtype=torch.bool)
    left_out[:10] = True
    found = measure_guesses(small(), TensorRows(ROWS), every_token(), left_out=left_out)
    counted = of(found, "anchor", "hidden").tokens + of(found, "anchor", "visible").tokens
    assert counted == int((ROWS >= 10).sum())


def test_the_unweighted_nll_is_that_of_the_models_own_table() -> None:
    """A second, naive computation of one figure from `log_probs`."""
    from adlm.diffusion.masking import corrupt
    from adlm.diffusion.rng import CounterRng
    from adlm.diffusion.schedules import LogLinear

    model = small()
    noised = corrupt(ROWS, LogLinear(), CounterRng.of(0, 24), 0, mask_id=VOCAB - 1)
    anchor, final = model.log_probs(noised.xt)
    assert anchor is not None
    hidden = noised.xt == VOCAB - 1
    found = measure_guesses(model, TensorRows(ROWS), RULE)
    for head, table in (("anchor", anchor), ("final", final)):
        nll = -table.gather(-1, ROWS[..., None])[..., 0][hidden].mean()
        hits = (table.argmax(-1) == ROWS)[hidden].float().mean()
        mine = of(found, head, "hidden")
        assert (mine.nll, mine.accuracy) == pytest.approx((nll.item(), hits.item()), abs=1e-5)


def test_calibration_of_a_known_distribution() -> None:
    rng = np.random.default_rng(0)
    said = rng.uniform(0, 1, 200_000)
    for truth, expected in ((said, 0.0), (said**2, 1 / 6)):  # E|p − p²| = 1/2 − 1/3
        bins = np.zeros((10, 3))
        hits = rng.uniform(0, 1, len(said)) < truth
        np.add.at(bins, np.minimum((said * 10).astype(int), 9), np.stack([np.ones_like(said), said, hits], 1))
        assert float(calibration_error(bins)) == pytest.approx(expected, abs=0.005)


def test_ratios_and_their_errors() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 9, 400).astype(float)
    sums = counts * 0.3 + rng.normal(0, 1, 400)
    mean, error = ratio(sums, counts)
    assert abs(mean - 0.3) < 4 * error and error == pytest.approx(20 / counts.sum(), rel=0.15)
    assert ratio_gap(sums, counts, sums, counts) == (0, 0)
    assert math.isnan(ratio(sums, 0 * counts)[0])


# Reveals.


def test_ranks_have_a_mean_of_a_half_whatever_the_ties() -> None:
    assert ranks(np.array([3, 1, 2])).tolist() == pytest.approx([5 / 6, 1 / 6, 3 / 6])
    assert ranks(np.array([7, 7, 7, 7])).tolist() == [0.5] * 4
    steps = np.random.default_rng(0).integers(0, 5, 101)
    assert ranks(steps).mean() == pytest.approx(0.5)


@pytest.mark.parametrize("sampler", ["ancestral", "first_hitting"])
def test_a_sampler_that_reveals_at_random_reveals_anchors_like_others(sampler: str) -> None:
    """Of a model that reads nothing, what is drawn does not depend on when; of others it may."""
    blind = lm("adlm", seed=3)
    with torch.no_grad():
        blind.model.head.weight.zero_()
        blind.model.head.bias.copy_(torch.linspace(0, 4, blind.model.config.vocab_size))
    steps = {"steps": 32} if sampler == "ancestral" else {}
    found = measure_reveals(
        blind, blind.build_request(n=60, length=40, sampler=sampler, batch=30, **steps), rare_in_sequence(1)
    )
    assert 0.1 < found.anchor_share < 0.9
    assert abs(found.anchors - 0.5) < 4 * found.anchors_se < 0.2
    assert abs(found.gap) < 4 * found.gap_se
    weighted = found.anchor_share * found.anchors + (1 - found.anchor_share) * found.others
    assert weighted == pytest.approx(0.5)


def test_the_surest_come_first() -> None:
    """A network that is the surer the further right a token stands reveals from the right."""
    writer = rigged("adlm", {}, seed=1)
    ramp = torch.zeros(1, 64, 16)
    ramp[..., 0] = torch.arange(64) / 4
    writer.predictor.final = lambda tokens, noise_level, valid: ramp[:, : tokens.shape[1]].expand(len(tokens), -1, -1)
    writer.predictor.head[0].zero_()[65, 0] = 1.0
    job = writer.build_request(n=4, length=20, sampler="confidence", steps=20)
    found = measure_reveals(writer, job, lambda tokens, valid: torch.arange(tokens.shape[1])[None] >= 11)  # BOS and ten
    assert found.steps == 20 and found.anchor_share == 0.5
    assert (found.anchors, found.others, found.gap) == pytest.approx((0.25, 0.75, -0.5))


def test_what_stands_behind_the_end_of_a_text_is_no_part_of_it() -> None:
    """A model that ends texts early: only tokens before the end are counted, be they anchors or not."""
    writer = rigged("adlm", {lm("adlm").tokenizer.eos_id: 3.0})
    job = writer.build_request(n=6, length=20, sampler="ancestral", steps=8, top_p=1.0)
    eos_id = writer.tokenizer.eos_id
    ended = []
    for text in watched(writer, job):
        ids = text.row.ids
        end = ids.index(eos_id, 1) if eos_id in ids[1:] else len(ids)  # the first is what begins a text
        assert text.is_written.tolist() == [1 <= place < end for place in range(len(ids))]
        ended.append(end)
    assert min(ended) < len(ids)
    counted = sum(end - 1 for end in ended)
    found = measure_reveals(writer, job, lambda tokens, valid: torch.arange(tokens.shape[1])[None] == 1)
    with_first = sum(end > 1 for end in ended)
    assert found.anchor_share == pytest.approx(with_first / counted)


def test_who_is_watched_writes_the_same() -> None:
    writer = lm("adlm")
    job = writer.build_request(n=5, length=20, batch=3, seed=2, sampler="remask_loop", steps=6)
    assert [text.row for text in watched(writer, job)] == list(writer.rows(job))


def test_reveals_need_two_texts_and_a_sampler() -> None:
    with pytest.raises(ValueError, match="at least 2 texts"):
        measure_reveals(lm("adlm"), lm("adlm").build_request(length=4, steps=2), RULE)
    with pytest.raises(ValueError, match="left to right"):
        measure_reveals(lm("ar"), lm("ar").build_request(length=4, n=2), RULE)


# The whole study.


def test_a_study_has_all_parts_and_can_be_kept() -> None:
    stages: list[str] = []
    writer = lm("adlm")
    extent = Extent((0.5,), (2,), draws=2, samples=4, length=16, steps=4, batch=4, sampler="remask_loop")
    assess = Assessor(writer.tokenizer)
    found = study_anchors(writer, held_out(writer), RULE, extent, assess, lambda what, *_: stages.append(what))
    assert list(dict.fromkeys(stages)) == ["rows", "texts", "orders"]
    assert [loss.change for loss in found.losses] == ["none", "noise 0.5", "permuted", "other_row", "stale 2"]
    assert [sample.change for sample in found.samples] == ["none", "noise 0.5", "permuted", "stale 2"]
    assert [each.sampler for each in found.reveals] == ["remask_loop", "confidence", "ancestral"]
    again = Study.of(json.loads(json.dumps(asdict(found))))  # as text: NaN is not itself
    assert isinstance(again.guesses[0], Guess) and json.dumps(asdict(again)) == json.dumps(asdict(found))
    silent = study_anchors(writer, held_out(writer), RULE, replace(extent, samples=0))
    assert silent.samples == silent.reveals == [] and silent.losses == found.losses
    bare = study_anchors(writer, held_out(writer), RULE, replace(extent, noise=(), stale=()), assess)
    for whole, part in ((found.losses, bare.losses), (found.samples, bare.samples), (found.reveals, bare.reveals)):
        assert part == whole[:1]
    with pytest.raises(ValueError, match="samples must be 0 or at least 2"):
        replace(extent, samples=1)
    with pytest.raises(ValueError, match="samples need an assessor"):
        study_anchors(writer, held_out(writer), RULE, extent)


def test_the_parts_of_a_study_are_what_they_are_alone() -> None:
    """What is shared between them changes no figure."""
    writer = lm("adlm")
    extent = Extent((0.5,), (1, 3), draws=2, samples=4, length=16, steps=6, batch=3, sampler="remask_loop")
    found = study_anchors(writer, held_out(writer), RULE, extent, Assessor(writer.tokenizer))
    left_out = classes_of(writer.tokenizer).special
    alone = measure_guesses(writer.model, held_out(writer), RULE, left_out=left_out, draws=2, batch=4)
    for mine, theirs in zip(found.guesses, alone, strict=True):
        assert (mine.tokens, mine.accuracy) == (theirs.tokens, theirs.accuracy)
        assert (mine.nll, mine.calibration_error) == pytest.approx((theirs.nll, theirs.calibration_error), abs=1e-5,
                                                                   nan_ok=True)  # fmt: skip
    job = writer.build_request(**extent.job("remask_loop"))
    assess = Assessor(writer.tokenizer)
    for sample in found.samples:
        rows = list(changed_texts(writer, job, Change(sample.kind, sample.amount)))
        assert sample.quality == assess([row.text for row in rows])
        assert sample.nfe == np.mean([row.nfe for row in rows])
    for each in found.reveals:
        assert each == measure_reveals(writer, writer.build_request(**extent.job(each.sampler)), RULE)


@with_matplotlib
def test_portraits_show_something(tmp_path: Path) -> None:
    one = studied()
    whole = pixels(draw_anchors(one, tmp_path / "whole.png"))
    bare = pixels(draw_anchors(replace(one, samples=[], reveals=[]), tmp_path / "bare.png"))
    assert whole.std() > 0.05 and bare.std() > 0.05 and whole.shape[1] > bare.shape[1]
    drawn = draw_anchors(one, tmp_path / "whole.svg").read_text("utf-8")
    for word in ("of another row", "stale 2", "Gen-PPL", "expected error", "when tokens are revealed"):
        assert word in drawn
