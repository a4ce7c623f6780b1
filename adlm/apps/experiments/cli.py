"""`adlm experiment`: run the arms of an experiment, or check claims."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from adlm.cli import options
from adlm.cli.output import Commands, print_json, print_result, status_console
from adlm.files import write_atomically

app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode="markdown")


@app.command()
def experiment(
    file: Annotated[
        Path | None, typer.Argument(help="YAML file; claims with --check [docs/reproduce.json].")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as corpora.prose=DATA.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results. [default: FILE without .yaml]")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of the run folders. [default: runs/NAME]")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time limit: a longer run is not started.")
    ] = float("inf"),
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and the estimated minutes.")
    ] = False,
    is_check: Annotated[
        bool, typer.Option("--check", help="Recompute the numbers and verdicts of claims.")
    ] = False,
    is_json: options.Json = False,
) -> None:
    """Train arms × corpora × seeds in parallel and compare them in pairs. Running the same command again resumes.

    Exit codes: 0 done, or stopped in time; 1 a run failed, or a checked value differs; 2 a file is wrong.
    """
    from adlm.apps.experiments import experiment as module

    log = partial(status_console().print, markup=False)
    if is_check:
        problems = module.check_claims(file := file or Path("docs/reproduce.json"))
        if is_json:
            print_json({"file": str(file), "problems": problems})
        log("\n".join([*problems, f"{file}: {len(problems)} values differ"]))
        raise typer.Exit(bool(problems))
    if file is None:
        raise ValueError("FILE is required: a YAML file such as experiments/toy.yaml, or --check")
    loaded, path = (
        module.load_experiment(file, *(changes or [])),
        (out or file.with_suffix("")) / "results.json",
    )
    if is_dry:
        left = {
            name: run["seconds"] / 60
            for name, run in module.list_runs(loaded, path).items()
            if not run["record"]
        }
        if is_json:
            return print_json({"minutes": left, "jobs": loaded.jobs})
        left |= {
            f"{len(left)} runs, {loaded.jobs} at once": max(
                sum(left.values()) / loaded.jobs, *left.values(), 0
            )
        }
        return print("\n".join(f"{name}: {minutes:.1f} minutes" for name, minutes in left.items()))
    results, failures = module.run_experiment(
        loaded, path, runs or Path("runs", file.stem), minutes, log
    )
    result = module.build_report(results)
    page = f"# {loaded.question}\n\n{result}\n"
    write_atomically(path.with_suffix(".md"), page.encode("utf-8"))
    if find_spec("matplotlib") is None:
        result.figures.clear()
    print_result(result, is_json=is_json, out=path.parent)
    log(f"{len(results['runs'])} of {results['planned_runs']} runs are in {path}")
    raise typer.Exit(bool(failures))
