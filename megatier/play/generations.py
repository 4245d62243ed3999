"""Tells which generation of a unit's state holds, which one a savepoint keeps, and which one is read.

A unit that spills may have several places for its state on NVMe, and two for what it has in RAM. So may a unit that is
in RAM whole. One generation holds. One may be kept as a savepoint. One may take an update that may yet be void.

The queue `checkpoint` reads state while passes go on. An update comes behind the reader of the generation that it
overwrites.

Threads: the thread that computes alone decides which generation holds, and it does so between passes, before it submits
the updates and loads that go by it. So queues may look at the generation of a unit that they load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatier.schedule.placement import Placement
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier


@dataclass(frozen=True, slots=True)
class Generation:
    """One version of a unit's state, given by the places in which it lies.

    These are two numbers, because a generation that a savepoint keeps on NVMe takes no place in RAM.
    """

    nvme: int = 0
    """The unit's place on NVMe."""
    ram: int = 0
    """The unit's place in RAM, for kinds of state that are at home there."""


class Generations:
    """The generations of all units of a run."""

    def __init__(self, units: Mapping[str, object], placement: Placement) -> None:
        """Let every unit's first generation hold, and keep none.

        Args:
            units: the run's units, by name.
            placement: says how many places each has.
        """
        self._placement = placement
        self.valid = dict.fromkeys(units, Generation())
        """The generation of each unit's state that holds."""
        self.kept: dict[str, int] = {}
        """For each unit that spills, the place on NVMe that a savepoint keeps; empty without a savepoint."""
        self._readers: dict[str, tuple[Generation, Transfer]] = {}
        """The reader of each unit that came last, and the generation that it reads. Earlier readers are over before it,
        since all of them are items of one queue."""

    def places(self, unit: str, kind: Kind) -> range:
        """Return the places that there are for a unit's state of one kind."""
        placement = self._placement
        if placement.homes[unit, kind] is Tier.NVME:
            num_places = placement.generations if unit in placement.spilled else 1
        else:
            # Two are enough in RAM, where a savepoint keeps none.
            num_places = 2 if unit in placement.speculative else 1
        return range(num_places)

    def place(self, unit: str, kind: Kind, generation: Generation | None = None) -> int:
        """Return the place of a unit's state of one kind, in the generation that holds unless another one is named."""
        generation = generation or self.valid[unit]
        return generation.nvme if self._placement.homes[unit, kind] is Tier.NVME else generation.ram

    def spare(self, unit: str) -> Generation | None:
        """Return a generation that neither holds nor is kept, if there is one: it may be overwritten."""
        valid = self.valid[unit]

        # A savepoint keeps no place in RAM: it copies what lies there to its folder. So two places are enough.
        ram = 1 - valid.ram if unit in self._placement.speculative else 0
        taken = valid.nvme, self.kept.get(unit)
        for place in range(self._placement.generations):
            if place not in taken:
                return Generation(place, ram)
        return None

    def advance(self, unit: str) -> tuple[Generation, Generation]:
        """Return the generations from which and into which a unit's next update goes. The latter holds from now on.

        They are one, for an update in place, unless the one that holds is kept.
        """
        old = self.valid[unit]
        if self.kept.get(unit) != old.nvme:
            return old, old

        new = self.spare(unit)
        assert new is not None, "a kept generation is one of several"

        # None of the unit's weights may lie in a GPU slot now: the slot would still belong to the old generation, and
        # the next load would leave it there. Savepoints need the deferred mode, which submits updates between passes,
        # when these slots are empty.
        self.valid[unit] = new
        return old, new

    def keep(self) -> None:
        """Keep for a savepoint the generations that hold from now on, and no longer those that it kept before."""
        self.kept = {unit: self.valid[unit].nvme for unit in self._placement.spilled}

    def release(self) -> None:
        """Note that no savepoint is there any more: all generations but those that hold may be overwritten."""
        self.kept = {}

    def hold(self, unit: str, reader: Transfer) -> None:
        """Note a transfer that reads the generation that holds now. Until it is over, no update overwrites that one."""
        self._readers[unit] = self.valid[unit], reader

    def readers(self, unit: str, generation: Generation) -> list[Transfer]:
        """Return the transfers that read from a place of this generation. Whatever overwrites it comes behind them."""
        if unit not in self._readers:
            return []
        read, reader = self._readers[unit]
        if reader.done():
            return []

        # One shared place is enough: two generations may differ on NVMe and have the same place in RAM.
        shares_place = read.nvme == generation.nvme or read.ram == generation.ram
        return [reader] if shares_place else []

    def forget_readers(self) -> None:
        """Forget all readers, which are over."""
        self._readers.clear()
