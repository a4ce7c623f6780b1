"""Anchored diffusion language models (arXiv 2505.18456): the public names, from the parts that define them.

A name is imported when it is first asked for, so that `adlm --help` and a shell's completion do not wait for torch.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read by type checkers, and by `parts`: the one place that says where a name comes from
    from adlm.config import Config, load_config
    from adlm.data.prepare import prepare
    from adlm.data.shards import PreparedData, open_data
    from adlm.data.tokenizers import Tokenizer, load_tokenizer
    from adlm.diffusion.anchors import anchor_weight, every_token, rare_in_corpus, rare_in_sequence
    from adlm.diffusion.categorical import SamplingParams
    from adlm.diffusion.denoise import Frame, denoise
    from adlm.diffusion.masking import NoisyBatch, corrupt, shift_tokens
    from adlm.diffusion.objectives import Loss
    from adlm.diffusion.orders import Order
    from adlm.diffusion.plans import Plan
    from adlm.diffusion.rng import CounterRng
    from adlm.diffusion.schedules import Cosine, LogLinear, NoiseSchedule
    from adlm.likelihood import NllEstimate, estimate_nll
    from adlm.generate import Predictor, compile_for_sampling, stream_tokens
    from adlm.interop.reference import from_state_dict
    from adlm.methods import build_anchor_rule, build_config, build_sampler, build_schedule, training_loss
    from adlm.models.language_model import Features, LanguageModel, ModelConfig
    from adlm.text.lm import LM, GenerationOutput, load
    from adlm.text.scoring import Score
    from adlm.text.stream import StreamStep
    from adlm.text.templates import Hole
    from adlm.training.ema import EMA
    from adlm.training.guard import Diverged, Preempted
    from adlm.training.loop import Run, train, train_steps
    from adlm.trajectory import Trajectory
    from adlm.view.gif import write_gif
    from adlm.view.player import write_player

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "LM",
    "Config",
    "Cosine",
    "CounterRng",
    "Diverged",
    "Features",
    "Frame",
    "GenerationOutput",
    "Hole",
    "LanguageModel",
    "LogLinear",
    "Loss",
    "ModelConfig",
    "NllEstimate",
    "NoiseSchedule",
    "NoisyBatch",
    "Order",
    "Plan",
    "Predictor",
    "Preempted",
    "PreparedData",
    "Run",
    "SamplingParams",
    "Score",
    "StreamStep",
    "Tokenizer",
    "Trajectory",
    "__version__",
    "anchor_weight",
    "build_anchor_rule",
    "build_config",
    "build_sampler",
    "build_schedule",
    "compile_for_sampling",
    "corrupt",
    "denoise",
    "estimate_nll",
    "every_token",
    "from_state_dict",
    "load",
    "load_config",
    "load_tokenizer",
    "open_data",
    "prepare",
    "rare_in_corpus",
    "rare_in_sequence",
    "shift_tokens",
    "stream_tokens",
    "train",
    "train_steps",
    "training_loss",
    "write_gif",
    "write_player",
]


@cache
def parts() -> dict[str, str]:
    """Public name -> the module that defines it, from the imports above."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adlm."):
            found |= {alias.name: str(node.module) for alias in node.names}
    return found


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'adlm' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(parts()[name]), name))


def __dir__() -> list[str]:
    return sorted(__all__)
