"""Recordings as one HTML file that plays them: no network, nothing beside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from adlm.trajectory import STATES, TokenState, Trajectory

TITLE = "From masks to text"


def write_player(recordings: Sequence[Trajectory], path: Path, *, title: str = TITLE) -> Path:
    """Write the page that plays the recordings, side by side where there are several, and return where it is."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file, such as {path / 'sample.html'}")
    page = player_html(recordings, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def player_html(recordings: Sequence[Trajectory], title: str = TITLE) -> str:
    """The page: style, script and data in one text, under a policy that lets it run its own script and load nothing."""
    if not recordings:
        raise ValueError("there are no recordings: give at least one")
    style, script = asset("player.css"), asset("player.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        # The parser reads &#…; in a title; a lone surrogate, which no file can hold, becomes a replacement character.
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "policy": policy,
        "style": style,
        "script": script,
        "data": as_json({"title": title, "states": STATES, "recordings": [encoded(each) for each in recordings]}),
    }
    # One pass: what is put in is never searched for places to put something in.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("player.html"))


def encoded(recording: Trajectory) -> dict[str, Any]:
    """A recording as numbers and one list of strings; a still holds the cells that differ from the still before.

    A still is [step, nfe, cells]; cells are flat: for each, its distance from the cell named before it (the first:
    from -1), 2 · state + is_anchor, its text, how many guesses, and for each guess its string and its thousandths.
    """
    check(recording)
    numbers: dict[str, int] = {}

    def number(string: str) -> int:
        return numbers.setdefault(string, len(numbers))

    stills: list[list[Any]] = []
    before: tuple[TokenState | None, ...] = (None,) * len(recording.stills[0].cells)
    for still in recording.stills:
        flat: list[int] = []
        place = -1
        for at, (cell, old) in enumerate(zip(still.cells, before, strict=True)):
            if cell == old:
                continue
            flat += [at - place, 2 * STATES.index(cell.state) + cell.is_anchor, number(cell.text), len(cell.guesses)]
            flat += [value for guess, p in cell.guesses for value in (number(guess), round(1000 * p))]
            place = at
        stills.append([still.step, still.nfe, flat])
        before = still.cells
    return {
        "title": recording.title,
        "seconds": round(recording.seconds, 3),
        "guesser": recording.guesser,
        "settings": [[str(name), shown(value)] for name, value in recording.settings.items()],
        "cells": len(recording.stills[0].cells),
        "strings": list(numbers),
        "stills": stills,
    }


def check(recording: Trajectory) -> None:
    """Refuse what could not be played, or would be played as something else."""
    name = f"recording {recording.title!r}"
    if not recording.stills:
        raise ValueError(f"{name} has no stills: record a text with at least one, the text before the first step")
    if recording.text != recording.stills[-1].text:
        raise ValueError(
            f"{name}: its text {excerpt(recording.text)} differs from its last still, "
            f"{excerpt(recording.stills[-1].text)}: the last still must be the finished text"
        )
    if not (math.isfinite(recording.seconds) and recording.seconds >= 0):
        raise ValueError(f"{name} took {recording.seconds} seconds: expected a finite number, 0 or more")
    length = len(recording.stills[0].cells)
    for still in recording.stills:
        if len(still.cells) != length:
            raise ValueError(
                f"{name}: step {still.step} has {len(still.cells)} cells and the first still {length}: "
                "every still must hold every position"
            )
        for at, cell in enumerate(still.cells):
            where = f"{name}: step {still.step}, position {at}"
            if cell.state not in STATES:
                raise ValueError(f"{where}: state {cell.state!r} is not one of {', '.join(STATES)}")
            for guess, p in cell.guesses:
                if not 0 <= p < 1.0005:  # a sum in float32 may pass 1 by a little; NaN fails as well
                    raise ValueError(f"{where}: guess {guess!r} has probability {p}: expected one from 0 to 1")


def excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}")


def shown(value: object) -> str:
    """A setting as a reader sees it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_json(value: object) -> str:
    """JSON in ASCII that a script element can hold: no text in it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def asset(name: str) -> str:
    return files("adlm.view").joinpath(name).read_text("utf-8")


def digest(content: str) -> str:
    """What a content security policy calls this style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode("ascii")
