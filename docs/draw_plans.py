"""Draw docs/plans.svg: the visible share of a text under each plan, before any network runs (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from adlm.diffusion.samplers import build_sampler

STEPS = 128
PLANS = {
    "ancestral": {},
    "forward_backward": {},
    "remask_cap": {"eta": 0.02},
    "remask_rescale": {"eta": 0.05},
    "remask_loop": {},
    "dfm": {},
}


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "adlm", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(
        2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, options) in zip(axes.flat, PLANS.items(), strict=True):
        plan = build_sampler(name, steps=STEPS, **options)
        visible, remasked = [], []
        share = torch.tensor(0.0, dtype=torch.float64)
        for step in plan:
            reveal, remask = (1 - share) * step.reveal_prob, share * step.remask_prob
            share = share + reveal - remask
            visible.append(share)
            remasked.append(remask)
        place = torch.arange(1, len(plan) + 1) / len(plan)
        axis.fill_between(place, visible, color="#4477aa", alpha=0.25, linewidth=0)
        axis.plot(place, visible, color="#4477aa", label="visible")
        axis.plot(
            place, torch.stack(remasked).cumsum(0), color="#cc6677", label="remasked, cumulative"
        )
        axis.set_title(f"{name} {', '.join(f'{k} = {v}' for k, v in options.items())}", fontsize=9)
        axis.set_ylim(0, 2)
    axes[0, 0].legend(frameon=False, loc="upper left", fontsize=8)
    figure.supxlabel(f"share of the steps ({STEPS} requested)")
    figure.supylabel("expected share of the text")
    figure.savefig(Path(__file__).parent / "plans.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
