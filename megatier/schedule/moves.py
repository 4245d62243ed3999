"""Counts the bytes that each part of a step takes from tier to tier, and names their queues. Pure.

The timeline says what is done in which order. This says what each of its items moves, and what follows the gradient of
a group, which no timeline plans: a unit may be left out. The forecast times these moves. `Demand` adds them up as the
player asks for them. The store counts what really moved, which has to be the same to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import block_bytes, final_grad_bytes, grad_bytes, trained_bytes
from megatier.schedule.timeline import Exchange, Item, Load, ReduceScatter, Timeline, Update
from megatier.schedule.unit_spec import UnitSpec
from megatier.tier import Kind, Tier, round_up


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes on one queue between two tiers."""

    queue: str
    """A queue of the store, such as `nvme_to_ram`; or `ranks`, by which bytes come from other ranks."""
    num_bytes: int
    """As many bytes as the store counts, in whole pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The way of a unit's gradient of one group, once compute has made it, or ranks have scattered it."""

    fetched: tuple[Move, ...]
    """Moves that bring the sum of the groups before to the GPU, if this gradient is added to it there."""
    shipped: tuple[Move, ...]
    """Moves that take the sum, or the gradient of one group, from the GPU to its home; none if it stays there."""
    sums_in_ram: bool
    """Whether it is then added up in RAM, on the queue `update`."""
    is_final: bool
    """Whether the sum is the unit's gradient of the step."""
    update: Update | None
    """The update that follows at once, because the norm is not waited for: in the immediate mode, or because the unit
    speculates."""


class Moves:
    """The moves of each part of a step, under one placement.

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

    def of(self, item: Item) -> tuple[Move, ...]:
        """Return the moves of an item.

        An update that feeds a load has the moves of both, and so has a load that an update follows.
        """
        match item:
            case Load(updates=True):
                return (*self.load(item.unit), *self.return_weights(item.unit))
            case Load():
                return self.load(item.unit)
            # Outside of a pass no load brings its weights to where AdamW works.
            case Update() if item.unit in self._placement.streamed:
                return (*self.bring(item.unit), *self.return_weights(item.unit))
            case Update(load=None):
                return self.update(item.unit)
            case Update():
                return (*self.update(item.unit), *self.feed(item.unit), *self.load_frozen(item.unit))
            case ReduceScatter():
                return self.reduce_scatter(item)
            case Exchange():
                moves: list[Move] = []

                # In this order, since what comes fills the slots that are left.
                for unit in item.home:
                    moves += self.return_state(unit)
                for unit in item.fetched:
                    moves += self.fetch_state(unit)
                return tuple(moves)

    # ------------------------------------------------------------------ weights

    def load(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring a unit's weights, whole, to a GPU slot, if no update feeds them."""
        size = block_bytes(self._units[unit], Kind.WEIGHT)
        return (*self.bring(unit), *self._from_others(size))

    def bring(self, unit: str) -> tuple[Move, ...]:
        """Return moves that bring what this rank has of a unit's weights to a GPU slot, unless it is at home there."""
        home = self._placement.homes[unit, Kind.WEIGHT]
        if home is Tier.GPU:
            return ()

        size = block_bytes(self._units[unit], Kind.WEIGHT)
        return self._up(home, size)

    def feed(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the weights that an update has just written to RAM slots to a GPU slot."""
        # The update has no frozen weights in its slots: they come by `load_frozen`.
        return (Move("ram_to_gpu", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    def load_frozen(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the frozen weights, which no update feeds, after those that it feeds."""
        home = self._placement.homes[unit, Kind.WEIGHT]
        spec = self._units[unit]
        whole = block_bytes(spec, Kind.WEIGHT)
        fed = trained_bytes(spec, Kind.WEIGHT)
        return self._up(home, whole - fed)

    # ------------------------------------------------------------------ gradients

    def gradient(self, unit: str, group: int) -> Gradient:
        """Return the way of a unit's gradient of one group. If one group of a step has one, all have."""
        placement = self._placement
        policy = self._policy

        # The last group makes the sum whole, so rounding, measuring and the update follow it alone.
        is_last = group == policy.groups - 1

        # A speculative update runs as if nothing were clipped. The others of the deferred mode wait for the norm.
        waits_for_norm = policy.deferred and unit not in placement.speculative
        updates = is_last and not waits_for_norm
        return Gradient(
            fetched=self._fetch_sum(unit) if group else (),
            shipped=self._ship(unit, is_last=is_last),
            sums_in_ram=policy.groups > 1 and placement.sum_tier(unit) is Tier.RAM,
            is_final=is_last,
            update=Update(unit=unit) if updates else None,
        )

    def gradients(self, unit: str) -> tuple[Move, ...]:
        """Return the moves of a unit's gradients in all groups of a step, until the gradient is final."""
        moves: list[Move] = []
        for group in range(self._policy.groups):
            gradient = self.gradient(unit, group)
            moves += gradient.fetched
            moves += gradient.shipped
        return tuple(moves)

    def sums_ahead(self, timeline: Timeline) -> frozenset[int]:
        """Return the accesses whose backward adds to a sum that left the GPU, and has to come again before they end."""
        ahead = set()
        for (unit, group), index in timeline.last_uses().items():
            # The first group adds to nothing.
            if group and self._fetch_sum(unit):
                ahead.add(index)
        return frozenset(ahead)

    def reduce_scatter(self, scatter: ReduceScatter) -> tuple[Move, ...]:
        """Return the moves by which a rank receives the others' gradients of its shard, of one group each."""
        # Sizes of units are those of a shard.
        shard_bytes = self._units[scatter.unit].num_trained * scatter.width
        return self._from_others(shard_bytes)

    # ------------------------------------------------------------------ updates

    def read_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves by which an update reads the state, and the gradient, that are at home on NVMe."""
        num_bytes = self._spilled_bytes(unit)
        grad_home = self._placement.grad_homes[unit]
        if grad_home is Tier.NVME:
            num_bytes += final_grad_bytes(self._units[unit], self._policy)
        return (read(num_bytes),)

    def write_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves by which an update writes the state that is at home on NVMe."""
        return (write(self._spilled_bytes(unit)),)

    def update(self, unit: str) -> tuple[Move, ...]:
        """Return the moves of an update on the CPU, or of one that is carried to the GPU, that feeds nothing."""
        return (*self.read_state(unit), *self.carry(unit), *self.write_state(unit))

    def carry(self, unit: str) -> tuple[Move, ...]:
        """Return the moves of a unit's matrices from RAM to the GPU and back; none if they are updated in place."""
        # On that queue the state is on the GPU already.
        if self._placement.update_queue(unit) == "update_gpu":
            return ()
        return carried(self._units[unit])

    # ------------------------------------------------------------------ streamed state

    def fetch_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the state of a streamed unit, except its weights, to the GPU."""
        return (Move("state_to_gpu", self._passing_bytes(unit)),)

    def return_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that take the state of a streamed unit, except its weights, home."""
        return (Move("state_to_ram", self._passing_bytes(unit)),)

    def return_weights(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that take the weights of a streamed unit home after its update."""
        # Frozen weights are as they were at home.
        return (Move("gpu_to_ram", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    # ------------------------------------------------------------------ activations

    def stash(self, unit: str, num_bytes: int, start: int = 0) -> tuple[Move, ...]:
        """Return the moves that take some bytes of an offloaded activation from the GPU to its home."""
        out = Move("gpu_to_ram", num_bytes)
        if self._placement.activation_homes[unit] is Tier.RAM:
            return (out,)

        drive_bytes = self._on_drive(unit, num_bytes, start)
        return out, write(drive_bytes)

    def unstash(self, unit: str, num_bytes: int, start: int = 0) -> tuple[Move, ...]:
        """Return the moves that bring them back."""
        back = Move("ram_to_gpu", num_bytes)
        if self._placement.activation_homes[unit] is Tier.RAM:
            return (back,)

        drive_bytes = self._on_drive(unit, num_bytes, start)
        return read(drive_bytes), back

    # ------------------------------------------------------------------ sizes

    def next_part(self, stop: int) -> int:
        """Return the first byte of the next tensor of an activation, if the one before ends here: that of a granule."""
        return round_up(stop, self._policy.granule_bytes)

    def _on_drive(self, unit: str, num_bytes: int, start: int) -> int:
        """Return the bytes on a drive of a part of an activation: whole granules, but no more than its block has."""
        block_end = round_up(self._units[unit].activation_bytes)
        return min(self.next_part(start + num_bytes), block_end) - start

    def _ship(self, unit: str, *, is_last: bool) -> tuple[Move, ...]:
        """Return the moves that take the gradient of a group from the GPU to its home.

        Args:
            unit: the unit.
            is_last: whether it is the last group. If groups are summed on the GPU, this gradient is the final one.
        """
        placement = self._placement
        home = placement.grad_homes[unit]
        if home is Tier.GPU:
            return ()

        # A sum is fp32, and the final gradient in the compute dtype may be smaller. A sum in RAM is rounded there, so
        # the fp32 of the last group has to get there first.
        is_rounded = is_last and placement.sum_tier(unit) is Tier.GPU
        bytes_of = final_grad_bytes if is_rounded else grad_bytes
        num_bytes = bytes_of(self._units[unit], self._policy)

        out = Move("gpu_to_ram", num_bytes)
        if home is Tier.NVME:
            return out, write(num_bytes)
        return (out,)

    def _fetch_sum(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the sum of the groups before to the GPU, if gradients are added there."""
        # A unit that is frozen whole has no gradient, and no entry.
        placement = self._placement
        home = placement.grad_homes.get(unit, Tier.GPU)
        if home is Tier.GPU or placement.sum_tier(unit) is Tier.RAM:
            return ()

        num_bytes = grad_bytes(self._units[unit], self._policy)
        return self._up(home, num_bytes)

    def _up(self, home: Tier | None, size: int) -> tuple[Move, ...]:
        """Return the moves to the GPU from a home, or from a slot in RAM (None)."""
        if home is not Tier.NVME:
            return (Move("ram_to_gpu", size),)
        if self._policy.gpu_direct:
            return (Move("nvme_to_gpu", size),)
        return (read(size), Move("ram_to_gpu", size))

    def _from_others(self, size: int) -> tuple[Move, ...]:
        """Return the moves that bring as many bytes from each other rank; none if there is no other."""
        others = self._policy.num_ranks - 1
        return (Move("ranks", others * size),) if others else ()

    def _spilled_bytes(self, unit: str) -> int:
        """Return the bytes of a unit's state that are at home on NVMe and that its update changes."""
        spec = self._units[unit]
        size = 0
        for kind in spec.kinds:
            if self._placement.homes[unit, kind] is Tier.NVME:
                size += trained_bytes(spec, kind)
        return size

    def _passing_bytes(self, unit: str) -> int:
        """Return the bytes of a streamed unit's state, except its weights."""
        spec = self._units[unit]
        return sum(block_bytes(spec, kind) for kind in spec.schema.passing_kinds)


def by_queue(moves: Iterable[Move]) -> Counter[str]:
    """Return the bytes that each queue moves; queues that move none are left out."""
    moved: Counter[str] = Counter()
    for move in moves:
        moved[move.queue] += move.num_bytes
    return +moved


def carried(spec: UnitSpec) -> tuple[Move, ...]:
    """Return the moves of state in RAM that is updated by matrix: to the GPU, with its gradient, and back."""
    if not spec.schema.by_matrix:
        return ()
    state = spec.num_trained * spec.schema.bytes_per_parameter
    grad = spec.num_trained * spec.schema.grad_width
    there = Move("state_to_gpu", state + grad)
    back = Move("state_to_ram", state)
    return there, back


def read(num_bytes: int) -> Move:
    """Return a move from NVMe to RAM."""
    return Move("nvme_to_ram", num_bytes)


def write(num_bytes: int) -> Move:
    """Return a move from RAM to NVMe."""
    return Move("ram_to_nvme", num_bytes)
