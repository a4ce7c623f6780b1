"""`adlm doctor`: what is installed, which device there is, what will be used."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from adlm.cli import options
from adlm.cli.health import Finding, examine
from adlm.cli.output import json_stdout, print_json, status_console

MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("–", "dim")}
TITLES = {"devices": "there is", "used": "will be used", "models": "bundled models", "tools": "optional tools"}


def doctor(is_json: options.Json = False) -> None:
    """Say what is installed, which device there is, what will be used, and what to do about what is wrong.

    Exit codes: 0 all that is needed works; 1 something does not.
    """
    console = Console(highlight=False, soft_wrap=True)
    sections: dict[str, list[Finding]] = {}
    with json_stdout(is_json), status_console().status("looking …"):
        for name, findings in examine():
            sections[name] = findings
            if not is_json:
                console.print(drawn(name, findings))
    wrong = [each for findings in sections.values() for each in findings if each.is_essential and not each.is_good]
    if is_json:
        found = {name: {each.name: as_dict(each) for each in findings} for name, findings in sections.items()}
        problems = [{"name": each.name, "said": each.said, "remedy": each.remedy} for each in wrong]
        print_json({"ok": not wrong, "problems": problems} | found)
    elif wrong:
        console.print("Broken: " + ", ".join(each.name for each in wrong), style="bold red", markup=False)
    else:
        console.print("All that is needed works.", style="bold")
    raise typer.Exit(1 if wrong else 0)


def as_dict(finding: Finding) -> dict[str, Any]:
    """A finding for JSON."""
    return {"is_good": finding.is_good, "said": finding.said} | finding.about


def drawn(title: str, findings: list[Finding]) -> Text:
    """A section: a mark, a name, what was found, and what to do where something is not there."""
    width = max(len(finding.name) for finding in findings)
    text = Text(TITLES.get(title, title) + "\n", style="")
    text.stylize("bold", 0, len(text))
    for finding in findings:
        mark, style = MARKS[finding.is_good]
        text.append("  ").append(mark, style).append(f" {finding.name:<{width}}  {finding.said}")
        if finding.is_good is not True and finding.remedy:
            text.append(f" → {finding.remedy}", style="cyan")
        text.append("\n")
    return text
