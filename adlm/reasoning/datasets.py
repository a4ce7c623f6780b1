"""Reasoning problems from files: GSM8K (sentences and equations), ProntoQA and ProsQA, as text and as BPE ids."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adlm.data.formats import RULES, SURROGATE, TABLES, get_suffix, join_parts, read_text
from adlm.data.tokenizers import Tokenizer
from adlm.methods import look_up
from adlm.reasoning.items import Item

ANSWER_MARK = "#### "  # GSM8K's and iCoT's
ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotation, iCoT's equation
NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
# A class ("wumpus", "Wumpuses"), or a capital letter and no word of the sentence frame: a name.
NODE = re.compile(r"\b(?:([A-Za-z]*pus)(?:es)?|((?!(?:Every|Each|Is|True|False)\b)[A-Z][a-z]+))\b")
REMEDY = "correct it or leave it out"


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


# Readers: a file to problems.


def _take_field(row: Any, name: str, place: str) -> str:
    """Return a text of a row, which must not be empty."""
    if not isinstance(row, dict):
        raise ValueError(f"{place} is {type(row).__name__}: expected an object with the field {name!r}; {REMEDY}")
    if name not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{place} has the fields {known:.200}: expected {name!r} among them; {REMEDY}")
    return _check_text(row[name], f"{place}, field {name!r}")


def _check_text(value: Any, place: str) -> str:
    """Return a value that must be a text with visible characters."""
    if not isinstance(value, str) or not value.strip() or SURROGATE.search(value):
        raise ValueError(f"{place} holds {value!r:.60}: expected a text that is not empty; {REMEDY}")
    return value


def _split_answer(text: str, place: str) -> tuple[str, str]:
    """Split a trace that ends in `#### answer`; the answer loses its thousands separators."""
    trace, mark, answer = text.rpartition(ANSWER_MARK)
    answer = answer.replace(",", "").strip()
    if not mark or not answer:
        raise ValueError(f"{place} ends in {text[-40:]!r}: expected '{ANSWER_MARK}' and the answer; {REMEDY}")
    return trace, answer


def _find_sentences(trace: str) -> list[str]:
    """Return the lines of a GSM8K trace without their annotations: the steps of the plain form."""
    return [line for each in trace.split("\n") if (line := ANNOTATION.sub("", each).strip())]


def _read_gsm8k(path: Path, find_steps: Callable[[str], list[str]]) -> Iterator[Problem]:
    """Read GSM8K's rows (question, answer)."""
    for row, _, place in TABLES[".jsonl"](path, None):
        question = _take_field(row, "question", place)
        trace, answer = _split_answer(_take_field(row, "answer", place), f"{place}, field 'answer'")
        yield Problem(question, tuple(find_steps(trace)), answer)


def _read_equations(path: Path) -> Iterator[Problem]:
    """Read iCoT's lines `question||<<equation>> <<equation>> #### answer`."""
    for number, (line, _) in enumerate(join_parts(read_text(path, RULES["every-line"]), str(path)), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        question, mark, rest = line.partition("||")
        if not mark:
            raise ValueError(f"{place} is {line!r:.60}: expected question||<<equation>> {ANSWER_MARK}answer; {REMEDY}")
        trace, answer = _split_answer(rest, place)
        if text := ANNOTATION.sub("", trace).strip():
            raise ValueError(f"{place} has {text!r:.60} outside of <<…>>: expected only equations; give that form")
        yield Problem(_check_text(question, f"{place}, question"), tuple(ANNOTATION.findall(trace)), answer)


def _read_logic(path: Path) -> Iterator[Problem]:
    """Read the rows of ProntoQA and ProsQA (question, steps, answer)."""
    for row, _, place in TABLES[".json"](path, None):
        question, answer = _take_field(row, "question", place), _take_field(row, "answer", place)
        steps = row.get("steps")
        if not isinstance(steps, list):
            raise ValueError(f"{place}, field 'steps' holds {steps!r:.60}: expected a list of texts; {REMEDY}")
        places = (f"{place}, field 'steps', step {number}" for number in range(1, len(steps) + 1))
        yield Problem(question, tuple(map(_check_text, steps, places)), answer)


class Dataset(NamedTuple):
    """A published set of problems: its files and how they are read."""

    readers: dict[str, Callable[[Path], Iterator[Problem]]]  # by suffix
    find_words: Callable[[str], list[str]]  # the rule of the anchors: words of a text, in order
    folder: str  # where the files of the splits lie, or in the folder above
    files: Mapping[str, tuple[str, ...]]  # by split, without .gz; the first that exists


def _describe_logic(name: str) -> Dataset:
    files = {split: (f"{name}_{split}.json",) for split in ("train", "valid", "test")}
    return Dataset({".json": _read_logic}, find_nodes, name, files)


DATASETS = {
    "gsm8k": Dataset(
        {".jsonl": partial(_read_gsm8k, find_steps=_find_sentences)},
        find_numbers,
        "gsm8k",
        {"train": ("train.jsonl",), "test": ("test.jsonl",)},
    ),
    "gsm8k-equations": Dataset(
        {".txt": _read_equations, ".jsonl": partial(_read_gsm8k, find_steps=ANNOTATION.findall)},
        find_numbers,
        "icot_gsm8k",
        {"train": ("train.txt", "train_eq_noaug_derived.txt"), "valid": ("valid.txt",), "test": ("test.txt",)},
    ),
    "prontoqa": _describe_logic("prontoqa"),
    "prosqa": _describe_logic("prosqa"),
}


def find_file(folders: Iterable[Path], names: Sequence[str]) -> Path | None:
    """Return the first of the names that is a file in one of the folders, as it is or with .gz."""
    paths = (folder / f"{name}{end}" for name in names for folder in folders for end in ("", ".gz"))
    return next(filter(Path.is_file, paths), None)


def find_splits(task: str, path: Path | str) -> dict[str, Path]:
    """Return the files of a task's splits in its folder or in the folder that holds it; a file stands for all."""
    dataset, path = look_up(DATASETS, task, "task"), Path(path).expanduser()
    if path.is_file():
        return dict.fromkeys(dataset.files, path)
    if not path.is_dir():
        raise ValueError(f"no file or folder {str(path)!r}: give a file of {task}, or a folder with its splits")
    folders = [path, path / dataset.folder]
    return {split: file for split, names in dataset.files.items() if (file := find_file(folders, names))}


def load_problems(task: str, path: Path | str, split: str = "test") -> list[Problem]:
    """Read the problems of a file, or of a folder's split."""
    files, dataset = find_splits(task, path), DATASETS[task]
    if split not in files:
        there = ", ".join(f"{name} ({file.name})" for name, file in files.items()) or "none"
        expected = ", ".join(each for names in dataset.files.values() for each in names)
        raise ValueError(
            f"{task} has no split {split!r} in {path}, where the splits are: {there}; choose one of these, give a "
            f"file, or add one of {expected} (.gz)"
        )
    file = files[split]
    if (suffix := get_suffix(file)) not in dataset.readers:
        known = " or ".join(dataset.readers)
        raise ValueError(f"{file} ends in {suffix!r}: expected {known} (.gz) for {task}; convert it")
    if not (problems := list(dataset.readers[suffix](file))):
        raise ValueError(f"{file} holds no problem: expected at least one of {task}; make or fetch it again")
    return problems


def recode_problems(
    task: str, path: Path | str, recode: Callable[[Problem, np.random.Generator], Item], seed: int
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
    """Encode problems as Coconut lays them out: the question and each step end in a newline.

    The answer has a leading space, as after Coconut's "###". An anchor is the first token of its word with a leading
    space, or the next token where the first is only the space. `off_path` has the question's words of the same kind
    that are not in the trace, each token once, none that is also an anchor.
    """
    find_words = DATASETS[task].find_words

    @cache
    def encode_word(word: str) -> int:
        return next(token for token in tokenizer.encode(f" {word}") if tokenizer.decode([token]).strip())

    texts = [[f"{each.question}\n", *(f"{step}\n" for step in each.steps), f" {each.answer}"] for each in problems]
    ids, counts = tokenizer.encode_batch([text for parts in texts for text in parts])
    encodings = (part.tolist() for part in np.split(ids, counts.cumsum()[:-1]))
    items = []
    for problem, parts in zip(problems, texts):
        question, *steps, answer = (next(encodings) for _ in parts)
        path_words = find_words("\n".join(problem.steps))
        anchors = [encode_word(word) for word in path_words]
        others = [encode_word(word) for word in find_words(problem.question) if word not in path_words]
        off_path = [token for token in dict.fromkeys(others) if token not in anchors]
        items.append(Item(question, steps, anchors, answer, off_path))
    return items


def load_items(task: str, path: Path | str, tokenizer: Tokenizer, split: str = "test") -> list[Item]:
    """Load the problems of a file, or of a folder's split, in token ids."""
    items = encode_problems(task, load_problems(task, path, split), tokenizer)
    if not any(item.anchors for item in items):
        raise ValueError(f"{path}: no trace of {len(items)} problems has a word for a slot; check that it is {task}")
    return items
