"""The rendezvous of the processes that `torchrun` started: they join as the ranks of a run, and leave at its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch

from megatier import _native
from megatier.errors import PeerError, StepAbandonedError
from megatier.ranks.peer_monitor import KeyValueStore, Member, PeerMonitor, comes_of_peers
from megatier.ranks.ranks import Ranks
from megatier.workers import Workers

TIMEOUT = timedelta(days=1)
"""How long a collective waits for a late rank. `PeerMonitor` finds a rank that hangs much sooner."""
STORE_TIMEOUT = timedelta(minutes=1)
"""How long a rank first waits for the heartbeats of all others."""
MEET_S = 0.01
"""Seconds between two looks whether all other ranks have come."""
MEET_LIMIT_S = 1800.0
"""Seconds that a rank waits for all others."""


@contextlib.contextmanager
def joined(device: str, *, is_guest: bool = False) -> Iterator[Ranks | None]:
    """Join the other ranks that `torchrun` started, and yield them. Yield None in a process that was started alone.

    Args:
        device: the device that computes, "cuda" or "cpu". A rank has the GPU of its local rank.
        is_guest: whether the program around may use `torch.distributed` too. Then it stays initialized at the end,
            because torch cannot initialize it twice with the store of one torchrun.

    Raises:
        PeerError: another rank has failed. It replaces all errors to which that led here. An error of this rank's own
            is raised as it is, and the other ranks are told.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield None
        return

    import torch.distributed as dist

    ranks = _join(device, is_guest=is_guest)
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    try:
        yield ranks

        # A forked child must not end the run of its parent.
        if not ranks.is_here:
            return
        ranks.leave()
        if not is_guest:
            dist.destroy_process_group()
    except BaseException as error:
        # Tell the others before anything is closed here. Otherwise they would only see a broken connection.
        ranks.fail(error)
        first = ranks.first_error() if comes_of_peers(error) else None
        if first is None:
            raise
        raise first from error


def _join(device: str, *, is_guest: bool) -> Ranks:
    """Join the ranks that `torchrun` started.

    Raises:
        PeerError: some of them do not come.
    """
    # torch waits for the other ranks in C++, where the main thread would not react to SIGINT. So another thread joins.
    # If this one is interrupted, the other ends soon, or sleeps in C++ until the process ends.
    is_given_up = _native.Latch()
    joining = Workers(1, "megatier-join")
    try:
        ranks = joining.submit(lambda: _join_all(device, is_given_up, is_guest=is_guest)).result()
    except BaseException:
        is_given_up.set()
        raise
    joining.close()
    return ranks


def _join_all(device: str, is_given_up: _native.Latch, *, is_guest: bool) -> Ranks:
    """Join the ranks. This runs on a thread of its own."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    # torchrun sets all four variables. Other launchers set the two that torch's `env://` needs.
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # of this thread

    # The program around gets a default group for its device. This run has groups of its own.
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if is_guest and device == "cuda" else "gloo"
        _open_default_group(backend, rank, size, is_given_up)

    # Each thread has a group of its own, so that none waits for the collectives of another.
    objects_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    beside = dist.new_group(backend="gloo", timeout=TIMEOUT)
    data = dist.new_group(backend="nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    process_groups = objects_group, beside, data

    # Runs may follow each other in one process, so each has a prefix of its own in the store.
    this = Member.here(), secrets.token_hex(8)
    by_rank: list[tuple[Member, str] | None] = [None] * size
    dist.all_gather_object(by_rank, this, group=objects_group)
    known = [each for each in by_rank if each is not None]
    members = [member for member, _ in known]
    _, run = known[0]

    # A connection of its own, which calls of other threads do not block.
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    connection = TCPStore(host, port, timeout=STORE_TIMEOUT)
    own_store = PrefixStore(f"megatier {run}", connection)
    watched = partial(PeerMonitor, own_store, rank, members, process_groups)
    return Ranks(rank, size, local_rank, local_size, process_groups, watched)


def _open_default_group(backend: str, rank: int, size: int, is_given_up: _native.Latch) -> None:
    """Initialise `torch.distributed`, under a name that no earlier start of these ranks had.

    Raises:
        PeerError: a rank does not come.
        StepAbandonedError: the thread that waits for the ranks was interrupted.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    # torchrun keeps its store between starts of the ranks, so each start needs a prefix of its own.
    store, _, _ = next(rendezvous("env://"))
    name = _meet(store, rank, size, is_given_up)
    dist.init_process_group(
        backend,
        store=PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )


def _meet(store: KeyValueStore, rank: int, size: int, is_given_up: _native.Latch) -> str:
    """Return a name that all ranks of this start agree on, for their keys in the store.

    torchrun keeps its store when it restarts the ranks, so the store may still have addresses of processes that have
    ended. So rank 0 stores a new name, and every other rank answers the name that it finds with a random word. Rank 0
    confirms the words. A rank trusts a name only if its own word was confirmed, which an old name cannot have.

    Raises:
        PeerError: a rank does not come.
        StepAbandonedError: the thread that waits for the ranks was interrupted.
    """
    word = secrets.token_hex(8)
    end = time.monotonic() + MEET_LIMIT_S

    def is_late() -> bool:
        """Wait a moment, and return whether the time is over."""
        # Not by a blocking `get`, which could not be interrupted.
        if is_given_up.wait(MEET_S):
            raise StepAbandonedError("nobody waits for the other ranks any more")
        return time.monotonic() > end

    def come(key: str, other: int) -> str:
        while not store.check([key]):
            if is_late():
                raise _absent(other)
        return store.get(key).decode()

    if rank == 0:
        store.set("megatier", word)
        words = [come(f"{word} {other}", other) for other in range(1, size)]
        store.set(f"{word} met", " ".join(words))
        return word

    while True:
        name = come("megatier", 0)
        store.set(f"{name} {rank}", word)

        # An old name has an answer too, but to the words of processes that have ended.
        answer = f"{name} met"
        if store.check([answer]) and word in store.get(answer).decode():
            return name
        if is_late():
            # Rank 0 answers when all have come. Under an old name all have, so then rank 0 is missing.
            others = range(1, size)
            raise _absent(next((other for other in others if not store.check([f"{name} {other}"])), 0))


def _absent(rank: int) -> PeerError:
    """Return the error that a rank has not come."""
    return PeerError(rank, "its host", f"it has not come within {MEET_LIMIT_S / 60:.0f} minutes.")
