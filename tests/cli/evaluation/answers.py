"""What `adlm eval …` answers, and text to ask it about."""

import json
from functools import cache
from typing import Any

from tests.cli.terminal import invoke
from tests.training.runs import TEXT, shelf


@cache
def text() -> str:
    """A file of held-out text."""
    path = shelf() / "held-out.txt"
    path.write_text(TEXT[:4000], "utf-8")
    return str(path)


def answered(*words: object) -> dict[str, Any]:
    """The one JSON object that `adlm eval WORDS --json` prints."""
    result = invoke("eval", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    return found
