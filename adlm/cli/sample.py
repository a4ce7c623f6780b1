"""`adlm sample`: texts from a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.output import read_text_file
from adlm.cli.writing import Request, answer, asking


@asking
def sample(
    request: Request,
    model: options.ModelArgument = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; - reads stdin. Several: n texts for each.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a text, the prompt's among them. (as many as the model takes)")
    ] = None,
) -> None:
    """Write texts. On a terminal the first is shown as it appears; in a pipe there is nothing but the texts."""
    with report_errors():
        prompts = [read_text_file(each) if each == "-" else each for each in prompt or [""]]
    answer(model, request, prompt=prompts, length=length)
