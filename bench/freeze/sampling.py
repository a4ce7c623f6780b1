"""Probes of sampling: texts, NFE, frames of every sampler, hole lengths, trajectories, scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.freeze.cases import (
    DRAWS,
    OPEN_TEMPLATES,
    ORDERS,
    PLANS,
    PROMPTS,
    TEMPLATES,
    TEXTS,
    Case,
    iter_named_samplers,
    load_model,
)
from bench.freeze.fixtures import CAUSAL, MASKED
from bench.versions import name_options, trace_rows

LONG_STEPS = 300  # most of them idle


def iter_output(title: str, output: Any) -> Iterator[Case]:
    """Yield the texts and the network evaluations of what has been generated."""
    yield f"{title}: texts", list(output.texts)
    yield f"{title}: NFE", list(output.nfe_each)


def iter_frames(title: str, model: Any, *prompt: str, **settings: Any) -> Iterator[Case]:
    """Yield the steps of a row alone that change something, with their numbers and NFE.

    The moves are the same without the tokens that were drawn.
    """
    (row,) = trace_rows(model.stream(*prompt, **settings))
    yield f"{title}: moves", [[each.step, each.nfe, sorted(each.tokens)] for each in row.changes]
    yield f"{title}: frames", row.as_json(with_steps=True)


def iter_combinations(*, is_quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield sampler × compat × block × temperature, nucleus and top-k: a title and settings."""
    draws = {name: each for name, each in DRAWS.items() if not is_quick or name != "top_k"}
    for (sampler, settings), draw, block in itertools.product(
        iter_named_samplers(), draws, (None, 5)
    ):
        yield f"{sampler}, {draw}, block {block}", {**settings, **draws[draw], "block": block}


def load_models(*, is_quick: bool) -> dict[str, Any]:
    """Load the masked models of the fixtures."""
    names = MASKED[:1] if is_quick else MASKED
    return {name: load_model(name) for name in names}


def probe_frames(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Rows alone: every frame that changes something, with its step and NFE."""
    models = load_models(is_quick=is_quick)
    for combination, settings in iter_combinations(is_quick=is_quick):
        for number, (name, model) in enumerate(models.items()):
            given = {**settings, "seed": 7 + number}
            title = f"{name}, {combination}"
            yield from iter_frames(f"{title}, prompt", model, PROMPTS[number], **given)
            template = TEMPLATES[number]
            yield from iter_frames(f"{title}, template", model, template=template, **given)


def probe_batches(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Rows of several lengths together, n of each prompt: texts, NFE and changes.

    A step's number is left out here: what it counts in a batch is not the row's own.
    """
    models = load_models(is_quick=is_quick)
    for combination, settings in iter_combinations(is_quick=is_quick):
        for name, model in models.items():
            given = {**settings, "seed": 11, "n": 2}
            title = f"{name}, {combination}"
            output = model.generate(PROMPTS, batch=4, max_new_tokens=9, **given)
            yield from iter_output(title, output)
            if ", nucleus," in title:
                rows = trace_rows(model.stream(PROMPTS, max_new_tokens=9, **given))
                yield f"{title}: changes", [row.as_json(with_steps=False) for row in rows]
                yield from iter_output(f"{title}, infilled", model.infill(TEMPLATES, **given))


def probe_long_plans(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Many steps, most of them idle, and the defaults."""
    model = load_model("adlm")
    for name, plan in PLANS.items():
        options = {"eta": 0.003} if "options" in plan else {}
        for block in (None, 7):
            settings = {"sampler": name, "steps": LONG_STEPS, "options": options, "block": block}
            title = f"{name}, {LONG_STEPS} steps, block {block}"
            yield from iter_frames(title, model, "The old", seed=3, **name_options(settings))
    for name in MASKED:
        model = load_model(name)
        yield from iter_output(f"{name}, defaults", model.generate(PROMPTS, seed=5, n=2))
        yield from iter_frames(f"{name}, defaults", model, PROMPTS[0], seed=5)


def probe_causal(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Causal models: rows alone and together, the frames alone."""
    for name in CAUSAL:
        model = load_model(name)
        for draw, settings in DRAWS.items():
            given = {**settings, "seed": 2, "max_new_tokens": 9}
            together = model.generate(PROMPTS, n=3, batch=4, **given)
            yield from iter_output(f"{name}, {draw}, together", together)
            for number, prompt in enumerate(PROMPTS):
                title = f"{name}, {draw}, prompt {number} alone"
                yield from iter_output(title, model.generate(prompt, **given))
                yield from iter_frames(title, model, prompt, **given)
        yield from iter_output(f"{name}, defaults", model.generate(PROMPTS, seed=4))


def probe_holes(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Lengths that a model chooses for holes, and what it fills in."""
    for name in MASKED:
        model = load_model(name)
        for number, template in enumerate(OPEN_TEMPLATES):
            title = f"{name}, template {number}"
            (row,) = trace_rows(model.stream(template=template))
            yield f"{title}: positions", sorted({i for each in row.changes for i in each.tokens})
            yield from iter_output(title, model.infill(template, seed=1))
        yield from iter_output(f"{name}, together", model.infill(OPEN_TEMPLATES, seed=1, n=2))


def probe_recorded(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Recorded trajectories with guesses, as the player shows them."""
    for name in MASKED:
        model = load_model(name)
        for sampler in ("remask_loop", "confidence", "first_hitting"):
            settings = name_options({"sampler": sampler, **(PLANS | ORDERS)[sampler]})
            trajectory = model.record("The old captain", seed=3, **settings)
            title = f"{name}, {sampler}"
            yield f"{title}: names", [trajectory.title, trajectory.guesser]
            changing = []
            for frame in trajectory.frames:
                if any(token.state in ("revealed", "remasked") for token in frame.tokens):
                    tokens = [describe_token(token) for token in frame.tokens]
                    changing.append([frame.step, frame.nfe, tokens])
            yield f"{title}: frames that change something", changing
            yield f"{title}: last tokens", [token.text for token in trajectory.frames[-1].tokens]


def describe_token(token: Any) -> list[Any]:
    """Return a token of a trajectory for JSON."""
    guesses = [[text, prob] for text, prob in token.guesses]
    return [token.text, token.state, token.is_anchor, guesses]


def probe_bundled(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """The bundled model: generation, infilling, hole lengths and scores."""
    model = load_model("adlm-prose")
    ways: dict[str, dict[str, Any]] = {
        "remask_loop": {"steps": 16},
        "confidence": {"steps": 8},
        "remask_conf": {"steps": 8},
        "first_hitting": {},
    }
    for sampler, settings in ways.items():
        given = {"sampler": sampler, "seed": 1, "max_new_tokens": 24, **settings}
        yield from iter_output(sampler, model.generate(["It was a dark", "The captain"], **given))
    yield from iter_frames("blocks", model, "It was", max_new_tokens=20, steps=16, block=8, seed=2)
    yield from iter_output("infilled", model.infill("The ___ sat on the ___{2}.", seed=0))
    texts = ["It was a dark and stormy night.", "sea the of"]
    for number, score in enumerate(model.score(texts, draws=8)):
        yield f"score {number}", np.array([score.nll, score.stderr, score.bits_per_byte])


def probe_scores(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """`LM.score` of all models."""
    for name in (*MASKED, *CAUSAL):
        model = load_model(name)
        for seed in (0, 3):
            for number, score in enumerate(model.score(TEXTS, draws=8, seed=seed, batch=5)):
                title = f"{name}, seed {seed}, text {number}"
                values = np.array([score.nll, score.stderr, score.bits_per_byte])
                yield f"{title}: numbers", values
                yield f"{title}: tokens", [score.tokens, score.is_exact]
