"""Where documents come from: local files and folders, named data sets, the Hugging Face Hub.

A source has a name, an identity and a reader. The identity is made of what decides the documents (content, not places
or times), so that what was prepared from one source is found again, and never taken for another.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from adlm.data.corpora import ALIASES, CONVERTED, CORPORA, Corpus, find_corpus
from adlm.data.detokenizers import Detokenizer, find_detokenizer
from adlm.data.formats import EXTRA, RULES, TABLES, TEXT_SUFFIXES, Documents, Table, parquet_rows, read_text, suffix_of
from adlm.data.splits import Split, of_split, split_in

READER = 1  # goes up when the same files would give other documents
WHOLE_HASH, END_HASH = 256 << 20, 64 << 20
READABLE = (*TEXT_SUFFIXES, *TABLES)
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """Documents, always in the same order, and what they are."""

    name: str
    identity: dict[str, Any]
    total_bytes: int | None  # on the disk, of what will be read; None where unknown
    read: Callable[[], Documents]  # each document with the bytes read so far; 0 where unknown
    folder: Path | None = None  # whose files are read, if it is one


def excerpt() -> str:
    """The opening chapters of one novel in the public domain (see excerpt.md): enough to try things on."""
    return gzip.decompress(resources.files("adlm.data").joinpath("excerpt.txt.gz").read_bytes()).decode("utf-8")


def open_source(
    spec: str | Path,
    *,
    split: str = "train",
    column: str | None = None,
    documents: str = "auto",
    detokenizer: str | None = None,
) -> Source:
    """A file, a folder, a named data set, `name:PATH` (its content in local files) or the Hub's `owner/name:config`.

    What is given here goes before what a named data set says of itself; `detokenizer="none"` switches its own off.
    """
    if documents not in RULES:
        raise ValueError(f"no rule for documents is called {documents!r}; there are {', '.join(RULES)}")
    name, colon, place = str(spec).partition(":")
    is_named = isinstance(spec, str) and (name in CORPORA or name in ALIASES)
    corpus = find_corpus(name) if is_named else None
    if corpus is not None:
        detokenizer = detokenizer or corpus.detokenizer
    clean = find_detokenizer(detokenizer) if detokenizer not in (None, "none") else None
    wanted = Wanted(str(spec), split, column, documents, detokenizer if clean else None, clean)
    if corpus is not None:
        if colon and not place:
            raise ValueError(f"{spec!r} has no path after the colon: {name} is the Hub's, {name}:PATH local files")
        if colon:
            return _local(Path(place), wanted, corpus)
        return _hub(corpus.hub, corpus.config, corpus.revision, wanted, corpus)
    if Path(spec).expanduser().exists() or isinstance(spec, Path) or _looks_like_a_path(spec):
        return _local(Path(spec), wanted, None)
    if hub := HUB_NAME.fullmatch(spec):
        return _hub(hub[1], hub[2], hub[3], wanted, None)
    raise FileNotFoundError(
        f"{spec!r} is no file or folder here, and no named data set ({', '.join([*CORPORA, *ALIASES])}); "
        "a data set of the Hub is written owner/name or owner/name:config@revision"
    )


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, with names looked up."""

    name: str
    split: str
    column: str | None
    documents: str
    detokenizer: str | None
    clean: Detokenizer | None


def _looks_like_a_path(spec: str) -> bool:
    if HUB_NAME.fullmatch(spec) and "@" in spec:
        return False  # a revision may have slashes
    is_file_name = suffix_of(Path(spec)) in READABLE
    return spec.startswith((".", "/", "~")) or spec.endswith("/") or spec.count("/") > 1 or "\\" in spec or is_file_name


def _split(wanted: Wanted, corpus: Corpus | None) -> Split:
    """What is asked for, in the names of the Hub if this is a named data set."""
    asked = Split.parse(wanted.split)
    if corpus is None:
        return asked
    ours = "valid" if asked.base == "validation" else asked.base
    if ours not in corpus.splits:
        raise ValueError(f"{wanted.name} has no split {asked.base!r}: choose {' or '.join(corpus.splits)} (--split)")
    theirs = Split.parse(corpus.splits[ours])
    if asked.is_whole:
        return theirs
    if not theirs.is_whole:
        raise ValueError(f"{ours} of {wanted.name} is a slice already ({theirs}): ask for {ours!r} whole")
    return Split(theirs.base, asked.start, asked.stop)


def _checked(documents: Documents, clean: Detokenizer | None, name: str, split: Split) -> Documents:
    """The documents, cleaned up; none at all is an error."""
    is_empty = True
    for text, position in documents:
        is_empty = False
        yield (clean(text) if clean else text), position
    if is_empty:
        raise ValueError(f"{name} holds no document in {split}: give a file, a folder or a split with text in it")


# Local files.


def _local(place: Path, wanted: Wanted, corpus: Corpus | None) -> Source:
    root = place.expanduser()
    if not root.exists():
        raise FileNotFoundError(f"no file or folder {str(root)!r} (asked for as {wanted.name!r}): check the path")
    split = _split(wanted, corpus)
    files = [(root.name, root)] if root.is_file() else of_split(_files(root, corpus), split.base, root)
    kinds = sorted({suffix if (suffix := suffix_of(path)) in READABLE else "no suffix" for _, path in files})
    if corpus and len(kinds) > 1:
        raise ValueError(
            f"{wanted.name}: {split.base} lies in files of several kinds ({', '.join(kinds)}), which may hold the same "
            f"text: give one file of {', '.join(name for name, _ in files)}"
        )
    total = sum(path.stat().st_size for _, path in files)
    if not total:
        raise ValueError(f"{wanted.name} is empty: give a file or a folder with text in it")
    tables = [path for _, path in files if suffix_of(path) in TABLES]
    if wanted.column and not tables:
        raise ValueError(f"column {wanted.column!r} is for tables ({', '.join(TABLES)}); {wanted.name} is plain text")
    if wanted.documents != "auto" and len(tables) == len(files):
        raise ValueError(f"documents={wanted.documents!r} is for plain text; in {wanted.name} a row is a document")
    rule = corpus.documents if corpus and wanted.documents == "auto" else wanted.documents
    names = _columns(tables, wanted.column or (corpus.column if corpus else None), wanted.name) if tables else ()
    characters = _characters(corpus, wanted, files)

    def read_all() -> Documents:
        before = 0
        for _, path in files:
            table = TABLES.get(suffix_of(path))
            documents = table.read(path, names) if table else read_text(path, RULES[rule])
            for text, position in documents:
                yield text, before + position
            before += path.stat().st_size

    def count() -> int:
        if all(suffix_of(path) == ".parquet" for _, path in files):
            return sum(parquet_rows(path) for _, path in files)
        return sum(1 for _ in read_all())

    def read() -> Documents:
        start, stop = split.bounds(count)
        documents: Documents = islice(read_all(), start, stop) if start or stop is not None else read_all()
        return _checked(_cut(documents, characters, wanted.name), wanted.clean, wanted.name, split)

    identity = {
        "kind": "files",
        "reader": READER,
        "files": [_fingerprint(name, path) for name, path in files],
        "column": "+".join(names) if tables else None,
        "documents": rule if len(tables) < len(files) else None,
        "detokenizer": wanted.detokenizer,
        "slice": None if split.is_whole else str(split).removeprefix(split.base),
        "characters": list(characters) if characters else None,
    }
    if corpus and (label := corpus.stand_ins.get("+".join(names))):
        identity["stand_in"] = label
    return Source(wanted.name, identity, total, read, root if root.is_dir() else None)


def _natural(name: str) -> tuple[Any, ...]:
    """part-2 before part-10; the name itself where that leaves two alike (2 and 02)."""
    return *((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)), (-1, name)


def _seen(root: Path) -> dict[str, Path]:
    """The files of a folder and below, by name; hidden ones are not seen."""
    every = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path for name, path in every.items() if not any(part.startswith(".") for part in name.split("/"))}


def unread_files(root: Path) -> list[str]:
    """The files of a folder that are left out because their names do not say that they hold text."""
    return sorted(name for name, path in _seen(root).items() if suffix_of(path) not in READABLE)


def _files(root: Path, corpus: Corpus | None) -> list[tuple[str, Path]]:
    """The readable files of a folder and below, by name."""
    seen, patterns = _seen(root), corpus.files if corpus else ()
    names = [
        name
        for name, path in seen.items()
        if suffix_of(path) in READABLE or any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    if not names:
        found = ", ".join(sorted(seen)[:10]) + (", ..." if len(seen) > 10 else "") or "nothing"
        readable = ", ".join(READABLE)
        raise ValueError(f"{root} holds no file that can be read ({readable}, each also with .gz); found: {found}")
    if twice := [name for name in names if f"{name}.gz" in seen]:
        raise ValueError(f"{root} holds {twice[0]} and {twice[0]}.gz, which may be the same text: leave one of them")
    return [(name, seen[name]) for name in sorted(names, key=_natural)]


def _fingerprint(name: str, path: Path) -> dict[str, Any]:
    """Name, size and hash of a file; of a very big one, of its two ends."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_HASH:
            while data := file.read(1 << 20):
                digest.update(data)
        else:
            digest.update(file.read(END_HASH))
            file.seek(-END_HASH, 2)
            digest.update(file.read(END_HASH))
    return {"name": name, "bytes": size, "sha256" if size <= WHOLE_HASH else "sha256_of_ends": digest.hexdigest()}


def _characters(corpus: Corpus | None, wanted: Wanted, files: list[tuple[str, Path]]) -> tuple[int, int] | None:
    """The part of the one file that holds every split; a file that is named after a split is that split."""
    if not corpus or not corpus.characters or len(files) > 1 or split_in(files[0][0]):
        return None
    if suffix_of(files[0][1]) in TABLES:
        return None
    return corpus.characters["valid" if wanted.split == "validation" else wanted.split]


def _cut(documents: Documents, characters: tuple[int, int] | None, name: str) -> Documents:
    if characters is None:
        yield from documents
        return
    start, stop = characters
    for text, position in documents:
        if len(text) < stop:
            raise ValueError(f"{name}: this split ends at character {stop:,}, and the file has {len(text):,}")
        yield text[start:stop], position


# Columns.


def _columns(tables: list[Path], spec: str | None, name: str) -> tuple[str, ...]:
    """The columns to read, from the first table that has a row."""
    for path in tables:
        table: Table = TABLES[suffix_of(path)]
        if columns := table.columns(path):
            return choose_columns(columns, spec, str(path), is_numbered=table.is_numbered)
    raise ValueError(f"{name} is empty: give a file or a folder with text in it")


def choose_columns(
    columns: dict[str, bool], spec: str | None, name: str, *, is_numbered: bool = False
) -> tuple[str, ...]:
    """Columns of a table: `a`, `a+b` (joined by a blank), `a|b` (the first there is); with no spec, the one of text."""
    if spec in columns:
        return (spec,)
    for names in (tuple(part.split("+")) for part in spec.split("|")) if spec is not None else ():
        if set(names) <= set(columns) or (is_numbered and all(part.isdecimal() for part in names)):
            return names
    texts = [column for column, is_text in columns.items() if is_text]
    if spec is None and "text" in texts:
        return ("text",)
    if spec is None and len(texts) == 1:
        return (texts[0],)
    numbers = "; where there is no header, give numbers: --column 0" if is_numbered else ""
    there = ", ".join(f"{column!r:.40}" for column in columns)
    asked = "text" if spec is None else spec
    what = f"holds no text in column {asked!r}" if asked in columns else f"has no column {asked!r}"
    raise ValueError(f"{name} {what}; choose one of these with --column: {there}{numbers}")


# The Hub.


def _hub(repo: str, config: str | None, revision: str | None, wanted: Wanted, corpus: Corpus | None) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{wanted.name} is read from the Hugging Face Hub, which takes datasets: {EXTRA}") from error
    if wanted.documents != "auto":
        raise ValueError(f"documents={wanted.documents!r} is for plain text; in {wanted.name} a row is a document")
    split = _split(wanted, corpus)
    # The branch of conversions has a folder for each configuration, and no card that names them.
    where = {"data_dir": config} if revision == CONVERTED else {"name": config}
    try:
        builder = datasets.load_dataset_builder(repo, revision=revision, **where)
        splits = builder.as_streaming_dataset()
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        local = f"; the same content in local files is {wanted.name}:PATH" if corpus else ""
        raise FileNotFoundError(
            f"{wanted.name} is no file or folder here, and {repo} could not be had from the Hub: {error}{local}"
        ) from error
    except RuntimeError as error:  # a repository that is a script
        raise ValueError(f"{repo} cannot be read ({error}); try {wanted.name}@{CONVERTED}") from error
    if split.base == "valid" and "valid" not in splits:
        split = Split("validation", split.start, split.stop)
    if split.base not in splits:
        raise ValueError(f"{wanted.name} has no split {split.base!r}; there are {', '.join(splits)}")
    rows = splits[split.base]
    features = builder.info.features or rows.features
    columns = (
        {name: getattr(kind, "dtype", "") in ("string", "large_string") for name, kind in features.items()}
        if features
        else {name: isinstance(value, str) for name, value in next(iter(rows), {}).items()}
    )
    names = choose_columns(columns, wanted.column or (corpus.column if corpus else None), wanted.name)

    def count() -> int:
        known = (builder.info.splits or {}).get(split.base)
        if known is None or not known.num_examples:
            raise ValueError(f"{split} takes the number of documents, which {repo} does not tell: use local files")
        return int(known.num_examples)

    start, stop = split.bounds(count)

    def documents() -> Documents:
        chosen = rows.select_columns(list(names)).skip(start)
        for number, row in enumerate(chosen if stop is None else chosen.take(max(0, stop - start)), start):
            parts = [row[name] for name in names]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f"{wanted.name}, row {number} holds {parts!r:.60}, where a text was expected")
            yield " ".join(parts), 0

    identity = {
        "kind": "hub",
        "reader": READER,
        "repo": repo,
        "config": config,
        "split": split.base,
        "slice": [start, stop],
        "revision": builder.hash,
        "column": "+".join(names),
        "detokenizer": wanted.detokenizer,
    }
    return Source(wanted.name, identity, None, lambda: _checked(documents(), wanted.clean, wanted.name, split))
