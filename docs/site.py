"""MkDocs hook: the README is the first page, the notebook the tutorial; API pages follow the packages' exports."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adlm", "adlm.evaluate", "adlm.diffusion", "adlm.models")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def list_definitions(package: str) -> list[str]:
    """Return the dotted path of the definition of every public name, the packages themselves excluded."""
    module = import_module(package)
    paths = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, str) or getattr(value, "__spec__", None):  # __version__, a subpackage
            continue
        is_defined = hasattr(value, "__qualname__")  # a function or class, not a table
        owner = value.__module__ if is_defined else package
        paths.append(f"{owner if owner.startswith('adlm') else package}.{name}")
    return paths


def write_api_page(package: str) -> str:
    summary = (import_module(package).__doc__ or "").split("\n\n")[0]
    return "\n".join(
        [
            f"# `{package}`",
            "",
            summary,
            "",
            *(f"::: {path}\n" for path in list_definitions(package)),
        ]
    )


def write_tour() -> str:
    """Return the notebook as a page: its texts, its code and the text that the code printed."""
    parts = []
    for cell in json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            parts += [f"```text\n{text.rstrip()}\n```"] if text.strip() else []
    return "\n\n".join(parts)


def on_files(files: Files, config: Any) -> Files:
    readme = LINK.sub(
        lambda match: rewrite_link(match, "."), (ROOT / "README.md").read_text(encoding="utf-8")
    )
    pages = {"index.md": readme, "tour.md": write_tour()}
    pages |= {f"api/{package}.md": write_api_page(package) for package in PACKAGES}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "experiments").rglob("*.png")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":  # its links were rewritten from the project's root
        return markdown
    return LINK.sub(lambda match: rewrite_link(match, "docs"), markdown)


def rewrite_link(match: re.Match[str], folder: str) -> str:
    """Make a link relative to docs/; a file outside of docs/ is named, because the site does not hold it."""
    picture, text, target, anchor = match.groups()
    if "://" in target or target.startswith("mailto:"):
        return match.group()
    path = (ROOT / folder / target).resolve()
    if path == ROOT / "README.md":
        return f"{picture}[{text}](index.md{anchor or ''})"
    if picture and path.is_relative_to(ROOT / "experiments"):
        return f"![{text}]({path.relative_to(ROOT)})"
    if not path.is_relative_to(ROOT / "docs"):
        return f"{text} (`{path.relative_to(ROOT)}`)" if path.exists() else match.group()
    return f"{picture}[{text}]({path.relative_to(ROOT / 'docs')}{anchor or ''})"
