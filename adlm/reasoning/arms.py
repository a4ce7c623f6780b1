"""The arms of the reasoning experiments as data: which tokens, which labels, which inputs are fed back, which stages.

An arm lays a problem out as one row of tokens (docs/reasoning.md shows every arm on one problem):

    question [<b> <p> … <p> <x>] [<r>] [steps] <a> answer <e>

The loss is on all tokens after the markers and, where an arm labels them, on the slots `<p>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adlm.diffusion.masking import NoisyBatch, Selection
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.reasoning.items import Item, Markers

Labels = Sequence[int | None]  # of the slots; None, and slots after the last label, carry no loss


@dataclass(frozen=True)
class Arm:
    """One way to train a model to reason."""

    steps: str = "none"  # written steps: none, kept, short (the anchors alone), removed (one a stage), by_token
    slots: str = "none"  # none, by_stage (one more each stage) or fixed (all from the first step on)
    labels: str = "none"  # of the slots: none, path, shuffled, foreign, off_path, no_answer
    feedback: bool = False  # a slot's input is the hidden state of the position before it, as in Coconut
    anchors: str | None = None  # a2r: tokens with the anchor term (trace, random) or "none"; null: one stage
    auxiliary: str = "none"  # simcot: a decoder writes the step of each slot; codi: distillation from the cot layout
    stages: int | None = None  # the last stage of the curriculum; null: the most hops of training

    @property
    def method(self) -> str:
        """The method of a model that is trained from scratch."""
        return "ar" if self.anchors is None else "a2r"


ARMS = {
    "no_cot": Arm(),
    "cot": Arm(steps="kept"),
    "short_cot": Arm(steps="short"),
    "curriculum_only": Arm(steps="removed"),
    "icot": Arm(steps="by_token"),
    "pause": Arm(slots="fixed"),
    "pause_curriculum": Arm(steps="removed", slots="by_stage"),
    "coconut": Arm(steps="removed", slots="by_stage", feedback=True),
    "acot": Arm(steps="removed", slots="by_stage", labels="path"),
    "acot_feedback": Arm(steps="removed", slots="by_stage", labels="path", feedback=True),
    "acot_shuffled": Arm(steps="removed", slots="by_stage", labels="shuffled"),
    "acot_foreign": Arm(steps="removed", slots="by_stage", labels="foreign"),
    "acot_off_path": Arm(steps="removed", slots="by_stage", labels="off_path"),
    "acot_no_answer": Arm(steps="removed", slots="by_stage", labels="no_answer"),
    "acot_kept": Arm(steps="kept", slots="by_stage", labels="path", stages=2),
    "acot_kept_feedback": Arm(steps="kept", slots="by_stage", labels="path", feedback=True, stages=2),
    "acot_kept_foreign": Arm(steps="kept", slots="by_stage", labels="foreign", stages=2),
    "pause_kept": Arm(steps="kept", slots="by_stage", stages=2),
    "a2r": Arm(steps="kept", anchors="trace"),
    "a2r_no_anchors": Arm(steps="kept", anchors="none"),
    "a2r_random": Arm(steps="kept", anchors="random"),
    "simcot": Arm(steps="removed", slots="by_stage", feedback=True, auxiliary="simcot"),
    "codi": Arm(slots="fixed", feedback=True, auxiliary="codi"),
}


@dataclass(frozen=True)
class Curriculum:
    """When the stages of an arm begin: each lasts so many optimizer steps, and earlier ones come back at times."""

    stages: int
    stage_steps: int
    revisit: float = 0.1  # probability of a random one of the stages so far

    def find_stages(self, step: int, rng: CounterRng) -> list[int]:
        """Return the stage of every row at an optimizer step (from 1)."""
        now = min((step - 1) // self.stage_steps, self.stages)
        u = rng.uniform(step, 2, Purpose.CURRICULUM)
        earlier = (u[:, 1] * (now + 1)).long()
        return torch.where(u[:, 0] < self.revisit, earlier, now).tolist()


class RowLayout(NamedTuple):
    """A problem as one row: the prompt is given, the rest is predicted."""

    tokens: list[int]
    prompt: int  # tokens before the first one that carries a loss
    slots: range  # positions of the slots
    trace: range  # positions of the written steps


def lay_out(item: Item, arm: Arm, stage: int, slots: int, markers: Markers, slots_per_stage: int = 1) -> RowLayout:
    """Lay out a problem at a stage of the arm's curriculum; `slots` is their number at the last stage.

    A stage removes one step (`removed`) or one token (`by_token`) from the left.
    """
    row = list(item.question)
    count = {"none": 0, "by_stage": min(stage * slots_per_stage, slots), "fixed": slots}[arm.slots]
    first = len(row) + 1
    if arm.slots != "none":
        row += [markers.begin_slots, *[markers.slot] * count, markers.end_slots]
    if arm.steps in ("kept", "short") or (arm.steps != "none" and arm.slots == "none"):
        row.append(markers.reasoning)
    kept = item.steps[stage:] if arm.steps == "removed" else item.steps if arm.steps in ("kept", "by_token") else []
    trace = [token for step in kept for token in step]
    if arm.steps == "by_token":
        trace = trace[stage:]
    if arm.steps == "short":
        trace = list(item.anchors)
    is_direct = arm.steps == arm.slots == "none"  # then the answer's marker is part of the prompt
    start = len(row)
    row += [*trace, markers.answer, *item.answer, markers.end]
    return RowLayout(row, start + is_direct, range(first, first + count), range(start, start + len(trace)))


def choose_labels(item: Item, foreign: Item, kind: str, order: Tensor) -> Labels:
    """Choose the labels of the slots; `order` are random numbers, `foreign` is another problem."""
    if kind == "shuffled":
        anchors = item.anchors
        places = order[: len(anchors)].argsort().tolist()
        shuffled = [anchors[place] for place in places]
        return anchors[1:] + anchors[:1] if shuffled == anchors else shuffled
    if kind == "no_answer":
        return [None if token in item.answer else token for token in item.anchors]
    sources: dict[str, Labels] = {"none": [], "path": item.anchors, "foreign": foreign.anchors}
    return (sources | {"off_path": item.off_path[: len(item.anchors)]})[kind]


@dataclass(frozen=True)
class ReasoningBatch(NoisyBatch):
    """Rows of problems for a causal model: `hidden` are the tokens and slots with a loss, `x0` their targets."""

    slot: Tensor | None = None  # (B, L): the number of the slot at a position, from 1; 0 elsewhere. None: no feedback
    slot_ends: tuple[int, ...] = ()  # the last position of each number
    teacher: ReasoningBatch | None = None  # the same problems with all steps written, for distillation
    step_targets: Tensor | None = None  # (B, slots, T): the step that each slot stands for, -1 after its end


def collate(
    layouts: Sequence[RowLayout],
    labels: Sequence[Labels],
    *,
    feedback: bool = False,
    label_weight: float = 1.0,
    anchors: Sequence[Sequence[int]] | None = None,
    multiple: int = 1,
) -> ReasoningBatch:
    """Make the batch of a causal model: position i has the token i as input and the token i + 1 as its target.

    A slot's own position has its label as the target. `anchors` are positions of tokens with A2R's anchor term.
    """
    length = max(len(layout.tokens) for layout in layouts) - 1
    length += -length % multiple
    rows: list[tuple[list[int], list[int], list[float], list[int]]] = []
    for layout, own in zip(layouts, labels, strict=True):
        tokens, end = layout.tokens, len(layout.tokens) - 1
        padding = [0] * (length - end)
        targets = tokens[1:] + padding
        weights = [0.0] * (layout.prompt - 1) + [1.0] * (end - layout.prompt + 1) + [0.0] * len(padding)
        slot = [0] * length
        for number, position in enumerate(layout.slots):
            slot[position] = number + 1
            if number < len(own) and (label := own[number]) is not None and label_weight:
                targets[position], weights[position] = label, label_weight
        rows.append((tokens[:-1] + padding, targets, weights, slot))
    inputs, x0, weight, numbers = (torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True))
    index = weight.flatten().nonzero()[:, 0]
    ones = torch.ones(len(layouts))
    return ReasoningBatch(
        x0,
        inputs,
        ones,
        0 * ones,
        Selection(index, weight.flatten()[index].float()),
        None if anchors is None else select_targets(anchors, length),
        torch.tensor(float(len(index))),
        is_causal=True,
        slot=numbers if feedback else None,
        slot_ends=tuple(max(ends) for ends in zip_longest(*(layout.slots for layout in layouts), fillvalue=0)),
    )


def select_targets(positions: Sequence[Sequence[int]], length: int) -> Selection:
    """Select the places at which the tokens of these positions are predicted, with weight 1."""
    places = [row * length + position - 1 for row, own in enumerate(positions) for position in own]
    return Selection(torch.tensor(places, dtype=torch.int64), torch.ones(len(places)))
