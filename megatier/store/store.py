"""The tiered store: named blocks of bytes over GPU memory, pinned RAM and NVMe.

A block always lies in its home tier, and may have copies in faster tiers, whole or in spans. If the home is NVMe, spans
start where granules do (`IoOptions.granule_bytes`), and end where one does, or with the block. A reader or writer of
bytes holds a lease of them, and nothing that is leased is evicted. Each kind of move has a queue of its own
(`tier.QUEUES`). Bytes from NVMe are verified, and a move that fails leaves the block whole where it was. All memory is
allocated when the first block is used (`seal`), and never later.

    with TieredStore.open(ram="64GiB", nvme=["/mnt/a:500GiB"]) as store:
        store.register(BlockSpec("layer0", num_bytes, home=Tier.NVME))
        with store.lease("layer0", Tier.RAM) as block:
            block.bytes.zero_()
            store.mark_dirty("layer0", Tier.RAM)  # within the lease: later the slot may be another block's
        store.write_back("layer0", Tier.RAM).wait()

Below this file, `blocks` knows the blocks, `copies` says which copy has which slot, `fills` and `write_backs` start
moves up and home, `lease` counts leases, `outside` moves bytes of others, and `loan` lends the memory of the GPU.

Threads: any thread may call any method. Who touches leased bytes, and in which order, is up to the callers. One lock
guards all bookkeeping. A thread lets go of it before it waits for a slot or a move, and the threads of the queues never
take it. So a thread that holds it waits for nobody who may want it.
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
        """Take the budgets, the files on NVMe, and the device of the gpu tier. `open` is easier to call."""
        self.device = device
        """The device of the gpu tier."""
        self.files = files
        """The block files on NVMe; None without mounts."""
        self._reader = GpuReader(files, device) if files is not None and files.options.gpu_direct else None
        self._reservation = reservation
        self._queues = TierQueues(device)
        self._blocks = Blocks(self._reservation, files)
        self.extents = self._blocks.extents
        """The place of each block that is at home on NVMe, by its key."""
        self._copies = Copies(self._reservation, self._queues)
        self._fills = Fills(self._copies, self._reservation, self._queues, files, self._reader)
        self._write_backs = WriteBacks(self._copies, self._queues, files)
        self._outside = Outside(self._blocks, self._copies, self._reservation, self._queues, files)
        self._leases = Leases(self._blocks, self._copies, self._fills, self._queues)
        self.loan = Loan(self._blocks, self._copies, self._reservation, self._queues)
        """Lends the memory of the gpu tier while nothing moves."""
        self.check_process = self._copies.owner.check  # refuses a forked child; every method but `close` does
        self.consistency = self._copies.consistency
        """Tells whether a change of the copies broke off. Its regions lie inside the lock, except that of `lease`."""
        self._sealing = Sealing()
        self.staging: Staging | None = None
        """Takes bytes of RAM that is not page-locked through rings, once the store is sealed; None: all of RAM is."""
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
            gpu: bytes of the gpu tier, such as "40GiB". On device "cpu" an arena of its own in RAM stands for it.
            ram: bytes of the ram tier, with its slots.
            nvme: mounts as DIRECTORY or DIRECTORY:SIZE, in a list or separated by commas.
            device: the device of the gpu tier.
            run_id: names the directory on each mount. It is random if not given.
            options: how block files are accessed.
            allocate: gives the memory of the gpu tier on a CUDA device; None: torch does.
            locked: the most bytes to page-lock; None: as many as CUDA takes. Other RAM goes through rings (`staging`).

        Raises:
            ConfigError: a size or a mount is not usable.
            RunLockedError: another process has this run id on a mount.
        """
        budgets = {Tier.GPU: byte_count("gpu", gpu), Tier.RAM: byte_count("ram", ram)}
        mounts = [parse_mount(text) for text in parse_list(nvme)]
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
        """Add a block. Its home is counted now and allocated by `seal`. A new block holds zeros.

        Raises:
            CapacityError: the home tier's budget is used up.
            BlockError: the key exists, the store is sealed, or no block can be of that size.
        """
        with self._copies.lock:
            if self._sealing.has_begun:
                raise BlockError(f"block {spec.key} comes too late: the store is in use. Register all blocks before.")
            self._blocks.add(spec)

    def reserve(self, tier: Tier, kind: Kind | None, slot_bytes: int, num_slots: int) -> None:
        """Set slots aside in gpu or ram for copies of one kind of block; None: of all kinds without slots of their own.

        Raises:
            CapacityError: the tier's budget is used up.
        """
        with self._copies.lock:
            assert not self._sealing.has_begun
            self._reservation.reserve_slots(tier, kind, slot_bytes, num_slots)

    def seal(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Allocate everything: block files, arenas, slots. The first use of a block calls this.

        If no slots were reserved in a tier, the rest of its budget becomes slots for the largest block that passes.
        While files on NVMe are filled, `progress` is called with the bytes that came since the last call.

        Raises:
            CapacityError: the system has less memory or less room on a drive than the budgets say.
            TransferError: a drive failed while its file was filled.
            UnsealedError: an earlier call failed.
        """
        with self._copies.lock:
            if self._sealing.is_over():
                return
            with self._sealing:
                # The files come first, since allocating them is quick and shows a drive that is too small.
                if self.files is not None:
                    self.files.allocate()
                self._reservation.reserve_default_slots([block.spec for block in self._blocks.by_key.values()])
                self.staging = self._queues.staging = self._reservation.allocate(self.device, self.clock)
                if self.files is not None:
                    self.files.fill(progress)
                if self._reader is not None:
                    self._reader.open(self.device)

    def prefetch(self, key: str, tier: Tier, span: Span | None = None, *, wait: bool = False) -> list[Transfer]:
        """Start bringing a block, or bytes [start, stop) of it, to a tier. Bytes that are there are not moved again.

        This is a hint: nobody holds the bytes until they are leased. From NVMe to the GPU they pass through slots in
        RAM, span by span; with `IoOptions.gpu_direct` they go past RAM.

        Args:
            key: a registered block.
            tier: gpu or ram.
            span: a range of bytes; the whole block if not given.
            wait: block until there are slots, instead of raising.

        Returns:
            The transfers after which the bytes are there; none if they are there.

        Raises:
            CapacityError: every slot of the tier is leased, dirty or being written.
            DirtyBlockError: the gpu has newer bytes; write them back first.
        """
        self.seal()
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = self._copies.copy_for(block, tier, span, wait=wait)
            # Nobody has a right to these bytes yet, so they give way if others need the slot.
            copy.is_ahead = not copy.num_leases
            self._fills.bring(copy, span, wait=wait)
            return [transfer for transfer in copy.arriving(span) if not transfer.done()]

    def lease(
        self, key: str, tier: Tier, span: Span | None = None, *, fresh: bool = False, wait: bool = False
    ) -> Lease:
        """Bring a block, or bytes [start, stop) of it, to a tier, and give the right to use them there.

        Args:
            key: a registered block.
            tier: gpu or ram.
            span: a range of bytes; the whole block if not given.
            fresh: the caller overwrites every byte, so nothing is read.
            wait: block until there are slots, instead of raising.

        Raises:
            CapacityError: every slot of the tier is leased, dirty or being written.
            DirtyBlockError: the gpu has newer bytes; write them back first.
            TransferError, IntegrityError: the bytes could not be brought. They are whole where they were.
        """
        self.seal()
        return self._leases.take(key, tier, span, fresh=fresh, wait=wait)

    def mark_dirty(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Note that the bytes under a lease were changed. Copies of them in other tiers are stale, and are dropped.

        Raises:
            BlockNotFoundError: the bytes are not there.
            LeaseHeldError: such a copy is leased.
        """
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = block.find(tier, span)
            others = [other for other in block.copies if other.tier is not tier and other.slot is not None]
            self._copies.drop_stale(others, span)

            # Bytes at home are never dirty. A scratch block has no home: its bytes on the gpu may go to ram, and stay.
            home = block.spec.home
            if home is not tier and (home is not None or tier is Tier.GPU):
                copy.dirty(span)

    def write_back(self, key: str, tier: Tier, span: Span | None = None, *, wait: bool = False) -> Transfer | None:
        """Start moving a span with dirty bytes one step towards home; returns None if none of its bytes are dirty.

        From the gpu, bytes at home on NVMe go to a slot in ram, where they are dirty then. A scratch block goes there
        too. If the move fails, the copy stays and is dirty. Write it back again once the cause is gone.

        Raises:
            BlockNotFoundError: the bytes are not there.
            CapacityError: no slot for the step in between, and not `wait`.
        """
        with self._copies.lock, self.consistency.call:
            block, span = self._blocks.span(key, span)
            copy = block.find(tier, span)
            return self._write_backs.begin(copy, span, wait=wait)

    def evict(self, key: str, tier: Tier, span: Span | None = None) -> None:
        """Drop the copy of exactly this span, if there is one.

        Nothing waits: the slot is reused once the moves from it have ended, and a copy from which state is being
        written stays until that went well.

        Raises:
            LeaseHeldError: it is leased.
            DirtyBlockError: it is dirty, and no write-back was started.
            TransferError: its write-back failed. It is still there, and dirty.
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
        """Drop all copies of a block in slots of a tier, as `evict` does, but dirty ones too."""
        with self._copies.lock, self.consistency.call:
            for copy in self._blocks.find(key).on(tier):
                if copy.slot is not None:
                    self._copies.discard(copy)

    def wake(self) -> None:
        """Let everyone who waits for a slot look again. They fail if something broke off."""
        with self._copies.lock:
            self._copies.wake()

    def reset(self) -> None:
        """Wait for all moves after something broke off, and forget all leases, slots and dirty bytes.

        The caller overwrites all blocks then. Leases from before end without effect. Threads that wait for slots fail.
        """
        # The state is torn before the wake, so that a thread that waits for a slot fails, and takes none.
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
        """Wait for the write-backs of a block. The bytes that they wrote are clean from then on.

        Raises:
            TransferError: one failed. The copy is still there, and dirty.
        """
        with self._copies.lock:
            block = self._blocks.find(key)
            write_backs = block.write_backs()

        # Moves may take long, so this waits without the lock, and then asks the copies anew which bytes are home.
        for transfer in write_backs:
            transfer.wait()
        with self._copies.lock, self.consistency.call:
            for copy in list(block.copies):
                copy.settle()
                if copy.is_leaving:
                    self._copies.evict(copy)

    def push(self, key: str, tensor: torch.Tensor, start: int = 0) -> Transfer:
        """Start moving a contiguous tensor from the gpu device to a block in ram or on NVMe; see `Outside.push`."""
        with self._copies.lock, self.consistency.call:
            return self._outside.push(key, tensor, start)

    def pull(self, key: str, tensor: torch.Tensor, start: int = 0) -> Transfer:
        """Start moving what `push` took back into a contiguous tensor on the gpu device; see `Outside.pull`."""
        with self._copies.lock, self.consistency.call:
            return self._outside.pull(key, tensor, start)

    def carry(self, key: str, target: torch.Tensor, source: torch.Tensor, *, to_gpu: bool) -> Transfer:
        """Start copying state between RAM and the caller's own memory on the gpu device; see `TierQueues.carry`."""
        with self._copies.lock, self.consistency.call:
            return self._queues.carry(key, target, source, to_gpu=to_gpu)

    def copy_out(self, key: str, span: Span, target: torch.Tensor) -> Transfer:
        """Start copying bytes from home, on the gpu or on NVMe, to RAM outside of the store; see `Outside.copy_out`."""
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
        """Return, per tier, the spans of a block that are there now and as new as any."""
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
        """How reads from NVMe past RAM really went so far, once the store is sealed; None if there are none."""
        return self._reader.path() if self._reader is not None else None

    def close(self) -> None:
        """Finish all moves, remove the files unless they are kept, and free the memory. In a forked child: nothing."""
        self._disown()
        if not self._copies.owner.is_here:
            return
        with ExitStack() as closing:  # the last one first, and the others too if that fails
            closing.callback(self._reservation.close)
            closing.callback(self.loan.close)
            for opened in [each for each in (self.files, self._reader) if each is not None]:
                closing.callback(opened.close)
            # What was submitted starts first. The files wait for what was started, whose threads touch the memory.
            closing.callback(self._queues.close)
