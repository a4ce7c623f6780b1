"""What a text on its way looks like, as plain data: terminal, page and picture draw the same stills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HIDDEN, REMASKED, REVEALED, VISIBLE, GIVEN = STATES = ("hidden", "remasked", "revealed", "visible", "given")


@dataclass(frozen=True)
class TokenState:
    """One position. `remasked` is hidden, and was visible a step ago; `revealed` is visible since this step."""

    text: str  # what the token adds to the text: nothing while hidden; a character of several tokens is its last one's
    state: str
    guesses: tuple[tuple[str, float], ...] = ()  # the anchor network's, likeliest first (one stage: the network's)
    is_anchor: bool = False  # rare in the text as it is guessed to be: a word that carries it

    @property
    def is_masked(self) -> bool:
        return self.state in (HIDDEN, REMASKED)


@dataclass(frozen=True)
class TrajectoryFrame:
    """One text after one step; the cells' texts together are the text."""

    step: int  # 0: before the first
    nfe: int  # network evaluations so far
    cells: tuple[TokenState, ...]

    @property
    def text(self) -> str:
        return "".join(cell.text for cell in self.cells)


@dataclass(frozen=True)
class Trajectory:
    """One text from its masks to its end."""

    title: str
    text: str  # the sample; the last still's text
    stills: tuple[TrajectoryFrame, ...]
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    guesser: str = "anchor network"  # whose guesses the cells hold

    @property
    def nfe(self) -> int:
        return self.stills[-1].nfe
