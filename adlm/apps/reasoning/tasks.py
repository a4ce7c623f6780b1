"""The tasks by name: problems for training and for tests, their vocabulary and their markers."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from torch import Tensor

from adlm.apps.reasoning import arithmetic, chains, datasets, graphs, sudoku
from adlm.apps.reasoning.items import MARKERS, WORD_MARKERS, Item, Markers, index_words, pad_rows
from adlm.apps.reasoning.settings import ReasoningSettings
from adlm.data.batches import Batch
from adlm.data.tokenizers import Tokenizer
from adlm.registry import Registry

TRAIN, TEST, VALID, SYMMETRY = (
    0,
    1,
    2,
    3,
)  # streams of random problems; those for tests do not depend on the run's seed
EXTRA_HOPS = (0, 1, 2)  # test problems have the most hops of training, one more and two more
SAMPLED = 512  # problems whose lengths stand for those of all that are generated
GENERATED = "generated"  # how the hash of generated problems of a text task begins
GENERATORS: dict[str, Any] = {"arithmetic": arithmetic, "graphs": graphs, "chains": chains}
WORD_TASKS = GENERATORS | {"sudoku": sudoku}  # with a vocabulary of their own
RECODED = {
    "graphs": ("prosqa", graphs.recode_prosqa),
    "chains": ("prontoqa", chains.recode_prontoqa),
}


def make_rng(seed: int, stream: int, number: int) -> np.random.Generator:
    """Return the generator of a batch of problems."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, number])))


def hash_items(items: Sequence[Item]) -> str:
    """Identify problems."""
    return hashlib.sha256(repr([tuple(item) for item in items]).encode("utf-8")).hexdigest()


@cache
def _permute(seed: int, epoch: int, count: int) -> list[int]:
    return make_rng(seed, TRAIN, epoch).permutation(count).tolist()


def draw_numbers(total: int, seed: int, step: int, count: int) -> list[int]:
    """Return the numbers of a step's problems when all are taken in epochs, each in an order of its own."""
    numbers = range((step - 1) * count, step * count)
    return [_permute(seed, number // total, total)[number % total] for number in numbers]


class ProblemSet:
    """Problems in a vocabulary of whole words; by default new ones at every step, of 1 to `hops` hops."""

    length: int | None = None  # of a model from scratch; None: the longest problem decides
    can_train: bool = True  # whether there are training problems
    markers: Markers = WORD_MARKERS

    def __init__(self, settings: ReasoningSettings, tokenizer: Tokenizer | None) -> None:
        self.name, self.path, self.folder = (
            str(settings.task),
            settings.path,
            Path(settings.path or ""),
        )
        self.hops = (
            0 if self.name == "sudoku" else settings.hops
        )  # the most of training: the number of stages
        if (generator := GENERATORS.get(self.name)) is not None:
            if not 1 <= self.hops <= (limit := generator.MAX_HOPS - max(EXTRA_HOPS)):
                raise ValueError(
                    f"reasoning.hops={self.hops} is out of range for {self.name}: give 1 to {limit}"
                )
        elif self.path is None:
            raise ValueError(
                f"reasoning.path is required for {self.name}: the folder with its files"
            )
        if (module := WORD_TASKS.get(self.name)) is not None:
            bpe = tokenizers.Tokenizer(
                models.WordLevel(vocab=index_words(module.WORDS), unk_token=module.WORDS[0])
            )
            bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            tokenizer, self.length = (
                Tokenizer(bpe, name=self.name),
                module.LENGTH,
            )  # the mask is the last id
        if tokenizer is None:
            raise ValueError(
                f"{self.name} needs a tokenizer: give init=MODEL, or its name as reasoning.tokenizer"
            )
        self.tokenizer = tokenizer

    def _generate(
        self, seed: int, stream: int, number: int, count: int, min_hops: int, max_hops: int
    ) -> list[Item]:
        return GENERATORS[self.name].draw_items(
            make_rng(seed, stream, number), count, min_hops, max_hops
        )

    def draw(self, seed: int, step: int, count: int) -> list[Item]:
        """Return the problems of an optimizer step."""
        return self._generate(seed, TRAIN, step, count, 1, self.hops)

    def load_tests(self, count: int) -> dict[str, list[Item]]:
        """Return the test sets by name, at most so many problems of each."""
        hops = [self.hops + more for more in EXTRA_HOPS]
        sets = {f"{n} hops": self._generate(0, TEST, n, count, n, n) for n in hops}
        if self.path is not None and self.name in RECODED:
            dataset, recode = RECODED[self.name]
            sets[dataset] = datasets.recode_problems(dataset, self.folder, recode)[:count]
        return sets

    def load_valid(self, count: int) -> list[Item]:
        """Return at most so many validation problems."""
        return self._generate(0, VALID, self.hops, count, self.hops, self.hops)

    def load_sample(self) -> list[Item]:
        """Return problems that are as long as any in training."""
        return self.draw(0, 1, SAMPLED)

    def hash_problems(self) -> str:
        """Identify the training problems."""
        return hash_items(self.draw(0, 0, 64))

    def encode_question(self, text: str) -> list[int]:
        """Return the ids of a question, as they begin an Item."""
        known = self.tokenizer.bpe.get_vocab().keys() - MARKERS
        unknown = [word for word in text.split() if word not in known]
        asked = text.partition("?")[2]
        if self.name in GENERATORS and (unknown or not asked.strip() or "?" in asked):
            example = self.decode(self.draw(0, 1, 1)[0].question)
            problem = f"{unknown[0]!r} is no word" if unknown else f"{text!r} is no question"
            raise ValueError(
                f"{problem} of {self.name}: ask as in {example!r}, with spaces between words"
            )
        assigned = re.findall(r"(\S+)\s+=", text)
        unassigned = [
            word
            for word in [*re.findall(r"\b[a-z]\b", text), *asked.split()]
            if word not in assigned
        ]
        if self.name == "arithmetic" and unassigned:
            remedy = (
                "assign every variable that is used or asked, as in 'b = a - 9 | a = 13 + 4 ? b'"
            )
            raise ValueError(f"{unassigned[0]!r} is not assigned in {text!r}: {remedy}")
        return [MARKERS.index("<q>"), *self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without markers."""
        return self.tokenizer.decode([i for i in ids if i not in self.markers]).strip()


class TextProblemSet(ProblemSet):
    """Problems of files in the vocabulary of a model's tokenizer, which the markers follow."""

    def __init__(self, settings: ReasoningSettings, tokenizer: Tokenizer | None) -> None:
        super().__init__(settings, tokenizer)
        self.tokenizer, self.markers = add_markers(self.tokenizer)

    @cached_property
    def splits(self) -> dict[str, Path]:
        return datasets.find_splits(self.name, self.folder)

    @property
    def is_generated(
        self,
    ) -> bool:  # ProsQA's training problems are not published: without a file, they are graphs
        return self.name == "prosqa" and "train" not in self.splits

    @property
    def can_train(self) -> bool:  # type: ignore[override]
        return self.is_generated or "train" in self.splits

    def _load(self, split: str) -> list[Item]:
        return datasets.load_items(self.name, self.folder, self.tokenizer, split)

    @cached_property
    def _train(self) -> list[Item]:
        return self._load("train")

    def draw(self, seed: int, step: int, count: int) -> list[Item]:
        if not self.is_generated:
            return [
                self._train[number] for number in draw_numbers(len(self._train), seed, step, count)
            ]
        problems = graphs.draw_problems(make_rng(seed, TRAIN, step), count, 1, self.hops)
        return datasets.encode_problems(self.name, problems, self.tokenizer)

    def load_tests(self, count: int) -> dict[str, list[Item]]:
        return {"test": self._load("test")[:count]}

    def load_valid(self, count: int) -> list[Item]:
        return self._load("valid" if "valid" in self.splits else "test")[:count]

    def load_sample(self) -> list[Item]:
        """Return all problems of all splits."""
        train = super().load_sample() if self.is_generated else self._train
        return [
            *train,
            *(item for split in self.splits if split != "train" for item in self._load(split)),
        ]

    def hash_problems(self) -> str:
        return (
            f"{GENERATED} {super().hash_problems()}"
            if self.is_generated
            else hash_items(self._train)
        )

    def encode_question(self, text: str) -> list[int]:
        return self.tokenizer.encode(f"{text}\n")


class SudokuProblemSet(ProblemSet):
    """The puzzle is the question, the board the answer; training draws a symmetry of each puzzle."""

    @cached_property
    def _train(self) -> tuple[sudoku.Boards, sudoku.Boards]:
        return sudoku.load_sudoku(self.folder, split="train")

    def draw(self, seed: int, step: int, count: int) -> list[Item]:
        puzzles, solutions = self._train
        numbers, rng = draw_numbers(len(puzzles), seed, step, count), make_rng(seed, SYMMETRY, step)
        return sudoku.make_items(*sudoku.draw_symmetries(rng, puzzles[numbers], solutions[numbers]))

    def load_tests(self, count: int) -> dict[str, list[Item]]:
        tests = {
            level: sudoku.load_sudoku(self.folder, [level], split="test") for level in sudoku.LEVELS
        }
        return {
            level: sudoku.make_items(*(boards[:count] for boards in test))
            for level, test in tests.items()
        }

    def load_valid(self, count: int) -> list[Item]:
        return [
            item
            for items in self.load_tests(count // len(sudoku.LEVELS)).values()
            for item in items
        ]

    def hash_problems(self) -> str:
        return hash_items(sudoku.make_items(*(boards[:64] for boards in self._train)))

    def encode_question(self, text: str) -> list[int]:
        """Return the ids of a puzzle; spaces between its cells are optional, and 0 is an empty cell too."""
        cells = "".join(text.split()).replace("0", ".")
        if not re.fullmatch("[1-9.]{81}", cells):
            problem = f"{cells!r} ({len(cells)} cells) is no Sudoku"
            raise ValueError(f"{problem}: give 81 digits row by row, a dot for an empty cell")
        return super().encode_question(" ".join(cells))


TASKS = (
    dict.fromkeys(GENERATORS, ProblemSet)
    | dict.fromkeys(datasets.DATASETS, TextProblemSet)
    | {"sudoku": SudokuProblemSet}
)


def open_task(settings: ReasoningSettings, tokenizer: Tokenizer | None = None) -> ProblemSet:
    """Open a task by its settings; text tasks take the tokenizer of the model that is trained."""
    return Registry("task", TASKS).resolve(str(settings.task))(settings, tokenizer)


def add_markers(tokenizer: Tokenizer) -> tuple[Tokenizer, Markers]:
    """Return a copy of a tokenizer with the markers as new special tokens, unless it has them, and their ids."""
    bpe = tokenizers.Tokenizer.from_str(tokenizer.json)
    bpe.add_special_tokens(
        [AddedToken(marker, special=True, normalized=False) for marker in MARKERS[1:]]
    )
    ids = [bpe.token_to_id(marker) or 0 for marker in MARKERS[1:]]
    return replace(tokenizer, bpe=bpe, own_mask_id=None, source=None), Markers(None, *ids)


@dataclass(frozen=True)
class ItemBatch(Batch):
    """The problems of an optimizer step that belong to this process; the tokens are their questions, padded."""

    items: list[Item]
    foreign: list[Item]  # their neighbors in the batch

    @classmethod
    def from_items(
        cls,
        items: list[Item],
        foreign: list[Item],
        number: Tensor,
        place: Tensor,
        total: int,
        state: dict[str, Any],
    ) -> Self:
        """Make the batch of these problems."""
        tokens = torch.from_numpy(pad_rows([item.question for item in items])[0])
        lengths = torch.tensor([len(item.question) for item in items])
        return cls(tokens, lengths, number, place, total, state, items, foreign)


class ItemBatches:
    """An endless iterator over the batches of a task; a batch is a function of seed and step."""

    def __init__(
        self, task: ProblemSet, batch: int, *, seed: int, rank: int = 0, size: int = 1
    ) -> None:
        self.task, self.batch, self.seed, self.rank, self.size, self.step = (
            task,
            batch,
            seed,
            rank,
            size,
            0,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that had this state."""
        self.step = state["step"]

    def __iter__(self) -> Iterator[ItemBatch]:
        while True:
            self.step += 1
            items = self.task.draw(self.seed, self.step, self.batch)
            mine, place = (
                slice(self.rank, None, self.size),
                torch.arange(self.rank, self.batch, self.size),
            )
            foreign = items[1:] + items[:1]
            state = {"epoch": 0, "step": self.step}
            numbers = self.step * self.batch + place
            yield ItemBatch.from_items(
                items[mine], foreign[mine], numbers, place, self.batch, state
            )
