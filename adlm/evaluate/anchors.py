"""What the anchor network contributes: its guesses, the model's loss without them, the order of reveals.

The paper calls for this analysis and does not contain it. Results are plain dicts, as in their JSON.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adlm.bundled import MODELS
from adlm.checkpoint import list_checkpoints
from adlm.config import load_config
from adlm.data.batches import RowDataset
from adlm.data.shards import write_atomically
from adlm.diffusion.anchors import AnchorRule
from adlm.diffusion.masking import NoisyBatch
from adlm.evaluate import stats
from adlm.evaluate.cache import Cache, hash_settings
from adlm.evaluate.data import EvalDataset, load_eval_data
from adlm.evaluate.perturbation import (
    LEVELS,
    NONE,
    Perturbation,
    TracedRow,
    flatten_estimates,
    measure_losses,
    require_two_stages,
    sample_rows,
)
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import (
    Cell,
    Column,
    Estimate,
    EvalResult,
    ProgressCallback,
    Table,
    ignore_progress,
    render_markdown,
)
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.scorer import ScoringModel, load_scorer
from adlm.methods import ANCHOR_RULES, SAMPLERS, build_anchor_rule, look_up
from adlm.models.language_model import LanguageModel
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, load
from adlm.text.templates import classify_tokens

Row = Mapping[str, Any]
MAX_COUNT = 5  # the paper's tau, where a checkpoint has no settings
RATE_BINS = 5  # of mask rates
ALL_RATES = [0.0, 1.0]
PROBABILITY_BINS = 10
RESAMPLES = 200  # of rows, for the standard error of the calibration error
MAX_POSITIONS = 1024  # whose logits exist at a time
ACCURACY = "anchor accuracy"
HEADS = {"anchor": "anchor network", "final": "denoiser"}
METRICS = {"nll": "nll (nats per token)", "gen_ppl": "Gen-PPL", "entropy": "entropy (nats)"}
NOTE = (
    "± is a standard error over rows or texts. A cost is the difference to the unperturbed model on the same noise. "
    "The rank of a reveal is 0 for the first and 1 for the last token; in a random order both kinds have 0.5."
)
CORRELATION_NOTE = (
    "ρ is Spearman's, r Pearson's (with the logarithm of Gen-PPL), with 95% intervals and p-values of a permutation "
    "test. Over all models, checkpoints count as independent, which those of one run are not. Within runs, each run's "
    "mean is subtracted: training alone correlates metrics there. At equal steps, each step's mean is subtracted, "
    "whole runs are permuted, and intervals count runs."
)


@dataclass(frozen=True)
class AnchorSettings:
    """How much is measured, and how texts are sampled; see `anchors`."""

    perturb: tuple[float, ...] = (0.1, 0.3, 1.0)
    stale: tuple[int, ...] = (1, 2, 4, 8)
    draws: int = 4
    samples: int = 0
    sampler: str = "ancestral"
    steps: int = LEVELS
    length: int | None = None
    temperature: float = 1.0
    top_p: float = 0.9
    seed: int = 0
    batch: int = 32

    def __post_init__(self) -> None:
        if self.samples == 1 or self.samples < 0:
            raise ValueError(f"samples must be 0 or at least 2, for a standard error; got {self.samples}")
        for name in ("draws", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.perturbations()  # refuses wrong amounts before anything runs

    def perturbations(self) -> list[Perturbation]:
        """The perturbations, the model itself first; without `perturb` and `stale` no other."""
        if not self.perturb and not self.stale:
            return [NONE]
        noise = [Perturbation("noise", amount) for amount in self.perturb]
        stale = [Perturbation("stale", steps) for steps in self.stale]
        return [NONE, *noise, Perturbation("permuted"), Perturbation("other_row"), *stale]

    def samplers(self) -> list[str]:
        """The samplers whose order of reveals is measured."""
        others = ["confidence", "ancestral"] if self.perturb or self.stale else []
        return list(dict.fromkeys([self.sampler, *others]))

    def build_request(self, lm: LM, sampler: str) -> GenerationRequest:
        """The request for the texts of one sampler."""
        options: dict[str, Any] = {"sampler": sampler, "length": self.length, "temperature": self.temperature}
        if "steps" in inspect.signature(look_up(SAMPLERS, sampler, "sampler")).parameters:
            options["steps"] = self.steps
        return lm.build_request(n=self.samples, top_p=self.top_p, seed=self.seed, batch=self.batch, **options)


def anchors(
    models: LM | Iterable[LM],
    data: str | Path,
    *,
    rows: Literal["wrapped", "documents"] | None = None,
    limit: int | None = 64,
    draws: int = 4,
    max_count: int | None = None,
    perturb: Sequence[float] = (0.1, 0.3, 1.0),
    stale: Sequence[int] = (1, 2, 4, 8),
    samples: int = 0,
    scorer: str | Path | ScoringModel | None = None,
    window: int | None = None,
    sampler: str = "ancestral",
    steps: int = LEVELS,
    length: int | None = None,
    temperature: float = 1.0,
    top_p: float = 0.9,
    seed: int = 0,
    batch: int = 32,
    out: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure the anchor networks of two-stage masked models on held-out text, and correlate three models or more.

    Models are measured one after the other, so `models` may be an iterator that loads them.

    Args:
        data, rows, limit, draws: held-out text, its rows and the noises per row, as in `perplexity`.
        max_count: anchors occur at most this often in their row; by default the rule of the run's training.
        perturb: amounts of noise on the anchor features, relative to their norm.
        stale: masking levels (in sampling: steps) by which the anchor features are out of date.
        samples: texts for every perturbation; `scorer` computes their Gen-PPL, in windows of `window` tokens.
        out: folder for finished models; running again resumes.
    """
    sampling = (sampler, steps, length, temperature, top_p)
    settings = AnchorSettings(tuple(perturb), tuple(stale), draws, samples, *sampling, seed, batch)
    if scorer is not None and not samples:
        raise ValueError(f"a scorer computes the Gen-PPL of samples, and samples is {samples}: give samples too")
    if window is not None and scorer is None:
        raise ValueError(f"window {window} splits long texts for a scorer, and there is none: give scorer too")
    cache, shared = Cache(out), dict[tuple[str, int, str], tuple[EvalDataset, TextScorer | None]]()
    cache.merge()
    cache.load()
    studies, about = list[dict[str, Any]](), list[dict[str, Any]]()
    for lm in [models] if isinstance(models, LM) else models:
        require_two_stages(lm.model, lm.name)
        key = (lm.tokenizer.sha256, lm.model.config.length, str(lm.device))
        if key not in shared:
            on_progress("loading", 0, 0)
            if isinstance(scorer, str | Path):
                scorer = load_scorer(scorer, device=lm.device)
            dataset = load_eval_data(data, lm.tokenizer, lm.model.config.length, rows=rows, limit=limit)
            shared[key] = dataset, TextScorer(lm.tokenizer, scorer, window) if samples else None
        (dataset, text_scorer), (rule, rule_settings) = shared[key], find_anchor_rule(lm, max_count)
        identity = {"model": lm.name, "method": lm.method, "step": lm.step, "weights_sha256": hash_weights(lm.model)}
        identity |= {"anchors": rule_settings, "data": {"rows_hash": dataset.rows_hash, **dataset.settings}}
        identity |= {"device": str(lm.device), "scorer": text_scorer.settings if text_scorer else None}
        entry = hash_settings(identity | asdict(settings) | {"batch": None})  # the batch size changes speed only
        if entry not in cache:
            cache.put(entry, measure_anchors(lm, dataset.rows, rule, settings, text_scorer, on_progress))
            cache.flush()
        studies.append(cache.get(entry))
        about.append(identity)
    cache.merge()
    if not studies:
        raise ValueError("models is empty: give at least one two-stage masked model")
    correlations, reasons = compare_studies(studies, about)
    return EvalResult(
        "anchors",
        {"models": studies, "correlations": correlations, "no_correlation": reasons},
        {"data": str(data), "window": window, **asdict(settings), "models": about},
        collect_provenance(about[0]["device"]),
        build_tables(studies, correlations),
        reasons if len(studies) > 1 else [],
        collect_figures(studies, correlations),
    )


def measure_anchors(
    lm: LM,
    rows: RowDataset,
    rule: AnchorRule,
    settings: AnchorSettings,
    text_scorer: TextScorer | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure one model: guesses and losses on rows and, with samples, quality and order of reveals of its texts."""
    require_two_stages(lm.model, lm.name)
    if settings.samples and text_scorer is None:
        raise ValueError(f"text_scorer is required for {settings.samples} samples: TextScorer(lm.tokenizer)")
    model = lm.model.to(lm.device)
    special = classify_tokens(lm.tokenizer).special
    ignored = torch.ones(model.config.vocab_size, dtype=torch.bool)  # tokens that begin and end a text
    ignored[: len(special)] = special
    tally = GuessTally(model, rule, len(rows), ignored=ignored)
    losses = measure_losses(
        model,
        rows,
        settings.perturbations(),
        draws=settings.draws,
        seed=settings.seed,
        batch=settings.batch,
        on_batch=lambda noisy: tally.add(noisy.number, noisy.on_host, noisy.anchor, noisy.final),
        on_progress=lambda stage, *done: on_progress(f"{lm.name}: {stage}", *done),
    )
    study = {"model": lm.name, "method": lm.method, "step": lm.step, "guesses": tally.summarize(settings.seed)}
    samples, reveals = list[dict[str, Any]](), list[dict[str, Any]]()
    if text_scorer is not None and settings.samples:
        perturbations = [each for each in settings.perturbations() if each.kind != "other_row"]
        total = len(perturbations) + len(settings.samplers())
        for sampler in settings.samplers():
            request = settings.build_request(lm, sampler)
            texts = list(sample_rows(lm, request))
            reveals.append(summarize_reveals(sampler, texts, rule))
            on_progress(f"{lm.name}: texts", len(samples) + len(reveals), total)
            for each in perturbations if sampler == settings.sampler else ():
                if each == Perturbation("stale", 1):  # features that are used once, as by the model itself
                    samples.append(samples[0] | each.as_dict())
                else:
                    generated = [text.row for text in (texts if each == NONE else sample_rows(lm, request, each))]
                    quality = text_scorer([row.text for row in generated]).as_row()
                    nfe = float(np.mean([row.nfe for row in generated]))
                    samples.append({**each.as_dict(), "nfe": nfe, **quality})
                on_progress(f"{lm.name}: texts", len(samples) + len(reveals), total)
    return study | {"losses": losses, "samples": samples, "reveals": reveals}


# Guesses: how well both heads predict tokens.


class GuessTally:
    """Counts both heads' guesses of masked tokens, and the anchor network's of visible ones, for anchors and others.

    Tokens in `ignored` (V,) are not counted. The denoiser's guesses of visible tokens are not counted: it copies them.
    """

    def __init__(self, model: LanguageModel, rule: AnchorRule, rows: int, *, ignored: Tensor | None = None) -> None:
        assert model.anchor_head is not None and model.config.mask_id is not None
        self.rule, self.ignored, self.mask_id = rule, ignored, model.config.mask_id
        self.heads = (model.anchor_head, None), (model.head, self.mask_id)  # with the token that is impossible
        # (row, bin of mask rate, masked or visible, anchor or other, head, bin of probability) -> sums of 1,
        # highest probability, hits, nll
        self.sums = np.zeros((rows, RATE_BINS, 2, 2, 2, PROBABILITY_BINS, 4))

    @torch.no_grad()
    def add(self, number: Tensor, noisy: NoisyBatch, anchor: Tensor, final: Tensor) -> None:
        """Count a batch on the host, of rows by number (n,), with both stages' features."""
        x0, is_masked = noisy.x0, noisy.xt == self.mask_id
        counted = torch.ones_like(is_masked) if noisy.valid is None else noisy.valid
        if self.ignored is not None:
            counted = counted & ~self.ignored[x0]
        rate = (noisy.t.double() * RATE_BINS).long().clamp(max=RATE_BINS - 1)
        is_anchor = self.rule(x0, noisy.valid)
        keys = (number[:, None], rate[:, None], (~is_masked).long(), (~is_anchor).long())
        inputs = (anchor, counted), (final, counted & is_masked)
        for head, ((features, where), (linear, impossible)) in enumerate(zip(inputs, self.heads, strict=True)):
            index = where.flatten().nonzero()[:, 0]
            probability, hits, nll = guess_tokens(features, linear, x0, index, impossible)
            # Bins are (0, 0.1], (0.1, 0.2], …
            place = np.clip(np.ceil(probability * PROBABILITY_BINS).astype(np.int64) - 1, 0, PROBABILITY_BINS - 1)
            places = [key.expand(x0.shape).flatten()[index].numpy() for key in keys]
            flat = np.ravel_multi_index((*places, np.full_like(place, head), place), self.sums.shape[:-1])
            each = np.stack([np.ones_like(nll), probability, hits, nll], axis=1)
            np.add.at(self.sums.reshape(-1, self.sums.shape[-1]), flat, each)

    def summarize(self, seed: int = 0) -> list[dict[str, Any]]:
        """One entry for each head, state, kind and range of mask rates; rows are resampled by the seed."""
        rows = len(self.sums)
        weights = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), RESAMPLES)
        ranges = [(slice(None), ALL_RATES)]
        ranges += [(slice(i, i + 1), [i / RATE_BINS, (i + 1) / RATE_BINS]) for i in range(RATE_BINS)]
        kinds = {"anchors": slice(0, 1), "others": slice(1, 2), "every": slice(None)}
        return [
            {"head": ("anchor", "final")[head], "state": ("hidden", "visible")[state], "kind": kind, "mask_rate": rate}
            | summarize_guesses(self.sums[:, part, state, chosen, head].sum((1, 2)), weights)
            for head, state in ((0, 0), (0, 1), (1, 0))
            for kind, chosen in kinds.items()
            for part, rate in ranges
        ]


def guess_tokens(
    features: Tensor, head: nn.Linear, x0: Tensor, index: Tensor, impossible: int | None
) -> NDArray[np.float64]:
    """At positions of the flattened batch: highest probability, whether its token is right, nats of the true token."""
    chosen, target = features.flatten(0, 1)[index.to(features.device)], x0.flatten()[index].to(features.device)
    parts = [torch.zeros(3, 0, dtype=torch.float64)]
    for inputs, tokens in zip(chosen.split(MAX_POSITIONS), target.split(MAX_POSITIONS), strict=True):
        logits = head(inputs).float()
        if impossible is not None:
            logits[:, impossible] = -torch.inf
        logs = logits.log_softmax(-1)
        best, token = logs.max(-1)
        nll = -logs.gather(1, tokens[:, None])[:, 0]
        parts.append(torch.stack([best.double().exp(), (token == tokens).double(), nll.double()]).cpu())
    return torch.cat(parts, 1).numpy()


def summarize_guesses(sums: NDArray[np.float64], weights: NDArray[np.int64]) -> dict[str, Any]:
    """Accuracy, nll and expected calibration error from sums (rows, bins, 4), with standard errors over rows."""
    counts, _, hits, nll = np.moveaxis(sums.sum(1), -1, 0)
    pooled = sums.sum(0)
    resampled = stats.calibration_error(np.einsum("bn,nrk->brk", weights, sums[..., :3]))
    resampled = resampled[np.isfinite(resampled)]
    error = float(resampled.std(ddof=1)) if len(resampled) > 1 else math.nan
    estimates = flatten_estimates(
        accuracy=stats.estimate_ratio(hits, counts),
        nll=stats.estimate_ratio(nll, counts),  # nats per token, every token with the same weight
        calibration_error=(float(stats.calibration_error(pooled[:, :3])), error),
    )
    # By bins of the highest probability: tokens, its mean, accuracy.
    bins = [[int(n), p / n if n else math.nan, h / n if n else math.nan] for n, p, h, _ in pooled.tolist()]
    return {"tokens": int(counts.sum()), **estimates, "reliability": bins}


# Reveals: the order in which a sampler reveals anchors and other tokens.


def summarize_reveals(sampler: str, texts: Sequence[TracedRow], rule: AnchorRule) -> dict[str, Any]:
    """Mean normalized ranks of reveals (0 first, 1 last) of the finished texts' anchors and of other tokens."""
    sums, different = np.zeros((len(texts), 4)), []  # rank and count of anchors, of others
    for number, text in enumerate(texts):
        is_anchor = rule(torch.tensor([text.row.ids]), None)[0].numpy()[text.is_generated]
        revealed = text.steps[text.is_generated]
        rank = (stats.rank_values(revealed) - 0.5) / len(revealed)  # equal steps share the middle: the mean is 1/2
        different.append(len(np.unique(revealed)))
        sums[number] = rank[is_anchor].sum(), is_anchor.sum(), rank[~is_anchor].sum(), (~is_anchor).sum()
    own, own_count, rest, rest_count = sums.T
    estimates = flatten_estimates(
        anchors=stats.estimate_ratio(own, own_count),
        others=stats.estimate_ratio(rest, rest_count),
        gap=stats.estimate_ratio_difference(own, own_count, rest, rest_count),  # below 0 where anchors come first
    )
    share = float(own_count.sum() / (own_count.sum() + rest_count.sum()))
    steps = float(np.mean(different))
    return {"sampler": sampler, "texts": len(sums), **estimates, "anchor_share": share, "steps": steps}


# The models and their anchor rules.


def list_run_checkpoints(models: Sequence[str]) -> list[str]:
    """The checkpoints of runs by their folders, oldest first; any other model is itself."""
    names = []
    for model in models:
        folder = Path(model) / "checkpoints"
        is_run = model not in MODELS and folder.is_dir()
        names += [str(path) for path in list_checkpoints(folder)] if is_run else [model]
    if len(names) < stats.MIN_POINTS:
        raise ValueError(
            f"{', '.join(models)}: {len(names)} checkpoints, and a correlation takes at least {stats.MIN_POINTS}; give "
            "more runs, keep more checkpoints (checkpoint.keep), or leave --checkpoints out"
        )
    return names


def load_two_stage_models(names: Sequence[str], *, device: str = "auto") -> Iterator[LM]:
    """Load models one at a time, because all may not fit into memory, after checking that all have two stages."""
    for name in names if len(names) > 1 else ():
        require_two_stages(load(name, device=device).model, name)
    for name in names:
        yield load(name, device=device)


def find_anchor_rule(lm: LM, max_count: int | None = None) -> tuple[AnchorRule, dict[str, Any]]:
    """The anchor rule that a run was trained with, and its settings; with `max_count` rare_in_sequence.

    Only a run's folder has the settings of its training; other models have the paper's rule, with a count of 5.
    """
    folder = Path(lm.name)
    near = [] if lm.name in MODELS or not folder.is_dir() else [folder, *folder.resolve().parents[1:2]]
    config = next((path / "config.yaml" for path in near if (path / "config.yaml").is_file()), None)
    if max_count is not None or config is None:
        options: dict[str, Any] = {"max_count": MAX_COUNT if max_count is None else max_count}
        return build_anchor_rule("rare_in_sequence", **options), {"rule": "rare_in_sequence", **options}
    run = load_config(config)
    name = run.objective.anchor_rule
    accepted = inspect.signature(look_up(ANCHOR_RULES, name, "anchor rule")).parameters
    if {"counts", "document_counts"} & accepted.keys():
        raise ValueError(
            f"{lm.name} was trained with the anchor rule {name}, which needs the counts of its training data: give "
            "max_count, for anchors that are rare in their row"
        )
    values = {each: getattr(run.objective, each) for each in ("max_count", "max_fraction", "fraction", "ids")}
    values |= {"seed": run.seed, "vocab_size": lm.model.config.vocab_size}
    options = {each: value for each, value in values.items() if each in accepted and value is not None}
    return build_anchor_rule(name, **options), {"rule": name, **options}


# Several models: correlations.


def find_guess(study: Row, head: str = "anchor", state: str = "hidden", kind: str = "anchors") -> Row:
    """A head's guesses over all mask rates."""
    wanted: Row = {"head": head, "state": state, "kind": kind, "mask_rate": ALL_RATES}
    return next(guess for guess in study["guesses"] if guess | wanted == guess)


def get_metric(study: Row, name: str) -> Estimate:
    """A metric of the unperturbed model; NaN where it was not measured."""
    if name == ACCURACY:
        return _estimate(find_guess(study), "accuracy")
    source = study["losses"] if name == "nll" else study["samples"]
    return _estimate(source[0], name) if source else Estimate(math.nan)


def _estimate(row: Row, name: str) -> Estimate:
    """A value of a row with its standard error, NaN and unknown as far as they are missing."""
    value, error = row[name], row[f"{name}_se"]
    return Estimate(math.nan if value is None else value, None if error is None or math.isnan(error) else error)


def find_run(study: Row) -> str:
    """The run that a checkpoint belongs to; any other model is a run of its own."""
    path = Path(study["model"])
    return str(path.parent.parent if path.parent.name == "checkpoints" else path)


def name_runs(studies: Sequence[Row]) -> dict[str, str]:
    """Every run by the shortest end of its path that is unique."""
    runs = list(dict.fromkeys(map(find_run, studies)))
    for size in range(1, 1 + max(len(PurePath(run).parts) for run in runs)):
        names = {run: "/".join(PurePath(run).parts[-size:]) for run in runs}
        if len(set(names.values())) == len(runs):
            return names
    return {run: run for run in runs}


def shared_metrics(studies: Sequence[Row]) -> list[str]:
    """The metrics other than anchor accuracy that all models have."""
    return [name for name in METRICS if all(not math.isnan(get_metric(study, name).value) for study in studies)]


def compare_studies(studies: Sequence[Row], about: Sequence[Row]) -> tuple[list[dict[str, Any]], list[str]]:
    """Correlate comparable models, or give the reasons why they are not."""
    if len({each["data"]["rows_hash"] for each in about}) > 1:
        return [], ["no correlation: the models have different rows, because their tokenizers or lengths differ"]
    if len({str(each["anchors"]) for each in about}) > 1:
        return [], ["no correlation: the runs have different anchor rules; give max_count, one rule for all"]
    first: dict[str, str] = {}
    for each in about:
        if (other := first.setdefault(each["weights_sha256"], each["model"])) != each["model"]:
            return [], [f"no correlation: {each['model']} has the same weights as {other}; leave one out"]
    return correlate_studies(studies)


def correlate_studies(studies: Sequence[Row]) -> tuple[list[dict[str, Any]], list[str]]:
    """Correlate anchor accuracy with loss and sample quality over all models, within runs and at equal steps.

    Returns the correlations, and the reasons why others cannot be computed. Pearson's r uses the logarithm of Gen-PPL.
    """
    x = [get_metric(study, ACCURACY).value for study in studies]
    runs, steps = [find_run(study) for study in studies], [study["step"] for study in studies]
    among = (
        [stats.ALL_MODELS] + [stats.WITHIN_RUNS] * (len(set(runs)) > 1) + [stats.AT_EQUAL_STEPS] * (len(set(steps)) > 1)
    )
    correlations, reasons = [], dict[str, None]()
    for name in shared_metrics(studies):
        y = [get_metric(study, name).value for study in studies]
        y = [math.log(value) for value in y] if name == "gen_ppl" else y
        for each in among:
            try:
                found = stats.correlate(x, y, among=each, runs=runs, steps=steps, names=(ACCURACY, name))
                correlations.append(asdict(found))
            except ValueError as error:
                reasons[str(error)] = None
    if stats.WITHIN_RUNS not in among:
        reasons["all models are of one run: training alone may correlate them"] = None
    if stats.AT_EQUAL_STEPS not in among:
        reasons["all models are at one step: the correlation over all models is the one at equal steps"] = None
    return correlations, list(reasons)


# Tables and figures.

# Part of a study -> title, columns of text, columns of numbers.
QUALITY = ("nfe", "gen_ppl", "entropy", "distinct_2", "repetition_4")
STUDY_TABLES = {
    "guesses": ("guesses", ("head", "state", "kind"), ("tokens", "accuracy", "nll", "calibration_error")),
    "losses": ("loss with perturbed anchor features", ("change",), ("nll", "cost")),
    "samples": ("samples with perturbed anchor features", ("change",), QUALITY),
    "reveals": ("mean rank of reveals", ("sampler",), ("anchors", "others", "gap", "anchor_share")),
}
COLUMN_NAMES = {"change": "anchor features", "nfe": "NFE", "gen_ppl": "Gen-PPL", "anchor_share": "share of anchors"}


def build_tables(studies: Sequence[Row], correlations: Sequence[Row]) -> list[Table]:
    """Tables of every model that is alone or was perturbed, then of all models and of correlations."""
    tables = []
    for study in studies:
        if len(studies) == 1 or len(study["losses"]) > 1:
            for part, (title, texts, numbers) in STUDY_TABLES.items():
                names = {key: COLUMN_NAMES.get(key, key.replace("_", " ")) for key in (*texts, *numbers)}
                columns = [Column(names[key], 1 if key in ("nfe", "gen_ppl") else 3, key in texts) for key in names]
                rows = [
                    [*(HEADS.get(row[key], row[key]) for key in texts), *(_get_cell(row, key) for key in numbers)]
                    for row in study[part]
                    if part != "guesses" or (row["mask_rate"] == ALL_RATES and row["kind"] != "every")
                ]
                if rows:
                    tables.append(Table(columns, rows, f"{study['model']}: {title}"))
            tables[-1] = replace(tables[-1], notes=[NOTE])
    if len(studies) > 1:
        metrics, runs = shared_metrics(studies), name_runs(studies)
        columns = [Column("run", is_text=True), Column("step"), Column(ACCURACY)]
        columns += [Column(METRICS[name], digits=1 if name == "gen_ppl" else 3) for name in metrics]
        models = [
            [runs[find_run(study)], study["step"], *(get_metric(study, name) for name in (ACCURACY, *metrics))]
            for study in studies
        ]
        tables.append(Table(columns, models, "Models", ["± is a standard error over rows or texts."]))
    if correlations:
        columns = [Column(name, is_text=True) for name in (f"{ACCURACY} with", "among")]
        columns += [Column(name, digits=2) for name in ("models", "ρ (95%)", "p", "r (95%)", "p of r")]
        lines: list[list[Cell]] = []
        for each in correlations:
            rho = Estimate(each["rho"], interval=(each["low"], each["high"]))
            r = Estimate(each["r"], interval=(each["r_low"], each["r_high"]))
            p, r_p = ("< 0.001" if p < 0.001 else f"{p:.3f}" for p in (each["p_value"], each["r_p_value"]))
            lines.append([each["y"], each["among"], each["points"], rho, p, r, r_p])
        tables.append(Table(columns, lines, "Correlations", [CORRELATION_NOTE]))
    return tables


def _get_cell(row: Row, name: str) -> Cell:
    if f"{name}_se" not in row:
        return row[name]
    estimate = _estimate(row, name)
    return None if math.isnan(estimate.value) else estimate


def collect_figures(studies: Sequence[Row], correlations: Sequence[Row]) -> dict[str, Any]:
    """What `adlm.evaluate.plots` draws: each model that was perturbed, and the correlations."""
    figures: dict[str, Any] = {}
    for number, study in enumerate(studies, 1):
        if len(study["losses"]) > 1:
            name = "anchors" if len(studies) == 1 else f"anchors-{number}"
            figures[name] = {"kind": "anchors", "study": study}
    if correlations:
        figures["correlation"] = {"kind": "correlation", "studies": studies, "correlations": correlations}
    return figures


def write_correlation_page(result: EvalResult, path: Path) -> Path:
    """Write the correlations and models of a result as Markdown, next to `correlation.png`."""
    models, correlations = result.tables[-2:]
    parts = ["# Anchor accuracy and other metrics", "![Anchor accuracy and other metrics](correlation.png)"]
    parts += [render_markdown(correlations), *correlations.notes, *result.warnings, render_markdown(models)]
    write_atomically(path, ("\n\n".join(parts) + "\n").encode("utf-8"))
    return path
