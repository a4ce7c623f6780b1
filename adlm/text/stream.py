"""A batch of texts on its way: frames of tokens, seen as text and as stills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.denoising import Frame
from adlm.diffusion.plans import EPS
from adlm.generate import Predictor
from adlm.text.templates import WORD, Layout, classify_tokens
from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, TrajectoryFrame

MAX_POSITIONS = 1024  # positions whose logits exist at a time
MAX_COUNT = 5  # the paper's tau: a token that occurs more often in its text is no anchor


@dataclass(frozen=True)
class Guesses:
    """What a network takes every position for, likeliest first."""

    tokens: Tensor  # (B, L, k)
    probs: Tensor  # (B, L, k)
    is_anchor: Tensor  # (B, L): rare in the text as it is guessed to be

    def at(self, layout: Layout, row: int, place: int) -> tuple[tuple[str, float], ...]:
        """The guesses at one place as text, with their probabilities; a blank that is given there is left out."""
        names = [decode_token(layout.tokenizer, token) for token in self.tokens[row, place].tolist()]
        if layout.kinds[place] == WORD:
            names = [name.removeprefix(" ") for name in names]
        return tuple(zip(names, self.probs[row, place].tolist(), strict=True))


@dataclass(frozen=True)
class StreamStep:
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

    def trajectory_frame(self, row: int = 0) -> TrajectoryFrame:
        """One of the texts, as terminal, page and picture draw it."""
        layout, frame = self.layouts[row], self.frame
        masked, changed = frame.is_masked[row].tolist(), frame.changed[row].tolist()
        cells = []
        for place, text in layout.parts(frame.tokens[row, : len(layout)].tolist()):
            if place is None:  # given text without a token
                cells.append(TokenState(text or "", GIVEN))
                continue
            if masked[place]:
                state = REMASKED if changed[place] else HIDDEN
            else:
                state = GIVEN if layout.is_fixed[place] else REVEALED if changed[place] else VISIBLE
            is_anchor = self.guesses is not None and bool(self.guesses.is_anchor[row, place])
            guesses = self.guesses.at(layout, row, place) if self.guesses is not None and masked[place] else ()
            cells.append(TokenState(text or "", state, guesses, is_anchor))
        return TrajectoryFrame(self.step, int(frame.nfe[row]), tuple(cells))


@lru_cache(maxsize=65536)
def decode_token(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, as text."""
    return tokenizer.decode([token])


@torch.no_grad()
def predict_guesses(predictor: Predictor, frame: Frame, layouts: Sequence[Layout], count: int) -> Guesses:
    """The anchor network's guesses at a frame (one stage: the network's): one more evaluation, left out of the nfe."""
    model, tokens = predictor.model, frame.tokens
    lengths = torch.tensor([len(layout) for layout in layouts])
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    level = None
    if model.config.time_conditioning:
        share = frame.is_masked.sum(-1) / lengths
        level = -torch.log(1 - (1 - EPS) * share).to(tokens.device)
    padding = None if bool(valid.all()) else valid.to(tokens.device)
    features = model(tokens, level, valid=padding)
    found, head = features.final, model.head
    if features.anchor is not None and model.anchor_head is not None:
        found, head = features.anchor, model.anchor_head
    special = classify_tokens(layouts[0].tokenizer).special
    special = F.pad(special, (0, model.config.vocab_size - len(special)), value=True).to(tokens.device)
    best = [
        head(part).float().masked_fill(special, -torch.inf).softmax(-1).topk(count, -1)
        for part in found.flatten(0, 1).split(MAX_POSITIONS)
    ]
    probs, ids = (torch.cat(part).unflatten(0, tokens.shape) for part in zip(*best))
    likeliest = torch.where(frame.is_masked.to(tokens.device), ids[..., 0], tokens)
    is_anchor = rare_in_sequence(MAX_COUNT)(likeliest.cpu(), valid)
    return Guesses(ids.cpu(), probs.cpu(), is_anchor)
