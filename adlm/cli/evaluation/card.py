"""`adlm eval card`: everything that was measured on one page, and how it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.errors import report_errors
from adlm.cli.evaluation.agenda import Asked, own_words, planned
from adlm.cli.evaluation.lists import check_folder, save_json, values_of
from adlm.cli.output import json_stdout, print_json, status_console

if TYPE_CHECKING:
    from adlm.text.lm import LM

ASKED = "commands.json"  # which command wrote which file of the folder
GIVEN = {"samples": ("samples*.json", "quality*.json")}  # names that other commands give their files
GOING_ON = ("samples", "frontier", "anchors")  # what they have done they keep in a folder, and go on behind it
PARTS = "parts"
MUCH = "How much is measured"
TAGS = ("diffusion", "masked-diffusion", "language-model")


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
        int | None, typer.Option(min=2, help="Rows for likelihood and anchors. (all; 64)", rich_help_panel=MUCH)
    ] = None,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar='"COMMAND OPTIONS"',
            help="Options for one of the commands, and zeroshot, domains or code beside the others; repeatable.",
            rich_help_panel=MUCH,
        ),
    ] = None,
    rows: Annotated[str | None, typer.Option(help="wrapped, documents (one a row, cut). (wrapped)")] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", help="Of the weights, as the Hub names it. (bundled: apache-2.0, else unknown)"),
    ] = None,
    language: Annotated[str, typer.Option(help="Of the text, as the Hub names it.")] = "en",
    seed: options.Seed = 0,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Put everything that is measured of models into card.json, card.html and card.md, ready to publish.

    Every figure comes from a command that the card names; what was not measured is said to be so.
    """
    with report_errors():
        if data is None:
            raise ValueError("what to measure on is not said: give --data FILE, a folder or the name of a corpus")
        check_folder("--out", out)
        several = tuple(values_of("--steps", steps, int)), tuple(values_of("--samplers", samplers, str))
        words = own_words(own or [])
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT, MODELS

            names = list(dict.fromkeys(models or [DEFAULT]))
            what = (names, data, reference, judge, rows, seed, device, is_quick)
            asked = Asked(*what, n, length, *several, limit, words)
            license = license or ("apache-2.0" if set(asked.models) <= set(MODELS) else "unknown")
            made = made_card(asked, train, out, {"license": license, "language": language})
            files = written(made, out)
        if is_json:
            print_json(made | {"files": [str(path) for path in files]})
            return
        for part in made["sections"]:
            said = "measured" if part["is_measured"] else f"not measured: {part['why']}"
            status_console().print(f"{part['title']}: {said}", markup=False)
        for path in files:
            status_console().print(f"→ {path}", style="dim", markup=False)


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
    found = all_gather(asked, facts, out)
    if train is not None and "ppl" in found.answers:
        beside = baselines(loaded[0], train, asked.data, **rows_of(found.answers["ppl"]))
        save_json(out / "baselines.json", beside)
        found.answers["ppl"].append(beside)
    given = [asked.data, asked.reference, asked.judge, train, *asked.models, *files_in(asked.own), str(out)]
    names = short_names([each for each in given if each])
    here = {"written": datetime.now(UTC).date().isoformat(), **provenance(loaded[0].device)}
    command = shlex.join(["adlm", *sys.argv[1:]]) if sys.argv[1:2] == ["eval"] else "adlm eval card"
    made = make_card(
        facts,
        found.answers,
        found.missing,
        found.commands,
        provenance=here,
        data=hashes([each for each in (asked.data, asked.reference, train, *files_in(asked.own)) if each], names),
        command=command,
        tags=[*TAGS, *dict.fromkeys(each["method"] for each in facts)],
        **about,
    )
    kept: dict[str, Any] = scrubbed(made, names)
    return kept


def rows_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the rows were read that the models were measured on."""
    data = answers[0]["settings"]["data"]
    return {"rows": data["rows"], "limit": data["limit"]}


def check_extent(asked: Asked, loaded: Sequence[LM]) -> None:
    """Refuse samplers, steps and lengths that cannot be before the first command runs."""
    from adlm.studies.frontier import grid

    for lm in loaded:
        for setting in grid(lm, asked.length or 1, asked.samplers or ("ancestral",), asked.steps or (1,), [1.0], [1.0]):
            lm.build_request(length=asked.length, n=1, **setting.how())


def all_gather(asked: Asked, facts: Sequence[Mapping[str, Any]], out: Path) -> Gathered:
    """Each section's answers: of files that lie in the folder, or of commands."""
    found = Gathered()
    ledger = out / ASKED
    known: dict[str, Any] = json.loads(ledger.read_text("utf-8")) if ledger.is_file() else {}
    for name, given in given_files(out, known).items():
        found.answers[name] = [read_answer(path, name) for path in given]
        for path, answer in zip(given, found.answers[name], strict=True):
            check_weights(path, answer, {str(each["name"]): str(each["weights_sha256"]) for each in facts})
        found.commands[name] = [f"taken from {path.name}" for path in given]
    read = [each for each in (asked.data, asked.reference, asked.judge) if each]
    # All of them before the first one runs: what is wrong with one is told at once.
    for name, words in list(planned(asked, facts, set(found.answers), found.missing)):
        number = len(found.answers.setdefault(name, [])) + 1
        path = out / f"{name}-{number}.json"
        shown = shlex.join(["adlm", *words])
        # An answer holds as long as its command, the weights and the files that it read are the same.
        weights = {each["name"]: each["weights_sha256"] for each in facts if each["name"] in words}
        same = stamps([*(each for each in read if each in words), *files_in({name: asked.own.get(name, ())})])
        follows = {"words": words, "weights": weights, "files": same}
        if not path.is_file() or known.get(path.name) != follows:
            status_console().print(f"$ {shown}", style="dim", markup=False)
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
    paths = {path: name for path, name in found.items() if os.sep in path}
    return {way: said for each in paths.items() for way, said in zip(*map(spellings, each), strict=True)}


def spellings(path: str) -> list[str]:
    """How a command may write a path: as it is or with backslashes, bare, in quotes, and in quotes in quotes."""
    found = [path, re.sub(r"(?=[^\w@%+=:,./-])", r"\\", path)]
    for _ in range(2):
        found += [each.replace("'", "'\"'\"'") for each in found]
    return found


def hashes(given: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The sha256 of the files among what was given, by what they are called."""
    from adlm.data.shards import hash_file

    return {names.get(each, Path(each).name): hash_file(Path(each)) for each in given if Path(each).is_file()}


def stamps(given: Sequence[str]) -> dict[str, str]:
    """What tells whether data are still the same: a file's sha256; of a folder names, sizes and times of its files."""
    found = hashes(given, short_names(given))
    for each in filter(os.path.isdir, given):
        there = sorted(path for path in Path(each).rglob("*") if path.is_file())
        listed = [[str(path.relative_to(each)), path.stat().st_size, path.stat().st_mtime_ns] for path in there]
        found[each] = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return found


def files_in(own: Mapping[str, Sequence[str]]) -> list[str]:
    """Files and folders that --with names: PATH, --option=PATH, NAME=PATH or --option=NAME=PATH."""
    parts = [word.split("=") for each in own.values() for word in each]
    given = ["=".join(part[start:]) for part in parts for start in range(len(part))]
    # Not `Path.exists`, which stumbles over words, such as prompts, that are too long for a name.
    return [each for each in dict.fromkeys(given) if os.path.exists(each) and not each.startswith("-")]


def written(made: Mapping[str, Any], out: Path) -> list[Path]:
    """card.json, and what is drawn from it."""
    from adlm.studies.pages import write_pages

    path = save_json(out / "card.json", made)
    return [path, *write_pages(json.loads(path.read_text("utf-8")), out)]
