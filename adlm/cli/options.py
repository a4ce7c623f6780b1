"""Options that commands share, and their shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adlm.bundled import DEFAULT, MODELS

SAMPLING, OUTPUT = "Sampling", "Output"  # panels of the help


def complete_model(incomplete: str) -> list[str]:
    """Complete bundled models and folders."""
    parent, slash, name = incomplete.rpartition("/")
    folder = Path(parent + slash or ".").expanduser()
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = [path.name for path in paths if path.is_dir() and path.name.startswith(name)]
    visible = [each for each in folders if name.startswith(".") or not each.startswith(".")]
    return [each for each in MODELS if each.startswith(incomplete)] + [f"{parent}{slash}{each}/" for each in visible]


def complete_sampler(incomplete: str) -> list[str]:
    """Complete samplers."""
    from adlm.methods import SAMPLERS

    return [name for name in SAMPLERS if name.startswith(incomplete)]


def complete_compare(incomplete: str) -> list[str]:
    """Complete samplers and models."""
    return complete_sampler(incomplete) + complete_model(incomplete)


def complete_recipe(incomplete: str) -> list[str]:
    """Complete bundled recipes."""
    from adlm.config import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]


MODEL_HELP = f"Name of a bundled model, or folder of a run, a checkpoint or a model. [default: {DEFAULT}]"
ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, autocompletion=complete_model)]
ModelOption = Annotated[str | None, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]

Count = Annotated[int, typer.Option("--n", "--rows", min=1, help="Number of texts for each prompt or template.")]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Sampling steps. [default: 128; confidence and margin: one token per step]",
        rich_help_panel=SAMPLING,
    ),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="Sampler: remask_loop, ancestral, confidence, … [default: remask_loop; for infill: confidence]",
        autocompletion=complete_sampler,
        rich_help_panel=SAMPLING,
    ),
]
Temperature = Annotated[float, typer.Option(help="Softmax temperature; 0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Nucleus: total probability of the tokens kept.", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int | None, typer.Option(min=1, help="Number of likeliest tokens kept. [default: all]", rich_help_panel=SAMPLING)
]
Block = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per block, sampled left to right. [default: one block]", rich_help_panel=SAMPLING),
]
SamplerOptions = Annotated[
    list[str] | None,
    typer.Option("--option", help="name=value: an option of the sampler, such as eta=0.04.", rich_help_panel=SAMPLING),
]
Batch = Annotated[
    int, typer.Option(min=1, help="Texts per batch; does not change the texts.", rich_help_panel=SAMPLING)
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Make texts independent of --batch on a GPU, too.", rich_help_panel=SAMPLING),
]

Out = Annotated[
    Path | None, typer.Option(help="Write the texts to this file, separated by <|endoftext|>.", rich_help_panel=OUTPUT)
]
Html = Annotated[
    Path | None, typer.Option(help="Write a page that plays the sampling of the first text.", rich_help_panel=OUTPUT)
]
Gif = Annotated[
    Path | None, typer.Option(help="Write the sampling of the first text as a GIF.", rich_help_panel=OUTPUT)
]
Compare = Annotated[
    str | None,
    typer.Option(
        help="Second sampler or second model, run with the same seed.",
        autocompletion=complete_compare,
        rich_help_panel=OUTPUT,
    ),
]
Guesses = Annotated[
    bool, typer.Option("--guesses/--no-guesses", help="Show the likeliest hidden tokens.", rich_help_panel=OUTPUT)
]
Pause = Annotated[float, typer.Option(min=0, help="Seconds between steps on a terminal.", rich_help_panel=OUTPUT)]
