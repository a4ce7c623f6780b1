"""`adlm infill`: holes in a text, filled."""

from __future__ import annotations

from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import read_text_file
from adlm.cli.writing import Request, answer, asking


@asking
def infill(
    request: Request,
    template: Annotated[
        list[str],
        typer.Argument(help="Text with holes: ___ of any length, ___{2} of two tokens, ___{2,8}; - reads stdin."),
    ],
    model: options.ModelOption = None,
) -> None:
    """Fill the holes of a text: "The ___ sat on the ___{2}." What is given stays as it is, to the byte."""
    with report_errors():
        templates = [read_text_file(each) if each == "-" else each for each in template]
    answer(model, request, template=templates)
