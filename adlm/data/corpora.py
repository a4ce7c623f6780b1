"""Named datasets, those of the MDLM lineage and a bundled one: where they are on the Hub, and their documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# The Hub's conversion to Parquet, for repositories with a loading script on the main branch: `datasets` runs none.
CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Corpus:
    """A named dataset: its Hub location, its document rule and the paper's settings; the defaults are plain text's."""

    hub: str = ""
    config: str | None = None
    column: str | None = (
        None  # alternatives separated by |, columns joined with a space by +, numbers without a header
    )
    splits: Mapping[str, str] = field(
        default_factory=dict
    )  # our split to the Hub's, or a slice: "train[:-100000]"
    documents: str = "auto"  # document rule for plain text files; in tables a row is a document
    detokenizer: str | None = None
    rows: str = "wrapped"  # "wrapped": one stream cut into rows; "documents": one document per row
    tokenizer: str = "gpt2"
    length: int = 1024
    revision: str | None = None
    files: tuple[str, ...] = ()  # file name patterns of text files without a known suffix
    # Character range of each split where one plain text file holds all splits.
    characters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(
        default_factory=dict
    )  # columns that only approximate the dataset: a label
    bundled: str = ""  # the file in adlm/data/bundled, of a dataset that comes with the package


HELD_OUT = {"train": "train", "valid": "validation", "test": "test"}
TEST_ONLY = {
    "train": "train",
    "valid": "test",
    "test": "test",
}  # the lineage validates on the test split here
# fmt: off
WIKITEXT2 = Corpus(
    "Salesforce/wikitext", "wikitext-2-raw-v1", "text", HELD_OUT, documents="every-line", detokenizer="wikitext",
)
PUBMED = Corpus(
    "armanc/scientific_papers", "pubmed", "article|abstract", HELD_OUT, revision=CONVERTED,
    detokenizer="scientific_papers",
    # Columns read instead of the articles; plain text has none.
    stand_ins={
        "abstract": "abstracts, in place of full articles", "": "plain text, in place of the published articles",
    },
)

CORPORA: dict[str, Corpus] = {
    "held-out": Corpus(  # passages of books that the bundled models have not seen
        rows="documents", tokenizer="adlm-prose", length=256, bundled="held-out.jsonl.gz",
    ),
    "lm1b": Corpus(
        "billion-word-benchmark/lm1b", "plain_text", "text", TEST_ONLY, revision=CONVERTED, documents="line",
        detokenizer="lm1b", rows="documents", tokenizer="bert-base-uncased", length=128, files=("news.en*",),
    ),
    "openwebtext-split": Corpus(
        "Skylion007/openwebtext", "plain_text", "text", {"train": "train[:-100000]", "valid": "train[-100000:]"},
    ),
    "wikitext2": WIKITEXT2,
    "wikitext103": replace(WIKITEXT2, config="wikitext-103-raw-v1"),
    "ptb": Corpus(  # LDC text, not to be redistributed
        "ptb-text-only/ptb_text_only", "penn_treebank", "sentence", HELD_OUT, revision=CONVERTED, documents="line",
        detokenizer="ptb",
    ),
    "lambada": Corpus(  # OpenAI's test file; there is no training split
        "EleutherAI/lambada_openai", "default", "text", {"valid": "test", "test": "test"}, documents="line",
        detokenizer="lambada",
    ),
    "ag_news": Corpus(  # title and description, as in the Hub's text column
        "fancyzhx/ag_news", "default", "text|Title+Description|1+2", TEST_ONLY, documents="line",
    ),
    "scientific_papers_pubmed": PUBMED,
    "scientific_papers_arxiv": replace(PUBMED, config="arxiv"),
    "text8": Corpus(
        "afmck/text8", "default", "text", HELD_OUT, documents="file", tokenizer="characters", length=256,
        files=("text8", "text8.gz"),
        characters={"train": (0, 90_000_000), "valid": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)},
    ),
}
# fmt: on


def find_corpus(spec: object) -> Corpus | None:
    """Return the dataset that a source names, also in the form NAME:PATH; None for a path or an unknown name."""
    return CORPORA.get(spec.partition(":")[0]) if isinstance(spec, str) else None
