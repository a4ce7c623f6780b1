"""A2R beside AR: the recipes' sizes, and the paired comparison over seeds."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import adlm
from adlm.config import load_config
from adlm.methods import build_config
from adlm.models.costs import count_parameters
from adlm.models.language_model import ModelConfig
from tests.evaluate.scorers import with_matplotlib
from tests.training.runs import data

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("mini-a2r", "mini-ar", "mini-ar-deep")


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "docs/a2r/compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = load_script()


def shape(recipe: str) -> ModelConfig:
    config = load_config(ROOT / f"recipes/{recipe}.yaml", folder="run", **{"data.path": "data"})
    model = {key: value for key, value in vars(config.model).items() if value is not None and key != "preset"}
    assert config.method and config.model.preset
    return build_config(config.method, config.model.preset, vocab_size=50_258, mask_id=50_257, length=512, **model)


def test_the_recipes_are_of_equal_depth_and_of_equal_parameters() -> None:
    a2r, ar, deep = map(shape, ARMS)
    assert a2r.anchor_layers + a2r.denoiser_layers == ar.denoiser_layers and a2r.cond_dim is ar.cond_dim is None
    assert abs(count_parameters(deep) / count_parameters(a2r) - 1) < 0.01
    page = (ROOT / "docs/a2r.md").read_text("utf-8")
    for config, recipe in zip((a2r, ar, deep), ARMS, strict=True):
        count = f"{count_parameters(config):,}"
        assert count in page and count in (ROOT / f"recipes/{recipe}.yaml").read_text("utf-8")
    head = (a2r.dim + 1) * a2r.vocab_size
    assert f"{head:,}" in page and f"{head:,}" in (ROOT / "recipes/mini-a2r.yaml").read_text("utf-8")
    settings = [load_config(ROOT / f"recipes/{arm}.yaml", folder="x", **{"data.path": "y"}) for arm in ARMS]
    for key in ("steps", "batch", "ema", "optimizer", "valid"):
        assert len({str(getattr(each, key)) for each in settings}) == 1, key


def results(differences: list[float], noise: float = 0.0) -> dict[str, Any]:
    """Two arms on ten rows of five documents, of 4 tokens a row: b, and a that much above it for each seed."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(8, 16, (len(differences), 10))
    shared = {"tokens_per_row": 4, "steps": 1, "layers": [0, 1], "parameters": 1, "flops_per_token": 1e9}
    runs = []
    for seed, difference in enumerate(differences):
        above = rows[seed] + 4 * difference + noise * rng.normal(size=10)
        for arm, nats in (("a", above), ("b", rows[seed])):
            runs.append(shared | {"arm": arm, "seed": seed, "row_nats": nats.tolist(), "valid": [[1, 3.0], [2, 2.0]]})
    return {"documents": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "runs": runs}


def test_differences_are_paired_and_their_interval_is_over_seeds() -> None:
    pair = compare.compare_arms(results([0.1, 0.2, 0.3]), "a", "b")
    assert pair["by_seed"] == pytest.approx([0.1, 0.2, 0.3]) and pair["mean"] == pytest.approx(0.2)
    half = 4.302653 * 0.1 / 3**0.5  # Student's, two degrees of freedom
    assert pair["interval"] == pytest.approx((0.2 - half, 0.2 + half), rel=1e-5)
    assert pair["document_se"] == pytest.approx(0, abs=1e-12)  # every row differs by the same
    noisy = compare.compare_arms(results([0.1, 0.2, 0.3], noise=1.0), "a", "b")
    assert 0.01 < noisy["document_se"] < 0.3
    other = compare.compare_arms(results([0.1, 0.2, 0.3], noise=1.0), "b", "a")
    assert other["mean"] == pytest.approx(-noisy["mean"])


def test_a_missing_seed_is_refused() -> None:
    incomplete = results([0.1, 0.2])
    incomplete["runs"].pop()
    with pytest.raises(ValueError, match=r"seeds differ: .*'a': \[0, 1\], 'b': \[0\].* run the missing ones"):
        compare.list_arms(incomplete)


@with_matplotlib
def test_runs_are_measured_and_tabulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"model.dim": 16, "model.heads": 2, "batch": 2, "steps": 2, "valid.every": 1, "valid.rows": 4}
    small |= {"device": "cpu", "log.show": False, "data.path": str(data())}
    folders = []
    for arm in ARMS[:2]:
        for seed in (0, 1):
            folder = tmp_path / f"{arm}-{seed}"
            adlm.train(ROOT / f"recipes/{arm}.yaml", **small, folder=str(folder), seed=seed)
            folders.append(str(folder))
    out = tmp_path / "results.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "measure", *folders, "--data", str(data()), "--every", "3", "--out", str(out)]
    )
    compare.main()
    measured = json.loads(out.read_text("utf-8"))
    assert [f"{run['arm']}-{run['seed']}" for run in measured["runs"]] == [Path(folder).name for folder in folders]
    assert all(len(run["row_nats"]) == len(measured["documents"]) for run in measured["runs"])
    assert [step for step, _ in measured["runs"][0]["valid"]] == [1, 2]
    monkeypatch.setattr(sys, "argv", ["x", "table", str(out), "--plot", str(tmp_path / "curves.svg")])
    compare.main()
    assert "| `mini-a2r` − `mini-ar` |" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "curves.svg").read_text("utf-8")
