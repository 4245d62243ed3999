"""The moves of a step: how many bytes each part of it takes from tier to tier, and on which queue. Pure.

`Moves` gives the moves of each item of a timeline. It also gives those of a group's gradient, which no timeline plans,
because a pass may leave a unit out. The forecast times these moves, and `Demand` adds them up when the player asks for
them. The store counts the bytes that really moved, and the two sums have to be equal.
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
    """A number of bytes that a queue moves."""

    queue: str
    """A queue of the store, such as `nvme_to_ram`; or `ranks`, for bytes that come from other ranks."""
    num_bytes: int
    """Bytes as the store counts them, in whole pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The moves of a unit's gradient of one group, after the backward, or after the reduce-scatter of the ranks."""

    fetched: tuple[Move, ...]
    """Moves that bring the sum of the groups before to the GPU, if the gradient is added to it there."""
    shipped: tuple[Move, ...]
    """Moves that take the sum, or the gradient of one group, from the GPU home; empty if it stays there."""
    sums_in_ram: bool
    """Whether the queue `update` then adds it to a sum in RAM."""
    is_final: bool
    """Whether the sum is the unit's gradient of the step."""
    update: Update | None
    """The update that follows without waiting for the norm, in the immediate mode or if the unit speculates; or
    None."""


class Moves:
    """The moves of each part of a step, for one placement.

    Several moves of a part follow each other: each begins when the one before is over.
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

        An update that feeds a load has the moves of both. So does a load with an update after it.
        """
        match item:
            case Load(updates=True):
                return (*self.load(item.unit), *self.return_weights(item.unit))
            case Load():
                return self.load(item.unit)
            # Outside of a pass no load brings the weights to the GPU.
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

                # New state needs the slots of the old state.
                for unit in item.home:
                    moves += self.return_state(unit)
                for unit in item.fetched:
                    moves += self.fetch_state(unit)
                return tuple(moves)

    # ------------------------------------------------------------------ weights

    def load(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring a unit's whole weights to a GPU slot, if no update feeds them."""
        size = block_bytes(self._units[unit], Kind.WEIGHT)
        return (*self.bring(unit), *self._from_others(size))

    def bring(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring this rank's weights of a unit to a GPU slot; none if its home is the GPU."""
        home = self._placement.homes[unit, Kind.WEIGHT]
        if home is Tier.GPU:
            return ()

        size = block_bytes(self._units[unit], Kind.WEIGHT)
        return self._up(home, size)

    def feed(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring weights from the RAM slots of their update to a GPU slot."""
        # Frozen weights are not in those slots. They come by `load_frozen`.
        return (Move("ram_to_gpu", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    def load_frozen(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring a unit's frozen weights, which no update feeds."""
        home = self._placement.homes[unit, Kind.WEIGHT]
        spec = self._units[unit]
        whole = block_bytes(spec, Kind.WEIGHT)
        fed = trained_bytes(spec, Kind.WEIGHT)
        return self._up(home, whole - fed)

    # ------------------------------------------------------------------ gradients

    def gradient(self, unit: str, group: int) -> Gradient:
        """Return the moves of a unit's gradient of one group. If one group of a step has a gradient, all have one."""
        placement = self._placement
        policy = self._policy

        # The last group completes the sum, so only then it is rounded, measured and used for the update.
        is_last = group == policy.groups - 1

        # A speculative update does not wait for the norm. All others of the deferred mode do.
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
        """Return the accesses whose backward adds to a sum that has left the GPU, and so has to come back first."""
        ahead = set()
        for (unit, group), index in timeline.last_uses().items():
            # The first group has no sum to add to.
            if group and self._fetch_sum(unit):
                ahead.add(index)
        return frozenset(ahead)

    def reduce_scatter(self, scatter: ReduceScatter) -> tuple[Move, ...]:
        """Return the moves by which a rank receives the gradients of its shard from the other ranks."""
        # Sizes of units are those of shards.
        shard_bytes = self._units[scatter.unit].num_trained * scatter.width
        return self._from_others(shard_bytes)

    # ------------------------------------------------------------------ updates

    def read_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves by which an update reads state and gradient from NVMe, as far as they are at home there."""
        num_bytes = self._spilled_bytes(unit)
        grad_home = self._placement.grad_homes[unit]
        if grad_home is Tier.NVME:
            num_bytes += final_grad_bytes(self._units[unit], self._policy)
        return (from_nvme(num_bytes),)

    def write_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves by which an update writes state to NVMe, as far as it is at home there."""
        return (to_nvme(self._spilled_bytes(unit)),)

    def update(self, unit: str) -> tuple[Move, ...]:
        """Return the moves of an update that feeds no load, on the CPU or with matrices carried to the GPU."""
        return (*self.read_state(unit), *self.carry(unit), *self.write_state(unit))

    def carry(self, unit: str) -> tuple[Move, ...]:
        """Return the moves of a unit's matrices from RAM to the GPU and back; none if they are updated in place."""
        # The state of such a unit is on the GPU already.
        if self._placement.update_queue(unit) == "update_gpu":
            return ()
        return matrix_moves(self._units[unit])

    # ------------------------------------------------------------------ streamed state

    def fetch_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the state of a streamed unit, except its weights, to the GPU."""
        return (Move("state_to_gpu", self._passing_bytes(unit)),)

    def return_state(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that take the state of a streamed unit, except its weights, home."""
        return (Move("state_to_ram", self._passing_bytes(unit)),)

    def return_weights(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that take the weights of a streamed unit home after its update."""
        # Frozen weights did not change.
        return (Move("gpu_to_ram", trained_bytes(self._units[unit], Kind.WEIGHT)),)

    # ------------------------------------------------------------------ activations

    def stash(self, unit: str, num_bytes: int, start: int = 0) -> tuple[Move, ...]:
        """Return the moves that take some bytes of an offloaded activation from the GPU to its home."""
        out = Move("gpu_to_ram", num_bytes)
        if self._placement.activation_homes[unit] is Tier.RAM:
            return (out,)

        drive_bytes = self._on_drive(unit, num_bytes, start)
        return out, to_nvme(drive_bytes)

    def unstash(self, unit: str, num_bytes: int, start: int = 0) -> tuple[Move, ...]:
        """Return the moves that bring some bytes of an offloaded activation back to the GPU."""
        back = Move("ram_to_gpu", num_bytes)
        if self._placement.activation_homes[unit] is Tier.RAM:
            return (back,)

        drive_bytes = self._on_drive(unit, num_bytes, start)
        return from_nvme(drive_bytes), back

    # ------------------------------------------------------------------ sizes

    def next_part(self, stop: int) -> int:
        """Return where the next tensor of an activation begins after one that ends here: at the next whole granule."""
        return round_up(stop, self._policy.granule_bytes)

    def _on_drive(self, unit: str, num_bytes: int, start: int) -> int:
        """Return the bytes on a drive of a part of an activation: whole granules, but no more than its block has."""
        block_end = round_up(self._units[unit].activation_bytes)
        return min(self.next_part(start + num_bytes), block_end) - start

    def _ship(self, unit: str, *, is_last: bool) -> tuple[Move, ...]:
        """Return the moves that take the gradient of a group from the GPU to its home.

        Args:
            unit: the unit.
            is_last: whether it is the last group, whose sum is final if groups are summed on the GPU.
        """
        placement = self._placement
        home = placement.grad_homes[unit]
        if home is Tier.GPU:
            return ()

        # A sum has fp32, and the final gradient has the compute dtype, which may be smaller. A sum in RAM is rounded
        # only there, so the last group's gradient goes there in fp32.
        is_rounded = is_last and placement.sum_tier(unit) is Tier.GPU
        bytes_of = final_grad_bytes if is_rounded else grad_bytes
        num_bytes = bytes_of(self._units[unit], self._policy)

        out = Move("gpu_to_ram", num_bytes)
        if home is Tier.NVME:
            return out, to_nvme(num_bytes)
        return (out,)

    def _fetch_sum(self, unit: str) -> tuple[Move, ...]:
        """Return the moves that bring the sum of the groups before to the GPU, if gradients are added there."""
        # Frozen units have no gradient, and so no entry.
        placement = self._placement
        home = placement.grad_homes.get(unit, Tier.GPU)
        if home is Tier.GPU or placement.sum_tier(unit) is Tier.RAM:
            return ()

        num_bytes = grad_bytes(self._units[unit], self._policy)
        return self._up(home, num_bytes)

    def _up(self, home: Tier | None, size: int) -> tuple[Move, ...]:
        """Return the moves to the GPU from a home; None: from a slot in RAM."""
        if home is not Tier.NVME:
            return (Move("ram_to_gpu", size),)
        if self._policy.gpu_direct:
            return (Move("nvme_to_gpu", size),)
        return (from_nvme(size), Move("ram_to_gpu", size))

    def _from_others(self, size: int) -> tuple[Move, ...]:
        """Return the move that brings so many bytes from each other rank; none for a single rank."""
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


def matrix_moves(spec: UnitSpec) -> tuple[Move, ...]:
    """Return the moves of state that is updated by matrix: from RAM to the GPU, with its gradient, and back."""
    if not spec.schema.by_matrix:
        return ()
    state = spec.num_trained * spec.schema.bytes_per_parameter
    grad = spec.num_trained * spec.schema.grad_width
    there = Move("state_to_gpu", state + grad)
    back = Move("state_to_ram", state)
    return there, back


def from_nvme(num_bytes: int) -> Move:
    """Return a move from NVMe to RAM."""
    return Move("nvme_to_ram", num_bytes)


def to_nvme(num_bytes: int) -> Move:
    """Return a move from RAM to NVMe."""
    return Move("ram_to_nvme", num_bytes)
