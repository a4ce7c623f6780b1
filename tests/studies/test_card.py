"""A card shows what is in its data and nothing else, says what was not measured, and lets no text become a page."""

import copy
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from adlm import load
from adlm.evaluate.likelihood import unigram_nll
from adlm.evaluate.reading import read
from adlm.studies.card import SECTIONS, baselines, facts_of, make_card, scrubbed
from adlm.studies.pages import html_of, markdown_of, pictures_of, point_of, study_of, write_pages
from tests.cli.terminal import trained
from tests.studies.answered import answers, held_out, sample_figures
from tests.studies.drawn import with_matplotlib

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])")
EVIL = '<script>alert("1")</script> ![x](javascript:x) | `a` ``` <b>&amp; \x00\x1b[31m'


@cache
def card_of(without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A card of two tiny models, as JSON has it."""
    lms = [load(trained(name), device="cpu") for name in ("adlm", "ar")]
    found = {name: each for name, each in answers().items() if name not in without}
    if "samples" not in without:
        found["samples"] = [sample_figures(trained())]
    given = [baselines(lms[0], held_out(), held_out(), limit=6)]
    made = make_card(
        [facts_of(lm) for lm in lms],
        found | {"ppl": [*found.get("ppl", []), *given]} if "ppl" in found else found,
        {name: f"nobody measured {name}" for name in without},
        {name: [f"adlm eval {name}"] for name in found},
        provenance={"commit": "abc", "device": "cpu", "versions": {"adlm": "1.2.3"}},
        data={"held-out.txt": "0" * 64},
        command="adlm eval card",
        license="apache-2.0",
        language="en",
        tags=["diffusion", "adlm"],
    )
    names = {trained(name): f"run-{name}" for name in ("adlm", "ar")} | {str(held_out()): "held-out.txt"}
    whole: dict[str, Any] = json.loads(json.dumps(scrubbed(made, names)))
    return whole


class Reader(HTMLParser):
    """The words of a page, its tags, and whether they close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def leaves(value: Any) -> list[Any]:
    """Every number and every text of the data."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)] + list(value)
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list) else [value]


def unknown_numbers(shown: str, card: dict[str, Any]) -> set[str]:
    """Numbers of a text that are in no text of the card and no rounding of a number of it."""
    known = {token for leaf in leaves(card) if isinstance(leaf, str) for token in NUMBER.findall(leaf)}
    for leaf in leaves(card):
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            known |= {f"{abs(leaf):,.{digits}f}" for digits in range(6)} | {str(leaf)}
    return {token for token in NUMBER.findall(shown) if token not in known and token.rstrip(",") not in known}


def pages(card: dict[str, Any], folder: Path) -> tuple[str, str]:
    write_pages(card, folder)
    return (folder / "card.html").read_text("utf-8"), (folder / "card.md").read_text("utf-8")


@with_matplotlib
def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    names = {path.name for path in write_pages(card_of(), one)}
    assert names == {"card.html", "card.md", "frontier-1.svg", "anchors-1.svg"}
    write_pages(json.loads(json.dumps(card_of())), two)
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()


@with_matplotlib
def test_every_number_on_the_pages_is_in_the_data(tmp_path: Path) -> None:
    card = card_of()
    page, text = pages(card, tmp_path)
    shown = " ".join(Reader(page).words)
    assert len(NUMBER.findall(shown)) > 150
    assert unknown_numbers(shown, card) == set()
    body = text.split("---\n", 2)[2]
    assert unknown_numbers(body.replace("\\", ""), card) == set()
    assert "987.654" in unknown_numbers("987.654", card)  # the check bites


@with_matplotlib
def test_every_section_shows_its_figures(tmp_path: Path) -> None:
    card = card_of()
    page, text = pages(card, tmp_path)
    assert [part["name"] for part in card["sections"]] == list(SECTIONS)
    for part in card["sections"]:
        assert part["is_measured"] and (part["tables"] or part["texts"]), part["name"]
        for shown in (page, text):
            assert part["title"] in shown
    words = " ".join(Reader(page).words)
    ppl = answers()["ppl"][0]
    assert f"≤ {ppl['nll']:,.4f} ± {ppl['se']:,.4f}" in words and f"{ppl['unmasking']['nll']:,.4f}" in words
    point = answers()["frontier"][0]["points"][0]
    assert f"{point['entropy']:.3f} ± {point['entropy_se']:.3f}" in words
    assert "185.2 ± 7.9" in words and "0.321" in words and "few texts" in words  # Gen-PPL and MAUVE together
    assert "unigram" in words and "bigram" in words and "pass@1" in words
    written = [each["text"] for each in card["sections"][-1]["texts"]]
    assert len(written) == 4 and all(
        re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", each) in words for each in written
    )


@pytest.mark.parametrize("name", list(SECTIONS))
def test_what_was_not_measured_is_said(name: str) -> None:
    card = card_of((name,))
    part = next(each for each in card["sections"] if each["name"] == name)
    assert not part["is_measured"] and part["tables"] == part["pictures"] == []
    blank = {each["name"]: b"" for part in card["sections"] for each in part["pictures"]}
    for shown in (html_of(card, blank), markdown_of(card)):
        assert f"Not measured: nobody measured {name}." in shown


@with_matplotlib
def test_no_text_becomes_a_page(tmp_path: Path) -> None:
    """Wherever a text comes from: samples, names of models, data, captions, commands."""
    card = copy.deepcopy(card_of())
    card["models"][0]["name"] = EVIL
    for part in card["sections"]:
        part["title"] = part["read"] = EVIL
        part["commands"] = [EVIL]
        for table in part["tables"]:
            table["caption"] = table["caption"] and EVIL
            table["columns"][0] = table["rows"][0][0] = EVIL
        for each in part["texts"]:
            each["text"] = each["model"] = EVIL
        for each in part["pictures"]:
            each["alt"] = EVIL
    page, text = pages(card, tmp_path)
    clean = Reader(html_of(card_of(), pictures_of(card_of(), tmp_path)))
    assert Reader(page).tags == clean.tags and not {"script", "b"} & set(clean.tags)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", page + text)
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text.split("---\n", 2)[2], flags=re.MULTILINE | re.DOTALL)
    assert "<" not in outside and "](javascript" not in outside.replace("\\]", "")
    assert all(
        len(re.findall(r"(?<!\\)\|", line)) == line.count("|") - line.count("\\|") for line in outside.splitlines()
    )
    plain = markdown_of(card_of())
    assert text.count("\n## ") == plain.count("\n## ")


@with_matplotlib
def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page, text = pages(card_of(), tmp_path)
    found = Reader(page)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in found.links) and len(found.links) == 2
    assert "script" not in found.tags and "url(" not in page and "@import" not in page
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / name).is_file()


@with_matplotlib
def test_the_hub_reads_the_front_matter(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    card = card_of()
    _, text = pages(card, tmp_path)
    found = ModelCard(text).data
    assert found.license == "apache-2.0" and found.language == ["en"] and found.library_name == "adlm"
    assert found.tags == ["diffusion", "adlm"] and found.pipeline_tag == "text-generation"
    results = {(each.metric_name, each.dataset_name, each.metric_value) for each in found.eval_results}
    assert results == {(each["name"], each["data"], each["value"]) for each in card["metrics"]}
    assert {each.metric_type for each in found.eval_results} >= {"perplexity", "bits_per_byte", "gen_ppl", "mauve"}
    again = ModelCard(str(ModelCard(text)))
    assert again.data.to_dict() == found.to_dict()
    bare = ModelCard(markdown_of(card | {"metrics": []})).data
    assert bare.eval_results is None


def test_no_path_of_this_machine_is_left() -> None:
    whole = json.dumps(card_of())
    assert str(held_out().parent) not in whole and "run-adlm" in whole
    assert scrubbed({"a": ["x/y/z", {"files": 1}], "b": 2}, {"x/y": "y"}) == {"a": ["y/z", {}], "b": 2}
    kept = {"text": "see /usr/lib/x", "link": "https://a.b/c/d", "source": "ptb:/data/sets/ptb.txt", "share": "1/2/3"}
    assert scrubbed(kept, {}) == kept | {"source": "ptb:ptb.txt"}
    assert scrubbed({"texts": "/data/sets/x.txt"}, {}) == {"texts": "x.txt"}
    assert scrubbed({"texts": ["/data/sets/x.txt"]}, {}) == {"texts": ["/data/sets/x.txt"]}
    assert scrubbed({"source": "/data/sets/ptb.txt, wrapped"}, {}) == {"source": "ptb.txt, wrapped"}
    assert scrubbed("/a/b/c", {"/a/b": "b", "/a/b/c": "c"}) == "c"  # the longest first


@with_matplotlib
def test_points_and_studies_come_back_from_json() -> None:
    found = answers()
    for row in found["frontier"][0]["points"]:
        assert json.loads(json.dumps(point_of(row).as_dict())) == row
    (study,) = found["anchors"][0]["models"]
    back = study_of(study).as_dict()
    assert back["losses"] == study["losses"] and back["samples"] == study["samples"]


def test_baselines_are_of_the_same_rows_and_counts() -> None:
    lm = load(trained(), device="cpu")
    found = baselines(lm, held_out(), held_out(), limit=6)
    rows = read(held_out(), lm.tokenizer, lm.model.config.length, limit=6)
    whole = read(held_out(), lm.tokenizer, lm.model.config.length)
    import torch

    given, _ = whole.rows.fetch(torch.arange(len(whole.rows)))
    asked, _ = rows.rows.fetch(torch.arange(len(rows.rows)))
    counts = torch.bincount(given.flatten().long(), minlength=lm.model.config.vocab_size)
    assert found["baselines"]["unigram"]["nll"] == pytest.approx(unigram_nll(counts, asked.long()), rel=1e-5)
    assert found["baselines"]["bigram"]["nll"] < found["baselines"]["unigram"]["nll"]
    assert found["rows_hash"] == rows.rows_hash == answers()["ppl"][0]["rows_hash"]
    assert found["baselines"]["unigram"]["tokens"] == answers()["ppl"][0]["tokens"]
