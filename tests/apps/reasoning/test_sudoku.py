"""Sudoku: laws of the boards, the split, the items and the score, on boards made from a canonical one."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from adlm.apps.reasoning import sudoku
from adlm.apps.reasoning.items import MARKERS
from adlm.apps.reasoning.sudoku import is_for_testing, load_sudoku, make_items, score_cells

VOCABULARY = MARKERS + sudoku.WORDS
CELLS = np.arange(81).reshape(9, 9)
UNITS = np.concatenate(
    [CELLS, CELLS.T, CELLS.reshape(3, 3, 3, 3).swapaxes(1, 2).reshape(9, 9)]
)  # rows, columns, boxes


def make_boards(count: int, seed: int = 0) -> tuple[sudoku.Boards, sudoku.Boards]:
    """Permute digits, and the rows and columns in their bands, of the canonical board; empty half of the cells."""
    rng = np.random.default_rng(seed)
    rows, columns = np.arange(9)[:, None], np.arange(9)
    canonical = (rows * 3 + rows // 3 + columns) % 9 + 1

    def draw_order() -> np.ndarray:
        return np.concatenate([3 * band + rng.permutation(3) for band in rng.permutation(3)])

    boards = [
        (rng.permutation(9) + 1)[canonical[draw_order()][:, draw_order()] - 1] for _ in range(count)
    ]
    solutions = np.array(boards, dtype=np.uint8).reshape(count, 81)
    return np.where(rng.random(solutions.shape) < 0.5, solutions, 0).astype(np.uint8), solutions


def is_complete(boards: sudoku.Boards) -> np.ndarray:
    """Whether each row, column and box of a board has the digits 1 to 9."""
    return (np.sort(boards[:, UNITS], axis=-1) == np.arange(1, 10)).all(axis=(1, 2))


def write(folder: Path, level: str, puzzles: sudoku.Boards, solutions: sudoku.Boards) -> None:
    for kind, boards in (("puzzles", puzzles), ("solutions", solutions)):
        text = "\n".join(
            "".join(map(str, board)) for board in boards
        )  # the last line without its end
        (folder / f"{level}_{kind}.txt.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, level in enumerate(("easy", "evil")):
        write(tmp_path, level, *make_boards(20, seed))
    return tmp_path


def test_files_are_read_as_they_were_written(folder: Path) -> None:
    boards = load_sudoku(folder, ["evil", "easy"], split=None)
    assert {each.dtype for each in boards} == {np.dtype(np.uint8)}
    for part, seed in ((slice(20), 1), (slice(20, 40), 0)):
        for read, written in zip(boards, make_boards(20, seed), strict=True):
            assert (read[part] == written).all()
    (folder / "easy_puzzles.txt").write_bytes(
        gzip.decompress((folder / "easy_puzzles.txt.gz").read_bytes()) + b"\r\n"
    )
    (folder / "easy_puzzles.txt.gz").unlink()
    assert (load_sudoku(folder, ["easy"], split=None)[0] == make_boards(20, 0)[0]).all()


def test_the_split_depends_on_the_puzzle_alone(folder: Path) -> None:
    puzzles, _ = make_boards(4000)
    in_test = is_for_testing(puzzles)
    assert abs(in_test.mean() - 0.2) < 3 * (0.2 * 0.8 / 4000) ** 0.5
    order = np.random.default_rng(1).permutation(4000)
    assert (is_for_testing(puzzles[order]) == in_test[order]).all()
    assert is_for_testing(puzzles[7:8])[0] == in_test[7]
    # By sha256sum: the hashes of "5" * 81 and "9" * 81 are 0 and 2 modulo 5.
    assert is_for_testing(np.array([[5] * 81, [9] * 81], dtype=np.uint8)).tolist() == [True, False]
    whole, *parts = (
        load_sudoku(folder, ["easy", "evil"], split=split)[0] for split in (None, "train", "test")
    )
    rows = [{puzzle.tobytes() for puzzle in each} for each in (whole, *parts)]
    assert rows[1] | rows[2] == rows[0] and not rows[1] & rows[2]
    assert len(parts[0]) + len(parts[1]) == len(whole) == 40


def test_items_spell_the_boards() -> None:
    puzzles, solutions = make_boards(2)
    for item, puzzle, solution in zip(
        make_items(puzzles, solutions), puzzles, solutions, strict=True
    ):
        marker, *cells = (VOCABULARY[token] for token in item.question)
        assert marker == "<q>" and "".join(cells) == "".join(map(str, puzzle)).replace("0", ".")
        assert "".join(VOCABULARY[token] for token in item.answer) == "".join(map(str, solution))
        assert (item.steps, item.anchors, item.off_path) == ([], [], [])


def test_only_empty_cells_are_scored_and_missing_ones_are_wrong() -> None:
    puzzles, solutions = make_boards(3)
    items, n_empty = make_items(puzzles, solutions), (puzzles == 0).sum(axis=1)
    answers = [item.answer for item in items]
    assert score_cells(answers, items) == 1.0
    assert (
        score_cells([item.question[1:] for item in items], items) == 0.0
    )  # the givens do not count
    left = int((puzzles[2, :40] == 0).sum())
    assert score_cells([answers[0], None, answers[2][:40]], items) == pytest.approx(
        (n_empty[0] + left) / n_empty.sum()
    )


ZEROS = b"0" * 81
SOLUTION = "".join(map(str, make_boards(1)[1][0])).encode()


@pytest.mark.parametrize(
    ("puzzles", "solutions", "message"),
    [
        (
            ZEROS[1:],
            SOLUTION,
            r"easy_puzzles.txt, line 1 is '0+' \(80 bytes\): expected 81 digits, 0 for an empty",
        ),
        (
            ZEROS + b"\n" + b"." * 81,
            SOLUTION,
            r"easy_puzzles.txt, line 2 is '\.+' \(81 bytes\): expected 81 digits",
        ),
        (b"\xff" * 81, SOLUTION, r"easy_puzzles.txt, line 1 .*expected 81 digits"),
        (b"", SOLUTION, r"easy_puzzles.txt holds no board"),
        (
            ZEROS + b"\n" + ZEROS,
            SOLUTION,
            r"easy_puzzles.txt has 2 boards and easy_solutions.txt 1: expected as many",
        ),
        (ZEROS, ZEROS, r"easy_solutions.txt, line 1 does not complete its puzzle"),
        (SOLUTION[::-1], SOLUTION, r"easy_solutions.txt, line 1 does not complete its puzzle"),
    ],
)
def test_bad_boards_get_one_line(
    puzzles: bytes, solutions: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "easy_puzzles.txt").write_bytes(puzzles)
    (tmp_path / "easy_solutions.txt").write_bytes(solutions)
    with pytest.raises(ValueError, match=message) as caught:
        load_sudoku(tmp_path, ["easy"], split=None)
    assert "\n" not in str(caught.value)


def test_missing_files_are_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no kids_puzzles.txt \(.gz\) in .*: levels found: easy, evil; add it"
    ):
        load_sudoku(folder, split="train")


def test_symmetries_keep_puzzles_proper() -> None:
    puzzles, solutions = make_boards(200)
    rng = np.random.default_rng(5)
    new_puzzles, new_solutions = sudoku.draw_symmetries(rng, puzzles, solutions)
    assert is_complete(new_solutions).all() and new_puzzles.dtype == new_solutions.dtype == np.uint8
    is_given = new_puzzles != 0
    assert (new_puzzles[is_given] == new_solutions[is_given]).all()
    assert (is_given.sum(1) == (puzzles != 0).sum(1)).all()  # cells move together with their givens
    assert (new_solutions != solutions).any(1).all() and len(
        np.unique(new_solutions, axis=0)
    ) == 200
    same = np.repeat(puzzles[:1], 4000, axis=0), np.repeat(solutions[:1], 4000, axis=0)
    moved = sudoku.draw_symmetries(rng, *same)[1]
    shares = np.stack([(moved == digit).mean(0) for digit in range(1, 10)])
    assert (abs(shares - 1 / 9) < 5 * (8 / 81 / 4000) ** 0.5).all()  # each cell may hold each digit
