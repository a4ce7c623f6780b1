"""The HTTP server: OpenAI's completions, infilling and scores over one engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException

from adlm import __version__
from adlm.methods import SAMPLERS
from adlm.serve.engine import (
    ALL,
    SETTLED,
    Engine,
    EngineLimits,
    EngineStats,
    QueueFullError,
    RowFrame,
    generate_rows,
    stream_rows,
)
from adlm.serve.page import PAGE_PATHS, add_page
from adlm.serve.protocol import CompletionBody, InfillBody, ScoreBody, TextReader, describe_draft
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow

log = logging.getLogger("adlm.serve")
MAX_BODY_BYTES = 1 << 20
MAX_SCORED_TEXTS = 64
OPEN_PATHS = ("/healthz", "/readyz", *PAGE_PATHS)  # without an API key
HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class AsciiJSONResponse(JSONResponse):
    """JSON in which even half of a surrogate pair can be sent back."""

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return json.dumps(content, allow_nan=False).encode("ascii")


def describe_error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_error(status: int, message: str, headers: dict[str, str] | None = None, **fields: Any) -> Response:
    """Return the answer to a request that failed."""
    return AsciiJSONResponse(describe_error(status, message, **fields), status, headers)


async def answer_exception(request: Request, error: Exception) -> Response:
    """Return the answer to an exception: 400 for a wrong value, 429 for a full queue."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "extra_forbidden":
            return answer_error(400, f"unknown field {place[-1]!r}: leave it out", param=place[-1])
        where = f"field {'.'.join(place)}" if place else "the body"
        return answer_error(400, f"{where}: {first['msg']}", param=place[0] if place else None)
    if isinstance(error, QueueFullError):
        headers = {"retry-after": str(error.retry_after)}
        return answer_error(429, str(error), headers, code="queue_full")
    if isinstance(error, HTTPException):
        return answer_error(error.status_code, str(error.detail), dict(error.headers or {}))
    return answer_error(400, str(error))


class EngineCollector:
    """Reads the counts of all engines when metrics are asked for."""

    def __init__(self, engines: Collection[Engine]) -> None:
        self.engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for name in asdict(EngineStats()):
            total = sum(getattr(engine.stats, name) for engine in self.engines)
            yield CounterMetricFamily(f"adlm_{name}", f"{name} since the start", value=total)
        running, room, waiting = (
            sum(column) for column in zip(*((x.running, x.limits.max_rows, len(x.waiting)) for x in self.engines))
        )
        yield GaugeMetricFamily("adlm_rows_running", "texts in the batch", value=running)
        yield GaugeMetricFamily("adlm_rows_max", "texts that the batch can hold", value=room)
        yield GaugeMetricFamily("adlm_rows_waiting", "texts in the queue", value=waiting)


class Guard:
    """ASGI middleware: API key, size of bodies, headers, request ids, and metrics of requests."""

    def __init__(self, app: Any, *, api_key: str | None, registry: CollectorRegistry) -> None:
        self.app, self.key = app, None if api_key is None else f"Bearer {api_key}".encode()
        labels = ("path", "status")
        self.requests = Counter("adlm_requests", "HTTP requests", labels, registry=registry)
        self.seconds = Histogram("adlm_request_seconds", "seconds of HTTP requests", labels[:1], registry=registry)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, began, size, status = dict(scope["headers"]), time.perf_counter(), 0, 500
        extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        extra.append((b"x-request-id", f"req-{secrets.token_hex(12)}".encode()))

        async def send_more(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = dict(message.get("headers", ()))
                message = {**message, "headers": [*own.items(), *(pair for pair in extra if pair[0] not in own)]}
            await send(message)

        async def receive_some() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES:,} bytes: send less")
            return message

        app, length = self.app, headers.get(b"content-length", b"0")
        key = self.key if scope["path"] not in OPEN_PATHS else None
        if key is not None and not hmac.compare_digest(headers.get(b"authorization", b""), key):
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            app = answer_error(401, message, code="invalid_api_key")
        if not length.isdigit() or int(length[:12]) > MAX_BODY_BYTES:
            app = answer_error(413, f"the body has more than {MAX_BODY_BYTES:,} bytes: send less")
        try:
            await app(scope, receive_some, send_more)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.requests.labels(path, status).inc()
            self.seconds.labels(path).observe(time.perf_counter() - began)


class Completion:
    """A request to /v1/completions while it is answered."""

    def __init__(self, body: CompletionBody, request: GenerationRequest, model: str) -> None:
        self.body, self.request = body, request
        self.head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        self.head |= {"model": model, "seed": request.config.seed}
        self.readers = [TextReader(layout, body.stops) for layout, _ in request.rows]
        self.nfe, self.skipped, self.begun = [0] * len(self.readers), set[int](), set[int]()

    def read(self, frame: RowFrame) -> dict[str, Any] | None:
        """Return the choice of a chunk that a frame makes, if it adds something."""
        reader, self.nfe[frame.index] = self.readers[frame.index], frame.nfe
        text = reader.read(frame)
        if self.body.echo and frame.index not in self.begun:
            text = reader.layout.pieces(frame.ids)[0][0] * (reader.span is not reader.layout.spans[0]) + text
        self.begun.add(frame.index)
        reason = None
        if frame.is_done or reader.is_stopped:
            self.skipped.add(frame.index)
            reason = "stop" if reader.is_stopped or self.body.suffix else "length"
        choice = {"index": frame.index, "text": text, "logprobs": None, "finish_reason": reason}
        if self.body.has_drafts:
            choice["draft"] = describe_draft(frame, self.request, self.body.guesses)
        return choice if text or reason or "draft" in choice else None

    def count_usage(self) -> dict[str, int]:
        """Return the tokens and network evaluations so far."""
        prompt = sum(sum(layout.is_fixed) for layout in self.request.layouts)
        tokens = sum(reader.tokens for reader in self.readers)
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return counts | {"nfe": sum(self.nfe)}

    def stream(self, frames: AsyncGenerator[RowFrame]) -> AsyncIterator[bytes]:
        """Return server-sent events."""
        if self.body.stream_options is None or not self.body.stream_options.include_usage:
            return stream_events(frames, self.read, self.head)
        return stream_events(frames, self.read, self.head | {"usage": None}, self.count_usage)

    async def finish(self, frames: AsyncGenerator[RowFrame]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [{"index": i, "text": "", "logprobs": None} for i in range(len(self.readers))]
        async with aclosing(frames):
            async for frame in frames:
                if (choice := self.read(frame)) is not None:
                    choices[frame.index] |= choice | {"text": choices[frame.index]["text"] + choice["text"]}
        return {**self.head, "choices": choices, "usage": self.count_usage()}


async def stream_events(
    frames: AsyncGenerator[RowFrame],
    read: Callable[[RowFrame], dict[str, Any] | None],
    head: dict[str, Any],
    count_usage: Callable[[], dict[str, int]] | None = None,
) -> AsyncIterator[bytes]:
    """Yield server-sent events: a chunk for each frame of which a choice is read, then the usage."""
    try:
        async with aclosing(frames):
            async for frame in frames:
                if (choice := read(frame)) is not None:
                    yield encode_event({**head, "choices": [choice]})
        if count_usage is not None:
            yield encode_event({**head, "choices": [], "usage": count_usage()})
        yield b"data: [DONE]\n\n"
    except Exception:
        log.exception("a stream failed")
        yield encode_event(describe_error(500, "the server failed while it sampled: retry the request"))


def encode_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(content).encode("ascii") + b"\n\n"


async def run_while_connected(request: Request, work: Awaitable[Any]) -> Response:
    """Return the result of some work as JSON; the work is cancelled when the client leaves."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return AsciiJSONResponse(await task) if task.done() else Response(status_code=499)
    finally:
        for each in (task, watcher):
            each.cancel()


def describe_fill(row: GeneratedRow, index: int) -> dict[str, Any]:
    """Return a filled template as a choice."""
    return {"index": index, "text": row.text, "fills": [text for text, is_given in row.pieces if not is_given]}


def describe_model(name: str, lm: LM) -> dict[str, Any]:
    """Return a model as OpenAI's list has it, with its samplers and the most tokens that a text can have."""
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "adlm", "method": lm.method}
    samplers = [] if lm.row_format.is_causal else list(SAMPLERS)
    return card | {"samplers": samplers, "max_tokens": lm.row_format.longest}


def create_app(
    lm: LM,
    *,
    limits: EngineLimits | None = None,
    api_key: str | None = None,
    name: str | None = None,
    others: Sequence[LM] = (),
) -> FastAPI:
    """Make the ASGI app of a model, and of others that requests name; their engines start and stop with it."""
    engine, model = Engine(lm, limits), name or lm.name
    engines = {model: engine} | {each.name: Engine(each, limits) for each in others}
    if len(engines) <= len(others):
        raise ValueError(f"two models have the same name, {', '.join(each.name for each in others)}: rename a folder")
    cards = {each: describe_model(each, served.lm) for each, served in engines.items()}
    registry = CollectorRegistry()
    registry.register(EngineCollector(engines.values()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in engines.values():
            each.start()
        yield
        await asyncio.gather(*(asyncio.to_thread(partial(each.stop, drain=True)) for each in engines.values()))

    app = FastAPI(title="adlm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    add_page(app)
    app.add_middleware(Guard, api_key=api_key, registry=registry)
    for kind in (RequestValidationError, HTTPException, QueueFullError, ValueError):
        app.add_exception_handler(kind, answer_exception)

    async def answer_failure(request: Request, error: Exception) -> Response:
        return answer_error(500, "the server failed: retry the request, and see its log")

    app.add_exception_handler(Exception, answer_failure)

    async def build(body: CompletionBody | InfillBody, is_filling: bool) -> tuple[Engine, GenerationRequest]:
        """Build a request: in the engine's thread where the model chooses the lengths of holes."""
        engine = engines[find_model(body.model)]
        if body.guesses is not None and not body.has_drafts:
            raise ValueError(
                "guesses are sent with every frame: set stream_mode to denoise (to infill, stream to true)"
            )
        make = partial(body.build_request, engine.lm)
        request = await (asyncio.wrap_future(engine.call(make)) if is_filling else asyncio.to_thread(make))
        engine.limits.check_request(request)
        return engine, request

    def find_model(wanted: str | None) -> str:
        if wanted is not None and wanted not in engines:
            raise HTTPException(404, f"there is no model {wanted!r}: this server has {', '.join(map(repr, engines))}")
        return wanted or model

    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionBody, http: Request) -> Response:
        """Generate texts after prompts, or between prompts and a suffix."""
        engine, request = await build(body, bool(body.suffix))
        completion = Completion(body, request, find_model(body.model))
        mode = ALL if body.has_drafts else SETTLED
        frames = stream_rows(engine, request, mode, completion.skipped, body.guesses)
        if body.stream:
            return StreamingResponse(completion.stream(frames), media_type="text/event-stream")
        return await run_while_connected(http, completion.finish(frames))

    @app.post("/v1/infill", response_model=None)
    async def infill(body: InfillBody, http: Request) -> Response:
        """Fill the holes of templates; a stream has a draft for every frame, and the texts in the last ones."""
        engine, request = await build(body, True)
        settings = {key: request.settings[key] for key in ("sampler", "seed")}
        head = {"object": "infill", "model": find_model(body.model), **settings}

        async def fill() -> dict[str, Any]:
            rows = await generate_rows(engine, request)
            choices, usage = [describe_fill(row, i) for i, row in enumerate(rows)], sum(row.nfe for row in rows)
            return {**head, "choices": choices, "usage": {"nfe": usage}}

        def read(frame: RowFrame) -> dict[str, Any]:
            draft = {"index": frame.index, "draft": describe_draft(frame, request, body.guesses)}
            return draft | describe_fill(frame.row, frame.index) if frame.is_done else draft

        if body.stream:
            events = stream_events(stream_rows(engine, request, ALL, guesses=body.guesses), read, head)
            return StreamingResponse(events, media_type="text/event-stream")
        return await run_while_connected(http, fill())

    @app.post("/v1/score", response_model=None)
    async def score(body: ScoreBody, http: Request) -> Response:
        """Return nats per token of texts, an upper bound for masked models."""
        name = find_model(body.model)
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not 1 <= len(texts) <= MAX_SCORED_TEXTS:
            raise ValueError(f"text has {len(texts)} texts: give 1 to {MAX_SCORED_TEXTS}")

        async def compute() -> dict[str, Any]:
            scores = []
            for text in texts:  # one by one: between two of them the batch takes steps
                call = partial(engines[name].lm.score, text, draws=body.draws, seed=body.seed)
                scores += await asyncio.wrap_future(engines[name].call(call))
            return {"object": "list", "model": name, "data": [asdict(each) for each in scores]}

        return await run_while_connected(http, compute())

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the models."""
        return {"object": "list", "data": list(cards.values())}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        """Describe a model."""
        return cards[find_model(model_id)]

    @app.get("/healthz")
    async def check_health() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=None)
    async def check_readiness() -> Response:
        """Say whether requests are answered."""
        is_ready = all(each.is_ready for each in engines.values())
        return AsciiJSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        """Return metrics in Prometheus' format."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app
