"""Metrics of samples and of real text of the same lengths, with errors over texts; docs/samples.md has the reasons."""

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adlm.data.sources import open_source
from adlm.data.tokenizers import Tokenizer
from adlm.distributed import DistributedContext
from adlm.errors import install_command
from adlm.evaluate.cache import (
    Cache,
    ProgressCallback,
    hash_settings,
    ignore_progress,
    lock_output,
    open_cache,
)
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn
from adlm.evaluate.scorer import (
    BATCH,
    ScoringModel,
    ScoringRequest,
    TokenizedText,
    load_scorer,
    score_texts,
)
from adlm.evaluate.stats import estimate_ratio
from adlm.files import hash_file, write_atomically
from adlm.settings import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from adlm.text.generation import TextRow, check_whole_numbers
from adlm.text.lm import LM
from adlm.view.console import hide_stderr

Tokens = Sequence[int] | Sequence[str] | NDArray[Any]  # of one text
DISTINCT, REPETITION = (1, 2, 3), 4  # orders of n-grams
MIN_TOKENS = max(REPETITION, *DISTINCT)  # of a text
DROPPED_END = (
    8  # one part in so many: MAUVE would tell the end of a text from the middle of a truncated one
)
Histogram = NDArray[np.float64]
Scored = tuple[
    Estimate, dict[str, Any]
]  # a metric of a scoring model, and more numbers for its JSON form
SEEDS = (0, 1, 2, 3, 4)  # of k-means
SCALE, POINTS = (
    5.0,
    25,
)  # the constant c and the points of the divergence curve: the package's defaults
CURVE = {"mauve_scaling_factor": SCALE, "divergence_curve_discretization_size": POINTS}
KMEANS = {"kmeans_explained_var": 0.9, "kmeans_num_redo": 5, "kmeans_max_iter": 500}
BOOTSTRAP_DRAWS = 500  # for each seed
TEXTS_PER_BUCKET, MIN_BUCKETS = 10, 10  # fewer give a warning


@dataclass(frozen=True)
class SampleMetrics:
    """Metrics of a set of texts."""

    texts: int  # that were measured
    tokens: int  # in all of them
    estimates: dict[
        str, Estimate
    ]  # gen_ppl and mauve (with a scoring model), entropy, distinct_N and repetition_4
    details: dict[str, dict[str, Any]]  # more numbers of gen_ppl and mauve
    short: int = 0  # texts left out: fewer than four tokens

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, an object for every metric."""
        parts = {
            name: each.as_dict() | self.details.get(name, {})
            for name, each in self.estimates.items()
        }
        return parts | {"texts": self.texts, "tokens": self.tokens}

    def as_row(self) -> dict[str, Any]:
        """The flat form, `NAME` and `NAME_se` for every metric; `tokens` is the mean of a text."""
        row: dict[str, Any] = {"gen_ppl": None, "gen_ppl_se": None}
        for name, each in self.estimates.items():
            row |= {name: each.value, f"{name}_se": each.stderr}
        return row | {"texts": self.texts, "short": self.short, "tokens": self.tokens / self.texts}


@dataclass(frozen=True)
class TextScorer:
    """Measures texts: entropy and n-grams in the tokens of one tokenizer, and Gen-PPL if there is a scoring model."""

    tokenizer: Tokenizer
    scorer: ScoringModel | None = None
    batch: int = BATCH

    def __post_init__(self) -> None:
        if self.scorer is not None:
            self.scorer.require_causal()

    @property
    def settings(self) -> dict[str, Any]:
        """What the metrics depend on."""
        scorer = self.scorer and self.scorer.settings | {"identity": self.scorer.identity}
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": self.tokenizer.sha256,
            "scorer": scorer,
        }

    def __call__(self, texts: Sequence[str]) -> SampleMetrics:
        """The metrics of the texts that have at least four tokens."""
        every = [(text, self.tokenizer.encode(text)) for text in texts]
        long = [(text, row) for text, row in every if len(row) >= MIN_TOKENS]
        short, scored = len(texts) - len(long), dict[str, Scored]()
        if len(long) < 2:
            problem = f"{short} of {len(texts)} texts have fewer than {MIN_TOKENS} tokens"
            raise ValueError(
                f"{problem} and at least 2 texts are needed: generate longer texts, or more of them"
            )
        if self.scorer is not None:
            request = ScoringRequest(self.scorer, self.scorer.encode([text for text, _ in long]))
            (scores,) = score_texts([request], batch=self.batch)
            scored["gen_ppl"] = compute_gen_ppl(self.scorer, request.texts, scores.nats)
        return measure_tokens([row for _, row in long], (2,), scored, short)


def measure_tokens(
    rows: Sequence[Tokens], orders: Sequence[int], scored: Mapping[str, Scored], short: int = 0
) -> SampleMetrics:
    """The metrics of at least two texts as tokens, together with those of a scoring model."""
    estimates = {name: estimate for name, (estimate, _) in scored.items()}
    estimates |= {"entropy": estimate_mean(compute_entropies(rows))}
    estimates |= {f"distinct_{n}": measure_distinct(rows, n) for n in orders}
    estimates |= {f"repetition_{REPETITION}": estimate_mean(compute_repetitions(rows, REPETITION))}
    details = {name: more for name, (_, more) in scored.items()}
    return SampleMetrics(len(rows), sum(map(len, rows)), estimates, details, short)


# Entropy and n-grams.


def count_ngrams(row: Tokens, n: int) -> Counter[tuple[Any, ...]]:
    """How often each n-gram occurs in a text."""
    tokens = np.asarray(row).tolist()
    return Counter(zip(*(tokens[k:] for k in range(n))))


def compute_entropies(rows: Sequence[Tokens]) -> NDArray[np.float64]:
    """Each text's unigram entropy in nats over its own tokens, as in MDLM's code; at most ln L for L tokens."""
    shares = [np.array(list(count_ngrams(row, 1).values())) / len(row) for row in rows]
    return np.array([-(share * np.log(share)).sum() for share in shares])


def compute_repetitions(rows: Sequence[Tokens], n: int) -> NDArray[np.float64]:
    """Each text's share of n-grams that occurred in it before."""
    counts = [count_ngrams(row, n) for row in rows]
    return np.array([1 - len(each) / each.total() for each in counts])


def measure_distinct(rows: Sequence[Tokens], n: int) -> Estimate:
    """Distinct-n: the number of different n-grams of the set as a share of all its n-grams; none spans two texts."""
    counts = [count_ngrams(row, n) for row in rows]
    texts = Counter(ngram for each in counts for ngram in each)  # in which it occurs
    lost = np.array(
        [sum(texts[ngram] == 1 for ngram in each) for each in counts]
    )  # without each text
    sizes = np.array([each.total() for each in counts])
    without = (len(texts) - lost) / (
        sizes.sum() - sizes
    )  # jackknife: a bootstrap would draw texts twice
    return Estimate(float(len(texts) / sizes.sum()), math.sqrt((len(rows) - 1) * without.var()))


def estimate_mean(values: NDArray[np.float64]) -> Estimate:
    """The mean over texts."""
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))


# Gen-PPL.


def is_counted(
    ids: Sequence[int] | NDArray[Any], eos_id: int | None, *, until_eos: bool = False
) -> NDArray[np.bool_]:
    """Which tokens of a text count in Gen-PPL: all but repeated EOS, as in MDLM's code, or those up to the first."""
    row = np.asarray(ids)
    is_eos = row == eos_id if eos_id is not None else np.zeros(len(row), dtype=bool)
    before = is_eos.cumsum() - is_eos  # end-of-text tokens before each token
    return before == 0 if until_eos else ~(is_eos & (before > 0))


def compute_gen_ppl(
    scorer: ScoringModel,
    texts: Sequence[TokenizedText],
    nats: Sequence[NDArray[Any]],
    *,
    until_eos: bool = False,
) -> Scored:
    """Gen-PPL of texts from the nats of their tokens; the details also compare between different vocabularies."""
    sums = np.zeros((3, len(texts)))  # nats, tokens and characters of each text
    for number, (text, own) in enumerate(zip(texts, nats, strict=True)):
        is_in = is_counted(text.ids, scorer.tokenizer.eos_token_id, until_eos=until_eos)
        is_in[: 1 - len(scorer.special_ids[0])] = False  # a first token without a BOS before it
        sums[:, number] = own[is_in].sum(), is_in.sum(), np.diff(text.ends, prepend=0)[is_in].sum()
    nll, stderr = estimate_ratio(sums[0], sums[1])
    bits, bits_stderr = estimate_ratio(sums[0] / math.log(2), sums[2])
    details = {
        "tokens": int(sums[1].sum()),
        "characters": int(sums[2].sum()),
        "nll": nll,
        "nll_stderr": stderr,
    }
    details |= {"bits_per_character": bits, "bits_per_character_stderr": bits_stderr}
    return Estimate(
        math.exp(nll), math.exp(nll) * stderr
    ), details  # its standard error is first-order


# MAUVE (Pillutla et al., 2021), with a 95% interval.
#
# Quantization and curve are those of the package mauve-text, except that equal histograms have MAUVE 1 (0.75 there, as
# it does not sort points with equal x). The interval covers the draw of the texts and the seed of k-means: for every
# seed the texts are quantized once and both histograms are resampled. Resampled histograms are noisier than the texts,
# so their MAUVE is biased downwards; only its standard deviation, pooled over seeds, is used.


def measure_mauve(
    reference: NDArray[np.float32],
    features: NDArray[np.float32],
    *,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
) -> Scored:
    """How close a set of texts is to a reference, from 0 to 1: the mean over seeds, from features (texts, width)."""
    from mauve import compute_mauve

    p, q = reference, features
    sizes, smaller = (len(p), len(q)), min(len(p), len(q))
    count = max(2, smaller // TEXTS_PER_BUCKET) if buckets is None else buckets
    if not 2 <= count <= sum(sizes):
        raise ValueError(
            f"buckets={count}: give at least 2 and at most the number of texts, {sum(sizes)}"
        )
    by_seed, resampled = [], []
    for seed in seeds:
        with hide_stderr():
            result = compute_mauve(
                p_features=p, q_features=q, num_buckets=count, seed=int(seed), **CURVE, **KMEANS
            )
        histograms = [np.asarray(each, dtype=np.float64) for each in (result.p_hist, result.q_hist)]
        by_seed.append(float(integrate_curve(*histograms)))
        rng = np.random.default_rng([int(seed), *sizes])
        draws = [
            rng.multinomial(n, h / h.sum(), size=BOOTSTRAP_DRAWS) / n
            for n, h in zip(sizes, histograms)
        ]
        resampled.append(integrate_curve(*draws))
    value, stderr = float(np.mean(by_seed)), float(np.concatenate(resampled).std(ddof=1))
    interval = (max(0.0, value - 1.96 * stderr), min(1.0, value + 1.96 * stderr))
    return Estimate(value, stderr, interval), {"by_seed": by_seed, "buckets": count}


def warn_few_texts(texts: int, buckets: int) -> list[str]:
    """A warning about a MAUVE from few texts."""
    few = (
        f"MAUVE has only {buckets} buckets for {texts} texts in a set, too few to tell models apart"
    )
    remedy = f"use at least {TEXTS_PER_BUCKET * MIN_BUCKETS} texts; its authors use 5,000"
    return [f"{few}: {remedy}"] if buckets < MIN_BUCKETS else []


def integrate_curve(p: Histogram, q: Histogram) -> NDArray[np.float64]:
    """MAUVE of histograms (…, buckets): the area under the curve of exp(−c·KL) of both to their mixtures."""
    share = np.linspace(1e-6, 1 - 1e-6, POINTS).reshape(-1, *[1] * p.ndim)
    mixture = share * p + (1 - share) * q
    with np.errstate(divide="ignore", invalid="ignore"):
        divergences = [
            np.where(each > 0, each * np.log(each / mixture), 0).sum(-1) for each in (q, p)
        ]
    x, y = (np.exp(-SCALE * each) for each in divergences)  # (points, …)
    zeros = np.zeros((1, *x.shape[1:]))
    # The curve runs from (0, 1) to (1, 0); the mean of the integrals over both axes.
    x, y = np.concatenate([zeros, x, zeros + 1]), np.concatenate([zeros + 1, y, zeros])
    areas = []
    for along, height in ((x, y), (y, x)):  # points with equal x are sorted from the highest down
        order = np.lexsort((-height, along), axis=0)
        along, height = np.take_along_axis(along, order, 0), np.take_along_axis(height, order, 0)
        areas.append(((along[1:] - along[:-1]) * (height[1:] + height[:-1]) / 2).sum(0))
    return (areas[0] + areas[1]) / 2


# Samples and real text.


def compare_texts(
    samples: Sequence[str],
    reference: Sequence[str],
    scorer: ScoringModel,
    features: ScoringModel | None = None,
    *,
    until_eos: bool = False,
    window: int | None = None,
    seeds: Sequence[int] = SEEDS,
    batch: int = BATCH,
    cache: Cache | None = None,
) -> tuple[SampleMetrics, SampleMetrics, dict[str, Any]]:
    """Measure samples and twice as many passages of real text: the metrics of both, and their settings."""
    features, n = features or scorer, len(samples)
    whole = [scorer.encode(texts) for texts in (samples, reference[:n], reference[n : 2 * n])]
    for texts, name in zip(whole, ("samples", "reference texts", "reference texts"), strict=True):
        if short := [
            at for at, text in enumerate(texts) if len(text) < MIN_TOKENS or not text.text.strip()
        ]:
            problem = f"{len(short)} of {n} {name} are empty or have fewer than {MIN_TOKENS} tokens"
            first = f"number {short[0]} has {len(texts[short[0]])}"
            raise ValueError(f"{problem} ({first}): leave such texts out, or generate longer ones")
    cut = truncate_together(whole)
    sets = [
        [text.truncate(len(text) - len(text) // DROPPED_END) for text in texts] for texts in cut
    ]
    if features is scorer:  # one pass for both; the MAUVE reference needs no nats
        requests = [
            ScoringRequest(scorer, texts, number != 1, True, window)
            for number, texts in enumerate(sets)
        ]
    else:
        size = (
            window if window is None else min(window, features.max_tokens)
        )  # an encoder's context may be shorter
        encoded = [features.encode([text.text for text in texts]) for texts in sets]
        requests = [ScoringRequest(scorer, texts, window=window) for texts in sets[::2]]
        requests += [ScoringRequest(features, texts, False, True, size) for texts in encoded]
    scores = score_texts(requests, cache=cache, batch=batch)
    nats, vectors = (
        [each.nats for each in scores if each.nats],
        [np.asarray(each.features) for each in scores[-3:]],
    )
    metrics = []
    for texts, own_nats, own_features in zip(sets[::2], nats, vectors[::2], strict=True):
        scored = {"gen_ppl": compute_gen_ppl(scorer, texts, own_nats, until_eos=until_eos)}
        scored["mauve"] = measure_mauve(vectors[1], own_features, seeds=seeds)
        metrics.append(measure_tokens([text.ids for text in texts], DISTINCT, scored))
    measured, baseline = metrics
    mauve = {
        "buckets": f"texts of the smaller set / {TEXTS_PER_BUCKET}",
        "seeds": list(seeds),
        **KMEANS,
    }
    mauve |= {"scale": SCALE, "curve_points": POINTS, "bootstrap_draws_per_seed": BOOTSTRAP_DRAWS}
    settings = {
        "scorer": scorer.settings,
        "features": features.settings,
        "until_eos": until_eos,
        "mauve": mauve,
    }
    settings |= {"window": window, "stride": None if window is None else window // 2}
    return (
        measured,
        baseline,
        settings | {"truncated_share": 1 - measured.tokens / sum(map(len, whole[0]))},
    )


def truncate_together(sets: Sequence[Sequence[TokenizedText]]) -> list[list[TokenizedText]]:
    """Truncate sets of equally many texts to the same lengths, the longest text of one with the longest of another."""
    lengths = [np.array([len(text) for text in texts]) for texts in sets]
    # The first set becomes the shortest, then the others are truncated to it.
    for other in (*range(1, len(sets)), *range(1, len(sets) - 1)):
        order, other_order = (np.argsort(lengths[each], kind="stable") for each in (0, other))
        shorter = np.minimum(lengths[0][order], lengths[other][other_order])
        lengths[0][order] = lengths[other][other_order] = shorter
    return [
        [text.truncate(n) for text, n in zip(texts, own.tolist())]
        for texts, own in zip(sets, lengths)
    ]


# Samples of a model, or given texts. A sample follows from the settings, the seed and its number.

SEPARATOR = "\n<|endoftext|>\n"  # between the texts of a file
Sample = dict[
    str, Any
]  # number, seed, text, tokens (of the model, without BOS and what follows the end), nfe
NUM_SAMPLES = 200
MAX_CHARACTERS_PER_TOKEN = (
    6  # of a reference passage; real text has fewer, so passages are long enough to be truncated
)
MIN_PASSAGE = 32  # characters; shorter ones are headings
PARAGRAPH = re.compile(r"(?:\A|\n[ \t]*\n)\s*(?=\S)")  # after a blank line
LINE = re.compile(r"^(?=\S)", re.MULTILINE)


@lock_output
def samples(
    model: LM | None = None,
    *,
    scorer: str | Path | ScoringModel,
    reference: str | Path,
    texts: str | Path | Sequence[str] | None = None,
    features: str | Path | ScoringModel | None = None,
    n: int | None = None,
    length: int | None = None,
    steps: int | None = None,
    sampler: str | None = None,
    temperature: float = DEFAULT_TEMPERATURE,
    top_p: float = DEFAULT_TOP_P,
    top_k: int | None = None,
    block: int | None = None,
    sampler_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    batch: int = 16,
    until_eos: bool = False,
    window: int | None = None,
    mauve_seeds: int = 5,
    scorer_batch: int = BATCH,
    out: str | Path | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Generate samples (or take `texts`) and measure Gen-PPL, MAUVE, entropy and n-grams, and those of real text.

    `scorer` is a causal LM (see `load_scorer`), `features` the model whose features MAUVE compares (by default the
    scorer), `reference` held-out real text. `out` keeps samples and scores; the same call resumes there.
    """
    sampling: dict[str, Any] = {
        "length": length,
        "steps": steps,
        "sampler": sampler,
        "block": block,
    }
    sampling |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if (model is None) == (texts is None):
        raise ValueError("samples measures a model or texts: give one of them")
    if texts is not None:
        defaults = inspect.signature(samples).parameters
        given = sampling | {"sampler_options": sampler_options or None}
        if unused := [name for name, value in given.items() if value != defaults[name].default]:
            raise ValueError(
                f"texts are given, but {', '.join(unused)} set how to generate: leave them out"
            )
    check_whole_numbers(1, mauve_seeds=mauve_seeds)
    if find_spec("mauve") is None:
        raise ImportError(
            f"MAUVE, a metric of samples, needs mauve-text: {install_command('mauve')}"
        )
    # Wrong names are refused before anything is generated.
    source, cache = open_source(reference), open_cache(out, context, is_shared=True)
    cache.on_progress = on_progress
    device = model.device if model is not None else context.device if context else "cpu"
    scoring_model = load_scorer(scorer, device=device)
    scoring_model.require_causal()
    features = (
        scoring_model
        if features is None or features == scorer
        else load_scorer(features, device=device)
    )
    if model is not None:
        n = NUM_SAMPLES if n is None else n
        rows = model.layout_rows(
            n=n, seed=seed, batch=batch, options=sampler_options or None, **sampling
        )
        require_two(len(rows), "generate a hundred or more")
        generated = generate_samples(model, rows, cache)
        if out is not None and (context is None or context.is_main):
            lines = [json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in generated]
            write_atomically(Path(out) / "samples.jsonl", b"".join(lines))
        selected = [each["text"] for each in generated]
        about = {"model": model.name, "n": len(rows), **describe_samples(model, rows)}
        about["nfe"] = sum(each["nfe"] for each in generated) / len(generated)
    else:
        assert texts is not None
        selected, about = select_texts(texts, n)
    characters = MAX_CHARACTERS_PER_TOKEN * max([1, *map(len, scoring_model.encode(selected))])

    def is_long_enough(passage: str) -> bool:
        return len(scoring_model.encode([passage])[0]) >= MIN_TOKENS

    documents = (text for text, _ in source.read())
    passages = cut_passages(
        documents, 2 * len(selected), characters, seed=seed, is_fit=is_long_enough
    )
    scoring: dict[str, Any] = {"until_eos": until_eos, "window": window, "batch": scorer_batch}
    scoring |= {"seeds": range(mauve_seeds), "cache": cache}
    measured, baseline, settings = compare_texts(
        selected, passages, scoring_model, features, **scoring
    )
    cut = {
        "shortest": f"{min_passage(characters)} characters",
        "longest": f"{characters} characters",
    }
    settings |= {"reference": {"name": source.name, "identity": source.identity, **cut}}
    settings |= {"reference_seed": seed, "samples": about}
    metrics = {"samples": measured.as_dict(), "reference": baseline.as_dict()}
    table = tabulate_samples(measured, baseline, settings)
    warnings = warn_few_texts(measured.texts, measured.details["mauve"]["buckets"])
    return EvalResult(
        "samples",
        metrics,
        settings,
        collect_provenance(scoring_model.model.device),
        [table],
        warnings,
    )


def tabulate_samples(
    measured: SampleMetrics, baseline: SampleMetrics, settings: dict[str, Any]
) -> Table:
    """One row for each metric."""
    columns = []
    for metrics in (measured, baseline):
        gen_ppl, *others = metrics.estimates.values()
        bits = Estimate(
            *(metrics.details["gen_ppl"][f"bits_per_character{end}"] for end in ("", "_stderr"))
        )
        columns.append([gen_ppl.format(1), bits, *others])
    names = ["Gen-PPL", "bits per character", "MAUVE (95%)", "entropy (nats)"]
    names += [name.replace("_", "-") for name in list(measured.estimates)[3:]]
    note = (
        f"{measured.texts} texts each, {measured.tokens:,} tokens, truncated to the same lengths; scored by "
        f"{settings['scorer']['name']}, features of {settings['features']['name']}. Samples are good where all metrics "
        "are near those of real text: a lower Gen-PPL with less entropy is repetition. Compare only metrics of one "
        "scoring model and of equally many texts of one length."
    )
    titles = [TableColumn("metric", is_text=True), TableColumn("samples"), TableColumn("real text")]
    return Table(titles, list(zip(names, *columns, strict=True)), notes=[note])


# Generation.


def generate_samples(lm: LM, rows: Sequence[TextRow], cache: Cache) -> list[Sample]:
    """Generate the samples of one prompt; those in the cache are not generated again."""
    base = hash_settings(describe_samples(lm, rows))
    layout = rows[0].layout
    eos_id = lm.tokenizer.eos_id
    keys = [f"sample-{base}-{row.number}" for row in rows]
    missing = [number for number, key in enumerate(keys) if key not in cache]

    def generate(numbers: Sequence[int]) -> dict[str, Sample]:
        lm.fill_rows([rows[number] for number in numbers])
        batch = {}
        for number in numbers:
            ids = rows[number].ids
            tokens = [token for span in layout.spans for token in ids[span.start : span.end]]
            if layout.may_end and eos_id in tokens:
                tokens = tokens[: tokens.index(eos_id)]
            sample = {
                "number": number,
                "seed": rows[number].seed,
                "text": layout.text(ids),
            }
            batch[keys[number]] = sample | {"tokens": tokens, "nfe": rows[number].nfe}
        return batch

    own = missing[cache.rank :: cache.world_size]
    size = rows[0].settings.batch
    batches = (generate(own[first : first + size]) for first in range(0, len(own), size))
    return cache.fill(keys, batches, "generating")


def describe_samples(lm: LM, rows: Sequence[TextRow]) -> dict[str, Any]:
    """Everything that a sample follows from, except its number."""
    settings = lm.describe(rows)
    del settings["n"], settings["model"]
    return {
        **settings,
        "prompt": "".join(span.text for span in rows[0].layout.spans),
        "weights_sha256": hash_weights(lm.model),
        "tokenizer_sha256": lm.tokenizer.sha256,
        "deterministic": lm.deterministic,
    }


# Given texts.


def require_two(texts: int, remedy: str) -> None:
    """Refuse fewer than two texts."""
    if texts < 2:
        raise ValueError(f"metrics of a set need at least 2 texts, got {texts}: {remedy}")


def select_texts(
    texts: str | Path | Sequence[str], n: int | None
) -> tuple[list[str], dict[str, Any]]:
    """The first `n` of given texts or of a file (by default all), and a description of them."""
    path = Path(texts) if isinstance(texts, str | Path) else None
    every = read_texts(path) if path else list(texts)  # type: ignore[arg-type]
    require_two(
        len(every[:n]), f"in a file, {SEPARATOR.strip()} on a line of its own separates texts"
    )
    if n is not None and n > len(every):
        raise ValueError(f"n={n}, but there are {len(every)} texts: leave n out to measure all")
    about: dict[str, Any] = {"available_texts": len(every), "n": len(every[:n])}
    return every[:n], about | ({"texts": str(path), "sha256": hash_file(path)} if path else {})


def read_texts(path: Path) -> list[str]:
    """The texts of a file: `<|endoftext|>` between them, or .jsonl with a "text" on each line."""
    if path.suffix == ".jsonl":
        try:
            return [text for text, _ in open_source(path).read()]
        except ValueError as error:
            raise ValueError(
                f'{path} is not a list of texts ({error}): write {{"text": "…"}} on each line'
            ) from error
    return path.read_bytes().decode("utf-8").removesuffix("\n").removesuffix("\r").split(SEPARATOR)


# Passages of real text.


def cut_passages(
    documents: Iterable[str],
    count: int,
    characters: int,
    *,
    seed: int = 0,
    is_fit: Callable[[str], bool] = bool,
) -> list[str]:
    """Draw passages of at most so many characters that begin at a paragraph (or line), without overlap."""
    shortest = min_passage(characters)
    every = [
        passage
        for each in documents
        for passage in split_document(each, characters)
        if len(passage) >= shortest
    ]
    order = np.random.default_rng(seed).permutation(len(every))
    chosen = list(islice((every[number] for number in order if is_fit(every[number])), count))
    if len(chosen) < count:
        problem = f"the reference has {len(chosen)} passages of {shortest} to {characters:,} characters, but {count}"
        remedy = "give more reference text, or measure fewer or shorter texts"
        raise ValueError(f"{problem} are needed, two for every text: {remedy}")
    return chosen


def min_passage(characters: int) -> int:
    """The smallest number of characters of a passage that may have at most `characters`."""
    return min(MIN_PASSAGE, characters // 4)


def split_document(document: str, characters: int) -> Iterator[str]:
    """The passages of one document."""
    if len(document) <= characters:
        yield document.strip()
        return
    # Lines of a text that is wrapped at a width are not paragraphs: most of them begin inside a sentence.
    begins, at = PARAGRAPH if re.search(r"\n[ \t]*\n", document.strip()) else LINE, 0
    while (match := begins.search(document, at)) and match.end() + characters <= len(document):
        at = match.end() + characters
        yield document[match.end() : at].rstrip()
