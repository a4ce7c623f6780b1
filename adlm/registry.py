"""Resolves names: of a table that stands beside its objects, or `module:object`."""

from importlib import import_module
from typing import Any


def load_object(target: str) -> Any:
    """Import `module:object`; the caller answers for where the string comes from."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{target!r} is not module:object: write for example my_package.file:name")
    found = import_module(module)
    if not hasattr(found, name):
        raise ValueError(f"{module} has no {name!r}: expected {target} to be defined in it")
    return getattr(found, name)
