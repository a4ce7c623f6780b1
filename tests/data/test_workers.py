"""Word by word or whole, by one process or several: the ids are those that the tokenizer gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from adlm.data.sources import load_excerpt
from adlm.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from adlm.data.workers import CachedEncoder, TokenizerPool, can_split_words, chunk_documents

TEXTS = [part for part in load_excerpt()[:60_000].split("\n\n") if part]
FAST = {name: load_tokenizer(name) for name in ("gpt2", "bert-base-uncased")}
FAST["learned"] = train_bpe([load_excerpt()[:50_000]], 700, end_token=END_OF_TEXT)
ENCODERS = {name: CachedEncoder(tokenizer.json, "uint16") for name, tokenizer in FAST.items()}
PIECES = st.sampled_from(
    [*" \n\t.,;:!?'\"-_&0aZé世ß\u0301\u00a0\u200b½²٣", "'s", "'ll", "  ", "\r\n", "word", "The", "[MASK]"]
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=30)), st.sampled_from(sorted(FAST)))
def test_words_looked_up_have_the_ids_of_the_whole_text(text: str, name: str) -> None:
    assert np.frombuffer(ENCODERS[name].encode(text), np.uint16).tolist() == FAST[name].encode(text)


@pytest.mark.parametrize("name", sorted(FAST))
def test_a_book_has_the_same_ids_word_by_word(name: str) -> None:
    encoder, text = CachedEncoder(FAST[name].json, "uint32"), load_excerpt()[:150_000]
    assert encoder.can_split and len(encoder.encode(text)) == 4 * len(FAST[name].encode(text))
    assert np.frombuffer(encoder.encode(text), np.uint32).tolist() == FAST[name].encode(text)
    assert 1000 < len(encoder.cache) < 40_000


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adlm.data.workers.MAX_CACHED_WORDS", 50)
    encoder = CachedEncoder(FAST["gpt2"].json, "uint16")
    for text in TEXTS[:30]:
        assert np.frombuffer(encoder.encode(text), np.uint16).tolist() == FAST["gpt2"].encode(text)
    assert len(encoder.cache) < 400


def test_a_document_is_asked_word_by_word_however_much_is_known() -> None:
    class Known(dict[str, bytes]):
        """What must not be walked through for every document: short ones would take minutes instead of seconds."""

        def keys(self) -> Any:
            raise AssertionError("all that is known was gone through")

        __iter__ = keys

    encoder = CachedEncoder(FAST["gpt2"].json, "uint16")
    encoder.cache = Known()
    for text in TEXTS[:5]:
        assert np.frombuffer(encoder.encode(text), np.uint16).tolist() == FAST["gpt2"].encode(text)


@pytest.mark.parametrize("name", sorted(FAST))
def test_text_that_is_hardly_cut_is_not_kept(name: str) -> None:
    """Without Latin letters a piece may be a whole document: the number of pieces bounds nothing."""
    encoder = CachedEncoder(FAST[name].json, "uint16")
    for number in range(20):
        text = "".join(chr(0x4E00 + (number * 997 + i * i) % 5000) for i in range(1000)) + " и слово за словом" * 50
        assert np.frombuffer(encoder.encode(text), np.uint16).tolist() == FAST[name].encode(text)
    assert sum(map(len, encoder.cache)) < 1000


def test_only_tokenizers_that_cut_there_are_asked_word_by_word() -> None:
    description = json.loads(FAST["gpt2"].json)
    assert can_split_words(description)
    changes: list[tuple[str, str, Any]] = [
        ("pre_tokenizer", "add_prefix_space", True),
        ("pre_tokenizer", "use_regex", False),
        ("pre_tokenizer", "type", "Metaspace"),
        ("model", "dropout", 0.1),
    ]
    for part, key, value in changes:
        assert not can_split_words(description | {part: description[part] | {key: value}})
    assert not can_split_words(description | {"normalizer": {"type": "NFC"}})
    assert not can_split_words(description | {"pre_tokenizer": None})
    bpe = train_bpe([load_excerpt()[:5000]], 300).bpe
    bpe.add_tokens([AddedToken("old man", special=False)])
    plain = CachedEncoder(bpe.to_str(), "uint16")
    assert not plain.can_split
    assert np.frombuffer(plain.encode("an old man"), np.uint16)[-1] == bpe.token_to_id("old man")


def pool(folder: Path, workers: int = 2) -> TokenizerPool:
    FAST["gpt2"].save(folder)
    return TokenizerPool(folder / "tokenizer.json", "uint16", workers)


def test_results_come_in_the_order_of_the_chunks(tmp_path: Path) -> None:
    texts = ["long " * 20_000, *(f"short {i}" for i in range(40)), "", "half \ud800 a pair"]
    with pool(tmp_path) as workers:
        found = list(workers.tokenize(([text], i) for i, text in enumerate(texts)))
    assert [note for _, note in found] == list(range(len(texts)))
    texts[-1] = "half ? a pair"
    for text, (tokenized, _) in zip(texts, found):
        assert tokenized.ids.tolist() == FAST["gpt2"].encode(text)
        assert tokenized.lengths.tolist() == [len(tokenized.ids)] and tokenized.sizes.tolist() == [len(text.encode())]


def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    with pool(tmp_path, 1) as workers:
        workers.processes[0].kill()
        with pytest.raises(ChildProcessError, match=r"ended with code -9.*fewer --workers"):
            list(workers.tokenize(([text], None) for text in TEXTS))


def test_an_error_of_the_source_is_raised_and_ends_the_workers(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[list[str], None]]:
        yield ["fine"], None
        raise ValueError("line 7 is not JSON")

    with pytest.raises(ValueError, match="line 7"), pool(tmp_path) as workers:
        list(workers.tokenize(broken()))
    assert all(process.returncode is not None for process in workers.processes)


def test_chunks_hold_every_document_once() -> None:
    documents = [(f"{i}" * (i % 7), i) for i in range(100)]
    found = list(chunk_documents(documents, skip=13, characters=20, max_documents=9))
    assert [text for texts, _ in found for text in texts] == [text for text, _ in documents[13:]]
    assert all(len(texts) <= 9 for texts, _ in found) and found[-1][1] == 99
