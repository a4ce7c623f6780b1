"""The server: `clients` compares many clients with the same requests as one offline batch; `trouble` kills clients and
sends too many requests; `engine` compares many requests together with one at a time, and measures their memory."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adlm.bundled import DEFAULT
from adlm.data.tokenizers import load_tokenizer
from adlm.models.folder import LoadedModel
from adlm.serve.engine import Engine, EngineLimits, fill_rows
from adlm.text.generation import TextRow
from adlm.text.lm import LM, load
from bench.setting import (
    SIZES,
    build_model,
    compute_spread,
    describe_machine,
    get_peak_gib,
    print_report,
)

if TYPE_CHECKING:
    import httpx


async def run_requests(engine: Engine, requests: list[list[TextRow]]) -> list[TextRow]:
    """Submit all requests at once and return their rows, which are sampled."""
    own = [[replace(row) for row in rows] for rows in requests]
    await asyncio.gather(*(fill_rows(engine, rows) for rows in own))
    return [row for rows in own for row in rows]


@contextmanager
def start_server(*options: str) -> Iterator[tuple[str, int]]:
    """Start `adlm serve` in a process of its own and yield its address and process id."""
    command = [sys.executable, "-m", "adlm", "serve", "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
        process.terminate()


async def post_all(address: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """Send all requests at once, each over a connection of its own."""
    import httpx

    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=None) as client:
        return list(
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        )


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of this process and of another."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_metrics(address: str) -> dict[str, float]:
    """Return the server's metrics by name."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = [
            line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[:1] != "#"
        ]
    return {name.removeprefix("adlm_"): float(value) for name, value in lines}


def measure_clients(args: argparse.Namespace) -> None:
    """Compare clients that come together, over HTTP and without, with one offline batch, in turns."""
    lm = load(args.model, device=args.device)
    prompts = [f"It was the {number}th day of" for number in range(args.clients)]
    settings = {"max_new_tokens": args.tokens, "steps": args.steps}
    body = {"max_tokens": args.tokens, "steps": args.steps, "seed": 0, "echo": True}
    expected = lm.generate(prompts, batch=1, **settings).texts  # every text alone
    requests = [lm.layout_rows(prompt, **settings) for prompt in prompts]
    seconds: dict[str, list[float]] = {"offline": [], "engine": [], "HTTP": []}
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in seconds}
    wrong = dict.fromkeys(seconds, 0)
    with (
        start_server(args.model, "--device", args.device, "--max-rows", str(args.clients)) as (
            address,
            pid,
        ),
        Engine(lm, EngineLimits(max_rows=args.clients)) as engine,
    ):

        def run(kind: str) -> list[str]:
            if kind == "offline":
                return lm.generate(prompts, batch=args.clients, **settings).texts
            if kind == "engine":
                return [row.text for row in asyncio.run(run_requests(engine, requests))]
            answers = asyncio.run(
                post_all(address, [{**body, "prompt": prompt} for prompt in prompts])
            )
            return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]

        for kind in seconds:
            run(kind)  # warm-up
        for number in range(args.repeats * len(seconds)):
            kind = list(seconds)[(number + number // len(seconds)) % len(seconds)]
            began, cpu_began = time.perf_counter(), read_cpu_seconds(pid)
            texts = run(kind)
            seconds[kind].append(time.perf_counter() - began)
            cpu_seconds[kind].append(read_cpu_seconds(pid) - cpu_began)
            wrong[kind] += sum(a != b for a, b in zip(texts, expected, strict=True))
    record: dict[str, object] = {
        **describe_machine("serve clients", str(lm.device)),
        "model": lm.name,
        **settings,
    }
    record |= {"clients": args.clients, "repeats": args.repeats, "texts_unlike_alone": wrong}
    rows = []
    for kind in seconds:
        rows.append([kind])
        for clock, times in (("wall", seconds), ("cpu", cpu_seconds)):
            middle, spread = compute_spread(times[kind])
            ratio, ratio_spread = compute_spread(
                [a / b for a, b in zip(times["offline"], times[kind], strict=True)]
            )
            rows[-1] += [f"{middle:.2f} ± {spread:.2f}", f"{ratio:.3f} ± {ratio_spread:.3f}"]
            record |= {
                f"{clock}_seconds_{kind}": round(middle, 3),
                f"{clock}_throughput_{kind}": round(ratio, 3),
            }
    columns = [
        "by",
        "seconds",
        "throughput / offline",
        "CPU seconds",
        "throughput / offline by CPU",
    ]
    print_report(f"{args.clients} clients", columns, rows, record)


def measure_trouble(args: argparse.Namespace) -> None:
    """Kill clients in mid-stream and count the steps until their slots are free; then send twice what fits."""
    with start_server(args.model, "--max-rows", "16", "--max-waiting", "16") as (address, _):
        slow = {
            "prompt": "It was",
            "steps": 4000,
            "sampler": "ancestral",
            "stream": True,
            "stream_mode": "denoise",
        }
        client = f"import asyncio, bench.serve; asyncio.run(bench.serve.post_all({address!r}, [{slow!r}] * 16))"
        with subprocess.Popen([sys.executable, "-c", client]) as process:
            while read_metrics(address)["rows_running"] < 16:
                time.sleep(0.05)
            time.sleep(2)
            before = read_metrics(address)
            process.kill()
        began = time.perf_counter()
        while (after := read_metrics(address))["rows_running"] > 0:
            time.sleep(0.005)
        steps, waited = after["steps_total"] - before["steps_total"], time.perf_counter() - began
        print(
            f"16 streams killed: all slots free after {1e3 * waited:.0f} ms, {steps:.0f} steps since before the kill"
        )
        bodies = [
            {"prompt": "It was", "max_tokens": 32, "steps": 64, "seed": number}
            for number in range(64)
        ]
        answers = asyncio.run(post_all(address, bodies))
        statuses = Counter(answer.status_code for answer in answers)
        waits = {
            answer.headers.get("retry-after") for answer in answers if answer.status_code == 429
        }
        print(f"64 requests where 32 fit: {dict(statuses)}, Retry-After {waits}")
        rest = [
            body for body, answer in zip(bodies, answers, strict=True) if answer.status_code == 429
        ]
        again = asyncio.run(post_all(address, rest))
        print(f"the rest again: {dict(Counter(answer.status_code for answer in again))}")


def measure_engine(args: argparse.Namespace) -> None:
    """Compare requests that come together with one at a time, and measure the memory beyond the weights."""
    model = build_model(args.size, "factored", dropout=0.0)
    lm = LM(
        LoadedModel(model, load_tokenizer("gpt2"), "adlm", 0, "wrapped"),
        args.size,
        device=args.device,
    )
    is_cuda, rows, results = lm.device.type == "cuda", [], []
    weights = sum(p.numel() * p.element_size() for p in lm.evaluator.model.parameters()) / 2**30

    def run(
        engine: Engine, count: int, length: int, steps: int, *, together: bool
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of some requests."""
        requests = [
            lm.layout_rows(
                length=min(length, lm.row_format.longest),
                seed=seed,
                steps=steps,
                sampler=args.sampler,
            )
            for seed in range(count)
        ]
        began, ids = time.perf_counter(), []
        for part in [requests] if together else [[request] for request in requests]:
            ids += [row.ids for row in asyncio.run(run_requests(engine, part))]
        return time.perf_counter() - began, ids

    with Engine(lm, EngineLimits(max_rows=args.rows, max_waiting=args.rows)) as engine:
        for length in args.length:
            run(engine, args.rows, length, 1, together=True)  # warm-up
            run(engine, 1, length, 1, together=False)
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() / 2**30 if is_cuda else 0.0
            together, ids = run(engine, args.rows, length, args.steps, together=True)
            memory = (get_peak_gib("cuda") or 0.0) - before if is_cuda else None
            alone, ids_alone = run(engine, args.alone, length, args.steps, together=False)
            ratio = (args.rows / together) / (args.alone / alone)
            equal = sum(a == b for a, b in zip(ids, ids_alone)) / args.alone
            rows.append(
                [
                    f"{args.rows} × {length}",
                    f"{together:.2f}",
                    f"{alone / args.alone:.3f}",
                    f"{ratio:.1f}×",
                ]
                + ["–" if memory is None else f"{memory:.2f}"]
            )
            values = {
                "length": length,
                "seconds": together,
                "seconds_alone": alone / args.alone,
                "ratio": ratio,
            }
            values |= {"gib_beyond_weights": memory, "texts_equal": equal}
            results.append(
                {key: value if value is None else round(value, 4) for key, value in values.items()}
            )
    record = {
        **describe_machine("serve engine", str(lm.device)),
        "size": args.size,
        "rows": args.rows,
    }
    record |= {
        "alone": args.alone,
        "steps": args.steps,
        "sampler": args.sampler,
        "weights_gib": round(weights, 3),
    }
    columns = [
        "canvases",
        "seconds together",
        "seconds of one alone",
        "throughput",
        "GiB beyond weights",
    ]
    print_report(
        f"Engine, {args.size}, {args.steps} steps", columns, rows, record | {"lengths": results}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="CPU threads")
    kinds = parser.add_subparsers(required=True)
    clients = kinds.add_parser("clients", help="many clients against one offline batch")
    clients.set_defaults(measure=measure_clients)
    clients.add_argument("--clients", type=int, default=64)
    clients.add_argument("--tokens", type=int, default=64)
    clients.add_argument("--steps", type=int, default=16)
    clients.add_argument("--repeats", type=int, default=5)
    trouble = kinds.add_parser("trouble", help="clients that are killed, and too many of them")
    trouble.set_defaults(measure=measure_trouble)
    for each in (clients, trouble):
        each.add_argument(
            "--model",
            default=DEFAULT,
            help="a bundled name or a folder [default: the bundled model]",
        )
    engine = kinds.add_parser(
        "engine", help="requests together against one at a time, without HTTP"
    )
    engine.set_defaults(measure=measure_engine)
    engine.add_argument(
        "--size", choices=SIZES, default="small", help="random weights of this size"
    )
    engine.add_argument("--rows", type=int, default=256, help="requests together")
    engine.add_argument("--alone", type=int, default=8, help="requests one at a time")
    engine.add_argument(
        "--length", type=int, nargs="+", default=[256, 1024], help="tokens of a canvas"
    )
    engine.add_argument("--steps", type=int, default=32)
    engine.add_argument("--sampler", default="remask_loop")
    for each in (clients, trouble, engine):
        each.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.measure(args)


if __name__ == "__main__":
    main()
