"""Options that commands share."""

from functools import partial
from typing import Annotated

import typer

from adlm.bundled import DEFAULT
from adlm.settings import DEFAULT_SAMPLER, DEFAULT_STEPS, INFILL_SAMPLER

sampling_option = partial(typer.Option, rich_help_panel="Sampling")

MODEL_HELP = f"Bundled model, folder of a run or a model, .ckpt, or OWNER/NAME on the Hub. [default: {DEFAULT}]"
ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
Device = Annotated[
    str, typer.Option(help="Device: auto (CUDA or the CPU), cpu, cuda, cuda:N or mps.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]

STEPS_HELP = (
    f"Sampling steps. [default: {DEFAULT_STEPS}; confidence and margin: one token per step]"
)
Steps = Annotated[int | None, sampling_option(min=1, help=STEPS_HELP)]
SAMPLER_HELP = (
    f"Sampler: ancestral, confidence, … [default: {DEFAULT_SAMPLER}; for infill: {INFILL_SAMPLER}]"
)
Sampler = Annotated[str | None, sampling_option(help=SAMPLER_HELP)]
Temperature = Annotated[float, sampling_option(help="Softmax temperature; 0 is greedy.")]
TopP = Annotated[float, sampling_option(help="Nucleus: total probability of the tokens kept.")]
TopK = Annotated[
    int | None, sampling_option(min=1, help="Number of likeliest tokens kept. [default: all]")
]
Block = Annotated[
    int | None, sampling_option(min=1, help="Tokens per block, left to right. [default: one block]")
]
SamplerOptions = Annotated[
    list[str] | None, sampling_option("--option", help="name=value of the sampler: eta=0.04.")
]
Batch = Annotated[int, sampling_option(min=1, help="Texts per batch; does not change the texts.")]
Deterministic = Annotated[
    bool, sampling_option("--deterministic", help="Independent of the batch on a GPU, too.")
]
