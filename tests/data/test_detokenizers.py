"""Detokenizers agree with the authors' on every golden string."""

import pytest

from adlm.data.detokenizers import DETOKENIZERS
from tests import goldens

GOLDEN = goldens.facts("detokenizers")
NAMES = {
    "wikitext": "wt",
    "ptb": "ptb",
    "lm1b": "lm1b",
    "lambada": "lambada",
    "scientific_papers": "scientific_papers",
}


def test_every_detokenizer_has_golden_strings() -> None:
    assert set(NAMES) == set(DETOKENIZERS)
    assert {f"{short}_detokenizer" for short in NAMES.values()} == set(GOLDEN["outputs"])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(
            (name, text, expected)
            for name, short in NAMES.items()
            for text, expected in zip(
                GOLDEN["inputs"], GOLDEN["outputs"][f"{short}_detokenizer"], strict=True
            )
        ),
        # Forms that the golden strings leave out.
        ("wikitext", "at 20 ° C , 1 @,@ 000 m", "at 20°C, 1,000 m"),
        ("wikitext", " = = = Life = = = \n", " === Life ===\n"),
        ("wikitext", "{ a } { b }", "{a} {b}"),
        ("ptb", " N" * 12 + " x", " 1" * 12 + " x"),
        ("lm1b", "see https : / / a.b , and http : / / c", "see https://a.b, and http://c"),
        ("lm1b", "Done . So .\n", "Done . So.\n"),  # the first word has no space before it
        ("lm1b", "It is done . So it is .", "It is done. So it is."),
        ("lm1b", "[ a ] ( b ) ' c ' \" d \"", "[a] (b) 'c' \"d\""),
        ("lambada", "  “ yes ”\n", '\n" yes "'),
    ],
)
def test_detokenized_text(name: str, text: str, expected: str) -> None:
    assert DETOKENIZERS[name](text) == expected
