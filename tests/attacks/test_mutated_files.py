"""Damaged and hostile files end with one line and an exit code: no traceback, no hang, no gigabytes."""

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.attacks.commands import Outcome, attack, count_cases, draw_examples, run_command

STEP = "run/checkpoints/step-00000005"
GENERATE = (
    "sample model --length 8 --steps 2",
    "score text --model model --draws 2",
    "infill a___b --model model",
)
READ_ROWS = (
    "train recipe.yaml data.path=data folder=new",
    "eval ppl model --data data --limit 2 --draws 1",
)
READ_ROWS += ("prepare --check --out data",)
RESUME = ("train recipe.yaml data.path=data folder=run steps=6 checkpoint.every=5",)
PREPARE = "prepare {} --out new --train-tokenizer 300 --length 32 --workers 1"
HALF = (
    "prepare text.txt --out half --train-tokenizer 300 --length 32 --workers 1 --shard-tokens 640",
)
# What is damaged, and the commands that read it.
FILES: dict[str, tuple[str, ...]] = {
    "model/config.json": GENERATE,
    "model/model.safetensors": GENERATE,
    "model/tokenizer.json": GENERATE,
    "model/tokenizer_config.json": GENERATE,
    "model/checksums.json": GENERATE,
    "data/manifest.json": READ_ROWS,
    "data/tokenizer.json": READ_ROWS,
    "data/counts.npy": READ_ROWS,
    "data/train-00000.bin": READ_ROWS,
    "half/progress.json": HALF,
    "half/train-00000.bin": HALF,
    "run/config.yaml": RESUME,
    "run/metrics.jsonl": (*RESUME, "plot run"),
    f"{STEP}/state.json": RESUME,
    f"{STEP}/config.json": (*RESUME, "sample run --length 8 --steps 2"),
    f"{STEP}/model.safetensors": RESUME,
    f"{STEP}/training/shard-00001-model-00001-of-00001.safetensors": RESUME,
    f"{STEP}/checksums.json": RESUME,
    "recipe.yaml": ("train recipe.yaml data.path=data folder=new",),
    "text.txt": (PREPARE.format("text.txt"), "score --file text.txt --model model --draws 2"),
    "text.txt.gz": (PREPARE.format("text.txt.gz"),),
    "lines.jsonl": (PREPARE.format("lines.jsonl"),),
    "table.csv": (PREPARE.format("table.csv"),),
}
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    10**9,
    10**30,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
]
VALUES += [
    "7",
    "../../x",
    "\x1b[31mred",
    "\ud800",
    "é" * 99,
    [],
    {},
    [[]],
    [1, 2, 3],
    {"x": 1},
    [-1, -1],
    ["a"] * 1000,
]


@dataclass(frozen=True)
class Mutation:
    """A file, what is done to it, and the command that reads it afterwards."""

    file: str
    kind: str
    where: float  # in [0, 1): a place in the file
    value: Any
    is_rehashed: bool  # whether the checksums of the file follow
    command: str

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        before = path.read_bytes()
        after = MUTATIONS[self.kind](self, path, before)
        if after is None:  # it is no file any more
            return
        path.write_bytes(after)
        if self.is_rehashed:
            old, new = (hashlib.sha256(content).hexdigest() for content in (before, after))
            for other in path.parent.glob("*.json"):
                other.write_bytes(other.read_bytes().replace(old.encode(), new.encode()))


def flip_bits(mutation: Mutation, path: Path, content: bytes) -> bytes:
    flipped, rng = bytearray(content), random.Random(mutation.where)
    for _ in range(rng.choice((1, 8, 64))):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def truncate(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return content[: int(mutation.where * len(content))]


def insert_noise(mutation: Mutation, path: Path, content: bytes) -> bytes:
    place = int(mutation.where * len(content))
    return content[:place] + random.Random(mutation.where).randbytes(64) + content[place:]


def insert_zeros(mutation: Mutation, path: Path, content: bytes) -> bytes:
    place = int(mutation.where * len(content))
    return content[:place] + bytes(100) + content[place:]


def replace_by_noise(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return random.Random(mutation.where).randbytes(len(content))


def encode_otherwise(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return content.decode("utf-8", "replace").encode(
        "utf-16" if mutation.where < 0.7 else "utf-8-sig"
    )


def delete(mutation: Mutation, path: Path, content: bytes) -> None:
    path.unlink()


def replace_by_folder(mutation: Mutation, path: Path, content: bytes) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(mutation: Mutation, path: Path, content: bytes) -> None:
    path.unlink()
    path.symlink_to(path.name)


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in list(items):
        yield value, key
        yield from list_places(item)


def change_json(mutation: Mutation, content: bytes) -> bytes:
    """Replace or, for the value None, delete one value of a JSON text; in a JSON lines file in one line."""
    lines = content.splitlines() if mutation.file.endswith(".jsonl") else [content]
    number = int(mutation.where * len(lines))
    value = json.loads(lines[number])
    # Values near the top are as likely as those of the vocabulary of a tokenizer.
    places = sorted(list_places(value), key=lambda place: len(place[0]))
    container, key = places[int(mutation.where * 997 % 1 * len(places))]
    if mutation.value is None and isinstance(container, dict):
        del container[key]
    else:
        container[key] = mutation.value
    lines[number] = json.dumps(value).encode()
    return b"\n".join(lines)


def set_json_value(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return change_json(mutation, content)


def replace_json(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return json.dumps(mutation.value).encode()


def nest_brackets(mutation: Mutation, path: Path, content: bytes) -> bytes:
    return b"[" * 200_000 if mutation.where < 0.5 else b'{"a":' * 100_000 + b"1" + b"}" * 100_000


def change_header(mutation: Mutation, path: Path, content: bytes) -> bytes:
    """Change one value of the header of a safetensors file, or its length."""
    (size,) = struct.unpack("<Q", content[:8])
    if mutation.where < 0.2:
        return (
            struct.pack("<Q", (0, 2**63, size + 1, 10**9)[int(mutation.where * 20)]) + content[8:]
        )
    header = change_json(mutation, content[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def set_yaml_value(mutation: Mutation, path: Path, content: bytes) -> bytes:
    lines = content.decode().splitlines()
    number = int(mutation.where * len(lines))
    key, colon, _ = lines[number].partition(":")
    lines[number] = f"{key}{colon} {json.dumps(mutation.value)}" + "," * lines[number].endswith(",")
    return "\n".join(lines).encode()


ANY = (
    flip_bits,
    truncate,
    insert_noise,
    insert_zeros,
    replace_by_noise,
    encode_otherwise,
    delete,
    replace_by_folder,
)
ANY += (replace_by_loop,)
BY_SUFFIX: dict[str, tuple[Callable[..., bytes], ...]] = {
    ".json": (set_json_value,) * 12 + (replace_json, nest_brackets, nest_brackets),
    ".jsonl": (set_json_value,) * 6 + (replace_json, nest_brackets),
    ".safetensors": (change_header,) * 8,
    ".yaml": (set_yaml_value,) * 6 + (nest_brackets,),
}
MUTATIONS: dict[str, Callable[..., bytes | None]] = {
    function.__name__: function
    for functions in (ANY, *BY_SUFFIX.values())
    for function in functions
}


@st.composite
def mutations(draw: Callable[..., Any], file: str) -> Mutation:
    """Some damage of a file, and one of the commands that read it."""
    kinds = [function.__name__ for function in (*ANY, *BY_SUFFIX.get(Path(file).suffix, ()))]
    return Mutation(
        file,
        draw(st.sampled_from(kinds)),
        draw(st.integers(0, 9999)) / 10_000,
        draw(st.sampled_from(VALUES)),
        draw(st.booleans()),
        draw(st.sampled_from(FILES[file])),
    )


def execute(mutation: Mutation, folder: Path) -> Outcome:
    mutation.apply(folder)
    return run_command(mutation.command.split(), folder)


@pytest.mark.slow
def test_mutated_files_are_refused_or_read(tmp_path: Path) -> None:
    cases = draw_examples({file: mutations(file) for file in FILES}, count_cases(6))
    assert (
        attack(cases, tmp_path, lambda each: each.file.removeprefix("run/checkpoints/"), execute)
        == []
    )
