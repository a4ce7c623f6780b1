"""Validation and samples of a run on text, while it trains."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field, PositiveInt

from adlm.data.batches import is_valid
from adlm.data.shards import PreparedData, ShardedRows
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.objectives import Objective
from adlm.diffusion.plans import Plan
from adlm.diffusion.sampling import Row, Sampler, fill_rows
from adlm.distributed import DistributedContext
from adlm.likelihood import estimate_nll, unigram_nll
from adlm.models.evaluator import build_evaluator
from adlm.settings import DEFAULT_SAMPLER, DEFAULT_STEPS, DEFAULT_TOP_P, Settings, TopP
from adlm.training.distributed import ParallelModel

SEPARATOR = "\n\n<|endoftext|>\n\n"  # of samples in a file
ROWS_AT_ONCE = 1024  # whose unigram nats are computed together


class ValidSettings(Settings):
    """Validation: the NELBO of held-out rows with fixed noise, exact for causal models."""

    every: PositiveInt = 5000
    """Steps between two validations."""
    rows: Annotated[int, Field(ge=2)] | None = 1024
    """The first rows, at least 2 for a standard error; null: all."""
    batch: PositiveInt | None = None
    """Rows per forward in a process; null: micro_batch."""
    draws: PositiveInt = 1
    """Noise draws per row."""


class SampleSettings(Settings):
    """Samples written during training."""

    every: PositiveInt | None = None
    """Steps between two files of samples; null: none."""
    rows: PositiveInt = 2
    """Texts in a file."""
    sampler: str = DEFAULT_SAMPLER
    """The sampler of a masked model."""
    steps: PositiveInt = DEFAULT_STEPS
    """Sampling steps."""
    top_p: TopP = DEFAULT_TOP_P
    """Nucleus: total probability of the tokens kept."""


def validate_rows(
    parallel: ParallelModel,
    rows: ShardedRows,
    objective: Objective,
    settings: ValidSettings,
    *,
    batch: int,
    context: DistributedContext,
) -> dict[str, float]:
    """Compute the bound on held-out rows; every rank computes its share."""
    estimate = estimate_nll(
        parallel.model,
        rows,
        objective,
        batch=batch,
        draws=settings.draws,
        max_rows=settings.rows,
        evaluate=parallel.evaluate,
        ranks=context,
    )
    return {"val/nll": estimate.nll, "val/ppl": estimate.ppl, "val/stderr": estimate.stderr}


def compute_unigram_ppl(data: PreparedData, rows: ShardedRows, max_rows: int | None) -> float:
    """Compute the perplexity of the unigram model on the rows that validation uses."""
    counts = data.counts()
    nats = 0.0
    total = 0
    count_rows = len(rows) if max_rows is None else min(max_rows, len(rows))
    for numbers in torch.arange(count_rows).split(ROWS_AT_ONCE):
        tokens, lengths = rows.fetch(numbers)
        valid = None if lengths is None else is_valid(lengths, tokens.shape[1])
        count = tokens.numel() if lengths is None else int(lengths.sum())
        nats += count * unigram_nll(counts, tokens, valid)
        total += count
    return math.exp(nats / total)


def format_validation(metrics: Mapping[str, float], *, is_causal: bool) -> str:
    """Format the validation metrics and, for comparison, the unigram model's perplexity."""
    bound = "" if is_causal else "at most "
    nll = f"{metrics['val/nll']:.4f} ± {metrics['val/stderr']:.4f} nats per token"
    ppl = f"validation perplexity {bound}{metrics['val/ppl']:.2f} ({nll})"
    return f"{ppl}; unigram model {metrics['unigram/ppl']:.2f}"


def describe_bound(objective: Objective) -> str:
    """Describe what validation reports."""
    if objective.is_causal:
        return "validation is exact"
    note = f" ({objective.note})" if objective.note else ""
    return f"the bound of validation lacks {objective.missing:.2%} of log(V - 1){note}"


def sample_texts(
    model: FeatureModel,
    tokenizer: Tokenizer,
    sampler: Plan | Sampler,
    settings: SampleSettings,
    *,
    seed: int,
    device: torch.device,
) -> str:
    """Sample texts."""
    shape = model.config
    first = tokenizer.bos_id if shape.is_causal else shape.mask_id
    assert first is not None  # every row of the data begins with it
    tokens = torch.full((shape.length,), first)
    is_fixed = (torch.arange(shape.length) == 0) & shape.is_causal
    params = SamplingParams(top_p=settings.top_p)
    rows = [
        Row(tokens, sampler, is_fixed, seed=seed, number=number, sampling=params)
        for number in range(settings.rows)
    ]
    filled = fill_rows(build_evaluator(model, device, uses_graphs=False), rows)
    texts = [tokenizer.decode(row.tolist(), skip_special=True) for row in filled]
    return SEPARATOR.join(texts)
