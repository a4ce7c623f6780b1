"""Write the tables of the settings: of sampling into generate.md, of recipes into training.md."""

from pathlib import Path

from pydantic import BaseModel

from adlm.apps.reasoning.settings import ReasoningConfig
from adlm.config import Config, find_resumable
from adlm.settings import SamplingSettings, describe, list_fields, list_names, list_own_names

FOLDER = Path(__file__).resolve().parent
BEGIN = "<!-- The settings, by `python docs/write_settings.py`. -->\n"
END = "<!-- End of the settings. -->\n"
HEAD = "| setting | sets | takes | default | HTTP | command line | Python also takes |"


def format_sampling() -> str:
    """Return the settings of sampling with their names on every surface as a table in Markdown."""
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    http = list_own_names(SamplingSettings, "openai")
    options = list_own_names(SamplingSettings, "cli")
    python = list_names(SamplingSettings, "python")
    for name, field in SamplingSettings.model_fields.items():
        others = [typed for typed, own in python.items() if own == name and typed != name]
        cells = [
            f"`{name}`",
            f"{field.description}",
            describe(field),
            "" if field.default in (None, ()) else f"`{field.default}`",
            format_code(http.get(name)),
            format_code(options.get(name)),
            ", ".join(format_code(other) for other in others),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_code(name: str | None) -> str:
    """Return a name as code, and nothing where there is none."""
    return "" if name is None else f"`{name}`"


def format_recipe() -> str:
    """Return the keys of a recipe as a table in Markdown."""
    lines = ["| key | sets | takes | default |", "|---|---|---|---|"]
    resumable = find_resumable(ReasoningConfig)
    fields = list_fields(ReasoningConfig) | list_fields(Config)
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            continue
        mark = "" if name in resumable else r" \*"
        is_empty = field.is_required() or default in (None, (), [], {}, "")
        cells = [
            f"`{name}`{mark}",
            f"{field.description}",
            describe(field),
            "" if is_empty else f"`{default}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {"generate.md": format_sampling, "training.md": format_recipe}


def fill_page(name: str) -> str:
    """Return a page with its table as it is now between the marks."""
    page = (FOLDER / name).read_text("utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{TABLES[name]()}\n{END}{after}"


if __name__ == "__main__":
    for name in TABLES:
        (FOLDER / name).write_text(fill_page(name), "utf-8")
