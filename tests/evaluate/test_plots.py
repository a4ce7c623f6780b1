"""Plots: they show their data, are complete, and equal data gives equal files."""

from pathlib import Path
from typing import Any

from adlm.evaluate.plots import draw_frontier
from tests.evaluate.scorers import pixels, with_matplotlib

pytestmark = with_matplotlib
REAL_TEXT = {"gen_ppl": 20.0, "gen_ppl_se": 1.0, "entropy": 4.1, "entropy_se": 0.1}


def point(
    steps: int, *, sampler: str = "ancestral", top_p: float = 0.9, **changes: Any
) -> dict[str, Any]:
    """A point of a frontier whose quality grows with its steps."""
    quality = {
        "gen_ppl": 900.0 / steps,
        "gen_ppl_se": 3.0,
        "entropy": 4.5 - steps / 100,
        "entropy_se": 0.05,
    }
    time = {"nfe": float(steps), "seconds": steps / 50, "seconds_sd": 0.01}
    return {
        "model": "runs/one",
        "sampler": sampler,
        "temperature": 1.0,
        "top_p": top_p,
        **quality,
        **time,
        **changes,
    }


POINTS = [
    point(steps, sampler=sampler) for sampler in ("ancestral", "confidence") for steps in (4, 8, 16)
]


def test_a_frontier_shows_points_models_and_real_text(tmp_path: Path) -> None:
    assert pixels(draw_frontier(POINTS, tmp_path / "scored.png", REAL_TEXT)).std() > 0.05
    odd = [*POINTS, point(32, model=r"a/$\frac{1", top_p=1.0)]
    drawn = draw_frontier(odd, tmp_path / "odd.svg", REAL_TEXT).read_text("utf-8")
    for word in ("confidence", "T 1, p 0.9", "real text", ">one<", "frac{1", "NFE", "Gen-PPL"):
        assert word in drawn
    again = draw_frontier(odd, tmp_path / "again.svg", REAL_TEXT)
    assert again.read_text("utf-8") == drawn  # no date in it
    unscored = draw_frontier(
        [each | {"gen_ppl": None} for each in odd], tmp_path / "unscored.svg"
    ).read_text("utf-8")
    assert "entropy (nats" in unscored and "Gen-PPL" not in unscored and "real text" not in unscored
