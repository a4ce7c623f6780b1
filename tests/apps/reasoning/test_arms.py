"""Every arm token by token: which tokens and slots carry a loss, which labels, and when stages begin."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adlm.apps.reasoning.arms import (
    ARMS,
    Curriculum,
    ReasoningBatch,
    ReasoningObjective,
    choose_anchors,
    choose_labels,
    collate,
    lay_out,
)
from adlm.apps.reasoning.datasets import load_items
from adlm.apps.reasoning.items import WORD_MARKERS
from adlm.apps.reasoning.tasks import ItemBatch, add_markers
from adlm.data.tokenizers import load_tokenizer
from adlm.diffusion.rng import CounterRng
from tests.apps.reasoning.examples import EXAMPLE, FOREIGN, NAMES, QUESTION, draw_examples

COT = "<r> 0^ 3^ ;^ 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^"
PAUSE = "<b> <p> <p> <p> <x> <a>^ 7^ <e>^"
LABELLED = "<b> _3 _5 _7 <x> <a>^ 7^ <e>^"
# As in docs/reasoning.md: `^` is a token with a loss, `_x` a slot with the label x, `!` a token with the anchor term.
ROWS = {
    "no_cot": "<a> 7^ <e>^",
    "cot": COT,
    "short_cot": "<r> 3^ 5^ 7^ <a>^ 7^ <e>^",
    "curriculum_only": "<r> <a>^ 7^ <e>^",
    "icot": "<r> <a>^ 7^ <e>^",
    "pause": PAUSE,
    "pause_curriculum": PAUSE,
    "coconut": PAUSE,
    "acot": LABELLED,
    "acot_feedback": LABELLED,
    "acot_shuffled": "<b> _7 _3 _5 <x> <a>^ 7^ <e>^",  # in the order of the random numbers below
    "acot_foreign": "<b> _9 _1 _2 <x> <a>^ 7^ <e>^",
    "acot_off_path": "<b> _4 _6 _8 <x> <a>^ 7^ <e>^",
    "acot_no_answer": "<b> _3 _5 <p> <x> <a>^ 7^ <e>^",
    "acot_kept": f"<b> _3 _5 <x> {COT}",
    "acot_kept_feedback": f"<b> _3 _5 <x> {COT}",
    "acot_kept_foreign": f"<b> _9 _1 <x> {COT}",
    "pause_kept": f"<b> <p> <p> <x> {COT}",
    "a2r": "<r> 0^ 3^! ;^ 3^! 5^! ;^ 5^! 7^! ;^ <a>^ 7^ <e>^",
    "a2r_no_anchors": COT,
    "a2r_random": "<r> 0^! 3^! ;^! 3^! 5^! ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",  # the lowest of the random numbers below
    "simcot": PAUSE,
    "codi": PAUSE,
}
STAGES = {
    ("curriculum_only", 0): COT,
    ("curriculum_only", 1): "<r> 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("curriculum_only", 2): "<r> 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("icot", 0): COT,
    ("icot", 1): "<r> 3^ ;^ 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("icot", 8): "<r> ;^ <a>^ 7^ <e>^",
    ("pause_curriculum", 0): "<b> <x> 0^ 3^ ;^ 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("pause_curriculum", 1): "<b> <p> <x> 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("coconut", 2): "<b> <p> <p> <x> 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("acot", 1): "<b> _3 <x> 3^ 5^ ;^ 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("acot_no_answer", 2): "<b> _3 _5 <x> 5^ 7^ ;^ <a>^ 7^ <e>^",
    ("acot_kept", 1): f"<b> _3 <x> {COT}",
    ("pause", 0): PAUSE,
    ("codi", 0): PAUSE,
    ("no_cot", 0): "<a> 7^ <e>^",
}


def render(batch: ReasoningBatch, names: dict[int, str], row: int = 0) -> list[str]:
    """The tokens of a row in the notation of the documents, from what the model reads and what it is asked."""
    length = batch.xt.shape[1]
    weights = (
        torch.zeros(batch.xt.numel())
        .index_put((batch.hidden.index,), batch.hidden.weight)
        .view(-1, length)[row]
    )
    anchored = torch.zeros(batch.xt.numel(), dtype=torch.bool)
    if batch.anchors is not None:
        assert (batch.anchors.weight == 1).all()
        anchored[batch.anchors.index] = True
    anchored = anchored.view(-1, length)[row]
    is_slot = batch.xt[row] == WORD_MARKERS.slot if names is NAMES else batch.xt[row] == max(names)
    size = int(weights.nonzero().max()) + 1  # the last token that is read predicts the end
    read, asked = batch.xt[row, :size].tolist(), batch.x0[row].tolist()
    texts = []
    for position, token in enumerate([*read, asked[size - 1]]):
        if position < size and is_slot[position]:
            assert not anchored[position]
            texts.append(f"_{names[asked[position]]}" if weights[position] else names[token])
            continue
        is_asked = position > 0 and not is_slot[position - 1] and bool(weights[position - 1])
        assert not is_asked or asked[position - 1] == token
        assert is_asked or position == 0 or is_slot[position - 1] or not anchored[position - 1]
        texts.append(
            names[token] + "^" * is_asked + "!" * (position > 0 and bool(anchored[position - 1]))
        )
    assert not weights[size:].any()
    return texts


def collate_example(name: str, stage: int) -> ReasoningBatch:
    arm = ARMS[name]
    layout = lay_out(EXAMPLE, arm, stage, arm.stages or 3, WORD_MARKERS)
    labels = choose_labels(EXAMPLE, FOREIGN, [0.5, 0.9, 0.1], arm.labels)
    anchors = None
    if arm.anchors not in (None, "none"):
        u = torch.linspace(0, 1, len(layout.tokens)).tolist()
        anchors = [choose_anchors(layout, EXAMPLE, None if arm.anchors == "trace" else u)]
    return collate([layout], [labels], feedback=arm.feedback, anchors=anchors)


def test_the_tables_have_every_arm() -> None:
    assert list(ROWS) == [name for name, arm in ARMS.items() if arm.holes is None]


@pytest.mark.parametrize("name", ROWS)
def test_an_arm_at_the_end_of_training(name: str) -> None:
    stage = 9 if name == "icot" else ARMS[name].stages or 3
    assert " ".join(render(collate_example(name, stage), NAMES)) == f"{QUESTION} {ROWS[name]}"


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_an_arm_at_a_stage(name: str, stage: int) -> None:
    assert (
        " ".join(render(collate_example(name, stage), NAMES)) == f"{QUESTION} {STAGES[name, stage]}"
    )


@pytest.mark.parametrize(
    "name", [name for name, arm in ARMS.items() if arm.steps in ("removed", "by_token")]
)
def test_the_last_stage_removes_all_steps_as_in_coconut(name: str) -> None:
    """Also where the trace is longer than the stages; where it is not, that stage is as any other."""
    long = EXAMPLE._replace(steps=EXAMPLE.steps + EXAMPLE.steps[::-1])
    objective = replace(make_objective(name), curriculum=Curriculum(9 if name == "icot" else 3, 2))
    last = objective.lay_out(long)
    assert last == objective.lay_out(long, objective.curriculum.stages) and len(last.trace) == 0
    assert (
        last == objective.lay_out(EXAMPLE) == objective.lay_out(EXAMPLE._replace(steps=[]))
    )  # no step is in a prompt
    before = objective.lay_out(long, objective.curriculum.stages - 1)
    assert len(before.trace) == (18 - 8 if name == "icot" else 18 - 2 * 3)
    stages = 9 if name == "icot" else 3
    assert objective.lay_out(EXAMPLE) == lay_out(EXAMPLE, ARMS[name], stages, 3, WORD_MARKERS)


def test_a_prompt_ends_before_the_first_loss() -> None:
    for name in ROWS:
        layout = lay_out(EXAMPLE, ARMS[name], 2, 3, WORD_MARKERS)
        texts = render(collate_example(name, 2), NAMES)
        assert layout.prompt == next(place for place, text in enumerate(texts) if "^" in text), name
        assert [layout.tokens[place] for place in layout.slots] == [WORD_MARKERS.slot] * len(
            layout.slots
        )
        assert layout.tokens[layout.trace.stop] == WORD_MARKERS.answer


def test_the_first_gsm8k_test_problem_has_slots_labelled_16_and_3() -> None:
    tokenizer, markers = add_markers(load_tokenizer("gpt2"))
    path = Path(__file__).parent / "excerpts" / "text_gsm8k.jsonl"
    first, second = load_items("gsm8k", path, tokenizer)[:2]
    layout = lay_out(first, ARMS["acot_kept"], 2, 2, markers)
    batch = collate([layout], [choose_labels(first, second, [0.0, 0.0], "path")])
    names = {token: tokenizer.decode([token]) for token in {*layout.tokens, *first.anchors}}
    assert max(names) == markers.slot
    texts = render(batch, names)
    question = len(first.question)
    assert texts[question : question + 5] == ["<b>", "_ 16", "_ 3", "<x>", "<r>"]
    rest = texts[question + 5 :]
    assert all(text.endswith("^") for text in rest) and not any(
        "^" in text for text in texts[:question]
    )
    assert tokenizer.decode(layout.tokens[layout.trace.start : layout.trace.stop]) == (
        "Janet sells 16 - 3 - 4 = 9 duck eggs a day.\nShe makes 9 * 2 = $18 every day at the farmer’s market.\n"
    )
    assert rest[-3:] == ["<a>^", " 18^", "<e>^"]
    assert tokenizer.decode(layout.tokens[:question]).startswith(
        "Janet’s ducks lay 16 eggs per day."
    )
    foreign = collate([layout], [choose_labels(first, second, [0.0, 0.0], "foreign")])
    assert (
        render(foreign, names | {t: tokenizer.decode([t]) for t in second.anchors})[question + 1]
        == "_ 2"
    )


def test_rows_of_a_batch_are_the_rows_alone_and_padding_carries_no_loss() -> None:
    items = draw_examples(9)
    arm = ARMS["acot"]
    layouts = [lay_out(item, arm, place % 4, 3, WORD_MARKERS) for place, item in enumerate(items)]
    labels = [item.anchors for item in items]
    for multiple in (1, 32):
        whole = collate(layouts, labels, feedback=True, multiple=multiple)
        assert whole.xt.shape[1] % multiple == 0 and all(
            end % multiple == 0 for end in whole.slot_ends
        )
        assert float(whole.tokens) == len(whole.hidden.index)
        for row, (layout, own) in enumerate(zip(layouts, labels, strict=True)):
            alone = collate([layout], [own], feedback=True)
            assert render(whole, NAMES, row) == render(alone, NAMES)
            size = alone.xt.shape[1]
            assert whole.slot is not None and alone.slot is not None
            assert (
                torch.equal(whole.slot[row, :size], alone.slot[0])
                and not whole.slot[row, size:].any()
            )
            assert alone.slot_ends == tuple(layout.slots)


def test_labels_are_never_read() -> None:
    layouts = [lay_out(item, ARMS["acot"], 3, 3, WORD_MARKERS) for item in draw_examples(8)]
    one, other = (collate(layouts, [[token] * 3] * 8) for token in (8, 9))
    assert torch.equal(one.xt, other.xt) and not torch.equal(one.x0, other.x0)


def test_weight_zero_is_the_pause_curriculum() -> None:
    items = draw_examples(8)
    layouts = [lay_out(item, ARMS["acot"], 2, 3, WORD_MARKERS) for item in items]
    weighed = collate(layouts, [item.anchors for item in items], label_weight=0.0)
    pauses = collate(
        [lay_out(item, ARMS["pause_curriculum"], 2, 3, WORD_MARKERS) for item in items],
        [[]] * len(items),
    )
    for name in ("x0", "xt", "tokens"):
        assert torch.equal(getattr(weighed, name), getattr(pauses, name))
    assert torch.equal(weighed.hidden.index, pauses.hidden.index)
    assert torch.equal(weighed.hidden.weight, pauses.hidden.weight)
    half = collate(layouts, [item.anchors for item in items], label_weight=0.5)
    assert set(half.hidden.weight.tolist()) == {0.5, 1.0} and half.tokens > pauses.tokens


def shuffle(anchors: Sequence[int], order: Sequence[float]) -> list[int | None]:
    return list(choose_labels(EXAMPLE._replace(anchors=list(anchors)), FOREIGN, order, "shuffled"))


def test_shuffled_labels_are_the_first_ones_in_another_order() -> None:
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        labels = shuffle([1, 2, 3, 4, 5], torch.rand(3, generator=rng).tolist())
        assert sorted(map(str, labels)) == ["1", "2", "3"] and labels != [1, 2, 3]
        seen.add(tuple(labels))
    assert len(seen) == 5  # every order but the first
    assert shuffle([1, 2], [0.1, 0.2]) == [2, 1]
    assert shuffle([4, 4, 5], [0.1, 0.2, 0.3]) == [4, 5, 4] and shuffle([4], [0.1]) == [4]


def test_controls_have_other_labels() -> None:
    for item in draw_examples(50):
        assert not {*choose_labels(item, FOREIGN, [], "off_path")} & {*item.anchors}
        assert choose_labels(item, FOREIGN, [], "foreign") == FOREIGN.anchors != item.anchors
        kept = choose_labels(item, FOREIGN, [], "no_answer")
        assert [a for a, b in zip(item.anchors, kept, strict=True) if b is None] == [
            token for token in item.anchors if token in item.answer
        ]


def test_stages_begin_after_so_many_steps() -> None:
    curriculum, rng = Curriculum(3, 500, revisit=0.0), CounterRng.from_seed(0, 4)
    begins = {
        step: curriculum.find_stages(step, rng) for step in (1, 500, 501, 1000, 1001, 1501, 9999)
    }
    assert [stages[0] for stages in begins.values()] == [0, 0, 1, 1, 2, 3, 3]
    assert all(len({*stages}) == 1 for stages in begins.values())


def test_earlier_stages_come_back_with_their_probability() -> None:
    curriculum, rng = Curriculum(4, 10, revisit=0.1), CounterRng.from_seed(3, 20_000)
    counts = torch.bincount(torch.tensor(curriculum.find_stages(35, rng)), minlength=5) / 20_000
    expected = torch.tensor(
        [0.025, 0.025, 0.025, 0.925, 0.0]
    )  # 0.1 in equal parts over the stages 0 to 3
    assert (counts - expected).abs().max() < 4 * (0.1 * 0.9 / 20_000) ** 0.5
    assert counts[4] == 0


def make_objective(name: str) -> ReasoningObjective:
    return ReasoningObjective(
        ARMS[name], Curriculum(3, 2, revisit=0.5), WORD_MARKERS, ARMS[name].stages or 3
    )


def make_batch(count: int = 8) -> ItemBatch:
    items, numbers = draw_examples(count), torch.arange(count)
    return ItemBatch.from_items(items, items[1:] + items[:1], numbers + 100, numbers, count, {})


@pytest.mark.parametrize("name", ROWS)
def test_a_row_depends_on_seed_row_and_step_alone(name: str) -> None:
    objective, batch = make_objective(name), make_batch()
    whole = objective.corrupt(batch, 7, 5)
    assert [render(whole, NAMES, row) for row in range(8)] == [
        render(part, NAMES, row)
        for part in (objective.corrupt(each, 7, 5) for each in batch.split(3))
        for row in range(part.xt.shape[0])
    ]
    again = objective.corrupt(batch, 7, 5)
    assert torch.equal(whole.x0, again.x0) and torch.equal(whole.hidden.index, again.hidden.index)
    assert whole.tokens.flatten()[0] == sum(
        objective.corrupt(each, 7, 5).tokens.flatten()[0] for each in batch.split(3)
    )


def test_stages_and_shuffled_labels_differ_between_seeds_steps_and_rows() -> None:
    batch = make_batch(64)
    objective = make_objective("acot_shuffled")

    def show(seed: int, step: int, numbers: torch.Tensor) -> list[list[str]]:
        made = objective.corrupt(replace(batch, number=numbers), seed, step)
        return [render(made, NAMES, row) for row in range(64)]

    base = show(7, 8, batch.number)
    assert base == show(7, 8, batch.number)
    assert all(
        base != other
        for other in (
            show(8, 8, batch.number),
            show(7, 9, batch.number),
            show(7, 8, 5 * batch.number),
        )
    )
