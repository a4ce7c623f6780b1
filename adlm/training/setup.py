"""Builds the parts of a run from its config: data, model, objective, sampler, and the checkpoint to resume from."""

import hashlib
import inspect
import json
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as format_bytes
from torch import Tensor

from adlm.bundled import MODELS, find_bundled_model
from adlm.config import APP_SECTIONS, Config, compare_configs, load_config
from adlm.data.batches import ShuffledBatches, StreamedBatches, is_valid
from adlm.data.shards import PreparedData, ShardedRows, describe_tokenizer, open_data
from adlm.data.sources import open_source
from adlm.data.tokenizers import Tokenizer
from adlm.devices import can_leave_padding_out, get_available_memory
from adlm.diffusion.anchors import ANCHOR_RULES, AnchorRule
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.masking import ForwardProcess
from adlm.diffusion.objectives import OBJECTIVES, Objective
from adlm.diffusion.plans import Plan
from adlm.diffusion.samplers import SAMPLERS, LeftToRight
from adlm.diffusion.sampling import Row, Sampler, fill_rows
from adlm.diffusion.schedules import SCHEDULES
from adlm.distributed import DistributedContext
from adlm.errors import check_known
from adlm.files import file_lock, hash_file
from adlm.likelihood import estimate_nll, unigram_nll
from adlm.models import folder as model_folder
from adlm.models.costs import estimate_memory
from adlm.models.evaluator import build_evaluator
from adlm.models.folder import MODEL_FORMAT, ModelDescription
from adlm.models.language_model import LanguageModel, ModelConfig, can_unpad
from adlm.models.methods import METHODS, build_config
from adlm.models.network import read_config
from adlm.models.transformer import unpad
from adlm.registry import build
from adlm.training import state as run_state
from adlm.training.distributed import ParallelModel


@dataclass(frozen=True)
class InitModel:
    """The model of `init`: its architecture and, for a run that does not resume, its weights and their hash."""

    method: str
    shape: ModelConfig
    weights: dict[str, Tensor] | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class TrainingTask:
    """What a run trains: its model, its data, its objective and how it is validated."""

    config: Config  # with the method of `init`
    shape: ModelConfig
    init: InitModel | None
    objective: Objective
    batches: Any  # an endless iterable of batches, with load_state_dict
    validate: Callable[
        [ParallelModel, int], dict[str, float]
    ]  # of a model, in batches of so many rows
    format_metrics: Callable[[Mapping[str, float]], str]
    sample: Callable[[LanguageModel], str]
    data_hash: str
    description: str
    length: int  # positions of a row
    tokenizer: Tokenizer | None
    rows: str = model_folder.WRAPPED
    best_metric: str = "val/nll"  # the lowest value is the best checkpoint
    row_tokens: float | None = None  # of a row on average, without padding; null: its length

    def describe(self, model: LanguageModel) -> ModelDescription:
        """Return the content of the config.json of a model that is trained on this task."""
        process = getattr(self.objective, "process", None)
        return ModelDescription(
            format=MODEL_FORMAT,
            method=str(self.config.method),
            step=0,
            rows=self.rows,
            objective=self.objective.name,
            attend_padding=process is not None and process.attend_padding,
            schedule=None if self.objective.is_causal else self.config.objective.schedule,
            model=read_config(model),
        )


def open_text_task(config: Config, context: DistributedContext) -> TrainingTask:
    """Open the text that a recipe trains on, with the method's model and objective."""
    for section in APP_SECTIONS:
        if hasattr(config, section):
            problem = f"the recipe has settings of {section}.*, which is not for text"
            raise ValueError(f"{problem}: use `adlm reason train`")
    data = open_data_on_all_ranks(config, context)
    valid_rows = data.rows("valid")
    init = load_init(config, data)
    shape = build_model_config(config, data, init)
    config = config.replace(method=init.method if init is not None else str(config.method))
    objective = build_objective(config, shape, data, on_gpu=context.device.type == "cuda")
    sampler: Plan | Sampler = LeftToRight()
    if not shape.is_causal:
        steps = {"steps": config.samples.steps}
        sampler = build(SAMPLERS, config.samples.sampler, steps, allow_import=True)
    unigram_ppl = compute_unigram_ppl(data, valid_rows, config.valid.rows)
    data_hash = str(data.manifest.settings_sha256)  # of the rows: a run resumes only on the same
    batches: ShuffledBatches | StreamedBatches
    part: dict[str, Any] = {"seed": config.seed, "rank": context.rank, "size": context.world_size}
    part["workers"] = config.data.workers
    if config.data.stream is None:
        batches = ShuffledBatches(data.rows("train"), config.batch, **part)
    else:
        for name in config.data.stream_options:
            check_known(
                "key of data.stream_options",
                name,
                list(inspect.signature(open_source).parameters)[1:],
            )
        stream = open_source(config.data.stream, **config.data.stream_options)
        part |= {"is_wrapped": not data.is_padded, "block": config.data.shuffle}
        batches = StreamedBatches(stream, data.tokenizer, data.length, config.batch, **part)
        data_hash = hashlib.sha256(
            json.dumps([data_hash, stream.identity], sort_keys=True).encode("utf-8")
        ).hexdigest()
    train = data.manifest.splits["train"]

    def validate(parallel: ParallelModel, batch: int) -> dict[str, float]:
        estimate = estimate_nll(
            parallel.model,
            valid_rows,
            objective,
            batch=batch,
            draws=config.valid.draws,
            max_rows=config.valid.rows,
            evaluate=parallel.evaluate,
            ranks=context,
        )
        metrics = {"val/nll": estimate.nll, "val/ppl": estimate.ppl, "val/stderr": estimate.stderr}
        return metrics | {"unigram/ppl": unigram_ppl}

    def sample(model: LanguageModel) -> str:
        settings = config.samples
        evaluator = build_evaluator(model, context.device)
        params = SamplingParams(top_p=settings.top_p)
        first = data.tokenizer.bos_id if shape.is_causal else data.mask_id
        assert first is not None  # every row of the data begins with it
        tokens = torch.full((shape.length,), first)
        is_fixed = (torch.arange(shape.length) == 0) & shape.is_causal
        rows = [
            Row(tokens, sampler, is_fixed, seed=config.seed, number=number, sampling=params)
            for number in range(settings.rows)
        ]
        filled = fill_rows(evaluator, rows)
        texts = [data.tokenizer.decode(row.tolist(), skip_special=True) for row in filled]
        return "\n\n<|endoftext|>\n\n".join(texts)

    return TrainingTask(
        config,
        shape,
        init,
        objective,
        batches,
        validate=validate,
        format_metrics=partial(format_validation, is_causal=shape.is_causal),
        sample=sample,
        data_hash=data_hash,
        description=f"{describe_data(config, data)}; {describe_bound(objective)}",
        length=shape.length,
        tokenizer=data.tokenizer,
        rows=data.manifest.rows,
        row_tokens=train.tokens / train.rows,
    )


def describe_data(config: Config, data: PreparedData) -> str:
    """Describe the rows of text that a run trains on."""
    rows, epochs = f"{config.data.stream}, streamed, rows", ""
    if not config.data.stream:
        count = len(data.rows("train"))
        rows, epochs = f"{count:,} rows", f" = {config.steps * config.batch / count:.3g} epochs"
    sizes = f"{data.length} tokens, vocabulary {data.vocab_size:,}"
    return f"{rows} of {sizes}; {config.steps:,} steps of {config.batch} rows{epochs}"


def describe_bound(objective: Objective) -> str:
    """Describe what validation reports."""
    if objective.is_causal:
        return "validation is exact"
    note = f" ({objective.note})" if objective.note else ""
    return f"the bound of validation lacks {objective.missing:.2%} of log(V - 1){note}"


def format_validation(metrics: Mapping[str, float], *, is_causal: bool) -> str:
    """Format the validation metrics and, for comparison, the unigram model's perplexity."""
    bound = "" if is_causal else "at most "
    nll = f"{metrics['val/nll']:.4f} ± {metrics['val/stderr']:.4f} nats per token"
    return f"validation perplexity {bound}{metrics['val/ppl']:.2f} ({nll}); unigram model {metrics['unigram/ppl']:.2f}"


def open_data_on_all_ranks(config: Config, context: DistributedContext) -> PreparedData:
    """Open the prepared data; its checksums are compared once per node, and all ranks must see the same data."""
    data, error = None, ""
    try:
        data = open_data(config.data.path, verify=config.data.verify and context.local_rank == 0)
    except (ValueError, OSError) as caught:  # raised below, on all ranks
        error = str(caught)
    ranks = context.all_gather({"error": error, "data": data and data.manifest.settings_sha256})
    errors = [rank["error"] for rank in ranks if rank["error"]]
    if data is None or errors:
        raise ValueError(errors[0])
    if len({rank["data"] for rank in ranks}) > 1:
        raise ValueError(
            f"the processes see different data in {config.data.path}: copy it again to every node"
        )
    count = len(data.rows("valid")) if "valid" in data.splits else 0
    if count < 2:
        remedy = "prepare it with --valid SOURCE or with --valid-share above 0"
        raise ValueError(
            f"{data.folder} has {count} valid rows, and validation needs at least 2: {remedy}"
        )
    return data


def compute_unigram_ppl(data: PreparedData, rows: ShardedRows, max_rows: int | None) -> float:
    """Compute the perplexity of the unigram model on the rows that validation uses."""
    counts, nats, total = data.counts(), 0.0, 0
    for numbers in torch.arange(len(rows) if max_rows is None else min(max_rows, len(rows))).split(
        1024
    ):
        tokens, lengths = rows.fetch(numbers)
        valid = None if lengths is None else is_valid(lengths, tokens.shape[1])
        count = tokens.numel() if lengths is None else int(lengths.sum())
        nats, total = nats + count * unigram_nll(counts, tokens, valid), total + count
    return math.exp(nats / total)


def restore_data_state(
    states: list[dict[str, Any]], context: DistributedContext, *, is_stream: bool
) -> dict[str, Any]:
    """Choose this rank's dataloader state from those of all ranks that wrote the checkpoint."""
    if is_stream and len(states) != context.world_size:
        problem = f"{context.world_size} processes cannot resume a streamed run of {len(states)}"
        raise ValueError(f"{problem}: start {len(states)} processes")
    return states[context.rank if is_stream else 0]


def load_init(config: Config, data: PreparedData) -> InitModel | None:
    """Load the model of `init`, which the data must fit; a run that resumes has its architecture in its checkpoint."""
    if config.init is None:
        return None
    resumed = find_checkpoint(config)
    if resumed is not None and resumed.is_dir():
        file = model_folder.read_config_json(resumed)
        init = InitModel(file.method, ModelConfig.parse("json", **file.model))
    else:
        is_bundled = config.init in MODELS  # ./NAME is a folder of that name
        folder = model_folder.find_model_folder(
            find_bundled_model(config.init) if is_bundled else config.init
        )
        loaded = model_folder.load_model(folder)
        check_init_data(config, data, loaded, config.init if is_bundled else str(folder))
        sha256 = hash_file(model_folder.find_weights_file(folder))
        init = InitModel(loaded.method, loaded.model.config, loaded.model.state_dict(), sha256)
    if config.method not in (None, init.method):
        raise ValueError(
            f"method={config.method}, and init={config.init} is {init.method}: leave method out"
        )
    return init


def check_init_data(
    config: Config, data: PreparedData, loaded: model_folder.LoadedModel, tokenizer: str
) -> None:
    """Raise ValueError, with the command that makes fitting data, if tokens or rows are not those of `init`."""
    shape, rows, train = (
        loaded.model.config,
        data.manifest.rows,
        data.manifest.splits["train"],
    )
    if loaded.tokenizer is None:
        raise ValueError(
            f"init={config.init} has no tokenizer.json: copy the one of its data into its folder"
        )
    expected, actual = (describe_tokenizer(each) for each in (loaded.tokenizer, data.tokenizer))
    is_same = actual | {"name": ""} == expected | {"name": ""}
    is_same &= (data.vocab_size, data.mask_id) == (shape.vocab_size, shape.mask_id)
    sizes = f"{data.vocab_size:,} tokens, not {expected['name']} with {shape.vocab_size:,}"
    problems = [] if is_same else [f"the tokenizer {actual['name']} with {sizes}"]
    problems += [f"length {data.length}, not {shape.length}"] * (data.length != shape.length)
    problems += [f"{rows} rows, not {loaded.rows}"] * (rows != loaded.rows)
    if problems:
        is_cut = (
            loaded.rows == "documents" and train.documents < train.rows
        )  # then a paragraph is a document
        source, out = (
            "SOURCE --documents blank" if is_cut else "SOURCE",
            shlex.quote(f"{config.data.path}-init"),
        )
        raise ValueError(
            f"data.path={config.data.path} does not fit init={config.init}: it has {'; '.join(problems)}. Prepare the "
            f"text for it: adlm prepare {source} --out {out} --tokenizer {shlex.quote(tokenizer)} "
            f"--length {shape.length} --rows {loaded.rows}"
        )


def build_model_config(
    config: Config, data: PreparedData, init: InitModel | None = None
) -> ModelConfig:
    """Build the method's model config from preset, recipe and data; with `init` it is that model's, with which settings
    of the recipe must agree, except for dropout."""
    changes = {
        key: value
        for key, value in vars(config.model).items()
        if key != "preset" and value is not None
    }
    if changes.get("cond_dim") == 0:
        changes["cond_dim"] = None
    method = init.method if init is not None else str(config.method)
    if not METHODS.resolve(method).two_stages and changes.pop("anchor_layers", 0):
        anchor_layers = config.model.anchor_layers
        raise ValueError(
            f"model.anchor_layers={anchor_layers}, but {method} has one stage: set model.denoiser_layers instead"
        )
    changes |= {"vocab_size": data.vocab_size, "mask_id": data.mask_id, "length": data.length}
    shape = build_config(method, config.model.preset, **changes) if config.model.preset else None
    if init is None:
        assert shape is not None
        return shape
    expected, given = init.shape.model_dump(), changes if shape is None else shape.model_dump()
    if wrong := [key for key in given if given[key] != expected[key] and key != "dropout"]:
        listed = "; ".join(
            f"model.{key} is {given[key]} in the recipe, {expected[key]} in init" for key in wrong
        )
        raise ValueError(
            f"init={config.init} has another model: {listed}. Use a recipe without model.*: fine-tune"
        )
    return init.shape.replace(dropout=given.get("dropout", init.shape.dropout))


def build_objective(
    config: Config, model: ModelConfig, data: PreparedData, *, on_gpu: bool
) -> Objective:
    """Build the training objective of a recipe."""
    settings, rule = config.objective, None
    if model.anchor_layers:
        factory = ANCHOR_RULES.resolve(settings.anchor_rule, allow_import=True)
        known = inspect.signature(factory).parameters
        given = {**vars(settings), "seed": config.seed, "vocab_size": data.vocab_size}
        options = {key: value for key, value in given.items() if key in known and value is not None}
        if "counts" in known:
            options["counts"] = data.counts()
        if "document_counts" in known:
            options |= count_documents(data)
        rule = build(ANCHOR_RULES, settings.anchor_rule, options, allow_import=True)
    process = build_process(config, model.mask_id, rule, on_gpu=on_gpu)
    # The kernel for rows of different lengths is one of half precision.
    is_unpadded = on_gpu and config.precision != "float32" and can_unpad(model)
    is_unpadded = is_unpadded and can_leave_padding_out()
    process = replace(process, arrange_valid=unpad if is_unpadded else None)
    method = METHODS.resolve(str(config.method))
    return OBJECTIVES.resolve(method.objective)(process)


def build_process(
    config: Config, mask_id: int | None, rule: AnchorRule | None, *, on_gpu: bool
) -> ForwardProcess:
    """Build the forward process of a recipe."""
    settings = config.objective
    return ForwardProcess(
        mask_id,
        schedule=build(SCHEDULES, settings.schedule, settings.schedule_options, allow_import=True),
        anchor_rule=rule,
        anchor_scope=settings.anchor_scope,
        attend_padding=settings.attend_padding,
        steps=settings.discrete_steps,
        time_std=settings.time_std,
        multiple=64 if on_gpu else 1,
        anchor_weight=settings.anchor_weight,
        ramp_steps=config.steps if settings.anchor_ramp else None,
    )


def count_documents(data: PreparedData, max_rows: int = 100_000) -> dict[str, Any]:
    """Count in how many of the first rows each token occurs, for tf-idf: a row is a document."""
    rows, counts = data.rows("train"), torch.zeros(data.vocab_size, dtype=torch.int64)
    count = min(len(rows), max_rows)
    for numbers in torch.arange(count).split(1024):
        tokens = rows.fetch(numbers)[0].long()
        counts += (
            torch.zeros(len(tokens), data.vocab_size, dtype=torch.bool)
            .scatter_(1, tokens, True)
            .sum(0)
        )
    return {"document_counts": counts, "documents": count}


def check_memory(
    config: Config,
    model: ModelConfig,
    context: DistributedContext,
    rows: int,
    length: int,
    precision: torch.dtype,
) -> None:
    """Raise MemoryError if a step is estimated not to fit, before anything is built."""
    kind, is_cuda = config.parallel.kind, context.device.type == "cuda"
    shards = {
        "fsdp": context.world_size,
        "hsdp": config.parallel.shard or context.local_world_size,
    }.get(kind, 1)
    needed = estimate_memory(
        model,
        rows=rows,
        length=length,
        bytes_per_activation=2 if precision == torch.bfloat16 else 4,
        ema=config.ema is not None,
        shards=shards,
        checkpoint_activations=config.parallel.checkpoint_activations,
        is_cuda=is_cuda,
    )
    needed *= 1 if is_cuda else context.local_world_size  # processes that share this memory
    available = get_available_memory(context.device)
    if config.memory_check and needed > available:
        raise MemoryError(
            f"a step of {rows} × {length} tokens takes about {format_bytes(needed)}; {format_bytes(int(available))} "
            f"are free on {context.device}. Reduce micro_batch (now {rows}), set parallel.checkpoint_activations=true, "
            "shard the weights with parallel.kind=fsdp, or choose a smaller model.preset; memory_check=false skips this"
        )


def lock_run_folder(folder: Path, exit_stack: ExitStack) -> None:
    """Lock the folder, so that no other process trains in it, until the exit stack or the process ends."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={folder} is a file: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    message = f"another process trains in {folder}: wait for it, or choose another folder"
    exit_stack.enter_context(file_lock(folder / ".lock", message))


def find_checkpoint(config: Config) -> Path | None:
    """Find the checkpoint to resume from, which need not exist if `resume` names it; None for a new run."""
    if config.resume == "auto":
        return model_folder.find_latest_checkpoint(Path(config.folder) / "checkpoints")
    return Path(config.resume).resolve()


def find_resume_checkpoint(config: Config, data_hash: str) -> Path | None:
    """Find and verify the checkpoint to resume from; None for a new run."""
    folder, checkpoints = Path(config.folder), Path(config.folder) / "checkpoints"
    run_state.restore_links(checkpoints)
    path = find_checkpoint(config)
    if path is None:
        return None
    if not path.is_dir():
        names = ", ".join(map(str, model_folder.list_checkpoints(checkpoints))) or "none"
        raise ValueError(
            f"resume={config.resume} is not a checkpoint: expected auto or one of {names}"
        )
    run_state.verify_checkpoint(path)
    state = run_state.read_state(path)
    saved = folder / "config.yaml"
    if saved.is_file() and (changes := compare_configs(load_config(saved), config)):
        remedy = "Choose another folder, or restore these settings to resume"
        raise ValueError(f"{folder} has a run with other settings: {'; '.join(changes)}. {remedy}")
    if state.data != data_hash:
        raise ValueError(
            f"{folder} was trained on other data than {config.data.path} (another text, tokenizer or length): resume "
            "with the same data, or choose another folder"
        )
    if config.resume != "auto" and path.parent == checkpoints.resolve():
        run_state.set_aside_later(path)
    return path
