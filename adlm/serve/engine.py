"""The serving engine: a queue of requests, and one thread that samples all of them in one running batch."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from adlm.diffusion.sampling import Frame, RowsError, RunningBatch
from adlm.text.generation import TextRow
from adlm.text.lm import LM, StreamStep, predict_guesses
from adlm.text.templates import classify_tokens

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

    def check_rows(self, rows: Sequence[TextRow]) -> None:
        """Raise if the rows of a request exceed the limits of one."""
        settings = rows[0].settings
        steps = rows[0].planned_steps
        if steps is None and settings.steps is not None:  # every block takes all of them
            longest = max(len(row.layout) for row in rows)
            steps = settings.steps * math.ceil(longest / (settings.block or 1))
        self.check_size(len(rows), steps)


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


Notify = Callable[[list[StreamStep] | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A request in the engine; `notify` is called in the engine's thread with its new frames, or with an error."""

    rows: Sequence[TextRow]
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

    def send(self, news: list[StreamStep] | Exception) -> None:
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
        self.waiting, self.calls = deque[TextRow](), set[Future[Any]]()
        self.is_stopping = self.is_draining = False
        self.running = 0  # rows in the batch
        self.seconds_per_text = 1.0  # a moving average, for Retry-After
        self.thread: threading.Thread | None = None
        self.pool = ThreadPoolExecutor(1, "adlm-calls")
        self.turns = Turns(
            lm.device.type == "cuda"
        )  # where a prediction is valid until the next one
        self.batch = make_batch(lm)
        self.pending = deque[PendingSteps]()
        self.open: dict[TextRow, None] = {}  # that have joined, and whose last frame is not sent

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
        rows = ticket.rows
        self.limits.check_rows(rows)
        for row in rows:
            row.owner = ticket
            row.top_logprobs = ticket.logprobs
            row.every_step = ticket.frames == ALL
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
                self.wake.wait_for(lambda: self._has_work() or self.is_stopping)
                if self.is_stopping and not (self.is_draining and self._has_work()):
                    break
            try:
                joining = self._exchange_rows()
                with self.turns.take():
                    self._join(joining)
                    if self.batch.rows:
                        self._step()
                    else:
                        self._deliver()
            except RowsError as error:
                log.exception("some rows failed; their requests are answered with an error")
                self._drop(error)
            except Exception as error:
                log.exception("a step failed; its requests are answered with an error")
                fail(list(self.open), error)
                self.open.clear()
                self.batch, self.running = make_batch(self.lm), 0
                self.pending.clear()
        with self.wake:
            rows = [*self.open, *self.waiting]
            self.waiting, self.running = deque(), 0
        fail(rows, ShutdownError("the server has stopped", 5))

    def _has_work(self) -> bool:
        return bool(self.batch.rows or self.waiting or self.pending)

    def _exchange_rows(self) -> list[TextRow]:
        """Remove rows that are cancelled or stopped by their text, and return waiting ones that there is room for."""
        with self.wake:
            leaving = [row for row in self.batch.rows if is_skipped(row)]
            staying = len(self.batch.rows) - len(leaving)
            room = self.limits.max_rows - staying
            joining = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
            self.running = staying + len(joining)
        self.open.update(dict.fromkeys(joining))
        for row in leaving:
            self.open.pop(row, None)
        self._count_leaving(leaving)
        self.batch.leave(leaving)
        return joining

    def _join(self, rows: Sequence[TextRow]) -> None:
        """Let rows join; where one of them cannot, only its request fails."""
        try:
            self.batch.join(rows)
        except Exception:
            for row in rows:
                if row not in self.open:  # another row of its request has failed
                    continue
                try:
                    self.batch.join([row])
                except Exception as error:
                    log.exception("a row cannot join; its request is answered with an error")
                    self._drop(RowsError([row], error))
        with self.wake:
            self.running = len(self.batch.rows)

    def _drop(self, error: RowsError) -> None:
        """Answer the requests of some rows with their error; all rows of these requests leave."""
        failed = {row.owner for row in error.rows if isinstance(row, TextRow)}
        gone = [row for row in self.open if row.owner in failed]
        fail(gone, error.cause)
        for row in gone:
            self.open.pop(row)
        self.batch.leave(gone)
        with self.wake:
            self.waiting = deque(row for row in self.waiting if row.owner not in failed)
            self.running = len(self.batch.rows)

    def _count_leaving(self, rows: Sequence[TextRow]) -> None:
        """Count rows that leave."""
        for row in rows:
            if row.owner.is_over:
                self.stats.cancelled += 1
            else:
                self.stats.texts += 1
                self.stats.tokens += row.layout.is_fixed[: row.delivered].count(False)

    def _step(self) -> None:
        """Take a step and deliver the frames: on a GPU those of the step before, without waiting for this one."""
        began, stats = time.perf_counter(), self.stats
        frame = self.batch.step()
        stats.steps += 1
        stats.row_steps += len(frame.rows)
        stats.nfe += len(self.batch.evaluated)
        done = list(compress(frame.rows, frame.is_done))
        chosen = choose_rows(frame)
        if done:
            mean_steps = sum(compress(frame.step, frame.is_done)) / len(done)
            seconds = (time.perf_counter() - began) * mean_steps
            self.seconds_per_text += 0.2 * (seconds - self.seconds_per_text)
        self._count_leaving(done)
        with self.wake:
            self.running = len(self.batch.rows)
        if chosen:
            self.pending.append(PendingSteps(frame, chosen))
        is_waiting = frame.tokens.is_cuda and bool(self.batch.rows)
        self._deliver(keep=1 if is_waiting and chosen else 0)

    def _deliver(self, keep: int = 0) -> None:
        """Deliver the steps that are pending, but for some of the last."""
        while len(self.pending) > keep:
            news: dict[Ticket, list[StreamStep]] = {}
            for step in self.pending.popleft().read():
                (row,) = step.frame.rows
                if row.owner.is_over:
                    self.open.pop(row, None)
                    continue
                news.setdefault(row.owner, []).append(add_guesses(self.lm, step))
            for ticket, steps in news.items():
                ticket.send(steps)
                for step in steps:
                    if step.frame.is_done[0]:
                        self.open.pop(step.frame.rows[0], None)


def stream_rows(
    engine: Engine, rows: Sequence[TextRow], frames: str = SETTLED, **fields: Any
) -> AsyncGenerator[StreamStep]:
    """Submit rows, with `fields` of their Ticket, and return their frames; closing them cancels the request."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[list[StreamStep] | Exception]()

    def notify(news: list[StreamStep] | Exception) -> None:
        if isinstance(news, list) and queue.qsize() >= MAX_UNREAD:  # the last frames have all text
            news = [step for step in news if step.frame.is_done[0]]
        loop.call_soon_threadsafe(queue.put_nowait, news)

    ticket = engine.submit(Ticket(rows, notify, frames, **fields))

    async def read_frames() -> AsyncGenerator[StreamStep]:
        left = {row.index for row in rows}
        try:
            while left - ticket.skipped:
                news = await queue.get()
                if isinstance(news, QueueFullError):
                    raise news
                if isinstance(news, Exception):
                    raise RuntimeError("sampling has failed") from news
                for step in news:
                    (row,) = step.frame.rows
                    if step.frame.is_done[0]:
                        left.discard(row.index)
                    if row.index not in ticket.skipped:
                        yield step
        finally:
            if left - ticket.skipped:
                engine.cancel(ticket)

    return read_frames()


async def fill_rows(engine: Engine, rows: Sequence[TextRow]) -> None:
    """Sample rows."""
    async for _ in stream_rows(engine, rows, LAST):
        pass  # a row that is done has its tokens


def make_batch(lm: LM) -> RunningBatch[TextRow]:
    """Return an empty batch of a model."""
    return RunningBatch(lm.evaluator, banned=classify_tokens(lm.tokenizer).banned)


def is_skipped(row: TextRow) -> bool:
    """Whether a row is no longer wanted."""
    return row.owner.is_over or row.index in row.owner.skipped


def fail(rows: Sequence[TextRow], error: Exception) -> None:
    """Answer the requests of rows with an error, but for those that are over."""
    for ticket in dict.fromkeys(row.owner for row in rows):
        if not ticket.is_over:
            ticket.is_over = True
            ticket.send(error)


def choose_rows(frame: Frame[TextRow]) -> list[int]:
    """Return the rows whose frames are wanted: the last ones, those with newly settled text, or all."""
    chosen = []
    for i, row in enumerate(frame.rows):
        wants = row.owner.frames
        is_settled = wants == SETTLED and frame.settled[i] > row.delivered
        if frame.is_done[i] or wants == ALL or is_settled:
            chosen.append(i)
            row.delivered = frame.settled[i]
    return chosen


def split_frame(frame: Frame[TextRow], tokens: Tensor, chosen: Sequence[int]) -> list[StreamStep]:
    """Return the step of each chosen row, whose tokens (n, L) are on the host."""
    steps = []
    for k, i in enumerate(chosen):
        row = frame.rows[i]
        length = len(row.layout)
        own = Frame(
            rows=[row],
            tokens=tokens[[k], :length],
            is_hidden=frame.is_hidden[[i], :length],
            changed=frame.changed[[i], :length],
            step=[frame.step[i]],
            nfe=[frame.nfe[i]],
            settled=[frame.settled[i]],
            is_done=[frame.is_done[i]],
        )
        steps.append(StreamStep(frame.step[i], own))
    return steps


def add_guesses(lm: LM, step: StreamStep) -> StreamStep:
    """Add guesses to the step of a row, where its request wants them; they are not counted as NFE."""
    (row,) = step.frame.rows
    if row.owner.guesses is None or lm.row_format.is_causal:
        return step
    if row.guesses is None or bool(step.frame.changed.any()):
        frame = replace(step.frame, tokens=step.frame.tokens.to(lm.device))
        row.guesses = predict_guesses(lm.evaluator, frame, row.owner.guesses)
    return replace(step, guesses=row.guesses)


class PendingSteps:
    """The steps of some rows of a frame, whose tokens are on their way from a GPU while the next step runs."""

    def __init__(self, frame: Frame[TextRow], chosen: Sequence[int]) -> None:
        self.frame, self.chosen = frame, chosen
        index = torch.tensor(chosen)
        self.is_ready: torch.cuda.Event | None = None
        if frame.tokens.is_cuda:
            tokens = frame.tokens[index.pin_memory().to(frame.tokens.device, non_blocking=True)]
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.is_ready = torch.cuda.Event()
            self.is_ready.record()
        else:
            self.tokens = frame.tokens.cpu()[index]

    def read(self) -> list[StreamStep]:
        """Return the steps, when their tokens have come."""
        if self.is_ready is not None:
            self.is_ready.synchronize()
        return split_frame(self.frame, self.tokens, self.chosen)
