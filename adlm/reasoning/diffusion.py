"""Reasoning with a masked model: the question is fixed, the trace and the answer are holes (arms `mdlm` and `adlm`).

On *arithmetic* the row is that of the arm `cot`, and all after `<r>` are holes; their number follows from the question,
which has one assignment for each step. A Sudoku is one row of 81 cells: the givens are fixed, empty cells are holes.
Noise and loss are on the holes alone. The anchors of `adlm` are the numbers in the holes: the values of the trace, all
cells of a Sudoku (each digit occurs nine times in a solution, so that no digit is rarer than another).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adlm.config import Config
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.masking import ForwardProcess, NoisyBatch, corrupt
from adlm.diffusion.rng import CounterRng
from adlm.generate import Predictor, stream_tokens
from adlm.methods import METHODS, build_anchor_rule, build_sampler, build_schedule, look_up, takes_steps
from adlm.models.language_model import LanguageModel
from adlm.reasoning import arithmetic, sudoku
from adlm.reasoning.decoding import Decoded, find_answer
from adlm.reasoning.items import WORD_MARKERS, Item, index_words
from adlm.reasoning.tasks import ItemBatch, Task
from adlm.training.objective import Objective

FILLED_ROWS = 1024  # filled at a time
HOLE = -1  # stands for the mask in a layout
EQUALS = index_words(arithmetic.WORDS)["="]
EMPTY = index_words(sudoku.WORDS)["."]


@dataclass(frozen=True)
class HoleTask:
    """How the questions of a task become rows with holes, and what belongs into the holes."""

    numbers: Sequence[int]  # the ids of anchors
    lay_out: Callable[[list[int]], list[int]]  # of a question
    list_solution: Callable[[Item], list[int]]
    find_answer: Callable[[list[int]], list[int] | None]  # in a filled row


def lay_out_trace(question: list[int]) -> list[int]:
    """Lay out a question of *arithmetic*: a step `a = 17 ;` for each assignment, then `<a>`, the answer and `<e>`."""
    return [*question, WORD_MARKERS.reasoning, *[HOLE] * (4 * question.count(EQUALS) + 3)]


def list_trace(item: Item) -> list[int]:
    """List the tokens of a trace and its answer."""
    return [*(token for step in item.steps for token in step), WORD_MARKERS.answer, *item.answer, WORD_MARKERS.end]


HOLE_TASKS = {
    "arithmetic": HoleTask(
        [index_words(arithmetic.WORDS)[str(number)] for number in range(arithmetic.MODULUS)],
        lay_out_trace,
        list_trace,
        lambda row: find_answer(row, WORD_MARKERS),
    ),
    "sudoku": HoleTask(
        [index_words(sudoku.WORDS)[str(digit)] for digit in range(1, 10)],
        lambda question: [HOLE if cell == EMPTY else cell for cell in question[1:]],
        lambda item: [token for cell, token in zip(item.question[1:], item.answer, strict=True) if cell == EMPTY],
        lambda row: row,
    ),
}


@dataclass(frozen=True)
class HoleSampling:
    """How the holes of a row are filled: a sampler of adlm.methods and its settings."""

    sampler: str
    steps: int | None = None  # network evaluations of samplers that have a number of them; None: one for each hole
    block: int | None = None
    temperature: float = 0.0


SAMPLINGS = {
    "confidence": HoleSampling("confidence"),
    "margin": HoleSampling("margin"),
    "entropy_bounded": HoleSampling("entropy_bounded"),
    "confidence_8": HoleSampling("confidence", steps=8),
    "random": HoleSampling("first_hitting"),
    "left_to_right": HoleSampling("confidence", block=1),
    "ancestral": HoleSampling("ancestral", temperature=1.0),
}


class HoleRows(NamedTuple):
    """Rows with holes (B, L); `valid` is False at padding, None where there is none."""

    tokens: Tensor
    is_fixed: Tensor
    valid: Tensor | None


class HoleLayout(NamedTuple):
    """A problem as one row with its solution."""

    tokens: list[int]
    is_fixed: list[bool]


@dataclass(frozen=True)
class HoleObjective:
    """Hides tokens of the holes, and fills the holes of questions."""

    task: HoleTask
    objective: Objective
    sampling: HoleSampling
    multiple: int = 1

    @staticmethod
    def from_config(config: Config, task: Task, *, multiple: int = 1, sampler: str | None = None) -> HoleObjective:
        """Build the objective of a run; `sampler` is by default the first of reasoning.samplers."""
        if config.init is not None:
            raise ValueError(f"init={config.init}: arm {config.reasoning.arm} is trained from scratch; leave init out")
        samplers, settings = config.reasoning.samplers, config.objective
        if not samplers:
            raise ValueError(f"reasoning.samplers is empty: give at least one of {', '.join(SAMPLINGS)}")
        samplings = {name: look_up(SAMPLINGS, name, "sampler of holes") for name in (*samplers, sampler or samplers[0])}
        holes = look_up(HOLE_TASKS, task.name, f"task of arm {config.reasoning.arm}")
        rule = None
        if METHODS[config.reasoning.arm].two_stages:
            rule = build_anchor_rule("listed", ids=holes.numbers, vocab_size=task.tokenizer.vocab_size)
        process = ForwardProcess(
            task.tokenizer.mask_id,
            schedule=build_schedule(settings.schedule, **settings.schedule_options),
            anchor_rule=rule,
            anchor_scope=settings.anchor_scope,
            steps=settings.discrete_steps,
            multiple=64 if multiple > 1 else 1,
        )
        objective = Objective(process, False, settings.anchor_weight, settings.anchor_ramp)
        return HoleObjective(holes, objective, samplings[sampler or samplers[0]], multiple)

    def lay_out(self, item: Item, stage: int | None = None) -> HoleLayout:
        """Lay out a problem with its solution; there are no stages."""
        row, solution = self.task.lay_out(item.question), self.task.list_solution(item)
        is_fixed = [token != HOLE for token in row]
        if is_fixed.count(False) != len(solution):
            raise ValueError(
                f"a question with {is_fixed.count(False)} holes has a solution of {len(solution)} tokens: expected as "
                "many; give each assignment one step and each empty cell one digit"
            )
        tokens = iter(solution)
        return HoleLayout([next(tokens) if token == HOLE else token for token in row], is_fixed)

    def collate(self, layouts: Sequence[HoleLayout], multiple: int = 1) -> HoleRows:
        """Pad layouts to one length, a multiple of a number where they differ; padding is fixed and never attended."""
        lengths = torch.tensor([len(layout.tokens) for layout in layouts])
        longest = int(lengths.max())
        is_padded = bool((lengths < longest).any())
        length = longest + -longest % multiple if is_padded else longest
        tokens = torch.tensor([layout.tokens + [0] * (length - len(layout.tokens)) for layout in layouts])
        is_fixed = torch.tensor([layout.is_fixed + [True] * (length - len(layout.tokens)) for layout in layouts])
        return HoleRows(tokens, is_fixed, torch.arange(length) < lengths[:, None] if is_padded else None)

    def corrupt(self, batch: ItemBatch, seed: int, step: int) -> NoisyBatch:
        """Hide tokens of the holes at an optimizer step."""
        rows = self.collate([self.lay_out(item) for item in batch.items], self.multiple)
        rng, where = CounterRng.from_seed(seed, batch.number), {"index": batch.place, "total": batch.total}
        options = {"valid": rows.valid, "is_fixed": rows.is_fixed}
        return corrupt(rows.tokens, self.objective.process, rng, step, **where, **options)  # type: ignore[arg-type]

    def anchor_weight(self, step: int, steps: int) -> float | None:
        """Gamma of the anchor term at a step; None where there are no anchors."""
        return self.objective.anchor_weight(step, steps)


@torch.no_grad()
def fill_holes(model: LanguageModel, objective: HoleObjective, questions: Sequence[list[int]]) -> list[Decoded]:
    """Fill the holes of questions; a row's result does not depend on the other rows."""
    device, mask_id = model.embed.weight.device, model.config.mask_id
    assert mask_id is not None
    predictor = Predictor(model, device, torch.float32, is_compiled=False)
    rows = [objective.task.lay_out(question) for question in questions]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    sampling, results = objective.sampling, {}
    steps = {"steps": sampling.steps or model.config.length} if takes_steps(sampling.sampler) else {}
    sampler = build_sampler(sampling.sampler, **steps)
    for start in range(0, len(order), FILLED_ROWS):
        part = order[start : start + FILLED_ROWS]
        layouts = [
            HoleLayout([mask_id if token == HOLE else token for token in row], [token != HOLE for token in row])
            for row in (rows[number] for number in part)
        ]
        xt, is_fixed, valid = objective.collate(layouts)
        frames = stream_tokens(
            predictor,
            xt,
            sampler,
            seed=0,
            rows=torch.tensor(part),
            sampling=SamplingParams(sampling.temperature),
            is_fixed=is_fixed,
            valid=valid,
            block=sampling.block,
        )
        with torch.autocast(device.type, enabled=False):
            (frame,) = deque(frames, maxlen=1)
        for number, tokens, layout, evaluations in zip(
            part, frame.tokens.tolist(), layouts, frame.nfe.tolist(), strict=True
        ):
            filled = tokens[: len(layout.tokens)]
            holes = [token for token, is_given in zip(filled, layout.is_fixed, strict=True) if not is_given]
            results[number] = Decoded(holes, objective.task.find_answer(filled), evaluations)
    return [results[number] for number in range(len(rows))]
