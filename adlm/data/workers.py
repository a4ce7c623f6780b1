"""Divides documents into chunks and tokenizes them in threads: the library releases Python's lock while it encodes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adlm.data.tokenizers import Tokenizer

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
        sizes = [len(text.encode("utf-8")) for text in texts]
        return TokenizedChunk(*tokenizer.encode_batch(texts), np.array(sizes, dtype=np.int64))

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


def can_cut_words(description: dict[str, Any]) -> bool:
    """Return whether the words of a text have the ids of the whole, for the tokenizer of a tokenizer.json.

    They have with the pre-tokenizers of GPT-2, of BERT and of single characters. An added token that is not special is
    searched for in the text before it is split, and may have a space in it.
    """
    splitter, normalizer = description.get("pre_tokenizer") or {}, description.get("normalizer") or {}
    if description["model"].get("dropout") or not all(each["special"] for each in description.get("added_tokens", [])):
        return False
    if splitter.get("type") == "BertPreTokenizer":
        return normalizer.get("type", "BertNormalizer") == "BertNormalizer"
    is_bytes = splitter.get("type") == "ByteLevel" and not splitter["add_prefix_space"]
    is_bytes = is_bytes and (splitter.get("use_regex", True) or description["model"].get("merges") == [])
    is_characters = splitter.get("type") == "Split" and splitter["pattern"] == {"Regex": r"[\s\S]"}
    return not normalizer and (is_bytes or is_characters)
