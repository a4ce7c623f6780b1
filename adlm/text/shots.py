"""A batch of texts on its way: frames of tokens, seen as text and as stills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.denoise import Frame
from adlm.generate import Predictor
from adlm.stills import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, Cell, Still
from adlm.text.templates import Layout, classes_of

MAX_COUNT = 5  # the paper's tau: a token that occurs more often in its text is no anchor


@dataclass(frozen=True)
class Guesses:
    """What a network takes every position for, likeliest first."""

    tokens: Tensor  # (B, L, k)
    probs: Tensor  # (B, L, k)
    is_anchor: Tensor  # (B, L): rare in the text as it is guessed to be


@dataclass(frozen=True)
class Shot:
    """The texts after one step; step 0 is before the first."""

    step: int
    frame: Frame
    layouts: tuple[Layout, ...]
    guesses: Guesses | None = None

    @property
    def texts(self) -> list[str]:
        """The texts so far, hidden tokens as blocks."""
        return [
            layout.text(ids[: len(layout)])
            for layout, ids in zip(self.layouts, self.frame.tokens.tolist(), strict=True)
        ]

    @property
    def nfe(self) -> list[int]:
        """Network evaluations that each text has had."""
        found: list[int] = self.frame.nfe.tolist()
        return found

    def still(self, row: int = 0) -> Still:
        """One of the texts, as terminal, page and picture draw it."""
        layout, frame = self.layouts[row], self.frame
        texts = layout.texts(frame.tokens[row, : len(layout)].tolist())
        masked, changed = frame.is_masked[row].tolist(), frame.changed[row].tolist()
        places = [place for span in layout.spans for place in range(span.start, span.end)]
        cells = []
        for place in places:
            is_given = layout.is_fixed[place]
            if masked[place]:
                state = REMASKED if changed[place] else HIDDEN
            else:
                state = GIVEN if is_given else REVEALED if changed[place] else VISIBLE
            guesses: tuple[tuple[str, float], ...] = ()
            is_anchor = False
            if self.guesses is not None:
                is_anchor = bool(self.guesses.is_anchor[row, place])
                if masked[place]:
                    tokens, probs = (x[row, place].tolist() for x in (self.guesses.tokens, self.guesses.probs))
                    guesses = tuple(
                        (name_of(layout.tokenizer, token), prob) for token, prob in zip(tokens, probs, strict=True)
                    )
            cells.append(Cell(texts[place] or "", state, guesses, is_anchor))
        return Still(self.step, int(frame.nfe[row]), tuple(cells))


@lru_cache(maxsize=65536)
def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, as text."""
    return tokenizer.decode([token])


@torch.no_grad()
def guessed(predictor: Predictor, frame: Frame, layouts: Sequence[Layout], count: int) -> Guesses:
    """The anchor network's guesses at a frame (one stage: the network's): one more evaluation, left out of the nfe."""
    model, tokens = predictor.model, frame.tokens
    lengths = torch.tensor([len(layout) for layout in layouts])
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    level = None
    if model.config.time_conditioning:
        share = frame.is_masked.sum(-1) / lengths
        level = -torch.log(1 - (1 - 1e-3) * share).to(tokens.device)
    padding = None if bool(valid.all()) else valid.to(tokens.device)
    features = model(tokens, level, valid=padding)
    if features.anchor is not None and model.anchor_head is not None:
        logits = model.anchor_head(features.anchor)
    else:
        logits = model.head(features.final)
    special = classes_of(layouts[0].tokenizer).special.to(logits.device)
    probs, ids = logits.float().masked_fill(special[: logits.shape[-1]], -torch.inf).softmax(-1).topk(count, -1)
    likeliest = torch.where(frame.is_masked.to(tokens.device), ids[..., 0], tokens)
    is_anchor = rare_in_sequence(MAX_COUNT)(likeliest.cpu(), valid)
    return Guesses(ids.cpu(), probs.cpu(), is_anchor)
