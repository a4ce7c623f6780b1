"""A run's settings: typed, validated, unknown keys refused; a YAML recipe with `key=value` changes on top."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from adlm.data.shards import write_safely

HERE = Path(__file__).resolve().parent
RECIPES = (HERE / "recipes", HERE.parent / "recipes")  # in a wheel, in a checkout
PATHS = ("folder", "resume", "data.path", "data.stream")
# What may differ between a run and its resumption without changing what the run computes.
FREE = (
    "folder",
    "steps",
    "device",
    "data.path",
    "data.workers",
    "data.verify",
    "log.*",
    "checkpoint.*",
    "samples.*",
    "valid.*",
    "parallel.*",
    "guard.*",
    "micro_batch",
    "compile",
    "memory_check",
    "resume",
)


@dataclass(frozen=True)
class DataSettings:
    """Where rows come from; vocabulary, mask id and length are read from the folder's manifest."""

    path: str = MISSING  # a folder made by `adlm prepare`
    stream: str | None = None  # train on this source as it comes, instead of the folder's train split
    stream_options: dict[str, str] = field(default_factory=dict)  # split, column, documents, detokenizer of the source
    shuffle: int = 1024  # rows in the buffer that a stream is shuffled with
    workers: int = 0  # processes that read rows ahead
    verify: bool = True  # compare the shards with their checksums first


@dataclass(frozen=True)
class ModelSettings:
    """A preset and changes to it; what is null is the preset's."""

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
    """What is asked of the model (METHOD: ANELBO)."""

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
    anchor_ramp: bool = True  # gamma = min(anchor_weight, step / steps)
    attend_padding: bool = False  # the lineage on LM1B: padding is read and hidden like text
    discrete_steps: int | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """How the weights move."""

    name: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon_lr: float = 0.02  # of the layers' matrices, when name is muon
    muon_momentum: float = 0.95
    clip: float = 1.0
    warmup: int = 2500
    decay: str = "constant"
    decay_share: float = 0.2  # of the steps, at the end, in which wsd goes down
    floor: float = 0.1  # of the peak, where a cosine ends


@dataclass(frozen=True)
class ValidSettings:
    """The held-out bound with fixed noise."""

    every: int = 5000
    rows: int | None = 1024  # the first so many; null: all
    batch: int | None = None  # rows at a time in a process; null: as in training
    draws: int = 1


@dataclass(frozen=True)
class SampleSettings:
    """Texts written while training."""

    every: int | None = None
    rows: int = 2
    sampler: str = "remask_loop"
    steps: int = 128
    top_p: float = 0.9


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept of a run."""

    every: int = 5000
    keep: int = 2  # the latest so many; the best one stays as well
    background: bool = True  # write while training goes on


@dataclass(frozen=True)
class LogSettings:
    """What is told of a run."""

    every: int = 10
    track: list[str] = field(default_factory=list)  # tensorboard, wandb, trackio
    show: bool = True  # on the terminal


@dataclass(frozen=True)
class GuardSettings:
    """When a run must not go on."""

    spike: float | None = 20.0  # standard deviations above the recent mean; null: only what is not finite
    window: int = 200  # steps the mean is over, and before which nothing is a spike


@dataclass(frozen=True)
class ParallelSettings:
    """How many processes share the work (torchrun says how many there are)."""

    kind: str = "auto"  # auto: ddp if there are several processes; none, ddp, fsdp, hsdp
    shard: int | None = None  # hsdp: processes that share one copy of the weights; null: those of a node
    checkpoint_activations: bool = False


@dataclass(frozen=True)
class Config:
    """A run. The defaults are the paper's."""

    folder: str = MISSING
    method: str = "adlm"
    steps: int = 1_000_000
    batch: int = 512  # rows a step, over all processes
    micro_batch: int | None = None  # rows at a time in a process; null: all of its rows
    seed: int = 0
    ema: float | None = 0.9999
    device: str = "auto"
    precision: str = "auto"  # bfloat16 (autocast) on a GPU, float32 elsewhere
    compile: bool | None = None  # null: on a GPU
    memory_check: bool = True
    resume: str = "auto"  # from the folder's latest checkpoint, or the path of one
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
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(f"config: {what}")

        def positive(**values: float | None) -> None:
            for name, value in values.items():
                require(value is None or value > 0, f"{name.replace('__', '.')} must be above 0, got {value}")

        def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
            require(value in known, f"{name} {value!r} is not one of {', '.join(known)}")

        positive(steps=self.steps, batch=self.batch, micro_batch=self.micro_batch, log__every=self.log.every)
        positive(valid__every=self.valid.every, valid__rows=self.valid.rows, valid__draws=self.valid.draws)
        positive(samples__every=self.samples.every, samples__rows=self.samples.rows, guard__spike=self.guard.spike)
        positive(checkpoint__every=self.checkpoint.every, checkpoint__keep=self.checkpoint.keep)
        positive(valid__batch=self.valid.batch, samples__steps=self.samples.steps, data__shuffle=self.data.shuffle)
        positive(parallel__shard=self.parallel.shard, objective__discrete_steps=self.objective.discrete_steps)
        positive(model__dim=self.model.dim, model__heads=self.model.heads, optimizer__muon_lr=self.optimizer.muon_lr)
        positive(optimizer__clip=self.optimizer.clip, optimizer__lr=self.optimizer.lr, guard__window=self.guard.window)
        require(self.valid.rows is None or self.valid.rows > 1, "valid.rows must be at least 2 for a standard error")
        require(self.objective.anchor_weight >= 0, f"objective.anchor_weight is {self.objective.anchor_weight} < 0")
        require(self.ema is None or 0 <= self.ema < 1, f"ema must be in [0, 1) or null, got {self.ema}")
        require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        require(self.data.workers >= 0, f"data.workers must not be negative, got {self.data.workers}")
        require(self.optimizer.warmup >= 0, f"optimizer.warmup must not be negative, got {self.optimizer.warmup}")
        require(0 <= self.optimizer.floor <= 1, f"optimizer.floor must be in [0, 1], got {self.optimizer.floor}")
        require(0 < self.samples.top_p <= 1, f"samples.top_p must be in (0, 1], got {self.samples.top_p}")
        require(0 < self.optimizer.decay_share <= 1, f"optimizer.decay_share is {self.optimizer.decay_share}")
        one_of("optimizer.name", self.optimizer.name, ("adamw", "muon"))
        one_of("optimizer.decay", self.optimizer.decay, ("constant", "cosine", "wsd"))
        one_of("precision", self.precision, ("auto", "float32", "bfloat16"))
        one_of("parallel.kind", self.parallel.kind, ("auto", "none", "ddp", "fsdp", "hsdp"))


def load_config(
    recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any
) -> Config:
    """A recipe (a file, the name of one that ships, a mapping), then `key=value` changes, then keyword settings.

    A keyword may be a section (`data={"path": ...}`) or dotted (`**{"data.path": ...}`).
    """
    base = OmegaConf.structured(Config)
    _writable(base)
    at = str(recipe)
    try:
        merged = OmegaConf.merge(base, _recipe(recipe))
        for change in changes:
            key, equals, text = change.partition("=") if isinstance(change, str) else ("", "", "")
            if not equals or not key.strip():
                raise ValueError(f"{change!r} is not a change: write key=value, such as steps=1000 or data.path=FOLDER")
            at = change
            if key in ("folder", "data.path"):  # a name as it is: 2026-11-15 is no date here, and 1e3 no number
                OmegaConf.update(merged, key, text)
            else:
                merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([change]))
        for key, value in settings.items():
            value = str(value) if isinstance(value, Path) else value
            nested: Any = value
            at = key
            for part in reversed(key.split(".")):
                nested = {part: nested}
            merged = OmegaConf.merge(merged, OmegaConf.create(_plain(nested)))
        missing = OmegaConf.missing_keys(merged)
        if missing:
            names = ", ".join(sorted(missing))
            raise ValueError(f"config: {names} must be given, for example {sorted(missing)[0]}=FOLDER")
        for key in PATHS:  # a shell leaves the ~ of key=~/folder to us
            if value := OmegaConf.select(merged, key):
                OmegaConf.update(merged, key, os.path.expanduser(value))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_explained(error, at)) from error
    assert isinstance(config, Config)
    return config


def save_config(config: Config, path: Path) -> None:
    """As YAML, whole: a recipe that repeats the run."""
    settings = asdict(config) | {"resume": "auto"}  # where this life began is no setting of the run
    write_safely(path, OmegaConf.to_yaml(OmegaConf.create(settings)).encode("utf-8"))


def differences(old: Config, new: Config) -> list[str]:
    """The settings that would make a resumed run another run, each with both values."""

    def is_free(key: str) -> bool:
        return any(key == free or (free.endswith(".*") and key.startswith(free[:-1])) for free in FREE)

    before, after = dict(_leaves(asdict(old))), dict(_leaves(asdict(new)))
    keys = [key for key in before | after if before.get(key) != after.get(key) and not is_free(key)]
    return [f"{key}: {before.get(key)} then, {after.get(key)} now" for key in keys]


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    folder = next(folder for folder in RECIPES if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _recipe(recipe: Config | Mapping[str, Any] | str | Path | None) -> Any:
    if recipe is None:
        return OmegaConf.create({})
    if isinstance(recipe, Config):
        return OmegaConf.create(asdict(recipe))
    if isinstance(recipe, Mapping):
        return OmegaConf.create(_plain(dict(recipe)))
    path = Path(recipe)
    if not path.is_file():
        # `recipes/x.yaml` works from anywhere: the recipes of the project ship inside the package.
        found = shipped_recipes().get(path.name.removesuffix(".yaml"))
        if found is None or (path.parent != Path() and path.parent.name != "recipes"):
            raise ValueError(f"there is no recipe {str(recipe)!r}; a file, or one of: {', '.join(shipped_recipes())}")
        path = found
    try:
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(loaded):
        raise ValueError(f"{path.name} is not a recipe: its top level must be `key: value` lines")
    return loaded


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _writable(node: Any) -> None:
    """Frozen dataclasses make read-only nodes; the merge may write, the result is frozen again."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            _writable(node[key])


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield prefix + key, list(item) if isinstance(item, tuple) else item


def known_keys() -> list[str]:
    """Every key a recipe may have, dotted."""

    def walk(section: Any, prefix: str) -> Iterator[str]:
        for f in fields(section):
            factory = f.default_factory
            inner = factory() if callable(factory) else None
            if is_dataclass(inner):
                yield from walk(inner, f"{prefix}{f.name}.")
            else:
                yield prefix + f.name

    return list(walk(Config, ""))


def _explained(error: OmegaConfBaseException, at: str) -> str:
    key = getattr(error, "full_key", None) or ""
    first = str(error).splitlines()[0]
    if "not in" in first or "Key" in first:
        close = difflib.get_close_matches(key, known_keys(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known_keys())}"
        return f"config: there is no key {key!r}; {hint}"
    return f"config: {key or at}: {first}"
