"""Ranks: the processes of one run, each with a GPU of its own, and what they tell and send each other.

This is the only file that imports `torch.distributed`, and one process alone never does. Weights and gradients go as
bytes, unchanged: `gather` and `scatter`, in an order that is the same on all ranks. Everything small goes as Python
objects: `agree`. What a checkpoint needs of other ranks goes by a channel of its own, `beside`. All three have process
groups of their own, so none waits for another.

Threads: one thread at a time gathers and scatters (the lane `ranks`), and the lane `checkpoint` uses its channel. The
thread that trains calls everything else; in a pass that is recorded, it is the thread that computes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from megatier.errors import ConfigError, MegatierError, PeerError, StepAbandonedError
from megatier.peers import TICK_S, Member, Peers, comes_of_peers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

T = TypeVar("T")
Watch = Callable[[Callable[[], None]], Peers]
"""Begins to watch the other ranks; takes what ends the collectives under way when one of them fails."""

TIMEOUT = timedelta(days=1)
"""How long a collective waits for a late rank. A rank that hangs is found by other means, and sooner (`peers`)."""
STORE_TIMEOUT = timedelta(minutes=1)
"""How long the first look of a rank waits for the first sign of life of all others."""
TICK = timedelta(seconds=TICK_S)


class Channel:
    """What the ranks tell each other, by a process group that one thread of each rank uses at a time.

    Every rank has to call the same, in the same order.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup, peers: Peers) -> None:
        """Take what is known of this process.

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

    def agree(self, record: T | None) -> list[T]:
        """Return the records of all ranks, in the order of the ranks, without those that are None.

        Raises:
            PeerError: a rank has failed; so do all that call this.
        """
        own = torch.frombuffer(bytearray(pickle.dumps(record)), dtype=torch.uint8)
        sizes = self._collect(torch.tensor([own.numel()])).tolist()
        padded = torch.nn.functional.pad(own, (0, max(sizes) - own.numel()))
        rows = self._collect(padded).view(self.size, -1)
        records = [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        return [found for found in records if found is not None]

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return any(self.agree(flag))

    def _collect(self, own: torch.Tensor) -> torch.Tensor:
        """Return small tensors of one size, end to end in the order of the ranks."""
        whole = own.new_empty(self.size * own.numel())
        self._finish(_gather(whole, own, group=self._group, async_op=True), self._peers.check)
        return whole

    def first(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes, or raise its error. The others do not make any."""
        made: tuple[T] | Exception | None = None
        if self.rank == 0:
            try:
                made = (make(),)
            except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
                made = self._told(error)

        told: list[tuple[T] | Exception] = self.agree(made)
        if isinstance(told[0], Exception):
            raise told[0]
        return told[0][0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do inside fails on all of them if it fails on one, with the error of the first that failed.

        Nothing inside may wait for a rank that has failed there.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:  # noqa: BLE001 - raised below, when the others know of it
            error = found

        if errors := self.agree(None if error is None else self._told(error)):
            raise errors[0] from error

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Inside, ranks wait for each other, so an error of one ends the run on all."""
        try:
            yield
        except Exception as error:
            self._peers.fail(error)
            raise

    def _told(self, error: Exception) -> Exception:
        """Return an error as other ranks raise it. Of one that is not ours they get the words."""
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

        received = torch.empty(sum(taken))
        work = dist.all_to_all_single(received, sent, list(taken), list(given), group=self._group, async_op=True)
        self._finish(work, self._peers.check)
        return received

    def _finish(self, work: Work | None, check: Callable[[float], None]) -> None:
        """Wait until a collective of gloo has ended; NCCL's are ordered by the stream.

        Raises:
            PeerError: it will not end, or did not end well.
        """
        if work is None:
            return
        waited_s = 0.0
        while not work.is_completed():
            check(waited_s)
            waited_s = TICK_S

            # It raises when the time is over.
            with contextlib.suppress(RuntimeError):
                work.wait(TICK)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._peers.explain(error) from error


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
        """Take what is known of this process, a group for each thread that talks, and what begins to watch others."""
        import torch.distributed as dist

        own, beside, self._data = groups
        self._is_nccl = dist.get_backend(self._data) == "nccl"
        self._is_given_up = False
        super().__init__(rank, size, own, watched(self._stop))
        self.beside = Channel(rank, size, beside, self._peers)
        """For the lane `checkpoint`, which works beside the thread that trains."""
        self.local_rank = local_rank
        """The number of this rank among those of its host."""
        self.local_size = local_size
        """The number of ranks of this host."""
        self.moved_bytes: Counter[str] = Counter()
        """The bytes that came from other ranks since the start, under the name `ranks`."""

    # ------------------------------------------------------------------ data

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard. Both lie on the device that computes.
        """
        assert whole.numel() == self.size * own.numel()
        self._check_data()
        self._finish(_gather(whole, own, group=self._data, async_op=not self._is_nccl), self._check_data)
        self.moved_bytes["ranks"] += whole.numel() - own.numel()

    def scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
            sent: uint8 [size * n]: piece r goes to rank r.
        """
        import torch.distributed as dist

        assert received.numel() == sent.numel()
        self._check_data()
        work = dist.all_to_all_single(received, sent, group=self._data, async_op=not self._is_nccl)
        self._finish(work, self._check_data)
        self.moved_bytes["ranks"] += received.numel() - received.numel() // self.size

    def give_up(self) -> None:
        """End a gather or scatter that is under way, because this rank comes to none of those that follow."""
        self._is_given_up = True
        self._stop()

    def _stop(self) -> None:
        """Make NCCL end what is under way. Whoever waits for gloo looks for itself."""
        if self._is_nccl:
            self._data.abort()

    def _check_data(self, waited_s: float = 0.0) -> None:
        """Refuse to gather or scatter, or to wait for it, if it will not end; see `Peers.check`.

        Raises:
            PeerError: a rank has failed.
            StepAbandonedError: this rank has given up.
        """
        self._peers.check(waited_s)
        if self._is_given_up:
            raise StepAbandonedError("the step was abandoned, and the other ranks are in it still")

    # ------------------------------------------------------------------ the thread that trains

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, end to end in the order of the ranks. They may differ in length."""
        return torch.cat(self.agree(values.cpu()))

    def groups_of(self, groups: int) -> range:
        """The groups of a step that this rank computes: in round j, rank r has group j * size + r.

        Raises:
            ConfigError: the ranks cannot share them equally.
        """
        check_groups(groups, self.size)
        return range(self.rank, groups, self.size)

    # ------------------------------------------------------------------ the end

    def failed(self) -> PeerError | None:
        """The error that names the rank that failed first; None if none has."""
        return self._peers.failed()

    def first_error(self) -> BaseException | None:
        """The same, or this rank's own error if it was the first."""
        return self._peers.first_error()

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, before anything is closed."""
        self._peers.fail(error)

    def leave(self) -> None:
        """End the connection to the others. Every rank has to call it."""
        import torch.distributed as dist

        self._peers.leave()
        self._finish(dist.barrier(async_op=True), self._peers.check)
        self._peers.end()
        dist.destroy_process_group()


class Alone:
    """A process without others, which is asked the same and answers at once."""

    rank = 0
    size = 1
    local_size = 1

    def agree(self, record: T) -> list[T]:
        """Return the only record."""
        return [record]

    def any(self, flag: bool) -> bool:
        """Return the only flag."""
        return flag

    def first(self, make: Callable[[], T]) -> T:
        """Return what this process makes."""
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
        """Return what this process has for itself."""
        return sent


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


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks | None]:
    """The ranks that `torchrun` started, while they run together; None in a process that was started alone.

    Args:
        device: what computes, "cuda" or "cpu". A rank has the GPU of its number on its host.

    Raises:
        PeerError: instead of all that came of the failure of another rank. An error of this rank's own is raised as it
            is, and the others are told.
    """
    ranks = _join(device)
    if ranks is None:
        yield None
        return

    try:
        yield ranks
        ranks.leave()
    except BaseException as error:
        ranks.fail(error)
        first = ranks.first_error() if comes_of_peers(error) else None
        if first is None:
            raise
        raise first from error


def _join(device: str) -> Ranks | None:
    """Join the ranks that `torchrun` started, if it did."""
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
        return None

    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if device == "cuda":
        torch.cuda.set_device(local_rank)

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    beside = dist.new_group(backend="gloo", timeout=TIMEOUT)
    data = dist.new_group(backend="nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    groups = dist.group.WORLD, beside, data

    # A store outlasts a run that is started again, so each has names of its own there.
    told: list[tuple[Member, str] | None] = [None] * size
    dist.all_gather_object(told, (Member.here(), secrets.token_hex(8)))
    known = [found for found in told if found is not None]
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"megatier {known[0][1]}", TCPStore(*address, timeout=STORE_TIMEOUT))
    watched = partial(Peers, store, rank, [member for member, _ in known], groups)
    return Ranks(rank, size, local_rank, local_size, groups, watched)


def _gather(whole: torch.Tensor, own: torch.Tensor, *, group: ProcessGroup, async_op: bool) -> Work | None:
    """Begin to bring the tensors of all ranks together."""
    import torch.distributed as dist

    # torch 2.13 has a new name for it, and warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, own, group=group, async_op=async_op)
    return work
