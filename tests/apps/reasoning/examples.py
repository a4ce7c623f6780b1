"""The written example of the arms, random problems of different lengths, and a tiny model."""

import numpy as np
import torch
from torch import Tensor

from adlm.apps.reasoning.arms import RowLayout
from adlm.apps.reasoning.items import WORD_MARKERS, Item, index_words
from adlm.models.language_model import Features, LanguageModel, ModelConfig

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
FOREIGN = Item(
    encode("<q> 2 9 ? 2 9 1"), [encode("2 9 ;")], encode("9 1 2"), encode("9"), encode("1")
)


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


def build_model(kind: str = "rotary", *, seed: int = 0, length: int = 64) -> LanguageModel:
    """A tiny causal model with random weights, none of them zero; "two stages" is A2R."""
    layers = (
        {"anchor_layers": 1, "denoiser_layers": 1}
        if kind == "two stages"
        else {"denoiser_layers": 2}
    )
    positions = "learned" if kind == "learned" else "rotary"
    sizes = {
        "dim": 16,
        "heads": 2,
        "length": length,
        "cond_dim": None,
        "bridge": "direct",
        "dropout": 0.0,
    }
    config = ModelConfig(
        vocab_size=VOCABULARY,
        mask_id=VOCABULARY - 1,
        is_causal=True,
        positions=positions,
        **sizes,
        **layers,
    )
    model, rng = LanguageModel(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


def unroll(model: LanguageModel, layout: RowLayout, *, feedback: bool) -> Features:
    """The features of a row, one position after the other, each by a pass over all that comes before it."""
    inputs: list[Tensor] = []
    for position, token in enumerate(layout.tokens):
        if feedback and position in layout.slots:
            inputs.append(model(torch.stack(inputs)[None]).final[0, -1])
        else:
            inputs.append(model.embed(torch.tensor(token)))
    return model(torch.stack(inputs)[None])
