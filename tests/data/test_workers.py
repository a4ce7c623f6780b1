"""Chunks that threads tokenize, and documents in parts, have the tokenizer's own ids."""

import json
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from adlm.data.formats import WORD_END
from adlm.data.sources import load_excerpt
from adlm.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from adlm.data.workers import can_cut_words, chunk_documents, tokenize_chunks

FAST = {name: load_tokenizer(name) for name in ("gpt2", "bert-base-uncased")}
FAST["trained"] = train_bpe([load_excerpt()[:50_000]], 700, end_token=END_OF_TEXT)


def test_results_come_in_the_order_of_the_chunks() -> None:
    texts, before = ["long " * 20_000, *(f"short {i}" for i in range(40)), ""], dict(os.environ)
    results = list(tokenize_chunks(FAST["gpt2"], (([text], i) for i, text in enumerate(texts)), workers=2))
    assert [tag for _, tag in results] == list(range(len(texts))) and before == os.environ
    for text, (tokenized, _) in zip(texts, results):
        assert tokenized.ids.tolist() == FAST["gpt2"].encode(text)
        assert tokenized.lengths.tolist() == [len(tokenized.ids)] and tokenized.sizes.tolist() == [len(text.encode())]


def test_an_error_of_the_source_is_raised() -> None:
    def broken() -> Iterator[tuple[list[str], None]]:
        yield ["fine"], None
        raise ValueError("line 7 is not JSON")

    with pytest.raises(ValueError, match="line 7"):
        list(tokenize_chunks(FAST["gpt2"], broken(), workers=2))


def test_which_tokenizers_allow_a_cut() -> None:
    description = json.loads(FAST["gpt2"].json)
    assert can_cut_words(description)
    changes = {"add_prefix_space": True, "use_regex": False, "type": "Metaspace"}
    for key, value in changes.items():
        assert not can_cut_words(description | {"pre_tokenizer": description["pre_tokenizer"] | {key: value}})
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
    documents = [(f"{i}" * (i % 7), i, i % 5 < 3) for i in range(100)]  # of five, the last three are one document
    documents[-1] = ("end", 99, True)
    chunks = list(chunk_documents(documents, skip=13, characters=20, max_documents=9))
    first = 13 // 3 * 5 + 13 % 3
    assert [text for texts, _ in chunks for text in texts] == [text for text, _, _ in documents[first:]]
    assert all(len(texts) <= 9 for texts, _ in chunks) and chunks[-1][1] == (99, True)
    ends = [is_last for texts, (_, is_last) in chunks for is_last in [*[True] * (len(texts) - 1), is_last]]
    assert ends == [is_last for _, _, is_last in documents[first:]]
