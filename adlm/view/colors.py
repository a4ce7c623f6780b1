"""The colors of terminal and picture: one for each state, a scale for how sure a guess is."""

from __future__ import annotations

from bisect import bisect_right

from rich.style import Style

from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE

# The guess of a probability of at least …; a scale has one color more than this.
SURE = (0.25, 0.5, 0.75)

# In a terminal, states differ without color too. Colors of middle lightness: there are backgrounds of both kinds.
STYLES = {
    HIDDEN: Style(dim=True),
    REMASKED: Style(reverse=True, color="red"),
    REVEALED: Style(bold=True, color="green"),
    VISIBLE: Style(),
    GIVEN: Style(italic=True, color="color(31)"),
}
ANCHOR = Style(underline=True)
GUESSES = tuple(Style(color=f"color({number})") for number in (245, 98, 168, 208))
DONE, REST = Style(color="color(31)"), Style(color="color(245)", dim=True)  # of a bar

# A picture has the colors of the page: paper, inks, and what is behind a token.
PAPER, INK, QUIET, LINE, ACCENT = "#fbf9f4", "#23211d", "#6d675d", "#e0dacd", "#355f9e"
BLOCK, SURE_BLOCK = "#e3ddd0", "#f2b04a"
REVEALED_GROUND, REMASKED_GROUND = "#c5e9d3", "#f8d8ca"
REVEALED_MARK, REMASKED_MARK, ANCHOR_MARK, GIVEN_INK = "#15804f", "#c2410c", "#6a4fb3", "#1d5fa8"


def mix(one: str, other: str, share: float) -> str:
    """A color on the way from one to another."""
    pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


# Blocks of a hidden token by how sure its guess is, and the inks of the guesses; an anchor has a line below it.
GUESS_BLOCKS = tuple(mix(BLOCK, SURE_BLOCK, share) for share in (0.12, 0.38, 0.62, 0.88))
GUESS_INKS = tuple(mix(INK, PAPER, share) for share in (0.5, 0.4, 0.28, 0.12))


def sureness(probability: float) -> int:
    """Which color of a scale a guess of this probability has."""
    return bisect_right(SURE, probability)
