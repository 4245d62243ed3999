"""Takes containers apart that a module may be given, and makes others like them.

A container is a mapping, a sequence, or an object whose contents are its fields. Its contents are read and written past
whatever its class does then, since a class may count, check or refuse.
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

from megatier.guards.held_parts import slots_of

ContainerKey = tuple[str, Hashable]
"""A place in a container: an item by its key or number, or a field by its name."""

LEAF_TYPES = (bool, int, float, complex, str, bytes, type(None), type, Enum, nn.Module, PretrainedConfig)
"""Kinds of values that are handed on as they are."""
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, deque, list, SimpleNamespace)
"""Kinds of containers, each before those that it is a kind of."""


def is_container(kind: type) -> bool:
    """Return whether values of a kind are containers: what they hold can be taken out, and put into another one."""
    return _base(kind) is not None


@cache
def _base(kind: Any) -> Any:  # noqa: ANN401 - mypy takes no type for hashable
    """Return the base whose `__new__` makes an empty container of this kind; None if the kind is no container.

    It is a known kind of container, or object if the contents of this one are fields alone.
    """
    # Remembered, since every call of a module asks for all that it is given.
    if issubclass(kind, LEAF_TYPES) or kind.__module__.partition(".")[0] == "torch":
        return None
    for base in _BASES:
        if issubclass(kind, base):
            return base

    # Callables hold state of their own, and so do most objects of Python's library, but for its containers in Python.
    is_called = any("__call__" in owner.__dict__ for owner in kind.__mro__)
    has_fields = kind.__dictoffset__ or any(True for _ in slots_of(kind))
    is_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if is_called or not has_fields or (is_python and not issubclass(kind, UserDict | UserList)):
        return None

    # A kind that is made in C, or a kind of number, refuses: nobody knows what it holds.
    try:
        object.__new__(kind)
    except TypeError:
        return None

    return object


def contents_of(container: Any) -> dict[ContainerKey, Any]:  # noqa: ANN401
    """Return all that a container holds, past whatever its class does when it is read."""
    kind: Any = type(container)
    base = _base(kind)
    contents: dict[ContainerKey, Any] = {}
    if issubclass(base, dict):
        for key in base.__iter__(container):
            contents["item", key] = base.__getitem__(container, key)
    elif issubclass(base, list | deque):
        for number, value in enumerate(base.__iter__(container)):
            contents["item", number] = value

    # A field that C keeps: neither the dictionary of fields nor the slots below have it.
    if base is defaultdict:
        contents["field", "default_factory"] = container.default_factory
    for name, value in getattr(container, "__dict__", {}).items():
        contents["field", name] = value
    for name in slots_of(kind):
        # A slot that was never assigned holds nothing, and reading it raises.
        if hasattr(container, name):
            contents["field", name] = getattr(container, name)
    return contents


def empty(kind: type, maxlen: int | None) -> Any:  # noqa: ANN401
    """Make an empty container.

    Args:
        kind: its kind.
        maxlen: the bound of a deque.
    """
    base = _base(kind)
    made = base.__new__(kind)
    if base is deque:
        # A deque takes its bound when it is initialised, and at no other time.
        deque.__init__(made, (), maxlen)
    return made


def fill(container: Any, contents: Mapping[ContainerKey, Any]) -> None:  # noqa: ANN401
    """Make a container hold this and nothing else, past whatever its class does when it is written to."""
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
            # Items come in the order of their numbers (`contents_of`), so each belongs at the end.
            base.append(container, value)
