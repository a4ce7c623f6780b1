"""Sizes by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Width and depth; a one-stage model has the anchor network's depth alone."""

    dim: int
    heads: int
    anchor_layers: int
    denoiser_layers: int
    cond_dim: int = 128
    bridge: str = "factored"


SIZES = {
    "nano": Size(dim=192, heads=6, anchor_layers=4, denoiser_layers=2, cond_dim=64, bridge="direct"),
    "small": Size(dim=768, heads=12, anchor_layers=12, denoiser_layers=6),
    "medium": Size(dim=1024, heads=16, anchor_layers=24, denoiser_layers=12),
    "large": Size(dim=1280, heads=20, anchor_layers=36, denoiser_layers=18),
}
