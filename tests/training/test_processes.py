"""Two and four processes train as one does, resume each other's checkpoints, and survive a process that dies.

Losses agree to 2e-5 (relative), weights to 1e-5 (absolute): sums of gradients are taken in another order.
"""

import shutil
from functools import cache
from pathlib import Path

import pytest

from adlm.training.state import read_state
from tests.training.runs import arguments, assert_close, run, run_jobs, shelf, torchrun

# Adam divides by the size of a gradient: where that is rounding alone, eps keeps it so.
STEADY = ("optimizer.eps=1e-5",)
# Of the transformer in the tiny recipe.
OWN_KEYS = ("preset", "dim", "heads", "anchor_layers", "denoiser_layers", "dropout")
SHAPES: dict[str, tuple[str, ...]] = {
    "full": (),
    "padded": (),
    "pieces": ("micro_batch=1",),
    "padded pieces": ("micro_batch=3", "parallel.checkpoint_activations=true"),
    "no anchor weight": ("objective.anchor_weight=0", "model.tied=true"),
    "causal": ("method=a2r",),
    "one stage": ("method=mdlm", "model.anchor_layers=null", "ema=null"),
    "score entropy": ("method=sedd", "model.anchor_layers=null"),
    "own network": (
        *(f"model.{key}=null" for key in OWN_KEYS),
        "model.network=tests.models.networks:TwoStages",
        "model.options={dim: 32}",
        "parallel.checkpoint_activations=true",
    ),
    "own buffers": (
        *(f"model.{key}=null" for key in OWN_KEYS),
        "model.network=tests.models.networks:Odd",
        "ema=null",
    ),
    "halves": (
        "log.every=5",
    ),  # the first five steps end with a record, as they do when they are all
}
TWO = [("full", "ddp"), ("full", "fsdp"), ("padded", "ddp"), ("padded pieces", "fsdp")]
TWO += [("own network", "ddp"), ("own network", "fsdp"), ("own buffers", "fsdp")]
TWO += [("no anchor weight", "ddp"), ("causal", "fsdp"), ("one stage", "ddp")]
REFUSED = {  # kind, changes, the error
    "muon": ("fsdp", "optimizer.name=muon", "optimizer.name=muon needs whole matrices"),
    "odd": ("ddp", "batch=7", "batch=7 must be a multiple of the 2 processes"),
    "none": ("none", "parallel.kind=none, but torchrun started 2 processes"),
    "shard": ("hsdp", "parallel.shard=3", "parallel.shard=3 does not divide the 2 processes"),
}
FOUR = [(shape, kind) for shape in ("full", "padded") for kind in ("ddp", "fsdp", "hsdp")]
FOUR += [
    ("pieces", "hsdp"),
    ("padded pieces", "fsdp"),
    ("padded pieces", "ddp"),
    ("no anchor weight", "fsdp"),
]
FOUR += [("causal", "hsdp"), ("one stage", "fsdp"), ("score entropy", "ddp")]


def settings(shape: str, kind: str) -> tuple[str, ...]:
    shard = ("parallel.shard=2",) if kind == "hsdp" else ()
    return *STEADY, *SHAPES[shape], f"parallel.kind={kind}", *shard


def rows(shape: str) -> str:
    return "documents" if "padded" in shape else "wrapped"


def place(processes: int, shape: str, kind: str) -> Path:
    return shelf() / "many" / f"{processes}-{shape}-{kind}".replace(" ", "-")


@cache
def alone(shape: str) -> Path:
    folder = place(1, shape, "none")
    run(folder, *settings(shape, "none"), rows=rows(shape))
    return folder


def job(processes: int, shape: str, kind: str, *changes: str, name: str = "") -> list[str]:
    folder = place(processes, name or shape, kind)
    return arguments(folder, *settings(shape, kind), *changes, rows=rows(shape))


@cache
def two() -> dict[str, str]:
    """All runs of two processes, and the errors of those that must fail."""
    jobs = {f"{shape} {kind}": job(2, shape, kind) for shape, kind in TWO}
    jobs["half"] = job(2, "halves", "fsdp", "steps=5", name="half")
    return run_jobs(
        2,
        jobs
        | {name: job(2, "full", *changes, name=name) for name, (*changes, _) in REFUSED.items()},
    )


@cache
def four() -> dict[str, str]:
    jobs = {f"{shape} {kind}": job(4, shape, kind) for shape, kind in FOUR}
    jobs |= {
        f"half {kind}": job(4, "halves", kind, "steps=5", name=f"half-{kind}")
        for kind in ("fsdp", "hsdp")
    }
    return run_jobs(4, jobs, seconds=400)


FOUR_IF_SLOW = [pytest.param(4, *case, marks=pytest.mark.slow) for case in FOUR]


@pytest.mark.parametrize(
    ("processes", "shape", "kind"), [*((2, *case) for case in TWO), *FOUR_IF_SLOW]
)
def test_several_processes_are_one(processes: int, shape: str, kind: str) -> None:
    errors = two() if processes == 2 else four()
    assert f"{shape} {kind}" not in errors, errors[f"{shape} {kind}"]
    assert_close(place(processes, shape, kind), alone(shape))


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_parallel_are_refused_by_all(name: str) -> None:
    assert two()[name].startswith(f"ValueError: {REFUSED[name][-1]}")


def test_one_process_resumes_what_two_sharded() -> None:
    assert "half" not in two()
    folder = place(2, "half", "fsdp")
    assert read_state(folder / "checkpoints/latest").step == 5
    run(folder, *settings("halves", "none"))
    assert_close(folder, alone("halves"))


@pytest.mark.slow
def test_a_run_survives_the_death_of_a_process(tmp_path: Path) -> None:
    """torchrun starts all of them again, and they resume from the last checkpoint."""
    changes = (*STEADY, "steps=40", "checkpoint.every=4", "log.every=4", "valid.every=20")
    run(tmp_path / "alone", *changes)
    given = arguments(tmp_path / "torn", *changes, "parallel.kind=ddp")
    done = torchrun(2, "-m", "tests.training.runs", "--dies", *given, restarts=1, seconds=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "torn/killed").exists(), "nobody died: the test is void"
    assert_close(tmp_path / "torn", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_fewer_processes_resume_what_four_sharded(tmp_path: Path, processes: int) -> None:
    folders = {kind: tmp_path / kind for kind in ("fsdp", "hsdp")}
    for kind, folder in folders.items():
        assert f"half {kind}" not in four()
        shutil.copytree(place(4, f"half-{kind}", kind), folder, symlinks=True)
        if processes == 1:
            run(folder, *settings("halves", "none"))
    if processes == 2:
        assert (
            run_jobs(
                2, {kind: arguments(folders[kind], *settings("halves", "fsdp")) for kind in folders}
            )
            == {}
        )
    for folder in folders.values():
        assert_close(folder, alone("halves"))
