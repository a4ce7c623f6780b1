"""The models bundled with the package."""

from pathlib import Path

MODELS = ("adlm-prose", "mdlm-prose")
DEFAULT = MODELS[0]


def find_bundled_model(name: str) -> Path:
    """Return the folder of a bundled model."""
    return Path(__file__).resolve().parent / "weights" / name
