"""`adlm infill`: holes in a text, filled."""

from __future__ import annotations

from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.answers import read_text
from adlm.cli.errors import told
from adlm.cli.writing import Request, answer


def infill(
    template: Annotated[
        list[str],
        typer.Argument(help="Text with holes: ___ of any length, ___{2} of two tokens, ___{2,8}; - reads stdin."),
    ],
    model: options.ModelOption = None,
    n: options.Count = 1,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = None,
    block: options.Block = None,
    option: options.Own = None,
    batch: options.Batch = 16,
    deterministic: options.Deterministic = False,
    device: options.Device = "auto",
    out: options.Out = None,
    html: options.Html = None,
    gif: options.Gif = None,
    beside: options.Beside = None,
    guesses: options.Guesses = True,
    pause: options.Pause = 0.1,
    is_json: options.Json = False,
) -> None:
    """Fill the holes of a text: "The ___ sat on the ___{2}." What is given stays as it is, to the byte."""
    request = Request(
        model=model,
        n=n,
        steps=steps,
        sampler=sampler,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        block=block,
        batch=batch,
        options=option,
        device=device,
        deterministic=deterministic,
        out=out,
        html=html,
        gif=gif,
        beside=beside,
        guesses=guesses,
        pause=pause,
        is_json=is_json,
    )
    with told():
        templates = [read_text(each) if each == "-" else each for each in template]
    answer(request, template=templates)
