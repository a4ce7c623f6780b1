"""`adlm prepare` and `adlm eval samples --out`, killed at any moment and started again, end with the same bytes.

Training is killed in tests/training/test_kills.py.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.commands import count_cases
from tests.cli.terminal import trained
from tests.evaluate.scorers import PROSE, causal_folder, needs, numbers
from tests.training.runs import TEXT, get_exit_code, wait_until

SLOW = 0.003  # seconds more for each file that is written or renamed: more kills fall into writing
SAMPLES = (
    "--n",
    12,
    "--length",
    24,
    "--steps",
    4,
    "--mauve-seeds",
    1,
    "--device",
    "cpu",
    "--reference",
    PROSE,
)


def start(words: list[str], slow: float = 0.0, dies_at: int = 0) -> BaseProcess:
    """Start a command in another process, which writes slowly and may kill itself while it writes a cache entry."""
    context = multiprocessing.get_context("forkserver")
    modules = ["tests.attacks.test_kills", "adlm.evaluate.sample_metrics", "transformers", "mauve"]
    context.set_forkserver_preload(modules)
    process = context.Process(target=_command, args=(words, slow, dies_at))
    process.start()
    return process


def _command(words: list[str], slow: float, dies_at: int) -> None:
    from adlm.cli.main import app
    from adlm.evaluate import cache

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, _delay(getattr(os, name), slow))
    cache.FLUSH_SECONDS = 0.0
    put, left = cache.Cache.put, dies_at

    def put_and_die(self: cache.Cache, key: str, value: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and self.folder is not None:
            line = cache.encode_line(key, value)
            with (self.folder / cache.PER_RANK.format(rank=self.rank)).open("ab") as file:
                file.write(line[: len(line) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, key, value)

    cache.Cache.put = put_and_die  # type: ignore[method-assign]
    app(words)


def _delay(function: Any, seconds: float) -> Any:
    def run(*values: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return function(*values, **named)

    return run


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_of_prepare_change_nothing(tmp_path: Path, workers: int) -> None:
    kills, rng, made = count_cases(2), random.Random(workers), 0
    (tmp_path / "text.txt").write_text(TEXT * 20, "utf-8")
    words = ["prepare", str(tmp_path / "text.txt"), "--train-tokenizer", "300", "--length", "32"]
    words += ["--shard-tokens", "8192", "--workers", str(workers), "--out"]
    straight, torn, folders = tmp_path / "straight", 0, 0
    assert get_exit_code(start([*words, str(straight)])) == 0
    while made < kills:
        folder, folders = tmp_path / f"torn-{folders}", folders + 1
        for _ in range(min(5, kills - made)):
            goal = count_shards(folder) + rng.choice((1, 1, 5, 20))
            process = start([*words, str(folder)], SLOW)
            wait_until(lambda folder=folder, goal=goal: count_shards(folder) >= goal, process)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            if get_exit_code(process) == 0:
                break
            assert process.exitcode == -9
            made, torn = made + 1, torn + any(folder.glob("*.part"))
        assert get_exit_code(start([*words, str(folder)])) == 0
        assert read_files(folder) == read_files(straight)
    print(
        f"prepare, {workers} workers: {made} kills in {folders} folders, {torn} in the middle of a file: same bytes"
    )


def count_shards(folder: Path) -> int:
    return len(list(folder.glob("*.bin")))


def count_entries(folder: Path) -> int:
    """Entries of a cache; its files may be merged and removed meanwhile."""
    entries = 0
    for path in folder.glob("cache*.jsonl"):
        with suppress(FileNotFoundError):
            entries += path.read_bytes().count(b"\n")
    return entries


@pytest.mark.slow
def test_kills_of_eval_samples_change_nothing(tmp_path: Path) -> None:
    needs("transformers", "mauve")
    kills, rng = count_cases(2), random.Random(0)
    words = [
        "eval",
        "samples",
        trained(),
        "--judge",
        str(causal_folder(positions=256)),
        *map(str, SAMPLES),
        "--out",
    ]
    straight = tmp_path / "straight"
    assert get_exit_code(start([*words, str(straight)])) == 0
    entries = count_entries(straight)
    moments: dict[str, int] = {"generating": 0, "scoring": 0, "any time": 0}
    for first in range(0, kills, 4):
        folder = tmp_path / f"torn-{first}"
        for number in range(first, min(first + 4, kills)):
            dies_at, stored = rng.randint(1, 8), count_entries(folder)
            if number % 4 == 1:  # while it scores: twelve texts come before
                dies_at += max(0, 12 - stored)
            elif number % 4 == 3:
                dies_at = 0
            goal = stored + rng.randint(1, 4)
            process = start([*words, str(folder)], SLOW, dies_at)
            if not dies_at:
                wait_until(lambda folder=folder, goal=goal: count_entries(folder) >= goal, process)
                time.sleep(rng.uniform(0, 0.03))
                process.kill()
            assert get_exit_code(process) == -9
            is_scoring = (folder / "samples.jsonl").exists()
            moments[
                "scoring" if dies_at and is_scoring else "generating" if dies_at else "any time"
            ] += 1
        assert get_exit_code(start([*words, str(folder)])) == 0
        results = [
            json.loads((each / "samples.json").read_text("utf-8")) for each in (folder, straight)
        ]
        assert numbers(results[0]) == numbers(results[1])
        files, expected = read_files(folder), read_files(straight)
        assert files.keys() == expected.keys()
        assert files["samples.jsonl"] == expected["samples.jsonl"]
        assert sorted(files["cache.jsonl"].splitlines()) == sorted(
            expected["cache.jsonl"].splitlines()
        )
    assert moments["generating"] and moments["scoring"]
    print(
        f"eval samples: {sum(moments.values())} kills ({moments}) of {entries} entries: same texts, scores, metrics"
    )
