"""Offloaded activations: the input of each unit lies in RAM from the unit's forward to its backward.

Threads: the thread that computes calls all of it (autograd's, in a backward).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatier.errors import ConfigError
from megatier.play.blocks import activation_key
from megatier.schedule.activations import Activations
from megatier.schedule.demand import Demand
from megatier.schedule.moves import stash, unstash
from megatier.schedule.sizes import UnitSpec
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer


class Offload:
    """Takes activations to RAM and brings them back, the last one first."""

    def __init__(self, store: TieredStore, units: Mapping[str, UnitSpec], demand: Demand) -> None:
        """Nothing is in RAM yet.

        Args:
            store: has a block for each unit with `activation_bytes`.
            units: sizes of every unit, by name.
            demand: counts the bytes that move.
        """
        self._store = store
        self._units = units
        self._demand = demand
        self._activations = Activations()
        """Says which activation comes back when."""
        self._stashed: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """The shape and dtype of each unit's activation in RAM."""
        self._fetched: dict[str, tuple[torch.Tensor, Transfer]] = {}
        """Activations on their way back, and the tensors that they come to."""

    def clear(self) -> None:
        """Forget the activations of a pass that was abandoned."""
        self._activations = Activations()
        self._stashed.clear()
        self._fetched.clear()

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Start copying an activation (contiguous, on the GPU) to its place in RAM.

        Raises:
            ConfigError: the batch is larger than what the run was planned for.
        """
        if tensor.nbytes > (planned := self._units[unit].activation_bytes):
            raise ConfigError(
                f"the input of {unit} has {tensor.nbytes} bytes; by train.batch and data.sequence_length, "
                f"train.activations: offload has set {planned} aside for it. Give batches that are no larger. If they "
                "are not larger, this model's layers take more than a hidden state a token: set train.activations to "
                "recompute."
            )

        self._store.push(activation_key(unit), tensor)
        self._activations.stash(unit)
        self._stashed[unit] = tensor.shape, tensor.dtype
        self._demand.add([stash(tensor.nbytes)])

    def fetch(self, unit: str) -> torch.Tensor:
        """Bring a stashed activation back to the GPU; compute that is enqueued next comes after it."""
        for asked in self._activations.fetch(unit):
            shape, dtype = self._stashed.pop(asked)
            back = torch.empty(shape, dtype=dtype, device=self._store.device)
            self._fetched[asked] = back, self._store.pull(activation_key(asked), back)
            self._demand.add([unstash(back.nbytes)])

        tensor, transfer = self._fetched.pop(unit)
        transfer.order()
        return tensor
