"""Generated task *chains*: an individual's class hierarchy, an attribute of every class, true or false.

Two individuals `n0`, `n1` head one chain of classes each; a class has one attribute with a sign. The asked attribute is
h hops away from the asked individual: h - 1 is-a links and the attribute, with one sign, and equally far in the other
chain with the other sign; both chains have one class more. Facts are `n0 c3 |`, `c3 c7 |` (is a) and `c7 p2 |` (has;
has not: `c7 -p2 |`), shuffled, and the question ends with `? n0 -p2`. At one hop the individuals have the attribute
themselves. Exchanging the chains keeps every count and reverses the answer, so only the links tell it.

Steps, as many as hops: `n0 c3 ;`, `c3 c7 ;`, `c7 p2 ;`; anchors: the classes of the path and the answer,
`c3 c7 false`; off_path: the classes of the other chain, as many.
"""

import re
from itertools import chain, pairwise

import numpy as np

from adlm.apps.reasoning.datasets import Problem
from adlm.apps.reasoning.items import Item, draw_hops, draw_symbols, index_words

NAMES, CLASSES, ATTRIBUTES = (
    tuple(f"{kind}{i}" for i in range(n)) for kind, n in (("n", 2), ("c", 24), ("p", 24))
)
NEGATED = tuple(f"-{attribute}" for attribute in ATTRIBUTES)
WORDS = (*NAMES, *CLASSES, *ATTRIBUTES, *NEGATED, "true", "false", "|", "?", ";")
MAX_HOPS = len(ATTRIBUTES) // 2 - 1
LENGTH = 384  # tokens of a model that is trained from scratch
_IDS = index_words(WORDS)


def draw_items(rng: np.random.Generator, count: int, min_hops: int, max_hops: int) -> list[Item]:
    """Draw items whose asked attribute is min_hops to max_hops hops away from the individual, uniformly."""
    hops = draw_hops(rng, count, min_hops, max_hops, MAX_HOPS)
    height, holder = np.arange(max_hops + 1), (np.arange(count), np.s_[:], hops - 1)
    # By item, chain (asked, other) and height: the individual or class, its attribute and the attribute's sign.
    names = rng.permuted(np.tile([[0], [1]], (count, 1, 1)), axis=1) + _IDS["n0"]
    classes, attributes = (
        rng.random((count, len(words))).argsort(axis=1)[:, : 2 * size].reshape(count, 2, size)
        + _IDS[words[0]]
        for words, size in ((CLASSES, max_hops), (ATTRIBUTES, max_hops + 1))
    )
    nodes = np.concatenate([names, classes], axis=2)
    signs = rng.integers(2, size=nodes.shape)  # 1: negated
    signs[holder] = signs[holder][:, :1] ^ [0, 1]
    attributes[holder] = attributes[holder][:, :1]
    asked_signs = rng.integers(2, size=count)
    answers = _IDS["true"] + (asked_signs != signs[holder][:, 0])

    facts = np.zeros(
        (count, 2, 2, max_hops + 1, 3), int
    )  # by kind: the link to a node, its attribute
    links, properties = facts[:, :, 0, 1:], facts[:, :, 1]
    links[..., 0], links[..., 1] = nodes[..., :-1], nodes[..., 1:]
    properties[..., 0], properties[..., 1] = nodes, attributes + len(ATTRIBUTES) * signs
    facts[..., 2] = _IDS["|"]
    is_used = np.broadcast_to((height <= hops[:, None])[:, None, None], facts.shape[:-1]).copy()
    is_used[..., 0] = np.stack([np.zeros(count, bool), hops == 1], axis=1)[
        :, None
    ]  # nothing links to a name
    order = rng.random((count, 4 * len(height))).argsort(axis=1)
    shuffled = np.take_along_axis(facts.reshape(count, -1, 3), order[..., None], axis=1)
    is_used = np.take_along_axis(is_used.reshape(count, -1), order, axis=1)
    tokens, ends = shuffled[is_used].ravel().tolist(), (3 * is_used.sum(axis=1)).cumsum().tolist()

    queries = np.stack(
        [names[:, 0, 0], attributes[holder][:, 0] + len(ATTRIBUTES) * asked_signs], axis=1
    ).tolist()
    facts[..., 2] = _IDS[";"]
    traces, last_steps = links[:, 0].tolist(), properties[holder][:, 0].tolist()
    items, start = [], 0
    rows = zip(hops.tolist(), ends, queries, traces, last_steps, classes.tolist(), answers.tolist())
    for h, end, query, trace, last_step, (path, other), answer in rows:
        question = [_IDS["<q>"], *tokens[start : end - 1], _IDS["?"], *query]
        steps, anchors = [*trace[: h - 1], last_step], [*path[: h - 1], answer]
        items.append(Item(question, steps, anchors, [answer], off_path=other[:h]))
        start = end
    return items


_FACT = re.compile(
    r"(?:(?:Each|Every) )?(?P<subject>\w+) (?:is|are) (?P<negation>not )?(?:an? )?(?P<value>\w+)\."
)
_PLURAL = re.compile("puses$")


def _parse_fact(sentence: str) -> tuple[str, str, str]:
    """Return a sentence's subject, its class or attribute, and the sign of an attribute: "-" or "+", "" for a class."""
    match = _FACT.fullmatch(sentence)
    is_class = bool(match and match["value"].endswith(("pus", "puses")))
    if match is None or (is_class and match["negation"]):
        expected = "'Each yumpus is a lorpus.', 'Lorpuses are not red.' or 'Max is a yumpus.'"
        raise ValueError(
            f"unknown sentence {sentence!r}: expected one such as {expected}; correct it or leave it out"
        )
    subject, value = (_PLURAL.sub("pus", match[part]) for part in ("subject", "value"))
    sign = "" if is_class else "-" if match["negation"] else "+"
    return subject.lower() if subject.endswith("pus") else subject, value, sign


def recode_prontoqa(problem: Problem, rng: np.random.Generator) -> Item:
    """Write a published ProntoQA problem in this vocabulary."""
    body, mark, query = problem.question.partition(" True or false: ")
    if not mark:
        raise ValueError(
            f"question {problem.question[-60:]!r} has no 'True or false:': correct it or leave it out"
        )
    facts, asked = [_parse_fact(each) for each in re.split(r"(?<=\.) ", body)], _parse_fact(query)
    # A step is a conclusion and the next fact ("Max is a wumpus. Each wumpus is red."); the last has no fact.
    trace = [_parse_fact(each) for step in problem.steps for each in re.split(r"(?<=\.) ", step)]
    links = [trace[0], *trace[1::2]]
    is_chain = all(after[0] == before[1] for before, after in pairwise(links))
    if not (
        is_chain
        and links[-1][2]
        and set(links) <= set(facts)
        and asked[:2] == (links[0][0], links[-1][1])
    ):
        raise ValueError(
            f"steps {' '.join(problem.steps)!r:.80} do not lead to {query!r} by the facts: correct them"
        )
    answer = "true" if asked[2] == links[-1][2] else "false"
    if problem.answer.lower() != answer:
        raise ValueError(
            f"answer {problem.answer!r} contradicts the steps: expected {answer}; correct it"
        )

    words = [word for subject, value, _ in facts for word in (subject, value)]
    values = {value for _, value, sign in facts if sign}
    classes = [word for word in words if word.endswith("pus")]
    symbols = draw_symbols(rng, classes, CLASSES) | draw_symbols(
        rng, (w for w in words if w in values), ATTRIBUTES
    )
    symbols |= draw_symbols(rng, (word for word in words if word not in symbols), NAMES)

    def encode(fact: tuple[str, str, str], end: str = "") -> list[int]:
        subject, value, sign = fact
        return [
            _IDS[word]
            for word in (symbols[subject], sign.replace("+", "") + symbols[value], end)
            if word
        ]

    body_ids = list(chain.from_iterable(encode(fact, "|") for fact in facts))
    path = {value for _, value, _ in links}
    return Item(
        question=[_IDS["<q>"], *body_ids[:-1], _IDS["?"], *encode(asked)],
        steps=[encode(link, ";") for link in links],
        anchors=[_IDS[symbols[value]] for _, value, _ in links[:-1]] + [_IDS[answer]],
        answer=[_IDS[answer]],
        off_path=[_IDS[symbols[word]] for word in dict.fromkeys(classes) if word not in path],
    )
