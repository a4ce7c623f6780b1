"""`adlm eval card`: everything that was measured on one page, and how it was."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.answers import answering, notes, print_json
from adlm.cli.errors import told
from adlm.cli.evaluation.lists import check_folder, save_json, values_of

if TYPE_CHECKING:
    from adlm.text.lm import LM

ASKED = "commands.json"  # which command wrote which file of the folder
GIVEN = {"samples": ("samples*.json", "quality*.json")}  # names that other commands give their files
OPTIONAL = {
    "zeroshot": "`adlm eval zeroshot MODEL --out FOLDER/zeroshot.json` adds it",
    "domains": "`adlm eval domains MODEL --set NAME=FILE --json > FOLDER/domains.json` adds it",
    "code": "`adlm eval code MODEL --json > FOLDER/code.json` adds it",
}
QUICK = {
    "ppl": {"--limit": "16", "--draws": "2"},
    "samples": {"--n": "8", "--steps": "8", "--length": "24", "--mauve-seeds": "1"},
    "frontier": {"--n": "4", "--length": "16", "--steps": "4,8", "--samplers": "ancestral"}
    | {"--top-p": "1.0", "--repeats": "2"},
    "anchors": {"--limit": "16", "--draws": "1", "--perturb": "1.0", "--stale": "1"}
    | {"--samples": "2", "--length": "16", "--steps": "4"},
    "examples": {"--n": "1", "--steps": "8"},
}
POINT = 48  # texts a point of the frontier at most: there are many points
CHANGED = 32  # texts with each change of the anchors at most: there are nine changes, and a text is written alone
FULL = {"anchors": {"--samples": str(CHANGED)}, "examples": {"--n": "2"}}
GOING_ON = ("samples", "frontier", "anchors")  # what they have done they keep in a folder, and go on behind it
PARTS = "parts"
MUCH = "How much is measured"
TAGS = ("diffusion", "masked-diffusion", "language-model")


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

    def extent(self, name: str, *, is_causal: bool = False) -> dict[str, str]:
        """How much a command is to measure, and how: what was asked for before what is usual.

        The frontier has all samplers and steps; what takes one of each has the first sampler and the most steps.
        """
        n, length, limit = (None if each is None else str(each) for each in (self.n, self.length, self.limit))
        steps, samplers = ",".join(map(str, self.steps)), ",".join(self.samplers)
        point, changed = (None if self.n is None else str(min(self.n, most)) for most in (POINT, CHANGED))
        most, first = str(max(self.steps, default="")), next(iter(self.samplers), "")
        writing = {"--length": length, "--steps": most, "--sampler": first}
        asked: dict[str, dict[str, str | None]] = {
            "ppl": {"--limit": limit},
            "samples": {"--n": n, **writing},
            "frontier": {"--n": point, "--length": length, "--steps": steps, "--samplers": samplers},
            "anchors": {"--limit": limit, "--samples": changed, **writing},
            "examples": writing,
        }
        found = (QUICK if self.is_quick else FULL).get(name, {}) | {
            option: value for option, value in asked[name].items() if value
        }
        if is_causal:  # it writes from left to right, a token a step
            return {option: value for option, value in found.items() if option not in ("--steps", "--sampler")}
        if "--sampler" in found:
            from adlm.studies.writing import takes_steps

            if not takes_steps(found["--sampler"]):
                found.pop("--steps", None)
        return found


@dataclass
class Gathered:
    """Answers by section, the commands that gave them, and why others are missing."""

    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def card(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Held-out text: what `adlm prepare` reads, or what it made.")] = None,
    reference: Annotated[str | None, typer.Option(help="Real text to compare samples with. (--data)")] = None,
    judge: Annotated[str | None, typer.Option(help="Whose Gen-PPL and MAUVE, as for `adlm eval samples`.")] = None,
    train: Annotated[
        str | None, typer.Option(help="Training text: what a unigram and a bigram of it are worth stands beside.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="A folder. JSON of other commands that lies there is taken; the same command goes on.")
    ] = Path("card"),
    is_quick: Annotated[bool, typer.Option("--quick", help="Little of everything: to see that it works.")] = False,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", min=2, help="Texts: samples, each point, each change. (as the commands)", rich_help_panel=MUCH
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text.", rich_help_panel=MUCH)] = None,
    steps: Annotated[
        str, typer.Option(help="With commas: the frontier has all, other texts the most.", rich_help_panel=MUCH)
    ] = "",
    samplers: Annotated[
        str, typer.Option(help="With commas: the frontier has all, other texts the first.", rich_help_panel=MUCH)
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=2, help="Rows for likelihood and anchors. (all; 256)", rich_help_panel=MUCH)
    ] = None,
    rows: Annotated[str | None, typer.Option(help="wrapped, documents (one a row, cut). (wrapped)")] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Of the weights, as the Hub names it. (bundled: apache-2.0, else unknown)"),
    ] = None,
    language: Annotated[str, typer.Option(help="Of the text, as the Hub names it.")] = "en",
    seed: options.Seed = 0,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Put likelihood, sample quality, frontier and anchors into card.json, card.html and card.md, ready to publish.

    Every figure comes from a command that the card names; what was not measured is said to be so.
    """
    with told():
        if data is None:
            raise ValueError("what to measure on is not said: give --data FILE, a folder or the name of a corpus")
        check_folder("--out", out)
        several = tuple(values_of("--steps", steps, int)), tuple(values_of("--samplers", samplers, str))
        with answering(is_json):
            from adlm.bundled import DEFAULT, MODELS

            names = list(dict.fromkeys(models or [DEFAULT]))
            asked = Asked(names, data, reference, judge, rows, seed, device, is_quick, n, length, *several, limit)
            licence = licence or ("apache-2.0" if set(asked.models) <= set(MODELS) else "unknown")
            made = made_card(asked, train, out, {"license": licence, "language": language})
            files = written(made, out)
        if is_json:
            print_json(made | {"files": [str(path) for path in files]})
            return
        for part in made["sections"]:
            said = "measured" if part["is_measured"] else f"not measured: {part['why']}"
            notes().print(f"{part['title']}: {said}", markup=False)
        for path in files:
            notes().print(f"→ {path}", style="dim", markup=False)


def made_card(asked: Asked, train: str | None, out: Path, about: dict[str, str]) -> dict[str, Any]:
    """The card's data, from the folder's files and from commands that are run for what is not there."""
    from datetime import UTC, datetime

    from adlm.evaluate.provenance import provenance
    from adlm.studies.card import baselines, facts_of, make_card, scrubbed
    from adlm.text.lm import load

    loaded = [load(name, device=asked.device) for name in asked.models]
    if find_spec("matplotlib") is None:
        raise ImportError("a card's pictures need matplotlib: pip install 'adlm[eval]'")
    check_extent(asked, loaded)
    facts = [facts_of(lm) for lm in loaded]
    found = gathered(asked, facts, out)
    if train is not None and "ppl" in found.answers:
        limit = asked.extent("ppl").get("--limit")
        how = {"rows": asked.rows, "limit": None if limit is None else int(limit)}
        beside = baselines(loaded[0], train, asked.data, **how)
        save_json(out / "baselines.json", beside)
        found.answers["ppl"].append(beside)
    given = [asked.data, asked.reference, asked.judge, train, *asked.models, str(out)]
    names = short_names([each for each in given if each])
    here = {"written": datetime.now(UTC).date().isoformat(), **provenance(loaded[0].device)}
    command = shlex.join(["adlm", *sys.argv[1:]]) if sys.argv[1:2] == ["eval"] else "adlm eval card"
    made = make_card(
        facts,
        found.answers,
        found.missing,
        found.commands,
        provenance=here,
        data=hashes([each for each in (asked.data, asked.reference, train) if each], names),
        command=command,
        tags=[*TAGS, *dict.fromkeys(each["method"] for each in facts)],
        **about,
    )
    kept: dict[str, Any] = scrubbed(made, names)
    return kept


def check_extent(asked: Asked, loaded: Sequence[LM]) -> None:
    """Refuse samplers, steps and lengths that cannot be before the first command runs."""
    from adlm.studies.frontier import grid

    for lm in loaded:
        for setting in grid(lm, asked.length or 1, asked.samplers or ("ancestral",), asked.steps or (1,), [1.0], [1.0]):
            lm.job(length=asked.length, n=1, **setting.how())


def gathered(asked: Asked, facts: Sequence[Mapping[str, Any]], out: Path) -> Gathered:
    """Each section's answers: of files that lie in the folder, or of commands."""
    found = Gathered(missing=dict(OPTIONAL))
    ledger = out / ASKED
    known: dict[str, Any] = json.loads(ledger.read_text("utf-8")) if ledger.is_file() else {}
    for name, given in given_files(out, known).items():
        found.answers[name] = [read_answer(path, name) for path in given]
        for path, answer in zip(given, found.answers[name], strict=True):
            check_weights(path, answer, {str(each["name"]): str(each["weights_sha256"]) for each in facts})
        found.commands[name] = [f"taken from {path.name}" for path in given]
    read = [each for each in (asked.data, asked.reference) if each]
    same = hashes(read, short_names(read))
    for name, words in planned(asked, facts, found):
        number = len(found.answers.setdefault(name, [])) + 1
        path = out / f"{name}-{number}.json"
        shown = shlex.join(["adlm", *words])
        # An answer holds as long as its command, the weights and the files that it read are the same.
        weights = {each["name"]: each["weights_sha256"] for each in facts if each["name"] in words}
        follows = {"words": words, "weights": weights, "files": same}
        if not path.is_file() or known.get(path.name) != follows:
            notes().print(f"$ {shown}", style="dim", markup=False)
            # In this order: an answer whose command is not put down would be taken for a file of somebody else's.
            path.unlink(missing_ok=True)
            save_json(ledger, known := known | {path.name: follows})
            save_json(path, answer_of([*words, *kept_in(out, name, follows)]))
        found.answers[name].append(read_answer(path, name))
        found.commands.setdefault(name, []).append(shown)
    return found


def kept_in(out: Path, name: str, follows: Mapping[str, Any]) -> list[str]:
    """Where a long command keeps what it has done, by what that follows from: after a Ctrl-C it goes on there."""
    if name not in GOING_ON:
        return []
    key = hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:12]
    return ["--out", str(out / PARTS / f"{name}-{key}")]


def given_files(out: Path, known: Mapping[str, Any]) -> dict[str, list[Path]]:
    """JSON of other commands that lies in the folder, by section."""
    from adlm.studies.card import SECTIONS

    found = {}
    for name in SECTIONS:
        files = [path for pattern in GIVEN.get(name, (f"{name}*.json",)) for path in sorted(out.glob(pattern))]
        if kept := [path for path in files if path.name not in known]:
            found[name] = kept
    return found


def planned(asked: Asked, facts: Sequence[Mapping[str, Any]], found: Gathered) -> Iterator[tuple[str, list[str]]]:
    """The commands for what the folder does not hold; what cannot be measured is put down as missing."""
    taken = set(found.answers)  # before the first answer comes in
    common = ["--seed", str(asked.seed), "--device", asked.device, "--json"]
    rows = ["--rows", asked.rows] if asked.rows else []
    judge = ["--judge", asked.judge] if asked.judge else []
    reference = asked.reference or asked.data

    def words(name: str, *given: str, is_causal: bool = False) -> tuple[str, list[str]]:
        start = ["sample"] if name == "examples" else ["eval", name]
        how = [word for pair in asked.extent(name, is_causal=is_causal).items() for word in pair]
        return name, [*start, *given, *how, *common]

    causal = {str(each["name"]) for each in facts if each["is_causal"]}
    if "ppl" not in taken:
        yield from (words("ppl", model, "--data", asked.data, *rows) for model in asked.models)
    if "samples" not in taken:
        if not asked.judge:
            found.missing["samples"] = "no judge was given (--judge NAME)"
        elif find_spec("mauve") is None:
            found.missing["samples"] = "mauve-text is not installed (pip install 'adlm[mauve]')"
        else:
            for model in asked.models:
                yield words("samples", model, *judge, "--reference", reference, is_causal=model in causal)
    if "frontier" not in taken:
        yield words("frontier", *asked.models, *judge, "--reference", reference)
    two_stage = [str(each["name"]) for each in facts if each["is_two_stage"]]
    if "anchors" not in taken:
        if two_stage:
            yield words("anchors", *two_stage, "--data", asked.data, *rows, *judge)
        else:
            found.missing["anchors"] = "none of the models has two stages"
    if "examples" not in taken:
        yield from (words("examples", model, is_causal=model in causal) for model in asked.models)


def answer_of(words: Sequence[str]) -> dict[str, Any]:
    """What a command of ours answers, in a process of its own; what it says on the way goes to our stderr."""
    is_shown = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "adlm", *words],
        stdout=subprocess.PIPE,
        stderr=None if is_shown else subprocess.PIPE,
        env=os.environ,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        why = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
        raise ValueError(f"`{shlex.join(['adlm', *words])}` did not answer: {why}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_answer(path: Path, name: str) -> dict[str, Any]:
    """A file that a command wrote."""
    from adlm.studies.card import SECTIONS

    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        SECTIONS[name][1]([found])  # is it what that section is made of?
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what `adlm eval {name} --json` prints ({type(error).__name__}: {error}): take it out of "
            "the folder, or write it again"
        ) from error
    return found


def check_weights(path: Path, answer: Any, weights: Mapping[str, str]) -> None:
    """Refuse a file whose figures are of other weights than those that the card is about."""
    if isinstance(answer, Mapping):
        name, said = answer.get("model"), answer.get("weights_sha256")
        if said is not None and weights.get(str(name), said) != said:
            raise ValueError(
                f"{path} is about other weights of {name} ({said[:12]}…, here {weights[str(name)][:12]}…): take it out "
                "of the folder, and it is measured again"
            )
        answer = list(answer.values())
    for each in answer if isinstance(answer, list) else ():
        check_weights(path, each, weights)


def short_names(given: Sequence[str]) -> dict[str, str]:
    """Paths of this machine, and what a reader elsewhere is told in their place."""
    found: dict[str, str] = {}
    used: dict[str, Path] = {}
    for each in given:
        path = Path(each)
        if path.exists():
            name = path.name or each
            if used.setdefault(name, path.resolve()) != path.resolve():  # two runs' checkpoints may be named alike
                name = "-".join(path.resolve().parts[-3:])
            found |= {each: name, str(path.absolute()): name, str(path.resolve()): name}
    return {path: name for path, name in found.items() if os.sep in path}


def hashes(given: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The sha256 of the files among what was given, by what they are called."""
    from adlm.data.shards import sha256_of

    return {names.get(each, Path(each).name): sha256_of(Path(each)) for each in given if Path(each).is_file()}


def written(made: Mapping[str, Any], out: Path) -> list[Path]:
    """card.json, and what is drawn from it."""
    from adlm.studies.pages import write_pages

    path = save_json(out / "card.json", made)
    return [path, *write_pages(json.loads(path.read_text("utf-8")), out)]
