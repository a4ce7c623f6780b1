"""The length of a hole: the one that makes the given tokens next to it likeliest, within the limits and the row."""

from functools import cache
from typing import Any

import pytest
import torch

from adlm import LM, Hole, LanguageModel
from adlm.models.methods import build_config
from adlm.text.generation import MAX_NEIGHBORS, find_neighbors
from adlm.text.templates import MAX_HOLE_TOKENS, build_layout, parse_template
from tests.text.models import lm, tokenizer, wrap

LENGTH = 32


@cache
def placed(text: str, rows: str = "documents") -> LM:
    """A model that predicts only by position: the byte of `text` there (after BOS), where it has a letter.

    Its layers add nothing, its tokens are zero: every position is a vector of its own, and the head reads it.
    """
    config = build_config(
        "mdlm", "nano", vocab_size=258, mask_id=257, dim=LENGTH, heads=2, denoiser_layers=1, length=LENGTH,
        positions="learned", cond_dim=None, dropout=0.0,
    )  # fmt: skip
    model = LanguageModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        assert model.positions is not None
        model.positions.weight.copy_(torch.eye(LENGTH))
        for place, letter in enumerate(text, 1):
            if letter != ".":
                model.head.weight[ord(letter), place] = 3.0
    return wrap(model, method="mdlm", rows=rows)


def lengths(model: LM, template: Any) -> list[int]:
    layout = model.layout_rows(template=template)[0].layout
    return [span.end - span.start for span in layout.spans if span.texts is None]


@pytest.mark.parametrize("rows", ["documents", "wrapped"])
@pytest.mark.parametrize("length", [1, 2, 5, 11, 12])
def test_the_likeliest_length_is_chosen(length: int, rows: str) -> None:
    model = placed("ab" + "." * length + "cd", rows)
    assert lengths(model, "ab___cd") == lengths(model, ["ab", Hole(), "cd"]) == [length]
    assert len(model.infill("ab___cd", n=2, temperature=0.0).texts) == 2


def test_limits_are_kept() -> None:
    model = placed("ab.......cd")  # seven would be best
    assert lengths(model, "ab___{3}cd") == [3]
    assert lengths(model, "ab___{2,9}cd") == lengths(model, "ab___{7,9}cd") == [7]
    assert 2 <= lengths(model, "ab___{2,5}cd")[0] <= 5
    assert 8 <= lengths(model, "ab___{8,9}cd")[0] <= 9


def test_there_is_room_for_everything() -> None:
    """A row has 32 positions, two of them for BOS and EOS: a hole takes what the others leave."""
    model, full = placed("ab" + "." * 20 + "cd"), "x" * 20
    assert lengths(model, "ab___{1,40}cd") == [20]
    assert sum(lengths(model, full + "___ ___{3}y___")) <= 30 - 22
    assert lengths(model, full + "___{1,12}___{8}y") == [1, 8]
    assert lengths(model, "x" * 29 + "___") == [1]
    assert lengths(placed("a" * 26), "a" * 26 + "___{1,12}") == [
        1
    ]  # every length is as likely: the shortest


@pytest.mark.parametrize(
    ("text", "template", "expected"),
    [
        ("a...b.....c", "a___b___c", [3, 5]),  # from left to right
        ("a...b..c.....d", "a___b___{2}c___d", [3, 2, 5]),
        ("abc", "___", [MAX_HOLE_TOKENS]),  # nothing is given: as long as allowed
        ("abc", "___{2,7}", [7]),
        ("abc", "___{1,99}", [30]),
        ("abc", [Hole(1, 4), Hole(1, 5)], [4, 5]),
    ],
)
def test_several_holes_and_nothing_given(text: str, template: Any, expected: list[int]) -> None:
    assert lengths(placed(text), template) == expected


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_the_choice_depends_on_neither_time_nor_batch(time_conditioning: bool) -> None:
    model = lm("adlm", "bytes", "documents", time_conditioning=time_conditioning)
    template = "An ___ in a ___{1,6}, or ___."
    assert (
        model.infill(template, n=3, seed=1, batch=1).texts
        == model.infill(template, n=3, seed=1).texts
    )
    assert lengths(model, template) == lengths(model, template)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_model_ends_its_hole_itself(method: str) -> None:
    """Nothing follows the hole: it gets all the tokens that it may have, and the text ends at EOS."""
    model = lm(method)
    assert lengths(model, "The cat ___") == [MAX_HOLE_TOKENS]
    assert lengths(model, "x" * 60 + "___") == [3]
    assert lengths(model, "The ___{2,40}") == [40]


def test_the_given_tokens_next_to_a_hole_are_scored() -> None:
    template = ["abcdefg", Hole.of_length(2), "xy", Hole.of_length(1), Hole.of_length(3), "z"]
    layout = build_layout(parse_template(template), tokenizer("bytes"))
    neighbors = [
        bytes(layout.ids[place] for place in find_neighbors(layout, number)) for number in range(3)
    ]
    assert neighbors == [b"defgxy", b"xy", b"z"] and len(neighbors[0]) == MAX_NEIGHBORS + 2
