"""Writes trajectories as one self-contained HTML page that plays them."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from adlm.view.trajectory import STATES, TokenState, Trajectory

TITLE = "From masks to text"


def write_player(trajectories: Sequence[Trajectory], path: Path, *, title: str = TITLE) -> Path:
    """Write the page that plays the trajectories next to each other, and return its path."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder: give the name of a file, such as {path / 'sample.html'}"
        )
    page = render_player(trajectories, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def render_player(trajectories: Sequence[Trajectory], title: str = TITLE) -> str:
    """Render the page; its content security policy allows its own script and style, and no loading."""
    if not trajectories:
        raise ValueError("there are 0 trajectories: give at least one")
    style, script = read_asset("player.css"), read_asset("player.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash_asset(style)}'; script-src '{_hash_asset(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = {
        "title": title,
        "states": STATES,
        "trajectories": [_encode_trajectory(each) for each in trajectories],
    }
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        # The parser reads &#…; in a title; a lone surrogate, which no file can hold, becomes a replacement character.
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "policy": policy,
        "style": style,
        "script": script,
        "stage": read_asset("stage.html"),
        # ASCII in which no text can end the script element or open a comment.
        "data": encoded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    }
    # One pass: what is inserted is never searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], read_asset("player.html"))


def _encode_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Encode a trajectory as numbers and one list of strings; a frame holds the tokens that changed.

    A frame is [step, nfe, tokens]; tokens are flat: for each, its distance from the token named before it (the first:
    from -1), 2 · state + is_anchor, its text, the number of guesses, and for each guess its string and its thousandths.
    """
    numbers: dict[str, int] = {}

    def number(string: str) -> int:
        return numbers.setdefault(string, len(numbers))

    frames: list[list[Any]] = []
    before: tuple[TokenState | None, ...] = (None,) * len(trajectory.frames[0].tokens)
    for frame in trajectory.frames:
        flat: list[int] = []
        place = -1
        for at, (token, old) in enumerate(zip(frame.tokens, before, strict=True)):
            if token == old:
                continue
            flat += [
                at - place,
                2 * STATES.index(token.state) + token.is_anchor,
                number(token.text),
            ]
            flat += [
                len(token.guesses),
                *(v for guess, p in token.guesses for v in (number(guess), round(1000 * p))),
            ]
            place = at
        frames.append([frame.step, frame.nfe, flat])
        before = frame.tokens
    return {
        "title": trajectory.title,
        "seconds": round(trajectory.seconds, 3),
        "guesser": trajectory.guesser,
        "settings": [
            [
                str(name),
                value
                if isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, default=str),
            ]
            for name, value in trajectory.settings.items()
        ],
        "strings": list(numbers),
        "frames": frames,
    }


def read_asset(name: str) -> str:
    """Read a file of the page's template, style or script."""
    return files("adlm.view").joinpath(name).read_text("utf-8")


def _hash_asset(content: str) -> str:
    """Return the source expression of a style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode("ascii")
