"""Passes Python objects and small tensors between the ranks of a run.

A process that is alone has `Alone` instead, which is asked the same and answers at once.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from megatier.errors import MegatierError
from megatier.ranks.peers import TICK_S, Peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

TICK = timedelta(seconds=TICK_S)


class Channel:
    """A channel between the ranks, by a process group that one thread of each rank uses at a time.

    Every rank has to call the same, in the same order.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup, peers: Peers) -> None:
        """Note the place of this process among the ranks.

        Args:
            rank: its number.
            size: the number of ranks.
            group: a group of gloo, for this channel alone.
            peers: knows whether another rank has failed.
        """
        self.rank = rank
        """The number of this rank, from 0."""
        self.size = size
        """The number of ranks."""
        self._group = group
        self._peers = peers

    def gather_objects(self, record: T | None) -> list[T]:
        """Return the records of all ranks, in the order of the ranks, without those that are None.

        Raises:
            PeerError: a rank has failed; so do all that call this.
        """
        pickled = bytearray(pickle.dumps(record))
        own = torch.frombuffer(pickled, dtype=torch.uint8)
        own_size = torch.tensor([own.numel()], dtype=torch.int64, device="cpu")
        sizes = self._collect(own_size).tolist()

        # A collective takes tensors of one size.
        padding = max(sizes) - own.numel()
        padded = torch.nn.functional.pad(own, (0, padding))
        rows = self._collect(padded).view(self.size, -1)

        records: list[T] = []
        for row, size in zip(rows, sizes, strict=True):
            content = row[:size].numpy().tobytes()
            of_rank: T | None = pickle.loads(content)
            if of_rank is not None:
                records.append(of_rank)
        return records

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return any(self.gather_objects(flag))

    def _collect(self, own: torch.Tensor) -> torch.Tensor:
        """Return small tensors of one size, end to end in the order of the ranks."""
        # A rank that has left a collective must begin no other: gloo takes its bytes for those of the one before, and
        # ends the processes that find them too long.
        self._peers.check()
        whole = own.new_empty(self.size * own.numel())
        work = gather_into(whole, own, group=self._group, async_op=True)
        self.finish(work, self._peers.check)
        return whole

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the object that the first rank makes, or raise its error. The others do not make any."""
        # An error is told like a result: the others wait for one of the two. In a tuple, since None may be a result.
        made: tuple[T] | Exception | None = None
        if self.rank == 0:
            try:
                made = (make(),)
            except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
                made = self._told(error)

        told: list[tuple[T] | Exception] = self.gather_objects(made)
        result = told[0]
        if isinstance(result, Exception):
            raise result
        return result[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Surround what all ranks do: if it fails on one, it fails on all, with the error of the first that failed.

        Nothing inside may wait for a rank that has failed there.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:  # noqa: BLE001 - raised below, when the others know of it
            error = found

        # Also those that did not fail come here, or the others would wait for them.
        told = None if error is None else self._told(error)
        errors = self.gather_objects(told)
        if errors:
            raise errors[0] from error

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Surround a wait of ranks for each other: an error of one ends the run on all."""
        try:
            yield
        except Exception as error:
            # Told at once: the others may be waiting for what this rank will not say any more.
            self._peers.fail(error)
            raise

    def _told(self, error: Exception) -> Exception:
        """Return an error as other ranks raise it. Of one that is not ours they get the words."""
        # Errors of megatier and of the system can be pickled, and mean the same anywhere. Of others nobody knows.
        if isinstance(error, MegatierError | OSError):
            return error
        return MegatierError(f"rank {self.rank} failed: {error!r}")

    def exchange(self, sent: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Give every rank some numbers, and return those that all ranks have for this one, in the order of the ranks.

        Args:
            sent: fp32 [sum of given], on the CPU: what each rank is given, in their order.
            given: how many numbers each rank is given.
            taken: how many each rank has for this one.
        """
        import torch.distributed as dist

        # For the reason that `_collect` has.
        self._peers.check()
        received = torch.empty(sum(taken), dtype=torch.float32, device="cpu")
        work = dist.all_to_all_single(
            received,
            sent,
            list(taken),
            list(given),
            group=self._group,
            async_op=True,
        )
        self.finish(work, self._peers.check)
        return received

    def finish(self, work: Work | None, check: Callable[[float], None]) -> None:
        """Wait until a collective of gloo has ended; NCCL's are ordered by the stream.

        Raises:
            PeerError: it will not end, or did not end well.
        """
        if work is None:
            return

        # In slices, because a wait in C++ hears neither a signal nor that a rank has failed.
        waited_s = 0.0
        while not work.is_completed():
            check(waited_s)
            waited_s = TICK_S

            # `wait` raises when the time is over.
            with contextlib.suppress(RuntimeError):
                work.wait(TICK)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._peers.explain(error) from error


class Alone:
    """A process without others, which is asked the same and answers at once."""

    rank = 0
    size = 1
    local_size = 1

    def gather_objects(self, record: T) -> list[T]:
        """Return the only record."""
        return [record]

    def any(self, flag: bool) -> bool:
        """Return the only flag."""
        return flag

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the object that this process makes."""
        return make()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do what is inside, which fails for this process alone."""
        yield

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Do what is inside, with nobody to wait for."""
        yield

    def exchange(self, sent: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Return the bytes that this process has for itself."""
        return sent

    def lend_memory(self) -> None:
        """Let go of nothing: there is no other GPU."""

    def groups_of(self, groups: int) -> range:
        """Return all groups of a step."""
        return range(groups)


def gather_into(whole: torch.Tensor, own: torch.Tensor, *, group: ProcessGroup, async_op: bool) -> Work | None:
    """Begin to bring the tensors of all ranks together."""
    import torch.distributed as dist

    # torch 2.13 has a new name for it, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, own, group=group, async_op=async_op)
    return work
