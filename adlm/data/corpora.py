"""The data sets that the lineage trains and evaluates on, as a table: where they are, and how they are read.

The Hub's repositories hold Parquet; where a repository's own branch holds a script, which `datasets` no longer runs,
`revision` is the branch of the Hub's conversion. The same content may lie in local files: `open_source("lm1b:PATH")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Corpus:
    """A named data set: the Hub's names for it, how its text becomes documents, and what the paper does with it."""

    hub: str
    config: str | None
    column: str  # alternatives by |, columns joined by a blank by +, numbers where a table has no header
    splits: Mapping[str, str]  # ours to the Hub's, which may be a slice: "train[:-100000]"
    documents: str  # the rule for plain text files; rows of a table are documents
    detokenizer: str | None
    rows: str  # "wrapped": one stream cut into rows; "documents": a document to a row
    tokenizer: str
    length: int
    note: str
    revision: str | None = None
    files: tuple[str, ...] = ()  # names, as patterns, of files without a suffix that says what they are
    # Where one plain text file holds every split, the characters of each.
    characters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # columns that are not quite it: what to call them


HELD_OUT = {"train": "train", "valid": "validation", "test": "test"}
TEST_ONLY = {"train": "train", "valid": "test", "test": "test"}  # the lineage validates on the test split here
OPENWEBTEXT_HELD_OUT = {"train": "train[:-100000]", "valid": "train[-100000:]"}
# What is read in place of the table of articles, by its columns; plain text has none.
ARTICLES = {"abstract": "abstracts, in place of full articles", "": "plain text, in place of the published articles"}
SCIENTIFIC = "an article to a document; abstracts alone, or plain text, are taken and labelled as a stand-in"

CORPORA: dict[str, Corpus] = {
    "lm1b": Corpus(
        hub="billion-word-benchmark/lm1b",
        config="plain_text",
        revision=CONVERTED,
        column="text",
        splits=TEST_ONLY,
        documents="line",
        detokenizer="lm1b",
        rows="documents",
        tokenizer="bert-base-uncased",
        length=128,
        note="One Billion Word benchmark: a sentence to a document, news.en.heldout-* is the test split",
        files=("news.en*",),
    ),
    "openwebtext-split": Corpus(
        hub="Skylion007/openwebtext",
        config="plain_text",
        column="text",
        splits=OPENWEBTEXT_HELD_OUT,
        documents="auto",
        detokenizer=None,
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="OpenWebText: the last 100,000 documents are held out, as in the lineage",
    ),
    "wikitext2": Corpus(
        hub="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        column="text",
        splits=HELD_OUT,
        documents="every-line",
        detokenizer="wikitext",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="a line to a document, blank ones too, as the Hub's rows have it; the raw form has no <unk>",
    ),
    "wikitext103": Corpus(
        hub="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        column="text",
        splits=HELD_OUT,
        documents="every-line",
        detokenizer="wikitext",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="a line to a document, blank ones too, as the Hub's rows have it; the raw form has no <unk>",
    ),
    "ptb": Corpus(
        hub="ptb-text-only/ptb_text_only",
        config="penn_treebank",
        revision=CONVERTED,
        column="sentence",
        splits=HELD_OUT,
        documents="line",
        detokenizer="ptb",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="Mikolov's Penn Treebank: a sentence to a document; LDC text, not to be passed on",
    ),
    "lambada": Corpus(
        hub="EleutherAI/lambada_openai",
        config="default",
        column="text",
        splits={"valid": "test", "test": "test"},
        documents="line",
        detokenizer="lambada",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="OpenAI's test file of 5,153 passages; there is nothing to train on",
    ),
    "ag_news": Corpus(
        hub="fancyzhx/ag_news",
        config="default",
        column="text|Title+Description|1+2",
        splits=TEST_ONLY,
        documents="line",
        detokenizer=None,
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note="title and description, joined by a blank, as the Hub's text column has it; non-commercial use",
    ),
    "scientific_papers_pubmed": Corpus(
        hub="armanc/scientific_papers",
        config="pubmed",
        revision=CONVERTED,
        column="article|abstract",
        splits=HELD_OUT,
        documents="auto",
        detokenizer="scientific_papers",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note=SCIENTIFIC,
        stand_ins=ARTICLES,
    ),
    "scientific_papers_arxiv": Corpus(
        hub="armanc/scientific_papers",
        config="arxiv",
        revision=CONVERTED,
        column="article|abstract",
        splits=HELD_OUT,
        documents="auto",
        detokenizer="scientific_papers",
        rows="wrapped",
        tokenizer="gpt2",
        length=1024,
        note=f"{SCIENTIFIC}; the Hub's conversion has the first 5 GB of the training split",
        stand_ins=ARTICLES,
    ),
    "text8": Corpus(
        hub="afmck/text8",
        config="default",
        column="text",
        splits=HELD_OUT,
        documents="file",
        detokenizer=None,
        rows="wrapped",
        tokenizer="characters",
        length=256,
        note="one document of lower-case letters and blanks; 90M, 5M and 5M characters",
        files=("text8", "text8.gz"),
        characters={
            "train": (0, 90_000_000),
            "valid": (90_000_000, 95_000_000),
            "test": (95_000_000, 100_000_000),
        },
    ),
}

ALIASES = {"openwebtext": "openwebtext-split", "wikitext-2": "wikitext2", "wikitext-103": "wikitext103"}


def find_corpus(name: str) -> Corpus:
    """The data set of this name, or of one that it also goes by."""
    known = ALIASES.get(name, name)
    if known not in CORPORA:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join([*CORPORA, *ALIASES])}")
    return CORPORA[known]
