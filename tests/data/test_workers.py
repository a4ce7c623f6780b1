"""Encoding word by word, in one process or several, gives the tokenizer's own ids."""

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from adlm.data.formats import WORD_END
from adlm.data.sources import load_excerpt
from adlm.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from adlm.data.workers import (
    CachedEncoder,
    WorkerProcess,
    can_cut_words,
    chunk_documents,
    tokenize_chunks,
)

TEXTS = [part for part in load_excerpt()[:60_000].split("\n\n") if part]
FAST = {name: load_tokenizer(name) for name in ("gpt2", "bert-base-uncased")}
FAST["trained"] = train_bpe([load_excerpt()[:50_000]], 700, end_token=END_OF_TEXT)
ENCODERS = {name: CachedEncoder(tokenizer.json, "uint16") for name, tokenizer in FAST.items()}
PIECES = st.sampled_from(
    [
        *" \n\t.,;:!?'\"-_&0aZé世ß\u0301\u00a0\u200b½²٣",
        "'s",
        "'ll",
        "  ",
        "\r\n",
        "word",
        "The",
        "[MASK]",
    ]
)


def assert_same_ids(encoder: CachedEncoder, text: str, name: str = "gpt2") -> None:
    assert np.frombuffer(encoder.encode(text), encoder.dtype).tolist() == FAST[name].encode(text)


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=30)),
    st.sampled_from(sorted(FAST)),
)
def test_cached_words_have_the_ids_of_the_whole_text(text: str, name: str) -> None:
    assert_same_ids(ENCODERS[name], text, name)


@pytest.mark.parametrize("name", sorted(FAST))
def test_a_book_has_the_same_ids_word_by_word(name: str) -> None:
    encoder, text = CachedEncoder(FAST[name].json, "uint32"), load_excerpt()[:150_000]
    assert_same_ids(encoder, text, name)
    assert encoder.can_cut and 1000 < len(encoder.cache) < 40_000


def test_the_cache_is_bounded_and_never_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache(dict[str, bytes]):
        def keys(self) -> Any:
            raise AssertionError(
                "iterating over the cache for every short document would take minutes"
            )

        __iter__ = keys

    monkeypatch.setattr("adlm.data.workers.MAX_CACHED_WORDS", 50)
    encoder = CachedEncoder(FAST["gpt2"].json, "uint16")
    encoder.cache = Cache()
    for text in TEXTS[:30]:
        assert_same_ids(encoder, text)
    assert len(encoder.cache) < 400


@pytest.mark.parametrize("name", sorted(FAST))
def test_long_pieces_are_not_cached(name: str) -> None:
    """Without Latin letters a piece may be a whole document, so the number of pieces does not bound the memory."""
    encoder = CachedEncoder(FAST[name].json, "uint16")
    for number in range(20):
        text = (
            "".join(chr(0x4E00 + (number * 997 + i * i) % 5000) for i in range(1000))
            + " и слово за словом" * 50
        )
        assert_same_ids(encoder, text, name)
    assert sum(map(len, encoder.cache)) < 1000


def test_results_come_in_the_order_of_the_chunks() -> None:
    texts = ["long " * 20_000, *(f"short {i}" for i in range(40)), ""]
    chunks = (([text], i) for i, text in enumerate(texts))
    results = list(tokenize_chunks(FAST["gpt2"].json, "uint16", chunks, workers=2))
    assert [tag for _, tag in results] == list(range(len(texts)))
    for text, (tokenized, _) in zip(texts, results):
        assert tokenized.ids.tolist() == FAST["gpt2"].encode(text)
        assert tokenized.lengths.tolist() == [len(tokenized.ids)] and tokenized.sizes.tolist() == [
            len(text.encode())
        ]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """The processes that a test starts."""
    started: list[WorkerProcess] = []

    def start(description: str, dtype: str) -> WorkerProcess:
        started.append(WorkerProcess(description, dtype))
        return started[-1]

    monkeypatch.setattr("adlm.data.workers.WorkerProcess", start)
    return started


def test_a_dead_worker_is_an_error(processes: list[WorkerProcess]) -> None:
    results = tokenize_chunks(
        FAST["gpt2"].json, "uint16", (([text], None) for text in TEXTS), workers=1
    )
    next(results)
    processes[0].process.kill()
    with pytest.raises(ChildProcessError, match=r"ended with code -9.*fewer --workers"):
        list(results)


def test_an_error_of_the_source_is_raised_and_ends_the_workers(
    processes: list[WorkerProcess],
) -> None:
    def broken() -> Iterator[tuple[list[str], None]]:
        yield ["fine"], None
        raise ValueError("line 7 is not JSON")

    with pytest.raises(ValueError, match="line 7"):
        list(tokenize_chunks(FAST["gpt2"].json, "uint16", broken(), workers=2))
    assert len(processes) == 2 and all(each.process.returncode is not None for each in processes)


@pytest.mark.parametrize("message", [b"", b"\0\0\1\0the beginning of 256 bytes"])
def test_a_process_ends_quietly_with_its_parent(
    message: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = WorkerProcess(FAST["gpt2"].json, "uint16")
    os.write(worker.connection.fileno(), message)
    worker.connection.close()
    assert worker.process.wait(20) == 0 and capfd.readouterr().err == ""


def test_which_tokenizers_allow_a_cut() -> None:
    description = json.loads(FAST["gpt2"].json)
    assert can_cut_words(description)
    changes = {"add_prefix_space": True, "use_regex": False, "type": "Metaspace"}
    for key, value in changes.items():
        assert not can_cut_words(
            description | {"pre_tokenizer": description["pre_tokenizer"] | {key: value}}
        )
    assert not can_cut_words(description | {"model": description["model"] | {"dropout": 0.1}})
    assert not can_cut_words(description | {"pre_tokenizer": None})
    assert not can_cut_words(description | {"normalizer": {"type": "NFC"}})
    bpe = train_bpe([load_excerpt()[:5000]], 300).bpe
    bpe.add_tokens([AddedToken("old man", special=False)])
    assert not can_cut_words(json.loads(bpe.to_str()))


CUTTABLE = FAST | {name: load_tokenizer(name) for name in ("bytes", "characters")}
WORDS = st.sampled_from([*" \n\t\u3000\x1c,é世。カ７½", "word", "The", "'s", "a\u0301"])


@settings(max_examples=400, deadline=None)
@given(st.lists(WORDS, max_size=40).map("".join), st.sampled_from(sorted(CUTTABLE)))
def test_the_parts_of_a_document_have_the_ids_of_the_whole(text: str, name: str) -> None:
    parts, encode = WORD_END.split(text), CUTTABLE[name].encode
    assert can_cut_words(json.loads(CUTTABLE[name].json)) and "".join(parts) == text
    assert [token for part in parts for token in encode(part)] == encode(text)


def test_chunks_hold_every_document_once() -> None:
    documents = [
        (f"{i}" * (i % 7), i, i % 5 < 3) for i in range(100)
    ]  # of five, the last three are one document
    documents[-1] = ("end", 99, True)
    chunks = list(chunk_documents(documents, skip=13, characters=20, max_documents=9))
    first = 13 // 3 * 5 + 13 % 3
    assert [text for texts, _ in chunks for text in texts] == [
        text for text, _, _ in documents[first:]
    ]
    assert all(len(texts) <= 9 for texts, _ in chunks) and chunks[-1][1] == (99, True)
    ends = [
        is_last
        for texts, (_, is_last) in chunks
        for is_last in [*[True] * (len(texts) - 1), is_last]
    ]
    assert ends == [is_last for _, _, is_last in documents[first:]]
