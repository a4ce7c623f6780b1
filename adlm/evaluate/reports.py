"""Evaluates models and writes report.json, report.html, report.md and plots, without the paths of this machine."""

import base64
import copy
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adlm.bundled import MODELS
from adlm.diffusion.samplers import takes_steps
from adlm.errors import import_extra, install_command
from adlm.evaluate.cache import ProgressCallback, ignore_progress, lock_output
from adlm.evaluate.data import RowLayout
from adlm.evaluate.frontiers import frontier
from adlm.evaluate.plots import draw_figures
from adlm.evaluate.ppl import list_models, perplexity, zero_shot
from adlm.evaluate.provenance import collect_provenance, hash_weights
from adlm.evaluate.results import Estimate, EvalResult, Table, TableColumn, save_json, to_json
from adlm.evaluate.sample_metrics import samples
from adlm.evaluate.scorer import ScoringModel, load_scorer
from adlm.files import hash_file, write_atomically
from adlm.registry import load_object
from adlm.text.generation import check_whole_numbers
from adlm.text.lm import LM

# Sections that apps measure: functions of the models and a ReportRequest.
APP_SECTIONS = {
    "anchors": "adlm.apps.anchor_study.report:measure_section",
    "code": "adlm.apps.code_eval.report:measure_section",
}
MAX_FRONTIER_TEXTS = 48  # for each point
TAGS = ("diffusion", "masked-diffusion", "language-model")
TITLES = {
    "perplexity": "Held-out likelihood",
    "samples": "Sample quality",
    "frontier": "Quality against cost",
    "anchors": "Anchor network",
    "zero_shot": "Zero-shot likelihood",
    "code": "Python code",
}
ABSOLUTE_PATH = re.compile(r"(?<![\w./])/(?:[^\s/:'\"]+/)+([^\s/:'\"]+)")
GENERATED = (
    "text",
    "texts",
    "completion",
    "before",
    "removed",
    "after",
)  # values that stay as they are


@dataclass
class Section:
    """A part of the report: results with tables and plots, or the reason why it was not measured."""

    name: str
    title: str
    reason: str = ""
    results: list[EvalResult] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def add(self, result: EvalResult, title: str = "") -> None:
        """Add a result; `title` is that of its tables without one."""
        self.results.append(result)
        self.tables += [replace(table, title=table.title or title) for table in result.tables]
        self.warnings += [warning for warning in result.warnings if warning not in self.warnings]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        kept = {name: getattr(self, name) for name in ("name", "title", "reason", "figures")}
        return kept | {"results": [result.as_dict() for result in self.results]}


@dataclass(frozen=True)
class ReportRequest:
    """What the sections of apps are measured with; None or empty is an evaluation's own default."""

    data: str | Path
    rows: RowLayout | None
    scorer: ScoringModel | None
    has_code: bool
    limit: int | None
    length: int | None
    n: int | None
    steps: int | None
    sampler: str | None
    batch: int | None
    seed: int
    out: Path
    on_progress: ProgressCallback

    def limit_texts(self, most: int) -> int:
        """Return the number of texts of a metric, at most `most`."""
        return min(self.n or most, most)


@lock_output
def report(
    models: LM | Iterable[LM],
    data: str | Path,
    *,
    reference: str | Path | None = None,
    scorer: str | Path | ScoringModel | None = None,
    zeroshot_dir: str | Path | None = None,
    code: bool = False,
    rows: RowLayout | None = None,
    n: int | None = None,
    length: int | None = None,
    steps: Sequence[int] = (),
    samplers: Sequence[str] = (),
    limit: int | None = None,
    batch: int | None = None,
    license: str | None = None,
    seed: int = 0,
    out: str | Path = "report",
    command: str = "",
    on_progress: ProgressCallback = ignore_progress,
) -> EvalResult:
    """Measure models on held-out text and write the report into the folder `out`; the same call resumes there.

    `scorer` adds samples and the frontier (compared with `reference`, by default `data`), `zeroshot_dir` the zero-shot
    sets, `code` Python code. The frontier takes all `steps` and `samplers`, other sections the most steps and the first
    sampler. `batch` is how many rows the models and the scorer take at a time; by default each evaluation's own. It
    changes the speed, results only by rounding. `command` is shown on the pages.
    """
    check_whole_numbers(2, n=n, limit=limit)
    check_whole_numbers(1, length=length, batch=batch)
    import_extra("matplotlib", "the plots of a report need matplotlib", "eval")
    given, out = list_models(models), Path(out)
    lms, real = name_models(given), reference or data
    license = license or ("apache-2.0" if {lm.name for lm in given} <= set(MODELS) else "unknown")
    sampler = next(iter(samplers), None)
    has_steps = sampler is None or takes_steps(sampler, allow_import=True)
    most = max(steps, default=None) if has_steps else None
    masked = drop_unset(length=length, steps=most, sampler=sampler)
    sampling = {
        lm.name: drop_unset(length=length) if lm.row_format.is_causal else masked for lm in lms
    }
    for lm in lms:  # wrong settings are refused before anything runs
        lm.layout_rows(seed=seed, **sampling[lm.name])
    paths = [
        str(each)
        for each in (data, reference, scorer, zeroshot_dir)
        if isinstance(each, str | Path)
    ]
    files = {Path(path).name: hash_file(Path(path)) for path in paths if Path(path).is_file()}
    scorer = None if scorer is None else load_scorer(scorer, device=lms[0].device)
    same: dict[str, Any] = {
        "seed": seed,
        "out": out,
        "on_progress": on_progress,
        **drop_unset(batch=batch),
    }
    bounded = drop_unset(limit=limit)
    scored = {"scorer": scorer, "reference": real, **drop_unset(scorer_batch=batch)}
    sections = {name: Section(name, title) for name, title in TITLES.items()}

    sections["perplexity"].add(
        perplexity(lms, {Path(data).name: data}, rows=rows, **same, **bounded)
    )
    if scorer is None:
        sections["samples"].reason = sections["frontier"].reason = (
            "no scoring model was given (--judge)"
        )
    else:
        grid = drop_unset(
            n=n and min(n, MAX_FRONTIER_TEXTS), length=length, steps=steps, samplers=samplers
        )
        sections["frontier"].add(frontier(lms, **scored, **same, **grid))
        if find_spec("mauve") is None:
            sections["samples"].reason = f"mauve-text is not installed ({install_command('mauve')})"
        for lm in lms if find_spec("mauve") else []:
            own = same | {"out": out / "samples" / lm.name} | drop_unset(n=n) | sampling[lm.name]
            sections["samples"].add(samples(lm, **scored, **own), lm.name)
    if zeroshot_dir is None:
        sections["zero_shot"].reason = "no folder of the sets was given (--zeroshot-dir)"
    else:
        sections["zero_shot"].add(
            zero_shot(lms, data_dir=zeroshot_dir, skip_missing=True, **bounded, **same)
        )
    request = ReportRequest(
        data=data,
        rows=rows,
        scorer=scorer,
        has_code=code,
        limit=limit,
        length=length,
        n=n,
        steps=most,
        sampler=sampler,
        batch=batch,
        seed=seed,
        out=out,
        on_progress=on_progress,
    )
    for name, target in APP_SECTIONS.items():
        measured = load_object(target)(lms, request)
        if isinstance(measured, str):
            sections[name].reason = measured
        else:
            sections[name].add(measured)

    hide = partial(hide_paths, paths=[*paths, *(lm.name for lm in given)])
    settings: dict[str, Any] = {
        "data": str(data),
        "reference": str(real),
        "rows": rows,
        "seed": seed,
        "files": files,
    }
    settings |= {
        "n": n,
        "length": length,
        "steps": steps,
        "samplers": samplers,
        "limit": limit,
        "batch": batch,
    }
    settings = hide(to_json(settings | {"scorer": scorer and scorer.settings}))
    provenance, metrics = collect_provenance(lms[0].device), hide(collect_metrics(sections))
    paths_written = []
    for section in sections.values():
        plots = [path for result in section.results for path in draw_figures(result, out, ".svg")]
        section.figures = [path.stem for path in plots]
        section.tables, section.warnings = hide(section.tables), hide(section.warnings)
        paths_written += plots
    described, shown = [describe_model(lm) for lm in lms], list(sections.values())
    columns = [
        TableColumn(name.replace("_", " "), is_text=isinstance(value, str))
        for name, value in described[0].items()
    ]
    summary = tabulate_summary(metrics)
    content = {
        "title": f"Evaluation of {', '.join(lm.name for lm in lms)}",
        "command": hide(command),
    }
    content |= {
        "models": Table(columns, [list(each.values()) for each in described]),
        "summary": summary,
    }
    content |= {
        "origin": {**settings, **provenance, "scorer": scorer and scorer.name},
        "sections": shown,
    }
    front: dict[str, Any] = {"license": license, "language": ["en"], "library_name": "adlm"}
    front |= {
        "pipeline_tag": "text-generation",
        "tags": [*TAGS, *dict.fromkeys(lm.method for lm in lms)],
    }
    front["model-index"] = build_model_index(metrics)
    paths_written += write_pages(content, front, out)
    whole = {"models": described, "metrics": metrics, "command": hide(command), "license": license}
    whole |= {"sections": hide(to_json([each.as_dict() for each in shown]))}
    whole["files"] = [path.name for path in paths_written]
    states = [[each.title, f"no: {each.reason}" if each.reason else "yes"] for each in shown]
    tables = [
        summary,
        Table(
            [TableColumn("section", is_text=True), TableColumn("measured", is_text=True)], states
        ),
    ]
    result = EvalResult("report", whole, settings, provenance, tables)
    save_json(out / "report.json", result.as_dict())
    return result


def drop_unset(**options: Any) -> dict[str, Any]:
    """The options that were given; the others have the defaults of each evaluation."""
    return {name: value for name, value in options.items() if value}


def name_models(lms: Sequence[LM]) -> list[LM]:
    """The models under public names: the last part of a path, or its last three parts where two would be equal."""
    short = [Path(lm.name).name or lm.name for lm in lms]
    named = []
    for lm, name in zip(lms, short, strict=True):
        named.append(copy.copy(lm))
        named[-1].name = (
            name if short.count(name) == 1 else "-".join(Path(lm.name).resolve().parts[-3:])
        )
    return named


def describe_model(lm: LM) -> dict[str, Any]:
    """The model's size, tokenizer and weights."""
    config, size = lm.model.config, sum(each.numel() for each in lm.model.parameters())
    about = {
        "name": lm.name,
        "method": lm.method,
        "step": lm.step,
        "length": config.length,
        "parameters": size,
    }
    about |= {"vocab_size": config.vocab_size, "tokenizer": lm.tokenizer.name}
    return about | {"weights_sha256": hash_weights(lm.model)}


def collect_metrics(sections: Mapping[str, Section]) -> list[dict[str, Any]]:
    """The metrics for a model page: model, type, name, value and dataset of each."""
    metrics = []

    def add(model: str, kind: str, name: str, data: str, **estimate: Any) -> None:
        numbers = {key: estimate.get(key) for key in ("value", "stderr", "interval")}
        metrics.append({"model": model, "type": kind, "name": name, "data": data, **numbers})

    for result in sections["perplexity"].results:
        for entry in result.metrics.get("models", [result.metrics]):
            model, data, bits, stderr = (
                entry[key] for key in ("model", "data", "bits_per_byte", "bits_per_byte_se")
            )
            name = f"Perplexity{' (upper bound)' if entry['is_bound'] else ''}"
            add(model, "perplexity", name, data, value=entry["ppl"])
            add(model, "bits_per_byte", "Bits per byte", data, value=bits, stderr=stderr)
    for result in sections["samples"].results:
        model, data = result.settings["samples"]["model"], result.settings["reference"]["name"]
        names = {
            "gen_ppl": f"Gen-PPL ({result.settings['scorer']['name']})",
            "mauve": "MAUVE",
            "entropy": "Entropy",
        }
        for kind, name in names.items():
            add(model, kind, name, data, **result.metrics["samples"][kind])
    for entry in (
        entry for result in sections["zero_shot"].results for entry in result.metrics["sets"]
    ):
        add(entry["model"], "perplexity", "Perplexity", entry["set"], value=entry["ppl"])
    return metrics


def build_model_index(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The metrics in the form of a Hugging Face model card."""
    index: dict[str, list[dict[str, Any]]] = {}
    for each in metrics:
        result: dict[str, Any] = {"task": {"type": "text-generation", "name": "Text Generation"}}
        result["dataset"] = {"type": each["data"], "name": each["data"]}
        result["metrics"] = [{key: each[key] for key in ("type", "name", "value")}]
        index.setdefault(each["model"], []).append(result)
    return [{"name": name, "results": results} for name, results in index.items()]


def tabulate_summary(metrics: Sequence[Mapping[str, Any]]) -> Table:
    """The main metrics of each model: of each type the first."""
    first: dict[tuple[str, str], list[Any]] = {}
    for each in metrics:
        estimate = Estimate(each["value"], each["stderr"], each["interval"])
        first.setdefault(
            (each["model"], each["type"]), [each["model"], each["name"], each["data"], estimate]
        )
    columns = [TableColumn(name, is_text=True) for name in ("model", "metric", "data")]
    return Table([*columns, TableColumn("value")], list(first.values()))


def hide_paths(value: Any, *, paths: Sequence[str]) -> Any:
    """The same data with the paths of this machine replaced by their last part; generated texts stay as they are."""
    hide = partial(hide_paths, paths=paths)
    if isinstance(value, Table):
        title, notes, rows = hide([value.title, value.notes, value.rows])
        return replace(value, title=title, notes=notes, rows=rows)
    if isinstance(value, Mapping):
        return {key: each if key in GENERATED else hide(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide(each) for each in value]
    if isinstance(value, str):
        for path in sorted((path for path in paths if "/" in path), key=len, reverse=True):
            value = value.replace(path, Path(path).name)
        return ABSOLUTE_PATH.sub(r"\1", value)
    return value


def write_pages(
    content: Mapping[str, Any], front_matter: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write report.html, one file that needs nothing else, and report.md, with plots next to it."""
    import jinja2
    import yaml
    from markupsafe import Markup

    def clean(value: Any) -> Any:
        """Replace control characters, which no page may hold."""
        is_markup = isinstance(value, Markup)
        return (
            value
            if is_markup
            else re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", str(value))
        )

    def escape_markdown(value: Any) -> Markup:
        """Escape all marks and tags, in one line."""
        if isinstance(value, Markup):
            return value
        return Markup(
            re.sub(
                r"([\\`*_\[\]|#~])",
                r"\\\1",
                html.escape(clean(value).replace("\n", " "), quote=False),
            )
        )

    names = [name for section in content["sections"] for name in section.figures]
    images = {
        name: base64.b64encode((folder / f"{name}.svg").read_bytes()).decode() for name in names
    }
    matter = Markup(
        f"---\n{yaml.safe_dump(dict(front_matter), sort_keys=False, allow_unicode=True)}---"
    )
    options: Any = {
        "loader": jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        "autoescape": True,
    }
    options |= {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    options |= {"trim_blocks": True, "lstrip_blocks": True}
    paths = []
    for name, finalize in (("report.html", clean), ("report.md", escape_markdown)):
        environment = jinja2.Environment(finalize=finalize, **options)
        page = environment.get_template(f"{name}.j2").render(
            **content, images=images, front_matter=matter
        )
        page = page if name == "report.html" else re.sub(r"\n{3,}", "\n\n", page)
        write_atomically(folder / name, page.encode("utf-8"))
        paths.append(folder / name)
    return paths
