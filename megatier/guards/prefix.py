"""Refuses prefixes that cannot be taken: keys, values and states of earlier tokens, handed to a forward.

Nodes give layers no cache while gradients are taken: a forward that is made again would append to it a second time. So
a cache that holds something would be left out, and one that is empty would stay so for the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import Cache

from megatier.errors import StreamedModelError

CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past"})
"""Names under which older models hand on tuples of tensors instead of a cache."""


def is_cache(value: object) -> bool:
    """Return whether a value is a cache, whatever the name under which it is handed on."""
    # A few models have caches of their own beside the class of transformers (xLSTM, Reformer).
    return isinstance(value, Cache) or type(value).__name__.endswith("Cache")


def refuse_given(arguments: Mapping[str, Any]) -> None:
    """Refuse a prefix among what a caller gives to a forward of the model with gradients.

    Args:
        arguments: of the forward, by their names.

    Raises:
        StreamedModelError: one is a cache, filled or not, or tuples of tensors for each layer, or holds such.
    """
    for name, value in arguments.items():
        if _has_prefix(value):
            raise _refused(f"{name} of the forward is")


def without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any], module_name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module without caches, which the model has made for itself and nobody has filled.

    Args:
        args: the arguments by place.
        kwargs: those by name.
        module_name: the name of the module in the model.

    Raises:
        StreamedModelError: a cache holds tensors.
    """

    def kept(name: str, value: object) -> object:
        if value is None or not (name in CACHE_NAMES or is_cache(value)):
            return value
        if _holds_tensors(value):
            raise _refused(f"argument {name} of {module_name} holds")
        return None

    by_place = tuple(kept(str(place), value) for place, value in enumerate(args))
    by_name = {name: kept(name, value) for name, value in kwargs.items()}

    # Else the module would make a cache of its own.
    if by_name.get("use_cache"):
        by_name["use_cache"] = False
    return by_place, by_name


def _has_prefix(value: object) -> bool:
    """Return whether a value is a cache or a sequence of tuples of tensors, or holds one of these."""
    if isinstance(value, Mapping):
        return any(map(_has_prefix, value.values()))
    if not isinstance(value, list | tuple):
        return is_cache(value)

    for item in value:
        if type(item) is tuple and any(map(torch.is_tensor, item)):
            return True
        if _has_prefix(item):
            return True
    return False


def _holds_tensors(value: object) -> bool:
    """Return whether there are keys, values or states in a cache, or in what stands for one."""
    if torch.is_tensor(value):
        return value.ndim > 0 and value.numel() > 0  # an empty cache may have its window as a tensor
    contents: Iterable[object]
    if isinstance(value, Mapping):
        contents = value.values()
    elif isinstance(value, list | tuple):
        contents = value
    elif isinstance(value, type):
        # The attributes of a class are no states.
        contents = ()
    else:
        contents = getattr(value, "__dict__", {}).values()
    return any(map(_holds_tensors, contents))


def _refused(given: str) -> StreamedModelError:
    """Return the error about a prefix."""
    return StreamedModelError(
        f"{given} a cache, or keys and values of earlier tokens, and a forward of a streamed model with gradients "
        "takes none: they would be left out. Give all tokens to one forward, as input_ids or as inputs_embeds with a "
        "learnt prefix in front; or make the forward under torch.no_grad()."
    )
