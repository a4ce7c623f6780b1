"""Rows and small models on which anchors are tested."""

from typing import Any

import torch

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.anchors import every_token, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.evaluate.anchors import AnchorSettings, measure_anchors
from adlm.evaluate.sample_metrics import TextScorer
from adlm.models.language_model import LanguageModel
from adlm.text.lm import LM
from tests.text.models import lm
from tests.world import random_model

VOCAB, LENGTH = 30, 12
ROWS = torch.randint(VOCAB - 1, (24, LENGTH), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(24) % 9 + 4
PADDED = TensorRows(torch.where(is_valid(LENGTHS, LENGTH), ROWS, 0), LENGTHS)
RULE = rare_in_sequence(1)


def small(method: str = "adlm", **changes: Any) -> LanguageModel:
    size: dict[str, Any] = {"vocab_size": VOCAB, "mask_id": VOCAB - 1, "dim": 16, "length": LENGTH, "scale": 0.6}
    return random_model(method, **(size | changes))


def train_small() -> LanguageModel:
    """A model that has learned its few rows, so that its anchor features matter."""
    model = small(scale=0.3).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    process = ForwardProcess(VOCAB - 1, anchor_rule=every_token())
    for step in range(60):
        optimizer.zero_grad()
        training_loss(
            model, corrupt(ROWS, process, CounterRng.from_seed(1, 24), step), anchor_weight=0.1
        ).total.backward()
        optimizer.step()
    return model.eval()


def held_out(model: LM) -> TensorRows:
    """Random rows to be measured on."""
    rng = torch.Generator().manual_seed(2)
    return TensorRows(torch.randint(1, 200, (6, model.model.config.length), generator=rng))


def measure_small(**changes: Any) -> dict[str, Any]:
    """All measurements of a small model."""
    model = lm("adlm", **changes)
    settings = AnchorSettings((0.5,), (2,), draws=2, samples=4, length=16, steps=4, batch=4)
    study = measure_anchors(model, held_out(model), RULE, settings, TextScorer(model.tokenizer))
    for sample in study["samples"]:
        sample |= {"gen_ppl": 9.0, "gen_ppl_se": 1.0}
    return study
