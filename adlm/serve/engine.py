"""The serving engine: a queue of requests, and one thread that samples all of them in one running batch."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any, Self, TypeVar

import torch

from adlm.diffusion.sampling import Frame, RowsError, RunningBatch
from adlm.text.generation import TextFrame, TextRow, select_rows, show_frame
from adlm.text.lm import LM
from adlm.text.templates import classify_tokens

log = logging.getLogger("adlm.serve")
T = TypeVar("T")
MAX_UNREAD = 256  # steps whose frames are kept for a slow client
LAST, SETTLED, ALL = "last", "settled", "all"  # the frames of a row that are delivered
# A frame, whose rows are delivered, and when its tokens have come from a GPU.
Delivery = tuple[Frame[TextRow], list[int], torch.cuda.Event | None]


class QueueFullError(RuntimeError):
    """The queue has no room for a request; `retry_after` is a guess in seconds."""

    status = 429  # of the HTTP answer
    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(f"{message}: retry later")
        self.retry_after = retry_after


class ShutdownError(QueueFullError):
    """The engine takes no more requests."""

    status = 503
    code = "shutting_down"


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
        """Raise if a request is for too many texts, or for texts of too many steps, before they are laid out."""
        allowed = min(self.max_texts, self.max_rows + self.max_waiting)  # more never fit
        if count > allowed:
            raise ValueError(
                f"the request is for {count} texts, at most {allowed} are allowed: ask for fewer"
            )
        if steps is not None and steps > self.max_steps:
            raise ValueError(
                f"a text takes {steps} steps, at most {self.max_steps} are allowed: use fewer steps"
            )


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


Notify = Callable[[TextFrame | Exception], None]


@dataclass(eq=False)
class Ticket:
    """A request in the engine; `notify` is called in the engine's thread with its frames, or with an error."""

    rows: Sequence[TextRow]
    notify: Notify
    frames: str = LAST
    guesses: int | None = None  # of the anchor network, in every frame; None: frames without tokens
    logprobs: int | None = None  # likeliest tokens recorded with each draw; None: no logprobs
    is_over: bool = False  # cancelled or failed: none of its rows is wanted
    last: TextFrame | None = None  # with guesses, that was sent

    def send(self, news: TextFrame | Exception) -> None:
        """Call `notify`; a request whose event loop is closed is cancelled."""
        try:
            self.notify(news)
        except RuntimeError:
            log.warning("the receiver of a request has gone; it is cancelled")
            self.is_over = True


class Turns:
    """Turns of two threads to use the model; where they are not needed, both use it at the same time."""

    def __init__(self, is_needed: bool) -> None:
        self.is_needed = is_needed
        self.turn = threading.Lock()
        self.next_turn = threading.Lock()

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
        self.lm = lm
        self.limits = limits or EngineLimits()
        self.stats = EngineStats()
        self.wake = threading.Condition()  # guards what follows
        self.waiting = deque[TextRow]()
        self.calls = set[Future[Any]]()
        self.is_stopping = False
        self.is_draining = False
        self.running = 0  # rows in the batch
        self.seconds_per_text = 1.0  # a moving average, for Retry-After
        self.thread: threading.Thread | None = None
        self.pool = ThreadPoolExecutor(1, "adlm-calls")
        # On a GPU a prediction is valid until the next one.
        self.turns = Turns(lm.device.type == "cuda")
        self.batch = make_batch(lm)
        self.pending = deque[Delivery]()
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
            self.is_stopping = True
            self.is_draining = drain
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
        self.limits.check_size(len(rows), count_steps(rows))
        for row in rows:
            row.ticket = ticket
            row.top_logprobs = ticket.logprobs
            row.every_step = ticket.frames == ALL
        with self.wake:
            self._require_running()
            count = len(self.waiting) + self.running
            most = self.limits.max_rows + self.limits.max_waiting
            if count + len(rows) > most:
                self.stats.rejected += 1
                seconds = round(self.seconds_per_text * count / self.limits.max_rows)
                message = f"{count} texts are running or waiting, at most {most} may, {len(rows)} are requested"
                raise QueueFullError(message, max(1, min(60, seconds)))
            self.waiting.extend(rows)
            self.wake.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request: it leaves the queue now, the batch before the next step."""
        with self.wake:
            ticket.is_over = True
            self.waiting = deque(row for row in self.waiting if row.ticket is not ticket)

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
                while not (self._has_work() or self.is_stopping):
                    self.wake.wait()
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
                self.batch = make_batch(self.lm)
                self.running = 0
                self.pending.clear()
        with self.wake:
            rows = [*self.open, *self.waiting]
            self.waiting = deque()
            self.running = 0
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
        failed = {row.ticket for row in error.rows if isinstance(row, TextRow)}
        gone = [row for row in self.open if row.ticket in failed]
        fail(gone, error.cause)
        for row in gone:
            self.open.pop(row)
        self.batch.leave(gone)
        with self.wake:
            self.waiting = deque(row for row in self.waiting if row.ticket not in failed)
            self.running = len(self.batch.rows)

    def _count_leaving(self, rows: Sequence[TextRow]) -> None:
        """Count rows that leave."""
        for row in rows:
            if row.ticket.is_over and not row.is_stopped:
                self.stats.cancelled += 1
            else:
                self.stats.texts += 1
                self.stats.tokens += row.layout.is_fixed[: row.delivered].count(False)

    def _step(self) -> None:
        """Take a step and deliver the frames: on a GPU those of the step before, without waiting for this one."""
        began = time.perf_counter()
        frame = self.batch.step()
        self.stats.steps += 1
        self.stats.row_steps += len(frame.rows)
        self.stats.nfe += len(self.batch.evaluated)
        chosen = choose_rows(frame)
        done = list(compress(frame.rows, frame.is_done))
        if done:
            mean_steps = sum(compress(frame.steps, frame.is_done)) / len(done)
            seconds = (time.perf_counter() - began) * mean_steps
            self.seconds_per_text += 0.2 * (seconds - self.seconds_per_text)
        self._count_leaving(done)
        with self.wake:
            self.running = len(self.batch.rows)
        keep = 0
        if chosen:
            is_ready = None
            if frame.tokens.is_cuda:
                tokens = torch.empty_like(frame.tokens, device="cpu", pin_memory=True)
                frame.tokens = tokens.copy_(frame.tokens, non_blocking=True)
                is_ready = torch.cuda.Event()
                is_ready.record()
                keep = 1 if self.batch.rows else 0
            else:
                frame.tokens = frame.tokens.cpu()
            self.pending.append((frame, chosen, is_ready))
        self._deliver(keep)

    def _deliver(self, keep: int = 0) -> None:
        """Deliver the frames that are pending, but for some of the last: to each request the part of its rows."""
        while len(self.pending) > keep:
            frame, chosen, is_ready = self.pending.popleft()
            if is_ready is not None:
                is_ready.synchronize()
            parts: dict[Ticket, list[int]] = {}
            for i in chosen:
                row = frame.rows[i]
                if is_skipped(row):
                    self.open.pop(row, None)
                else:
                    parts.setdefault(row.ticket, []).append(i)
            for ticket, places in parts.items():
                part = select_rows(frame, places)
                try:
                    self._show(part, ticket)
                except Exception as error:
                    log.exception("a frame cannot be shown; its request is answered with an error")
                    self._drop(RowsError(ticket.rows, error))
                    continue
                ticket.send(part)
                for row in compress(part.rows, part.is_done):
                    self.open.pop(row, None)

    def _show(self, frame: TextFrame, ticket: Ticket) -> None:
        """Add the guesses that a request wants to a frame of its rows."""
        if ticket.guesses is not None:
            show_frame(frame, ticket.last, self.lm.evaluator, ticket.guesses)
            ticket.last = frame


@asynccontextmanager
async def stream_rows(
    engine: Engine, rows: Sequence[TextRow], frames: str = SETTLED, **fields: Any
) -> AsyncIterator[AsyncIterator[TextFrame]]:
    """Context manager: submit rows, with `fields` of their Ticket, and yield their frames; at its end they leave."""
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[TextFrame | Exception]()

    def notify(news: TextFrame | Exception) -> None:
        is_last = isinstance(news, Exception) or any(news.is_done)  # a last frame has all text
        if is_last or queue.qsize() < MAX_UNREAD:
            loop.call_soon_threadsafe(queue.put_nowait, news)

    async def read_frames() -> AsyncIterator[TextFrame]:
        left = set(rows)
        while any(not row.is_stopped for row in left):
            news = await queue.get()
            if isinstance(news, QueueFullError):
                raise news
            if isinstance(news, Exception):
                raise RuntimeError("sampling has failed") from news
            left.difference_update(compress(news.rows, news.is_done))
            yield news

    ticket = engine.submit(Ticket(rows, notify, frames, **fields))
    try:
        yield read_frames()
    finally:
        engine.cancel(ticket)


async def fill_rows(engine: Engine, rows: Sequence[TextRow]) -> None:
    """Sample rows."""
    async with stream_rows(engine, rows, LAST) as frames:
        async for _ in frames:
            pass  # a row that is done has its tokens


def make_batch(lm: LM) -> RunningBatch[TextRow]:
    """Return an empty batch of a model."""
    return RunningBatch(lm.evaluator, banned=classify_tokens(lm.tokenizer).banned)


def count_steps(rows: Sequence[TextRow]) -> int | None:
    """Return how many steps rows that were laid out together take, where it is known."""
    settings = rows[0].settings
    if settings.block is None or settings.steps is None:
        return rows[0].planned_steps
    longest = max(len(row.layout) for row in rows)
    return settings.steps * math.ceil(longest / settings.block)  # every block takes all of them


def is_skipped(row: TextRow) -> bool:
    """Whether a row is no longer wanted."""
    return row.is_stopped or row.ticket.is_over


def fail(rows: Sequence[TextRow], error: Exception) -> None:
    """Answer the requests of rows with an error, but for those that are over."""
    for ticket in dict.fromkeys(row.ticket for row in rows):
        if not ticket.is_over:
            ticket.is_over = True
            ticket.send(error)


def choose_rows(frame: Frame[TextRow]) -> list[int]:
    """Return the rows whose frames are wanted: the last ones, those with newly settled text, or all."""
    chosen = []
    for i, row in enumerate(frame.rows):
        wants = row.ticket.frames
        is_settled = wants == SETTLED and frame.settled[i] > row.delivered
        if frame.is_done[i] or wants == ALL or is_settled:
            chosen.append(i)
            row.delivered = frame.settled[i]
    return chosen
