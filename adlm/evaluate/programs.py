"""Programs by their tests: problems in HumanEval's form, each candidate in a process of its own, and pass@k.

Candidates are code that nobody has read. Each gets a time and memory limit, no stdin, an empty folder, no network and
no processes (see `cell`); that stops accidents and the usual tricks. It is no wall against an attacker: run models that
you do not trust in a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CELL = Path(__file__).with_name("cell.py")  # the child's side
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
REFUSAL = (
    "running programs that a model wrote can do harm, and nobody has read them: add --allow-code-execution "
    "(allow_execution=True) if this machine may run them"
)


@dataclass(frozen=True)
class Problem:
    """A function to be written: its beginning, and a test that defines `check(candidate)`."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


@dataclass(frozen=True)
class Candidate:
    """What was written after a problem's prompt."""

    task_id: str
    completion: str


@dataclass(frozen=True)
class Allowance:
    """What a candidate may use."""

    seconds: float = 5.0
    memory: int = 512 * 2**20  # bytes of address space
    file_size: int = 2**20

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 3600:
            raise ValueError(f"a time limit is between 0 and 3600 seconds, got {self.seconds}")
        if self.memory < 64 * 2**20:
            raise ValueError(f"an interpreter alone takes some 64 MiB; the memory limit is {self.memory / 2**20:g} MiB")


@dataclass(frozen=True)
class Verdict:
    """How a candidate ended: passed, failed, syntax, memory, time or died, and why."""

    task_id: str
    status: str
    why: str
    seconds: float
    network: str  # `alone`: a network namespace of its own; `hook`: sockets refused in the interpreter

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class Share:
    """A share of problems or texts, its standard error over them, and a 95% interval."""

    value: float
    stderr: float
    low: float
    high: float
    count: int


def read_problems(path: Path | str) -> list[Problem]:
    """Problems of a jsonl file in HumanEval's form."""
    problems = [Problem(**{name: str(row[name]) for name in FIELDS}) for row in _rows(path, FIELDS)]
    if len({each.task_id for each in problems}) < len(problems):
        raise ValueError(f"{path} has a task_id twice: every problem needs one of its own")
    return problems


def read_candidates(path: Path | str, problems: Sequence[Problem]) -> list[Candidate]:
    """Candidates of a jsonl file, {task_id, completion} a line."""
    known = {each.task_id for each in problems}
    found = [Candidate(str(row["task_id"]), str(row["completion"])) for row in _rows(path, ("task_id", "completion"))]
    if unknown := [each.task_id for each in found if each.task_id not in known]:
        raise ValueError(f"{path} has a candidate for {unknown[0]!r}, which is none of the {len(known)} problems")
    tried = {each.task_id for each in found}
    if left := [each.task_id for each in problems if each.task_id not in tried]:
        raise ValueError(
            f"{path} has no candidate for {len(left)} of {len(known)} problems, {left[0]!r} among them: pass@k is over "
            "all of them; give one for each, or take those problems out of the file"
        )
    return found


def _rows(path: Path | str, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    lines = Path(path).read_text("utf-8").splitlines()
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path} is empty: give one JSON object a line, with {', '.join(fields)}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON ({error}): give one object a line") from error
        if not isinstance(row, dict) or (missing := [name for name in fields if name not in row]):
            lacking = ", ".join(missing) if isinstance(row, dict) else "everything"
            raise ValueError(f"{path}, line {number} lacks {lacking}: a line has {', '.join(fields)}")
        yield row


def try_candidate(
    problem: Problem,
    completion: str,
    allowance: Allowance = Allowance(),  # noqa: B008 (frozen)
    *,
    allow_execution: bool = False,
    leave_network: bool = True,
) -> Verdict:
    """Run a candidate and its test in a process of its own, and tell how it ended."""
    if not allow_execution:
        raise ValueError(REFUSAL)
    word = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="adlm-candidate-", ignore_cleanup_errors=True))
        proof, answer = _pipe(stack), _pipe(stack)
        os.write(proof[1], word.encode())
        given = {
            "program": problem.prompt + completion,
            "test": problem.test,
            "entry_point": problem.entry_point,
            "proof": proof[0],
            "answer": answer[1],
            "cpu_seconds": math.ceil(allowance.seconds) + 1,
            "memory": allowance.memory,
            "file_size": allowance.file_size,
            "leave_network": leave_network,
        }
        began = time.perf_counter()
        # No site packages, nothing written beside sources, no folder of ours on the path, no variables of ours.
        process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", str(CELL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
            pass_fds=(proof[0], answer[1]),
            start_new_session=True,
        )
        is_late = False
        try:
            process.communicate(json.dumps(given).encode(), timeout=allowance.seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole session is gone already
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        seconds = time.perf_counter() - began
        os.set_blocking(answer[0], False)
        try:
            told = os.read(answer[0], 65536).decode("utf-8", "replace")
        except BlockingIOError:
            told = ""
    network, _, report = told.partition("\n")
    status, why = _status(report, word, is_late, process.returncode, allowance)
    return Verdict(problem.task_id, status, why, seconds, network or "unknown")


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _status(report: str, word: str, is_late: bool, code: int, allowance: Allowance) -> tuple[str, str]:
    """How it ended, by what the child said and by what the system says of it."""
    if is_late or code == -signal.SIGXCPU:
        return "time", f"longer than {allowance.seconds:g} seconds"
    status, _, rest = report.partition(" ")
    said, _, why = rest.partition(" ")
    if status == "passed" and said == word:
        return "passed", ""
    if status in ("failed", "syntax", "memory"):
        return status, why
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "died", f"ended before its test did ({ended})"


def try_all(
    problems: Sequence[Problem],
    candidates: Sequence[Candidate],
    allowance: Allowance = Allowance(),  # noqa: B008 (frozen)
    *,
    allow_execution: bool = False,
    workers: int = 1,
) -> Iterator[Verdict]:
    """The verdict on every candidate, in order."""
    if not allow_execution:
        raise ValueError(REFUSAL)
    by_id = {each.task_id: each for each in problems}
    with ThreadPoolExecutor(max_workers=workers) as pool:
        yield from pool.map(
            lambda each: try_candidate(by_id[each.task_id], each.completion, allowance, allow_execution=True),
            candidates,
        )


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate from n candidates: 1 - C(n - passed, k) / C(n, k)."""
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} candidates, {passed} of which passed: k is between 1 and their number")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def solved_share(verdicts: Iterable[Verdict], k: int, *, resamples: int = 2000, seed: int = 0) -> Share:
    """pass@k: the mean over problems, its standard error, and a bootstrap interval over problems."""
    counts: Mapping[str, list[bool]] = defaultdict(list)
    for each in verdicts:
        counts[each.task_id].append(each.passed)
    if not counts:
        raise ValueError("there are no verdicts: give candidates")
    if few := [(task, len(each)) for task, each in counts.items() if len(each) < k]:
        raise ValueError(f"pass@{k} needs {k} candidates a problem, {few[0][0]!r} has {few[0][1]}: write more (--n)")
    values = np.array([pass_at_k(len(each), sum(each), k) for each in counts.values()])
    return mean_share(values, resamples=resamples, seed=seed)


def mean_share(values: np.ndarray[Any, np.dtype[np.float64]], *, resamples: int = 2000, seed: int = 0) -> Share:
    """The mean of values between 0 and 1, its standard error, and a 95% interval.

    Of zeros and ones the interval is Wilson's, which is honest where all are alike; else the bootstrap's.
    """
    count, mean = len(values), float(values.mean())
    stderr = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    if bool(np.isin(values, (0.0, 1.0)).all()):
        low, high = wilson(int(values.sum()), count)
    else:
        drawn = np.random.default_rng(seed).integers(0, count, (resamples, count))
        low, high = (float(each) for each in np.quantile(values[drawn].mean(1), (0.025, 0.975)))
    return Share(mean, stderr, low, high, count)


def wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    share, extra = hits / count, z * z / count
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / count + extra / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
