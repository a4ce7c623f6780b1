"""Two replicas on Ray give the same texts, and one that is killed loses no request that the client retries."""

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import adlm

if os.environ.get("ADLM_ALL") == "1":
    import openai
    import ray
else:
    openai: Any = pytest.importorskip("openai")
    ray: Any = pytest.importorskip(
        "ray", reason="ray comes with the extra ray, which make test-all installs"
    )

from adlm.serve.ray_app import RayOptions, build

OURS: dict[str, Any] = {"sampler": "remask_loop", "steps": 64}  # slow enough to be killed meanwhile
BODY: dict[str, Any] = {
    "model": "adlm-prose",
    "prompt": "It was",
    "max_tokens": 16,
    "extra_body": OURS,
}


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_replicas is 1: expected at least min_replicas, 2"):
        build(RayOptions(min_replicas=2, max_replicas=1))
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        RayOptions.model_validate({"replicas": 2})
    assert "secret" not in repr(RayOptions(api_key="secret"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_AUTH_TOKEN", secrets.token_hex(16)
        )  # or Ray writes one into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.serve.start(http_options={"host": "127.0.0.1", "port": port})
        ray.serve.run(build(RayOptions(min_replicas=2, api_key="secret")))
        yield f"http://127.0.0.1:{port}/v1"
        ray.serve.shutdown()
        ray.shutdown()


def look_at_replicas() -> dict[int, tuple[int, int]]:
    """The texts that each replica has generated and is generating, by its process."""
    actors = [
        each for each in ray.util.list_named_actors(all_namespaces=True) if "#adlm#" in each["name"]
    ]

    def look(_: Any) -> tuple[int, tuple[int, int]]:
        (thread,) = (each for each in threading.enumerate() if each.name == "adlm-engine")
        engine = thread._target.__self__  # type: ignore[attr-defined]
        return os.getpid(), (engine.stats.texts, engine.running)

    return dict(ray.get([ray.get_actor(**each).__ray_call__.remote(look) for each in actors]))


@pytest.mark.slow
def test_a_killed_replica_loses_no_request(address: str) -> None:
    lm = adlm.load(device="cpu")
    expected = [lm.generate("It was", max_new_tokens=16, **OURS, seed=seed)[0] for seed in range(2)]
    with openai.OpenAI(base_url=address, api_key="secret") as client, ThreadPoolExecutor(8) as pool:

        def complete(seed: int) -> tuple[bool, int]:
            answer = client.completions.with_raw_response.create(**BODY, seed=seed)
            return "It was" + answer.parse().choices[0].text == expected[seed], answer.retries_taken

        until = time.monotonic() + 30
        while (
            min(texts for texts, _ in look_at_replicas().values()) == 0
        ):  # until both have answered
            assert (
                all(is_equal for is_equal, _ in pool.map(complete, [0, 1] * 4))
                and time.monotonic() < until
            )
        answers, busy = [pool.submit(complete, i % 2) for i in range(32)], list[int]()
        while not busy and not all(answer.done() for answer in answers):
            busy = [pid for pid, (_, running) in look_at_replicas().items() if running > 0]
        os.kill(busy[0], signal.SIGKILL)
        results = [answer.result() for answer in answers]
    assert [is_equal for is_equal, _ in results] == [True] * 32
    assert any(retries for _, retries in results)  # it was answering when it was killed
