"""Temporary replacement of values, such as functions of a module of another library."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def patched(namespace: MutableMapping[str, object], /, **values: object) -> Iterator[None]:
    """Replace the values of names in this context, and restore them afterwards.

    Args:
        namespace: the mapping of names, such as the `vars` of a module.
        **values: the new values by name.
    """
    before = {name: namespace[name] for name in values if name in namespace}
    namespace.update(values)
    try:
        yield
    finally:
        # A name that was only in the object's class is removed, so that the class's value shows again.
        for name in values.keys() - before.keys():
            namespace.pop(name, None)
        namespace.update(before)
