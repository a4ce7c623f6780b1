"""Named datasets: the same documents from the Hub's Parquet and from the files that circulate."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from adlm.data.corpora import CORPORA, Corpus, find_corpus
from adlm.data.detokenizers import DETOKENIZERS
from adlm.data.formats import RULES
from adlm.data.sources import Split, open_source
from tests.data.test_sources import FIXTURES, make_parquet, need, texts


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make_parquet(rows))


def test_every_entry_names_what_exists() -> None:
    lineage = [
        "lm1b",
        "openwebtext-split",
        "wikitext2",
        "wikitext103",
        "ptb",
        "lambada",
        "ag_news",
        "text8",
    ]
    assert set(CORPORA) == {
        *lineage,
        "scientific_papers_pubmed",
        "scientific_papers_arxiv",
        "held-out",
    }
    for corpus in CORPORA.values():
        assert corpus.documents in RULES and corpus.rows in ("wrapped", "documents")
        assert corpus.detokenizer is None or corpus.detokenizer in DETOKENIZERS
        assert set(corpus.splits) <= {"train", "valid", "test"}
        assert all(str(Split.parse(split)) == split for split in corpus.splits.values())
        assert corpus.characters.keys() <= corpus.splits.keys()
    assert all(find_corpus(f"{name}:PATH") is corpus for name, corpus in CORPORA.items())
    assert find_corpus("c4") is find_corpus(Path("lm1b")) is None


def test_the_held_out_passages_come_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = open_source("held-out", split="valid")
    assert len(texts(source)) == 1000 and source.identity == open_source("held-out").identity
    assert source.identity["files"][0]["name"] == "held-out.jsonl.gz"
    with pytest.raises(ValueError, match="give held-out without a path"):
        open_source("held-out:PATH")


# Local files of the same content. The sentences are made up, except the excerpt of WikiText.


def test_wikitext_lines_are_rows() -> None:
    source = open_source(f"wikitext103:{FIXTURES / 'wiki.valid.tokens'}", split="valid")
    rows = texts(source)
    assert rows[:3] == ["", " = Homarus gammarus =\n", ""]
    assert "lobster, is a species" in rows[3] and "(24 in)" in rows[3] and rows[3].endswith(".\n")
    assert (
        source.identity["detokenizer"] == "wikitext"
        and source.identity["documents"] == "every-line"
    )
    raw = open_source(
        f"wikitext103:{FIXTURES / 'wiki.valid.tokens'}", split="valid", detokenizer="none"
    )
    assert raw.identity["detokenizer"] is None and " lobster , is " in texts(raw)[3]


def test_billion_words(tmp_path: Path) -> None:
    for name, text in {
        "training-monolingual/news.en-00001-of-00100": "The cat 's gone .\nSo it is , they said .\n",
        "training-monolingual/news.en-00010-of-00100": "Ten .\n",
        "training-monolingual/news.en-00002-of-00100": "It is two .\n",
        "heldout-monolingual/news.en.heldout-00000-of-00050": 'He said : " Why not ? "\n\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # In "Ten ." the detokenizer would need a space before the last word.
    assert texts(open_source(f"lm1b:{tmp_path}")) == [
        "The cat's gone.",
        "So it is, they said.",
        "It is two.",
        "Ten .",
    ]
    held_out = open_source(f"lm1b:{tmp_path}", split="valid")
    assert texts(held_out) == ['He said: "Why not?"']
    assert held_out.identity == open_source(f"lm1b:{tmp_path}", split="test").identity
    one = tmp_path / "heldout-monolingual/news.en.heldout-00000-of-00050"
    assert texts(open_source(f"lm1b:{one}", split="test")) == texts(held_out)


CLASSES = '"3","A title","Text with a ""word"" in it"\n"1","B","C"\n'
HEADED = f"Class Index,Title,Description\n{CLASSES}"
NEWS = ['A title Text with a "word" in it', "B C"]


@pytest.mark.parametrize(
    ("corpus", "file", "content", "options", "expected"),
    [
        (
            "ptb",
            "ptb.valid.txt",
            " the <unk> rose N N \n it did n't fall \n",
            {},
            ["the ? rose 1 N", "it didn't fall"],
        ),
        ("ag_news", "test.csv", CLASSES, {}, NEWS),
        ("ag_news", "test.csv", HEADED, {}, NEWS),
        (
            "ag_news",
            "test.csv",
            HEADED,
            {"column": "Description"},
            ['Text with a "word" in it', "C"],
        ),
        (
            "lambada",
            "test.jsonl",
            '{"text": " “Go,” she said.\\n\\nSo"}\n',
            {},
            ['\n"Go," she said.\n\nSo'],
        ),
        (
            "scientific_papers_pubmed",
            "valid.jsonl",
            '{"abstract": "we find , so ."}\n',
            {},
            ["we find, so."],
        ),
    ],
)
def test_local_files(
    tmp_path: Path, corpus: str, file: str, content: str, options: Any, expected: list[str]
) -> None:
    (tmp_path / file).write_text(content)
    for place in (tmp_path, tmp_path / file):
        assert texts(open_source(f"{corpus}:{place}", split="valid", **options)) == expected


def test_scientific_papers(tmp_path: Path) -> None:
    source = open_source(f"scientific_papers_arxiv:{FIXTURES / 'elife.jsonl'}", split="test")
    assert (
        texts(source)[0].startswith("Mental and behavioral") and "stand_in" not in source.identity
    )
    (tmp_path / "test.jsonl").write_text('{"title": "T", "abstract": "cells grow ."}\n')
    source = open_source(f"scientific_papers_pubmed:{tmp_path}", split="test")
    assert source.identity["stand_in"] == "abstracts, in place of full articles"


def test_text8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = CORPORA["text8"].characters
    small = {split: (start // 10**6, stop // 10**6) for split, (start, stop) in spans.items()}
    assert small == {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
    monkeypatch.setitem(CORPORA, "text8", dataclasses.replace(CORPORA["text8"], characters=small))
    text = ("abcdefghi " * 10)[:100]
    (tmp_path / "text8").write_text(text)
    for place in (tmp_path, tmp_path / "text8"):
        parts = [
            texts(open_source(f"text8:{place}", split=split))
            for split in ("train", "valid", "test")
        ]
        assert parts == [[text[:90]], [text[90:95]], [text[95:]]]
    assert (
        open_source(f"text8:{tmp_path}").identity
        != open_source(f"text8:{tmp_path}", split="valid").identity
    )
    (tmp_path / "text8").write_text(text[:99])
    with pytest.raises(ValueError, match="has 99 characters, its splits need 100"):
        texts(open_source(f"text8:{tmp_path}", split="test"))


def test_files_of_two_kinds_may_be_the_same_text_twice(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.raw").write_text("a\n")
    (tmp_path / "test.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"several kinds \(.raw, .txt\)"):
        open_source(f"wikitext2:{tmp_path}", split="test")


@pytest.fixture
def small_openwebtext(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """OpenWebText with 3 documents held out, where there are 100,000."""
    held_out = {
        split: part.replace("100000", "3")
        for split, part in CORPORA["openwebtext-split"].splits.items()
    }
    assert held_out == {"train": "train[:-3]", "valid": "train[-3:]"}
    corpus = dataclasses.replace(CORPORA["openwebtext-split"], splits=held_out)
    monkeypatch.setitem(CORPORA, "openwebtext-split", corpus)
    return corpus


def split_texts(spec: str) -> tuple[list[str], list[str]]:
    return texts(open_source(spec, split="train")), texts(open_source(spec, split="valid"))


@pytest.mark.usefixtures("small_openwebtext")
def test_the_last_documents_are_held_out(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", [{"text": str(i)} for i in range(4)])
    write_parquet(tmp_path / "1.parquet", [{"text": str(i)} for i in range(4, 9)])
    assert split_texts(f"openwebtext-split:{tmp_path}") == (list("012345"), list("678"))
    with pytest.raises(ValueError, match=r"no split 'test': choose train or valid"):
        open_source(f"openwebtext-split:{tmp_path}", split="test")
    with pytest.raises(ValueError, match="is a slice already"):
        open_source(f"openwebtext-split:{tmp_path}", split="valid[:1]")
    (tmp_path / "1.parquet").unlink()
    assert split_texts(f"openwebtext-split:{tmp_path}") == (["0"], list("123"))
    write_parquet(tmp_path / "0.parquet", [{"text": "0"}])
    with pytest.raises(ValueError, match=r"needs at least 3 documents, and there are 1"):
        open_source(f"openwebtext-split:{tmp_path}", split="valid").read()


# The Hub, replaced by a folder of Parquet files.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose owner/name[@revision] is what the Hub would hold; `datasets` reads it as it reads any folder."""
    datasets = need("datasets")
    real = datasets.load_dataset_builder
    root = tmp_path / "hub"
    root.mkdir()

    def load(repo: str, name: str | None = None, revision: str | None = None, **kwargs: Any) -> Any:
        place = root / (repo if revision is None else f"{repo}@{revision.replace('/', '.')}")
        if not place.is_dir():
            raise datasets.exceptions.DatasetNotFoundError(
                f"Dataset '{repo}' doesn't exist on the Hub"
            )
        return real(str(place), name, cache_dir=str(tmp_path / "cache"), **kwargs)

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    monkeypatch.chdir(tmp_path)
    return root


def make_card(examples: dict[str, int]) -> str:
    """A dataset card with the number of training examples of each configuration."""
    info = "".join(
        f"- config_name: {config}\n  features:\n  - name: text\n    dtype: string\n"
        f"  splits:\n  - name: train\n    num_examples: {n}\n    num_bytes: 1\n"
        for config, n in examples.items()
    )
    files = "".join(
        f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train-*\n"
        for config in examples
    )
    return f"---\ndataset_info:\n{info}configs:\n{files}---\n"


def test_a_dataset_of_the_hub(hub: Path) -> None:
    write_parquet(
        hub / "me/words/data/train-00000-of-00001.parquet",
        [{"n": i, "body": f"w {i}"} for i in range(5)],
    )
    write_parquet(hub / "me/words/data/validation-00000-of-00001.parquet", [{"n": 9, "body": "v"}])
    source = open_source("me/words")
    assert texts(source) == texts(source) == [f"w {i}" for i in range(5)]
    assert source.total_bytes is None and source.identity["column"] == "body"
    assert source.identity["repo"] == "me/words" and source.identity["revision"]
    assert (
        json.loads(json.dumps(source.identity))
        == source.identity
        == open_source("me/words").identity
    )
    assert texts(open_source("me/words", split="valid")) == ["v"]
    assert texts(open_source("me/words", split="train[1:3]", detokenizer="lambada")) == [
        "\nw 1",
        "\nw 2",
    ]
    errors: list[tuple[str, dict[str, str], str]] = [
        ("me/words", {"split": "test"}, r"no split 'test': choose one of train, validation"),
        (
            "me/words",
            {"column": "text"},
            r"me/words has no text column 'text'.*'n' \(no text\), 'body'",
        ),
        ("me/words", {"split": "train[-1:]"}, "which me/words does not have"),
        ("me/words", {"documents": "line"}, "a row is a document"),
        ("me/nothing", {}, "me/nothing is no file, and loading me/nothing from the Hub failed"),
        ("ptb", {}, "to read local files, give ptb:PATH"),
    ]
    for spec, options, message in errors:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_source(spec, **options)


@pytest.mark.usefixtures("small_openwebtext")
def test_the_hubs_last_documents_are_held_out(hub: Path) -> None:
    folder = hub / "Skylion007/openwebtext"
    for shard in range(3):
        rows = [{"text": str(3 * shard + i)} for i in range(3)]
        write_parquet(folder / f"plain_text/train-0000{shard}-of-00003.parquet", rows)
    (folder / "README.md").write_text(make_card({"plain_text": 9}))
    assert split_texts("openwebtext-split") == (list("012345"), list("678"))


@pytest.mark.parametrize(
    ("name", "folder", "column", "text", "expected"),
    [
        ("lm1b", "plain_text/train", "text", "It is so .", "It is so."),
        ("ptb", "penn_treebank/train", "sentence", "it is n't", "it isn't"),
        ("scientific_papers_pubmed", "pubmed/train", "article", "so , we", "so, we"),
        ("scientific_papers_arxiv", "arxiv/partial-train", "article", "so , we", "so, we"),
    ],
)
def test_the_branch_of_conversions(
    hub: Path, name: str, folder: str, column: str, text: str, expected: str
) -> None:
    repo = hub / f"{CORPORA[name].hub}@refs.convert.parquet"
    write_parquet(repo / folder / "0000.parquet", [{column: text, "section_names": ""}])
    write_parquet(repo / "another/train/0000.parquet", [{column: "not this"}])
    write_parquet(repo / folder.replace("train", "test") / "0000.parquet", [{column: "nor this"}])
    source = open_source(name)
    assert texts(source) == [expected] and source.identity["config"] == CORPORA[name].config


def test_configurations(hub: Path) -> None:
    repo = hub / "Salesforce/wikitext"
    configs = ("wikitext-2-raw-v1", "wikitext-103-raw-v1")
    for config in configs:
        write_parquet(
            repo / config / "train-00000-of-00001.parquet",
            [{"text": ""}, {"text": f" {config} , so \n"}],
        )
    (repo / "README.md").write_text(make_card(dict.fromkeys(configs, 2)))
    assert texts(open_source("wikitext2")) == ["", " wikitext-2-raw-v1, so\n"]
    assert texts(open_source("wikitext103")) == ["", " wikitext-103-raw-v1, so\n"]
    assert texts(open_source("Salesforce/wikitext:wikitext-2-raw-v1")) == [
        "",
        " wikitext-2-raw-v1 , so \n",
    ]
