"""Options that commands share, and the options that settings are on the command line."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic.fields import FieldInfo

from adlm.bundled import DEFAULT
from adlm.settings import (
    SamplingSettings,
    Settings,
    SettingsError,
    list_own_names,
    split_schema,
)

if TYPE_CHECKING:
    from adlm.text.lm import LM

sampling_option = partial(typer.Option, rich_help_panel="Sampling")
METAVARS = {  # by the type of a value in JSON
    "integer": "<int>",
    "number": "<float>",
    "boolean": "<bool>",
    "string": "<str>",
    "array": "<str>",
    "object": "<name=value>",
}
REPEATED = ("array", "object")  # options that may be given several times
NULL = "null"  # the text of None


def format_help(field: FieldInfo) -> str:
    """Return what a field sets, and its default."""
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    return f"{field.description}{default}"


def setting_option(name: str) -> Any:
    """Return the option of one setting of sampling, for a command that takes only some of them."""
    typed = list_own_names(SamplingSettings, "cli")[name]
    description = SamplingSettings.model_fields[name].description

    def check(value: Any) -> Any:
        read_setting(name, value)
        return value

    return sampling_option(typed, help=f"{description}", callback=check)


def read_setting(name: str, value: Any) -> Any:
    """Check the value of one option by its setting, and return it as the setting has it."""
    if value in (None, []):
        return None
    typed = list_own_names(SamplingSettings, "cli")[name]
    return getattr(SamplingSettings.parse("cli", None, **{typed: value}), name)


@contextmanager
def name_options() -> Iterator[None]:
    """Context manager: errors name settings of sampling as options of the command line."""
    try:
        yield
    except SettingsError as error:
        raise error.rename(list_own_names(SamplingSettings, "cli")) from None


MODEL_HELP = (
    "Bundled model, folder of a run or a model, .ckpt, or OWNER/NAME on the Hub. "
    f"[default: {DEFAULT}]"
)
ModelArgument = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
Device = Annotated[
    str, typer.Option(help="Device: auto (CUDA or the CPU), cpu, cuda, cuda:N or mps.")
]
NETWORK_HELP = "Network of a model folder that is not built in; its module is imported."
OBJECTIVE_HELP = "Objective of a model folder that is not built in; its module is imported."
Seed = Annotated[int, setting_option("seed")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]

Steps = Annotated[int | None, setting_option("steps")]
Sampler = Annotated[str | None, setting_option("sampler")]
Temperature = Annotated[float, setting_option("temperature")]
TopP = Annotated[float, setting_option("top_p")]
TopK = Annotated[int | None, setting_option("top_k")]
Block = Annotated[int | None, setting_option("block")]
Batch = Annotated[int, setting_option("batch")]
SamplerOptions = Annotated[list[str] | None, setting_option("options")]
Deterministic = Annotated[
    bool, sampling_option("--deterministic", help="Independent of the batch on a GPU, too.")
]


Objective = Annotated[str | None, typer.Option(metavar="MODULE:OBJECT", help=OBJECTIVE_HELP)]


@dataclass(frozen=True)
class LoadOptions:
    """Where a model runs, and what its folder names that is not built in."""

    device: Device = "auto"
    network: Annotated[str | None, typer.Option(metavar="MODULE:OBJECT", help=NETWORK_HELP)] = None
    objective: Objective = None

    def load_model(self, name: str | None, *, deterministic: bool = False) -> "LM":
        """Load a model, by default the bundled one."""
        return next(self.load_models([name], deterministic=deterministic))

    def load_models(
        self, names: Sequence[str | None], *, deterministic: bool = False
    ) -> "Iterator[LM]":
        """Load models one by one, of which some may have networks of their own."""
        from adlm.text.lm import load_models

        return load_models(
            [name or DEFAULT for name in names],
            device=self.device,
            deterministic=deterministic,
            network=self.network,
            objective=self.objective,
        )


def add_options(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: what it takes as settings or as a dataclass becomes options.

    Settings are read as text by the types of their fields, without those that are left out. Errors
    name them as they were typed, also those that are raised later.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, list[str]]] = {}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            kind = parameter.annotation
            if not inspect.isclass(kind):
                shown.append(parameter)
                continue
            options = list(list_options(kind, left_out))
            shown.extend(options)
            groups[name] = kind, [option.name for option in options]

        has_settings = any(issubclass(kind, Settings) for kind, _ in groups.values())

        def run(**values: Any) -> None:
            with name_options() if has_settings else nullcontext():
                for name, (kind, names) in groups.items():
                    own = {option: values.pop(option) for option in names}
                    values[name] = build_group(kind, own)
                command(**values)

        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in shown]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in keywords}
        return run

    return decorate


def list_options(kind: type, left_out: Sequence[str]) -> Iterator[inspect.Parameter]:
    """Yield the options of settings, or of a dataclass whose fields have theirs."""
    if not issubclass(kind, Settings):
        yield from inspect.signature(kind, eval_str=True).parameters.values()
        return
    schemas = kind.model_json_schema()["properties"]
    for name, typed in list_own_names(kind, "cli").items():
        if name in left_out:
            continue
        types = [each["type"] for each in split_schema(schemas[name])]
        is_repeated = not set(REPEATED).isdisjoint(types)
        text: Any = list[str] if is_repeated else str
        help_text = format_help(kind.model_fields[name])
        option = sampling_option(typed, help=help_text, metavar=METAVARS[types[0]])
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[text | None, option],
        )


def build_group(kind: type, values: Mapping[str, Any]) -> Any:
    """Make settings of texts, or a dataclass of values."""
    if not issubclass(kind, Settings):
        return kind(**values)
    given: dict[str, Any] = {}
    for name, typed in list_own_names(kind, "cli").items():
        text = values.get(name)
        if text not in (None, []):
            given[typed] = None if text == NULL else text
    return kind.parse("cli", None, **given)
