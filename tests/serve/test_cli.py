"""`adlm serve` prints its address when it is ready, answers, and ends cleanly."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

if os.environ.get("ADLM_ALL") != "1":
    for extra in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(extra)


def test_the_command_serves_the_bundled_model_and_ends_after_its_streams() -> None:
    command = [sys.executable, "-m", "adlm", "serve", "--port", "0", "--max-rows", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving adlm-prose on http://127.0.0.1:"), line
        second = subprocess.run(
            [*command[:-3], line.split(":")[-1].strip()], capture_output=True, text=True
        )
        assert second.returncode != 0 and "give another --host or --port" in second.stderr
        settings = {
            "prompt": "It was",
            "max_tokens": 4,
            "sampler": "remask_loop",
            "steps": 300,
            "guesses": 0,
        }
        body = json.dumps(settings | {"stream": True}).encode()
        request = urllib.request.Request(
            f"{line.split()[-1]}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert (
                json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["draft"][
                    "step"
                ]
                == 1
            )
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        rest = process.stdout.read()
    assert rest == "waiting for 1 request(s) to end: press Ctrl-C to stop at once\n"
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize("signals", [1, 2])
def test_streams_end_with_an_error_after_the_grace_period_or_a_second_signal(signals: int) -> None:
    """Neither prints a traceback."""
    grace = "import adlm.cli.serve as cli; cli.SECONDS_TO_DRAIN = 1" if signals == 1 else ""
    unignore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # as nohup and & leave it
    code = f"{unignore}\n{grace}\nfrom adlm.cli.main import app\napp(['serve', '--port', '0'])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[-1]
        settings = {
            "prompt": "It was",
            "sampler": "remask_loop",
            "steps": 2000,
            "n": 20,
            "stream": True,
        }
        body = json.dumps(settings).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            process.send_signal(signal.SIGINT)
            lines = [process.stderr.readline()]
            if signals == 2:
                process.send_signal(signal.SIGINT)
            event = json.loads(response.read().split(b"\n\n")[-2].removeprefix(b"data: "))
        lines += process.stderr.readlines()
    assert event["error"]["code"] == "shutting_down" and event["error"]["type"] == "server_error"
    assert lines[0].startswith("waiting for 1 request(s)") and len(lines) == 2, lines
    assert ("stopping at once: 1 request(s)" if signals == 2 else "Cancel 1 running task") in lines[
        1
    ]
    assert process.returncode == 130
