"""Which commands a card runs: what is asked for, as words of `adlm`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

QUICK = {
    "ppl": {"--limit": "16", "--draws": "2"},
    "samples": {"--n": "8", "--steps": "8", "--length": "24", "--mauve-seeds": "1"},
    "frontier": {"--n": "4", "--length": "16", "--steps": "4,8", "--samplers": "ancestral"}
    | {"--top-p": "1.0", "--repeats": "2"},
    "anchors": {"--limit": "16", "--draws": "1", "--perturb": "1.0", "--stale": "1"}
    | {"--samples": "2", "--length": "16", "--steps": "4"},
    "zeroshot": {"--limit": "8", "--draws": "2"},
    "domains": {"--limit": "8", "--draws": "2"},
    "code": {"--texts": "2", "--infills": "2", "--steps": "8"},
    "examples": {"--n": "1", "--steps": "8"},
}
POINT = 48  # texts a point of the frontier at most: there are many points
CHANGED = 32  # texts with each change of the anchors at most: they are written eight times
FULL = {"anchors": {"--samples": str(CHANGED)}, "examples": {"--n": "2"}}
NAMED = {  # what is measured if --with names it
    "zeroshot": '--with "zeroshot --data-dir FOLDER" adds it',
    "domains": '--with "domains --set NAME=FILE" adds it',
    "code": '--with "code" adds it',
}
COMMANDS = ("ppl", "samples", "frontier", "anchors", *NAMED, "examples")
WAY = ("--sampler", "--steps")  # of writing; a causal model has none: it writes from left to right, a token a step
OWN = ("--data", "--reference", "--judge", "--seed", "--device", "--out", "--json")  # the card's own to give


@dataclass(frozen=True)
class Asked:
    """What the card is to hold."""

    models: Sequence[str]
    data: str
    reference: str | None
    judge: str | None
    rows: str | None
    seed: int
    device: str
    is_quick: bool
    n: int | None = None
    length: int | None = None
    steps: tuple[int, ...] = ()
    samplers: tuple[str, ...] = ()
    limit: int | None = None
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)  # words of --with, by command

    def extent(self, name: str, *, is_causal: bool = False) -> dict[str, str]:
        """How much a command is to measure, and how: what was asked for before what is usual.

        The frontier has all samplers and steps; what takes one of each has the first sampler and the most steps.
        """
        n, length, limit = (None if each is None else str(each) for each in (self.n, self.length, self.limit))
        steps, samplers = ",".join(map(str, self.steps)), ",".join(self.samplers)
        point, changed = (None if self.n is None else str(min(self.n, most)) for most in (POINT, CHANGED))
        way = {"--steps": str(max(self.steps, default="")), "--sampler": next(iter(self.samplers), "")}
        writing = {"--length": length, **way}
        asked: dict[str, dict[str, str | None]] = {
            "ppl": {"--limit": limit},
            "samples": {"--n": n, **writing},
            "frontier": {"--n": point, "--length": length, "--steps": steps, "--samplers": samplers},
            "anchors": {"--limit": limit, "--samples": changed, **writing},
            "zeroshot": {"--limit": limit},
            "domains": {"--limit": limit},
            "code": {**way},
            "examples": writing,
        }
        found = (QUICK if self.is_quick else FULL).get(name, {}) | {
            option: value for option, value in asked[name].items() if value
        }
        own = self.own_of(name)
        found = {option: value for option, value in found.items() if option not in {each for each, _ in own}}
        if is_causal:
            return {option: value for option, value in found.items() if option not in WAY}
        if sampler := (found | {each: words[-1] for each, words in own}).get("--sampler"):
            from adlm.studies.writing import takes_steps

            if not takes_steps(sampler.removeprefix("--sampler=")):
                found.pop("--steps", None)
        return found

    def own_of(self, name: str) -> list[tuple[str, list[str]]]:
        """The options that --with gives a command, each with its words: `--a b`, `--a=b` or a flag."""
        found: list[tuple[str, list[str]]] = []
        for word in self.own.get(name, ()):
            if word.startswith("--") or not found:
                found.append((word.partition("=")[0], [word]))
            else:
                found[-1][1].append(word)
        return found


def own_words(given: Sequence[str]) -> dict[str, list[str]]:
    """What --with says: a command, and options for it."""
    found: dict[str, list[str]] = {}
    for each in given:
        try:
            name, *words = shlex.split(each)
        except ValueError as error:
            why = "it is empty" if not each.strip() else str(error)
            raise ValueError(f'--with {each!r} is no command with options, such as "code --texts 64": {why}') from error
        if name not in COMMANDS:
            raise ValueError(f"--with {each!r}: {name!r} is not one of {', '.join(COMMANDS)}")
        if name in found:
            raise ValueError(f"--with names {name} twice: put its options into one")
        if words and not words[0].startswith("-"):
            raise ValueError(f"--with {each!r}: {words[0]!r} is no option; the card gives the model itself")
        if taken := [word for word in words if word.partition("=")[0] in OWN]:
            raise ValueError(f"--with {each!r}: {taken[0]} is the card's own, which all commands are given")
        found[name] = words
    return found


def planned(
    asked: Asked, facts: Sequence[Mapping[str, Any]], taken: set[str], missing: dict[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """The commands for sections that are not `taken` already; what cannot be measured is put down as missing."""
    rows = ["--rows", asked.rows] if asked.rows else []
    judge = ["--judge", asked.judge] if asked.judge else []
    reference = ["--reference", asked.reference or asked.data]
    causal = {str(each["name"]) for each in facts if each["is_causal"]}
    two_stage = [str(each["name"]) for each in facts if each["is_two_stage"]]

    def words(name: str, *given: str, is_causal: bool = False) -> tuple[str, list[str]]:
        start = ["sample"] if name == "examples" else ["eval", name]
        how = [word for pair in asked.extent(name, is_causal=is_causal).items() for word in pair]
        own = [word for option, own in asked.own_of(name) if not (is_causal and option in WAY) for word in own]
        common = ["--seed", str(asked.seed), "--device", asked.device, "--json"]
        return name, [*start, *given, *how, *own, *common]

    if "ppl" not in taken:
        yield from (words("ppl", model, "--data", asked.data, *rows) for model in asked.models)
    if "samples" not in taken:
        if not asked.judge:
            missing["samples"] = "no judge was given (--judge NAME)"
        elif find_spec("mauve") is None:
            missing["samples"] = "mauve-text is not installed (pip install 'adlm[mauve]')"
        else:
            yield from (words("samples", m, *judge, *reference, is_causal=m in causal) for m in asked.models)
    if "frontier" not in taken:
        yield words("frontier", *asked.models, *judge, *reference)
    if "anchors" not in taken:
        if two_stage:
            yield words("anchors", *two_stage, "--data", asked.data, *rows, *judge)
        else:
            missing["anchors"] = "none of the models has two stages"
    for name, why in NAMED.items():
        if name in taken:
            continue
        if name not in asked.own:
            missing[name] = why
        elif name == "code":
            yield from (words(name, model, is_causal=model in causal) for model in asked.models)
        else:
            yield words(name, *asked.models)
    if "examples" not in taken:
        yield from (words("examples", model, is_causal=model in causal) for model in asked.models)
