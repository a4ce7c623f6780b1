"""`adlm reason`: train models to reason, measure their accuracy, ask them, and compare arms."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from adlm.cli import options, output
from adlm.cli.output import json_stdout, print_json, print_result, progress_bar
from adlm.cli.train import is_main_process, run_or_exit

app = typer.Typer(
    cls=output.Commands,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train models to reason, and compare ways to do it.",
    no_args_is_help=True,
)

TASKS = (
    "arithmetic",
    "graphs",
    "chains",
    "gsm8k",
    "gsm8k-equations",
    "prontoqa",
    "prosqa",
    "sudoku",
)
TASK_HELP = (
    f"Problems: {', '.join(TASKS)}; from gsm8k on with reasoning.path=FOLDER of their files."
)
ARM_HELP = (
    "How to reason: no_cot, cot, short_cot, curriculum_only, icot, pause, pause_curriculum, coconut, simcot, codi, "
    "acot, acot_feedback, acot_shuffled, acot_foreign, acot_off_path, acot_no_answer, acot_kept, acot_kept_feedback, "
    "acot_kept_foreign, pause_kept, a2r, a2r_no_anchors, a2r_random; mdlm and adlm fill holes (arithmetic, sudoku)."
)
OVERRIDES_HELP = "key=value: seed=1 steps=1000 reasoning.hops=3 reasoning.path=FOLDER …"
QUICK_HELP = "Small model, 1 to 2 hops: two minutes on two CPU cores, then test it."
DATA_HELP = (
    "Folder of published files: ProsQA for graphs, ProntoQA for chains, those of a text task."
)
TESTS_HELP = "Problems of each test set. [default: as the recipe: 4000]"
PLOT_HELP = "Draw a question of graphs, with the guesses, to this .svg or .png."


@app.command()
def train(
    task: Annotated[str, Argument(help=TASK_HELP)],
    arm: Annotated[str, Argument(help=ARM_HELP)],
    overrides: Annotated[list[str] | None, Argument(help=OVERRIDES_HELP)] = None,
    out: Annotated[
        Path | None, Option(help="Run folder. [default: TASK-ARM, with --quick TASK-ARM-quick]")
    ] = None,
    recipe: Annotated[
        str | None, Option(help="YAML file or name of a bundled recipe. [default: reason]")
    ] = None,
    quick: Annotated[bool, Option("--quick", help=QUICK_HELP)] = False,
    is_json: options.Json = False,
) -> None:
    """Train a model on a task by an arm. Running the same command again resumes a stopped run.

    Exit codes: 0 done; 75 stopped by SIGTERM or SIGUSR1 after saving, start again to resume; 2 a setting or a file is
    wrong; 1 the loss diverged.
    """
    from adlm.apps.reasoning.runs import evaluate
    from adlm.apps.reasoning.runs import train as run_training
    from adlm.apps.reasoning.verdicts import summarize_runs

    if quick and recipe is not None:
        raise ValueError(f"--quick is a recipe of its own: leave out --recipe {recipe}, or --quick")
    default = f"{task}-{arm}-quick" if quick else f"{task}-{arm}"
    name = "reason-quick" if quick else recipe or "reason"
    changes = [f"folder={default}", *(overrides or []), *([f"folder={out}"] if out else [])]
    run = run_or_exit(lambda: run_training(task, arm, name, *changes), is_json=is_json)
    if not is_main_process():
        return
    answer = asdict(run)
    if quick:
        with progress_bar() as on_progress:
            result = evaluate(run.folder, on_progress=on_progress)
        answer["tests"] = result["tests"]
        if not is_json:
            (table,) = summarize_runs({str(run.folder): result}).tables
            output.print_table(table)
            typer.echo(f"example: {next(iter(result['tests'].values()))['example']}")
    if is_json:
        print_json(answer)


@app.command("eval")
def evaluate_runs(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help="Folders that `adlm reason train` wrote.")
    ],
    data: Annotated[Path | None, Option(help=DATA_HELP)] = None,
    tests: Annotated[int | None, Option(min=1, help=TESTS_HELP)] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure the accuracy of runs on test problems, greedily decoded, and write reasoning.json into their folders.

    Generated tasks are tested at the most hops of training, one more and two more.
    """
    from adlm.apps.reasoning.runs import evaluate
    from adlm.apps.reasoning.verdicts import summarize_runs

    with json_stdout(is_json), progress_bar() as on_progress:
        results: dict[str, Any] = {}
        for run in runs:
            results[str(run)] = evaluate(
                run, data=data, tests=tests, device=device, on_progress=on_progress
            )
    print_result(summarize_runs(results), is_json=is_json)


@app.command()
def ask(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder that `adlm reason train` wrote.")],
    question: Annotated[
        str, Argument(help="A question as the task writes it: 'b = a - 9 | a = 13 + 4 ? b'.")
    ],
    plot: Annotated[Path | None, Option(help=PLOT_HELP)] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Ask a trained model: print what it writes, its guesses at labelled slots, and the answer."""
    from adlm.apps.reasoning.runs import ask as ask_run

    with json_stdout(is_json):
        reply = ask_run(run, question, device=device, plot=plot)
    if is_json:
        print_json(reply)
        return
    if reply["slots"] is not None:
        typer.echo(f"slots:  {' '.join(reply['slots'])}")
    typer.echo(f"writes: {reply['text']}")
    typer.echo(
        f"answer: {'none, a marker is missing' if reply['answer'] is None else reply['answer']}"
    )


@app.command()
def table(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...|FOLDER", help="Evaluated runs, or folders that hold them."),
    ],
    out: Annotated[
        Path | None, Option(help="Output folder for the table as Markdown and JSON, and two plots.")
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Compare arms: accuracy over seeds, tokens, sequential passes, FLOPs and parameters, and the verdicts."""
    from adlm.apps.reasoning.verdicts import tabulate

    output.check_output_folder("--out", out)
    print_result(tabulate(runs, out), is_json=is_json, out=out)
