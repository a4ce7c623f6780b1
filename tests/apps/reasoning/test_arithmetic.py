"""Assignments evaluated again from the tokens, and the distribution of their answers."""

from collections import Counter

import numpy as np
import pytest

from adlm.apps.reasoning import arithmetic
from adlm.apps.reasoning.items import MARKERS, Item

VOCABULARY = (*MARKERS, *arithmetic.WORDS)


def draw(count: int, min_hops: int, max_hops: int, seed: int = 0) -> list[Item]:
    return arithmetic.draw_items(np.random.default_rng(seed), count, min_hops, max_hops)


def words(ids: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in ids)


def parse(item: Item) -> tuple[dict[str, tuple[str, str, str]], str]:
    """Assignments by variable, and the asked variable."""
    body, asked = words(item.question).removeprefix("<q> ").split(" ? ")
    assignments = (assignment.split(" = ") for assignment in body.split(" | "))
    return {name: tuple(right.split()) for name, right in assignments}, asked  # type: ignore[misc]


def evaluate(item: Item) -> list[tuple[str, int]]:
    """The variables that the asked one needs, with their values, in order of evaluation."""
    assignments, asked = parse(item)
    done: list[tuple[str, int]] = []

    def value(word: str) -> int:
        if word.isdigit():
            return int(word)
        left, operator, right = assignments[word]
        a, b = value(left), value(right)
        done.append((word, {"+": a + b, "-": a - b, "*": a * b}[operator] % 100))
        return done[-1][1]

    value(asked)
    return done


@pytest.mark.parametrize("hops", range(1, 11))
def test_the_answer_needs_every_assignment(hops: int) -> None:
    for item in draw(200, hops, hops, seed=hops):
        done = evaluate(item)
        assert len(done) == hops == len(parse(item)[0])
        assert [words(step) for step in item.steps] == [
            f"{name} = {value} ;" for name, value in done
        ]
        assert words(item.anchors).split() == [str(value) for _, value in done]
        assert words(item.answer) == str(done[-1][1])


def test_a_written_item() -> None:
    (item,) = draw(1, 3, 3)
    assert words(item.question) == "<q> p = g - 1 | g = 81 * 3 | i = p - 2 ? i"
    assert [words(step) for step in item.steps] == ["g = 43 ;", "p = 42 ;", "i = 40 ;"]
    assert words(item.anchors + item.answer + item.off_path) == "43 42 40 40 3 1 2"


def test_labels_off_the_path_are_other_numbers_of_the_question() -> None:
    items = draw(2000, 1, 8)
    for item in items:
        assert set(item.off_path) <= set(item.question) - set(item.anchors)
        assert all(word.isdigit() for word in words(item.off_path).split())
        assert len(item.off_path) <= len(item.anchors)
    assert np.mean([len(item.off_path) == len(item.anchors) for item in items]) > 0.9


@pytest.mark.parametrize("hops", [1, 2, 4, 8])
def test_answers_are_uniform_and_no_constant_tells_them(hops: int) -> None:
    items = draw(20_000, hops, hops, seed=hops)
    answers = Counter(item.answer[0] for item in items)
    assert len(answers) == 100
    assert max(answers.values()) < 0.02 * len(items)
    deviation = sum((count - 200) ** 2 / 200 for count in answers.values())
    assert deviation < 99 + 5 * np.sqrt(2 * 99)  # chi-square: mean 99, variance 2 · 99
    for position in range(len(items[0].question)):  # a word of the question at a fixed place
        assert np.mean([item.question[position] == item.answer[0] for item in items]) < 0.03


def test_order_hops_and_operators_are_uniform() -> None:
    items = draw(6000, 1, 4)
    hops = Counter(len(item.steps) for item in items)
    assert all(abs(hops[h] - 1500) < 150 for h in range(1, 5)) and len(hops) == 4
    places = Counter(
        list(parse(item)[0]).index(parse(item)[1]) for item in items if len(item.steps) == 4
    )
    assert all(abs(places[place] / hops[4] - 0.25) < 0.05 for place in range(4))
    operators = Counter(right[1] for item in items for right in parse(item)[0].values())
    assert all(abs(operators[each] / operators.total() - 1 / 3) < 0.02 for each in "+-*")


def test_items_depend_on_the_generator_alone() -> None:
    assert draw(50, 1, 6) == draw(50, 1, 6) != draw(50, 1, 6, seed=1)


def test_the_vocabulary_is_small_and_hops_are_checked() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) <= 160
    for low, high in ((0, 2), (3, 2), (1, 27)):
        with pytest.raises(
            ValueError, match=rf"hops {low} to {high} are out of range: give 1 <= min <= max <= 26"
        ):
            draw(1, low, high)
