"""Generated task *graphs*: which of two nodes can be reached from the root?

Question `<q> 3 5 | 1 4 | 0 3 | 6 8 | 5 7 | 4 6 ? 0 8 7` (edges, root, two options), steps `0 3 ;`, `3 5 ;`, `5 7 ;`,
anchors `3 5 7`, answer `7`, off_path: other nodes in random order, never an option or a root, at least as many.

A graph has two roots, each the start of a path of h edges: to the target and to the distractor. Branches leave a path
and may return to it by a detour, sources have edges into everything, sinks from everything, and no edge leads from one
root's part into the other's. The shortest path is unique. Both parts are drawn alike, and the ends of both paths have
the same in-degree, the same out-degree and ancestor counts that differ by at most 1: no count tells the target.
"""

import re
from itertools import chain, pairwise

import numpy as np

from adlm.apps.reasoning.datasets import Problem
from adlm.apps.reasoning.items import Item, draw_hops, draw_symbols, index_words

SYMBOLS = tuple(map(str, range(40)))
WORDS = (*SYMBOLS, "|", "?", ";")
MIN_NODES, MAX_NODES = 16, 24
MIN_EDGES, MEAN_EDGES, MAX_EDGES = 30, 36, 42
MAX_HOPS = MAX_NODES // 2 - 4  # leaves six nodes off both paths
LENGTH = 288  # tokens of a model that is trained from scratch
_IDS = index_words(WORDS)
_BITS = 1 << np.arange(MAX_NODES)
_SOURCE, _SINK, _ABSENT = 2, 3, 4  # the part of a node; 0: the target's, 1: the distractor's
_GROUP_PARTS = np.array(
    [0, 1, 0, 1, _SOURCE, _SINK, _ABSENT]
)  # both paths, both branches, the shared nodes


def draw_items(rng: np.random.Generator, count: int, min_hops: int, max_hops: int) -> list[Item]:
    """Draw items whose target is min_hops to max_hops edges away from the root, uniformly."""
    hops = draw_hops(rng, count, min_hops, max_hops, MAX_HOPS)
    return _make_items(rng, hops, _draw_adjacency(rng, hops))


def _make_items(rng: np.random.Generator, hops: np.ndarray, adjacency: np.ndarray) -> list[Item]:
    """Write graphs with symbols and an order of edges and options drawn for each."""
    count, index = len(hops), np.arange(MAX_NODES)
    symbols = rng.random((count, len(SYMBOLS))).argsort(axis=1)[:, :MAX_NODES] + _IDS["0"]
    row, source, target = adjacency.nonzero()
    edges = np.stack(
        [symbols[row, source], symbols[row, target], np.full(len(row), _IDS["|"])], axis=1
    )
    tokens = edges[(row + rng.random(len(row))).argsort()].ravel().tolist()
    ends = 3 * np.bincount(row, minlength=count).cumsum()
    is_target_first = rng.random(count) < 0.5
    # Labels that tell nothing: nodes on neither path and, where these are too few, inner nodes of the other path.
    last = 2 * hops[:, None] + 1
    is_used = (
        (adjacency.any(axis=1) | adjacency.any(axis=2))
        & (index > last - hops[:, None])
        & (index != last)
    )
    keys = np.where(is_used, rng.random((count, MAX_NODES)) + (index < last), 2)
    others = np.take_along_axis(symbols, keys.argsort(axis=1), axis=1).tolist()
    sizes = np.maximum((keys < 1).sum(axis=1), hops).tolist()
    items, start = [], 0
    rows = zip(
        hops.tolist(), ends.tolist(), symbols.tolist(), is_target_first.tolist(), others, sizes
    )
    for h, end, nodes, is_first, other, size in rows:
        path, distractor = nodes[: h + 1], nodes[2 * h + 1]
        options = [path[-1], distractor] if is_first else [distractor, path[-1]]
        question = [_IDS["<q>"], *tokens[start : end - 1], _IDS["?"], path[0], *options]
        steps = [[*edge, _IDS[";"]] for edge in pairwise(path)]
        items.append(
            Item(question, steps, anchors=path[1:], answer=path[-1:], off_path=other[:size])
        )
        start = end
    return items


def _draw_adjacency(rng: np.random.Generator, hops: np.ndarray) -> np.ndarray:
    """Draw graphs until there is a balanced one for each number of hops: adjacency [row, from, to]."""
    adjacency = np.zeros((len(hops), MAX_NODES, MAX_NODES), bool)
    pending = np.arange(len(hops))
    while len(pending):
        candidates = np.repeat(
            pending, 1 + 32 // len(pending)
        )  # a call for few graphs costs as much as for 32
        graphs, is_valid = _draw_graphs(rng, hops[candidates])
        adjacency[candidates[is_valid]] = graphs[is_valid]
        pending = np.setdiff1d(pending, candidates[is_valid])
    return adjacency


def _draw_graphs(rng: np.random.Generator, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw a graph for each number of hops: adjacency [row, from, to], and whether it has the wanted counts.

    Nodes 0..h are the path to the target, h+1..2h+1 that to the distractor. Ranks order the nodes, so there is no
    cycle. A node is at least its level away from its root: an edge within a part leads at most one level up, and a node
    of the path is entered from a lower level by its path alone.
    """
    rows, index = np.arange(len(hops)), np.arange(MAX_NODES)
    extra = (
        rng.integers(np.maximum(MIN_NODES, 2 * hops + 8), MAX_NODES, endpoint=True) - 2 * hops - 2
    )
    branch = extra // 3
    sources = rng.integers(1, extra - 2 * branch)
    bounds = np.cumsum(
        [hops + 1, hops + 1, branch, branch, sources, extra - 2 * branch - sources], axis=0
    )
    group = sum(index >= bound[:, None] for bound in bounds)
    part, is_path, is_branch = (
        _GROUP_PARTS[group].astype(np.int8),
        group < 2,
        (group == 2) | (group == 3),
    )
    noise = rng.random(part.shape, np.float32)
    branch_level = 1 + (rng.random(part.shape, np.float32) * (hops[:, None] + 1)).astype(np.int8)
    level = np.select([is_path, is_branch], [index % (hops[:, None] + 1), branch_level], 0).astype(
        np.int8
    )
    ranks = [level, level - noise, -noise - 1, MAX_NODES + noise]
    rank = np.select([is_path, is_branch, part == _SOURCE, part == _SINK], ranks, 2 * MAX_NODES)

    here, there = np.s_[:, :, None], np.s_[:, None, :]  # the ends of an edge
    is_same = (part[here] == part[there]) & ((level + is_path)[there] <= (level + 1)[here])
    is_shared = ((part == _SOURCE)[here] & (part != _ABSENT)[there]) | (part == _SINK)[there]
    allowed = (is_same | is_shared) & (rank[here] < rank[there])
    targets = np.stack([hops, 2 * hops + 1])  # the ends of the paths: target, distractor

    keys = rng.random(allowed.shape, np.float32)
    priority = (keys + is_same) * allowed
    priority[rows, targets] = priority[rows, :, targets] = 0
    edges = np.zeros_like(allowed)
    row, node = (
        is_branch | (part == _SINK)
    ).nonzero()  # every branch and sink has an edge from, every source one to
    edges[row, priority[row, :, node].argmax(axis=1), node] = True
    row, node = (part == _SOURCE).nonzero()
    edges[row, node, priority[row, node].argmax(axis=1)] = True
    edges[:, index[:-1], index[1:]] |= is_path[:, 1:] & (index[1:] != hops[:, None] + 1)
    allowed &= ~edges
    share = (MEAN_EDGES - edges.sum(axis=(1, 2))) / allowed.sum(axis=(1, 2))
    optional = allowed & (keys < share[:, None, None])
    for view, key in (
        (optional, keys),
        (optional.swapaxes(1, 2), keys.swapaxes(1, 2)),
    ):  # equal out- and in-degrees
        drawn = view[rows, targets]
        kept = drawn.sum(axis=2).min(axis=0)
        drawn_keys = np.where(drawn, key[rows, targets], 1)
        view[rows, targets] = drawn_keys < np.sort(drawn_keys, axis=2)[:, rows, kept][..., None]
    edges |= optional

    count = edges.sum(axis=(1, 2))
    ancestors = _count_ancestors(edges, targets)
    return edges, (abs(ancestors[0] - ancestors[1]) <= 1) & (count >= MIN_EDGES) & (
        count <= MAX_EDGES
    )


def _count_ancestors(edges: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Count the nodes that reach the given ones [kind, row]; sets of nodes are bits of a number."""
    children = (edges.astype(np.float32) @ _BITS.astype(np.float32)).astype(int)
    reaching, before = _BITS[nodes], np.zeros_like(nodes)
    while (reaching != before).any():
        before = reaching
        reaching = before | (((children & before[..., None]) != 0) @ _BITS)
    return ((reaching[..., None] & _BITS) != 0).sum(axis=-1) - 1


# ProsQA's words.
_NAMES = "Alex Bob Carol Davis Eva Fae Gabriel Jack Max Oliver Polly Rex Sally Sam Stella Tom Wren"
_STEMS = (
    "bom boom brim chor dum fel fom ger gor grim gwom hil im jel jom ker lem lor num quim rem rom ror scrom shum ster "
    "stor ter tim tum vum wor wum yer yim yum zhor zum"
)
NAMES = tuple(_NAMES.split())
CONCEPTS = tuple(f"{stem}pus" for stem in _STEMS.split())


def draw_problems(
    rng: np.random.Generator, count: int, min_hops: int, max_hops: int
) -> list[Problem]:
    """Draw graphs and write them as ProsQA does: names are nodes without an edge to them, as both roots are there."""
    hops = draw_hops(rng, count, min_hops, max_hops, MAX_HOPS)
    adjacency, rows = _draw_adjacency(rng, hops), np.arange(count)
    adjacency[rows, :, 0] = adjacency[rows, :, hops + 1] = False
    return [_write_problem(item, rng) for item in _make_items(rng, hops, adjacency)]


def _write_problem(item: Item, rng: np.random.Generator) -> Problem:
    facts, query = item.question[1:-4], item.question[-3:]
    concepts = draw_symbols(rng, facts[1::3], CONCEPTS)
    words = concepts | draw_symbols(
        rng, (node for node in facts[::3] if node not in concepts), NAMES
    )

    def write(source: int, target: int) -> str:
        return f"{'Every ' if source in concepts else ''}{words[source]} is a {words[target]}."

    root, one, other = (words[node] for node in query)
    sentences = [write(*edge) for edge in zip(facts[::3], facts[1::3])]
    steps = tuple(write(*step[:2]) for step in item.steps)
    question = " ".join([*sentences, f"Is {root} a {one} or {other}?"])
    return Problem(question, steps, f"{root} is a {words[item.answer[0]]}.")


_EDGE = re.compile(r"(?:Every )?(\w+) is an? (\w+)\.")
_QUERY = re.compile(r"Is (\w+) an? (\w+) or (\w+)\?")


def _parse_sentence(pattern: re.Pattern[str], sentence: str, example: str) -> tuple[str, ...]:
    """Return the nodes that a sentence names."""
    if match := pattern.fullmatch(sentence):
        return match.groups()
    raise ValueError(
        f"unknown sentence {sentence!r}: expected one such as {example!r}; correct it or leave it out"
    )


def recode_prosqa(problem: Problem, rng: np.random.Generator) -> Item:
    """Write a published ProsQA problem in this vocabulary, with edges and path in the order of their sentences."""
    *facts, query = re.split(r"(?<=\.) ", problem.question.strip())
    edges = [_parse_sentence(_EDGE, fact, "Every gerpus is a terpus.") for fact in facts]
    root, *options = _parse_sentence(_QUERY, query, "Is Max a terpus or gerpus?")
    steps = [_parse_sentence(_EDGE, step, "Every gerpus is a terpus.") for step in problem.steps]
    nodes = [root, *(step[1] for step in steps)]
    if list(pairwise(nodes)) != steps or not set(steps) <= set(edges) or nodes[-1] not in options:
        raise ValueError(
            f"steps {' '.join(problem.steps)!r:.80} are no path of the facts to an option: correct them"
        )
    if problem.answer != f"{root} is a {nodes[-1]}.":
        raise ValueError(
            f"answer {problem.answer!r} contradicts the steps, which end in {nodes[-1]}: correct it"
        )

    symbols = draw_symbols(rng, chain(*edges, [root], options), SYMBOLS)
    ids = {node: _IDS[symbol] for node, symbol in symbols.items()}
    tokens = [token for source, target in edges for token in (ids[source], ids[target], _IDS["|"])]
    return Item(
        question=[
            _IDS["<q>"],
            *tokens[:-1],
            _IDS["?"],
            ids[root],
            *(ids[option] for option in options),
        ],
        steps=[[ids[source], ids[target], _IDS[";"]] for source, target in steps],
        anchors=[ids[node] for node in nodes[1:]],
        answer=[ids[nodes[-1]]],
        off_path=[ids[node] for node in ids if node not in (*nodes, *options)],
    )
