"""The engine's thread: texts equal those generated alone, cancellation frees slots, the queue is bounded."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import pytest

from adlm.diffusion.samplers import top_prob
from adlm.diffusion.sampling import Move, RunningBatch, Sampler, ScoreFn, View
from adlm.serve.engine import (
    ALL,
    LAST,
    Engine,
    EngineLimits,
    QueueFullError,
    Ticket,
    count_steps,
    fill_rows,
    stream_rows,
)
from adlm.text import generation
from adlm.text.generation import TextFrame, TextRow
from adlm.text.lm import LM, GenerationOutput
from tests.text.models import lm

SLOW = {"sampler": "ancestral", "steps": 2000, "max_new_tokens": 16}


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not become true in 5 s")


def again(rows: Sequence[TextRow]) -> list[TextRow]:
    """The same rows, not sampled yet."""
    return [replace(row) for row in rows]


def generate(model: LM, rows: Sequence[TextRow]) -> GenerationOutput:
    return model.fill_rows(again(rows))


def submit(
    engine: Engine, rows: Sequence[TextRow], wanted: str = LAST
) -> tuple[Ticket, Future[list[TextRow]]]:
    """Submit the same rows and return their ticket, and the rows when the last frame is delivered."""
    own = again(rows)
    future = Future[list[TextRow]]()
    done = set[TextRow]()

    def notify(news: TextFrame | Exception) -> None:
        if isinstance(news, Exception):
            future.set_exception(news)
            return
        done.update(compress(news.rows, news.is_done))
        if len(done) == len(own):
            future.set_result(own)

    return engine.submit(Ticket(own, notify, wanted)), future


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_concurrent_requests_equal_those_alone(method: str) -> None:
    model = lm(method)
    own = {"steps": 6} if method == "adlm" else {}
    settings = [
        {"seed": seed, "n": 1 + seed % 2, "max_new_tokens": 4 + seed, **own} for seed in range(8)
    ]
    requests = [model.layout_rows("the", **each) for each in settings]

    async def run(engine: Engine) -> list[list[str]]:
        await asyncio.gather(*(fill_rows(engine, rows) for rows in requests))
        return [[row.text for row in rows] for rows in requests]

    with Engine(model, EngineLimits(max_rows=5)) as engine:
        assert asyncio.run(run(engine)) == [generate(model, request).texts for request in requests]
        assert engine.stats.texts == 12
        assert engine.stats.nfe == sum(
            sum(generate(model, request).nfe_each) for request in requests
        )
        assert engine.stats.steps < engine.stats.row_steps <= 5 * engine.stats.steps


def test_all_frames_are_those_of_a_stream() -> None:
    model = lm()
    request = model.layout_rows("the", steps=6, max_new_tokens=9, seed=3)

    async def run(engine: Engine) -> list[list[int]]:
        async with stream_rows(engine, again(request), ALL) as frames:
            return [frame.ids[0] async for frame in frames]

    with Engine(model) as engine:
        assert (
            asyncio.run(run(engine))
            == [frame.ids[0] for frame in model.stream_rows(again(request))][1:]
        )


def test_a_slow_reader_gets_fewer_frames_and_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lm()
    request = model.layout_rows("the", steps=200, max_new_tokens=9, seed=3, sampler="ancestral")
    monkeypatch.setattr("adlm.serve.engine.MAX_UNREAD", 4)

    async def run(engine: Engine) -> list[TextFrame]:
        async with stream_rows(engine, again(request), ALL) as frames:
            await asyncio.to_thread(wait_for, lambda: engine.stats.texts == 1)
            return [frame async for frame in frames]

    with Engine(model) as engine:
        frames = asyncio.run(run(engine))
    assert len(frames) < 200 and frames[-1].texts[0] == generate(model, request).texts[0]


def test_cancellation_frees_the_slot_within_one_step_and_spares_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, steps_at_removal = lm(), list[int]()
    slow, fast = (
        model.layout_rows("the", **SLOW),
        model.layout_rows("a", steps=4, max_new_tokens=5),
    )
    with Engine(model, EngineLimits(max_rows=1)) as engine:
        leave = RunningBatch.leave

        def leave_and_note(batch: RunningBatch[Any], rows: Any) -> None:
            leaving = list(rows)
            if leaving:
                steps_at_removal.append(engine.stats.steps)
            leave(batch, leaving)

        monkeypatch.setattr(RunningBatch, "leave", leave_and_note)
        ticket, first = submit(engine, slow, ALL)
        wait_for(lambda: engine.running == 1)
        _, second = submit(engine, fast)
        assert not second.done()
        engine.cancel(ticket)
        steps = engine.stats.steps
        (row,) = second.result(10)
        assert row.text == generate(model, fast).texts[0]
        assert steps_at_removal[0] <= steps + 1
        assert not first.done() and engine.stats.cancelled == 1


def test_closing_a_stream_cancels_its_request() -> None:
    model = lm()

    async def run(engine: Engine) -> None:
        async with stream_rows(engine, model.layout_rows("the", **SLOW), ALL) as frames:
            async for _ in frames:
                break

    with Engine(model) as engine:
        asyncio.run(run(engine))
        wait_for(lambda: engine.running == 0)
        assert engine.stats.texts == 0 and engine.stats.cancelled == 1


def test_a_stream_that_nobody_reads_leaves_the_batch_and_the_queue() -> None:
    model = lm()

    async def run(engine: Engine) -> None:
        async with stream_rows(engine, model.layout_rows("the", n=3, **SLOW), ALL):
            await asyncio.to_thread(wait_for, lambda: engine.running == 1)
            assert len(engine.waiting) == 2
        assert not engine.waiting

    with Engine(model, EngineLimits(max_rows=1)) as engine:
        asyncio.run(run(engine))
        wait_for(lambda: engine.running == 0)
        assert engine.stats.texts == 0 and engine.stats.cancelled == 1


def test_a_stopped_row_leaves_and_the_others_finish() -> None:
    model = lm()
    request = model.layout_rows("the", n=3, steps=64, max_new_tokens=9)

    async def run(engine: Engine) -> dict[int, str]:
        texts = {}
        async with stream_rows(engine, rows := again(request), ALL) as frames:
            async for frame in frames:
                rows[1].is_stopped = True
                for row, text, is_done in zip(frame.rows, frame.texts, frame.is_done, strict=True):
                    if is_done:
                        texts[row.index] = text
        return texts

    with Engine(model) as engine:
        done = asyncio.run(run(engine))
    texts = generate(model, request).texts
    assert done == {0: texts[0], 2: texts[2]}
    assert engine.stats.texts == 3 and engine.stats.cancelled == 0
    assert 18 <= engine.stats.tokens <= 27


def test_steps_are_taken_during_a_call() -> None:
    model = lm()
    request = model.layout_rows("the", steps=4, max_new_tokens=5)
    with Engine(model) as engine:
        (row,) = engine.call(lambda: submit(engine, request)[1].result(10)).result(10)
    assert row.text == generate(model, request).texts[0]


def test_on_a_gpu_steps_and_calls_alternate() -> None:
    model = lm()
    with Engine(model) as engine:
        engine.turns.is_needed = True
        ticket = submit(engine, model.layout_rows("the", **SLOW), ALL)[0]
        wait_for(lambda: engine.stats.steps > 2)

        def count_steps() -> tuple[int, int]:
            before = engine.stats.steps
            threading.Event().wait(0.05)
            return before, engine.stats.steps

        results = [future.result(10) for future in [engine.call(count_steps) for _ in range(3)]]
        assert all(
            before == after for before, after in results
        )  # no step during a call, which would change its memory
        assert len({before for before, _ in results}) == 3  # steps between calls
        engine.cancel(ticket)


def test_the_queue_is_bounded_and_recovers() -> None:
    model = lm()
    slow = model.layout_rows("the", **SLOW)
    with Engine(model, EngineLimits(max_rows=2, max_waiting=3)) as engine:
        tickets = [submit(engine, slow, ALL)[0] for _ in range(5)]
        with pytest.raises(QueueFullError, match="at most 5 may") as caught:
            submit(engine, slow)
        assert 1 <= caught.value.retry_after <= 60
        for ticket in tickets:
            engine.cancel(ticket)
        assert submit(engine, model.layout_rows("the", steps=2, max_new_tokens=3))[1].result(10)
    with pytest.raises(QueueFullError, match="shutting down"):
        submit(engine, slow)


def test_limits_of_a_request_name_their_values() -> None:
    model = lm()
    limits = EngineLimits(max_texts=2, max_steps=50)
    with pytest.raises(ValueError, match="3 texts, at most 2"):
        limits.check_size(3, None)
    with pytest.raises(ValueError, match="51 steps, at most 50"):
        limits.check_size(1, count_steps(model.layout_rows("the", steps=51, sampler="ancestral")))
    rows = model.layout_rows("the", steps=20, block=4, sampler="ancestral")
    with pytest.raises(ValueError, match="steps, at most 50"):
        limits.check_size(1, count_steps(rows))
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        EngineLimits(max_rows=0)


def test_a_failing_step_answers_its_requests_and_the_engine_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lm("mdlm")
    request = model.layout_rows("the", steps=4, max_new_tokens=5)
    with Engine(model) as engine:
        monkeypatch.setattr(model.evaluator, "logits_at", lambda features: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            submit(engine, request)[1].result(10)
        monkeypatch.undo()
        assert submit(engine, request)[1].result(10)
        assert engine.call(lambda: 7).result(10) == 7
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 // 0).result(10)


def test_a_failing_last_frame_answers_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    request = model.layout_rows("the", sampler="confidence", steps=3, max_new_tokens=5)
    predict = generation.predict_guesses

    def fail_at_the_end(evaluator: Any, frame: Any, count: int) -> Any:
        if not frame.is_hidden.any():
            raise ZeroDivisionError("no guesses")
        return predict(evaluator, frame, count)

    monkeypatch.setattr("adlm.text.generation.predict_guesses", fail_at_the_end)

    async def run(engine: Engine) -> None:
        async with asyncio.timeout(20):
            async with stream_rows(engine, again(request), ALL, guesses=1) as frames:
                _ = [frame async for frame in frames]

    with Engine(model) as engine:
        with pytest.raises(RuntimeError, match="sampling has failed"):
            asyncio.run(run(engine))
        assert submit(engine, request)[1].result(10)
        wait_for(lambda: not engine.open)


def test_failing_guesses_fail_their_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    own = {"sampler": "ancestral", "steps": 30, "max_new_tokens": 9}
    with_guesses = model.layout_rows("the", n=2, **own)
    neighbor = model.layout_rows("a", n=2, **own)
    news = Future[Exception]()

    def fail(evaluator: Any, frame: Any, count: int) -> Any:
        raise ZeroDivisionError("no guesses")

    def notify(each: TextFrame | Exception) -> None:
        assert isinstance(each, Exception), "a frame without guesses was sent"
        news.set_result(each)

    monkeypatch.setattr("adlm.text.generation.predict_guesses", fail)
    with Engine(model) as engine:
        with engine.wake:  # both join at once
            engine.submit(Ticket(with_guesses, notify, ALL, guesses=1))
            future = submit(engine, neighbor)[1]
        assert isinstance(news.result(10), ZeroDivisionError)
        assert [row.text for row in future.result(10)] == generate(model, neighbor).texts
        wait_for(lambda: not engine.open and not engine.running)


def test_a_stopped_engine_answers_texts_that_are_done_but_not_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lm()
    request = model.layout_rows("the", steps=3, max_new_tokens=5)
    monkeypatch.setattr(Engine, "_deliver", lambda self, keep=0: None)
    engine = Engine(model).start()
    _, future = submit(engine, request)
    wait_for(lambda: engine.stats.texts == 1)
    engine.stop()
    with pytest.raises(QueueFullError, match="stopped"):
        future.result(5)


def test_a_block_longer_than_any_text_is_one_block() -> None:
    model = lm()
    settings = {"steps": 4, "max_new_tokens": 5, "seed": 3}
    expected = model.generate("the", **settings)
    assert model.generate("the", block=10**30, **settings).texts == expected.texts


@dataclass(frozen=True)
class Breaks(Sampler):
    """Reveals a position a step and raises at its third step, in its score or in its move."""

    score: ScoreFn | None = None

    def move(self, view: View) -> Move:
        if int(view.step[0]) == 2:
            raise KeyError("no third step")
        return Move(view.is_hidden & (view.is_hidden.cumsum(-1) == 1))


@pytest.mark.parametrize("score", [None, top_prob])
@pytest.mark.parametrize("method", ["adlm", "mdlm"])
def test_an_error_of_a_sampler_fails_its_request_only(method: str, score: ScoreFn | None) -> None:
    model = lm(method)
    own = {"max_new_tokens": 9}
    breaks = model.layout_rows("the", sampler=Breaks(score), n=2, **own)
    neighbors = [
        model.layout_rows("a", sampler="ancestral", steps=30, **own),
        model.layout_rows("a", sampler="remask_cap", steps=20, **own),
        model.layout_rows("a", sampler="confidence", steps=7, **own),
        model.layout_rows("a", sampler="first_hitting", **own),
    ]
    with pytest.raises(KeyError, match="no third step"):
        generate(model, breaks)
    with Engine(model) as engine:
        with engine.wake:  # all of them join at once
            futures = [submit(engine, request)[1] for request in [breaks, *neighbors]]
        with pytest.raises(KeyError, match="no third step"):
            futures[0].result(10)
        for request, future in zip(neighbors, futures[1:], strict=True):
            expected = generate(model, request)
            assert [row.text for row in future.result(10)] == expected.texts
            assert [row.nfe for row in future.result(10)] == expected.nfe_each
        assert engine.stats.texts == 4 and not engine.open and not engine.running


class RevealsNothing(Sampler):
    """Never comes to an end."""

    def move(self, view: View) -> Move:
        return Move(view.is_hidden & False)


def test_a_sampler_that_reveals_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adlm.diffusion.sampling.MAX_IDLE_STEPS", 50)
    model = lm()
    idle = model.layout_rows("the", sampler=RevealsNothing(), max_new_tokens=5)
    good = model.layout_rows("the", sampler="remask_conf", steps=200, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"RevealsNothing .* has changed nothing in 50 steps"):
        generate(model, idle)
    with Engine(model) as engine:
        failing, future = submit(engine, idle)[1], submit(engine, good)[1]
        with pytest.raises(ValueError, match="has changed nothing"):
            failing.result(10)
        assert [row.text for row in future.result(10)] == generate(model, good).texts


def test_a_row_that_cannot_be_built_fails_alone() -> None:
    model = lm()
    good, bad = (model.layout_rows("the", steps=4, max_new_tokens=5, n=2) for _ in range(2))
    for name in ("tokens", "is_fixed", "kinds"):
        setattr(bad[0], name, getattr(bad[0], name).repeat(1000))
    with Engine(model) as engine:
        with engine.wake:
            failing, future = submit(engine, bad)[1], submit(engine, good)[1]
        with pytest.raises(ValueError, match="this model's rows at most"):
            failing.result(10)
        texts = [row.text for row in future.result(10)]
        assert texts == generate(model, good).texts


def test_a_late_reader_sees_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm("mdlm")
    monkeypatch.setattr(model.evaluator, "logits_at", lambda features: 1 / 0)

    async def run(engine: Engine) -> None:
        rows = model.layout_rows("the", steps=4, max_new_tokens=5)
        async with stream_rows(engine, rows) as frames:
            await asyncio.to_thread(engine.call(lambda: None).result)
            await asyncio.to_thread(wait_for, lambda: engine.running == 0)
            with pytest.raises(RuntimeError, match="sampling has failed"):
                _ = [frame async for frame in frames]

    with Engine(model) as engine:
        asyncio.run(run(engine))


def test_a_row_that_cannot_join_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm()
    request = model.layout_rows("the", steps=4, max_new_tokens=5)
    with Engine(model) as engine:
        monkeypatch.setattr(
            "adlm.serve.engine.RunningBatch.join", lambda self, rows: [1 / 0 for _ in rows]
        )
        with pytest.raises(ZeroDivisionError):
            submit(engine, request)[1].result(10)
        monkeypatch.undo()
        assert submit(engine, request)[1].result(10)


def test_stopping_answers_or_finishes_what_is_left() -> None:
    model = lm()
    engine = Engine(model).start()
    _, future = submit(
        engine, model.layout_rows("the", steps=50, max_new_tokens=9, sampler="ancestral")
    )
    engine.stop(drain=True)
    assert future.result(0)
    engine = Engine(model).start()
    _, future = submit(engine, model.layout_rows("the", **SLOW), ALL)
    engine.stop()
    with pytest.raises(QueueFullError, match="stopped"):
        future.result(5)
    assert not engine.is_ready
