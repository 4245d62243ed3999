"""The blocks of a run: their names in the store, and leases on runs of a unit's state where AdamW works on them.

A unit has one block per kind of state, one for its gradient, one more if gradients of several groups are summed in RAM,
and one for its activation if that is offloaded. A unit that is frozen has weights alone. Frozen elements of other units
follow the trained ones in the block of the weights, and no update touches them. A unit that spills may have several
blocks per kind of state, for its generations: one holds, one may be kept as a savepoint, one may take an update that
may yet be void.

Threads: the lanes that update lease and read ahead. The thread that computes sends gradients and alone decides which
generation holds (`valid`, `kept`, `hold`); it does so before it submits the update that goes by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatier.errors import TransferError
from megatier.play.gate import Gate
from megatier.play.optimizer import Elements
from megatier.schedule.placement import Placement
from megatier.schedule.sizes import (
    Policy,
    UnitSpec,
    bytes_per_element,
    final_grad_bytes,
    grad_bytes,
    kinds_of,
    passing_kinds,
    state_kinds,
)
from megatier.schedule.timeline import Load
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up


@dataclass(frozen=True, slots=True)
class Generation:
    """One version of a unit's state, given by the places in which it lies.

    These are two numbers, because a generation that a savepoint keeps on NVMe takes no place in RAM.

    Attributes:
        nvme: which of the unit's places on NVMe.
        ram: which of its places in RAM, for kinds that are at home there.
    """

    nvme: int = 0
    ram: int = 0


@dataclass(frozen=True, slots=True)
class StateRun:
    """A leased run of a unit's state.

    Attributes:
        store: holds the blocks.
        homes: the home of each kind.
        keys: the block of each kind.
        tier: gpu or ram, where the planes lie.
        planes: uint8 per kind.
        spans: the bytes of each block that the planes are.
        before: planes of the generation that held, if that is another one: an update reads these and writes `planes`.
    """

    store: TieredStore
    homes: Mapping[Kind, Tier]
    keys: Mapping[Kind, str]
    tier: Tier
    planes: Mapping[Kind, torch.Tensor]
    spans: Mapping[Kind, tuple[int, int]]
    before: Mapping[Kind, torch.Tensor] = field(default_factory=dict)

    def write_back(self) -> None:
        """Say that every plane was changed, and start its way home; of a streamed unit the weights alone go home.

        Call it while the run is leased: a dirty copy that nobody leases is one that nobody may evict.
        """
        for kind, span in self.spans.items():
            home = self.homes[kind]
            key = self.keys[kind]
            self.store.mark_dirty(key, self.tier, span)
            if home is Tier.NVME or (home is not self.tier and kind is Kind.WEIGHT):
                self.store.write_back(key, self.tier, span)


class UnitBlocks:
    """All blocks of a run's units, registered with a fresh store.

    Attributes:
        store: holds them.
        units: sizes of every unit, by name.
        placement: homes and slots.
        policy: dtype, groups, clip.
        kinds: the kinds of state of a unit that is trained.
        valid: the generation of each unit's state that holds.
        kept: for each unit that spills, the place on NVMe that a savepoint keeps; empty without a savepoint.
    """

    def __init__(self, store: TieredStore, units: Mapping[str, UnitSpec], placement: Placement, policy: Policy) -> None:
        """Register every block and reserve every slot of the placement."""
        self.store = store
        self.units = units
        self.placement = placement
        self.policy = policy
        self.kinds = state_kinds(split=policy.split)
        self._passing = passing_kinds(split=policy.split)
        self.valid = dict.fromkeys(units, Generation())
        self.kept: dict[str, int] = {}
        self._readers: dict[str, tuple[Generation, Transfer]] = {}
        """The reader of each unit that came last, and the generation that it reads. Earlier ones are over before it,
        since all of them are work of one lane."""
        self._register()

    def key(self, unit: str, kind: Kind, generation: Generation | None = None) -> str:
        """Name of the block of a unit's state of one kind; of the generation that holds, unless one is named."""
        generation = generation or self.valid[unit]
        is_spilled = self.placement.homes[unit, kind] is Tier.NVME
        return block_key(unit, kind, generation.nvme if is_spilled else generation.ram)

    def places(self, unit: str, kind: Kind) -> range:
        """The places that there are for a unit's state of one kind."""
        if self.placement.homes[unit, kind] is Tier.NVME:
            return range(self.placement.generations if unit in self.placement.spilled else 1)
        return range(2 if unit in self.placement.speculative else 1)

    def spare(self, unit: str) -> Generation | None:
        """A generation that neither holds nor is kept, if there is one: it may be overwritten."""
        valid = self.valid[unit]
        taken = {valid.nvme, self.kept.get(unit)}
        free = (place for place in range(self.placement.generations) if place not in taken)
        ram = 1 - valid.ram if unit in self.placement.speculative else 0
        return next((Generation(place, ram) for place in free), None)

    def advance(self, unit: str) -> tuple[Generation, Generation]:
        """The generations from which and into which a unit's next update goes; the latter holds from now on.

        They are one, for an update in place, unless the one that holds is kept. Then none of its weights may lie in a
        GPU slot: the slot would still belong to the old generation, and the next load would leave it there.
        """
        old = new = self.valid[unit]
        if self.kept.get(unit) == old.nvme:
            spare = self.spare(unit)
            assert spare is not None, "a kept generation is one of several"
            new = self.valid[unit] = spare
        return old, new

    def keep(self) -> None:
        """From now on a savepoint keeps the generations that hold, and no longer those that it kept before."""
        self.kept = {unit: self.valid[unit].nvme for unit in self.placement.spilled}

    def hold(self, unit: str, reader: Transfer) -> None:
        """Note a transfer that reads the generation that holds: until it is over, updates leave that as it is."""
        self._readers[unit] = self.valid[unit], reader

    def readers(self, unit: str, generation: Generation) -> list[Transfer]:
        """The transfers that read from a place of this generation: whatever overwrites it comes behind them."""
        if unit not in self._readers:
            return []
        read, reader = self._readers[unit]
        shares = read.nvme == generation.nvme or read.ram == generation.ram
        return [reader] if shares and not reader.done() else []

    def chunks(self, name: str) -> list[Elements]:
        """The runs of trained elements of a unit: AdamW works on one run at a time."""
        return self._cut(name, 0, self.units[name].num_trained)

    def frozen_chunks(self, name: str) -> list[Elements]:
        """The runs of a unit's frozen elements, which follow the trained ones."""
        return self._cut(name, self.units[name].num_trained, self.units[name].num_elements)

    def runs(self, name: str) -> list[tuple[Elements, tuple[Kind, ...]]]:
        """All runs of a unit's elements, in order, and the kinds of state that each has."""
        chunks = [(elements, self.kinds) for elements in self.chunks(name)]
        return [*chunks, *((elements, (Kind.WEIGHT,)) for elements in self.frozen_chunks(name))]

    def _cut(self, name: str, start: int, stop: int) -> list[Elements]:
        step = self.placement.chunk_elements if self.is_cut(name) else max(1, stop - start)
        return [(first, min(first + step, stop)) for first in range(start, stop, step)]

    def whole(self, name: str, kind: Kind) -> tuple[int, int]:
        """Bytes of a unit's block of one kind."""
        return self.span(name, kind, (0, self.units[name].elements_of(kind)))

    def span(self, name: str, kind: Kind, elements: Elements) -> tuple[int, int]:
        """Bytes of a run of elements in a block of one kind."""
        width = bytes_per_element(kind, split=self.policy.split)
        return elements[0] * width, elements[1] * width

    def spilled(self, name: str) -> list[Kind]:
        """Kinds of a unit's state that are at home on NVMe."""
        return [kind for kind in self.kinds if self.placement.homes.get((name, kind)) is Tier.NVME]

    def is_cut(self, name: str) -> bool:
        """Whether a unit's update reads from NVMe, so that it is worked on in chunks."""
        return bool(self.spilled(name)) or self.placement.grad_homes.get(name) is Tier.NVME

    @contextlib.contextmanager
    def open_state(
        self,
        unit: str,
        elements: Elements,
        kinds: Sequence[Kind],
        *,
        fresh: Container[Kind] = (),
        streamed: bool = False,
        generation: Generation | None = None,
    ) -> Iterator[StateRun]:
        """Lease a run of a unit's state: on the GPU if at home there, else in RAM.

        Args:
            unit: its name.
            elements: one of `chunks(unit)`; of weights also of `frozen_chunks(unit)`.
            kinds: planes wanted.
            fresh: planes of which every byte will be overwritten, so nothing is read.
            streamed: bring it to the GPU in any case, where it stays until `return_state`.
            generation: the one that holds, unless one is named.
        """
        is_on_gpu = streamed or self.placement.homes[unit, Kind.WEIGHT] is Tier.GPU
        tier = Tier.GPU if is_on_gpu else Tier.RAM
        spans = {kind: self.span(unit, kind, elements) for kind in kinds}
        keys = {kind: self.key(unit, kind, generation) for kind in kinds}
        homes = {kind: self.placement.homes[unit, kind] for kind in kinds}
        tear = self.store.tear
        # An interrupt between a lease and its entry on the stack leaves one that nobody gives back: the region notes
        # it. One that comes while the caller works finds all leases on the stack, so it tears nothing.
        with tear.call, contextlib.ExitStack() as stack:
            planes = {}
            for kind in kinds:
                lease = self.store.lease(keys[kind], tier, spans[kind], fresh=kind in fresh, wait=True)
                planes[kind] = stack.enter_context(lease).bytes
            with tear.waiting():
                yield StateRun(self.store, homes, keys, tier, planes, spans)

        # After the leases, which forbid it. A copy that is being written stays until it is home.
        for kind in kinds:
            if homes[kind] is Tier.NVME:
                self.store.evict(keys[kind], Tier.RAM, spans[kind])

    @contextlib.contextmanager
    def open_update(self, unit: str, elements: Elements, old: Generation, new: Generation) -> Iterator[StateRun]:
        """Lease a run of a unit's state to update it from one generation into another."""
        moved = [kind for kind in self.kinds if self.key(unit, kind, old) != self.key(unit, kind, new)]
        with (
            self.open_state(unit, elements, moved, generation=old) as before,
            self.open_state(unit, elements, self.kinds, fresh=moved, generation=new) as state,
        ):
            yield replace(state, before=before.planes)

    def share_frozen(self, unit: str) -> None:
        """Copy a unit's frozen elements from the generation that holds to all its others: no update carries them over.

        Call it when they were written to the generation that holds.
        """
        places = [Generation(place, place) for place in self.places(unit, Kind.WEIGHT)]
        for other in places if len(places) > 1 else ():
            if self.key(unit, Kind.WEIGHT, other) == self.key(unit, Kind.WEIGHT):
                continue
            for elements in self.frozen_chunks(unit):
                with (
                    self.open_state(unit, elements, [Kind.WEIGHT]) as held,
                    self.open_state(unit, elements, [Kind.WEIGHT], fresh=[Kind.WEIGHT], generation=other) as state,
                ):
                    state.planes[Kind.WEIGHT].copy_(held.planes[Kind.WEIGHT])
                    state.write_back()

    def feed_frozen(self, unit: str) -> None:
        """Start bringing frozen weights to the GPU slot that the unit's update has fed with the others."""
        if frozen := self.frozen_chunks(unit):
            span = self.span(unit, Kind.WEIGHT, (frozen[0][0], frozen[-1][1]))
            self.store.prefetch(self.key(unit, Kind.WEIGHT), Tier.GPU, span, wait=True)

    def make_room(self, load: Load, gate: Gate) -> None:
        """Free a load's GPU slot once the access that it displaces is over.

        Raises:
            StepAbandonedError: the gate was abandoned.
        """
        gate.wait_for(load.after_access + 1)
        if load.evicts is not None:
            self.drop_weights(load.evicts)

    def drop_weights(self, unit: str) -> None:
        """Drop a unit's weights from its GPU slot, if it has one."""
        if self.placement.homes[unit, Kind.WEIGHT] is not Tier.GPU:
            self.store.evict(self.key(unit, Kind.WEIGHT), Tier.GPU)

    def fetch_state(self, unit: str) -> None:
        """Start bringing a streamed unit's state to its GPU slots, all but the weights."""
        for kind in self._passing:
            self.store.prefetch(self.key(unit, kind), Tier.GPU, wait=True)

    def return_state(self, unit: str) -> None:
        """Start writing a streamed unit's state home; its GPU slots are free when that is over."""
        for kind in self._passing:
            self.store.write_back(self.key(unit, kind), Tier.GPU)
            self.store.evict(self.key(unit, kind), Tier.GPU)

    @contextlib.contextmanager
    def open_grad(self, name: str, elements: Elements) -> Iterator[torch.Tensor]:
        """Lease a run of the final gradient, uint8 in the compute dtype.

        A sum over groups was rounded into the front of its block.
        """
        home = self.placement.grad_homes[name]
        span = self._grad_span(name, elements)
        key = sum_key(name) if self.sums_in_ram(name) else grad_key(name)
        if home is None:  # the gradient lies in one slot, whole
            with self.store.lease(key, Tier.RAM) as lease:
                yield lease.bytes[span[0] : span[1]]
            return

        with self.store.lease(key, Tier.GPU if home is Tier.GPU else Tier.RAM, span, wait=True) as lease:
            yield lease.bytes[: (elements[1] - elements[0]) * self._grad_width]
        # Read once: nobody needs its slot any more.
        if home is Tier.NVME:
            self.store.evict(key, Tier.RAM, span)

    def sums_in_ram(self, name: str) -> bool:
        """Whether the gradients of several groups are added up in RAM; else that is done on the GPU."""
        return self.policy.groups > 1 and self.placement.sums_at(name) is Tier.RAM

    def send_grad(self, name: str, *, final: bool) -> None:
        """Start taking a gradient from its GPU slot to its home or slot in RAM, or to NVMe; waits for RAM slots.

        A final gradient that was added up on the GPU, and rounded there, is only the front of its block.
        """
        key = grad_key(name)
        unit = self.units[name]
        is_front = final and self.placement.sums_on_gpu
        size = final_grad_bytes(unit, self.policy) if is_front else grad_bytes(unit, self.policy)
        self.store.mark_dirty(key, Tier.GPU, (0, size))

        # Chunk by chunk, and each one leaves for NVMe before the next comes: all of them may have to share one slot in
        # RAM. Evicting now means that a slot is free as soon as its bytes are written.
        if self.placement.grad_homes[name] is Tier.NVME:
            step = self.placement.chunk_elements * self._grad_width
            for start in range(0, size, step):
                span = start, min(start + step, size)
                self.store.write_back(key, Tier.GPU, span, wait=True)
                self.store.write_back(key, Tier.RAM, span)
                self.store.evict(key, Tier.RAM, span)
        else:
            self.store.write_back(key, Tier.GPU, (0, size), wait=True)
        self.store.evict(key, Tier.GPU)  # the slot is free at once: the next gradient comes behind the copies from it

    def drop_grad(self, name: str) -> None:
        """Drop a gradient of a step that was given up from all slots. No update and no sum of it is under way."""
        home = None if self.sums_in_ram(name) else self.placement.grad_homes[name]
        for tier in (Tier.GPU, Tier.RAM):
            if home is not tier:
                with contextlib.suppress(TransferError):  # it stays, and whoever writes it next has the error
                    self.store.discard(grad_key(name), tier)

    def forget_readers(self) -> None:
        """Forget all readers, which are over."""
        self._readers.clear()

    @property
    def _grad_width(self) -> int:
        return 2 if self.policy.split else 4

    def _grad_span(self, name: str, elements: Elements) -> tuple[int, int]:
        """Bytes of a run of elements in the final gradient; the last run on NVMe ends with a checksummed chunk."""
        unit = self.units[name]
        width = self._grad_width
        is_padded = self.placement.grad_homes[name] is Tier.NVME and elements[1] == unit.num_trained
        return elements[0] * width, final_grad_bytes(unit, self.policy) if is_padded else elements[1] * width

    def read_ahead(self, name: str, elements: Elements, generation: Generation) -> int:
        """Start reading what a chunk's update needs from NVMe into RAM slots; returns its bytes."""
        size = 0
        for key, (start, stop) in self._read(name, elements, generation):
            self.store.prefetch(key, Tier.RAM, (start, stop), wait=True)
            size += round_up(stop) - start  # a block's last page moves whole
        return size

    def drop_read(self, name: str, elements: Elements, generation: Generation) -> None:
        """Free the slots of what was read ahead."""
        for key, span in self._read(name, elements, generation):
            self.store.evict(key, Tier.RAM, span)

    def _read(self, name: str, elements: Elements, generation: Generation) -> list[tuple[str, tuple[int, int]]]:
        """Blocks and spans that a chunk's update reads from NVMe."""
        found = [(self.key(name, kind, generation), self.span(name, kind, elements)) for kind in self.spilled(name)]
        if self.placement.grad_homes[name] is Tier.NVME:
            found.append((grad_key(name), self._grad_span(name, elements)))
        return found

    def _register(self) -> None:
        """Register the blocks of all units, and reserve slots: homes are set aside first, then all slots."""
        for unit in self.units.values():
            for kind in kinds_of(unit, self.policy):
                size = unit.elements_of(kind) * bytes_per_element(kind, split=self.policy.split)
                home = self.placement.homes[unit.name, kind]
                for place in self.places(unit.name, kind):
                    self.store.register(BlockSpec(block_key(unit.name, kind, place), size, home, kind))
            if unit.num_trained:
                self._register_grad(unit)
            if unit.activation_bytes:
                key = activation_key(unit.name)
                self.store.register(BlockSpec(key, unit.activation_bytes, Tier.RAM, Kind.ACTIVATION))

        for plan in self.placement.slots:
            self.store.reserve(plan.tier, plan.kind, plan.slot_bytes, plan.num_slots)
        # No slots for any other kind: without these, the store would make slots of the rest of its budget.
        for tier in (Tier.GPU, Tier.RAM):
            self.store.reserve(tier, None, PAGE_BYTES, 0)

    def _register_grad(self, unit: UnitSpec) -> None:
        """Register a unit's gradient, and its sum; then the sum has the home, and the gradient passes through slots."""
        home = self.placement.grad_homes[unit.name]
        size = grad_bytes(unit, self.policy)
        if self.sums_in_ram(unit.name):
            self.store.register(BlockSpec(sum_key(unit.name), size, home, Kind.GRAD))
            home = None
        self.store.register(BlockSpec(grad_key(unit.name), size, home, Kind.GRAD))


def block_key(unit: str, kind: Kind, place: int = 0) -> str:
    """Name of a unit's block of one kind of state, in one of its places."""
    return f"{unit}/{kind}" if not place else f"{unit}/{kind}@{place}"


def grad_key(unit: str) -> str:
    """Name of a unit's gradient, of one group or whole."""
    return f"{unit}/{Kind.GRAD}"


def sum_key(unit: str) -> str:
    """Name of the fp32 sum of a unit's gradients over groups in RAM."""
    return f"{unit}/{Kind.GRAD}_sum"


def activation_key(unit: str) -> str:
    """Name of a unit's offloaded boundary activation."""
    return f"{unit}/{Kind.ACTIVATION}"
