"""The command line as a user has it, and the server: runs of commands and requests over HTTP."""

import io
import json
import os
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Few steps and, where a sampler can, much remasking: keywords and the sampler's own options.
QUICK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ancestral": ({"steps": 6}, {}),
    "forward_backward": ({"steps": 6}, {}),
    "remask_cap": ({"steps": 6}, {"eta": 0.3}),
    "remask_rescale": ({"steps": 6}, {"eta": 0.3}),
    "remask_conf": ({"steps": 6}, {}),
    "remask_loop": ({"steps": 8}, {"eta": 0.3}),
    "ddpm": ({"steps": 6}, {}),
    "dfm": ({"steps": 4}, {}),
    "first_hitting": ({}, {}),
    "confidence": ({"steps": 5}, {}),
    "margin": ({"steps": 5}, {}),
    "entropy_bounded": ({}, {"bound": 2.0}),
}
PLANS = (
    "ancestral",
    "forward_backward",
    "remask_cap",
    "remask_rescale",
    "remask_conf",
    "remask_loop",
    "ddpm",
    "dfm",
)


def quick_settings(sampler: str) -> dict[str, Any]:
    """Return a sampler's name, few steps and its own options, as the adapter takes them."""
    settings, options = QUICK[sampler]
    return {"sampler": sampler, **settings, "options": options}


def quick_options(sampler: str) -> dict[str, Any]:
    """Return all options of a sampler in one dict."""
    settings, options = QUICK[sampler]
    return {**settings, **options}


@dataclass(frozen=True)
class Answer:
    """What a command wrote, and its exit code."""

    code: int
    out: bytes
    err: str


def run_command(*words: object, given: bytes = b"") -> Answer:
    """Run `python -m adlm WORDS` in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    stdin, argv, code = sys.stdin, sys.argv, 0
    sys.stdin, sys.argv = io.TextIOWrapper(io.BytesIO(given), "utf-8"), ["adlm", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_module("adlm", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdin, sys.argv = stdin, argv
    out.flush()
    return Answer(code, out.buffer.getvalue(), err.getvalue())


def run_json(*words: object, given: bytes = b"") -> dict[str, Any]:
    """Run a command with --json and return the object that it prints."""
    answer = run_command(*words, "--json", given=given)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


def start_command(*words: object, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start `python -m adlm WORDS` in a process of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "adlm", *map(str, words)]
    return subprocess.Popen(command, env=env, **pipes)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run without times."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{key: value for key, value in each.items() if key != "time"} for each in records]


class Server:
    """The address of a running server, and requests to it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer to a GET request."""
        with urllib.request.urlopen(self.address + path) as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the answer to a POST request."""
        content = json.dumps(body).encode("utf-8")
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.address + path, content, headers)
        with urllib.request.urlopen(request) as response:
            return response.read()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the object that answers a POST request."""
        found: dict[str, Any] = json.loads(self.post(path, body))
        return found

    def refuse(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Return status and error of a request that must be refused."""
        try:
            self.post(path, body)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]
        raise AssertionError(f"{path} answered {body}")

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        events = self.post(path, body | {"stream": True}).decode("utf-8").split("\n\n")
        lines = [event.removeprefix("data: ") for event in events if event]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@contextmanager
def serve(*models: object) -> Iterator[Server]:
    """Run `adlm serve` on a free port."""
    words = ("serve", *models, "--port", 0, "--device", "cpu", "--max-rows", 8)
    with start_command(*words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("serving "), line
            yield Server(line.split()[-1])
        finally:
            process.terminate()
