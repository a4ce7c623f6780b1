"""The written example of the arms, and rows of random problems of different lengths."""

import numpy as np

from adlm.reasoning.items import WORD_MARKERS, Item, index_words

WORDS = (*map(str, range(10)), "|", "?", ";")
IDS = index_words(WORDS)
NAMES = {index: word for word, index in IDS.items()}
VOCABULARY = len(IDS) + 1  # with the mask
QUESTION = "<q> 3 5 | 1 4 | 0 3 | 6 8 | 5 7 | 4 6 ? 0 8 7"


def encode(text: str) -> list[int]:
    return [IDS[word] for word in text.split()]


EXAMPLE = Item(
    encode(QUESTION),
    [encode(step) for step in ("0 3 ;", "3 5 ;", "5 7 ;")],
    encode("3 5 7"),
    encode("7"),
    encode("4 6 8"),
)
FOREIGN = Item(encode("<q> 2 9 ? 2 9 1"), [encode("2 9 ;")], encode("9 1 2"), encode("9"), encode("1"))


def draw_examples(count: int, *, seed: int = 0, hops: int = 3) -> list[Item]:
    """Problems without meaning whose questions, traces and answers have different lengths."""
    rng = np.random.default_rng(seed)
    first = len(WORD_MARKERS)

    def draw(size: int) -> list[int]:
        return rng.integers(first, len(IDS), size).tolist()

    items = []
    for _ in range(count):
        steps = [draw(int(rng.integers(2, 5))) for _ in range(int(rng.integers(1, hops + 1)))]
        anchors = draw(len(steps))
        others = [token for token in range(first, len(IDS)) if token not in anchors][: len(steps)]
        question = [WORD_MARKERS.question or 0, *draw(int(rng.integers(1, 9)))]
        items.append(Item(question, steps, anchors, draw(int(rng.integers(1, 3))), others))
    return items
