"""Write the table of the settings of sampling into docs/generate.md."""

from pathlib import Path

from adlm.settings import SamplingSettings, describe, list_names, list_own_names

PAGE = Path(__file__).resolve().parent / "generate.md"
BEGIN = "<!-- The settings, by `python docs/write_settings.py`. -->\n"
END = "<!-- End of the settings. -->\n"
HEAD = "| setting | sets | takes | default | HTTP | command line | Python also takes |"


def format_table() -> str:
    """Return the settings with their names on every surface as a table in Markdown."""
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


def fill_page(page: str) -> str:
    """Return a page with the table as it is now between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{format_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(fill_page(PAGE.read_text("utf-8")), "utf-8")
