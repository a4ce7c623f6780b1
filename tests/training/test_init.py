"""Fine-tuning: weights and architecture come from `init`, whose data must fit, and which resuming does not read."""

import json
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.config import load_config
from adlm.files import hash_file
from adlm.models.folder import export_model, load_model, read_weights
from adlm.training.state import read_state
from adlm.training.train import Run, train
from tests.cli.terminal import invoke
from tests.training.runs import TEXT, TINY, assert_same, data, run, shelf
from tests.training.test_resume import crash_at

PLAIN = {key: value for key, value in TINY.items() if key != "model"}


@cache
def base() -> Path:
    """A run to start from, with modulations and dropout."""
    return run(shelf() / "base", "steps=4", "model.dropout=0.1").folder


def fine_tune(folder: Path, *changes: str, init: Path | str | None = None, **settings: Any) -> Run:
    given = {"data": {"path": data()}} | settings
    return train(PLAIN, f"init={init or base()}", *changes, folder=folder, **given)


def test_a_run_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    done = fine_tune(tmp_path, "steps=1", "optimizer.lr=1e-12", "optimizer.warmup=0")
    assert done.step == 1
    mine, theirs = (read_weights(folder / "checkpoints/latest") for folder in (tmp_path, base()))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    config, state = load_config(tmp_path / "config.yaml"), read_state(done.checkpoint)
    assert (config.init, config.method, config.model.preset) == (str(base()), "adlm", None)
    assert state.init_sha256 == hash_file(base() / "checkpoints/latest/model.safetensors")
    assert load_model(tmp_path).model.config == load_model(base()).model.config
    assert read_state(base() / "checkpoints/latest").init_sha256 is None


def test_a_run_resumes_without_its_init(tmp_path: Path) -> None:
    init, torn, straight = (tmp_path / name for name in ("init", "torn", "straight"))
    shutil.copytree(base(), init, symlinks=True)
    fine_tune(straight, init=init)
    with crash_at(7):
        fine_tune(torn, init=init)
    shutil.rmtree(init)
    fine_tune(torn, init=init)
    assert_same(torn, straight)
    for change, message in (
        ("method=mdlm", "method=mdlm, and init="),
        ("model.dim=64", "dim is 64 in the recipe, 32"),
    ):
        with pytest.raises(ValueError, match=message):
            fine_tune(torn, change, init=init)
    with pytest.raises(ValueError, match=r"init: .* then, adlm-prose now"):
        fine_tune(torn, init="adlm-prose")
    with pytest.raises(FileNotFoundError, match="neither a run folder nor a model folder"):
        fine_tune(tmp_path / "new", init=init)
    resume = f"resume={torn / 'checkpoints/step-00000005'}"  # into another folder, as the error of a divergence advises
    assert fine_tune(tmp_path / "new", resume, "optimizer.lr=1e-3", init=init).step == 10


@pytest.mark.parametrize("is_quantized", [True, False])
def test_an_exported_model_trains_as_it_is(tmp_path: Path, is_quantized: bool) -> None:
    """The bundled models are folded and int8: they have no modulations, and train without."""
    init = export_model(load_model(base()), tmp_path / "model", is_quantized=is_quantized)
    assert (load_model(init).model.config.cond_dim is None) == is_quantized
    fine_tune(
        tmp_path / "run", "model.dropout=0", "ema=null", "steps=2", "optimizer.warmup=0", init=init
    )
    before, after = load_model(init).model, load_model(tmp_path / "run").model
    same = [
        name for name, p in after.named_parameters() if torch.equal(p, before.get_parameter(name))
    ]
    assert not [name for name in same if ".condition." not in name]
    assert after.config.dropout == 0 and after.config.cond_dim == before.config.cond_dim


def test_a_recipes_architecture_must_be_that_of_init(tmp_path: Path) -> None:
    assert (
        run(tmp_path / "same", f"init={base()}", "steps=1").step == 1
    )  # the tiny recipe has the same model
    with pytest.raises(
        ValueError, match=r"model\.dim is 64 in the recipe, 32 in init\. Use a recipe without"
    ):
        fine_tune(tmp_path / "other", "model.dim=64")
    with pytest.raises(
        ValueError, match=r"model\.dim is 768 .*model\.heads is 12 in the recipe, 2 in init"
    ):
        fine_tune(tmp_path / "other", "model.preset=small")
    with pytest.raises(ValueError, match=r"method=ar, and init=\S+ is adlm: leave method out"):
        fine_tune(tmp_path / "other", "method=ar")
    assert not (tmp_path / "other").exists()


def test_data_that_does_not_fit_are_refused_with_the_command_that_makes_fitting_data(
    tmp_path: Path,
) -> None:
    tokens = (
        r"the tokenizer bpe-300 with 300 tokens, not \S+ with 8,192; length 32, not 256; "
        r"wrapped rows, not documents"
    )
    with pytest.raises(ValueError, match=f"does not fit init=adlm-prose: it has {tokens}"):
        fine_tune(tmp_path / "run", init="adlm-prose")
    with pytest.raises(ValueError, match="documents rows, not wrapped") as caught:
        fine_tune(tmp_path / "run", data={"path": data("documents")})
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    command = (
        str(caught.value)
        .partition("adlm prepare SOURCE")[2]
        .replace(str(data("documents")), str(tmp_path / "x"))
    )
    result = invoke("prepare", str(tmp_path / "text.txt"), *shlex.split(command), "--json")
    assert result.exit_code == 0, result.output
    assert (
        fine_tune(
            tmp_path / "run", "steps=1", data={"path": json.loads(result.stdout)["folder"]}
        ).step
        == 1
    )


def test_a_novel_is_prepared_by_paragraphs_for_a_bundled_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SOURCE --documents blank --out") as caught:
        fine_tune(tmp_path / "run", init="adlm-prose")
    (tmp_path / "novel.txt").write_text(TEXT, "utf-8")
    command = (
        str(caught.value)
        .partition("adlm prepare SOURCE")[2]
        .replace(str(data()), str(tmp_path / "x"))
    )
    result = invoke("prepare", str(tmp_path / "novel.txt"), *shlex.split(command), "--json")
    assert result.exit_code == 0, result.output
    fitting = load_config(
        "fine-tune", folder=tmp_path / "run", data={"path": json.loads(result.stdout)["folder"]}
    )
    run = train(
        fitting,
        "steps=1",
        "batch=2",
        "valid.rows=2",
        "valid.draws=1",
        "device=cpu",
        "log.show=false",
    )
    assert load_model(run.folder).rows == "documents" and load_model(run.folder).method == "adlm"
