"""The serving engine: a queue of requests, and one thread that samples all of them in one running batch."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, Self, TypeVar

import torch

from adlm.diffusion.denoising import Frame
from adlm.serve.batches import CausalBatch, MaskedBatch, Row, StepResult, TokenLogprob
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, StreamStep, predict_guesses
from adlm.text.templates import Layout

log = logging.getLogger("adlm.serve")
T = TypeVar("T")
MAX_UNREAD = 256  # steps whose frames are kept for a slow client
LAST, SETTLED, ALL = "last", "settled", "all"  # the frames of a row that are delivered


class QueueFullError(RuntimeError):
    """The queue has no room for a request; `retry_after` is a guess in seconds."""

    status, code = 429, "queue_full"  # of the HTTP answer

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(f"{message}: retry later")
        self.retry_after = retry_after


class ShutdownError(QueueFullError):
    """The engine takes no more requests."""

    status, code = 503, "shutting_down"


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

    def check_size(self, count: int, steps: int | None) -> None:
        """Raise if a request is for too many texts, or for texts of too many steps."""
        allowed = min(self.max_texts, self.max_rows + self.max_waiting)  # more never fit
        if count > allowed:
            raise ValueError(
                f"the request is for {count} texts, at most {allowed} are allowed: ask for fewer"
            )
        if steps is not None and steps > self.max_steps:
            raise ValueError(
                f"a text takes {steps} steps, at most {self.max_steps} are allowed: use fewer steps"
            )

    def check_request(self, request: GenerationRequest) -> None:
        """Raise if a request exceeds the limits of one."""
        steps = request.steps
        if steps is None and "steps" in request.description:  # every block takes all of them
            blocks = -(
                -max(len(layout) for layout in request.layouts) // (request.settings.block or 1)
            )
            steps = request.description["steps"] * blocks
        self.check_size(len(request.layouts) * request.settings.n, steps)


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


Notify = Callable[[list[RowFrame] | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A request in the engine; `notify` is called in the engine's thread with its new frames, or with an error."""

    request: GenerationRequest
    notify: Notify
    frames: str = LAST
    skipped: set[int] = field(
        default_factory=set
    )  # rows that are no longer wanted: they leave before the next step
    guesses: int | None = None  # of the anchor network, in every frame; None: frames without tokens
    logprobs: int | None = (
        None  # likeliest tokens recorded for every token that is drawn; None: no logprobs
    )
    is_over: bool = False  # cancelled or failed: none of its rows is wanted

    def send(self, news: list[RowFrame] | Exception) -> None:
        """Call `notify`; a request whose event loop is closed is cancelled."""
        try:
            self.notify(news)
        except RuntimeError:
            log.warning("the receiver of a request has gone; it is cancelled")
            self.is_over = True


class Turns:
    """Turns of two threads to use the model; where they are not needed, both use it at the same time."""

    def __init__(self, is_needed: bool) -> None:
        self.is_needed, self.turn, self.next_turn = is_needed, threading.Lock(), threading.Lock()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Context manager: take a turn; a thread that waits for one gets the next."""
        if not self.is_needed:
            yield
            return
        with self.next_turn:
            self.turn.acquire()
        try:
            yield
        finally:
            self.turn.release()


class Engine:
    """Samples the requests of many clients with one model; each gets the texts of `LM.generate` or `LM.infill`."""

    def __init__(self, lm: LM, limits: EngineLimits | None = None) -> None:
        self.lm, self.limits, self.stats = lm, limits or EngineLimits(), EngineStats()
        self.wake = threading.Condition()  # guards what follows
        self.waiting, self.calls = deque[Row](), set[Future[Any]]()
        self.is_stopping = self.is_draining = False
        self.running = 0  # rows in the batch
        self.seconds_per_text = 1.0  # a moving average, for Retry-After
        self.thread: threading.Thread | None = None
        self.pool = ThreadPoolExecutor(1, "adlm-calls")
        self.turns = Turns(
            lm.device.type == "cuda"
        )  # where a prediction is valid until the next one
        self.batch = make_batch(lm)

    def start(self) -> Self:
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
        self.pool.shutdown(wait=drain, cancel_futures=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self.thread is not None and self.thread.is_alive() and not self.is_stopping

    def submit(self, ticket: Ticket) -> Ticket:
        """Put a request into the queue."""
        request, numbered = ticket.request, enumerate(ticket.request.rows)
        self.limits.check_request(request)
        rows = [
            Row(layout, request, number, i, ticket, ticket.logprobs)
            for i, (layout, number) in numbered
        ]
        with self.wake:
            self._require_running()
            count, most = (
                len(self.waiting) + self.running,
                self.limits.max_rows + self.limits.max_waiting,
            )
            if count + len(rows) > most:
                self.stats.rejected += 1
                seconds = max(
                    1, min(60, round(self.seconds_per_text * count / self.limits.max_rows))
                )
                message = f"{count} texts are running or waiting, at most {most} may, {len(rows)} are requested"
                raise QueueFullError(message, seconds)
            self.waiting.extend(rows)
            self.wake.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request: it leaves the queue now, the batch before the next step."""
        with self.wake:
            ticket.is_over = True
            self.waiting = deque(row for row in self.waiting if not is_skipped(row))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in a thread of its own, one after the other, while (on a GPU: between) the batch's steps."""
        with self.wake:
            self._require_running()
            if len(self.calls) >= self.limits.max_waiting:
                raise QueueFullError(f"{len(self.calls)} calls are waiting")
            future = self.pool.submit(self.turns.take()(function))
            self.calls.add(future)
        future.add_done_callback(self.calls.discard)
        return future

    def _require_running(self) -> None:
        if self.is_stopping:
            raise ShutdownError("the server is shutting down", 5)

    def _run(self) -> None:
        """The thread: rows leave and join, then a step; until it is stopped."""
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.batch.rows or self.waiting or self.is_stopping)
                if self.is_stopping and not (
                    self.is_draining and (self.batch.rows or self.waiting)
                ):
                    break
            joining = list[Row]()
            try:
                joining = self._exchange_rows()
                with self.turns.take():
                    if joining:
                        self.batch.join(joining)
                    if self.batch.rows:
                        self._step()
            except Exception as error:
                log.exception("a step failed; its requests are answered with an error")
                fail([*self.batch.rows, *joining], error)
                self.batch, self.running = make_batch(self.lm), 0
        with self.wake:
            rows = [*self.batch.rows, *self.waiting]
            self.waiting, self.running = deque(), 0
        fail(rows, ShutdownError("the server has stopped", 5))

    def _exchange_rows(self) -> list[Row]:
        """Remove rows that are cancelled or stopped by their text, and return waiting ones that there is room for."""
        with self.wake:
            is_leaving = [is_skipped(row) for row in self.batch.rows]
            staying = is_leaving.count(False)
            room = self.limits.max_rows - staying
            joining = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
            self.running = staying + len(joining)
        self._remove(is_leaving)
        return joining

    def _remove(self, is_leaving: Sequence[bool]) -> None:
        """Remove rows from the batch, and count them."""
        for row in compress(self.batch.rows, is_leaving):
            if row.owner.is_over:
                self.stats.cancelled += 1
            else:
                self.stats.texts += 1
                self.stats.tokens += row.layout.is_fixed[: row.delivered].count(False)
        if any(is_leaving):
            self.batch.keep(~torch.tensor(is_leaving))

    def _step(self) -> None:
        """Take a step, remove the rows that are done and deliver the frames."""
        began, rows, stats = time.perf_counter(), self.batch.rows, self.stats
        result = self.batch.step()
        stats.steps, stats.row_steps = stats.steps + 1, stats.row_steps + len(rows)
        for row, nfe in zip(rows, result.nfe.tolist(), strict=True):
            stats.nfe, row.nfe = stats.nfe + nfe - row.nfe, nfe
        news = collect_frames(self.lm, rows, result)
        if bool(result.is_done.any()):
            mean_steps = float(result.step[result.is_done].double().mean())
            self.seconds_per_text += 0.2 * (
                (time.perf_counter() - began) * mean_steps - self.seconds_per_text
            )
        self._remove(result.is_done.tolist())
        with self.wake:
            self.running = len(self.batch.rows)
        for ticket, frames in news.items():
            ticket.send(frames)


def stream_rows(
    engine: Engine, request: GenerationRequest, frames: str = SETTLED, **fields: Any
) -> AsyncGenerator[RowFrame]:
    """Submit a request, with `fields` of its Ticket, and return the frames of its rows; closing them cancels it."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[RowFrame] | Exception]()

    def notify(news: list[RowFrame] | Exception) -> None:
        if isinstance(news, list) and queue.qsize() >= MAX_UNREAD:  # the last frames have all text
            news = [frame for frame in news if frame.is_done]
        loop.call_soon_threadsafe(queue.put_nowait, news)

    ticket = engine.submit(Ticket(request, notify, frames, **fields))

    async def read_frames() -> AsyncGenerator[RowFrame]:
        left = set(range(len(request.rows)))
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

    return read_frames()


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


def fail(rows: Sequence[Row], error: Exception) -> None:
    """Answer the requests of rows with an error."""
    for ticket in dict.fromkeys(row.owner for row in rows):
        ticket.is_over = True
        ticket.send(error)


def collect_frames(lm: LM, rows: Sequence[Row], result: StepResult) -> dict[Ticket, list[RowFrame]]:
    """Return the frames that every request wants: the last ones, those with newly settled text, or all."""
    settled, is_done, steps, nfe = (
        x.tolist() for x in (result.settled, result.is_done, result.step, result.nfe)
    )
    wants = []
    for i, row in enumerate(rows):
        frames = row.owner.frames
        if is_done[i] or frames == ALL or (frames == SETTLED and settled[i] > row.delivered):
            wants.append(i)
    news = dict[Ticket, list[RowFrame]]()
    if not wants:
        return news
    tokens = result.tokens[torch.tensor(wants, device=result.tokens.device)].tolist()
    for i, ids in zip(wants, tokens, strict=True):
        row = rows[i]
        row.delivered = settled[i]
        columns = (
            steps[i],
            ids[: len(row.layout)],
            settled[i],
            nfe[i],
            is_done[i],
            guess_tokens(lm, row, result, i),
        )
        news.setdefault(row.owner, []).append(
            RowFrame(row.index, row.layout, *columns, row.logprobs)
        )
    return news


def guess_tokens(lm: LM, row: Row, result: StepResult, place: int) -> StreamStep | None:
    """Return the step of a row with guesses, where its request wants them; they are not counted as NFE."""
    if row.owner.guesses is None:
        return None
    frame = Frame(
        0, *(x[[place]] for x in (result.tokens, result.is_hidden, result.changed, result.nfe))
    )
    if not lm.row_format.is_causal and (row.guesses is None or bool(frame.changed.any())):
        row.guesses = predict_guesses(lm.predictor, frame, [row.layout], row.owner.guesses)
    return StreamStep(0, frame, (row.layout,), row.guesses)
