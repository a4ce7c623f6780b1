"""`adlm eval`: what a model is worth, as figures that mean something."""

from __future__ import annotations

import typer

from adlm.cli.errors import Commands
from adlm.cli.evaluation.anchors import anchors
from adlm.cli.evaluation.card import card
from adlm.cli.evaluation.code import code
from adlm.cli.evaluation.domains import domains
from adlm.cli.evaluation.frontier import frontier
from adlm.cli.evaluation.ppl import ppl
from adlm.cli.evaluation.samples import samples
from adlm.cli.evaluation.zeroshot import zeroshot

app = typer.Typer(cls=Commands, help="Measure models and texts.", no_args_is_help=True)

# A command of its own file each: adlm/cli/evaluation/NAME.py holds the function NAME.
for command in (anchors, card, code, domains, frontier, ppl, samples, zeroshot):
    app.command()(command)
