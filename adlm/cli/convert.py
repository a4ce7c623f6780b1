"""`adlm convert` and `adlm export`: models from and to the formats of other libraries."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from adlm.cli import options
from adlm.cli.output import json_stdout, print_json, status_console

SOURCE_HELP = "Lightning .ckpt, folder or Hub name (OWNER/NAME) of the lineage; with --to lightning a model of ours."
TO_HELP = "Write a Lightning checkpoint. [default: a model folder]"
EMA_HELP = "Averaged or raw weights. [default: averaged if there are any]"
TOKENIZER_HELP = "Tokenizer the model was trained with. [default: by its name or vocabulary]"


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    out: Annotated[
        Path,
        typer.Option(help="New folder for the model; with --to lightning a .ckpt or its folder."),
    ],
    to: Annotated[Literal["lightning"] | None, typer.Option(help=TO_HELP)] = None,
    is_ema: Annotated[bool | None, typer.Option("--ema/--raw", help=EMA_HELP)] = None,
    tokenizer: Annotated[str | None, typer.Option(help=TOKENIZER_HELP)] = None,
    objective: options.Objective = None,
    is_json: options.Json = False,
) -> None:
    """Convert a checkpoint of ADLM, MDLM, ReMDM or AR to a model folder, or a model to a Lightning checkpoint.

    Files are read without running code of theirs. Every tensor must be used, or the error lists the others.
    """
    path = out / "model.ckpt" if to and out.suffix != ".ckpt" else out
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path} already exists: give another --out, or delete it")
    with json_stdout(is_json):
        from adlm.convert import is_lineage, load_lineage, write_lightning
        from adlm.models.costs import count_parameters
        from adlm.models.folder import (
            export_model,
            load_model,
            read_config_json,
            require_transformer,
        )
        from adlm.text.lm import find_model

        found = find_model(source)
        weights = None if is_ema is None else "ema" if is_ema else "raw"
        if is_lineage(found):
            loaded, weights = load_lineage(found, weights=weights, tokenizer=tokenizer)
        elif to is None or weights or tokenizer:
            raise ValueError(
                f"{source} is a model folder of adlm already: the only conversion of it is --to lightning"
            )
        else:
            require_transformer(read_config_json(found).network, "a Lightning checkpoint")
            loaded = load_model(found, objective=objective)
            weights = "for inference"
        written = (
            write_lightning(loaded, path) if to else export_model(loaded, path, is_quantized=False)
        )
        if to and loaded.tokenizer is not None:
            status_console().print(
                "warning: a .ckpt has no tokenizer; give --tokenizer when you convert it back"
            )
    config = loaded.model.config
    summary: dict[str, object] = {
        "out": str(written),
        "method": loaded.method,
        "weights": weights,
        "step": loaded.step,
    }
    summary |= {
        "parameters": count_parameters(config),
        "layers": [config.anchor_layers, config.denoiser_layers],
    }
    summary |= {
        name: getattr(config, name)
        for name in ("dim", "heads", "length", "vocab_size", "time_conditioning")
    }
    summary["tokenizer"] = None if loaded.tokenizer is None else loaded.tokenizer.name
    if is_json:
        print_json(summary)
        return
    shown = ", ".join(f"{name} {value}" for name, value in summary.items() if name != "out")
    status_console().print(f"{path}: {shown}", markup=False, soft_wrap=True)


def export(
    out: Annotated[Path, typer.Option(help="Output folder; must not exist or be empty.")],
    model: options.ModelArgument = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the weights: float32 or bfloat16.")
    ] = "float32",
    report: Annotated[
        Path | None, typer.Option(help="Folder of a report with metrics for the card.")
    ] = None,
    push_to: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to the Hub.")
    ] = None,
    is_public: Annotated[
        bool, typer.Option("--public", help="Make a new repository on the Hub public.")
    ] = False,
    objective: options.Objective = None,
    is_json: options.Json = False,
) -> None:
    """Export a model to a folder that transformers, diffusers (masked models) and adlm load."""
    with json_stdout(is_json):
        from adlm.bundled import DEFAULT
        from adlm.convert import is_lineage
        from adlm.errors import import_extra
        from adlm.models.folder import read_config_json, require_transformer
        from adlm.text.lm import find_model, load

        found = find_model(model or DEFAULT)
        if not is_lineage(found):
            require_transformer(read_config_json(found).network, "adlm export")
        huggingface = import_extra(
            "adlm.interop.huggingface", "adlm export needs transformers", "hf"
        )
        folder = huggingface.export(
            load(model or DEFAULT, device="cpu", objective=objective),
            out,
            dtype=dtype,
            report=report,
        )
        address = (
            None
            if push_to is None
            else huggingface.push_to_hub(folder, push_to, is_private=not is_public)
        )
    if is_json:
        print_json({"folder": str(folder), "dtype": dtype, "address": address})
        return
    typer.echo(
        f"{folder}: load it with transformers or diffusers (trust_remote_code=True) or adlm.load"
    )
    if address is not None:
        typer.echo(address)
