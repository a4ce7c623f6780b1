"""The report: one call, one folder; pages that show the results and nothing else, and let no text become markup."""

import copy
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from adlm import load
from adlm.evaluate.reports import TITLES, Section, hide_paths, name_models, report, write_pages
from adlm.evaluate.results import EvalResult, Table, TableColumn
from tests.cli.terminal import answer_json, trained
from tests.evaluate.scorers import causal, causal_folder, documents, needs, with_matplotlib
from tests.evaluate.test_zeroshot import write_sets
from tests.training.runs import TEXT, shelf

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.])")
EVIL = '<script>alert("1")</script> ![x](javascript:x) | `a` ``` <b>&amp; \x00\x1b[31m'
FILES = ("report.json", "report.html", "report.md")


@cache
def quick_report() -> tuple[EvalResult, Path]:
    """A report about two tiny models, without a scoring model."""
    text, out = shelf() / "report-held-out.txt", shelf() / "report"
    text.write_text(TEXT[:6000], "utf-8")
    lms = [load(trained(name), device="cpu") for name in ("adlm", "ar")]
    command = f"adlm eval report {trained()} --data {text}"
    return report(
        lms, str(text), n=2, length=16, steps=[4], limit=8, command=command, out=str(out)
    ), out


class Reader(HTMLParser):
    """The words and tags of a page; checks that tags are closed in order and that nothing is a script."""

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
        self.links += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "action", "data")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def list_leaves(value: Any) -> list[Any]:
    """All numbers, texts and keys of the data."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in list_leaves(each)] + list(value)
    return (
        [leaf for each in value for leaf in list_leaves(each)]
        if isinstance(value, list)
        else [value]
    )


def find_unknown_numbers(page: str, data: dict[str, Any]) -> set[str]:
    """Numbers of a page that are in no text of the data and no rounding of a number in it."""
    leaves = list_leaves(data)
    known = {token for leaf in leaves if isinstance(leaf, str) for token in NUMBER.findall(leaf)}
    for leaf in leaves:
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            known |= {f"{abs(leaf):,.{digits}f}" for digits in range(6)} | {str(leaf)}
    return {token for token in NUMBER.findall(page) if token.rstrip(",") not in known}


@with_matplotlib
def test_the_pages_show_the_results_and_nothing_else() -> None:
    result, out = quick_report()
    data = json.loads((out / "report.json").read_text("utf-8"))
    html, markdown = ((out / name).read_text("utf-8") for name in FILES[1:])
    page = Reader(html)
    words = " ".join(page.words)
    assert data == json.loads(json.dumps(result.as_dict()))
    assert len(NUMBER.findall(words)) > 60 and "987.654" in find_unknown_numbers("987.654", data)
    for section in data["sections"]:
        assert section["title"] in words and f"## {section['title']}" in markdown
        assert not section["reason"] or f"Not measured: {section['reason']}." in words
    states = {section["name"]: bool(section["reason"]) for section in data["sections"]}
    assert states == {name: name not in ("perplexity", "anchors") for name in TITLES}
    body = markdown.split("---\n", 2)[2].replace("\\", "")
    assert find_unknown_numbers(words, data) == find_unknown_numbers(body, data) == set()
    entry = data["sections"][0]["results"][0]["models"][0]
    assert f"≤ {entry['nll']:,.4f} ± {entry['se']:,.4f}" in words
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "script" not in page.tags and "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html
    for name in re.findall(r"\]\(([^)]+)\)", markdown):
        assert (out / name).is_file()


@with_matplotlib
def test_no_path_of_this_machine_is_published() -> None:
    _, out = quick_report()
    for name in FILES:
        whole = (out / name).read_text("utf-8")
        assert str(shelf()) not in whole and "run-adlm" in whole and "report-held-out.txt" in whole
    kept = {
        "text": "see /usr/lib/x",
        "link": "https://a.b/c/d",
        "source": "ptb:/data/sets/ptb.txt",
        "share": "1/2/3",
    }
    assert hide_paths(kept, paths=[]) == kept | {"source": "ptb:ptb.txt"}
    assert hide_paths([{"x": "my/data.txt, wrapped"}], paths=["my/data.txt"]) == [
        {"x": "data.txt, wrapped"}
    ]
    lm = load(trained(), device="cpu")
    two = [copy.copy(lm), copy.copy(lm)]
    two[0].name, two[1].name = "/x/one/run", "/x/two/run"
    assert [each.name for each in name_models(two)] == [
        "x-one-run",
        "x-two-run",
    ] and lm.name == trained()


@with_matplotlib
def test_the_same_call_writes_the_same_files() -> None:
    """Everything measured comes from the cache."""
    _, out = quick_report()
    before = {name: (out / name).read_bytes() for name in FILES}
    quick_report.__wrapped__()
    assert (out / "report.html").read_bytes() == before["report.html"]
    assert (out / "report.md").read_bytes() == before["report.md"]


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    """Wherever a text comes from: samples, names, titles, notes, warnings, commands."""

    def write(text: str) -> tuple[str, str]:
        table = Table(
            [TableColumn(text, is_text=True), TableColumn("x")],
            [[text, 1.0], [text, None]],
            title=text,
            notes=[text],
        )
        section = Section("code", TITLES["code"], text, tables=[table], warnings=[text])
        content = {
            "title": text,
            "models": table,
            "summary": table,
            "origin": {text: text},
            "command": text,
        }
        paths = write_pages(content | {"sections": [section]}, {"license": "mit"}, tmp_path)
        return paths[0].read_text("utf-8"), paths[1].read_text("utf-8")

    (page, text), (clean, plain) = write(EVIL), write("plain")
    assert Reader(page).tags == Reader(clean).tags and not {"script", "b"} & set(Reader(page).tags)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", page + text)
    outside = re.sub(
        r"^(`{3,})text\n.*?\n\1$", "", text.split("---\n", 2)[2], flags=re.MULTILINE | re.DOTALL
    )
    assert "<" not in outside and "](javascript" not in outside.replace("\\]", "")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {3}
    assert text.count("\n## ") == plain.count("\n## ")


@with_matplotlib
def test_the_hub_reads_the_front_matter() -> None:
    from huggingface_hub import ModelCard

    result, out = quick_report()
    card = ModelCard((out / "report.md").read_text("utf-8")).data
    assert card.license == "unknown" and card.language == ["en"] and card.library_name == "adlm"
    assert "diffusion" in card.tags and card.pipeline_tag == "text-generation"
    results = {
        (each.metric_name, each.dataset_name, each.metric_value) for each in card.eval_results
    }
    assert results == {(each["name"], each["data"], each["value"]) for each in result["metrics"]}
    assert {each.metric_type for each in card.eval_results} == {"perplexity", "bits_per_byte"}


def drop_times(value: Any) -> Any:
    """The data without what depends on the machine."""
    timed = ("seconds", "seconds_sd", "timings", "settings", "provenance", "tables")
    if isinstance(value, dict):
        return {key: drop_times(each) for key, each in value.items() if key not in timed}
    return [drop_times(each) for each in value] if isinstance(value, list) else value


@pytest.mark.slow  # `quick_report` has most of it
@with_matplotlib
def test_one_command_measures_everything_and_the_batch_changes_nothing(tmp_path: Path) -> None:
    needs("transformers", "mauve")
    text, out, sets = tmp_path / "prose.txt", tmp_path / "report", write_sets(tmp_path / "sets")
    text.write_text("\n<|endoftext|>\n".join(documents()[:60]), "utf-8")
    words = (
        trained(),
        trained("ar"),
        "--data",
        text,
        "--judge",
        causal_folder(),
        "--code",
        "--batch",
        1,
    )
    words = (
        *words,
        "--n",
        4,
        "--length",
        16,
        "--steps",
        "4,8",
        "--samplers",
        "ancestral",
        "--limit",
        8,
    )
    data = answer_json(
        "eval", "report", *words, "--zeroshot-dir", sets, "--out", out, "--device", "cpu"
    )
    reasons = {
        section["name"]: section["reason"] for section in data["sections"] if section["reason"]
    }
    assert set(reasons) <= {"code"} and "functions" in reasons.get(
        "code", "functions"
    )  # the model's rows are short
    assert {each["type"] for each in data["metrics"]} == {
        "perplexity",
        "bits_per_byte",
        "gen_ppl",
        "mauve",
        "entropy",
    }
    assert set(data["files"]) >= {"report.html", "report.md", "frontier.svg"}
    for name in FILES:
        assert str(tmp_path) not in (out / name).read_text("utf-8")
    lms, other = [load(trained(name), device="cpu") for name in ("adlm", "ar")], tmp_path / "other"
    size: dict[str, Any] = {
        "n": 4,
        "length": 16,
        "steps": [4, 8],
        "samplers": ["ancestral"],
        "limit": 8,
        "batch": 3,
    }
    again = report(lms, text, scorer=causal(), zeroshot_dir=sets, code=True, **size, out=other)
    one, two = (
        list_leaves(drop_times(each["sections"]))
        for each in (data, json.loads(json.dumps(again.metrics)))
    )
    assert len(one) == len(two) > 1000
    for value, expected in zip(one, two, strict=True):
        assert value == (
            pytest.approx(expected, rel=1e-5, abs=1e-6) if isinstance(expected, float) else expected
        )
