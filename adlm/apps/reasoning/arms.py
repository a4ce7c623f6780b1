"""The arms of the reasoning experiments as data: which tokens, which labels, which inputs are fed back, which stages.

An arm lays a problem out as one row of tokens (docs/reasoning.md shows every arm on one problem):

    question [<b> <p> … <p> <x>] [<r>] [steps] <a> answer <e>

The loss is on all tokens after the markers and, where an arm labels them, on the slots `<p>`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adlm.apps.reasoning.items import Item, Markers, pad_rows
from adlm.apps.reasoning.settings import ReasoningConfig
from adlm.apps.reasoning.tasks import ItemBatch, ProblemSet
from adlm.diffusion.anchors import anchor_weight
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.masking import NoisyBatch, Selection
from adlm.diffusion.objectives import Loss, Objective, training_loss
from adlm.diffusion.rng import CounterRng, Purpose

LAST = sys.maxsize  # the last stage of any curriculum, which leaves no step to remove
Labels = Sequence[int | None]  # of the slots; None, and slots after the last label, carry no loss


@dataclass(frozen=True)
class Arm:
    """One way to train a model to reason."""

    steps: str = "none"  # written steps: none, kept, short (the anchors alone), removed (one a stage), by_token
    slots: str = (
        "none"  # none, by_stage (one more each stage) or fixed (all from the first step on)
    )
    labels: str = "none"  # of the slots: none, path, shuffled, foreign, off_path, no_answer
    feedback: bool = (
        False  # a slot's input is the hidden state of the position before it, as in Coconut
    )
    anchors: str | None = (
        None  # a2r: tokens with the anchor term (trace, random) or "none"; null: one stage
    )
    auxiliary: str | None = (
        None  # simcot: a decoder writes the step of each slot; codi: distillation from cot's rows
    )
    stages: int | None = None  # the last stage of the curriculum; null: the most hops of training
    holes: str | None = (
        None  # the method of a masked model that fills trace and answer (adlm.apps.reasoning.diffusion)
    )

    @property
    def method(self) -> str:
        """The method of a model that is trained from scratch."""
        return self.holes or ("ar" if self.anchors is None else "a2r")

    @property
    def has_anchor_term(self) -> bool:
        return self.anchors not in (None, "none")


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
    "acot_kept_feedback": Arm(
        steps="kept", slots="by_stage", labels="path", feedback=True, stages=2
    ),
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


def lay_out(
    item: Item, arm: Arm, stage: int, slots: int, markers: Markers, slots_per_stage: int = 1
) -> RowLayout:
    """Lay out a problem at a stage of the arm's curriculum, which ends with `slots` slots and no step (LAST)."""
    trace = [*chain(*item.steps)]
    written = {
        "none": [],
        "kept": trace,
        "short": item.anchors,
        "removed": [*chain(*item.steps[stage:])],
        "by_token": trace[stage:],
    }[arm.steps]
    count = {"none": 0, "fixed": slots, "by_stage": min(stage * slots_per_stage, slots)}[arm.slots]
    row = list(item.question)
    first = len(row) + 1
    if arm.slots != "none":
        row += [markers.begin_slots, *[markers.slot] * count, markers.end_slots]
    if arm.steps in ("kept", "short") or (arm.steps != "none" and arm.slots == "none"):
        row.append(markers.reasoning)
    is_direct = arm.steps == arm.slots == "none"  # then the answer's marker is part of the prompt
    start = len(row)
    row += [*written, markers.answer, *item.answer, markers.end]
    return RowLayout(
        row, start + is_direct, range(first, first + count), range(start, start + len(written))
    )


def choose_labels(item: Item, foreign: Item, order: Sequence[float], kind: str) -> Labels:
    """Choose the labels of the slots; `order` has a random number for each slot, `foreign` is another problem."""
    if kind == "shuffled":
        anchors = item.anchors[: len(order)]
        shuffled = [anchors[place] for place in sorted(range(len(anchors)), key=order.__getitem__)]
        return anchors[1:] + anchors[:1] if shuffled == anchors else shuffled
    if kind == "no_answer":
        return [None if token in item.answer else token for token in item.anchors]
    off_path = item.off_path[: len(item.anchors)]
    return {"none": [], "path": item.anchors, "foreign": foreign.anchors, "off_path": off_path}[
        kind
    ]


def choose_anchors(layout: RowLayout, item: Item, u: Sequence[float] | None) -> list[int]:
    """Return the positions of the trace's anchors or, with random numbers, as many random positions of the trace."""
    found = [position for position in layout.trace if layout.tokens[position] in item.anchors]
    return found if u is None else sorted(layout.trace, key=u.__getitem__)[: len(found)]


@dataclass(frozen=True)
class ReasoningBatch(NoisyBatch):
    """Rows of problems for a causal model: `hidden` are the tokens and slots with a loss, `x0` their targets."""

    slot: Tensor | None = (
        None  # (B, L): the number of the slot at a position, from 1; 0 elsewhere. None: no feedback
    )
    slot_ends: tuple[int, ...] = ()  # so much of the rows comes before the slots of each number
    auxiliary: ReasoningBatch | None = (
        None  # simcot: the steps that slots replace; codi: the problems laid out as cot
    )
    links: Tensor | None = (
        None  # positions in the flattened rows: of the answers' markers; simcot: of those slots
    )


def collate(
    layouts: Sequence[RowLayout],
    labels: Sequence[Labels],
    anchors: Sequence[Sequence[int]] | None = None,  # positions of tokens with A2R's anchor term
    *,
    feedback: bool = False,
    label_weight: float = 1.0,
    multiple: int = 1,
) -> ReasoningBatch:
    """Make the batch of a causal model: position i reads token i; its target is token i + 1, at a slot its label."""
    inputs, _ = pad_rows([each.tokens[:-1] for each in layouts], multiple)
    targets, is_target = pad_rows([each.tokens[1:] for each in layouts], multiple)
    length, place = inputs.shape[1], np.arange(inputs.shape[1])
    prompts, first, stop = np.array(
        [(each.prompt, each.slots.start, each.slots.stop) for each in layouts]
    ).T[..., None]
    weights = (is_target & (place >= prompts - 1)).astype(np.float32)
    for row, (layout, own) in enumerate(zip(layouts, labels, strict=True)):
        for position, label in zip(layout.slots, own if label_weight else ()):
            if label is not None:
                targets[row, position], weights[row, position] = label, label_weight
    slot, ends = None, list[int]()
    if feedback:
        slot = torch.from_numpy(np.where((place >= first) & (place < stop), place - first + 1, 0))
        ends = [
            max(places)
            for places in zip_longest(*(layout.slots for layout in layouts), fillvalue=0)
        ]
    weight = torch.from_numpy(weights).flatten()
    index, ones = weight.nonzero()[:, 0], torch.ones(len(layouts))
    anchored = [
        row * length + position - 1 for row, own in enumerate(anchors or ()) for position in own
    ]
    return ReasoningBatch(
        x0=torch.from_numpy(targets),
        xt=torch.from_numpy(inputs),
        t=ones,
        noise_level=0 * ones,
        hidden=Selection(index, weight[index]),
        anchors=None
        if anchors is None
        else Selection(torch.tensor(anchored).long(), torch.ones(len(anchored))),
        tokens=torch.tensor(float(len(index))),
        is_causal=True,
        slot=slot,
        slot_ends=tuple(end + -end % multiple for end in ends),
        links=torch.tensor(
            [row * length + layout.trace.stop for row, layout in enumerate(layouts)]
        ),
    )


@dataclass(frozen=True)
class ReasoningObjective(Objective):
    """Lays problems out at their stage of the curriculum, with labels on the slots."""

    is_causal: ClassVar[bool] = True

    arm: Arm
    curriculum: Curriculum
    markers: Markers
    slots: int
    slots_per_stage: int = 1
    label_weight: float = 1.0
    anchor_weight: float = 3e-3  # the peak of gamma, of A2R
    ramp_steps: int | None = None  # over which gamma rises; None: always at its peak
    multiple: int = 1  # of the length of rows
    loss_fn: Callable[..., Loss] = training_loss
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    @staticmethod
    def from_config(
        config: ReasoningConfig, task: ProblemSet, *, multiple: int = 1
    ) -> ReasoningObjective:
        """Build the objective of a run."""
        settings, arm = config.reasoning, ARMS[config.reasoning.arm]
        stages = settings.stages or arm.stages or max(task.hops, 1)
        curriculum = Curriculum(stages, settings.stage_steps, settings.revisit)
        if arm.steps == "by_token" and task.can_train:  # as long as the stages of whole steps
            tokens = max(sum(map(len, item.steps)) for item in task.load_sample())
            curriculum = Curriculum(
                tokens, max(1, stages * settings.stage_steps // tokens), settings.revisit
            )
        size = settings.slots_per_stage
        return ReasoningObjective(
            arm,
            curriculum,
            task.markers,
            stages * size,
            size,
            settings.label_weight,
            config.objective.anchor_weight,
            config.steps if config.objective.anchor_ramp else None,
            multiple,
        )

    def lay_out(self, item: Item, stage: int = LAST) -> RowLayout:
        """Lay out a problem at a stage, by default the last one."""
        stage = LAST if stage == self.curriculum.stages else stage
        return lay_out(item, self.arm, stage, self.slots, self.markers, self.slots_per_stage)

    def lay_out_auxiliary(self, item: Item, layout: RowLayout) -> list[RowLayout]:
        """Lay out the rows of the second loss: simcot, the step that each slot replaces; codi, the problem as cot."""
        if self.arm.auxiliary == "codi":
            return [lay_out(item, ARMS["cot"], 0, 0, self.markers)]
        if self.arm.auxiliary is None:
            return []
        steps = [step for step in item.steps for _ in range(self.slots_per_stage)][
            : len(layout.slots)
        ]
        return [
            RowLayout([self.markers.slot, *step], 1, range(0), range(1, 1 + len(step)))
            for step in steps
        ]

    def count_tokens(self, item: Item) -> int:
        """Return the tokens of a problem's longest row: of the first stage, the last one, or the second loss."""
        rows = [self.lay_out(item, 0), self.lay_out(item)]
        return max(len(row.tokens) for row in [*rows, *self.lay_out_auxiliary(item, rows[0])])

    def corrupt(self, batch: ItemBatch, seed: int, step: int) -> ReasoningBatch:
        """Make the network's inputs and targets of an optimizer step."""
        rng, arm, items = CounterRng.from_seed(seed, batch.number), self.arm, batch.items
        layouts = list(map(self.lay_out, items, self.curriculum.find_stages(step, rng)))
        order = rng.uniform(step, max(1, self.slots), Purpose.LABEL).tolist()
        labels = [
            choose_labels(*row, arm.labels) for row in zip(items, batch.foreign, order, strict=True)
        ]
        anchors = None
        if arm.has_anchor_term:
            width = max(len(layout.tokens) for layout in layouts)
            u = (
                rng.uniform(step, width, Purpose.ANCHOR).tolist()
                if arm.anchors == "random"
                else [None] * len(items)
            )
            anchors = list(map(choose_anchors, layouts, items, u))
        made = collate(
            layouts,
            labels,
            anchors,
            feedback=arm.feedback,
            label_weight=self.label_weight,
            multiple=self.multiple,
        )
        if arm.has_anchor_term:
            gamma = anchor_weight(step, self.ramp_steps, self.anchor_weight)
            made = replace(made, anchor_weight=gamma)
        if arm.auxiliary is None:
            return made
        rows = list(map(self.lay_out_auxiliary, items, layouts))
        others, length, auxiliary = [*chain(*rows)], made.xt.shape[1], None
        if arm.auxiliary == "simcot":
            slots = (layout.slots[: len(own)] for layout, own in zip(layouts, rows, strict=True))
            places = [row * length + place for row, own in enumerate(slots) for place in own]
            made = replace(made, links=torch.tensor(places, dtype=torch.int64))
        if others:
            auxiliary = collate(
                others, [()] * len(others), multiple=self.multiple if arm.auxiliary == "codi" else 1
            )
        counts = [
            float(made.tokens),
            0.0 if auxiliary is None else float(auxiliary.tokens),
            float(len(items)),
        ]
        return replace(
            made, auxiliary=auxiliary, tokens=torch.tensor(counts)
        )  # of both losses' targets, and of rows

    @property
    def name(self) -> str:
        """The objective under which the model's text is scored."""
        return "causal"

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the cross-entropy of tokens and labels, and the arm's second loss."""
        return self.loss_fn(model, batch, anchor_weight=batch.anchor_weight, check=False)
