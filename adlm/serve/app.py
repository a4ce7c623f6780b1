"""The HTTP server: OpenAI's completions, infilling and scores, over an engine for each model."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException

from adlm import __version__
from adlm.diffusion.samplers import SAMPLERS
from adlm.serve.engine import (
    ALL,
    SETTLED,
    Engine,
    EngineLimits,
    EngineStats,
    QueueFullError,
    stream_rows,
)
from adlm.serve.protocol import (
    CompletionBody,
    ErrorBody,
    InfillBody,
    ScoreBody,
    describe_draft,
)
from adlm.settings import (
    MAX_SHOWN,
    SamplingSettings,
    SettingsError,
    explain,
    list_kinds,
    list_own_names,
)
from adlm.text.generation import TextFrame, TextRow
from adlm.text.lm import LM
from adlm.view.player import read_asset

log = logging.getLogger("adlm.serve")
MAX_BODY_BYTES = 1 << 20
SCORE_BATCH = 8  # rows that a score evaluates at once while the batch takes its steps
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # of the latency histogram
PAGE_NAMES = ("docs.js", "page.js", "page.css", "player.js", "player.css")
PAGE_FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    **{f"/{name}": name for name in PAGE_NAMES},
}  # by path
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
OPEN_PATHS = ("/healthz", "/readyz", "/openapi.json", *PAGE_FILES)  # without an API key
HEADERS = {  # of all answers; the policy: files of this server and requests to it, nothing else
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
GAUGES: tuple[tuple[str, str, Callable[[Engine], int]], ...] = (
    ("rows_running", "texts in the batch", lambda engine: engine.running),
    ("rows_max", "texts that the batch can hold", lambda engine: engine.limits.max_rows),
    ("rows_waiting", "texts in the queue", lambda engine: len(engine.waiting)),
)
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
KINDS |= dict.fromkeys((500, 503), "server_error")
PLACED = ("n", "max_tokens", "steps", "seed")  # numbers that the page has elsewhere, or not
STEPS = {"integer": 1, "number": "any"}  # of an input, by the type of its number
SHUTDOWN = "the server is shutting down: retry later"


def answer_json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in ASCII JSON, in which even half of a surrogate pair can be sent back."""
    return Response(
        json.dumps(content, allow_nan=False), status, headers, media_type="application/json"
    )


def describe_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def answer_error(
    status: int, message: str, headers: dict[str, str] | None = None, **fields: Any
) -> Response:
    """Return the answer to a request that failed."""
    return answer_json(describe_error(status, message, **fields), status, headers)


def answer_problem(request: Request, error: RequestValidationError) -> Response:
    """Return the answer to a body that is not what its path takes."""
    problems = [problem | {"loc": problem["loc"][1:]} for problem in error.errors()]
    if problems[0]["type"] == "json_invalid":
        (place,), context = problems[0]["loc"], problems[0]["ctx"]
        return answer_error(400, f"the body is not JSON: {context['error']} at character {place}")
    if isinstance(error.body, bytes):  # which was not read as JSON
        kind = request.headers.get("content-type", "missing")
        remedy = "send it with Content-Type: application/json"
        return answer_error(400, f"the type of the body is {kind!r:.{MAX_SHOWN}}: {remedy}")
    if not isinstance(error.body, dict):
        expected = 'expected names with values; send an object, such as {"prompt": "It was"}'
        return answer_error(400, str(SettingsError({"body": error.body}, expected)))
    cause = explain(request.scope["endpoint"].__annotations__["body"], problems, error.body, "json")
    return answer_error(400, str(cause), param=next(iter(cause.values)))


async def answer_exception(request: Request, error: Exception) -> Response:
    """Return the answer to an exception: 400 for a wrong value, 429 for a full queue, 503 during a shutdown."""
    if isinstance(error, RequestValidationError):
        return answer_problem(request, error)
    if isinstance(error, QueueFullError):
        return answer_error(
            error.status, str(error), {"retry-after": str(error.retry_after)}, code=error.code
        )
    if isinstance(error, HTTPException):
        missing = f"there is no {request.url.path}: use /v1/completions, or see /docs for all paths"
        message = missing if error.detail == "Not Found" else str(error.detail)
        return answer_error(error.status_code, message, dict(error.headers or {}))
    if isinstance(error, SettingsError):
        error = error.rename(list_own_names(SamplingSettings, "openai"))
        return answer_error(400, str(error), param=next(iter(error.values)))
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
        for name, help_text, count in GAUGES:
            yield GaugeMetricFamily(f"adlm_{name}", help_text, value=sum(map(count, self.engines)))


class Guard:
    """ASGI middleware: API key, size of bodies, headers, request ids, and metrics of requests."""

    def __init__(
        self, app: Any, *, api_key: str | None, registry: CollectorRegistry, tasks: set[Any]
    ) -> None:
        self.app = app
        self.tasks = tasks
        self.key = None if api_key is None else f"Bearer {api_key}".encode()
        self.requests = Counter(
            "adlm_requests", "HTTP requests", ("path", "status"), registry=registry
        )
        self.seconds = Histogram(
            "adlm_request_seconds",
            "seconds of HTTP requests",
            ("path",),
            registry=registry,
            buckets=SECONDS,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        began = time.perf_counter()
        size = 0
        status = 500
        has_begun = False
        extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        extra.append((b"x-request-id", f"req-{secrets.token_hex(12)}".encode()))

        async def send_more(message: Any) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status = message["status"]
                has_begun = True
                own = dict(message.get("headers", ()))
                added = [pair for pair in extra if pair[0] not in own]
                message = {**message, "headers": [*own.items(), *added]}
            await send(message)

        async def receive_some() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(
                    413, f"the body has more than {MAX_BODY_BYTES:,} bytes: send less"
                )
            return message

        app = self.app
        key = self.key if scope["path"] not in OPEN_PATHS else None
        if key is not None and not hmac.compare_digest(headers.get(b"authorization", b""), key):
            message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
            app = answer_error(401, message, code="invalid_api_key")
        task = asyncio.current_task()
        self.tasks.add(task)
        scope["at_end"] = at_end = AsyncExitStack()  # of the request, however it ends
        try:
            await app(scope, receive_some, send_more)
        except asyncio.CancelledError:  # by the server, which stops; a stream has sent its error
            if not has_begun:
                error = answer_error(503, SHUTDOWN, {"retry-after": "5"}, code="shutting_down")
                await error(scope, receive, send_more)
        except Exception:
            log.exception("a request failed")
            if has_begun:
                raise
            error = answer_error(500, "the server failed: retry the request, and see its log")
            await error(scope, receive, send_more)
        finally:
            self.tasks.discard(task)
            await at_end.aclose()
            path = getattr(scope.get("route"), "path", "other")
            self.requests.labels(path, status).inc()
            self.seconds.labels(path).observe(time.perf_counter() - began)


class Answer:
    """The answer to a request to complete or infill while its texts are sampled."""

    def __init__(
        self, body: CompletionBody | InfillBody, lm: LM, rows: Sequence[TextRow], model: str
    ) -> None:
        self.body = body
        self.lm = lm
        self.rows = rows
        self.is_infill = isinstance(body, InfillBody)
        self.head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "infill" if self.is_infill else "text_completion",
            "created": int(time.time()),
            "model": model,
            "sampler": rows[0].settings.sampler,
            "seed": rows[0].seed,
        }
        self.readers = [body.make_reader(row.layout) for row in rows]
        self.nfe = [0] * len(rows)

    def read(self, frame: TextFrame) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks that a frame makes, of each row to which it adds something."""
        for i, row in enumerate(frame.rows):
            if not row.is_stopped:
                choice = self._read_row(frame, i)
                if choice is not None:
                    yield choice

    def _read_row(self, frame: TextFrame, i: int) -> dict[str, Any] | None:
        row = frame.rows[i]
        ids = frame.ids[i]
        is_done = frame.is_done[i]
        reader = self.readers[row.index]
        self.nfe[row.index] = frame.nfe[i]
        text = reader.read(ids, frame.settled[i], is_done=is_done)
        row.is_stopped = reader.is_stopped
        is_end = is_done or reader.is_stopped
        choice: dict[str, Any] = {
            "index": row.index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
        }
        if is_end:
            is_whole = reader.is_stopped or self.body.is_filling
            choice["finish_reason"] = "stop" if is_whole else "length"
            if self.is_infill:
                pieces = row.layout.pieces(ids)
                choice["fills"] = [piece for piece, is_given in pieces if not is_given]
        if self.body.logprobs is not None and (is_end or self.body.stream):
            choice["logprobs"] = reader.read_logprobs(ids, row.logprobs)
        if self.body.has_drafts:
            choice["draft"] = describe_draft(frame, i)
            if is_done:
                choice["draft"]["settings"] = self.lm.describe(self.rows)
        return choice if text or is_end or "draft" in choice else None

    def count_usage(self) -> dict[str, int]:
        """Return the tokens and network evaluations so far."""
        prompts = [row for row in self.rows if row.number == 0]  # each counts once
        prompt = sum(row.layout.is_fixed.count(True) for row in prompts)
        tokens = sum(reader.generated for reader in self.readers)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }
        return counts | {"nfe": sum(self.nfe)}

    async def stream(self, frames: AsyncIterator[TextFrame]) -> AsyncIterator[bytes]:
        """Yield server-sent events."""
        has_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        extra: dict[str, Any] = {"usage": None} if has_usage else {}
        try:
            async for frame in frames:
                for choice in self.read(frame):
                    yield encode_event({**self.head, "choices": [choice], **extra})
            if has_usage:
                yield encode_event({**self.head, "choices": [], "usage": self.count_usage()})
            yield b"data: [DONE]\n\n"
        except (QueueFullError, asyncio.CancelledError):
            yield encode_event(describe_error(503, SHUTDOWN, code="shutting_down"))
        except Exception:
            log.exception("a stream failed")
            yield encode_event(
                describe_error(500, "the server failed while it sampled: retry the request")
            )

    async def finish(self, frames: AsyncIterator[TextFrame]) -> dict[str, Any]:
        """Return the whole answer."""
        choices: list[dict[str, Any]] = [{} for _ in self.readers]
        async for frame in frames:
            for choice in self.read(frame):
                index = choice["index"]
                choices[index] = choice | {"text": self.readers[index].text}
        return {**self.head, "choices": choices, "usage": self.count_usage()}


def encode_event(content: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(content).encode("ascii") + b"\n\n"


async def run_while_connected(request: Request, work: Awaitable[Any]) -> Response:
    """Return the result of some work as JSON; the work is cancelled when the client leaves."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return answer_json(await task) if task.done() else Response(status_code=499)
    finally:
        for each in (task, watcher):
            each.cancel()


def format_inputs() -> Iterator[str]:
    """Yield the page's input of each number among the settings that has no place of its own there."""
    for name, typed in list_own_names(SamplingSettings, "openai").items():
        field = SamplingSettings.model_fields[name]
        kind = next((each for each in list_kinds(field) if each["type"] in STEPS), None)
        if kind is None or typed in PLACED:
            continue
        # HTML has no limits that are excluded: the server refuses a number on them.
        least = kind.get("minimum", kind.get("exclusiveMinimum", 0) + (kind["type"] == "integer"))
        attributes = {
            "name": typed,
            "type": "number",
            "min": least,
            "max": kind.get("maximum"),
            "step": STEPS[kind["type"]],
            "value": None if field.default is None else f"{field.default:g}",
            "placeholder": "default" if field.default is None else None,
            "title": field.description,
        }
        shown = [
            f'{key}="{escape(str(value))}"'
            for key, value in attributes.items()
            if value is not None
        ]
        label = typed.replace("_", " ").capitalize()
        yield f"<label>{label} <input {' '.join(shown)} data-setting></label>"


def serve_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Make the route of a file: the player's own, or the page's with the player's elements and the settings."""
    if name.startswith("player"):
        content = read_asset(name)
    else:
        content = files("adlm.serve").joinpath("page", name).read_text("utf-8")
        content = content.replace("{{stage}}", read_asset("stage.html"))
        content = content.replace("{{settings}}", "\n      ".join(format_inputs()))

    async def answer(request: Request) -> Response:
        return Response(content, media_type=MEDIA_TYPES[name.rsplit(".")[-1]])

    return answer


def describe_model(name: str, lm: LM) -> dict[str, Any]:
    """Return a model as OpenAI's list has it, with its samplers and the most tokens that a text can have."""
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "adlm",
        "method": lm.method,
    }
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
    engine = Engine(lm, limits)
    model = name or lm.name
    engines = {model: engine} | {each.name: Engine(each, limits) for each in others}
    if len(engines) <= len(others):
        raise ValueError(
            f"two models have the same name, {', '.join(each.name for each in others)}: rename a folder"
        )
    cards = {each: describe_model(each, served.lm) for each, served in engines.items()}
    tasks = set[asyncio.Task[Any]]()  # of open requests
    registry = CollectorRegistry()
    registry.register(EngineCollector(engines.values()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for each in engines.values():
            each.start()
        yield
        await asyncio.gather(
            *(asyncio.to_thread(partial(each.stop, drain=True)) for each in engines.values())
        )

    app = FastAPI(
        title="adlm",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.engine = engine
    for path, file in PAGE_FILES.items():
        app.add_route(path, serve_file(file), include_in_schema=False)
    app.state.requests = tasks
    app.add_middleware(Guard, api_key=api_key, registry=registry, tasks=tasks)
    for kind in (RequestValidationError, HTTPException, QueueFullError, ValueError):
        app.add_exception_handler(kind, answer_exception)

    def find_model(wanted: str | None) -> str:
        if wanted is not None and wanted not in engines:
            raise HTTPException(
                404,
                f"there is no model {wanted!r}: this server has {', '.join(map(repr, engines))}",
            )
        return wanted or model

    async def answer(body: CompletionBody | InfillBody, http: Request) -> Response:
        """Sample the texts; they are laid out in the engine's thread where the model chooses lengths of holes."""
        name = find_model(body.model)
        engine = engines[name]
        engine.limits.check_size(len(body.texts) * (body.n or 1), body.steps)
        layout_rows = partial(body.layout_rows, engine.lm)
        if body.is_filling:
            rows = await asyncio.wrap_future(engine.call(layout_rows))
        else:
            rows = await asyncio.to_thread(layout_rows)
        answer = Answer(body, engine.lm, rows, name)
        wanted = ALL if body.has_drafts else SETTLED
        guesses = body.guesses if body.has_drafts else None
        stream = stream_rows(engine, rows, wanted, guesses=guesses, logprobs=body.logprobs)
        frames = await http.scope["at_end"].enter_async_context(stream)
        if body.stream:
            return StreamingResponse(answer.stream(frames), media_type="text/event-stream")
        return await run_while_connected(http, answer.finish(frames))

    @app.post("/v1/completions", responses=STREAMED)
    async def create_completion(body: CompletionBody, http: Request) -> Response:
        """Generate texts after prompts, or between prompts and a suffix."""
        return await answer(body, http)

    @app.post("/v1/infill", responses=STREAMED)
    async def infill(body: InfillBody, http: Request) -> Response:
        """Fill the holes of templates."""
        return await answer(body, http)

    @app.post("/v1/score")
    async def score(body: ScoreBody, http: Request) -> Response:
        """Return nats per token of texts, an upper bound for masked models."""
        name = find_model(body.model)
        engine = engines[name]

        async def compute() -> dict[str, Any]:
            scores = []
            for text in [body.text] if isinstance(body.text, str) else body.text:
                call = partial(
                    engine.lm.score, text, draws=body.draws, seed=body.seed, batch=SCORE_BATCH
                )
                scores += await asyncio.wrap_future(engine.call(call))
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

    @app.get("/readyz")
    async def check_readiness() -> Response:
        """Say whether requests are answered."""
        is_ready = all(each.is_ready for each in engines.values())
        return answer_json({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Return metrics in Prometheus' format."""
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app
