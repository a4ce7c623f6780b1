"""Structure and balance of generated graphs, recomputed from the tokens, and ProsQA in their vocabulary."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adlm.apps.reasoning import graphs
from adlm.apps.reasoning.datasets import recode_problems
from adlm.apps.reasoning.items import MARKERS, Item
from tests.apps.reasoning.probes import probe_accuracy

EXCERPT = Path(__file__).parent / "excerpts/text_prosqa.json"
recode = partial(recode_problems, "prosqa", recode=graphs.recode_prosqa)
VOCABULARY = (*MARKERS, *graphs.WORDS)
ZERO = VOCABULARY.index("0")
SYMBOLS = len(graphs.SYMBOLS)
TABLE_COUNTS = (
    "in-degree",
    "out-degree",
    "ancestors",
    "descendants",
    "first position",
    "last position",
)


def draw(count: int, min_hops: int, max_hops: int, seed: int = 0) -> list[Item]:
    return graphs.draw_items(np.random.default_rng(seed), count, min_hops, max_hops)


def words(ids: list[int]) -> str:
    return " ".join(VOCABULARY[token] for token in ids)


def parse(item: Item) -> tuple[list[tuple[str, ...]], str, list[str]]:
    """Edges, root and options of a question."""
    body, query = words(item.question).removeprefix("<q> ").split(" ? ")
    root, *options = query.split()
    return [tuple(edge.split()) for edge in body.split(" | ")], root, options


def count_shortest_paths(edges: list[tuple[str, ...]], root: str) -> dict[str, tuple[int, int]]:
    """Distance from the root and the number of shortest paths, of all nodes that can be reached."""
    found, distance, frontier = {root: (0, 1)}, 0, Counter({root: 1})
    while frontier:
        distance += 1
        reached: Counter[str] = Counter()
        for a, b in edges:
            if a in frontier and b not in found:
                reached[b] += frontier[a]
        found |= {node: (distance, count) for node, count in reached.items()}
        frontier = reached
    return found


def check_item(item: Item) -> tuple[list[tuple[str, ...]], str, str]:
    """The steps are a shortest path to the answer and the other option is unreachable; edges, target, distractor."""
    edges, root, options = parse(item)
    assert len(set(edges)) == len(edges) and all(len(edge) == 2 for edge in edges)
    found = count_shortest_paths(edges, root)
    (target,) = (option for option in options if option in found)
    (distractor,) = (option for option in options if option not in found)
    path = [root, *words(item.anchors).split()]
    assert words(item.answer) == target == path[-1]
    assert found[target][0] == len(item.steps) == len(item.anchors)
    assert [words(step) for step in item.steps] == [f"{a} {b} ;" for a, b in pairwise(path)]
    assert set(pairwise(path)) <= set(edges)
    assert len(set(item.off_path)) == len(item.off_path) >= len(item.anchors)
    assert set(item.off_path) <= set(item.question)
    assert not {*item.question[-3:], *item.anchors} & set(
        item.off_path
    )  # nor the distractor, which gives all away
    return edges, target, distractor


@pytest.mark.parametrize("hops", range(1, 9))
def test_the_target_is_reached_and_the_distractor_is_not(hops: int) -> None:
    items = draw(150, hops, hops, seed=hops)
    for item in items:
        edges, target, _ = check_item(item)
        assert len(item.steps) == hops
        assert count_shortest_paths(edges, parse(item)[1])[target][1] == 1
        nodes = {node for edge in edges for node in edge}
        assert 16 <= len(nodes) <= 24 and 30 <= len(edges) <= 42
        remaining = edges
        while sources := {a for a, _ in remaining} - {b for _, b in remaining}:
            remaining = [edge for edge in remaining if edge[0] not in sources]
        assert not remaining  # no cycle
    counts, _ = count_features(items)
    assert (counts[:, 1, :2] == counts[:, 2, :2]).all()
    assert (abs(counts[:, 1, 2] - counts[:, 2, 2]) <= 1).all()


def test_a_written_item() -> None:
    """The counts are those of the drawing: 0 → 3 → 5 → 7 and 1 → 4 → 6 → 8."""
    question = "<q> 3 5 | 1 4 | 0 3 | 6 8 | 5 7 | 4 6 ? 0 8 7"
    ids = [
        [VOCABULARY.index(word) for word in text.split()]
        for text in (question, "0 3 ;", "3 5 ;", "5 7 ;", "3 5 7")
    ]
    item = Item(
        ids[0], ids[1:4], ids[4], ids[4][-1:], [VOCABULARY.index(word) for word in ("4", "6", "1")]
    )
    edges, target, distractor = check_item(item)
    assert (len(edges), target, distractor) == (6, "7", "8")
    counts, is_first = count_features([item])
    assert counts.tolist() == [[[0, 1, 0, 3, 2, 2], [1, 0, 3, 0, 3, 3], [1, 0, 3, 0, 4, 4]]]
    assert is_first.tolist() == [False]


def count_features(items: list[Item]) -> tuple[np.ndarray, np.ndarray]:
    """Counts [item, root and two options, kind] in the order of TABLE_COUNTS, and whether the first option is right."""
    sizes = np.array([(len(item.question) - 4) // 3 for item in items])
    tokens = np.array([token for item in items for token in (*item.question[1:-4], 0)]).reshape(
        -1, 3
    )
    row, (source, target) = np.arange(len(items)).repeat(sizes), tokens[:, :2].T - ZERO
    nodes = np.array([item.question[-3:] for item in items]) - ZERO
    position = np.arange(len(row)) - (sizes.cumsum() - sizes).repeat(sizes)
    tables = np.zeros((len(TABLE_COUNTS), len(items), SYMBOLS), int)
    np.add.at(tables[0], (row, target), 1)
    np.add.at(tables[1], (row, source), 1)
    tables[4] = 99
    for end in source, target:
        np.minimum.at(tables[4], (row, end), position)
        np.maximum.at(tables[5], (row, end), position)
    bits = 1 << np.arange(SYMBOLS)
    counts = np.take_along_axis(tables, nodes[None], axis=2)
    for kind, start, end in ((2, source, target), (3, target, source)):
        neighbors = np.zeros((len(items), 1, SYMBOLS), int)
        np.add.at(neighbors[:, 0], (row, start), bits[end])
        reached, before = bits[nodes], np.zeros_like(nodes)
        while (reached != before).any():
            before = reached
            reached = before | (((neighbors & before[..., None]) != 0) * bits).sum(axis=2)
        counts[kind] = ((reached[..., None] & bits) != 0).sum(axis=2) - 1
    return counts.transpose(1, 2, 0), np.array(
        [item.question[-2] == item.answer[0] for item in items]
    )


def probe_features(counts: np.ndarray, items: list[Item]) -> np.ndarray:
    """20 counts of an item: six of the root and of each option, and the numbers of edges and nodes."""
    sizes = [(len(item.question), len(set(item.question))) for item in items]
    return np.concatenate([counts.reshape(len(items), -1), sizes], axis=1)


def shortcut_accuracies(counts: np.ndarray, is_first: np.ndarray) -> dict[str, float]:
    """Share of items that "the option with the larger count" answers, a tie counted as one half."""
    difference = np.sign(counts[:, 1] - counts[:, 2]) * np.where(is_first, 1, -1)[:, None]
    return dict(zip(TABLE_COUNTS, (difference + 1).mean(axis=0) / 2)) | {
        "first option": float(is_first.mean())
    }


def check_balance(items: list[Item], train_count: int) -> None:
    """No count, alone (on 10,000 items) or with others in a logistic probe, tells the target."""
    counts, is_first = count_features(items)
    accuracies = shortcut_accuracies(counts[:10_000], is_first[:10_000])
    assert all(abs(accuracy - 0.5) < 0.02 for accuracy in accuracies.values()), accuracies
    features = probe_features(counts, items)
    assert features.shape[1] == 20
    assert probe_accuracy(features, is_first, train_count) <= 0.53


def test_no_count_tells_the_target() -> None:
    check_balance(draw(24_000, 1, 6), train_count=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("hops", [1, 4, 8])
def test_no_count_tells_the_target_at_any_distance(hops: int) -> None:
    check_balance(draw(30_000, hops, hops, seed=hops), train_count=20_000)


def test_the_balance_check_finds_a_shortcut() -> None:
    """Where the distractor is a node before that of its path, its counts tell it."""

    def plant(item: Item) -> Item:
        edges, _, distractor = check_item(item)
        before = ZERO + int(next(a for a, b in edges if b == distractor))
        options = [option if option in item.answer else before for option in item.question[-2:]]
        return item._replace(question=item.question[:-2] + options)

    items = list(map(plant, draw(2000, 3, 3)))
    counts, is_first = count_features(items)
    assert shortcut_accuracies(counts, is_first)["ancestors"] > 0.8
    assert probe_accuracy(probe_features(counts, items), is_first, 1000) > 0.8


def test_labels_off_the_path_do_not_tell_the_distractor() -> None:
    """The first ones, which are the labels, reach the distractor as often as the target."""
    reached = np.zeros(2)
    for item in draw(3000, 1, 6):
        edges, target, distractor = check_item(item)
        for label in words(item.off_path[: len(item.anchors)]).split():
            found = count_shortest_paths(edges, label)
            reached += [target in found, distractor in found]
    assert abs(reached[0] / reached.sum() - 0.5) < 0.02


def test_items_depend_on_the_generator_alone() -> None:
    items = draw(3000, 1, 6)
    assert items[:50] == draw(3000, 1, 6)[:50] != draw(3000, 1, 6, seed=1)[:50]
    hops = Counter(len(item.steps) for item in items)
    assert all(abs(hops[h] - 500) < 100 for h in range(1, 7)) and len(hops) == 6
    answers = Counter(item.answer[0] for item in items)
    assert len(answers) == SYMBOLS and max(answers.values()) < 0.04 * len(items)
    assert 35 < np.mean([len(parse(item)[0]) for item in items]) < 37


def test_the_vocabulary_is_small_and_hops_are_checked() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) <= 64
    with pytest.raises(ValueError, match="hops 1 to 9 are out of range: give 1 <= min <= max <= 8"):
        draw(1, 1, 9)


def test_prosqa_keeps_its_edges_and_its_path(tmp_path: Path) -> None:
    items, records = recode(EXCERPT), json.loads(EXCERPT.read_text("utf-8"))
    compressed = tmp_path / "prosqa_test.json.gz"
    compressed.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    assert items == recode(compressed) != recode(EXCERPT, seed=1)
    for item, record in zip(items, records, strict=True):
        edges, target, distractor = check_item(item)
        _, root, options = parse(item)
        names = record["idx_to_symbol"]
        sentences = record["question"].split(". ")[:-1]
        symbols = {}  # the symbol of a name, the same everywhere
        for edge, sentence in zip(edges, sentences, strict=True):
            start, end = sentence.removeprefix("Every ").split(" is a ")
            assert (symbols.setdefault(start, edge[0]), symbols.setdefault(end, edge[1])) == edge
        assert len(set(symbols.values())) == len(symbols) == len(names)
        assert {(symbols[names[a]], symbols[names[b]]) for a, b in record["edges"]} == set(edges)
        fields = ("root", "target", "neg_target")
        assert [symbols[names[record[field]]] for field in fields] == [root, target, distractor]
        query = record["question"].rpartition("Is ")[2].rstrip("?").split()
        assert [symbols[query[2]], symbols[query[4]]] == options
        assert len(item.off_path) == len(names) - len(item.anchors) - 2


def test_graphs_are_written_as_prosqa(tmp_path: Path) -> None:
    problems = graphs.draw_problems(np.random.default_rng(0), 100, 1, 6)
    assert problems == graphs.draw_problems(np.random.default_rng(0), 100, 1, 6)
    path = tmp_path / "prosqa_train.json"
    path.write_text(json.dumps([problem._asdict() for problem in problems]), "utf-8")
    for problem, item in zip(problems, recode(path), strict=True):  # it checks sentences and steps
        edges, target, _ = check_item(item)
        assert count_shortest_paths(edges, parse(item)[1])[target][1] == 1
        *facts, query = problem.question.replace("Every ", "").replace("?", ".").split(". ")
        subjects, objects = ({fact.split()[place] for fact in facts} for place in (0, 3))
        assert query.split()[1] in subjects - objects and subjects - objects <= set(graphs.NAMES)
        assert objects <= set(graphs.CONCEPTS)
    published = {
        symbol
        for record in json.loads(EXCERPT.read_text("utf-8"))
        for symbol in record["idx_to_symbol"]
    }
    assert published <= {*graphs.NAMES, *graphs.CONCEPTS}
    assert (len(set(graphs.NAMES)), len(set(graphs.CONCEPTS))) == (17, 38)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        (
            "question",
            lambda text: f"All is well. {text}",
            "problem 0: unknown sentence 'All is well.'",
        ),
        ("question", lambda text: text.replace(" or ", " and "), "unknown sentence 'Is "),
        ("steps", lambda steps: steps[1:], "are no path of the facts"),
        (
            "answer",
            lambda text: "Max is a rempus.",
            "answer 'Max is a rempus.' contradicts the steps",
        ),
        ("steps", None, "has no steps"),
    ],
)
def test_errors_name_the_file_the_problem_and_the_sentence(
    field: str, change: Callable[[Any], Any] | None, message: str, tmp_path: Path
) -> None:
    record = json.loads(EXCERPT.read_text("utf-8"))[0]
    if change is None:
        del record[field]
    else:
        record[field] = change(record[field])
    path = tmp_path / "prosqa_test.json"
    path.write_text(json.dumps([record]), "utf-8")
    with pytest.raises(ValueError, match=r"prosqa_test\.json") as error:
        recode(path)
    assert message in str(error.value) and "\n" not in str(error.value)
