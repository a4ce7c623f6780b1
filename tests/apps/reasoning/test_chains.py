"""Chains followed again from the tokens, their balance, and ProntoQA in their vocabulary."""

import gzip
import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from adlm.apps.reasoning import chains
from adlm.apps.reasoning.datasets import recode_problems
from adlm.apps.reasoning.items import MARKERS, Item
from tests.apps.reasoning.probes import probe_accuracy

EXCERPT = Path(__file__).parent / "excerpts/text_prontoqa.json"
recode = partial(recode_problems, "prontoqa", recode=chains.recode_prontoqa)
VOCABULARY = (*MARKERS, *chains.WORDS)
SEPARATOR = VOCABULARY.index("|")


def draw(count: int, min_hops: int, max_hops: int, seed: int = 0) -> list[Item]:
    return chains.draw_items(np.random.default_rng(seed), count, min_hops, max_hops)


def words(ids: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in ids)


def parse(item: Item) -> tuple[list[list[str]], list[str]]:
    """Facts of two (is a) or three words (has: with a sign), and the asked name, attribute and sign."""
    body, query = words(item.question).removeprefix("<q> ").split(" ? ")
    return [split_sign(fact) for fact in body.split(" | ")], split_sign(query)


def split_sign(fact: str) -> list[str]:
    subject, value = fact.split()
    return (
        [subject, value]
        if value in chains.CLASSES
        else [subject, value.lstrip("-"), "+-"[value.startswith("-")]]
    )


def reach(facts: list[list[str]], start: str) -> dict[str, list[str]]:
    """The ways from a node to all nodes above it."""
    ways, frontier = {start: [start]}, [start]
    while frontier:
        above = [(a, b) for a, b, *sign in facts if not sign and a in frontier]
        frontier = [b for _, b in above]
        ways |= {b: [*ways[a], b] for a, b in above}
    return ways


def check_item(item: Item) -> None:
    """The steps lead from the asked name to its attribute, and the answer compares the signs."""
    facts, (name, attribute, sign) = parse(item)
    ways = reach(facts, name)
    holders = [
        (node, each)
        for node, value, each in (fact for fact in facts if len(fact) == 3)
        if value == attribute
    ]
    assert sorted(each for _, each in holders) == ["+", "-"]
    ((holder, true_sign),) = [(node, each) for node, each in holders if node in ways]
    path, answer = ways[holder], "true" if sign == true_sign else "false"
    assert [words(step) for step in item.steps] == [
        *(f"{a} {b} ;" for a, b in pairwise(path)),
        f"{holder} {true_sign.strip('+')}{attribute} ;",
    ]
    assert words(item.answer) == answer
    assert words(item.anchors).split() == [*path[1:], answer]
    assert len(item.anchors) == len(item.steps)
    others = words(item.off_path).split()
    assert len(set(others)) == len(others) >= len(item.anchors)
    assert not set(others) & set(path) and all(word in chains.CLASSES for word in others)
    assert set(item.off_path) <= set(item.question)


@pytest.mark.parametrize("hops", range(1, 9))
def test_the_path_leads_to_the_answer(hops: int) -> None:
    for item in draw(150, hops, hops, seed=hops):
        check_item(item)
        facts, (name, *_) = parse(item)
        assert len(item.steps) == hops == len(item.off_path)
        for (
            each
        ) in chains.NAMES:  # both chains have one class above the one with the asked attribute
            assert len(reach(facts, each)) == hops + 1
        assert not set(words(item.off_path).split()) & reach(facts, name).keys()
        attributes = Counter(fact[0] for fact in facts if len(fact) == 3)
        assert set(attributes.values()) == {
            1
        }  # one attribute a class, and of the names only at one hop
        assert attributes.keys() - chains.NAMES == {fact[1] for fact in facts if len(fact) == 2}
        assert (attributes.keys() >= set(chains.NAMES)) == (hops == 1)


def test_a_written_item() -> None:
    (item,) = draw(1, 1, 1)
    assert (
        words(item.question) == "<q> n0 -p23 | c2 p10 | c10 p7 | n1 c2 | n1 p23 | n0 c10 ? n0 -p23"
    )
    assert [words(step) for step in item.steps] == ["n0 -p23 ;"]
    assert words(item.anchors + item.answer + item.off_path) == "true true c2"


def count_features(items: list[Item]) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the nodes that have the asked attribute, first with the asked sign, and of the asked name.

    Of each: the places of its first and last fact, of its attribute and of the link above it, and its facts; also the
    index of the name, the asked sign, the signs of all attributes and the number of facts.
    """
    rows = []
    for item in items:
        facts, (name, attribute, sign) = parse(item)
        row = [
            chains.NAMES.index(name),
            sign == "+",
            sum(fact[-1] == "+" for fact in facts),
            len(facts),
        ]
        holders = {
            fact[2] == sign: (fact[0], place)
            for place, fact in enumerate(facts)
            if fact[1] == attribute
        }
        for node, place in (holders[True], holders[False], (name, 0)):
            places = [index for index, fact in enumerate(facts) if node in fact]
            above = next(
                index for index, fact in enumerate(facts) if fact[0] == node and len(fact) == 2
            )
            row += [places[0], places[-1], place, above, len(places)]
        rows.append(row)
    return np.array(rows, float), np.array([words(item.answer) == "true" for item in items])


def check_balance(items: list[Item], train_count: int) -> None:
    """No count, alone (on 10,000 items) or with others in a logistic probe, tells the answer."""
    features, is_true = count_features(items)
    first, second = features[:10_000, 4:9], features[:10_000, 9:14]
    truth = is_true[:10_000, None]
    rules = np.column_stack(
        [np.sign(first - second), features[:10_000, :2] * 2 - 1, np.ones(len(truth))]
    )
    accuracies = ((rules * np.where(truth, 1, -1) + 1) / 2).mean(axis=0)  # a tie counts as one half
    assert abs(accuracies - 0.5).max() < 0.02, accuracies
    assert probe_accuracy(features, is_true, train_count) < 0.53


def test_no_count_tells_the_answer() -> None:
    check_balance(draw(16_000, 1, 6, seed=1), train_count=12_000)


@pytest.mark.slow
@pytest.mark.parametrize("hops", [1, 3, 6])
def test_no_count_tells_the_answer_at_any_distance(hops: int) -> None:
    check_balance(draw(30_000, hops, hops, seed=hops), train_count=20_000)


def test_the_balance_check_finds_a_shortcut() -> None:
    """Where the true sign is always stated first, the check fails."""

    def state_first(item: Item) -> Item:
        fact = item.steps[-1][:-1]
        facts = [item.question[start : start + 2] for start in range(1, len(item.question) - 3, 3)]
        body = [
            token
            for each in (fact, *(each for each in facts if each != fact))
            for token in (*each, SEPARATOR)
        ]
        return item._replace(question=[0, *body[:-1], *item.question[-3:]])

    items = [state_first(item) for item in draw(2000, 2, 4)]
    check_item(items[0])
    with pytest.raises(AssertionError):
        check_balance(items, train_count=1000)


def test_items_depend_on_the_generator_alone() -> None:
    items = draw(3000, 1, 6)
    assert items[:50] == draw(3000, 1, 6)[:50] != draw(3000, 1, 6, seed=1)[:50]
    hops = Counter(len(item.steps) for item in items)
    assert all(abs(hops[h] - 500) < 100 for h in range(1, 7)) and len(hops) == 6
    used = Counter(token for item in items for token in item.question)
    assert (
        len(used) == len(VOCABULARY) - len(MARKERS) + 1 - 3
    )  # <q> and all words but true, false, ;


def test_the_vocabulary_is_small_and_hops_are_checked() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) <= 160
    assert draw(1, 11, 11)
    with pytest.raises(
        ValueError, match="hops 1 to 12 are out of range: give 1 <= min <= max <= 11"
    ):
        draw(1, 1, 12)


def test_prontoqa_keeps_its_facts_and_its_path(tmp_path: Path) -> None:
    items, records = recode(EXCERPT), json.loads(EXCERPT.read_text("utf-8"))
    compressed = tmp_path / "prontoqa_test.json.gz"
    compressed.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    assert items == recode(compressed) != recode(EXCERPT, seed=1)
    for item, record in zip(items, records, strict=True):
        check_item(item)
        assert words(item.answer) == record["answer"].lower()
        assert len(item.steps) == len(record["steps"]) == 6
        sentences = record["question"].split(". ")[:-1]
        facts, (*_, sign) = parse(item)
        assert len(facts) == len(sentences)
        for fact, sentence in zip(facts, sentences):
            assert ("-" in fact) == (" not " in sentence)
            assert (len(fact) == 2) == sentence.lower().endswith(("pus", "puses"))
        assert (sign == "-") == (" not " in record["question"].rpartition(":")[2])
    facts = parse(items[0])[0]
    assert len({word for fact in facts for word in fact if word.startswith("c")}) == 14
    assert len({fact[1] for fact in facts if len(fact) == 3}) == 11


@pytest.mark.parametrize(
    ("field", "old", "new", "message"),
    [
        (
            "question",
            "Each yumpus is a lorpus.",
            "Yumpus or lorpus.",
            "problem 0: unknown sentence 'Yumpus or lorpus.'",
        ),
        (
            "question",
            "Each yumpus is a lorpus.",
            "Each yumpus is not a lorpus.",
            "unknown sentence 'Each yumpus is not a",
        ),
        ("question", "True or false:", "Is it true:", "has no 'True or false:'"),
        (
            "question",
            "Each yumpus is a lorpus.",
            "Each yumpus is a rompus.",
            "do not lead to 'Stella is not floral.'",
        ),
        ("answer", "False", "True", "answer 'True' contradicts the steps: expected false"),
        ("steps", None, None, "has no steps"),
    ],
)
def test_errors_name_the_file_the_problem_and_the_sentence(
    field: str, old: str | None, new: str, message: str, tmp_path: Path
) -> None:
    record = json.loads(EXCERPT.read_text("utf-8"))[0]
    if old is None:
        del record[field]
    else:
        assert old in record[field]
        record[field] = record[field].replace(old, new)
    path = tmp_path / "prontoqa_test.json"
    path.write_text(json.dumps([record]), "utf-8")
    with pytest.raises(ValueError, match=r"prontoqa_test\.json") as error:
        recode(path)
    assert message in str(error.value) and "\n" not in str(error.value)
