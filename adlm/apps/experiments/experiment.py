"""Experiments: arms × corpora × seeds from one YAML file, trained in parallel, compared in pairs and judged."""

import math
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt

from adlm.apps.reasoning.verdicts import BETTER, compare_arms, flatten_settings, group_by
from adlm.config import (
    Config,
    compare_configs,
    insert,
    load_config,
    read_change,
    read_yaml,
)
from adlm.data.batches import DataSettings
from adlm.data.prepare import count_cores
from adlm.data.shards import open_data
from adlm.errors import Diverged, check_known
from adlm.evaluate.cache import decode_array, encode_array, hash_settings
from adlm.evaluate.data import load_eval_data
from adlm.evaluate.ppl import NllSettings, estimate_texts
from adlm.evaluate.provenance import collect_provenance
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn, save_json
from adlm.evaluate.stats import describe_seeds, estimate_ratio_difference
from adlm.files import file_lock, read_json, read_stored
from adlm.settings import Settings, SettingsError, Stored, list_fields
from adlm.text.lm import load
from adlm.training.guard import catch_stop_signals
from adlm.training.logging import read_metrics
from adlm.training.state import read_state
from adlm.training.train import train

MEASURED = "measured.json"  # in the folder of a finished run
STOP_SECONDS = 15.0  # before the end of the time limit, for running processes to save
VERDICTS, NOT_TESTABLE = {True: "supported", False: "not supported"}, "not testable here"
PAPER = Config(folder="", data=DataSettings(path=""))  # all defaults
Record = dict[str, Any]  # of a run: what was measured; or error, if it diverged


ScoutValue = Annotated[int | float | bool | str | None, Field(union_mode="left_to_right")]


class ExperimentArm(Settings):
    """A recipe with overrides, or with `model` a model that exists."""

    recipe: str = ""
    """The recipe, by name or as a file."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipe by key, such as optimizer.lr."""
    scout: dict[str, list[ScoutValue]] = Field(default_factory=dict)
    """Values of one key, of which the first seed chooses the one for all others."""
    model: str = ""
    """A model instead of a recipe; {seed} and {corpus} in its path are replaced."""
    seeds: list[int] | None = None
    """Only these of the experiment's seeds, such as [0] where one seed was enough."""
    seconds_per_step: PositiveFloat | None = None
    """Seconds of a step in one process; by default those of the experiment."""


class ExperimentClaim(Settings):
    """A claim that an arm's nll is lower than another's: that of every seed, and the mean by 2 · SD / √seeds."""

    text: str
    """The claim in words."""
    arm: str
    """The arm that is claimed to be better."""
    than: str
    """The other arm."""
    min_seeds: int = 3
    """With fewer seeds it is not testable."""
    is_pooled: bool = False
    """Take the mean over all claims of the variance over seeds."""
    within: float | None = None
    """Claim instead that both are equal: Student's interval lies in ±within nats per token."""


class Claims(Stored):
    """A file of claims, such as docs/reproduce.json."""

    claims: list[Record]
    """The claims, each with its evidence."""


class MeasureSettings(Settings):
    """The held-out rows and the noise that runs share."""

    data: str | None = None
    """Text or prepared data; null: the valid split of the run's data."""
    rows: int = 2048
    """Rows at most."""
    draws: int = 2
    """Noise draws per row."""
    seed: int = 0
    """Seed of the noise."""
    batch: int = 64
    """Rows per batch."""


class Experiment(Settings):
    """A question and the runs that answer it."""

    question: str
    """The question."""
    arms: dict[str, ExperimentArm] = Field(default_factory=dict)
    """What is compared, by name."""
    corpora: dict[str, str] = Field(default_factory=dict)
    """Folders of prepared data, by name."""
    seeds: list[int] = Field(default_factory=lambda: [0, 1, 2])
    """Seeds of every arm."""
    corpus_seeds: dict[str, list[int]] = Field(default_factory=dict)
    """Other seeds of a corpus."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Changes to the recipes of all arms."""
    measure: MeasureSettings = MeasureSettings()
    """What is measured after training."""
    claims: list[ExperimentClaim] = Field(default_factory=list)
    """Claims to be judged."""
    jobs: PositiveInt = 1
    """Processes at once, on all GPUs together or on the CPU."""
    seconds_per_step: float = 1.0
    """Seconds of a step in one process while the others run."""
    startup_seconds: float = 30.0
    """Seconds of a run for imports, compilation and measuring."""


def load_experiment(path: Path, *changes: str) -> Experiment:
    """Load an experiment, with changes such as `corpora.prose=FOLDER` or `overrides.steps=20`."""
    values = read_yaml(path, "an experiment")
    fields = list_fields(Experiment)
    for change in changes:
        values = insert(values, *read_change(change, fields))
    try:
        experiment = Experiment.parse("recipe", **values)
    except SettingsError as error:
        raise ValueError(f"{path}: {error} (docs/reproduce.md)") from None

    for name in (name for claim in experiment.claims for name in (claim.arm, claim.than)):
        check_known("arm", name, experiment.arms)
    for name in experiment.corpus_seeds:
        check_known("corpus", name, experiment.corpora)
    seeds = {seed for own in (experiment.seeds, *experiment.corpus_seeds.values()) for seed in own}
    if unknown := {seed for arm in experiment.arms.values() for seed in arm.seeds or ()} - seeds:
        raise ValueError(
            f"{path}: an arm has the seed {min(unknown)}: expected some of the seeds {sorted(seeds)}"
        )
    if many := [name for name, arm in experiment.arms.items() if len(arm.scout) > 1]:
        raise ValueError(
            f"{path}: arm {many[0]!r} scouts several keys: give one, the others as overrides"
        )
    return experiment


def list_runs(experiment: Experiment, path: Path) -> dict[str, Record]:
    """Return all runs by name, with their records in the results file and estimated seconds; at the first corpus and
    seed an arm has a run for each value of its scout, and the others wait for the best value."""
    stored = read_json(path)["runs"] if path.is_file() else []
    runs, records = dict[str, Record](), {run["name"]: run for run in stored}
    points = [
        (key, seed)
        for key in experiment.corpora
        for seed in experiment.corpus_seeds.get(key, experiment.seeds)
    ]
    for (corpus, seed), (name, arm) in product(points, experiment.arms.items()):
        if arm.seeds is not None and seed not in arm.seeds:
            continue
        variants: list[Record] = [
            {key: value} for key, values in arm.scout.items() for value in values
        ] or [{}]
        scouts = [each["record"] for each in runs.values() if each["arm"] == name][: len(variants)]
        is_waiting = len(variants) > 1 and None in scouts
        if len(variants) > 1 and scouts:  # the best of them is the value of the others
            best = int(np.argmin(nll := [compute_nll(each) for each in scouts]))
            variants = (
                variants[best : best + 1] if is_waiting or nll[best] < math.inf else []
            )  # all values diverged
        for variant in variants:
            label = " ".join(f"{key}={value}" for key, value in variant.items())
            run_name = re.sub(
                r"[^\w.=-]+", "_", "-".join(filter(None, [name, label, corpus, str(seed)]))
            )
            if run_name in runs:
                raise ValueError(
                    f"{path}: two runs are named {run_name}: rename the arm {name!r}, or repeat no seed"
                )
            model, config, data = (
                arm.model.format(seed=seed, corpus=corpus),
                None,
                experiment.corpora[corpus],
            )
            content, seconds = (
                list[Any]([model, experiment.measure.model_dump()]),
                experiment.startup_seconds,
            )
            if not arm.model:
                settings = experiment.overrides | arm.overrides | variant
                config = load_config(
                    arm.recipe or None,
                    **settings,
                    **{"seed": seed, "folder": "", "data.path": data},
                )
                content += [config.steps, compare_configs(PAPER, config)]
                seconds += config.steps * (arm.seconds_per_step or experiment.seconds_per_step)
            key, record = hash_settings(content), records.get(run_name, {"key": ""})
            run = {
                "name": run_name,
                "arm": name,
                "variant": label,
                "corpus": corpus,
                "seed": seed,
                "model": model,
            }
            run |= {
                "key": key,
                "config": config,
                "is_waiting": is_waiting,
                "data": experiment.measure.data or data,
            }
            runs[run_name] = run | {
                "seconds": seconds,
                "record": record if record["key"] == key else None,
            }
    if lost := [name for name in records if name not in runs or not runs[name]["record"]]:
        problem = f"{path}: {len(lost)} runs are not planned, or had other settings ({lost[0]}, …)"
        raise ValueError(f"{problem}: undo the change, or give another --out and --runs")
    return runs


def run_experiment(
    experiment: Experiment,
    path: Path,
    folder: Path,
    minutes: float = math.inf,
    on_event: Callable[[str], None] = print,
) -> tuple[Record, list[str]]:
    """Run what the results file at `path` lacks, in folders below `folder`; return the results and the failed runs."""
    deadline, gpus = time.monotonic() + 60 * minutes - STOP_SECONDS, torch.cuda.device_count()
    devices = [
        f"cuda:{number % gpus}" if gpus else "cpu" for number in range(experiment.jobs)
    ]  # that are free
    spawn, active, failures = (
        multiprocessing.get_context("spawn"),
        dict[str, tuple[Any, str]](),
        list[str](),
    )
    threads = str(1 if gpus else max(1, count_cores() // experiment.jobs))
    os.environ |= {
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    } | os.environ  # of the processes
    folder.mkdir(parents=True, exist_ok=True)
    locked = file_lock(
        folder / ".lock", f"another experiment runs in {folder}: wait for it, or give --runs"
    )
    with locked, catch_stop_signals() as signals, ExitStack() as joins, ExitStack() as stops:
        planned = list_runs(experiment, path)
        check_folders(planned, path, folder)
        while True:
            left = -1.0 if signals else deadline - time.monotonic()  # below 0 it stops
            for process, _ in active.values() if left < 0 else ():
                process.terminate()
            for name, run in planned.items() if left >= 0 else ():
                is_open = not run["record"] and not run["is_waiting"] and run["seconds"] < left
                if devices and is_open and name not in {*active, *failures}:
                    on_event(f"{name} started on {devices[0]}")
                    args = (run, folder / name, devices[0], experiment.measure)
                    process = spawn.Process(target=run_worker, args=args)
                    process.start()
                    joins.callback(
                        process.join
                    )  # after an error here, all save a checkpoint and end
                    stops.callback(process.terminate)
                    active[name] = process, devices.pop(0)
            if not active:
                return save_results(experiment, planned, path), failures
            time.sleep(0.2)
            for name in [
                name for name, (process, _) in active.items() if process.exitcode is not None
            ]:
                process, device = active.pop(name)
                devices.append(device)
                if process.exitcode == 0:
                    record = planned[name]["record"] = read_json(folder / name / MEASURED)
                    on_event(f"{name}: {record.get('error') or f'nll {compute_nll(record):.4f}'}")
                    save_results(experiment, planned, path)
                    if any(
                        run["is_waiting"] for run in planned.values()
                    ):  # for the best value of a scout
                        planned = list_runs(experiment, path)
                elif left >= 0:
                    failures.append(name)
                    log = folder / name / "log.txt"
                    lines = log.read_text("utf-8").strip().splitlines() if log.is_file() else []
                    on_event(
                        f"{name} failed, exit code {process.exitcode}: {lines[-1] if lines else '–'} ({log})"
                    )


def check_folders(planned: Mapping[str, Record], path: Path, folder: Path) -> None:
    """Refuse data that are missing or not those of the finished runs, and folders of runs with other steps."""
    trained = [run for run in planned.values() if run["config"]]
    opened = {
        data: open_data(data)
        for data in {run["config"].data.path for run in trained if not run["record"]}
    }
    for run in trained:
        config, record, saved = (
            run["config"],
            run["record"] or {},
            folder / run["name"] / "config.yaml",
        )
        data_hash, data = (
            record.get("data_sha256"),
            opened.get(config.data.path),
        )  # old records have no hash
        if data_hash and data and data_hash != data.manifest.settings_sha256:
            raise ValueError(
                f"{path}: {run['name']} had other data than {data.folder}: give that, or another --out"
            )
        if not record and saved.is_file() and (steps := load_config(saved).steps) != config.steps:
            raise ValueError(
                f"{saved.parent} is a run of {steps} steps, not {config.steps}: give another --runs"
            )


def run_worker(run: Record, folder: Path, device: str, measure: MeasureSettings) -> None:
    """Train and measure a run in a process of its own, which ends with its parent."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = (folder / "log.txt").open("a", buffering=1, encoding="utf-8")
    record = {key: run[key] for key in ("name", "arm", "variant", "corpus", "seed", "key", "model")}
    try:
        if config := run["config"]:
            trained = train(config, folder=str(folder), device=device)
            record["seconds"] = round(read_state(trained.checkpoint).seconds, 1)
            record["data_sha256"] = open_data(config.data.path).manifest.settings_sha256
            metrics = read_metrics(folder / "metrics.jsonl")
            record["curve"] = [
                [each["step"], each["val/nll"]] for each in metrics if "val/nll" in each
            ]
        record |= measure_run(run["model"] or str(folder), run["data"], measure, device)
    except Diverged as error:
        record["error"] = str(error)
    save_json(folder / MEASURED, record)


def measure_run(model: str, data: str, measure: MeasureSettings, device: str) -> Record:
    """Compute the nats of every held-out row under a model, in float32, with noise that follows from the row alone."""
    lm, settings = load(model, device=device), NllSettings(measure.draws, measure.seed)
    read = partial(load_eval_data, rows=lm.loaded.rows, limit=measure.rows)  # type: ignore[arg-type]
    (text,) = estimate_texts([lm], {data: data}, read, settings, batch=measure.batch)
    narrow = torch.short if lm.model.config.length < 2**15 else torch.int
    rows = {"documents": text.data.documents.int(), "row_tokens": text.nll.row_tokens.to(narrow)}
    rows["row_nats"] = text.nll.row_nats.float()
    about = {
        "step": lm.step,
        "rows_sha256": text.data.rows_hash,
        "provenance": collect_provenance(device),
    }
    return about | {name: encode_array(values.numpy()) for name, values in rows.items()}


def compute_nll(run: Record | None) -> float:
    """Compute the nats per token of a run; infinite if it diverged or has not finished."""
    if run is None or "error" in run:
        return math.inf
    return float(
        decode_array(run["row_nats"]).sum(dtype=float) / decode_array(run["row_tokens"]).sum()
    )


def save_results(experiment: Experiment, planned: Mapping[str, Record], path: Path) -> Record:
    """Save the finished runs, and the rules by which claims about them are judged; return both."""
    results: Record = {"question": experiment.question, "measure": experiment.measure.model_dump()}
    results |= {
        "planned_runs": len(planned),
        "rules": [claim.model_dump() for claim in experiment.claims],
    }
    results["runs"] = [run["record"] for run in planned.values() if run["record"]]
    save_json(path, results)
    return results


def choose_runs(results: Record) -> dict[str, dict[str, dict[int, Record]]]:
    """Return the runs by corpus, arm and seed; of the values that a scout tried only the best."""
    chosen: dict[str, dict[str, dict[int, Record]]] = {}
    for run in results["runs"]:
        own = chosen.setdefault(run["corpus"], {}).setdefault(run["arm"], {})
        own[run["seed"]] = min(own.get(run["seed"], run), run, key=compute_nll)
    return chosen


def summarize(results: Record) -> Record:
    """Compute nll by arm, and the paired differences and verdicts of the claims or, without any, from the first arm."""
    groups: dict[tuple[str, str], list[float]] = {}
    for run in results["runs"]:
        groups.setdefault((run["corpus"], f"{run['arm']} {run['variant']}".strip()), []).append(
            compute_nll(run)
        )
    arms = [
        {"corpus": corpus, "name": name} | describe_seeds(nll)
        for (corpus, name), nll in groups.items()
    ]
    comparisons: list[Record] = []
    for corpus, runs in choose_runs(results).items():
        for rule in results["rules"] or [
            ExperimentClaim(text="", arm=arm, than=next(iter(runs))).model_dump()
            for arm in [*runs][1:]
        ]:
            one, other = runs.get(rule["arm"], {}), runs.get(rule["than"], {})
            name, pairs = (
                f"{rule['arm']} − {rule['than']}",
                [(one[seed], other[seed]) for seed in one if seed in other],
            )
            comparisons.append({"corpus": corpus, "name": name} | rule | compare_seeds(pairs))
    spread = [
        np.var(each["by_seed"], ddof=1) for each in comparisons if each["text"] and each["interval"]
    ]
    for each in comparisons:
        each["verdict"] = judge_claim(each, float(np.mean(spread or 0))) if each["text"] else None
    return {"arms": arms, "comparisons": comparisons}


def compare_seeds(pairs: Sequence[tuple[Record, Record]]) -> Record:
    """Compare pairs of runs of equal seeds, over seeds and documents; if a seed diverged, the mean is not finite."""
    differences = describe_seeds([compute_nll(one) - compute_nll(other) for one, other in pairs])
    if not math.isfinite(differences["mean"]):
        return differences | {"document_se": None}
    if len({run["rows_sha256"] for pair in pairs for run in pair}) > 1:
        raise ValueError(
            f"{pairs[0][0]['name']} and others were measured on different rows: measure them again"
        )
    unit = np.unique(decode_array(pairs[0][0]["documents"]), return_inverse=True)[1]
    rows = [
        [decode_array(run[key]) for run in runs]
        for runs in zip(*pairs)
        for key in ("row_nats", "row_tokens")
    ]
    sums = [np.bincount(unit, np.mean(values, axis=0, dtype=float)) for values in rows]
    return differences | {"document_se": estimate_ratio_difference(*sums)[1]}


def judge_claim(claim: Record, pooled_variance: float) -> str:
    """Judge a claim by its rule (`ExperimentClaim`); if a seed of either arm diverged, it is not supported."""
    differences = claim["by_seed"]
    if len(differences) < max(2, claim["min_seeds"]):
        return NOT_TESTABLE
    if claim["interval"] is None:
        return VERDICTS[False]
    if claim["within"] is not None:
        return VERDICTS[max(map(abs, claim["interval"])) < claim["within"]]
    variance = pooled_variance if claim["is_pooled"] else float(np.var(differences, ddof=1))
    return VERDICTS[
        max(differences) < 0 and claim["mean"] < -2 * math.sqrt(variance / len(differences))
    ]


def build_report(results: Record) -> EvalResult:
    """Build the tables of arms and of paired differences with verdicts, and the data of the plots."""
    text, summary, figures, sets = (
        partial(TableColumn, is_text=True),
        summarize(results),
        Record(),
        list[Record](),
    )
    rows: dict[str, list[Any]] = {"arms": [], "comparisons": []}
    for each, own in ((each, own) for kind, own in rows.items() for each in summary[kind]):
        by_seed = ", ".join(
            f"{value:.4f}" if math.isfinite(value) else "diverged" for value in each["by_seed"]
        )
        more = [each[key] for key in ("document_se", "text", "verdict") if key in each]
        own.append(
            [
                each["corpus"],
                each["name"],
                by_seed,
                Estimate(each["mean"], None, each["interval"]),
                *more,
            ]
        )
    columns = [
        text("corpus"),
        text("arms"),
        text("by seed"),
        TableColumn("mean (95% over seeds)", 4),
    ]
    tables = [Table(columns, rows["arms"], "Held-out nll, nats per token")]
    columns = [*columns, TableColumn("s.e. over documents", 4), text("claim"), text("verdict")]
    tables.append(
        Table(columns, rows["comparisons"], "Paired differences; below 0 the first arm is better")
    )
    runs = [
        run
        for arms in choose_runs(results).values()
        for seeds in arms.values()
        for run in seeds.values()
    ]
    if curves := [
        {"task": run["corpus"], "arm": run["arm"], "points": run["curve"]}
        for run in runs
        if "curve" in run
    ]:
        figures["curves"] = (
            "curves",
            {"curves": curves, "label": "validation nll (nats per token)"},
        )
    finite = [each for each in summary["comparisons"] if math.isfinite(each["mean"])]
    for corpus, pairs in group_by(finite, "corpus").items():
        values, spans = (
            {pair["name"]: pair[key] for pair in pairs} for key in ("by_seed", "interval")
        )
        sets.append(
            {
                "task": corpus,
                "test": "mean (95% over several seeds)",
                "arms": values,
                "intervals": spans,
            }
        )
        figures["differences"] = ("arms", {"sets": sets, "label": "difference (nats per token)"})
    return EvalResult(
        "experiment", summary, results["measure"], collect_provenance(), tables, figures=figures
    )


def check_claims(path: Path) -> list[str]:
    """Recompute what a file of claims states from the stored measurements; return a line for every difference."""
    problems = []
    for claim in read_stored(path, Claims, "give a file such as docs/reproduce.json").claims:
        for key, value in recompute_claim(claim.get("evidence"), path.parent).items():
            stored: Any = claim.get(key)
            is_equal = value == stored
            if isinstance(value, float | list) and isinstance(stored, type(value)):
                is_equal = np.allclose(value, stored, rtol=1e-9, atol=0)
            if not is_equal:
                problems.append(f"{claim['claim']!r}, {key}: stored {stored!r}, computed {value!r}")
    return problems


def recompute_claim(evidence: Record | None, folder: Path) -> Record:
    """Compute our number, its interval and the verdict of a claim from stored measurements (docs/reproduce.md)."""
    if evidence is None:
        return {"ours": None, "interval": None, "verdict": NOT_TESTABLE}
    source, kind = read_json(folder / evidence["file"]), evidence["kind"]
    check_known(
        "kind of evidence", kind, ["experiment", "accuracy", "report", "value", "slope", "excess"]
    )
    if kind == "experiment":
        every = [each for each in summarize(source)["comparisons"] if each["text"]]
        claims = {each["text"]: each for each in every if each["corpus"] == every[0]["corpus"]}
        check_known(f"claim of {evidence['file']}", evidence["claim"], claims)
        own = claims[evidence["claim"]]
    elif (
        kind == "accuracy"
    ):  # in points, from the problems that each seed solved, by the rule of the reasoning runs
        points, pair = (
            dict[str, dict[int, float]](),
            (evidence["arm"], evidence["than"]),
        )  # by arm and seed
        for run in (run for run in source["runs"] if run["task"] == evidence["task"]):
            test = run["tests"][evidence["test"]]
            right = 100 * int(test["right"], 16).bit_count() / test["problems"]
            points.setdefault(run["arm"], {})[run["seed"]] = right
        for name in pair:
            check_known(f"arm of {evidence['file']}", name, points)
        if points[pair[0]].keys() != points[pair[1]].keys():
            raise ValueError(
                f"{' and '.join(pair)} have different seeds in {evidence['file']}: give both the same"
            )
        by_seed = {arm: [solved[seed] for seed in sorted(solved)] for arm, solved in points.items()}
        compared = compare_arms(by_seed, *pair)
        own = describe_seeds(np.subtract(by_seed[pair[0]], by_seed[pair[1]]).tolist())
        own["verdict"] = (
            VERDICTS[compared["verdict"] == BETTER] if compared["verdict"] else NOT_TESTABLE
        )
        own["threshold"] = 2 * compared["sd"]  # the smallest difference that counts
    elif kind == "report":  # two models of `adlm eval report`, of one training run each
        metrics = [each for each in source["metrics"] if evidence["where"].items() <= each.items()]
        values = {each["model"]: each["value"] for each in metrics}
        if len(values) != len(metrics):
            raise ValueError(
                f"{evidence['where']} matches several metrics of a model in {evidence['file']}: add data"
            )
        for name in (evidence["arm"], evidence["than"]):
            check_known(f"model of {evidence['file']}", name, values)
        one, other = values[evidence["arm"]], values[evidence["than"]]
        ours = math.log(one / other) if evidence["where"]["type"] == "perplexity" else one - other
        own = {"mean": ours, "interval": None, "verdict": NOT_TESTABLE}
    else:
        if kind == "value":
            ours = flatten_settings(source)[evidence["value"]]
        else:
            rows = [flatten_settings(row) for row in source[evidence["list"]]]
            rows = [row for row in rows if evidence.get("where", {}).items() <= row.items()]
            x, y = (np.array([row[evidence[axis]] for row in rows]) for axis in "xy")
            ours = float(
                np.polyfit(np.log(x), np.log(y), 1)[0] if kind == "slope" else (x - y).max()
            )
        if not {"at_least", "at_most"} & evidence.keys():
            raise ValueError(
                f"{evidence} has no bound, so every value would be supported: give at_least or at_most"
            )
        is_inside = evidence.get("at_least", -math.inf) <= ours <= evidence.get("at_most", math.inf)
        own = {"mean": ours, "interval": None, "verdict": VERDICTS[is_inside]}
    return {"ours": own["mean"]} | {
        key: own[key] for key in ("interval", "verdict", "threshold") if key in own
    }
