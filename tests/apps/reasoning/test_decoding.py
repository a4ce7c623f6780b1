"""Greedy decoding: a batch is its rows alone, and rows alone are a plain loop without a cache."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from adlm.apps.reasoning.arms import ARMS, RowLayout, lay_out
from adlm.apps.reasoning.decoding import decode_greedily, find_answer
from adlm.apps.reasoning.items import WORD_MARKERS
from adlm.models.language_model import LanguageModel
from tests.apps.reasoning.examples import VOCABULARY, build_model, draw_examples, unroll

LAYOUTS = (
    "no_cot",
    "cot",
    "short_cot",
    "curriculum_only",
    "pause",
    "coconut",
    "acot",
    "acot_kept_feedback",
)
END, ANSWER, MASK = WORD_MARKERS.end, WORD_MARKERS.answer, VOCABULARY - 1


def lay_out_prompts(name: str, count: int = 12) -> list[RowLayout]:
    """Rows at different stages: their prompts differ in length and in the number of slots."""
    items, arm = draw_examples(count, seed=1), ARMS[name]
    return [
        lay_out(item, arm, place % 4, arm.stages or 3, WORD_MARKERS)
        for place, item in enumerate(items)
    ]


def build_writer(kind: str = "rotary", seed: int = 0) -> LanguageModel:
    """A model that writes answers of some tokens: random, with a liking for the answer's marker and the end."""
    model = build_model(kind, seed=seed)
    with torch.no_grad():
        model.head.bias[[END, ANSWER]] += 1.0
        model.head.bias[MASK] += 100.0  # which is never written
    return model


@torch.no_grad()
def write_plainly(
    model: LanguageModel, layout: RowLayout, *, feedback: bool, most: int
) -> list[int]:
    tokens = layout.tokens[: layout.prompt]
    while len(tokens) < layout.prompt + most and (
        len(tokens) == layout.prompt or tokens[-1] != END
    ):
        logits = model.head(
            unroll(model, layout._replace(tokens=tokens), feedback=feedback).final[0, -1]
        )
        tokens = [*tokens, int(logits[:MASK].argmax())]
    return tokens[layout.prompt :]


@pytest.mark.parametrize("kind", ["rotary", "learned", "two stages"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_batch_is_its_rows_alone(name: str, kind: str) -> None:
    model, layouts, feedback = build_writer(kind), lay_out_prompts(name), ARMS[name].feedback
    decoded = decode_greedily(model, layouts, WORD_MARKERS, feedback=feedback, max_new_tokens=7)
    for layout, result in zip(layouts, decoded, strict=True):
        (alone,) = decode_greedily(
            model, [layout], WORD_MARKERS, feedback=feedback, max_new_tokens=7
        )
        assert alone == result
        assert result.tokens == write_plainly(model, layout, feedback=feedback, most=7)
        assert result.passes == len(result.tokens) + (len(layout.slots) if feedback else 0)
    assert len({layout.prompt for layout in layouts}) > 3


def test_rows_stop_at_the_end_or_at_the_most_tokens() -> None:
    decoded = [
        result
        for seed in range(8)
        for result in decode_greedily(
            build_writer(seed=seed),
            lay_out_prompts("acot"),
            WORD_MARKERS,
            feedback=False,
            max_new_tokens=7,
        )
    ]
    for result in decoded:
        assert MASK not in result.tokens and END not in result.tokens[:-1]
        assert result.tokens[-1] == END or len(result.tokens) == 7
        assert (result.answer is None) == (result.tokens[-1] != END or ANSWER not in result.tokens)
    assert {result.tokens[-1] == END for result in decoded} == {True, False}, (
        "all rows ended alike: the test is void"
    )
    assert any(result.answer for result in decoded)


@pytest.mark.parametrize("name", ["cot", "acot", "coconut"])
def test_passes_are_the_passes_of_the_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, feedback, calls = build_writer(), ARMS[name].feedback, []
    forward = LanguageModel.forward

    def count(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(LanguageModel, "forward", count)  # decoding has a copy of the model
    for layout in lay_out_prompts(name):
        calls.clear()
        (result,) = decode_greedily(
            model, [layout], WORD_MARKERS, feedback=feedback, max_new_tokens=7
        )
        assert len(calls) == result.passes


def test_it_leaves_the_model_in_its_mode_and_needs_room() -> None:
    model, layouts = build_writer(), lay_out_prompts("cot")
    for mode in (True, False):
        model.train(mode)
        decode_greedily(model, layouts, WORD_MARKERS, feedback=False, max_new_tokens=2)
        assert model.training is mode
    with pytest.raises(
        ValueError, match=r"60 new ones do not fit into this model's 64: shorten the question"
    ):
        decode_greedily(model, layouts, WORD_MARKERS, feedback=False, max_new_tokens=60)


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        ([9, ANSWER, 8, 9, END], [8, 9]),
        ([ANSWER, 8, ANSWER, 9, END], [9]),
        ([ANSWER, END], []),
        ([9, 8, END], None),
        ([ANSWER, 8], None),
    ],
)
def test_the_answer_is_between_its_marker_and_the_end(
    tokens: Sequence[int], answer: list[int] | None
) -> None:
    assert find_answer(tokens, WORD_MARKERS) == answer
