"""One of the two processes of bench.host_time: sample with a network that costs nothing.

It reads the number of a case per line and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.versions import name_options

MAX_LOGIT_ROWS = 256  # rows of logits that exist at a time on a CPU


@dataclass(frozen=True)
class Case:
    """Rows that are sampled."""

    name: str
    rows: int
    length: int
    settings: dict[str, Any]
    is_served: bool = (
        False  # by the server's batch; for a version with one loop there is no difference
    )


@dataclass(frozen=True)
class Timing:
    """What sampling took: steps and evaluations of the row that took most."""

    seconds: float  # of the CPU, so that other processes count less
    frames: int
    steps: int
    nfe: int


LOOP = {"sampler": "remask_loop", "steps": 256, "options": {"eta": 0.02}}
SHORT_LOOP = {**LOOP, "steps": 64}
ANCESTRAL = {"sampler": "ancestral", "steps": 64}
CONFIDENCE = {"sampler": "confidence", "steps": 16}
CASES = (
    Case("remask_loop", 1, 128, LOOP),
    Case("remask_loop", 1, 1024, LOOP),
    Case("ancestral", 1, 1024, ANCESTRAL),
    Case("remask_conf", 1, 128, {"sampler": "remask_conf", "steps": 128}),
    Case("first_hitting", 1, 128, {"sampler": "first_hitting"}),
    Case("confidence", 1, 128, CONFIDENCE),
    Case("entropy_bounded", 1, 128, {"sampler": "entropy_bounded", "options": {"bound": 2.0}}),
    Case("ancestral, nearly all idle", 1, 16, {"sampler": "ancestral", "steps": 16384}),
    Case("remask_loop", 64, 128, SHORT_LOOP),
    Case("remask_loop", 64, 1024, SHORT_LOOP),
    Case("remask_loop, served", 64, 128, SHORT_LOOP, is_served=True),
    Case("remask_loop, served", 64, 1024, SHORT_LOOP, is_served=True),
    Case("in 4 blocks, served", 64, 128, {**SHORT_LOOP, "block": 32}, is_served=True),
    Case("ancestral, served", 64, 128, ANCESTRAL, is_served=True),
    Case("confidence, served", 64, 128, CONFIDENCE, is_served=True),
    Case("confidence, served", 64, 1024, CONFIDENCE, is_served=True),
    Case("first_hitting, served", 64, 128, {"sampler": "first_hitting"}, is_served=True),
)
MAX_LENGTH = 1026  # of the model: BOS and another token of a text are not generated


class NullNetwork:
    """A network that costs nothing and predicts the same everywhere, as both versions see one."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.mask_id = config.mask_id
        self.max_length = config.length
        self.max_batch = 1
        self.max_logit_rows = MAX_LOGIT_ROWS
        self.zeros = torch.zeros(64, config.length, 16)
        rng = torch.Generator().manual_seed(0)
        logits = torch.randn(1, config.vocab_size, generator=rng)
        logits[:, config.mask_id] = -torch.inf
        self.logits = logits.repeat(MAX_LOGIT_ROWS, 1)

    def open(self) -> NullNetwork:
        return self

    def predict(self, tokens: Tensor, *others: object) -> Tensor:
        return self.zeros[: tokens.shape[0], : tokens.shape[1]]

    features = predict

    def logits_at(self, features: Tensor) -> Tensor:
        return self.logits[: len(features)]

    def pad_limits(self, limits: Any) -> Any:
        return limits


def sample_in_one_loop(network: NullNetwork, rows: Any, *, is_served: bool) -> Timing:
    """Sample with the loop of adlm/diffusion/sampling.py."""
    sampling = import_module("adlm.diffusion.sampling")
    templates = import_module("adlm.text.templates")
    banned = templates.classify_tokens(rows[0].layout.tokenizer).banned
    frames = 0
    began = time.process_time()
    for _ in sampling.sample(network, rows, banned=banned):
        frames += 1
    seconds = time.process_time() - began
    return Timing(seconds, frames, max(row.steps for row in rows), max(row.nfe for row in rows))


def sample_in_two_loops(network: NullNetwork, request: Any, *, is_served: bool) -> Timing:
    """Sample with `denoise`, or with the batch of the server, which was written apart from it."""
    if not is_served:
        lm = import_module("adlm.text.lm")
        frames = 0
        began = time.process_time()
        for frame in lm.denoise_rows(network, request, request.rows):
            frames += 1
            last = frame
        seconds = time.process_time() - began
        return Timing(seconds, frames, last.step, int(last.nfe.max()))
    batches = import_module("adlm.serve.batches")
    rows = [batches.Row(layout, request, number) for layout, number in request.rows]
    frames = steps = nfe = 0
    began = time.process_time()
    batch = batches.MaskedBatch(network)
    batch.join(rows)
    while batch.rows:
        result = batch.step()
        frames += 1
        if bool(result.is_done.any()):
            steps = max(steps, int(result.step.max()))
            nfe = max(nfe, int(result.nfe.max()))
            batch.keep(~result.is_done)
    seconds = time.process_time() - began
    return Timing(seconds, frames, steps, nfe)


def choose_loop() -> Callable[..., Timing]:
    """Return how this version of the package samples."""
    if find_spec("adlm.diffusion.sampling") is None:
        return sample_in_two_loops
    return sample_in_one_loop


def main() -> None:
    import adlm

    torch.set_num_threads(1)
    lm = adlm.load(Path("models", "long"), device="cpu")
    network = NullNetwork(lm.model.config)
    run = choose_loop()
    print("ready", flush=True)
    with torch.no_grad():
        for line in sys.stdin:
            case = CASES[int(line)]
            settings = name_options({**case.settings, "top_p": 1.0, "n": case.rows, "seed": 0})
            name = "layout_rows" if hasattr(lm, "layout_rows") else "build_request"
            rows = getattr(lm, name)("", max_new_tokens=case.length, **settings)
            timing = run(network, rows, is_served=case.is_served)
            print(json.dumps(asdict(timing)), flush=True)


if __name__ == "__main__":
    main()
