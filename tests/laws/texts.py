"""The models of the fixtures, as a user loads them, and folders of their own for tests."""

from functools import cache
from pathlib import Path

import adlm
from adlm import LM

FIXTURES = Path(__file__).parent / "fixtures"
METHODS = ("mdlm", "adlm", "ar", "a2r", "sedd")
MASKED = ("mdlm", "adlm", "sedd", "timed")
CAUSAL = ("ar", "a2r")


def folder(name: str) -> Path:
    """Return the folder of a model: of a method's, or `timed`."""
    return FIXTURES / f"model-{name}"


@cache
def model(name: str) -> LM:
    """Load a model of the fixtures: bytes are its tokens, its rows have 64 positions.

    Texts of `mdlm` and `adlm` are whole documents, those of the others end at an end token.
    """
    return adlm.load(folder(name), device="cpu")
