"""The monitor of the other ranks: it learns that one failed, died or hangs, and tells the others why this one fails.

Ranks share what they know by the store of `torch.distributed`, a small server of keys and values in torchrun or in rank
0. The thread `megatier-peers` of each rank looks there once a second:

- A rank that fails posts its cause before it closes anything. All ranks name the first post.
- A rank whose process dies is posted by the others of its machine, which learn it from the system at once.
- A rank whose heartbeat stands still is posted by the first rank that has looked often enough. Time is counted in
  looks, so ranks that a person stops and continues together notice nothing.

Only that thread uses the store. It blocks for ever if the store's machine has stopped. So code that waits for another
rank calls `check`, which notices this too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from megatier import _native
from megatier.errors import MegatierError, PeerError
from megatier.owner import Owner

LOOK_S = 1.0
"""Seconds between two looks."""
SILENT_LOOKS = 60
"""A rank is silent if its heartbeat stands still for so many looks. Slow Python code may block its thread for a
while."""
BROKEN_LOOKS = 4
"""The same after a connection has broken."""
ANSWER_S = 10.0
"""Seconds that a rank waits to learn why a connection broke, and for its own post."""
TICK_S = 0.25
"""Seconds between two calls of `check` in code that waits for another rank."""

FIRST_KEY = "first"
LEFT_HEARTBEAT = "left"
DIED = "its process ended without a word. If the system killed it for want of memory, dmesg says so."
SILENT = "it has given no sign of life. Its process was stopped, or its machine or network is gone."
NO_STORE = "the store of all ranks, which torchrun or the first rank keeps, no longer answers."


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank."""

    host: str
    """The name of its machine, for people."""
    machine: str
    """Identifies its machine, and the namespace of its process numbers."""
    process: int
    """The number of its process."""

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        # Containers of one machine share the boot id, but have process numbers of their own.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(socket.gethostname(), f"{boot} {namespace}", os.getpid())


class KeyValueStore(Protocol):
    """The methods of a store of `torch.distributed` that are used here."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return values, once all of them are there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a value if the one before was as expected."""


class _Waited(threading.local):
    """The time that a thread has waited for other ranks since the last look ended. Each thread has its own."""

    num_ended = 0
    """The number of ended looks when it last waited."""
    seconds = 0.0
    """Seconds that it has waited since."""


class PeerMonitor:
    """The watch of one rank over the others, from its making until `end`."""

    def __init__(
        self, store: KeyValueStore, rank: int, members: Sequence[Member], kept_alive: object, stop: Callable[[], None]
    ) -> None:
        """Begin to watch.

        Args:
            store: a connection for this object alone, under a prefix of this run.
            rank: this rank.
            members: the processes of all ranks.
            kept_alive: an object that has to stay alive until this process ends, if a rank fails.
            stop: ends the collectives under way; called repeatedly after a rank has failed.
        """
        self._owner = Owner("this rank of a run")
        self._store = store
        self._rank = rank
        self._members = members
        self._stop = stop
        self._kept_alive = kept_alive
        self._error: BaseException | None = None
        """The error with which this rank failed."""
        self._own: str | None = None
        """The cause of this rank's failure, until it is posted."""
        self._first: tuple[int, str] | None = None
        """The rank that failed first, and why."""
        self._known = _native.Latch()
        """Set together with it."""
        self._looked = _native.Latch()
        """Set when the thread has ended its last look."""
        self._is_leaving = False
        self._has_ended = False
        self._has_broken = False
        self._waited = _Waited()
        self._num_looks = 0
        self._num_ended = 0
        """The number of looks that have ended. Only the thread writes it."""
        self._heartbeats = [b""] * len(members)
        self._num_still = [0] * len(members)
        """The number of looks for which each heartbeat has stood still."""

        self._wake = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._processes: dict[int, int] = {}
        """The other ranks of this machine, by descriptors of their processes."""
        self._dead: set[int] = set()
        for number, member in enumerate(members):
            if number != rank and member.machine == members[rank].machine:
                self._watch(number, member.process)

        # Every rank has to have a heartbeat before the first look.
        store.set(f"heartbeat {rank}", "0")
        self._thread = threading.Thread(target=self._run, name="megatier-peers", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for any thread

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are processes of one machine, with one namespace of process numbers."""
        return len({member.machine for member in self._members}) == 1

    @property
    def is_here(self) -> bool:
        """Whether this process is the rank, and not a forked child of it."""
        return self._owner.is_here

    def failed(self) -> PeerError | None:
        """Return the error that names the rank that failed first; None if none has."""
        if self._first is None:
            return None
        rank, cause = self._first
        return PeerError(rank, self._members[rank].host, cause)

    def first_error(self) -> BaseException | None:
        """Return the error of the rank that failed first, or this rank's own if it was the first."""
        if self._error is None or self._first is None:
            return self.failed()

        first_rank, _ = self._first
        return self._error if first_rank == self._rank else self.failed()

    def check(self, waited_s: float = 0.0) -> None:
        """Raise if a rank has failed. Call this every TICK_S while waiting for another rank.

        Args:
            waited_s: seconds that the caller has waited since its last call.

        Raises:
            PeerError: a rank has failed.
        """
        self._owner.check()

        # Waits are added up, because the clock goes on while this process is stopped. Each thread has its own sum,
        # because waits of several threads at once are no longer than one of them.
        waited = self._waited
        if waited.num_ended != self._num_ended:
            waited.num_ended = self._num_ended
            waited.seconds = 0.0
        waited.seconds += waited_s
        if self._first is None and waited.seconds > SILENT_LOOKS * LOOK_S:
            self._note((0, NO_STORE))

        error = self.failed()
        if error is not None:
            raise error

    def fail(self, error: BaseException) -> None:
        """Post why this rank fails, unless another rank failed before. A forked child posts nothing."""
        if not self._owner.is_here or comes_of_peers(error):
            return

        # The first error counts, because it mostly causes the later ones.
        self._error = self._error or error
        cause = cause_of(self._error)
        self._fail(cause)

    def _fail(self, cause: str) -> None:
        """Have the thread post the cause, and wait until all ranks can see it."""
        self._own = cause
        if self._has_ended:
            # The thread has ended, and another file may have the descriptor by now.
            return

        # Only the thread uses the store. The wait has a limit, because the store may never answer.
        os.eventfd_write(self._wake, 1)
        self._known.wait(ANSWER_S)

    def explain(self, error: Exception) -> PeerError:
        """Wait until it is known why a collective failed, and return the error for it."""
        self._has_broken = True

        # Mostly the connection broke because another rank has failed, which posts the cause.
        if not self._known.wait(ANSWER_S):
            self._fail(sentence(f"its connection to another rank broke: {error}"))

        failure = self.failed()
        if failure is None:
            # Even this rank's own post did not come back.
            failure = PeerError(self._rank, self._members[self._rank].host, NO_STORE)
        return failure

    def leave(self) -> None:
        """Say that this rank has ended well, so that its silence means nothing from now on."""
        # The thread looks at once, because this process may be gone before its next look.
        self._is_leaving = True
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Stop watching. A second call does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        has_looked = self._looked.wait(ANSWER_S)

        # After a failure, or during a look, the thread may still use the descriptors.
        if has_looked and self._first is None:
            for descriptor in (*self._processes, self._wake):
                os.close(descriptor)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        """Look until this rank has left or any rank has failed."""
        try:
            while not self._has_ended and self._first is None:
                self._wait(LOOK_S)
                self._look()

            # `leave` and `end` may both have come during the last look, after it had written a heartbeat.
            if self._is_leaving:
                self._beat()
        except RuntimeError:
            # The store is gone. If a rank of this machine has died, it was probably in that process. Ranks that leave
            # last may also find it gone, which is no failure.
            self._wait(TICK_S)
            if not self._is_leaving:
                first = (min(self._dead), DIED) if self._dead else (0, NO_STORE)
                self._note(first)

        # A process group of gloo cannot be aborted, and destroying it would wait for its collectives for ever. This
        # thread keeps it alive after a failure by never ending.
        self._looked.set()
        while self._first is not None:
            self._stop()
            _native.Latch().wait(TICK_S)

    def _wait(self, seconds: float) -> None:
        """Wait for the next look, and note the processes that end meanwhile."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._dead.add(self._processes.pop(descriptor))
                self._poll.unregister(descriptor)
                os.close(descriptor)

    def _look(self) -> None:
        """Write the heartbeat, post failures, and read the posts of others."""
        # First its own cause, which says more than the silence of other ranks.
        if self._own is not None:
            self._post(self._rank, self._own)

        self._num_looks += 1
        self._beat()

        keys = [f"heartbeat {rank}" for rank in range(len(self._members))]
        for rank, heartbeat in enumerate(self._store.multi_get(keys)):
            self._see(rank, heartbeat)

        if self._store.check([FIRST_KEY]):
            posted = self._store.get(FIRST_KEY)
            rank, cause = json.loads(posted)
            self._note((rank, cause))
        self._num_ended += 1

    def _beat(self) -> None:
        """Write the heartbeat of this rank."""
        # A counter and not a time, because the clocks of two machines differ.
        heartbeat = LEFT_HEARTBEAT if self._is_leaving else str(self._num_looks)
        self._store.set(f"heartbeat {self._rank}", heartbeat)

    def _see(self, rank: int, heartbeat: bytes) -> None:
        """Compare a rank's heartbeat with that of the last look, and post the rank if it died or is silent."""
        is_still = heartbeat == self._heartbeats[rank]
        num_still = self._num_still[rank] + 1 if is_still else 0
        self._num_still[rank] = num_still
        self._heartbeats[rank] = heartbeat

        # The process of a rank that has left may end.
        if heartbeat == LEFT_HEARTBEAT.encode() or rank == self._rank:
            return
        limit = BROKEN_LOOKS if self._has_broken else SILENT_LOOKS
        if rank in self._dead:
            self._post(rank, DIED)
        elif num_still >= limit:
            self._post(rank, SILENT)

    def _post(self, rank: int, cause: str) -> None:
        """Post that a rank has failed, unless another failure was posted before."""
        self._store.compare_set(FIRST_KEY, "", json.dumps([rank, cause]))

    def _note(self, first: tuple[int, str]) -> None:
        """Note the first failure, and wake all that wait."""
        # The order matters, because a thread that wakes calls `failed`.
        self._first = first
        self._stop()
        self._known.set()

    def _watch(self, rank: int, process: int) -> None:
        """Ask the system to say when a process of this machine ends. Some containers do not allow it."""
        # Another process may get the number of one that has ended, but a descriptor stays valid.
        with contextlib.suppress(PermissionError):
            try:
                descriptor = os.pidfd_open(process)
            except ProcessLookupError:
                self._dead.add(rank)
                return
            self._processes[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)


def cause_of(error: BaseException) -> str:
    """Return the message of an error, as a sentence."""
    text = str(error)
    kind = type(error).__name__
    if not isinstance(error, MegatierError):
        text = f"{kind}: {text}" if text else kind
    return sentence(text)


def sentence(text: str) -> str:
    """Return a text with a full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def comes_of_peers(error: BaseException) -> bool:
    """Return whether the failure of another rank has led to this error."""
    # Causes may form a cycle, because Python lets an error be raised from itself.
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, PeerError):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False
