"""The HTTP server, through a test client: OpenAI's form, errors, limits, security; texts equal those of the LM."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm import LM, Hole
from adlm.text.templates import classify_tokens
from tests.serve.test_engine import wait_for
from tests.text.models import lm

if os.environ.get("ADLM_ALL") != "1":
    for extra in ("fastapi", "prometheus_client", "httpx"):
        pytest.importorskip(extra)

from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect

from adlm.serve.app import MAX_BODY_BYTES, create_app
from adlm.serve.engine import EngineLimits, Ticket
from adlm.serve.protocol import TextReader

QUICK = {"steps": 6, "seed": 3, "max_tokens": 12}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(lm(), name="small"), raise_server_exceptions=False) as client:
        yield client


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith(
        "text/event-stream"
    )
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def join_chunks(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        each["text"] for chunk in chunks for each in chunk["choices"] if each["index"] == index
    )


def test_a_completion_is_the_text_of_the_model(client: TestClient) -> None:
    answer = complete(client, model="small", prompt=["the cat", "a"], n=2, **QUICK)
    expected = lm().generate(["the cat", "a"], n=2, max_new_tokens=12, steps=6, seed=3)
    prompts = ["the cat", "the cat", "a", "a"]
    assert [
        p + c["text"] for p, c in zip(prompts, answer["choices"], strict=True)
    ] == expected.texts
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert (
        answer["object"] == "text_completion"
        and answer["id"].startswith("cmpl-")
        and answer["seed"] == 3
    )
    assert answer["usage"]["nfe"] == sum(expected.nfe_each)
    echoed = complete(client, prompt="the cat", echo=True, **QUICK)["choices"][0]["text"]
    assert echoed == lm().generate("the cat", max_new_tokens=12, steps=6, seed=3)[0]


@pytest.mark.parametrize("sampler", ["remask_loop", "ancestral", "confidence", "remask_conf"])
@pytest.mark.parametrize("block", [None, 4])
def test_joined_chunks_are_the_whole_text(
    client: TestClient, sampler: str, block: int | None
) -> None:
    body = {"prompt": "the", "n": 2, "sampler": sampler, "block": block, **QUICK}
    whole, chunks = (
        complete(client, **body),
        stream(client, **body, stream_options={"include_usage": True}),
    )
    assert [join_chunks(chunks, i) for i in (0, 1)] == [
        choice["text"] for choice in whole["choices"]
    ]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    reasons = [each["finish_reason"] for chunk in chunks for each in chunk["choices"]]
    assert sum(reason is not None for reason in reasons) == 2
    if sampler == "ancestral":
        assert len(chunks) > 4, "text is sent before the end"


def test_denoise_mode_sends_every_frame(client: TestClient) -> None:
    chunks = stream(client, prompt="the", stream_mode="denoise", **QUICK)
    steps = list(lm().stream("the", max_new_tokens=12, steps=6, seed=3))[1:]
    assert [chunk["choices"][0]["draft"]["text"] for chunk in chunks] == [
        step.texts[0] for step in steps
    ]
    assert join_chunks(chunks) == complete(client, prompt="the", **QUICK)["choices"][0]["text"]


def replay_logprobs(model: LM, **settings: Any) -> list[float]:
    """The log-probability of every token after the prompt when it was drawn last, by evaluating every state again."""
    rows, drawn, before = model.layout_rows("the", **settings), dict[int, float](), None
    layout = rows[0].layout
    banned = classify_tokens(model.tokenizer).banned[torch.tensor(layout.kinds)]
    for step in model.stream_rows(rows):
        if before is not None:
            tokens = before.tokens.clamp(max=model.model.config.vocab_size - 1)
            features = model.evaluator.model(tokens, torch.zeros(1)).final[0]
            logits = model.evaluator.logits_at(features)
            if model.row_format.is_causal:
                logits = logits.roll(1, 0)
            logprobs = logits.masked_fill(banned[:, : logits.shape[1]], -torch.inf).log_softmax(-1)
            for at in (step.changed & ~step.is_hidden)[0].nonzero()[:, 0].tolist():
                drawn[at] = float(logprobs[at, step.tokens[0, at]])
        before = step
    return [drawn[at] for at, is_fixed in enumerate(layout.is_fixed) if not is_fixed]


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_logprobs_are_those_of_the_last_draws(method: str) -> None:
    own = {"steps": 24, "sampler": "remask_loop"} if method == "adlm" else {}
    settings: dict[str, Any] = {"seed": 3, "temperature": 0.7, "top_p": 0.8, **own}
    expected = replay_logprobs(lm(method), max_new_tokens=12, **settings)
    with TestClient(create_app(lm(method))) as client:
        body = {"prompt": "the", "max_tokens": 12, "logprobs": 2, **settings}
        (choice,) = complete(client, **body)["choices"]
        columns = choice["logprobs"]
        count = len(columns["tokens"])
        assert columns["token_logprobs"] == pytest.approx(expected[:count], abs=1e-4)
        assert count == 12 or choice["finish_reason"] == "stop"
        assert "".join(columns["tokens"]) == choice["text"]
        assert columns["text_offset"] == [len("".join(columns["tokens"][:i])) for i in range(count)]
        for token, logprob, top in zip(
            *(columns[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
        ):
            assert top[token] == logprob and 1 <= len(top) <= 3 and max(top.values()) >= logprob
        chunks = [chunk["choices"][0]["logprobs"] for chunk in stream(client, **body)]
        assert {
            key: [value for chunk in chunks for value in chunk[key]] for key in columns
        } == columns
        (echoed,) = complete(client, **{**body, "echo": True, "logprobs": 0})["choices"]
        assert echoed["text"] == "the" + choice["text"] and echoed["logprobs"]["tokens"][:3] == [
            "t",
            "h",
            "e",
        ]
        assert echoed["logprobs"]["token_logprobs"] == [None] * 3 + columns["token_logprobs"]
        assert echoed["logprobs"]["text_offset"][3:] == [
            3 + offset for offset in columns["text_offset"]
        ]
        cut = complete(client, **body, stop=choice["text"][4])["choices"][0]
        assert (
            "".join(cut["logprobs"]["tokens"]).startswith(cut["text"])
            and len(cut["logprobs"]["tokens"]) <= 5
        )


def test_prompts_may_be_token_ids(client: TestClient) -> None:
    texts = ["the cat", "a"]
    ids = [lm().tokenizer.encode(text) for text in texts]
    expected = complete(client, prompt=texts, echo=True, **QUICK)
    answer = complete(client, prompt=ids, echo=True, **QUICK)
    assert answer["choices"] == expected["choices"] and answer["usage"] == expected["usage"]
    whole = {"steps": 6, "seed": 3}  # as long as the model allows
    assert (
        complete(client, prompt=ids[0], **whole)["choices"]
        == complete(client, prompt=texts[0], **whole)["choices"]
    )
    response = client.post("/v1/completions", json={"prompt": [lm().tokenizer.mask_id]})
    assert (
        response.status_code == 400
        and "give ids of text tokens" in response.json()["error"]["message"]
    )


def test_stop_sequences_cut_the_text(client: TestClient) -> None:
    whole = complete(client, prompt="the", sampler="ancestral", **QUICK)["choices"][0]["text"]
    stop = whole[3:5]
    body = {"prompt": "the", "sampler": "ancestral", "stop": [stop, "never in it"], **QUICK}
    (choice,) = complete(client, **body)["choices"]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    assert join_chunks(stream(client, **body)) == choice["text"]


def test_a_suffix_infills(client: TestClient) -> None:
    (choice,) = complete(client, prompt="the ", suffix=" sat", min_tokens=2, max_tokens=4, seed=1)[
        "choices"
    ]
    (expected,) = lm().infill([["the ", Hole(2, 4), " sat"]], seed=1)
    assert "the " + choice["text"] + " sat" == expected and choice["finish_reason"] == "stop"
    answer = client.post("/v1/infill", json={"template": "the ___{3} sat ___{2}", "seed": 1}).json()
    row = lm().infill("the ___{3} sat ___{2}", seed=1).rows[0]
    assert answer["choices"][0]["text"] == row.text
    assert answer["choices"][0]["fills"] == [text for text, is_given in row.pieces if not is_given]


@pytest.mark.parametrize("template", ["the ___{3} sat ___{2}", "___{4}.", "a ___{2} b ___{2} "])
def test_infilling_streams(client: TestClient, template: str) -> None:
    body = {
        "template": [template, "x ___{2}"],
        "n": 2,
        "seed": 1,
        "sampler": "ancestral",
        "steps": 12,
    }
    whole = client.post("/v1/infill", json=body).json()
    chunks = stream(client, "/v1/infill", **body, stream_options={"include_usage": True})
    assert [join_chunks(chunks, i) for i in range(4)] == [
        choice["text"] for choice in whole["choices"]
    ]
    last = {
        each["index"]: each
        for chunk in chunks
        for each in chunk["choices"]
        if each["finish_reason"]
    }
    assert [last[i]["fills"] for i in range(4)] == [choice["fills"] for choice in whole["choices"]]
    assert chunks[-1]["usage"] == whole["usage"] and len(chunks) > 5, "text is sent before the end"
    drafts = stream(client, "/v1/infill", template=template, seed=1, stream_mode="denoise")
    steps = list(lm().stream(template=template, seed=1))[1:]
    assert [chunk["choices"][0]["draft"]["text"] for chunk in drafts] == [
        step.texts[0] for step in steps
    ]


def test_scores_are_those_of_the_model(client: TestClient) -> None:
    data = client.post("/v1/score", json={"text": ["the cat", "a dog"], "draws": 8}).json()["data"]
    assert [each["nll"] for each in data] == pytest.approx(
        [each.nll for each in lm().score(["the cat", "a dog"], draws=8)]
    )


def test_the_mask_token_as_text_stays_text(client: TestClient) -> None:
    (choice,) = complete(client, prompt="[MASK] ___", echo=True, **QUICK)["choices"]
    assert choice["text"].startswith("[MASK] ___")


BAD_BODIES: list[tuple[Any, str | None]] = [
    ({"tempreature": 1}, "tempreature"), ({"n": 0}, "n"), ({"n": "2"}, "n"), ({"seed": -1}, "seed"),
    ({"temperature": -1}, "temperature"), ({"logprobs": 6}, "logprobs"), ({"presence_penalty": 1}, "presence_penalty"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"sampler": "nope"}, None), ({"steps": 10**6}, None), ({"n": 10**9}, None),
    ({"prompt": 5}, "prompt"), ({"prompt": [1, 2.5]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": []}, None),
    ({"prompt": [[]]}, None), ({"prompt": [10**30]}, None), ({"prompt": [-1]}, None), ({"prompt": [65] * 999}, None),
    ({"prompt": [65], "max_tokens": 999}, None), ({"prompt": [65], "suffix": "x"}, None), ({"guesses": 99}, "guesses"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"eta": 0.1}, "eta"), ({"options": {"eta": 0.1}, "sampler": "margin"}, "options"),
    ({"max_tokens": 10**9}, None), ({"min_tokens": 3}, None), ([], None), (None, None), ({"\ud800": 1}, None),
    ({"prompt": "\ud800"}, None), ({"body": 1}, "body"), ({"seed": 10**300}, "seed"),
    ({"suffix": "x", "max_tokens": 10**9}, None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
def test_bad_bodies_are_named(client: TestClient, body: Any, param: str | None) -> None:
    response = client.post(
        "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["type"] == "invalid_request_error"
    )
    assert error["message"] and (param is None or error["param"] == param)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_of_another_type_is_told_the_right_one(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.endswith("send it with Content-Type: application/json")
    assert repr(kind or "missing") in message


def test_drafts_without_a_stream_are_not_computed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = complete(client, prompt="the", **QUICK)
    monkeypatch.setattr("adlm.text.generation.predict_guesses", lambda *_: 1 / 0)
    for asked in ({"guesses": 2}, {"stream_mode": "denoise"}):
        assert complete(client, prompt="the", **QUICK, **asked)["choices"] == plain["choices"]


def test_errors_say_the_value_and_what_is_expected(client: TestClient) -> None:
    for body, message in (
        ({"max_tokens": "3"}, "max_tokens='3': expected a whole number above 0; leave it out"),
        ({"stop": ["x"] * 17}, "expected at most 16 texts; leave some out"),
        ({"prompt": "the", "max_tokens": 999}, "max_tokens=999: expected at most "),
        ({"prompt": ["the"] * 100_000}, "100000 texts, at most 128"),
        ({"temprature": 1}, "temprature=1: unknown name; did you mean temperature?"),
        (
            {"stream_options": {"include_usages": True}},
            "did you mean stream_options.include_usage?",
        ),
        (
            {"stream_options": {"x": 1}},
            "x=1: unknown name; expected one of stream_options.include_usage",
        ),
        ({"prompt": 5}, "leave it out for the default ('')"),
        ({"steps": 100_000}, "100000 steps, at most 4096 are allowed"),
        (
            {"options": {"eta": 0.1}, "sampler": "margin"},
            "options={'eta': 0.1}: of margin, eta=0.1: unknown name; there is none here",
        ),
    ):
        assert message in client.post("/v1/completions", json=body).json()["error"]["message"]
    unknown = client.post("/v1/completions", json={"what": 1}).json()["error"]["message"]
    assert "stream_options, " in unknown and "stream_options.include_usage" not in unknown
    score = client.post("/v1/score", json={"text": ["a"] * 65}).json()["error"]
    assert (
        "expected a text or a list of 1 to 64; give" in score["message"]
        and score["param"] == "text"
    )
    (eta,) = [client.post("/v1/completions", json={"eta": 0.1}).json()["error"]]
    assert "options={'eta': …}" in eta["message"] and eta["param"] == "eta"
    for body in ([], "x", 5):
        message = client.post("/v1/completions", json=body).json()["error"]["message"]
        assert message.startswith(f"body={body!r}: expected names with values")


def test_a_request_never_imports_a_sampler(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("open('evil.txt', 'w')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path, body in (("completions", {"prompt": "a"}), ("infill", {"template": "a ___"})):
        answer = client.post(f"/v1/{path}", json={**body, "sampler": "evil:run"})
        assert answer.status_code == 400 and "'evil:run'" in answer.json()["error"]["message"]
    assert not (tmp_path / "evil.txt").exists() and "evil" not in sys.modules


def test_a_causal_model_takes_the_sampler_that_its_answers_name(client: TestClient) -> None:
    body = {"prompt": "the", "seed": 3, "max_tokens": 8}
    with TestClient(create_app(lm("ar"))) as causal:
        plain = complete(causal, **body)
        named = complete(causal, **body, sampler="left_to_right")
    assert plain["choices"] == named["choices"]
    refused = client.post("/v1/completions", json={**body, "sampler": "left_to_right"})
    assert refused.status_code == 400
    assert "unknown sampler 'left_to_right'" in refused.json()["error"]["message"]


def test_neutral_values_of_unsupported_fields_are_accepted(client: TestClient) -> None:
    neutral: dict[str, Any] = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0}
    for bias in (None, {}):
        complete(client, prompt="the", logit_bias=bias, **neutral, **QUICK)
    assert client.post("/v1/completions", json={"logit_bias": {"5": 1}}).status_code == 400


def test_holes_that_leave_too_many_lengths_are_refused(client: TestClient) -> None:
    for path, body in (
        ("infill", {"template": "a ___ b " * 12}),
        ("completions", {"prompt": ["a"] * 5, "suffix": "b", "max_tokens": 32}),
    ):
        response = client.post(f"/v1/{path}", json=body)
        assert (
            response.status_code == 400
            and "lengths to choose from" in response.json()["error"]["message"]
        )


def test_bad_requests_never_fail_the_server(client: TestClient) -> None:
    for content in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"n": NaN}',
        b'{"temperature": Infinity}',
        b'"x"',
    ):
        assert client.post("/v1/completions", content=content).status_code == 400
    assert client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert (
        client.post("/v1/completions", content=iter([b" " * MAX_BODY_BYTES] * 2)).status_code == 413
    )
    missing = client.post("/v1/chat/completions", json={})
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert "no /v1/chat/completions: use /v1/completions" in missing.json()["error"]["message"]
    assert client.get("/v1/completions").status_code == 405
    missing = client.post("/v1/completions", json={"model": "other"})
    assert missing.status_code == 404 and "'other'" in missing.json()["error"]["message"]


def test_models_health_metrics_and_headers(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "small"
    assert client.get("/v1/models/small").json()["object"] == "model"
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    complete(client, prompt="the", **QUICK)
    metrics = client.get("/metrics").text
    for name in (
        "adlm_texts_total",
        "adlm_nfe_total",
        "adlm_rows_waiting",
        "adlm_request_seconds_bucket",
    ):
        assert name in metrics
    assert 'path="/v1/completions",status="200"' in metrics
    headers = client.get("/healthz").headers
    assert (
        headers["x-content-type-options"] == "nosniff"
        and "default-src 'none'" in headers["content-security-policy"]
    )
    assert (
        headers["x-request-id"].startswith("req-") and "access-control-allow-origin" not in headers
    )


def test_the_schema_has_a_page_without_outside_resources(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert {
        "/v1/completions",
        "/v1/infill",
        "/v1/score",
        "/v1/models",
        "/healthz",
        "/metrics",
    } <= set(schema["paths"])
    page = client.get("/docs")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "script-src 'self'" in page.headers["content-security-policy"]
    )
    assert not re.search(
        r"https?:|<script>|style=|onclick", page.text + client.get("/docs.js").text
    )


def test_an_api_key_is_required_where_it_is_set() -> None:
    with TestClient(create_app(lm(), api_key="secret")) as client:
        assert client.get("/healthz").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = client.get("/v1/models", headers=headers)
            assert (
                response.status_code == 401
                and response.json()["error"]["code"] == "invalid_api_key"
            )
        assert (
            client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        )


def test_overload_is_answered_with_429() -> None:
    limits = EngineLimits(max_rows=1, max_waiting=2)
    with TestClient(create_app(lm(), limits=limits)) as client:
        engine, slow = (
            client.app.state.engine,
            lm().layout_rows("the", n=3, steps=4000, sampler="ancestral"),
        )
        ticket = engine.submit(Ticket(slow, lambda news: None))
        for is_streamed in (False, True):
            response = client.post("/v1/completions", json={"stream": is_streamed, **QUICK})
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
        engine.cancel(ticket)
        wait_for(lambda: engine.running == 0)
        never = client.post("/v1/completions", json={"n": 4, **QUICK})
        assert (
            never.status_code == 400 and "at most 3 are allowed" in never.json()["error"]["message"]
        )
        assert len(complete(client, n=3, **QUICK)["choices"]) == 3


def test_a_stream_whose_client_has_gone_before_it_begins_leaves_the_queue() -> None:
    body = json.dumps({"prompt": "the", "stream": True, **QUICK}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise OSError("the client has gone")

    with TestClient(create_app(lm(), limits=EngineLimits(max_rows=1))) as client:
        engine = client.app.state.engine
        slow = lm().layout_rows("the", steps=4000, sampler="ancestral")
        ticket = engine.submit(Ticket(slow, lambda news: None))
        wait_for(lambda: engine.running == 1)
        with pytest.raises(ClientDisconnect):
            asyncio.run(client.app(scope, receive, send))
        assert not engine.waiting and engine.running == 1
        engine.cancel(ticket)


def test_a_shutdown_is_answered_with_503() -> None:
    with TestClient(create_app(lm())) as client:
        client.app.state.engine.stop(drain=True)
        for path, body in (
            ("completions", QUICK),
            ("infill", {"template": "a ___"}),
            ("score", {"text": "a"}),
        ):
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "server_error"
        assert client.get("/readyz").status_code == 503


def test_holes_that_cannot_fit_are_refused_before_they_are_laid_out(client: TestClient) -> None:
    response = client.post("/v1/infill", json={"template": "___{1} a " * 100_000})
    assert response.status_code == 400 and "has 100000 holes" in response.json()["error"]["message"]


def test_a_failure_while_sampling_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lm("mdlm")
    monkeypatch.setattr(model.evaluator, "logits_at", lambda features: 1 / 0)
    with TestClient(create_app(model), raise_server_exceptions=False) as client:
        response = client.post("/v1/completions", json={"prompt": "the", **QUICK})
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "division" not in response.text
        assert (
            "server_error"
            in client.post("/v1/completions", json={"prompt": "the", "stream": True, **QUICK}).text
        )


def test_settled_text_is_whole_characters() -> None:
    """A reader that is given one more token at a time returns the text, and never half of a character."""
    model = lm()
    text = "naïve 😀 漢字 ok"
    layout = model.row_format.layout_prompt("a", max_new_tokens=len(text.encode()))
    ids = [*layout.ids[: layout.is_fixed.index(False)], *model.tokenizer.encode(text)]
    ids += layout.ids[len(ids) :]
    reader = TextReader(layout, layout.spans[1:])
    start = layout.is_fixed.index(False)
    chunks = [reader.read(ids, i, is_done=i == len(ids)) for i in range(start, len(ids) + 1)]
    assert "".join(chunks) == text and not any("\ufffd" in chunk for chunk in chunks)
    assert sum(map(bool, chunks)) == len(text)
