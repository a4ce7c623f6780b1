"""Throughput of the serving engine with many clients, against the same requests as one offline batch."""

from __future__ import annotations

import argparse
import asyncio
import threading
import time

import torch

from adlm.serve.engine import Engine, EngineLimits, generate_rows
from adlm.text.lm import LM, load
from bench.setting import compute_spread, describe_machine, print_report

PORT = 8765


async def run_clients(engine: Engine, lm: LM, prompts: list[str], settings: dict[str, int]) -> list[str]:
    """Send every prompt as a request of its own, all at once."""
    rows = await asyncio.gather(*(generate_rows(engine, lm.build_request(p, **settings)) for p in prompts))
    return [row.text for (row,) in rows]


async def run_http_clients(lm: LM, prompts: list[str], settings: dict[str, int]) -> list[str]:
    """Send the requests over HTTP to a server in this process."""
    import httpx
    import uvicorn

    from adlm.serve.app import create_app

    app = create_app(lm, limits=EngineLimits(max_rows=len(prompts)))
    server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        await asyncio.sleep(0.01)
    body = {"max_tokens": settings["max_new_tokens"], "steps": settings["steps"], "seed": 0, "echo": True}
    url, limits = f"http://127.0.0.1:{PORT}/v1/completions", httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:
        answers = await asyncio.gather(*(client.post(url, json={**body, "prompt": p}) for p in prompts))
    server.should_exit = True
    thread.join()
    return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]


def main(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    lm = load(args.model, device=args.device) if args.model else load(device=args.device)
    prompts = [f"It was the {number}th day of" for number in range(args.clients)]
    settings = {"max_new_tokens": args.tokens, "steps": args.steps}
    lm.generate(prompts, batch=args.clients, max_new_tokens=args.tokens, steps=1)  # warm-up
    wall, cpu, equal = [], [], True
    for _ in range(args.repeats):
        seconds = []
        for kind in ("offline", "engine"):
            began = time.perf_counter(), time.process_time()
            if kind == "offline":
                expected = lm.generate(prompts, batch=args.clients, **settings).texts
            elif args.http:
                equal &= asyncio.run(run_http_clients(lm, prompts, settings)) == expected
            else:
                with Engine(lm, EngineLimits(max_rows=args.clients)) as engine:
                    equal &= asyncio.run(run_clients(engine, lm, prompts, settings)) == expected
            seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        wall.append(seconds[0][0] / seconds[1][0])
        cpu.append(seconds[0][1] / seconds[1][1])
    (ratio, spread), (cpu_ratio, cpu_spread) = compute_spread(wall), compute_spread(cpu)
    record = {
        **describe_machine("serve", str(lm.device)),
        "model": lm.name,
        "clients": args.clients,
        **settings,
        "http": args.http,
    }
    record |= {"ratio": round(ratio, 3), "cpu_ratio": round(cpu_ratio, 3), "texts_equal": equal}
    rows = [["wall clock", f"{ratio:.3f} ± {spread:.3f}"], ["CPU time", f"{cpu_ratio:.3f} ± {cpu_spread:.3f}"]]
    print_report(f"{args.clients} clients, throughput of the engine / offline", ["by", "ratio"], rows, record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a bundled name or a folder [default: the bundled model]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--http", action="store_true", help="through the HTTP server; its start and stop count")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    main(parser.parse_args())
