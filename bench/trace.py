"""Which functions of the package one call enters, in all threads.

    python -m bench.trace                          # every way, as the package is here
    python -m bench.trace generate step --list     # with the functions, in the order of their files
    python -m bench.trace --of 3da4d78             # of a commit, or of another folder

A function is counted once, however often it is called; comprehensions and the bodies of modules
and classes are not counted. A file is counted if a function or a comprehension of it runs.
Everything is traced when it is warm: a step in the middle of a run, a request after another one, a
command when it runs a second time in one process, so that nothing is imported. Only `cold-sample`
is the first command of its process, with all that runs while modules are imported.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from bench.trees import build_environment, copy_tree
from bench.versions import STEP_ENDS

UNCOUNTED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
TRACED_STEP = 6  # of a training run: nothing is logged, validated or saved there
REQUEST_SECONDS = 300  # that the server may take
PROMPT = "It was"
MODEL = "models/adlm"


@dataclass(frozen=True, order=True)
class Function:
    """A function, or what else has a code object."""

    file: str
    line: int
    name: str

    @property
    def is_counted(self) -> bool:
        return not self.name.endswith(UNCOUNTED)


class Tracer:
    """Notes the functions of the package that are entered while it is on, in all threads.

    It must be made before the threads that it is to see.
    """

    def __init__(self) -> None:
        from importlib.util import find_spec

        spec = find_spec("adlm")
        assert spec is not None and spec.origin is not None
        self.root = str(Path(spec.origin).parent) + os.sep
        self.entered: set[Any] = set()  # code objects
        self.is_on = False
        self.on_return: Callable[[str], None] | None = None  # called with a function's name
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.is_on:
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or a class
                self.entered.add(frame.f_code)
        elif event == "return" and self.on_return is not None:
            self.on_return(frame.f_code.co_name)

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Forget what was noted, and note what is entered in this context."""
        self.entered.clear()
        self.is_on = True
        yield
        self.is_on = False

    def stop(self) -> list[Function]:
        """Stop for good; return what was noted."""
        self.is_on = False
        self.on_return = None
        sys.setprofile(None)
        threading.setprofile(None)
        functions = set()
        for code in self.entered:
            if code.co_filename.startswith(self.root):
                file = code.co_filename.removeprefix(self.root)
                functions.add(Function(file, code.co_firstlineno, code.co_qualname))
        return sorted(functions)


def trace_generate(tracer: Tracer) -> None:
    """`LM.generate` of one prompt."""
    import adlm

    lm = adlm.load(MODEL, device="cpu")
    lm.generate(PROMPT)
    with tracer.trace():
        lm.generate(PROMPT)


def trace_step(tracer: Tracer) -> None:
    """A step in the middle of a training run, from the end of the one before to its own."""
    import adlm

    ends = 0

    def count_steps(name: str) -> None:
        nonlocal ends
        if name == STEP_ENDS:
            ends += 1
            tracer.is_on = ends == TRACED_STEP - 1

    tracer.on_return = count_steps
    quiet = ["log.every=1000", "valid.every=1000", "checkpoint.every=1000", "ema=0.9"]
    model = ["method=adlm", "model.anchor_layers=1", f"steps={TRACED_STEP + 2}"]
    adlm.train("tiny.yaml", "data.path=wrapped", "folder=traced", *model, *quiet)
    if ends < TRACED_STEP:
        raise RuntimeError(f"{STEP_ENDS} ended {ends} times, expected at least {TRACED_STEP}")


def trace_request(tracer: Tracer) -> None:
    """A completion over HTTP, from `adlm serve` in this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    problems: list[BaseException] = []

    def complete() -> None:
        data = json.dumps({"prompt": PROMPT, "max_tokens": 12, "seed": 0}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(address + "/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            answer.read()
        time.sleep(0.5)  # the server's own part ends after the answer

    def run_client() -> None:
        try:
            wait_for_port(port)
            complete()
            with tracer.trace():
                complete()
        except BaseException as error:  # raised below, in the thread that runs the server
            problems.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server raises it again when it has ended
    client = threading.Thread(target=run_client)
    client.start()
    run_command("serve", MODEL, "--port", str(port), "--device", "cpu")
    client.join()
    if problems:
        raise problems[0]


def wait_for_port(port: int) -> None:
    """Wait until somebody listens on a port of this machine."""
    deadline = time.monotonic() + REQUEST_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def run_command(*words: str) -> None:
    """Run a command in this process; an error raises."""
    from adlm.cli.main import app

    try:
        app(list(words), standalone_mode=False)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"adlm {' '.join(words)}: exit code {error.code}") from None


def trace_command(*words: str) -> Callable[[Tracer], None]:
    """Return a function that traces a command's second run, with NEW in its words replaced."""

    def trace(tracer: Tracer) -> None:
        run_command(*(word.replace("NEW", "first") for word in words))
        with tracer.trace():
            run_command(*(word.replace("NEW", "second") for word in words))

    return trace


def trace_first_command(*words: str) -> Callable[[Tracer], None]:
    """Return a function that traces a command as the first in its process."""

    def trace(tracer: Tracer) -> None:
        with tracer.trace():
            run_command(*words)

    return trace


SAMPLE = ["sample", MODEL, "--prompt", PROMPT, "--device", "cpu"]
TRAIN = ["train", "tiny.yaml", "method=adlm", "model.anchor_layers=1", "data.path=wrapped"]
PREPARE = ["prepare", "text.txt", "--out", "NEW", "--train-tokenizer", "400"]
WAYS: dict[str, Callable[[Tracer], None]] = {
    "generate": trace_generate,
    "step": trace_step,
    "request": trace_request,
    "sample": trace_command(*SAMPLE),
    "cold-sample": trace_first_command(*SAMPLE),
    "ppl": trace_command("eval", "ppl", MODEL, "--data", "other.txt", "--device", "cpu"),
    "prepare": trace_command(*PREPARE, "--length", "48"),
    "train": trace_command(*TRAIN, "folder=NEW"),
}


def count(functions: list[Function]) -> tuple[int, int]:
    """Return the numbers of functions and of files."""
    return sum(each.is_counted for each in functions), len({each.file for each in functions})


def run_way(name: str, out: Path) -> None:
    """Trace a way in this process and write its functions as JSON: file, line and name."""
    import torch

    torch.set_num_threads(1)
    tracer = Tracer()
    WAYS[name](tracer)
    functions = tracer.stop()
    rows = [[each.file, each.line, each.name] for each in functions]
    out.write_text(json.dumps(rows), "utf-8")


def trace_ways(of: str, names: list[str]) -> dict[str, list[Function]]:
    """Trace ways of a tree, each in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="adlm-trace-") as temporary:
        tree = Path(temporary, "tree")
        copy_tree(of, tree)
        fixtures = Path(temporary, "fixtures")
        fixtures.mkdir()
        start = [sys.executable, "-P", "-m"]
        shared: dict[str, Any] = {"cwd": fixtures, "env": build_environment(tree)}
        subprocess.run([*start, "bench.freeze.fixtures", "--only", "adlm"], check=True, **shared)
        for name in names:
            out = Path(temporary, f"{name}.json")
            command = [*start, "bench.trace", name, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, **shared)
            if done.returncode != 0:
                raise RuntimeError(f"{name} failed: {done.stderr}")
            rows = json.loads(out.read_text("utf-8"))
            found[name] = [Function(*row) for row in rows]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", nargs="*", help=f"{', '.join(WAYS)} [default: all]")
    parser.add_argument("--of", default=".", help="a commit or a folder [default: the files here]")
    parser.add_argument("--list", action="store_true", help="print the functions too")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of one way, in this process
    args = parser.parse_args()
    unknown = [name for name in args.way if name not in WAYS]
    if unknown:
        parser.error(f"unknown way {unknown[0]!r}: expected one of {', '.join(WAYS)}")
    if args.out is not None:
        run_way(args.way[0], args.out)
        return
    found = trace_ways(args.of, args.way or list(WAYS))
    print(f"{'way':12s} functions  files")
    for name, functions in found.items():
        entered, files = count(functions)
        print(f"{name:12s} {entered:9d} {files:6d}")
    if not args.list:
        return
    for name, functions in found.items():
        print(f"\n{name}")
        for file in sorted({each.file for each in functions}):
            own = [each.name for each in functions if each.file == file and each.is_counted]
            print(f"  {file}: {', '.join(own)}")


if __name__ == "__main__":
    main()
