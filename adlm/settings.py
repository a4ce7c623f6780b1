"""Settings: each is written once, as a field of a class; every surface is derived from it. No torch.

A field has a type with limits, a default, and a text below it. A vocabulary holds the names that a
surface (Python, the command line, HTTP, transformers, …) has for the fields. A new setting of
sampling is a field of `SamplingSettings`, and its name and type a line of `SamplingArguments`.
"""

import inspect
import os
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    get_args,
)

import pydantic
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from adlm.registry import VARIADIC, takes_any_option

Vocabulary = Literal[
    "python", "cli", "openai", "transformers", "diffusers", "llada", "recipe", "json"
]
Names = Mapping[str, str | None]  # field -> its name in a vocabulary; None: it is not offered

TEXT_VOCABULARIES = ("cli", "recipe")  # their values are texts, read as the field's type
LIBRARIES: tuple[Vocabulary, ...] = (
    "openai",
    "transformers",
    "diffusers",
    "llada",
)  # Python takes their names too
MAX_SHOWN = 80  # characters of a value in an error
CLOSE = 0.7  # similarity of names, from which on one is suggested
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = MAX_SHOWN

NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "names with values",
    "null": "null",
}
LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}

# What pydantic raises for types that it does not know, such as torch.Tensor.
NO_SCHEMA = (pydantic.PydanticSchemaGenerationError, pydantic.PydanticInvalidForJsonSchema)


class SettingsError(ValueError):
    """Values by name, and what is wrong with them: the expectation and the remedy."""

    def __init__(self, values: Mapping[str, Any], problem: str) -> None:
        super().__init__(values, problem)
        self.values = dict(values)
        self.problem = problem

    def __str__(self) -> str:
        shown = [f"{name:.{MAX_SHOWN}}={SHORT.repr(value)}" for name, value in self.values.items()]
        return f"{' and '.join(shown)}: {self.problem}"

    def rename(self, names: Names) -> "SettingsError":
        """Return the error with the names that were typed in place of the fields' own."""
        values = {names.get(name) or name: value for name, value in self.values.items()}
        return SettingsError(values, self.problem)


class Settings(BaseModel):
    """The base of all settings: exact types, no NaN, no unknown names."""

    model_config = pydantic.ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # `adlm --help` reads the fields alone
        protected_namespaces=(),
    )
    vocabularies: ClassVar[Mapping[str, Names]] = {}
    elsewhere: ClassVar[str] = ""  # where a name belongs that is no setting, for errors

    def __init__(self, **given: Any) -> None:
        """Make settings of values by field; an error is ours, as `parse` raises it."""
        try:
            super().__init__(**given)
        except pydantic.ValidationError as error:
            raise explain(type(self), error.errors(), given, "python") from None

    # Without this mark pydantic would validate through the constructor, which is slower.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @pydantic.model_validator(mode="before")
    @classmethod
    def read_scalars(cls, values: Any) -> Any:
        """Take numbers of numpy and torch as Python's."""
        if not isinstance(values, dict):
            return values
        return {name: to_python(value) for name, value in values.items()}

    def require(self, is_met: bool, expected: str, *names: str) -> Self:
        """Raise an error about several fields unless their rule is met."""
        if not is_met:
            values = {name: getattr(self, name) for name in names}
            raise SettingsError(values, f"expected {expected}")
        return self

    @classmethod
    def parse(cls, vocabulary: Vocabulary, start: Self | None = None, /, **given: Any) -> Self:
        """Make settings of what was given under a vocabulary's names, as changes to `start`."""
        known = list_names(cls, vocabulary)
        takes_any = cls.model_config.get("extra") == "allow"
        values: dict[str, Any] = {}
        typed_names: dict[str, str] = {}
        for typed, value in given.items():
            if typed not in known and not takes_any:
                raise SettingsError({typed: value}, suggest(cls, typed, vocabulary))
            field = known.get(typed, typed)
            if field in values:
                both = {typed_names[field]: values[field], typed: value}
                raise SettingsError(both, "expected one name of the setting; leave the other out")
            values[field] = value
            typed_names[field] = typed
        strict = False if vocabulary in TEXT_VOCABULARIES else None
        try:
            merged = dict(start or {}) | values
            return cls.model_validate(merged, strict=strict, context=vocabulary)
        except pydantic.ValidationError as error:
            cause = explain(cls, error.errors(), values, vocabulary)
            names = {**list_own_names(cls, vocabulary), **typed_names}
            raise cause.rename(names) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked."""
        return self.parse("python", self, **changes)

    def to_keywords(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return the settings that are not None under a vocabulary's names."""
        names = list_own_names(type(self), vocabulary)
        values = {typed: getattr(self, field) for field, typed in names.items()}
        return {typed: value for typed, value in values.items() if value is not None}


class Stored(Settings):
    """The base of what a JSON file holds; names that are not fields are kept, and not checked."""

    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=True)

    @classmethod
    def read(cls, content: Any, place: str, remedy: str) -> Self:
        """Check the content of a file; an error names the place, the value and the remedy."""
        try:
            return cls.model_validate(content if isinstance(content, dict) else {})
        except pydantic.ValidationError as error:
            problems = error.errors()
        cause = explain(cls, problems, {}, "json")
        missing = [
            ".".join(map(str, each["loc"])) for each in problems if each["type"] == "missing"
        ]
        found = []
        for key, value in cause.values.items():
            found.append(f"no {key}" if key in missing else f"{key} {SHORT.repr(value)}")
        expected = cause.problem.partition(";")[0]
        raise ValueError(f"{place} has {' and '.join(found)}, {expected}: {remedy}")


def to_python(value: Any) -> Any:
    """Return a scalar of numpy or torch as Python's number, and anything else as it is."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def explain(
    settings: type[BaseModel],
    problems: Sequence[Any],
    given: Mapping[str, Any],
    vocabulary: Vocabulary,
) -> SettingsError:
    """Return one of pydantic's errors as ours: an unknown name, or else the first."""
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"]]
    value = first["input"]
    if first["type"] == "extra_forbidden":
        return SettingsError({".".join(place): value}, suggest_at(settings, place, vocabulary))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SettingsError):  # of a rule over several fields
        return cause.rename({name: ".".join([*place, name]) for name in cause.values})
    key, field = find_field(settings, place)
    if field is None:
        problem = f"expected names with values: {first['msg']}"
        return SettingsError({"settings": dict(given)}, problem)
    value = given.get(key, value)
    if first["type"] == "missing":
        value = None
    if isinstance(cause, ValueError):  # of a rule over one field, which says what it expects
        return SettingsError({key: value}, str(cause))
    expected = f"expected {describe(field)}"
    if isinstance(value, Mapping):
        wrong = next((part for part in place if part in value), None)
        if wrong is not None:
            expected += f", not the value {SHORT.repr(value[wrong])} of {wrong}"
    if field.is_required():
        wanted = (field.description or "it").rstrip(".")
        return SettingsError({key: value}, f"{expected}; give {wanted[0].lower()}{wanted[1:]}")
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or isinstance(default, BaseModel):
        return SettingsError({key: value}, f"{expected}; leave it out")
    shown = f"{default!s:.{MAX_SHOWN}}" or "''"
    return SettingsError({key: value}, f"{expected}; leave it out for the default ({shown})")


def find_field(settings: type[BaseModel], place: Sequence[str]) -> tuple[str, FieldInfo | None]:
    """Return the last field on the way to a place, with its key: splits.train.rows.

    What is no field is a name or a number of an item, or one of several types of a value.
    """
    key = ""
    field: FieldInfo | None = None
    classes = [settings]
    for count, part in enumerate(place, 1):
        owner = next((each for each in classes if part in each.model_fields), None)
        if owner is not None:
            key = ".".join(place[:count])
            field = owner.model_fields[part]
            classes = find_classes(field.annotation)
    return key, field


def find_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of settings in a type: itself, of its items, or of its alternatives."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in get_args(annotation) for each in find_classes(part)]


def suggest_at(settings: type[BaseModel], place: Sequence[str], vocabulary: Vocabulary) -> str:
    """Return what to do about an unknown name at a place, which may be in an item of a field."""
    _, field = find_field(settings, place[:-1])
    if field is None or len(place) == 2:
        return suggest(settings, ".".join(place), vocabulary)
    return suggest(find_classes(field.annotation)[0], place[-1], vocabulary)


def suggest(settings: type[BaseModel], name: str, vocabulary: Vocabulary) -> str:
    """Return what to do about an unknown name: take the closest one, or one of all."""
    own = list_own_names(settings, vocabulary)
    if vocabulary == "json":  # where a section is an object of its own
        section = name.rpartition(".")[0]
        own = {key: typed for key, typed in own.items() if typed.rpartition(".")[0] == section}
    meanings = {typed: typed for typed in own.values()}
    for typed, field in list_names(settings, "python").items():  # also names of other surfaces
        if field in own:
            meanings.setdefault(to_option(typed) if vocabulary == "cli" else typed, own[field])
    for close in get_close_matches(name[:MAX_SHOWN], meanings, n=1, cutoff=CLOSE):
        return f"unknown name; did you mean {meanings[close]}?"
    if not own:
        return "unknown name; there is none here, leave it out"
    elsewhere = getattr(settings, "elsewhere", "").format(name=name)
    return f"unknown name; expected one of {', '.join(own.values())}{elsewhere}"


@cache
def list_names(settings: type[BaseModel], vocabulary: Vocabulary) -> Mapping[str, str]:
    """Return the field of each name in a vocabulary; Python takes those of all libraries."""
    known = {typed: field for field, typed in list_own_names(settings, vocabulary).items()}
    if vocabulary == "python":
        for library in LIBRARIES:
            for field, typed in list_own_names(settings, library).items():
                known.setdefault(typed, field)
    return known


@cache
def list_own_names(settings: type[BaseModel], vocabulary: Vocabulary) -> Mapping[str, str]:
    """Return the name of each field that a vocabulary has."""
    tables: Mapping[str, Names] = getattr(settings, "vocabularies", {})
    table = tables.get(vocabulary, {})
    names: dict[str, str] = {}
    for field in list_fields(settings):
        typed = table.get(field, field)
        if typed is not None:
            names[field] = to_option(typed) if vocabulary == "cli" else typed
    return names


def to_option(name: str) -> str:
    """Return a name as an option of the command line: --top-p."""
    return "--" + name.replace("_", "-")


@cache
def list_fields(settings: type[BaseModel], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Return all fields by key, those of sections too: optimizer.lr."""
    fields: dict[str, FieldInfo] = {}
    for name, field in settings.model_fields.items():
        fields[prefix + name] = field
        for kind in (field.annotation, *get_args(field.annotation)):  # a section, or one or None
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                fields |= list_fields(kind, f"{prefix}{name}.")
    return fields


def list_kinds(field: FieldInfo) -> list[dict[str, Any]]:
    """Return the JSON schema of each type that a field takes."""
    annotation: Any = Annotated[field.annotation, field]
    return split_schema(pydantic.TypeAdapter(annotation).json_schema())


def split_schema(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schema of each of several types."""
    kinds: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return kinds


def describe(field: FieldInfo) -> str:
    """Return what a field takes, by its JSON schema: a number above 0 and at most 1."""
    try:
        kinds = list_kinds(field)
    except NO_SCHEMA:
        return f"a value of the type {inspect.formatannotation(field.annotation)}"
    texts = []
    for kind in kinds:
        text = describe_kind(kind)
        if text != NOUNS["null"] or field.default is not None:
            texts.append(text)
    return " or ".join(dict.fromkeys(texts))


def describe_kind(kind: Mapping[str, Any]) -> str:
    """Return what one type of a JSON schema takes."""
    if "enum" in kind:
        return f"one of {', '.join(map(str, kind['enum']))}"
    if "const" in kind:
        return str(kind["const"])
    noun = NOUNS[kind.get("type", "object")]
    limits = [f"{word} {kind[limit]}" for limit, word in LIMITS.items() if limit in kind]
    if "maxItems" in kind:
        limits.append(f"of {kind.get('minItems', 0)} to {kind['maxItems']}")
    return f"{noun} {' and '.join(limits)}" if limits else noun


class Parameters(Settings):
    """The base of what a function takes: a user's function may have types of any class."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)


class OpenParameters(Parameters):
    """The base of what a function with `**options` takes."""

    model_config = pydantic.ConfigDict(extra="allow")

    __pydantic_extra__: "dict[str, Undeclared]"


def derive_settings(function: Callable[..., Any], *left_out: str) -> type[Settings]:
    """Return the settings that are a function's parameters, with their types and defaults."""
    try:
        hash(function)
    except TypeError:  # a user's callable may have none: a dataclass, for example
        return _derive_settings(function, *left_out)
    return _derive_settings_once(function, *left_out)


def _derive_settings(function: Callable[..., Any], *left_out: str) -> type[Settings]:
    parameters = inspect.signature(function, eval_str=True).parameters
    base = OpenParameters if takes_any_option(parameters) else Parameters
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in left_out or parameter.kind in VARIADIC:
            continue
        kind = Undeclared if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (kind, default)
    return pydantic.create_model(base.__name__, __base__=base, **fields)


_derive_settings_once = cache(_derive_settings)


def make_optional(settings: type[Settings], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields under other names for `pydantic.create_model`, each with the default None."""
    fields: dict[str, Any] = {}
    for own, typed in names.items():
        field = settings.model_fields[own]
        kind: Any = Annotated[field.annotation, Field(), *field.metadata]
        fields[typed] = (kind | None, Field(default=None, description=field.description))
    return fields


# ------------------------------------------------------------------------------ marks in recipes


@dataclass(frozen=True)
class Mark:
    """Says something about a field to those who read recipes."""

    name: str


RESUMABLE = Mark("resumable")  # a run may resume with another value
AS_TYPED = Mark("as typed")  # a command line gives it as it was typed, not as YAML
PathText = Annotated[
    str,
    AS_TYPED,
    pydantic.AfterValidator(os.path.expanduser),  # shells leave the ~ of key=~/folder
]


def has_mark(field: FieldInfo, mark: Mark) -> bool:
    """Return whether a field, or one of its types, has a mark."""
    marks = [*field.metadata]
    for kind in get_args(field.annotation):
        marks += getattr(kind, "__metadata__", ())
    return mark in marks


# -------------------------------------------------------------------------------------- sampling

DEFAULT_SAMPLER = "remask_loop"
INFILL_SAMPLER = "confidence"
DEFAULT_STEPS = 128  # of a plan
DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 0.82


class BuiltSampler:
    """The base of plans and of samplers, which settings take as they take a name."""


def name_sampler(sampler: BuiltSampler) -> str:
    """Return the name of a sampler that is built already."""
    return str(getattr(sampler, "name", type(sampler).__name__))


class TypedText(str):
    """An option as it was typed, which is read by the type of the sampler's parameter."""


def read_values(value: Any, info: pydantic.ValidationInfo) -> Any:
    """Read ["eta=0.04"] where values are texts, and numbers of numpy."""
    if isinstance(value, list) and info.context in TEXT_VOCABULARIES:
        return read_pairs(value)
    if isinstance(value, Mapping):
        return {name: to_python(each) for name, each in value.items()}
    return value


def read_pairs(pairs: Iterable[Any]) -> dict[str, TypedText]:
    """Read name=value pairs."""
    values = {}
    for pair in pairs:
        name, sign, text = str(pair).partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"expected name=value; write it as eta=0.04, not {str(pair)!r}")
        values[name] = TypedText(text)
    return values


def keep_typed(value: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Keep an option as it was typed, for the sampler's parameter to read."""
    return value if isinstance(value, TypedText) else read(value)


def read_typed(value: Any) -> Any:
    """Read an option as it was typed: a number, true or false, or a text."""
    if not isinstance(value, TypedText):
        return value
    return pydantic.TypeAdapter(Scalar).validate_python(str(value), strict=False)


def list_texts(value: Any) -> Any:
    """Take one text as a list of one, and None as no text."""
    if value is None:
        return ()
    return [value] if isinstance(value, str) else value


def drop_empty(texts: Sequence[str]) -> tuple[str, ...]:
    """Drop empty texts, in front of which every text would end."""
    return tuple(text for text in texts if text)


Built = Annotated[
    SkipJsonSchema[pydantic.InstanceOf[BuiltSampler]],
    pydantic.PlainSerializer(name_sampler),
]
Texts = Annotated[
    Sequence[str],
    pydantic.BeforeValidator(list_texts, json_schema_input_type=str | list[str]),
    pydantic.AfterValidator(drop_empty),
]
Scalar = Annotated[int | float | bool | str, Field(union_mode="left_to_right")]
OptionValue = Annotated[Scalar, pydantic.WrapValidator(keep_typed)]
Undeclared = Annotated[Any, pydantic.BeforeValidator(read_typed)]  # a parameter without a type
Options = Annotated[Mapping[str, OptionValue], pydantic.BeforeValidator(read_values)]


Temperature = NonNegativeFloat
TopK = PositiveInt | None
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]

# The keys of stored texts, in this order; and what a description has in another form.
DESCRIBED = ("temperature", "top_p", "top_k", "seed", "n", "block")
NOT_DESCRIBED = ("max_new_tokens", "length", "steps", "sampler", "options", "do_sample", "batch")
STEPS = f"Sampling steps; by default {DEFAULT_STEPS}, for confidence and margin one per token."
SAMPLER = f"Sampler: ancestral, …; by default {DEFAULT_SAMPLER}, for holes {INFILL_SAMPLER}."


class SamplingSettings(Settings):
    """The settings of `LM.generate`, `infill`, `stream` and `record`, of commands and requests."""

    vocabularies = {
        "cli": {"options": "option", "do_sample": None},
        "openai": {
            "max_new_tokens": "max_tokens",
            "length": None,
            "batch": None,
            "do_sample": None,
        },
        "transformers": {
            "n": "num_return_sequences",
            "length": None,
            "stop": None,
            "batch": None,
        },
        "diffusers": {
            "n": "num_texts_per_prompt",
            "steps": "num_inference_steps",
            "block": "block_length",
            "sampler": None,  # the scheduler's
            "options": None,
            "seed": None,  # the generator's
            "length": None,
            "stop": None,
            "batch": None,
            "do_sample": None,
        },
        "llada": {"max_new_tokens": "gen_length", "block": "block_length"},
    }
    elsewhere = "; an option of a sampler is given as options={{'{name}': …}}"

    max_new_tokens: PositiveInt | None = None
    """Tokens after the prompt; by default as many as the model allows."""
    length: PositiveInt | None = None
    """Tokens of a text, including the prompt, without BOS and EOS; by default the model's length."""
    n: PositiveInt = 1
    """Number of texts for each prompt or template."""
    steps: PositiveInt | None = Field(default=None, description=STEPS)
    sampler: str | Built | None = Field(default=None, description=SAMPLER)
    options: Options | None = None
    """Options that only this sampler takes, such as eta=0.04."""
    temperature: Temperature = DEFAULT_TEMPERATURE
    """Softmax temperature; 0 is greedy."""
    top_p: TopP = DEFAULT_TOP_P
    """Nucleus: total probability of the tokens kept."""
    top_k: TopK = None
    """Number of likeliest tokens kept; by default all."""
    min_p: MinP = 0.0
    """Least probability of a token kept, as a share of the likeliest one's."""
    do_sample: bool = True
    """False sets the temperature to 0."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = 0
    """Random seed; null draws one."""
    block: PositiveInt | None = None
    """Tokens per block, left to right; by default one block."""
    stop: Texts = ()
    """Texts before the first of which a generated text ends."""
    batch: PositiveInt = 16
    """Texts per batch; does not change the texts."""

    def draw_seed(self) -> Self:
        """Return the settings with a seed: their own, or one that is drawn now."""
        if self.seed is not None:
            return self
        return self.model_copy(update={"seed": secrets.randbits(32)})

    @pydantic.model_validator(mode="before")
    @classmethod
    def read_do_sample(cls, values: Any) -> Any:
        """Set the temperature to 0 where nothing is to be drawn."""
        if isinstance(values, dict) and values.get("do_sample") is False:
            return values | {"temperature": 0.0}
        return values

    def describe_texts(self) -> dict[str, Any]:
        """Return what the texts follow from, besides their lengths and their sampler.

        A setting of a later version is there only where it is not the default, so that what was
        stored under these values is found again.
        """
        described = {name: getattr(self, name) for name in DESCRIBED}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in NOT_DESCRIBED and value != field.default:
                described[name] = value
        return described

    @pydantic.model_validator(mode="after")
    def check_lengths(self) -> Self:
        """Refuse two lengths."""
        is_one = self.length is None or self.max_new_tokens is None
        expected = "one of them: the first counts the prompt, the second does not; leave one out"
        return self.require(is_one, expected, "length", "max_new_tokens")


class SamplingArguments(TypedDict, total=False):
    """The same for type checkers and editors, which cannot derive it; other libraries' names too."""

    max_new_tokens: int | None
    length: int | None
    n: int
    steps: int | None
    sampler: str | BuiltSampler | None
    options: Mapping[str, int | float | bool | str] | None
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    do_sample: bool
    seed: int | None
    block: int | None
    stop: Sequence[str]
    batch: int
    max_tokens: int | None
    num_return_sequences: int
    num_texts_per_prompt: int
    num_inference_steps: int | None
    block_length: int | None
    gen_length: int | None
