"""Processes that tokenize. Run as a script this file is such a process.

It imports nothing of adlm, so that a process starts in a tenth of a second and holds no torch. Its memory is its own,
it inherits no threads, and it ends when its input does, so a parent that is killed leaves none behind.
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
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

# Between a visible ASCII character and a blank before a letter, or a line end; between a letter and a punctuation mark.
CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z]|\n)|(?<=[A-Za-z])(?=[,.;:!?\"])")
MOST_KNOWN = 2**18  # words; some 50 MB
LONGEST_KNOWN = 40  # characters: text without Latin letters is hardly cut, and a paragraph is not met again
AHEAD = 3  # chunks in flight for each process: one in work, one waiting, one on its way back


class Tokenized(NamedTuple):
    """A chunk of documents: their ids in one array, how many each has, and its size in bytes."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


class TokenizerPool:
    """Some processes with one tokenizer; results come in the order of the input, whoever was first."""

    def __init__(self, tokenizer_file: Path, dtype: str, workers: int) -> None:
        self.dtype = np.dtype(dtype)
        command = [sys.executable, "-P", __file__, str(tokenizer_file), dtype]
        # One thread each: the processes are the parallel part.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(workers)
        ]
        self.free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self.processes:
            self.free.put(process)
        self.threads = ThreadPoolExecutor(workers)  # they wait on pipes

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in self.processes:
                process.kill()  # nobody will read what they are at
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # closing sends what is buffered: nobody may be there to read it
                process.stdin.close()
            process.stdout.close()
            process.wait()

    def tokenize(self, chunks: Iterable[tuple[Sequence[str], Any]]) -> Iterator[tuple[Tokenized, Any]]:
        """Each chunk's ids, with whatever came along with it; only a few chunks are read ahead."""
        waiting: deque[tuple[Future[Tokenized], Any]] = deque()
        for texts, note in chunks:
            waiting.append((self.threads.submit(self._ask, texts), note))
            if len(waiting) >= AHEAD * len(self.processes):
                future, noted = waiting.popleft()
                yield future.result(), noted
        for future, noted in waiting:
            yield future.result(), noted

    def _ask(self, texts: Sequence[str]) -> Tokenized:
        # Half of a surrogate pair is no character and UTF-8 cannot hold it: it becomes a question mark.
        encoded = [text.encode("utf-8", "replace") for text in texts]
        sizes = np.array([len(each) for each in encoded], dtype=np.int64)
        process = self.free.get()
        try:
            return self._answer(process, encoded, sizes)
        except (BrokenPipeError, EOFError) as error:
            raise ChildProcessError(
                f"a tokenizing process ended with code {process.wait()}; what it said is above. "
                "If it was killed, memory may be short: try fewer --workers"
            ) from error
        finally:
            self.free.put(process)  # a dead one, too: whoever waits for it must not wait for ever

    def _answer(self, process: subprocess.Popen[bytes], texts: list[bytes], sizes: NDArray[np.int64]) -> Tokenized:
        assert process.stdin is not None and process.stdout is not None
        send(process.stdin, sizes, b"".join(texts))
        lengths = receive(process.stdout)
        if lengths is None or len(lengths) != len(sizes):
            raise EOFError
        size = int(lengths.sum()) * self.dtype.itemsize
        ids = process.stdout.read(size)
        if len(ids) != size:
            raise EOFError
        return Tokenized(np.frombuffer(ids, dtype=self.dtype), lengths, sizes)


def chunked(
    documents: Iterable[tuple[str, int]], *, skip: int = 0, characters: int = 2**20, most: int = 4096
) -> Iterator[tuple[list[str], int]]:
    """Documents without the first `skip`, some at a time, with the bytes of the source that were read for them."""
    texts: list[str] = []
    size = consumed = 0
    for number, (text, consumed) in enumerate(documents):
        if number < skip:
            continue
        texts.append(text)
        size += len(text)
        if size >= characters or len(texts) >= most:
            yield texts, consumed
            texts, size = [], 0
    if texts:
        yield texts, consumed


def send(pipe: IO[bytes], numbers: NDArray[np.int64], content: bytes) -> None:
    """How many numbers, the numbers, the content."""
    pipe.write(np.int64(len(numbers)).tobytes())
    pipe.write(numbers.tobytes())
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> NDArray[np.int64] | None:
    """The numbers that `send` wrote, or None at the end of the pipe."""
    count = pipe.read(8)
    if len(count) < 8:
        return None
    return np.frombuffer(pipe.read(8 * int(np.frombuffer(count, dtype=np.int64)[0])), dtype=np.int64)


def words_are_apart(description: dict[str, Any]) -> bool:
    """Whether a tokenizer.json cuts text wherever `CUT` does, so that the ids of the pieces are those of the whole.

    So do the byte-level pre-tokenizer of GPT-2 and the one of BERT. An added token that is not special is looked for in
    the text before it is cut: with one, nothing is promised.
    """
    before = description.get("pre_tokenizer") or {}
    normalizer = (description.get("normalizer") or {}).get("type")
    is_gpt2 = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before["add_prefix_space"]
    is_bert = before.get("type") == "BertPreTokenizer"
    return (
        ((is_gpt2 and normalizer is None) or (is_bert and normalizer in (None, "BertNormalizer")))
        and not description["model"].get("dropout")
        and all(token["special"] for token in description.get("added_tokens", []))
    )


class Encoder:
    """Text to the bytes of its ids; a word that was met before is looked up, which most are."""

    def __init__(self, description: str, dtype: str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_str(description)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # as Tokenizer does: no text is a special token
        self.dtype = np.dtype(dtype)
        self.is_apart = words_are_apart(json.loads(description))
        self.known: dict[str, bytes] = {}

    def encode(self, text: str) -> bytes:
        if not self.is_apart:
            return self._ids([text])[0]
        pieces = CUT.split(text)
        # Asked word by word: a difference of sets would walk through all that is known, for every document.
        if fresh := [piece for piece in set(pieces) if piece not in self.known]:
            if len(self.known) + len(fresh) > MOST_KNOWN:
                self.known.clear()
                fresh = list(set(pieces))
            self.known.update(zip(fresh, self._ids(fresh)))
        ids = b"".join(map(self.known.__getitem__, pieces))
        for piece in fresh:
            if len(piece) > LONGEST_KNOWN:
                del self.known[piece]
        return ids

    def _ids(self, texts: list[str]) -> list[bytes]:
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype).tobytes() for each in found]


def serve(tokenizer_file: str, dtype: str) -> None:
    """Chunks from standard input, ids to standard output, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process at the terminal; the parent answers it
    encoder = Encoder(Path(tokenizer_file).read_bytes().decode("utf-8"), dtype)
    while (sizes := receive(sys.stdin.buffer)) is not None:
        parts = [encoder.encode(sys.stdin.buffer.read(size).decode("utf-8")) for size in sizes.tolist()]
        lengths = np.array([len(part) // encoder.dtype.itemsize for part in parts], dtype=np.int64)
        send(sys.stdout.buffer, lengths, b"".join(parts))


if __name__ == "__main__":
    try:
        serve(*sys.argv[1:])
    except BrokenPipeError:
        os._exit(1)  # the parent is gone, and with it whoever would read more of this
