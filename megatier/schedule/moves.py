"""Moves: the bytes that each part of a step takes from tier to tier, and the lanes on which they go. Pure.

This is written down once, for three readers. The forecast times these moves. `Demand` adds them up, as the player and
its lanes ask the store for the parts of a step one by one. The store counts what really moved, which has to be the same
to the byte. A new lane between tiers begins here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatier.schedule.placement import Placement
from megatier.schedule.sizes import (
    Policy,
    UnitSpec,
    block_bytes,
    final_grad_bytes,
    grad_bytes,
    trained_bytes,
)
from megatier.schedule.timeline import Scatter, Timeline
from megatier.tier import Kind, Tier


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes on one lane between two tiers."""

    lane: str
    """A queue of the store, such as `nvme_to_ram`; or `ranks`, by which bytes come from other ranks."""
    num_bytes: int
    """As many bytes as the store counts, in whole pages."""


class Moves:
    """What each part of a step moves, under one placement.

    A part that takes several moves gives them in order: each one begins when the one before is over.
    """

    def __init__(self, units: Mapping[str, UnitSpec], placement: Placement, policy: Policy) -> None:
        """Take sizes and homes.

        Args:
            units: sizes of the units, by name.
            placement: homes of all blocks.
            policy: groups, and whether reads go past RAM.
        """
        self._units = units
        self._placement = placement
        self._policy = policy

    # ------------------------------------------------------------------ weights

    def load(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring a unit's weights, whole, to a GPU slot, if no update feeds them."""
        size = block_bytes(self._units[unit], Kind.WEIGHT)
        return (*self.bring(unit), *self._from_others(size))

    def bring(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring what this rank has of a unit's weights to a GPU slot, unless it is at home there."""
        size = block_bytes(self._units[unit], Kind.WEIGHT)
        home = self._placement.homes[unit, Kind.WEIGHT]
        return self._up(home, size) if home is not Tier.GPU else ()

    def feed(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring the weights that an update has just written to RAM slots to a GPU slot."""
        return (Move("ram_to_gpu", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    def load_frozen(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring the frozen weights, which no update feeds, after those that it feeds."""
        size = block_bytes(self._units[unit], Kind.WEIGHT)
        trained = trained_bytes(self._units[unit], Kind.WEIGHT)
        return self._up(self._placement.homes[unit, Kind.WEIGHT], size - trained)

    # ------------------------------------------------------------------ gradients

    def ship(self, unit: str, *, is_last: bool) -> tuple[Move, ...]:
        """Moves that take the gradient of a group from the GPU to its home.

        Args:
            unit: the unit.
            is_last: whether it is the last group. If groups are summed on the GPU, this gradient is the final one.
        """
        # A unit that is frozen whole has no gradient, and no entry.
        home = self._placement.grad_homes.get(unit, Tier.GPU)
        if home is Tier.GPU:
            return ()

        # A sum is fp32, and the final gradient in the compute dtype may be smaller.
        size = grad_bytes(self._units[unit], self._policy)
        if is_last and self._placement.sums_on_gpu:
            size = final_grad_bytes(self._units[unit], self._policy)
        out = Move("gpu_to_ram", size)
        return (out, Move("ram_to_nvme", size)) if home is Tier.NVME else (out,)

    def fetch_sum(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring the sum of the groups before to the GPU, if this group's gradient is added there."""
        home = self._placement.grad_homes.get(unit, Tier.GPU)
        if home is Tier.GPU or not self._placement.sums_on_gpu:
            return ()
        return self._up(home, grad_bytes(self._units[unit], self._policy))

    def scatter(self, scatter: Scatter) -> tuple[Move, ...]:
        """Moves by which a rank receives the others' gradients of its shard, of one group each."""
        return self._from_others(self._units[scatter.unit].num_trained * scatter.width)

    def gradients(self, unit: str) -> tuple[Move, ...]:
        """Moves of a unit's gradients in all groups of a step, until the gradient is final."""
        groups = self._policy.groups
        shipped = [move for group in range(groups) for move in self.ship(unit, is_last=group == groups - 1)]
        fetched = [move for _ in range(groups - 1) for move in self.fetch_sum(unit)]
        return (*shipped, *fetched)

    # ------------------------------------------------------------------ updates

    def read_state(self, unit: str) -> tuple[Move, ...]:
        """Moves by which an update reads the state, and the gradient, that are at home on NVMe."""
        size = self._spilled_bytes(unit)
        if self._placement.grad_homes[unit] is Tier.NVME:
            size += final_grad_bytes(self._units[unit], self._policy)
        return (read(size),)

    def write_state(self, unit: str) -> tuple[Move, ...]:
        """Moves by which an update writes the state that is at home on NVMe."""
        return (write(self._spilled_bytes(unit)),)

    def update(self, unit: str) -> tuple[Move, ...]:
        """Moves of an update that reads from NVMe and writes there, and feeds nothing."""
        return (*self.read_state(unit), *self.write_state(unit))

    # ------------------------------------------------------------------ streamed state

    def fetch_state(self, unit: str) -> tuple[Move, ...]:
        """Moves that bring the state of a streamed unit, except its weights, to the GPU."""
        return (Move("state_to_gpu", self._passing_bytes(unit)),)

    def return_state(self, unit: str) -> tuple[Move, ...]:
        """Moves that take the state of a streamed unit, except its weights, home."""
        return (Move("state_to_ram", self._passing_bytes(unit)),)

    def return_weights(self, unit: str) -> tuple[Move, ...]:
        """Moves that take the weights of a streamed unit home after its update."""
        return (Move("gpu_to_ram", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    # ------------------------------------------------------------------ passes

    def of_pass(self, timeline: Timeline, *, gradients: Iterable[str], updated: Iterable[str]) -> Iterator[Move]:
        """Moves of weights, gradients and updates in one pass, but not of activations and streamed state.

        Args:
            timeline: the pass.
            gradients: units with a backward in it.
            updated: units whose AdamW runs in it.
        """
        for load in timeline.loads:
            yield from self.load(load.unit)
        for update in timeline.updates:
            if update.load is not None:
                yield from self.feed(update.unit)
                yield from self.load_frozen(update.unit)

        for scatter in timeline.scatters:
            yield from self.scatter(scatter)
        for unit in gradients:
            yield from self.gradients(unit)
        for unit in updated:
            yield from self.update(unit)

    # ------------------------------------------------------------------ sizes

    def _up(self, home: Tier | None, size: int) -> tuple[Move, ...]:
        """Moves to the GPU from a home, or from a slot in RAM (None)."""
        if home is not Tier.NVME:
            return (Move("ram_to_gpu", size),)
        if self._policy.gpu_direct:
            return (Move("nvme_to_gpu", size),)
        return (read(size), Move("ram_to_gpu", size))

    def _from_others(self, size: int) -> tuple[Move, ...]:
        """Moves that bring as many bytes from each other rank; none if there is no other."""
        others = self._policy.ranks - 1
        return (Move("ranks", others * size),) if others else ()

    def _spilled_bytes(self, unit: str) -> int:
        """Bytes of a unit's state that are at home on NVMe and that its update changes."""
        spilled = [kind for kind in self._units[unit].kinds if self._placement.homes[unit, kind] is Tier.NVME]
        return sum(trained_bytes(self._units[unit], kind) for kind in spilled)

    def _passing_bytes(self, unit: str) -> int:
        """Bytes of a streamed unit's state, except its weights."""
        found = self._units[unit]
        return sum(block_bytes(found, kind) for kind in found.schema.passing_kinds)


def by_lane(moves: Iterable[Move]) -> Counter[str]:
    """Bytes that each lane moves; lanes that move none are left out."""
    moved: Counter[str] = Counter()
    for move in moves:
        moved[move.lane] += move.num_bytes
    return +moved


def read(num_bytes: int) -> Move:
    """A move of state from NVMe to RAM."""
    return Move("nvme_to_ram", num_bytes)


def write(num_bytes: int) -> Move:
    """A move of state from RAM to NVMe."""
    return Move("ram_to_nvme", num_bytes)


def stash(num_bytes: int) -> Move:
    """A move of an offloaded activation to RAM."""
    return Move("gpu_to_ram", num_bytes)


def unstash(num_bytes: int) -> Move:
    """A move of an offloaded activation back to the GPU."""
    return Move("ram_to_gpu", num_bytes)
