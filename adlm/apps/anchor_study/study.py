"""What the anchor network contributes: its guesses, the model's loss without them, the order of reveals."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from adlm.data.batches import RowDataset, is_valid
from adlm.diffusion.anchors import AnchorRule, rare_in_sequence
from adlm.diffusion.features import Features
from adlm.diffusion.masking import ForwardProcess, mask_tokens
from adlm.diffusion.objectives import MaskedDiffusion, ScoredRows
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.samplers import takes_steps
from adlm.diffusion.sampling import Positions, sample
from adlm.diffusion.sampling import Row as SampledRow
from adlm.diffusion.schedules import LogLinear, noise_level
from adlm.evaluate import stats
from adlm.evaluate.cache import (
    ProgressCallback,
    hash_settings,
    ignore_progress,
    lock_output,
    open_cache,
)
from adlm.evaluate.data import RowLayout, fetch_rows, iterate_rows, load_eval_data
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Cell, Estimate, EvalResult, Table, TableColumn, shorten_names
from adlm.evaluate.sample_metrics import TextScorer
from adlm.evaluate.scorer import ScoringModel, load_scorer
from adlm.evaluate.stats import estimate_ratio, flatten_estimates
from adlm.likelihood import draw_position, group_rows
from adlm.models.evaluator import ModelEvaluator
from adlm.models.folder import require_transformer
from adlm.models.language_model import LanguageModel
from adlm.text.generation import TextRow, check_whole_numbers
from adlm.text.lm import LM
from adlm.text.templates import classify_tokens

SCHEDULE = LogLinear()
LEVELS = 32  # of masking: features that are k levels stale saw the text at time t + k / LEVELS


@dataclass(frozen=True)
class Perturbation:
    """A change of the anchor features before the bridge.

    none; noise: Gaussian, its norm `amount` times that of the features; permuted: over the row's positions; stale: of
    the text `amount` masking levels earlier (in sampling: computed once for every `amount` evaluations).
    """

    kind: str = "none"
    amount: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.amount < math.inf:
            raise ValueError(
                f"the amount of {self.kind} must be finite and not negative, got {self.amount}"
            )
        if self.kind == "stale" and (self.amount != int(self.amount) or self.amount < 1):
            raise ValueError(
                f"stale must be a whole number of steps, at least 1, got {self.amount}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The first keys of a JSON row."""
        name = f"{self.kind} {self.amount:g}" if self.kind in ("noise", "stale") else self.kind
        return {"perturbation": name, "kind": self.kind, "amount": self.amount}

    def apply(
        self,
        features: Tensor,
        seed: int,
        rows: Sequence[int],
        turns: Sequence[int],
        lengths: Sequence[int],
    ) -> Tensor:
        """Add noise to features (n, L, dim) or permute their first `lengths`, at random by seed, number and turn."""
        if self.kind == "noise":
            noise = draw_normal(seed, tuple(rows), tuple(turns), tuple(features.shape[1:])).to(
                features.device
            )
            size = features.float().norm(dim=-1, keepdim=True) / features.shape[-1] ** 0.5
            return (features.float() + self.amount * size * noise).to(features.dtype)
        if self.kind == "permuted":
            places = np.tile(np.arange(features.shape[1]), (len(rows), 1))
            for place, row, turn, length in zip(places, rows, turns, lengths, strict=True):
                place[:length] = np.random.default_rng([seed, row, turn]).permutation(length)
            return features.gather(
                1, torch.from_numpy(places).to(features.device)[..., None].expand_as(features)
            )
        return features


NONE = Perturbation()


@lru_cache(maxsize=1)  # all amounts of noise share it
def draw_normal(
    seed: int, rows: tuple[int, ...], turns: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Draw standard normal numbers (n, *shape); fewer positions have the first of more."""
    streams = [np.random.default_rng([seed, *pair]) for pair in zip(rows, turns, strict=True)]
    return torch.from_numpy(
        np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in streams])
    )


def check_two_stages(model: LanguageModel, name: str) -> None:
    """Refuse models without an anchor network, and causal ones, which mask nothing."""
    if model.anchor is None or model.config.is_causal:
        reason = (
            "has one stage and no anchor network"
            if model.anchor is None
            else "is causal and has no masked tokens"
        )
        raise ValueError(
            f"{name} {reason}: give a two-stage masked model (trained with method=adlm)"
        )


# The held-out bound.


@torch.no_grad()
def measure_losses(
    model: LanguageModel,
    rows: RowDataset,
    perturbations: Sequence[Perturbation],
    *,
    draws: int = 1,
    seed: int = 0,
    batch: int = 16,
    on_batch: Callable[["NoisyRows"], None] = lambda noisy: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Measure the NELBO of held-out rows under each perturbation, and its cost against the model itself."""
    perturbations = [NONE, *(each for each in perturbations if each != NONE)]
    group_rows(len(rows))  # raises where there are too few for a standard error
    folded = model.fold()
    nats, tokens = (
        np.zeros((len(perturbations), len(rows))),
        np.concatenate([size for _, size in iterate_rows(rows)]),
    )
    order = np.argsort(tokens, kind="stable")  # rows of similar length together
    for start in range(0, len(order), batch):
        index = order[start : start + batch]
        for draw in range(draws):
            noisy = NoisyRows(folded, rows, torch.from_numpy(index), draw, draws, seed)
            for place, each in enumerate(perturbations):
                nats[place, index] += noisy.loss(each).cpu().double().numpy() / draws
            on_batch(noisy)
        on_progress(start + len(index), len(rows))
    losses = []
    for each, total in zip(perturbations, nats, strict=True):
        values = flatten_estimates(
            nll=estimate_ratio(total, tokens), cost=estimate_ratio(total - nats[0], tokens)
        )
        losses.append(each.as_dict() | values | {"tokens": int(tokens.sum())})
    return losses


class KnownFeatures(nn.Module):
    """A network whose features are known, so that an objective computes its bound from them."""

    def __init__(self, model: LanguageModel, features: Features) -> None:
        super().__init__()
        self.config, self.head, self.features = model.config, model.head, features

    def forward(
        self, tokens: Tensor, noise_level: Tensor | None = None, *, valid: Any = None
    ) -> Features:
        return self.features


class NoisyRows:
    """Rows by number (n,) under one noise: the features of both stages, and the loss under every perturbation."""

    def __init__(
        self,
        model: LanguageModel,
        rows: RowDataset,
        number: Tensor,
        draw: int,
        draws: int,
        seed: int,
    ) -> None:
        assert model.config.mask_id is not None
        self.model, self.number, self.draw, self.seed = model, number, draw, seed
        self.mask_id, self.rng = model.config.mask_id, CounterRng.from_seed(seed, number)
        x0, self.lengths = fetch_rows(rows, number)
        x0 = x0[:, : int(self.lengths.max())]
        valid = (
            None
            if bool((self.lengths == x0.shape[1]).all())
            else is_valid(self.lengths, x0.shape[1])
        )
        self.objective = MaskedDiffusion(ForwardProcess(self.mask_id, SCHEDULE))
        scored = ScoredRows(
            x0,
            number,
            draw_position(number, len(rows), draw, draws, seed),
            total=len(rows),
            draw=draw,
            valid=valid,
        )
        self.on_host = self.objective.hide(scored, seed)
        self.noisy = self.on_host.to(model.embed.weight.device)
        self.anchor = self.run_anchor(self.noisy.xt, self.noisy.noise_level)
        self.final = model.denoise_features(
            self.anchor, self.noisy.noise_level, valid=self.noisy.valid
        )

    def run_anchor(self, tokens: Tensor, level: Tensor) -> Tensor:
        """The anchor network's features of other tokens in these rows."""
        device = self.noisy.xt.device
        return self.model.anchor_features(
            tokens.to(device), level.to(device), valid=self.noisy.valid
        )

    def loss(self, each: Perturbation) -> Tensor:
        """Each row's nats (n,) under a perturbation."""
        final, x0, valid = self.final, self.on_host.x0, self.on_host.valid
        if each.kind == "stale":
            earlier = (self.on_host.t + each.amount / LEVELS).clamp(max=1.0)
            # The same random numbers: what is masked now was masked then.
            u, padding = (
                self.rng.uniform(self.draw, x0.shape[1], Purpose.MASK),
                None if valid is None else ~valid,
            )
            tokens = mask_tokens(x0, 1 - SCHEDULE.alpha(earlier.double()), u, self.mask_id, padding)
            anchor = self.run_anchor(tokens, noise_level(SCHEDULE, earlier))
        else:
            turns = [self.draw] * len(self.number)
            anchor = each.apply(
                self.anchor, self.seed, self.number.tolist(), turns, self.lengths.tolist()
            )
        if each != NONE:
            final = self.model.denoise_features(
                anchor, self.noisy.noise_level, valid=self.noisy.valid
            )
        network = KnownFeatures(self.model, Features(anchor, final))
        return self.objective.bound(network, self.noisy).row_nll


# Texts.


class PerturbedEvaluator(ModelEvaluator):
    """An evaluator with perturbed anchor features; each row has its own count of evaluations and stale features."""

    def __init__(self, lm: LM, perturbation: Perturbation, seed: int) -> None:
        super().__init__(lm.model, lm.device)
        self.perturbation, self.seed = perturbation, seed
        self.turns: dict[SampledRow, int] = {}
        self.anchors: dict[SampledRow, Tensor] = {}  # (L, dim)

    def features(
        self,
        tokens: Tensor,
        noise_level: Tensor,
        valid: Tensor | None = None,
        rows: Sequence[SampledRow] = (),
        next_position: Positions | None = None,
    ) -> Tensor:
        """The denoiser's features (n, L, dim); noise follows from a row's number and its count of evaluations."""
        each, level = self.perturbation, noise_level.to(self.device)
        valid = None if valid is None else valid.to(self.device)
        turns = [self.turns.get(row, 0) for row in rows]
        period = int(each.amount) if each.kind == "stale" else 1
        due = torch.tensor([i for i, turn in enumerate(turns) if turn % period == 0])
        if len(due):
            due = due.to(self.device)
            is_text = None if valid is None else valid[due]
            fresh = self.model.anchor_features(tokens[due], level[due], valid=is_text)
            for i, features in zip(due.tolist(), fresh, strict=True):
                self.anchors[rows[i]] = features[: len(rows[i].tokens)]
        for row, turn in zip(rows, turns, strict=True):
            self.turns[row] = turn + 1
        anchor = pad_sequence([self.anchors[row] for row in rows], batch_first=True)
        anchor = F.pad(anchor, (0, 0, 0, tokens.shape[1] - anchor.shape[1]))
        numbers = [row.number for row in rows]
        lengths = [len(row.tokens) for row in rows]
        anchor = each.apply(anchor, self.seed, numbers, turns, lengths)
        return self.model.denoise_features(anchor, level, valid=valid)


@dataclass(frozen=True)
class TracedRow:
    """A generated row, and the step in which each of its tokens was revealed for the last time."""

    row: TextRow
    steps: NDArray[np.int64]

    @property
    def is_generated(self) -> NDArray[np.bool_]:
        """Which tokens were generated and stand before the end of the text."""
        layout, ids = self.row.layout, self.row.ids
        is_generated, last = ~np.array(layout.is_fixed), layout.spans[-1]
        hole, eos_id = ids[last.start : last.end], layout.tokenizer.eos_id
        if layout.may_end and eos_id in hole:
            is_generated[last.start + hole.index(eos_id) :] = False
        return is_generated


def sample_rows(
    lm: LM, laid_out: Sequence[TextRow], perturbation: Perturbation = NONE
) -> Iterator[TracedRow]:
    """Generate the rows of `lm.fill_rows(laid_out)`, or the same with perturbed anchor features."""
    evaluator = lm.evaluator
    batch = laid_out[0].settings.batch
    if perturbation != NONE:
        evaluator = PerturbedEvaluator(lm, perturbation, laid_out[0].seed)
        batch = 1 if lm.deterministic else batch
    rows = [replace(row) for row in laid_out]  # they are sampled again with the next perturbation
    banned = classify_tokens(lm.tokenizer).banned
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        steps = {row: np.zeros(len(row.layout), np.int64) for row in part}
        for frame in sample(evaluator, part, banned=banned):
            revealed = (frame.changed & ~frame.is_hidden).numpy()
            for i, row in enumerate(frame.rows):
                steps[row][revealed[i, : len(row.layout)]] = frame.steps[i]
        for row in part:
            yield TracedRow(row, steps[row])


Row = Mapping[str, Any]
RATE_BINS = 5  # of mask rates
ALL_RATES = [0.0, 1.0]
PROBABILITY_BINS = 10
MAX_POSITIONS = 1024  # whose logits exist at a time
ACCURACY = "anchor accuracy"
HEADS = {"anchor": "anchor network", "final": "denoiser"}
METRICS = {"nll": "nll (nats per token)", "gen_ppl": "Gen-PPL", "entropy": "entropy (nats)"}
NOTE = (
    "± is a standard error over rows or texts. A cost is the difference to the unperturbed model on the same noise. "
    "The rank of a reveal is 0 for the first and 1 for the last token; in a random order both kinds have 0.5."
)
CORRELATION_NOTE = (
    "ρ is Spearman's, with a 95% interval. Training improves nearly every metric, so any two correlate over the "
    "checkpoints of a run: within runs and at equal steps, ranks are those in a run or at a step, and the intervals at "
    "equal steps count runs."
)


@lock_output
def anchors(
    models: LM | Iterable[LM],
    data: str | Path,
    *,
    rows: RowLayout | None = None,
    limit: int | None = 64,
    draws: int = 4,
    max_count: int = 5,
    perturb: Sequence[float] = (0.1, 0.3, 1.0),
    stale: Sequence[int] = (1, 2, 4, 8),
    samples: int = 0,
    scorer: str | Path | ScoringModel | None = None,
    sampler: str = "ancestral",
    steps: int = 32,
    length: int | None = None,
    seed: int = 0,
    batch: int = 16,
    out: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure the anchor networks of two-stage masked models on held-out text, and correlate three models or more.

    `models` may be an iterator that loads them. Anchors occur at most `max_count` times in their row (the paper's tau).
    `perturb` has the amounts of noise on the anchor features, relative to their norm, `stale` the masking levels (in
    sampling: steps) by which they are out of date. `out` keeps finished models; the same call resumes there.
    """
    check_whole_numbers(1, draws=draws, batch=batch, steps=steps, max_count=max_count)
    if samples == 1 or samples < 0:
        raise ValueError(f"samples must be 0 or at least 2, for a standard error; got {samples}")
    if scorer is not None and not samples:
        raise ValueError(
            f"a scorer computes the Gen-PPL of samples, and samples is {samples}: give samples too"
        )
    noise = [Perturbation("noise", amount) for amount in perturb]
    late = [Perturbation("stale", amount) for amount in stale]
    perturbations = [Perturbation(), *noise, Perturbation("permuted"), *late]
    perturbations = perturbations if noise or late else perturbations[:1]
    sampling = {"sampler": sampler, "steps": steps, "length": length, "seed": seed, "batch": batch}
    settings = {
        "perturb": list(perturb),
        "stale": list(stale),
        "draws": draws,
        "samples": samples,
        **sampling,
    }
    settings |= {"anchors": {"rule": "rare_in_sequence", "max_count": max_count}}
    rule = rare_in_sequence(max_count)
    cache, studies, about = open_cache(out), list[dict[str, Any]](), list[dict[str, Any]]()
    for lm in [models] if isinstance(models, LM) else models:
        require_transformer(lm.loaded.network, "eval anchors")
        check_two_stages(lm.model, lm.name)
        on_progress(f"{lm.name}: loading", 0, 0)
        scorer = None if scorer is None else load_scorer(scorer, device=lm.device)
        text_scorer = TextScorer(lm.tokenizer, scorer, batch)
        dataset = load_eval_data(data, lm.tokenizer, lm.model.config.length, rows=rows, limit=limit)
        names = {"model": lm.name, "method": lm.method, "step": lm.step}
        identity = names | {"weights_sha256": hash_weights(lm.model)}
        identity |= {
            "data": {"rows_hash": dataset.rows_hash, **dataset.settings},
            "device": str(lm.device),
        }
        identity |= text_scorer.settings if samples else {"scorer": None}
        entry = hash_settings(
            identity | settings | {"batch": None}
        )  # the batch size changes speed only
        if entry not in cache:
            own = {"n": samples, **sampling}
            study = measure_model(
                lm, dataset.rows, rule, perturbations, draws, own, text_scorer, on_progress
            )
            cache.put(entry, names | study, is_flushed=True)
        studies.append(cache.get(entry))
        about.append(identity)
    cache.merge()
    if not studies:
        raise ValueError("models is empty: give at least one two-stage masked model")
    correlations, reasons = correlate_studies(studies)
    if len({each["data"]["rows_hash"] for each in about}) > 1:
        correlations, reasons = (
            [],
            ["no correlation: models with other tokenizers or lengths have other rows"],
        )
    metrics = {"models": studies, "correlations": correlations, "skipped_correlations": reasons}
    settings = {"data": str(data), **settings, "models": about}
    drawn = {"models": studies, "correlations": correlations}
    figures = {"correlation": ("correlation", drawn)} if correlations else {}
    tables = build_tables(studies, correlations)
    provenance, warnings = (
        collect_provenance(about[0]["device"]),
        reasons if len(studies) > 1 else [],
    )
    return EvalResult("anchors", metrics, settings, provenance, tables, warnings, figures)


def measure_model(
    lm: LM,
    rows: RowDataset,
    rule: AnchorRule,
    perturbations: Sequence[Perturbation],
    draws: int,
    sampling: Mapping[str, Any],
    scorer: TextScorer,
    on_progress: ProgressCallback = ignore_progress,
) -> dict[str, Any]:
    """Measure guesses and losses on held-out rows and, unless n is 0, texts and reveals by these settings."""
    special = classify_tokens(lm.tokenizer).special
    ignored = torch.ones(
        lm.model.config.vocab_size, dtype=torch.bool
    )  # tokens that begin and end a text
    ignored[: len(special)] = special
    tally, size = (
        GuessTally(rule, len(rows), ignored),
        {"seed": sampling["seed"], "batch": sampling["batch"]},
    )
    report: dict[str, Any] = {
        "on_batch": tally.add,
        "on_progress": partial(on_progress, f"{lm.name}: rows"),
    }
    losses = measure_losses(
        lm.model.to(lm.device), rows, perturbations, draws=draws, **size, **report
    )
    samples, reveals = list[dict[str, Any]](), list[dict[str, Any]]()
    samplers = [
        sampling["sampler"],
        *(["confidence", "ancestral"] if len(perturbations) > 1 else []),
    ]
    for sampler in dict.fromkeys(samplers) if sampling["n"] else ():
        steps = sampling["steps"] if takes_steps(sampler, allow_import=True) else None
        laid_out = lm.layout_rows(**{**sampling, "sampler": sampler, "steps": steps})
        texts = list(sample_rows(lm, laid_out))
        reveals.append(summarize_reveals(sampler, texts, rule))
        for each in perturbations if sampler == sampling["sampler"] else ():
            on_progress(f"{lm.name}: texts", len(samples), len(perturbations))
            if each == Perturbation(
                "stale", 1
            ):  # features that are used once, as by the model itself
                samples.append(samples[0] | each.as_dict())
            else:
                generated = texts if each.kind == "none" else list(sample_rows(lm, laid_out, each))
                nfe = float(np.mean([text.row.nfe for text in generated]))
                samples.append(
                    {
                        **each.as_dict(),
                        "nfe": nfe,
                        **scorer([text.row.text for text in generated]).as_row(),
                    }
                )
    return {"guesses": tally.summarize(), "losses": losses, "samples": samples, "reveals": reveals}


# Guesses: how well both heads predict tokens.


class GuessTally:
    """Counts both heads' guesses of masked tokens, for anchors and others; tokens in `ignored` (V,) do not count."""

    def __init__(self, rule: AnchorRule, rows: int, ignored: Tensor) -> None:
        self.rule, self.ignored = rule, ignored
        # (row, bin of mask rate, anchor or other, head, bin of probability) -> sums of 1, probability, hits, nll
        self.sums = np.zeros((rows, RATE_BINS, 2, 2, PROBABILITY_BINS, 4))

    @torch.no_grad()
    def add(self, rows: NoisyRows) -> None:
        """Count the guesses of a batch."""
        noisy, model = rows.on_host, rows.model
        assert model.anchor_head is not None
        at = ((noisy.xt == rows.mask_id) & ~self.ignored[noisy.x0]).nonzero(as_tuple=True)
        rate = (noisy.t[at[0]].double() * RATE_BINS).long().clamp(max=RATE_BINS - 1)
        is_other = ~self.rule(noisy.x0, noisy.valid)[at]
        heads = (rows.anchor, model.anchor_head, None), (rows.final, model.head, rows.mask_id)
        for head, (features, linear, banned) in enumerate(heads):
            chosen = features[tuple(each.to(features.device) for each in at)]
            probability, hits, nll = guess_tokens(chosen, linear, noisy.x0[at], banned)
            # Bins are (0, 0.1], (0.1, 0.2], …
            place = np.clip(
                np.ceil(probability * PROBABILITY_BINS).astype(np.int64) - 1,
                0,
                PROBABILITY_BINS - 1,
            )
            each = np.stack([np.ones_like(nll), probability, hits, nll], axis=1)
            places: Any = (
                rows.number[at[0]].numpy(),
                rate.numpy(),
                is_other.long().numpy(),
                head,
                place,
            )
            np.add.at(self.sums, places, each)

    def summarize(self) -> list[dict[str, Any]]:
        """One entry for each head, kind of token and range of mask rates."""
        ranges = [(slice(None), ALL_RATES)]
        ranges += [
            (slice(i, i + 1), [i / RATE_BINS, (i + 1) / RATE_BINS]) for i in range(RATE_BINS)
        ]
        return [
            {"head": name, "kind": kind, "mask_rate": rate}
            | summarize_guesses(self.sums[:, part, is_other, head].sum(1))
            for head, name in enumerate(HEADS)
            for is_other, kind in enumerate(("anchors", "others"))
            for part, rate in ranges
        ]


def guess_tokens(features: Tensor, head: nn.Linear, x0: Tensor, banned: int | None) -> NDArray[Any]:
    """Of features (n, dim): highest probability, whether its token is right, nats of the true tokens (n,)."""
    parts = [torch.zeros(3, 0, dtype=torch.float64)]
    for inputs, tokens in zip(
        features.split(MAX_POSITIONS), x0.to(features.device).split(MAX_POSITIONS), strict=True
    ):
        logits = head(inputs).float()
        if banned is not None:
            logits[:, banned] = -torch.inf
        logs = logits.log_softmax(-1)
        best, token = logs.max(-1)
        nll = -logs.gather(1, tokens[:, None])[:, 0]
        parts.append(
            torch.stack(
                [best.cpu().double().exp(), (token == tokens).cpu().double(), nll.cpu().double()]
            )
        )
    return torch.cat(parts, 1).numpy()


def summarize_guesses(sums: NDArray[np.float64]) -> dict[str, Any]:
    """Accuracy and nll from sums (rows, bins, 4), with standard errors over rows, and the calibration error."""
    counts, _, hits, nll = np.moveaxis(sums.sum(1), -1, 0)
    # nll is in nats per token, every token with the same weight
    flat = flatten_estimates(accuracy=estimate_ratio(hits, counts), nll=estimate_ratio(nll, counts))
    bins, total = sums.sum(0), counts.sum()
    error = float(np.abs(bins[:, 1] - bins[:, 2]).sum() / total) if total else math.nan
    # By bins of the highest probability: tokens, its mean, accuracy.
    reliability = [
        [int(n), p / n if n else math.nan, h / n if n else math.nan] for n, p, h, _ in bins.tolist()
    ]
    return {"tokens": int(total), **flat, "calibration_error": error, "reliability": reliability}


# Reveals: the order in which a sampler reveals anchors and other tokens.


def summarize_reveals(sampler: str, texts: Sequence[TracedRow], rule: AnchorRule) -> dict[str, Any]:
    """Mean normalized ranks of reveals (0 first, 1 last) of the finished texts' anchors and of other tokens."""
    sums, different = np.zeros((len(texts), 4)), []  # rank and count of anchors, of others
    for number, text in enumerate(texts):
        is_anchor = rule(torch.tensor([text.row.ids]), None)[0].numpy()[text.is_generated]
        revealed = text.steps[text.is_generated]
        rank = (stats.rank_values(revealed) - 0.5) / len(
            revealed
        )  # equal steps share the middle: the mean is 1/2
        different.append(len(np.unique(revealed)))
        sums[number] = (
            rank[is_anchor].sum(),
            is_anchor.sum(),
            rank[~is_anchor].sum(),
            (~is_anchor).sum(),
        )
    own, own_count, rest, rest_count = sums.T
    estimates = flatten_estimates(
        anchors=estimate_ratio(own, own_count),
        others=estimate_ratio(rest, rest_count),
        gap=stats.estimate_ratio_difference(
            own, own_count, rest, rest_count
        ),  # below 0 where anchors come first
    )
    share, steps = (
        float(own_count.sum() / (own_count + rest_count).sum()),
        float(np.mean(different)),
    )
    return {
        "sampler": sampler,
        "texts": len(sums),
        **estimates,
        "anchor_share": share,
        "steps": steps,
    }


# Several models: correlations.


def find_guess(study: Row, head: str = "anchor", kind: str = "anchors") -> Row:
    """A head's guesses over all mask rates."""
    key: Row = {"head": head, "kind": kind, "mask_rate": ALL_RATES}
    return next(guess for guess in study["guesses"] if guess | key == guess)


def get_metric(study: Row, name: str) -> Estimate:
    """A metric of the unperturbed model; NaN where it was not measured."""
    rows = (
        [find_guess(study)] if name == ACCURACY else study["losses" if name == "nll" else "samples"]
    )
    return (
        Estimate.from_row(rows[0], "accuracy" if name == ACCURACY else name)
        if rows
        else Estimate(math.nan)
    )


def find_run(study: Row) -> str:
    """The run that a checkpoint belongs to; any other model is a run of its own."""
    path = Path(study["model"])
    return str(path.parent.parent if path.parent.name == "checkpoints" else path)


def shared_metrics(studies: Sequence[Row]) -> list[str]:
    """The metrics other than anchor accuracy that all models have."""
    return [
        name
        for name in METRICS
        if all(not math.isnan(get_metric(study, name).value) for study in studies)
    ]


def correlate_studies(studies: Sequence[Row]) -> tuple[list[dict[str, Any]], list[str]]:
    """Correlate anchor accuracy with loss and sample quality; also the reasons why some cannot be computed."""
    x = [get_metric(study, ACCURACY).value for study in studies]
    groups, correlations = group_models(studies), []
    for name in shared_metrics(studies):
        y = [get_metric(study, name).value for study in studies]
        for among, (members, independent) in groups.items():
            if independent >= stats.MIN_MODELS:
                rho, low, high = stats.correlate(x, y, members, independent)
                about = {"x": ACCURACY, "y": name, "among": among, "points": sum(map(len, members))}
                correlations.append(
                    about | {"independent": independent, "rho": rho, "low": low, "high": high}
                )
    few = {among: count for among, (_, count) in groups.items() if count < stats.MIN_MODELS}
    needed = f"independent models, and at least {stats.MIN_MODELS} are needed"
    return correlations, [
        f"no correlation {among}: {count} {needed}" for among, count in few.items()
    ]


def group_models(studies: Sequence[Row]) -> dict[str, tuple[list[list[int]], int]]:
    """The groups in which models are ranked, for each comparison, and how many models count as independent."""
    runs, steps = [find_run(study) for study in studies], [study["step"] for study in studies]
    groups = {"all models": ([list(range(len(studies)))], len(studies))}
    if len(set(runs)) > 1:
        every = [[i for i, each in enumerate(runs) if each == run] for run in dict.fromkeys(runs)]
        several = [group for group in every if len(group) > 1]
        groups["within runs"] = several, sum(len(group) - 1 for group in several) + 1
    if len(set(steps)) > 1:
        at_steps = [
            [i for i, each in enumerate(steps) if each == step] for step in dict.fromkeys(steps)
        ]
        shared = [group for group in at_steps if len(group) == len(set(runs))]
        groups["at equal steps"] = shared, len(set(runs)) if shared else 0
    return groups


# Tables.

# Part of a study -> title, columns of text, columns of numbers.
GUESS_COLUMNS = ("tokens", "accuracy", "nll", "calibration_error")
QUALITY = ("nfe", "gen_ppl", "entropy", "distinct_2", "repetition_4")
STUDY_TABLES = {
    "guesses": ("guesses of masked tokens", ("head", "kind", "mask_rate"), GUESS_COLUMNS),
    "losses": ("loss with perturbed anchor features", ("perturbation",), ("nll", "cost")),
    "samples": ("samples with perturbed anchor features", ("perturbation",), QUALITY),
    "reveals": ("mean rank of reveals", ("sampler",), ("anchors", "others", "gap", "anchor_share")),
}
COLUMN_NAMES = {"perturbation": "anchor features", "nfe": "NFE", "gen_ppl": "Gen-PPL"}


def build_tables(studies: Sequence[Row], correlations: Sequence[Row]) -> list[Table]:
    """Tables of every model that is alone or was perturbed, then of all models and of correlations."""
    tables = list[Table]()

    def get_cell(row: Row, key: str) -> Cell:
        if key == "mask_rate":
            return "{:g} to {:g}".format(*row[key])
        return Estimate.from_row(row, key) if f"{key}_se" in row else HEADS.get(row[key], row[key])

    for study in (
        studies if len(studies) == 1 else [study for study in studies if study["losses"][1:]]
    ):
        for part, (title, texts, numbers) in STUDY_TABLES.items():
            names = {
                key: COLUMN_NAMES.get(key, key.replace("_", " ")) for key in (*texts, *numbers)
            }
            columns = [
                TableColumn(names[key], 1 if key in ("nfe", "gen_ppl") else 3, key in texts)
                for key in names
            ]
            rows = [[get_cell(row, key) for key in names] for row in study[part]]
            tables += [Table(columns, rows, f"{study['model']}: {title}")] if rows else []
        tables[-1] = replace(tables[-1], notes=[NOTE])
    if len(studies) > 1:
        metrics, runs = shared_metrics(studies), shorten_names(list(map(find_run, studies)))
        columns = [TableColumn("run", is_text=True), TableColumn("step"), TableColumn(ACCURACY)]
        columns += [
            TableColumn(METRICS[name], digits=1 if name == "gen_ppl" else 3) for name in metrics
        ]
        measured = [[get_metric(study, name) for name in (ACCURACY, *metrics)] for study in studies]
        rows = [
            [runs[find_run(study)], study["step"], *own]
            for study, own in zip(studies, measured, strict=True)
        ]
        tables.append(Table(columns, rows, "Models", ["± is a standard error over rows or texts."]))
    if correlations:
        columns = [TableColumn(name, is_text=True) for name in (f"{ACCURACY} with", "among")]
        columns += [TableColumn("models"), TableColumn("ρ (95%)", digits=2)]
        intervals = [
            Estimate(each["rho"], interval=(each["low"], each["high"])) for each in correlations
        ]
        keys = ("y", "among", "points")
        rows = [
            [*(each[key] for key in keys), rho]
            for each, rho in zip(correlations, intervals, strict=True)
        ]
        tables.append(Table(columns, rows, "Correlations", [CORRELATION_NOTE]))
    return tables
