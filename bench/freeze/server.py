"""Probe of `adlm serve`: transcripts of completions, infilling, streams, scores and models."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.freeze.cases import OPEN_TEMPLATES, PROMPTS, TEMPLATES, TEXTS, Case, drop_volatile
from bench.versions import name_options

COMPLETIONS = "/v1/completions"
INFILL = "/v1/infill"
MODELS = ("models/adlm", "models/timed", "models/documents", "models/ar")
CLIENTS = 8
REFUSED: dict[str, dict[str, Any]] = {
    "unknown field": {"prompt": "a", "temprature": 1},
    "unknown model": {"model": "b"},
    "a text for a number": {"n": "two"},
    "above the limit": {"top_p": 1.5},
}


@dataclass(frozen=True)
class Call:
    """A request."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the server answers, but for what differs from run to run; a stream's events listed."""

    status: int
    kind: str
    content: Any


@contextmanager
def start_server(*models: str) -> Iterator[str]:
    """Start `adlm serve` in a process of its own and yield its address."""
    options = ["--port", "0", "--device", "cpu"]
    command = [sys.executable, "-P", "-m", "adlm", "serve", *models, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server stopped: exit code {process.wait()}")
        try:
            yield line.split()[-1]
        finally:
            process.terminate()


def send(address: str, path: str, body: dict[str, Any] | None = None) -> Reply:
    """Send a request and return the reply, also one that says what is wrong."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    try:
        answer = urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        kind = answer.headers["content-type"]
        text = answer.read().decode("utf-8")
    if not kind.startswith("text/event-stream"):
        return Reply(answer.status, kind, drop_volatile(json.loads(text)))
    events = []
    for line in text.split("\n\n"):
        event = line.removeprefix("data: ")
        if event == "[DONE]":
            events.append(event)
        elif event:
            events.append(drop_volatile(json.loads(event)))
    return Reply(answer.status, kind, events)


def list_calls() -> dict[str, Call]:
    """Return requests by name."""
    loop = name_options({"sampler": "remask_loop", "steps": 8, "options": {"eta": 0.3}})
    compat = {"eta": 0.3, "compat": True}
    cap = name_options({"sampler": "remask_cap", "steps": 6, "options": compat})
    prompt = {"prompt": PROMPTS[0], "seed": 3, "max_tokens": 12}
    greedy = {"sampler": "confidence", "temperature": 0, "logprobs": 2}
    between = {"suffix": " the sea.", "min_tokens": 2, "max_tokens": 5}
    causal = {**prompt, "model": "models/ar"}
    bodies: dict[str, dict[str, Any]] = {
        "defaults": {**prompt, "steps": 8},
        "loop": {**prompt, **loop},
        "cap compat": {**prompt, **cap, "top_p": 0.9},
        "several prompts": {**prompt, **loop, "prompt": PROMPTS, "n": 2},
        "blocks": {**prompt, **loop, "block": 5},
        "first hitting": {**prompt, "sampler": "first_hitting", "temperature": 0.7},
        "tokens": {**prompt, **loop, "prompt": [[40, 50, 60], [70, 80]]},
        "echo and stop": {**prompt, **loop, "echo": True, "stop": ["e"]},
        "log-probabilities": {**prompt, **loop, "logprobs": 3},
        "greedy log-probabilities": {**prompt, **greedy},
        "suffix": {**prompt, **loop, **between},
        "timed": {**prompt, **loop, "model": "models/timed"},
        "documents": {**prompt, **loop, "model": "models/documents"},
        "causal": causal,
        "causal several": {**causal, "prompt": PROMPTS, "n": 2, "logprobs": 2},
        "greedy causal": {**causal, "temperature": 0},
        "greedy causal several": {**causal, "temperature": 0, "prompt": PROMPTS, "n": 2},
        "infill": {"template": TEMPLATES[0], "seed": 3},
        "infill loop": {"template": TEMPLATES[0], "seed": 3, **loop, "logprobs": 1},
        "infill open": {"template": OPEN_TEMPLATES[1], "seed": 1},
        "infill several": {"template": TEMPLATES, "seed": 1, "n": 2},
    }
    return {
        name: Call(INFILL if "template" in body else COMPLETIONS, body)
        for name, body in bodies.items()
    }


def iter_stream(title: str, reply: Reply) -> Iterator[Case]:
    """Yield all of a stream: the events of each choice, in which order they come, and the rest.

    An end that comes after its row's last text, in an event of its own, is merged with that text.
    """
    events: dict[int, list[Any]] = {}
    order: list[int | None] = []  # the choice of each event; None: of no choice
    apart = []
    others = []
    for event in reply.content:
        choices = event["choices"] if isinstance(event, dict) else []
        if not choices:
            order.append(None)
            others.append(event)
            continue
        (choice,) = choices
        index = choice["index"]
        before = events.setdefault(index, [])
        if before and is_end_alone(choice):
            apart.append(index)
            (last,) = before[-1]["choices"]
            kept = {name: last[name] for name in ("text", "logprobs")}
            before[-1] = event | {"choices": [choice | kept]}
        else:
            order.append(index)
            before.append(event)
    yield f"{title}: events", sorted(events.items())
    yield f"{title}: order", order
    yield f"{title}: ends apart", sorted(apart)
    usage = [each.pop("usage", None) for each in others if isinstance(each, dict)]
    yield f"{title}: usage", usage
    yield f"{title}: the rest", [reply.status, reply.kind, others]


def is_end_alone(choice: dict[str, Any]) -> bool:
    """Return whether an event says that a choice has ended, and has no text of it."""
    logprobs = choice["logprobs"]
    has_tokens = logprobs is not None and bool(logprobs["tokens"])
    return choice["finish_reason"] is not None and not choice["text"] and not has_tokens


def iter_answer(title: str, reply: Reply) -> Iterator[Case]:
    """Yield the parts of an answer, so that one may be allowed to differ and the others not."""
    rest = dict(reply.content)
    choices = rest.pop("choices")
    yield f"{title}: texts", [choice.pop("text") for choice in choices]
    yield f"{title}: log-probabilities", [choice.pop("logprobs") for choice in choices]
    yield f"{title}: choices", choices
    yield f"{title}: usage", rest.pop("usage")
    yield f"{title}: the rest", [reply.status, reply.kind, rest]


def probe_server(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Transcripts of `adlm serve`."""
    calls = list_calls()
    with start_server(*MODELS) as address:
        for name, call in calls.items():
            yield from iter_answer(name, send(address, call.path, call.body))
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            reply = send(address, call.path, {**call.body, **usage})
            yield from iter_stream(f"{name}, stream", reply)
        for name in ("loop", "blocks", "causal", "greedy causal", "infill"):
            drafts = {"stream": True, "stream_mode": "denoise", "guesses": 2}
            reply = send(address, calls[name].path, {**calls[name].body, **drafts})
            yield f"{name}, drafts: events", [reply.status, reply.kind, reply.content]
        yield from iter_together(address, calls)
        for model in ("models/adlm", "models/ar"):
            body = {"model": model, "text": TEXTS, "draws": 4, "seed": 2}
            yield f"score, {model}", send(address, "/v1/score", body).content
        for path in ("/v1/models", "/v1/models/models/ar", "/healthz", "/readyz"):
            yield path, send(address, path).content
        for name, body in REFUSED.items():
            yield f"{name}: status", send(address, COMPLETIONS, body).status


def iter_together(address: str, calls: dict[str, Call]) -> Iterator[Case]:
    """Yield the texts of requests that share batches.

    Who shares one is chance, and rounding depends on it: log-probabilities do, texts do not.
    """
    with ThreadPoolExecutor(CLIENTS) as pool:
        waiting = {
            name: pool.submit(send, address, call.path, call.body) for name, call in calls.items()
        }
    for name, future in waiting.items():
        answer = future.result().content
        texts = [choice["text"] for choice in answer["choices"]]
        yield f"{name}, together: texts", texts
        yield f"{name}, together: usage", answer["usage"]
