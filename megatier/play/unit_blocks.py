"""The blocks of a run's units in the store: their keys, and leases of runs of state for updates.

A unit has a block for each kind of state, and one for its activation if that is offloaded; `grad_blocks` has those of
gradients. A frozen unit has only weights. If a unit is partly frozen, its frozen elements follow the trained ones in
the block of weights. A unit that spills may have several blocks of each kind, one for each of its `generations`.

Threads: the update queues lease and read ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatier.address import address_of
from megatier.planes import Elements
from megatier.play.gate import Gate
from megatier.play.generations import Generation, Generations
from megatier.play.grad_blocks import GradBlocks, grad_key
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.sizes import block_bytes, gathered_bytes, group_grad_bytes, home_bytes
from megatier.schedule.timeline import Load
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.store import TieredStore
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRun:
    """A leased run of a unit's state."""

    store: TieredStore
    """The store, which holds the blocks."""
    homes: Mapping[Kind, Tier]
    """The home of each kind."""
    keys: Mapping[Kind, str]
    """The block of each kind."""
    tier: Tier
    """The tier where the planes lie: gpu or ram."""
    planes: Mapping[Kind, torch.Tensor]
    """The plane of each kind, as uint8."""
    spans: Mapping[Kind, tuple[int, int]]
    """The bytes of each block that the plane covers."""
    before: Mapping[Kind, torch.Tensor] = field(default_factory=dict)
    """Planes of the old generation, if it is another one. An update reads these and writes `planes`."""

    def write_back(self) -> None:
        """Mark every plane as changed, and start to write it home. Of a streamed unit only the weights go home.

        Frozen weights in the user's own files are at home there, so only their checksums are computed.

        Call it while the run is leased. A dirty copy cannot be evicted before its write-back begins, so without a lease
        it could block a slot that others wait for.
        """
        for kind, span in self.spans.items():
            home = self.homes[kind]
            key = self.keys[kind]
            start, stop = span

            # Later bytes are in the user's files, which no run writes.
            extent = self.store.extents.get(key)
            if extent is not None and start >= extent.own_bytes:
                assert self.store.files is not None
                address = address_of(self.planes[kind], torch.uint8, stop - start)
                self.store.files.note(extent, start, stop, address)
                continue

            self.store.mark_dirty(key, self.tier, span)

            # The rest of a streamed unit's state follows after the CPU's updates (`UnitBlocks.return_state`), which
            # need all the bandwidth of RAM.
            is_streamed = home is not self.tier and home is not Tier.NVME
            follows_later = is_streamed and kind is not Kind.WEIGHT
            if home is not self.tier and not follows_later:
                self.store.write_back(key, self.tier, span)


class UnitBlocks:
    """The blocks of a run's units, registered with a fresh store."""

    def __init__(self, store: TieredStore, units: Mapping[str, UnitSpec], placement: Placement, policy: Policy) -> None:
        """Register every block and reserve every slot of the placement."""
        self.store = store
        """The store, which holds the blocks."""
        self.units = units
        """The sizes of every unit, by name."""
        self.placement = placement
        """The homes of all blocks, and the slots."""
        self.policy = policy
        """The groups of a step, and whether updates wait for the norm."""
        self.generations = Generations(units, placement)
        """The generations of each unit's state."""
        self.grads = GradBlocks(store, units, placement, policy)
        """The blocks of gradients."""
        self._register()

    def key(self, unit: str, kind: Kind, generation: Generation | None = None) -> str:
        """Return the key of a unit's block of one kind in a generation; None: in the valid one."""
        return block_key(unit, kind, self.generations.place(unit, kind, generation))

    def compute_key(self, unit: str) -> str:
        """Return the key of the block from which compute reads a unit's weights."""
        return gathered_key(unit) if self.policy.num_ranks > 1 else self.key(unit, Kind.WEIGHT)

    def compute_bytes(self, unit: str) -> int:
        """Return the bytes of that block, which has the unit's whole weights."""
        if self.policy.num_ranks > 1:
            return gathered_bytes(self.units[unit], self.policy)
        return self.whole(unit, Kind.WEIGHT)[1]

    def kinds(self, unit: str) -> tuple[Kind, ...]:
        """Return the kinds of a unit's state. A frozen unit has only weights."""
        return self.units[unit].kinds

    def chunks(self, unit: str) -> list[Elements]:
        """Return the runs of a unit's trained elements, which AdamW updates one at a time."""
        spec = self.units[unit]

        # An update by matrix needs whole matrices, which a chunk could cut.
        if spec.schema.by_matrix:
            return [(0, spec.num_trained)]
        return self._cut(unit, 0, spec.num_trained)

    def frozen_chunks(self, unit: str) -> list[Elements]:
        """Return the runs of a unit's frozen elements, which follow the trained ones."""
        return self._cut(unit, self.units[unit].num_trained, self.units[unit].num_elements)

    def runs(self, unit: str) -> list[tuple[Elements, tuple[Kind, ...]]]:
        """Return all runs of a unit's elements in order, each with its kinds of state."""
        runs = []
        for elements in self.chunks(unit):
            runs.append((elements, self.kinds(unit)))
        for elements in self.frozen_chunks(unit):
            runs.append((elements, (Kind.WEIGHT,)))
        return runs

    def _cut(self, unit: str, start: int, stop: int) -> list[Elements]:
        """Cut elements into runs of a chunk, or into a single run if the unit is updated whole."""
        # A range takes no step of 0, which a unit without such elements would give.
        step = self.placement.chunk_elements if self.is_cut(unit) else max(1, stop - start)
        return [(first, min(first + step, stop)) for first in range(start, stop, step)]

    def whole(self, unit: str, kind: Kind) -> tuple[int, int]:
        """Return the bytes of a unit's whole block of one kind."""
        return self.span(unit, kind, (0, self.units[unit].elements_of(kind)))

    def span(self, unit: str, kind: Kind, elements: Elements) -> tuple[int, int]:
        """Return the bytes of a run of elements in a block of one kind."""
        width = self.units[unit].schema.width(kind)
        return elements[0] * width, elements[1] * width

    def gathered_spans(self, unit: str) -> list[tuple[int, int]]:
        """Return the spans of a rank's shard of weights that are gathered one by one: trained, then frozen ones."""
        spec = self.units[unit]
        trained = 0, spec.num_trained
        frozen = spec.num_trained, spec.num_elements

        # The whole weights have the trained elements of all ranks first, and then all frozen ones.
        spans = []
        for elements in (trained, frozen):
            start, stop = self.span(unit, Kind.WEIGHT, elements)
            if start < stop:
                spans.append((start, stop))
        return spans

    def spilled(self, unit: str) -> list[Kind]:
        """Return the kinds of a unit's state that are at home on NVMe."""
        return [kind for kind in self.kinds(unit) if self.placement.homes[unit, kind] is Tier.NVME]

    def is_cut(self, unit: str) -> bool:
        """Return whether a unit's update reads from NVMe, and so works chunk by chunk."""
        return bool(self.spilled(unit)) or self.placement.grad_homes.get(unit) is Tier.NVME

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
        """Lease a run of a unit's state: on the GPU if it is at home there, otherwise in RAM.

        Args:
            unit: the name of the unit.
            elements: one of `chunks(unit)`, or for weights also one of `frozen_chunks(unit)`.
            kinds: the kinds of state to lease.
            fresh: kinds of which every byte will be overwritten, so that they are not read.
            streamed: whether to bring it to the GPU in any case, where it stays until `return_state`.
            generation: the generation; None: the valid one.
        """
        is_on_gpu = streamed or self.placement.homes[unit, Kind.WEIGHT] is Tier.GPU
        tier = Tier.GPU if is_on_gpu else Tier.RAM
        spans: dict[Kind, tuple[int, int]] = {}
        keys: dict[Kind, str] = {}
        homes: dict[Kind, Tier] = {}
        for kind in kinds:
            spans[kind] = self.span(unit, kind, elements)
            keys[kind] = self.key(unit, kind, generation)
            homes[kind] = self.placement.homes[unit, kind]

        store = self.store
        consistency = store.consistency

        # An interrupt between a lease and its entry on the stack would leave a lease that nobody releases, which the
        # region notes. While the caller works, all leases are on the stack, and an interrupt does no harm.
        with consistency.call, contextlib.ExitStack() as stack:
            planes = {}
            for kind in kinds:
                is_fresh = kind in fresh
                lease = store.lease(keys[kind], tier, spans[kind], fresh=is_fresh, wait=True)
                planes[kind] = stack.enter_context(lease).bytes
            with consistency.waiting():
                yield StateRun(
                    store=store,
                    homes=homes,
                    keys=keys,
                    tier=tier,
                    planes=planes,
                    spans=spans,
                )

        # Leases forbid eviction, so it comes after them. A copy that is being written stays until it is home.
        for kind in kinds:
            if homes[kind] is Tier.NVME:
                store.evict(keys[kind], Tier.RAM, spans[kind])

    @contextlib.contextmanager
    def open_update(self, unit: str, elements: Elements, old: Generation, new: Generation) -> Iterator[StateRun]:
        """Lease a run of a unit's state for an update from one generation into another, or in place."""
        # Kinds with the same place in both generations are updated in place.
        kinds = self.kinds(unit)
        moved = []
        for kind in kinds:
            if self.key(unit, kind, old) != self.key(unit, kind, new):
                moved.append(kind)

        with (
            self.open_state(unit, elements, moved, generation=old) as before,
            self.open_state(unit, elements, kinds, fresh=moved, generation=new) as state,
        ):
            yield replace(state, before=before.planes)

    def share_frozen(self, unit: str) -> None:
        """Copy a unit's frozen elements from the valid generation to all others, because no update does.

        Call it after they were written to the valid generation.
        """
        weight = [Kind.WEIGHT]
        for place in self.generations.places(unit, Kind.WEIGHT):
            # Only one of the two numbers counts, by the home of the weights.
            other = Generation(nvme=place, ram=place)
            if self.key(unit, Kind.WEIGHT, other) == self.key(unit, Kind.WEIGHT):
                continue

            for elements in self.frozen_chunks(unit):
                with (
                    self.open_state(unit, elements, weight) as valid,
                    self.open_state(unit, elements, weight, fresh=weight, generation=other) as state,
                ):
                    state.planes[Kind.WEIGHT].copy_(valid.planes[Kind.WEIGHT])
                    state.write_back()

    def prefetch_frozen(self, unit: str) -> None:
        """Start to load a unit's frozen weights into the GPU slot that its update has fed with the trained ones."""
        spec = self.units[unit]
        frozen = spec.num_trained, spec.num_elements
        if spec.num_trained < spec.num_elements:
            key = self.key(unit, Kind.WEIGHT)
            span = self.span(unit, Kind.WEIGHT, frozen)
            self.store.prefetch(key, Tier.GPU, span, wait=True)

    def make_room(self, load: Load, gate: Gate) -> None:
        """Wait for the access that a load has to follow, and evict the unit in its GPU slot.

        Raises:
            StepAbandonedError: the gate was abandoned.
        """
        # After that access nobody leases the weights. If compute on the device still reads them, the slot notes it.
        gate.wait_for(load.after_access + 1)
        if load.evicts is not None:
            self.drop_weights(load.evicts)

    def drop_weights(self, unit: str) -> None:
        """Evict a unit's weights from the GPU slot from which compute reads them, if they are in one."""
        if self.policy.num_ranks > 1:
            self.store.evict(gathered_key(unit), Tier.GPU)
        else:
            self.drop_shard(unit)

    def drop_shard(self, unit: str) -> None:
        """Evict this rank's own weights of a unit from their GPU slot, if they are in one."""
        if self.placement.homes[unit, Kind.WEIGHT] is not Tier.GPU:
            self.store.evict(self.key(unit, Kind.WEIGHT), Tier.GPU)

    def fetch_state(self, unit: str) -> None:
        """Start to bring a streamed unit's state, except weights, to its GPU slots."""
        for kind in self.units[unit].schema.passing_kinds:
            self.store.prefetch(self.key(unit, kind), Tier.GPU, wait=True)

    def return_state(self, unit: str) -> None:
        """Start to write a streamed unit's state home. Its GPU slots are free when that is over."""
        kinds = self.units[unit].schema.passing_kinds
        for kind in kinds:
            key = self.key(unit, kind)
            self.store.write_back(key, Tier.GPU)

            # The store keeps the copy until its bytes are home, and frees the slot then.
            self.store.evict(key, Tier.GPU)

    def read_ahead(self, unit: str, elements: Elements, generation: Generation) -> int:
        """Start to read what a chunk's update needs from NVMe into RAM slots. Return the number of bytes.

        Bytes that are there, or being read, are not read again.
        """
        num_bytes = 0
        for key, span in self._spilled_spans(unit, elements, generation):
            self.store.prefetch(key, Tier.RAM, span, wait=True)

            # A block's last page moves whole.
            start, stop = span
            num_bytes += round_up(stop) - start
        return num_bytes

    def drop_read(self, unit: str, elements: Elements, generation: Generation) -> None:
        """Free the slots of bytes that were read ahead for a chunk."""
        for key, span in self._spilled_spans(unit, elements, generation):
            self.store.evict(key, Tier.RAM, span)

    def _spilled_spans(
        self, unit: str, elements: Elements, generation: Generation
    ) -> list[tuple[str, tuple[int, int]]]:
        """Return the blocks and spans that a chunk's update reads from NVMe."""
        spilled = []
        for kind in self.spilled(unit):
            key = self.key(unit, kind, generation)
            span = self.span(unit, kind, elements)
            spilled.append((key, span))

        if self.placement.grad_homes[unit] is Tier.NVME:
            grad_span = self.grads.span(unit, elements)
            spilled.append((grad_key(unit), grad_span))
        return spilled

    def _register(self) -> None:
        """Register the blocks of all units, and then reserve all slots."""
        for spec in self.units.values():
            unit = spec.name
            for kind in spec.kinds:
                _, size = self.whole(unit, kind)
                home = self.placement.homes[unit, kind]

                # A frozen base may be in files of its own, which the run only reads.
                elsewhere = block_bytes(spec, kind) - home_bytes(spec, kind, home)
                for place in self.generations.places(unit, kind):
                    key = block_key(unit, kind, place)
                    state = BlockSpec(key, size, home, kind, elsewhere)
                    self.store.register(state)

            if spec.num_trained:
                self.grads.register(unit)
            if self.policy.num_ranks > 1:
                self._register_shared(spec)
            if spec.activation_bytes:
                home = self.placement.activation_homes[unit]
                activation = BlockSpec(activation_key(unit), spec.activation_bytes, home, Kind.ACTIVATION)
                self.store.register(activation)

        for plan in self.placement.slots:
            self.store.reserve(plan.tier, plan.kind, plan.slot_bytes, plan.num_slots)

        # Without this the store would make slots of the rest of its budgets.
        for tier in (Tier.GPU, Tier.RAM):
            self.store.reserve(tier, None, PAGE_BYTES, 0)

    def _register_shared(self, spec: UnitSpec) -> None:
        """Register a unit's blocks for collectives. They have no home, because their bytes are only in slots."""
        unit = spec.name
        weight_bytes = gathered_bytes(spec, self.policy)
        gathered = BlockSpec(gathered_key(unit), weight_bytes, None, Kind.GATHERED)
        self.store.register(gathered)
        if not spec.num_trained:
            return

        # A rank receives its shard from every rank, so both blocks are as large as a whole gradient.
        grad_bytes = group_grad_bytes(spec, self.policy)
        block = BlockSpec(group_grad_key(unit), grad_bytes, None, Kind.GROUP_GRAD)
        received = BlockSpec(received_key(unit), grad_bytes, None, Kind.RECEIVED)
        self.store.register(block)
        self.store.register(received)


def block_key(unit: str, kind: Kind, place: int = 0) -> str:
    """Return the key of a unit's block of one kind of state, in one of the unit's places."""
    return f"{unit}/{kind}" if not place else f"{unit}/{kind}@{place}"


def gathered_key(unit: str) -> str:
    """Return the key of a unit's whole weights after an all-gather."""
    return f"{unit}/{Kind.GATHERED}"


def group_grad_key(unit: str) -> str:
    """Return the key of a unit's whole gradient of one group, before the reduce-scatter."""
    return f"{unit}/{Kind.GROUP_GRAD}"


def received_key(unit: str) -> str:
    """Return the key of the gradients of a rank's shard that all ranks have sent."""
    return f"{unit}/{Kind.RECEIVED}"


def activation_key(unit: str) -> str:
    """Return the key of a unit's offloaded activation."""
    return f"{unit}/{Kind.ACTIVATION}"
