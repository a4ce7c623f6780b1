"""Numbers of the authors' implementation, as tensors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from adlm import LanguageModel
from tests.laws import adapter

FOLDER = Path(__file__).resolve().parents[1] / "golden"
MASK = 64


def arrays(name: str) -> dict[str, Tensor]:
    """Return the arrays of a golden file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def facts(name: str) -> dict[str, Any]:
    """Return a golden file of JSON."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


@cache
def model(kind: str, time_conditioning: bool = False) -> LanguageModel:
    """Return the authors' weights in our model."""
    state = load_file(FOLDER / f"weights_{kind}_gpt2like.safetensors")
    return adapter.load_author_model(
        state, heads=4, mask_id=MASK, time_conditioning=time_conditioning
    )
