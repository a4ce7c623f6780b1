"""Evaluates Python code: the share of generated and filled-in functions that parse, and pass@k of problems.

The functions are those of the running interpreter's standard library (PSF license): the same for one version of Python
on every machine, which `hash_sources` shows. Problems have the form of HumanEval; `adlm.evaluate.sandbox` runs them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import sysconfig
import textwrap
import threading
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.data.shards import hash_file
from adlm.evaluate.cache import Cache, hash_settings, open_cache
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Cell, Column, Estimate, EvalResult, ProgressCallback, Table, ignore_progress
from adlm.evaluate.sandbox import Limits, ProgramResult, find_sandbox_problem, run_program
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM
from adlm.text.templates import Hole, tokenize_piece
from adlm.training.distributed import DistributedContext

LICENSE = "PSF-2.0 (Python Software Foundation License, version 2)"
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "turtledemo")
GAP_KINDS = ("lines", "expression")
HELD_OUT_SHARE = 10  # every tenth file, by the hash of its name
MAX_GAP_TOKENS = 24
MAX_COMPLETION_TOKENS = 128
BOOTSTRAP_RESAMPLES = 2000
PROMPT = "def "
CACHE_LOCK = threading.Lock()
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
PARSE_NOTE = (
    "With 95% intervals. parses: Python's parser accepts it. equal: identical to the original. parses_if_left_empty: "
    "with the gap left empty, the baseline that a model must exceed."
)
PASS_NOTE = "With 95% intervals. pass@k: the chance that one of k candidates for a problem passes its test."
Row = dict[str, str]  # a problem by FIELDS, or a candidate: task_id and completion


@dataclass(frozen=True)
class SourceFile:
    """A file of the standard library."""

    name: str  # its path inside the library, with /
    text: str

    @property
    def is_held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Gap:
    """A function with a part taken out."""

    name: str
    before: str
    removed: str
    after: str
    kind: str

    @property
    def whole(self) -> str:
        return self.before + self.removed + self.after


@dataclass(frozen=True)
class ModelCode:
    """The results of one model: their JSON form, settings, and by metric the values of the items they average."""

    entry: dict[str, Any]
    settings: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)  # what the values are of, where two models may share it

    @property
    def name(self) -> str:
        return str(self.entry.get("model", "candidates"))

    def add(self, metric: str, values: Sequence[float], items: Any = None) -> dict[str, Any]:
        """Add a metric, and return its JSON form."""
        self.values[metric], self.items[metric] = list(map(float, values)), items
        return estimate_share(values).as_dict() | {"count": len(values)}


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
    temperature: float = 1.0,
    top_p: float = 0.9,
    seed: int = 0,
    batch: int = 16,
    out: Path | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure how much generated Python parses or, with `problems`, pass@k.

    Without problems, a model generates `texts` functions and fills `infills` gaps of each kind. With problems, `n`
    candidates each (or those of the file `candidates`) run against the tests, in sandboxes with a limit of `seconds`
    and of `memory` MiB; `unsafe` runs them without a sandbox, which protects nothing.
    """
    lms: list[LM] = [models] if isinstance(models, LM) else list(models)
    if candidates is not None and problems is None:
        raise ValueError(f"candidates={str(candidates)!r} solve problems: give problems too")
    if (candidates is None) != bool(lms):
        raise ValueError("give models, or problems with candidates, and not both")
    if not k or min(k) < 1:
        raise ValueError(f"k={list(k)} must be whole numbers from 1, for example 1,5")
    if problems is not None and candidates is None and max(k) > n:
        raise ValueError(f"pass@{max(k)} needs at least {max(k)} candidates for each problem, n is {n}: raise n")
    if problems is not None and not unsafe and (reason := find_sandbox_problem()):
        raise ValueError(reason)
    device = lms[0].device if lms else torch.device("cpu")
    cache = open_cache(out, DistributedContext(device))
    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "batch": batch}
    measured, notes, tasks = [], [], [] if problems is None else read_problems(problems)
    for lm in lms:
        is_causal, about = lm.row_format.is_causal, {"model": lm.name, "weights_sha256": hash_weights(lm.model)}
        own = sampling if is_causal else sampling | {"sampler": sampler, "steps": steps}
        found = ModelCode({"model": lm.name}, about | {"method": lm.method, "device": str(lm.device)} | own)
        if problems is None:
            found.settings.update(texts=texts, infills=infills, prompt=PROMPT, length=length)
            measure_parsing(found, lm, texts, infills, cache, on_progress, own | {"length": length})
            notes += [f"{lm.name} is causal, sees only what is before a gap, and fills none"] * (
                is_causal and infills > 0
            )
        else:
            on_progress(f"{lm.name}: candidates", 0, 0)
            found.entry["candidates"] = complete_problems(lm, tasks, n, cache, about, own)
            found.settings["n"] = n
        measured.append(found)
    if problems is not None:
        if candidates is not None:
            given = {"model": None, "candidates_sha256": hash_file(Path(candidates))}
            measured.append(ModelCode({"candidates": read_candidates(candidates, tasks)}, given))
        run = partial(run_program, limits=Limits(seconds, memory * 2**20), unsafe=unsafe)
        shared = {"problems": len(tasks), "problems_sha256": hash_file(Path(problems)), "seconds": seconds}
        shared |= {"memory_mib": memory, "isolation": "none" if unsafe else "bubblewrap"}
        notes += ["candidates ran without a sandbox (unsafe), which protects nothing"] * unsafe
        for found in measured:
            found.settings.update(shared)
            notes += measure_passing(found, tasks, k, run, shared, workers, cache, on_progress)
    differences, provenance = compare_models(measured), collect_provenance(device)
    tables = build_tables(measured, differences, PARSE_NOTE if problems is None else PASS_NOTE)
    if len(measured) == 1:
        return EvalResult("code", measured[0].entry, measured[0].settings, provenance, tables, notes)
    entries = [found.entry | {"settings": found.settings} for found in measured]
    metrics = {"models": entries, "differences": differences}
    return EvalResult("code", metrics, sampling | {"sampler": sampler, "steps": steps}, provenance, tables, notes)


def compare_models(measured: Sequence[ModelCode]) -> list[dict[str, Any]]:
    """The paired difference of each further model to the first, of every metric that both have on the same items."""
    differences, baseline = [], measured[0]
    for found in measured[1:]:
        for metric, items in found.items.items():
            if items and items == baseline.items.get(metric):
                change = np.subtract(found.values[metric], baseline.values[metric])
                error = float(change.std(ddof=1) / math.sqrt(len(change))) if len(change) > 1 else None
                pair = {"metric": metric, "model": found.name, "baseline": baseline.name, "count": len(change)}
                differences.append(pair | {"difference": float(change.mean()), "se": error})
    return differences


def build_tables(measured: Sequence[ModelCode], differences: Sequence[dict[str, Any]], note: str) -> list[Table]:
    """One row for each metric of each model, and the paired differences."""
    names = ("metric", "model", "share", "of")
    columns = [Column(name, is_text=name in ("metric", "model")) for name in names]
    metrics = dict.fromkeys(metric for found in measured for metric in found.values)
    pairs = [(metric, found) for metric in metrics for found in measured if metric in found.values]
    rows: list[list[Cell]]
    rows = [[name, each.name, estimate_share(each.values[name]), len(each.values[name])] for name, each in pairs]
    ends = {found.name: found.entry["ends"].items() for found in measured if "ends" in found.entry}
    notes = [f"{name}: {', '.join(f'{count} {status}' for status, count in each)}." for name, each in ends.items()]
    tables = [Table(list(columns), rows, notes=[note, *notes])]
    rows = []
    for each in differences:
        change = Estimate(each["difference"], each["se"])
        rows.append([each["metric"], f"{each['model']} − {each['baseline']}", change, each["count"]])
    columns[2] = Column("difference")
    return [*tables, Table(columns, rows, title="Paired differences")] if rows else tables


def estimate_share(values: Sequence[float]) -> Estimate:
    """The mean of values between 0 and 1: Wilson's 95% interval of zeros and ones, else the bootstrap's."""
    sample, count = np.asarray(values, dtype=np.float64), len(values)
    stderr = float(sample.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    if bool(np.isin(sample, (0.0, 1.0)).all()):
        try:
            from scipy.stats import binomtest
        except ImportError as error:
            raise ImportError(f"intervals of shares need scipy ({error}): pip install 'adlm[eval]'") from error
        interval = binomtest(int(sample.sum()), count).proportion_ci(method="wilson")
    else:
        drawn = np.random.default_rng(0).integers(0, count, (BOOTSTRAP_RESAMPLES, count))
        interval = np.quantile(sample[drawn].mean(1), (0.025, 0.975))
    low, high = map(float, interval)
    return Estimate(float(sample.mean()), stderr, (low, high))


def recall(cache: Cache, settings: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """The cached result of these settings, or a new one."""
    key = hash_settings(settings)
    if key not in cache:
        result = compute()
        with CACHE_LOCK:
            cache.put(key, result)
            cache.flush()
    return cache.get(key)


# Problems


def read_problems(path: Path | str) -> list[Row]:
    """Read problems in the form of HumanEval from a jsonl file."""
    problems = list(read_json_lines(path, FIELDS))
    if len({each["task_id"] for each in problems}) < len(problems):
        raise ValueError(f"{path} has a task_id twice: every problem needs its own")
    return problems


def read_candidates(path: Path | str, problems: Sequence[Row]) -> list[Row]:
    """Read candidates from a jsonl file of task_id and completion; every problem needs one."""
    candidates = list(read_json_lines(path, ("task_id", "completion")))
    known, tried = [each["task_id"] for each in problems], {each["task_id"] for each in candidates}
    if unknown := sorted(tried - set(known)):
        raise ValueError(f"{path} has a candidate for {unknown[0]!r}, which is none of the {len(known)} problems")
    if left := [task for task in known if task not in tried]:
        raise ValueError(
            f"{path} has no candidate for {len(left)} of {len(known)} problems, {left[0]!r} among them: pass@k is over "
            "all of them; give one for each, or remove those problems from the file"
        )
    return candidates


def read_json_lines(path: Path | str, fields: Sequence[str]) -> Iterator[Row]:
    """The fields of all objects of a jsonl file, as texts."""
    lines = Path(path).read_text("utf-8").splitlines()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path} is empty: give one JSON object a line, with {', '.join(fields)}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): give one object a line") from error
        if not isinstance(row, dict) or (missing := [name for name in fields if name not in row]):
            lacking = ", ".join(missing) if isinstance(row, dict) else "everything"
            raise ValueError(f"{path}, line {number} lacks {lacking}: a line has {', '.join(fields)}")
        yield {name: str(row[name]) for name in fields}


def complete_problems(
    lm: LM, problems: Sequence[Row], n: int, cache: Cache, about: dict[str, Any], sampling: dict[str, Any]
) -> list[Row]:
    """`n` candidates for each problem: what the model generates after the prompt, to the end of the function."""
    candidates = []
    for task, prompt in ((each["task_id"], each["prompt"]) for each in problems):
        size, longest = len(tokenize_piece(lm.tokenizer, prompt)[0]), lm.row_format.longest
        if size >= longest:
            raise ValueError(
                f"the prompt of {task} has {size} tokens, this model's rows hold {longest}: remove the problem, or use "
                "a model with longer rows"
            )
        request = lm.build_request(prompt, length=min(longest, size + MAX_COMPLETION_TOKENS), n=n, **sampling)
        key = {"task": "completions", "about": about, "prompt": prompt, **request.settings}
        texts = recall(cache, key, lambda: [row.pieces[-1][0] for row in lm.generate_rows(request)])  # noqa: B023
        candidates += [{"task_id": task, "completion": cut_function_body(text)} for text in texts]
    return candidates


def cut_function_body(text: str) -> str:
    """A completion up to the first line, after its first, that is not indented: there the function ends."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and not line[0].isspace():
            return "".join(lines[:number])
    return text


def measure_passing(
    found: ModelCode,
    problems: Sequence[Row],
    ks: Sequence[int],
    run: Callable[..., ProgramResult],
    settings: dict[str, Any],
    workers: int,
    cache: Cache,
    on_progress: ProgressCallback,
) -> list[str]:
    """Run the candidates, and add pass@k as the mean over problems; returns warnings."""
    by_id, candidates, results = {each["task_id"]: each for each in problems}, found.entry["candidates"], []

    def run_candidate(candidate: Row) -> dict[str, Any]:
        problem = by_id[candidate["task_id"]]
        programs = [problem["prompt"] + each for each in (candidate["completion"], problem["canonical_solution"])]
        programs += [problem["test"], problem["entry_point"]]
        return candidate | recall(cache, {"programs": programs, **settings}, lambda: asdict(run(*programs)))

    with ThreadPoolExecutor(max_workers=workers) as pool:
        for result in pool.map(run_candidate, candidates):
            results.append(result)
            on_progress(f"{found.name}: tests", len(results), len(candidates))
    found.entry.update({"candidates": results, "ends": dict(Counter(each["status"] for each in results)), "pass": {}})
    for k in ks:
        rates = []
        for task in by_id:
            passed = [each["status"] == "passed" for each in results if each["task_id"] == task]
            if len(passed) < k:
                raise ValueError(
                    f"pass@{k} needs {k} candidates for each problem, {task!r} has {len(passed)}: give more"
                )
            rates.append(estimate_pass_at_k(len(passed), sum(passed), k))
        found.entry["pass"][f"pass@{k}"] = found.add(f"pass@{k}", rates, list(by_id))
    reasons = [each["reason"] for each in results if each["status"] == "unsupported"]
    return [f"{len(reasons)} unsupported candidates count as failed, the first: {reasons[0]}"] if reasons else []


def estimate_pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate from n candidates: 1 − C(n − passed, k) / C(n, k)."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} candidates, {passed} of which passed: k must be between 1 and their number")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


# Parsing


def measure_parsing(
    found: ModelCode,
    lm: LM,
    texts: int,
    infills: int,
    cache: Cache,
    on_progress: ProgressCallback,
    sampling: dict[str, Any],
) -> None:
    """Generate functions and fill gaps, and add the shares that parse, equal the original, or have its syntax tree."""

    def generate(stage: str, request: GenerationRequest, key: Any) -> list[str]:
        on_progress(f"{lm.name}: {stage}", 0, 0)
        settings = {"task": stage, "key": key, "weights": found.settings["weights_sha256"], **request.settings}
        return list(recall(cache, settings, lambda: lm.run_request(request).texts))

    found.entry.update(written=None, filled_in=None)
    if texts:
        written = generate("texts", lm.build_request(PROMPT, n=texts, **sampling), PROMPT)
        metrics: dict[str, Sequence[float]]
        metrics = {"parses": list(map(can_parse, written)), "parsing_lines": list(map(share_parsing_lines, written))}
        shares = {name: found.add(f"written: {name}", values) for name, values in metrics.items()}
        found.entry.update(written=shares, texts=written)
    if not infills or lm.row_format.is_causal:
        return
    sources, filling = load_standard_library(), {key: each for key, each in sampling.items() if key != "length"}
    found.settings["sources_sha256"], found.entry["filled_in"] = hash_sources(sources), {}
    for kind in GAP_KINDS:
        gaps = choose_gaps(sources, lm, infills, kind=kind, seed=sampling["seed"])
        items = [list(asdict(gap).values()) for gap in gaps]
        filled = generate(kind, lm.build_request(template=[build_template(lm, gap) for gap in gaps], **filling), items)
        pairs = list(zip(filled, gaps, strict=True))
        metrics = {
            "parses": [can_parse(text) for text in filled],
            "equal": [text == gap.whole for text, gap in pairs],
            "same_tree": [dump_tree(text) == dump_tree(gap.whole) for text, gap in pairs],
            "parses_if_left_empty": [can_parse(gap.before + gap.after) for gap in gaps],
        }
        shares = {name: found.add(f"filled in, {kind}: {name}", values, items) for name, values in metrics.items()}
        examples = [{**asdict(gap), "written": text} for text, gap in pairs]
        found.entry["filled_in"][kind] = {"shares": shares, "examples": examples}


def can_parse(text: str) -> bool:
    """Whether a text is a Python program, with at least one statement."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are not errors yet
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the errors of the parser
        return False


def share_parsing_lines(text: str) -> float:
    """The share of a text's lines in its longest beginning that parses: a text may be cut off at its end."""
    lines = text.splitlines()
    ends = (end for end in range(len(lines), 0, -1) if can_parse("\n".join(lines[:end])))
    return next(ends, 0) / len(lines) if lines else 0.0


def dump_tree(text: str) -> str | None:
    """The syntax tree of a program as text, None where it does not parse."""
    return ast.dump(ast.parse(text)) if can_parse(text) else None


# The standard library


def load_standard_library(folder: Path | None = None) -> list[SourceFile]:
    """The sources of the standard library in the order of their names, without tests and generated tables."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if set(parts) & set(LEFT_OUT) or parts[0].startswith("config-"):
            continue
        if parts[-1].startswith("_sysconfigdata"):  # how this interpreter was built: differs between machines
            continue
        with tokenize.open(path) as file:  # in the encoding that the source declares
            text = file.read().replace("\r\n", "\n")
        if text.strip():
            sources.append(SourceFile("/".join(parts), text))
    if not sources:
        raise ValueError(f"{folder} has no Python sources: use an interpreter that comes with its library's")
    return sorted(sources, key=lambda source: source.name)


def hash_sources(sources: Sequence[SourceFile]) -> str:
    """The sha256 of names and texts."""
    digest = hashlib.sha256()
    for part in (part for source in sources for part in (source.name, source.text)):
        data = part.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def write_standard_library(path: Path) -> list[dict[str, Any]]:
    """Write the library as two jsonl files for `adlm prepare`: for training, and with -heldout in its name."""
    sources, written = load_standard_library(), []
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, is_held_out in ((path, False), (path.with_name(f"{path.stem}-heldout{path.suffix}"), True)):
        part = [each for each in sources if each.is_held_out is is_held_out]
        lines = [json.dumps({"text": each.text, "name": each.name}, ensure_ascii=False) + "\n" for each in part]
        file.write_bytes("".join(lines).encode("utf-8"))
        size = sum(len(each.text.encode("utf-8")) for each in part)
        about = {"file": file.name, "files": len(part), "bytes": size, "sha256": hash_sources(part)}
        written.append(about | {"license": LICENSE})
    return written


def list_functions(source: SourceFile) -> Iterator[tuple[str, str]]:
    """The functions and methods of a file, each as a program of its own."""
    lines = source.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
            if can_parse(text):  # a dedent may break a string that spans lines
                yield f"{source.name}:{node.lineno}:{node.name}", text


def choose_gaps(sources: Sequence[SourceFile], lm: LM, count: int, *, kind: str = "lines", seed: int = 0) -> list[Gap]:
    """Choose `count` functions of held-out files that fit the model, each with a gap.

    `lines` takes out one to three whole lines of the body, `expression` the inside of one expression.
    """
    if kind not in GAP_KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(GAP_KINDS)}")
    rng, longest = np.random.default_rng(seed), lm.row_format.longest
    held_out = [source for source in sources if source.is_held_out]
    functions = [each for source in held_out for each in list_functions(source)]
    gaps: list[Gap] = []
    for number in rng.permutation(len(functions)):
        name, text = functions[number]
        if len(text) > 8 * longest:  # too long to be worth tokenizing
            continue
        spans = _list_line_spans(text) if kind == "lines" else _list_expression_spans(text)
        if not spans:
            continue
        begin, end = spans[int(rng.integers(len(spans)))]
        gap = Gap(name, text[:begin], text[begin:end], text[end:], kind)
        sizes = [len(tokenize_piece(lm.tokenizer, piece)[0]) for piece in (gap.before, gap.removed, gap.after)]
        if 1 <= sizes[1] <= MAX_GAP_TOKENS and sum(sizes) <= longest:
            gaps.append(gap)
        if len(gaps) == count:
            return gaps
    raise ValueError(
        f"only {len(gaps)} of {count} functions of {len(held_out)} held-out files fit into {longest} tokens: lower "
        "infills, or use a model with longer rows"
    )


def build_template(lm: LM, gap: Gap) -> list[str | Hole]:
    """The function with a hole as long as what was taken out."""
    hole = Hole.of_length(len(tokenize_piece(lm.tokenizer, gap.removed)[0]))
    return [piece for piece in (gap.before, hole, gap.after) if piece]


def _list_line_spans(text: str) -> list[tuple[int, int]]:
    """Where one to three whole lines of the body stand, from their indentation to before their line end."""
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == "\n"), len(text) + 1]
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    spans = []
    for line in range(node.body[0].lineno - 1, len(starts) - 1):
        begin = starts[line] + len(text[starts[line] :]) - len(text[starts[line] :].lstrip(" "))
        for last in range(line, min(line + 3, len(starts) - 1)):
            end = starts[last + 1] - 1
            if begin < end <= len(text) and text[begin:end].strip() and text[end - 1] != "\n":
                spans.append((begin, end))
    return spans


def _list_expression_spans(text: str) -> list[tuple[int, int]]:
    """Where expressions on one line stand."""
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == "\n")]
    lines, spans = text.splitlines(), set()
    for node in ast.walk(ast.parse(text).body[0]):
        inside = getattr(node, "value", None) if isinstance(node, ast.Return | ast.Assign | ast.keyword) else None
        for each in [inside, *(node.args if isinstance(node, ast.Call) else ())]:
            if isinstance(each, ast.expr) and each.lineno == each.end_lineno and each.end_col_offset is not None:
                line = lines[each.lineno - 1].encode()  # columns count bytes
                begin, end = (len(line[:at].decode()) for at in (each.col_offset, each.end_col_offset))
                spans.add((starts[each.lineno - 1] + begin, starts[each.lineno - 1] + end))
    return sorted(spans)
