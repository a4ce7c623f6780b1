"""Numbers of the authors' implementation, as tensors."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from adlm.convert import from_state_dict
from adlm.models.language_model import LanguageModel

FOLDER = Path(__file__).parent / "golden"
MASK = 64
HEADS = 4


def arrays(name: str) -> dict[str, Tensor]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def facts(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def weights(kind: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"weights_{kind}_gpt2like.safetensors")


@lru_cache
def model(kind: str, time_conditioning: bool = False) -> LanguageModel:
    return from_state_dict(
        weights(kind), heads=HEADS, mask_id=MASK, time_conditioning=time_conditioning
    )
