"""A card's data as files: card.html (one file, no script), card.md for a model page, and the pictures beside it.

Nothing is computed here and nothing is known but the data: the same card gives the same files.
"""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from adlm.data.shards import write_safely

Card = Mapping[str, Any]
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #d5d5d5; --dim: #5a5a5a; --soft: #f4f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --line: #3a3d42; --dim: #a5a8ad; --soft: #1f2226; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.n, th.n { text-align: right; } .dim { color: var(--dim); font-size: .9rem; } .none { font-style: italic; }
figure { margin: 1rem 0; overflow-x: auto; }
img { width: max(100%, 38rem); max-width: 60rem; height: auto; background: #fff; border-radius: 6px; padding: 6px; }
pre { white-space: pre-wrap; background: var(--soft); padding: .7rem; border-radius: 6px; font-size: .85rem; }
"""


def shown(cell: Any) -> str:
    """A cell as it is read; what is not known is a dash."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    digits = cell["digits"]
    text = f"{cell['sign']}{cell['value']:,.{digits}f}"
    return text if cell["se"] is None else f"{text} ± {cell['se']:,.{digits}f}"


def title_of(card: Card) -> str:
    """What the card is about."""
    return ", ".join(str(model["name"]) for model in card["models"])


def models_table(card: Card) -> dict[str, Any]:
    """The models as a table."""
    columns = ["model", "method", "parameters", "tokens a row", "vocabulary", "step", "weights"]

    def number(value: int) -> dict[str, Any]:
        return {"value": value, "se": None, "digits": 0, "sign": ""}

    rows = [
        [each["name"], each["method"], *(number(each[key]) for key in ("parameters", "length", "vocab_size", "step"))]
        + [each["weights_sha256"][:16]]
        for each in card["models"]
    ]
    return {"caption": "", "columns": columns, "rows": rows}


def origin_table(card: Card) -> dict[str, Any]:
    """Where the figures come from."""
    found = card["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    computed = dict.fromkeys(origin for part in card["sections"] for origin in part["origins"])
    rows = [["figures computed by", origin] for origin in computed]
    rows += [[f"page: {key}", str(value)] for key, value in found.items() if key != "versions"]
    rows += [["page: versions", versions]]
    rows += [["data", f"{name}, sha256 {digest}"] for name, digest in card["data"].items()]
    return {"caption": "", "columns": ["what", "which"], "rows": rows}


# HTML


def html_of(card: Card, pictures: Mapping[str, bytes]) -> str:
    """The card as one page that needs nothing else; `pictures` are SVG by name."""
    parts = [f"<h1>Evaluation of {_safe(title_of(card))}</h1>", _html_table(models_table(card))]
    parts += [_html_table(card["summary"])] if len(card["summary"]["columns"]) > 1 else []
    parts += [_html_section(part, pictures) for part in card["sections"]]
    parts += ["<h2>Where this comes from</h2>", _html_table(origin_table(card)), f"<pre>{_safe(card['command'])}</pre>"]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Evaluation of {_safe(title_of(card))}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _html_section(part: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    found = [f'<section id="{_safe(part["name"])}">', f"<h2>{_safe(part['title'])}</h2>"]
    if not part["is_measured"]:
        found.append(f'<p class="none">Not measured: {_safe(part["why"])}.</p>')
    for each in part["pictures"]:
        data = base64.b64encode(pictures[each["name"]]).decode()
        found.append(f'<figure><img alt="{_safe(each["alt"])}" src="data:image/svg+xml;base64,{data}"></figure>')
    found += [_html_table(each) for each in part["tables"]]
    for text in part["texts"]:
        found.append(f'<p class="dim">{_safe(told(text))}</p><pre>{_safe(text["text"])}</pre>')
    if part["is_measured"] and part["read"]:
        found.append(f'<p class="dim">{_safe(part["read"])}</p>')
    if part["commands"]:
        found.append(f"<pre>{_safe(chr(10).join([*part['commands'], *comments(part)]))}</pre>")
    return "\n".join([*found, "</section>"])


def _html_table(table: Mapping[str, Any]) -> str:
    numeric = [any(isinstance(row[i], Mapping) for row in table["rows"]) for i in range(len(table["columns"]))]
    classes = [' class="n"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{_safe(name)}</th>" for name, kind in zip(table["columns"], classes))
    rows = [
        "<tr>" + "".join(f"<td{kind}>{_safe(shown(cell))}</td>" for cell, kind in zip(row, classes)) + "</tr>"
        for row in table["rows"]
    ]
    caption = f'<p class="dim">{_safe(table["caption"])}</p>\n' if table["caption"] else ""
    body = "\n".join(rows)
    whole = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'{caption}<div class="scroll">{whole}</div>'


def _safe(text: object) -> str:
    return html.escape(_visible(str(text)))


def _visible(text: str) -> str:
    """Control characters, which no page may hold, as a mark that one stood there."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]", "\ufffd", text)


def told(text: Mapping[str, Any]) -> str:
    """How a text was written."""
    settings = text["settings"]
    known = ("sampler", "steps", "temperature", "top_p", "seed")
    return ", ".join([str(text["model"]), *(f"{k} {settings[k]}" for k in known if settings.get(k) is not None)])


def comments(part: Mapping[str, Any]) -> list[str]:
    """Where a section's figures were computed, below its commands."""
    return [f"# {origin}" for origin in part["origins"]]


# Markdown


def markdown_of(card: Card) -> str:
    """The card for a model page: front matter that the Hub reads, then the same tables; pictures lie beside it."""
    parts = [front_matter(card), f"# Evaluation of {_plain(title_of(card))}", markdown_table(models_table(card))]
    parts += [markdown_table(card["summary"])] if len(card["summary"]["columns"]) > 1 else []
    for part in card["sections"]:
        parts.append(f"## {_plain(part['title'])}")
        if not part["is_measured"]:
            parts.append(f"*Not measured: {_plain(part['why'])}.*")
        parts += [f"![{_plain(each['alt'])}]({each['name']}.svg)" for each in part["pictures"]]
        parts += [markdown_table(each) for each in part["tables"]]
        for text in part["texts"]:
            parts += [f"{_plain(told(text))}:", _fenced(text["text"])]
        if part["is_measured"] and part["read"]:
            parts.append(_plain(part["read"]))
        if part["commands"]:
            parts.append(_fenced("\n".join([*part["commands"], *comments(part)])))
    parts += ["## Where this comes from", markdown_table(origin_table(card)), _fenced(card["command"])]
    return "\n\n".join(parts) + "\n"


def front_matter(card: Card) -> str:
    """What the Hub reads of a model page: license, language, tags, and the figures as a model index."""
    import yaml

    index = []
    for model in card["models"]:
        results = [
            {
                "task": {"type": "text-generation", "name": "Text Generation"},
                "dataset": {"type": each["data"], "name": each["data"]},
                "metrics": [{"type": each["type"], "name": each["name"], "value": each["value"]}],
            }
            for each in card["metrics"]
            if each["model"] == model["name"] and each["value"] is not None
        ]
        if results:  # the Hub refuses a model without any
            index.append({"name": model["name"], "results": results})
    about: dict[str, Any] = {"license": card["license"], "language": [card["language"]], "library_name": "adlm"}
    about |= {"pipeline_tag": "text-generation", "tags": list(card["tags"])}
    about |= {"model-index": index} if index else {}
    return f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}---"


def markdown_table(table: Mapping[str, Any]) -> str:
    """A table whose cells are text, whatever stands in them."""
    lines = [f"{_plain(table['caption'])}\n"] if table["caption"] else []
    lines.append("| " + " | ".join(_plain(name) or " " for name in table["columns"]) + " |")
    lines.append("|" + "---|" * len(table["columns"]))
    lines += ["| " + " | ".join(_plain(shown(cell)) or " " for cell in row) + " |" for row in table["rows"]]
    return "\n".join(lines)


def _plain(text: object) -> str:
    """Text that is text in Markdown: one line, nothing in it a mark or a tag."""
    escaped = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", _visible(str(text)).replace("\n", " "))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _fenced(text: str) -> str:
    """Text as it is, in a fence longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{_visible(text)}\n{fence}"


# Pictures and files


def pictures_of(card: Card, folder: Path) -> dict[str, bytes]:
    """Every picture drawn anew from the answers in the card, as SVG."""
    from adlm.studies.pictures import draw_frontier
    from adlm.studies.portraits import draw_anchors

    found = {}
    for part in card["sections"]:
        studies = [study for each in part["answers"] for study in each.get("models", [])]
        for number, picture in enumerate(part["pictures"]):
            path = folder / f"{picture['name']}.svg"
            if picture["kind"] == "frontier":
                answer = part["answers"][number]
                held_out = quality_of(answer["reference"]) if answer.get("reference") else None
                draw_frontier([point_of(each) for each in answer["points"]], path, held_out)
            else:
                draw_anchors(study_of(studies[number]), path)
            found[picture["name"]] = path.read_bytes()
    return found


def quality_of(row: Mapping[str, Any]) -> Any:
    """Figures of texts, from their flat form."""
    from adlm.studies.writing import TextFigures

    return TextFigures(**{each.name: row[each.name] for each in fields(TextFigures)})


def point_of(row: Mapping[str, Any]) -> Any:
    """A point of the frontier, from its flat form."""
    from adlm.studies.frontier import Point

    own = {each.name: row[each.name] for each in fields(Point) if each.name != "quality"}
    return Point(**own, quality=quality_of(row))


def study_of(row: Mapping[str, Any]) -> Any:
    """A study of anchors, from JSON; what was not a number is one again."""
    from adlm.studies.anchors import Sample, Study

    def numbered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: math.nan if each is None else numbered(each) for key, each in value.items()}
        return [math.nan if each is None else numbered(each) for each in value] if isinstance(value, list) else value

    own = [each.name for each in fields(Sample) if each.name != "quality"]
    samples = [{name: each[name] for name in own} | {"quality": asdict(quality_of(each))} for each in row["samples"]]
    whole = {name: [numbered(each) for each in row[name]] for name in ("guesses", "losses", "reveals")}
    return Study.of(dict(row) | whole | {"samples": samples})


def write_pages(card: Card, folder: Path) -> list[Path]:
    """card.html, card.md and the pictures in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = pictures_of(card, folder)
    pages: Sequence[tuple[str, str]] = (("card.html", html_of(card, pictures)), ("card.md", markdown_of(card)))
    for name, text in pages:
        write_safely(folder / name, text.encode("utf-8"))
    return [folder / name for name, _ in pages] + [folder / f"{name}.svg" for name in pictures]
