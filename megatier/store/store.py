"""The tiered store: named blocks of bytes over GPU memory, pinned RAM and NVMe.

A block has a home tier, where it always lies, and may have copies in faster tiers, whole or in spans. Whoever reads or
writes bytes holds a lease; nothing leased is evicted. Moves run on four queues and are checked; a failed one leaves the
block where it was, whole. All memory is reserved when the first block is used (`seal`), never later.

    with TieredStore.open(ram="64GiB", nvme=["/mnt/a:500GiB"]) as store:
        store.register(BlockSpec("layer0", num_bytes, home=Tier.NVME))
        with store.lease("layer0", Tier.RAM) as block:
            block.bytes.zero_()
        store.mark_dirty("layer0", Tier.RAM)
        store.write_back("layer0", Tier.RAM).wait()

Threads: every method may be called from any thread; the bytes under a lease are the caller's to order.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from megatier import _native
from megatier.config import parse_bytes, parse_mount
from megatier.errors import (
    BlockNotFoundError,
    CapacityError,
    DirtyBlockError,
    LastCopyError,
    LeaseHeldError,
    MegatierError,
)
from megatier.store.arena import Arena, Slot, SlotPool
from megatier.store.blockfile import BlockFiles, Extent, IoOptions
from megatier.store.tier import BlockSpec, Kind, Tier, round_up
from megatier.store.transfer import Queue, StreamClock, Transfer, mark

Span = tuple[int, int]
POISON = 0xFF
"""Byte written over a released slot of the CPU arena that stands for the GPU: NaN in every float type."""


@dataclass(slots=True, eq=False)
class _Copy:
    """Bytes [start, stop) of a block in one tier, at an arena offset."""

    tier: Tier
    span: Span
    offset: int
    slot: Slot | None
    """None: a home copy, which is never evicted."""
    fills: dict[Span, Transfer | None] = field(default_factory=dict)
    """Spans that are valid once their transfer has ended (None: already)."""
    readers: list[Transfer] = field(default_factory=list)
    """Moves and compute that still use the bytes."""
    writing: dict[Span, Transfer] = field(default_factory=dict)
    dirty: set[Span] = field(default_factory=set)
    num_leases: int = 0

    def holds(self, span: Span) -> bool:
        return self.span[0] <= span[0] and span[1] <= self.span[1]

    def missing(self, span: Span) -> bool:
        return self.slot is not None and sum(_overlap(span, filled) for filled in self.fills) < span[1] - span[0]


@dataclass(slots=True, eq=False)
class _Block:
    spec: BlockSpec
    extent: Extent | None = None
    copies: list[_Copy] = field(default_factory=list)
    home_writes: dict[Span, Transfer] = field(default_factory=dict)
    """Last write to NVMe of each span; a read of the same bytes comes after it."""


class Lease:
    """The right to use a resident copy until exit.

    Attributes:
        bytes: uint8 [stop - start] on the tier's device; valid until exit.
    """

    def __init__(self, store: TieredStore, copy: _Copy, span: Span, key: str) -> None:
        """Made by TieredStore.lease."""
        self._store, self._copy, self._key = store, copy, key
        self.bytes = store._view(copy, span)
        self.address = self.bytes.data_ptr()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the right back. Compute enqueued so far on the current stream still reads valid bytes."""
        self._store._release(self._copy, self._key)


class TieredStore:
    """Blocks of bytes over three tiers. See the module's head."""

    def __init__(
        self,
        budgets: dict[Tier, int],
        files: BlockFiles | None,
        device: torch.device,
    ) -> None:
        """Use `open`; this takes bytes per tier, the NVMe back end, and the device of the gpu tier."""
        self._budgets, self._files, self.device = budgets, files, device
        self._blocks: dict[str, _Block] = {}
        self._homes: Counter[Tier] = Counter()
        self._home_kinds: Counter[tuple[Tier, Kind]] = Counter()
        self._wanted: dict[tuple[Tier, Kind | None], tuple[int, int]] = {}
        self._pools: dict[tuple[Tier, Kind | None], SlotPool] = {}
        self._arenas: dict[Tier, Arena] = {}
        self._lock = threading.RLock()
        self._slot_freed = threading.Condition(self._lock)
        self._sealed = False
        self.moved_bytes: Counter[str] = Counter()
        """Bytes submitted per queue since the start."""
        self._log: list[Transfer] = []
        self.clock = StreamClock() if device.type == "cuda" else None
        names = ("nvme_to_ram", "ram_to_gpu", "gpu_to_ram", "ram_to_nvme")
        self._queues = {name: Queue(name, self.clock if "gpu" in name else None) for name in names}

    @classmethod
    def open(
        cls,
        *,
        gpu: int | str = 0,
        ram: int | str = 0,
        nvme: Sequence[str] = (),
        device: str = "cpu",
        run_id: str | None = None,
        options: IoOptions | None = None,
    ) -> TieredStore:
        """Open a store with byte budgets.

        Args:
            gpu: bytes of the gpu tier, such as "40GiB"; on device "cpu" a separate arena in RAM stands for it.
            ram: bytes of the ram tier, slots included.
            nvme: mounts as DIRECTORY or DIRECTORY:SIZE.
            device: device of the gpu tier.
            run_id: names the directory on each mount; random where not given.
            options: how block files are accessed.

        Raises:
            ConfigError: a mount is not usable.
            RunLockedError: another process has this run id on a mount.
        """
        mounts = [parse_mount(text) for text in nvme]
        files = BlockFiles(mounts, run_id or secrets.token_hex(6), options or IoOptions()) if mounts else None
        sizes = {tier: parse_bytes(str(size)) for tier, size in ((Tier.GPU, gpu), (Tier.RAM, ram))}
        return cls(sizes | {Tier.NVME: files.capacity_bytes if files else 0}, files, torch.device(device))

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ before use

    def register(self, spec: BlockSpec) -> None:
        """Add a block; its home bytes are counted now and allocated by `seal`. A new block holds zeros.

        Raises:
            CapacityError: the home tier's budget is used up.
            ValueError: the key exists, or the store is sealed.
        """
        with self._lock:
            if self._sealed or spec.key in self._blocks:
                raise ValueError(
                    f"cannot register {spec.key}: {'the store is sealed' if self._sealed else 'it exists'}"
                )
            block = self._blocks[spec.key] = _Block(spec)
            if spec.home is Tier.NVME:
                if self._files is None:
                    raise CapacityError("nvme", spec.num_bytes, 0, "Give the store at least one mount.")
                block.extent = self._files.reserve(spec.num_bytes)
            elif spec.home is not None:
                self._charge(spec.home, round_up(spec.num_bytes))
                offset = self._homes[spec.home]
                block.copies.append(_Copy(spec.home, (0, spec.num_bytes), offset, None))
                self._homes[spec.home] += round_up(spec.num_bytes)
            if spec.home is not None:
                self._home_kinds[spec.home, spec.kind] += round_up(spec.num_bytes)

    def reserve(self, tier: Tier, kind: Kind | None, slot_bytes: int, num_slots: int) -> None:
        """Set slots aside in gpu or ram for copies of one kind of block (None: all kinds without slots of their own).

        Raises:
            CapacityError: the tier's budget is used up.
        """
        with self._lock:
            assert not self._sealed
            self._charge(tier, round_up(slot_bytes) * num_slots)
            self._wanted[tier, kind] = (slot_bytes, num_slots)

    def _charge(self, tier: Tier, num_bytes: int) -> None:
        taken = self._homes[tier] + sum(
            round_up(size) * count for (t, _), (size, count) in self._wanted.items() if t is tier
        )
        if taken + num_bytes > self._budgets[tier]:
            free = self._budgets[tier] - taken
            raise CapacityError(tier, num_bytes, free, f"Raise the {tier} budget or home fewer blocks there.")

    def seal(self) -> None:
        """Allocate everything: arenas, slots, block files. Called by the first use of a block.

        Where no slots were reserved in a tier, its remaining budget becomes slots as large as the largest block that
        may pass through.

        Raises:
            CapacityError: the system has less memory or disk than the budgets say.
        """
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
            for tier in (Tier.GPU, Tier.RAM):
                if not any(t is tier for t, _ in self._wanted):
                    self._default_slots(tier)
                size = self._homes[tier]
                for (pool_tier, kind), (slot_bytes, num_slots) in self._wanted.items():
                    if pool_tier is tier:
                        pool = self._pools[tier, kind] = SlotPool(size, slot_bytes, num_slots)
                        size += pool.slot_bytes * num_slots
                if size:
                    on_gpu = tier is Tier.GPU
                    pin = self.clock is not None and not on_gpu
                    self._arenas[tier] = Arena(size, self.device if on_gpu else torch.device("cpu"), pin=pin)
            if self._files is not None:
                self._files.allocate()
                self._files.fill()
                for block in self._blocks.values():
                    if block.extent is not None:
                        self._files.forget(block.extent)

    def _default_slots(self, tier: Tier) -> None:
        passing = [round_up(b.spec.num_bytes) for b in self._blocks.values() if b.spec.home is not tier]
        room = self._budgets[tier] - self._homes[tier]
        if passing and (count := min(len(passing), room // max(passing))):
            self._wanted[tier, None] = (max(passing), count)

    # ------------------------------------------------------------------ use

    def prefetch(self, key: str, tier: Tier, span: Span | None = None) -> list[Transfer]:
        """Start bringing a block, or bytes [start, stop) of it, to a tier. A hint: nothing waits.

        Bytes already there are not moved again. From NVMe to the GPU they pass through RAM slots span by span.

        Returns:
            The transfers after which the bytes are there; empty when they are.

        Raises:
            CapacityError: every slot of the tier is leased or dirty.
        """
        self.seal()
        with self._lock:
            block = self._block(key)
            span = span or (0, block.spec.num_bytes)
            copy = self._copy_for(block, tier, span)
            if copy.missing(span):
                self._fill(block, copy, span)
            return [t for filled, t in copy.fills.items() if t is not None and not t.done() and _overlap(filled, span)]

    def lease(
        self, key: str, tier: Tier, span: Span | None = None, *, fresh: bool = False, wait: bool = False
    ) -> Lease:
        """The right to use a block, or bytes [start, stop) of it, in a tier; brings it there first.

        Args:
            key: a registered block.
            tier: gpu or ram.
            span: chunk-aligned byte range; the whole block where not given.
            fresh: the caller overwrites every byte, so nothing is read.
            wait: block until a slot is free instead of raising.

        Raises:
            CapacityError: every slot of the tier is leased or dirty.
            TransferError, IntegrityError: the bytes could not be brought; the home copy is as it was.
        """
        self.seal()
        with self._lock:
            block = self._block(key)
            span = span or (0, block.spec.num_bytes)
            copy = self._copy_for(block, tier, span, wait=wait)
            copy.num_leases += 1
            try:
                if fresh and copy.slot is not None:
                    copy.fills[span] = None
                elif copy.missing(span):
                    self._fill(block, copy, span)
            except BaseException:
                copy.num_leases -= 1
                raise
            needed = [t for filled, t in copy.fills.items() if t is not None and _overlap(filled, span)]
            if fresh and copy.slot is not None:
                needed += copy.slot.pending
            if tier is not Tier.GPU:
                needed += [t for t in copy.readers if t.queue == "gpu_to_ram"]
        try:
            for transfer in needed:
                transfer.order()
        except BaseException:
            self._drop(block, copy)
            raise
        return Lease(self, copy, span, key)

    def mark_dirty(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Say that the bytes under a lease were changed. Copies in other tiers that overlap are stale and dropped.

        Raises:
            LeaseHeldError: such a copy is leased.
        """
        with self._lock:
            block = self._block(key)
            span = span or (0, block.spec.num_bytes)
            copy = self._find(block, tier, span)
            for other in [c for c in block.copies if c is not copy and c.slot is not None]:
                if any(_overlap(span, filled) for filled in other.fills):
                    self._evict(block, other)
            copy.writing.pop(span, None)
            if block.spec.home is not tier:
                copy.dirty.add(span)

    def write_back(self, key: str, tier: Tier, span: Span | None = None, *, wait: bool = False) -> Transfer | None:
        """Start copying dirty bytes one step towards home; None when nothing is dirty.

        A scratch block goes from gpu to a slot in ram. When the move fails, the copy stays, dirty.

        Raises:
            CapacityError: no slot for the step in between, and not `wait`.
        """
        with self._lock:
            block = self._block(key)
            span = span or (0, block.spec.num_bytes)
            copy = self._find(block, tier, span)
            if span not in copy.dirty:
                return None
            if tier is Tier.RAM:
                transfer = self._write_extent(block, copy, span)
            else:
                transfer = self._copy_down(block, copy, span, wait=wait)
            copy.writing[span] = transfer
            return transfer

    def evict(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Drop a copy; a no-op when there is none. Moves in flight from it are finished before its slot is reused.

        Raises:
            LeaseHeldError: it is leased.
            DirtyBlockError: it is dirty and no write-back was started, or the write-back failed.
            LastCopyError: it is the home copy.
        """
        with self._lock:
            block = self._block(key)
            span = span or (0, block.spec.num_bytes)
            for copy in [c for c in block.copies if c.tier is tier and c.span == span]:
                if copy.slot is None:
                    raise LastCopyError(f"block {key} is at home on {tier}; it cannot be evicted.")
                self._evict(block, copy)

    def settle(self, key: str) -> None:
        """Wait for the write-backs of a block; what was written is clean from then on.

        Raises:
            TransferError: one failed; the copy is still there, dirty.
        """
        with self._lock:
            block = self._block(key)
            writes = [t for copy in block.copies for t in copy.writing.values()] + list(block.home_writes.values())
        for transfer in writes:
            transfer.wait()
        with self._lock:
            self._settle(block)

    def push(self, key: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a contiguous tensor on the gpu device into a block at home in ram; it may be freed at once."""
        return self._exchange("gpu_to_ram", key, tensor)

    def pull(self, key: str, tensor: torch.Tensor) -> Transfer:
        """Start copying a block at home in ram into a contiguous tensor on the gpu device."""
        return self._exchange("ram_to_gpu", key, tensor)

    def take_log(self) -> list[Transfer]:
        """Transfers submitted since the last call, for a trace."""
        with self._lock:
            log, self._log = self._log, []
        return log

    def residency(self, key: str) -> dict[Tier, tuple[Span, ...]]:
        """Per tier, the spans of the block that are there now."""
        with self._lock:
            block = self._block(key)
            whole = (0, block.spec.num_bytes)
            result: dict[Tier, tuple[Span, ...]] = {Tier.NVME: (whole,)} if block.extent is not None else {}
            for copy in block.copies:
                spans = (copy.span,) if copy.slot is None else tuple(sorted(copy.fills))
                result[copy.tier] = result.get(copy.tier, ()) + spans
            return result

    def is_dirty(self, key: str) -> bool:
        """True when a copy has bytes that home has not."""
        with self._lock:
            self._settle(block := self._block(key))
            return any(copy.dirty for copy in block.copies)

    def usage(self, tier: Tier) -> dict[str, int]:
        """Bytes by kind at home in the tier, `slots` (reserved for copies), and `budget`."""
        with self._lock:
            kinds = {str(kind): size for (t, kind), size in self._home_kinds.items() if t is tier}
            slots = sum(round_up(size) * count for (t, _), (size, count) in self._wanted.items() if t is tier)
            return kinds | {"slots": slots, "budget": self._budgets[tier]}

    @property
    def is_direct(self) -> bool | None:
        """Whether NVMe access is O_DIRECT; None without mounts."""
        return self._files.is_direct if self._files is not None else None

    def close(self) -> None:
        """Finish all moves, free the memory, remove this store's files."""
        for queue in self._queues.values():
            queue.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        if self._files is not None:
            self._files.close()

    # ------------------------------------------------------------------ inside; the lock is held

    def _block(self, key: str) -> _Block:
        try:
            return self._blocks[key]
        except KeyError:
            raise BlockNotFoundError(f"no block {key!r} is registered.") from None

    def _view(self, copy: _Copy, span: Span) -> torch.Tensor:
        return self._arenas[copy.tier].view(copy.offset + span[0] - copy.span[0], span[1] - span[0])

    def _find(self, block: _Block, tier: Tier, span: Span) -> _Copy:
        for copy in block.copies:
            if copy.tier is tier and copy.holds(span):
                return copy
        raise BlockNotFoundError(f"block {block.spec.key} has no copy of bytes {span} on {tier}.")

    def _copy_for(self, block: _Block, tier: Tier, span: Span, *, wait: bool = False) -> _Copy:
        """The copy that holds the span, or a new one in a slot. A gpu copy is always whole."""
        for copy in block.copies:
            if copy.tier is tier and copy.holds(span):
                return copy
        wanted = (0, block.spec.num_bytes) if tier is Tier.GPU else span
        for copy in block.copies:
            if copy.tier is tier and _overlap(copy.span, wanted):
                raise LeaseHeldError(f"bytes {copy.span} of {block.spec.key} lie on {tier} as another span.")
        slot = self._take(tier, block.spec, wanted[1] - wanted[0], wait=wait)
        copy = _Copy(tier, wanted, slot.offset, slot)
        block.copies.append(copy)
        return copy

    def _take(self, tier: Tier, spec: BlockSpec, num_bytes: int, *, wait: bool) -> Slot:
        pool = self._pools.get((tier, spec.kind)) or self._pools.get((tier, None))
        if pool is None or pool.slot_bytes < num_bytes or not pool.num_slots:
            had = pool.slot_bytes if pool is not None and pool.num_slots else 0
            remedy = f"Slots for {spec.kind} blocks on {tier} are too small; raise the {tier} budget or lease spans."
            raise CapacityError(tier, num_bytes, had, remedy)
        while (slot := pool.take()) is None:
            if self._evict_any(tier, pool):
                continue
            if not wait:
                raise CapacityError(
                    tier, num_bytes, 0, f"All {pool.num_slots} slots are leased or dirty; release some."
                )
            self._slot_freed.wait()
        return slot

    def _evict_any(self, tier: Tier, pool: SlotPool) -> bool:
        """Drop the oldest clean, unleased copy that lies in this pool."""
        for block in self._blocks.values():
            for copy in block.copies:
                in_pool = self._pools.get((tier, block.spec.kind)) or self._pools.get((tier, None))
                if copy.slot is None or copy.tier is not tier or in_pool is not pool or copy.num_leases:
                    continue
                if not any(span not in copy.writing for span in copy.dirty) and block.spec.home is not None:
                    self._evict(block, copy)
                    return True
        return False

    def _fill(self, block: _Block, copy: _Copy, span: Span) -> None:
        """Start the moves that make the span valid, from the nearest tier that has it."""
        assert copy.slot is not None
        after = copy.slot.pending
        if copy.tier is Tier.RAM:
            copy.fills[span] = self._read_extent(block, copy, span, after)
            return
        for start, stop in self._ram_spans(block, span):
            if any(_overlap((start, stop), filled) for filled in copy.fills):
                continue
            source = self._copy_for(block, Tier.RAM, (start, stop), wait=True)
            if source.missing((start, stop)):
                self._fill(block, source, (start, stop))
            ready = [t for filled, t in source.fills.items() if t is not None and _overlap(filled, (start, stop))]
            transfer = self._move(
                "ram_to_gpu",
                block.spec.key,
                self._view(copy, (start, stop)),
                self._view(source, (start, stop)),
                [*after, *ready],
            )
            copy.fills[start, stop] = transfer
            source.readers = [*(t for t in source.readers if not t.done()), transfer]
            if source.slot is not None and not source.num_leases and not source.dirty:
                self._evict(block, source)

    def _ram_spans(self, block: _Block, span: Span) -> list[Span]:
        """How bytes on their way through RAM are cut: by the resident copies, else by the slots' size."""
        resident = [c.span for c in block.copies if c.tier is Tier.RAM and _overlap(c.span, span)]
        if any(start <= span[0] and span[1] <= stop for start, stop in resident):
            return [span]
        if resident:
            return sorted(resident)
        pool = self._pools.get((Tier.RAM, block.spec.kind)) or self._pools.get((Tier.RAM, None))
        if pool is None:
            raise CapacityError(
                "ram", span[1] - span[0], 0, "Bytes from NVMe pass through RAM slots; give ram a budget."
            )
        chunk = self._files.options.chunk_bytes if self._files is not None else 1
        size = max(chunk, pool.slot_bytes // chunk * chunk)
        return [(start, min(start + size, span[1])) for start in range(span[0], span[1], size)]

    # HOP 2/6: RAM slot -> GPU slot, and HOP 4/6: gradient GPU slot -> RAM slot
    def _move(
        self, queue: str, key: str, target: torch.Tensor, source: torch.Tensor, after: list[Transfer]
    ) -> Transfer:
        def start() -> None:
            if self.clock is None:
                _native.copy(target.data_ptr(), source.data_ptr(), source.numel())
            else:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if tensor.is_cuda:  # the caching allocator must not hand the memory out before the copy is over
                        tensor.record_stream(torch.cuda.current_stream())

        return self._submit(queue, key, source.numel(), start, after)

    def _exchange(self, queue: str, key: str, tensor: torch.Tensor) -> Transfer:
        """Between a tensor outside the arenas and a block at home in ram, after the block's last exchange."""
        with self._lock:
            block = self._block(key)
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            copy = self._find(block, Tier.RAM, (0, flat.numel()))
            inside = self._view(copy, (0, flat.numel()))
            after = [t for t in copy.readers if not t.done()]
            if (point := mark(self.clock, key)) is not None:
                after.append(point)
            outwards = queue == "gpu_to_ram"
            transfer = self._move(queue, key, inside if outwards else flat, flat if outwards else inside, after)
            copy.readers = [*after, transfer]
            return transfer

    def _read_extent(self, block: _Block, copy: _Copy, span: Span, after: list[Transfer]) -> Transfer:
        if block.extent is None or self._files is None:
            raise BlockNotFoundError(f"block {block.spec.key} has no bytes {span} anywhere to read.")
        files, extent, address = self._files, block.extent, self._view(copy, span).data_ptr()
        stop = extent.num_bytes if span[1] == block.spec.num_bytes else span[1]
        writes = [t for written, t in block.home_writes.items() if _overlap(written, span)]
        key = block.spec.key
        return self._submit(
            "nvme_to_ram",
            key,
            stop - span[0],
            lambda: files.read(key, extent, span[0], stop, address),
            [*after, *writes],
        )

    def _write_extent(self, block: _Block, copy: _Copy, span: Span) -> Transfer:
        assert block.extent is not None
        assert self._files is not None
        files, extent, address = self._files, block.extent, self._view(copy, span).data_ptr()
        stop = extent.num_bytes if span[1] == block.spec.num_bytes else span[1]
        after = [t for filled, t in copy.fills.items() if t is not None and _overlap(filled, span)]
        key = block.spec.key
        transfer = self._submit(
            "ram_to_nvme", key, stop - span[0], lambda: files.write(key, extent, span[0], stop, address), after
        )
        block.home_writes = {s: t for s, t in block.home_writes.items() if not t.done() and not _overlap(s, span)}
        block.home_writes[span] = transfer
        return transfer

    def _copy_down(self, block: _Block, copy: _Copy, span: Span, *, wait: bool) -> Transfer:
        """gpu -> ram: into the home there, or into a slot, which is dirty from then on unless the block is scratch."""
        below = self._copy_for(block, Tier.RAM, span, wait=wait)
        after = [t for filled, t in copy.fills.items() if t is not None and _overlap(filled, span)]
        after += [t for t in copy.readers if t.queue == "compute"]
        if (point := mark(self.clock, block.spec.key)) is not None:
            after.append(point)
        after += below.slot.pending if below.slot is not None else below.readers
        transfer = self._move("gpu_to_ram", block.spec.key, self._view(below, span), self._view(copy, span), after)
        below.fills[span] = transfer
        if block.spec.home is Tier.NVME:
            below.dirty.add(span)
        return transfer

    def _submit(self, queue: str, key: str, num_bytes: int, start: object, after: Sequence[Transfer]) -> Transfer:
        transfer = self._queues[queue].submit(key, num_bytes, start, after)  # type: ignore[arg-type]
        self.moved_bytes[queue] += num_bytes
        self._log.append(transfer)
        return transfer

    def _settle(self, block: _Block) -> None:
        """Bytes whose write-back ended well are clean."""
        for copy in block.copies:
            for span, transfer in list(copy.writing.items()):
                if transfer.done():
                    del copy.writing[span]
                    transfer.wait()
                    copy.dirty.discard(span)

    def _evict(self, block: _Block, copy: _Copy) -> None:
        if copy.num_leases:
            raise LeaseHeldError(f"block {block.spec.key} on {copy.tier} is leased; release it first.")
        unwritten = [span for span in copy.dirty if span not in copy.writing]
        failed = [span for span, transfer in copy.writing.items() if transfer.done() and not _went_well(transfer)]
        if (unwritten or failed) and block.spec.home is not None:
            raise DirtyBlockError(
                f"block {block.spec.key} on {copy.tier} has bytes that are not home yet; write them back."
            )
        block.copies.remove(copy)
        assert copy.slot is not None
        pending = [
            t for t in (*copy.fills.values(), *copy.readers, *copy.writing.values()) if t is not None and not t.done()
        ]
        if copy.tier is Tier.GPU and self.clock is None:
            address = self._arenas[Tier.GPU].address + copy.offset
            size = copy.span[1] - copy.span[0]
            pending = [self._queues["ram_to_gpu"].submit("", 0, lambda: _native.fill(address, POISON, size), pending)]
        self._give(copy, pending)

    def _give(self, copy: _Copy, pending: list[Transfer]) -> None:
        assert copy.slot is not None
        copy.slot.pool.give(copy.slot, pending)
        self._slot_freed.notify_all()

    def _drop(self, block: _Block, copy: _Copy) -> None:
        """Forget a copy whose filling failed."""
        with self._lock:
            copy.num_leases -= 1
            if copy.slot is not None and not copy.num_leases and copy in block.copies:
                block.copies.remove(copy)
                self._give(copy, [])

    def _release(self, copy: _Copy, key: str) -> None:
        with self._lock:
            copy.num_leases -= 1
            assert copy.num_leases >= 0, f"{key} was released twice"
            copy.readers = [t for t in copy.readers if not t.done()]
            if copy.tier is Tier.GPU and (point := mark(self.clock, key)) is not None:
                copy.readers.append(point)
            self._slot_freed.notify_all()


def _overlap(first: Span, second: Span) -> int:
    """Bytes that two spans share."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def _went_well(transfer: Transfer) -> bool:
    try:
        transfer.wait()
    except (MegatierError, OSError, RuntimeError):
        return False
    return True
