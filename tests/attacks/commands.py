"""Commands in processes of their own with limits of time and memory, and the small world of files they run in.

The processes are forked from one that has imported the package, because imports are what takes the time.

`ADLM_ATTACKS=200` runs that many cases of each kind instead of a few; see CONTRIBUTING.md.
"""

import csv
import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import adlm.evaluate.ppl  # noqa: F401 (so that the server has it imported)
from adlm.cli.main import app
from adlm.data.prepare import prepare
from adlm.text.lm import load
from tests.cli.terminal import make_env
from tests.training.runs import ROOT, TEXT, TINY, data, run, shelf

T = TypeVar("T")
MAX_SECONDS, MAX_BYTES = 10.0, 2 * 2**30  # of a process: no hang, no more memory
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def count_cases(few: int) -> int:
    """Cases of a kind: a few, or as many as ADLM_ATTACKS says."""
    return int(os.environ.get("ADLM_ATTACKS", few))


def draw_examples(strategies: Mapping[str, st.SearchStrategy[T]], count: int) -> list[T]:
    """As many examples, evenly from all strategies; the same ones at every call."""
    names = list(strategies)
    chosen = [
        names[i % len(names) if count >= len(names) else i * len(names) // count]
        for i in range(count)
    ]
    drawn = {
        name: draw_from(strategies[name], chosen.count(name), name)
        for name in dict.fromkeys(chosen)
    }
    return [drawn[name].pop() for name in chosen if drawn[name]]


def draw_from(strategy: st.SearchStrategy[T], count: int, name: str) -> list[T]:
    """Different examples; hypothesis begins with the simplest, so these are a part of more."""
    examples: list[T] = []
    number = zlib.crc32(name.encode())

    @seed(number)
    @settings(
        max_examples=8 * count + 8, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(strategy)
    def collect(example: T) -> None:
        if example not in examples:
            examples.append(example)

    collect()
    return random.Random(number).sample(examples, min(count, len(examples)))


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    words: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float  # without those in which the machine ran other processes
    peak: int  # resident bytes of its largest process

    @property
    def problems(self) -> list[str]:
        """What no command may do, whatever it is given."""
        errors = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        found = {
            "traceback": "Traceback" in self.stderr + self.stdout,
            f"exit code {self.code}": self.code not in (0, 1, 2),
            f"{len(errors)} error lines": self.code == 2 and len(errors) != 1,
            f"{self.seconds:.1f} s": self.seconds > MAX_SECONDS,
            f"{self.peak / 2**30:.1f} GB": self.peak > MAX_BYTES,
            "control characters": bool(CONTROLS.search(self.stderr)),
        }
        return [name for name, is_true in found.items() if is_true]

    def __str__(self) -> str:
        shown = [
            word if len(word) < 200 else f"{word[:20]}…({len(word)} characters)"
            for word in self.words
        ]
        return (
            f"{', '.join(self.problems) or 'ok'}: adlm {shlex.join(shown)!r}\n{self.stderr[-1500:]}"
        )


def run_command(words: Iterable[object], folder: Path) -> Outcome:
    """`adlm …` in a folder, killed with its children when it takes too long or too much memory."""
    given, server = tuple(map(str, words)), start_server()
    assert server.stdin is not None and server.stdout is not None
    files = [str(shelf() / name) for name in ("stdout", "stderr")]
    server.stdin.write(json.dumps([given, str(folder), *files]) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    texts = [Path(file).read_bytes().decode("utf-8", "replace") for file in files]
    return Outcome(given, answer["code"], *texts, answer["seconds"], answer["peak"])


@cache
def start_server() -> subprocess.Popen[str]:
    """Start the process from which commands are forked; it ends with this one."""
    command, pipe = [sys.executable, "-m", "tests.attacks.commands"], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=make_env(), stdin=pipe, stdout=pipe, text=True)


def serve() -> None:
    """Run the commands that stdin names, one after another, and answer each with its code, seconds and peak memory."""
    for line in sys.stdin:
        words, folder, *files = json.loads(line)
        began, peak, waited, pid = time.monotonic(), 0, 0.0, os.fork()
        if pid == 0:
            execute(words, folder, *files)
        while not (ended := os.wait4(pid, os.WNOHANG))[0]:
            resident, delay = read_usage(pid)
            peak, waited = max(peak, resident), max(waited, delay)
            if time.monotonic() - began - waited > MAX_SECONDS or peak > MAX_BYTES:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.005)
        answer = {
            "code": os.waitstatus_to_exitcode(ended[1]),
            "seconds": time.monotonic() - began - waited,
        }
        print(json.dumps(answer | {"peak": max(peak, ended[2].ru_maxrss * 1024)}), flush=True)


def execute(words: list[str], folder: str, stdout: str, stderr: str) -> NoReturn:
    """Run a command in this process, as `python -m adlm` does, and end the process."""
    os.setsid()
    os.chdir(folder)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, WRITE),
        (2, stderr, WRITE),
    ):
        os.dup2(os.open(path, flags), number)
    sys.argv, code = ["adlm", *words], 1
    try:
        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def read_usage(pid: int) -> tuple[int, float]:
    """The resident bytes of a process, and the seconds that it has waited for a core; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0, 0.0
    return pages * os.sysconf("SC_PAGESIZE"), waited / 1e9


def summarize(outcomes: list[Outcome], names: list[str]) -> str:
    """A table: cases, exit codes, longest time, largest memory and problems of each command or file."""
    lines = [f"{'':40} cases  code 0  1  2  other  seconds (max)     GB (max)  problems"]
    for name in [*sorted(set(names)), "all"]:
        own = [
            outcome for outcome, each in zip(outcomes, names, strict=True) if name in (each, "all")
        ]
        codes = [sum(outcome.code == code for outcome in own) for code in (0, 1, 2)]
        peak = max(outcome.peak for outcome in own) / 2**30
        lines.append(
            f"{name:40} {len(own):5} {codes[0]:7} {codes[1]:2} {codes[2]:2} {len(own) - sum(codes):6} "
            f"{max(outcome.seconds for outcome in own):14.1f} {peak:12.2f} {sum(bool(o.problems) for o in own):9}"
        )
    return "\n".join(lines)


@cache
def build_world() -> Path:
    """A folder with texts, prepared data, a half-finished preparation, a recipe, a run, a model and strange files."""
    folder = shelf() / "attacked"
    folder.mkdir()
    paragraphs = [" ".join(TEXT[i : i + 500].split()) for i in range(0, 10_000, 500)]
    text = "\n\n".join(paragraphs) + "\n"
    (folder / "text.txt").write_text(text, "utf-8")
    (folder / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"text": each}) + "\n" for each in paragraphs), "utf-8"
    )
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([each] for each in paragraphs)])
    (folder / "recipe.yaml").write_text(json.dumps(TINY | {"steps": 2}, indent=1), "utf-8")
    (folder / "empty.txt").touch()
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 16)
    (folder / "a folder").mkdir()
    shutil.copytree(data(), folder / "data")
    settings: dict[str, Any] = {
        "train_tokenizer": 300,
        "length": 32,
        "workers": 1,
        "shard_tokens": 640,
    }

    class Stop(Exception):
        pass

    def stop(progress: object) -> None:
        raise Stop

    try:
        os.chdir(folder)
        prepare("text.txt", "half", **settings, on_progress=stop)
    except Stop:
        pass
    finally:
        os.chdir(ROOT)
    run(folder / "run", "steps=5", "checkpoint.every=5")
    load(folder / "run", device="cpu").save(folder / "model")
    return folder


def attack(
    cases: list[T], folder: Path, name: Callable[[T], str], execute: Callable[[T, Path], Outcome]
) -> list[Outcome]:
    """Execute each case in its own copy of the world, print a table, and return the outcomes with problems."""
    outcomes = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        shutil.copytree(build_world(), place, symlinks=True)
        outcomes.append(execute(case, place))
        if outcomes[-1].problems:
            print(f"{number}: {case}\n{outcomes[-1]}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    print(f"\n{summarize(outcomes, [name(case) for case in cases])}", flush=True)
    return [outcome for outcome in outcomes if outcome.problems]


if __name__ == "__main__":
    serve()
