"""`adlm eval`: parse options, call one function of adlm.evaluate, print its result."""

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

app = typer.Typer(cls=Commands, help="Evaluate models and texts.", no_args_is_help=True)

# Move your command into this file with @app.command(), then remove its line here and its import above.
app.command()(ppl)
app.command()(zeroshot)
app.command()(domains)
app.command()(samples)  # B
app.command()(frontier)  # B
app.command()(anchors)  # C
app.command()(code)  # D
app.command()(card)  # D
