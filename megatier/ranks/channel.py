"""Collectives for Python objects and small tensors between the ranks of a run, by a process group of gloo.

A process that trains alone has a `SingleRank` instead. It has the same methods, so callers need not ask which one they
have. One thread of each rank uses a channel at a time.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from megatier.errors import MegatierError
from megatier.ranks.peer_monitor import TICK_S, PeerMonitor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")

TICK = timedelta(seconds=TICK_S)
PIECE_BYTES = 64 << 20
"""Bytes that the first rank sends at once."""


class Channel:
    """A channel between the ranks. Every rank has to call the same methods in the same order."""

    def __init__(self, rank: int, size: int, process_group: ProcessGroup, peers: PeerMonitor) -> None:
        """Note the place of this process among the ranks.

        Args:
            rank: its number.
            size: the number of ranks.
            process_group: a group of gloo, for this channel alone.
            peers: knows whether another rank has failed.
        """
        self.rank = rank
        """The number of this rank, from 0."""
        self.size = size
        """The number of ranks."""
        self._process_group = process_group
        self._peers = peers

    def all_gather_object(self, value: T) -> list[T]:
        """Return the objects of all ranks, in the order of the ranks.

        Raises:
            PeerError: a rank has failed. Then this raises on every rank that calls it.
        """
        pickled = bytearray(pickle.dumps(value))
        pickled_bytes = torch.frombuffer(pickled, dtype=torch.uint8)
        own_size = torch.tensor([pickled_bytes.numel()], dtype=torch.int64, device="cpu")
        sizes = self._all_gather(own_size).tolist()

        # A collective takes tensors of one size.
        padding = max(sizes) - pickled_bytes.numel()
        padded = torch.nn.functional.pad(pickled_bytes, (0, padding))
        rows = self._all_gather(padded).view(self.size, -1)

        values: list[T] = []
        for row, size in zip(rows, sizes, strict=True):
            content = row[:size].numpy().tobytes()
            values.append(pickle.loads(content))
        return values

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return any(self.all_gather_object(flag))

    def _all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, which have one size, end to end in the order of the ranks."""
        # A rank that has left a collective early must begin no other. Gloo would take its bytes for those of the
        # earlier one, and it ends processes that receive more bytes than they expect.
        self._peers.check()
        whole = shard.new_empty(self.size * shard.numel())
        work = all_gather_into(whole, shard, group=self._process_group, async_op=True)
        self.finish(work, self._peers.check)
        return whole

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone, and return its result, or raise its error, on all ranks.

        Rank 0 gets the object itself, the others a copy. No rank returns before all have called this.
        """
        # An error is told like a result: the others wait for one of the two. In a tuple, because None may be a result.
        outcome: tuple[T] | Exception | None = None
        pickled = io.BytesIO()
        if self.rank == 0:
            try:
                outcome = (make(),)
                pickle.dump(outcome, pickled)
            except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
                outcome = self._error_for_peers(error)
                pickled = io.BytesIO(pickle.dumps(outcome))

        content = self._broadcast_bytes(pickled.getbuffer())
        result: tuple[T] | Exception = pickle.loads(content) if outcome is None else outcome
        if isinstance(result, Exception):
            raise result
        return result[0]

    def _broadcast_bytes(self, sent: memoryview) -> memoryview:
        """Return the bytes of the first rank. Images may be many, so no rank holds them more than once.

        Args:
            sent: what the first rank has; empty on all others.
        """
        import torch.distributed as dist

        size = torch.tensor([sent.nbytes], dtype=torch.int64, device="cpu")
        num_bytes = int(self._all_gather(size)[0])
        content = sent if self.rank == 0 else memoryview(bytearray(num_bytes))

        # In pieces, so that even a slow network ends each of them soon.
        for piece in torch.frombuffer(content, dtype=torch.uint8).split(PIECE_BYTES):
            # For the reason that `_all_gather` has.
            self._peers.check()
            work = dist.broadcast(piece, 0, group=self._process_group, async_op=True)
            self.finish(work, self._peers.check)
        return content

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run the block on all ranks. If it fails on one, all raise the error of the lowest rank that failed.

        Code in the block must not wait for another rank, which may have failed there.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised below, when the others know of it
            error = raised

        # Ranks that did not fail come here too, because the others wait for their answer.
        own_error = None if error is None else self._error_for_peers(error)
        errors = [each for each in self.all_gather_object(own_error) if each is not None]
        if errors:
            raise errors[0] from error

    @contextlib.contextmanager
    def ending_run_on_error(self) -> Iterator[None]:
        """Run a block in which ranks wait for each other. An error of one ends the run on all."""
        try:
            yield
        except Exception as error:
            # The others learn of it at once, because they may be waiting for this rank in the block.
            self._peers.fail(error)
            raise

    def _error_for_peers(self, error: Exception) -> Exception:
        """Return the error that other ranks raise for an error of this one."""
        # Errors of megatier and of the system can be pickled, and mean the same on any rank. Of all other errors only
        # the text is sent.
        if isinstance(error, MegatierError | OSError):
            return error
        return MegatierError(f"rank {self.rank} failed: {error!r}")

    def all_to_all_floats(
        self, sent: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """Send numbers to every rank, and return those that all ranks send to this one, in the order of the ranks.

        Args:
            sent: fp32 [sum of input_splits], on the CPU: the numbers for each rank, in the order of the ranks.
            input_splits: how many numbers go to each rank.
            output_splits: how many numbers come from each rank.
        """
        import torch.distributed as dist

        # A rank that has left a collective begins no other; see `_all_gather`.
        self._peers.check()
        received = torch.empty(sum(output_splits), dtype=torch.float32, device="cpu")
        work = dist.all_to_all_single(
            received,
            sent,
            list(output_splits),
            list(input_splits),
            group=self._process_group,
            async_op=True,
        )
        self.finish(work, self._peers.check)
        return received

    def finish(self, work: Work | None, check: Callable[[float], None]) -> None:
        """Wait until a collective of gloo has ended. None stands for one of NCCL, which the stream orders.

        Raises:
            PeerError: it failed, or another rank has failed.
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


class SingleRank:
    """A process that trains alone. It has the methods of `Ranks` that callers of both use."""

    rank = 0
    size = 1
    local_size = 1

    def all_gather_object(self, value: T) -> list[T]:
        """Return the object of this process."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Return the flag of this process."""
        return flag

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return the result of `make`."""
        return make()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run the block."""
        yield

    @contextlib.contextmanager
    def ending_run_on_error(self) -> Iterator[None]:
        """Run the block."""
        yield

    def all_to_all_floats(
        self, sent: torch.Tensor, input_splits: Sequence[int], output_splits: Sequence[int]
    ) -> torch.Tensor:
        """Return what this process sends to itself."""
        return sent

    def lend_memory(self) -> None:
        """Do nothing, because no other GPU reads this one's memory."""

    def own_groups(self, num_groups: int) -> range:
        """Return the numbers of all groups of a step."""
        return range(num_groups)


def all_gather_into(whole: torch.Tensor, shard: torch.Tensor, *, group: ProcessGroup, async_op: bool) -> Work | None:
    """Begin torch's all-gather of equal shards into `whole`."""
    import torch.distributed as dist

    # torch 2.13 has a new name for it, and warns about the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, shard, group=group, async_op=async_op)
    return work
