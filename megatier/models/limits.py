"""Limits the size of the model that a config may ask for, since even without weights a billion modules would fill RAM.

A config with `num_hidden_layers: 1000000000` would first keep its own class busy, which lists all layers, and then the
model's constructor. So the counts in a config are checked before, and what a constructor makes is counted while it
runs, whatever the config calls it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel

from megatier.byte_counts import format_bytes
from megatier.errors import UnsupportedModelError
from megatier.foreign import printable

LAYERS_MAX = 4096
"""The most layers. The deepest models ever trained have about a thousand."""
MODULES_MAX = 200_000
"""The most modules. Kimi K2 with a module for each expert has half as many."""
ELEMENTS_MAX = 1 << 44
"""The most elements of all parameters, 17 trillion: ten times the largest known model."""
BUFFER_BYTES_MAX = 1 << 30
"""The most bytes of buffers, which are real and in RAM: masks and position tables (0.1 GiB in GPT-J)."""

POSITIONS = re.compile(r"(?:^|[._])(?:wpe|pos(?:ition)?s?(?:_emb\w*)?|embed_positions)(?:\.\w+)?$")
"""The names of position tables."""
ROWS_IN_FRONT_MAX = 8
"""The most rows of such a table that are not positions."""
COUNTS = re.compile(r"(?:^|_)n?(?:layers?|blocks|depths?|stages|dense_replace|attention_types)$")
"""Keys of counts of repeated modules. Experts are not included, since Doge has 16,384 of them in one table."""


def check_counts(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a config that asks for more layers than any model has, at any depth of the config.

    Args:
        settings: plain dicts, lists, numbers and text, of a bounded depth.
        where: the source of the settings, for messages.

    Raises:
        UnsupportedModelError: a count is too large. The message names its key.
    """
    # Iterative, so that a deep config cannot exhaust the stack.
    waiting: list[tuple[str, Any]] = list(settings.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            inner = [(str(name), item) for name, item in value.items()]
            waiting.extend(inner)
        elif isinstance(value, list | tuple):
            waiting.extend((key, item) for item in value)
        elif isinstance(value, int | float):
            is_count = COUNTS.search(str(key)) is not None
            if is_count and value > LAYERS_MAX:
                raise UnsupportedModelError(
                    f"{where}: {printable(str(key))} is above {LAYERS_MAX}, which no model has."
                )


@contextlib.contextmanager
def limiting_construction() -> Iterator[None]:
    """Count what this thread constructs inside, and stop when it is more than any model has.

    Raises:
        UnsupportedModelError: there are too many modules or parameters, or the buffers are too large.
    """
    count = _Count()

    # torch's hooks see the modules of all threads, and other threads may build their own models. A hook that returns
    # None leaves the registered object as it is.
    thread = threading.get_ident()

    def here(add: Any) -> Any:  # noqa: ANN401  torch's hooks have three types
        return lambda owner, name, value: add(value) if threading.get_ident() == thread else None

    hooks = (
        torch_module.register_module_module_registration_hook(here(count.add_module)),
        torch_module.register_module_parameter_registration_hook(here(count.add_parameter)),
        torch_module.register_module_buffer_registration_hook(here(count.add_buffer)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a config's model was made for; None if it names none."""
    # A downloaded config may have any value there.
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def has_position_table(model: PreTrainedModel) -> bool:
    """Return whether a model looks positions up in a table that ends with the last one.

    Rotary and sinusoidal positions continue beyond it.
    """
    num_positions = max_positions(model.config)
    if num_positions is None:
        return False

    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    tables = (tensor for name, tensor in tensors if POSITIONS.search(name))
    return any(_has_rows(table, num_positions) for table in tables)


def _has_rows(table: Tensor, num_positions: int) -> bool:
    """Return whether a table has a row for each position, and perhaps a few before them, as OPT has."""
    return table.ndim == 2 and num_positions <= table.shape[0] <= num_positions + ROWS_IN_FRONT_MAX


class _Count:
    """The counts of everything registered so far. A tied parameter counts twice, for which the limits leave room."""

    def __init__(self) -> None:
        self._modules = 0
        self._elements = 0
        self._buffer_bytes = 0

    def add_module(self, module: nn.Module | None) -> None:
        # torch registers None for an optional submodule that is not there.
        if module is not None:
            self._modules += 1
        if self._modules > MODULES_MAX:
            raise UnsupportedModelError(f"the model has more than {MODULES_MAX:,} modules, which none needs.")

    def add_parameter(self, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._elements += parameter.numel()
        if self._elements > ELEMENTS_MAX:
            raise UnsupportedModelError(f"the model has more than {ELEMENTS_MAX:,} parameters, which no drives hold.")

    def add_buffer(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._buffer_bytes += buffer.nbytes
        if self._buffer_bytes > BUFFER_BYTES_MAX:
            raise UnsupportedModelError(
                f"the model's buffers take more than {format_bytes(BUFFER_BYTES_MAX)} of RAM. Lower "
                "max_position_embeddings, or what it is called in this config."
            )
