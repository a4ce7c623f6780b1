"""The two stages of a model apart, so that what passes between them can be changed."""

from __future__ import annotations

from torch import Tensor

from adlm.models.language_model import LanguageModel, attention_mask, check_noise_level
from adlm.models.transformer import Rotary


def require_two_stages(model: LanguageModel, name: str) -> None:
    """A study of anchors needs a network that guesses them, in a model that restores hidden tokens."""
    if model.anchor is None:
        raise ValueError(
            f"{name} has one stage, no anchor network, and this study is about one: give a model trained with "
            "method=adlm"
        )
    if model.config.is_causal:
        raise ValueError(
            f"{name} writes from left to right, and this study hides tokens at random: give a masked two-stage model "
            "(method=adlm)"
        )


def first_stage(
    model: LanguageModel, tokens: Tensor, noise_level: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """The anchor network's features (B, L, dim): what `model(…)` calls `anchor`, and nothing behind it."""
    assert model.anchor is not None
    x = model.embed(tokens)
    if model.positions is not None:
        x = x + model.positions.weight[: tokens.shape[1]]
    told = _context(model, tokens.shape[0], tokens.shape[1], noise_level, valid, x)
    found: Tensor = model.anchor(x, *told, None)
    return found


def second_stage(
    model: LanguageModel, anchor: Tensor, noise_level: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """The denoiser's features (B, L, dim) for these features of the anchor network, whatever they come from."""
    told = _context(model, anchor.shape[0], anchor.shape[1], noise_level, valid, anchor)
    found: Tensor = model.denoiser(model.apply_bridge(anchor), *told, None)
    return found


def _context(
    model: LanguageModel, rows: int, length: int, noise_level: Tensor | None, valid: Tensor | None, at: Tensor
) -> tuple[Tensor | None, Rotary | None, Tensor | None]:
    """What every stack is told beside its input: noise level, angles, what may be read."""
    rotary = None
    if model.positions is None:
        cos, sin = model.rotary(at.device)
        rotary = cos[:length], sin[:length]
    level = check_noise_level(noise_level, rows) if model.config.time_conditioning else None
    return level, rotary, None if valid is None else attention_mask(valid, model.config.is_causal, False)
