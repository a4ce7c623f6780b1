"""Training, validation and test: which documents, and which files of a folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "heldout": "test",
}
SLICE = re.compile(r"([\w.-]+)(?:\[(-?\d+)?:(-?\d+)?\])?")


@dataclass(frozen=True)
class Split:
    """A split's name, and which of its documents: as in a Python slice."""

    base: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> Split:
        match = SLICE.fullmatch(text)
        if not match:
            raise ValueError(f"a split is a name, perhaps with a slice of documents (train[:-1000]), got {text!r}")
        return cls(match[1], *(int(bound) if bound else None for bound in match.groups()[1:]))

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """First document, and the one after the last (None: all); documents are counted only if need be."""
        ends = (self.start or 0, self.stop)
        if all(end is None or end >= 0 for end in ends):
            return ends
        n = count()
        if any(end is not None and end < -n for end in ends):
            least = max(-(end or 0) for end in ends)
            raise ValueError(f"{self} takes at least {least:,} documents, and there are {n:,}: give a smaller slice")
        start, stop = (end + n if end is not None and end < 0 else end for end in ends)
        assert start is not None
        return start, stop

    def __str__(self) -> str:
        start, stop = ("" if bound is None else str(bound) for bound in (self.start, self.stop))
        return self.base if self.is_whole else f"{self.base}[{start}:{stop}]"


def split_in(name: str) -> str | None:
    """The split that a file's name, or else the nearest folder's, speaks of."""
    for part in reversed(name.split("/")):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def of_split(files: list[tuple[str, Path]], split: str, root: Path) -> list[tuple[str, Path]]:
    """All files, if none is named after a split; else those of the split. Held-out text must not slip into training."""
    spoken = {name: split_in(name) for name, _ in files}
    if split == "all" or not any(spoken.values()):
        return files
    if silent := [name for name, said in spoken.items() if said is None]:
        said_so = [name for name, said in spoken.items() if said]
        raise ValueError(
            f"in {root}, some files are named after a split ({', '.join(said_so[:5])}) and some are not "
            f"({', '.join(silent[:5])}): move or rename them, or take every file with split='all'"
        )
    wanted = SPLIT_WORDS.get(split, split)
    if chosen := [(name, path) for name, path in files if spoken[name] == wanted]:
        return chosen
    there = ", ".join(sorted({said for said in spoken.values() if said}))
    raise ValueError(f"{root} has no file of the split {split!r}; it has {there}: ask for one, or give a file")
