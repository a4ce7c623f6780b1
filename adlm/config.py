"""The config of a training run: dataclasses, filled from a YAML recipe and `key=value` changes, and validated."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import CollectionEndEvent, CollectionStartEvent, YAMLError

from adlm.errors import suggest_names
from adlm.files import write_atomically
from adlm.models.language_model import ModelConfig
from adlm.settings import DEFAULT_SAMPLER, DEFAULT_STEPS, DEFAULT_TOP_P

PACKAGE = Path(__file__).resolve().parent
RECIPE_FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # in a wheel, in a checkout
MAX_DEPTH = (
    20  # of the lists and mappings of a recipe; deep nesting overflows the stack of the YAML loader
)
TOO_DEEP = f"more than {MAX_DEPTH} levels deep: a recipe has `key: value` lines"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # as OmegaConf
PATH_KEYS = ("folder", "init", "resume", "data.path", "data.stream", "reasoning.path")
DEFAULTS = {"method": "adlm", "model.preset": "small"}  # without init, whose own they are otherwise
INTERPOLATION = re.compile(r"\$\{[^}]*\}*")
# Keys and sections that a run may resume with other values of; all others change what it computes.
RESUMABLE = """
log checkpoint samples valid parallel guard folder steps device micro_batch compile memory_check resume
data.path data.workers data.verify reasoning.tests reasoning.samplers
"""
POSITIVE_KEYS = """
steps batch micro_batch log.every valid.every valid.batch valid.draws samples.every samples.rows samples.steps
checkpoint.every checkpoint.keep data.shuffle model.dim model.heads optimizer.lr optimizer.muon_lr optimizer.clip
objective.discrete_steps objective.time_std guard.spike guard.window parallel.shard
reasoning.hops reasoning.stages reasoning.stage_steps reasoning.slots_per_stage reasoning.tests
"""
NON_NEGATIVE_KEYS = "objective.anchor_weight data.workers optimizer.warmup reasoning.label_weight"
CHOICES = {
    "optimizer.name": ("adamw", "muon"),
    "optimizer.decay": ("constant", "cosine", "wsd"),
    "precision": ("auto", "float32", "bfloat16"),
    "parallel.kind": ("auto", "none", "ddp", "fsdp", "hsdp"),
}
# Which values of a key are allowed, and how an error says it; null is always allowed.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{key: (lambda value: value > 0, "above 0") for key in POSITIVE_KEYS.split()},
    **{key: (lambda value: value >= 0, "at least 0") for key in NON_NEGATIVE_KEYS.split()},
    **{
        key: (values.__contains__, f"one of {', '.join(values)}") for key, values in CHOICES.items()
    },
    "valid.rows": (lambda value: value > 1, "at least 2 for a standard error"),
    "seed": (lambda value: 0 <= value < 2**63, "between 0 and 2**63 - 1"),
    "ema": (lambda value: 0 <= value < 1, "in [0, 1) or null"),
    "reasoning.revisit": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "optimizer.floor": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "optimizer.decay_share": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "samples.top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
}


@dataclass(frozen=True)
class DataSettings:
    """The training data; vocabulary, mask id and length are in its manifest."""

    path: str = MISSING  # required: a folder written by `adlm prepare`
    stream: str | None = None  # a source to stream instead of the train split of data.path
    stream_options: dict[str, str] = field(
        default_factory=dict
    )  # split, column, documents, detokenizer
    shuffle: int = 1024  # rows in the shuffle buffer of a stream
    workers: int = 0  # dataloader processes
    verify: bool = True  # compare the shards with their checksums at the start


# The model: a preset (null: small, or the architecture of init) and changes to it. The keys are those of ModelConfig,
# except for what data and method say; null is the preset's value, or that of init, and cond_dim=0 is no modulation.
FIXED = ("vocab_size", "mask_id", "length", "is_causal")
MODEL_KEYS = [
    (key, kind | None, None)
    for key, kind in get_type_hints(ModelConfig).items()
    if key not in FIXED
]
MODULE = {"__module__": __name__}  # so that pickle finds the class
ModelSettings = make_dataclass(
    "ModelSettings", [("preset", str | None, None), *MODEL_KEYS], frozen=True, namespace=MODULE
)


@dataclass(frozen=True)
class ObjectiveSettings:
    """The training objective: noise schedule, anchors and their weight in the ANELBO."""

    schedule: str = "loglinear"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    anchor_rule: str = "rare_in_sequence"
    max_count: int | None = 5  # rare_in_sequence, frequent_in_sequence: tau
    max_fraction: float | None = None  # rare_in_sequence (with max_count=null), rare_in_corpus
    top_fraction: float | None = None  # tf_idf
    fraction: float | None = None  # random
    ids: list[int] | None = None  # listed
    anchor_scope: str = "all"
    anchor_weight: float = 3e-3
    anchor_ramp: bool = True  # gamma is min(anchor_weight, step / steps)
    attend_padding: bool = False  # as the lineage on LM1B: padding is masked and attended like text
    discrete_steps: int | None = None
    time_std: float | None = None  # of training times around 1/2; null: uniform times


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and the learning rate schedule."""

    name: str = "adamw"  # or muon
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0  # with muon, of its matrices alone
    muon_lr: float = 0.02  # muon: of the layers' matrices
    muon_momentum: float = 0.95
    split_qkv: bool = False  # muon: queries, keys and values as three matrices
    muon_beta2: float | None = (
        None  # muon: rows are divided by the root of their mean square, averaged with this decay
    )
    clip: float = 1.0  # maximal gradient norm
    warmup: int = 2500  # steps of linear warm-up
    decay: str = "constant"  # or cosine, wsd (warm-up, stable, decay)
    decay_share: float = 0.2  # wsd: the last part of the steps, in which it falls to 0
    floor: float = 0.1  # cosine: where it ends, as a share of the peak


@dataclass(frozen=True)
class ValidSettings:
    """Validation: the NELBO of held-out rows with fixed noise, exact for causal models."""

    every: int = 5000
    rows: int | None = 1024  # the first rows; null: all
    batch: int | None = None  # rows per forward in a process; null: micro_batch
    draws: int = 1  # noise draws per row


@dataclass(frozen=True)
class SampleSettings:
    """Samples written during training."""

    every: int | None = None  # steps; null: none
    rows: int = 2
    sampler: str = DEFAULT_SAMPLER
    steps: int = DEFAULT_STEPS
    top_p: float = DEFAULT_TOP_P


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    every: int = 5000
    keep: int = 2  # number of latest checkpoints to keep, besides the best
    background: bool = True  # write in a thread while training continues


@dataclass(frozen=True)
class LogSettings:
    """Logging."""

    every: int = 10
    track: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio
    show: bool = True  # print progress


@dataclass(frozen=True)
class GuardSettings:
    """Protection against divergence."""

    spike: float | None = (
        20.0  # stop at so many standard deviations above the mean; null: only if not finite
    )
    window: int = 200  # steps of that mean


@dataclass(frozen=True)
class ParallelSettings:
    """Parallelism over the processes that torchrun starts."""

    kind: str = "auto"  # auto (ddp with several processes), none, ddp, fsdp, hsdp
    shard: int | None = None  # hsdp: processes per replica; null: those of a node
    checkpoint_activations: bool = False


@dataclass(frozen=True)
class ReasoningSettings:
    """Training to reason (`adlm reason train`): a task of adlm.apps.reasoning instead of text."""

    task: str | None = None  # null: text; arithmetic, graphs, chains, sudoku, gsm8k, …
    arm: str = "cot"  # which tokens, labels and inputs: adlm.apps.reasoning.arms
    path: str | None = None  # folder of the task's files; generated tasks use it for a second test
    tokenizer: str | None = None  # of a text task; null: that of init
    hops: int = 4  # generated tasks: training problems have 1 to this many
    stages: int | None = None  # of the curriculum; null: those of the arm, else hops
    stage_steps: int = 500  # optimizer steps of a stage
    slots_per_stage: int = 1
    revisit: float = 0.1  # probability that a row is laid out as in an earlier stage
    label_weight: float = 1.0  # of a labelled slot in the loss; a token has 1
    tests: int = 4000  # problems of each test set
    samplers: list[str] = field(
        default_factory=lambda: ["confidence"]
    )  # arms mdlm, adlm; the first one validates


@dataclass(frozen=True)
class Config:
    """A training run. The defaults are the paper's."""

    folder: str = MISSING  # required: the run folder
    init: str | None = (
        None  # start from the weights of a bundled model, a run or a checkpoint; null: from scratch
    )
    method: str | None = None  # null: adlm, or that of init
    steps: int = 1_000_000
    batch: int = 512  # rows per step, over all processes
    micro_batch: int | None = None  # rows per forward in a process; null: all
    seed: int = 0
    ema: float | None = 0.9999  # decay of the weights' moving average; null: none
    device: str = "auto"  # or cpu, cuda
    precision: str = "auto"  # auto: bfloat16 (autocast) on a GPU, float32 elsewhere
    compile: bool | None = None  # torch.compile of the layers; null: on a GPU
    memory_check: bool = True  # stop before the first step if the memory estimate does not fit
    resume: str = "auto"  # auto: from the folder's latest checkpoint; or the path of a checkpoint
    data: DataSettings = field(default_factory=DataSettings)
    reasoning: ReasoningSettings = field(default_factory=ReasoningSettings)
    model: Any = field(default_factory=ModelSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    valid: ValidSettings = field(default_factory=ValidSettings)
    samples: SampleSettings = field(default_factory=SampleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def __post_init__(self) -> None:
        for key, (is_allowed, expectation) in LIMITS.items():
            value = attrgetter(key)(self)
            if value is not None and not is_allowed(value):
                raise ValueError(f"config: {key} must be {expectation}, got {value}")


SECTIONS = [key for key, value in vars(Config()).items() if is_dataclass(value)]


def load_config(
    recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any
) -> Config:
    """Load a recipe (a file, the name of a shipped one, a mapping), then apply `key=value` changes and keywords:
    sections (`data={"path": ...}`) or dotted keys."""
    merged: Any = OmegaConf.structured(Config)
    for node in (
        merged,
        *(merged[key] for key in SECTIONS),
    ):  # frozen dataclasses become read-only nodes
        OmegaConf.set_readonly(node, False)
    source = str(recipe) if isinstance(recipe, str | Path) else "the recipe"  # for error messages
    try:
        merged.merge_with(_refuse_interpolation(source, _read_recipe(recipe)))
        for source in changes:
            _refuse_interpolation(source, source)
            key, equals, text = source.partition("=") if isinstance(source, str) else ("", "", "")
            if not equals or not key.strip():
                raise ValueError(
                    f"{source!r} is not an override: write key=value, such as steps=1000 or data.path=FOLDER"
                )
            if (
                key in ("folder", "init", "data.path") and text != "null"
            ):  # names such as 2026-11-15 or 1e3 stay text
                OmegaConf.update(merged, key, text)
            else:
                _refuse_nesting(key, text)
                merged.merge_with_dotlist([source])
        for source, value in settings.items():
            OmegaConf.update(merged, source, _refuse_interpolation(source, value))
        for key, value in DEFAULTS.items():
            if merged.init is None and OmegaConf.select(merged, key) is None:
                OmegaConf.update(merged, key, value)
        missing = sorted(OmegaConf.missing_keys(merged))
        if (
            merged.reasoning.task is not None and "data.path" in missing
        ):  # its problems are in reasoning.path, or made
            OmegaConf.update(merged, "data.path", "")
            missing.remove("data.path")
        if missing:
            raise ValueError(
                f"config: {', '.join(missing)} must be given, for example {missing[0]}=FOLDER"
            )
        for key in PATH_KEYS:  # shells do not expand the ~ of key=~/folder
            if value := OmegaConf.select(merged, key):
                OmegaConf.update(merged, key, os.path.expanduser(value))
        return cast(Config, OmegaConf.to_object(merged))
    except YAMLError as error:
        raise ValueError(
            f"config: {key}={text!r:.80} is no YAML value: put quotes around it"
        ) from error
    except RecursionError as error:  # by YAML aliases, or by a mapping of the caller
        raise ValueError(f"{source} is nested {TOO_DEEP}") from error
    except OmegaConfBaseException as error:
        key, problem = getattr(error, "full_key", None) or source, str(error).splitlines()[0]
        if "not in" not in problem and "Key" not in problem:
            raise ValueError(f"config: {key}: {problem}") from error
        known = list(_flatten(Config()))
        hint = suggest_names(key, known) or f": expected one of {', '.join(known)}"
        raise ValueError(f"config: unknown key {key!r}{hint}") from error


def save_config(config: Config, path: Path) -> None:
    """Write the whole config as YAML: a recipe that repeats the run."""
    settings = asdict(config) | {
        "resume": "auto"
    }  # where a process resumed is no setting of the run
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(settings)).encode("utf-8"))


def compare_configs(old: Config, new: Config) -> list[str]:
    """List the settings that prevent resuming `old` as `new`, each with both values."""
    before, after, resumable = _flatten(old), _flatten(new), set(RESUMABLE.split())
    keys = [
        key
        for key in before
        if before[key] != after[key] and not {key, key.split(".")[0]} & resumable
    ]
    return [f"{key}: {before[key]} then, {after[key]} now" for key in keys]


def list_recipes() -> dict[str, Path]:
    """Return the files of the recipes that ship with the package, by name."""
    folder = next(folder for folder in RECIPE_FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read_recipe(recipe: Config | Mapping[str, Any] | str | Path | None) -> Any:
    if recipe is None or isinstance(recipe, Mapping):
        return dict(recipe or {})
    if isinstance(recipe, Config):
        return asdict(recipe)
    path, recipes = Path(recipe), list_recipes()
    if not path.is_file():
        # `recipes/x.yaml` works from any folder: the recipes are also in the package.
        name = path.name.removesuffix(".yaml")
        if name not in recipes or (path.parent != Path() and path.parent.name != "recipes"):
            hint = suggest_names(name, recipes)
            raise ValueError(
                f"unknown recipe {str(recipe)!r}{hint}: expected a file or one of {', '.join(recipes)}"
            )
        path = recipes[name]
    try:
        _refuse_nesting(path, path.read_bytes())
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(
            f"{path} is not YAML ({' '.join(str(error).split())}): correct this line"
        ) from error
    if not OmegaConf.is_dict(loaded):
        raise ValueError(f"{path.name} is not a recipe: its top level must be `key: value` lines")
    return loaded


def _refuse_nesting(source: str | Path, content: str | bytes) -> None:
    """Refuse YAML that is nested so deeply that loading it could overflow the stack, which ends the process."""
    depth = 0
    for event in yaml.parse(content, LOADER):  # which does not recurse
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"{source} is nested {TOO_DEEP}")


def _refuse_interpolation(source: str, value: Any) -> Any:
    """Return a value without `${…}`: it would copy the environment into config.yaml and the trackers."""
    if found := INTERPOLATION.search(str(value)):
        raise ValueError(
            f"config: {source} has {found[0]}, which is not resolved: write the value itself"
        )
    return value


def _flatten(config: Config) -> dict[str, Any]:
    """Return the settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in asdict(config).items():
        flat |= (
            {f"{key}.{name}": item for name, item in value.items()}
            if key in SECTIONS
            else {key: value}
        )
    return flat
