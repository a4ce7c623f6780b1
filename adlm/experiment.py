"""Experiments: arms × corpora × seeds from one YAML file, trained in parallel, compared in pairs and judged."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from adlm.checkpoint import find_latest_checkpoint, read_state
from adlm.config import Config, load_config
from adlm.data.shards import file_lock, open_data
from adlm.data.tokenizers import read_json
from adlm.evaluate import paired
from adlm.evaluate.paired import MeasureSettings, Record, compute_nll, measure_run, summarize
from adlm.evaluate.results import Cell, Column, Table, save_json, to_json
from adlm.reasoning.verdicts import BETTER, compare_arms, flatten_settings
from adlm.remedies import check_known
from adlm.training.guard import Diverged, Preempted, catch_stop_signals
from adlm.training.loop import train

MEASURED = "measured.json"  # in the folder of a finished run
STOP_SECONDS = 15.0  # before the end of the time limit, for running processes to save
CLAIM_KEYS = ("claim", "paper", "ours", "interval", "scale", "command", "gpu_hours", "verdict", "evidence")
WORKER = "from adlm.experiment import run_worker; run_worker()"
# Settings that change nothing in a result.
IGNORED = {"folder", "device", "log", "checkpoint", "samples", "parallel", "guard", "micro_batch", "compile", "resume"}
IGNORED |= {"memory_check", "data.path", "data.workers", "data.verify"}


@dataclass(frozen=True)
class ExperimentArm:
    """A recipe with overrides or, with `model`, a model that exists: {seed} and {corpus} in its path are replaced."""

    recipe: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    scout: dict[str, list[Any]] = field(default_factory=dict)  # the first seed chooses the value for all others
    model: str = ""
    seconds_per_step: float | None = None


@dataclass(frozen=True)
class ExperimentClaim:
    """A claim that an arm's nll is lower than another's (or, with `within`, equal), and when it is supported."""

    text: str = MISSING
    arm: str = MISSING
    than: str = MISSING
    corpus: str | None = None  # null: the first
    min_seeds: int = 3
    same_sign: bool = True  # the difference of every seed is below 0
    errors: float = 2.0  # the mean difference is below -errors · SD / √seeds
    is_pooled: bool = False  # the variance over seeds is the mean of that of all claims
    at_least: float = 0.0  # the mean difference is below -at_least nats per token
    within: float | None = None  # instead of these: Student's interval lies in ±within nats per token


@dataclass(frozen=True)
class Experiment:
    """A question and the runs that answer it."""

    question: str = MISSING
    arms: dict[str, ExperimentArm] = field(default_factory=dict)
    corpora: dict[str, str] = field(default_factory=dict)  # name: folder of prepared data
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    corpus_seeds: dict[str, list[int]] = field(default_factory=dict)  # other seeds of a corpus
    overrides: dict[str, Any] = field(default_factory=dict)  # of all arms
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    claims: list[ExperimentClaim] = field(default_factory=list)
    jobs: int = 1  # processes at once on each GPU, or on the CPU
    seconds_per_step: float = 1.0  # in one process while the others run
    startup_seconds: float = 30.0  # of a run: imports, compilation, measuring


def load_experiment(path: Path, *changes: str) -> Experiment:
    """Load an experiment, with changes such as `corpora.prose=FOLDER` or `overrides.steps=20`."""
    try:
        merged = OmegaConf.merge(Experiment, OmegaConf.load(path), OmegaConf.from_dotlist(list(changes)))
        experiment: Experiment = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except (OmegaConfBaseException, YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is no experiment ({problem}): docs/reproduce.md lists its keys") from error
    for claim in experiment.claims:
        check_known("arm", claim.arm, experiment.arms)
        check_known("arm", claim.than, experiment.arms)
    return experiment


def list_runs(experiment: Experiment, records: Mapping[str, Record]) -> list[Record]:
    """List all runs by corpus, seed and arm, each with its record if it has finished.

    At the first corpus and seed an arm has a run for each value of its scout; the others wait for the best value.
    """
    runs: list[Record] = []
    default = flatten_settings(asdict(Config()))
    for corpus, path in experiment.corpora.items():
        for seed in experiment.corpus_seeds.get(corpus, experiment.seeds):
            for name, arm in experiment.arms.items():
                variants: list[Record] = [{key: value} for key, values in arm.scout.items() for value in values] or [{}]
                scouts = [each["record"] for each in runs if each["arm"] == name][: len(variants)]
                is_waiting = bool(arm.scout) and None in scouts
                if scouts:
                    nll = [0.0 if is_waiting or not arm.scout else compute_nll(each) for each in scouts]
                    variants = [variants[int(np.argmin(nll))]]
                for variant in variants:
                    label = " ".join(f"{key}={value}" for key, value in variant.items())
                    run_name = re.sub(r"[^\w.=-]+", "_", "-".join(filter(None, [name, label, corpus, str(seed)])))
                    run: Record = {"name": run_name, "arm": name, "variant": label, "corpus": corpus, "seed": seed}
                    run |= {"model": arm.model.format(seed=seed, corpus=corpus), "settings": {}, "config": None}
                    if not arm.model:
                        settings = experiment.overrides | arm.overrides | variant | {"seed": seed, "data.path": path}
                        run["config"] = asdict(load_config(arm.recipe or None, folder="", **settings))
                        given = flatten_settings(run["config"])
                        changed = [key for key in given if given[key] != default.get(key)]
                        changed = [key for key in changed if not {key, key.split(".")[0]} & IGNORED]
                        run["settings"] = {key: given[key] for key in changed}
                    content = json.dumps([run["settings"], run["model"], asdict(experiment.measure)], sort_keys=True)
                    run |= {"key": hashlib.sha256(content.encode()).hexdigest()[:16], "is_waiting": is_waiting}
                    record = records.get(run_name, {"key": ""})
                    run |= {"data": experiment.measure.data or path}
                    runs.append(run | {"record": record if record["key"] == run["key"] else None})
    return runs


def estimate_seconds(experiment: Experiment, run: Record, folder: Path, records: Mapping[str, Record]) -> float:
    """Estimate how long a run takes from its last checkpoint on, by the finished runs of its arm if there are any."""
    if run["config"] is None:
        return experiment.startup_seconds
    own = [each["seconds"] / each["step"] for each in records.values() if each["arm"] == run["arm"] and "step" in each]
    speed = max(own, default=experiment.arms[run["arm"]].seconds_per_step or experiment.seconds_per_step)
    latest = find_latest_checkpoint(folder / "checkpoints")
    left = run["config"]["steps"] - (read_state(latest)["step"] if latest is not None else 0)
    return experiment.startup_seconds + left * speed


def build_plan(experiment: Experiment, path: Path, runs_folder: Path, jobs: int | None = None) -> Table:
    """Build the table of runs with the estimated minutes of those that are not in the results file at `path`."""
    records, rows, minutes = read_records(path), list[list[Cell]](), [0.0]
    for run in list_runs(experiment, records):
        left = 0.0 if run["record"] else estimate_seconds(experiment, run, runs_folder / run["name"], records)
        minutes.append(left / 60)
        rows.append([run["name"], run["config"]["steps"] if run["config"] else 0, minutes[-1]])
    slots = (jobs or experiment.jobs) * max(1, torch.cuda.device_count())
    note = f"{len(rows)} runs, {slots} at once: about {max(sum(minutes) / slots, *minutes):.1f} minutes"
    return Table([Column("run", is_text=True), Column("steps"), Column("minutes", 1)], rows, notes=[note])


def read_records(path: Path) -> dict[str, Record]:
    """Read the finished runs of a results file by their names; none if there is no file."""
    return {each["name"]: each for each in (read_json(path)["runs"] if path.is_file() else [])}


def run_experiment(
    experiment: Experiment,
    path: Path,
    runs_folder: Path,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    is_interrupting: bool = False,
    on_event: Callable[[str], None] = print,
) -> tuple[Record, list[str]]:
    """Run what the results file at `path` does not have, and add it; return the results and the runs that failed.

    A run that cannot end within the minutes is started only with `is_interrupting`; one that has not ended then is
    saved, and resumes in the next call.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes - STOP_SECONDS
    gpus = torch.cuda.device_count()
    slots, records = (jobs or experiment.jobs) * max(1, gpus), read_records(path)
    active: dict[int, tuple[str, subprocess.Popen[str]]] = {}
    failures, is_stopping = list[str](), False
    runs_folder.mkdir(parents=True, exist_ok=True)
    locked = file_lock(runs_folder / ".lock", f"another experiment runs in {runs_folder}: wait for it, or give --runs")
    with locked, catch_stop_signals() as signals:
        planned = list_runs(experiment, records)
        for folder in {run["config"]["data"]["path"] for run in planned if run["config"] and not run["record"]}:
            open_data(folder, verify=False)  # raises before anything starts
        while True:
            for slot, (name, process) in list(active.items()):
                if process.poll() is not None:
                    del active[slot]
                    if not (runs_folder / name / MEASURED).is_file() and not is_stopping:
                        log = (runs_folder / name / "log.txt").read_text("utf-8").strip()
                        failures.append(name)
                        on_event(f"{name} failed: {log.splitlines()[-1] if log else process.returncode}")
            for run in list(planned):
                measured = runs_folder / run["name"] / MEASURED
                if run["record"] is None and measured.is_file() and read_json(measured)["key"] == run["key"]:
                    record = records[run["name"]] = run["record"] = read_json(measured)
                    on_event(f"{run['name']}: {record.get('error') or f'nll {compute_nll(record):.4f}'}")
                    if any(each["is_waiting"] for each in planned):
                        planned = list_runs(experiment, records)
                    save_json(path, collect_results(experiment, planned))
            left = deadline - time.monotonic()
            if (signals or left < 0) and not is_stopping:
                is_stopping = True
                for _, process in active.values():
                    process.terminate()
            busy = {*failures, *(name for name, _ in active.values())}
            for slot in sorted(set(range(slots)) - set(active)) if not is_stopping else ():
                for run in planned:
                    name, folder = run["name"], runs_folder / run["name"]
                    is_open = run["record"] is None and not run["is_waiting"] and name not in busy
                    if is_open and (is_interrupting or estimate_seconds(experiment, run, folder, records) < left):
                        device = f"cuda:{slot % gpus}" if gpus else "cpu"
                        active[slot] = name, start_worker(run, folder, device, experiment.measure)
                        busy.add(name)
                        on_event(f"{name} started on {device}")
                        break
            if not active:
                save_json(path, results := collect_results(experiment, planned))
                return results, failures
            time.sleep(0.2)


def start_worker(run: Record, folder: Path, device: str, measure: MeasureSettings) -> "subprocess.Popen[str]":
    """Start the process of a run, which stops when this one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MEASURED).unlink(missing_ok=True)
    config = run["config"] and run["config"] | {"folder": str(folder), "device": device}
    job = run | {"config": config, "folder": str(folder), "device": device, "measure": asdict(measure)}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        streams: Record = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT, "text": True}
        environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ
        process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, **streams)
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    return process


def run_worker() -> None:
    """Train and measure the run that a line of stdin describes; when stdin ends, the parent has ended: stop."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    folder = Path(job["folder"])
    record = {key: job[key] for key in ("name", "arm", "variant", "corpus", "seed", "key", "settings", "model")}
    try:
        if job["config"] is not None:
            train(job["config"])
        measure = MeasureSettings(**job["measure"])
        record |= measure_run(job["model"] or str(folder), job["data"], measure, job["device"])
    except Preempted as stopped:
        sys.exit(stopped.code)
    except (Diverged, FloatingPointError) as error:
        record["error"] = str(error)
    save_json(folder / MEASURED, record)


def collect_results(experiment: Experiment, planned: Sequence[Record]) -> Record:
    """Collect the finished runs, with all that follows from them."""
    results: Record = {"question": experiment.question, "measure": asdict(experiment.measure)}
    results |= {"planned_runs": len(planned), "rules": [asdict(claim) for claim in experiment.claims]}
    results["runs"] = [run["record"] for run in planned if run["record"] is not None]
    return dict(to_json(results | summarize(results)))


def check_file(path: Path) -> tuple[int, list[str]]:
    """Recompute what a file of results or of claims states; return how many values it has, and those that differ."""
    content, committed = read_json(path), path.parent.parent / f"{path.parent.name}.yaml"
    if not isinstance(content, dict) or not {"runs", "claims"} & set(content):
        raise ValueError(f"{path} has no claims: give results.json of an experiment, or docs/reproduce.json")
    if "runs" in content:
        if committed.is_file():  # whose rules count
            content["rules"] = [asdict(claim) for claim in load_experiment(committed).claims]
        summary = to_json(summarize(content))
        return find_differences({key: content.get(key) for key in summary}, summary, path.name)
    count, problems = 0, list[str]()
    for claim in content["claims"]:
        problems += [f"{claim.get('claim')!r} has no {key}" for key in CLAIM_KEYS if key not in claim]
        computed = to_json(recompute_claim(claim.get("evidence"), path.parent))
        found, differing = find_differences({key: claim.get(key) for key in computed}, computed, repr(claim["claim"]))
        count, problems = count + found, problems + differing
    return count, problems


def flatten_values(value: Any, where: str) -> dict[str, Any]:
    """Return the values of nested lists and mappings by their path."""
    if not isinstance(value, dict | list):
        return {where: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: leaf for key, each in items for path, leaf in flatten_values(each, f"{where}, {key}").items()}


def find_differences(stored: Any, computed: Any, where: str) -> tuple[int, list[str]]:
    """Compare JSON values: return how many there are, and a line for each that differs by more than rounding."""
    before, after = (flatten_values(each, where) for each in (stored, computed))
    problems = []
    for path in before | after:
        old, new = before.get(path), after.get(path)
        is_close = isinstance(old, int | float) and isinstance(new, float) and math.isclose(old, new, rel_tol=1e-6)
        if old != new and not is_close:
            problems.append(f"{path}: stored {old!r:.80}, computed {new!r:.80}")
    return len(before | after), problems


def recompute_claim(evidence: Record | None, folder: Path) -> Record:
    """Compute our number, its interval and the verdict of a claim from stored measurements (docs/reproduce.md)."""
    if evidence is None:
        return {"ours": None, "interval": None, "verdict": paired.NOT_TESTABLE}
    source, kind = read_json(folder / evidence["file"]), evidence["kind"]
    check_known("kind of evidence", kind, ["experiment", "accuracy", "value", "slope", "excess"])
    if kind == "experiment":
        own = next(each for each in summarize(source)["claims"] if each["text"] == evidence["claim"])
        return {"ours": own.get("mean"), "interval": own.get("interval"), "verdict": own["verdict"]}
    if kind == "accuracy":  # in points, from the problems that each seed solved
        groups: dict[str, list[float]] = {}
        for run in (run for run in source["runs"] if run["task"] == evidence["task"]):
            test = run["tests"][evidence["test"]]
            groups.setdefault(run["arm"], []).append(100 * int(test["right"], 16).bit_count() / test["problems"])
        one, other = evidence["arm"], evidence["than"]
        differences = np.subtract(groups[one], groups[other]).tolist()
        is_better = compare_arms(groups, one, other)["verdict"] == BETTER  # the rule that was written before the runs
        verdict = paired.SUPPORTED if is_better else paired.NOT_SUPPORTED
        return {"ours": fmean(differences), "interval": paired.find_interval(differences), "verdict": verdict}
    if kind == "value":
        ours = flatten_settings(source)[evidence["value"]]
    else:
        rows = [flatten_settings(row) for row in source[evidence["list"]]]
        rows = [row for row in rows if evidence.get("where", {}).items() <= row.items()]
        x, y = (np.array([row[evidence[axis]] for row in rows]) for axis in "xy")
        ours = float(np.polyfit(np.log(x), np.log(y), 1)[0] if kind == "slope" else (x - y).max())
    is_inside = evidence.get("at_least", -math.inf) <= ours <= evidence.get("at_most", math.inf)
    return {"ours": ours, "interval": None, "verdict": paired.SUPPORTED if is_inside else paired.NOT_SUPPORTED}
