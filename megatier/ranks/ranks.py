"""The ranks of a run: processes with a GPU each that train one model, and their collectives.

Weights and gradients move as bytes by `all_gather` and `all_to_all`, in the same order on all ranks. Small things move
as Python objects by `all_gather_object` and `broadcast`. Checkpoints have a channel of their own, `beside`. Each of the
three has a process group of its own, so that none waits for another.

`Ranks.transport` says how bytes move. It is the first of these that all ranks have: copies between GPUs
(`peer_copies`), RAM that the ranks of a host share (`shared_ram`), NCCL's kernels, or gloo on CPUs.

Threads: the queue `ranks` alone calls `all_gather` and `all_to_all`, and the queue `checkpoint` alone uses `beside`.
The training thread calls everything else. In a pass that is recorded it is the thread that computes. A process that
trains alone never imports `torch.distributed`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatier.errors import ConfigError, MegatierError, PeerError, StepAbandonedError
from megatier.ranks.channel import Channel, all_gather_into
from megatier.ranks.collective_backend import CollectiveBackend
from megatier.ranks.peer_copies import PeerCopies, allocate, change_limit, open_peer_copies, why_no_peer_access
from megatier.ranks.peer_monitor import PeerMonitor
from megatier.ranks.shared_ram import open_shared_ram, why_not_shared
from megatier.tier import Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Watch = Callable[[Callable[[], None]], PeerMonitor]
"""Begins to watch the other ranks. Its argument ends the collectives under way when one of them fails."""


class Ranks(Channel):
    """The ranks of a run as one of them sees them."""

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        process_groups: tuple[ProcessGroup, ProcessGroup, ProcessGroup],
        watched: Watch,
    ) -> None:
        """Begin to watch the other ranks.

        Args:
            rank: the number of this rank.
            size: the number of ranks.
            local_rank: the number of this rank among those of its host.
            local_size: the number of ranks of this host.
            process_groups: one of gloo for the training thread, another for the queue `checkpoint`, and one of NCCL or
                gloo for weights and gradients.
            watched: begins to watch.
        """
        import torch.distributed as dist

        self._process_groups = process_groups
        objects_group, beside, self._data = process_groups
        self._is_nccl = dist.get_backend(self._data) == "nccl"
        self._is_given_up = False
        self._abort_once = threading.Lock()
        """The thread that aborts the group of NCCL takes it, and never releases it."""
        self._backend: CollectiveBackend | None = None
        """What moves weights and gradients; None: torch's process group."""
        self.transport = Transport.KERNELS if self._is_nccl else Transport.GLOO
        """What moves weights and gradients between ranks."""
        self.transport_reason = ""
        """Why no faster transport is used; empty if there is none."""
        self.shared_bytes = 0
        """Bytes of GPU memory that other GPUs may read. torch's caching allocator does not count them."""
        super().__init__(rank, size, objects_group, watched(self._stop))
        self.beside = Channel(rank, size, beside, self._peers)
        """The channel of the queue `checkpoint`, which runs beside the training thread."""
        self.local_rank = local_rank
        """The number of this rank among those of its host."""
        self.local_size = local_size
        """The number of ranks of this host."""
        self.moved_bytes: Counter[str] = Counter()
        """The bytes that have come from other ranks, under the name `ranks`."""

    # ------------------------------------------------------------------ data

    def allocate_gpu_tier(self, num_bytes: int, buffer_bytes: int, *, prefers: Transport | None = None) -> torch.Tensor:
        """Allocate the GPU tier, in memory that the other GPUs of the host can read if the machine allows it.

        Every rank has to call it with the same size. From now on `all_gather` and `all_to_all` take only tensors in it.

        Args:
            num_bytes: the size of the GPU tier.
            buffer_bytes: see `share_ram`.
            prefers: see `share_ram`.

        Returns:
            uint8 [num_bytes] on this rank's GPU, zeros.

        Raises:
            torch.OutOfMemoryError: the GPU has no room.
        """
        self.drop_memory()
        reason = self._first_of(self._apart() or why_no_peer_access(self.local_rank, self.local_size))
        if reason is None:
            with self.failing_together():  # otherwise a rank without room would leave the others waiting
                memory = allocate(num_bytes)
            self.shared_bytes = num_bytes
            reason = self._share_gpu_memory(memory)
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

        if reason is not None:
            self.share_ram(buffer_bytes, prefers=prefers, why=reason)
        return memory

    def share_ram(self, buffer_bytes: int, *, prefers: Transport | None = None, why: str = "") -> None:
        """Move weights and gradients through RAM that the ranks of the host share, if they can share any.

        Every rank has to call it.

        Args:
            buffer_bytes: the size of a buffer. The least size of all ranks counts.
            prefers: the transport that was measured to be faster; None: it was not measured.
            why: why copies between GPUs are not used.
        """
        self.transport = Transport.KERNELS if self._is_nccl else Transport.GLOO
        reason = self._apart() or why_not_shared(is_on_gpu=self._is_nccl)
        if prefers is self.transport:
            verb = "were" if self._is_nccl else "was"
            reason = f"{prefers} {verb} measured to be faster than shared RAM"

        # All ranks have to make the same choice.
        reason = self._first_of(reason)
        if reason is None:
            device = "cuda" if self._is_nccl else "cpu"
            least_bytes = min(self.all_gather_object(buffer_bytes))
            try:
                self._backend = open_shared_ram(self, least_bytes, self._check_data, device=device)
                self.transport = Transport.RAM
            except PeerError:
                raise
            except (MegatierError, OSError, RuntimeError) as error:
                reason = _first_line(error)

        # Both transports may have failed for one reason, which is told once.
        reasons = [each for each in (why, reason) if each]
        self.transport_reason = "; ".join(dict.fromkeys(reasons))

    def _share_gpu_memory(self, memory: torch.Tensor) -> str | None:
        """Share this rank's memory with the other GPUs. Return why they cannot read it; None if they can."""
        peer_copies: PeerCopies | None = None
        try:
            peer_copies = open_peer_copies(self, self._process_group, memory, self._check_data)
            reason = None if peer_copies.try_out() else "a trial of copies between GPUs failed"
        except PeerError:
            raise
        except (MegatierError, OSError, RuntimeError) as error:
            # A container may forbid it, and there are other transports.
            reason = _first_line(error)

        # If one rank cannot read, none may, because the others would wait for its signals.
        reason = self._first_of(reason)
        if reason is None:
            self._backend = peer_copies
            self.transport = Transport.COPIES
            self.transport_reason = ""
        elif peer_copies is not None:
            peer_copies.abort()
            torch.cuda.synchronize()
            peer_copies.close()
        return reason

    def _apart(self) -> str | None:
        """Return why the ranks are too far apart to share memory; None if they are not."""
        # torchrun may count containers of one machine as one host, but they share no memory.
        if self.local_size < self.size:
            return "several hosts"
        return None if self._peers.is_one_machine else "several hosts or containers"

    def _first_of(self, reason: str | None) -> str | None:
        """Return the first reason of all ranks; None if none has any."""
        return next((each for each in self.all_gather_object(reason) if each is not None), None)

    def lend_memory(self) -> None:
        """Unmap the memory of the other GPUs, while all ranks lend theirs.

        Until `allocate_gpu_tier` is called again, collectives take tensors in any memory.
        """
        if num_bytes := self.shared_bytes:
            self.drop_memory()
            change_limit(num_bytes)

    def drop_memory(self) -> None:
        """Close the backend of collectives, which no thread uses any more."""
        self.shared_bytes = 0

        # Cleared before it is closed, because the thread that watches the other ranks may call `_stop` at any time.
        backend = self._backend
        self._backend = None
        if backend is not None:
            backend.close()

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather the shards of all ranks, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            shard: uint8 [n], this rank's shard. Both are on the device that computes.
        """
        assert whole.numel() == self.size * shard.numel()
        self._check_data()
        if self._backend is not None:
            self._backend.all_gather(whole, shard)
        else:
            work = all_gather_into(whole, shard, group=self._data, async_op=not self._is_nccl)
            self.finish(work, self._check_data)

        received_bytes = whole.numel() - shard.numel()
        self.moved_bytes["ranks"] += received_bytes

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Send piece r to rank r, and receive a piece from every rank.

        Args:
            received: uint8 [size * n], overwritten: piece r comes from rank r.
            sent: uint8 [size * n]: piece r goes to rank r.
        """
        import torch.distributed as dist

        assert received.numel() == sent.numel()
        self._check_data()
        if self._backend is not None:
            self._backend.all_to_all(received, sent)
        else:
            work = dist.all_to_all_single(received, sent, group=self._data, async_op=not self._is_nccl)
            self.finish(work, self._check_data)
        own_bytes = received.numel() // self.size
        self.moved_bytes["ranks"] += received.numel() - own_bytes

    def give_up(self) -> None:
        """End a collective that is under way, because this rank does not take part in those that follow."""
        self._is_given_up = True
        self._stop()

    def _stop(self) -> None:
        """End the collectives under way on a GPU. A thread that waits for gloo calls `check` itself."""
        backend = self._backend
        if backend is not None:
            backend.abort()
        # The training thread and the thread that watches the others call this repeatedly, but a group is aborted once.
        elif self._is_nccl and self._abort_once.acquire(blocking=False):
            self._data.abort()

    def _check_data(self, waited_s: float = 0.0) -> None:
        """Refuse a collective that would not end; see `PeerMonitor.check`.

        Raises:
            PeerError: a rank has failed.
            StepAbandonedError: this rank has given up.
        """
        self._peers.check(waited_s)
        if self._is_given_up:
            raise StepAbandonedError("the step was abandoned, and the other ranks are in it still")

    # ------------------------------------------------------------------ the thread that trains

    def all_gather_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, end to end in the order of the ranks. Their lengths may differ."""
        # On the CPU, where the host needs them to add them exactly.
        return torch.cat(self.all_gather_object(values.cpu()))

    def own_groups(self, num_groups: int) -> range:
        """Return the groups of a step that this rank computes. In round j, rank r has group j * size + r.

        Raises:
            ConfigError: the ranks cannot share the groups equally.
        """
        # By turns: then a reduce-scatter has consecutive groups, which are added in order.
        check_groups(num_groups, self.size)
        return range(self.rank, num_groups, self.size)

    # ------------------------------------------------------------------ the end

    @property
    def is_here(self) -> bool:
        """Whether this process is the rank, and not a forked child of it."""
        return self._peers.is_here

    def first_error(self) -> BaseException | None:
        """Return the error of the rank that failed first, which may be this one; None if none has failed."""
        return self._peers.first_error()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, before anything is closed."""
        self._peers.fail(error)

    def leave(self) -> None:
        """Close the connection to the other ranks. Every rank has to call it."""
        import torch.distributed as dist

        # Ranks watch each other until all have come here, because one may still fail.
        self._peers.leave()
        barrier = dist.barrier(group=self._process_group, async_op=True)
        self.finish(barrier, self._peers.check)
        self._peers.end()
        for process_group in self._process_groups:
            dist.destroy_process_group(process_group)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0].removesuffix(".")


def check_groups(groups: int, size: int) -> None:
    """Refuse a number of groups that the ranks cannot share equally.

    Raises:
        ConfigError: it names the numbers of ranks that can.
    """
    if groups % size:
        fitting = ", ".join(str(number) for number in range(1, groups + 1) if groups % number == 0)
        raise ConfigError(
            f"train.groups is {groups}, which {size} ranks cannot share equally. Start {fitting} of them, or set "
            f"train.groups to a multiple of {size}; that is another sum, with other last digits."
        )
