"""The official OpenAI client talks to a real server."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.text.models import lm

if os.environ.get("ADLM_ALL") == "1":
    import openai
else:
    openai: Any = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")

from adlm.serve.app import create_app
from adlm.serve.engine import EngineLimits, Ticket
from tests.serve.servers import run_server

QUICK: dict[str, Any] = {"model": "small", "seed": 3, "max_tokens": 12, "extra_body": {"steps": 6}}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    app = create_app(
        lm(), name="small", api_key="secret", limits=EngineLimits(max_rows=4, max_waiting=4)
    )
    with run_server(app) as address:
        yield f"{address}/v1", app.state.engine


@pytest.fixture
def client(server: tuple[str, Any]) -> Iterator[Any]:
    with openai.OpenAI(base_url=server[0], api_key="secret", max_retries=0) as client:
        yield client


def test_completions_with_n_suffix_and_stop(client: Any) -> None:
    expected = lm().generate("the", max_new_tokens=12, steps=6, seed=3, n=2).texts
    answer = client.completions.create(prompt="the", n=2, **QUICK)
    assert ["the" + choice.text for choice in answer.choices] == expected
    assert answer.usage.nfe > 0 and client.models.list().data[0].id == "small"
    stop = answer.choices[0].text[2:4]
    cut = client.completions.create(prompt="the", stop=stop, **QUICK).choices[0]
    assert cut.text == answer.choices[0].text.partition(stop)[0] and cut.finish_reason == "stop"
    filled = client.completions.create(
        prompt="the ", suffix=" sat", model="small", max_tokens=3, seed=1
    )
    assert filled.choices[0].text


def test_logprobs_and_token_ids(client: Any) -> None:
    expected = client.completions.create(prompt="the", logprobs=2, echo=True, **QUICK).choices[0]
    ids = lm().tokenizer.encode("the")
    for prompt in (ids, [ids]):
        choice = client.completions.create(prompt=prompt, logprobs=2, echo=True, **QUICK).choices[0]
        assert (choice.text, choice.logprobs) == (expected.text, expected.logprobs)
    assert (
        choice.logprobs.token_logprobs[:3] == [None] * 3
        and max(choice.logprobs.token_logprobs[3:]) < 0
    )
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[:4] == [
        0,
        1,
        2,
        3,
    ]


def test_streams(client: Any) -> None:
    expected = client.completions.create(prompt="the", n=2, **QUICK)
    texts, usage = ["", ""], None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(prompt="the", n=2, **options, **QUICK):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in expected.choices]
    assert usage is not None and usage.total_tokens == expected.usage.total_tokens


def test_errors(client: Any, server: tuple[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="typo=1: unknown name; expected one of"):
        client.completions.create(prompt="the", model="small", extra_body={"typo": 1})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt="the", model="other")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server[0], api_key="wrong", max_retries=0).models.list()
    slow = lm().layout_rows("the", n=8, steps=4000, sampler="ancestral")
    ticket = server[1].submit(Ticket(slow, lambda news: None))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(prompt="the", model="small")
    server[1].cancel(ticket)
    assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_slot(
    client: Any, server: tuple[str, Any], is_streamed: bool
) -> None:
    engine, body = server[1], {"steps": 4000, "sampler": "remask_conf", "stream_mode": "denoise"}
    texts = engine.stats.texts
    if is_streamed:
        with client.completions.create(
            prompt="the", model="small", stream=True, extra_body=body
        ) as chunks:
            next(iter(chunks))
            assert engine.running == 1
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(
                prompt="the", model="small", extra_body=body
            )
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.running == 0 and engine.stats.texts == texts, "cancelled, not finished"


def test_a_retry_succeeds_when_the_queue_has_room_again(server: tuple[str, Any]) -> None:
    body, rejected = {"steps": 300, "sampler": "ancestral"}, server[1].stats.rejected

    def run(number: int) -> None:
        with openai.OpenAI(base_url=server[0], api_key="secret", max_retries=20) as client:
            options: dict[str, Any] = {
                "model": "small",
                "max_tokens": 24,
                "seed": number,
                "extra_body": body,
            }
            texts[number] = client.completions.create(prompt="the", **options).choices[0].text

    texts: dict[int, str] = {}
    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server[1].stats.rejected > rejected
    settings: dict[str, Any] = {"max_new_tokens": 24, **body}
    assert {i: "the" + text for i, text in texts.items()} == {
        i: lm().generate("the", seed=i, **settings)[0] for i in range(12)
    }
