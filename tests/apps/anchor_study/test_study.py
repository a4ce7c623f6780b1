"""Anchors: perturbed features, guesses of known heads, orders of known ranks, comparisons of several models."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adlm
import adlm.evaluate
from adlm.apps.anchor_study import study as anchor_study
from adlm.apps.anchor_study.plots import draw_correlation
from adlm.apps.anchor_study.study import (
    LEVELS,
    NONE,
    Perturbation,
    check_two_stages,
    correlate_studies,
    find_guess,
    measure_losses,
    sample_rows,
)
from adlm.data.batches import RowDataset, TensorRows, is_valid
from adlm.diffusion.anchors import AnchorRule, every_token, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import diffusion_loss, training_loss
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear
from adlm.evaluate.cache import ProgressCallback, ignore_progress
from adlm.evaluate.data import load_eval_data
from adlm.evaluate.results import Estimate, render_markdown
from adlm.evaluate.sample_metrics import TextScorer
from adlm.likelihood import draw_position, estimate_nll
from adlm.models.language_model import LanguageModel
from adlm.text.generation import TextRow
from adlm.text.lm import LM
from tests.cli.eval_answers import evaluate, held_out
from tests.cli.terminal import invoke, trained
from tests.evaluate.scorers import causal_folder, needs, pixels, with_matplotlib
from tests.text.models import lm, rigged
from tests.training.runs import run, shelf
from tests.world import random_model

VOCAB, LENGTH = 30, 12
ROWS = torch.randint(VOCAB - 1, (24, LENGTH), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(24) % 9 + 4
PADDED = TensorRows(torch.where(is_valid(LENGTHS, LENGTH), ROWS, 0), LENGTHS)
RULE = rare_in_sequence(1)


def small(method: str = "adlm", **changes: Any) -> LanguageModel:
    size: dict[str, Any] = {
        "vocab_size": VOCAB,
        "mask_id": VOCAB - 1,
        "dim": 16,
        "length": LENGTH,
        "scale": 0.6,
    }
    return random_model(method, **(size | changes))


def train_small() -> LanguageModel:
    """A model that has learned its few rows, so that its anchor features matter."""
    model = small(scale=0.3).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    process = ForwardProcess(VOCAB - 1, anchor_rule=every_token())
    for step in range(60):
        optimizer.zero_grad()
        batch = corrupt(ROWS, process, CounterRng.from_seed(1, 24), step)
        training_loss(model, batch, anchor_weight=0.1).total.backward()
        optimizer.step()
    return model.eval()


NOISE, PERMUTED = Perturbation("noise", 0.5), Perturbation("permuted")
CHANGES = [NONE, NOISE, PERMUTED]


def measure(
    changes: Sequence[Perturbation], sampler: str, on_progress: ProgressCallback = ignore_progress
) -> dict[str, Any]:
    model, rng = lm("adlm"), torch.Generator().manual_seed(2)
    rows = TensorRows(torch.randint(1, 200, (6, model.model.config.length), generator=rng))
    sampling = {"n": 4, "sampler": sampler, "length": 16, "steps": 4, "batch": 3, "seed": 0}
    scorer = TextScorer(model.tokenizer)
    return anchor_study.measure_model(model, rows, RULE, changes, 2, sampling, scorer, on_progress)


@cache
def study() -> dict[str, Any]:
    """Measurements of a model, with a made-up Gen-PPL."""
    whole = measure([*CHANGES, Perturbation("stale", 2)], "ancestral") | {
        "model": "small",
        "step": 0,
    }
    scored = [sample | {"gen_ppl": 9.0, "gen_ppl_se": 1.0} for sample in whole["samples"]]
    return whole | {"samples": scored}


def build_studies(
    points: Sequence[tuple[str, int, float, float]], **changes: Any
) -> list[dict[str, Any]]:
    """Checkpoints of runs: (run, step, nll, accuracy)."""
    one = study() | {"samples": []} | changes
    return [
        one
        | {"model": f"runs/{run}/checkpoints/step-{step:08d}", "step": step}
        | {"losses": [one["losses"][0] | {"nll": nll}]}
        | {"guesses": [guess | {"accuracy": accuracy} for guess in one["guesses"]]}
        for run, step, nll, accuracy in points
    ]


RUNS = [
    (run, step, 6 - step / 2 + i / 10, step / 10 + i / 100)
    for i, run in enumerate("abcd")
    for step in (2, 4)
]
EVERY = [*CHANGES, Perturbation("stale", 4)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: check_two_stages(small("mdlm"), "plain"), r"plain has one stage.*method=adlm"),
        (lambda: check_two_stages(small("a2r"), "later"), r"later is causal.*two-stage masked"),
        (lambda: Perturbation("noise", -1), "not negative"),
        (lambda: Perturbation("noise", float("inf")), "finite"),
        (lambda: Perturbation("stale", 1.5), "whole"),
        (lambda: Perturbation("stale", 0), "at least 1"),
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


def test_losses_agree_with_a_naive_computation_row_by_row() -> None:
    """One row at a time, without folding and without padding."""
    model, draws, seed, mask_id = small(), 2, 3, VOCAB - 1
    losses = measure_losses(model, PADDED, EVERY, draws=draws, seed=seed, batch=5)
    nats = torch.zeros(len(EVERY))
    for row, length in enumerate(LENGTHS.tolist()):
        x0 = ROWS[row : row + 1, :length]
        rng = CounterRng.from_seed(seed, torch.tensor([row]))
        for draw in range(draws):
            place = draw_position(torch.tensor([row]), 24, draw, draws, seed)
            noisy = corrupt(x0, ForwardProcess(mask_id), rng, draw, index=place, total=24)
            own = model.anchor_features(noisy.xt)
            u = rng.uniform(draw, length, Purpose.MASK)
            earlier = torch.where(
                u < 1 - LogLinear().alpha((noisy.t + 4 / LEVELS).clamp(max=1)), mask_id, x0
            )
            moved = [
                each.apply(own, seed, [row], [draw], [length]) for each in (NONE, NOISE, PERMUTED)
            ]
            for number, anchor in enumerate([*moved, model.anchor_features(earlier)]):
                loss = diffusion_loss(
                    model.denoise_features(anchor), model.head, noisy, mask_id=mask_id
                )
                nats[number] += loss.row_nll.sum() / draws
    assert [loss["nll"] for loss in losses] == pytest.approx(
        (nats / LENGTHS.sum()).tolist(), abs=1e-5
    )
    assert len({round(each["nll"], 6) for each in losses}) == len(EVERY)


def test_noise_has_the_requested_norm() -> None:
    features = torch.randn(6, 40, 64, generator=torch.Generator().manual_seed(0)) * torch.rand(
        6, 40, 1
    )
    moved = Perturbation("noise", 0.3).apply(features, 0, range(6), [0] * 6, [40] * 6) - features
    assert float((moved.norm(dim=-1) / features.norm(dim=-1)).mean()) == pytest.approx(
        0.3, rel=0.02
    )


def test_a_permutation_leaves_padding_and_follows_from_seed_row_and_turn() -> None:
    places = torch.arange(8.0)[None, :, None].expand(2, 8, 1)
    moved = PERMUTED.apply(places, 0, [3, 4], [1, 1], [5, 8])[..., 0]
    assert sorted(moved[0, :5].tolist()) == list(range(5)) and moved[0, 5:].tolist() == [5, 6, 7]
    assert sorted(moved[1].tolist()) == list(range(8))
    assert torch.equal(moved[1:], PERMUTED.apply(places[:1], 0, [4], [1], [8])[..., 0])


# Texts.


def texts(rows: Any) -> list[tuple[str, int]]:
    return [(row.text, row.nfe) for row in (getattr(each, "row", each) for each in rows)]


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
    settings = {"n": 2 if "prompt" in options else 4, "length": 17, "seed": 2, **options}
    rows = model.layout_rows(**settings)
    alone = model.layout_rows(batch=1, **settings)
    first = [row for row in rows if row.number == 0][-1]
    own = texts(model.generate(**settings).rows)
    for each in (Perturbation("stale", 1), NOISE, PERMUTED, Perturbation("stale", 3)):
        expected = texts(sample_rows(model, alone, each))
        assert texts(sample_rows(model, rows, each)) == expected
        assert texts(sample_rows(model, [first], each)) == [expected[first.index]]
        assert (expected == own) == (each not in (NOISE, PERMUTED, Perturbation("stale", 3)))


def test_stale_features_are_computed_at_every_third_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lm("adlm")
    rows = model.layout_rows(n=2, length=17, steps=8, sampler="ancestral")
    evaluated, anchor_features = list[Tensor](), LanguageModel.anchor_features

    def spy(self: LanguageModel, tokens: Tensor, *more: Any, **options: Any) -> Tensor:
        evaluated.extend(tokens)
        return anchor_features(self, tokens, *more, **options)

    monkeypatch.setattr(LanguageModel, "anchor_features", spy)
    assert sum(
        -(-text.row.nfe // 3) for text in sample_rows(model, rows, Perturbation("stale", 3))
    ) == len(evaluated)


ROWS_24 = TensorRows(ROWS)
NOTHING = torch.zeros(VOCAB, dtype=torch.bool)

# Guesses.


def measure_guesses(
    rows: RowDataset, ignored: Tensor = NOTHING, **options: Any
) -> list[dict[str, Any]]:
    tally = anchor_study.GuessTally(RULE, len(rows), ignored)
    measure_losses(small(), rows, [], on_batch=tally.add, **options)
    return tally.summarize()


def test_guesses_agree_with_log_probs() -> None:
    noisy, guesses = (
        corrupt(ROWS, ForwardProcess(VOCAB - 1), CounterRng.from_seed(0, 24), 0),
        measure_guesses(ROWS_24),
    )
    with torch.no_grad():
        tables = dict(zip(("anchor", "final"), small().log_probs(noisy.xt), strict=True))
    is_masked, is_anchor, heads = (
        noisy.xt == VOCAB - 1,
        RULE(ROWS, None),
        [guess["head"] for guess in guesses],
    )
    assert (heads.count("anchor"), heads.count("final")) == (
        2 * 6,
        2 * 6,
    )  # kinds, ranges of mask rates
    for guess in guesses:
        low, high = guess["mask_rate"]
        where = is_masked & (low <= noisy.t)[:, None] & (noisy.t < high)[:, None]
        where &= is_anchor == (guess["kind"] == "anchors")
        table = tables[guess["head"]][where]
        best, hits = table.exp().amax(-1), (table.argmax(-1) == ROWS[where]).float()
        nll, each = (
            -table.gather(-1, ROWS[where][:, None]),
            torch.stack([torch.ones_like(best), best, hits], 1),
        )
        bins = torch.zeros(10, 3).index_add_(0, (best * 10).ceil().long() - 1, each).numpy()
        assert [count for count, _, _ in guess["reliability"]] == bins[:, 0].tolist()
        error = abs(bins[:, 1] - bins[:, 2]).sum() / len(best) if len(best) else float("nan")
        expected = (len(best), nll.mean().item(), hits.mean().item(), error)
        values = [guess[name] for name in ("tokens", "nll", "accuracy", "calibration_error")]
        assert values == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_batches_and_padding_change_no_guess_and_tokens_can_be_ignored() -> None:
    guesses, others = (measure_guesses(PADDED, draws=4, batch=batch) for batch in (24, 5))
    for mine, theirs in zip(guesses, others, strict=True):
        both = [[each[name] for name in ("tokens", "accuracy", "nll")] for each in (mine, theirs)]
        assert both[0] == pytest.approx(both[1], abs=1e-5, nan_ok=True)
    noisy = corrupt(ROWS, ForwardProcess(VOCAB - 1), CounterRng.from_seed(0, 24), 0)
    ignored = {"guesses": measure_guesses(ROWS_24, torch.arange(VOCAB) < 10)}
    counted = sum(find_guess(ignored, "anchor", kind)["tokens"] for kind in ("anchors", "others"))
    assert counted == int(((noisy.xt == VOCAB - 1) & (ROWS >= 10)).sum())


# Reveals.


def measure_reveals(model: LM, rows: Sequence[TextRow], rule: AnchorRule) -> dict[str, Any]:
    return anchor_study.summarize_reveals("any", list(sample_rows(model, rows)), rule)


@pytest.mark.parametrize("sampler", ["ancestral", "first_hitting"])
def test_a_random_order_reveals_anchors_like_other_tokens(sampler: str) -> None:
    """A model that reads nothing draws the same at any time; others may not."""
    blind = lm("adlm", seed=3)
    with torch.no_grad():
        blind.model.head.weight.zero_()
        blind.model.head.bias.copy_(torch.linspace(0, 4, blind.model.config.vocab_size))
    steps = {"steps": 32} if sampler == "ancestral" else {}
    rows = blind.layout_rows(n=60, length=40, sampler=sampler, batch=30, **steps)
    reveals = measure_reveals(blind, rows, rare_in_sequence(1))
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
    evaluator = model.evaluator
    evaluator.features = lambda tokens, *others: ramp[:, : tokens.shape[1]].expand(  # type: ignore[method-assign]
        len(tokens), -1, -1
    )
    weight = torch.zeros(model.model.config.vocab_size, 16)
    weight[65, 0] = 1.0
    evaluator.logits_at = lambda features: features @ weight.T  # type: ignore[method-assign]
    rows = model.layout_rows(n=4, length=20, sampler="confidence", steps=20)
    # BOS and ten others come before the anchors.
    reveals = measure_reveals(
        model, rows, lambda tokens, valid: torch.arange(tokens.shape[1])[None] >= 11
    )
    assert reveals["steps"] == 20 and reveals["anchor_share"] == 0.5
    assert (reveals["anchors"], reveals["others"], reveals["gap"]) == pytest.approx(
        (0.25, 0.75, -0.5)
    )


def test_tokens_after_the_end_of_a_text_are_not_counted() -> None:
    model = rigged("adlm", {lm("adlm").tokenizer.eos_id: 3.0})
    rows = model.layout_rows(n=6, length=20, sampler="ancestral", steps=8, top_p=1.0)
    ends = []
    for text in sample_rows(model, rows):
        ids, eos_id = text.row.ids, model.tokenizer.eos_id
        ends.append(
            ids.index(eos_id, 1) if eos_id in ids[1:] else len(ids)
        )  # the first token begins a text
        assert text.is_generated.tolist() == [1 <= place < ends[-1] for place in range(len(ids))]
    assert min(ends) < len(ids)
    reveals = measure_reveals(
        model, rows, lambda tokens, valid: torch.arange(tokens.shape[1])[None] == 1
    )
    assert reveals["anchor_share"] == pytest.approx(
        sum(end > 1 for end in ends) / sum(end - 1 for end in ends)
    )


# One model.


def test_a_study_has_all_parts_and_equals_its_json() -> None:
    stages: list[str] = []
    model, changes = lm("adlm"), [*CHANGES, Perturbation("stale", 1), Perturbation("stale", 3)]
    whole = measure(changes, "remask_loop", lambda stage, *_: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["small adlm: rows", "small adlm: texts"]
    names = ["none", "noise 0.5", "permuted", "stale 1", "stale 3"]
    for part in ("losses", "samples"):
        assert [each["perturbation"] for each in whole[part]] == names
    assert [each["sampler"] for each in whole["reveals"]] == [
        "remask_loop",
        "confidence",
        "ancestral",
    ]
    texts = sample_rows(model, model.layout_rows(n=4, length=16, steps=4, sampler="remask_loop"))
    own = TextScorer(model.tokenizer)([text.row.text for text in texts]).as_row()
    for sample in (
        whole["samples"][0],
        whole["samples"][3],
    ):  # stale by one step is the model itself
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
    assert "at least 3 are needed" in correlate_studies([study()] * 2)[1][0]
    correlations, reasons = correlate_studies(build_studies(ONE_RUN))
    assert [(each["y"], each["among"], each["rho"]) for each in correlations] == [
        ("nll", "all models", -1)
    ]
    assert "no correlation at equal steps: 1 independent" in reasons[0]
    finals = build_studies([(str(nll), 8, nll, accuracy) for _, _, nll, accuracy in ONE_RUN])
    correlations, reasons = correlate_studies(finals)
    assert [each["among"] for each in correlations] == ["all models"] and "within runs" in reasons[
        0
    ]
    found, _ = correlate_studies(build_studies(RUNS, samples=study()["samples"]))
    assert {each["y"] for each in found if each["rho"] == each["rho"]} == {
        "nll"
    }  # the Gen-PPL of all is the same
    fewer = correlate_studies(build_studies(RUNS[1:]))[0]  # a step that one run lacks is left out
    assert [(each["points"], each["independent"]) for each in fewer] == [(7, 7), (6, 4), (4, 4)]


def test_tables_list_models_and_correlations() -> None:
    studies = build_studies(RUNS, samples=study()["samples"])
    models, correlations = anchor_study.build_tables(studies, correlate_studies(studies)[0])
    assert [row[:2] for row in models.rows] == [[run, step] for run, step, _, _ in RUNS]
    errors = find_guess(studies[0])["accuracy_se"], studies[0]["losses"][0]["nll_se"]
    assert models.rows[0][2:4] == [Estimate(0.2, errors[0]), Estimate(5.0, errors[1])]
    assert [column.name for column in models.columns][-2:] == ["Gen-PPL", "entropy (nats)"]
    assert [row[1] for row in correlations.rows] == 3 * [
        "all models",
        "within runs",
        "at equal steps",
    ]
    (*_, named) = anchor_study.build_tables(
        build_studies([("a<b|c", 2, 5, 0.1), ("d", 2, 5, 0.1)]), []
    )
    assert r"| a\<b\|c | 2 |" in render_markdown(named)


# The command.

ARGS = ("--limit", 8, "--draws", 2, "--perturb", "0.5", "--stale", "2", "--device", "cpu")
BARE = ("--limit", 4, "--draws", 1, "--perturb", "", "--stale", "", "--device", "cpu")
run_json = partial(evaluate, "anchors")


@cache
def train_run(name: str, *settings: str) -> str:
    """A run that keeps its checkpoints of steps 2, 4 and 6."""
    folder = shelf() / f"run-{name}"
    run(folder, "steps=6", "checkpoint.every=2", "checkpoint.keep=3", *settings)
    return str(folder)


def train_seed(seed: int) -> str:
    return train_run(f"seed-{seed}", f"seed={seed}", f"optimizer.lr={(3e-3, 1e-3, 1e-2)[seed - 1]}")


def test_a_model_is_measured_once_and_printed(tmp_path: Path) -> None:
    words = (
        trained(),
        "--data",
        held_out(),
        *ARGS,
        "--samples",
        2,
        "--length",
        12,
        "--steps",
        3,
        "--out",
        tmp_path,
    )
    found, lm = run_json(*words), adlm.load(trained(), device="cpu")
    (model,) = found["models"]
    for part in ("losses", "samples"):
        assert [each["perturbation"] for each in model[part]] == [
            "none",
            "noise 0.5",
            "permuted",
            "stale 2",
        ]
    assert {each["sampler"] for each in model["reveals"]} == {"ancestral", "confidence"}
    assert (
        found["correlations"] == [] and "at least 3 are needed" in found["skipped_correlations"][0]
    )
    settings = found["settings"]["models"][0]
    assert found["settings"]["anchors"] == {"rule": "rare_in_sequence", "max_count": 5}
    assert len(settings["data"]["rows_hash"]) == 64 and found["provenance"]["versions"]["torch"]
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "anchors.json", "cache.jsonl"}
    before = (tmp_path / "cache.jsonl").read_bytes()
    result = invoke("eval", "anchors", *words)
    assert (tmp_path / "cache.jsonl").read_bytes() == before  # nothing was measured again
    for row, name in [(loss, "cost") for loss in model["losses"][1:]] + [
        (row, "entropy") for row in model["samples"]
    ]:
        assert f"{row[name]:.3f} ± {row[f'{name}_se']:.3f}" in result.stdout
    assert "calibration error" in result.stdout and "mean rank of reveals" in result.stdout
    same = anchor_study.anchors(lm, held_out(), limit=8, draws=2, perturb=[0.5], stale=[2])
    assert same["models"][0]["losses"] == model["losses"] and "anchor network" in str(same)
    rows = load_eval_data(held_out(), lm.tokenizer, lm.model.config.length, limit=8).rows
    assert model["losses"][0]["nll"] == pytest.approx(
        estimate_nll(lm.model, rows, draws=2).nll, rel=1e-5
    )


@with_matplotlib
def test_checkpoints_of_several_runs_are_compared(tmp_path: Path) -> None:
    """Nothing is perturbed, and every checkpoint is measured once."""
    needs("transformers")
    runs = [
        str(path)
        for seed in (1, 2, 3)
        for path in sorted(Path(train_seed(seed)).glob("checkpoints/step-*"))
    ]
    words = ("--data", held_out(), *BARE, "--out", tmp_path)
    words = (*words, "--samples", 4, "--length", 24, "--steps", 3, "--judge", causal_folder())
    found = run_json(*runs, *words)
    assert [(Path(each["model"]).parent.parent.name, each["step"]) for each in found["models"]] == [
        (f"run-seed-{seed}", step) for seed in (1, 2, 3) for step in (2, 4, 6)
    ]
    for model in found["models"]:
        assert [loss["perturbation"] for loss in model["losses"]] == ["none"]
        assert [sample["perturbation"] for sample in model["samples"]] == ["none"] and len(
            model["reveals"]
        ) == 1
    looks = [
        (each["y"], each["among"], each["points"], each["independent"])
        for each in found["correlations"]
    ]
    among = (("all models", 9, 9), ("within runs", 9, 7), ("at equal steps", 9, 3))
    assert looks == [(y, *look) for y in ("nll", "gen_ppl", "entropy") for look in among]
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "anchors.json",
        "cache.jsonl",
        "correlation.png",
    }
    assert pixels(tmp_path / "correlation.png").std() > 0.03
    again = run_json(*runs, *words, "--batch", 3)  # the batch size is no other setting
    assert again["models"] == found["models"] and again["correlations"] == found["correlations"]
    result = invoke("eval", "anchors", *runs[:3], *words)
    assert (
        "all models" in result.stdout
        and "head" not in result.stdout
        and "at equal steps" in result.stderr
    )
    assert len((tmp_path / "cache.jsonl").read_text("utf-8").splitlines()) == 9


@with_matplotlib
def test_correlations_show_runs_and_coefficients(tmp_path: Path) -> None:
    few = build_studies(RUNS)
    drawn = draw_correlation(few, correlate_studies(few)[0], tmp_path / "few.svg").read_text(
        "utf-8"
    )
    for word in ("within runs: ρ = -1.00", "at equal steps: ρ = 1.00", ">a<", ">d<"):
        assert word in drawn
