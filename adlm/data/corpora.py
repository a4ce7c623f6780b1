"""Named data sets of the MDLM lineage: their place on the Hugging Face Hub and how their text becomes documents.

The Hub's repositories hold Parquet files. Where the main branch of a repository holds a loading script, which
`datasets` no longer runs, `revision` is the branch with the Hub's conversion. `open_source("lm1b:PATH")` reads the same
content from local files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Corpus:
    """A named data set: its Hub location, its document rule and the paper's settings for it."""

    hub: str
    config: str | None
    column: str  # alternatives separated by |, columns joined with a space by +, numbers where there is no header
    splits: Mapping[str, str]  # our split to the Hub's, which may be a slice: "train[:-100000]"
    documents: str = "auto"  # document rule for plain text files; in tables a row is a document
    detokenizer: str | None = None
    rows: str = "wrapped"  # "wrapped": one stream cut into rows; "documents": one document per row
    tokenizer: str = "gpt2"
    length: int = 1024
    revision: str | None = None
    files: tuple[str, ...] = ()  # file name patterns of text files without a known suffix
    # Character range of each split where one plain text file holds all splits.
    characters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # columns that only approximate the data set: a label


HELD_OUT = {"train": "train", "valid": "validation", "test": "test"}
TEST_ONLY = {"train": "train", "valid": "test", "test": "test"}  # the lineage validates on the test split here
WIKITEXT2 = Corpus(
    hub="Salesforce/wikitext",
    config="wikitext-2-raw-v1",
    column="text",
    splits=HELD_OUT,
    documents="every-line",
    detokenizer="wikitext",
)
PUBMED = Corpus(
    hub="armanc/scientific_papers",
    config="pubmed",
    revision=CONVERTED,
    column="article|abstract",
    splits=HELD_OUT,
    detokenizer="scientific_papers",
    # Columns read instead of the articles; plain text has none.
    stand_ins={
        "abstract": "abstracts, in place of full articles",
        "": "plain text, in place of the published articles",
    },
)

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
        files=("news.en*",),
    ),
    "openwebtext-split": Corpus(
        hub="Skylion007/openwebtext",
        config="plain_text",
        column="text",
        splits={"train": "train[:-100000]", "valid": "train[-100000:]"},
    ),
    "wikitext2": WIKITEXT2,
    "wikitext103": replace(WIKITEXT2, config="wikitext-103-raw-v1"),
    "ptb": Corpus(  # LDC text, not to be redistributed
        hub="ptb-text-only/ptb_text_only",
        config="penn_treebank",
        revision=CONVERTED,
        column="sentence",
        splits=HELD_OUT,
        documents="line",
        detokenizer="ptb",
    ),
    "lambada": Corpus(
        hub="EleutherAI/lambada_openai",
        config="default",
        column="text",
        splits={"valid": "test", "test": "test"},
        documents="line",
        detokenizer="lambada",
    ),
    "ag_news": Corpus(
        hub="fancyzhx/ag_news",
        config="default",
        column="text|Title+Description|1+2",  # as in the Hub's text column
        splits=TEST_ONLY,
        documents="line",
    ),
    "scientific_papers_pubmed": PUBMED,
    "scientific_papers_arxiv": replace(PUBMED, config="arxiv"),
    "text8": Corpus(
        hub="afmck/text8",
        config="default",
        column="text",
        splits=HELD_OUT,
        documents="file",
        tokenizer="characters",
        length=256,
        files=("text8", "text8.gz"),
        characters={"train": (0, 90_000_000), "valid": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)},
    ),
}

ALIASES = {"openwebtext": "openwebtext-split", "wikitext-2": "wikitext2", "wikitext-103": "wikitext103"}


def find_corpus(name: str) -> Corpus:
    """Return the data set with this name or alias."""
    known = ALIASES.get(name, name)
    if known not in CORPORA:
        raise ValueError(f"data set {name!r} is unknown: choose one of {', '.join([*CORPORA, *ALIASES])}")
    return CORPORA[known]
