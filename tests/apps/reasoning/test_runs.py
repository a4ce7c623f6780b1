"""Training runs of every arm: they run, resume bit for bit, and are the same in two processes."""

import json
import math
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from adlm.apps.reasoning import runs
from adlm.apps.reasoning.arms import ARMS
from adlm.apps.reasoning.graphs import NAMES
from adlm.apps.reasoning.runs import ReasoningTask, evaluate, load_run, solve, train
from adlm.config import load_config
from adlm.data.tokenizers import END_OF_TEXT, train_bpe
from adlm.distributed import DistributedContext
from adlm.models import folder as model_folder
from adlm.models.folder import LoadedModel
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.training import state as run_state
from adlm.training.train import Run, train_task
from tests.training.runs import assert_close, assert_same, curve, shelf, tensors, torchrun
from tests.training.runs import run as run_text
from tests.training.test_resume import crash_at

VOCABULARY = 400  # of the tiny GPT-2
EXCERPTS = Path(__file__).parent / "excerpts"
TINY = {
    "steps": 10,
    "batch": 6,
    "ema": 0.9,
    "device": "cpu",
    "model": {"dim": 32, "heads": 2, "denoiser_layers": 2, "dropout": 0.0},
    "optimizer": {"lr": 3e-3, "warmup": 3, "eps": 1e-5},
    "valid": {"every": 5, "rows": 4},
    "checkpoint": {"every": 5},
    "log": {"every": 2, "show": False},
    "guard": {"spike": None},
    "reasoning": {"hops": 2, "stage_steps": 2, "revisit": 0.3, "tests": 8},
}


@cache
def recipe() -> str:
    path = shelf() / "reasoning.yaml"
    path.write_text(json.dumps(TINY), "utf-8")
    return str(path)


def arguments(folder: Path, arm: str, *changes: str, task: str = "arithmetic") -> list[str]:
    return [
        recipe(),
        f"reasoning.task={task}",
        f"reasoning.arm={arm}",
        f"folder={folder}",
        *changes,
    ]


def run(folder: Path, arm: str, *changes: str, task: str = "arithmetic") -> Run:
    return train(task, arm, recipe(), f"folder={folder}", *changes)


CAUSAL = [name for name, arm in ARMS.items() if arm.holes is None]


@pytest.mark.parametrize("arm", CAUSAL)
def test_every_arm_trains(tmp_path: Path, arm: str) -> None:
    done = run(
        tmp_path,
        arm,
        "steps=3",
        "reasoning.stage_steps=1",
        "checkpoint.every=3",
        "valid.every=3",
        "ema=null",
    )
    assert done.step == 3 and 0 <= done.valid["val/accuracy"] <= 1
    assert math.isfinite(curve(tmp_path)[-1].get("train/loss", 0.0))


@pytest.mark.parametrize(
    "arm", ["cot", "icot", "acot_feedback", "acot_shuffled", "a2r_random", "simcot", "codi"]
)
def test_ten_steps_are_five_and_five(tmp_path: Path, arm: str) -> None:
    straight, torn = tmp_path / "straight", tmp_path / "torn"
    changes = ("model.dropout=0.1",) if arm in ("cot", "simcot", "codi") else ()
    done = run(straight, arm, *changes)
    with crash_at(7):
        run(torn, arm, *changes)
    assert run_state.read_state(torn / "checkpoints/latest").step == 5, (
        "nothing to resume from: the test is void"
    )
    run(torn, arm, *changes)
    assert_same(torn, straight)
    assert 0 <= done.valid["val/accuracy"] == 1 - done.valid["val/error"] <= 1
    losses = [record["train/loss"] for record in curve(straight) if "train/loss" in record]
    assert len(losses) == 5 and all(map(math.isfinite, losses))
    loaded = load_run(straight)
    items = loaded.task.load_valid(4)
    results = solve(loaded.model, loaded.task, loaded.objective, items)
    right = [result.answer == item.answer for result, item in zip(results, items, strict=True)]
    assert sum(right) / 4 == done.valid["val/accuracy"]


def test_there_is_room_for_steps_beyond_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "acot", "steps=1")
    loaded, counts = load_run(tmp_path), []
    monkeypatch.setattr(
        runs, "decode_greedily", lambda *_, **options: [counts.append(options["max_new_tokens"])]
    )
    for items in loaded.task.load_tests(
        1
    ).values():  # 2, 3 and 4 hops, two of which the stages remove
        solve(loaded.model, loaded.task, loaded.objective, items)
    assert counts == [3 + 8, 3 + 4 + 8, 3 + 8 + 8]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_decoder_of_simcot_is_trained_and_checkpointed_but_no_part_of_the_model(
    tmp_path: Path, optimizer: str
) -> None:
    run(tmp_path, "simcot", f"optimizer.name={optimizer}", "checkpoint.keep=3")
    early, late = tensors(tmp_path, "step-00000005"), tensors(tmp_path)
    names = {name for name in late if "decoder" in name}
    assert {
        "weights.auxiliary.decoder.layer.qkv.weight",
        "weights.auxiliary.decoder.norm.weight",
    } <= names
    assert not any(
        torch.equal(early[name], late[name]) for name in names if name.startswith("weights")
    )
    saved = model_folder.read_weights(tmp_path / "checkpoints/latest")
    assert not any("decoder" in name for name in saved)
    assert model_folder.load_model(tmp_path).model.state_dict().keys() >= saved.keys()


def test_a_plain_run_has_the_names_of_its_model_alone(tmp_path: Path) -> None:
    run(tmp_path, "cot", "steps=2")
    names = {
        name.removeprefix("weights.") for name in tensors(tmp_path) if name.startswith("weights.")
    }
    assert names == model_folder.load_model(tmp_path).model.state_dict().keys()


PROCESSES = ("cot", "acot", "acot_feedback", "a2r_random", "simcot", "codi")


@cache
def run_in_two_processes() -> Path:
    """All runs of two processes, one after another in the same processes."""
    folder = shelf() / "reasoning-two"
    folder.mkdir()
    jobs = {arm: arguments(folder / arm, arm, "micro_batch=2") for arm in PROCESSES}
    jobs["fsdp"] = arguments(folder / "fsdp", "cot", "parallel.kind=fsdp")
    (folder / "jobs.json").write_text(json.dumps(jobs), "utf-8")
    done = torchrun(2, "-m", "tests.apps.reasoning.test_runs", str(folder / "jobs.json"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("arm", PROCESSES)
def test_two_processes_are_one(arm: str, tmp_path: Path) -> None:
    run(tmp_path, arm)
    assert_close(run_in_two_processes() / arm, tmp_path)


def test_sharded_weights_are_refused() -> None:
    errors = json.loads((run_in_two_processes() / "errors-0.json").read_text("utf-8"))
    assert errors == {
        "fsdp": "ValueError: parallel.kind=fsdp shards weights, and one process decodes: use ddp"
    }


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        shutil.copy(EXCERPTS / "text_gsm8k.jsonl", folder / f"{split}.jsonl")
    return folder


def text_settings(gsm8k: Path) -> tuple[str, ...]:
    small = (
        "model.dim=null",
        "model.heads=null",
        "model.denoiser_layers=null",
        "model.dropout=null",
        "ema=null",
    )
    return (
        f"reasoning.path={gsm8k}",
        "batch=2",
        "steps=2",
        "checkpoint.every=1",
        "valid.every=2",
        *small,
    )


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with random weights and a small vocabulary."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the extra eval"
    )
    texts = [(EXCERPTS / "text_gsm8k.jsonl").read_text("utf-8")]
    tokenizer = train_bpe(texts, VOCABULARY + 1, end_token=END_OF_TEXT)  # with the mask
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=640, n_embd=8, n_layer=1, n_head=2
    )
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("arm", ["acot_kept", "coconut", "simcot", "codi"])
def test_a_gpt2_folder_is_extended_and_trained_and_resumed_without_it(
    arm: str, gpt2_folder: Path, gsm8k: Path, tmp_path: Path
) -> None:
    folder, init = tmp_path / "run", tmp_path / "gpt2"
    shutil.copytree(gpt2_folder, init)
    run(folder, arm, *text_settings(gsm8k), f"init={init}", task="gsm8k")
    loaded = model_folder.load_model(folder)
    assert (
        loaded.model.config.vocab_size == VOCABULARY + 6 + 1
        and loaded.model.config.mask_id == VOCABULARY + 6
    )
    assert (
        loaded.tokenizer is not None
        and loaded.tokenizer.decode([VOCABULARY, VOCABULARY + 5]) == "<r><p>"
    )
    shutil.rmtree(init)
    assert (
        run(folder, arm, *text_settings(gsm8k), "steps=3", f"init={init}", task="gsm8k").step == 3
    )
    again = load_run(folder)
    assert len(solve(again.model, again.task, again.objective, again.task.draw(0, 1, 2))) == 2


def test_a_run_starts_from_a_causal_model_of_text(gsm8k: Path, tmp_path: Path) -> None:
    """Ids and weights of the base model stay; the markers follow them, and the mask follows the markers."""
    tokenizer = train_bpe([(EXCERPTS / "text_gsm8k.jsonl").read_text("utf-8")], VOCABULARY)
    shape = ModelConfig(
        vocab_size=VOCABULARY,
        mask_id=VOCABULARY - 1,
        dim=8,
        heads=2,
        denoiser_layers=1,
        length=640,
        is_causal=True,
    )
    base = LanguageModel(shape, seed=3)
    model_folder.export_model(
        LoadedModel(base, tokenizer, "ar", 0, "wrapped"), tmp_path / "base", is_quantized=False
    )
    changes = *text_settings(gsm8k), f"init={tmp_path / 'base'}", "optimizer.lr=1e-9"
    run(tmp_path / "run", "acot_kept", *changes, task="gsm8k")
    loaded = model_folder.load_model(tmp_path / "run")
    config = loaded.model.config
    assert config == shape.replace(vocab_size=VOCABULARY + 6, mask_id=VOCABULARY + 5)
    rows = slice(VOCABULARY - 1)
    torch.testing.assert_close(loaded.model.embed.weight[rows], base.embed.weight[rows])
    assert loaded.tokenizer is not None and loaded.tokenizer.decode([VOCABULARY - 1]) == "<r>"
    text = "16 ducks lay eggs"
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    shutil.rmtree(tmp_path / "base")
    assert run(tmp_path / "run", "acot_kept", *changes, "steps=3", task="gsm8k").step == 3


def test_a_model_that_does_not_fit_is_refused(gsm8k: Path, tmp_path: Path) -> None:
    run_text(tmp_path / "text", "method=ar", "model.anchor_layers=null", "steps=1", "valid.every=1")
    init = f"init={tmp_path / 'text'}"
    with pytest.raises(
        ValueError, match=r"a problem of gsm8k has \d+ tokens .* and the model takes 32: choose"
    ):
        run(tmp_path / "long", "acot_kept", *text_settings(gsm8k), init, task="gsm8k")
    with pytest.raises(
        ValueError, match="train on a text task, whose vocabulary is the model's, or without init"
    ):
        run(tmp_path / "words", "cot", init)
    with pytest.raises(ValueError, match="is ar, and arm a2r trains a2r: choose another model"):
        run(tmp_path / "a2r", "a2r", init)


def test_a_run_starts_from_a_run_of_another_arm(tmp_path: Path) -> None:
    run(tmp_path / "cot", "cot", "steps=2")
    run(tmp_path / "acot", "acot", "steps=2", f"init={tmp_path / 'cot'}", "optimizer.lr=1e-9")
    first, second = (
        model_folder.load_model(tmp_path / arm).model.state_dict() for arm in ("cot", "acot")
    )
    torch.testing.assert_close(first, second)
    with crash_at(4):
        run(tmp_path / "acot", "acot", "steps=4", f"init={tmp_path / 'cot'}", "optimizer.lr=1e-9")
    shutil.rmtree(tmp_path / "cot")
    assert (
        run(
            tmp_path / "acot", "acot", "steps=4", f"init={tmp_path / 'cot'}", "optimizer.lr=1e-9"
        ).step
        == 4
    )


TEXT_MODEL = (
    "model.dim=8",
    "model.heads=2",
    "model.denoiser_layers=1",
    "ema=null",
    "checkpoint.every=1",
)


def test_prosqa_without_a_training_file_trains_on_generated_problems(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(EXCERPTS / "text_prosqa.json", tmp_path / "data/prosqa_test.json")
    changes = (
        *TEXT_MODEL,
        f"reasoning.path={tmp_path / 'data'}",
        "batch=2",
        "steps=1",
        "valid.rows=2",
        "valid.every=1",
    )
    run(tmp_path / "run", "cot", *changes, task="prosqa")
    result = evaluate(tmp_path / "run", tests=1)
    assert result["training_problems"] == "generated" and result["tests"]["test"]["problems"] == 1
    assert result["flops"] > 0
    task = load_run(tmp_path / "run").task
    item, other = task.draw(0, 1, 2)
    assert task.decode(item.question).startswith(("Every ", *NAMES)) and item != other
    assert len(item.steps) <= 2 and task.decode(item.answer).endswith("pus.")
    shutil.rmtree(tmp_path / "data")  # a question needs no files
    assert load_run(tmp_path / "run").task.encode_question("Is Tom a terpus or lempus?")


def test_a_folder_with_test_problems_alone_is_enough_to_evaluate(
    gsm8k: Path, tmp_path: Path
) -> None:
    changes = *TEXT_MODEL, "batch=2", "steps=1", "valid.rows=2", "valid.every=1"
    run(tmp_path / "run", "icot", *changes, f"reasoning.path={gsm8k}", task="gsm8k")
    (tmp_path / "data").mkdir()
    shutil.copy(gsm8k / "test.jsonl", tmp_path / "data")
    result = evaluate(tmp_path / "run", data=tmp_path / "data", tests=2)
    assert result["training_problems"] == "files" and result["tests"]["test"]["problems"] == 2
    assert result["flops"] is None
    with pytest.raises(ValueError, match="gsm8k has no split 'train'"):
        run(
            tmp_path / "other", "cot", *changes, f"reasoning.path={tmp_path / 'data'}", task="gsm8k"
        )


def test_all_problems_of_a_text_task_must_fit_the_model(gsm8k: Path, tmp_path: Path) -> None:
    problems = [json.loads(line) for line in (gsm8k / "test.jsonl").read_text("utf-8").splitlines()]
    short = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
    lines = [json.dumps(each) for each in [*[short] * 600, problems[0]]]
    (tmp_path / "train.jsonl").write_text("\n".join([*lines, ""]), "utf-8")
    (tmp_path / "test.jsonl").write_text(f"{lines[0]}\n", "utf-8")
    config = load_config(
        *arguments(tmp_path, "cot", *TEXT_MODEL, f"reasoning.path={tmp_path}", task="gsm8k")
    )
    opened = ReasoningTask(config, DistributedContext(torch.device("cpu")))
    assert opened.shape.length >= opened.length > len(problems[0]["question"].split())


def test_words_of_another_task_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "graphs", "cot", "steps=1", task="graphs")
    with pytest.raises(ValueError, match="which are not those of arithmetic: train on a text task"):
        run(tmp_path / "arithmetic", "cot", f"init={tmp_path / 'graphs'}")


@pytest.mark.parametrize(
    ("task", "arm", "changes", "problem"),
    [
        ("arithmetics", "cot", (), "unknown task 'arithmetics' .did you mean arithmetic"),
        ("arithmetic", "acott", (), "unknown arm 'acott' .did you mean acot or cot"),
        ("arithmetic", "cot", ("init=adlm-prose",), "is a masked model"),
        (
            "arithmetic",
            "cot",
            ("reasoning.hops=99",),
            r"reasoning\.hops=99 is out of range for arithmetic",
        ),
        ("gsm8k", "cot", (), r"reasoning\.path is required for gsm8k"),
        ("arithmetic", "acot_foreign", ("batch=1",), "batch=1 has no other problem's labels"),
    ],
)
def test_bad_settings_get_one_line(
    task: str, arm: str, changes: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        run(tmp_path, arm, *changes, task=task)
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    import tests.training.runs as jobs

    torch.set_num_threads(1)
    jobs.train = lambda *given: train_task(load_config(*given), ReasoningTask)  # type: ignore[assignment]
    jobs._run_jobs(Path(sys.argv[1]))
