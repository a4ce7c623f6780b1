"""Greedy batched decoding with the key-value cache: problems in, answers out."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.apps.reasoning.arms import RowLayout, collate
from adlm.apps.reasoning.items import Markers
from adlm.apps.reasoning.losses import feed_back
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.denoising import continue_tokens
from adlm.diffusion.rng import CounterRng
from adlm.likelihood import compute_logits
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
    rows = [
        layout._replace(tokens=layout.tokens[: layout.prompt + 1]) for layout in layouts
    ]  # read up to the prompt
    batch = collate(rows, [()] * len(rows), feedback=feedback).to(device)
    inputs = feed_back(model, batch)
    prompts = torch.tensor([layout.prompt for layout in layouts])
    is_fixed, cache = torch.arange(length) < prompts[:, None], model.new_cache(len(rows), length)
    is_prompt = is_fixed.to(device)

    def predict(tokens: Tensor) -> Tensor:
        """Read the next tokens (B, n) and return the features (B, dim) of the last of them."""
        start, end = cache[0].used, cache[0].used + tokens.shape[1]
        if feedback and start < longest:
            tokens = torch.where(
                is_prompt[:, start:end, None], inputs[:, start:end], model.embed(tokens)
            )
        return model(tokens, cache=cache).final[:, -1]

    xt, rng = F.pad(batch.xt, (0, max_new_tokens)), CounterRng.from_seed(0, len(rows))
    sampling, head = SamplingParams(0.0), partial(compute_logits, model)
    with torch.autocast(device.type, enabled=False):
        for frame in continue_tokens(
            xt, predict, head, is_fixed=is_fixed, rng=rng, sampling=sampling
        ):
            is_end = ((frame.tokens == markers.end).cpu() & ~is_fixed & ~frame.is_masked).any(-1)
            is_cut = ~frame.is_masked[torch.arange(len(rows)), (prompts + max_new_tokens - 1)]
            if bool((is_end | is_cut).all()):
                break
    model.train(was_training)
    decoded = []
    for row, layout in zip(frame.tokens.tolist(), layouts, strict=True):
        written = row[layout.prompt : layout.prompt + max_new_tokens]
        written = written[: written.index(markers.end) + 1] if markers.end in written else written
        passes = len(written) + (len(layout.slots) if feedback else 0)
        decoded.append(
            Decoded(written, find_answer(layout.tokens[: layout.prompt] + written, markers), passes)
        )
    return decoded


def find_answer(tokens: Sequence[int], markers: Markers) -> list[int] | None:
    """Return the tokens between the last answer marker and the end marker."""
    if tokens[-1] != markers.end or markers.answer not in tokens:
        return None
    start = max(place for place, token in enumerate(tokens) if token == markers.answer) + 1
    return list(tokens[start:-1])
