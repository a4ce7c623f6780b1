"""What is said below a table names the lines that it is true of, and no others."""

import pytest

from adlm.cli.evaluation.table import FEW, remarks

TEXTS, MODELS = ("ptb", "lambada"), ("a", "b")


def said(*marked: tuple[str, str], texts: tuple[str, ...] = TEXTS, models: tuple[str, ...] = MODELS) -> list[str]:
    """What is said of a table in which the lines marked so differ."""
    every = [
        {"set": text, "model": model, "error_units": FEW, "error_over": "rows"}
        | {"differs": ["other rows"] if (text, model) in marked else []}
        for text in texts
        for model in models
    ]
    return list(remarks(every, "set"))


@pytest.mark.parametrize(
    ("marked", "whose"),
    [
        ([(text, model) for text in TEXTS for model in MODELS], "all"),
        ([("ptb", "a"), ("ptb", "b")], "ptb"),
        ([("ptb", "b"), ("lambada", "b")], "b"),  # a model with another tokenizer
        ([("ptb", "a")], "ptb (a)"),
        ([("ptb", "a"), ("lambada", "a"), ("lambada", "b")], "ptb (a), lambada (a), lambada (b)"),
    ],
)
def test_a_remark_is_of_the_lines_that_it_is_true_of(marked: list[tuple[str, str]], whose: str) -> None:
    assert said(*marked) == [f"{whose}: other rows"]
    assert said() == []


def test_of_one_model_texts_are_named() -> None:
    assert said(("ptb", "a"), models=("a",)) == ["ptb: other rows"]
    assert said(("ptb", "a"), ("lambada", "a"), models=("a",)) == ["all: other rows"]
    assert said(("ptb", "a"), texts=("ptb",), models=("a",)) == ["ptb: other rows"]


def test_few_units_are_told() -> None:
    line = {"set": "ptb", "model": "a", "error_units": FEW - 1, "error_over": "documents"}
    assert list(remarks([line], "set")) == [f"ptb: the error is over {FEW - 1} documents only, too few to lean on"]
