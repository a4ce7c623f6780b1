"""The loss of every arm by hand, independent of the batch's split, and feedback against an unrolled computation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.apps.reasoning.arms import (
    ARMS,
    Curriculum,
    Labels,
    ReasoningBatch,
    ReasoningObjective,
    RowLayout,
    collate,
    lay_out,
)
from adlm.apps.reasoning.items import WORD_MARKERS
from adlm.apps.reasoning.losses import StepDecoder, compute_features, reasoning_loss
from adlm.apps.reasoning.tasks import ItemBatch
from adlm.models.language_model import LanguageModel
from tests.apps.reasoning.examples import build_model, draw_examples, unroll

KINDS = ("rotary", "learned", "two stages")


def lay_out_rows(name: str, count: int = 6) -> tuple[list[RowLayout], list[Labels]]:
    """Rows of different lengths with 0 to 3 slots, and their labels."""
    items, arm = draw_examples(count), ARMS[name]
    layouts = [lay_out(item, arm, place % 4, 3, WORD_MARKERS) for place, item in enumerate(items)]
    return layouts, [[*item.anchors, None] if arm.labels == "path" else [] for item in items]


def log_probs(model: LanguageModel, features: Tensor) -> Tensor:
    logits = model.head(features)
    assert model.config.mask_id is not None
    return logits.index_fill(-1, torch.tensor(model.config.mask_id), -torch.inf).log_softmax(-1)


def compute_by_hand(
    model: LanguageModel,
    layouts: Sequence[RowLayout],
    labels: Sequence[Labels],
    *,
    feedback: bool,
    weight: float = 1.0,
) -> Tensor:
    """The mean over tokens after the prompt and labelled slots, from unrolled rows."""
    losses = []
    for layout, own in zip(layouts, labels, strict=True):
        table = log_probs(model, unroll(model, layout, feedback=feedback).final[0])
        losses += [
            -table[place - 1, layout.tokens[place]]
            for place in range(layout.prompt, len(layout.tokens))
        ]
        losses += [
            -weight * table[place, token]
            for place, token in zip(layout.slots, own)
            if token is not None
        ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["no_cot", "cot", "acot", "acot_feedback", "coconut", "acot_kept_feedback"]
)
def test_the_loss_and_its_gradients_are_those_by_hand(name: str, kind: str) -> None:
    model, (layouts, labels) = build_model(kind), lay_out_rows(name)
    feedback = ARMS[name].feedback
    for multiple in (1, 16):
        batch = collate(layouts, labels, feedback=feedback, label_weight=0.5, multiple=multiple)
        loss = reasoning_loss(model, batch)
        expected = compute_by_hand(model, layouts, labels, feedback=feedback, weight=0.5)
        torch.testing.assert_close(loss.total, expected)
        assert loss.total == loss.nll and loss.anchor == 0
        chosen = [
            parameter
            for name, parameter in model.named_parameters()
            if not name.startswith("anchor_head")
        ]
        grads = (torch.autograd.grad(value, chosen) for value in (loss.total, expected))
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_is_the_unrolled_computation(kind: str) -> None:
    model, (layouts, labels) = build_model(kind), lay_out_rows("coconut")
    batch = collate(layouts, labels, feedback=True)
    assert batch.slot is not None and len({len(layout.tokens) for layout in layouts}) > 2
    features = compute_features(model, batch)
    plain = model(batch.xt)
    for row, layout in enumerate(layouts):
        size, expected = len(layout.tokens) - 1, unroll(model, layout, feedback=True)
        torch.testing.assert_close(
            features.final[row, :size], expected.final[0, :-1], atol=1e-5, rtol=1e-5
        )
        if features.anchor is not None and expected.anchor is not None:
            torch.testing.assert_close(
                features.anchor[row, :size], expected.anchor[0, :-1], atol=1e-5, rtol=1e-5
            )
        is_other = (features.final[row, :size] - plain.final[row, :size]).abs().amax(-1) > 1e-3
        first = layout.slots.start if layout.slots else size
        assert not is_other[:first].any() and is_other[first:].all()


def test_gradients_flow_through_the_states_that_are_fed_back() -> None:
    """By differences of the embedding of a token that comes before the slots alone."""
    model, (layouts, _) = build_model().double(), lay_out_rows("coconut")
    layout = max(layouts, key=lambda each: len(each.slots))
    assert len(layout.slots) == 3
    batch = collate([layout], [[]], feedback=True)

    def compute() -> Tensor:
        return reasoning_loss(model, batch).total

    (grad,) = torch.autograd.grad(compute(), model.embed.weight)
    token, size = layout.tokens[1], 1e-3
    for column in (0, 7, 15):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                model.embed.weight[token, column] += sign * size
                values.append(float(compute()))
                model.embed.weight[token, column] -= sign * size
        assert abs((values[0] - values[1]) / (2 * size) - float(grad[token, column])) < 1e-3
    assert not grad[WORD_MARKERS.slot].any()  # the embedding of a slot is never read


def test_padding_changes_nothing() -> None:
    model, (layouts, labels) = build_model(), lay_out_rows("acot_feedback")
    batch = collate(layouts, labels, feedback=True, multiple=32)
    reached = torch.zeros(batch.xt.shape, dtype=torch.bool)
    for row, layout in enumerate(layouts):
        reached[row, : len(layout.tokens) - 1] = True
    other = replace(
        batch, xt=torch.where(reached, batch.xt, 9), x0=torch.where(reached, batch.x0, 9)
    )
    assert not torch.equal(other.xt, batch.xt)
    assert torch.equal(reasoning_loss(model, other).total, reasoning_loss(model, batch).total)


def make_batch(count: int = 8) -> ItemBatch:
    items, numbers = draw_examples(count), torch.arange(count)
    return ItemBatch.from_items(items, items[1:] + items[:1], numbers + 100, numbers, count, {})


def make_objective(
    name: str, *, stage_steps: int = 2, slots_per_stage: int = 1
) -> ReasoningObjective:
    """Stages of so many steps, which often come back."""
    arm = ARMS[name]
    slots = (arm.stages or 3) * slots_per_stage
    return ReasoningObjective(
        arm, Curriculum(3, stage_steps, revisit=0.3), WORD_MARKERS, slots, slots_per_stage
    )


def make_parts(name: str, rows: int, step: int = 7) -> list[ReasoningBatch]:
    """The batches of a step as the loop makes them: the mean is over the tokens of all."""
    objective = make_objective(name)
    parts = [objective.corrupt(part, 5, step) for part in make_batch().split(rows)]
    tokens = torch.stack([part.tokens for part in parts]).sum(0)
    return [replace(part, tokens=tokens) for part in parts]


CAUSAL = [name for name, arm in ARMS.items() if arm.holes is None]


@pytest.mark.parametrize("name", CAUSAL)
def test_micro_batches_sum_to_the_batch(name: str) -> None:
    model = build_model("two stages" if ARMS[name].method == "a2r" else "rotary")
    gamma = 0.1 if ARMS[name].anchors in ("trace", "random") else None
    decoder = StepDecoder(model.config) if name == "simcot" else None
    parameters = [*model.parameters(), *([] if decoder is None else decoder.parameters())]

    def compute(rows: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        losses = [
            reasoning_loss(model, part, anchor_weight=gamma, decoder=decoder)
            for part in make_parts(name, rows)
        ]
        has_term = gamma is not None or ARMS[name].auxiliary is not None
        assert (torch.stack([loss.anchor for loss in losses]).sum() > 0) == has_term
        total = torch.stack([loss.total for loss in losses]).sum()
        return total, torch.autograd.grad(total, parameters, allow_unused=True)

    whole, parts = compute(8), compute(3)
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["a2r", "a2r_random"])
def test_the_anchor_term_is_cross_entropy_of_the_anchor_head(name: str) -> None:
    model = build_model("two stages")
    (batch,) = make_parts(name, 8)
    loss = reasoning_loss(model, batch, anchor_weight=0.1)
    features = model(batch.xt)
    assert (
        model.anchor_head is not None and batch.anchors is not None and len(batch.anchors.index) > 0
    )
    each = F.cross_entropy(
        model.anchor_head(features.anchor).flatten(0, 1)[batch.anchors.index],
        batch.x0.flatten()[batch.anchors.index],
    )
    torch.testing.assert_close(loss.anchor, each * len(batch.anchors.index) / batch.tokens)
    torch.testing.assert_close(loss.total, loss.nll + 0.1 * loss.anchor)


def test_label_weight_zero_is_the_loss_of_the_pause_curriculum() -> None:
    model, (layouts, labels) = build_model(), lay_out_rows("acot")
    pauses, _ = lay_out_rows("pause_curriculum")
    weightless = reasoning_loss(model, collate(layouts, labels, label_weight=0.0))
    assert torch.equal(
        weightless.total, reasoning_loss(model, collate(pauses, [[]] * len(pauses))).total
    )
    assert not torch.equal(weightless.total, reasoning_loss(model, collate(layouts, labels)).total)


def test_simcot_adds_the_cross_entropy_of_the_steps_that_slots_replace() -> None:
    model, items = build_model(), draw_examples(6)
    decoder, objective = (
        StepDecoder(model.config, seed=1),
        make_objective("simcot", slots_per_stage=2),
    )
    batch = make_batch(6)
    made = objective.corrupt(batch, 5, 7)
    losses = []
    for row, item in enumerate(items):
        slots = (made.xt[row] == WORD_MARKERS.slot).nonzero()[:, 0].tolist()
        tokens = made.xt[row].tolist()
        layout = RowLayout(
            tokens, 0, range(slots[0], slots[-1] + 1) if slots else range(0), range(0)
        )
        features = unroll(model, layout, feedback=True).final[0]
        for number, position in enumerate(slots):
            if number // 2 >= len(item.steps):
                continue
            step = torch.tensor(item.steps[number // 2])
            inputs = torch.cat([features[position][None], model.embed(step[:-1])])
            rotary = tuple(table[: len(step)] for table in model.rotary(inputs.device))
            written = decoder.norm(decoder.layer(inputs[None], rotary))[0]
            losses.append(-log_probs(model, written).gather(1, step[:, None])[:, 0])
    assert len(losses) > 6
    loss = reasoning_loss(model, made, decoder=decoder)
    expected = torch.cat(losses).mean()
    torch.testing.assert_close(loss.anchor, expected)
    torch.testing.assert_close(loss.total, loss.nll + expected)
    plain = reasoning_loss(model, make_objective("coconut", slots_per_stage=2).corrupt(batch, 5, 7))
    torch.testing.assert_close(loss.nll, plain.total)
    parameters = [*decoder.parameters(), *model.parameters()]
    grads = (
        torch.autograd.grad(value, parameters) for value in (loss.total, plain.total + expected)
    )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert one.any()


def test_simcot_without_slots_keeps_the_decoder_in_the_graph() -> None:
    model = build_model()
    decoder, made = StepDecoder(model.config), make_objective("simcot").corrupt(make_batch(), 5, 1)
    assert made.auxiliary is None and made.tokens[1] == 0
    loss = reasoning_loss(model, made, decoder=decoder)
    assert loss.total == loss.nll
    assert all(
        not grad.any() for grad in torch.autograd.grad(loss.total, list(decoder.parameters()))
    )


def test_codi_adds_the_teacher_and_the_distance_of_all_layers_before_the_answer() -> None:
    model, items = build_model(), draw_examples(6)
    outputs: dict[int, Tensor] = {}
    for number, layer in enumerate(model.denoiser.layers):
        layer.register_forward_hook(
            lambda *given, number=number: outputs.update({number: given[-1]})
        )

    def collect(name: str) -> tuple[Tensor, list[Tensor], list[RowLayout]]:
        rows, layouts = [], [lay_out(item, ARMS[name], 0, 3, WORD_MARKERS) for item in items]
        for layout in layouts:
            unroll(model, layout, feedback=ARMS[name].feedback)
            place = layout.tokens.index(
                WORD_MARKERS.answer
            )  # predicts the first token of the answer
            rows.append(torch.stack([outputs[number][0, place] for number in range(2)]))
        return (
            compute_by_hand(model, layouts, [[]] * 6, feedback=ARMS[name].feedback),
            rows,
            layouts,
        )

    mean, mine, layouts = collect("codi")
    teacher_mean, theirs, _ = collect("cot")
    distances = [
        F.smooth_l1_loss(a, b.detach(), reduction="none").mean(-1) / b.detach().std(-1)
        for a, b in zip(mine, theirs, strict=True)
    ]
    expected = mean + teacher_mean + torch.stack(distances).mean()
    made = make_objective("codi").corrupt(make_batch(6), 5, 7)
    loss = reasoning_loss(model, made)
    torch.testing.assert_close(loss.nll, mean)
    torch.testing.assert_close(loss.total, expected)
    grads = (
        torch.autograd.grad(value, list(model.parameters())) for value in (loss.total, expected)
    )
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
    assert len({len(layout.tokens) for layout in layouts}) > 2


def test_a_batch_with_auxiliary_rows_moves_whole() -> None:
    made = make_objective("codi").corrupt(make_batch(), 5, 7).to("meta")
    assert (
        isinstance(made, ReasoningBatch)
        and made.auxiliary is not None
        and made.auxiliary.links is not None
    )
    assert (
        made.auxiliary.xt.is_meta
        and made.auxiliary.links.is_meta
        and made.auxiliary.hidden.index.is_meta
    )
