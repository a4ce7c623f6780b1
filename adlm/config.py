"""The settings of a training run, read from a YAML recipe and `key=value` changes.

A settings class stands beside the code that it is for; `Config` composes them. A section of an app
(`reasoning`) is known by name only, and its class is imported when a recipe has the section.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveInt
from pydantic.fields import FieldInfo
from yaml import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    MappingNode,
    ScalarEvent,
    YAMLError,
)

from adlm.data.batches import DataSettings
from adlm.diffusion.objectives import ObjectiveSettings
from adlm.errors import suggest_names
from adlm.files import write_atomically
from adlm.models.methods import ModelSettings
from adlm.registry import load_object
from adlm.settings import (
    AS_TYPED,
    RESUMABLE,
    PathText,
    Settings,
    SettingsError,
    has_mark,
    list_fields,
    to_python,
)
from adlm.training.distributed import ParallelSettings
from adlm.training.guard import GuardSettings
from adlm.training.logging import LogSettings
from adlm.training.optim import OptimizerSettings
from adlm.training.state import CheckpointSettings
from adlm.training.validation import SampleSettings, ValidSettings

PACKAGE = Path(__file__).resolve().parent
RECIPE_FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")  # in a wheel, in a checkout
DEFAULT_METHOD, DEFAULT_PRESET = "adlm", "small"  # without init, whose own they are otherwise
# The class of a run with a section of an app.
APP_SECTIONS = {"reasoning": "adlm.apps.reasoning.settings:ReasoningConfig"}

MAX_VALUES = 2**20  # of YAML; aliases can stand for more than memory holds
MAX_DEPTH = 20  # of lists and mappings; deep nesting overflows the stack of the YAML loader
NULL = "tag:yaml.org,2002:null"


class Config(Settings):
    """A training run. The defaults are the paper's."""

    folder: Annotated[PathText, RESUMABLE]
    """The run folder."""
    init: PathText | None = None
    """Start from the weights of a bundled model, a run or a checkpoint; null: from scratch."""
    method: str | None = None
    """adlm, mdlm, ar, a2r or sedd; by default adlm, or that of init."""
    steps: Annotated[PositiveInt, RESUMABLE] = 1_000_000
    """Optimizer steps."""
    batch: PositiveInt = 512
    """Rows per step, over all processes."""
    micro_batch: Annotated[PositiveInt | None, RESUMABLE] = None
    """Rows per forward in a process; null: all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = 0.9999
    """Decay of the weights' moving average; null: none."""
    device: Annotated[str, RESUMABLE] = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 (autocast) on a GPU, float32 elsewhere."""
    compile: Annotated[bool | None, RESUMABLE] = None
    """Compile the layers; null: on a GPU."""
    memory_check: Annotated[bool, RESUMABLE] = True
    """Stop before the first step if the memory estimate does not fit."""
    resume: Annotated[PathText, RESUMABLE] = "auto"
    """The checkpoint to resume from; auto: the folder's latest."""
    data: DataSettings
    """The training data."""
    model: ModelSettings = ModelSettings()
    """The model."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """The training objective."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and the learning rate schedule."""
    valid: Annotated[ValidSettings, RESUMABLE] = ValidSettings()
    """Validation."""
    samples: Annotated[SampleSettings, RESUMABLE] = SampleSettings()
    """Samples written during training."""
    checkpoint: Annotated[CheckpointSettings, RESUMABLE] = CheckpointSettings()
    """Checkpoints."""
    log: Annotated[LogSettings, RESUMABLE] = LogSettings()
    """Logging."""
    guard: Annotated[GuardSettings, RESUMABLE] = GuardSettings()
    """Protection against divergence."""
    parallel: Annotated[ParallelSettings, RESUMABLE] = ParallelSettings()
    """Parallelism."""


def load_config(
    recipe: Config | Mapping[str, Any] | str | Path | None = None, *changes: str, **settings: Any
) -> Config:
    """Load a recipe (a file, the name of a shipped one, a mapping), then apply `key=value` changes
    and keywords: sections (`data={"path": ...}`) or dotted keys."""
    values, source = read_recipe(recipe)
    kind = choose_class([*values, *changes, *settings])
    fields = list_fields(kind)
    changed: list[str] = []
    for change in changes:
        key, value = read_change(change, fields)
        values = insert(values, key, value)
        changed.append(key)
    for key, value in settings.items():
        values = insert(values, key, to_text(value, key))
        changed.append(key)
    values.setdefault("data", {})  # so that an error about it names data.path
    if values.get("init") is None:
        values = add_defaults(values)

    try:
        config = kind.parse("recipe", **values)
        for section in APP_SECTIONS:
            if has_defaults(config, section):  # as in the config.yaml of older runs on text
                values = {key: value for key, value in values.items() if key != section}
                config = Config.parse("recipe", **values)
    except SettingsError as error:
        is_changed = any(name.startswith(tuple(changed)) for name in error.values)
        shown = str(error) if is_changed or not source else f"{source}: {error}"
        raise ValueError(shown) from None
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the whole config as YAML: a recipe that repeats the run."""
    values = config.model_dump(mode="json")
    values["resume"] = "auto"  # where a process resumed is no setting of the run
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    write_atomically(path, text.encode("utf-8"))


def compare_configs(old: Config, new: Config) -> list[str]:
    """List the settings that prevent resuming `old` as `new`, each with both values."""
    kind = type(old) if type(new) is Config else type(new)  # with the section of an app
    before = flatten(old)
    after = flatten(new)
    problems = []
    for key, field in list_fields(kind).items():
        default = field.get_default(call_default_factory=True)
        then = before.get(key, default)
        now = after.get(key, default)
        if then != now and key not in find_resumable(kind):
            problems.append(f"{key}: {then} then, {now} now")
    return problems


def flatten(config: Config) -> dict[str, Any]:
    """Return the settings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in config:
        if isinstance(value, Settings):
            flat.update({f"{key}.{name}": item for name, item in value})
        else:
            flat[key] = value
    return flat


def find_resumable(kind: type[Config]) -> set[str]:
    """Return the keys that a run may resume with other values of; the others change the result."""
    keys: set[str] = set()
    for key, field in list_fields(kind).items():
        section = key.partition(".")[0]
        if has_mark(field, RESUMABLE) or section in keys:
            keys.add(key)
    return keys


def list_recipes() -> dict[str, Path]:
    """Return the files of the recipes that ship with the package, by name."""
    folder = next(folder for folder in RECIPE_FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


# ------------------------------------------------------------------------------------- the parts


def read_recipe(
    recipe: Config | Mapping[str, Any] | str | Path | None,
) -> tuple[dict[str, Any], str]:
    """Return a recipe's values as texts, and its file for errors."""
    if recipe is None:
        return {}, ""
    if isinstance(recipe, Config | Mapping):
        return to_text(recipe, "the recipe"), ""
    path = find_recipe(recipe)
    return read_yaml(path, "a recipe"), str(path)


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: `recipes/x.yaml` works from any folder, as the package has it."""
    path = Path(recipe)
    if path.is_file():
        return path
    recipes = list_recipes()
    name = path.name.removesuffix(".yaml")
    if name not in recipes or (path.parent != Path() and path.parent.name != "recipes"):
        hint = suggest_names(name, recipes)
        expected = f"expected a file or one of {', '.join(recipes)}"
        raise ValueError(f"unknown recipe {str(recipe)!r}{hint}: {expected}")
    return recipes[name]


def choose_class(keys: Iterable[str]) -> type[Config]:
    """Return the class of a recipe with these keys: that of an app if it has the app's section."""
    for section, target in APP_SECTIONS.items():
        if any(re.match(rf"{section}\b", str(key)) for key in keys):
            return load_object(target)
    return Config


def has_defaults(config: Config, section: str) -> bool:
    """Return whether a config has the section of an app, and nothing in it."""
    settings = getattr(config, section, None)
    return settings is not None and settings == type(settings)()


def add_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the method and the preset of a run that starts from scratch."""
    model = values.get("model")
    if isinstance(model, dict) and model.get("network") is not None:
        return values  # which has neither
    if values.get("method") is None:
        values = insert(values, "method", DEFAULT_METHOD)
    if model is None or (isinstance(model, dict) and model.get("preset") is None):
        values = insert(values, "model.preset", DEFAULT_PRESET)
    return values


def read_change(change: str, fields: Mapping[str, FieldInfo]) -> tuple[str, Any]:
    """Return the key and the value of `key=value`; a path is taken as it was typed."""
    key, sign, text = change.partition("=") if isinstance(change, str) else ("", "", "")
    if not sign or not key.strip():
        remedy = "write key=value, such as steps=1000 or data.path=FOLDER"
        raise ValueError(f"{change!r} is not an override: {remedy}")
    if key in fields and has_mark(fields[key], AS_TYPED):
        return key, None if text == "null" else text
    try:
        return key, load_yaml(text, key)
    except YAMLError:
        raise ValueError(f"{key}={text!r:.80} is no YAML value: put quotes around it") from None


def insert(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return values with another one under a key such as optimizer.lr; mappings are merged."""
    first, _, rest = key.partition(".")
    inner = values.get(first)
    if rest:
        value = insert(inner if isinstance(inner, Mapping) else {}, rest, value)
    elif isinstance(inner, Mapping) and isinstance(value, Mapping):
        for name, each in value.items():
            inner = insert(inner, name, each)
        value = inner
    return {**values, first: value}


def to_text(value: Any, source: str) -> Any:
    """Return values of Python as YAML has them: texts in lists and mappings."""
    try:
        return _to_text(value)
    except RecursionError:
        raise ValueError(f"{source} is nested too deeply: give values by key") from None


def _to_text(value: Any) -> Any:
    value = to_python(value)
    if isinstance(value, Settings):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): _to_text(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_text(each) for each in value]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | os.PathLike):
        return str(value)
    return value


# ------------------------------------------------------------------------------------------ YAML


class TextLoader(yaml.BaseLoader):
    """Leaves values as text, which the fields read: YAML takes 3e-3 for text and `no` for false."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise YAMLError(f"{name} is there twice")
        return super().construct_mapping(node, deep)


TextLoader.add_implicit_resolver(NULL, re.compile("(?:null|Null|NULL|~|)$"), ["n", "N", "~", ""])
TextLoader.add_constructor(NULL, lambda loader, node: None)


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """Return the values of a YAML file: texts, in lists and mappings."""
    try:
        values = load_yaml(path.read_bytes(), str(path))
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML ({problem}): correct this line") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not {kind}: its top level must be `key: value` lines")
    return values


def load_yaml(content: str | bytes, source: str) -> Any:
    """Return a value of YAML, its leaves as texts."""
    check_yaml_size(content, source)
    return yaml.load(content, TextLoader)


@dataclass
class YamlSize:
    """The size of a value of YAML: how many values it has, in how many levels."""

    anchor: str | None = None
    values: int = 1
    levels: int = 1  # of lists and mappings, with its own; 0 of a text

    def add(self, inner: "YamlSize") -> None:
        """Count a value inside."""
        self.values += inner.values
        self.levels = max(self.levels, inner.levels + 1)


def check_yaml_size(content: str | bytes, source: str) -> None:
    """Refuse YAML that could overflow the stack or, by aliases, fill the memory."""
    outer = [YamlSize()]  # the values around the current one
    anchored: dict[str | None, YamlSize] = {}
    for event in yaml.parse(content, yaml.BaseLoader):  # which does not recurse
        if isinstance(event, CollectionStartEvent):
            outer.append(YamlSize(event.anchor))
        elif isinstance(event, CollectionEndEvent):
            inner = outer.pop()
            anchored[inner.anchor] = inner
            outer[-1].add(inner)
        elif isinstance(event, AliasEvent):
            outer[-1].add(anchored.get(event.anchor, YamlSize(levels=0)))
        elif isinstance(event, ScalarEvent):
            outer[-1].add(YamlSize(levels=0))

        if len(outer) - 2 + outer[-1].levels > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} levels deep"
            raise ValueError(f"{source} {problem}: write `key: value` lines")
        if outer[-1].values > MAX_VALUES:
            raise ValueError(f"{source} has more than {MAX_VALUES:,} values: use fewer aliases")
