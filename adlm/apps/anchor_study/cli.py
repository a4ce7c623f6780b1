"""`adlm eval anchors`: study the anchor network of models."""

from typing import Annotated

import typer
from typer import Option

from adlm.cli import options, output
from adlm.cli.eval import (
    JUDGE_HELP,
    DataOption,
    EvalOptions,
    ModelArguments,
    OutFolder,
    RowBatch,
    RowsOption,
    TextLength,
    run_eval,
)

app = typer.Typer(cls=output.Commands, add_completion=False, rich_markup_mode="markdown")


@app.command()
@options.add_options()
def anchors(
    models: ModelArguments = None,
    data: DataOption = None,
    rows: RowsOption = None,
    limit: Annotated[int | None, Option(min=2, help="Use only the first rows.")] = 64,
    draws: Annotated[int, Option(min=1, help="Noise samples per row.")] = 4,
    max_count: Annotated[
        int, Option(min=1, help="Anchors occur at most this often in their row.")
    ] = 5,
    perturb: Annotated[
        str, Option(help="Noise on anchor features, relative to their norm.")
    ] = "0.1,0.3,1.0",
    stale: Annotated[
        str, Option(help="Delays of anchor features in masking levels (sampling: steps).")
    ] = "1,2,4,8",
    samples: Annotated[
        int, Option(min=0, help="Texts for every perturbation and order of reveals.")
    ] = 0,
    scorer: Annotated[
        str | None, Option("--judge", help=f"{JUDGE_HELP} Without it, there is no Gen-PPL.")
    ] = None,
    sampler: Annotated[str, Option(help="Sampler of the texts.")] = "ancestral",
    steps: Annotated[int, Option(min=1, help="Steps of the sampler.")] = 32,
    length: TextLength = None,
    seed: options.Seed = 0,
    batch: RowBatch = 16,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Measure an anchor network: its predictions, the loss with perturbed anchor features, the unmasking order.

    Three models or more, such as RUN/checkpoints/step-*: correlate anchor accuracy with loss and sample quality. For
    that alone, pass --perturb "" --stale "".
    """
    run_eval(
        "anchors",
        own,
        locals(),
        module="adlm.apps.anchor_study.study",
        perturb=output.parse_list("--perturb", perturb, float),
        stale=output.parse_list("--stale", stale, int),
    )
