"""Evaluates Python code: the share of generated and infilled functions that parse, and pass@k of problems."""

import ast
import hashlib
import json
import math
import sysconfig
import textwrap
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from adlm.apps.code_eval.sandbox import Limits, find_sandbox_problem, run_program
from adlm.errors import import_extra
from adlm.evaluate.cache import (
    Cache,
    ProgressCallback,
    hash_settings,
    ignore_progress,
    lock_output,
    open_cache,
)
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn
from adlm.files import hash_file, write_atomically
from adlm.settings import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from adlm.text.generation import TextRow
from adlm.text.lm import LM
from adlm.text.templates import Hole, tokenize_piece

LICENSE = "PSF-2.0 (Python Software Foundation License, version 2)"
SKIPPED_DIRS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "__pycache__",
    "turtledemo",
}
BUILD_FILES = (
    "config-",
    "_sysconfigdata",
)  # how this interpreter was built: differs between machines
HELD_OUT_SHARE = 10  # every tenth file, by the hash of its name
MAX_GAP_LINES, MAX_GAP_TOKENS, MAX_COMPLETION_TOKENS = 3, 24, 128
BOOTSTRAP_RESAMPLES = 2000
PROMPT = "def "
CANDIDATE_FIELDS = ("task_id", "completion")
PROBLEM_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
PARSE_NOTE = (
    "With 95% intervals. parses: Python's parser accepts it. equal: identical to the original. parses_if_left_empty: "
    "with the gap left empty, the baseline that a model must exceed."
)
PASS_NOTE = (
    "With 95% intervals. pass@k: the chance that one of k candidates for a problem passes its test."
)
Row = dict[str, str]  # a problem by PROBLEM_FIELDS, or a candidate: task_id and completion
Sources = Mapping[str, str]  # texts of files by their path in the standard library, with /


@dataclass(frozen=True)
class Gap:
    """A function with a part taken out."""

    name: str
    before: str
    removed: str
    after: str

    @property
    def whole(self) -> str:
        return self.before + self.removed + self.after


@dataclass
class CodeMetrics:
    """The metrics of one model or of given candidates: their JSON form, and the values that they average."""

    name: str
    settings: dict[str, Any]
    entry: dict[str, Any]
    cache: Cache
    on_progress: ProgressCallback
    values: dict[str, Sequence[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, metric: str, values: Sequence[float]) -> dict[str, Any]:
        """Add a metric, and return its JSON form."""
        self.values[metric] = values
        return estimate_share(values).as_dict() | {"count": len(values)}

    def generate(self, lm: LM, stage: str, rows: Sequence[TextRow], prompt: Any) -> list[str]:
        """The texts of rows, from the cache where it has them."""
        self.on_progress(f"{self.name}: {stage}", 0, 0)
        key = hash_settings([stage, prompt, self.settings["weights_sha256"], lm.describe(rows)])
        if key not in self.cache:
            self.cache.put(key, lm.fill_rows(rows).texts, is_flushed=True)
        return list(self.cache.get(key))


@lock_output
def code(
    models: LM | Iterable[LM] = (),
    *,
    problems: str | Path | None = None,
    candidates: str | Path | None = None,
    n: int = 1,
    k: Sequence[int] = (1,),
    seconds: float = 5.0,
    memory: int = 512,
    workers: int = 1,
    unsafe: bool = False,
    texts: int = 32,
    infills: int = 32,
    length: int | None = None,
    sampler: str | None = None,
    steps: int | None = None,
    temperature: float = DEFAULT_TEMPERATURE,
    top_p: float = DEFAULT_TOP_P,
    seed: int = 0,
    batch: int = 16,
    out: str | Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure how much generated Python parses or, with `problems`, pass@k.

    Without problems, a model generates `texts` functions and fills `infills` gaps. With problems, `n` candidates each
    (or those of the file `candidates`) run against the tests, in sandboxes with a limit of `seconds` and of `memory`
    MiB; `unsafe` runs them without a sandbox, which protects nothing.
    """
    lms: list[LM] = [models] if isinstance(models, LM) else list(models)
    if candidates is not None and problems is None:
        raise ValueError(f"candidates={str(candidates)!r} solve problems: give problems too")
    if (candidates is None) != bool(lms):
        raise ValueError(
            f"{len(lms)} models and candidates={candidates}: give models, or candidates, not both"
        )
    if problems is None and n != 1:
        raise ValueError(
            f"n={n} is for problems: give problems too, or say how many with texts and infills"
        )
    if not k or min(k) < 1:
        raise ValueError(
            f"k={list(k)}: pass@k needs whole numbers from 1; give for example k=[1, 5] (--k 1,5)"
        )
    if problems is not None and candidates is None and max(k) > n:
        raise ValueError(
            f"pass@{max(k)} needs at least {max(k)} candidates for each problem, n is {n}: raise n"
        )
    if problems is not None and not unsafe and (reason := find_sandbox_problem()):
        raise ValueError(reason)
    limits, tasks = (
        Limits(seconds, memory * 2**20),
        {} if problems is None else read_problems(problems),
    )
    shared: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "batch": batch,
    }
    extent: dict[str, Any] = {"n": n}
    if problems is None:
        extent = {"texts": texts, "infills": infills, "prompt": PROMPT, "length": length}
    new, measured = (
        partial(CodeMetrics, cache=open_cache(out), on_progress=on_progress),
        list[CodeMetrics](),
    )
    for lm in lms:
        sampling = (
            shared if lm.row_format.is_causal else shared | {"sampler": sampler, "steps": steps}
        )
        about = {"model": lm.name, "weights_sha256": hash_weights(lm.model), "method": lm.method}
        measured.append(
            new(
                lm.name,
                about | {"device": str(lm.device), **sampling, **extent},
                {"model": lm.name},
            )
        )
        if problems is None:
            measure_parsing(measured[-1], lm, sampling)
        else:
            complete_problems(measured[-1], lm, tasks, sampling | extent)
    if candidates is not None:
        given = {"candidates": read_json_lines(candidates, CANDIDATE_FIELDS)}
        measured = [
            new(
                "candidates",
                {"model": None, "candidates_sha256": hash_file(Path(candidates))},
                given,
            )
        ]
    for each in measured if problems is not None else ():
        each.settings |= {"problems": len(tasks), "problems_sha256": hash_file(Path(str(problems)))}
        each.settings |= {
            "seconds": seconds,
            "memory_mib": memory,
            "isolation": "none" if unsafe else "bubblewrap",
        }
        measure_passing(each, tasks, k, limits, workers)
    rows: list[list[Any]] = []
    for metric in dict.fromkeys(metric for each in measured for metric in each.values):
        named = [(each.name, each.values[metric]) for each in measured if each.values.get(metric)]
        rows += [[metric, name, estimate_share(values), len(values)] for name, values in named]
    notes = [
        PARSE_NOTE if problems is None else PASS_NOTE,
        *(note for each in measured for note in each.notes),
    ]
    columns = [
        TableColumn("metric", is_text=True),
        TableColumn("model", is_text=True),
        TableColumn("share"),
        TableColumn("of"),
    ]
    warned = list(dict.fromkeys(warning for each in measured for warning in each.warnings))
    provenance = collect_provenance(lms[0].device if lms else "cpu")
    metrics, settings = measured[0].entry, measured[0].settings
    if len(measured) > 1:
        metrics = {"models": [each.entry | {"settings": each.settings} for each in measured]}
        settings = shared | {"sampler": sampler, "steps": steps}
    return EvalResult(
        "code", metrics, settings, provenance, [Table(columns, rows, notes=notes)], warned
    )


def estimate_share(values: Sequence[float]) -> Estimate:
    """The mean of values between 0 and 1: Wilson's 95% interval of zeros and ones, else the bootstrap's."""
    sample, count = np.asarray(values, dtype=np.float64), len(values)
    stderr = float(sample.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    if set(values) <= {0, 1}:
        scipy_stats = import_extra("scipy.stats", "intervals of shares need scipy", "eval")
        interval = scipy_stats.binomtest(int(sample.sum()), count).proportion_ci(method="wilson")
    else:
        drawn = np.random.default_rng(0).integers(0, count, (BOOTSTRAP_RESAMPLES, count))
        interval = np.quantile(sample[drawn].mean(1), (0.025, 0.975))
    return Estimate(float(sample.mean()), stderr, (float(interval[0]), float(interval[1])))


# Problems


def read_problems(path: Path | str) -> dict[str, Row]:
    """Read problems in the form of HumanEval from a jsonl file, by task_id."""
    rows = read_json_lines(path, PROBLEM_FIELDS)
    problems = {row["task_id"]: row for row in rows}
    if len(problems) < len(rows):
        raise ValueError(f"{path} has a task_id twice: every problem needs its own")
    return problems


def read_json_lines(path: Path | str, fields: Sequence[str]) -> list[Row]:
    """The fields of all objects of a jsonl file, as texts."""
    rows, names = [], ", ".join(fields)
    for number, line in enumerate(Path(path).read_text("utf-8").split("\n"), 1):
        try:
            if line.strip():
                row = json.loads(line)
                rows.append({name: str(row[name]) for name in fields})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a JSON object with {names}: {error!r}"
            ) from error
    if not rows:
        raise ValueError(f"{path} is empty: give one JSON object a line, with {names}")
    return rows


def complete_problems(
    metrics: CodeMetrics, lm: LM, problems: Mapping[str, Row], sampling: Mapping[str, Any]
) -> None:
    """Add candidates for each problem: what the model generates after the prompt, to the end of the function."""
    rows_of = {}
    for task, problem in problems.items():  # all are checked before anything is generated
        size = len(tokenize_piece(lm.tokenizer, problem["prompt"])[0]) + MAX_COMPLETION_TOKENS
        length = min(lm.row_format.longest, size)
        rows_of[task] = lm.layout_rows(problem["prompt"], length=length, **sampling)
    candidates = []
    for task, rows in rows_of.items():
        prompt = problems[task]["prompt"]
        for text in metrics.generate(lm, "candidates", rows, prompt):
            body = cut_function_body(text[len(prompt) :])
            candidates.append({"task_id": task, "completion": body})
    metrics.entry["candidates"] = candidates


def cut_function_body(text: str) -> str:
    """A completion up to the first line, after its first, that is not indented: there the function ends."""
    lines = text.splitlines(keepends=True)
    ends = (
        number
        for number, line in enumerate(lines)
        if number and line.strip() and not line[0].isspace()
    )
    return "".join(lines[: next(ends, None)])


def measure_passing(
    metrics: CodeMetrics,
    problems: Mapping[str, Row],
    ks: Sequence[int],
    limits: Limits,
    workers: int,
) -> None:
    """Run the candidates, and add pass@k as the mean over problems."""
    unsafe, candidates = metrics.settings["isolation"] == "none", metrics.entry["candidates"]
    ran, outcomes = [], {task: list[bool]() for task in problems}

    def run(candidate: Row) -> tuple[str, dict[str, Any]]:
        problem = problems[candidate["task_id"]]
        job = {"program": problem["prompt"] + candidate["completion"], "test": problem["test"]}
        job |= {
            "reference": problem["prompt"] + problem["canonical_solution"],
            "entry_point": problem["entry_point"],
        }
        key = hash_settings([job, asdict(limits), unsafe])
        return key, metrics.cache.get(key) or run_program(**job, limits=limits, unsafe=unsafe)

    counts = Counter(each["task_id"] for each in candidates)
    for task in (*problems, *counts):
        if task not in problems or counts[task] < max(ks):
            needed = (
                f"at least {max(ks)} for each of the {len(problems)} problems, and none for others"
            )
            raise ValueError(
                f"{counts[task]} candidates for {task!r}: pass@{max(ks)} needs {needed}"
            )
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for candidate, (key, result) in zip(candidates, pool.map(run, candidates), strict=True):
            metrics.cache.put(key, result)
            ran.append(candidate | result)
            outcomes[candidate["task_id"]].append(result["status"] == "passed")
            metrics.on_progress(f"{metrics.name}: tests", len(ran), len(candidates))
    metrics.cache.flush()
    statuses = dict(Counter(each["status"] for each in ran))
    metrics.notes.append(
        f"{metrics.name}: {', '.join(f'{count} {status}' for status, count in statuses.items())}."
    )
    metrics.entry |= {"candidates": ran, "statuses": statuses, "pass": {}}
    for k in ks:
        rates = [estimate_pass_at_k(len(passed), sum(passed), k) for passed in outcomes.values()]
        metrics.entry["pass"][f"pass@{k}"] = metrics.add(f"pass@{k}", rates)
    metrics.warnings += [
        "candidates ran without a sandbox (unsafe), which protects nothing"
    ] * unsafe
    if reasons := [each["reason"] for each in ran if each["status"] == "unsupported"]:
        metrics.warnings.append(
            f"{len(reasons)} unsupported candidates count as failed, the first: {reasons[0]}"
        )


def estimate_pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate from n candidates: 1 − C(n − passed, k) / C(n, k)."""
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


# Parsing


def measure_parsing(metrics: CodeMetrics, lm: LM, sampling: Mapping[str, Any]) -> None:
    """Generate functions and fill gaps, and add the shares that parse or equal the original."""
    texts, infills, length = (metrics.settings[name] for name in ("texts", "infills", "length"))
    metrics.entry |= {"generated": None, "infilled": None}
    if texts:
        generated = metrics.generate(
            lm, "texts", lm.layout_rows(PROMPT, n=texts, length=length, **sampling), PROMPT
        )
        parses = metrics.add("generated: parses", list(map(can_parse, generated)))
        metrics.entry |= {"generated": {"parses": parses}, "texts": generated}
    if infills and lm.row_format.is_causal:
        metrics.warnings.append(
            f"{lm.name} is causal, sees only what is before a gap, and fills none"
        )
    elif infills:
        metrics.settings["sources_sha256"] = hash_sources(load_standard_library())
        gaps = choose_gaps(lm, infills, sampling["seed"])
        rows = lm.layout_rows(template=[build_template(lm, gap) for gap in gaps], **sampling)
        filled = metrics.generate(lm, "lines", rows, [list(asdict(gap).values()) for gap in gaps])
        values = {
            "parses": list(map(can_parse, filled)),
            "equal": [text == gap.whole for text, gap in zip(filled, gaps, strict=True)],
            "parses_if_left_empty": [can_parse(gap.before + gap.after) for gap in gaps],
        }
        shares = {
            name: metrics.add(f"infilled lines: {name}", each) for name, each in values.items()
        }
        examples = [
            asdict(gap) | {"completion": text} for text, gap in zip(filled, gaps, strict=True)
        ]
        metrics.entry["infilled"] = {"lines": {"shares": shares, "examples": examples}}


def can_parse(text: str) -> bool:
    """Whether a text is a Python program, with at least one statement."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are not errors yet
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the errors of the parser
        return False


# The standard library


@cache
def load_standard_library() -> Sources:
    """The sources of this Python version's standard library by name, without tests, tables and build files."""
    folder, sources = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if not SKIPPED_DIRS & set(parts) and not any(
            part.startswith(BUILD_FILES) for part in (parts[0], parts[-1])
        ):
            with tokenize.open(path) as file:  # in the encoding that the source declares
                sources["/".join(parts)] = file.read().replace("\r\n", "\n")
    return {name: sources[name] for name in sorted(sources) if sources[name].strip()}


def is_held_out(name: str) -> bool:
    """Whether a file of the standard library is kept from training."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def hash_sources(sources: Sources) -> str:
    """The sha256 of names and texts."""
    digest = hashlib.sha256()
    for part in (part.encode("utf-8") for source in sources.items() for part in source):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def write_standard_library(path: Path) -> list[dict[str, Any]]:
    """Write the library as two jsonl files for `adlm prepare`: for training, and with -heldout in its name."""
    written = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, kept in ((path, False), (path.with_name(f"{path.stem}-heldout{path.suffix}"), True)):
        part = {
            name: text
            for name, text in load_standard_library().items()
            if is_held_out(name) is kept
        }
        lines = [
            json.dumps({"text": text, "name": name}, ensure_ascii=False) + "\n"
            for name, text in part.items()
        ]
        write_atomically(file, "".join(lines).encode("utf-8"))
        about = {
            "file": file.name,
            "files": len(part),
            "bytes": sum(len(text.encode()) for text in part.values()),
        }
        written.append(about | {"sha256": hash_sources(part), "license": LICENSE})
    return written


@cache
def list_held_out_functions() -> dict[str, str]:
    """The functions and methods of held-out files by file, line and name, each as a program of its own."""
    functions = {}
    for name, source in load_standard_library().items():
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)) if is_held_out(name) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
                if can_parse(text):  # a dedent may break a string that spans lines
                    functions[f"{name}:{node.lineno}:{node.name}"] = text
    return functions


class TooFewFunctionsError(ValueError):
    """Fewer held-out functions fit into the rows of a model than are asked for."""


def choose_gaps(lm: LM, count: int, seed: int) -> list[Gap]:
    """Choose `count` functions of held-out files that fit the model, each with a gap."""
    rng, longest, gaps = np.random.default_rng(seed), lm.row_format.longest, list[Gap]()
    functions = list(list_held_out_functions().items())
    for name, text in (functions[number] for number in rng.permutation(len(functions))):
        # A function with more characters is too long to be worth tokenizing.
        if len(text) <= 8 * longest and (spans := list_spans(text)):
            begin, end = spans[int(rng.integers(len(spans)))]
            gap = Gap(name, text[:begin], text[begin:end], text[end:])
            sizes = [
                len(tokenize_piece(lm.tokenizer, piece)[0])
                for piece in (gap.before, gap.removed, gap.after)
            ]
            if 1 <= sizes[1] <= MAX_GAP_TOKENS and sum(sizes) <= longest:
                gaps.append(gap)
        if len(gaps) == count:
            return gaps
    problem = f"only {len(gaps)} of {len(functions)} held-out functions fit into {longest} tokens, not {count}"
    raise TooFewFunctionsError(f"{problem}: lower infills, or use a model with longer rows")


def build_template(lm: LM, gap: Gap) -> list[str | Hole]:
    """The function with a hole as long as what was taken out."""
    hole = Hole.of_length(len(tokenize_piece(lm.tokenizer, gap.removed)[0]))
    return [piece for piece in (gap.before, hole, gap.after) if piece]


def list_spans(text: str) -> list[tuple[int, int]]:
    """Where one to three whole lines of a function's body are, from their indentation to before their line end."""
    lines = text.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    spans = []
    for first in range(function.body[0].lineno - 1, len(lines)):
        begin = starts[first] + len(lines[first]) - len(lines[first].lstrip(" "))
        for last in range(first, min(first + MAX_GAP_LINES, len(lines))):
            if lines[last] and text[begin : starts[last + 1] - 1].strip():
                spans.append((begin, starts[last + 1] - 1))
    return spans
