"""The command line as tests call it: in this process, in one of its own, and in a terminal."""

import json
import os
import pty
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from adlm.cli.main import app
from tests.training.runs import ROOT, run, shelf

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@cache
def trained(method: str = "adlm") -> str:
    """A tiny run with rows of 32 tokens."""
    folder = shelf() / f"run-{method}"
    one_stage = ("model.anchor_layers=0",) if method in ("mdlm", "ar") else ()
    run(folder, "steps=5", f"method={method}", *one_stage)
    return str(folder)


def invoke(*words: object, given: str | bytes | None = None) -> Result:
    """A command in this process; `given` is what comes in by stdin."""
    found: Any = CliRunner().invoke(app, [str(word) for word in words], input=given)
    return found


def answer_json(*words: object, given: str | bytes | None = None) -> dict[str, Any]:
    """The JSON object that a command prints, which is all of stdout."""
    result = invoke(*words, "--json", given=given)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def assert_error(result: Result, *said: str, code: int = 2) -> None:
    """One line on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for part in said:
        assert part in lines[0], lines[0]


def process(*words: object, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`python -m adlm …`, its output as bytes."""
    command = [sys.executable, "-m", "adlm", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=make_env(**env), capture_output=True, timeout=120, check=False
    )


def make_env(**env: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")
    }
    return kept | {"OMP_NUM_THREADS": "1"} | env


def screen(*words: object, columns: int = 100, cwd: Path = ROOT) -> tuple[str, int]:
    """What `python -m adlm …` writes to a terminal, escape sequences and all, and its exit code."""
    ours, theirs = pty.openpty()
    env = make_env(TERM="xterm-256color", COLUMNS=str(columns), LINES="40", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "adlm", *map(str, words)]
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how a terminal says that nobody is there any more
                break
            if not piece:
                break
            shown += piece
        os.close(ours)
        code = child.wait(timeout=60)
    return shown.decode("utf-8").replace("\r\n", "\n"), code


def without_escapes(shown: str) -> str:
    return ESCAPES.sub("", shown)
