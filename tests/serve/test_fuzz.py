"""No body fails the server: schemathesis on its schema, and random bad bodies (10,000: ADLM_BODIES=10000)."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serve.test_engine import wait_for
from tests.text.models import any_text, lm

if os.environ.get("ADLM_ALL") != "1":
    for extra in ("fastapi", "prometheus_client", "httpx", "uvicorn", "schemathesis"):
        pytest.importorskip(extra)

from fastapi.testclient import TestClient

from adlm.serve.app import create_app
from adlm.serve.engine import EngineLimits
from adlm.serve.protocol import CompletionBody, InfillBody, ScoreBody
from tests.serve.servers import run_server

BODIES = int(os.environ.get("ADLM_BODIES", "300"))
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)
QUICK = {"steps": 2, "seed": 1}
VALID: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the", "max_tokens": 3, **QUICK},
    "infill": {"template": "the ___{2} sat", **QUICK},
    "score": {"text": "the cat", "draws": 2},
}
MODELS = {"completions": CompletionBody, "infill": InfillBody, "score": ScoreBody}
TEXTS = [
    "prompt",
    "template",
    "text",
    "suffix",
    "stop",
    "sampler",
    "user",
    "model",
    "stream_mode",
    "__proto__",
]
FLAGS = ["echo", "stream", "compat", "stream_options"]
COUNTS = [
    "max_tokens",
    "min_tokens",
    "n",
    "top_k",
    "seed",
    "steps",
    "block",
    "logprobs",
    "guesses",
    "best_of",
    "draws",
]
NUMBERS = [
    "temperature",
    "top_p",
    "eta",
    "t_on",
    "t_off",
    "alpha_on",
    "bound",
    "presence_penalty",
    "frequency_penalty",
]


@pytest.mark.slow
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    app = create_app(lm(), limits=EngineLimits(max_steps=1000, max_texts=8))
    with run_server(app) as address:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{address}/openapi.json",
            "--no-color",
        ]
        command += [
            "--checks",
            CHECKS,
            "--phases",
            "coverage,fuzzing",
            "--max-examples",
            "5",
            "--seed",
            "1",
        ]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    simple = [
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        10**9,
        10**30,
        -(10**30),
        0.5,
        -0.5,
        1e308,
        5e-324,
        "",
        "a",
        "NaN",
        "___",
    ]
    kind = rng.randrange(8)
    if kind == 0:
        return any_text(rng)
    if kind == 1:
        return rng.choice(
            [
                "\ud800",
                "\x00",
                "a" * rng.randrange(5000),
                "___{0}",
                "___{9999999999}",
                "___{5,2}",
                "{" * 99,
            ]
        )
    if kind == 2 and depth < 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 3 and depth < 4:
        return {any_text(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if kind == 4:
        return rng.uniform(-2, 2)
    return rng.choice(simple)


def plausible_value(rng: random.Random, field: str) -> Any:
    """A value of the field's type."""
    if field in TEXTS:
        text = any_text(rng) + rng.choice(["", "", " ", "___{2}"])
        ids = [rng.randrange(300) for _ in range(rng.randrange(6))]
        return rng.choice(
            [text, [text] * rng.randrange(3), ids, [ids], "denoise", "ancestral", "margin"]
        )
    if field in FLAGS:
        return (
            rng.random() < 0.5
            if field != "stream_options"
            else {"include_usage": rng.random() < 0.5}
        )
    return rng.randrange(9) if field in COUNTS else rng.choice([0, 0.5, 1, rng.uniform(0, 2)])


def random_content(rng: random.Random, path: str) -> bytes:
    """A body with some random fields, or no JSON at all."""
    body: Any = dict(VALID[path])
    for _ in range(rng.randint(1, 3)):
        is_known = rng.random() < 0.9
        field = rng.choice(
            list(MODELS[path].model_fields) if is_known else [*TEXTS, *FLAGS, *COUNTS, *NUMBERS]
        )
        body[field] = plausible_value(rng, field) if rng.random() < 0.6 else random_value(rng)
    if rng.random() < 0.1:
        body[any_text(rng)] = random_value(rng)
    if rng.random() < 0.1:
        body.pop(rng.choice(list(body)))
    if rng.random() < 0.05:
        body = random_value(rng)
    content = json.dumps(body).encode()
    damage = rng.random()
    if damage < 0.05:
        return content[: rng.randrange(len(content) + 1)]
    if damage < 0.1:
        return bytes(
            rng.choice(b'{}[]",:0123456789.eE-ntf\x00\xff\xc3 ') for _ in range(rng.randrange(60))
        )
    if damage < 0.13:
        return content.replace(
            b"1", rng.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"\xff"])
        )
    return content if damage < 0.99 else b"[" * 50_000


def read_memory() -> int:
    """The resident memory of this process in KiB."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def test_random_bad_bodies_never_fail_the_server(caplog: pytest.LogCaptureFixture) -> None:
    rng, statuses, memory = random.Random(1), Counter[int](), list[int]()
    limits = EngineLimits(max_texts=4, max_steps=64)
    with TestClient(create_app(lm(), limits=limits), raise_server_exceptions=False) as client:
        for number in range(BODIES):
            path = rng.choice(list(VALID))
            content = random_content(rng, path)
            kind = rng.choice(
                ["application/json"] * 9 + ["text/plain", "application/x-www-form-urlencoded", ""]
            )
            response = client.post(f"/v1/{path}", content=content, headers={"content-type": kind})
            assert response.status_code < 500 and "Traceback" not in response.text, (
                path,
                content,
                response.text,
            )
            assert response.headers["x-content-type-options"] == "nosniff"
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            statuses[response.status_code] += 1
            if number % max(1, BODIES // 10) == 0:
                memory.append(read_memory() // 1024)
        assert client.post("/v1/completions", json=VALID["completions"]).status_code == 200, (
            "it still answers"
        )
        engine = client.app.state.engine  # type: ignore[attr-defined]
        wait_for(lambda: not (engine.running or engine.waiting or engine.calls))
    print(f"{BODIES} bodies: {dict(statuses)}, MiB resident: {memory}")
    assert statuses[400] > BODIES / 2 and statuses[200] > BODIES / 50
    assert not [record for record in caplog.records if record.name == "adlm.serve"]
    assert memory[-1] - memory[1] < 100, "memory is flat"
