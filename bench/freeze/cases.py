"""What the probes share: prompts, samplers, ways to draw, and how a model or a command is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.versions import name_options

Case = tuple[str, Any]  # a name, and an array or what JSON can hold

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
    "He ___ the night ___ away",
    "It was ___{1,12} and she",
    "the ___{1,9} in her ___{1,9} and the ___{1,9} door",
    "all ___{3,20}",
    "Again ___{2,11} stood.",
]
TEXTS = [
    "The old house stood at the sea.",
    "He was cold",
    "night and the captain gave her a letter again",
]
VOLATILE = ("id", "created", "seconds", "provenance", "time")


def load_model(name: str) -> Any:
    """Load one of the models of the fixtures, or a bundled one."""
    import adlm

    folder = Path("models", name)
    return adlm.load(folder if folder.exists() else name, device="cpu")


def iter_samplers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every sampler with its settings, and plans with compat too; `options` are its own."""
    for name, settings in (PLANS | ORDERS).items():
        yield name, {"sampler": name, **settings}
        if name in PLANS:
            options = {**settings.get("options", {}), "compat": True}
            yield f"{name} compat", {"sampler": name, **settings, "options": options}


def iter_named_samplers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every sampler with its settings as this version of the package names them."""
    for name, settings in iter_samplers():
        yield name, name_options(settings)


def run_command(*words: object) -> Any:
    """Return the JSON that a command prints."""
    from typer.testing import CliRunner

    from adlm.cli.main import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exit_code != 0:
        command = " ".join(map(str, words))
        raise RuntimeError(f"adlm {command}: exit code {result.exit_code}\n{result.output}")
    return json.loads(result.stdout)


def drop_volatile(value: Any) -> Any:
    """Return JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {key: drop_volatile(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [drop_volatile(each) for each in value]
    return value


def name_folder(value: Any, folder: Path) -> Any:
    """Return JSON with another name for a folder, which differs from run to run."""
    return json.loads(json.dumps(value).replace(str(folder), "OUT"))


def iter_parts(title: str, answer: dict[str, Any], *parts: str) -> Iterator[Case]:
    """Yield some parts of an answer, and the rest, as cases of their own.

    So one part may be allowed to differ while the others must not.
    """
    rest = dict(answer)
    for part in parts:
        yield f"{title}: {part}", rest.pop(part, None)
    yield f"{title}: the rest", rest
