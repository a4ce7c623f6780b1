"""A row of a running batch has the tokens, NFE and frames that it has alone, whoever joins and leaves and when."""

import random
from functools import cache

import pytest
import torch

from adlm import LM
from adlm.serve.batches import CausalBatch, MaskedBatch, Row
from adlm.text.generation import GenerationRequest
from adlm.text.lm import denoise_rows
from tests.text.models import lm
from tests.world import SAMPLING

ORDERS = ("first_hitting", "confidence", "margin", "entropy_bounded")
Outcome = tuple[list[int], int, int]  # tokens, NFE, frames


def build_requests(model: LM) -> list[GenerationRequest]:
    """Requests with every sampler, whole and block by block, and various lengths, seeds and sampling parameters."""
    rng = random.Random(0)
    requests = []
    for name, sampling in SAMPLING.items():
        for block in (None, 5):
            settings = {"block": block, "seed": rng.randrange(1000), **sampling}
            settings |= {"temperature": rng.choice([0, 0.7, 1]), "top_p": rng.choice([0.9, 1.0])}
            settings |= {"top_k": rng.choice([None, 5]), "n": rng.choice([1, 2])}
            if name not in ORDERS:
                compat = {"compat": rng.choice([False, True])}
                settings["options"] = (sampling["options"] or {}) | compat
            if block is None:
                requests.append(
                    model.build_request(
                        template=rng.choice(["a ___{4} b ___{3}", "___{9}."]), **settings
                    )
                )
            prompt, length = "the cat"[: rng.randrange(7)], rng.randrange(3, 20)
            requests.append(model.build_request(prompt, max_new_tokens=length, **settings))
    return requests


def run_alone(model: LM, requests: list[GenerationRequest]) -> list[Outcome]:
    outcomes = []
    for request in requests:
        for each in request.rows:
            *_, frame = denoise_rows(model.predictor, request, [each])
            outcomes.append((frame.tokens[0].tolist(), int(frame.nfe[0]), frame.step))
    return outcomes


@cache
def masked_case(is_conditioned: bool) -> tuple[LM, list[GenerationRequest], list[Outcome]]:
    model = lm("adlm", time_conditioning=is_conditioned)
    requests = build_requests(model)
    return model, requests, run_alone(model, requests)


def run_together(
    model: LM,
    requests: list[GenerationRequest],
    joins: list[int],
    leaves: dict[int, int] | None = None,
) -> list[Outcome | None]:
    """Let every row join at its step, and some leave unfinished after so many steps."""
    rows = [Row(layout, request, number) for request in requests for layout, number in request.rows]
    batch = (CausalBatch if model.row_format.is_causal else MaskedBatch)(model.predictor)
    outcomes: dict[Row, Outcome] = {}
    tick, waiting, leaving = (
        0,
        list(zip(joins, rows)),
        {rows[i]: step for i, step in (leaves or {}).items()},
    )
    while waiting or batch.rows:
        if joining := [row for step, row in waiting if step <= tick]:
            batch.join(joining)
            waiting = [(step, row) for step, row in waiting if step > tick]
        if batch.rows:
            present, result = batch.rows, batch.step()
            for i in result.is_done.nonzero()[:, 0].tolist():
                length = len(present[i].layout)
                outcomes[present[i]] = (
                    result.tokens[i, :length].tolist(),
                    int(result.nfe[i]),
                    int(result.step[i]),
                )
            gone = torch.tensor([leaving.get(row, 10**6) <= tick for row in present])
            if bool((gone | result.is_done).any()):
                batch.keep(~(gone | result.is_done))
        tick += 1
    return [outcomes.get(row) for row in rows]


@pytest.mark.parametrize("is_conditioned", [False, True])
@pytest.mark.parametrize("spread", [1, 12])
def test_rows_with_all_samplers_share_a_batch(is_conditioned: bool, spread: int) -> None:
    model, requests, alone = masked_case(is_conditioned)
    rng = random.Random(spread)
    assert run_together(model, requests, [rng.randrange(spread) for _ in alone]) == alone


def test_rows_may_leave_at_any_step() -> None:
    model, requests, alone = masked_case(False)
    rng = random.Random(1)
    joins = [rng.randrange(6) for _ in alone]
    leaves = {i: joins[i] + rng.randrange(4) for i in range(0, len(alone), 2)}
    together = run_together(model, requests, joins, leaves)
    assert together[1::2] == alone[1::2]
    assert any(each is None for each in together[::2])
    assert all(each in (None, other) for each, other in zip(together, alone, strict=True))


def test_settled_text_does_not_change() -> None:
    """What a batch calls settled is the beginning of the final tokens, for remasking plans too."""
    model, requests, alone = masked_case(False)
    rows = [Row(layout, request, number) for request in requests for layout, number in request.rows]
    batch, final = MaskedBatch(model.predictor), dict(zip(rows, alone, strict=True))
    batch.join(rows)
    early = set()
    while batch.rows:
        present, result = batch.rows, batch.step()
        for row, ids, settled, done in zip(
            present, result.tokens.tolist(), result.settled.tolist(), result.is_done
        ):
            assert ids[:settled] == final[row][0][:settled]
            assert not done or settled == len(row.layout)
            if not done and settled > row.layout.is_fixed.index(False):
                early.add(row.request.description["sampler"])
        batch.keep(~result.is_done)
    assert {"ancestral", "ddpm", "confidence", "first_hitting"} <= early


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_rows_join_at_different_times(method: str) -> None:
    model = lm(method)
    settings = [{"seed": k, "temperature": 0.5 + 0.5 * (k % 2), "n": 2} for k in range(1, 5)]
    requests = [
        model.build_request("the cat"[: k + 1], max_new_tokens=5 + k, **each)
        for k, each in enumerate(settings)
    ]
    alone = run_alone(model, requests)
    assert run_together(model, requests, [0] * len(alone)) == alone
    assert run_together(model, requests, list(range(len(alone)))) == alone
    assert run_together(model, requests, [0] * len(alone), {0: 1})[1:] == alone[1:]
