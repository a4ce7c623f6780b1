"""Texts while they are sampled: token frames as text and as trajectory frames."""

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
from adlm.diffusion.plans import mean_noise_level
from adlm.generate import Predictor
from adlm.text.templates import WORD, Layout, classify_tokens
from adlm.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE, TokenState, TrajectoryFrame

MAX_POSITIONS = 1024  # whose logits exist at a time
MAX_COUNT = 5  # the paper's tau


@dataclass(frozen=True)
class Guesses:
    """A network's top predictions for every position, likeliest first."""

    tokens: Tensor  # (B, L, k)
    probs: Tensor  # (B, L, k)
    is_anchor: Tensor  # (B, L): rare in the predicted text

    def at(self, layout: Layout, row: int, position: int) -> tuple[tuple[str, float], ...]:
        """Return the guesses at one position as text, with their probabilities, without a blank that is given there."""
        names = [decode_token(layout.tokenizer, token) for token in self.tokens[row, position].tolist()]
        if layout.kinds[position] == WORD:
            names = [name.removeprefix(" ") for name in names]
        return tuple(zip(names, self.probs[row, position].tolist(), strict=True))


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
        """Network evaluations of each text so far."""
        nfe: list[int] = self.frame.nfe.tolist()
        return nfe

    def trajectory_frame(self, row: int = 0) -> TrajectoryFrame:
        """Return one of the texts as terminal, player and GIF draw it."""
        layout, frame = self.layouts[row], self.frame
        masked, changed = frame.is_masked[row].tolist(), frame.changed[row].tolist()
        states = []
        for position, text in layout.parts(frame.tokens[row, : len(layout)].tolist()):
            if position is None:  # given text without a token
                states.append(TokenState(text or "", GIVEN))
                continue
            if masked[position]:
                state = REMASKED if changed[position] else HIDDEN
            else:
                state = GIVEN if layout.is_fixed[position] else REVEALED if changed[position] else VISIBLE
            is_anchor = self.guesses is not None and bool(self.guesses.is_anchor[row, position])
            guesses = self.guesses.at(layout, row, position) if self.guesses is not None and masked[position] else ()
            states.append(TokenState(text or "", state, guesses, is_anchor))
        return TrajectoryFrame(self.step, int(frame.nfe[row]), tuple(states))


@lru_cache(maxsize=65536)
def decode_token(tokenizer: Tokenizer, token: int) -> str:
    """Decode one token."""
    return tokenizer.decode([token])


@torch.no_grad()
def predict_guesses(predictor: Predictor, frame: Frame, layouts: Sequence[Layout], count: int) -> Guesses:
    """Predict the likeliest tokens of a frame with the anchor network (one stage: the network), not counted as NFE."""
    model, tokens = predictor.model, frame.tokens
    lengths = torch.tensor([len(layout) for layout in layouts])
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    level = None
    if model.config.time_conditioning:
        level = mean_noise_level(frame.is_masked.sum(-1) / lengths).to(tokens.device)
    padding = None if bool(valid.all()) else valid.to(tokens.device)
    if model.anchor_head is None:
        features, head = model(tokens, level, valid=padding).final, model.head
    else:
        features, head = model.anchor_features(tokens, level, valid=padding), model.anchor_head
    special = classify_tokens(layouts[0].tokenizer).special
    special = F.pad(special, (0, model.config.vocab_size - len(special)), value=True).to(tokens.device)
    best = [
        head(part).float().masked_fill(special, -torch.inf).softmax(-1).topk(count, -1)
        for part in features.flatten(0, 1).split(MAX_POSITIONS)
    ]
    probs, ids = (torch.cat(part).unflatten(0, tokens.shape) for part in zip(*best))
    likeliest = torch.where(frame.is_masked.to(tokens.device), ids[..., 0], tokens)
    is_anchor = rare_in_sequence(MAX_COUNT)(likeliest.cpu(), valid)
    return Guesses(ids.cpu(), probs.cpu(), is_anchor)
