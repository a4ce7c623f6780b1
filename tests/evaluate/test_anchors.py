"""Anchors: known heads have known guesses, known orders known ranks, and several models are compared."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.batches import RowDataset, TensorRows
from adlm.diffusion.anchors import AnchorRule, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.evaluate import stats
from adlm.evaluate.anchor_study import GuessTally, build_tables, correlate_studies, find_guess, summarize_reveals
from adlm.evaluate.perturbation import NONE, Perturbation, measure_losses, sample_rows
from adlm.evaluate.results import Estimate, render_markdown
from adlm.evaluate.sample_metrics import TextScorer
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM
from tests.evaluate.anchor_models import (
    CHANGES,
    LENGTHS,
    PADDED,
    ROWS,
    RULE,
    RUNS,
    VOCAB,
    build_studies,
    measure,
    small,
    study,
)
from tests.text.models import lm, rigged

ROWS_24 = TensorRows(ROWS)
NOTHING = torch.zeros(VOCAB, dtype=torch.bool)

# Guesses.


def measure_guesses(rows: RowDataset, ignored: Tensor = NOTHING, **options: Any) -> list[dict[str, Any]]:
    tally = GuessTally(RULE, len(rows), ignored)
    measure_losses(small(), rows, [], on_batch=tally.add, **options)
    return tally.summarize()


def test_guesses_agree_with_log_probs() -> None:
    noisy, guesses = corrupt(ROWS, ForwardProcess(VOCAB - 1), CounterRng.from_seed(0, 24), 0), measure_guesses(ROWS_24)
    with torch.no_grad():
        tables = dict(zip(("anchor", "final"), small().log_probs(noisy.xt), strict=True))
    is_masked, is_anchor, heads = noisy.xt == VOCAB - 1, RULE(ROWS, None), [guess["head"] for guess in guesses]
    assert (heads.count("anchor"), heads.count("final")) == (2 * 3 * 6, 3 * 6)  # states, kinds, ranges of mask rates
    for guess in guesses:
        low, high = guess["mask_rate"]
        where = (is_masked == (guess["state"] == "hidden")) & (low <= noisy.t)[:, None] & (noisy.t < high)[:, None]
        if guess["kind"] != "every":
            where &= is_anchor == (guess["kind"] == "anchors")
        table = tables[guess["head"]][where]
        best, hits = table.exp().amax(-1), (table.argmax(-1) == ROWS[where]).float()
        nll, each = -table.gather(-1, ROWS[where][:, None]), torch.stack([torch.ones_like(best), best, hits], 1)
        bins = torch.zeros(10, 3).index_add_(0, (best * 10).ceil().long() - 1, each).numpy()
        assert [count for count, _, _ in guess["reliability"]] == bins[:, 0].tolist()
        expected = (len(best), nll.mean().item(), hits.mean().item(), float(stats.calibration_error(bins)))
        values = [guess[name] for name in ("tokens", "nll", "accuracy", "calibration_error")]
        assert values == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_batches_and_padding_change_no_guess_and_tokens_can_be_ignored() -> None:
    guesses, others = (measure_guesses(PADDED, draws=4, batch=batch) for batch in (24, 5))
    for mine, theirs in zip(guesses, others, strict=True):
        both = [[each[name] for name in ("tokens", "accuracy", "nll")] for each in (mine, theirs)]
        assert both[0] == pytest.approx(both[1], abs=1e-5, nan_ok=True)
    ignored = measure_guesses(ROWS_24, torch.arange(VOCAB) < 10)
    for each, count in ((guesses, 4 * int(LENGTHS.sum())), (ignored, int((ROWS >= 10).sum()))):
        counted = [find_guess({"guesses": each}, "anchor", state, "every") for state in ("hidden", "visible")]
        assert sum(guess["tokens"] for guess in counted) == count


# Reveals.


def measure_reveals(model: LM, request: GenerationRequest, rule: AnchorRule) -> dict[str, Any]:
    return summarize_reveals("any", list(sample_rows(model, request)), rule)


@pytest.mark.parametrize("sampler", ["ancestral", "first_hitting"])
def test_a_random_order_reveals_anchors_like_other_tokens(sampler: str) -> None:
    """A model that reads nothing draws the same at any time; others may not."""
    blind = lm("adlm", seed=3)
    with torch.no_grad():
        blind.model.head.weight.zero_()
        blind.model.head.bias.copy_(torch.linspace(0, 4, blind.model.config.vocab_size))
    steps = {"steps": 32} if sampler == "ancestral" else {}
    request = blind.build_request(n=60, length=40, sampler=sampler, batch=30, **steps)
    reveals = measure_reveals(blind, request, rare_in_sequence(1))
    assert 0.1 < reveals["anchor_share"] < 0.9
    assert abs(reveals["anchors"] - 0.5) < 4 * reveals["anchors_se"] < 0.2
    assert abs(reveals["gap"]) < 4 * reveals["gap_se"]
    share = reveals["anchor_share"]
    assert share * reveals["anchors"] + (1 - share) * reveals["others"] == pytest.approx(0.5)


def test_the_most_confident_tokens_come_first() -> None:
    """A network whose confidence grows to the right reveals from the right."""
    model = rigged("adlm", {}, seed=1)
    ramp = torch.zeros(1, 64, 16)
    ramp[..., 0] = torch.arange(64) / 4
    model.predictor.predict = lambda tokens, level, valid: ramp[:, : tokens.shape[1]].expand(len(tokens), -1, -1)  # type: ignore[method-assign]
    model.predictor.head[0].zero_()[65, 0] = 1.0
    request = model.build_request(n=4, length=20, sampler="confidence", steps=20)
    # BOS and ten others come before the anchors.
    reveals = measure_reveals(model, request, lambda tokens, valid: torch.arange(tokens.shape[1])[None] >= 11)
    assert reveals["steps"] == 20 and reveals["anchor_share"] == 0.5
    assert (reveals["anchors"], reveals["others"], reveals["gap"]) == pytest.approx((0.25, 0.75, -0.5))


def test_tokens_after_the_end_of_a_text_are_not_counted() -> None:
    model = rigged("adlm", {lm("adlm").tokenizer.eos_id: 3.0})
    request = model.build_request(n=6, length=20, sampler="ancestral", steps=8, top_p=1.0)
    ends = []
    for text in sample_rows(model, request):
        ids, eos_id = text.ids, model.tokenizer.eos_id
        ends.append(ids.index(eos_id, 1) if eos_id in ids[1:] else len(ids))  # the first token begins a text
        assert text.is_generated.tolist() == [1 <= place < ends[-1] for place in range(len(ids))]
    assert min(ends) < len(ids)
    reveals = measure_reveals(model, request, lambda tokens, valid: torch.arange(tokens.shape[1])[None] == 1)
    assert reveals["anchor_share"] == pytest.approx(sum(end > 1 for end in ends) / sum(end - 1 for end in ends))


# One model.


def test_a_study_has_all_parts_and_equals_its_json() -> None:
    stages: list[str] = []
    model, changes = lm("adlm"), [*CHANGES, Perturbation("stale", 1), Perturbation("stale", 3)]
    whole = measure(changes, "remask_loop", lambda stage, *_: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["small adlm: texts", "small adlm: rows"]
    names = ["none", "noise 0.5", "permuted", "other_row", "stale 1", "stale 3"]
    assert [loss["change"] for loss in whole["losses"]] == names
    assert [sample["change"] for sample in whole["samples"]] == [each for each in names if each != "other_row"]
    assert [each["sampler"] for each in whole["reveals"]] == ["remask_loop", "confidence", "ancestral"]
    texts = sample_rows(model, model.build_request(n=4, length=16, steps=4, sampler="remask_loop"))
    own = TextScorer(model.tokenizer)([row.text for row in texts]).as_row()
    for sample in (whole["samples"][0], whole["samples"][3]):  # stale by one step is the model itself
        assert sample | own == sample
    text = json.dumps(whole)  # NaN is not equal to itself
    assert json.dumps(json.loads(text)) == text
    assert find_guess(json.loads(text))["accuracy"] == find_guess(whole)["accuracy"]
    bare = measure([NONE], "remask_loop")
    for part in ("losses", "samples", "reveals"):
        assert bare[part] == whole[part][:1]


# Several models.

ONE_RUN = [("a", 2, 5.0, 0.1), ("a", 4, 4.0, 0.2), ("a", 6, 3.0, 0.3), ("a", 8, 2.5, 0.4)]


def test_models_are_correlated_as_far_as_they_can_be() -> None:
    assert "at least 3 models" in correlate_studies([study()] * 2)[1][0]
    correlations, reasons = correlate_studies(build_studies(ONE_RUN))
    assert [(each["y"], each["among"], each["rho"]) for each in correlations] == [("nll", stats.ALL_MODELS, -1)]
    assert any("of one run" in reason for reason in reasons) and any("there are 1 runs" in reason for reason in reasons)
    finals = build_studies([(str(nll), 8, nll, accuracy) for _, _, nll, accuracy in ONE_RUN])
    correlations, reasons = correlate_studies(finals)
    assert [each["among"] for each in correlations] == [stats.ALL_MODELS]
    assert any("at one step" in reason for reason in reasons)
    # Training improves both metrics, and at one step they are opposed.
    found, reasons = correlate_studies(build_studies(RUNS))
    counts = [tuple(each[name] for name in ("among", "points", "groups", "independent")) for each in found]
    assert (
        counts == [(stats.ALL_MODELS, 8, 1, 8), (stats.WITHIN_RUNS, 8, 4, 5), (stats.AT_EQUAL_STEPS, 8, 2, 4)]
        and reasons == []
    )
    assert found[0]["rho"] < -0.5 and [each["rho"] for each in found[1:]] == pytest.approx([-1, 1])
    assert found[2]["p_value"] == pytest.approx(2 / 24)
    found, reasons = correlate_studies(build_studies(RUNS, samples=study()["samples"]))
    assert {each["y"] for each in found} == {"nll"} and any("gen_ppl is the same" in reason for reason in reasons)


def test_tables_list_models_and_correlations() -> None:
    studies = build_studies(RUNS, samples=study()["samples"])
    models, correlations = build_tables(studies, correlate_studies(studies)[0])
    assert [row[:2] for row in models.rows] == [[run, step] for run, step, _, _ in RUNS]
    errors = find_guess(studies[0])["accuracy_se"], studies[0]["losses"][0]["nll_se"]
    assert models.rows[0][2:4] == [Estimate(0.2, errors[0]), Estimate(5.0, errors[1])]
    assert [column.name for column in models.columns][-2:] == ["Gen-PPL", "entropy (nats)"]
    assert [row[1] for row in correlations.rows] == [stats.ALL_MODELS, stats.WITHIN_RUNS, stats.AT_EQUAL_STEPS]
    (*_, named) = build_tables(build_studies([("a<b|c", 2, 5, 0.1), ("d", 2, 5, 0.1)]), [])
    assert r"| a\<b\|c | 2 |" in render_markdown(named)
