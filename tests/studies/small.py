"""Rows and small models that the studies are tested on."""

from typing import Any

import torch

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.anchors import every_token, rare_in_sequence
from adlm.diffusion.masking import corrupt
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear
from adlm.methods import training_loss
from adlm.models.language_model import LanguageModel
from adlm.studies.anchors import Extent, Study, study_anchors
from adlm.studies.writing import Assessor
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


def trained() -> LanguageModel:
    """A model that has learned its few rows, so that what it is told matters."""
    model = small(scale=0.3).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = corrupt(ROWS, LogLinear(), CounterRng.of(1, 24), step, mask_id=VOCAB - 1, anchor_rule=every_token())
        optimizer.zero_grad()
        training_loss(model, batch, anchor_weight=0.1).total.backward()
        optimizer.step()
    return model.eval()


def held_out(writer: LM) -> TensorRows:
    """Random rows to be measured on."""
    rng = torch.Generator().manual_seed(2)
    return TensorRows(torch.randint(1, 200, (6, writer.model.config.length), generator=rng))


def studied(**changes: Any) -> Study:
    """A study of a small model with all of its parts."""
    writer = lm("adlm", **changes)
    extent = Extent((0.5,), (2,), draws=2, samples=4, length=16, steps=4, batch=4)
    return study_anchors(writer, held_out(writer), RULE, extent, Assessor(writer.tokenizer, lambda texts: (9.0, 1.0)))
