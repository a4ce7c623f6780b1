"""A row of a running batch has the tokens, evaluations and steps that it has alone.

Whoever joins and leaves, and when.
"""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import pytest

from adlm import LM
from tests.laws import adapter
from tests.laws.adapter import Outcome, Progress, RunningBatch
from tests.laws.commands import PLANS, QUICK
from tests.laws.texts import FIXTURES, model

OLD_ROWS = FIXTURES / "rows.jsonl"


@dataclass(frozen=True)
class Request:
    """A row before it is sampled: its sampler, the plan of its texts, its place among them."""

    sampler: str
    plan: Any
    place: int


def plan_many(lm: LM) -> list[tuple[str, Any]]:
    """Plan texts with every sampler, whole and in blocks, of various lengths, seeds and draws."""
    rng = random.Random(0)
    plans = []
    for name, (settings, options) in QUICK.items():
        for block in (None, 5):
            shared: dict[str, Any] = {"sampler": name, "block": block, "seed": rng.randrange(1000)}
            shared |= settings
            shared |= {"temperature": rng.choice([0, 0.7, 1]), "top_p": rng.choice([0.9, 1.0])}
            shared |= {"top_k": rng.choice([None, 5]), "n": rng.choice([1, 2])}
            own = dict(options)
            if name in PLANS:
                own["compat"] = rng.choice([False, True])
            if block is None:
                template = rng.choice(["a ___{4} b ___{3}", "___{9}."])
                filling = adapter.plan_texts(lm, template=template, options=own, **shared)
                plans.append((name, filling))
            prompt, length = "the cat"[: rng.randrange(7)], rng.randrange(3, 20)
            shared["max_new_tokens"] = length
            plans.append((name, adapter.plan_texts(lm, prompt, options=own, **shared)))
    return plans


def run_alone(lm: LM, plans: list[tuple[str, Any]]) -> tuple[list[Request], list[Outcome]]:
    """Return all rows of plans and what becomes of each alone."""
    rows, alone = [], []
    for name, plan in plans:
        outcomes = adapter.sample_alone(lm, plan)
        rows += [Request(name, plan, place) for place in range(len(outcomes))]
        alone += outcomes
    return rows, alone


@cache
def masked_case(name: str) -> tuple[LM, list[Request], list[Outcome]]:
    """Return a model, rows for it, and what becomes of each alone."""
    lm = model(name)
    return lm, *run_alone(lm, plan_many(lm))


@pytest.mark.parametrize("name", ["mdlm", "timed"])
def test_rows_are_those_of_an_earlier_version(name: str) -> None:
    """Tokens, evaluations and steps, in which those where nothing changes count too."""
    _, rows, alone = masked_case(name)
    records = [json.loads(line) for line in OLD_ROWS.read_text("utf-8").splitlines()]
    old = [each for each in records if each["model"] == name]
    for row, outcome, expected in zip(rows, alone, old, strict=True):
        found = {"model": name, "sampler": row.sampler, **asdict(outcome)}
        assert found == expected


def run_together(
    lm: LM,
    rows: list[Request],
    joins: list[int],
    leaves: dict[int, int] | None = None,
) -> tuple[dict[int, Outcome], list[Progress]]:
    """Let every row join at its step and some leave after a step; return what became of them."""
    batch, tick, shown = RunningBatch(lm), 0, []
    outcomes: dict[int, Outcome] = {}
    waiting = dict(enumerate(joins))
    leaves = leaves or {}
    while waiting or batch.rows:
        joining = [number for number, step in waiting.items() if step <= tick]
        if joining:
            batch.join([(number, rows[number].plan, rows[number].place) for number in joining])
            for number in joining:
                del waiting[number]
        if batch.rows:
            progress = batch.step()
            shown += progress
            for each in progress:
                if each.is_done:
                    outcomes[each.row] = Outcome(each.ids, each.nfe, each.steps)
            leaving = [number for number in batch.rows if leaves.get(number, 10**6) <= tick]
            if leaving:
                batch.leave(leaving)
        tick += 1
    return outcomes, shown


@pytest.mark.parametrize("name", ["mdlm", "adlm", "timed"])
@pytest.mark.parametrize("spread", [1, 12])
def test_rows_with_all_samplers_share_a_batch(name: str, spread: int) -> None:
    lm, rows, alone = masked_case(name)
    rng = random.Random(spread)
    outcomes, _ = run_together(lm, rows, [rng.randrange(spread) for _ in rows])
    for number, expected in enumerate(alone):
        assert outcomes[number] == expected, rows[number].sampler


def test_rows_may_leave_at_any_step() -> None:
    lm, rows, alone = masked_case("adlm")
    rng = random.Random(1)
    joins = [rng.randrange(6) for _ in rows]
    leaves = {i: joins[i] + rng.randrange(4) for i in range(0, len(rows), 2)}
    outcomes, _ = run_together(lm, rows, joins, leaves)
    for number, expected in enumerate(alone):
        if number % 2:
            assert outcomes[number] == expected
        else:
            assert outcomes.get(number) in (None, expected)
    assert len(outcomes) < len(rows)


def test_settled_tokens_do_not_change() -> None:
    """They are the beginning of the final ones, also where a plan hides again."""
    lm, rows, alone = masked_case("adlm")
    _, shown = run_together(lm, rows, [0] * len(rows))
    early = set()
    for each in shown:
        final = alone[each.row].ids
        assert each.ids[: each.settled] == final[: each.settled]
        assert not each.is_done or each.settled == len(final)
        if not each.is_done and each.settled > 8:
            early.add(rows[each.row].sampler)
    assert {"ancestral", "confidence", "first_hitting"} <= early


@pytest.mark.parametrize("name", ["ar", "a2r"])
def test_causal_rows_join_at_different_times(name: str) -> None:
    lm = model(name)
    plans = []
    for k in range(1, 6):
        settings: dict[str, Any] = {"seed": k, "temperature": 0.5 + 0.5 * (k % 2), "n": 2}
        plan = adapter.plan_texts(lm, "the cat"[: k + 1], max_new_tokens=5 + k, **settings)
        plans.append(("left_to_right", plan))
    rows, alone = run_alone(lm, plans)
    count = len(rows)
    for joins in ([0] * count, list(range(count)), [3 * (i % 3) for i in range(count)]):
        outcomes, _ = run_together(lm, rows, joins)
        for number, expected in enumerate(alone):
            found = outcomes[number]
            assert (found.ids, found.nfe) == (expected.ids, expected.nfe)
    outcomes, _ = run_together(lm, rows, [0] * count, {0: 1, 5: 2})
    for number in set(range(count)) - {0, 5}:
        assert outcomes[number].ids == alone[number].ids
