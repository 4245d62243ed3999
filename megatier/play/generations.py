"""The generations of units' state: which one is valid, which one a savepoint keeps, and which one is being read.

A unit that spills may have several places for its state on NVMe, and two for its state in RAM. So may a unit that is
whole in RAM. One generation is valid, one may be kept as a savepoint, and one may receive a speculative update.

The queue `checkpoint` reads state while passes go on. An update follows the reader of the generation that it
overwrites.

Threads: only the thread that computes changes which generation is valid. It does so between passes, before it submits
the updates and loads that depend on it. So queues may read the generation of a unit that they load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatier.schedule.placement import Placement
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier


@dataclass(frozen=True, slots=True)
class Generation:
    """A version of a unit's state, given by its places on NVMe and in RAM.

    The two numbers differ, because a generation that a savepoint keeps on NVMe takes no place in RAM.
    """

    nvme: int = 0
    """The unit's place on NVMe."""
    ram: int = 0
    """The unit's place in RAM, for kinds of state that are at home there."""


class Generations:
    """The generations of all units of a run."""

    def __init__(self, units: Mapping[str, object], placement: Placement) -> None:
        """Begin with every unit's first generation valid, and none kept.

        Args:
            units: the run's units, by name.
            placement: the number of places of each.
        """
        self._placement = placement
        self.valid = dict.fromkeys(units, Generation())
        """The valid generation of each unit's state."""
        self.kept: dict[str, int] = {}
        """For each unit that spills, the place on NVMe that a savepoint keeps; empty without a savepoint."""
        self._readers: dict[str, tuple[Generation, Transfer]] = {}
        """The last reader of each unit, and the generation that it reads. Earlier readers end before it, because all
        are items of one queue."""

    def places(self, unit: str, kind: Kind) -> range:
        """Return the places of a unit's state of one kind."""
        placement = self._placement
        if placement.homes[unit, kind] is Tier.NVME:
            num_places = placement.generations if unit in placement.spilled else 1
        else:
            # Two suffice in RAM, where a savepoint keeps none.
            num_places = 2 if unit in placement.speculative else 1
        return range(num_places)

    def place(self, unit: str, kind: Kind, generation: Generation | None = None) -> int:
        """Return the place of a unit's state of one kind in a generation; None: in the valid one."""
        generation = generation or self.valid[unit]
        return generation.nvme if self._placement.homes[unit, kind] is Tier.NVME else generation.ram

    def spare(self, unit: str) -> Generation | None:
        """Return a generation that is neither valid nor kept, and so may be overwritten; None if there is none."""
        valid = self.valid[unit]

        # A savepoint keeps no place in RAM, because it copies that state to its folder. So two places suffice.
        ram = 1 - valid.ram if unit in self._placement.speculative else 0
        taken = valid.nvme, self.kept.get(unit)
        for place in range(self._placement.generations):
            if place not in taken:
                return Generation(place, ram)
        return None

    def advance(self, unit: str) -> tuple[Generation, Generation]:
        """Return the generations that a unit's next update reads and writes. The latter is valid from now on.

        They are the same one, unless the valid generation is kept.
        """
        old = self.valid[unit]
        if self.kept.get(unit) != old.nvme:
            return old, old

        new = self.spare(unit)
        assert new is not None, "a kept generation is one of several"

        # The unit's weights must not be in a GPU slot now, because the slot would belong to the old generation.
        # Savepoints need the deferred mode, which submits updates between passes, when these slots are empty.
        self.valid[unit] = new
        return old, new

    def keep(self) -> None:
        """Keep the valid generations as a savepoint, in place of those that were kept before."""
        self.kept = {unit: self.valid[unit].nvme for unit in self._placement.spilled}

    def release(self) -> None:
        """Give up the savepoint, so that all generations but the valid ones may be overwritten."""
        self.kept = {}

    def hold(self, unit: str, reader: Transfer) -> None:
        """Note a transfer that reads the valid generation. Until it is over, no update overwrites that generation."""
        self._readers[unit] = self.valid[unit], reader

    def readers(self, unit: str, generation: Generation) -> list[Transfer]:
        """Return the transfers that read from a place of this generation. An update of it has to follow them."""
        if unit not in self._readers:
            return []
        read, reader = self._readers[unit]
        if reader.done():
            return []

        # Two generations may differ on NVMe, but have the same place in RAM.
        shares_place = read.nvme == generation.nvme or read.ram == generation.ram
        return [reader] if shares_place else []

    def forget_readers(self) -> None:
        """Forget all readers, which have ended."""
        self._readers.clear()
