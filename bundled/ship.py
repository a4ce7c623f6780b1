"""Export a trained model for the package: `python bundled/ship.py RUN FOLDER --data DATA`.

Modulations are folded into the matrices, which are stored as int8 with one scale per row. The logits are multiplied by
the factor with the lowest NELBO on validation rows (temperature scaling, Guo et al. 2017): a trained model may be over-
or underconfident.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import adlm
from adlm.data.batches import RowDataset
from adlm.likelihood import estimate_nll
from adlm.models.folder import export_model, load_model
from adlm.models.language_model import LanguageModel

FACTORS = [round(0.9 + 0.02 * i, 2) for i in range(21)]


@torch.no_grad()
def scale_logits(model: LanguageModel, factor: float) -> None:
    """Multiply the logits of a folded model with a tied head (without a bias) by a factor, in place."""
    assert model.config.tied and model.config.cond_dim is None
    for parameter in model.denoiser.norm.parameters():
        parameter.mul_(factor)


def fit_logit_factor(
    model: LanguageModel, rows: RowDataset, *, batch: int = 256, max_rows: int = 1024
) -> float:
    """Return the factor of the logits with the lowest NELBO on the first rows, all with the same noise."""
    nlls = {}
    for factor in FACTORS:
        scale_logits(model, factor)
        nlls[factor] = estimate_nll(
            model, rows, batch=batch, draws=2, seed=1, max_rows=max_rows
        ).nll
        scale_logits(model, 1 / factor)
    best = min(FACTORS, key=nlls.__getitem__)
    if best in (FACTORS[0], FACTORS[-1]):
        print(f"warning: the best factor, {best}, is at the end of the range that was tried")
    count = min(max_rows, len(rows))
    print(
        f"logits × {best}: {nlls[best]:.4f} nats per token on {count} validation rows; × 1: {nlls[1.0]:.4f}"
    )
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path, help="run or checkpoint folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--data", required=True, help="folder written by adlm prepare, for its validation rows"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device",
        default=device,
        help="device that fits the factor [default: cuda if there is one]",
    )
    options = parser.parse_args()
    loaded = load_model(options.run)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    model = loaded.model.fold().to(options.device)
    factor = fit_logit_factor(model, adlm.open_data(options.data).rows("valid"))
    scale_logits(model, factor)
    export_model(replace(loaded, model=model.cpu()), options.folder)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(
        f"{options.folder}: step {loaded.step}, {parameters:,} parameters as trained, {size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
