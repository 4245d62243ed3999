"""Containers that a module may be given: which kinds there are, what one holds, and how to make another one like it.

A container is a mapping, a sequence, or an object whose contents are its fields. Its contents are read and written past
whatever its class does then, since a class may count, check or refuse.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig

Place = tuple[str, Hashable]
"""A place in a container: an item by its key or number, or a field by its name."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Enum, nn.Module, PretrainedConfig)
"""Kinds of values that are handed on as they are."""
BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, deque, list, SimpleNamespace)
"""Kinds of containers, each before those that it is a kind of."""
_bases: dict[type, type | None] = {}
"""The base of each kind that was asked for so far."""


def is_container(kind: type) -> bool:
    """Whether values of a kind are containers: what they hold can be taken out, and put into another one."""
    return _base(kind) is not None


def _base(kind: type) -> type | None:
    """The base whose `__new__` makes an empty container of this kind; None if the kind is no container."""
    if kind not in _bases:
        _bases[kind] = _find_base(kind)
    return _bases[kind]


def _find_base(kind: type) -> type | None:
    """Find the base of a kind: a known kind of container, or object if its contents are fields alone."""
    if issubclass(kind, PLAIN) or kind.__module__.partition(".")[0] == "torch":
        return None
    for base in BASES:
        if issubclass(kind, base):
            return base

    # Callables hold state of their own, and so do most objects of Python's library, but for its containers in Python.
    is_called = any("__call__" in owner.__dict__ for owner in kind.__mro__)
    has_fields = kind.__dictoffset__ or any(True for _ in _slots(kind))
    is_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if is_called or not has_fields or (is_python and not issubclass(kind, UserDict | UserList)):
        return None

    # A kind that is made in C, or a kind of number, refuses: nobody knows what it holds.
    try:
        object.__new__(kind)
    except TypeError:
        return None

    return object


def _slots(kind: type) -> Iterator[str]:
    """The names of the fields that do not lie in `__dict__`."""
    for owner in kind.__mro__:
        names = owner.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                # Python mangles private names with that of their class.
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def contents_of(container: Any) -> dict[Place, Any]:  # noqa: ANN401
    """All that a container holds, past whatever its class does when it is read."""
    base = cast("Any", _base(type(container)))
    found: dict[Place, Any] = {}
    if issubclass(base, dict):
        found = {("item", key): base.__getitem__(container, key) for key in base.__iter__(container)}
    elif issubclass(base, list | deque):
        found = {("item", number): value for number, value in enumerate(base.__iter__(container))}

    if base is defaultdict:
        found["field", "default_factory"] = container.default_factory
    found |= {("field", name): value for name, value in getattr(container, "__dict__", {}).items()}
    names = [name for name in _slots(type(container)) if hasattr(container, name)]
    return found | {("field", name): getattr(container, name) for name in names}


def empty(kind: type, maxlen: int | None) -> Any:  # noqa: ANN401
    """Make an empty container.

    Args:
        kind: its kind.
        maxlen: the bound of a deque.
    """
    base = cast("Any", _base(kind))
    made = base.__new__(kind)
    if base is deque:
        deque.__init__(made, (), maxlen)
    return made


def fill(container: Any, contents: Mapping[Place, Any]) -> None:  # noqa: ANN401
    """Make a container hold this and nothing else, past whatever its class does when it is written to."""
    base = cast("Any", _base(type(container)))
    if issubclass(base, dict | list | deque):
        base.clear(container)
    getattr(container, "__dict__", {}).clear()
    for name in _slots(type(container)):
        if hasattr(container, name):
            object.__delattr__(container, name)

    for (kind, key), value in contents.items():
        if kind == "field":
            object.__setattr__(container, cast("str", key), value)
        elif issubclass(base, dict):
            base.__setitem__(container, key, value)
        else:
            base.append(container, value)
