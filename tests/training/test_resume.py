"""A run that was stopped anywhere and resumed computes and logs the same as one that was not."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adlm.files import write_json
from adlm.models.folder import compute_checksums, find_latest_checkpoint, load_model
from adlm.models.methods import METHODS
from adlm.training.logging import RunLogger, StepMetrics
from adlm.training.state import read_state
from tests.training.runs import (
    assert_same,
    curve,
    data,
    get_exit_code,
    in_process,
    run,
    tensors,
    wait_until,
)


class Crash(Exception):
    pass


@contextmanager
def crash_at(step: int) -> Iterator[None]:
    """A context in which a run ends in the middle of a step."""

    add = RunLogger.add

    def stop(self: RunLogger, metrics: StepMetrics) -> None:
        add(self, metrics)
        if metrics.step == step:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "add", stop)
        with pytest.raises(Crash):
            yield


def method_settings(method: str) -> tuple[str, ...]:
    return f"method={method}", *(
        () if METHODS[method].two_stages else ("model.anchor_layers=null",)
    )


def check_resume(tmp_path: Path, *changes: str, crash: int, rows: str = "wrapped") -> None:
    """A run that crashed and resumed is the run that did not."""
    straight, torn = tmp_path / "straight", tmp_path / "torn"
    run(straight, *changes, rows=rows)
    with crash_at(crash):
        run(torn, *changes, rows=rows)
    assert find_latest_checkpoint(torn / "checkpoints") is not None, (
        "nothing to resume from: the test is void"
    )
    done = run(torn, *changes, rows=rows)
    assert_same(torn, straight)
    states = [read_state(folder / "checkpoints" / "latest") for folder in (straight, torn)]
    assert all(state.seconds > 0 for state in states)
    assert states[0].replace(seconds=0.0) == states[1].replace(seconds=0.0)
    assert done.step == states[0].step and done.valid.items() <= states[0].valid.items()


CASES: dict[str, tuple[str, ...]] = {
    "adamw": ("optimizer.name=adamw",),
    "muon": ("optimizer.name=muon", "optimizer.muon_lr=0.01"),
    "normalized muon": (
        "optimizer.name=muon",
        "optimizer.split_qkv=true",
        "optimizer.muon_beta2=0.9",
    ),
    "no ema": ("ema=null",),
    "dropout": ("model.dropout=0.1", "parallel.checkpoint_activations=true"),
    "tied": ("model.tied=true", "micro_batch=3", "optimizer.decay=wsd"),
    "second epoch": ("data.workers=2", "batch=96", "checkpoint.background=false"),
    "random anchors": (
        "objective.anchor_ramp=false",
        "objective.anchor_rule=random",
        "objective.fraction=0.3",
    ),
    "nothing logged": ("log.every=10", "valid.every=10", "checkpoint.every=2"),
    **{method: (*method_settings(method), "model.dropout=0.1") for method in METHODS},
    **{f"padded {method}": method_settings(method) for method in ("adlm", "a2r")},
}


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_five_and_five(tmp_path: Path, case: str) -> None:
    check_resume(
        tmp_path, *CASES[case], crash=7, rows="documents" if "padded" in case else "wrapped"
    )


def test_metrics_that_were_not_yet_logged_are_not_lost(tmp_path: Path) -> None:
    """A checkpoint between two records: the mean is over steps of both processes, and the guard remembers."""
    check_resume(tmp_path, "log.every=5", "checkpoint.every=3", "guard.window=4", crash=8)
    state = read_state(tmp_path / "torn/checkpoints/step-00000009")
    assert len(state.window) == 4 and len(state.recent) == 4
    assert state.recent == [row[0] for row in state.window]  # steps 6 to 9
    assert [record["step"] for record in curve(tmp_path / "torn")] == [5, 5, 10, 10]


def test_metrics_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    with crash_at(9):
        run(tmp_path, "log.every=1", "valid.every=4")
    assert [r["step"] for r in curve(tmp_path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "train/lo')  # killed in the middle of a line
    with crash_at(6):
        run(tmp_path, "log.every=1", "valid.every=4")
    assert [r["step"] for r in curve(tmp_path)] == [1, 2, 3, 4, 4, 5]


def test_a_run_that_is_done_is_not_trained_further(tmp_path: Path) -> None:
    first = run(tmp_path)
    before, logged = tensors(tmp_path), curve(tmp_path)
    assert run(tmp_path) == first and curve(tmp_path) == logged
    after = tensors(tmp_path)
    assert all((after[name] == value).all() for name, value in before.items())
    assert run(tmp_path, "steps=12").step == 12


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, "steps=5")
    before = (tmp_path / "config.yaml").read_bytes(), curve(tmp_path)
    with pytest.raises(ValueError, match="other settings") as caught:
        run(tmp_path, "steps=10", "batch=4", "optimizer.lr=0.1", "ema=null")
    for change in (
        "batch: 8 then, 4 now",
        "optimizer.lr: 0.003 then, 0.1 now",
        "ema: 0.9 then, None now",
    ):
        assert change in str(caught.value)
    assert "steps" not in str(caught.value)
    assert before == ((tmp_path / "config.yaml").read_bytes(), curve(tmp_path))
    free = ("log.every=3", "micro_batch=2", "checkpoint.keep=5", "samples.rows=1", "data.workers=1")
    assert run(tmp_path, "steps=6", *free).step == 6


def test_a_run_of_an_older_format_is_refused_but_its_model_loads(tmp_path: Path) -> None:
    """Run folders written before format 2 have no format number, and spell config keys differently."""
    run(tmp_path, "steps=5")
    path = tmp_path / "checkpoints" / "step-00000005"
    write_json(
        path / "state.json",
        read_state(path).model_dump(exclude={"format"}),
    )
    (path / "checksums.json").unlink()
    write_json(path / "checksums.json", compute_checksums(path))
    (tmp_path / "config.yaml").write_text("optimiser:\n  lr: 0.1\n", "utf-8")
    with pytest.raises(
        ValueError, match="run format 1, and this version of adlm resumes format 2: start a new"
    ):
        run(tmp_path)
    assert load_model(tmp_path, verify=True).step == 5


@pytest.mark.parametrize(
    "values", [{"seconds": "7"}, {"step": None}, {"batches": [{"epoch": 0}]}, {"recent": 3}]
)
def test_a_state_that_no_run_wrote_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    run(tmp_path, "steps=5")
    path = tmp_path / "checkpoints" / "step-00000005"
    write_json(path / "state.json", read_state(path).model_dump() | values)
    (path / "checksums.json").unlink()
    write_json(path / "checksums.json", compute_checksums(path))
    with pytest.raises(
        ValueError,
        match=rf"state\.json has {next(iter(values))} .*copy or download the folder again",
    ):
        run(tmp_path)


def test_other_data_are_refused_and_moved_data_are_not(tmp_path: Path) -> None:
    run(tmp_path / "run", "steps=5")
    with pytest.raises(ValueError, match="trained on other data"):
        run(tmp_path / "run", rows="documents")
    (tmp_path / "elsewhere").symlink_to(data(), target_is_directory=True)
    assert run(tmp_path / "run", f"data.path={tmp_path / 'elsewhere'}").step == 10


def test_going_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    straight, back = tmp_path / "straight", tmp_path / "back"
    for folder in (straight, back):
        run(folder)
    earlier = back / "checkpoints" / "step-00000005"
    for _ in range(2):  # also a second time
        state = read_state(earlier)
        with crash_at(8):
            run(back, f"resume={earlier}")
        assert read_state(back / "checkpoints/latest") == state
        assert not (back / "checkpoints/step-00000010").exists()
        for name in ("latest", "best"):
            link = back / "checkpoints" / name
            assert link.exists() or not link.is_symlink(), f"{name} points nowhere"
        run(back, f"resume={earlier}")
        assert_same(back, straight)


def test_a_run_may_start_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    run(tmp_path / "one", "steps=5", "log.every=5")
    with pytest.raises(
        ValueError, match=r"not a checkpoint: expected auto or one of .*step-00000005"
    ):
        run(tmp_path / "one", f"resume={tmp_path / 'one/checkpoints/step-00000004'}")
    run(tmp_path / "two", f"resume={tmp_path / 'one/checkpoints/latest'}", "log.every=5")
    run(tmp_path / "one", "log.every=5")
    mine, theirs = tensors(tmp_path / "two"), tensors(tmp_path / "one")
    assert all((mine[name] == value).all() for name, value in theirs.items())


def test_a_run_without_its_link_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """Killed between the rename of the first checkpoint and its link."""
    straight, torn = tmp_path / "straight", tmp_path / "torn"
    run(straight)
    with crash_at(7):
        run(torn)
    (torn / "checkpoints/latest").unlink()
    with crash_at(6):  # the first step that is not in the checkpoint
        run(torn)
    run(torn)
    assert_same(torn, straight)


def test_a_copy_of_a_run_resumes_where_links_became_folders(tmp_path: Path) -> None:
    straight, torn, copied, bare = (
        tmp_path / name for name in ("straight", "torn", "copied", "bare")
    )
    run(straight)
    with crash_at(7):
        run(torn)
    shutil.copytree(torn, copied)  # follows links
    shutil.copytree(torn / "checkpoints/latest", bare / "checkpoints/latest")
    for folder in (copied, bare):
        assert not (folder / "checkpoints/latest").is_symlink()
        run(folder)
        links = {name: os.readlink(folder / "checkpoints" / name) for name in ("latest", "best")}
        assert links["latest"] == "step-00000010" and links["best"].startswith("step-")
        assert (folder / "checkpoints/step-00000005").is_dir()
    assert_same(copied, straight)
    run(bare, f"resume={bare / 'checkpoints/latest'}")


def test_a_run_whose_workers_outlive_it_restarts_at_once(tmp_path: Path) -> None:
    changes, metrics = (
        ("steps=100000", "data.workers=2", "valid.every=1000"),
        tmp_path / "metrics.jsonl",
    )
    process = in_process(tmp_path, *changes)
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("utf-8").split()
    process.kill()
    assert get_exit_code(process) == -9
    with crash_at(2):
        run(tmp_path, *changes, "resume=auto")
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()], (
        "all workers had ended: the test is void"
    )


SIGNALS = [
    (signal.SIGTERM, 75),
    (signal.SIGINT, 130),
    pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
]


SIGNAL_RUN = ("steps=60", "log.every=7", "checkpoint.every=1000", "valid.every=50")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("signals") / "straight", *SIGNAL_RUN).folder


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_is_answered_with_a_checkpoint(
    straight: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    changes = SIGNAL_RUN
    process, metrics = in_process(tmp_path / "torn", *changes), tmp_path / "torn/metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and metrics.stat().st_size, process)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert get_exit_code(process) == code
    saved = find_latest_checkpoint(tmp_path / "torn/checkpoints")
    assert saved is not None and 7 <= read_state(saved).step < 60
    run(tmp_path / "torn", *changes)
    assert_same(tmp_path / "torn", straight)
