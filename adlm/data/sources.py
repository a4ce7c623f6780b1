"""Where text comes from. So far: the excerpt that ships with the package."""

from __future__ import annotations

import gzip
from importlib import resources


def excerpt() -> str:
    """The opening chapters of one novel in the public domain (see excerpt.md): enough to try things on."""
    return gzip.decompress(resources.files("adlm.data").joinpath("excerpt.txt.gz").read_bytes()).decode("utf-8")
