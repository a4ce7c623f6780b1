"""The recipes of the paper's fine-tuning: their steps are its epochs, and a GPT-2 folder trains with them."""

import os
from pathlib import Path

import pytest
import torch

from adlm.apps.reasoning.arms import ARMS
from adlm.apps.reasoning.runs import load_run, train
from adlm.config import load_config
from adlm.data.tokenizers import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
EXCERPT = Path(__file__).parent / "excerpts/text_prosqa.json"
# Task, training problems, epochs, epochs of a stage, the last stage, the steps.
PAPER = {
    "gsm8k": ("gsm8k-equations", 385_620, 25, 3, 2, "kept"),
    "prontoqa": ("prontoqa", 9_000, 50, 5, 6, "kept"),
    "prosqa": ("prosqa", 17_886, 50, 5, 6, "removed"),
}


@pytest.mark.parametrize("name", PAPER)
def test_steps_are_the_papers_epochs(name: str) -> None:
    task, problems, epochs, stage_epochs, stages, kind = PAPER[name]
    config = load_config(ROOT / f"recipes/reason-{name}.yaml", folder="run")
    arm, settings = ARMS[config.reasoning.arm], config.reasoning
    assert (settings.task, settings.stages, arm.steps, arm.labels) == (task, stages, kind, "path")
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.batch) == (1e-4, 0.01, 128)
    assert config.steps == round(epochs * problems / 128)
    assert settings.stage_steps == round(stage_epochs * problems / 128)
    assert config.steps > stages * settings.stage_steps


def test_a_gpt2_folder_is_fine_tuned_by_a_recipe(tmp_path: Path) -> None:
    if os.environ.get("ADLM_ALL") == "1":
        import transformers
    else:
        transformers = pytest.importorskip(
            "transformers", reason="transformers comes with the extra eval"
        )
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    base.save_pretrained(tmp_path / "gpt2")
    transformers.GPT2TokenizerFast(tokenizer_object=load_tokenizer("gpt2").bpe).save_pretrained(
        tmp_path / "gpt2"
    )
    small = {
        "steps": 1,
        "batch": 2,
        "valid.rows": 2,
        "device": "cpu",
        "log.show": False,
        "optimizer.lr": 1e-9,
    }
    settings = {"init": str(tmp_path / "gpt2"), "folder": str(tmp_path / "run")}
    train(
        "prosqa", "acot", "reason-prosqa", **small, **settings, **{"reasoning.path": str(EXCERPT)}
    )
    run = load_run(tmp_path / "run")
    assert (
        run.model.config.tied
        and run.model.config.positions == "learned"
        and run.objective.slots == 6
    )
    assert (
        run.model.config.vocab_size
        == run.task.tokenizer.vocab_size
        > max(run.task.markers[1:])
        >= 50_257
    )
    theirs = base.transformer.wte.weight.detach()
    torch.testing.assert_close(run.model.embed.weight[:50_257], theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        run.model.embed.weight[run.task.markers.slot], theirs.mean(0), atol=1e-6, rtol=0
    )
