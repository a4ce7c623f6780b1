"""Sudoku: boards from files, the split by hash, whole-word items and the share of right cells."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adlm.apps.reasoning.datasets import find_file
from adlm.apps.reasoning.items import MARKERS, Item
from adlm.data.formats import MAX_WHOLE_BYTES, read_whole

Boards = NDArray[np.uint8]  # (N, 81): row by row, 0 is an empty cell

LEVELS = ("kids", "easy", "medium", "expert", "evil")
WORDS = (".", *"123456789")  # the word of a cell is at its digit; an empty cell is a dot
LENGTH = 192  # tokens of a model that is trained from scratch
TEST_EVERY = 5  # a puzzle is for testing if this divides its hash: one in five


def read_boards(path: Path) -> Boards:
    """Read boards, 81 digits to a line; the last line may lack its end."""
    lines = read_whole(path, MAX_WHOLE_BYTES, "divide it").splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) != 81 or not line.isdigit():
            problem = f"{path}, line {number} is {line.decode('utf-8', 'replace')!r:.90} ({len(line)} bytes)"
            remedy = "correct it or leave it out, with its line in the other file"
            raise ValueError(f"{problem}: expected 81 digits, 0 for an empty cell; {remedy}")
    if not lines:
        raise ValueError(
            f"{path} holds no board: expected 81 digits to a line; make or fetch it again"
        )
    return np.frombuffer(b"".join(lines), dtype=np.uint8).reshape(-1, 81) - ord("0")


def is_for_testing(puzzles: Boards) -> NDArray[np.bool_]:
    """Whether puzzles are for testing: `TEST_EVERY` divides the SHA-256 of the 81 digits, a big-endian integer."""
    digests = (hashlib.sha256(puzzle.tobytes()).digest() for puzzle in puzzles + np.uint8(ord("0")))
    return np.array(
        [int.from_bytes(digest, "big") % TEST_EVERY == 0 for digest in digests], dtype=bool
    )


def load_sudoku(
    folder: Path | str, levels: Iterable[str] = LEVELS, *, split: str | None
) -> tuple[Boards, Boards]:
    """Load puzzles and their solutions from <level>_puzzles.txt and <level>_solutions.txt (.gz): train, test or all."""
    parts = [_load_level(Path(folder).expanduser(), level) for level in levels]
    puzzles, solutions = map(np.concatenate, zip(*parts))
    keep = (
        np.ones(len(puzzles), bool)
        if split is None
        else is_for_testing(puzzles) == (split == "test")
    )
    return puzzles[keep], solutions[keep]


def _load_level(folder: Path, level: str) -> tuple[Boards, Boards]:
    paths = []
    for kind in ("puzzles", "solutions"):
        name = f"{level}_{kind}.txt"
        if (path := find_file([folder], [name])) is None:
            there = [each for each in LEVELS if find_file([folder], [f"{each}_{kind}.txt"])]
            raise ValueError(
                f"no {name} (.gz) in {folder}: levels found: {', '.join(there) or 'none'}; add it"
            )
        paths.append(path)
    puzzles, solutions = map(read_boards, paths)
    if len(puzzles) != len(solutions):
        counts = f"{paths[0]} has {len(puzzles)} boards and {paths[1].name} {len(solutions)}"
        raise ValueError(f"{counts}: expected as many; fetch both again")
    is_bad = ((solutions == 0) | ((puzzles != 0) & (puzzles != solutions))).any(axis=1)
    if is_bad.any():
        place = f"{paths[1]}, line {is_bad.argmax() + 1}"
        raise ValueError(
            f"{place} does not complete its puzzle: correct it or leave it out of both files"
        )
    return puzzles, solutions


def make_items(puzzles: Boards, solutions: Boards) -> list[Item]:
    """Make items without steps: the question is <q> and the puzzle's 81 cells, the answer the solution's."""
    cells = (np.stack([puzzles, solutions]).astype(np.int64) + len(MARKERS)).tolist()
    return [
        Item([MARKERS.index("<q>"), *question], [], [], answer, [])
        for question, answer in zip(*cells)
    ]


def draw_symmetries(
    rng: np.random.Generator, puzzles: Boards, solutions: Boards
) -> tuple[Boards, Boards]:
    """Rename digits, permute bands, stacks and lines within them, and transpose half of the boards, at random."""
    count = len(puzzles)

    def draw_lines() -> NDArray[np.int64]:
        bands, lines = (
            rng.random((count, 3, 1)).argsort(axis=1),
            rng.random((count, 3, 3)).argsort(axis=2),
        )
        return (3 * bands + lines).reshape(count, 9)

    cells = 9 * draw_lines()[:, :, None] + draw_lines()[:, None, :]
    cells = np.where(rng.random((count, 1, 1)) < 0.5, cells, cells.swapaxes(1, 2)).reshape(
        count, 81
    )
    digits = np.concatenate(
        [np.zeros((count, 1), int), rng.random((count, 9)).argsort(axis=1) + 1], axis=1
    )

    def apply(boards: Boards) -> Boards:
        moved = np.take_along_axis(boards, cells, axis=1)
        return np.take_along_axis(digits, moved.astype(np.int64), axis=1).astype(np.uint8)

    return apply(puzzles), apply(solutions)


def score_cells(answers: Sequence[Sequence[int] | None], items: Sequence[Item]) -> float:
    """Return the share of the puzzles' empty cells that answers in token ids fill rightly; missing cells are wrong."""
    boards = np.array([[*(answer or ()), *[0] * 81][:81] for answer in answers])
    is_empty = np.array([item.question[1:] for item in items]) == len(MARKERS)
    return float((boards == np.array([item.answer for item in items]))[is_empty].mean())
