"""Reads, creates and fills the containers that a module may be given.

A container is a mapping, a sequence, or an object whose contents are its fields. Contents are read and written without
calling the container's own methods, since a class may count, check or refuse there. `call_arguments` is the caller.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Hashable, Mapping
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig

from megatier.guards.hidden_parts import slots_of

ContainerKey = tuple[str, Hashable]
"""A place in a container: an item by its key or index, or a field by its name."""

LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, Enum, nn.Module, PretrainedConfig)
"""Types of values that are passed on as they are."""
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, deque, list, SimpleNamespace)
"""Types of containers. A subclass comes before its base."""


def is_container(kind: type) -> bool:
    """Return whether values of a type are containers: what they hold can be read, and put into another one."""
    return _base(kind) is not None


@cache
def _base(kind: Any) -> Any:  # noqa: ANN401 - mypy takes no type for hashable
    """Return the base class whose `__new__` makes an empty container of this type; None if it is no container.

    It is one of the known container types, or object if the contents are fields alone.
    """
    # Cached, since every call of a module asks this for all its arguments.
    if issubclass(kind, LEAF_TYPES) or kind.__module__.partition(".")[0] == "torch":
        return None
    for base in _BASES:
        if issubclass(kind, base):
            return base

    # Callables have state that cannot be seen, and so do most objects of the standard library, except its containers
    # that are written in Python.
    is_called = any("__call__" in owner.__dict__ for owner in kind.__mro__)
    has_fields = kind.__dictoffset__ or any(True for _ in slots_of(kind))
    is_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if is_called or not has_fields or (is_python and not issubclass(kind, UserDict | UserList)):
        return None

    # Types that are implemented in C refuse this, and nothing is known of what they hold.
    try:
        object.__new__(kind)
    except TypeError:
        return None

    return object


def contents_of(container: Any) -> dict[ContainerKey, Any]:  # noqa: ANN401
    """Return all that a container holds, without calling its methods."""
    kind: Any = type(container)
    base = _base(kind)
    contents: dict[ContainerKey, Any] = {}
    if issubclass(base, dict):
        for key in base.__iter__(container):
            contents["item", key] = base.__getitem__(container, key)
    elif issubclass(base, list | deque):
        for number, value in enumerate(base.__iter__(container)):
            contents["item", number] = value

    # This field is kept in C: neither `__dict__` nor the slots below have it.
    if base is defaultdict:
        contents["field", "default_factory"] = container.default_factory
    for name, value in getattr(container, "__dict__", {}).items():
        contents["field", name] = value
    for name in slots_of(kind):
        # Reading a slot that was never assigned raises an error.
        if hasattr(container, name):
            contents["field", name] = getattr(container, name)
    return contents


def empty(kind: type, maxlen: int | None) -> Any:  # noqa: ANN401
    """Make an empty container.

    Args:
        kind: its type.
        maxlen: the bound of a deque.
    """
    base = _base(kind)
    container = base.__new__(kind)
    if base is deque:
        # A deque takes its bound only when it is initialised.
        deque.__init__(container, (), maxlen)
    return container


def fill(container: Any, contents: Mapping[ContainerKey, Any]) -> None:  # noqa: ANN401
    """Replace the contents of a container, without calling its methods."""
    kind: Any = type(container)
    base = _base(kind)
    if issubclass(base, dict | list | deque):
        base.clear(container)
    getattr(container, "__dict__", {}).clear()
    for name in slots_of(kind):
        if hasattr(container, name):
            object.__delattr__(container, name)

    for (place, key), value in contents.items():
        if place == "field":
            object.__setattr__(container, cast("str", key), value)
        elif issubclass(base, dict):
            base.__setitem__(container, key, value)
        else:
            # Items come in the order of their indices (`contents_of`), so each one is appended.
            base.append(container, value)
