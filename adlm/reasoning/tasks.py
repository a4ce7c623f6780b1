"""The tasks by name: problems for training and for tests, their vocabulary and their markers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from torch import Tensor

from adlm.config import ReasoningSettings
from adlm.data.tokenizers import Tokenizer
from adlm.methods import look_up
from adlm.reasoning import arithmetic, chains, datasets, graphs, sudoku
from adlm.reasoning.items import MARKERS, WORD_MARKERS, Item, Markers

Entry = TypeVar("Entry")
TRAIN, TEST, VALID, SYMMETRY = 0, 1, 2, 3  # streams of random problems; those for tests do not depend on the run's seed
EXTRA_HOPS = (0, 1, 2)  # test problems have the most hops of training, one more and two more
GENERATORS: dict[str, Any] = {"arithmetic": arithmetic, "graphs": graphs, "chains": chains}
LENGTHS = {"arithmetic": 160, "graphs": 288, "chains": 384, "sudoku": 192}  # of a model that is trained from scratch
RECODED: dict[str, tuple[str, Callable[[Path], list[Item]]]] = {
    "graphs": ("prosqa", graphs.recode_prosqa),
    "chains": ("prontoqa", chains.recode_prontoqa),
}


@dataclass(frozen=True)
class Task:
    """Problems for training and tests; `draw(seed, step, count)` gives those of an optimizer step."""

    name: str
    tokenizer: Tokenizer
    markers: Markers
    hops: int  # the most of training: the number of slots, and of stages
    length: int | None  # of a model from scratch; None: the longest problem decides
    draw: Callable[[int, int, int], list[Item]]
    load_tests: Callable[[int], dict[str, list[Item]]]  # at most so many problems of each set
    load_valid: Callable[[int], list[Item]]
    sha256: str  # of its problems

    def encode_question(self, text: str) -> list[int]:
        """Return the ids of a question, as they begin an Item."""
        words = text.split() if self.markers.question is not None else []
        vocabulary = self.tokenizer.bpe.get_vocab() if words else {}
        for word in words:
            if word not in vocabulary or word in MARKERS:
                known = " ".join(word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word not in MARKERS)
                raise ValueError(f"{word!r} is no word of {self.name}: its words are {known}")
        if not text.strip():
            raise ValueError("the question is empty: give its text")
        if self.markers.question is None:
            return self.tokenizer.encode(f"{text}\n")
        return [self.markers.question, *self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without markers."""
        return self.tokenizer.decode([i for i in ids if i not in self.markers]).strip()


def open_task(settings: ReasoningSettings, tokenizer: Tokenizer | None = None) -> Task:
    """Open a task by its settings; text tasks take the tokenizer of the model that is trained."""
    names = [*GENERATORS, *datasets.TEXT_TASKS, "sudoku"]
    kind = look_up(
        dict.fromkeys(names, 0) | dict.fromkeys(datasets.TEXT_TASKS, 1) | {"sudoku": 2}, str(settings.task), "task"
    )
    return (open_generated, open_text, open_sudoku)[kind](settings, tokenizer)


def make_word_tokenizer(words: Sequence[str], name: str) -> Tokenizer:
    """Make the tokenizer of a whole-word vocabulary: the markers, the words, and the mask as the last id."""
    vocabulary = {word: index for index, word in enumerate((*MARKERS, *words))}
    bpe = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=words[0]))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(bpe, name=name)


def make_rng(seed: int, stream: int, number: int) -> np.random.Generator:
    """Return the generator of a batch of problems."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, number])))


def hash_items(items: Sequence[Item]) -> str:
    """Identify problems."""
    return hashlib.sha256(repr([tuple(item) for item in items]).encode("utf-8")).hexdigest()


def open_generated(settings: ReasoningSettings, tokenizer: Tokenizer | None = None) -> Task:
    """Open a generated task: new problems at every step, of 1 to `hops` hops."""
    name, hops = str(settings.task), settings.hops
    module = GENERATORS[name]
    if not 1 <= hops <= module.MAX_HOPS - max(EXTRA_HOPS):
        raise ValueError(
            f"reasoning.hops={hops} is out of range for {name}: give 1 to {module.MAX_HOPS - max(EXTRA_HOPS)}"
        )

    def draw(seed: int, step: int, count: int) -> list[Item]:
        items: list[Item] = module.draw_items(make_rng(seed, TRAIN, step), count, 1, hops)
        return items

    def load_tests(count: int) -> dict[str, list[Item]]:
        sets = {
            f"{n} hops": module.draw_items(make_rng(0, TEST, n), count, n, n)
            for n in (hops + more for more in EXTRA_HOPS)
        }
        if settings.path is not None and name in RECODED:
            dataset, recode = RECODED[name]
            sets[dataset] = recode(datasets.find_split(dataset, Path(settings.path), "test"))[:count]
        return sets

    def load_valid(count: int) -> list[Item]:
        items: list[Item] = module.draw_items(make_rng(0, VALID, hops), count, hops, hops)
        return items

    words = make_word_tokenizer(module.WORDS, name)
    sha256 = hash_items(draw(0, 0, 64))
    return Task(name, words, WORD_MARKERS, hops, LENGTHS[name], draw, load_tests, load_valid, sha256)


def draw_from(items: Sequence[Entry], seed: int, step: int, count: int) -> list[Entry]:
    """Return the problems of a step when all are taken in epochs, each in an order of its own."""
    numbers = range((step - 1) * count, step * count)
    orders = {epoch: _permute(seed, epoch, len(items)) for epoch in {number // len(items) for number in numbers}}
    return [items[orders[number // len(items)][number % len(items)]] for number in numbers]


@cache
def _permute(seed: int, epoch: int, count: int) -> list[int]:
    return make_rng(seed, TRAIN, epoch).permutation(count).tolist()


def open_text(settings: ReasoningSettings, tokenizer: Tokenizer | None = None) -> Task:
    """Open a task of text files; the markers follow the vocabulary of the tokenizer."""
    if settings.path is None:
        raise ValueError(f"reasoning.path is required for {settings.task}: the folder with its files")
    if tokenizer is None:
        raise ValueError(
            f"{settings.task} needs a tokenizer: give init=MODEL, or the name of one as reasoning.tokenizer"
        )
    tokenizer, markers = add_markers(tokenizer)
    name, path = str(settings.task), Path(settings.path)
    load = partial(datasets.load_items, name, path, tokenizer)
    train = load("train")
    return Task(
        name,
        tokenizer,
        markers,
        settings.hops,
        None,
        partial(draw_from, train),
        lambda count: {"test": load("test")[:count]},
        lambda count: load("valid" if "valid" in datasets.TEXT_TASKS[name].files else "test")[:count],
        hash_items(train),
    )


def add_markers(tokenizer: Tokenizer) -> tuple[Tokenizer, Markers]:
    """Return a copy of a tokenizer with the markers as new special tokens, unless it has them, and their ids."""
    bpe = tokenizers.Tokenizer.from_str(tokenizer.json)
    bpe.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS[1:]])
    ids = [bpe.token_to_id(marker) or 0 for marker in MARKERS[1:]]
    return replace(tokenizer, bpe=bpe, own_mask_id=None, source=None), Markers(None, *ids)


def open_sudoku(settings: ReasoningSettings, tokenizer: Tokenizer | None = None) -> Task:
    """Open Sudoku: the puzzle is the question, the board the answer; training draws a symmetry of each puzzle."""
    if settings.path is None:
        raise ValueError("reasoning.path is required for sudoku: the folder with its files")
    load = partial(sudoku.load_sudoku, settings.path)
    puzzles, solutions, _ = load(split="train")

    def draw(seed: int, step: int, count: int) -> list[Item]:
        numbers = draw_from(range(len(puzzles)), seed, step, count)
        rng = make_rng(seed, SYMMETRY, step)
        return sudoku.make_items(*sudoku.draw_symmetries(rng, puzzles[numbers], solutions[numbers]))

    def load_tests(count: int) -> dict[str, list[Item]]:
        tests = {level: load([level], split="test") for level in sudoku.LEVELS}
        return {level: sudoku.make_items(test.puzzles[:count], test.solutions[:count]) for level, test in tests.items()}

    def load_valid(count: int) -> list[Item]:
        return [item for items in load_tests(count // len(sudoku.LEVELS)).values() for item in items]

    words = make_word_tokenizer(sudoku.WORDS, "sudoku")
    sha256 = hash_items(sudoku.make_items(puzzles[:64], solutions[:64]))
    return Task("sudoku", words, WORD_MARKERS, 0, LENGTHS["sudoku"], draw, load_tests, load_valid, sha256)


@dataclass(frozen=True)
class ItemBatch:
    """The problems of an optimizer step that belong to this process; `foreign` are their neighbors in the batch."""

    items: list[Item]
    foreign: list[Item]
    number: Tensor  # (n,): keys the random numbers
    place: Tensor  # (n,): positions in the global batch
    total: int
    state: dict[str, Any]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(item.question) for item in self.items])

    @property
    def tokens(self) -> Tensor:
        """The questions, padded."""
        length = max(len(item.question) for item in self.items)
        return torch.tensor([item.question + [0] * (length - len(item.question)) for item in self.items])

    def split(self, rows: int) -> list[ItemBatch]:
        """Split into batches of at most so many rows."""
        parts = [slice(start, start + rows) for start in range(0, len(self.items), rows)]
        names = ("items", "foreign", "number", "place")
        return [replace(self, **{name: getattr(self, name)[part] for name in names}) for part in parts]


class ItemBatches:
    """An endless iterator over the batches of a task; a batch is a function of seed and step."""

    def __init__(self, task: Task, batch: int, *, seed: int, rank: int = 0, size: int = 1) -> None:
        self.task, self.batch, self.seed, self.rank, self.size, self.step = task, batch, seed, rank, size, 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that had this state."""
        self.step = state["step"]

    def __iter__(self) -> Iterator[ItemBatch]:
        while True:
            self.step += 1
            items = self.task.draw(self.seed, self.step, self.batch)
            mine, place = slice(self.rank, None, self.size), torch.arange(self.rank, self.batch, self.size)
            foreign = items[1:] + items[:1]
            state = {"epoch": 0, "step": self.step}
            yield ItemBatch(items[mine], foreign[mine], self.step * self.batch + place, place, self.batch, state)
