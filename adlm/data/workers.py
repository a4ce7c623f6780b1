"""Divides documents into chunks and tokenizes them in threads: the library releases Python's lock while it encodes."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer

# In a long document: between words in any script, which no pre-tokenizer of `choose_cut` takes together.
PART_CUT = re.compile(r"(?<=\S)(?=\n| \S)|(?<=[\u3041-\u30fa\u4e00-\u9fff])(?=[、。，！？])")
ANYWHERE = re.compile(r"(?<=[\s\S])")
PART_CHARACTERS = 2**20  # a longer document is cut into parts
MAX_UNCUT, MAX_WHOLE = 2**24, 2**26  # characters without a place to cut; of a document that may not be cut
CHUNKS_PER_WORKER = 2  # in flight
PARALLELISM = "TOKENIZERS_PARALLELISM"  # of the library's own threads


class TokenizedChunk(NamedTuple):
    """A chunk of documents: all ids in one array, the number of ids of each and its size in bytes."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


def tokenize_chunks(
    tokenizer: Tokenizer, chunks: Iterable[tuple[Sequence[str], Any]], workers: int
) -> Iterator[tuple[TokenizedChunk, Any]]:
    """Yield each chunk's ids and the object that came with it, in order; only a few chunks are read ahead."""

    def tokenize(texts: Sequence[str]) -> TokenizedChunk:
        # Half of a surrogate pair is no character and has no UTF-8: it becomes a question mark.
        encoded = [text.encode("utf-8", "replace") for text in texts]
        ids, lengths = tokenizer.encode_batch([text.decode("utf-8") for text in encoded])
        return TokenizedChunk(ids, lengths, np.array(list(map(len, encoded)), dtype=np.int64))

    waiting: deque[tuple[Future[TokenizedChunk], Any]] = deque()
    threads, before = ThreadPoolExecutor(workers), os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"  # these threads are the parallel part
    try:
        for texts, tag in chunks:
            waiting.append((threads.submit(tokenize, texts), tag))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                future, first_tag = waiting.popleft()
                yield future.result(), first_tag
        for future, tag in waiting:
            yield future.result(), tag
    finally:
        threads.shutdown(cancel_futures=True)
        del os.environ[PARALLELISM]
        if before is not None:
            os.environ[PARALLELISM] = before


def chunk_documents(
    parts: Iterable[tuple[str, int, bool]], *, skip: int = 0, characters: int = 2**20, max_documents: int = 4096
) -> Iterator[tuple[list[str], tuple[int, bool]]]:
    """Yield lists of documents, without the first `skip`, with the bytes of the source read so far.

    The last of a list may be a part of a document that the next list continues: then the flag is false.
    """
    texts: list[str] = []
    number = size = consumed = 0
    for text, consumed, is_last in parts:
        number += is_last
        if number - is_last < skip:
            continue
        texts.append(text)
        size += len(text)
        if size >= characters or len(texts) >= max_documents or not is_last:
            yield texts, (consumed, is_last)
            texts, size = [], 0
    if texts:
        yield texts, (consumed, True)


def cut_documents(
    parts: Iterable[tuple[str, int, bool]], cut: re.Pattern[str] | None, characters: int = PART_CHARACTERS
) -> Iterator[tuple[str, int, bool]]:
    """Cut documents into parts of so many characters or a little more, at places that `cut` finds; None: nowhere.

    The parts depend on the document alone, not on the parts in which it arrives.
    """
    held, searched = "", 0
    for text, consumed, is_last in parts:
        held, start = held + text if held else text, 0
        while cut is not None and len(held) - start > characters:
            if (place := cut.search(held, max(start + characters, searched))) is None:
                break
            yield held[start : place.start()], consumed, False
            start = place.start()
        held = held[start:] if start else held
        searched = max(0, len(held) - 2)  # a cut looks at two characters behind it
        if len(held) > (MAX_WHOLE if cut is None else MAX_UNCUT):
            problem, remedy = (
                "in which this tokenizer sees no end of a word",
                "leave it out, or use --tokenizer bytes",
            )
            if cut is None:
                problem, remedy = "and this tokenizer reads it as a whole", "divide the text, as with --documents blank"
            raise ValueError(f"a document has {len(held):,} characters, {problem} ({held[:40]!r}…): {remedy}")
        if is_last:
            yield held, consumed, True
            held, searched = "", 0


def choose_cut(description: dict[str, Any]) -> re.Pattern[str] | None:
    """Return where a tokenizer.json allows a text to be cut, so that the parts have the ids of the whole.

    The byte-level pre-tokenizer of GPT-2 and that of BERT split at `PART_CUT`, those of bytes and characters anywhere.
    An added token that is not special is searched for in the text before it is split: with one there is no place.
    """
    splitter, model = description.get("pre_tokenizer") or {}, description["model"]
    kind, normalizer = splitter.get("type"), (description.get("normalizer") or {}).get("type")
    if model.get("dropout") or not all(token["special"] for token in description.get("added_tokens", [])):
        return None
    if kind == "BertPreTokenizer" and normalizer in (None, "BertNormalizer"):
        return PART_CUT
    if normalizer is not None:
        return None
    if kind == "ByteLevel" and not splitter["add_prefix_space"]:
        if model.get("merges") == []:
            return ANYWHERE
        return PART_CUT if splitter.get("use_regex", True) else None
    return ANYWHERE if kind == "Split" and splitter["pattern"] == {"Regex": r"[\s\S]"} else None
