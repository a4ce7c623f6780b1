"""Tokenizing processes. Run as a script, this file is one of them.

It imports nothing from adlm, so that a process starts in a tenth of a second and holds no torch. It inherits no threads
and ends when its connection does, so a parent that is killed leaves no process behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

# Between a visible ASCII character and a space before a letter, or a line end; between a letter and a punctuation mark.
WORD_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z]|\n)|(?<=[A-Za-z])(?=[,.;:!?\"])")
MAX_CACHED_WORDS = 2**18  # about 50 MB
MAX_CACHED_LENGTH = (
    40  # characters: text without Latin letters is hardly cut, and paragraphs do not repeat
)
CHUNKS_PER_PROCESS = 3  # in flight: one in work, one waiting, one on its way back


class TokenizedChunk(NamedTuple):
    """A chunk of documents: all ids in one array, the number of ids of each and its size in bytes."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


class WorkerProcess:
    """A tokenizing process, for a tokenizer by the content of its tokenizer.json, and the connection to it."""

    def __init__(self, description: str, dtype: str) -> None:
        self.connection, theirs = Pipe()
        # One thread each: the processes are the parallel part.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, dtype], stdin=theirs.fileno(), env=environment
        )
        theirs.close()
        self.connection.send(description)

    def tokenize(self, texts: Sequence[str]) -> TokenizedChunk:
        """Wait for the ids of a chunk of documents."""
        try:
            self.connection.send(texts)
            return TokenizedChunk(*self.connection.recv())
        except (OSError, EOFError) as error:
            problem = f"a tokenizing process ended with code {self.process.wait()}; its messages are above"
            raise ChildProcessError(
                f"{problem}. If memory was short, try fewer --workers"
            ) from error


def tokenize_chunks(
    description: str, dtype: str, chunks: Iterable[tuple[Sequence[str], Any]], workers: int
) -> Iterator[tuple[TokenizedChunk, Any]]:
    """Yield each chunk's ids and the object that came with it, in order; only a few chunks are read ahead."""
    processes = [WorkerProcess(description, dtype) for _ in range(workers)]
    free: SimpleQueue[WorkerProcess] = SimpleQueue()
    for process in processes:
        free.put(process)

    def tokenize(texts: Sequence[str]) -> TokenizedChunk:
        process = free.get()
        try:
            return process.tokenize(texts)
        finally:
            free.put(process)  # a dead one, too: otherwise a waiting thread would block

    threads = ThreadPoolExecutor(workers)  # they wait for the processes
    waiting: deque[tuple[Future[TokenizedChunk], Any]] = deque()
    try:
        for texts, tag in chunks:
            waiting.append((threads.submit(tokenize, texts), tag))
            if len(waiting) >= CHUNKS_PER_PROCESS * workers:
                future, first_tag = waiting.popleft()
                yield future.result(), first_tag
        for future, tag in waiting:
            yield future.result(), tag
    finally:
        for process in processes:
            process.process.kill()  # it waits for the next chunk, or its result is not needed
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.connection.close()
            process.process.wait()


def chunk_documents(
    parts: Iterable[tuple[str, int, bool]],
    *,
    skip: int = 0,
    characters: int = 2**20,
    max_documents: int = 4096,
) -> Iterator[tuple[list[str], tuple[int, bool]]]:
    """Yield lists of documents after the first `skip`, the bytes read so far, and whether the last one is whole."""
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
    splitter, normalizer = (
        description.get("pre_tokenizer") or {},
        description.get("normalizer") or {},
    )
    if description["model"].get("dropout") or not all(
        each["special"] for each in description.get("added_tokens", [])
    ):
        return False
    if splitter.get("type") == "BertPreTokenizer":
        return normalizer.get("type", "BertNormalizer") == "BertNormalizer"
    is_bytes = splitter.get("type") == "ByteLevel" and not splitter["add_prefix_space"]
    is_bytes = is_bytes and (
        splitter.get("use_regex", True) or description["model"].get("merges") == []
    )
    is_characters = splitter.get("type") == "Split" and splitter["pattern"] == {"Regex": r"[\s\S]"}
    return not normalizer and (is_bytes or is_characters)


class CachedEncoder:
    """Encodes text to the bytes of its ids, with a cache of words."""

    def __init__(self, description: str, dtype: str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_str(description)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # as in Tokenizer: no text is a special token
        self.dtype = np.dtype(dtype)
        self.can_cut = can_cut_words(json.loads(description))
        self.cache: dict[str, bytes] = {}

    def encode(self, text: str) -> bytes:
        if not self.can_cut:
            return self._encode_pieces([text])[0]
        pieces = WORD_CUT.split(text)
        # Word by word: a difference of sets would walk through the whole cache for every document.
        if fresh := [piece for piece in set(pieces) if piece not in self.cache]:
            if len(self.cache) + len(fresh) > MAX_CACHED_WORDS:
                self.cache.clear()
                fresh = list(set(pieces))
            self.cache.update(zip(fresh, self._encode_pieces(fresh)))
        ids = b"".join(map(self.cache.__getitem__, pieces))
        for piece in fresh:
            if len(piece) > MAX_CACHED_LENGTH:
                del self.cache[piece]
        return ids

    def _encode_pieces(self, texts: list[str]) -> list[bytes]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype).tobytes() for each in encodings]


def run_worker(dtype: str) -> None:
    """Receive a tokenizer and then chunks on standard input, a socket, and send ids back until the parent ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process; the parent handles it
    with suppress(EOFError, OSError), Connection(sys.stdin.fileno()) as parent:
        encoder = CachedEncoder(parent.recv(), dtype)
        while True:
            texts = parent.recv()
            parts = [encoder.encode(text) for text in texts]
            lengths = np.array(
                [len(part) // encoder.dtype.itemsize for part in parts], dtype=np.int64
            )
            sizes = np.array([len(text.encode("utf-8")) for text in texts], dtype=np.int64)
            parent.send((np.frombuffer(b"".join(parts), encoder.dtype), lengths, sizes))


if __name__ == "__main__":
    run_worker(*sys.argv[1:])
