"""Prepares text as a folder of packed rows: in parallel, independent of the number of workers, and resumable."""

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm import files
from adlm.data import shards
from adlm.data.corpora import Corpus, find_corpus
from adlm.data.packing import PackedRows, Packer, iterate_blocks
from adlm.data.shards import (
    COUNTS,
    FORMAT,
    MANIFEST,
    PROGRESS,
    Count,
    Manifest,
    PreparationSettings,
    Sha256,
    ShardedRows,
    ShardRecord,
)
from adlm.data.sources import KNOWN_HASHES, Source, open_source
from adlm.data.tokenizers import END_OF_TEXT, MAX_VOCAB_SIZE, Tokenizer, load_tokenizer, train_bpe
from adlm.data.workers import can_cut_words, chunk_documents, tokenize_chunks
from adlm.files import read_object, read_stored
from adlm.settings import Stored

TOKENIZER_BYTES = (
    100_000_000  # of text, from the beginning of the source, that a tokenizer is trained on
)
SHARD_TOKENS = 2**25
ROW_LAYOUTS = ("wrapped", "documents")
TEMPORARY = (".part", ".ends", PROGRESS)  # what only an unfinished preparation needs
HASHES = "hashes.json"  # of the source's files, by what `describe_version` returns
FILE_NAMES = re.compile(
    r"((train|valid)-\d{5,}\.(bin|len|ends)|counts\.npy|tokenizer(_config)?\.json|(progress|manifest|hashes)\.json)"
    r"(\.part)?"
)


class SplitProgress(Stored):
    """A split of an unfinished preparation."""

    shards: list[ShardRecord]
    """The complete shards."""
    end: list[Count]
    """The place in the source where the next one begins."""


class Progress(Stored):
    """The state of an unfinished preparation, progress.json."""

    settings: PreparationSettings
    """The settings of `adlm prepare`."""
    settings_sha256: Sha256
    """Their hash."""
    splits: dict[str, SplitProgress]
    """The splits by name."""
    tokenizer: dict[str, Any] | None = None
    """The tokenizer, once it is saved."""


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a preparation."""

    split: str
    consumed: int  # bytes of the source on disk
    total: int | None
    bytes: int  # of text, tokenized by this run
    rows: int


def prepare(
    source: str | Path | Source,
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    length: int | None = None,
    rows: str | None = None,
    valid: str | Path | Source | None = None,
    valid_share: float = 0.01,
    split: str = "train",
    column: str | None = None,
    documents: str = "auto",
    detokenizer: str | None = None,
    glob: str | Sequence[str] = (),
    train_tokenizer: int | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> Manifest:
    """Prepare the folder `out`, or resume or reuse it, and return its manifest (docs/prepare.md)."""
    corpus = find_corpus(source)
    defaults = corpus or Corpus()
    length, rows = length or defaults.length, rows or defaults.rows
    if rows not in ROW_LAYOUTS:
        raise ValueError(f"rows is {rows!r}: expected {' or '.join(ROW_LAYOUTS)}")
    if not 0 <= valid_share < 1:
        raise ValueError(f"valid_share is {valid_share}: expected at least 0 and below 1")
    if shard_tokens < length:
        raise ValueError(
            f"length is {length:,}: expected at most shard_tokens, {shard_tokens:,}; choose a shorter one"
        )
    if train_tokenizer is not None and not 258 <= train_tokenizer <= MAX_VOCAB_SIZE:
        expected = f"expected at least 258 tokens (bytes, end, mask) and at most {MAX_VOCAB_SIZE:,}"
        raise ValueError(f"train_tokenizer is {train_tokenizer}: {expected}")
    if train_tokenizer is not None and tokenizer is not None:
        raise ValueError(
            f"tokenizer {str(tokenizer)!r:.60} and train_tokenizer are both given: leave one out"
        )
    hashes = Path(out) / HASHES
    KNOWN_HASHES.update(read_hashes(hashes))
    reading: dict[str, Any] = {
        "column": column,
        "documents": documents,
        "detokenizer": detokenizer,
        "glob": glob,
    }
    sources = {
        "train": source
        if isinstance(source, Source)
        else open_source(source, split=split, **reading)
    }
    if valid is not None:
        sources["valid"] = (
            valid if isinstance(valid, Source) else open_source(valid, split="valid", **reading)
        )
    elif corpus is not None and isinstance(source, str) and split == "train":
        sources["valid"] = open_source(source, split="valid", **reading)
        if sources["valid"].identity == sources["train"].identity:
            del sources["valid"]  # one file is every split: its end is held out, as of any file
    for each in sources.values():
        if each.folder is not None and Path(out).resolve().is_relative_to(each.folder.resolve()):
            raise ValueError(
                f"{out} is inside {each.folder}, whose files are read as text: choose another --out"
            )

    loaded = None
    described: dict[str, Any] = {"trained": train_tokenizer, "on_bytes": TOKENIZER_BYTES}
    if train_tokenizer is None:
        loaded = (
            tokenizer
            if isinstance(tokenizer, Tokenizer)
            else load_tokenizer(tokenizer or defaults.tokenizer)
        )
        described = {
            key: value for key, value in shards.describe_tokenizer(loaded).items() if key != "name"
        }
    settings = {
        "source": sources["train"].identity,
        "valid": sources["valid"].identity if "valid" in sources else {"share": valid_share},
        "tokenizer": described,
        "length": length,
        "rows": rows,
        "shard_tokens": shard_tokens,
    }
    settings = json.loads(json.dumps(settings))
    job = Preparation(
        Path(out), settings, workers or count_cores(), on_progress or (lambda _: None)
    )
    if job.folder.exists() and not job.folder.is_dir():
        raise ValueError(f"{job.folder} is a file: give --out a folder, which may be new")
    job.folder.mkdir(parents=True, exist_ok=True)
    with files.file_lock(
        job.folder / ".lock", f"another process prepares {job.folder}: wait for it, or change --out"
    ):
        if overwrite and any((job.folder / name).is_file() for name in (PROGRESS, MANIFEST)):
            remove_files(job.folder)
        finished = begin_or_resume(job)
        content = {key: value for each in sources.values() for key, value in each.hashes.items()}
        if content and content != read_hashes(hashes):
            files.write_atomically(hashes, json.dumps(content, indent=1).encode("utf-8"))
        return run_preparation(job, sources, loaded) if finished is None else finished


def read_hashes(path: Path) -> dict[str, str]:
    """Return the hashes of an earlier run; a missing or damaged file has none, and the source is hashed again."""
    with suppress(OSError, ValueError):
        return read_object(path, "")
    return {}


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_valid_rows(rows: int, share: float) -> int:
    """Return the size of the valid split: the share, but at least 64 or a tenth, and at least two rows."""
    return max(int(share * rows), min(64, rows // 10), 2)


class Preparation:
    """One preparation: its folder, its settings, and the state in progress.json from which it resumes."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        workers: int,
        on_progress: Callable[[PrepareProgress], None],
    ) -> None:
        self.folder, self.settings, self.workers, self.on_progress = (
            folder,
            settings,
            workers,
            on_progress,
        )
        self.sha256 = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.length, self.shard_rows = (
            int(settings["length"]),
            int(settings["shard_tokens"] // settings["length"]),
        )
        self.is_padded = settings["rows"] == "documents"
        self.is_cut = (
            "share" in settings["valid"]
        )  # whether the valid split is the end of the train stream
        self.state: dict[str, Any] = {}

    @property
    def dtype(self) -> str:
        return shards.choose_dtype(self.state["tokenizer"]["vocab_size"])

    def save_state(self) -> None:
        files.write_atomically(
            self.folder / PROGRESS, json.dumps(self.state, indent=1).encode("utf-8")
        )

    def open_train_rows(self) -> ShardedRows:
        files = tuple(
            (shard["file"], shard["rows"]) for shard in self.state["splits"]["train"]["shards"]
        )
        return ShardedRows(self.folder, self.length, self.dtype, self.is_padded, files)


def begin_or_resume(job: Preparation) -> Manifest | None:
    """Return the manifest if the folder is finished; otherwise load the state to resume from, or a fresh one."""
    old = None
    if is_finished := (job.folder / MANIFEST).is_file():
        old = shards.read_manifest(job.folder).model_dump(exclude_unset=True)
    elif (job.folder / PROGRESS).is_file():
        progress = read_stored(job.folder / PROGRESS, Progress, shards.PREPARE_AGAIN)
        old = progress.model_dump(exclude_unset=True)
    elif foreign := [path.name for path in list_files(job.folder) if path.suffix != ".part"]:
        raise ValueError(
            f"{job.folder} holds {foreign[0]}, which no preparation wrote: move it, or change --out"
        )
    if old is not None and not any(split["shards"] for split in old["splits"].values()):
        old = None  # nothing is lost by starting over
    if old is not None and old["settings_sha256"] != job.sha256:
        changes = [(key, old["settings"].get(key), value) for key, value in job.settings.items()]
        lines = [
            f"  {key}: {then!s:.200} there, {now!s:.200} now"
            for key, then, now in changes
            if then != now
        ]
        content = "prepared data" if is_finished else "an unfinished preparation"
        lines = [f"{job.folder} holds {content} with other settings:", *lines]
        raise ValueError("\n".join([*lines, "(choose another --out, or --overwrite it)"]))
    if is_finished:
        remove_files(job.folder, TEMPORARY)
        return shards.open_data(job.folder).manifest
    if old is not None and not (
        job.is_cut and "valid" in old["splits"]
    ):  # else shards are being shortened
        for split in old["splits"].values():
            for shard in split["shards"]:
                shards.check_file(job.folder / shard["file"], shard["bytes"])
    names = ("train",) if job.is_cut else ("train", "valid")
    splits = {name: {"shards": [], "end": [0, 0, 0], "is_complete": False} for name in names}
    fresh = {
        "settings": job.settings,
        "settings_sha256": job.sha256,
        "tokenizer": None,
        "splits": splits,
    }
    job.state.update(old or fresh)
    job.save_state()
    return None


def run_preparation(
    job: Preparation, sources: dict[str, Source], tokenizer: Tokenizer | None
) -> Manifest:
    """Do everything that is left to do and return the manifest."""
    tokenizer = save_tokenizer(job, sources["train"], tokenizer)
    try:
        for split, source in sources.items():
            if not job.state["splits"][split]["is_complete"]:
                write_split(job, split, source, tokenizer)
        if share := job.settings["valid"].get("share"):
            cut_valid(job, share)
        return write_manifest(job)
    except OSError as error:
        remove_files(job.folder, (".part",))  # frees space
        if error.errno != errno.ENOSPC:
            raise
        free = f"{shutil.disk_usage(job.folder).free / 1e9:.1f} GB free"
        problem = f"the disk of {job.folder} is full ({free}): free some space and run the same command again"
        raise OSError(errno.ENOSPC, problem) from error


def save_tokenizer(job: Preparation, source: Source, tokenizer: Tokenizer | None) -> Tokenizer:
    """Save the tokenizer in the folder; without one given, load the one saved before or train one."""
    if job.state["tokenizer"] is not None:
        return shards.load_checked_tokenizer(job.folder, job.state["tokenizer"])
    if tokenizer is None:
        size = job.settings["tokenizer"]["trained"]
        texts = read_first_documents(source, TOKENIZER_BYTES)
        tokenizer = train_bpe(texts, size, end_token=END_OF_TEXT, name=f"bpe-{size}")
    tokenizer.save(job.folder)
    job.state["tokenizer"] = shards.describe_tokenizer(tokenizer)
    job.save_state()
    return tokenizer


def read_first_documents(source: Source, max_bytes: int) -> Iterator[str]:
    """Yield the first documents up to so many bytes; the last one is cut."""
    for text, _, _ in source.parts():
        content = text.encode("utf-8")
        yield content[:max_bytes].decode("utf-8", "ignore")
        max_bytes -= len(content)
        if max_bytes <= 0:
            return


def write_split(job: Preparation, split: str, source: Source, tokenizer: Tokenizer) -> None:
    """Write documents to shards, from the end of the last complete shard."""
    state = job.state["splits"][split]
    packer = Packer(tokenizer, job.length, is_wrapped=not job.is_padded, start=state["end"])
    parts = source.parts()
    if not can_cut_words(json.loads(tokenizer.json)):
        parts = ((text, position, True) for text, position in source.read())
    rows, text, tokens = sum(shard["rows"] for shard in state["shards"]), 0, 0

    def pack() -> Iterator[PackedRows]:
        nonlocal rows, text, tokens
        chunks = chunk_documents(parts, skip=packer.documents)
        for chunk, (consumed, is_whole) in tokenize_chunks(
            tokenizer.json, job.dtype, chunks, job.workers
        ):
            packed = packer.feed(*chunk, is_whole=is_whole)
            yield packed
            rows, text, tokens = (
                rows + len(packed.rows),
                text + int(chunk.sizes.sum()),
                tokens + len(chunk.ids),
            )
            job.on_progress(PrepareProgress(split, consumed, source.total_bytes, text, rows))

    for packed in iterate_blocks(pack(), job.shard_rows):
        state["shards"].append(
            shards.write_shard(job.folder, split, len(state["shards"]), packed, job.dtype)
        )
        state["end"] = packed.ends[-1].tolist()
        job.save_state()
    if rows == 0:
        remove_files(job.folder)
        counted = f"{tokens:,} tokens in {packer.documents:,} documents"
        problem = f"{source.name} ({split}) fills no row of length {job.length} with {counted}"
        raise ValueError(f"{problem}: choose a smaller --length or more text")
    state["is_complete"] = True
    job.save_state()


def cut_valid(job: Preparation, share: float) -> None:
    """Move the last rows to the valid split: first copy, then truncate, so that a kill in between loses nothing."""
    splits, row_bytes = job.state["splits"], job.length * np.dtype(job.dtype).itemsize
    if "valid" not in splits:
        rows, (documents, inside, text) = job.open_train_rows(), splits["train"]["end"]
        if (kept := len(rows) - count_valid_rows(len(rows), share)) < 1:
            remove_files(job.folder)
            problem = (
                f"{len(rows)} rows of length {job.length} are too few for a train and a valid split"
            )
            raise ValueError(f"{problem}: choose a smaller --length, more text, or --valid-share 0")
        moved: list[dict[str, Any]] = []
        for part in torch.arange(kept, len(rows)).split(job.shard_rows):
            tokens, lengths = rows.fetch(part)
            no_ends = np.zeros((len(part), 3), dtype=np.int64)
            packed = PackedRows(
                tokens.numpy(), None if lengths is None else lengths.numpy(), no_ends
            )
            moved.append(shards.write_shard(job.folder, "valid", len(moved), packed, job.dtype))
        number, row = divmod(
            kept - 1, job.shard_rows
        )  # the shard and its row with which the train split ends
        path = job.folder / splits["train"]["shards"][number]["file"]
        end = np.fromfile(path.with_suffix(".ends"), shards.END_DTYPE).reshape(-1, 3)[row].tolist()
        last = shards.describe_shard(path, row + 1, row_bytes, is_padded=job.is_padded)
        splits["train"] |= {"shards": [*splits["train"]["shards"][:number], last], "end": end}
        splits["valid"] = {
            "shards": moved,
            "end": [documents - end[0], inside, text - end[2]],
            "is_complete": True,
        }
        job.save_state()
    sizes, counts = {".bin": row_bytes, ".len": 4}, dict(job.open_train_rows().shards)
    for path in list_files(job.folder):
        if path.name.startswith("train-") and path.suffix in sizes:
            if not (size := counts.get(path.with_suffix(".bin").name, 0) * sizes[path.suffix]):
                files.remove_file(path)
            elif path.stat().st_size > size:
                files.cut_file(path, size)


def write_manifest(job: Preparation) -> Manifest:
    """Count the tokens, write the manifest and remove temporary files."""
    splits = {}
    for name, state in job.state["splits"].items():
        documents, inside, text = state["end"]
        rows = sum(shard["rows"] for shard in state["shards"])
        totals = {"rows": rows, "tokens": rows * job.length}
        if job.is_padded:
            paths = [(job.folder / shard["file"]).with_suffix(".len") for shard in state["shards"]]
            totals["tokens"] = sum(
                int(np.fromfile(path, shards.LENGTH_DTYPE).sum()) for path in paths
            )
        splits[name] = totals | {
            "documents": documents + (inside > 0),
            "bytes": text,
            "shards": state["shards"],
        }
    made_with = "adlm"
    with suppress(PackageNotFoundError):  # not installed
        made_with = f"adlm {version('adlm')}"
    content, tokenizer = io.BytesIO(), job.state["tokenizer"]
    counts = job.open_train_rows().count_tokens(tokenizer["vocab_size"])
    np.save(content, counts.astype("<i8"), allow_pickle=False)
    files.write_atomically(job.folder / COUNTS, content.getvalue())
    manifest = {
        "format": FORMAT,
        "settings": job.settings,
        "settings_sha256": job.sha256,
        "tokenizer": tokenizer,
        "vocab_size": tokenizer["vocab_size"],
        "mask_id": tokenizer["mask_id"],
        "length": job.length,
        "dtype": job.dtype,
        "rows": job.settings["rows"],
        "splits": splits,
        "valid_from": "the end of the stream" if job.is_cut else "a source of its own",
        "source": job.settings["source"],
        "counts_sha256": files.hash_file(job.folder / COUNTS),
        "made_with": made_with,
    }
    files.write_atomically(
        job.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode("utf-8")
    )
    remove_files(job.folder, TEMPORARY)
    return shards.read_manifest(job.folder)


def list_files(folder: Path) -> list[Path]:
    """List the files of a preparation by name; progress and manifest come last."""
    paths = [
        path for path in folder.glob("*") if path.is_file() and FILE_NAMES.fullmatch(path.name)
    ]
    return sorted(paths, key=lambda path: (path.name.startswith((PROGRESS, MANIFEST)), path.name))


def remove_files(folder: Path, endings: tuple[str, ...] = ("",)) -> None:
    """Remove the files of a preparation, by default all of them."""
    for path in list_files(folder):
        if path.name.endswith(endings):
            files.remove_file(path)
