"""The probes of the freeze script: each yields cases, a name and a value, through public names alone.

`python -m bench.freeze_probes NAME OUT` runs one in the current folder, which holds the fixtures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from bench.freeze_fixtures import CAUSAL, MASKED, RUNS, train_tiny
from bench.versions import has_settings_class, list_settings, name_options, trace_rows

Case = tuple[str, Any]  # a name, and an array or what JSON can hold
Probe = Callable[[argparse.Namespace], Iterator[Case]]
PROBES: dict[str, Probe] = {}

PLANS: dict[str, dict[str, Any]] = {  # few steps and, where a sampler can, much remasking
    "ancestral": {"steps": 6},
    "forward_backward": {"steps": 6},
    "remask_cap": {"steps": 6, "options": {"eta": 0.3}},
    "remask_rescale": {"steps": 6, "options": {"eta": 0.3}},
    "remask_conf": {"steps": 6},
    "remask_loop": {"steps": 8, "options": {"eta": 0.3}},
    "ddpm": {"steps": 6},
    "dfm": {"steps": 4},
}
ORDERS: dict[str, dict[str, Any]] = {
    "first_hitting": {},
    "confidence": {"steps": 5},
    "margin": {"steps": 5},
    "entropy_bounded": {"options": {"bound": 2.0}},
}
DRAWS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_p": 1.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
    "top_k": {"temperature": 1.2, "top_p": 1.0, "top_k": 6},
}
PROMPTS = ["The old captain", "it", "She took the letter to the house"]  # of three lengths
TEMPLATES = ["The ___{3} stood at the ___{2}.", "___{4} and the sea", "He ___{1}"]
OPEN_TEMPLATES = [  # whose holes have lengths to be chosen
    "The captain ___ the door.",
    "She ___{2,6} to the sea and ___{1,4}.",
    "___ was cold",
]
VOLATILE = ("id", "created", "seconds", "provenance", "time")
TEXTS = [
    "The old house stood at the sea.",
    "He was cold",
    "night and the captain gave her a letter again",
]


def probe(function: Probe) -> Probe:
    """Register a probe by its function's name."""
    PROBES[function.__name__.removeprefix("probe_")] = function
    return function


def load_model(name: str) -> Any:
    """Load one of the models of the fixtures, or a bundled one."""
    import adlm

    folder = Path("models", name)
    return adlm.load(folder if folder.exists() else name, device="cpu")


def iter_samplers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every sampler with settings, and plans with compat too."""
    for name, settings in (PLANS | ORDERS).items():
        yield name, name_options({"sampler": name, **settings})
        if name in PLANS:
            options = {**settings.get("options", {}), "compat": True}
            yield f"{name} compat", name_options({"sampler": name, **settings, "options": options})


def drop_volatile(value: Any) -> Any:
    """Return JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {key: drop_volatile(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [drop_volatile(each) for each in value]
    return value


# ---------------------------------------------------------------------------------------- sampling


@probe
def probe_frames(args: argparse.Namespace) -> Iterator[Case]:
    """Rows alone: every frame that changes something, with its step and NFE."""
    models = {name: load_model(name) for name in MASKED}
    for (sampler, settings), draw, block in itertools.product(iter_samplers(), DRAWS, (None, 5)):
        for number, (name, model) in enumerate(models.items()):
            if args.quick and (number or draw == "top_k"):
                continue
            given = {**settings, **DRAWS[draw], "block": block, "seed": 7 + number}
            title = f"{name}, {sampler}, {draw}, block {block}"
            (row,) = trace_rows(model.stream(PROMPTS[number], **given))
            yield f"{title}, prompt", row.as_json(with_steps=True)
            (row,) = trace_rows(model.stream(template=TEMPLATES[number], **given))
            yield f"{title}, template", row.as_json(with_steps=True)


@probe
def probe_batches(args: argparse.Namespace) -> Iterator[Case]:
    """Rows of several lengths together, n of each prompt: texts, NFE and changes."""
    models = {name: load_model(name) for name in MASKED}
    for (sampler, settings), draw, block in itertools.product(iter_samplers(), DRAWS, (None, 5)):
        for number, (name, model) in enumerate(models.items()):
            if args.quick and (number or draw == "top_k"):
                continue
            given = {
                **settings,
                **DRAWS[draw],
                "block": block,
                "seed": 11,
                "n": 2,
                "max_new_tokens": 9,
            }
            title = f"{name}, {sampler}, {draw}, block {block}"
            output = model.generate(PROMPTS, batch=4, **given)
            yield f"{title}, texts and NFE", [output.texts, list(output.nfe_each)]
            if draw == "nucleus":
                rows = trace_rows(model.stream(PROMPTS, **given))
                yield f"{title}, changes", [row.as_json(with_steps=False) for row in rows]
                del given["max_new_tokens"]
                output = model.infill(TEMPLATES, **given)
                yield f"{title}, infilled", [output.texts, list(output.nfe_each)]


@probe
def probe_long_plans(args: argparse.Namespace) -> Iterator[Case]:
    """Many steps, most of them idle, and the defaults."""
    model = load_model("adlm")
    for name in PLANS:
        options = {"eta": 0.003} if "options" in PLANS[name] else {}
        for block in (None, 7):
            given = name_options(
                {"sampler": name, "steps": 300, "options": options, "block": block}
            )
            (row,) = trace_rows(model.stream("The old", seed=3, **given))
            yield f"{name}, 300 steps, block {block}", row.as_json(with_steps=True)
    for name in MASKED:
        output = load_model(name).generate(PROMPTS, seed=5, n=2)
        yield f"{name}, defaults", [output.texts, list(output.nfe_each)]
        (row,) = trace_rows(load_model(name).stream(PROMPTS[0], seed=5))
        yield f"{name}, defaults, frames", row.as_json(with_steps=True)


@probe
def probe_causal(args: argparse.Namespace) -> Iterator[Case]:
    """Causal models: rows alone and together, the frames alone."""
    for name in CAUSAL:
        model = load_model(name)
        for draw, settings in DRAWS.items():
            output = model.generate(PROMPTS, n=3, seed=2, max_new_tokens=9, batch=4, **settings)
            yield f"{name}, {draw}, together", [output.texts, list(output.nfe_each)]
            for number, prompt in enumerate(PROMPTS):
                output = model.generate(prompt, seed=2, max_new_tokens=9, **settings)
                yield (
                    f"{name}, {draw}, prompt {number} alone",
                    [output.texts, list(output.nfe_each)],
                )
                (row,) = trace_rows(model.stream(prompt, seed=2, max_new_tokens=9, **settings))
                yield f"{name}, {draw}, prompt {number}, frames", row.as_json(with_steps=True)
        yield f"{name}, defaults", model.generate(PROMPTS, seed=4).texts


@probe
def probe_holes(args: argparse.Namespace) -> Iterator[Case]:
    """Lengths that a model chooses for holes, and what it fills in."""
    for name in MASKED:
        model = load_model(name)
        for number, template in enumerate(OPEN_TEMPLATES):
            for seed in range(2):
                (row,) = trace_rows(model.stream(template=template, seed=seed))
                positions = sorted({i for change in row.changes for i in change.tokens})
                yield f"{name}, template {number}, seed {seed}, positions", positions
                yield (
                    f"{name}, template {number}, seed {seed}, text",
                    model.infill(template, seed=seed).texts,
                )
        output = model.infill(OPEN_TEMPLATES, seed=1, n=2)
        yield f"{name}, all templates", [output.texts, list(output.nfe_each)]


@probe
def probe_recorded(args: argparse.Namespace) -> Iterator[Case]:
    """Recorded trajectories with guesses, as the player shows them."""
    for name in MASKED:
        model = load_model(name)
        for sampler in ("remask_loop", "confidence", "first_hitting"):
            settings = name_options({"sampler": sampler, **(PLANS | ORDERS)[sampler]})
            trajectory = model.record("The old captain", seed=3, **settings)
            title = f"{name}, {sampler}"
            yield f"{title}, about", [trajectory.title, trajectory.guesser]
            shown = [
                [token.text, token.state, token.is_anchor] for token in trajectory.frames[-1].tokens
            ]
            yield f"{title}, last frame", shown
            changing = []
            for frame in trajectory.frames:
                if any(token.state in ("revealed", "remasked") for token in frame.tokens):
                    changing.append(
                        [frame.step, frame.nfe, [describe_token(token) for token in frame.tokens]]
                    )
            yield f"{title}, frames that change something", changing


def describe_token(token: Any) -> list[Any]:
    """Return a token of a trajectory for JSON."""
    guesses = [[text, prob] for text, prob in token.guesses]
    return [token.text, token.state, token.is_anchor, guesses]


@probe
def probe_bundled(args: argparse.Namespace) -> Iterator[Case]:
    """The bundled model: generation, infilling, hole lengths and scores."""
    model = load_model("adlm-prose")
    for sampler, steps in (
        ("remask_loop", 16),
        ("confidence", 8),
        ("remask_conf", 8),
        ("first_hitting", None),
    ):
        given = {"sampler": sampler, "seed": 1, "max_new_tokens": 24} | (
            {"steps": steps} if steps else {}
        )
        output = model.generate(["It was a dark", "The captain"], **given)
        yield f"{sampler}, texts and NFE", [output.texts, list(output.nfe_each)]
    (row,) = trace_rows(model.stream("It was", max_new_tokens=20, steps=16, block=8, seed=2))
    yield "blocks, frames", row.as_json(with_steps=True)
    yield "infilled", model.infill("The ___ sat on the ___{2}.", seed=0).texts
    for number, score in enumerate(
        model.score(["It was a dark and stormy night.", "sea the of"], draws=8)
    ):
        yield f"score {number}", [score.nll, score.stderr, score.tokens, score.bits_per_byte]


@probe
def probe_scores(args: argparse.Namespace) -> Iterator[Case]:
    """`LM.score` of all models."""
    for name in (*MASKED, *CAUSAL):
        model = load_model(name)
        for seed in (0, 3):
            for number, score in enumerate(model.score(TEXTS, draws=8, seed=seed, batch=5)):
                values = np.array([score.nll, score.stderr, score.bits_per_byte])
                yield f"{name}, seed {seed}, text {number}", values
                yield f"{name}, seed {seed}, text {number}, about", [score.tokens, score.is_exact]


# ---------------------------------------------------------------------------------------- training


def iter_tensors(folder: Path) -> Iterator[Case]:
    """Yield all tensors below a folder, whose files may have any names."""
    for path in sorted(folder.rglob("*.safetensors")):
        part = "training" if path.parent.name == "training" else "weights"
        with safe_open(path, "pt") as opened:
            for name in opened.keys():
                yield f"{part}, {name}", opened.get_tensor(name).numpy()


def iter_run(title: str, folder: Path) -> Iterator[Case]:
    """Yield what a run has computed: weights, the optimizer's state, metrics."""
    for name, value in iter_tensors(folder / "checkpoints" / "latest"):
        yield f"{title}: {name}", value
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    yield f"{title}: metrics", drop_volatile(records)


TRAINED = {
    "adlm": ["method=adlm"],
    "mdlm": ["method=mdlm"],
    "sedd": ["method=sedd"],
    "ar": ["method=ar"],
    "a2r": ["method=a2r"],
    "adlm documents": ["method=adlm", "data.path=documents"],
    "adlm attend padding": ["method=adlm", "data.path=documents", "objective.attend_padding=true"],
    "ar documents": ["method=ar", "data.path=documents"],
    "adlm cosine": ["method=adlm", "objective.schedule=cosine", "objective.anchor_scope=masked"],
    "adlm geometric": ["method=adlm", "objective.schedule=geometric"],
    "mdlm discrete": ["method=mdlm", "objective.discrete_steps=10"],
    "mdlm timed": ["method=mdlm", "model.time_conditioning=true", "objective.time_std=0.2"],
    "adlm dropout": ["method=adlm", "model.dropout=0.1", "micro_batch=4", "seed=5"],
    "adlm factored": ["method=adlm", "model.bridge=factored", "model.tied=true", "ema=null"],
    "adlm rare in corpus": [
        "method=adlm",
        "objective.anchor_rule=rare_in_corpus",
        "objective.max_count=null",
        "objective.max_fraction=0.01",
    ],
}
OPTIMIZERS = {
    "adamw": ["optimizer.weight_decay=0.1"],
    "muon": ["optimizer.name=muon", "optimizer.muon_lr=0.01"],
}
BOTH_OPTIMIZERS = ("adlm", "mdlm", "sedd", "ar", "a2r")


@probe
def probe_training(args: argparse.Namespace) -> Iterator[Case]:
    """Three steps of every method."""
    for name, changes in TRAINED.items():
        if args.quick and name not in BOTH_OPTIMIZERS:
            continue
        for optimizer, more in OPTIMIZERS.items():
            if optimizer == "adamw" or name in BOTH_OPTIMIZERS:
                title = f"{name}, {optimizer}"
                yield from iter_run(title, train_tiny(args.out / "runs" / title, *changes, *more))


@probe
def probe_resume(args: argparse.Namespace) -> Iterator[Case]:
    """Runs that the first tree has written, resumed for two more steps."""
    for name, changes in RUNS.items():
        folder = args.out / "runs" / name
        shutil.copytree(Path("runs", name), folder, symlinks=True)
        yield from iter_run(name, train_tiny(folder, *changes, "steps=5"))
    folder = args.out / "runs" / "fine-tuned"
    yield from iter_run(
        "init", train_tiny(folder, "method=adlm", "init=models/adlm", "model.preset=null")
    )


@probe
def probe_prepare(args: argparse.Namespace) -> Iterator[Case]:
    """Prepared folders: every file but locks."""
    import adlm

    ways: dict[str, dict[str, Any]] = {
        "wrapped": {"rows": "wrapped"},
        "documents": {"rows": "documents", "documents": "line"},
    }
    for name, settings in ways.items():
        folder = args.out / name
        adlm.prepare(
            "text.txt",
            folder,
            tokenizer="wrapped/tokenizer.json",
            length=24,
            valid_share=0.2,
            **settings,
        )
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != ".lock":
                content = path.read_bytes()
                is_json = path.suffix == ".json"
                value = json.loads(content) if is_json else np.frombuffer(content, np.uint8)
                yield f"{name}: {path.relative_to(folder)}", value


# ---------------------------------------------------------------------------- commands and recipes


def run_command(*words: object) -> Any:
    """Return the JSON that a command prints."""
    from typer.testing import CliRunner

    from adlm.cli.main import app

    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    if result.exit_code != 0:
        raise RuntimeError(
            f"adlm {' '.join(map(str, words))}: exit code {result.exit_code}\n{result.output}"
        )
    return json.loads(result.stdout)


@probe
def probe_ppl(args: argparse.Namespace) -> Iterator[Case]:
    """`adlm eval ppl --json`."""
    wrapped: list[object] = ["--data", "one=text.txt", "--data", "two=other.txt"]
    documents: list[object] = ["--data", "documents"]
    ways: dict[str, list[object]] = {
        "defaults": ["models/adlm"],
        "causal": ["models/ar", "models/a2r"],
        "documents": ["models/documents", *documents],
        "causal documents": ["models/ar-documents", *documents, "--count", "text"],
        "attend padding": ["models/documents", *documents, "--attend-padding"],
        "discrete": ["models/adlm", "--steps", 10],
        "timed": ["models/timed", "--draws", 3, "--seed", 4],
        "score entropy": ["runs/sedd"],
        "two models": ["models/adlm", "models/timed"],
        "confidence": ["models/adlm", "--order", "confidence"],
        "random order": ["models/adlm", "--order", "random"],
        "left to right": ["models/timed", "--order", "left_to_right"],
        "an old run": ["runs/adlm"],
        "an old export": ["exports/adlm"],
    }
    for name, words in ways.items():
        texts = [] if "documents" in words else wrapped
        limits = ["--limit", 12, "--batch", 5, "--device", "cpu"]
        found = run_command("eval", "ppl", *words, *texts, *limits, "--json")
        yield name, drop_volatile(found)


@probe
def probe_commands(args: argparse.Namespace) -> Iterator[Case]:
    """`adlm sample`, `infill` and `score` with --json, and what --out writes."""
    shared: list[object] = ["--device", "cpu", "--json", "--seed", 6]
    ways: dict[str, list[object]] = {
        "sample": ["sample", "models/adlm", "--prompt", PROMPTS[0], "--n", 2],
        "sample a sampler": [
            "sample",
            "models/adlm",
            "--sampler",
            "remask_cap",
            "--option",
            "eta=0.3",
            "--steps",
            8,
        ],
        "sample blocks": [
            "sample",
            "models/timed",
            "--block",
            5,
            "--steps",
            6,
            "--top-p",
            0.9,
            "--temperature",
            0.8,
        ],
        "sample causal": ["sample", "models/ar", "--prompt", PROMPTS[1], "--top-k", 4],
        "sample an old run": ["sample", "runs/adlm", "--steps", 4],
        "infill": ["infill", OPEN_TEMPLATES[0], "--model", "models/adlm"],
    }
    for name, words in ways.items():
        yield name, drop_volatile(run_command(*words, *shared))
    run_command("sample", "models/adlm", "--n", 3, "--out", args.out / "texts.txt", *shared)
    yield "sample --out", (args.out / "texts.txt").read_text("utf-8")
    for model in ("adlm", "ar"):
        answer = run_command(
            "score", *TEXTS, "--model", f"models/{model}", "--device", "cpu", "--json"
        )
        yield f"score {model}", drop_volatile(answer)


@probe
def probe_recipes(args: argparse.Namespace) -> Iterator[Case]:
    """All recipes as `load_config` reads them."""
    import adlm

    folder = Path(adlm.__file__).parents[1] / "recipes"
    for path in sorted(folder.glob("*.yaml")):
        config = adlm.load_config(str(path), "folder=run", "data.path=data")
        yield path.name, json.loads(json.dumps(list_settings(config), default=str))


@probe
def probe_reasoning(args: argparse.Namespace) -> Iterator[Case]:
    """Tiny runs that reason, causal and masked: weights, accuracy, answers."""
    tiny = [
        "steps=4",
        "batch=4",
        "model.dim=32",
        "model.heads=2",
        "model.denoiser_layers=2",
        "reasoning.hops=2",
    ]
    tiny += [
        "reasoning.tests=6",
        "reasoning.stage_steps=1",
        "valid.rows=4",
        "device=cpu",
        "log.show=false",
    ]
    for task, arm in (("arithmetic", "acot"), ("graphs", "acot_feedback"), ("arithmetic", "adlm")):
        title = f"{task} {arm}"
        folder = args.out / "runs" / title
        run_command("reason", "train", task, arm, *tiny, "--out", folder, "--json")
        yield from iter_run(title, folder)
        found = drop_volatile(
            run_command("reason", "eval", folder, "--tests", 4, "--device", "cpu", "--json")
        )
        yield f"{title}: evaluated", json.loads(json.dumps(found).replace(str(args.out), "OUT"))
        if task == "arithmetic":
            asked = run_command(
                "reason", "ask", folder, "b = a - 9 | a = 13 + 4 ? b", "--device", "cpu", "--json"
            )
            yield f"{title}: asked", drop_volatile(asked)


# ------------------------------------------------------------------------------------------ server


@contextmanager
def start_server(*models: str) -> Iterator[str]:
    """Start `adlm serve` in a process of its own and yield its address."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "adlm",
        "serve",
        *models,
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server stopped: exit code {process.wait()}")
        try:
            yield line.split()[-1]
        finally:
            process.terminate()


def read_answer(content: bytes, kind: str) -> Any:
    """Return an answer without what differs from run to run: events of a stream as a list."""
    text = content.decode("utf-8")
    if kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [each if each == "[DONE]" else drop_volatile(json.loads(each)) for each in events]
    return drop_volatile(json.loads(text))


def send(address: str, path: str, body: dict[str, Any] | None = None) -> list[Any]:
    """Send a request and return status, media type and answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, kind, content = answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        status, kind, content = error.code, error.headers["content-type"], error.read()
    return [status, kind, read_answer(content, kind)]


def build_bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return requests by name: path and body."""
    loop = name_options({"sampler": "remask_loop", "steps": 8, "options": {"eta": 0.3}})
    cap = name_options(
        {"sampler": "remask_cap", "steps": 6, "options": {"eta": 0.3, "compat": True}}
    )
    prompt = {"prompt": PROMPTS[0], "seed": 3, "max_tokens": 12}
    hole = {"template": TEMPLATES[0], "seed": 3}
    complete, infill = "/v1/completions", "/v1/infill"
    return {
        "defaults": (complete, {**prompt, "steps": 8}),
        "loop": (complete, {**prompt, **loop}),
        "cap compat": (complete, {**prompt, **cap, "top_p": 0.9}),
        "several prompts": (complete, {**prompt, **loop, "prompt": PROMPTS, "n": 2}),
        "blocks": (complete, {**prompt, **loop, "block": 5}),
        "first hitting": (complete, {**prompt, "sampler": "first_hitting", "temperature": 0.7}),
        "tokens": (complete, {**prompt, **loop, "prompt": [[40, 50, 60], [70, 80]]}),
        "echo and stop": (complete, {**prompt, **loop, "echo": True, "stop": ["e"]}),
        "log-probabilities": (complete, {**prompt, **loop, "logprobs": 3}),
        "greedy log-probabilities": (
            complete,
            {**prompt, "sampler": "confidence", "temperature": 0, "logprobs": 2},
        ),
        "suffix": (
            complete,
            {**prompt, **loop, "suffix": " the sea.", "min_tokens": 2, "max_tokens": 5},
        ),
        "timed": (complete, {**prompt, **loop, "model": "models/timed"}),
        "documents": (complete, {**prompt, **loop, "model": "models/documents"}),
        "causal": (complete, {**prompt, "model": "models/ar"}),
        "causal several": (
            complete,
            {**prompt, "model": "models/ar", "prompt": PROMPTS, "n": 2, "logprobs": 2},
        ),
        "infill": (infill, hole),
        "infill loop": (infill, {**hole, **loop, "logprobs": 1}),
        "infill open": (infill, {"template": OPEN_TEMPLATES[1], "seed": 1}),
        "infill several": (infill, {"template": TEMPLATES, "seed": 1, "n": 2}),
    }


def join_events(answer: list[Any]) -> dict[str, str]:
    """Return the texts of a stream, by the number of the choice."""
    texts: dict[str, str] = {}
    for event in answer[2]:
        if event != "[DONE]":
            for choice in event["choices"]:
                texts[str(choice["index"])] = texts.get(str(choice["index"]), "") + choice["text"]
    return texts


@probe
def probe_server(args: argparse.Namespace) -> Iterator[Case]:
    """Transcripts of `adlm serve`: completions, infilling, streams, scores, models."""
    bodies = build_bodies()
    with start_server("models/adlm", "models/timed", "models/documents", "models/ar") as address:
        for name, (path, body) in bodies.items():
            yield name, send(address, path, body)
            answer = send(
                address, path, {**body, "stream": True, "stream_options": {"include_usage": True}}
            )
            yield f"{name}, stream", answer
            yield f"{name}, text of the stream", join_events(answer)
        for name in ("loop", "blocks", "causal", "infill"):
            path, body = bodies[name]
            answer = send(
                address, path, {**body, "stream": True, "stream_mode": "denoise", "guesses": 2}
            )
            yield f"{name}, drafts", answer
        with ThreadPoolExecutor(8) as pool:
            waiting = {}
            for name, (path, body) in bodies.items():
                # Who shares a batch is chance, and rounding depends on it: texts do not, log-probabilities do.
                plain = {key: value for key, value in body.items() if key != "logprobs"}
                waiting[name] = pool.submit(send, address, path, plain)
            for name, future in waiting.items():
                yield f"{name}, at the same time", future.result()
        for model in ("models/adlm", "models/ar"):
            body = {"model": model, "text": TEXTS, "draws": 4, "seed": 2}
            yield f"score, {model}", send(address, "/v1/score", body)
        yield "models", send(address, "/v1/models")
        yield "a model", send(address, "/v1/models/models/ar")
        yield "health", send(address, "/healthz")
        wrong = {
            "no field": {"prompt": "a", "temprature": 1},
            "no model": {"model": "b"},
            "no number": {"n": "two"},
        }
        for name, body in wrong.items():
            yield f"{name}, status", send(address, "/v1/completions", body)[0]


# ---------------------------------------------------------------------------------- other libraries


def export_model(name: str, out: Path) -> Path:
    """Export a model with this tree's command."""
    folder = out / name
    command = [sys.executable, "-P", "-m", "adlm", "export", f"models/{name}", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@probe
def probe_transformers(args: argparse.Namespace) -> Iterator[Case]:
    """Texts and logits of exported folders, by the code in them; of this tree's and of the first tree's."""
    import transformers

    folders = {
        name: export_model(name, args.out / "exported") for name in ("adlm", "documents", "ar")
    }
    folders |= {f"old {name}": Path("exports", name).resolve() for name in ("adlm", "ar")}
    for name, folder in folders.items():
        is_causal = name.endswith("ar")
        kind: Any = (
            transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForMaskedLM
        )
        model = kind.from_pretrained(folder, trust_remote_code=True)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        with torch.no_grad():
            yield f"{name}, logits", model(**inputs).logits.numpy()
        ways = [("left to right", {})] if is_causal else list(iter_samplers())
        is_old = name.startswith("old") and has_settings_class()
        for sampler, settings in ways:
            given: dict[str, Any] = dict(settings)
            if is_old:  # its code takes options by name
                given |= given.pop("options", {})
            tokens = model.generate(
                **inputs, max_new_tokens=9, seed=3, num_return_sequences=2, **given
            )
            yield f"{name}, {sampler}", tokens.tolist()
        torch.manual_seed(3)
        yield f"{name}, seed of torch", model.generate(**inputs, max_new_tokens=5).tolist()


@probe
def probe_diffusers(args: argparse.Namespace) -> Iterator[Case]:
    """Texts of the exported pipeline, and of LLaDA2Pipeline with our scheduler."""
    import diffusers

    folder = export_model("adlm", args.out / "exported")
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    pipe.set_progress_bar_config(disable=True)
    for sampler, settings in (PLANS | ORDERS).items():
        scheduler = type(pipe.scheduler)(
            sampler=sampler, steps=settings.get("steps"), options=dict(settings.get("options", {}))
        )
        own = type(pipe)(model=pipe.model, scheduler=scheduler, tokenizer=pipe.tokenizer)
        own.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(4)
        output = own(PROMPTS[:2], max_new_tokens=9, generator=generator, output_type="seq")
        yield f"{sampler}, sequences", output.sequences.tolist()
        parts = {"model": pipe.model, "scheduler": scheduler, "tokenizer": pipe.tokenizer}
        theirs: Any = diffusers.LLaDA2Pipeline(**parts)
        theirs.set_progress_bar_config(disable=True)
        for block in (5, 32):
            output = theirs(
                PROMPTS[0],
                use_chat_template=False,
                gen_length=10,
                block_length=block,
                temperature=1.0,
                top_p=0.9,
                eos_early_stop=False,
                output_type="seq",
                generator=torch.Generator().manual_seed(4),
            )
            yield f"{sampler}, LLaDA2Pipeline, block {block}", output.sequences.tolist()


# ------------------------------------------------------------------------------------- one process


def write_cases(cases: Iterator[Case], folder: Path) -> int:
    """Write cases into a folder: JSON, and arrays by the number of their case; return how many there are."""
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in cases:
        if name in values:
            raise ValueError(f"two cases are named {name!r}")
        if isinstance(value, np.ndarray):
            key = str(len(arrays))
            arrays[key] = value
            value = {"array": key}
        values[name] = value
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    (folder / "cases.json").write_text(json.dumps(values), "utf-8")
    return len(values)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, required=True, help="where the package must come from")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(words)
    import adlm

    if not Path(adlm.__file__).is_relative_to(args.tree):
        raise RuntimeError(f"adlm comes from {adlm.__file__}, not from {args.tree}: set PYTHONPATH")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    count = write_cases(PROBES[args.probe](args), args.out)
    print(f"{args.probe}: {count} cases")


if __name__ == "__main__":
    main()
