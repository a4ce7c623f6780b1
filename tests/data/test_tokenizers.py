"""Decoding returns the encoded text; no text is encoded to a special token."""

import json
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from adlm.data.hub import check_hub, find_address
from adlm.data.sources import load_excerpt
from adlm.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe

TOKENIZER = train_bpe([load_excerpt()[:20_000]], 400)
LOADED = {
    name: load_tokenizer(name) for name in ("gpt2", "bert-base-uncased", "bytes", "characters")
}
LOADED["trained"] = TOKENIZER
# Parts of a text that look like special tokens.
SPECIAL = st.sampled_from(
    ["[MASK]", "[CLS]", "[SEP]", "[PAD]", "[BOS]", "<|endoftext|>", "<mask>", " ", "a", "\n"]
)


def get_ids(tokenizer: Tokenizer) -> tuple[int | None, ...]:
    return (
        tokenizer.vocab_size,
        tokenizer.mask_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )


@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from(["gpt2", "bytes", "trained"]))
def test_byte_level_tokenizers_give_the_text_back(text: str, name: str) -> None:
    ids = LOADED[name].encode(text)
    assert LOADED[name].decode(ids) == text and LOADED[name].mask_id not in ids
    if name == "bytes":
        assert ids == list(text.encode("utf-8"))


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("gpt2", (50_258, 50_257, 50_256, 50_256, None)),
        ("bert-base-uncased", (30_522, 103, 101, 102, 0)),
        ("bytes", (258, 257, 256, 256, None)),
        ("characters", (35, 4, 2, 3, 5)),
        ("trained", (400, 399, None, None, None)),
    ],
)
def test_ids_of_the_named_tokenizers(name: str, ids: tuple[int | None, ...]) -> None:
    assert get_ids(LOADED[name]) == ids


def test_named_tokenizers_are_the_published_ones() -> None:
    """Ids that the published files give; the hashes are those of the files themselves."""
    text = "Hello world, it's 2025.\n\n  café — naïve\n"
    gpt2 = [15496, 995, 11, 340, 338, 32190, 13, 628, 220, 40304, 851, 41492, 198]
    assert LOADED["gpt2"].encode(text) == gpt2
    assert LOADED["bert-base-uncased"].encode("Hello world, it's naïve") == [
        7592,
        2088,
        1010,
        2009,
        1005,
        1055,
        15743,
    ]
    page = (Path(__file__).parents[2] / "adlm/data/bundled/README.md").read_text("utf-8")
    assert all(LOADED[name].sha256 in page for name in ("gpt2", "bert-base-uncased"))
    characters = LOADED["characters"]  # the lineage's for text8
    assert (
        characters.encode("az bA") == [8, 33, 34, 9, 7]
        and characters.decode([8, 33, 34, 9]) == "az b"
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(SPECIAL, max_size=8).map("".join), st.sampled_from(sorted(LOADED)))
def test_no_text_becomes_a_special_token(text: str, name: str) -> None:
    tokenizer = LOADED[name]
    ids = tokenizer.encode(text)
    assert not {tokenizer.mask_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids)
    flat, lengths = tokenizer.encode_batch([text, "x", text])
    assert flat.tolist() == ids + tokenizer.encode("x") + ids and flat.dtype == np.uint32
    assert lengths.tolist() == [len(ids), len(tokenizer.encode("x")), len(ids)]


@pytest.mark.parametrize("name", sorted(LOADED))
def test_a_saved_or_pickled_tokenizer_is_the_same(name: str, tmp_path: Path) -> None:
    tokenizer, text = LOADED[name], "It was [MASK] <|endoftext|> all the same."
    tokenizer.save(tmp_path)
    for other in (
        Tokenizer.load(tmp_path),
        load_tokenizer(tmp_path),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert (other.sha256, other.name, get_ids(other)) == (
            tokenizer.sha256,
            tokenizer.name,
            get_ids(tokenizer),
        )
        assert other.encode(text) == tokenizer.encode(text)


def test_special_tokens_are_skipped_on_request() -> None:
    gpt2 = LOADED["gpt2"]
    row = [gpt2.bos_id, *gpt2.encode("So it goes."), gpt2.eos_id]
    assert gpt2.decode(row) == "<|endoftext|>So it goes.<|endoftext|>"
    assert gpt2.decode(row, skip_special=True) == "So it goes."


def write_tokenizer(folder: Path, specials: list[str], config: dict | None, name: str) -> Path:
    """Write a small word-level tokenizer with these special tokens, as other libraries do."""
    words = ["a", "b", "c", *specials]
    bpe = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    )
    bpe.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in specials])
    bpe.enable_truncation(2)
    bpe.enable_padding()
    bpe.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / name).write_text(json.dumps(config))
    return folder


CONFIG = {
    "bos_token": "<go>",
    "eos_token": {"content": "<stop>"},
    "pad_token": None,
    "mask_token": "<hide>",
}


@pytest.mark.parametrize(
    ("specials", "config", "file", "ids"),
    [  # a mask of its own, a map of special tokens, and well-known names without a configuration
        (
            ["[CLS]", "[PAD]", "<go>", "<stop>", "<hide>"],
            CONFIG,
            "tokenizer_config.json",
            (8, 7, 5, 6, None),
        ),
        (
            ["<a>", "<b>"],
            {"cls_token": "<a>", "sep_token": "<b>"},
            "special_tokens_map.json",
            (6, 5, 3, 4, None),
        ),
        (["<s>", "</s>", "<pad>"], None, "", (7, 6, 3, 4, 5)),
    ],
)
def test_special_tokens_of_a_folder(
    tmp_path: Path, specials: list[str], config: dict | None, file: str, ids: tuple[int | None, ...]
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, specials, config, file))
    assert get_ids(tokenizer) == ids == get_ids(load_tokenizer(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a b c") == [0, 1, 2]  # neither cut nor padded, though the file says so


def test_tokenizers_with_errors(tmp_path: Path) -> None:
    bpe = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[MASK]": 1}, unk_token="a"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(ValueError, match=r"'\[MASK\]' is encoded to special token 1"):
        Tokenizer(bpe, own_mask_id=1)
    with pytest.raises(ValueError, match=r"nowhere\.json.*gpt2, bert-base-uncased, bytes"):
        load_tokenizer(tmp_path / "nowhere.json")
    random = json.loads(LOADED["gpt2"].json)
    random["model"]["dropout"] = 0.1
    contents = {
        "{}": r"not a sound tokenizer\.json",
        json.dumps(random): r"model.dropout 0\.1.*set it to null",
    }
    for content, message in contents.items():
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)
    write_tokenizer(tmp_path, ["<go>"], {"bos_token": {"x": 1}}, "tokenizer_config.json")
    with pytest.raises(ValueError, match=r"names \{'x': 1\} as bos: expected a token"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, allow_patterns: list[str]) -> str:
        if not (tmp_path / "tokenizer.json").is_file():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network here")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("adlm.data.hub.check_hub", lambda: True)
    with pytest.raises(
        ValueError, match=r"'someone/something' could not be loaded \(no network here"
    ):
        load_tokenizer("someone/something")
    write_tokenizer(
        tmp_path,
        ["<go>", "<stop>"],
        {"bos_token": "<go>", "eos_token": "<stop>"},
        "tokenizer_config.json",
    )
    tokenizer = load_tokenizer("someone/something")
    assert (tokenizer.name, tokenizer.bos_id, tokenizer.eos_id) == ("someone/something", 3, 4)


def test_training_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, hashes = load_excerpt()[:100_000].split("\n"), set()
    for parallel in ("true", "false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        hashes.add(train_bpe(texts, 1000, end_token=END_OF_TEXT).sha256)
    assert len(hashes) == 1


def test_an_end_token_is_part_of_the_vocabulary() -> None:
    text = load_excerpt()[:20_000]
    tokenizer = train_bpe([text], 400, end_token=END_OF_TEXT)
    assert (tokenizer.vocab_size, tokenizer.mask_id) == (400, 399)
    assert (
        tokenizer.bos_id == tokenizer.eos_id
        and tokenizer.decode([tokenizer.eos_id or 0]) == END_OF_TEXT
    )
    assert tokenizer.eos_id not in tokenizer.encode(END_OF_TEXT)
    assert len(tokenizer.encode(text)) < 0.8 * len(text.encode())  # merges shorten the text


@pytest.mark.parametrize(
    ("name", "token", "problem"),
    [
        ("trained", 399, "mask"),
        ("trained", 400, "outside"),
        ("trained", -1, "outside"),
        ("characters", 4, "mask"),
    ],
)
def test_decoding_a_mask_is_an_error(name: str, token: int, problem: str) -> None:
    with pytest.raises(ValueError, match=f"position 1 is .*{problem}"):
        LOADED[name].decode([5, token])


def test_the_smallest_vocabulary() -> None:
    with pytest.raises(ValueError, match="expected more than 256"):
        train_bpe(["text"], 256)
    assert isinstance(train_bpe(["text"], 257), Tokenizer)
    with pytest.raises(ValueError, match="expected more than 257"):
        train_bpe(["text"], 257, end_token=END_OF_TEXT)


def test_names_close_to_a_bundled_one_are_refused_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("adlm.data.hub.check_hub", lambda: pytest.fail("the Hub was asked"))
    for name, meant in (
        ("gpt-2", "gpt2"),
        ("bert-base-uncase", "bert-base-uncased"),
        ("byte", "bytes"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"unknown tokenizer '{name}' \(did you mean {meant}\?\).*OWNER/{name}",
        ):
            load_tokenizer(name)


def test_without_a_connection_a_name_of_the_hub_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(
        sys.modules, "datasets.config", datasets := SimpleNamespace(HF_HUB_OFFLINE=False)
    )
    began = time.monotonic()
    with pytest.raises(ValueError, match="the Hub cannot be reached, and its cache has none"):
        load_tokenizer("someone/something")
    assert (
        time.monotonic() - began < 3
        and huggingface_hub.constants.HF_HUB_OFFLINE
        and datasets.HF_HUB_OFFLINE
    )


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, ("huggingface.co", 443)),
        ({"https_proxy": "proxy.corp:3128"}, ("proxy.corp", 3128)),
        ({"https_proxy": "http://proxy.corp"}, ("proxy.corp", 80)),
        ({"https_proxy": "proxy.corp:3128", "no_proxy": "huggingface.co"}, ("huggingface.co", 443)),
        ({"https_proxy": "proxy.corp:3128", "HF_ENDPOINT": "http://mirror"}, ("mirror", 80)),
    ],
)
def test_the_hub_is_reached_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], address: tuple[str, int]
) -> None:
    set_variables(monkeypatch, variables)
    assert find_address() == address


@pytest.mark.parametrize("url", ["http://[::1", "http://proxy:99999", "http://" + "a" * 64])
def test_a_wrong_url_is_a_hub_that_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    set_variables(monkeypatch, {"https_proxy": url, "HF_HUB_OFFLINE": "0"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(sys.modules, "datasets.config", SimpleNamespace(HF_HUB_OFFLINE=False))
    errors: list[object] = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    assert not check_hub() and not errors


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    content = json.loads(LOADED["gpt2"].json)
    content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 4_000_000_000, "content": "<far>"}
    )
    content["model"]["vocab"]["<far>"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="has ids up to 4,000,000,001: expected fewer than 16,777,216"
    ):
        load_tokenizer(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes: expected at most"):
        load_tokenizer(tmp_path)
