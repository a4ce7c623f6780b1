"""The models bundled with the package."""

from pathlib import Path

MODELS = ("adlm-prose", "mdlm-prose")
DEFAULT = MODELS[0]


def find_bundled_model(name: str) -> Path:
    """Return the folder of a bundled model."""
    return Path(__file__).resolve().parent / "weights" / name


# Defaults of sampling. Holes are filled by confidence.
DEFAULT_SAMPLER = "remask_loop"
DEFAULT_TOP_P = 0.9
DEFAULT_TEMPERATURE = 1.0
