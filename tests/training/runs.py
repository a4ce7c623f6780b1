"""Tiny text, a tiny recipe, and runs of it: in this process, in another, in several.

`torchrun -m tests.training.runs JOBS` trains many runs one after another in the same processes, because starting
processes is what takes the time.
"""

import atexit
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from adlm import files
from adlm.data.prepare import prepare
from adlm.data.sources import load_excerpt
from adlm.models import folder as model_folder
from adlm.models.language_model import ModelConfig
from adlm.models.methods import METHODS, build_config
from adlm.training import state as run_state
from adlm.training.logging import Record, read_metrics
from adlm.training.train import Run, train

ROOT = Path(__file__).resolve().parents[2]
TEXT = load_excerpt()[:30_000]
TINY: dict[str, Any] = {
    "steps": 10,
    "batch": 8,
    "ema": 0.9,
    "device": "cpu",
    "model": {
        "preset": "nano",
        "dim": 32,
        "heads": 2,
        "anchor_layers": 1,
        "denoiser_layers": 1,
        "dropout": 0.0,
    },
    "optimizer": {"lr": 3e-3, "warmup": 3},
    "valid": {"every": 5, "rows": 16},
    "checkpoint": {"every": 5},
    "log": {"every": 2, "show": False},
}


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """A context in which a longer file cannot be written, as on a full disk."""
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@cache
def shelf() -> Path:
    """A folder that lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="adlm-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def data(rows: str = "wrapped") -> Path:
    """Prepared text with rows of 32 tokens, full, or `documents` of different lengths."""
    folder, text = shelf() / rows, shelf() / f"{rows}.txt"
    if rows == "wrapped":
        text.write_text(TEXT, "utf-8")
        prepare(text, folder, train_tokenizer=300, length=32, valid_share=0.1, workers=1)
        return folder
    words, documents = iter(TEXT.split()), []
    while document := list(islice(words, 2 + 5 * len(documents) % 11)):
        documents.append(" ".join(document))
    text.write_text("\n".join(documents), "utf-8")
    tokenizer = data() / "tokenizer.json"
    prepare(
        text,
        folder,
        tokenizer=tokenizer,
        length=32,
        rows=rows,
        documents="line",
        valid_share=0.1,
        workers=1,
    )
    return folder


def tiny_config(method: str = "adlm", **sizes: Any) -> ModelConfig:
    """A model of one layer per stage."""
    layers = (
        {"anchor_layers": 1, "denoiser_layers": 1}
        if METHODS[method].two_stages
        else {"denoiser_layers": 1}
    )
    return build_config(method, "nano", **(layers | sizes))


@cache
def tiny_recipe() -> Path:
    """The tiny recipe as a file (JSON is YAML)."""
    path = shelf() / "tiny.yaml"
    path.write_text(json.dumps(TINY), "utf-8")
    return path


def arguments(folder: Path, *changes: str, rows: str = "wrapped") -> list[str]:
    """What follows `adlm train`."""
    return [str(tiny_recipe()), f"data.path={data(rows)}", f"folder={folder}", *changes]


def run(folder: Path, *changes: str, rows: str = "wrapped") -> Run:
    """A run in this process."""
    return train(*arguments(folder, *changes, rows=rows))


def curve(folder: Path) -> list[Record]:
    """The metrics of a run without times: equal for two runs with the same settings."""
    records = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


def tensors(folder: Path, which: str = "latest") -> dict[str, Tensor]:
    """Everything a checkpoint holds, whole, however many processes wrote it."""
    path = folder / "checkpoints" / which
    known = HuggingFaceStorageReader(str(path / "training")).read_metadata().state_dict_metadata
    loaded = {name: torch.zeros(about.size) for name, about in known.items()}
    run_state.load_training_tensors(path, loaded)
    return loaded | {
        f"model.{name}": value for name, value in model_folder.read_weights(path).items()
    }


def assert_same(one: Path, other: Path) -> None:
    """Two runs ended with the same bits and logged the same metrics."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert curve(one) == curve(other)


def assert_close(one: Path, other: Path, *, losses: float = 2e-5, weights: float = 1e-5) -> None:
    """Two runs differ by rounding alone: losses relative to their size, weights absolutely."""
    for a, b in zip(curve(one), curve(other), strict=True):
        assert a.keys() == b.keys()
        wrong = [key for key in a if abs(a[key] - b[key]) > losses * max(1, abs(b[key]))]
        assert not wrong, (wrong, a, b)
    mine, theirs = (
        {k: v for k, v in tensors(run).items() if not k.startswith("optimizer.")}
        for run in (one, other)
    )
    torch.testing.assert_close(mine, theirs, rtol=0, atol=weights)


def in_process(
    folder: Path, *changes: str, slow: float = 0.0, rows: str = "wrapped"
) -> BaseProcess:
    """Start `adlm train` in another process, forked from one that has torch loaded.

    Writing each file of a checkpoint takes `slow` seconds more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adlm.cli.train"])
    process = context.Process(target=_command, args=(arguments(folder, *changes, rows=rows), slow))
    process.start()
    return process


def _command(given: list[str], slow: float) -> None:
    from adlm.cli.main import app

    torch.set_num_threads(1)
    sync_path = files.sync_path

    def sync_slowly(path: Path) -> None:
        time.sleep(slow)
        sync_path(path)

    files.sync_path = sync_slowly
    app(["train", *given])


def wait_until(condition: Callable[[], object], process: BaseProcess, seconds: float = 60) -> bool:
    """Wait for a condition or the end of the process; return whether the condition was met."""
    deadline = time.monotonic() + seconds
    while process.is_alive() and not condition():
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.001)
    return bool(condition())


def get_exit_code(process: BaseProcess, seconds: float = 60) -> int | None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"still running after {seconds} s")
    return process.exitcode


def torchrun(
    processes: int, *command: str, restarts: int = 0, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    """A command (`-m module …`) in several processes of this machine, none of which is left behind."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    given = [*launch, f"--max-restarts={restarts}", *command]
    env, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    with subprocess.Popen(given, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # and it ends its own
            out, err = process.communicate(timeout=60)
            raise AssertionError(f"still running after {seconds} s\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(given, process.returncode, out, err)


def run_jobs(processes: int, jobs: dict[str, list[str]], seconds: float = 100) -> dict[str, str]:
    """Runs by name, one after another in the same processes; the errors of those that failed."""
    folder = Path(tempfile.mkdtemp(dir=shelf()))
    listed = folder / "jobs.json"
    listed.write_text(json.dumps(jobs), "utf-8")
    done = torchrun(processes, "-m", "tests.training.runs", str(listed), seconds=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    errors = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("errors-*.json"))]
    assert len(errors) == processes
    assert all(one.keys() == errors[0].keys() for one in errors), (
        "processes failed at different runs"
    )
    return errors[0]


def _run_jobs(listed: Path) -> None:
    rendezvous = sys.modules[
        "torch.distributed.rendezvous"
    ]  # the name in torch.distributed is a function
    errors, create = {}, rendezvous._create_c10d_store
    for name, given in json.loads(listed.read_text("utf-8")).items():
        # Each run has its own keys in torchrun's store, which still has the addresses of the run before.
        rendezvous._create_c10d_store = lambda *a, name=name, **k: dist.PrefixStore(
            name, create(*a, **k)
        )
        try:
            train(*given)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    (listed.parent / f"errors-{os.environ['RANK']}.json").write_text(json.dumps(errors), "utf-8")


def _run_and_die(given: list[str]) -> None:
    """A run whose second process is killed once there is a checkpoint, the first time that it is started."""
    folder = Path(
        next(change for change in given if change.startswith("folder=")).removeprefix("folder=")
    )

    def watch() -> None:
        while not (folder / "checkpoints" / "latest").exists():
            time.sleep(0.001)
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        threading.Thread(target=watch, daemon=True).start()
    train(*given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):
        if sys.argv[1] == "--dies":
            _run_and_die(sys.argv[2:])
        else:
            _run_jobs(Path(sys.argv[1]))
