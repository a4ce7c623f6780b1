"""Text to a folder of packed rows: in parallel, the same whatever the number of workers, and over any interruption."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adlm.data import writing
from adlm.data.corpora import ALIASES, CORPORA, Corpus
from adlm.data.packing import Framing, Packer
from adlm.data.shards import (
    COUNTS,
    FORMAT,
    MANIFEST,
    Rows,
    check_size,
    dtype_for,
    open_data,
    read_manifest,
    sha256_of,
    tokenizer_facts,
    tokenizer_of,
    write_safely,
)
from adlm.data.sources import Source, open_source
from adlm.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe
from adlm.data.workers import TokenizerPool, chunked

SAMPLE_BYTES = 100_000_000  # of text, from the beginning of the source, that a tokenizer is learned from
SHARD_TOKENS = 2**25
MANNERS = ("wrapped", "documents")


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    split: str
    consumed: int  # bytes of the source on disk
    total: int | None
    bytes: int  # of text, tokenized by this run
    tokens: int
    rows: int
    documents: int
    seconds: float


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
    train_tokenizer: int | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """The manifest of the folder `out`, made, completed or found there; see docs/prepare.md for every choice.

    A named corpus brings its own tokenizer, length, rows and valid split; otherwise they are gpt2, 1024, wrapped, and
    the last rows of the stream.
    """
    corpus = named_corpus(source)
    asked, tokenizer = tokenizer, tokenizer or (corpus.tokenizer if corpus else "gpt2")
    length = length or (corpus.length if corpus else 1024)
    rows = rows or (corpus.rows if corpus else "wrapped")
    if rows not in MANNERS:
        raise ValueError(f"rows must be one of {', '.join(MANNERS)}, got {rows!r}")
    if not 0 <= valid_share < 1:
        raise ValueError(f"valid_share must be at least 0 and below 1, got {valid_share}")
    if shard_tokens < length:
        raise ValueError(f"shard_tokens must be at least a row's {length}, got {shard_tokens}")
    if train_tokenizer is not None and train_tokenizer < 258:
        raise ValueError(f"a trained tokenizer has at least 258 tokens (bytes, end, mask), got {train_tokenizer}")
    if train_tokenizer is not None and asked is not None:
        raise ValueError(
            f"tokenizer {str(asked)!r:.60} is given, and one of {train_tokenizer} to be learned: leave one"
        )
    how: dict[str, Any] = {"column": column, "documents": documents, "detokenizer": detokenizer}
    opened = {"train": source if isinstance(source, Source) else open_source(source, split=split, **how)}
    if valid is not None:
        opened["valid"] = valid if isinstance(valid, Source) else open_source(valid, split="valid", **how)
    elif corpus is not None and isinstance(source, str) and split == "train":
        opened["valid"] = open_source(source, split="valid", **how)
        if opened["valid"].identity == opened["train"].identity:
            del opened["valid"]  # one file is every split: its end is held out, as of any file
    for each in opened.values():
        if each.folder is not None and Path(out).resolve().is_relative_to(each.folder.resolve()):
            raise ValueError(
                f"{out} lies in {each.folder}, whose files are read as text: choose an --out outside of it"
            )

    given = None
    if train_tokenizer is None:
        given = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
        learned: dict[str, Any] = {key: value for key, value in tokenizer_facts(given).items() if key != "name"}
    else:
        learned = {"trained": train_tokenizer, "on_bytes": SAMPLE_BYTES}
    settings = {
        "source": opened["train"].identity,
        "valid": opened["valid"].identity if "valid" in opened else {"share": valid_share},
        "tokenizer": learned,
        "length": length,
        "rows": rows,
        "shard_tokens": shard_tokens,
    }
    job = Job(Path(out), json.loads(json.dumps(settings)), workers or cores(), on_progress or (lambda _: None))
    if overwrite:
        writing.clear(job.folder)
    found = begin(job)
    if found is not None:
        return found
    return run(job, opened, given)


def named_corpus(source: str | Path | Source) -> Corpus | None:
    """The corpus that a source names, also in the form NAME:PATH."""
    if not isinstance(source, str):
        return None
    name = source.split(":")[0]
    return CORPORA.get(ALIASES.get(name, name))


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def held_out_rows(rows: int, share: float) -> int:
    """How many of the last rows become the valid split: the share, but not fewer than 64 or a tenth, nor than two."""
    return max(int(share * rows), min(64, rows // 10), 2) if share else 0


@dataclass(frozen=True)
class Job:
    """One preparation: where, of what, and the state that it can be taken up from, which is all in progress.json."""

    folder: Path
    settings: dict[str, Any]
    workers: int
    on_progress: Callable[[Progress], None]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    @property
    def is_cut(self) -> bool:
        """Whether the valid split is the end of the train stream."""
        return "share" in self.settings["valid"]

    def save(self) -> None:
        writing.write_progress(self.folder, self.state)


def begin(job: Job) -> dict[str, Any] | None:
    """The manifest if the folder is finished; otherwise the state to go on from, perhaps a fresh one."""
    if job.folder.exists() and not job.folder.is_dir():
        raise ValueError(f"{job.folder} is a file: give --out a folder, which may be new")
    job.folder.mkdir(parents=True, exist_ok=True)
    is_finished = (job.folder / MANIFEST).is_file()
    old = read_manifest(job.folder) if is_finished else writing.read_progress(job.folder)
    if old is None and (found := [path for path in writing.ours(job.folder) if path.suffix != ".part"]):
        raise ValueError(
            f"{job.folder} holds {found[0].name}, which no preparation here wrote and this one would replace: "
            "move it, or choose another --out"
        )
    if old is not None and not is_finished and not any(split["shards"] for split in old["splits"].values()):
        old = None  # nothing is lost by beginning anew
    if old is not None and old["settings_sha256"] != job.sha256:
        listed = "\n".join(writing.differences(old["settings"], job.settings))
        what = "holds data prepared" if is_finished else "holds a preparation begun"
        raise ValueError(
            f"{job.folder} {what} with other settings:\n{listed}\nChoose another --out, or --overwrite it."
        )
    if is_finished:
        writing.tidy(job.folder)
        return open_data(job.folder).manifest
    if old is not None and old["cut"] is None:  # while the valid split is cut off, shards are being shortened
        for split in old["splits"].values():
            for shard in split["shards"]:
                check_size(job.folder / shard["file"], shard["bytes"])
    splits = {"train": {"shards": [], "end": [0, 0, 0], "is_complete": False}}
    if not job.is_cut:
        splits["valid"] = json.loads(json.dumps(splits["train"]))
    fresh = {"settings": job.settings, "settings_sha256": job.sha256, "tokenizer": None, "splits": splits}
    job.state.update(old or {"format": FORMAT, **fresh, "cut": None})
    job.save()
    return None


def run(job: Job, sources: dict[str, Source], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Everything that is still to do."""
    tokenizer = ready_tokenizer(job, sources["train"], tokenizer)
    if tokenizer.bos_id is None or tokenizer.eos_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} does not say which tokens begin and end a text: name them as bos_token "
            "and eos_token in a tokenizer_config.json beside its tokenizer.json"
        )
    pad_id = tokenizer.eos_id if tokenizer.pad_id is None else tokenizer.pad_id
    framing = Framing(job.settings["length"], tokenizer.bos_id, tokenizer.eos_id, pad_id)
    dtype = dtype_for(tokenizer.vocab_size)
    try:
        with TokenizerPool(job.folder / "tokenizer.json", dtype, job.workers) as pool:
            for split, source in sources.items():
                if not job.state["splits"][split]["is_complete"]:
                    write_split(job, split, source, pool, framing, dtype)
        if job.is_cut:
            cut_valid(job, dtype)
        return finish(job, sources["train"], tokenizer, dtype)
    except OSError as error:
        writing.remove_parts(job.folder)  # room for whatever comes next
        if error.errno == errno.ENOSPC:
            raise disk_full(job) from error
        raise


def ready_tokenizer(job: Job, source: Source, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, in the folder: given, learned now, or learned before the interruption."""
    if job.state["tokenizer"] is not None:
        return tokenizer_of(job.folder, job.state["tokenizer"])
    if tokenizer is None:
        size = job.settings["tokenizer"]["trained"]
        tokenizer = train_bpe(sample(source, SAMPLE_BYTES), size, end_token=END_OF_TEXT, name=f"bpe-{size}")
    tokenizer.save(job.folder)
    job.state["tokenizer"] = tokenizer_facts(tokenizer)
    job.save()
    return tokenizer


def write_split(job: Job, split: str, source: Source, pool: TokenizerPool, framing: Framing, dtype: str) -> None:
    """Documents to shards, from where the last complete shard ended."""
    state, began = job.state["splits"][split], time.perf_counter()
    is_wrapped = job.settings["rows"] == "wrapped"

    def on_shard(record: dict[str, Any], end: list[int]) -> None:
        state["shards"].append(record)
        state["end"] = end
        job.save()

    writer = writing.ShardWriter(
        job.folder,
        split,
        dtype=dtype,
        shard_rows=job.settings["shard_tokens"] // framing.length,
        first=len(state["shards"]),
        keep_ends=job.is_cut,
        on_shard=on_shard,
    )
    packer = Packer(framing, is_wrapped=is_wrapped, start=state["end"])
    count, text, tokens = sum(shard["rows"] for shard in state["shards"]), 0, 0
    for found, consumed in pool.tokenize(chunked(source.read(), skip=packer.documents)):
        packed = packer.feed(*found)
        writer.add(packed)
        count, text, tokens = count + len(packed.rows), text + int(found.sizes.sum()), tokens + len(found.ids)
        seconds = time.perf_counter() - began
        job.on_progress(Progress(split, consumed, source.total_bytes, text, tokens, count, packer.documents, seconds))
        state["consumed"], state["of"] = consumed, source.total_bytes
    writer.close()
    if count == 0:
        writing.clear(job.folder)
        raise ValueError(
            f"{source.name} ({split}) fills no row: it has {tokens:,} tokens in {packer.documents:,} documents, and "
            f"one row of length {framing.length} takes {framing.length - 2:,}; choose a smaller --length or more text"
        )
    state["is_complete"] = True
    job.save()


def stored(job: Job, dtype: str) -> Rows:
    shards = tuple((shard["file"], shard["rows"]) for shard in job.state["splits"]["train"]["shards"])
    is_padded = job.settings["rows"] == "documents"
    return Rows(job.folder, job.settings["length"], dtype, is_padded, shards)


def cut_valid(job: Job, dtype: str) -> None:
    """Move the last rows to the valid split: first copy, then shorten, so that a kill in between loses nothing."""
    state = job.state["splits"]["train"]
    if job.state["cut"] is None:
        rows = stored(job, dtype)
        cut = len(rows) - held_out_rows(len(rows), job.settings["valid"]["share"])
        if cut < 1:
            writing.clear(job.folder)
            raise ValueError(
                f"{len(rows)} rows of length {job.settings['length']} are too few: the valid split takes "
                f"{len(rows) - cut} and at least one must be left to train on; choose a smaller --length, more "
                "text, or --valid-share 0"
            )
        ends = writing.ends_of(job.folder, state["shards"], cut)
        moved: list[dict[str, Any]] = []
        writer = writing.ShardWriter(
            job.folder,
            "valid",
            dtype=dtype,
            shard_rows=job.settings["shard_tokens"] // job.settings["length"],
            on_shard=lambda record, _: moved.append(record),
        )
        for packed in writing.copied(rows, cut):
            writer.add(packed)
        writer.close()
        if moved:
            (documents, inside, text), (before, _, text_before) = state["end"], ends
            end = [documents - before, inside, text - text_before]
            job.state["splits"]["valid"] = {"shards": moved, "end": end, "is_complete": True}
        job.state["cut"] = {"rows": cut, "end": ends}
        job.save()
    row_bytes = job.settings["length"] * (2 if dtype == "uint16" else 4)
    state["shards"] = writing.shorten(job.folder, state["shards"], job.state["cut"]["rows"], row_bytes)
    state["end"] = job.state["cut"]["end"]


def finish(job: Job, source: Source, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Count the tokens, write the manifest, tidy up."""
    writing.save_counts(job.folder / COUNTS, stored(job, dtype).count_tokens(tokenizer.vocab_size))
    manifest = {
        "format": FORMAT,
        "settings": job.settings,
        "settings_sha256": job.sha256,
        "tokenizer": tokenizer_facts(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "mask_id": tokenizer.mask_id,
        "length": job.settings["length"],
        "dtype": dtype,
        "rows": job.settings["rows"],
        "splits": {name: summary(job, found) for name, found in job.state["splits"].items()},
        "valid_from": "the end of the stream" if job.is_cut else "a source of its own",
        "source": source.identity,
        "counts_sha256": sha256_of(job.folder / COUNTS),
        "made_with": f"adlm {own_version()}",
    }
    write_safely(job.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode("utf-8"))
    writing.tidy(job.folder)
    return manifest


def summary(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    rows, (documents, inside, text) = sum(shard["rows"] for shard in state["shards"]), state["end"]
    tokens = sum(shard.pop("tokens", shard["rows"] * job.settings["length"]) for shard in state["shards"])
    return {
        "rows": rows,
        "tokens": tokens,
        "documents": documents + (inside > 0),
        "bytes": text,
        "shards": state["shards"],
    }


def sample(source: Source, most: int) -> Iterator[str]:
    """The first documents, until they make up so many bytes; the last one is cut."""
    left = most
    for text, _ in source.read():
        yield text[:left]  # characters: no more than the bytes that are left
        left -= len(text.encode("utf-8", "replace"))
        if left <= 0:
            return


def disk_full(job: Job) -> OSError:
    """The error of a full disk, with what is known of the room that the rest takes."""
    splits = job.state["splits"].values()
    written = sum(shard["bytes"] for split in splits for shard in split["shards"])
    consumed = sum(split.get("consumed") or 0 for split in splits)
    total = sum(split.get("of") or 0 for split in splits)
    about = f"; the rest takes about {written * (total / consumed - 1) / 1e9:.1f} GB more" if consumed and total else ""
    free = shutil.disk_usage(job.folder).free
    return OSError(
        errno.ENOSPC,
        f"the disk of {job.folder} is full: {free / 1e9:.1f} GB free, {written / 1e9:.1f} GB of shards written{about}. "
        "What is there is kept: make room and run the same command again",
    )


def own_version() -> str:
    """Of the package, if it is installed and not just on the path."""
    try:
        return version("adlm")
    except PackageNotFoundError:
        return "not installed"
