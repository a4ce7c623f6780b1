"""A run that is killed at any moment resumes, and ends with the same bits as one that was not."""

import random
import time
from pathlib import Path

import pytest

from adlm.files import PARTIAL
from adlm.models.folder import list_checkpoints
from adlm.training.state import verify_checkpoint
from tests.attacks.commands import count_cases
from tests.training.runs import assert_same, get_exit_code, in_process, run, wait_until

# A checkpoint at every step, at other steps than those that are logged and validated.
OFTEN = ("checkpoint.every=1", "log.every=3", "valid.every=4", "model.dropout=0.1")
SLOW = 0.004  # seconds more for each file of a checkpoint: most of a run's time goes into writing


def partial(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob(f"{PARTIAL}*"))


def is_killed(folder: Path, changes: tuple[str, ...], rng: random.Random, moment: str) -> bool:
    """Kill a run as soon as it writes, some time after that, or at any time; False if it ended before."""
    process = in_process(folder, *changes, slow=SLOW)
    before = {path.name for path in partial(folder)}
    if moment == "any time":
        time.sleep(rng.uniform(0, 1))
    elif (
        wait_until(lambda: any(path.name not in before for path in partial(folder)), process)
        and moment == "later"
    ):
        time.sleep(rng.uniform(0, 0.2))
    process.kill()
    code = get_exit_code(process)
    assert code in (0, -9)
    return code == -9


@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        (0, 3),
        pytest.param(0, count_cases(8), marks=pytest.mark.slow),
        pytest.param(2, count_cases(3), marks=pytest.mark.slow),
    ],
)
def test_kills_change_nothing(tmp_path: Path, workers: int, kills: int) -> None:
    straight, torn = tmp_path / "straight", tmp_path / "torn"
    changes = (*OFTEN, f"steps={6 * kills + 6}", f"data.workers={workers}")
    run(straight, *changes)
    rng, left = random.Random(kills), 0
    for number in range(kills):
        moment = ("writing", "later", "any time")[number % 3]
        assert is_killed(torn, changes, rng, moment), f"the run was over before kill {number}"
        left += bool(partial(torn))
        for path in list_checkpoints(torn / "checkpoints")[-2:]:
            verify_checkpoint(path)
    assert left >= kills // 3, "too few kills fell into the writing of a checkpoint"
    assert get_exit_code(in_process(torn, *changes)) == 0
    assert not partial(torn)
    assert_same(torn, straight)
