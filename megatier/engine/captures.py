"""Handles what Hugging Face's hooks capture in a forward besides the results of modules, such as router logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from megatier.errors import UnsupportedModelError

collector: ContextVar[dict[str, Any] | None] = _active_collector  # type: ignore[assignment]
"""The dictionary into which Hugging Face's hooks append what they capture."""


def requested_keys() -> list[str]:
    """Return the keys under which the hooks capture in this pass."""
    return [key for key, value in (collector.get() or {}).items() if isinstance(value, list)]


@contextlib.contextmanager
def capturing(keys: Iterable[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield a dictionary of our own, into which the hooks capture under these keys inside."""
    caught: dict[str, list[Tensor]] = {key: [] for key in keys}
    token = collector.set(caught)
    try:
        yield caught
    finally:
        collector.reset(token)


@contextlib.contextmanager
def refusing_captures(module_name: str) -> Iterator[None]:
    """Refuse hooks that take tensors out of a module while it runs in tiles, or is recomputed for its backward.

    Raises:
        UnsupportedModelError: a hook has captured a tensor.
    """
    # Most passes capture nothing, and there are many tiles.
    if not (requested := requested_keys()):
        yield
        return
    with capturing(requested) as caught:
        yield
    if taken := sorted(key for key, values in caught.items() if values):
        raise UnsupportedModelError(f"Hugging Face takes {', '.join(taken)} out of {module_name}, past its result")
