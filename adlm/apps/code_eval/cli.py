"""`adlm eval code`: measure Python code that models write."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from adlm.cli import options, output
from adlm.cli.eval import EvalOptions, ModelArguments, OutFolder, TextLength, run_eval
from adlm.settings import DEFAULT_TEMPERATURE, DEFAULT_TOP_P

app = typer.Typer(cls=output.Commands, add_completion=False, rich_markup_mode="markdown")
problem_option = partial(Option, rich_help_panel="Problems")


@app.command()
@options.add_options()
def code(
    models: ModelArguments = None,
    problems: Annotated[
        Path | None, problem_option(help="jsonl in HumanEval's form: measure pass@k.")
    ] = None,
    candidates: Annotated[
        Path | None, problem_option(help="jsonl of task_id and completion, without a model.")
    ] = None,
    n: Annotated[int, problem_option("--n", min=1, help="Candidates for each problem.")] = 1,
    k: Annotated[str, problem_option("--k", help="k of pass@k, separated by commas.")] = "1",
    seconds: Annotated[float, problem_option(help="Time limit of a candidate.")] = 5.0,
    memory: Annotated[int, problem_option(help="Memory limit of a candidate in MiB.")] = 512,
    workers: Annotated[int, problem_option(min=1, help="Candidates at a time.")] = 1,
    unsafe: Annotated[
        bool, problem_option("--unsafe", help="Run without a sandbox; gives no protection.")
    ] = False,
    texts: Annotated[int, Option(min=0, help="Functions to generate and parse.")] = 32,
    infills: Annotated[int, Option(min=0, help="Gaps to fill and parse.")] = 32,
    length: TextLength = None,
    write_data: Annotated[
        Path | None, Option(help="Only write the standard library for `adlm prepare`.")
    ] = None,
    sampler: options.Sampler = None,
    steps: options.Steps = None,
    temperature: options.Temperature = DEFAULT_TEMPERATURE,
    top_p: options.TopP = DEFAULT_TOP_P,
    seed: options.Seed = 0,
    batch: options.Batch = 16,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Measure Python code: the share of generated and filled-in functions that parse, or pass@k of problems.

    Candidates of --problems run in bubblewrap sandboxes.
    """
    if write_data is None:
        parameters = locals()
        del parameters["write_data"]
        return run_eval(
            "code",
            own,
            parameters,
            module="adlm.apps.code_eval.evaluation",
            has_models=candidates is None,
            k=output.parse_list("--k", k, int),
        )
    output.check_output_files({"--write-data": write_data})
    from adlm.apps.code_eval.evaluation import write_standard_library

    written = write_standard_library(write_data)
    if own.is_json:
        output.print_json({"datasets": written})
    for each in written:
        size = f"{each['files']} files, {each['bytes'] / 1e6:.1f} MB, sha256 {each['sha256']}"
        output.status_console().print(
            f"wrote {each['file']}: {size}, license {each['license']}", markup=False
        )
