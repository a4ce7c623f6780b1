"""A picture's pixels, where pictures can be drawn."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

with_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None and not os.environ.get("ADLM_ALL"),
    reason="needs matplotlib: pip install 'adlm[eval]'",
)


def pixels(path: Path) -> NDArray[np.float64]:
    """Grey levels (height, width), 0 black to 1 white."""
    from matplotlib.image import imread

    return np.asarray(imread(path)[..., :3].mean(-1), dtype=np.float64)
