"""Rows and small models on which anchors are tested."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.anchors import every_token, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.evaluate.anchors import measure_rows, measure_texts
from adlm.evaluate.perturbation import NONE, Perturbation
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
        batch = corrupt(ROWS, process, CounterRng.from_seed(1, 24), step)
        training_loss(model, batch, anchor_weight=0.1).total.backward()
        optimizer.step()
    return model.eval()


def held_out(model: LM) -> TensorRows:
    """Random rows to be measured on."""
    rng = torch.Generator().manual_seed(2)
    return TensorRows(torch.randint(1, 200, (6, model.model.config.length), generator=rng))


CHANGES = [NONE, Perturbation("noise", 0.5), Perturbation("permuted"), Perturbation("other_row")]
SAMPLING: dict[str, Any] = {"n": 4, "sampler": "ancestral", "length": 16, "steps": 4, "batch": 3}


@cache
def study() -> dict[str, Any]:
    """All measurements of a small model, with a Gen-PPL that nobody measured."""
    model, changes = lm("adlm"), [*CHANGES, Perturbation("stale", 2)]
    whole = {"model": model.name, "method": model.method, "step": 0}
    whole |= measure_rows(model, held_out(model), RULE, changes, draws=2)
    whole |= measure_texts(model, RULE, changes, SAMPLING, TextScorer(model.tokenizer))
    for sample in whole["samples"]:
        sample |= {"gen_ppl": 9.0, "gen_ppl_se": 1.0}
    return whole


def build_studies(points: Sequence[tuple[str, int, float, float]], **changes: Any) -> list[dict[str, Any]]:
    """Checkpoints of runs: (run, step, nll, accuracy)."""
    one = study() | {"samples": []} | changes
    return [
        one
        | {"model": f"runs/{run}/checkpoints/step-{step:08d}", "step": step}
        | {"losses": [one["losses"][0] | {"nll": nll}]}
        | {"guesses": [guess | {"accuracy": accuracy} for guess in one["guesses"]]}
        for run, step, nll, accuracy in points
    ]


RUNS = [(run, step, 6 - step / 2 + i / 10, step / 10 + i / 100) for i, run in enumerate("abcd") for step in (2, 4)]
