"""Reasoning problems from files: GSM8K (sentences and equations), ProntoQA and ProsQA, as text and as BPE ids."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from adlm.apps.reasoning.items import Item
from adlm.data.formats import MAX_WHOLE_BYTES, TABLES, get_suffix, read_lines, read_whole
from adlm.data.tokenizers import Tokenizer
from adlm.registry import Registry
from adlm.settings import Stored

ANSWER_MARK = "#### "  # GSM8K's and iCoT's
ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotation, iCoT's equation
NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
# A class ("wumpus", "Wumpuses"), or a capital letter and no word of the sentence frame: a name.
NODE = re.compile(r"\b(?:([A-Za-z]*pus)(?:es)?|((?!(?:Every|Each|Is|True|False)\b)[A-Z][a-z]+))\b")
ProblemText = Annotated[str, Field(pattern=r"\S")]  # pydantic refuses half of a surrogate pair
REMEDY = "correct it or leave it out"


class ProblemRow(Stored):
    """A problem in a file; its answer ends a trace."""

    question: ProblemText
    """The question."""
    answer: ProblemText
    """The answer, after its trace if the file has no steps."""
    steps: Any = ()
    """Not read."""


class SteppedRow(ProblemRow):
    """A problem in a file with its steps in a list."""

    steps: list[ProblemText]
    """The steps."""


class Problem(NamedTuple):
    """A problem with its reasoning as text."""

    question: str
    steps: tuple[str, ...]
    answer: str


def find_numbers(text: str) -> list[str]:
    """Return the numbers of a text in order, without thousands separators; .5 is 0.5."""
    numbers = (match.replace(",", "") for match in NUMBER.findall(text))
    return [f"0{number}" if number.startswith(".") else number for number in numbers]


def find_nodes(text: str) -> list[str]:
    """Return the names and classes of a text in order of their first occurrence, classes in the singular."""
    return list(dict.fromkeys(name or kind.lower() for kind, name in NODE.findall(text)))


def find_sentences(trace: str) -> list[str]:
    """Return the lines of a GSM8K trace without their annotations: the steps of the plain form."""
    return [line for each in trace.split("\n") if (line := ANNOTATION.sub("", each).strip())]


class Dataset(NamedTuple):
    """A published set of problems: its files and how they are read."""

    find_steps: (
        Callable[[str], list[str]] | None
    )  # in a trace that ends in `#### answer`; None: they have a field
    find_words: Callable[[str], list[str]]  # the rule of the anchors: words of a text, in order
    folder: str  # where the files of the splits lie, or in the folder above
    files: Mapping[str, tuple[str, ...]]  # by split, without .gz; the first that exists


GSM8K_FILES = {"train": ("train.jsonl",), "test": ("test.jsonl",)}
ICOT_FILES = {
    "train": ("train.txt", "train_eq_noaug_derived.txt"),
    "valid": ("valid.txt",),
    "test": ("test.txt",),
}
DATASETS = {
    "gsm8k": Dataset(find_sentences, find_numbers, "gsm8k", GSM8K_FILES),
    "gsm8k-equations": Dataset(ANNOTATION.findall, find_numbers, "icot_gsm8k", ICOT_FILES),
}
for _name in ("prontoqa", "prosqa"):
    _files = {split: (f"{_name}_{split}.json",) for split in ("train", "valid", "test")}
    DATASETS[_name] = Dataset(None, find_nodes, _name, _files)


def _read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield rows with their places: objects of .jsonl, items of .json, iCoT's lines `question||answer` of .txt."""
    suffix = get_suffix(path)
    if suffix == ".jsonl":
        yield from ((row, place) for row, _, place in TABLES[".jsonl"](path, None))
    elif suffix == ".txt":
        for number, (line, _) in enumerate(read_lines(path), 1):
            if not line.isspace():
                question, _, answer = line.rstrip().partition("||")
                yield {"question": question, "answer": answer}, f"{path}, line {number}"
    elif suffix == ".json":
        try:
            rows = json.loads(read_whole(path, MAX_WHOLE_BYTES, "divide it"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a JSON array ({error}): make or fetch it again"
            ) from error
        for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
            yield row, f"{path}, item {number}"
    else:
        raise ValueError(
            f"{path} ends in {suffix!r}: expected .jsonl, .json or .txt (.gz); convert it"
        )


def _read_problems(path: Path, find_steps: Callable[[str], list[str]] | None) -> Iterator[Problem]:
    """Read the problems of a file; the answer of a trace loses its thousands separators."""
    kind = SteppedRow if find_steps is None else ProblemRow
    for content, place in _read_rows(path):
        row = kind.read(content, place, REMEDY)
        steps = row.steps
        answer = row.answer
        if find_steps is not None:
            trace, mark, answer = answer.rpartition(ANSWER_MARK)
            steps = find_steps(trace)
            answer = answer.replace(",", "").strip()
            if not mark or not answer:
                end = row.answer[-40:]
                raise ValueError(
                    f"{place} ends in {end!r}: expected '{ANSWER_MARK}' and the answer; {REMEDY}"
                )
        yield Problem(row.question, tuple(steps), answer)


def find_file(folders: Iterable[Path], names: Sequence[str]) -> Path | None:
    """Return the first of the names that is a file in one of the folders, as it is or with .gz."""
    paths = (folder / f"{name}{end}" for name in names for folder in folders for end in ("", ".gz"))
    return next(filter(Path.is_file, paths), None)


def find_splits(task: str, path: Path | str) -> dict[str, Path]:
    """Return the files of a task's splits in its folder or in the folder that holds it; a file stands for all."""
    dataset, path = Registry("task", DATASETS).resolve(task), Path(path).expanduser()
    if path.is_file():
        return dict.fromkeys(dataset.files, path)
    if not path.is_dir():
        raise ValueError(
            f"no file or folder {str(path)!r}: give a file of {task}, or a folder with its splits"
        )
    folders = [path, path / dataset.folder]
    return {
        split: file for split, names in dataset.files.items() if (file := find_file(folders, names))
    }


def load_problems(task: str, path: Path | str, split: str = "test") -> list[Problem]:
    """Read the problems of a file, or of a folder's split."""
    files, dataset = find_splits(task, path), DATASETS[task]
    if split not in files:
        there = ", ".join(f"{name} ({file.name})" for name, file in files.items()) or "none"
        expected = ", ".join(each for names in dataset.files.values() for each in names)
        problem = f"{task} has no split {split!r} in {path}, where the splits are: {there}"
        raise ValueError(
            f"{problem}; choose one of these, give a file, or add one of {expected} (.gz)"
        )
    if not (problems := list(_read_problems(files[split], dataset.find_steps))):
        raise ValueError(
            f"{files[split]} holds no problem: expected at least one of {task}; make or fetch it again"
        )
    return problems


def recode_problems(
    task: str,
    path: Path | str,
    recode: Callable[[Problem, np.random.Generator], Item],
    seed: int = 0,
) -> list[Item]:
    """Read published test problems as items of a generated task, with symbols drawn anew for each."""
    items = []
    for index, problem in enumerate(load_problems(task, path)):
        try:
            items.append(recode(problem, np.random.default_rng((seed, index))))
        except ValueError as error:
            raise ValueError(f"{path}, problem {index}: {error}") from None
    return items


def encode_problems(task: str, problems: Sequence[Problem], tokenizer: Tokenizer) -> list[Item]:
    """Encode problems as Coconut does: question and steps end in a newline, the answer has a leading space."""
    find_words = DATASETS[task].find_words

    @cache
    def encode_word(
        word: str,
    ) -> int:  # the first token of a word with a leading space that is not only the space
        return next(
            token for token in tokenizer.encode(f" {word}") if tokenizer.decode([token]).strip()
        )

    texts = [
        [f"{each.question}\n", *(f"{step}\n" for step in each.steps), f" {each.answer}"]
        for each in problems
    ]
    ids, counts = tokenizer.encode_batch([text for parts in texts for text in parts])
    encodings = (part.tolist() for part in np.split(ids, counts.cumsum()[:-1]))
    items = []
    for problem, parts in zip(problems, texts):
        question, *steps, answer = (next(encodings) for _ in parts)
        path_words = find_words("\n".join(problem.steps))
        anchors = [encode_word(word) for word in path_words]
        others = [
            encode_word(word) for word in find_words(problem.question) if word not in path_words
        ]
        off_path = [token for token in dict.fromkeys(others) if token not in anchors]
        items.append(Item(question, steps, anchors, answer, off_path))
    return items


def load_items(
    task: str, path: Path | str, tokenizer: Tokenizer, split: str = "test"
) -> list[Item]:
    """Load the problems of a file, or of a folder's split, in token ids."""
    items = encode_problems(task, load_problems(task, path, split), tokenizer)
    if not any(item.anchors for item in items):
        raise ValueError(
            f"{path}: no trace of {len(items)} problems has a word for a slot; check that it is {task}"
        )
    return items
