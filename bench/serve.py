"""The serving engine: `clients` compares many clients with the same requests as one offline batch, `engine` many
requests together with one at a time, with random weights, and measures their memory."""

from __future__ import annotations

import argparse
import asyncio
import threading
import time

import torch

from adlm.checkpoint import LoadedModel
from adlm.data.tokenizers import load_tokenizer
from adlm.serve.engine import Engine, EngineLimits, generate_rows
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, load
from bench.setting import SIZES, build_model, compute_spread, describe_machine, get_peak_gib, print_report

PORT = 8765


async def run_requests(engine: Engine, requests: list[GenerationRequest]) -> list[GeneratedRow]:
    """Submit all requests at once and return their rows."""
    rows = await asyncio.gather(*(generate_rows(engine, request) for request in requests))
    return [row for each in rows for row in each]


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


def measure_clients(args: argparse.Namespace) -> None:
    """Compare clients that come together with one offline batch."""
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
                    requests = [lm.build_request(prompt, **settings) for prompt in prompts]
                    equal &= [row.text for row in asyncio.run(run_requests(engine, requests))] == expected
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


def measure_engine(args: argparse.Namespace) -> None:
    """Compare requests that come together with one at a time, and measure the memory beyond the weights."""
    model = build_model(args.size, "factored", dropout=0.0)
    lm = LM(LoadedModel(model, load_tokenizer("gpt2"), "adlm", 0, "wrapped"), args.size, device=args.device)
    is_cuda, rows, results = lm.device.type == "cuda", [], []
    weights = sum(p.numel() * p.element_size() for p in lm.predictor.model.parameters()) / 2**30

    def run(engine: Engine, count: int, length: int, steps: int, *, together: bool) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of some requests."""
        requests = [
            lm.build_request(length=min(length, lm.row_format.longest), seed=seed, steps=steps, sampler=args.sampler)
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
                [f"{args.rows} × {length}", f"{together:.2f}", f"{alone / args.alone:.3f}", f"{ratio:.1f}×"]
                + ["–" if memory is None else f"{memory:.2f}"]
            )
            values = {"length": length, "seconds": together, "seconds_alone": alone / args.alone, "ratio": ratio}
            values |= {"gib_beyond_weights": memory, "texts_equal": equal}
            results.append({key: value if value is None else round(value, 4) for key, value in values.items()})
    record = {**describe_machine("serve engine", str(lm.device)), "size": args.size, "rows": args.rows}
    record |= {"alone": args.alone, "steps": args.steps, "sampler": args.sampler, "weights_gib": round(weights, 3)}
    columns = ["canvases", "seconds together", "seconds of one alone", "throughput", "GiB beyond weights"]
    print_report(f"Engine, {args.size}, {args.steps} steps", columns, rows, record | {"lengths": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="CPU threads")
    kinds = parser.add_subparsers(required=True)
    clients = kinds.add_parser("clients", help="many clients against one offline batch")
    clients.set_defaults(measure=measure_clients)
    clients.add_argument("--model", help="a bundled name or a folder [default: the bundled model]")
    clients.add_argument("--http", action="store_true", help="through the HTTP server; its start and stop count")
    clients.add_argument("--clients", type=int, default=64)
    clients.add_argument("--tokens", type=int, default=64)
    clients.add_argument("--steps", type=int, default=16)
    clients.add_argument("--repeats", type=int, default=3)
    engine = kinds.add_parser("engine", help="requests together against one at a time, without HTTP")
    engine.set_defaults(measure=measure_engine)
    engine.add_argument("--size", choices=SIZES, default="small", help="random weights of this size")
    engine.add_argument("--rows", type=int, default=256, help="requests together")
    engine.add_argument("--alone", type=int, default=8, help="requests one at a time")
    engine.add_argument("--length", type=int, nargs="+", default=[256, 1024], help="tokens of a canvas")
    engine.add_argument("--steps", type=int, default=32)
    engine.add_argument("--sampler", default="remask_loop")
    for each in (clients, engine):
        each.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.measure(args)


if __name__ == "__main__":
    main()
