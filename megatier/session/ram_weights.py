"""Copies weights past the gpu tier, while its memory is lent: from homes in RAM and on NVMe, and what the loan saves.

Threads: that of the caller alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatier.play.unit_blocks import StateRun
from megatier.session.session import Session
from megatier.tier import Kind, Tier


class RamWeights:
    """The weights of a session that is alone and lends its memory."""

    def __init__(self, session: Session) -> None:
        """Copy nothing yet."""
        self._device = session.engine.options.device
        self._store = session.store
        self._blocks = session.blocks

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the weights of units to memory on the device, and wait for that.

        Args:
            targets: uint8 [block] for each unit, by name.

        Raises:
            TransferError, IntegrityError: weights could not be read.
        """
        runs = []
        for unit, target in targets.items():
            if self._home(unit) is Tier.GPU:
                key = self._blocks.key(unit, Kind.WEIGHT)
                target.copy_(self._store.loan.saved(key), non_blocking=True)
            else:
                runs += [(unit, elements) for elements, _ in self._blocks.runs(unit)]

        for number, (unit, elements) in enumerate(runs, start=1):
            with self._blocks.open_state(unit, elements, [Kind.WEIGHT]) as state:
                for following in runs[number : number + 1]:
                    self._read_ahead(*following)
                self._copy_run(targets[unit], state)
        self._wait()

    def _read_ahead(self, unit: str, elements: tuple[int, int]) -> None:
        """Start reading a run of weights from NVMe, while the one before it is copied."""
        if self._home(unit) is not Tier.NVME:
            return
        key = self._blocks.key(unit, Kind.WEIGHT)
        span = self._blocks.span(unit, Kind.WEIGHT, elements)
        self._store.prefetch(key, Tier.RAM, span, wait=True)

    def _copy_run(self, target: Tensor, state: StateRun) -> None:
        """Copy a run of weights from RAM."""
        first, stop = state.spans[Kind.WEIGHT]
        target[first:stop].copy_(state.planes[Kind.WEIGHT], non_blocking=True)
        # The slot of a run is another one's after its lease.
        if state.homes[Kind.WEIGHT] is Tier.NVME:
            self._wait()

    def _home(self, unit: str) -> Tier:
        """Return the home of a unit's weights."""
        return self._blocks.placement.homes[unit, Kind.WEIGHT]

    def _wait(self) -> None:
        """Wait for the device, on whichever streams it works."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
