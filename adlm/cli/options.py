"""The options that commands share, and how the shell completes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adlm.bundled import DEFAULT, MODELS

HOW, SEE = "How it is written", "What becomes of it"


def complete_model(incomplete: str) -> list[str]:
    """Models that come with the package, and folders here."""
    before, name = incomplete.rpartition("/")[:2], incomplete.rpartition("/")[2]
    folder = Path("".join(before) or ".").expanduser()
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = ["".join(before) + path.name + "/" for path in found if path.is_dir() and path.name.startswith(name)]
    hidden = name.startswith(".")
    return [each for each in MODELS if each.startswith(incomplete)] + [
        each for each in folders if hidden or not each.rstrip("/").rpartition("/")[2].startswith(".")
    ]


def complete_sampler(incomplete: str) -> list[str]:
    """Samplers."""
    from adlm.methods import SAMPLERS

    return [name for name in SAMPLERS if name.startswith(incomplete)]


def complete_beside(incomplete: str) -> list[str]:
    """Samplers and models."""
    return complete_sampler(incomplete) + complete_model(incomplete)


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that come with the package."""
    from adlm.config import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


MODEL_HELP = f"A bundled model's name, a run's folder, or a checkpoint's. ({DEFAULT})"
ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, autocompletion=complete_model)]
ModelOption = Annotated[str | None, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same texts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Count = Annotated[int, typer.Option("--n", "--rows", min=1, help="How many texts for each prompt or template.")]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Of the sampler. (128; confidence, margin: a token a step)", rich_help_panel=HOW),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="remask_loop, ancestral, confidence, … (remask_loop; infill: confidence)",
        autocompletion=complete_sampler,
        rich_help_panel=HOW,
    ),
]
Temperature = Annotated[float, typer.Option(help="Below 1 safer, above 1 wilder; 0: likeliest.", rich_help_panel=HOW)]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest that make up this much.", rich_help_panel=HOW)]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from so many likeliest tokens.", rich_help_panel=HOW)]
Block = Annotated[
    int | None, typer.Option(min=1, help="Write so many tokens, then the next so many, …", rich_help_panel=HOW)
]
Own = Annotated[
    list[str] | None,
    typer.Option("--option", help="name=value: one of the sampler's own, such as eta=0.04.", rich_help_panel=HOW),
]
Batch = Annotated[int, typer.Option(min=1, help="Texts at a time; it changes no text.", rich_help_panel=HOW)]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="On a GPU: --batch changes no text there either.", rich_help_panel=HOW)
]

Out = Annotated[
    Path | None, typer.Option(help="Write the texts to a file, <|endoftext|> between them.", rich_help_panel=SEE)
]
Html = Annotated[Path | None, typer.Option(help="Write a page that plays the first text's way.", rich_help_panel=SEE)]
Gif = Annotated[Path | None, typer.Option(help="Write the first text's way as a picture.", rich_help_panel=SEE)]
Beside = Annotated[
    str | None,
    typer.Option(
        help="A second sampler, or a second model: its texts beside, on the same seed.",
        autocompletion=complete_beside,
        rich_help_panel=SEE,
    ),
]
Guesses = Annotated[
    bool, typer.Option("--guesses/--no-guesses", help="Show what hidden tokens are taken for.", rich_help_panel=SEE)
]
Pause = Annotated[float, typer.Option(min=0, help="Seconds between steps on a terminal.", rich_help_panel=SEE)]
