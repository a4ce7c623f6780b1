"""`adlm experiment`: run the arms of an experiment, or check stored results."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.output import json_stdout, print_json, print_table, status_console

OUT_HELP = "Folder of results.json, results.md and plots. [default: FILE without .yaml]"
MINUTES_HELP = "Time limit: a run that cannot end in it is not started. [default: none]"


def experiment(
    files: Annotated[list[Path], typer.Argument(help="A YAML file; with --check, results and claims (.json).")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value, such as corpora.prose=DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of the run folders. [default: runs/NAME]")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes per GPU, or on the CPU. [default: FILE's]")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help=MINUTES_HELP)] = None,
    is_interrupting: Annotated[bool, typer.Option("--interrupt", help="Start it; the next call resumes it.")] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Print the runs and the estimated minutes.")] = False,
    is_check: Annotated[bool, typer.Option("--check", help="Recompute stored numbers and verdicts.")] = False,
    is_json: options.Json = False,
) -> None:
    """Train arms × corpora × seeds in parallel and compare them in pairs. Running the same command again resumes.

    Exit codes: 0 done, or stopped in time; 1 a run failed, or a checked value differs; 2 a file is wrong.
    """
    from adlm import experiment as module
    from adlm.evaluate.paired import write_report

    log = partial(status_console().print, markup=False)
    if is_check:
        checked = {file: module.check_file(file) for file in files}
        for file, (count, problems) in checked.items():
            for line in [*problems, f"{count} values, {len(problems)} differ"]:
                log(f"{file}: {line}")
        raise typer.Exit(any(problems for _, problems in checked.values()))
    if len(files) > 1:
        raise ValueError(f"{len(files)} files are given: run one experiment at a time, or give --check")
    loaded = module.load_experiment(files[0], *(changes or []))
    runs, out = runs or Path("runs", files[0].stem), out or files[0].with_suffix("")
    path = out / "results.json"
    if is_dry:
        return print_table(module.build_plan(loaded, path, runs, jobs))
    limits: dict[str, Any] = {"minutes": minutes, "jobs": jobs, "is_interrupting": is_interrupting}
    with json_stdout(is_json):
        results, failures = module.run_experiment(loaded, path, runs, on_event=log, **limits)
        tables = write_report(results, out)
    if is_json:
        print_json(results)
    for table in tables if not is_json else ():
        print_table(table)
    log(f"{len(results['runs'])} of {results['planned_runs']} runs are in {path}")
    raise typer.Exit(bool(failures))
