"""A collection is the same set of texts however it was written: at once, after kills, by several processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adlm.studies.collection import SAMPLES, SETTINGS, Sample, collect, read
from adlm.text.lm import LM, load
from adlm.training.distributed import init_distributed
from tests.cli.terminal import env_of, trained
from tests.text.models import lm, rigged
from tests.training.runs import ROOT, torchrun

HOW = {"length": 12, "steps": 8, "sampler": "ancestral", "seed": 5, "top_p": 1.0}
N = 10


def collected(folder: Path, who: LM | None = None, **changes) -> list[Sample]:
    who = who or lm()
    return collect(who, folder, who.build_request(**({"n": N, "batch": 4} | HOW | changes)))


def main(folder: str, model: str, n: str, pause: str) -> None:
    """What other processes of these tests run: texts one by one, slowly."""
    with init_distributed("cpu") as world:
        who = load(model, device="cpu")
        job = who.build_request(n=int(n), batch=1, **HOW)
        collect(who, Path(folder), job, world=world, on_texts=lambda done, total: time.sleep(float(pause)))


def test_texts_are_those_of_generate(tmp_path: Path) -> None:
    found = collected(tmp_path)
    texts = lm().generate("", n=N, **HOW)
    assert [each.text for each in found] == texts.texts
    assert [each.nfe for each in found] == texts.nfe_each
    assert [(each.number, each.seed) for each in found] == [(number, 5) for number in range(N)]
    lines = (tmp_path / SAMPLES).read_text("utf-8").splitlines()
    assert list(json.loads(lines[0])) == ["number", "seed", "text", "tokens", "nfe"]
    assert len(lines) == N and read(tmp_path / SAMPLES) == found


def test_tokens_are_the_texts(tmp_path: Path) -> None:
    """Up to the end that a text has: this model ends texts early."""
    eos = lm().tokenizer.eos_id
    found = collected(tmp_path, rigged("adlm", {eos: 3.0}))
    assert len({len(each.tokens) for each in found}) > 1
    for each in found:
        assert eos not in each.tokens and lm().tokenizer.decode(each.tokens) == each.text


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_batch_changes_no_text(tmp_path: Path, batch: int) -> None:
    assert collected(tmp_path / "one", batch=batch) == collected(tmp_path / "other")


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    whole = collected(tmp_path / "whole")
    told: list[tuple[int, int]] = []
    collected(tmp_path / "part", n=3)
    job = lm().build_request(n=N, batch=4, **HOW)
    assert collect(lm(), tmp_path / "part", job, on_texts=lambda *each: told.append(each)) == whole
    assert told == [(3, N), (7, N), (N, N)]
    before = (tmp_path / "part" / SAMPLES).read_bytes()
    assert collected(tmp_path / "part", n=4) == whole[:4]
    assert (tmp_path / "part" / SAMPLES).read_bytes() == before == (tmp_path / "whole" / SAMPLES).read_bytes()


@pytest.mark.parametrize("torn", [b"", b'{"number": 9, "te'])
def test_a_torn_line_is_written_again(tmp_path: Path, torn: bytes) -> None:
    whole = collected(tmp_path)
    lines = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    for kept in (lines[:4] + lines[6:8], []):  # holes among the numbers, and nothing but the torn line
        (tmp_path / SAMPLES).write_bytes(b"".join(kept) + torn)
        assert collected(tmp_path) == whole
        assert (tmp_path / SAMPLES).read_bytes() == b"".join(lines)


def test_what_other_processes_left_is_taken_in(tmp_path: Path) -> None:
    """Three processes were killed; one goes on."""
    whole = collected(tmp_path)
    lines = (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)
    (tmp_path / SAMPLES).write_bytes(b"".join(lines[0:6:3]))
    (tmp_path / "samples.1.jsonl").write_bytes(b"".join(lines[1:9:3]))
    (tmp_path / "samples.2.jsonl").write_bytes(lines[2] + lines[5][:11])
    assert collected(tmp_path) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [SAMPLES, SETTINGS]


def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    model = trained()
    words = [sys.executable, "-m", "tests.studies.test_collection", str(tmp_path / "torn"), model, str(N)]
    with subprocess.Popen([*words, "0.3"], cwd=ROOT, env=env_of()) as process:
        path, deadline = tmp_path / "torn" / SAMPLES, time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.read_bytes().count(b"\n") >= 3):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert 3 <= path.read_bytes().count(b"\n") < N, "it was not killed on the way: the test is void"
    who = load(model, device="cpu")
    found, whole = (collect(who, tmp_path / name, who.build_request(n=N, **HOW)) for name in ("torn", "whole"))
    assert found == whole


def test_two_processes_write_what_one_does(tmp_path: Path) -> None:
    model = trained()
    done = torchrun(2, "-m", "tests.studies.test_collection", str(tmp_path / "two"), model, str(N), "0")
    assert done.returncode == 0, done.stderr[-3000:]
    who = load(model, device="cpu")
    whole = collect(who, tmp_path / "one", who.build_request(n=N, **HOW))
    assert read(tmp_path / "two" / SAMPLES) == whole
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [SAMPLES, SETTINGS]
    assert (tmp_path / "two" / SETTINGS).read_bytes() == (tmp_path / "one" / SETTINGS).read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 6}, "seed 5, now 6"),
        ({"steps": 9}, "steps 8, now 9"),
        ({"top_p": 0.5}, r"top_p 1\.0, now 0\.5"),
        ({"prompt": "a"}, 'prompt "", now "a"'),
    ],
)
def test_other_settings_take_another_folder(tmp_path: Path, changes, said: str) -> None:
    collected(tmp_path, n=2)
    before = (tmp_path / SAMPLES).read_bytes()
    with pytest.raises(ValueError, match=rf"has samples of other settings \(.*{said}.*take another folder"):
        collected(tmp_path, **changes)
    assert (tmp_path / SAMPLES).read_bytes() == before


def test_other_weights_take_another_folder(tmp_path: Path) -> None:
    collected(tmp_path, n=2)
    with pytest.raises(ValueError, match=r"other settings \(weights_sha256"):
        collected(tmp_path, rigged("adlm", {3: 1.0}))


def test_errors_teach(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_bytes(b'{"text": "whose?"}\n')
    with pytest.raises(ValueError, match=r"has a samples\.jsonl and no settings\.json"):
        collected(tmp_path)
    collected(tmp_path / "x", n=2)
    with (tmp_path / "x" / SAMPLES).open("ab") as file:
        file.write(b'{"text": "whose?"}\n')
    with pytest.raises(ValueError, match=r"line 3 of .* is no sample"):
        collected(tmp_path / "x")
    job = lm().build_request(["a", "b"], **HOW)
    with pytest.raises(ValueError, match="one prompt, and this job 2"):
        collect(lm(), tmp_path / "y", job)


@pytest.mark.parametrize("content", ["", "[1]", '{"n"'])
def test_settings_that_cannot_be_read_are_told(tmp_path: Path, content: str) -> None:
    (tmp_path / SETTINGS).write_text(content, "utf-8")
    with pytest.raises(ValueError, match=r"settings\.json does not say of what the samples .*: take another folder"):
        collected(tmp_path)
    assert (tmp_path / SETTINGS).read_text("utf-8") == content


if __name__ == "__main__":
    main(*sys.argv[1:])
