"""Sources of documents: local files and folders, named datasets, the Hugging Face Hub."""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

from adlm.data import formats
from adlm.data.corpora import CONVERTED, CORPORA, Corpus, find_corpus
from adlm.data.detokenizers import DETOKENIZERS
from adlm.data.formats import RULES, TABLES, Documents, Parts, get_suffix, join_parts
from adlm.data.hub import check_hub
from adlm.errors import check_known, import_extra, suggest_names
from adlm.files import hash_file

READER = 1  # goes up when the same files would give other documents
MAX_LISTED_FILES = 1000  # in the identity of a source
MIN_KNOWN_BYTES = 1 << 20  # a smaller file is hashed each time
SETTLED_NS = 2 * 10**9  # a file that changed so recently may change again without another time
READABLE = (*formats.TEXT_SUFFIXES, *TABLES)
MARKUP = (".md", ".rst", ".py", ".html")  # read as plain text where a folder holds no other text
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w./-]+))?")
SLICE = re.compile(r"([\w.-]+)(\[(?:-?\d+)?:(?:-?\d+)?\])?")
SPLIT_WORDS = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "heldout": "test",
}
SPLIT_WORDS |= {split: split for split in ("train", "validation", "test")}
KNOWN_HASHES: dict[str, str] = {}  # SHA-256 of files by what `describe_version` returns


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, and their identity."""

    name: str
    identity: dict[str, Any]  # what decides the documents: content, not paths or times
    total_bytes: int | None  # bytes on the disk that will be read; None where unknown
    parts: Callable[
        [], Parts
    ]  # the documents, long ones in parts, with the bytes read so far; 0 where unknown
    folder: Path | None = None  # the folder whose files are read, if it is one
    hashes: dict[str, str] = field(
        default_factory=dict
    )  # to reuse as KNOWN_HASHES when it is opened again

    def read(self) -> Documents:
        """Iterate over whole documents, each with the bytes read so far."""
        return join_parts(self.parts(), self.name)


class Split(NamedTuple):
    """A split's name and a slice of its documents, such as [:-1000]; without one it is whole."""

    base: str
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        if not (match := SLICE.fullmatch(text)):
            raise ValueError(
                f"split {text!r} is invalid: give a name, optionally with a slice (train[:-1000])"
            )
        return cls(match[1], "" if match[2] in (None, "[:]") else match[2])

    def resolve_bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """Return the first document and the one after the last (None: all); `count` is called only if needed."""
        first, _, last = self.part.strip("[]").partition(":")
        start, stop = int(first or 0), int(last) if last else None
        if (least := -min(0, start, stop or 0)) == 0:
            return start, stop
        if (n := count()) < least:
            raise ValueError(
                f"{self} needs at least {least:,} documents, and there are {n:,}: give a smaller slice"
            )
        return start + n * (start < 0), stop if stop is None else stop + n * (stop < 0)

    def __str__(self) -> str:
        return self.base + self.part


def load_excerpt() -> str:
    """Return the opening chapters of a novel in the public domain (see excerpt.md), for demos and tests."""
    return gzip.decompress(
        resources.files("adlm.data").joinpath("excerpt.txt.gz").read_bytes()
    ).decode("utf-8")


def open_source(
    spec: str | Path,
    *,
    split: str = "train",
    column: str | None = None,
    documents: str = "auto",
    detokenizer: str | None = None,
    glob: str | Sequence[str] = (),
) -> Source:
    """Open a file, a folder, a named dataset, `name:PATH` (its local files) or `owner/name:config` (docs/data.md)."""
    corpus, (name, colon, place) = find_corpus(spec), str(spec).partition(":")
    settings = corpus or Corpus()
    if detokenizer is not None:
        settings = replace(settings, detokenizer=None if detokenizer == "none" else detokenizer)
    check_known("documents", documents, RULES)
    check_known("detokenizer", detokenizer or "none", [*DETOKENIZERS, "none"])
    patterns = (glob,) if isinstance(glob, str) else tuple(glob)
    request = SourceRequest(str(spec), split, column, documents, settings, patterns)
    if settings.bundled:
        if colon:
            raise ValueError(f"{spec!r}: {name} comes with the package; give {name} without a path")
        return _open_files(
            Path(str(resources.files("adlm.data"))) / "bundled" / settings.bundled, request
        )
    if corpus is not None and colon:
        if not place:
            raise ValueError(
                f"{spec!r} has no path after the colon: give {name} (from the Hub) or {name}:PATH"
            )
        return _open_files(Path(place), request)
    if corpus is not None:
        return _open_hub(corpus.hub, corpus.config, corpus.revision, request)
    text, path = str(spec), Path(spec).expanduser()
    hub, is_path = HUB_NAME.fullmatch(text), isinstance(spec, Path) or path.exists()
    if not is_path and not (hub and hub[3]):  # a revision may have slashes
        is_path = (
            text.startswith((".", "/", "~"))
            or text.endswith("/")
            or text.count("/") > 1
            or "\\" in text
        )
        is_path = is_path or get_suffix(path) in READABLE
    if is_path:
        return _open_files(path, request)
    if hub:
        return _open_hub(hub[1], hub[2], hub[3], request)
    known = ", ".join([*CORPORA, "owner/name[:config][@revision] of the Hub"])
    problem = f"{spec!r} is no file, no folder and no named dataset{suggest_names(text, CORPORA)}"
    raise FileNotFoundError(f"{problem}: check the name ({known})")


@dataclass(frozen=True)
class SourceRequest:
    """The arguments of `open_source`, with the settings of a named dataset."""

    name: str
    split: str
    column: str | None
    documents: str
    corpus: Corpus
    glob: tuple[str, ...]

    def resolve_split(self) -> Split:
        """Return the split, in the names of the Hub for a named dataset."""
        split = Split.parse(self.split)
        if not self.corpus.splits:
            return split
        name, splits = "valid" if split.base == "validation" else split.base, self.corpus.splits
        if name not in splits:
            raise ValueError(
                f"{self.name} has no split {split.base!r}: choose {' or '.join(splits)} (--split)"
            )
        hub_split = Split.parse(splits[name])
        if split.part and hub_split.part:
            raise ValueError(
                f"{name} of {self.name} is a slice already ({hub_split}): give {name!r} without a slice"
            )
        return Split(hub_split.base, split.part or hub_split.part)

    def clean_documents(self, parts: Parts, split: Split) -> Parts:
        """Apply the detokenizer, to whole documents; no document at all is an error."""
        if self.corpus.detokenizer:
            clean = DETOKENIZERS[self.corpus.detokenizer]
            parts = (
                (clean(text), position, True) for text, position in join_parts(parts, self.name)
            )
        if (first := next(parts, None)) is None:
            raise ValueError(
                f"{self.name} holds no document in {split}: give a source or a split with text in it"
            )
        yield first
        yield from parts


# Local files.


def _open_files(place: Path, request: SourceRequest) -> Source:
    root, corpus = place.expanduser(), request.corpus
    if not root.exists():
        raise FileNotFoundError(
            f"no file or folder {str(root)!r} (given as {request.name!r}): check the path"
        )
    if request.glob and root.is_file():
        raise ValueError(
            f"glob {request.glob[0]!r} selects files of a folder, and {root} is a file: leave it out"
        )
    split = request.resolve_split()
    files = {root.name: root}
    if root.is_dir():
        files = select_split_files(
            select_files(root, corpus.files, request.glob)[0], split.base, root
        )
    kinds = sorted(
        {
            suffix if (suffix := get_suffix(path)) in READABLE else "no suffix"
            for path in files.values()
        }
    )
    if corpus.hub and len(kinds) > 1:
        raise ValueError(
            f"{root} has files of several kinds ({', '.join(kinds)}): give one of {', '.join(files)}"
        )
    if not (total := sum(path.stat().st_size for path in files.values())):
        raise ValueError(f"{request.name} is empty: give a file or a folder with text in it")
    tables = [path for path in files.values() if get_suffix(path) in TABLES]
    if request.column and not tables:
        raise ValueError(
            f"column {request.column!r} is for tables ({', '.join(TABLES)}); {request.name} is plain text"
        )
    if request.documents != "auto" and len(tables) == len(files):
        raise ValueError(
            f"documents={request.documents!r} is for plain text; in {request.name} a row is a document"
        )
    rule = corpus.documents if request.documents == "auto" else request.documents
    columns: tuple[str, ...] = ()
    if tables:  # of the first one that has a row
        path, known = next(
            ((path, found) for path in tables if (found := formats.read_columns(path))), (root, {})
        )
        if not known:
            raise ValueError(f"{request.name} is empty: give a file or a folder with text in it")
        is_numbered = get_suffix(path) in formats.NUMBERED
        columns = choose_columns(
            known, request.column or corpus.column, str(path), is_numbered=is_numbered
        )
    characters = None
    if corpus.characters and not tables and len(files) == 1 and not detect_split(*files):
        characters = corpus.characters["valid" if request.split == "validation" else request.split]

    def read_all() -> Parts:
        before = 0
        for path in files.values():
            parts = formats.read_text(path, RULES[rule])
            if read_rows := TABLES.get(get_suffix(path)):
                rows = read_rows(path, columns)
                parts = (
                    (formats.join_columns(row, columns, place), position, True)
                    for row, position, place in rows
                )
            for text, position, is_last in parts:
                yield text, before + position, is_last
            before += path.stat().st_size
            # Another mode or link changes the device or the change time, not the content.
            if describe_version(path).split()[:3] != versions[path].split()[:3]:
                raise ValueError(
                    f"{path} changed while it was read: run the same command again, with --overwrite"
                )

    def count() -> int:
        if all(get_suffix(path) == ".parquet" for path in files.values()):
            return sum(int(formats.open_parquet(path).metadata.num_rows) for path in files.values())
        return sum(is_last for _, _, is_last in read_all())

    def read_parts() -> Parts:
        parts = slice_documents(read_all(), *split.resolve_bounds(count))
        if characters:
            parts = _cut_characters(join_parts(parts, request.name), *characters, request.name)
        return request.clean_documents(parts, split)

    versions = {path: describe_version(path) for path in files.values()}
    fingerprints: Any = [_fingerprint(name, path, versions[path]) for name, path in files.items()]
    if len(files) > MAX_LISTED_FILES:  # a hash of the list: it is compared, written and read often
        digest = hashlib.sha256(json.dumps(fingerprints).encode("utf-8")).hexdigest()
        fingerprints = {"count": len(files), "bytes": total, "sha256": digest}
    identity = {"kind": "files", "reader": READER, "files": fingerprints}
    identity["column"] = "+".join(columns) if tables else None
    identity["documents"] = rule if len(tables) < len(files) else None
    identity |= {"detokenizer": corpus.detokenizer, "slice": split.part or None}
    identity["characters"] = list(characters) if characters else None
    if label := corpus.stand_ins.get("+".join(columns)):
        identity["stand_in"] = label
    hashes = {
        version: KNOWN_HASHES[version] for version in versions.values() if version in KNOWN_HASHES
    }
    return Source(
        request.name, identity, total, read_parts, root if root.is_dir() else None, hashes
    )


def _sort_naturally(name: str) -> tuple[Any, ...]:
    """Sort key: part-2 before part-10; the name itself breaks ties (2 and 02)."""
    return *(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ), (-1, name)


def select_files(
    root: Path, extra: Sequence[str] = (), glob: Sequence[str] = ()
) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a folder that are read (docs/data.md), in natural order, and the names of the others."""
    every = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    files = {
        name: path for name, path in every.items() if not re.search(r"(^|/)\.", name)
    }  # without hidden ones

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(
            fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)
            for pattern in patterns
        )

    names = {name for name in files if matches(name, glob)}
    if not glob:
        suffixes = {name: get_suffix(path) for name, path in files.items()}
        names = {name for name in files if suffixes[name] in READABLE or matches(name, extra)}
        names = names or {name for name in files if suffixes[name] in MARKUP}
    if not names:
        listed = ", ".join(sorted(files)[:10]) + (", ..." if len(files) > 10 else "") or "nothing"
        expected = (
            f"name of the pattern {', '.join(glob)}"
            if glob
            else f"file to read ({', '.join(READABLE + MARKUP)}"
        )
        hint = "" if glob else ", each also with .gz); others are read with --glob PATTERN"
        raise ValueError(f"{root} holds no {expected}{hint}; found: {listed}")
    if twice := [name for name in sorted(names) if f"{name}.gz" in names]:
        raise ValueError(
            f"{root} holds {twice[0]} and {twice[0]}.gz, which may be the same text: leave one of them"
        )
    return {name: files[name] for name in sorted(names, key=_sort_naturally)}, sorted(
        files.keys() - names
    )


def detect_split(name: str) -> str | None:
    """Return the split that a file's name, or else its nearest folder's, contains."""
    words = [
        word for part in reversed(name.split("/")) for word in re.split(r"[^a-z]+", part.lower())
    ]
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def select_split_files(files: dict[str, Path], split: str, root: Path) -> dict[str, Path]:
    """Select the files named after the split, or all files if none is named after a split."""
    splits = {name: detect_split(name) for name in files}
    if split == "all" or not any(splits.values()):
        return files
    if unnamed := [name for name in splits if splits[name] is None]:
        named = next(name for name in splits if splits[name])
        raise ValueError(
            f"{root}: {named} is named after a split, {unnamed[0]} is not: rename it, or use split='all'"
        )
    if chosen := {
        name: path for name, path in files.items() if splits[name] == SPLIT_WORDS.get(split, split)
    }:
        return chosen
    known = ", ".join(sorted({str(named) for named in splits.values()}))
    raise ValueError(
        f"{root} has no file of the split {split!r}; it has {known}: choose one of these, or give a file"
    )


def describe_version(path: Path) -> str:
    """Return a file's size, modification time, inode, device and change time: a hash is reused if these are equal."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {stat.st_dev} {stat.st_ctime_ns}"


def _fingerprint(name: str, path: Path, version: str) -> dict[str, Any]:
    """Return name, size and hash of a file, which may be known."""
    size, time_ns, *_ = map(int, version.split())
    if (sha256 := KNOWN_HASHES.get(version)) is None:
        sha256 = hash_file(path)
        if size >= MIN_KNOWN_BYTES and time.time_ns() - time_ns > SETTLED_NS:
            KNOWN_HASHES[version] = sha256
    return {"name": name, "bytes": size, "sha256": sha256}


def slice_documents(parts: Parts, start: int, stop: int | None) -> Parts:
    """Yield the documents from number `start` to the one before `stop`, as `islice` does for whole documents."""
    number = 0
    for part in parts if stop is None or stop > start else ():
        if number >= start:
            yield part
        number += part[2]
        if number == stop:
            return


def _cut_characters(documents: Documents, start: int, stop: int, name: str) -> Parts:
    for text, position in documents:
        if len(text) < stop:
            raise ValueError(
                f"{name} has {len(text):,} characters, its splits need {stop:,}: give the whole file"
            )
        yield text[start:stop], position, True


def choose_columns(
    columns: dict[str, bool], spec: str | None, name: str, *, is_numbered: bool = False
) -> tuple[str, ...]:
    """Choose columns: `a`, `a+b` (joined with a space), `a|b` (the first that exists); by default the one with text."""
    if spec in columns:
        return (spec,)
    for names in (tuple(part.split("+")) for part in spec.split("|")) if spec is not None else ():
        if set(names) <= set(columns) or (is_numbered and all(part.isdecimal() for part in names)):
            return names
    texts = [column for column, is_text in columns.items() if is_text]
    if spec is None and ("text" in texts or len(texts) == 1):
        return ("text",) if "text" in texts else (texts[0],)
    numbers = "; where there is no header, give numbers: --column 0" if is_numbered else ""
    known = ", ".join(
        f"{column!r:.40}{'' if is_text else ' (no text)'}" for column, is_text in columns.items()
    )
    raise ValueError(
        f"{name} has no text column {spec or 'text'!r}; choose one with --column: {known}{numbers}"
    )


# The Hub.


def _open_hub(
    repo: str, config: str | None, revision: str | None, request: SourceRequest
) -> Source:
    check_hub()
    datasets = import_extra(
        "datasets", f"{request.name} is on the Hugging Face Hub, which needs datasets", "data"
    )
    if request.documents != "auto":
        raise ValueError(
            f"documents={request.documents!r} is for plain text; in {request.name} a row is a document"
        )
    split = request.resolve_split()
    # The branch of conversions has a folder for each configuration, and no card that names them.
    where = {"data_dir": config} if revision == CONVERTED else {"name": config}
    try:
        builder = datasets.load_dataset_builder(repo, revision=revision, **where)
        splits = builder.as_streaming_dataset()
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        local = f"; to read local files, give {request.name}:PATH" if request.corpus.hub else ""
        problem = f"{request.name} is no file, and loading {repo} from the Hub failed ({error})"
        raise FileNotFoundError(f"{problem}: check the name and the connection{local}") from error
    except RuntimeError as error:  # a repository that is a script
        raise ValueError(
            f"{repo} cannot be read ({error}): try {request.name}@{CONVERTED}"
        ) from error
    if split.base == "valid" and "valid" not in splits:
        split = Split("validation", split.part)
    if split.base not in splits:
        raise ValueError(
            f"{request.name} has no split {split.base!r}: choose one of {', '.join(splits)}"
        )
    rows = splits[split.base]
    features = builder.info.features or rows.features
    columns = {name: isinstance(value, str) for name, value in next(iter(rows), {}).items()}
    if features:
        columns = {
            name: getattr(kind, "dtype", "") in ("string", "large_string")
            for name, kind in features.items()
        }
    names = choose_columns(columns, request.column or request.corpus.column, request.name)

    def count() -> int:
        known = (builder.info.splits or {}).get(split.base)
        if known is None or not known.num_examples:
            raise ValueError(
                f"{split} needs the number of documents, which {repo} does not have: use local files"
            )
        return int(known.num_examples)

    start, stop = split.resolve_bounds(count)

    def read_rows() -> Parts:
        chosen = rows.select_columns(list(names)).skip(start)
        for number, row in enumerate(
            chosen if stop is None else chosen.take(max(0, stop - start)), start
        ):
            yield formats.join_columns(row, names, f"{request.name}, row {number}"), 0, True

    identity = {
        "kind": "hub",
        "reader": READER,
        "repo": repo,
        "config": config,
        "split": split.base,
    }
    identity |= {"slice": [start, stop], "revision": builder.hash, "column": "+".join(names)}
    identity["detokenizer"] = request.corpus.detokenizer
    return Source(request.name, identity, None, lambda: request.clean_documents(read_rows(), split))
