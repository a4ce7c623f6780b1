"""`adlm export`: write a model as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.output import json_stdout, print_json


def export(
    out: Annotated[Path, typer.Option(help="Output folder; must not exist or be empty.")],
    model: options.ModelArgument = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights: float32 or bfloat16.")] = "float32",
    report: Annotated[Path | None, typer.Option(help="Folder of a report with metrics for the card.")] = None,
    push_to: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the Hub.")] = None,
    is_public: Annotated[bool, typer.Option("--public", help="Make a new repository on the Hub public.")] = False,
    is_json: options.Json = False,
) -> None:
    """Export a model to a folder that transformers, diffusers (masked models) and adlm load."""
    with json_stdout(is_json):
        from adlm.bundled import DEFAULT
        from adlm.remedies import import_extra
        from adlm.text.lm import load

        huggingface = import_extra("adlm.interop.huggingface", "adlm export needs transformers", "hf")
        folder = huggingface.export(load(model or DEFAULT, device="cpu"), out, dtype=dtype, report=report)
        address = None if push_to is None else huggingface.push_to_hub(folder, push_to, is_private=not is_public)
    if is_json:
        print_json({"folder": str(folder), "dtype": dtype, "address": address})
        return
    typer.echo(f"{folder}: load it with transformers or diffusers (trust_remote_code=True) or adlm.load")
    if address is not None:
        typer.echo(address)
