"""Python as a domain: the standard library's sources as text, and how much of what a model writes or fills in parses.

The sources are the running interpreter's own (PSF license, version 2): the same for one version of Python on every
machine, which the hash shows.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adlm.evaluate.programs import Candidate, Problem, Share, mean_share
from adlm.text.lm import LM
from adlm.text.templates import Hole, cut

LICENSE = "PSF-2.0 (Python Software Foundation License, version 2)"
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "turtledemo")
KINDS = ("lines", "expression")
HELD_OUT = 10  # every tenth file, by the hash of its name


@dataclass(frozen=True)
class Source:
    """A file of the standard library."""

    name: str  # its path inside the library, with /
    text: str

    @property
    def is_held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big") % HELD_OUT == 0


def standard_library(folder: Path | None = None) -> list[Source]:
    """The sources of the standard library in the order of their names, without tests and generated tables."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        if set(parts) & set(LEFT_OUT) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        if parts[-1].startswith("_sysconfigdata"):  # how this interpreter was built: differs between machines
            continue
        with tokenize.open(path) as file:  # by the encoding that the source declares
            text = file.read().replace("\r\n", "\n")
        if text.strip():
            found.append(Source("/".join(parts), text))
    if not found:
        raise ValueError(f"there are no Python sources in {folder}: this interpreter comes without its library's")
    return sorted(found, key=lambda source: source.name)


def hash_of(sources: Sequence[Source]) -> str:
    """The sha256 of names and texts."""
    found = hashlib.sha256()
    for source in sources:
        for part in (source.name, source.text):
            data = part.encode("utf-8")
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def write_sources(path: Path, sources: Sequence[Source]) -> dict[str, Any]:
    """Write sources as jsonl, {"text", "name"} a line: what `adlm prepare` reads. What was written, as plain data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for source in sources:
            file.write(json.dumps({"text": source.text, "name": source.name}, ensure_ascii=False) + "\n")
    size = sum(len(source.text.encode("utf-8")) for source in sources)
    return {"file": path.name, "files": len(sources), "bytes": size, "sha256": hash_of(sources), "license": LICENSE}


def parses(text: str) -> bool:
    """Whether a text is a Python program, with at least one statement."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that will be an error some day is none yet
            return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's ways to say no
        return False


def parsing_lines(text: str) -> float:
    """The share of a text's lines in the longest beginning of it that parses: a text may be cut off at its end."""
    lines = text.splitlines()
    ends = (end for end in range(len(lines), 0, -1) if parses("\n".join(lines[:end])))
    return next(ends, 0) / len(lines) if lines else 0.0


def parse_shares(texts: Sequence[str]) -> dict[str, Share]:
    """How many texts parse as a whole, and the mean share of lines that parse."""
    if not texts:
        raise ValueError("there are no texts to parse: give some")
    return {
        "parses": mean_share(np.array([float(parses(text)) for text in texts])),
        "parsing_lines": mean_share(np.array([parsing_lines(text) for text in texts])),
    }


def written_code(lm: LM, count: int, *, prompt: str = "def ", **how: Any) -> list[str]:
    """Texts of a model that begin as a function does."""
    return lm.generate(prompt, n=count, **how).texts


@dataclass(frozen=True)
class Gap:
    """A real function with a part taken out."""

    name: str
    before: str
    removed: str
    after: str
    kind: str

    @property
    def whole(self) -> str:
        return self.before + self.removed + self.after


def functions_of(source: Source) -> Iterator[tuple[str, str]]:
    """The functions and methods of a file, each as a program of its own."""
    lines = source.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
            if parses(text):  # a dedent may break a string that spans lines
                yield f"{source.name}:{node.lineno}:{node.name}", text


def gaps(
    sources: Sequence[Source], lm: LM, count: int, *, kind: str = "lines", most: int = 24, seed: int = 0
) -> list[Gap]:
    """`count` functions of held-out files that fit the model, each with a hole of at most `most` tokens.

    `lines` takes out one to three whole lines of the body, `expression` the inside of one expression.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    held = [source for source in sources if source.is_held_out]
    rng = np.random.default_rng(seed)
    functions = [each for source in held for each in functions_of(source)]
    found: list[Gap] = []
    for number in rng.permutation(len(functions)):
        name, text = functions[number]
        if len(text) > 8 * lm.row_format.longest:  # far too long to be cut into tokens for nothing
            continue
        spans = _line_spans(text) if kind == "lines" else _expression_spans(text)
        if not spans:
            continue
        begin, end = spans[int(rng.integers(len(spans)))]
        gap = Gap(name, text[:begin], text[begin:end], text[end:], kind)
        pieces = [len(cut(lm.tokenizer, piece)[0]) for piece in (gap.before, gap.removed, gap.after)]
        if 1 <= pieces[1] <= most and sum(pieces) <= lm.row_format.longest:
            found.append(gap)
        if len(found) == count:
            return found
    raise ValueError(
        f"only {len(found)} of {count} functions of {len(held)} held-out files fit into {lm.row_format.longest} tokens: ask "
        "for fewer, or take a model with longer rows"
    )


def _line_spans(text: str) -> list[tuple[int, int]]:
    """Where one to three whole lines below the heading stand, from their indentation to before their line end."""
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == "\n"), len(text) + 1]
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = node.body[0].lineno - 1
    spans = []
    for line in range(first, len(starts) - 1):
        begin = starts[line] + len(text[starts[line] :]) - len(text[starts[line] :].lstrip(" "))
        for last in range(line, min(line + 3, len(starts) - 1)):
            end = starts[last + 1] - 1
            if begin < end <= len(text) and text[begin:end].strip() and text[end - 1] != "\n":
                spans.append((begin, end))
    return spans


def _expression_spans(text: str) -> list[tuple[int, int]]:
    """Where expressions on one line stand."""
    starts = [0, *(i + 1 for i, c in enumerate(text) if c == "\n")]
    lines = text.splitlines()
    spans = set()
    for node in ast.walk(ast.parse(text).body[0]):
        inside = getattr(node, "value", None) if isinstance(node, ast.Return | ast.Assign | ast.keyword) else None
        for each in [inside, *(node.args if isinstance(node, ast.Call) else ())]:
            if isinstance(each, ast.expr) and each.lineno == each.end_lineno and each.end_col_offset is not None:
                line = lines[each.lineno - 1].encode()  # columns count bytes
                begin, end = (len(line[:at].decode()) for at in (each.col_offset, each.end_col_offset))
                spans.add((starts[each.lineno - 1] + begin, starts[each.lineno - 1] + end))
    return sorted(spans)


def template_of(lm: LM, gap: Gap) -> list[str | Hole]:
    """The function with a hole as long as what was taken out."""
    return [piece for piece in (gap.before, Hole.of(len(cut(lm.tokenizer, gap.removed)[0])), gap.after) if piece]


def infilling(lm: LM, chosen: Sequence[Gap], **how: Any) -> dict[str, Any]:
    """Fill the holes: how many programs parse, are the original to the letter, or mean the same to the parser.

    Beside them, what parses with the hole left empty: what the text around it gives away.
    """
    texts = lm.infill([template_of(lm, gap) for gap in chosen], **how).texts
    original = [same_tree(gap.whole) for gap in chosen]
    rows = {
        "parses": [parses(text) for text in texts],
        "equal": [text == gap.whole for text, gap in zip(texts, chosen, strict=True)],
        "same_tree": [same_tree(text) == tree for text, tree in zip(texts, original, strict=True)],
        "parses_if_left_empty": [parses(gap.before + gap.after) for gap in chosen],
    }
    shares = {name: asdict(mean_share(np.array(values, dtype=float))) for name, values in rows.items()}
    examples = [{**asdict(gap), "written": text} for gap, text in zip(chosen, texts, strict=True)]
    return {"shares": shares, "examples": examples}


def same_tree(text: str) -> str | None:
    """What the parser sees in a text, None where it sees nothing."""
    return ast.dump(ast.parse(text)) if parses(text) else None


def completions(lm: LM, problems: Sequence[Problem], n: int, *, most: int = 128, **how: Any) -> list[Candidate]:
    """`n` candidates for each problem: what the model writes after the prompt, up to where the function ends."""
    found = []
    for problem in problems:
        taken = len(cut(lm.tokenizer, problem.prompt)[0])
        room = lm.row_format.longest - taken
        if room < 1:
            raise ValueError(
                f"the prompt of {problem.task_id} has {taken} tokens, this model's rows hold {lm.row_format.longest}: leave "
                "the problem out, or take a model with longer rows"
            )
        job = lm.build_request(problem.prompt, length=taken + min(room, most), n=n, **how)
        found += [Candidate(problem.task_id, function_body(row.pieces[-1][0])) for row in lm.generate_rows(job)]
    return found


def function_body(text: str) -> str:
    """A completion up to the first line after its first that is not indented: there the function has ended."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and not line[0].isspace():
            return "".join(lines[:number])
    return text
