"""`adlm sample`: texts from a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.answers import read_text
from adlm.cli.errors import told
from adlm.cli.writing import Request, answer


def sample(
    model: options.ModelArgument = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the text begins with; - reads stdin. Several: n texts for each.")
    ] = None,
    n: options.Count = 1,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a text, the prompt's among them. (as many as the model takes)")
    ] = None,
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
    pause: options.Pause = 0.03,
    is_json: options.Json = False,
) -> None:
    """Write texts. On a terminal the first is shown as it appears; in a pipe there is nothing but the texts."""
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
        prompts = [read_text(each) if each == "-" else each for each in prompt or [""]]
    answer(request, prompt=prompts, length=length)
