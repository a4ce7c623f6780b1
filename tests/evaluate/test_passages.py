"""Passages are real text from beginnings of paragraphs, none of it twice."""

import pytest

from adlm.evaluate.passages import cut_up, passages, shortest
from tests.evaluate.small_judges import documents

SIZE = 200


def test_passages_are_pieces_of_the_documents_without_overlap() -> None:
    for document in documents()[:5]:
        at = 0
        for passage in cut_up(document, SIZE):
            start = document.index(passage, at)
            assert start == 0 or document[start - 1] == "\n"
            assert 0 < len(passage) <= SIZE
            at = start + len(passage)
        assert at > len(document) / 3, "most of a document is left out"


def test_a_line_is_a_paragraph_only_where_no_blank_line_says_otherwise() -> None:
    broken = "\n\n".join("First words\nof a paragraph\nthat is broken at a width." for _ in range(30))
    found = list(cut_up(broken, 60))
    assert len(found) > 10 and all(passage.startswith("First words") for passage in found)
    lines = broken.replace("\n\n", "\n")
    assert {passage.split()[0] for passage in cut_up(lines, 60)} == {"First", "of", "that"}
    assert next(cut_up("  \n\n" + broken, 60)).startswith("First words")


def test_a_short_document_is_one_passage() -> None:
    assert list(cut_up("  A line.\n", SIZE)) == ["A line."]
    assert list(cut_up(" \n", SIZE)) == []


def test_headings_are_no_passages() -> None:
    """A document of two words would cut a sample to two words, which n-grams cannot be counted in."""
    long = "A sentence that is long enough to be a passage of its own."
    assert passages(["CHAPTER I.", long, "* * *", " \n"], 1, SIZE) == [long]
    with pytest.raises(ValueError, match="has 1 passages of 32 to 200 characters, and 2 are needed"):
        passages(["CHAPTER I.", long], 2, SIZE)
    assert sorted(passages(["Short.", "Texts."], 2, 6)) == ["Short.", "Texts."]  # where little is asked for


@pytest.mark.parametrize("characters", [5, 40, 127, 128, 900])
def test_the_shortest_is_said(characters: int) -> None:
    least = shortest(characters)
    documents = ["x" * size for size in range(1, characters + 1)]
    assert min(map(len, passages(documents, characters - least + 1, characters))) == least
    assert least == (32 if characters >= 128 else characters // 4)


def test_what_is_not_fit_is_left_out_of_the_seeds_order() -> None:
    every = passages(documents(), 60, SIZE, seed=3)
    even = passages(documents(), 10, SIZE, seed=3, is_fit=lambda text: len(text) % 2 == 0)
    assert even == [text for text in every if len(text) % 2 == 0][:10]
    with pytest.raises(ValueError, match="has 0 passages"):
        passages(documents(), 1, SIZE, is_fit=lambda text: False)


def test_the_seed_says_which() -> None:
    one, again, other = (passages(documents(), 50, SIZE, seed=seed) for seed in (0, 0, 1))
    assert one == again != other
    assert len(set(one)) == 50
    assert passages(documents(), 20, SIZE, seed=0) == one[:20]


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="has 2 passages of 2 to 10 characters, and 4 are needed, two for"):
        passages(["short", "also\n"], 4, 10)
    with pytest.raises(ValueError, match="from 1 on"):
        passages(["short"], 1, 0)
