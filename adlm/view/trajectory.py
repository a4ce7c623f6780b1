"""A text at every step of sampling, as plain data: terminal, player and GIF draw the same frames."""

from dataclasses import dataclass, field
from html import escape
from typing import Any

HIDDEN, REMASKED, REVEALED, VISIBLE, GIVEN = STATES = (
    "hidden",
    "remasked",
    "revealed",
    "visible",
    "given",
)


@dataclass(frozen=True)
class TokenState:
    """One position. `remasked` is hidden, and was visible a step ago; `revealed` is visible since this step."""

    text: str  # what the token adds to the text: nothing while hidden; a character of several tokens is its last one's
    state: str
    guesses: tuple[
        tuple[str, float], ...
    ] = ()  # of the anchor network (one stage: of the network), likeliest first
    is_anchor: bool = False  # rare in the text as it is guessed to be

    @property
    def is_masked(self) -> bool:
        return self.state in (HIDDEN, REMASKED)


@dataclass(frozen=True)
class TrajectoryFrame:
    """One text after one step."""

    step: int  # 0: before the first
    nfe: int  # network evaluations so far
    tokens: tuple[TokenState, ...]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def hidden(self) -> int:
        return sum(token.is_masked for token in self.tokens)


@dataclass(frozen=True)
class Trajectory:
    """One text from all masks to its end."""

    title: str
    frames: tuple[TrajectoryFrame, ...] = field(repr=False)
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    guesser: str = "anchor network"  # which network the tokens' guesses come from

    def __post_init__(self) -> None:
        if len(lengths := {len(frame.tokens) for frame in self.frames}) != 1:
            sizes = f"trajectory {self.title!r} has {len(self.frames)} frames of {sorted(lengths)} tokens"
            raise ValueError(f"{sizes}: record at least one frame, and every position in each")

    @property
    def text(self) -> str:
        return self.frames[-1].text

    @property
    def nfe(self) -> int:
        return self.frames[-1].nfe

    def _repr_html_(
        self,
    ) -> str:  # a notebook shows the player, in an iframe apart from its own styles and scripts
        from adlm.view.player import render_player

        page = escape(render_player([self]))
        return f'<iframe srcdoc="{page}" width="100%" height="480" style="border: 0"></iframe>'
