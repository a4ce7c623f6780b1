"""Scoring models with random weights and real ones by name, held-out prose, and the pixels of a plot."""

import gzip
import importlib.util
import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adlm.evaluate.scorer import ScoringModel, load_scorer
from tests.training.runs import shelf

PROSE = Path(__file__).parent / "fixtures" / "prose.txt.gz"
MODULES = {"transformers": "eval", "gguf": "eval", "accelerate": "eval", "mauve": "mauve"}
MODULES |= {"tensorboard": "track", "wandb": "track", "trackio": "track"}
END = "<|endoftext|>"
with_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None and not os.environ.get("ADLM_ALL"),
    reason="needs matplotlib: the extra eval",
)


def needs(*names: str) -> None:
    """Skip a test whose extra or scoring model is not installed; with ADLM_ALL=1 it fails by itself."""
    if os.environ.get("ADLM_ALL") == "1":
        return
    for name in names:
        if name in MODULES and importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: the extra {MODULES[name]}")
        if name not in MODULES:
            try:
                distribution(name)
            except PackageNotFoundError:
                pytest.skip(f"needs {name}: pip install --no-deps {name}")


def documents() -> list[str]:
    return (
        gzip.decompress(PROSE.read_bytes()).decode("utf-8").removesuffix("\n").split(f"\n{END}\n")
    )


@cache
def causal_folder(bos: bool = True, positions: int = 64) -> Path:
    """A GPT-2 of two layers with a byte-level vocabulary of 400."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = shelf() / f"gpt2-{bos}-{positions}"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents(), vocab_size=400, special_tokens=[END])
    names = {"eos_token": END} | ({"bos_token": END} if bos else {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, model_max_length=positions, **names
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=400, n_positions=positions, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@cache
def encoder_folder() -> Path:
    """A BERT of two layers that reads 48 tokens."""
    from tokenizers import BertWordPieceTokenizer, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = shelf() / "bert"
    words = BertWordPieceTokenizer()
    words.train_from_iterator(documents(), vocab_size=600)
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, model_max_length=48, **roles
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=48, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@cache
def causal(bos: bool = True, positions: int = 64) -> ScoringModel:
    needs("transformers")
    return load_scorer(causal_folder(bos, positions))


@cache
def encoder() -> ScoringModel:
    needs("transformers")
    return load_scorer(encoder_folder())


@cache
def real(name: str) -> ScoringModel:
    """An installed scoring model, which loads without a word."""
    needs("transformers", "gguf", "accelerate", name)
    with tempfile.TemporaryFile() as printed:
        ends = [os.dup(end) for end in (1, 2)]
        try:
            for end in (1, 2):
                os.dup2(printed.fileno(), end)
            scorer = load_scorer(name)
        finally:
            for end, kept in zip((1, 2), ends, strict=True):
                os.dup2(kept, end)
                os.close(kept)
        printed.seek(0)
        assert printed.read() == b""
    return scorer


def numbers(result: Any) -> dict[str, float]:
    """Every number of every metric of a result of `samples`, of samples and of real text."""
    return {
        f"{side} {name} {key}": value
        for side in ("samples", "reference")
        for name, metric in result[side].items()
        for key, value in (metric.items() if isinstance(metric, dict) else [("", metric)])
        if isinstance(value, int | float)
    }


def pixels(path: Path) -> NDArray[np.float64]:
    """Grey levels (height, width), 0 black to 1 white."""
    from matplotlib.image import imread

    return np.asarray(imread(path)[..., :3].mean(-1), dtype=np.float64)
