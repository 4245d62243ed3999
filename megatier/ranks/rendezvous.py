"""Makes ranks of a run out of the processes that `torchrun` started, and lets them part again."""

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
from megatier.ranks.peer_monitor import Member, PeerMonitor, Store, comes_of_peers
from megatier.ranks.ranks import Ranks
from megatier.workers import Workers

TIMEOUT = timedelta(days=1)
"""How long a collective waits for a late rank. `PeerMonitor` finds a rank that hangs much sooner."""
STORE_TIMEOUT = timedelta(minutes=1)
"""How long the first look of a rank waits for the first sign of life of all others."""
MEET_S = 0.01
"""How often a rank looks whether all others have come."""
MEET_LIMIT_S = 1800.0
"""How long it waits for them."""


@contextlib.contextmanager
def joined(device: str, *, is_guest: bool = False) -> Iterator[Ranks | None]:
    """Yield the ranks that `torchrun` started, while they run together; None in a process that was started alone.

    Args:
        device: what computes, "cuda" or "cpu". A rank has the GPU of its number on its host.
        is_guest: whether the program around may use `torch.distributed` itself, before, meanwhile and afterwards. Then
            it stays initialized: torch cannot initialize it twice with the store of one torchrun.

    Raises:
        PeerError: instead of all that came of the failure of another rank. An error of this rank's own is raised as it
            is, and the others are told.
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

        # A forked child is no rank, and must not end the run of its parent.
        if not ranks.is_here:
            return
        ranks.leave()
        if not is_guest:
            dist.destroy_process_group()
    except BaseException as error:
        # Others are told before anything is closed here: else they would see no more than a broken connection.
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
    # torch waits for the others in C++, where the main thread would hear no signal. So that is done on another thread,
    # which ends soon if this one is interrupted, or stays asleep in C++ until the process ends.
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
    """Join the ranks, on a thread that hears no signals."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

    # torchrun sets all four. Other launchers set the first two, as torch's `env://` asks for them.
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # of this thread

    # The program around finds a default group that takes tensors of its device. This run has groups of its own.
    if not dist.is_initialized():
        needs_nccl = is_guest and device == "cuda"
        store, _, _ = next(rendezvous("env://"))
        name = _meet(store, rank, size, is_given_up)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if needs_nccl else "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )

    # One for each thread that talks, so that none waits for what another one is at.
    own = dist.new_group(backend="gloo", timeout=TIMEOUT)
    beside = dist.new_group(backend="gloo", timeout=TIMEOUT)
    data = dist.new_group(backend="nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    groups = own, beside, data

    # Runs may follow each other in one process, so each has names of its own in the store.
    this = Member.here(), secrets.token_hex(8)
    by_rank: list[tuple[Member, str] | None] = [None] * size
    dist.all_gather_object(by_rank, this, group=own)
    known = [each for each in by_rank if each is not None]
    members = [member for member, _ in known]
    _, run = known[0]

    # A connection of its own: a call of another thread would hold up the looks.
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    connection = TCPStore(host, port, timeout=STORE_TIMEOUT)
    own_store = PrefixStore(f"megatier {run}", connection)
    watched = partial(PeerMonitor, own_store, rank, members, groups)
    return Ranks(rank, size, local_rank, local_size, groups, watched)


def _meet(store: Store, rank: int, size: int, is_given_up: _native.Latch) -> str:
    """Return a name that all ranks have, and that no earlier start of them had.

    torchrun keeps its store when it starts the ranks again. There they would find the addresses of processes that have
    ended. So the first rank puts a new name there, and every other rank answers the name that it finds with a word of
    its own. A rank goes by a name that has come back with its word: an old name cannot have it.

    Raises:
        PeerError: a rank does not come.
        StepAbandonedError: nobody waits for the ranks any more.
    """
    word = secrets.token_hex(8)
    end = time.monotonic() + MEET_LIMIT_S

    def is_late() -> bool:
        """Wait a moment, and return whether there is no time left."""
        # Not by a `get` that waits: nothing would end it when this process is told to stop.
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

        # Under an old name there may be an answer too, but to the words of processes that have ended.
        answer = f"{name} met"
        if store.check([answer]) and word in store.get(answer).decode():
            return name
        if is_late():
            # The first rank answers when all have come. Under an old name all have, so it is the first that has not.
            others = range(1, size)
            raise _absent(next((other for other in others if not store.check([f"{name} {other}"])), 0))


def _absent(rank: int) -> PeerError:
    """Return the error of ranks for which one does not come."""
    return PeerError(rank, "its host", f"it has not come within {MEET_LIMIT_S / 60:.0f} minutes.")
