"""A pool of tokenizing processes. Run as a script, this file is one of the processes.

It imports nothing from adlm, so that a process starts in a tenth of a second and holds no torch. It inherits no threads
and ends when its input does, so a parent that is killed leaves no process behind.
"""

from __future__ import annotations

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
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

# Between a visible ASCII character and a space before a letter, or a line end; between a letter and a punctuation mark.
WORD_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z]|\n)|(?<=[A-Za-z])(?=[,.;:!?\"])")
MAX_CACHED_WORDS = 2**18  # about 50 MB
MAX_CACHED_LENGTH = 40  # characters: text without Latin letters is hardly cut, and paragraphs do not repeat
CHUNKS_PER_PROCESS = 3  # in flight: one in work, one waiting, one on its way back


class TokenizedChunk(NamedTuple):
    """A chunk of documents: all ids in one array, the number of ids of each and its size in bytes."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


class TokenizerPool:
    """Processes that share the tokenizing; results keep the order of the input."""

    def __init__(self, description: str, dtype: str, workers: int) -> None:
        """Start the processes; the description of the tokenizer is the content of a tokenizer.json."""
        self.dtype, content = np.dtype(dtype), description.encode("utf-8")
        command = [sys.executable, "-P", __file__, dtype]
        # One thread each: the processes are the parallel part.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(workers)
        ]
        self.free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self.processes:
            assert process.stdin is not None
            send(process.stdin, content, np.array([len(content)]))
            self.free.put(process)
        self.threads = ThreadPoolExecutor(workers)  # they wait on pipes

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in self.processes:
                process.kill()  # their results are not needed
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # closing flushes, and the process may have ended
                process.stdin.close()
            process.stdout.close()
            process.wait()

    def tokenize(self, chunks: Iterable[tuple[Sequence[str], Any]]) -> Iterator[tuple[TokenizedChunk, Any]]:
        """Yield each chunk's ids and the object that came with it; only a few chunks are read ahead."""
        waiting: deque[tuple[Future[TokenizedChunk], Any]] = deque()
        for texts, tag in chunks:
            waiting.append((self.threads.submit(self._tokenize_chunk, texts), tag))
            if len(waiting) >= CHUNKS_PER_PROCESS * len(self.processes):
                future, first_tag = waiting.popleft()
                yield future.result(), first_tag
        for future, tag in waiting:
            yield future.result(), tag

    def _tokenize_chunk(self, texts: Sequence[str]) -> TokenizedChunk:
        encoded = [text.encode("utf-8") for text in texts]
        sizes = np.array([len(each) for each in encoded], dtype=np.int64)
        process = self.free.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, b"".join(encoded), sizes)
            ids, lengths = receive(process.stdout)
        except (BrokenPipeError, EOFError) as error:
            raise ChildProcessError(
                f"a tokenizing process ended with code {process.wait()}; its messages are above. "
                "If it was killed, memory may be short: try fewer --workers"
            ) from error
        finally:
            self.free.put(process)  # a dead one, too: otherwise a waiting thread would block
        return TokenizedChunk(np.frombuffer(ids, dtype=self.dtype), lengths, sizes)


def tokenize_chunks(
    description: str, dtype: str, chunks: Iterable[tuple[Sequence[str], Any]], workers: int
) -> Iterator[tuple[TokenizedChunk, Any]]:
    """Yield each chunk's ids and the object that came with it, in order, from a pool that ends with this."""
    with TokenizerPool(description, dtype, workers) as pool:
        yield from pool.tokenize(chunks)


def send(pipe: IO[bytes], content: bytes, sizes: NDArray[np.int64]) -> None:
    """Write two lengths in bytes, then the sizes of the parts and the content itself."""
    pipe.write(np.array([sizes.nbytes, len(content)], dtype=np.int64).tobytes() + sizes.tobytes())
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[bytes, NDArray[np.int64]]:
    """Read what `send` wrote; EOFError where the pipe ends."""
    header = pipe.read(16)
    lengths = np.frombuffer(header if len(header) == 16 else bytes(16), dtype=np.int64).tolist()
    sizes, content = (pipe.read(length) for length in lengths)
    if [len(header), len(sizes), len(content)] != [16, *lengths]:
        raise EOFError("the pipe ended")
    return content, np.frombuffer(sizes, dtype=np.int64)


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
    """Read a tokenizer and chunks from standard input, and write ids to standard output until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent handles it
    with suppress(EOFError):
        encoder = CachedEncoder(receive(sys.stdin.buffer)[0].decode("utf-8"), dtype)
        while True:
            content, sizes = receive(sys.stdin.buffer)
            ends = np.cumsum(sizes).tolist()
            texts = (content[end - size : end].decode("utf-8") for end, size in zip(ends, sizes.tolist()))
            parts = [encoder.encode(text) for text in texts]
            lengths = np.array([len(part) // encoder.dtype.itemsize for part in parts], dtype=np.int64)
            send(sys.stdout.buffer, b"".join(parts), lengths)


if __name__ == "__main__":
    try:
        run_worker(*sys.argv[1:])
    except BrokenPipeError:
        os._exit(1)  # the parent is gone
