"""Model sizes by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Width and depth; a one-stage model has the anchor network's depth."""

    dim: int
    heads: int
    anchor_layers: int
    denoiser_layers: int
    cond_dim: int = 128
    bridge: str = "factored"


PRESETS = {
    "nano": Preset(dim=192, heads=6, anchor_layers=4, denoiser_layers=2, cond_dim=64, bridge="direct"),
    "small": Preset(dim=768, heads=12, anchor_layers=12, denoiser_layers=6),
    "medium": Preset(dim=1024, heads=16, anchor_layers=24, denoiser_layers=12),
    "large": Preset(dim=1280, heads=20, anchor_layers=36, denoiser_layers=18),
}
