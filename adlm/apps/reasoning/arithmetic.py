"""Generated task *arithmetic*: a chain of assignments modulo 100, in shuffled order.

Question `<q> c = b * 7 | a = 13 + 4 | b = a - 9 ? c`, steps `a = 17 ;`, `b = 8 ;`, `c = 56 ;`, anchors `17 8 56`,
answer `56`, off_path numbers of the question that are no value of the path. Every assignment uses the variable before
it, so all are needed, and maps its values one to one (factors are coprime to 100), so the answer is uniform. Constants
have one digit: there are 2,100 different assignments of a value, few enough to be learned in some thousand steps.
"""

import string

import numpy as np

from adlm.apps.reasoning.items import Item, draw_hops, index_words

MODULUS = 100
WORDS = (*map(str, range(MODULUS)), *string.ascii_lowercase, "=", "+", "-", "*", "|", "?", ";")
MAX_HOPS = len(string.ascii_lowercase)
LENGTH = 160  # tokens of a model that is trained from scratch
OPERATORS = "+-*"
CONSTANTS = np.arange(1, 10)  # of + and -
FACTORS = CONSTANTS[np.gcd(CONSTANTS, MODULUS) == 1][1:]  # 3, 7, 9
_IDS = index_words(WORDS)


def draw_items(rng: np.random.Generator, count: int, min_hops: int, max_hops: int) -> list[Item]:
    """Draw items of min_hops to max_hops assignments each, uniformly."""
    hops = draw_hops(rng, count, min_hops, max_hops, MAX_HOPS)
    shape = count, max_hops
    operators = rng.integers(len(OPERATORS), size=shape)
    constants = np.where(operators == 2, rng.choice(FACTORS, shape), rng.choice(CONSTANTS, shape))
    first = rng.integers(MODULUS, size=count)
    values, value = np.empty(shape, int), first
    for step in range(max_hops):
        constant = constants[:, step]
        value = (
            np.choose(operators[:, step], (value + constant, value - constant, value * constant))
            % MODULUS
        )
        values[:, step] = value
    variables = rng.random((count, MAX_HOPS)).argsort(axis=1)[:, :max_hops] + _IDS["a"]
    values, constants, first = values + _IDS["0"], constants + _IDS["0"], first + _IDS["0"]

    assignments = np.empty((*shape, 6), int)  # variable = operand operator constant |
    assignments[..., 0] = variables
    assignments[..., 1] = _IDS["="]
    assignments[:, 0, 2] = first
    assignments[:, 1:, 2] = variables[:, :-1]
    assignments[..., 3] = np.array([_IDS[operator] for operator in OPERATORS])[operators]
    assignments[..., 4] = constants
    assignments[..., 5] = _IDS["|"]
    order = np.where(np.arange(max_hops) < hops[:, None], rng.random(shape), 2).argsort(axis=1)
    assignments = np.take_along_axis(assignments, order[..., None], axis=1)
    assignments[np.arange(count), hops - 1, 5] = _IDS["?"]
    steps = np.stack(
        [variables, np.full(shape, _IDS["="]), values, np.full(shape, _IDS[";"])], axis=2
    )

    items = []
    rows = zip(
        hops.tolist(), assignments.reshape(count, -1).tolist(), steps.tolist(), values.tolist()
    )
    for row, (length, question, trace, path) in enumerate(rows):
        question = [_IDS["<q>"], *question[: 6 * length], trace[length - 1][0]]
        anchors, others = path[:length], [*constants[row, :length].tolist(), int(first[row])]
        off_path = [constant for constant in others if constant not in anchors][:length]
        items.append(
            Item(question, trace[:length], anchors, answer=anchors[-1:], off_path=off_path)
        )
    return items
