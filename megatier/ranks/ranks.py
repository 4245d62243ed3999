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
"""Begins to watch the other ranks; takes what ends the collectives under way when one of them fails."""


class Ranks(Channel):
    """The ranks of a run as one of them sees them."""

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        groups: tuple[ProcessGroup, ProcessGroup, ProcessGroup],
        watched: Watch,
    ) -> None:
        """Note the place of this process among the ranks, and begin to watch the others.

        Args:
            rank: its number.
            size: the number of ranks.
            local_rank: its number among those of its host.
            local_size: the number of ranks of this host.
            groups: one of gloo for each thread that talks: the one that trains, and the queue `checkpoint`; and the one
                by which weights and gradients go.
            watched: begins to watch.
        """
        import torch.distributed as dist

        self._groups = groups
        own, beside, self._data = groups
        self._is_nccl = dist.get_backend(self._data) == "nccl"
        self._is_given_up = False
        self._abort_once = threading.Lock()
        """Taken, and never released, by the thread that aborts the group of NCCL."""
        self._backend: CollectiveBackend | None = None
        """What moves weights and gradients; None: the process group does."""
        self.transport = Transport.KERNELS if self._is_nccl else Transport.GLOO
        """What moves weights and gradients between ranks."""
        self.transport_reason = ""
        """Why nothing better does; empty if there is nothing to say."""
        self.shared_bytes = 0
        """Bytes of the GPU memory that other GPUs may read. torch's pool does not count them."""
        super().__init__(rank, size, own, watched(self._stop))
        self.beside = Channel(rank, size, beside, self._peers)
        """For the queue `checkpoint`, which works beside the thread that trains."""
        self.local_rank = local_rank
        """The number of this rank among those of its host."""
        self.local_size = local_size
        """The number of ranks of this host."""
        self.moved_bytes: Counter[str] = Counter()
        """The bytes that came from other ranks since the start, under the name `ranks`."""

    # ------------------------------------------------------------------ data

    def allocate_gpu_tier(self, num_bytes: int, buffer_bytes: int, *, prefers: Transport | None = None) -> torch.Tensor:
        """Allocate the GPU tier, so that the other GPUs of the host can read it by copy engines, if they can at all.

        Every rank has to call it, for as many bytes. What is gathered and scattered from now on has to lie in it.

        Args:
            num_bytes: of the GPU tier.
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
            with self.failing_together():  # one that has no room must not leave the others waiting in what follows
                memory = allocate(num_bytes)
            self.shared_bytes = num_bytes
            reason = self._pull_from(memory)
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")

        if reason is not None:
            self.share_ram(buffer_bytes, prefers=prefers, why=reason)
        return memory

    def share_ram(self, buffer_bytes: int, *, prefers: Transport | None = None, why: str = "") -> None:
        """Let weights and gradients go through RAM that the ranks of the host share, if they can share any.

        Every rank has to call it.

        Args:
            buffer_bytes: the size of a buffer; the least of all ranks counts.
            prefers: the way that was faster where it was measured; None: nobody did.
            why: why they do not go between GPUs.
        """
        self.transport = Transport.KERNELS if self._is_nccl else Transport.GLOO
        reason = self._apart() or why_not_shared(is_on_gpu=self._is_nccl)
        if prefers is self.transport:
            verb = "were" if self._is_nccl else "was"
            reason = f"{prefers} {verb} measured to be faster than shared RAM"

        # Ranks agree first, because all of them or none have to go on.
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

        # Copies between GPUs may have failed for the same reason.
        reasons = [each for each in (why, reason) if each]
        self.transport_reason = "; ".join(dict.fromkeys(reasons))

    def _pull_from(self, memory: torch.Tensor) -> str | None:
        """Share this rank's memory with the other GPUs; returns why that cannot be."""
        peer_copies: PeerCopies | None = None
        try:
            peer_copies = open_peer_copies(self, self._group, memory, self._check_data)
            reason = None if peer_copies.work() else "a trial of copies between GPUs failed"
        except PeerError:
            raise
        except (MegatierError, OSError, RuntimeError) as error:
            # A container may forbid what this needs, and there are other ways.
            reason = _first_line(error)

        # One rank that cannot pull is enough: the others would wait for its numbers.
        reason = self._first_of(reason)
        if reason is None:
            self._backend = peer_copies
            self.transport = Transport.COPIES
            self.transport_reason = ""
        elif peer_copies is not None:
            peer_copies.release()
            torch.cuda.synchronize()
            peer_copies.close()
        return reason

    def _apart(self) -> str | None:
        """Return why ranks are too far apart to share memory; None if they are not."""
        # Containers of one machine may count as one host to torchrun, and share no memory.
        if self.local_size < self.size:
            return "several hosts"
        return None if self._peers.is_one_machine else "several hosts or containers"

    def _first_of(self, reason: str | None) -> str | None:
        """Return the first reason of all ranks; None if none has any."""
        return next((each for each in self.all_gather_object(reason) if each is not None), None)

    def lend_memory(self) -> None:
        """Let go of the memory of the other GPUs, if this rank reads it: all ranks lend theirs, and nobody reads any.

        What is gathered until `allocate_gpu_tier` is called again may lie anywhere.
        """
        if num_bytes := self.shared_bytes:
            self.drop_memory()
            change_limit(num_bytes)

    def drop_memory(self) -> None:
        """Let go of the memory, which nobody reads any more."""
        self.shared_bytes = 0
        # First nobody finds it any more: the thread that watches the other ranks may come to `_stop` at any time.
        backend = self._backend
        self._backend = None
        if backend is not None:
            backend.close()

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard. Both lie on the device that computes.
        """
        assert whole.numel() == self.size * own.numel()
        self._check_data()
        if self._backend is not None:
            self._backend.all_gather(whole, own)
        else:
            work = all_gather_into(whole, own, group=self._data, async_op=not self._is_nccl)
            self.finish(work, self._check_data)

        received_bytes = whole.numel() - own.numel()
        self.moved_bytes["ranks"] += received_bytes

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
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
        """End a gather or scatter that is under way, because this rank comes to none of those that follow."""
        self._is_given_up = True
        self._stop()

    def _stop(self) -> None:
        """End what is under way on a GPU. A thread that waits for gloo looks by itself."""
        backend = self._backend
        if backend is not None:
            backend.release()
        # The thread that trains and the one that watches the others both come here, again and again. A group is aborted
        # once.
        elif self._is_nccl and self._abort_once.acquire(blocking=False):
            self._data.abort()

    def _check_data(self, waited_s: float = 0.0) -> None:
        """Refuse to gather or scatter, or to wait for it, if it will not end; see `PeerMonitor.check`.

        Raises:
            PeerError: a rank has failed.
            StepAbandonedError: this rank has given up.
        """
        self._peers.check(waited_s)
        if self._is_given_up:
            raise StepAbandonedError("the step was abandoned, and the other ranks are in it still")

    # ------------------------------------------------------------------ the thread that trains

    def all_gather_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, end to end in the order of the ranks. They may differ in length."""
        # By the CPU, where the host needs them anyway to add them exactly.
        return torch.cat(self.all_gather_object(values.cpu()))

    def own_groups(self, num_groups: int) -> range:
        """Return the groups of a step that this rank computes: in round j, rank r has group j * size + r.

        Raises:
            ConfigError: the ranks cannot share them equally.
        """
        # By turns, so that ranks scatter groups that follow each other at one time: sums depend on their order.
        check_groups(num_groups, self.size)
        return range(self.rank, num_groups, self.size)

    # ------------------------------------------------------------------ the end

    @property
    def is_here(self) -> bool:
        """Whether this process is the rank, and not a forked child of it."""
        return self._peers.is_here

    def first_error(self) -> BaseException | None:
        """Return the error that names the rank that failed first, or this rank's own if that was it; None: none has."""
        return self._peers.first_error()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, before anything is closed."""
        self._peers.fail(error)

    def leave(self) -> None:
        """End the connection to the others. Every rank has to call it."""
        import torch.distributed as dist

        # Nobody stops looking before all have come here: until then a rank may still fail.
        self._peers.leave()
        barrier = dist.barrier(group=self._group, async_op=True)
        self.finish(barrier, self._peers.check)
        self._peers.end()
        for group in self._groups:
            dist.destroy_process_group(group)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0].removesuffix(".")


def check_groups(groups: int, size: int) -> None:
    """Refuse groups of a step that so many ranks cannot share equally.

    Raises:
        ConfigError: names the numbers of ranks that can.
    """
    if groups % size:
        fitting = ", ".join(str(number) for number in range(1, groups + 1) if groups % number == 0)
        raise ConfigError(
            f"train.groups is {groups}, which {size} ranks cannot share equally. Start {fitting} of them, or set "
            f"train.groups to a multiple of {size}; that is another sum, with other last digits."
        )
