"""Values that stand in the place of others for a while."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager


@contextmanager
def patched(held: MutableMapping[str, object], /, **values: object) -> Iterator[None]:
    """Give names these values for a while. Then they have their own again, or none if they had none.

    Args:
        held: what holds the names, such as the `vars` of a module.
        **values: the values by their names.
    """
    before = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        # What the class of an object has is none of the names here, and is seen again when its stand-in is gone.
        for name in values.keys() - before.keys():
            held.pop(name, None)
        held.update(before)
