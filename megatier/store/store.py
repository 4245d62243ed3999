"""The tiered store: named blocks of bytes over GPU memory, pinned RAM and NVMe.

A block always lies in its home tier, and may have copies in faster tiers, whole or in spans. If the home is NVMe, spans
begin and end at granules (`IoOptions.granule_bytes`), or at the end of the block. Whoever reads or writes bytes holds a
lease of them, and nothing that is leased is evicted. Each kind of move has a queue of its own (`tier.QUEUES`). Bytes
from NVMe are verified, and a move that fails leaves the block whole where it was. All memory is allocated when the
first block is used (`seal`), and never later.

    with TieredStore.open(ram="64GiB", nvme=["/mnt/a:500GiB"]) as store:
        store.register(BlockSpec("layer0", num_bytes, home=Tier.NVME))
        with store.lease("layer0", Tier.RAM) as block:
            block.bytes.zero_()
            store.mark_dirty("layer0", Tier.RAM)  # within the lease: later the slot may be another block's
        store.write_back("layer0", Tier.RAM).wait()

The parts are `blocks`, `copies` and their slots, `fills` and `write_backs` (moves up and home), `lease`, `outside`
(moves to memory of others) and `loan` (of GPU memory).

Threads: any thread may call any method. Callers order their own reads and writes of leased bytes. One lock guards all
bookkeeping. A thread releases it before it waits for a slot or a move, and the queues never take it, so it causes no
deadlock.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import torch

from megatier.config.values import byte_count, parse_list, parse_mount
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.gds import GpuReader, IoPath
from megatier.errors import BlockError, LastCopyError
from megatier.finalizer import ClosedWhenDropped
from megatier.store.arena import Allocate
from megatier.store.blocks import Blocks
from megatier.store.copies import Copies
from megatier.store.fills import Fills
from megatier.store.lease import Lease, Leases
from megatier.store.loan import Loan
from megatier.store.outside import Outside
from megatier.store.reservation import Reservation
from megatier.store.residency import Span
from megatier.store.sealing import Sealing
from megatier.store.staging import Staging
from megatier.store.tier_queues import TierQueues
from megatier.store.transfer import Transfer
from megatier.store.write_backs import WriteBacks
from megatier.tier import BlockSpec, Kind, Tier


class TieredStore(ClosedWhenDropped):
    """Named blocks of bytes over GPU memory, pinned RAM and NVMe; see `megatier.store.store`."""

    def __init__(self, reservation: Reservation, files: BlockFiles | None, device: torch.device) -> None:
        """Make a store from its parts. `open` is easier to call."""
        self.device = device
        """The device of the gpu tier."""
        self.files = files
        """The block files on NVMe; None without mounts."""
        self._reader = GpuReader(files, device) if files is not None and files.options.gpu_direct else None
        self._reservation = reservation
        self._queues = TierQueues(device)
        self._blocks = Blocks(self._reservation, files)
        self.extents = self._blocks.extents
        """The extent of each block that is at home on NVMe, by key."""
        self._copies = Copies(self._reservation, self._queues)
        self._fills = Fills(self._copies, self._reservation, self._queues, files, self._reader)
        self._write_backs = WriteBacks(self._copies, self._queues, files)
        self._outside = Outside(self._blocks, self._copies, self._reservation, self._queues, files)
        self._leases = Leases(self._blocks, self._copies, self._fills, self._queues)
        self.loan = Loan(self._blocks, self._copies, self._reservation, self._queues)
        """Lends the memory of the gpu tier while nothing moves."""
        self.check_process = self._copies.owner.check  # refuses a forked child; every method but `close` does
        self.consistency = self._copies.consistency
        """Whether a change of the copies was interrupted. Its regions are inside the lock, except that of `lease`."""
        self._sealing = Sealing()
        self.staging: Staging | None = None
        """The rings for RAM that is not pinned, once the store is sealed; None: all of RAM is pinned."""
        self.clock = self._queues.clock
        """Maps device times to the host's; None without a CUDA device."""
        self.queues = tuple(self._queues.queues.values())
        """Every queue between tiers."""
        self._own()

    @classmethod
    def open(
        cls,
        *,
        gpu: int | str = 0,
        ram: int | str = 0,
        nvme: str | Sequence[str] = (),
        device: str = "cpu",
        run_id: str | None = None,
        options: IoOptions | None = None,
        allocate: Allocate | None = None,
        locked: int | None = None,
    ) -> TieredStore:
        """Open a store with byte budgets.

        Args:
            gpu: bytes of the gpu tier, such as "40GiB". On device "cpu" this tier is another arena in RAM.
            ram: bytes of the ram tier, slots included.
            nvme: mounts as DIRECTORY or DIRECTORY:SIZE, in a list or separated by commas.
            device: the device of the gpu tier.
            run_id: names the directory on each mount; None: a random name.
            options: how block files are accessed.
            allocate: allocates the gpu tier on a CUDA device; None: torch does.
            locked: the most bytes of RAM to pin; None: as many as CUDA allows. The rest goes through rings (`staging`).

        Raises:
            ConfigError: a size or a mount is not usable.
            RunLockedError: another process has this run id on a mount.
        """
        budgets = {Tier.GPU: byte_count("gpu", gpu), Tier.RAM: byte_count("ram", ram)}
        mounts = [parse_mount(text) for text in parse_list(nvme, "nvme")]
        files = BlockFiles(mounts, run_id or secrets.token_hex(6), options or IoOptions()) if mounts else None
        try:
            budgets[Tier.NVME] = files.capacity_bytes if files is not None else 0
            return cls(Reservation(budgets, allocate, locked), files, torch.device(device))
        except BaseException:
            if files is not None:
                files.close()
            raise

    def __enter__(self) -> Self:
        self._disown()  # its `with` block closes it
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def register(self, spec: BlockSpec) -> None:
        """Add a block. Its home counts in the budget now, and `seal` allocates it. A new block holds zeros.

        Raises:
            CapacityError: the home tier's budget is used up.
            BlockError: the key exists, the store is sealed, or the size is not valid.
        """
        with self._copies.lock:
            if self._sealing.has_begun:
                raise BlockError(f"block {spec.key} comes too late: the store is in use. Register all blocks before.")
            self._blocks.add(spec)

    def reserve(self, tier: Tier, kind: Kind | None, slot_bytes: int, num_slots: int) -> None:
        """Reserve slots in gpu or ram for one kind of block; None: for all kinds without slots of their own.

        Raises:
            CapacityError: the tier's budget is used up.
        """
        with self._copies.lock:
            assert not self._sealing.has_begun
            self._reservation.reserve_slots(tier, kind, slot_bytes, num_slots)

    def seal(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Allocate block files, arenas and slots. The first use of a block calls this.

        If no slots were reserved in a tier, the rest of its budget becomes slots for the largest block that passes.
        While zeros are written to files on NVMe, `progress` gets the bytes since its last call.

        Raises:
            CapacityError: the system has less memory, or a drive less room, than the budgets say.
            TransferError: a drive failed while zeros were written.
            UnsealedError: an earlier call failed.
        """
        with self._copies.lock:
            if self._sealing.is_over():
                return
            with self._sealing:
                # Files come first, because allocating them is quick and finds a drive that is too small.
                if self.files is not None:
                    self.files.allocate()
                self._reservation.reserve_default_slots([block.spec for block in self._blocks.by_key.values()])
                self.staging = self._queues.staging = self._reservation.allocate(self.device, self.clock)
                if self.files is not None:
                    self.files.fill(progress)
                if self._reader is not None:
                    self._reader.open(self.device)

    def prefetch(self, key: str, tier: Tier, span: Span | None = None, *, wait: bool = False) -> list[Transfer]:
        """Start to bring a block, or bytes [start, stop) of it, to a tier. Bytes that are there are not moved again.

        Nothing holds the bytes there until they are leased. From NVMe to the GPU they pass through slots in RAM, span
        by span; with `IoOptions.gpu_direct` they go past RAM.

        Args:
            key: a registered block.
            tier: gpu or ram.
            span: a range of bytes; None: the whole block.
            wait: whether to wait for slots, instead of raising.

        Returns:
            The transfers after which the bytes are there; empty if they are there.

        Raises:
            CapacityError, TransferError: every slot is leased, dirty or being written; a write-back failed.
            LeaseHeldError, DirtyBlockError: a copy of these bytes is leased or dirty, or the gpu has newer ones.
        """
        self.seal()
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = self._copies.copy_for(block, tier, span, wait=wait)
            # Without a lease these bytes give way if others need the slot.
            copy.is_ahead = not copy.num_leases
            self._fills.bring(copy, span, wait=wait)
            return [transfer for transfer in copy.arriving(span) if not transfer.done()]

    def lease(
        self, key: str, tier: Tier, span: Span | None = None, *, fresh: bool = False, wait: bool = False
    ) -> Lease:
        """Bring a block, or bytes [start, stop) of it, to a tier, and lease them there.

        Args:
            key: a registered block.
            tier: gpu or ram.
            span: a range of bytes; None: the whole block.
            fresh: whether the caller overwrites every byte, so that nothing is read.
            wait: whether to wait for slots, instead of raising.

        Raises:
            CapacityError: every slot of the tier is leased, dirty or being written.
            LeaseHeldError, DirtyBlockError: a copy of these bytes is leased or dirty, or the gpu has newer ones.
            TransferError, IntegrityError: the bytes could not be moved. They are whole where they were.
        """
        self.seal()
        return self._leases.take(key, tier, span, fresh=fresh, wait=wait)

    def mark_dirty(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Note that leased bytes were changed. Their copies in other tiers are stale, and are dropped.

        Raises:
            BlockNotFoundError: the bytes are not there.
            LeaseHeldError: a stale copy is leased.
        """
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = block.find(tier, span)
            others = [other for other in block.copies if other.tier is not tier and other.slot is not None]
            self._copies.drop_stale(others, span)

            # Bytes at home are never dirty. A scratch block has no home, so only its bytes on the gpu count as dirty,
            # and can be written back to ram.
            home = block.spec.home
            if home is not tier and (home is not None or tier is Tier.GPU):
                copy.dirty(span)

    def write_back(self, key: str, tier: Tier, span: Span | None = None, *, wait: bool = False) -> Transfer | None:
        """Start to move a span with dirty bytes one step towards home. Return None if none of its bytes are dirty.

        From the gpu, bytes with a home on NVMe go to a slot in ram, where they are dirty then. So do scratch blocks. If
        the move fails, the copy stays dirty, and can be written back again.

        Raises:
            BlockNotFoundError: the bytes are not there.
            CapacityError: there is no slot in ram, and not `wait`.
        """
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = block.find(tier, span)
            return self._write_backs.begin(copy, span, wait=wait)

    def evict(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Drop the copy of exactly this span, if there is one.

        This does not wait. The slot is reused when the moves from it have ended, and a copy whose state is being
        written stays until the write has succeeded.

        Raises:
            LeaseHeldError: the copy is leased.
            DirtyBlockError: the copy is dirty, and no write-back was started.
            TransferError: its write-back failed. The copy is still there, and dirty.
            LastCopyError: it is the home copy.
        """
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            if block.spec.home is tier:
                raise LastCopyError(f"block {key} is at home on {tier}; it cannot be evicted.")
            for copy in block.on(tier):
                if copy.span == span:
                    self._copies.evict(copy)

    def discard(self, key: str, tier: Tier) -> None:
        """Evict all copies of a block in slots of a tier, even dirty ones."""
        with self._copies.lock, self.consistency.call:
            for copy in self._blocks.find(key).on(tier):
                if copy.slot is not None:
                    self._copies.discard(copy)

    def wake(self) -> None:
        """Wake all threads that wait for a slot. They fail if the state is torn."""
        with self._copies.lock:
            self._copies.wake()

    def reset(self) -> None:
        """Wait for all moves, and forget all leases, slots and dirty bytes. The caller then overwrites all blocks.

        Older leases end without effect, and threads that wait for slots fail.
        """
        self.consistency.is_torn = True
        self.wake()
        for queue in self.queues:
            queue.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._copies.lock:
            self._leases.forget()
            self._copies.forget(self._blocks.by_key.values())
        self.consistency.is_torn = False

    def settle(self, key: str) -> None:
        """Wait for the write-backs of a block, after which the written bytes are clean.

        Raises:
            TransferError: a write-back failed. The copy is still there, and dirty.
        """
        with self._copies.lock:
            block = self._blocks.find(key)
            write_backs = block.write_backs()

        # Without the lock, because moves may take long. Copies may have changed afterwards.
        for transfer in write_backs:
            transfer.wait()
        with self._copies.lock, self.consistency.call:
            for copy in list(block.copies):
                copy.settle()
                if copy.is_evicted:
                    self._copies.evict(copy)

    def push(self, key: str, tensor: torch.Tensor, start: int = 0) -> Transfer:
        """Start to move a contiguous tensor from the gpu device to a block in ram or on NVMe; see `Outside.push`."""
        with self._copies.lock, self.consistency.call:
            return self._outside.push(key, tensor, start)

    def pull(self, key: str, tensor: torch.Tensor, start: int = 0) -> Transfer:
        """Start to move a pushed tensor back into a contiguous tensor on the gpu device; see `Outside.pull`."""
        with self._copies.lock, self.consistency.call:
            return self._outside.pull(key, tensor, start)

    def carry(self, key: str, target: torch.Tensor, source: torch.Tensor, *, to_gpu: bool) -> Transfer:
        """Start to copy state between RAM and the caller's own memory on the gpu device; see `TierQueues.carry`."""
        with self._copies.lock, self.consistency.call:
            return self._queues.carry(key, target, source, to_gpu=to_gpu)

    def copy_out(self, key: str, span: Span, target: torch.Tensor) -> Transfer:
        """Start to copy bytes from home, on the gpu or on NVMe, to the caller's RAM; see `Outside.copy_out`."""
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            return self._outside.copy_out(block, span, target)

    @property
    def moved_bytes(self) -> Counter[str]:
        """The bytes that were submitted to each queue since the start, without those of `copy_out`."""
        return self._queues.moved_bytes

    def take_log(self) -> list[Transfer]:
        """Return the transfers that were submitted since the last call, for a trace; at most `LOG_TRANSFERS_MAX`."""
        with self._copies.lock:
            return self._queues.take_log()

    def residency(self, key: str) -> dict[Tier, tuple[Span, ...]]:
        """Return the spans of a block that each tier has in their newest version."""
        with self._copies.lock:
            return self._blocks.find(key).residency()

    def is_dirty(self, key: str) -> bool:
        """Return whether a copy of a block has bytes that home does not have."""
        with self._copies.lock:
            return self._blocks.find(key).is_dirty()

    def usage(self, tier: Tier) -> dict[str, int]:
        """Return the bytes at home in a tier by kind, those of its `slots`, and its `budget`."""
        with self._copies.lock:
            return self._reservation.usage(tier)

    @property
    def is_direct(self) -> bool | None:
        """Whether NVMe is accessed with O_DIRECT, which is known once the store is sealed; None without mounts."""
        return self.files.is_direct if self.files is not None else None

    @property
    def gpu_path(self) -> IoPath | None:
        """How reads from NVMe past RAM are really done, once the store is sealed; None if there are none."""
        return self._reader.path() if self._reader is not None else None

    def close(self) -> None:
        """Finish all moves, remove the files unless they are kept, and free the memory. A forked child does nothing."""
        self._disown()
        if not self._copies.owner.is_here:
            return
        with ExitStack() as closing:  # in reverse order, and all of them even if one fails
            closing.callback(self._reservation.close)
            closing.callback(self.loan.close)
            for opened in [each for each in (self.files, self._reader) if each is not None]:
                closing.callback(opened.close)
            # Queues first start all submitted moves. Files then wait for these, because their threads use the memory.
            closing.callback(self._queues.close)
