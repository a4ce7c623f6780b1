"""The config of a training run: dataclasses, filled from a YAML recipe and `key=value` changes, and validated."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from adlm.data.shards import write_atomically

PACKAGE = Path(__file__).resolve().parent
RECIPE_FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # in a wheel, in a checkout
PATH_KEYS = ("folder", "resume", "data.path", "data.stream")
# A run may resume with other values of these; all other keys change what it computes.
RESUMABLE_SECTIONS = ("log", "checkpoint", "samples", "valid", "parallel", "guard")
RESUMABLE_KEYS = ("folder", "steps", "device", "micro_batch", "compile", "memory_check", "resume")
RESUMABLE_DATA_KEYS = ("data.path", "data.workers", "data.verify")
POSITIVE_KEYS = """
steps batch micro_batch log.every valid.every valid.rows valid.batch valid.draws samples.every samples.rows
samples.steps checkpoint.every checkpoint.keep data.shuffle model.dim model.heads optimizer.lr optimizer.muon_lr
optimizer.clip objective.discrete_steps guard.spike guard.window parallel.shard
"""


@dataclass(frozen=True)
class DataSettings:
    """The training data; vocabulary, mask id and length are in its manifest."""

    path: str = MISSING  # required: a folder written by `adlm prepare`
    stream: str | None = None  # a source to stream instead of the train split of data.path
    stream_options: dict[str, str] = field(default_factory=dict)  # split, column, documents, detokenizer
    shuffle: int = 1024  # rows in the shuffle buffer of a stream
    workers: int = 0  # dataloader processes
    verify: bool = True  # compare the shards with their checksums at the start


@dataclass(frozen=True)
class ModelSettings:
    """The model: a preset and changes to it; null is the preset's value."""

    preset: str = "small"
    dim: int | None = None
    heads: int | None = None
    anchor_layers: int | None = None
    denoiser_layers: int | None = None
    bridge: str | None = None
    cond_dim: int | None = None  # 0: no modulation
    time_conditioning: bool | None = None
    dropout: float | None = None
    positions: str | None = None
    norm_bias: bool | None = None
    attention_bias: bool | None = None
    tied: bool | None = None


@dataclass(frozen=True)
class ObjectiveSettings:
    """The training objective: noise schedule, anchors and their weight (Eq. 6, the ANELBO)."""

    schedule: str = "loglinear"
    schedule_options: dict[str, Any] = field(default_factory=dict)
    anchor_rule: str = "rare_in_sequence"
    max_count: int | None = 5  # rare_in_sequence: tau
    max_fraction: float | None = None  # rare_in_sequence (with max_count=null), rare_in_corpus
    top_fraction: float | None = None  # tf_idf
    fraction: float | None = None  # random
    ids: list[int] | None = None  # listed
    anchor_scope: str = "all"
    anchor_weight: float = 3e-3
    anchor_ramp: bool = True  # gamma is min(anchor_weight, step / steps)
    attend_padding: bool = False  # as the lineage on LM1B: padding is masked and attended like text
    discrete_steps: int | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and the learning rate schedule."""

    name: str = "adamw"  # or muon
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_lr: float = 0.02  # muon: of the layers' matrices
    muon_momentum: float = 0.95
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
    sampler: str = "remask_loop"
    steps: int = 128
    top_p: float = 0.9


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

    spike: float | None = 20.0  # stop at so many standard deviations above the mean; null: only if not finite
    window: int = 200  # steps of that mean


@dataclass(frozen=True)
class ParallelSettings:
    """Parallelism over the processes that torchrun starts."""

    kind: str = "auto"  # auto (ddp with several processes), none, ddp, fsdp, hsdp
    shard: int | None = None  # hsdp: processes per replica; null: those of a node
    checkpoint_activations: bool = False


@dataclass(frozen=True)
class Config:
    """A training run. The defaults are the paper's."""

    folder: str = MISSING  # required: the run folder
    method: str = "adlm"
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
    model: ModelSettings = field(default_factory=ModelSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    valid: ValidSettings = field(default_factory=ValidSettings)
    samples: SampleSettings = field(default_factory=SampleSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def __post_init__(self) -> None:
        def require(is_met: bool, message: str) -> None:
            if not is_met:
                raise ValueError(f"config: {message}")

        def require_choice(key: str, value: str, *choices: str) -> None:
            require(value in choices, f"{key} {value!r} is not one of {', '.join(choices)}")

        for key in POSITIVE_KEYS.split():
            value = attrgetter(key)(self)
            require(value is None or value > 0, f"{key} must be above 0, got {value}")
        optimizer, objective = self.optimizer, self.objective
        require(self.valid.rows is None or self.valid.rows > 1, "valid.rows must be at least 2 for a standard error")
        require(
            objective.anchor_weight >= 0, f"objective.anchor_weight must be at least 0, got {objective.anchor_weight}"
        )
        require(self.ema is None or 0 <= self.ema < 1, f"ema must be in [0, 1) or null, got {self.ema}")
        require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        require(self.data.workers >= 0, f"data.workers must be at least 0, got {self.data.workers}")
        require(optimizer.warmup >= 0, f"optimizer.warmup must be at least 0, got {optimizer.warmup}")
        require(0 <= optimizer.floor <= 1, f"optimizer.floor must be in [0, 1], got {optimizer.floor}")
        require(0 < self.samples.top_p <= 1, f"samples.top_p must be in (0, 1], got {self.samples.top_p}")
        require(0 < optimizer.decay_share <= 1, f"optimizer.decay_share must be in (0, 1], got {optimizer.decay_share}")
        require_choice("optimizer.name", optimizer.name, "adamw", "muon")
        require_choice("optimizer.decay", optimizer.decay, "constant", "cosine", "wsd")
        require_choice("precision", self.precision, "auto", "float32", "bfloat16")
        require_choice("parallel.kind", self.parallel.kind, "auto", "none", "ddp", "fsdp", "hsdp")


def load_config(
    recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any
) -> Config:
    """Load a recipe (a file, the name of a shipped one, a mapping), then apply `key=value` changes and keywords.

    A keyword is a section (`data={"path": ...}`) or a dotted key (`**{"data.path": ...}`).
    """
    merged: Any = OmegaConf.structured(Config)
    _make_writable(merged)
    source = str(recipe)  # for error messages
    try:
        merged = OmegaConf.merge(merged, _read_recipe(recipe))
        for change in changes:
            key, equals, text = change.partition("=") if isinstance(change, str) else ("", "", "")
            if not equals or not key.strip():
                raise ValueError(f"{change!r} is not a change: write key=value, such as steps=1000 or data.path=FOLDER")
            source = change
            if key in ("folder", "data.path"):  # names such as 2026-11-15 or 1e3 stay text
                OmegaConf.update(merged, key, text)
            else:
                merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([change]))
        for key, value in settings.items():
            source = key
            for part in reversed(key.split(".")):
                value = {part: value}
            merged = OmegaConf.merge(merged, OmegaConf.create(_to_plain(value)))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(f"config: {', '.join(missing)} must be given, for example {missing[0]}=FOLDER")
        for key in PATH_KEYS:  # shells do not expand the ~ of key=~/folder
            if value := OmegaConf.select(merged, key):
                OmegaConf.update(merged, key, os.path.expanduser(value))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_explain_error(error, source)) from error
    assert isinstance(config, Config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the whole config as YAML: a recipe that repeats the run."""
    settings = asdict(config) | {"resume": "auto"}  # where a process resumed is no setting of the run
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(settings)).encode("utf-8"))


def compare_configs(old: Config, new: Config) -> list[str]:
    """List the settings that prevent resuming `old` as `new`, each with both values."""

    def is_resumable(key: str) -> bool:
        return key in RESUMABLE_KEYS + RESUMABLE_DATA_KEYS or key.split(".")[0] in RESUMABLE_SECTIONS

    before, after = (dict(_flatten(asdict(config))) for config in (old, new))
    keys = [key for key in before | after if before.get(key) != after.get(key) and not is_resumable(key)]
    return [f"{key}: {before.get(key)} then, {after.get(key)} now" for key in keys]


def list_recipes() -> dict[str, Path]:
    """Return the files of the recipes that ship with the package, by name."""
    folder = next(folder for folder in RECIPE_FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def list_config_keys() -> list[str]:
    """List all dotted keys of a recipe."""
    return [key for key, _ in _flatten(asdict(Config()))]


def _read_recipe(recipe: Config | Mapping[str, Any] | str | Path | None) -> Any:
    if recipe is None:
        return OmegaConf.create({})
    if isinstance(recipe, Config):
        return OmegaConf.create(asdict(recipe))
    if isinstance(recipe, Mapping):
        return OmegaConf.create(_to_plain(recipe))
    path, recipes = Path(recipe), list_recipes()
    if not path.is_file():
        # `recipes/x.yaml` works from any folder: the recipes are also in the package.
        name = path.name.removesuffix(".yaml")
        if name not in recipes or (path.parent != Path() and path.parent.name != "recipes"):
            raise ValueError(f"there is no recipe {str(recipe)!r}: give a file or one of {', '.join(recipes)}")
        path = recipes[name]
    try:
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(loaded):
        raise ValueError(f"{path.name} is not a recipe: its top level must be `key: value` lines")
    return loaded


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _make_writable(node: Any) -> None:
    """Let a merge write into the read-only nodes of frozen dataclasses; the resulting Config is frozen again."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            _make_writable(node[key])


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; the values of free-form options are dicts."""
    for key, value in section.items():
        if isinstance(value, dict) and not key.endswith("_options"):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value


def _explain_error(error: OmegaConfBaseException, source: str) -> str:
    key = getattr(error, "full_key", None) or ""
    first = str(error).splitlines()[0]
    if "not in" in first or "Key" in first:
        keys = list_config_keys()
        close = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(keys)}"
        return f"config: there is no key {key!r}; {hint}"
    return f"config: {key or source}: {first}"
