"""Training on text: prepared rows, or a source that is streamed."""

import hashlib
import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adlm.bundled import MODELS, find_bundled_model
from adlm.config import APP_SECTIONS, Config
from adlm.data.batches import ShuffledBatches, StreamedBatches
from adlm.data.shards import PreparedData, describe_tokenizer, open_data
from adlm.data.sources import Source, open_source
from adlm.devices import can_leave_padding_out
from adlm.diffusion.anchors import ANCHOR_RULES, AnchorRule
from adlm.diffusion.features import FeatureModel, find_anchor_head
from adlm.diffusion.masking import ForwardProcess
from adlm.diffusion.objectives import (
    OBJECTIVES,
    Objective,
    ObjectiveSettings,
    choose_objective,
)
from adlm.diffusion.plans import Plan
from adlm.diffusion.samplers import LeftToRight, choose_sampler, takes_steps
from adlm.diffusion.sampling import Sampler
from adlm.diffusion.schedules import SCHEDULES
from adlm.distributed import DistributedContext
from adlm.errors import check_known
from adlm.files import hash_file
from adlm.models import folder as model_folder
from adlm.models.language_model import LanguageModel, ModelConfig, can_unpad
from adlm.models.methods import METHODS, build_config
from adlm.models.network import (
    NETWORKS,
    NetworkClass,
    build_network,
    choose_network,
    read_network_config,
)
from adlm.models.transformer import unpad
from adlm.registry import build
from adlm.settings import (
    SamplingSettings,
    SettingsError,
    derive_settings,
)
from adlm.training.distributed import ParallelModel
from adlm.training.setup import find_checkpoint
from adlm.training.task import Batches, InitModel, Task
from adlm.training.validation import (
    SampleSettings,
    compute_unigram_ppl,
    describe_bound,
    format_validation,
    sample_texts,
    validate_rows,
)


class TextTask(Task):
    """Rows of text, with the method's network and objective."""

    def __init__(self, config: Config, context: DistributedContext) -> None:
        for section in APP_SECTIONS:
            if hasattr(config, section):
                problem = f"the recipe has settings of {section}.*, which is not for text"
                raise ValueError(f"{problem}: use `adlm reason train`")
        self.context = context
        self.data = open_data_on_all_ranks(config, context)
        self.valid_rows = self.data.rows("valid")
        self.init = load_init(config, self.data)
        self.config = config
        if config.model.network is None:
            self.shape = build_model_config(config, self.data, self.init)
            method = config.method if self.init is None else self.init.method
            self.config = config.replace(method=method)
        else:
            self.network = choose_own_network(config)
            self.shape = build_own_config(config, self.network, self.data, self.init)
        on_gpu = context.device.type == "cuda"
        probe = build_network(self.network, self.shape, seed=None)
        self.objective = build_objective(self.config, probe, self.data, on_gpu=on_gpu)
        self.sampler: Plan | Sampler = LeftToRight()
        if not self.shape.is_causal:
            self.sampler = build_recipe_sampler(config.samples, self.shape.length)
        self.unigram_ppl = compute_unigram_ppl(self.data, self.valid_rows, config.valid.rows)

        self.stream = open_stream(config)
        train = self.data.manifest.splits["train"]
        self.tokenizer = self.data.tokenizer
        self.data_hash = hash_data(self.data, self.stream)
        self.description = f"{describe_data(config, self.data)}; {describe_bound(self.objective)}"
        self.length = self.shape.length
        self.row_tokens = train.tokens / train.rows
        self.rows = self.data.manifest.rows

    def open_batches(self) -> Batches:
        """Open the rows of the train split, shuffled, or those of a stream."""
        config = self.config
        part: dict[str, Any] = {
            "seed": config.seed,
            "rank": self.context.rank,
            "size": self.context.world_size,
            "workers": config.data.workers,
        }
        if self.stream is None:
            return ShuffledBatches(self.data.rows("train"), config.batch, **part)
        return StreamedBatches(
            self.stream,
            self.data.tokenizer,
            self.data.length,
            config.batch,
            is_wrapped=not self.data.is_padded,
            block=config.data.shuffle,
            **part,
        )

    def validate(self, parallel: ParallelModel, batch: int) -> dict[str, float]:
        """Compute the bound on the valid split."""
        metrics = validate_rows(
            parallel,
            self.valid_rows,
            self.objective,
            self.config.valid,
            batch=batch,
            context=self.context,
        )
        return metrics | {"unigram/ppl": self.unigram_ppl}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the perplexity, and that of the unigram model."""
        return format_validation(metrics, is_causal=self.shape.is_causal)

    def sample(self, model: FeatureModel) -> str:
        """Sample texts."""
        return sample_texts(
            model,
            self.data.tokenizer,
            self.sampler,
            self.config.samples,
            seed=self.config.seed,
            device=self.context.device,
        )


def open_stream(config: Config) -> Source | None:
    """Open the source of a run that streams its text."""
    if config.data.stream is None:
        return None
    known = list(inspect.signature(open_source).parameters)[1:]
    for name in config.data.stream_options:
        check_known("key of data.stream_options", name, known)
    return open_source(config.data.stream, **config.data.stream_options)


def hash_data(data: PreparedData, stream: Source | None) -> str:
    """Identify the rows that a run trains on."""
    data_hash = data.manifest.settings_sha256
    if stream is None:
        return data_hash
    content = json.dumps([data_hash, stream.identity], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def describe_data(config: Config, data: PreparedData) -> str:
    """Describe the rows of text that a run trains on."""
    rows = f"{config.data.stream}, streamed, rows"
    epochs = ""
    if not config.data.stream:
        count = len(data.rows("train"))
        rows = f"{count:,} rows"
        epochs = f" = {config.steps * config.batch / count:.3g} epochs"
    sizes = f"{data.length} tokens, vocabulary {data.vocab_size:,}"
    return f"{rows} of {sizes}; {config.steps:,} steps of {config.batch} rows{epochs}"


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


def load_init(config: Config, data: PreparedData) -> InitModel | None:
    """Load the model of `init`, which the data must fit; a run that resumes has its architecture in its checkpoint."""
    if config.init is None:
        return None
    resumed = find_checkpoint(config)
    if resumed is not None and resumed.is_dir():
        described = model_folder.read_config_json(resumed)
        check_init_parts(config, described)
        network = choose_network(described.network, config.model.network)
        init = InitModel(described.method, model_folder.read_shape(resumed, described, network))
    else:
        is_bundled = config.init in MODELS  # ./NAME is a folder of that name
        path = find_bundled_model(config.init) if is_bundled else config.init
        folder = model_folder.find_model_folder(path)
        described = model_folder.read_config_json(folder)
        check_init_parts(config, described)
        # Its objective is not that of the run, and of one's own it is loaded with the folder.
        is_built_in = described.objective_name in OBJECTIVES
        loaded = model_folder.load_model(
            folder,
            network=config.model.network,
            objective=None if is_built_in else config.objective.name,
        )
        check_init_data(config, data, loaded, config.init if is_bundled else str(folder))
        sha256 = hash_file(model_folder.find_weights_file(folder))
        init = InitModel(loaded.method, loaded.model.config, loaded.model.state_dict(), sha256)
    if config.method not in (None, init.method):
        problem = f"method={config.method}, and init={config.init} is {init.method}"
        raise ValueError(f"{problem}: leave method out")
    return init


def check_init_parts(config: Config, described: model_folder.ModelDescription) -> None:
    """Raise ValueError unless the recipe names the network and the objective of `init` that are not built in."""
    is_own = described.network not in NETWORKS
    if is_own and config.model.network is None:
        raise ValueError(
            f"init={config.init} has the network {described.network!r:.80}, which is not built in: "
            "if you trust its code, set model.network=MODULE:OBJECT"
        )
    if not is_own and config.model.network is not None:
        raise ValueError(
            f"model.network={config.model.network}, and init={config.init} has the built-in "
            f"network {described.network!r}: leave model.network out, or choose another init"
        )
    if described.objective_name not in OBJECTIVES and config.objective.name is None:
        raise ValueError(
            f"init={config.init} has the objective {described.objective_name!r:.80}, which is not "
            "built in: set objective.name to it, if you trust its code, or to another one"
        )


def check_init_data(
    config: Config, data: PreparedData, loaded: model_folder.LoadedModel, tokenizer: str
) -> None:
    """Raise ValueError, with the command that makes fitting data, if tokens or rows are not those of `init`."""
    if loaded.tokenizer is None:
        problem = f"init={config.init} has no tokenizer.json"
        raise ValueError(f"{problem}: copy the one of its data into its folder")
    problems = list_init_problems(data, loaded, describe_tokenizer(loaded.tokenizer))
    if not problems:
        return
    train = data.manifest.splits["train"]
    is_cut = loaded.rows == "documents" and train.documents < train.rows
    source = "SOURCE --documents blank" if is_cut else "SOURCE"  # a paragraph is a document
    out = shlex.quote(f"{config.data.path}-init")
    command = (
        f"adlm prepare {source} --out {out} --tokenizer {shlex.quote(tokenizer)} "
        f"--length {loaded.model.config.length} --rows {loaded.rows}"
    )
    raise ValueError(
        f"data.path={config.data.path} does not fit init={config.init}: it has "
        f"{'; '.join(problems)}. Prepare the text for it: {command}"
    )


def list_init_problems(
    data: PreparedData, loaded: model_folder.LoadedModel, expected: Mapping[str, Any]
) -> list[str]:
    """List how the rows of data differ from those of a model, whose tokenizer is described."""
    shape = loaded.model.config
    actual = describe_tokenizer(data.tokenizer)
    problems = []
    is_same = all(actual[key] == expected[key] for key in actual if key != "name")
    if not is_same or (data.vocab_size, data.mask_id) != (shape.vocab_size, shape.mask_id):
        sizes = f"{data.vocab_size:,} tokens, not {expected['name']} with {shape.vocab_size:,}"
        problems.append(f"the tokenizer {actual['name']} with {sizes}")
    if data.length != shape.length:
        problems.append(f"length {data.length}, not {shape.length}")
    if data.manifest.rows != loaded.rows:
        problems.append(f"{data.manifest.rows} rows, not {loaded.rows}")
    return problems


def build_model_config(
    config: Config, data: PreparedData, init: InitModel | None = None
) -> ModelConfig:
    """Build the method's model config from preset, recipe and data; with `init` it is that model's, with which settings
    of the recipe must agree, except for dropout."""
    method = str(config.method) if init is None else init.method
    changes = config.model.list_changes()
    if changes.get("cond_dim") == 0:
        changes["cond_dim"] = None
    if not METHODS.resolve(method).two_stages and changes.pop("anchor_layers", 0):
        problem = f"model.anchor_layers={config.model.anchor_layers}, but {method} has one stage"
        raise ValueError(f"{problem}: set model.denoiser_layers instead")
    changes |= {"vocab_size": data.vocab_size, "mask_id": data.mask_id, "length": data.length}
    shape = None
    if config.model.preset is not None:
        shape = build_config(method, config.model.preset, **changes)
    if init is None:
        assert shape is not None  # the recipe's, or the default
        return shape

    expected = init.shape.model_dump()
    given = changes if shape is None else shape.model_dump()
    wrong = [
        f"model.{key} is {value} in the recipe, {expected[key]} in init"
        for key, value in given.items()
        if value != expected[key] and key != "dropout"
    ]
    if wrong:
        problem = f"init={config.init} has another model: {'; '.join(wrong)}"
        raise ValueError(f"{problem}. Use a recipe without model.*: fine-tune")
    return init.shape.replace(dropout=given.get("dropout", init.shape.dropout))


def choose_own_network(config: Config) -> NetworkClass:
    """Return the network that a recipe names, which takes none of the transformer's settings."""
    name = str(config.model.network)
    given = list(config.model.list_changes())
    if config.model.preset is not None:
        given.append("preset")
    if given or config.method is not None:
        key = f"model.{given[0]}" if given else "method"
        raise ValueError(
            f"{key} is a setting of the transformer, and model.network={name} is a network of your "
            "own: give its settings as model.options.NAME=VALUE, and objective.name"
        )
    return NETWORKS.resolve(name, allow_import=True)


def build_own_config(
    config: Config, network: NetworkClass, data: PreparedData, init: InitModel | None
) -> Any:
    """Build the config of a network that a recipe names; with `init` it is that network's."""
    if init is not None:
        return init.shape
    settings = {"vocab_size": data.vocab_size, "mask_id": data.mask_id, "length": data.length}
    return read_network_config(network, settings | (config.model.options or {}))


def build_objective(
    config: Config, model: FeatureModel, data: PreparedData, *, on_gpu: bool
) -> Objective:
    """Build the training objective of a recipe."""
    rule = None if find_anchor_head(model) is None else build_rule(config, data)
    process = build_process(config, model.config.mask_id, rule, on_gpu=on_gpu)
    # The kernel for rows of different lengths is one of half precision.
    has_kernel = on_gpu and config.precision != "float32" and can_leave_padding_out()
    if has_kernel and isinstance(model, LanguageModel) and can_unpad(model.config):
        process = replace(process, arrange_valid=unpad)
    name = config.objective.name
    if name is None and config.method is not None:
        name = METHODS.resolve(config.method).objective
    if name is None:
        name = "causal" if model.config.is_causal else "masked"
    objective = choose_objective(name, process, name)
    if objective.is_causal != model.config.is_causal:
        kind = "causal" if model.config.is_causal else "masked"
        raise ValueError(f"objective.name={name} does not fit a {kind} network: choose another one")
    return objective


def build_rule(config: Config, data: PreparedData) -> AnchorRule:
    """Build the anchor rule of a recipe, with the settings and the counts that it takes."""
    name = config.objective.anchor_rule
    factory = ANCHOR_RULES.resolve(name, allow_import=True)
    known = inspect.signature(factory).parameters
    given = dict(config.objective) | {"seed": config.seed, "vocab_size": data.vocab_size}
    options = {key: given[key] for key in known if given.get(key) is not None}
    if "counts" in known:
        options["counts"] = data.counts()
    if "document_counts" in known:
        options |= count_documents(data)
    options |= read_anchor_options(config, factory, list(options))
    return build(ANCHOR_RULES, name, options, allow_import=True)


def read_anchor_options(
    config: Config, factory: Callable[..., AnchorRule], supplied: Sequence[str]
) -> dict[str, Any]:
    """Check an anchor rule's own options by the parameters of its function, and return them."""
    options = config.objective.anchor_options
    if not options:
        return {}
    key = {"objective.anchor_options": options}
    of_recipe = [name for name in options if name in ObjectiveSettings.model_fields]
    if of_recipe:
        raise SettingsError(key, f"{of_recipe[0]} is given as objective.{of_recipe[0]}")
    try:
        checked = derive_settings(factory, *supplied).parse("recipe", None, **options)
    except SettingsError as error:
        raise SettingsError(key, f"of {config.objective.anchor_rule}, {error}") from None
    return {name: getattr(checked, name) for name in options}


def build_recipe_sampler(settings: SampleSettings, length: int) -> Plan | Sampler:
    """Build the sampler of a recipe, as a request would, with its steps where it takes some."""
    has_steps = takes_steps(settings.sampler, allow_import=True)
    steps = settings.steps if has_steps else None
    request = SamplingSettings(sampler=settings.sampler, steps=steps)
    return choose_sampler(request, hidden=length, allow_import=True)[0]


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
    rows = data.rows("train")
    count = min(len(rows), max_rows)
    counts = torch.zeros(data.vocab_size, dtype=torch.int64)
    for numbers in torch.arange(count).split(1024):
        tokens = rows.fetch(numbers)[0].long()
        occurs = torch.zeros(len(tokens), data.vocab_size, dtype=torch.bool)
        counts += occurs.scatter_(1, tokens, True).sum(0)
    return {"document_counts": counts, "documents": count}
