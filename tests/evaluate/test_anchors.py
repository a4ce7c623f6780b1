"""Anchors: known heads have known guesses, known orders known ranks, and several models are compared."""

import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adlm.data.batches import RowDataset, TensorRows
from adlm.diffusion.anchors import AnchorRule, every_token, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.evaluate.anchors import (
    GuessTally,
    build_tables,
    correlate_studies,
    find_guess,
    measure_rows,
    measure_texts,
    summarize_reveals,
)
from adlm.evaluate.perturbation import NONE, Perturbation, measure_losses, sample_rows
from adlm.evaluate.results import Estimate
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.stats import ALL_MODELS, AT_EQUAL_STEPS, WITHIN_RUNS
from adlm.models.language_model import LanguageModel
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM
from tests.evaluate.anchor_models import (
    CHANGES,
    LENGTHS,
    PADDED,
    ROWS,
    RULE,
    RUNS,
    SAMPLING,
    VOCAB,
    build_studies,
    held_out,
    small,
    study,
)
from tests.text.models import lm, rigged

Guesses = list[dict[str, Any]]
NOTHING = torch.zeros(VOCAB, dtype=torch.bool)

# Guesses.


def measure_guesses(
    model: LanguageModel, rows: RowDataset, rule: AnchorRule, *, ignored: Tensor = NOTHING, **options: Any
) -> Guesses:
    tally = GuessTally(rule, len(rows), ignored)
    measure_losses(model, rows, [], on_batch=tally.add, **options)
    return tally.summarize()


def find(
    guesses: Guesses, head: str, state: str, kind: str = "every", rate: Sequence[float] = (0, 1)
) -> dict[str, Any]:
    key = {"head": head, "state": state, "kind": kind, "mask_rate": list(rate)}
    (guess,) = (guess for guess in guesses if guess | key == guess)
    return guess


def test_a_perfect_anchor_network_is_always_right_and_a_blank_denoiser_uniform() -> None:
    model, truth = small(dim=VOCAB, heads=1, cond_dim=None), ROWS[:8]
    assert model.anchor_head is not None
    with torch.no_grad():
        model.anchor_head.weight.copy_(torch.eye(VOCAB))
        for parameter in (model.anchor_head.bias, model.head.weight, model.head.bias):
            parameter.zero_()
    tally = GuessTally(RULE, 8, NOTHING)
    anchor = nn.functional.one_hot(truth, VOCAB).float() * 60
    rows: Any = SimpleNamespace(model=model, mask_id=VOCAB - 1, number=torch.arange(8), anchor=anchor, final=0 * anchor)
    for draw in range(8):
        rows.on_host = corrupt(truth, ForwardProcess(VOCAB - 1), CounterRng.from_seed(0, 8), draw)
        tally.add(rows)
    guesses = tally.summarize()
    for state in ("hidden", "visible"):
        for kind in ("anchors", "others", "every"):
            guess = find(guesses, "anchor", state, kind)
            assert guess["tokens"] > 0 and guess["accuracy"] == 1 and guess["accuracy_se"] == 0
            assert (guess["nll"], guess["calibration_error"]) == pytest.approx((0, 0), abs=1e-5)
            assert guess["reliability"][-1][0] == guess["tokens"]
    blank = find(guesses, "final", "hidden")
    assert blank["nll"] == pytest.approx(math.log(VOCAB - 1), abs=1e-5)  # the mask is impossible
    assert blank["reliability"][0][1] == pytest.approx(1 / (VOCAB - 1), abs=1e-6)


def test_kinds_and_mask_rates_are_parts_of_the_whole() -> None:
    guesses = measure_guesses(small(), PADDED, RULE, draws=4)
    for head, state in (("anchor", "hidden"), ("anchor", "visible"), ("final", "hidden")):
        whole = find(guesses, head, state)
        kinds = [find(guesses, head, state, kind) for kind in ("anchors", "others")]
        rates = [find(guesses, head, state, "every", (i / 5, (i + 1) / 5)) for i in range(5)]
        for parts in (kinds, rates):
            assert sum(part["tokens"] for part in parts) == whole["tokens"]
            hits = sum(part["accuracy"] * part["tokens"] for part in parts if part["tokens"])
            assert hits / whole["tokens"] == pytest.approx(whole["accuracy"])
        assert sum(count for count, _, _ in whole["reliability"]) == whole["tokens"]
        assert head == "final" or rates[0]["tokens"] < rates[4]["tokens"] or state == "visible"
    counted = sum(find(guesses, "anchor", state)["tokens"] for state in ("hidden", "visible"))
    assert counted == 4 * int(LENGTHS.sum())
    assert {guess["state"] for guess in guesses if guess["head"] == "final"} == {"hidden"}


def test_batches_change_no_guess_and_tokens_can_be_ignored() -> None:
    one, other = (measure_guesses(small(), PADDED, RULE, draws=2, batch=size) for size in (24, 5))
    for mine, theirs in zip(one, other, strict=True):
        assert (mine["tokens"], mine["accuracy"]) == (theirs["tokens"], theirs["accuracy"])
        assert mine["nll"] == pytest.approx(theirs["nll"], abs=1e-5, nan_ok=True)
    guesses = measure_guesses(small(), TensorRows(ROWS), every_token(), ignored=torch.arange(VOCAB) < 10)
    counted = sum(find(guesses, "anchor", state)["tokens"] for state in ("hidden", "visible"))
    assert counted == int((ROWS >= 10).sum())


def test_guesses_agree_with_log_probs() -> None:
    model = small()
    noisy = corrupt(ROWS, ForwardProcess(VOCAB - 1), CounterRng.from_seed(0, 24), 0)
    anchor, final = model.log_probs(noisy.xt)
    assert anchor is not None
    masked = noisy.xt == VOCAB - 1
    guesses = measure_guesses(model, TensorRows(ROWS), RULE)
    for head, table in (("anchor", anchor), ("final", final)):
        nll = -table.gather(-1, ROWS[..., None])[..., 0][masked].mean()
        hits = (table.argmax(-1) == ROWS)[masked].float().mean()
        guess = find(guesses, head, "hidden")
        assert (guess["nll"], guess["accuracy"]) == pytest.approx((nll.item(), hits.item()), abs=1e-5)


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
    model, on_progress = lm("adlm"), lambda stage, *_: stages.append(stage)
    changes, scorer = [*CHANGES, Perturbation("stale", 1), Perturbation("stale", 3)], TextScorer(model.tokenizer)
    sampling = SAMPLING | {"sampler": "remask_loop"}
    whole = measure_rows(model, held_out(model), RULE, changes, on_progress=on_progress, draws=2)
    whole |= measure_texts(model, RULE, changes, sampling, scorer, on_progress)
    assert list(dict.fromkeys(stages)) == ["small adlm: rows", "small adlm: texts"]
    names = ["none", "noise 0.5", "permuted", "other_row", "stale 1", "stale 3"]
    assert [loss["change"] for loss in whole["losses"]] == names
    assert [sample["change"] for sample in whole["samples"]] == [each for each in names if each != "other_row"]
    assert [each["sampler"] for each in whole["reveals"]] == ["remask_loop", "confidence", "ancestral"]
    own = scorer([row.text for row in sample_rows(model, model.build_request(**sampling))]).as_row()
    for sample in (whole["samples"][0], whole["samples"][3]):  # stale by one step is the model itself
        assert sample | own == sample
    text = json.dumps(whole)  # NaN is not equal to itself
    assert json.dumps(json.loads(text)) == text
    assert find_guess(json.loads(text))["accuracy"] == find_guess(whole)["accuracy"]
    bare = measure_rows(model, held_out(model), RULE, [NONE], draws=2)
    bare |= measure_texts(model, RULE, [NONE], sampling, scorer)
    for part in ("losses", "samples", "reveals"):
        assert bare[part] == whole[part][:1]


# Several models.

ONE_RUN = [("a", 2, 5.0, 0.1), ("a", 4, 4.0, 0.2), ("a", 6, 3.0, 0.3), ("a", 8, 2.5, 0.4)]


def test_models_are_correlated_as_far_as_they_can_be() -> None:
    _, reasons = correlate_studies([study()] * 2)
    assert "at least 3 models" in reasons[0]
    correlations, reasons = correlate_studies(build_studies(ONE_RUN))
    assert [(each["y"], each["among"], each["rho"]) for each in correlations] == [("nll", ALL_MODELS, -1)]
    assert any("of one run" in reason for reason in reasons) and any("there are 1 runs" in reason for reason in reasons)
    finals = build_studies([(str(nll), 8, nll, accuracy) for _, _, nll, accuracy in ONE_RUN])
    correlations, reasons = correlate_studies(finals)
    assert [each["among"] for each in correlations] == [ALL_MODELS]
    assert any("at one step" in reason for reason in reasons)
    # Training improves both metrics, and at one step they are opposed.
    (together, within, equal), reasons = correlate_studies(build_studies(RUNS))
    counts = [tuple(each[name] for name in ("among", "points", "groups", "independent"))
              for each in (together, within, equal)]  # fmt: skip
    assert counts == [(ALL_MODELS, 8, 1, 8), (WITHIN_RUNS, 8, 4, 5), (AT_EQUAL_STEPS, 8, 2, 4)] and reasons == []
    assert together["rho"] < -0.5 and within["rho"] == pytest.approx(-1) and equal["rho"] == pytest.approx(1)
    assert equal["p_value"] == pytest.approx(2 / 24)


def test_tables_list_models_and_correlations() -> None:
    studies = build_studies(RUNS)
    models, correlations = build_tables(studies, correlate_studies(studies)[0])
    assert [row[:2] for row in models.rows] == [[run, step] for run, step, _, _ in RUNS]
    errors = find_guess(studies[0])["accuracy_se"], studies[0]["losses"][0]["nll_se"]
    assert models.rows[0][2:] == [Estimate(0.2, errors[0]), Estimate(5.0, errors[1])]
    assert [row[1] for row in correlations.rows] == [ALL_MODELS, WITHIN_RUNS, AT_EQUAL_STEPS]
    scored = build_studies(RUNS, samples=study()["samples"])
    assert [column.name for column in build_tables(scored, [])[0].columns][-2:] == ["Gen-PPL", "entropy (nats)"]
    found, reasons = correlate_studies(scored)
    assert {each["y"] for each in found} == {"nll"} and any("gen_ppl is the same" in reason for reason in reasons)
