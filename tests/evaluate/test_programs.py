"""Candidates are run, held to their limits, and counted without bias."""

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from adlm.evaluate.programs import (
    Allowance,
    Candidate,
    Problem,
    Verdict,
    mean_share,
    pass_at_k,
    read_candidates,
    read_problems,
    solved_share,
    try_all,
    try_candidate,
    wilson,
)

FILE = Path(__file__).with_name("problems.jsonl")
PROBLEMS = read_problems(FILE)
LOADS = "from importlib.machinery import ExtensionFileLoader as L, ModuleSpec as S\n"
LOADS += "L('x', 'x.so').create_module(S('x', L('x', 'x.so'), origin='x.so'))"
LIBRARY = "import os, json\nd = os.open(os.path.dirname(json.__file__), 0)\nos.open('x', os.O_CREAT, dir_fd=d)"
SHORT = Allowance(seconds=2.0, memory=256 * 2**20)


def tried(body: str, allowance: Allowance = SHORT, problem: Problem = PROBLEMS[0]) -> Verdict:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return try_candidate(problem, lines, allowance, allow_execution=True)


def test_canonical_solutions_pass() -> None:
    candidates = [Candidate(each.task_id, each.canonical_solution) for each in PROBLEMS]
    verdicts = list(try_all(PROBLEMS, candidates, SHORT, allow_execution=True, workers=2))
    assert [each.task_id for each in verdicts] == [each.task_id for each in PROBLEMS]
    assert all(each.passed for each in verdicts), verdicts
    assert solved_share(verdicts, 1).value == 1.0


def test_the_solution_of_another_problem_does_not() -> None:
    for one, other in zip(PROBLEMS, PROBLEMS[1:] + PROBLEMS[:1]):
        verdict = try_candidate(one, other.canonical_solution, SHORT, allow_execution=True)
        assert verdict.status == "failed", verdict


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ("return 0", "failed", "test: AssertionError"),
        ("return 1 / 0", "failed", "test: ZeroDivisionError"),
        ("return (", "syntax", "candidate: SyntaxError"),
        ("while True: pass", "time", "longer than 2 seconds"),
        ("import time\ntime.sleep(60)", "time", "longer than 2 seconds"),
        ("return len(bytearray(2**30))", "memory", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 2**20)", "memory", "MemoryError"),
        ("import sys\nsys.exit(0)", "failed", "test: SystemExit: 0"),
        ("raise SystemExit", "failed", "SystemExit"),
        ("import os\nos._exit(0)", "died", "ended before its test did (exit code 0)"),
        ("import os\nos.abort()", "died", "signal 6"),
        ("def f(): return f()\nreturn f()", "failed", "RecursionError"),
        ("import os\nif os.fork() == 0:\n    os._exit(0)", "failed", "may not do this: os.fork"),
        ("import os\nwhile True: os.fork()", "failed", "may not do this: os.fork"),
        ("import subprocess\nsubprocess.run(['true'])", "failed", "may not do this: subprocess.Popen"),
        ("import os\nos.system('true')", "failed", "may not do this: os.system"),
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "failed", "may not do this"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "failed", "may not do this: socket."),
        ("import socket\nsocket.socket()", "failed", "may not do this: socket."),
        ("from urllib.request import urlopen\nurlopen('http://example.org')", "failed", "may not do this: socket."),
        ("import ctypes\nreturn ctypes.CDLL(None)", "failed", "may not import ctypes"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9, 9))", "failed", "may not do this: resource."),
        ("import os\nos.kill(os.getppid(), 9)", "failed", "may not do this: os.kill"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "time", "longer"),
        ("return input()", "failed", "EOFError"),
        ("open('/etc/passwd').read()", "failed", "may not open"),
        ("import pathlib\npathlib.Path('..', 'x').write_text('x')", "failed", "may not open"),
        (LIBRARY, "failed", "may not open"),
        ("import os\nos.open('.', 0)", "failed", "may not open"),
        ("import os\nreturn os.listdir('/')", "failed", "may not look into /"),
        ("import os\nos.mkfifo('x')", "failed", "has no attribute 'mkfifo'"),
        ("import _posixsubprocess\n_posixsubprocess.fork_exec()", "failed", "may not do this: fork_exec"),
        ("import sys\ndel sys.modules['_posixsubprocess']\nimport _posixsubprocess", "failed", "may not import"),
        (f"open('x.so', 'wb').write(b'x')\n{LOADS}", "failed", "native code of its own"),
        ("open('big', 'wb').write(bytes(2**22))", "failed", "OSError"),
        ("import torch", "failed", "ModuleNotFoundError"),
    ],
)
def test_what_must_not_pass_does_not(body: str, status: str, why: str) -> None:
    began = time.perf_counter()
    verdict = tried(body)
    assert (verdict.status, why in verdict.why) == (status, True), verdict
    assert time.perf_counter() - began < SHORT.seconds + 2


def test_a_forged_report_does_not_pass() -> None:
    """Every descriptor written to, and the streams: the word that proves the test's end is not known."""
    forged = "import os\nfor i in range(40):\n    try: os.write(i, b'passed - ')\n    except OSError: pass\nos._exit(0)"
    assert tried(forged).status == "died"
    assert tried("print('passed')\nreturn 0").status == "failed"


def test_the_library_can_be_used() -> None:
    """What is refused is not in the way of honest programs."""
    modules = "asyncio, subprocess, multiprocessing, concurrent.futures, platform, sqlite3, decimal, csv, tempfile, os"
    body = f"import {modules}\nopen('x', 'w').close()\nos.listdir('.')\nraise ValueError('got here')"
    assert tried(body).why.endswith("got here")


def test_a_candidate_may_write_in_its_own_folder_which_goes_with_it() -> None:
    verdict = tried("open('x', 'w').write('5')\nraise ValueError(__import__('os').getcwd())")
    folder = verdict.why.rpartition(" ")[2]
    assert "adlm-candidate-" in folder and not Path(folder).exists()


def test_variables_of_ours_stay_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "tell nobody")
    verdict = tried("import os\nraise ValueError(sorted(os.environ))")
    assert "HOME" in verdict.why and "SECRET_KEY" not in verdict.why


def test_sets_are_in_the_same_order_every_time() -> None:
    body = "raise ValueError(''.join({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert tried(body).why == tried(body).why


def test_the_network_is_said_and_sockets_are_refused_without_a_namespace_too() -> None:
    body = "    import socket\n    socket.socket()\n"
    for leave in (True, False):
        verdict = try_candidate(PROBLEMS[0], body, SHORT, allow_execution=True, leave_network=leave)
        assert verdict.status == "failed" and verdict.network in (("alone", "hook") if leave else ("hook",))


def test_nothing_runs_unless_it_is_allowed(tmp_path: Path) -> None:
    for run in (
        lambda: try_candidate(PROBLEMS[0], "    return 0\n"),
        lambda: list(try_all(PROBLEMS, [Candidate("own/0", "    return 0\n")])),
    ):
        with pytest.raises(ValueError, match="--allow-code-execution"):
            run()


def test_pass_at_k_is_the_share_of_draws_with_a_hit() -> None:
    for n, passed, k in [(5, 2, 1), (5, 2, 3), (6, 1, 2), (4, 0, 4), (4, 4, 1), (5, 3, 5)]:
        draws = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    for bad in [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)]:
        with pytest.raises(ValueError, match="between 1 and their number"):
            pass_at_k(*bad)


def test_pass_at_k_is_unbiased() -> None:
    """Over many sets of 4 candidates that pass with probability p each: the mean is 1 - (1 - p)^k."""
    rng, p, k = np.random.default_rng(0), 0.3, 2
    values = [pass_at_k(4, int(c), k) for c in rng.binomial(4, p, 20_000)]
    error = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - (1 - (1 - p) ** k)) < 4 * error


def test_the_mean_is_over_problems_not_over_candidates() -> None:
    def verdicts(task: str, passed: int, n: int) -> list[Verdict]:
        return [Verdict(task, "passed" if i < passed else "failed", "", 0.0, "alone") for i in range(n)]

    found = solved_share([*verdicts("a", 4, 4), *verdicts("b", 0, 2)], 1)
    assert found.value == pytest.approx(0.5) and found.count == 2
    half = solved_share([*verdicts("a", 2, 4), *verdicts("b", 0, 2), *verdicts("c", 1, 2)], 1)
    assert half.low < half.value < half.high and half.stderr > 0
    with pytest.raises(ValueError, match=r"pass@3 needs 3 candidates a problem, 'b' has 2"):
        solved_share([*verdicts("a", 4, 4), *verdicts("b", 0, 2)], 3)
    with pytest.raises(ValueError, match="no verdicts"):
        solved_share([], 1)


def test_an_interval_covers_the_share_as_often_as_it_says() -> None:
    rng, p, count = np.random.default_rng(1), 0.1, 40
    inside = [low <= p <= high for low, high in (wilson(int(hits), count) for hits in rng.binomial(count, p, 2000))]
    assert 0.92 < np.mean(inside) < 0.99
    assert wilson(0, 10)[0] == 0 and wilson(0, 10)[1] > 0.2  # nothing seen is not nothing there
    assert mean_share(np.array([1.0, 1.0])).high == pytest.approx(1.0)


def test_files_that_are_no_problems_are_told(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    for text, said in [
        ("", "is empty"),
        ("{\n", "line 1 is no JSON"),
        ('{"task_id": 1}', "line 1 lacks prompt, entry_point, canonical_solution, test"),
        ("3", "line 1 lacks everything"),
        (FILE.read_text("utf-8") * 2, "task_id twice"),
    ]:
        file.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=said):
            read_problems(file)
    file.write_text(json.dumps({"task_id": "other", "completion": ""}), "utf-8")
    with pytest.raises(ValueError, match="candidate for 'other', which is none of the 5 problems"):
        read_candidates(file, PROBLEMS)
    file.write_text(json.dumps({"task_id": "own/1", "completion": "x"}), "utf-8")
    assert read_candidates(file, PROBLEMS[1:2]) == [Candidate("own/1", "x")]
    with pytest.raises(ValueError, match="no candidate for 4 of 5 problems, 'own/0' among them"):
        read_candidates(file, PROBLEMS)  # the others would not count, and the share be too high


def test_limits_that_make_no_sense_are_told() -> None:
    with pytest.raises(ValueError, match="time limit"):
        Allowance(seconds=0)
    with pytest.raises(ValueError, match="64 MiB"):
        Allowance(memory=1)


def test_no_process_is_left_behind() -> None:
    before = set(os.listdir("/proc"))
    tried("while True: pass", Allowance(seconds=0.3))
    time.sleep(0.1)
    left = [p for p in set(os.listdir("/proc")) - before if p.isdigit() and "cell.py" in _command(p)]
    assert left == []


def _command(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_text()
    except OSError:
        return ""
