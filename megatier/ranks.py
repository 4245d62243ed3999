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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from megatier.errors import ConfigError, MegatierError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TIMEOUT = timedelta(days=1)
"""How long a collective waits for a late rank. A rank that hangs is found by other means, and sooner."""


class Channel:
    """What the ranks tell each other, by a process group that one thread of each rank uses at a time.

    Every rank has to call the same, in the same order.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup | None) -> None:
        """Take what is known of this process.

        Args:
            rank: its number.
            size: the number of ranks.
            group: a group of its own for this channel; None: the one that torch makes at the start.
        """
        self.rank = rank
        """The number of this rank, from 0."""
        self.size = size
        """The number of ranks."""
        self._group = group

    def agree(self, record: T | None) -> list[T]:
        """Return the records of all ranks, in the order of the ranks, without those that are None."""
        import torch.distributed as dist

        records: list[T | None] = [None] * self.size
        dist.all_gather_object(records, record, group=self._group)
        return [found for found in records if found is not None]

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
        dist.all_to_all_single(received, sent, list(taken), list(given), group=self._group)
        return received


class Ranks(Channel):
    """The ranks of a run as one of them sees them."""

    def __init__(
        self, rank: int, size: int, local_rank: int, local_size: int, data: ProcessGroup, beside: ProcessGroup
    ) -> None:
        """Take what is known of this process; see `join`."""
        super().__init__(rank, size, None)
        self.beside = Channel(rank, size, beside)
        """For the lane `checkpoint`, which works beside the thread that trains."""
        self.local_rank = local_rank
        """The number of this rank among those of its host."""
        self.local_size = local_size
        """The number of ranks of this host."""
        self.moved_bytes: Counter[str] = Counter()
        """The bytes that came from other ranks since the start, under the name `ranks`."""
        self._data = data

    # ------------------------------------------------------------------ data

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Bring the shards of all ranks together, in the order of the ranks.

        Args:
            whole: uint8 [size * n], overwritten.
            own: uint8 [n], this rank's shard. Both lie on the device that computes.
        """
        import torch.distributed as dist

        # torch 2.13 has a new name for it, and warns of the old one.
        assert whole.numel() == self.size * own.numel()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, own, group=self._data)
        self.moved_bytes["ranks"] += whole.numel() - own.numel()

    def scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Give every rank its shard of this rank's bytes, and take this rank's shard of the bytes of all.

        Args:
            received: uint8 [size * n], overwritten: piece r is what rank r sent.
            sent: uint8 [size * n]: piece r goes to rank r.
        """
        import torch.distributed as dist

        assert received.numel() == sent.numel()
        dist.all_to_all_single(received, sent, group=self._data)
        self.moved_bytes["ranks"] += received.numel() - received.numel() // self.size

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

    def leave(self) -> None:
        """End the connection to the others. Every rank has to call it."""
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


class Alone:
    """A process without others, which is asked the same and answers at once."""

    rank = 0
    size = 1
    local_size = 1

    def agree(self, record: T) -> list[T]:
        """Return the only record."""
        return [record]

    def first(self, make: Callable[[], T]) -> T:
        """Return what this process makes."""
        return make()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do what is inside, which fails for this process alone."""
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


def join(device: str) -> Ranks | None:
    """Join the ranks that `torchrun` started; None in a process that was started alone.

    Args:
        device: what computes, "cuda" or "cpu". A rank has the GPU of its number on its host.
    """
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
        return None

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if device == "cuda":
        torch.cuda.set_device(local_rank)

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    data = dist.new_group(backend="nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    beside = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return Ranks(rank, size, local_rank, local_size, data, beside)
