"""Anchored diffusion language models (arXiv 2505.18456).

Public names are imported on first use, so that `adlm --help` and shell completion do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as`: type checkers take the names as public
    from adlm import evaluate as evaluate
    from adlm.config import Config as Config
    from adlm.config import load_config as load_config
    from adlm.convert import from_state_dict as from_state_dict
    from adlm.data.prepare import prepare as prepare
    from adlm.data.shards import open_data as open_data
    from adlm.diffusion.anchors import AnchorRule as AnchorRule
    from adlm.diffusion.anchors import rare_in_sequence as rare_in_sequence
    from adlm.diffusion.categorical import SamplingParams as SamplingParams
    from adlm.diffusion.masking import ForwardProcess as ForwardProcess
    from adlm.diffusion.masking import corrupt as corrupt
    from adlm.diffusion.objectives import training_loss as training_loss
    from adlm.diffusion.rng import CounterRng as CounterRng
    from adlm.diffusion.samplers import build_sampler as build_sampler
    from adlm.diffusion.sampling import Column as Column
    from adlm.diffusion.sampling import Frame as Frame
    from adlm.diffusion.sampling import Move as Move
    from adlm.diffusion.sampling import Row as Row
    from adlm.diffusion.sampling import RunningBatch as RunningBatch
    from adlm.diffusion.sampling import Sampler as Sampler
    from adlm.diffusion.sampling import View as View
    from adlm.diffusion.sampling import sample as sample
    from adlm.likelihood import estimate_nll as estimate_nll
    from adlm.models.evaluator import build_evaluator as build_evaluator
    from adlm.models.language_model import LanguageModel as LanguageModel
    from adlm.models.methods import build_config as build_config
    from adlm.settings import (
        SamplingArguments as SamplingArguments,
    )
    from adlm.settings import (
        SamplingSettings as SamplingSettings,
    )
    from adlm.text.lm import LM as LM
    from adlm.text.lm import GenerationOutput as GenerationOutput
    from adlm.text.lm import load as load
    from adlm.text.templates import Hole as Hole
    from adlm.training.train import train as train
    from adlm.view.gif import write_gif as write_gif
    from adlm.view.player import write_player as write_player
    from adlm.view.trajectory import Trajectory as Trajectory

__version__ = "0.1.0"

# Name -> the module that defines it.
_EXPORTS = {
    "LM": "adlm.text.lm",
    "AnchorRule": "adlm.diffusion.anchors",
    "Column": "adlm.diffusion.sampling",
    "Config": "adlm.config",
    "CounterRng": "adlm.diffusion.rng",
    "ForwardProcess": "adlm.diffusion.masking",
    "Frame": "adlm.diffusion.sampling",
    "GenerationOutput": "adlm.text.lm",
    "Hole": "adlm.text.templates",
    "LanguageModel": "adlm.models.language_model",
    "Move": "adlm.diffusion.sampling",
    "Row": "adlm.diffusion.sampling",
    "RunningBatch": "adlm.diffusion.sampling",
    "Sampler": "adlm.diffusion.sampling",
    "SamplingArguments": "adlm.settings",
    "SamplingParams": "adlm.diffusion.categorical",
    "SamplingSettings": "adlm.settings",
    "Trajectory": "adlm.view.trajectory",
    "View": "adlm.diffusion.sampling",
    "build_config": "adlm.models.methods",
    "build_evaluator": "adlm.models.evaluator",
    "build_sampler": "adlm.diffusion.samplers",
    "corrupt": "adlm.diffusion.masking",
    "estimate_nll": "adlm.likelihood",
    "evaluate": "adlm.evaluate",
    "from_state_dict": "adlm.convert",
    "load": "adlm.text.lm",
    "load_config": "adlm.config",
    "open_data": "adlm.data.shards",
    "prepare": "adlm.data.prepare",
    "rare_in_sequence": "adlm.diffusion.anchors",
    "sample": "adlm.diffusion.sampling",
    "train": "adlm.training.train",
    "training_loss": "adlm.diffusion.objectives",
    "write_gif": "adlm.view.gif",
    "write_player": "adlm.view.player",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'adlm' has no attribute {name!r}")
    module = import_module(_EXPORTS[name])
    return module if module.__name__ == f"adlm.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
