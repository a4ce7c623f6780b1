"""The serving engine: a queue of requests, and one thread that samples all of them in one running batch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch

from adlm.diffusion.denoising import Frame
from adlm.serve.batches import CausalBatch, MaskedBatch, Row, StepResult, TokenLogprob
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, Guesses, StreamStep, predict_guesses
from adlm.text.templates import Layout
from adlm.view.trajectory import TokenState

log = logging.getLogger("adlm.serve")
T = TypeVar("T")
MAX_UNREAD = 256  # steps whose frames are kept for a slow client
LAST, SETTLED, ALL = "last", "settled", "all"  # the frames of a row that are delivered


class QueueFullError(RuntimeError):
    """The queue has no room for a request; `retry_after` is a guess in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the engine and of one request."""

    max_rows: int = 64  # texts that are sampled at once
    max_waiting: int = 256  # texts in the queue
    max_texts: int = 128  # of one request
    max_steps: int = 4096  # of one text

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def check_count(self, count: int) -> None:
        """Raise if a request is for too many texts."""
        allowed = min(self.max_texts, self.max_rows + self.max_waiting)  # more never fit
        if count > allowed:
            raise ValueError(f"the request is for {count} texts, at most {allowed} are allowed: ask for fewer")

    def check_request(self, request: GenerationRequest) -> None:
        """Raise if a request exceeds the limits of one."""
        self.check_count(len(request.layouts) * request.config.n)
        steps = request.steps
        if steps is None and "steps" in request.settings:  # every block takes all of them
            blocks = -(-max(len(layout) for layout in request.layouts) // (request.config.block or 1))
            steps = request.settings["steps"] * blocks
        if steps is not None and steps > self.max_steps:
            raise ValueError(f"a text takes {steps} steps, at most {self.max_steps} are allowed: use fewer steps")


@dataclass
class EngineStats:
    """Counts since the start."""

    steps: int = 0  # of the batch
    row_steps: int = 0  # of all rows: divided by `steps`, the mean number of rows in the batch
    nfe: int = 0
    texts: int = 0  # finished, or ended by EOS or a stop sequence
    tokens: int = 0  # generated, in these texts
    cancelled: int = 0
    rejected: int = 0  # requests that the queue had no room for

    def count_step(self, rows: Sequence[Row], result: StepResult) -> None:
        """Add a step of these rows."""
        self.steps, self.row_steps = self.steps + 1, self.row_steps + len(rows)
        for row, nfe, is_done in zip(rows, result.nfe.tolist(), result.is_done.tolist(), strict=True):
            self.nfe, row.nfe = self.nfe + nfe - row.nfe, nfe
            if is_done:
                self.count_text(row, len(row.layout))

    def count_skipped(self, rows: Sequence[Row]) -> None:
        """Add rows that are cancelled, or whose text has ended before its length."""
        for row in rows:
            if row.owner.is_over:
                self.cancelled += 1
            else:
                self.count_text(row, row.delivered)

    def count_text(self, row: Row, end: int) -> None:
        """Add a text with the tokens that were generated before a position."""
        self.texts, self.tokens = self.texts + 1, self.tokens + row.layout.is_fixed[:end].count(False)


@dataclass(frozen=True)
class RowFrame:
    """A row of a request after a step."""

    index: int  # among the rows of the request
    layout: Layout
    step: int
    ids: list[int]
    settled: int  # leading positions that can no longer change
    nfe: int
    is_done: bool
    stream_step: StreamStep | None = None  # of this row, where guesses are wanted
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position

    @property
    def row(self) -> GeneratedRow:
        """The row as `LM.generate` returns it."""
        return GeneratedRow(self.layout, self.ids, self.nfe)

    @property
    def tokens(self) -> tuple[TokenState, ...] | None:
        """The tokens as the player draws them, where guesses are wanted."""
        return None if self.stream_step is None else self.stream_step.trajectory_frame().tokens


Notify = Callable[[list[RowFrame] | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A request in the engine; `notify` is called in the engine's thread with its new frames, or with an error."""

    request: GenerationRequest
    notify: Notify
    frames: str
    skipped: set[int] = field(default_factory=set)  # rows that are no longer wanted
    guesses: int | None = None  # of the anchor network, in every frame; None: frames without tokens
    is_over: bool = False  # cancelled or failed: none of its rows is wanted


class Engine:
    """Samples the requests of many clients with one model.

    A text does not depend on the other requests: it is the one that `LM.generate` or `LM.infill` returns.
    """

    def __init__(self, lm: LM, limits: EngineLimits | None = None) -> None:
        self.lm, self.limits, self.stats = lm, limits or EngineLimits(), EngineStats()
        self.wake = threading.Condition()  # guards what follows
        self.waiting, self.calls = deque[Row](), deque[tuple[Future[Any], Callable[[], Any]]]()
        self.is_stopping = self.is_draining = False
        self.running = 0  # rows in the batch
        self.seconds_per_text = 1.0  # a moving average, for Retry-After
        self.thread: threading.Thread | None = None
        self.batch = make_batch(lm)

    def start(self) -> Engine:
        """Start the thread."""
        assert self.thread is None, "an engine starts once"
        self.thread = threading.Thread(target=self._run, name="adlm-engine", daemon=True)
        self.thread.start()
        return self

    def stop(self, *, drain: bool = False, timeout: float = 30.0) -> None:
        """Stop the thread at the next step or, to drain, when all requests are answered; the others get an error."""
        with self.wake:
            self.is_stopping, self.is_draining = True, drain
            self.wake.notify_all()
        if self.thread is not None:
            self.thread.join(timeout)
            if self.thread.is_alive() and drain:
                self.stop(timeout=timeout)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self.thread is not None and self.thread.is_alive() and not self.is_stopping

    def submit(
        self,
        request: GenerationRequest,
        notify: Notify,
        frames: str = LAST,
        skipped: set[int] | None = None,
        guesses: int | None = None,
        logprobs: int | None = None,
    ) -> Ticket:
        """Put a request into the queue; raise QueueFullError where its texts do not fit.

        A row in `skipped` leaves the batch before the next step. Frames have so many `guesses` and `logprobs`.
        """
        self.limits.check_request(request)
        ticket = Ticket(request, notify, frames, set() if skipped is None else skipped, guesses)
        rows = [Row(layout, request, number, i, ticket, logprobs) for i, (layout, number) in enumerate(request.rows)]
        with self.wake:
            if self.is_stopping:
                raise QueueFullError("the server is shutting down: retry later", 5)
            count, most = len(self.waiting) + self.running, self.limits.max_rows + self.limits.max_waiting
            if count + len(rows) > most:
                self.stats.rejected += 1
                seconds = max(1, min(60, round(self.seconds_per_text * count / self.limits.max_rows)))
                message = f"{count} texts are running or waiting, at most {most} may, {len(rows)} are requested"
                raise QueueFullError(f"{message}: retry later", seconds)
            self.waiting.extend(rows)
            self.wake.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request: it leaves the queue now, the batch before the next step."""
        with self.wake:
            ticket.is_over = True
            self.waiting = deque(row for row in self.waiting if not is_skipped(row))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread, between two steps."""
        future: Future[T] = Future()
        with self.wake:
            if self.is_stopping:
                raise QueueFullError("the server is shutting down: retry later", 5)
            if len(self.calls) >= self.limits.max_waiting:
                raise QueueFullError(f"{len(self.calls)} calls are waiting: retry later", 1)
            self.calls.append((future, function))
            self.wake.notify_all()
        return future

    def _run(self) -> None:
        """The thread: calls, then rows that leave and join, then a step; until it is stopped."""
        while True:
            with self.wake:
                while not (has_work := bool(self.batch.rows or self.waiting or self.calls)) and not self.is_stopping:
                    self.wake.wait()
                if self.is_stopping and not (self.is_draining and has_work):
                    break
                calls, self.calls = self.calls, deque()
            run_calls(calls)
            self.take_step()
        stopped = QueueFullError("the server has stopped: retry later", 5)
        with self.wake:
            rows, calls = [*self.batch.rows, *self.waiting], self.calls
            self.waiting, self.calls, self.running = deque(), deque(), 0
        fail(rows, stopped)
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(stopped)

    def take_step(self) -> None:
        """Remove and add rows, then take a step; long calls do so between their parts, in the engine's thread."""
        joining = list[Row]()
        try:
            joining = self._exchange_rows()
            if joining:
                self.batch.join(joining)
            if self.batch.rows:
                self._step()
        except Exception as error:
            log.exception("a step failed; its requests are answered with an error")
            fail([*self.batch.rows, *joining], error)
            self.batch, self.running = make_batch(self.lm), 0

    def _exchange_rows(self) -> list[Row]:
        """Remove rows that are cancelled or stopped by their text, and return waiting ones that there is room for."""
        with self.wake:
            rows = self.batch.rows
            skipped = [row for row in rows if is_skipped(row)]
            room = self.limits.max_rows - len(rows) + len(skipped)
            joining = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
            self.running = len(rows) - len(skipped) + len(joining)
        if skipped:
            self.stats.count_skipped(skipped)
            self.batch.keep(torch.tensor([row not in skipped for row in rows]))
        return joining

    def _step(self) -> None:
        """Take a step, deliver its frames and remove the rows that are done."""
        began, batch, rows = time.perf_counter(), self.batch, self.batch.rows
        result = batch.step()
        self.stats.count_step(rows, result)
        deliver(rows, result, predict_tokens(self.lm, rows, result))
        if bool(result.is_done.any()):
            batch.keep(~result.is_done)
            mean_steps = float(result.step[result.is_done].double().mean())
            self.seconds_per_text += 0.2 * ((time.perf_counter() - began) * mean_steps - self.seconds_per_text)
        with self.wake:
            self.running = len(batch.rows)


def stream_rows(
    engine: Engine,
    request: GenerationRequest,
    frames: str = SETTLED,
    skipped: set[int] | None = None,
    **wants: int | None,
) -> AsyncGenerator[RowFrame]:
    """Submit a request and return the frames of its rows, but of those in `skipped`, to which the caller may add.

    Closing the iterator cancels what is left of the request.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[RowFrame] | Exception]()

    def notify(news: list[RowFrame] | Exception) -> None:
        if isinstance(news, list) and queue.qsize() >= MAX_UNREAD:  # the last frames have all text
            news = [frame for frame in news if frame.is_done]
        loop.call_soon_threadsafe(queue.put_nowait, news)

    return _read_frames(engine, engine.submit(request, notify, frames, skipped, **wants), queue)


async def _read_frames(
    engine: Engine, ticket: Ticket, queue: asyncio.Queue[list[RowFrame] | Exception]
) -> AsyncGenerator[RowFrame]:
    left = set(range(len(ticket.request.rows)))
    try:
        while left - ticket.skipped:
            news = await queue.get()
            if isinstance(news, QueueFullError):
                raise news
            if isinstance(news, Exception):
                raise RuntimeError("sampling has failed") from news
            for frame in news:
                if frame.is_done:
                    left.discard(frame.index)
                if frame.index not in ticket.skipped:
                    yield frame
    finally:
        if left - ticket.skipped:
            engine.cancel(ticket)


async def generate_rows(engine: Engine, request: GenerationRequest) -> list[GeneratedRow]:
    """Return the rows of a request."""
    frames = [frame async for frame in stream_rows(engine, request, LAST)]
    return [frame.row for frame in sorted(frames, key=lambda frame: frame.index)]


def make_batch(lm: LM) -> MaskedBatch | CausalBatch:
    """Return an empty batch of a model."""
    return (CausalBatch if lm.row_format.is_causal else MaskedBatch)(lm.predictor)


def is_skipped(row: Row) -> bool:
    """Whether a row is no longer wanted."""
    return row.owner.is_over or row.index in row.owner.skipped


def run_calls(calls: Sequence[tuple[Future[Any], Callable[[], Any]]]) -> None:
    """Call functions and set their futures."""
    for future, function in calls:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)


def predict_tokens(lm: LM, rows: Sequence[Row], result: StepResult) -> dict[int, StreamStep]:
    """Return the steps, with guesses, of the rows that want them, by their places in the batch.

    A row in which nothing has changed keeps its guesses. They are not counted as NFE.
    """
    places = [i for i, row in enumerate(rows) if row.owner.guesses is not None]
    if not places:
        return {}
    columns = result.tokens, result.is_hidden, result.changed, result.nfe
    frames = {i: Frame(0, *(x[[i]] for x in columns)) for i in places}
    changed = [i for i in places if rows[i].guesses is None or bool(frames[i].changed.any())]
    if changed and not lm.row_format.is_causal:
        count, layouts = max(rows[i].owner.guesses for i in places), [rows[i].layout for i in changed]
        guesses = predict_guesses(lm.predictor, Frame(0, *(x[changed] for x in columns)), layouts, count)
        for at, i in enumerate(changed if guesses is not None else ()):
            rows[i].guesses = Guesses(*(getattr(guesses, each.name)[[at]] for each in fields(Guesses)))
    return {i: StreamStep(0, frames[i], (rows[i].layout,), rows[i].guesses) for i in places}


def deliver(rows: Sequence[Row], result: StepResult, stream_steps: dict[int, StreamStep]) -> None:
    """Send every request the frames that it wants: the last ones, those with newly settled text, or all."""
    settled, is_done = result.settled.tolist(), result.is_done.tolist()
    wants = []
    for i, row in enumerate(rows):
        frames = row.owner.frames
        if is_done[i] or frames == ALL or (frames == SETTLED and settled[i] > row.delivered):
            wants.append(i)
    if not wants:
        return
    tokens = result.tokens[torch.tensor(wants, device=result.tokens.device)].tolist()
    steps, nfe, news = result.step.tolist(), result.nfe.tolist(), dict[Ticket, list[RowFrame]]()
    for i, ids in zip(wants, tokens, strict=True):
        row = rows[i]
        row.delivered = settled[i]
        columns = steps[i], ids[: len(row.layout)], settled[i], nfe[i], is_done[i], stream_steps.get(i), row.logprobs
        news.setdefault(row.owner, []).append(RowFrame(row.index, row.layout, *columns))
    for ticket, frames in news.items():
        notify(ticket, frames)


def fail(rows: Sequence[Row], error: Exception) -> None:
    """Answer the requests of rows with an error."""
    for ticket in dict.fromkeys(row.owner for row in rows):
        ticket.is_over = True
        notify(ticket, error)


def notify(ticket: Ticket, news: list[RowFrame] | Exception) -> None:
    """Call a request's callback; one whose event loop is closed is cancelled."""
    try:
        ticket.notify(news)
    except RuntimeError:
        log.warning("the receiver of a request has gone; it is cancelled")
        ticket.is_over = True
