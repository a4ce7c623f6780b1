"""The look of all plots: colors, and matplotlib's settings."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colors, which people who see fewer colors tell apart; black and yellow are left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY, LIGHT = "#555555", "#DDDDDD"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "axes.grid": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.hashsalt": "adlm",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
