"""What a run says in words: what it begins with, how it does on held-out rows, what it writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from adlm.checkpoint import restored
from adlm.config import Config
from adlm.data.batches import is_valid
from adlm.data.shards import PreparedData, Rows
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.evaluate.likelihood import unigram_nll
from adlm.generate import compile_for_sampling, generate_texts
from adlm.methods import build_sampler
from adlm.models.costs import parameter_count
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.training.distributed import DistributedContext


def opening(
    config: Config, shape: ModelConfig, data: PreparedData, world: DistributedContext, kind: str, source: Path | None
) -> str:
    """The first lines of a run."""
    rows = len(data.rows("train"))
    text = f"{config.data.stream} as it comes, rows" if config.data.stream else f"{rows:,} rows"
    where = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    many = "" if world.size == 1 else f" × {world.size} processes ({kind})"
    lines = [
        f"{config.method}, {parameter_count(shape) / 1e6:.1f}M parameters, on {where}{many}",
        f"{text} of {shape.length} tokens, vocabulary {shape.vocab_size:,}; "
        f"{config.steps:,} steps of {config.batch} rows"
        + ("" if config.data.stream else f" = {config.steps * config.batch / rows:.3g} epochs"),
    ]
    if source is not None:
        lines.append(f"going on from {source}")
    return "\n".join(lines)


def unigram_ppl(data: PreparedData, held: Rows, first: int | None) -> float:
    """The perplexity of the unigram model on the rows that validation uses."""
    counts, nats, asked = data.counts(), 0.0, 0
    for piece in torch.arange(len(held) if first is None else min(first, len(held))).split(1024):
        tokens, lengths = held.fetch(piece)
        here = tokens.numel() if lengths is None else int(lengths.sum())
        valid = None if lengths is None else is_valid(lengths, tokens.shape[1])
        nats, asked = nats + here * unigram_nll(counts, tokens, valid), asked + here
    return math.exp(nats / asked)


def validation_line(figures: Mapping[str, float], *, is_causal: bool) -> str:
    """The validation figures beside the unigram model's."""
    sign = "" if is_causal else "at most "
    return (
        f"validation perplexity {sign}{figures['val/ppl']:.2f} "
        f"({figures['val/nll']:.4f} ± {figures['val/stderr']:.4f} nats per token); "
        f"unigram model {figures['unigram/ppl']:.2f}"
    )


def sampler_of(config: Config, shape: ModelConfig) -> Plan | Order | None:
    """What the samples of a run are written with; a causal model needs nothing."""
    return None if shape.is_causal else build_sampler(config.samples.sampler, steps=config.samples.steps)


def write_samples(
    config: Config,
    shape: ModelConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    step: int,
    device: torch.device,
) -> str:
    """Write texts with the weights as they are, into the run's folder; where they are and how the first begins."""
    model = LanguageModel(shape)
    model.load_state_dict(restored(weights, model))
    asked, sampler = config.samples, sampler_of(config, shape)
    predictor = compile_for_sampling(model, device, is_compiled=False)
    how = SamplingParams(top_p=asked.top_p)
    texts = generate_texts(predictor, tokenizer, sampler, rows=asked.rows, seed=config.seed, how=how)
    path = Path(config.folder) / "samples" / f"step-{step:08d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n<|endoftext|>\n\n".join(texts) + "\n", "utf-8")
    return f"step {step:,}: {path}: {' '.join(texts[0].split())[:160]}…"
