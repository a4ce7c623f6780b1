"""Samples of a model, passages of real text, and `samples`, which measures both.

A sample follows from the settings, the seed and its number, whether one process generates it or a resumed run.
"""

import inspect
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from adlm.data.shards import hash_file, write_atomically
from adlm.data.sources import open_source
from adlm.evaluate.cache import Cache, hash_settings, lock_output, open_cache
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Column, Estimate, EvalResult, ProgressCallback, Table, ignore_progress
from adlm.evaluate.sample_metrics import MIN_TOKENS, SampleMetrics, compare_texts, warn_few_texts
from adlm.evaluate.scorer import BATCH, ScoringModel, load_scorer
from adlm.remedies import install_command
from adlm.text.generation import GenerationRequest, check_whole_numbers
from adlm.text.lm import LM, denoise_rows
from adlm.training.distributed import DistributedContext

SEPARATOR = "\n<|endoftext|>\n"  # between the texts of a file
Sample = dict[str, Any]  # number, seed, text, tokens (of the model, without BOS and what follows the end), nfe
NUM_SAMPLES = 200
MAX_CHARACTERS_PER_TOKEN = 6  # of a reference passage; real text has fewer, so passages are long enough to be truncated
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
    temperature: float = 1.0,
    top_p: float = 0.9,
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
    sampling: dict[str, Any] = {"length": length, "steps": steps, "sampler": sampler, "block": block}
    sampling |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    if (model is None) == (texts is None):
        raise ValueError("samples measures a model or texts: give one of them")
    if texts is not None:
        defaults = inspect.signature(samples).parameters
        given = sampling | {"sampler_options": sampler_options or None}
        if unused := [name for name, value in given.items() if value != defaults[name].default]:
            raise ValueError(f"texts are given, but {', '.join(unused)} set how to generate: leave them out")
    check_whole_numbers(1, mauve_seeds=mauve_seeds)
    if find_spec("mauve") is None:
        raise ImportError(f"MAUVE, a metric of samples, needs mauve-text: {install_command('mauve')}")
    # Wrong names are refused before anything is generated.
    source, cache = open_source(reference), open_cache(out, context, is_shared=True)
    device = model.device if model is not None else context.device if context else "cpu"
    scoring_model = load_scorer(scorer, device=device)
    scoring_model.require_causal()
    features = scoring_model if features is None or features == scorer else load_scorer(features, device=device)
    if model is not None:
        request = model.build_request(n=n or NUM_SAMPLES, seed=seed, batch=batch, **sampling, **(sampler_options or {}))
        require_two(request.config.n, "generate a hundred or more")
        generated = generate_samples(model, request, cache=cache, context=context, on_progress=on_progress)
        if out is not None and (context is None or context.is_main):
            lines = [json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in generated]
            write_atomically(Path(out) / "samples.jsonl", b"".join(lines))
        selected = [each["text"] for each in generated]
        about = {"model": model.name, "n": request.config.n, **describe_samples(model, request)}
        about["nfe"] = sum(each["nfe"] for each in generated) / len(generated)
    else:
        assert texts is not None
        selected, about = select_texts(texts, n)
    characters = MAX_CHARACTERS_PER_TOKEN * max([1, *map(len, scoring_model.encode(selected))])

    def is_long_enough(passage: str) -> bool:
        return len(scoring_model.encode([passage])[0]) >= MIN_TOKENS

    documents = (text for text, _ in source.read())
    passages = cut_passages(documents, 2 * len(selected), characters, seed=seed, is_fit=is_long_enough)
    scoring: dict[str, Any] = {"until_eos": until_eos, "window": window, "batch": scorer_batch}
    scoring |= {"seeds": range(mauve_seeds), "cache": cache, "context": context, "on_progress": on_progress}
    measured, baseline, settings = compare_texts(selected, passages, scoring_model, features, **scoring)
    cut = {"shortest": f"{min_passage(characters)} characters", "longest": f"{characters} characters"}
    settings |= {"reference": {"name": source.name, "identity": source.identity, **cut}}
    settings |= {"reference_seed": seed, "samples": about}
    metrics = {"samples": measured.as_dict(), "reference": baseline.as_dict()}
    table = tabulate_samples(measured, baseline, settings)
    warnings = warn_few_texts(measured.texts, measured.details["mauve"]["buckets"])
    return EvalResult("samples", metrics, settings, collect_provenance(scoring_model.model.device), [table], warnings)


def tabulate_samples(measured: SampleMetrics, baseline: SampleMetrics, settings: dict[str, Any]) -> Table:
    """One row for each metric."""
    columns = []
    for metrics in (measured, baseline):
        gen_ppl, *others = metrics.estimates.values()
        bits = Estimate(*(metrics.details["gen_ppl"][f"bits_per_character{end}"] for end in ("", "_stderr")))
        columns.append([gen_ppl.format(1), bits, *others])
    names = ["Gen-PPL", "bits per character", "MAUVE (95%)", "entropy (nats)"]
    names += [name.replace("_", "-") for name in list(measured.estimates)[3:]]
    note = (
        f"{measured.texts} texts each, {measured.tokens:,} tokens, truncated to the same lengths; scored by "
        f"{settings['scorer']['name']}, features of {settings['features']['name']}. Samples are good where all metrics "
        "are near those of real text: a lower Gen-PPL with less entropy is repetition. Compare only metrics of one "
        "scoring model and of equally many texts of one length."
    )
    titles = [Column("metric", is_text=True), Column("samples"), Column("real text")]
    return Table(titles, list(zip(names, *columns, strict=True)), notes=[note])


# Generation.


def generate_samples(
    lm: LM,
    request: GenerationRequest,
    *,
    cache: Cache | None = None,
    context: DistributedContext | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> list[Sample]:
    """Generate the samples of a request with one prompt; those in the cache are not generated again."""
    cache, (rank, world_size) = cache or Cache(), (context.rank, context.world_size) if context else (0, 1)
    base, (layout,), eos_id = hash_settings(describe_samples(lm, request)), request.layouts, lm.tokenizer.eos_id
    keys = [f"sample-{base}-{number}" for number in range(request.config.n)]
    missing = [number for number, key in enumerate(keys) if key not in cache]

    def generate(numbers: Sequence[int]) -> dict[str, Sample]:
        (frame,) = deque(denoise_rows(lm.predictor, request, [(layout, number) for number in numbers]), maxlen=1)
        batch = {}
        for number, ids, nfe in zip(numbers, frame.tokens.tolist(), frame.nfe.tolist(), strict=True):
            tokens = [token for span in layout.spans for token in ids[span.start : span.end]]
            if layout.may_end and eos_id in tokens:
                tokens = tokens[: tokens.index(eos_id)]
            sample = {"number": number, "seed": request.config.seed, "text": layout.text(ids[: len(layout)])}
            batch[keys[number]] = sample | {"tokens": tokens, "nfe": nfe}
        return batch

    own, size = missing[rank::world_size], request.config.batch
    batches = (generate(own[first : first + size]) for first in range(0, len(own), size))
    return cache.fill(keys, batches, "generating", on_progress, context)


def describe_samples(lm: LM, request: GenerationRequest) -> dict[str, Any]:
    """Everything that a sample follows from, except its number."""
    settings = {name: value for name, value in request.settings.items() if name not in ("n", "model")}
    settings |= {"prompt": "".join(span.text for span in request.layouts[0].spans)}
    settings |= {"weights_sha256": hash_weights(lm.model), "tokenizer_sha256": lm.tokenizer.sha256}
    return settings | {"deterministic": lm.deterministic}


# Given texts.


def require_two(texts: int, remedy: str) -> None:
    """Refuse fewer than two texts."""
    if texts < 2:
        raise ValueError(f"metrics of a set need at least 2 texts, got {texts}: {remedy}")


def select_texts(texts: str | Path | Sequence[str], n: int | None) -> tuple[list[str], dict[str, Any]]:
    """The first `n` of given texts or of a file (by default all), and a description of them."""
    path = Path(texts) if isinstance(texts, str | Path) else None
    every = read_texts(path) if path else list(texts)  # type: ignore[arg-type]
    require_two(len(every), f"in a file, {SEPARATOR.strip()} on a line of its own separates texts")
    if n is not None and n > len(every):
        raise ValueError(f"n={n}, but there are {len(every)} texts: leave n out to measure all")
    about: dict[str, Any] = {"available_texts": len(every), "n": n or len(every)}
    return every[:n], about | ({"texts": str(path), "sha256": hash_file(path)} if path else {})


def read_texts(path: Path) -> list[str]:
    """The texts of a file: `<|endoftext|>` between them, or .jsonl with a "text" on each line."""
    if path.suffix == ".jsonl":
        try:
            return [text for text, _ in open_source(path).read()]
        except ValueError as error:
            raise ValueError(f'{path} is not a list of texts ({error}): write {{"text": "…"}} on each line') from error
    return path.read_bytes().decode("utf-8").removesuffix("\n").removesuffix("\r").split(SEPARATOR)


# Passages of real text.


def cut_passages(
    documents: Iterable[str],
    count: int,
    characters: int,
    *,
    seed: int = 0,
    is_fit: Callable[[str], bool] = lambda passage: True,
) -> list[str]:
    """Draw passages of at most so many characters from documents, without overlap.

    A passage begins at a paragraph (after a blank line; in a document without any, at a line); a shorter document is
    one passage if it has `min_passage` characters. The end of a document that is shorter than a passage is left out,
    and so are passages that are not `is_fit`.
    """
    shortest = min_passage(characters)
    every = [passage for each in documents for passage in split_document(each, characters) if len(passage) >= shortest]
    order = np.random.default_rng(seed).permutation(len(every))
    chosen = list(islice((every[number] for number in order if is_fit(every[number])), count))
    if len(chosen) < count:
        raise ValueError(
            f"the reference has {len(chosen)} passages of {shortest} to {characters:,} characters, but {count} are "
            "needed, two for every text: give more reference text, or measure fewer or shorter texts"
        )
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
