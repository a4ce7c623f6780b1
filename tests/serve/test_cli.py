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
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving adlm-prose on http://127.0.0.1:"), line
        second = subprocess.run([*command[:-3], line.split(":")[-1].strip()], capture_output=True, text=True)
        assert second.returncode != 0 and "give another --host or --port" in second.stderr
        body = json.dumps({"prompt": "It was", "max_tokens": 4, "steps": 300, "stream": True, "guesses": 0}).encode()
        request = urllib.request.Request(
            f"{line.split()[-1]}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["draft"]["step"] == 1
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        rest = process.stdout.read()
    assert rest == "" and process.returncode in (0, -signal.SIGTERM)
