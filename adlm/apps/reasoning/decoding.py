"""Greedy batched decoding with the key-value cache: problems in, answers out."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.apps.reasoning.arms import RowLayout, collate
from adlm.apps.reasoning.items import Markers
from adlm.apps.reasoning.losses import feed_back
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.samplers import LeftToRight
from adlm.diffusion.sampling import Row, RunningBatch
from adlm.models.evaluator import CausalEvaluator
from adlm.models.language_model import LanguageModel

DECODED_ROWS = 1024  # decoded at a time


class Decoded(NamedTuple):
    """What a model wrote after a prompt."""

    tokens: list[int]  # up to and with the end marker, if it came
    answer: (
        list[int] | None
    )  # the tokens between the answer's marker and the end; None: one of the two is missing
    passes: int  # forward passes one after the other: one for each token, and for each slot that is fed back


def decode_in_batches(
    lengths: Sequence[int], decode: Callable[[list[int]], list[Decoded]]
) -> list[Decoded]:
    """Decode rows, given by their numbers, in batches of similar lengths; return the results in the rows' order."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    parts = [order[start : start + DECODED_ROWS] for start in range(0, len(order), DECODED_ROWS)]
    results = dict(zip(order, chain.from_iterable(map(decode, parts)), strict=True))
    return [results[number] for number in range(len(lengths))]


@torch.no_grad()
def decode_greedily(
    model: LanguageModel,
    layouts: Sequence[RowLayout],
    markers: Markers,
    *,
    feedback: bool,
    max_new_tokens: int,
) -> list[Decoded]:
    """Continue the prompts of layouts until the end marker; a row's result does not depend on the other rows."""
    device = model.embed.weight.device
    longest = max(layout.prompt for layout in layouts)
    length = longest + max_new_tokens
    if length > model.config.length:
        problem = f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into this model's"
        raise ValueError(
            f"{problem} {model.config.length}: shorten the question, or generate fewer tokens"
        )
    was_training = model.training
    model.eval()
    prompts = [
        layout._replace(tokens=layout.tokens[: layout.prompt + 1]) for layout in layouts
    ]  # read up to the prompt
    batch = collate(prompts, [()] * len(layouts), feedback=feedback).to(device)
    inputs = feed_back(model, batch)
    model.train(was_training)

    rows = []
    for layout, tokens in zip(layouts, batch.xt.cpu(), strict=True):
        text = F.pad(tokens[: layout.prompt], (0, max_new_tokens))
        is_fixed = torch.arange(len(text)) < layout.prompt
        rows.append(Row(text, LeftToRight(), is_fixed, sampling=SamplingParams(0.0)))
    evaluator = FeedbackEvaluator(model, device, torch.float32)
    if feedback:
        for row, layout, embedded in zip(rows, layouts, inputs, strict=True):
            evaluator.inputs[row] = embedded[: layout.prompt]

    running = RunningBatch(evaluator, rows)
    while running.rows:
        with torch.autocast(device.type, enabled=False):
            frame = running.step()
        is_end = ((frame.tokens == markers.end).cpu() & frame.changed).any(-1)
        ended = [row for row, ends in zip(frame.rows, is_end.tolist(), strict=True) if ends]
        for i, row in enumerate(frame.rows):
            row.filled = frame.tokens[i, : len(row.tokens)]
        running.leave(ended)

    decoded = []
    for row, layout in zip(rows, layouts, strict=True):
        assert row.filled is not None
        written = row.filled[layout.prompt :].tolist()
        written = written[: written.index(markers.end) + 1] if markers.end in written else written
        passes = len(written) + (len(layout.slots) if feedback else 0)
        answer = find_answer(layout.tokens[: layout.prompt] + written, markers)
        decoded.append(Decoded(written, answer, passes))
    return decoded


class FeedbackEvaluator(CausalEvaluator):
    """A causal evaluator whose prompts may be embeddings: at latent slots, features that were fed back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inputs: dict[Row, Tensor] = {}  # (L, dim)

    def embed_prompts(self, tokens: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return the embeddings of prompts, where they have some."""
        if not self.inputs:
            return tokens
        embedded = pad_sequence([self.inputs[row] for row in rows], batch_first=True)
        return embedded.float()


def find_answer(tokens: Sequence[int], markers: Markers) -> list[int] | None:
    """Return the tokens between the last answer marker and the end marker."""
    if tokens[-1] != markers.end or markers.answer not in tokens:
        return None
    start = max(place for place, token in enumerate(tokens) if token == markers.answer) + 1
    return list(tokens[start:-1])
