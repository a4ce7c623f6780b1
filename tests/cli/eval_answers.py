"""What `adlm eval …` prints, and text to evaluate on."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import answer_json, invoke, without_escapes
from tests.training.runs import TEXT, shelf


@cache
def documents() -> Path:
    """A file with documents of 3 to 40 words, <|endoftext|> between them."""
    path, words, texts = shelf() / "documents.txt", TEXT[:12_000].split(), []
    while words:
        count = 3 + 7 * len(texts) % 38
        texts.append(" ".join(words[:count]))
        words = words[count:]
    path.write_text("\n<|endoftext|>\n".join(texts), "utf-8")
    return path


@cache
def held_out() -> str:
    path = shelf() / "held-out.txt"
    path.write_text(TEXT[:4000], "utf-8")
    return str(path)


def evaluate(*words: object) -> dict[str, Any]:
    """The one JSON object that `adlm eval WORDS --json` prints."""
    return answer_json("eval", *words)


def narrow_table(monkeypatch: pytest.MonkeyPatch, columns: int, *words: object) -> list[str]:
    """The lines of the tables that a command prints on a terminal of this width."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    lines = [
        line for line in without_escapes(result.stdout).splitlines() if line[:1] in tuple("┏┃┡│└")
    ]
    assert max(map(len, lines)) <= columns
    return lines
