"""The arms of the reasoning experiments as data: which tokens, which labels, which inputs are fed back, which stages.

An arm lays a problem out as one row of tokens (docs/reasoning.md shows every arm on one problem):

    question [<b> <p> … <p> <x>] [<r>] [steps] <a> answer <e>

The loss is on all tokens after the markers and, where an arm labels them, on the slots `<p>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
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
    auxiliary: str | None = None  # simcot: a decoder writes the step of each slot; codi: distillation from cot's rows
    stages: int | None = None  # the last stage of the curriculum; null: the most hops of training
    holes: str | None = None  # the method of a masked model that fills trace and answer (adlm.reasoning.diffusion)

    @property
    def method(self) -> str:
        """The method of a model that is trained from scratch."""
        return self.holes or ("ar" if self.anchors is None else "a2r")


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
    "mdlm": Arm(steps="kept", holes="mdlm"),
    "adlm": Arm(steps="kept", holes="adlm"),
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


def choose_labels(item: Item, foreign: Item, kind: str, order: Sequence[float]) -> Labels:
    """Choose the labels of the slots; `order` has a random number for each slot, `foreign` is another problem."""
    if kind == "shuffled":
        anchors = item.anchors[: len(order)]
        shuffled = [anchors[place] for place in sorted(range(len(anchors)), key=order.__getitem__)]
        return anchors[1:] + anchors[:1] if shuffled == anchors else shuffled
    if kind == "no_answer":
        return [None if token in item.answer else token for token in item.anchors]
    sources: dict[str, Labels] = {"none": [], "path": item.anchors, "foreign": foreign.anchors}
    return (sources | {"off_path": item.off_path[: len(item.anchors)]})[kind]


@dataclass(frozen=True)
class ReasoningBatch(NoisyBatch):
    """Rows of problems for a causal model: `hidden` are the tokens and slots with a loss, `x0` their targets.

    With auxiliary rows `tokens` has three counts: of this batch's targets, of the auxiliary ones, and of rows.
    """

    slot: Tensor | None = None  # (B, L): the number of the slot at a position, from 1; 0 elsewhere. None: no feedback
    slot_ends: tuple[int, ...] = ()  # so much of the rows comes before the slots of each number
    auxiliary: ReasoningBatch | None = None  # simcot: the steps that slots replace; codi: the problems laid out as cot
    links: Tensor | None = None  # positions in the flattened rows: simcot: of those slots; codi: of the answer's marker


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
    sizes, prompts, first, stop = np.array(
        [(len(each.tokens), each.prompt, each.slots.start, each.slots.stop) for each in layouts]
    ).T[..., None]
    length = _round_up(int(sizes.max()) - 1, multiple)
    place = np.arange(length + 1)
    tokens = np.zeros((len(layouts), length + 1), np.int64)
    tokens[place < sizes] = np.fromiter(chain.from_iterable(each.tokens for each in layouts), np.int64)
    inputs, targets, place = tokens[:, :-1].copy(), tokens[:, 1:].copy(), place[:-1]
    weights = ((place >= prompts - 1) & (place < sizes - 1)).astype(np.float32)
    for row, (layout, own) in enumerate(zip(layouts, labels, strict=True)):
        for position, label in zip(layout.slots, own if label_weight else ()):
            if label is not None:
                targets[row, position], weights[row, position] = label, label_weight
    is_slot = (place >= first) & (place < stop)
    ends = map(max, zip_longest(*(layout.slots for layout in layouts), fillvalue=0))
    weight = torch.from_numpy(weights).flatten()
    index, ones = weight.nonzero()[:, 0], torch.ones(len(layouts))
    return ReasoningBatch(
        torch.from_numpy(targets),
        torch.from_numpy(inputs),
        ones,
        0 * ones,
        Selection(index, weight[index]),
        None if anchors is None else select_targets(anchors, length),
        torch.tensor(float(len(index))),
        is_causal=True,
        slot=torch.from_numpy(np.where(is_slot, place - first + 1, 0)) if feedback else None,
        slot_ends=tuple(_round_up(end, multiple) for end in ends),
    )


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


def add_auxiliary(
    batch: ReasoningBatch,
    layouts: Sequence[RowLayout],
    items: Sequence[Item],
    kind: str,
    markers: Markers,
    slots_per_stage: int = 1,
    multiple: int = 1,
) -> ReasoningBatch:
    """Add the rows of the second loss: simcot, the step that each slot replaces; codi, the problems laid out as cot."""
    others: list[RowLayout] = []
    links: list[int] = []
    for row, (layout, item) in enumerate(zip(layouts, items, strict=True)):
        start = row * batch.xt.shape[1]
        if kind == "codi":
            others.append(lay_out(item, ARMS["cot"], 0, 0, markers))
            links.append(start + layout.trace.stop)
            continue
        steps = [step for step in item.steps for _ in range(slots_per_stage)]
        for position, step in zip(layout.slots, steps):
            others.append(RowLayout([markers.slot, *step], 1, range(0), range(1, 1 + len(step))))
            links.append(start + position)
    auxiliary, count = None, torch.tensor(0.0)
    if others:
        auxiliary = collate(others, [()] * len(others), multiple=multiple if kind == "codi" else 1)
        count, length = auxiliary.tokens, auxiliary.xt.shape[1]
        if kind == "codi":
            ends = [row * length + layout.trace.stop for row, layout in enumerate(others)]
            auxiliary = replace(auxiliary, links=torch.tensor(ends))
    tokens = torch.stack([batch.tokens, count, torch.tensor(float(len(layouts)))])
    return replace(batch, auxiliary=auxiliary, links=torch.tensor(links, dtype=torch.int64), tokens=tokens)


def select_targets(positions: Sequence[Sequence[int]], length: int) -> Selection:
    """Select the places at which the tokens of these positions are predicted, with weight 1."""
    places = [row * length + position - 1 for row, own in enumerate(positions) for position in own]
    return Selection(torch.tensor(places, dtype=torch.int64), torch.ones(len(places)))
