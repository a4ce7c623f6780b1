"""One seed, one text: in Python, on the command line, over HTTP, streamed or not."""

import json
import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.laws import adapter
from tests.laws.commands import PLANS, QUICK, Server, run_command, run_json, start_command
from tests.laws.texts import folder, model

SAMPLERS = list(QUICK)
DRAW = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}


def command_words(name: str, sampler: str | None) -> list[object]:
    """Return the options of a sampler and a draw on the command line."""
    words: list[object] = ["--device", "cpu", "--seed", 11]
    words += ["--temperature", 0.9, "--top-p", 0.95, "--top-k", 40]
    if sampler is not None:
        settings, options = QUICK[sampler]
        words += ["--sampler", sampler]
        for setting, value in settings.items():
            words += [f"--{setting}", value]
        for option, value in options.items():
            words += ["--option", f"{option}={value}"]
    return words


def body_settings(sampler: str | None, **more: Any) -> dict[str, Any]:
    """Return the same settings, and more options, as the body of a request has them."""
    if sampler is None:
        return {"seed": 11, **DRAW}
    settings, options = QUICK[sampler]
    own = adapter.body_options(options | more)
    return {"seed": 11, "sampler": sampler, **DRAW, **settings, **own}


def python_settings(sampler: str | None) -> dict[str, Any]:
    """Return the same settings as the adapter takes them."""
    if sampler is None:
        return {"seed": 11, **DRAW}
    settings, options = QUICK[sampler]
    return {"seed": 11, "sampler": sampler, **DRAW, **settings, "options": options}


def join_chunks(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Return the streamed text of a choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


CASES = [*(("timed", sampler) for sampler in SAMPLERS), ("adlm", "remask_loop"), ("ar", None)]


@pytest.mark.parametrize(("name", "sampler"), CASES)
def test_a_seeds_text_is_one(server: Server, name: str, sampler: str | None) -> None:
    """Of Python, command line and HTTP, whole and as a stream, with evaluations counted alike."""
    expected = adapter.generate(model(name), "the cat", n=2, length=19, **python_settings(sampler))
    words = command_words(name, sampler)
    answer = run_json(
        "sample", folder(name), "--prompt", "the cat", "--n", 2, "--length", 19, *words
    )
    assert answer["texts"] == list(expected)
    assert answer["nfe_each"] == expected.nfe_each
    body = {"model": str(folder(name)), "prompt": "the cat", "n": 2, "max_tokens": 12}
    body |= body_settings(sampler)
    whole = server.ask("/v1/completions", **body)
    assert ["the cat" + each["text"] for each in whole["choices"]] == list(expected)
    assert whole["usage"]["nfe"] == sum(expected.nfe_each)
    chunks = server.stream("/v1/completions", **body, stream_options={"include_usage": True})
    assert ["the cat" + join_chunks(chunks, i) for i in (0, 1)] == list(expected)
    assert chunks[-1]["usage"] == whole["usage"]
    drafts = server.stream("/v1/completions", **(body | {"n": 1}), stream_mode="denoise")
    assert drafts[-1]["choices"][0]["draft"]["text"] == expected[0]
    assert "the cat" + join_chunks(drafts) == expected[0]


@pytest.mark.parametrize("sampler", ["remask_conf", "confidence", "ancestral"])
def test_a_seeds_filling_is_one(server: Server, sampler: str) -> None:
    template = "the ___{3} sat ___{2}."
    expected = adapter.infill(model("timed"), template, n=2, **python_settings(sampler))
    words = command_words("timed", sampler)
    answer = run_json("infill", template, "--model", folder("timed"), "--n", 2, *words)
    assert answer["texts"] == list(expected)
    assert answer["fills"] == adapter.fills(expected)
    body = {"model": str(folder("timed")), "template": template, "n": 2, **body_settings(sampler)}
    whole = server.ask("/v1/infill", **body)
    assert [each["text"] for each in whole["choices"]] == list(expected)
    assert [each["fills"] for each in whole["choices"]] == adapter.fills(expected)
    chunks = server.stream("/v1/infill", **body)
    assert [join_chunks(chunks, i) for i in (0, 1)] == list(expected)


def test_a_suffix_is_a_hole(server: Server) -> None:
    settings = {"model": str(folder("timed")), "seed": 1, "steps": 3}
    answer = server.ask(
        "/v1/completions", prompt="the ", suffix=" sat", min_tokens=4, max_tokens=4, **settings
    )
    expected = adapter.infill(model("timed"), "the ___{4} sat", seed=1, steps=3)
    assert "the " + answer["choices"][0]["text"] + " sat" == expected[0]


@pytest.mark.parametrize("name", ["timed", "ar"])
def test_a_stop_sequence_is_cut_off(server: Server, name: str) -> None:
    """The text ends before the first one, streamed or not."""
    body = {"model": str(folder(name)), "prompt": "the", "seed": 3, "max_tokens": 24, "top_p": 1.0}
    if name == "timed":
        body |= {"steps": 8, "sampler": "ancestral"}
    whole = server.ask("/v1/completions", **body)["choices"][0]["text"]
    stop = whole[3:5]
    (choice,) = server.ask("/v1/completions", **body, stop=[stop, "never in it"])["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    chunks = server.stream("/v1/completions", **body, stop=stop)
    assert join_chunks(chunks) == choice["text"]


def test_prompts_may_be_token_ids(server: Server) -> None:
    tokenizer = model("timed").tokenizer
    settings = {"model": str(folder("timed")), "seed": 3, "steps": 5, "max_tokens": 9}
    texts = server.ask("/v1/completions", prompt=["the cat", "a"], **settings)["choices"]
    ids = [tokenizer.encode(text) for text in ("the cat", "a")]
    assert server.ask("/v1/completions", prompt=ids, **settings)["choices"] == texts
    code, error = server.refuse("/v1/completions", prompt=[tokenizer.mask_id])
    assert code == 400
    assert "token" in error["message"]


def predict_logprobs(name: str, text: str) -> list[float]:
    """Return the log-probability of each token of a text of 8 tokens after "the"."""
    lm = model(name)
    (row,) = adapter.stream(lm, "the", max_new_tokens=8, seed=3, **LOGPROB_SETTINGS[name])[-1].ids
    ids, mask = torch.tensor([row]), lm.tokenizer.mask_id
    if name == "ar":
        logits = adapter.predict(lm.model, ids)[1][0, 3:-1]
    else:
        xt = ids.clone()
        xt[:, 4:] = mask
        # All that is to be generated is hidden.
        level = torch.tensor([-math.log(1 - 0.999)])
        logits = adapter.predict(lm.model, xt, level)[1][0, 4:]
    banned = [token for token in adapter.banned_tokens(lm) if token < logits.shape[-1]]
    logits = logits.double()
    logits[:, banned] = -torch.inf
    assert text == lm.tokenizer.decode(row[4:]).split("<|endoftext|>")[0]
    return logits.log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0].tolist()


LOGPROB_SETTINGS: dict[str, dict[str, Any]] = {
    "timed": {"temperature": 0.7, "sampler": "confidence", "steps": 1},
    "ar": {"temperature": 0.7},
}


@pytest.mark.parametrize("name", ["timed", "ar"])
def test_log_probabilities_are_the_models(server: Server, name: str) -> None:
    """Of every token when it was drawn last, before temperature and nucleus."""
    body: dict[str, Any] = {"model": str(folder(name)), "prompt": "the", "seed": 3}
    body |= {"max_tokens": 8, "logprobs": 2, **LOGPROB_SETTINGS[name]}
    (choice,) = server.ask("/v1/completions", **body)["choices"]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"]
    chunks = server.stream("/v1/completions", **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    joined = {key: [value for part in parts for value in part[key]] for key in columns}
    assert joined == columns
    expected = predict_logprobs(name, choice["text"])
    assert columns["token_logprobs"] == pytest.approx(expected[: len(columns["tokens"])], abs=1e-4)
    for token, logprob, top in zip(
        columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert max(top.values()) >= logprob


def test_concurrent_clients_get_the_texts_of_a_client_alone(server: Server) -> None:
    """Requests of every sampler, more than there are slots, each at its own time."""
    requests = []
    for number, sampler in enumerate([*SAMPLERS, *SAMPLERS]):
        more = {"compat": True} if sampler in PLANS and number % 2 else {}
        body = body_settings(sampler, **more) | {"model": str(folder("timed")), "seed": number}
        body |= {"prompt": "the cat"[: number % 7], "max_tokens": 3 + number, "n": 1 + number % 2}
        if number % 3 == 0:
            body["block"] = 5
        requests.append(body)
    for number in range(6):
        body = {"model": str(folder("ar")), "prompt": "a", "seed": number, "max_tokens": 5 + number}
        requests.append(body)

    def ask(body: dict[str, Any]) -> list[str]:
        return [each["text"] for each in server.ask("/v1/completions", **body)["choices"]]

    alone = [ask(body) for body in requests]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(ask, requests[::-1]))[::-1]
    assert together == alone
    assert len({tuple(texts) for texts in alone}) > 25


def test_another_seed_is_another_text_and_none_is_drawn(server: Server) -> None:
    """Over HTTP the seed of a request without one is random, and the answer says which it was."""
    body = {"model": str(folder("timed")), "prompt": "the", "steps": 6, "max_tokens": 12}
    texts = [server.ask("/v1/completions", **body, seed=seed) for seed in (1, 2, 1)]
    first, other, again = (each["choices"][0]["text"] for each in texts)
    assert first == again != other
    drawn = server.ask("/v1/completions", **body)
    repeated = server.ask("/v1/completions", **body, seed=drawn["seed"])
    assert repeated["choices"] == drawn["choices"]


def test_scores_are_one(server: Server) -> None:
    texts = ["the cat sat", "a"]
    for name in ("timed", "ar"):
        expected = [each.nll for each in model(name).score(texts, draws=8, seed=2)]
        body = {"model": str(folder(name)), "text": texts, "draws": 8, "seed": 2}
        data = server.ask("/v1/score", **body)["data"]
        assert [each["nll"] for each in data] == pytest.approx(expected, rel=1e-5)
        words = ("--model", folder(name), "--draws", 8, "--seed", 2, "--device", "cpu")
        scores = run_json("score", *texts, *words)["scores"]
        assert [each["nll"] for each in scores] == pytest.approx(expected, rel=1e-5)


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"tempreature": 1}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": "2"}, "2"),
    ({"seed": -1}, "seed"),
    ({"temperature": -1}, "temperature"),
    ({"sampler": "nope"}, "nope"),
    ({"steps": 10**6}, "1000000"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"eta": 0.1, "sampler": "margin"}, "eta"),
    ({"suffix": "x", "prompt": [65]}, "suffix"),
]


@pytest.mark.parametrize(("body", "part"), BAD_BODIES)
def test_a_request_that_cannot_be_is_refused(
    server: Server, body: dict[str, Any], part: str
) -> None:
    code, error = server.refuse("/v1/completions", **body)
    assert code == 400
    assert part in error["message"]


def test_a_command_that_cannot_be_is_refused_in_one_line() -> None:
    for words, part in (
        (("--sampler", "nope"), "nope"),
        (("--length", 99), "99"),
        (("--top-p", 2), "top_p"),
        (("--option", "seed=3"), "seed"),
    ):
        answer = run_command("sample", folder("timed"), "--device", "cpu", *words)
        assert (answer.code, answer.out) == (2, b"")
        assert len(answer.err.splitlines()) == 1
        assert part in answer.err.replace("-", "_")


def test_a_process_of_its_own_prints_the_texts_and_nothing_else() -> None:
    """Text of any writing system comes out as UTF-8."""
    expected = adapter.generate(model("timed"), "Süß 東京 ", n=2, steps=3, seed=1, length=30)
    words = ("sample", folder("timed"), "--prompt", "Süß 東京 ", "--n", 2, "--steps", 3)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_command(*words, "--seed", 1, "--length", 30, "--device", "cpu", **pipes) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.decode("utf-8").removesuffix("\n").split("\n<|endoftext|>\n") == list(expected)
    answer = run_command(*words, "--seed", 1, "--length", 30, "--device", "cpu")
    assert answer.out == out


def test_models_are_listed(server: Server) -> None:
    names = [each["id"] for each in server.get("/v1/models")["data"]]
    assert names == [str(folder(name)) for name in ("timed", "ar", "adlm")]
    assert server.get("/healthz") == {"status": "ok"}
    assert json.dumps(server.get("/readyz")) == '{"ready": true}'
