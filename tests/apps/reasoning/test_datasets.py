"""Reasoning problems from files: texts, slot labels by the paper's rule, splits, errors."""

import gzip
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from adlm.apps.reasoning.datasets import (
    DATASETS,
    Problem,
    encode_problems,
    find_nodes,
    find_numbers,
    load_items,
    load_problems,
)
from adlm.data.tokenizers import Tokenizer, load_tokenizer

EXCERPTS = Path(__file__).parent / "excerpts"
FILES = {
    "gsm8k": "text_gsm8k.jsonl",
    "gsm8k-equations": "text_icot.txt",
    "prontoqa": "text_prontoqa.json",
    "prosqa": "text_prosqa.json",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("gpt2")


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return "|".join(tokenizer.decode([each]) for each in ids)


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        (
            "gsm8k",
            [
                "Janet sells 16 - 3 - 4 = 9 duck eggs a day.\n",
                "She makes 9 * 2 = $18 every day at the farmer’s",
            ],
        ),
        ("gsm8k-equations", ["<<16-3-4=9>>\n", "<<9*2=18>>\n"]),
    ],
)
def test_the_first_gsm8k_test_problem_is_labelled_16_and_3(
    task: str, steps: list[str], tokenizer: Tokenizer
) -> None:
    item = load_items(task, EXCERPTS / FILES[task], tokenizer)[0]
    assert words(tokenizer, item.anchors) == " 16| 3| 4| 9| 9| 2| 18"
    question = tokenizer.decode(item.question)
    assert question.startswith("Janet’s ducks lay 16 eggs per day.") and question.endswith(
        "farmers' market?\n"
    )
    decoded = [tokenizer.decode(step) for step in item.steps]
    assert [
        text.startswith(step) and text.endswith("\n")
        for text, step in zip(decoded, steps, strict=True)
    ] == [True] * 2
    assert tokenizer.decode(item.answer) == " 18"
    assert item.off_path == []  # every number of the question that is written in digits is used


def test_equations_of_the_annotated_file_are_the_published_ones() -> None:
    annotated = EXCERPTS / FILES["gsm8k"]
    derived = load_problems("gsm8k-equations", annotated)
    assert derived == load_problems("gsm8k-equations", EXCERPTS / FILES["gsm8k-equations"])
    published = (EXCERPTS / FILES["gsm8k-equations"]).read_text("utf-8").splitlines()
    for problem, line in zip(derived, published, strict=True):
        trace, _, answer = line.rpartition(" #### ")
        assert f"{problem.question}||{' '.join(problem.steps)}" == trace
        assert problem.answer == answer.replace(",", "")
    assert [problem.answer for problem in derived] == [
        "18",
        "3",
        "70000",
        "540",
        "114200",
        "5",
        "25",
    ]
    plain = load_problems("gsm8k", annotated)
    assert [each._replace(steps=()) for each in plain] == [
        each._replace(steps=()) for each in derived
    ]
    rows = [json.loads(line) for line in annotated.read_text("utf-8").splitlines()]
    for problem, row in zip(
        plain, rows, strict=True
    ):  # a step is a line; what is in <<…>> is not part of it
        assert len(problem.steps) == sum(map(bool, row["answer"].split("\n"))) - 1
        assert not any("<<" in step for step in problem.steps)
    assert [len(problem.steps) for problem in derived][-2:] == [
        0,
        3,
    ]  # the first without a calculator annotation


def test_prontoqa_is_labelled_with_its_name_and_classes(tokenizer: Tokenizer) -> None:
    path = EXCERPTS / FILES["prontoqa"]
    problem, item = load_problems("prontoqa", path)[0], load_items("prontoqa", path, tokenizer)[0]
    assert find_nodes("\n".join(problem.steps)) == [
        "Stella",
        "zumpus",
        "gorpus",
        "rompus",
        "yumpus",
        "lorpus",
    ]
    assert words(tokenizer, item.anchors) == " Stella| z| g| r| y| l"
    assert words(tokenizer, item.off_path) == " br| sh| gr| dump| le| imp| w| ster| v"
    assert [tokenizer.decode(step) for step in item.steps] == [
        f"{step}\n" for step in problem.steps
    ]
    assert tokenizer.decode(item.answer) == " False"


def test_prosqa_is_labelled_with_the_path_of_its_graph(tokenizer: Tokenizer) -> None:
    path = EXCERPTS / FILES["prosqa"]
    rows, items = json.loads(path.read_text("utf-8")), load_items("prosqa", path, tokenizer)
    for row, item in zip(rows, items, strict=True):
        symbols = row["idx_to_symbol"]
        nodes = find_nodes("\n".join(row["steps"]))
        numbers = [symbols.index(node) for node in nodes]
        assert (numbers[0], numbers[-1]) == (row["root"], row["target"])
        assert all(list(edge) in row["edges"] for edge in pairwise(numbers))
        assert item.anchors == [tokenizer.encode(f" {node}")[0] for node in nodes]
        others = {tokenizer.encode(f" {symbol}")[0] for symbol in symbols if symbol not in nodes}
        assert set(item.off_path) == others - set(item.anchors)
    assert words(tokenizer, items[0].anchors) == " Sally| sc| rem| ster"
    assert tokenizer.decode(items[0].answer) == " Sally is a sterpus."


@pytest.mark.parametrize("task", DATASETS)
def test_off_path_tokens_are_in_the_question_and_are_no_labels(
    task: str, tokenizer: Tokenizer
) -> None:
    for item in load_items(task, EXCERPTS / FILES[task], tokenizer):
        assert len(set(item.off_path)) == len(item.off_path)
        assert not set(item.off_path) & set(item.anchors)
        text = f" {tokenizer.decode(item.question)}".lower()
        assert all(tokenizer.decode([token]).lower().strip() in text for token in item.off_path)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("80,000+50,000=$130,000.", ["80000", "50000", "130000"]),
        ("<<.05*104000=5200>>", ["0.05", "104000", "5200"]),
        ("2/.5=4 and 1.50, 7. x - 3x", ["2", "0.5", "4", "1.50", "7", "3"]),
        ("3,4,5 and 1,2345", ["3", "4", "5", "1", "2345"]),
        ("three", []),
    ],
)
def test_numbers_lose_operators_and_punctuation(text: str, numbers: list[str]) -> None:
    assert find_numbers(text) == numbers


def test_words_of_the_sentence_frame_and_properties_are_no_nodes() -> None:
    text = "Each wumpus is an impus. Wumpuses are not red. Every impus is kind. Is Max red? True or False: Max is kind."
    assert find_nodes(text) == ["wumpus", "impus", "Max"]


def test_a_tokenizer_of_bytes_labels_slots_with_the_character_after_the_space() -> None:
    items = load_items("gsm8k", EXCERPTS / FILES["gsm8k"], load_tokenizer("bytes"))
    assert items[0].anchors[:2] == [ord("1"), ord("3")]


def test_a_batch_is_encoded_as_its_parts(tokenizer: Tokenizer) -> None:
    problems = [Problem("One?", ("1+1=2", "2*2=4"), "4"), Problem("Two?\n", (), "x y")]
    first, second = encode_problems("gsm8k", problems, tokenizer)
    assert [first.question, first.answer] == [tokenizer.encode("One?\n"), tokenizer.encode(" 4")]
    assert first.steps == [tokenizer.encode("1+1=2\n"), tokenizer.encode("2*2=4\n")]
    assert second.question == tokenizer.encode("Two?\n\n")
    assert (second.steps, second.anchors, second.answer) == ([], [], tokenizer.encode(" x y"))


def test_splits_are_found_in_the_folder_and_in_the_folder_above(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "icot_gsm8k"
    folder.mkdir()
    source = EXCERPTS / FILES["gsm8k-equations"]
    shutil.copy(source, folder / "test.txt")
    lines = source.read_bytes().splitlines(keepends=True)
    (folder / "train_eq_noaug_derived.txt.gz").write_bytes(gzip.compress(b"".join(lines[:2])))
    for place in (folder, tmp_path):
        assert [
            len(load_items("gsm8k-equations", place, tokenizer, split))
            for split in ("train", "test")
        ] == [2, 7]
    (folder / "train.txt").write_bytes(lines[0])  # the augmented file comes first
    assert len(load_items("gsm8k-equations", tmp_path, tokenizer, "train")) == 1
    for split in ("valid", "dev"):
        with pytest.raises(
            ValueError, match=r"no split .* the splits are: train \(train.txt\), test \(test.txt\);"
        ):
            load_problems("gsm8k-equations", tmp_path, split)
    with pytest.raises(
        ValueError, match=r"prosqa has no split 'train' .* are: none; .*prosqa_train\.json"
    ):
        load_problems("prosqa", tmp_path, "train")


GOOD_ROW = b'{"question": "1+1?", "answer": "1+1=2\\n#### 2"}\n'
LOGIC = '[{"question": "Is Max a wumpus?", "steps": %s, "answer": "Yes"}]'
BAD_FILES = [
    (
        "gsm8k",
        "a.jsonl",
        GOOD_ROW + b'{"question": "1+1?"}\n',
        r"line 2 has no answer, expected a text",
    ),
    ("gsm8k", "a.jsonl", GOOD_ROW + b'\n{"question": \n', r"line 3 is not JSON"),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": 5, "answer": "#### 2"}',
        r"line 1 has question 5, expected a text",
    ),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": " ", "answer": "#### 2"}',
        r"line 1 has question ' ', expected a text",
    ),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": "\\ud800", "answer": "#### 2"}',
        r"line 1 has question '.ud800'",
    ),
    ("gsm8k", "a.jsonl", b'["question"]', r"line 1 is not JSON of this form \(an array\)"),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": "1?", "answer": "2"}',
        r"line 1 ends in '2': expected '#### ' and",
    ),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": "1?", "answer": "#### "}',
        r"line 1 ends in '#### ': expected",
    ),
    (
        "gsm8k",
        "a.jsonl",
        b'{"question": "\xff", "answer": "#### 2"}',
        r"byte 14 \(0xff\) is not UTF-8: convert",
    ),
    (
        "gsm8k",
        "a.jsonl",
        b"",
        r"holds no problem: expected at least one of gsm8k; make or fetch it again",
    ),
    ("gsm8k", "a.jsonl.gz", GOOD_ROW, r"is not a sound gzip file .*: make or fetch it again"),
    (
        "gsm8k",
        "a.csv",
        GOOD_ROW,
        r"ends in '.csv': expected .jsonl, .json or .txt \(.gz\); convert it",
    ),
    (
        "gsm8k",
        "a.jsonl",
        GOOD_ROW.replace(b"1+1=2", b"x"),
        r"no trace of 1 problems has a word for a slot",
    ),
    (
        "gsm8k-equations",
        "a.txt",
        b"1?||<<1+1=2>> #### 2\n1+1?\n",
        r"line 2 has answer '', expected a text",
    ),
    (
        "gsm8k-equations",
        "a.txt",
        b"1?||<<1+1=2>> 2\n",
        r"line 1 ends in '<<1\+1=2>> 2': expected '#### '",
    ),
    (
        "gsm8k-equations",
        "a.txt",
        b"1?||So 1+1=2. #### 2",
        r"no trace of 1 problems has a word for a slot",
    ),
    (
        "gsm8k-equations",
        "a.txt",
        b"||<<1+1=2>> #### 2",
        r"line 1 has question '', expected a text",
    ),
    ("gsm8k-equations", "a.txt", b"\n\n", r"holds no problem"),
    ("prontoqa", "a.json", b"[]", r"holds no problem: expected at least one of prontoqa"),
    ("prontoqa", "a.json", b"[{]", r"is not a JSON array"),
    (
        "prosqa",
        "a.json",
        (LOGIC % '"a"').encode(),
        r"item 1 has steps 'a', expected a list",
    ),
    (
        "prosqa",
        "a.json",
        (LOGIC % '["a", 1]').encode(),
        r"item 1 has steps 1, expected a list",
    ),
    (
        "prosqa",
        "a.json",
        b'[{"question": "1?", "answer": "2"}]',
        r"item 1 has no steps, expected a list",
    ),
    ("prosqa", "a.json", b'{"question": "1?"}', r"item 1 has no answer, expected a text"),
]


@pytest.mark.parametrize(("task", "name", "content", "message"), BAD_FILES)
def test_bad_files_get_one_line(
    task: str, name: str, content: bytes, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_items(task, tmp_path / name, tokenizer)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_tasks_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown task 'gsm8' \(did you mean gsm8k.*expected one of gsm8k, "
    ):
        load_problems("gsm8", tmp_path)
    with pytest.raises(
        ValueError, match=r"no file or folder '.*a.json': give a file of prosqa, or a folder"
    ):
        load_problems("prosqa", tmp_path / "a.json")
