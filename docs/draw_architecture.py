"""Draw docs/images/layers.svg and four_ways.svg, the two pictures of architecture.md, as plain SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
# The paper is opaque, so that the pictures read the same on a light and on a dark page.
PAPER = "#ffffff"
INK = "#1f2933"
FAINT = "#5b6770"
ACROSS = 960  # width of a picture
MARGIN = 16
SANS = 'font-family="system-ui, sans-serif"'
MONO = 'font-family="ui-monospace, Menlo, Consolas, monospace"'
FONTS = {
    "title": f'{SANS} font-size="15" font-weight="600"',
    "text": f'{SANS} font-size="13"',
    "code": f'{MONO} font-size="14"',
}


@dataclass(frozen=True)
class Color:
    """The fill and the edge of a box."""

    fill: str
    edge: str


GRAY = Color("#eef1f4", "#8a97a3")
BLUE = Color("#e3eefa", "#4477aa")
GREEN = Color("#e5f3ea", "#228833")
YELLOW = Color("#fbf3da", "#b8962e")
RED = Color("#fbe6ea", "#cc6677")
PURPLE = Color("#f1e6f5", "#aa3377")


@dataclass(frozen=True)
class Room:
    """A box of the layers: a name and what is in it, a line each."""

    name: str
    lines: tuple[str, ...]
    color: Color
    share: int = 1  # of the width of its layer


LAYERS = (
    (
        Room(
            "apps/",
            (
                "reasoning, experiments, anchor_study, code_eval: clients of the core,",
                "which names them in tables of strings and never imports them",
            ),
            RED,
        ),
    ),
    (Room("cli/", ("one file for a command or a few; --help waits for no torch",), GRAY),),
    (
        Room("serve/", ("a running batch over HTTP",), GRAY),
        Room("evaluate/", ("models in, EvalResult out",), YELLOW),
        Room("interop/", ("transformers, diffusers, lm-eval",), YELLOW),
    ),
    (
        Room("text/", ("LM, layouts, rows and", "frames, lengths of holes"), YELLOW),
        Room(
            "training/", ("train.py: the loop over a Task;", "config.py composes recipes"), YELLOW
        ),
    ),
    (
        Room("models/folder.py", ("what a model folder holds",), GREEN),
        Room("likelihood.py", ("row_nats: every bound",), YELLOW),
        Room("view/", ("terminal, HTML, GIF",), YELLOW),
        Room("convert.py", ("the lineage's files",), YELLOW),
    ),
    (
        Room("models/", ("networks, methods,", "the evaluator for sampling"), GREEN),
        Room("data/", ("sources, rows, shards, batches;", "knows no model"), PURPLE),
    ),
    (
        Room(
            "diffusion/",
            (
                "the mathematics: schedules, masking, anchors, objectives, draws, random numbers;",
                "plans, samplers and the one loop over rows (sampling.py)",
            ),
            BLUE,
        ),
    ),
    (
        Room("settings.py", ("each setting once; no torch",), GRAY),
        Room("registry.py", ("names to objects",), GRAY),
        Room("files, devices, distributed, errors", ("the world outside",), GRAY),
    ),
)


@dataclass(frozen=True)
class Stop:
    """A box on a way: a name in code and what happens there."""

    name: str
    text: str
    color: Color


WAYS = (
    (
        "1  Text to a training step",
        (
            Stop("open_source", "text to documents", PURPLE),
            Stop("tokenize_chunks", "in several processes", PURPLE),
            Stop("Packer.feed", "tokens to rows", PURPLE),
            Stop("write_shard", "a prepared folder", PURPLE),
            Stop("ShuffledBatches", "a Batch with its place", PURPLE),
            Stop("Objective.corrupt", "a NoisyBatch", BLUE),
            Stop("Objective.loss", "heads only where they count", BLUE),
            Stop("step_optimizers", "weights and their average", YELLOW),
        ),
    ),
    (
        "2  A prompt to a text",
        (
            Stop("LM.generate", "a prompt and settings", YELLOW),
            Stop("SamplingSettings.parse", "checked once", GRAY),
            Stop("layout_prompt", "given text and holes", YELLOW),
            Stop("choose_sampler", "a plan, or an object", BLUE),
            Stop("layout_rows", "a TextRow for each text", YELLOW),
            Stop("sample", "a Frame for each step", BLUE),
            Stop("TextRow.text", "a done row to text", YELLOW),
            Stop("GenerationOutput", "texts, NFE, settings", YELLOW),
        ),
    ),
    (
        "3  A request to a text",
        (
            Stop("CompletionBody", "JSON to settings", GRAY),
            Stop("LM.layout_rows", "the rows of way 2", YELLOW),
            Stop("Engine.submit", "TextRows of a Ticket", GRAY),
            Stop("RunningBatch.join", "among other rows", BLUE),
            Stop("RunningBatch.step", "a Frame for each step", BLUE),
            Stop("select_rows", "the TextFrame of a Ticket", GRAY),
            Stop("TextReader.read", "settled text, stops", GRAY),
            Stop("encode_event", "or one JSON answer", GRAY),
        ),
    ),
    (
        "4  adlm eval ppl",
        (
            Stop("perplexity", "models and texts", YELLOW),
            Stop("load_eval_data", "rows with a hash", YELLOW),
            Stop("Cache", "nats that are known", YELLOW),
            Stop("row_nats", "batches and draws of noise", YELLOW),
            Stop("Objective.row_nats", "a bound, or exact", BLUE),
            Stop("summarize_rows", "nats per token ± error", YELLOW),
            Stop("EvalResult", "tables, provenance, JSON", YELLOW),
            Stop("print_result", "a table, or JSON", GRAY),
        ),
    ),
)
LEGEND = (
    ("diffusion/", BLUE),
    ("data/", PURPLE),
    ("text/, training/, evaluate/, likelihood.py", YELLOW),
    ("settings.py, serve/, cli/", GRAY),
)


def draw_text(
    x: float, y: float, text: str, kind: str, color: str = INK, *, centered: bool = True
) -> str:
    anchor = "middle" if centered else "start"
    font = FONTS[kind]
    attributes = f'x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" {font}'
    return f"<text {attributes}>{escape(text)}</text>"


def draw_box(x: float, y: float, width: float, height: float, color: Color) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'<rect {shape} fill="{color.fill}" stroke="{color.edge}"/>'


def draw_arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{FAINT}" stroke-width="1.4" marker-end="url(#arrow)"/>'


def write_svg(name: str, title: str, height: float, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{ACROSS}" height="{height:g}" '
        f'viewBox="0 0 {ACROSS} {height:g}" role="img">'
    )
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
    )
    paper = f'<rect width="{ACROSS}" height="{height:g}" rx="10" fill="{PAPER}"/>'
    lines = [head, f"<title>{escape(title)}</title>", marker, paper, *parts, "</svg>", ""]
    (IMAGES / name).write_text("\n".join(lines), encoding="utf-8")


def draw_layers() -> None:
    """Draw the layers, from the apps at the top to what knows nothing of the others."""
    gap = 10
    left = 44  # of the arrow that says which way imports point
    y = float(MARGIN)
    parts = []
    for layer in LAYERS:
        height = 34 + 18 * max(len(room.lines) for room in layer)
        room_width = ACROSS - MARGIN - left - gap * (len(layer) - 1)
        shares = sum(room.share for room in layer)
        x = float(left)
        for room in layer:
            width = room_width * room.share / shares
            parts.append(draw_box(x, y, width, height, room.color))
            parts.append(draw_text(x + width / 2, y + 21, room.name, "title"))
            for number, line in enumerate(room.lines):
                parts.append(draw_text(x + width / 2, y + 40 + 18 * number, line, "text", FAINT))
            x += width + gap
        y += height + gap
    middle = y / 2
    parts.append(draw_arrow(28, MARGIN, 28, y - gap))
    turned = draw_text(0, 0, "imports point downwards", "text", FAINT)
    parts.append(f'<g transform="translate(20 {middle:g}) rotate(-90)">{turned}</g>')
    write_svg("layers.svg", "The layers of adlm", y - gap + MARGIN, parts)


def draw_ways() -> None:
    """Draw each way as a column, from the top to the bottom."""
    gap = 20
    box_height = 48
    width = (ACROSS - 2 * MARGIN - gap * (len(WAYS) - 1)) / len(WAYS)
    first = MARGIN + 28
    parts = []
    for column, (title, stops) in enumerate(WAYS):
        x = MARGIN + column * (width + gap)
        middle = x + width / 2
        parts.append(draw_text(middle, MARGIN + 14, title, "title"))
        y = float(first)
        for number, stop in enumerate(stops):
            if number:
                parts.append(draw_arrow(middle, y - gap, middle, y))
            parts.append(draw_box(x, y, width, box_height, stop.color))
            parts.append(draw_text(middle, y + 20, stop.name, "code"))
            parts.append(draw_text(middle, y + 38, stop.text, "text", FAINT))
            y += box_height + gap
    bottom = first + max(len(stops) for _, stops in WAYS) * (box_height + gap)
    x = float(MARGIN)
    for name, color in LEGEND:
        parts.append(draw_box(x, bottom, 14, 14, color))
        parts.append(draw_text(x + 20, bottom + 12, name, "text", FAINT, centered=False))
        x += 40 + 7.5 * len(name)
    write_svg("four_ways.svg", "The four ways of the data", bottom + 14 + MARGIN, parts)


if __name__ == "__main__":
    draw_layers()
    draw_ways()
