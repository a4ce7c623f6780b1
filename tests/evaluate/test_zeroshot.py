"""Zero-shot sets: where they are found, that their rows are the lineage's, and how they deviate from the paper's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.data.corpora import CORPORA
from adlm.data.sources import open_source
from adlm.data.tokenizers import Tokenizer
from adlm.evaluate.data import EvalDataset, load_eval_data
from adlm.evaluate.ppl import (
    PAPER,
    SETS,
    SPLIT,
    compare_with_paper,
    find_set,
    locate_set,
    zero_shot,
)
from adlm.likelihood import estimate_nll
from tests.data.test_corpora import hub, write_parquet  # noqa: F401
from tests.data.test_packing import wrap_rows
from tests.data.test_sources import FIXTURES
from tests.evaluate.test_perplexity import small
from tests.text.models import tokenizer


def load_set(source: str, words: Tokenizer, length: int) -> EvalDataset:
    return load_eval_data(source, words, length, split=SPLIT, rows="wrapped")


def jsonl(**fields: str) -> str:
    """Twelve documents, with their numbers in place of {n}."""
    documents = [{name: text.format(n=n) for name, text in fields.items()} for n in range(12)]
    return "".join(json.dumps(each) + "\n" for each in documents)


WIKI = {
    "wiki.valid.tokens": (FIXTURES / "wiki.valid.tokens").read_text("utf-8"),
    "wiki.test.tokens": " \n = Another split = \n" * 30,
}
# Files of each set, with sentences of our own; only WikiText's are real (see tests/data/fixtures).
FILES: dict[str, dict[str, str]] = {
    "lambada": {
        "lambada_test.jsonl": jsonl(text="“Is it {n}?” she asked. He did not know , and went home")
    },
    "ptb": {
        "ptb.valid.txt": " the board did n't say how many <unk> were sold \n its shares rose N N to $ N a share \n"
        * 8,
        "ptb.test.txt": " this is the other split \n" * 30,
    },
    "wikitext2": WIKI,
    "wikitext103": WIKI,
    "lm1b": {
        "news.en.heldout-00000-of-00050": 'The cat \'s asleep , they say .\n" Why not ? " he asked ( again ) .\n'
        * 8
    },
    "ag_news": {
        "test.csv": "".join(
            f'"{n % 4 + 1}","Title {n}","A ""short"" report , of ours."\r\n' for n in range(12)
        )
    },
    "pubmed": {
        "valid.jsonl": jsonl(
            title="T", abstract="we looked at {n} cells , and found them ( all ) ."
        )
    },
    "arxiv": {
        "valid.jsonl": jsonl(article="we prove lemma {n} . it follows .\n", abstract="not this")
    },
}
# What the first documents become, by the lineage's clean-up.
BEGINNINGS = {
    "lambada": '\n"Is it 0?" she asked. He did not know , and went home',
    "ptb": "the board didn't say how many ? were sold",
    "wikitext2": "",  # a blank line is a document
    "wikitext103": "",
    "lm1b": "The cat's asleep, they say.",
    "ag_news": 'Title 0 A "short" report , of ours.',
    "pubmed": "we looked at 0 cells, and found them (all) .",  # the blank goes behind a word only
    "arxiv": "we prove lemma 0. it follows.\n",
}


def write_sets(root: Path) -> Path:
    for name, files in FILES.items():
        (root / name).mkdir(parents=True)
        for file, text in files.items():
            (root / name / file).write_text(text, "utf-8", newline="")
    return root


def test_the_table_names_corpora_and_the_papers_numbers() -> None:
    assert set(SETS) == set(FILES) and [find_set(name) for name in SETS] == list(SETS)
    for found in SETS.values():
        assert CORPORA[found.corpus].splits[SPLIT] in ("validation", "test")
        assert len(found.paper) == len(PAPER) and found.documents > 1000
    is_test = {name for name in SETS if CORPORA[SETS[name].corpus].splits["valid"] == "test"}
    assert is_test == {"lambada", "lm1b", "ag_news"}  # which have no other
    lineage = ["lm1b-gpt2", "wikitext-2", "scientific_papers_arxiv", "ptb"]
    assert [find_set(name) for name in lineage] == ["lm1b", "wikitext2", "arxiv", "ptb"]


def test_a_folder_of_sets(tmp_path: Path) -> None:
    write_sets(tmp_path)
    assert locate_set("ptb", data_dir=tmp_path) == f"ptb:{tmp_path / 'ptb'}"
    assert (
        locate_set("pubmed", data_dir=tmp_path) == f"scientific_papers_pubmed:{tmp_path / 'pubmed'}"
    )
    (tmp_path / "wikitext2").rename(tmp_path / "wikitext-2")
    assert locate_set("wikitext2", data_dir=tmp_path) == f"wikitext2:{tmp_path / 'wikitext-2'}"
    (tmp_path / "lambada").rename(tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"not in .*put its files into a folder 'lambada' there"
    ):
        locate_set("lambada", data_dir=tmp_path)


def test_sets_of_the_hub(hub: Path) -> None:  # noqa: F811
    repo = hub / f"{CORPORA['ptb'].hub}@refs.convert.parquet/penn_treebank"
    sentences = ["it is n't so", "no <unk> was found"] * 12
    write_parquet(repo / "train/0000.parquet", [{"sentence": "not this"}])
    write_parquet(repo / "validation/0000.parquet", [{"sentence": each} for each in sentences])
    assert locate_set("ptb") == "ptb"
    reading = load_set("ptb", tokenizer("bytes"), 24)
    text = "".join(
        chr(token) for row in reading.rows.fetch([0, 1])[0].tolist() for token in row if token < 256
    )
    assert text.startswith("it isn't sono ? was found")
    assert reading.settings["identity"]["kind"] == "hub" and reading.settings["split"] == "valid"
    with pytest.raises(FileNotFoundError, match=r"lambada: .*from the Hub failed.*give --data-dir"):
        locate_set("lambada")


@pytest.mark.parametrize("name", SETS)
def test_every_form_becomes_the_lineages_rows(tmp_path: Path, name: str) -> None:
    root, words = write_sets(tmp_path), tokenizer("gpt2")
    reading = load_set(locate_set(name, data_dir=root), words, 32)
    rows, lengths = reading.rows.fetch(torch.arange(len(reading.rows)))
    assert lengths is None and set(rows[:, 0].tolist()) == {words.bos_id} == set(
        rows[:, -1].tolist()
    )
    first = words.encode(BEGINNINGS[name])[:30]
    assert rows[0, 1 : 1 + len(first)].tolist() == first
    if len(first) < 30:
        assert rows[0, 1 + len(first)] == words.eos_id  # behind every document
    texts = [text for text, _ in open_source(locate_set(name, data_dir=root), split="valid").read()]
    stream = [token for text in texts for token in [*words.encode(text), words.eos_id]]
    expected, rest = wrap_rows(stream, 32, words.bos_id, words.eos_id)
    assert rows.tolist() == expected.tolist() and reading.settings["tokens_dropped"] == rest
    assert (reading.settings["stand_in"] is not None) == (name == "pubmed")


PAPERS: dict[str, Any] = {
    "stand_in": None, "tokenizer": "gpt2", "tokenizer_sha256": tokenizer("gpt2").sha256, "unk_marks": 0,
    "length": 1024, "rows": "wrapped", "limit": None, "row_count": 80, "documents": 3_365,
    "documents_dropped": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"stand_in": "novels"}, ["stand-in: novels"]),
        (
            {"tokenizer": "my", "tokenizer_sha256": "0"},
            ["tokenizer my, not gpt2: perplexities per token do not compare"],
        ),
        (
            {"unk_marks": 1234},
            ["1,234 <unk> marks in the text, where the lineage reads the raw form"],
        ),
        ({"length": 128}, ["rows of 128 tokens, not 1024"]),
        ({"rows": "documents"}, ["rows documents, not wrapped"]),
        ({"limit": 80, "documents_dropped": None}, ["only the first 80 rows"]),
        ({"documents": 70}, ["75 documents, where the whole split has 3,370"]),
    ],
)
def test_deviations_from_the_paper_are_listed(change: dict[str, Any], reasons: list[str]) -> None:
    compared = compare_with_paper("ptb", PAPERS | change)
    assert compared["deviations"] == reasons and compared["is_comparable"] == (not reasons)


def test_plain_text_in_place_of_articles_is_a_stand_in(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("We find that cells grow.\n<|endoftext|>\nThey do.\n" * 9)
    reading = load_set(f"scientific_papers_arxiv:{tmp_path}", tokenizer("bytes"), 16)
    assert reading.settings["stand_in"] == "plain text, in place of the published articles"


def test_an_entry_is_the_estimate_with_the_papers_numbers(tmp_path: Path) -> None:
    root, model = write_sets(tmp_path), small()
    found = zero_shot(model, ["ptb", "pubmed"], data_dir=str(root), seed=3)
    ptb, pubmed = found["sets"]
    data = load_set(locate_set("ptb", data_dir=root), tokenizer("bytes"), 32)
    expected = estimate_nll(model.model, data.rows, draws=2, seed=3, documents=data.documents)
    assert ptb["nll"] == pytest.approx(expected.nll, abs=1e-5) and ptb["tokens"] == expected.tokens
    assert ptb["set"] == "ptb" and ptb["rows_hash"] == data.rows_hash and ptb["model"] == "small"
    assert ptb["paper"] == {"ADLM": 95.37, "MDLM": 95.26, "AR": 82.05} and not ptb["is_comparable"]
    assert ptb["deviations"] == compare_with_paper("ptb", data.settings)["deviations"]
    assert (
        pubmed["paper"] is None
        and pubmed["label"] == "stand-in: abstracts, in place of full articles"
    )
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def test_workers_and_a_resumed_run_change_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data_dir": write_sets(tmp_path / "sets"),
        "out": tmp_path / "out",
        "sets": ["arxiv"],
    }
    (line,) = zero_shot(small(), **options)["sets"]
    assert zero_shot(small(), **options, workers=2)["sets"] == [line]
