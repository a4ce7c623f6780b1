"""Colors of plots, styles of the terminal, and colors of GIFs, which look like the player."""

from bisect import bisect_right

from rich.style import Style

from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE

# Plots: Okabe and Ito's colors, which color-blind readers can tell apart; black and yellow are left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRAY, LIGHT = "#555555", "#DDDDDD"

# Guesses are colored by their probability: a scale has one color more than there are levels.
PROBABILITY_LEVELS = (0.25, 0.5, 0.75)

# Terminal: states differ without color, too; colors of middle lightness suit dark and light backgrounds.
STATE_STYLES = {
    HIDDEN: Style(dim=True),
    REMASKED: Style(reverse=True, color="red"),
    REVEALED: Style(bold=True, color="green"),
    VISIBLE: Style(),
    GIVEN: Style(italic=True, color="color(31)"),
}
ANCHOR_STYLE = Style(underline=True)
GUESS_STYLES = tuple(Style(color=f"color({number})") for number in (245, 98, 168, 208))
BAR_DONE, BAR_REST = Style(color="color(31)"), Style(color="color(245)", dim=True)

# GIF: the colors of player.css.
PAPER, INK, QUIET = "#fbf9f4", "#23211d", "#6d675d"
BLOCK, SURE_BLOCK = "#e3ddd0", "#f2b04a"
REVEALED_GROUND, REMASKED_GROUND = "#c5e9d3", "#f8d8ca"
REVEALED_MARK, REMASKED_MARK, ANCHOR_MARK, GIVEN_INK = "#15804f", "#c2410c", "#6a4fb3", "#1d5fa8"


def mix_colors(one: str, other: str, share: float) -> str:
    """Return the color at this share of the way from one color to another."""
    pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


GUESS_BLOCKS = tuple(mix_colors(BLOCK, SURE_BLOCK, share) for share in (0.12, 0.38, 0.62, 0.88))
GUESS_INKS = tuple(mix_colors(INK, PAPER, share) for share in (0.5, 0.4, 0.28, 0.12))


def find_level(probability: float) -> int:
    """Return the index of a guess's color in a scale."""
    return bisect_right(PROBABILITY_LEVELS, probability)
