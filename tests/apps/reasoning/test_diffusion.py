"""Reasoning with a masked model: holes, their loss, their samplers, and runs of the arms mdlm and adlm."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adlm.apps.reasoning import runs, sudoku
from adlm.apps.reasoning.diffusion import SAMPLINGS, HoleObjective, fill_holes, pad_holes
from adlm.apps.reasoning.items import MARKERS
from adlm.apps.reasoning.tasks import ItemBatch, ItemBatches, ProblemSet, open_task
from adlm.config import Config, load_config
from adlm.diffusion.objectives import training_loss
from adlm.models.language_model import LanguageModel
from tests.apps.reasoning.test_sudoku import make_boards, write

TINY = [
    "model.dim=32",
    "model.heads=2",
    "model.denoiser_layers=2",
    "log.show=false",
    "device=cpu",
    "valid.rows=10",
]
HOLE = -1  # in layouts of arithmetic
TINY += ["steps=2", "batch=4", "reasoning.tests=3"]


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sudoku")
    for seed, level in enumerate(sudoku.LEVELS):
        write(folder, level, *make_boards(30, seed))
    return folder


def make_config(task: str, arm: str, boards: Path, *changes: str) -> Config:
    path = [f"reasoning.path={boards}"] if task == "sudoku" else []
    return load_config(
        None, f"reasoning.task={task}", f"reasoning.arm={arm}", "folder=run", *TINY, *path, *changes
    )


def open_objective(
    task: str, arm: str, boards: Path, sampler: str = "confidence"
) -> tuple[ProblemSet, HoleObjective]:
    config = make_config(task, arm, boards)
    opened = open_task(config.reasoning)
    return opened, HoleObjective.from_config(config, opened, sampler=sampler)


def build_model(task: ProblemSet, arm: str, boards: Path, *changes: str) -> LanguageModel:
    config = make_config(task.name, arm, boards, *changes).replace(method=arm)
    return LanguageModel(runs.build_shape(config, task, None, 64))


def draw_batch(task: ProblemSet, rows: int, seed: int = 0) -> ItemBatch:
    return next(iter(ItemBatches(task, rows, seed=seed)))


def spell(task: ProblemSet, ids: list[int]) -> str:
    return " ".join(
        "_" if token == HOLE else str(task.tokenizer.bpe.id_to_token(token)) for token in ids
    )


def test_the_holes_of_arithmetic_follow_from_the_question(boards: Path) -> None:
    task, objective = open_objective("arithmetic", "mdlm", boards)
    question = task.encode_question("b = a - 9 | a = 13 + 4 ? b")
    assert (
        spell(task, objective.task.lay_out(question))
        == "<q> b = a - 9 | a = 13 + 4 ? b <r>" + " _" * 11
    )
    for item in task.draw(0, 1, 64):
        tokens, prompt = objective.task.complete(item), [*item.question, MARKERS.index("<r>")]
        assert objective.task.lay_out(item.question) == prompt + [HOLE] * (
            len(tokens) - len(prompt)
        )
        solution = spell(task, tokens[len(prompt) :])
        assert solution.endswith(f"; <a> {spell(task, item.answer)} <e>") and solution.count(
            ";"
        ) == len(item.steps)
        assert objective.task.find_answer(tokens) == item.answer


def test_a_sudoku_is_one_row_whose_empty_cells_are_holes(boards: Path) -> None:
    task, objective = open_objective("sudoku", "mdlm", boards)
    puzzles, solutions = make_boards(3)
    for item, puzzle, solution in zip(
        sudoku.make_items(puzzles, solutions), puzzles, solutions, strict=True
    ):
        row = spell(task, objective.task.lay_out(item.question))
        assert row == " ".join(map(str, puzzle)).replace("0", spell(task, [objective.task.hole]))
        assert spell(task, objective.task.complete(item)) == " ".join(map(str, solution))


@pytest.mark.parametrize("arm", ["mdlm", "adlm"])
@pytest.mark.parametrize("name", ["arithmetic", "sudoku"])
def test_only_holes_are_hidden_and_carry_loss(name: str, arm: str, boards: Path) -> None:
    task, objective = open_objective(name, arm, boards)
    batch = draw_batch(task, 4)
    layouts, _ = pad_holes([objective.task.lay_out(item.question) for item in batch.items])
    x0, _ = pad_holes([objective.task.complete(item) for item in batch.items])
    is_hole = layouts == objective.task.hole
    hidden = torch.zeros_like(is_hole)
    for step in range(1, 150):
        noisy = objective.corrupt(batch, 0, step)
        is_hidden = noisy.xt == task.tokenizer.mask_id
        assert torch.equal(noisy.x0, x0) and torch.equal(noisy.xt[~is_hidden], x0[~is_hidden])
        assert torch.equal(noisy.hidden.index, is_hidden.flatten().nonzero()[:, 0])
        assert not (is_hidden & ~is_hole).any() and noisy.tokens == is_hole.sum()
        if arm == "adlm":
            assert noisy.anchors is not None
            is_number = torch.isin(x0, torch.tensor(objective.task.numbers)) & is_hole
            assert torch.equal(noisy.anchors.index, is_number.flatten().nonzero()[:, 0])
            values = torch.tensor([len(item.steps) + 1 for item in batch.items])  # and the answer
            assert torch.equal(is_number.sum(-1), is_hole.sum(-1) if name == "sudoku" else values)
        hidden |= is_hidden
    assert torch.equal(hidden, is_hole)  # and each hole is hidden at times
    assert (noisy.anchor_weight is None) == (arm == "mdlm")


def test_noise_does_not_depend_on_how_a_batch_is_split(boards: Path) -> None:
    task, objective = open_objective("arithmetic", "adlm", boards)
    batch = draw_batch(task, 6)
    whole = objective.corrupt(batch, 0, 5)
    parts = [objective.corrupt(part, 0, 5) for part in batch.split(2)]
    for number, part in enumerate(parts):
        length = part.xt.shape[1]
        assert torch.equal(part.xt, whole.xt[2 * number : 2 * number + 2, :length])
        assert torch.equal(part.t, whole.t[2 * number : 2 * number + 2])


@pytest.mark.parametrize("sampler", SAMPLINGS)
@pytest.mark.parametrize("name", ["arithmetic", "sudoku"])
def test_samplers_fill_all_holes_and_rows_do_not_see_each_other(
    name: str, sampler: str, boards: Path
) -> None:
    task, objective = open_objective(name, "adlm", boards, sampler)
    model = build_model(task, "adlm", boards)
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(3))  # it starts at zero
    questions = [item.question for item in task.draw(0, 1, 3)]
    results = fill_holes(model, objective, questions)
    for question, result in zip(questions, results, strict=True):
        row = objective.task.lay_out(question)
        holes = row.count(objective.task.hole)
        assert len(result.tokens) == holes and task.tokenizer.mask_id not in result.tokens
        if name == "sudoku":  # the givens stay
            assert result.answer is not None
            assert all(
                cell in (objective.task.hole, filled)
                for cell, filled in zip(row, result.answer, strict=True)
            )
        expected = {
            "confidence_8": min(8, holes),
            "entropy_bounded": result.passes,
            "ancestral": result.passes,
        }
        assert result.passes == expected.get(sampler, holes) <= holes
    for count in (1, 2):
        assert fill_holes(model, objective, questions[:count]) == results[:count]


@pytest.mark.parametrize("name", ["arithmetic", "sudoku"])
def test_an_overfitted_model_fills_in_the_solutions(name: str, boards: Path) -> None:
    task, objective = open_objective(name, "adlm", boards)
    model = build_model(
        task, "adlm", boards, "model.dim=64", "model.positions=learned", "model.dropout=0"
    )
    batch = draw_batch(task, 4)
    batch = replace(
        batch, items=batch.items[:2] + batch.items[1::-1]
    )  # a row's place decides how much is hidden
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, 121):
        loss = training_loss(model, objective.corrupt(batch, 0, step), anchor_weight=3e-3)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    results = fill_holes(model, objective, [item.question for item in batch.items])
    assert [result.answer for result in results] == [item.answer for item in batch.items]


@pytest.mark.parametrize(
    ("task", "arm"), [("sudoku", "adlm"), ("sudoku", "no_cot"), ("arithmetic", "mdlm")]
)
def test_arms_train_and_are_evaluated_as_all_others(
    task: str, arm: str, boards: Path, tmp_path: Path
) -> None:
    path = [f"reasoning.path={boards}"] if task == "sudoku" else []
    run = runs.train(task, arm, "reason", *TINY, *path, f"folder={tmp_path}")
    assert run.step == 2 and 0 <= run.valid["val/accuracy"] <= 1
    result = runs.evaluate(tmp_path, "reasoning.samplers=[entropy_bounded,confidence]")
    assert json.loads((tmp_path / "reasoning.json").read_text("utf-8"))["tests"] == result["tests"]
    if task == "sudoku":
        assert list(result["tests"]) == list(sudoku.LEVELS)
        assert all(0 <= metrics["cells"] <= 1 for metrics in result["tests"].values())
    if arm == "no_cot":
        assert "samplers" not in result
    else:
        assert list(result["samplers"]) == ["entropy_bounded", "confidence"]
        assert result["tests"] == result["samplers"]["entropy_bounded"]
        puzzle = "53..7...." + 72 * "0"
        if task == "sudoku":
            reply = runs.ask(tmp_path, puzzle)
            assert reply["answer"].replace(" ", "").startswith("53") and reply["passes"] == 81 - 3
            with pytest.raises(
                ValueError, match=r"80 cells\) is no Sudoku: give 81 digits row by row"
            ):
                runs.ask(tmp_path, puzzle[1:])
    shape = runs.load_run(tmp_path).model.config
    assert (shape.anchor_layers, shape.denoiser_layers, shape.is_causal) == {
        "adlm": (1, 1, False), "mdlm": (0, 2, False), "no_cot": (0, 2, True)
    }[arm]  # fmt: skip


def test_bad_settings_get_one_line(boards: Path) -> None:
    cases = {
        ("graphs",): "unknown task of arm mdlm 'graphs': expected one of arithmetic, sudoku",
        ("arithmetic", "reasoning.samplers=[confidance]"): "unknown sampler of holes 'confidance'",
        (
            "arithmetic",
            "reasoning.samplers=[]",
        ): "reasoning.samplers is empty: give at least one of confidence",
        (
            "arithmetic",
            "init=somewhere",
        ): "init=somewhere: arm mdlm is trained from scratch; leave init out",
    }
    for (name, *changes), message in cases.items():
        config = make_config(name, "mdlm", boards, *changes)
        with pytest.raises(ValueError, match=message.replace("[", r"\[")) as caught:
            HoleObjective.from_config(config, open_task(config.reasoning))
        assert "\n" not in str(caught.value)
