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
from adlm.evaluate.anchor_study import measure_rows, measure_texts
from adlm.evaluate.perturbation import NONE, Perturbation
from adlm.evaluate.results import ProgressCallback, ignore_progress
from adlm.evaluate.sample_metrics import TextScorer
from adlm.models.language_model import LanguageModel
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


CHANGES = [NONE, Perturbation("noise", 0.5), Perturbation("permuted"), Perturbation("other_row")]


def measure(
    changes: Sequence[Perturbation], sampler: str, on_progress: ProgressCallback = ignore_progress
) -> dict[str, Any]:
    """All measurements of a small model on random rows."""
    model, rng = lm("adlm"), torch.Generator().manual_seed(2)
    rows = TensorRows(torch.randint(1, 200, (6, model.model.config.length), generator=rng))
    sampling = {"n": 4, "sampler": sampler, "length": 16, "steps": 4, "batch": 3}
    of_texts = measure_texts(model, RULE, changes, sampling, TextScorer(model.tokenizer), on_progress)
    return measure_rows(model, rows, RULE, changes, on_progress=on_progress, draws=2) | of_texts


@cache
def study() -> dict[str, Any]:
    """Measurements of a model, with a made-up Gen-PPL."""
    whole = measure([*CHANGES, Perturbation("stale", 2)], "ancestral") | {"model": "small", "step": 0}
    scored = [sample | {"gen_ppl": 9.0, "gen_ppl_se": 1.0} for sample in whole["samples"]]
    return whole | {"samples": scored}


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
