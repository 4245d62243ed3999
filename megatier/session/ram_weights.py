"""Copies weights past the gpu tier, while its memory is lent: from homes in RAM and on NVMe, and what the loan saves.

Several ranks copy the same units in the same order. Each brings its own shard of a unit, and gathers those of the
others.

Threads: that of the caller alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from megatier.play.unit_blocks import StateRun
from megatier.schedule.lent_room import shard_bytes
from megatier.session.session import Session
from megatier.tier import Kind, Tier


class RamWeights:
    """The weights of a session that lends its memory."""

    def __init__(self, session: Session) -> None:
        """Copy nothing yet."""
        self._device = session.engine.options.device
        self._store = session.store
        self._blocks = session.blocks
        self._all_ranks = session.all_ranks
        self._ranks = session.ranks

    @property
    def shard_bytes(self) -> int:
        """The bytes that a copy takes on the device beside its targets."""
        return shard_bytes(self._blocks.units.values(), self._blocks.policy)

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the weights of units to memory on the device, and wait for that.

        Args:
            targets: uint8 [compute_bytes] for each unit, by name.

        Raises:
            TransferError, IntegrityError: weights could not be read.
            PeerError: another rank has failed.
        """
        read = deque(
            (unit, elements)
            for unit in targets
            if self._home(unit) is Tier.NVME
            for elements, _ in self._blocks.runs(unit)
        )
        # Others may be waiting for what this rank cannot read.
        with self._all_ranks.ending_run_on_error():
            shard = torch.empty(self.shard_bytes, dtype=torch.uint8, device=self._device)
            for unit, target in targets.items():
                if self._ranks is None:
                    self._copy_unit(unit, target, read)
                    continue
                own_shard = shard[: self._blocks.whole(unit, Kind.WEIGHT)[1]]
                self._copy_unit(unit, own_shard, read)
                # As `Collectives` does: the trained elements of all ranks come before the frozen ones.
                for start, stop in self._blocks.gathered_spans(unit):
                    self._ranks.all_gather(
                        target[self._ranks.size * start : self._ranks.size * stop], own_shard[start:stop]
                    )
            self._wait()

    def _copy_unit(self, unit: str, target: Tensor, read: deque[tuple[str, tuple[int, int]]]) -> None:
        """Copy what this rank has of a unit's weights.

        Args:
            unit: its name.
            target: uint8 [block].
            read: the runs that are to be read from NVMe, from this unit on. Its own are taken out.
        """
        if self._home(unit) is Tier.GPU:
            key = self._blocks.key(unit, Kind.WEIGHT)
            target.copy_(self._store.loan.saved(key), non_blocking=True)
            return
        for elements, _ in self._blocks.runs(unit):
            with self._blocks.open_state(unit, elements, [Kind.WEIGHT]) as state:
                if self._home(unit) is Tier.NVME:
                    read.popleft()
                    self._read_ahead(read)
                self._copy_run(target, state)

    def _read_ahead(self, read: deque[tuple[str, tuple[int, int]]]) -> None:
        """Start reading the next run of weights from NVMe, while the one before it is copied."""
        if not read:
            return
        unit, elements = read[0]
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
