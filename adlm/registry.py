"""Resolves names: of a table that stands beside its objects, or `module:object` of a user's file.

An import is allowed where a person typed the name (Python, the command line, a recipe), never for a
name that a model folder or a request holds.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from adlm.errors import check_known

Entry = TypeVar("Entry")
Built = TypeVar("Built")
# Parameters such as *args and **options, which stand for any number of others.
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A table of names with what errors call its entries; `aliases` are names in other code."""

    def __init__(
        self, kind: str, table: Mapping[str, Entry], aliases: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.table = dict(table)
        self.aliases = dict(aliases or {})

    def __getitem__(self, name: str) -> Entry:
        return self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def knows(self, name: str) -> bool:
        """Return whether a name is in the table, or an alias of one that is."""
        return self.aliases.get(name, name) in self.table

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry for the rest of the process, as `adlm serve --plugin` does."""
        if self.table.get(name, entry) != entry:
            raise ValueError(f"{self.kind} {name!r} exists already: choose another name")
        self.table[name] = entry

    def resolve(self, name: str, *, allow_import: bool = False) -> Entry:
        """Return the entry of a name or, where it is allowed, the `module:object`."""
        name = self.aliases.get(name, name)
        if name in self.table:
            return self.table[name]
        if ":" in str(name):
            if allow_import:
                return cast(Entry, load_user_object(name))
            known = ", ".join(self.table)
            raise ValueError(
                f"{self.kind} {name!r} is not imported from here: expected one of {known}; "
                "give module:object in Python, on the command line or in a recipe"
            )
        check_known(self.kind, name, self.table)
        return self.table[name]


def build(
    registry: Registry[Callable[..., Built]],
    name: str,
    options: Mapping[str, Any],
    *,
    allow_import: bool = False,
) -> Built:
    """Call the function or class of a name with its options; `module:object` may be finished."""
    factory: Any = registry.resolve(name, allow_import=allow_import)
    if name not in registry and not (inspect.isroutine(factory) or inspect.isclass(factory)):
        if options:
            given = ", ".join(options)
            raise ValueError(f"{registry.kind} {name!r} is an object and takes no {given}")
        return cast(Built, factory)

    parameters = inspect.signature(factory).parameters
    known = {key: each for key, each in parameters.items() if each.kind not in VARIADIC}
    if not takes_any_option(parameters):
        for option in options:
            check_known(f"{name} option", option, known or ["none"])
    required = [each.name for each in known.values() if each.default is each.empty]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(
            f"{registry.kind} {name!r} needs {', '.join(missing)}: give {missing[0]}=VALUE"
        )
    return cast(Built, factory(**options))


def takes_any_option(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function with these parameters has `**options`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def load_user_object(target: str) -> Any:
    """Import `module:object` that a person typed: a file in the current folder counts too."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)  # last: a file there does not hide an installed package
    return load_object(target)


def load_object(target: str) -> Any:
    """Import `module:object`; the caller answers for where the string comes from."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{target!r} is not module:object: write for example my_package.file:name")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise ValueError(
            f"{target!r}: there is no module {error.name!r}: expected an installed one, "
            "or a file in the current folder"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{target!r}: {module} has no {name!r}: define it there")
        found = getattr(found, part)
    return found
