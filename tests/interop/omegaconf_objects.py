"""Objects of OmegaConf as a Lightning checkpoint stores them, without the library.

A pickle names `omegaconf.dictconfig.DictConfig` and others, and holds their state: `_content` of
dictionaries and lists, `_val` of values, and metadata with types.
"""

import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stored:
    """An object with the state that the library's has."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)


class DictConfig(Stored):
    """A dictionary."""


class ListConfig(Stored):
    """A list."""


class AnyNode(Stored):
    """A value."""


class Metadata(Stored):
    """The types of a node."""


class OmegaConf:
    """The library's entry point, with a call that changes something."""

    resolvers: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, argument: str = "") -> None:
        self.resolvers["created"] = 1

    @classmethod
    def register_new_resolver(cls, name: str, value: int) -> None:
        """Leave a trace."""
        cls.resolvers[name] = value


MODULES = {
    "omegaconf": (),
    "omegaconf.base": (Metadata,),
    "omegaconf.dictconfig": (DictConfig,),
    "omegaconf.listconfig": (ListConfig,),
    "omegaconf.nodes": (AnyNode,),
    "omegaconf.omegaconf": (OmegaConf,),
}


@contextmanager
def omegaconf_modules() -> Iterator[None]:
    """A context in which the objects have the library's names, so that they can be pickled."""
    before = {name: sys.modules.get(name) for name in MODULES}
    for name, classes in MODULES.items():
        module = sys.modules[name] = types.ModuleType(name)
        for each in classes:
            each.__module__ = name
            setattr(module, each.__name__, each)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def make_node(value: Any, parent: Any = None, key: Any = None) -> Stored:
    """Return the object that the library has for a value."""
    metadata = Metadata(
        ref_type=Any,
        object_type=type(value) if isinstance(value, dict | list) else None,
        optional=True,
        key=key,
        flags={},
        flags_root=False,
        resolver_cache=defaultdict(dict),
    )
    if isinstance(value, dict):
        node: Stored = DictConfig(_metadata=metadata, _parent=parent)
        content = {name: make_node(each, node, name) for name, each in value.items()}
        vars(node)["_content"] = content
    elif isinstance(value, list):
        node = ListConfig(_metadata=metadata, _parent=parent)
        vars(node)["_content"] = [make_node(each, node, i) for i, each in enumerate(value)]
    else:
        node = AnyNode(_metadata=metadata, _parent=parent, _val=value)
    return node
