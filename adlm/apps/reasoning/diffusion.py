"""Reasoning with a masked model: the question is fixed, the trace and the answer are holes (arms `mdlm` and `adlm`).

On *arithmetic* the row is that of the arm `cot`, and all after `<r>` are holes; their number follows from the question,
which has one assignment for each step. A Sudoku is one row of 81 cells: the givens are fixed, empty cells are holes.
Noise and loss are on the holes alone. The anchors of `adlm` are the numbers in the holes: the values of the trace, all
cells of a Sudoku (each digit occurs nine times in a solution, so that no digit is rarer than another).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adlm.apps.reasoning import arithmetic, sudoku
from adlm.apps.reasoning.arms import ARMS, LAST, RowLayout, lay_out
from adlm.apps.reasoning.decoding import Decoded, decode_in_batches, find_answer
from adlm.apps.reasoning.items import WORD_MARKERS, Item, index_words, pad_rows
from adlm.apps.reasoning.settings import ReasoningConfig
from adlm.apps.reasoning.tasks import ItemBatch, ProblemSet
from adlm.diffusion.anchors import build_anchor_rule
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import NoisyBatch, corrupt
from adlm.diffusion.objectives import Loss, MaskedDiffusion, training_loss
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import build_sampler, takes_steps
from adlm.diffusion.sampling import Row, fill_rows
from adlm.models.evaluator import build_evaluator
from adlm.models.language_model import LanguageModel
from adlm.models.methods import METHODS
from adlm.registry import Registry
from adlm.training.text import build_process

NUMBERS = index_words(arithmetic.WORDS)
CELLS = index_words(sudoku.WORDS)


class HoleTask(NamedTuple):
    """How the problems of a task become rows with holes."""

    hole: int  # what stands for a hole in a layout
    numbers: Sequence[int]  # the ids of anchors
    lay_out: Callable[[list[int]], list[int]]  # the row of a question, with holes
    complete: Callable[[Item], list[int]]  # the row of a problem, with its solution
    find_answer: Callable[[list[int]], list[int] | None]  # in a row without holes


HOLE_TASKS = {
    "arithmetic": HoleTask(
        -1,
        [NUMBERS[str(number)] for number in range(arithmetic.MODULUS)],
        # A step `a = 17 ;` for each assignment, then `<a>`, the answer and `<e>`.
        lambda question: [
            *question,
            WORD_MARKERS.reasoning,
            *[-1] * (4 * question.count(NUMBERS["="]) + 3),
        ],
        lambda item: lay_out(item, ARMS["cot"], 0, 0, WORD_MARKERS).tokens,
        lambda row: find_answer(row, WORD_MARKERS),
    ),
    "sudoku": HoleTask(
        CELLS["."],
        [CELLS[str(digit)] for digit in range(1, 10)],
        lambda question: question[1:],
        lambda item: item.answer,
        lambda row: row,
    ),
}


class HoleSampling(NamedTuple):
    """How the holes of a row are filled: a sampler of adlm.diffusion.samplers and its settings."""

    sampler: str
    steps: int | None = (
        None  # network evaluations of samplers that have a number of them; None: one for each hole
    )
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


def pad_holes(rows: Sequence[list[int]], multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Return rows (B, L) of one length and which tokens are no padding; only padded rows are as long as a multiple."""
    is_padded = len({len(row) for row in rows}) > 1
    tokens, is_token = map(torch.from_numpy, pad_rows(rows, multiple if is_padded else 1))
    return tokens, is_token if is_padded else None


@dataclass(frozen=True)
class HoleObjective(MaskedDiffusion):
    """Hides tokens of the holes, and fills the holes of questions."""

    _: KW_ONLY
    task: HoleTask
    sampling: HoleSampling
    multiple: int = 1
    loss_fn: Callable[..., Loss] = training_loss
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @staticmethod
    def from_config(
        config: ReasoningConfig, task: ProblemSet, *, multiple: int = 1, sampler: str | None = None
    ) -> "HoleObjective":
        """Build the objective of a run; `sampler` is by default the first of reasoning.samplers."""
        names, arm = config.reasoning.samplers, config.reasoning.arm
        if config.init is not None:
            raise ValueError(
                f"init={config.init}: arm {arm} is trained from scratch; leave init out"
            )
        if not names:
            raise ValueError(
                f"reasoning.samplers is empty: give at least one of {', '.join(SAMPLINGS)}"
            )
        samplings = [Registry("sampler of holes", SAMPLINGS).resolve(name) for name in names]
        holes, rule = Registry(f"task of arm {arm}", HOLE_TASKS).resolve(task.name), None
        if METHODS[arm].two_stages:
            rule = build_anchor_rule(
                "listed", ids=holes.numbers, vocab_size=task.tokenizer.vocab_size
            )
        process = build_process(config, task.tokenizer.mask_id, rule, on_gpu=multiple > 1)
        sampling = SAMPLINGS[sampler] if sampler else samplings[0]
        return HoleObjective(process, task=holes, sampling=sampling, multiple=multiple)

    def lay_out(self, item: Item, stage: int = LAST) -> RowLayout:
        """Lay out a problem with its solution; there are no stages, and what is given need not come first."""
        return RowLayout(self.task.complete(item), 0, range(0), range(0))

    def count_tokens(self, item: Item) -> int:
        """Return the tokens of a problem's row."""
        return len(self.task.complete(item))

    def corrupt(self, batch: ItemBatch, seed: int, step: int) -> NoisyBatch:  # type: ignore[override]
        """Hide tokens of the holes at an optimizer step."""
        layouts, _ = pad_holes(
            [self.task.lay_out(item.question) for item in batch.items], self.multiple
        )
        x0, valid = pad_holes([self.task.complete(item) for item in batch.items], self.multiple)
        rng = CounterRng.from_seed(seed, batch.number)
        places: dict[str, Any] = {"index": batch.place, "total": batch.total, "valid": valid}
        return corrupt(x0, self.process, rng, step, is_fixed=layouts != self.task.hole, **places)

    @property
    def name(self) -> str:
        """The objective under which the model's text is scored."""
        return "masked"

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the NELBO of holes and the anchor term."""
        return self.loss_fn(model, batch, anchor_weight=batch.anchor_weight, check=False)


@torch.no_grad()
def fill_holes(
    model: LanguageModel, objective: HoleObjective, questions: Sequence[list[int]]
) -> list[Decoded]:
    """Fill the holes of questions; a row's result does not depend on the other rows."""
    device, mask_id = model.embed.weight.device, model.config.mask_id
    assert mask_id is not None
    evaluator = build_evaluator(model, device, torch.float32, uses_graphs=False)
    task, sampling = objective.task, objective.sampling
    rows = [task.lay_out(question) for question in questions]
    steps = (
        {"steps": sampling.steps or model.config.length} if takes_steps(sampling.sampler) else {}
    )
    sampler = build_sampler(sampling.sampler, **steps)

    def fill(part: list[int]) -> list[Decoded]:
        filled = []
        for number in part:
            layout = torch.tensor(rows[number])
            is_hole = layout == task.hole
            row = Row(
                layout.masked_fill(is_hole, mask_id),
                sampler,
                ~is_hole,
                number=number,
                block=sampling.block,
                sampling=SamplingParams(sampling.temperature),
            )
            filled.append(row)
        with torch.autocast(device.type, enabled=False):
            texts = fill_rows(evaluator, filled)
        decoded = []
        for row, text in zip(filled, texts, strict=True):
            assert row.is_fixed is not None
            tokens = text.cpu()
            answer = task.find_answer(tokens.tolist())
            decoded.append(Decoded(tokens[~row.is_fixed].tolist(), answer, row.nfe))
        return decoded

    return decode_in_batches([len(row) for row in rows], fill)
