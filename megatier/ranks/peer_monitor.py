"""Tells a rank that another one failed, died or hangs, and tells the others why it fails itself.

What is known goes over the store of `torch.distributed`, a small server of keys and values: that of torchrun, or one in
the process of the first rank. A thread of each rank looks there once a second:

- A rank that fails posts its cause before it closes anything. The first post is the one that all ranks name.
- A rank that ends without a word is posted by the others of its machine, which the system tells at once.
- A rank whose heartbeat stands still is posted by the first rank that has looked often enough. Time is counted in
  looks: ranks that a person stops and wakes together notice nothing.

Only that thread uses the store. A server whose machine has stopped never answers, and the thread does not come back
then. Code that waits for another rank calls `check` meanwhile, which notices this as well.
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
"""A rank is silent if its heartbeat stands still for so many looks. Python code of a library may hold up its thread."""
BROKEN_LOOKS = 4
"""The same, once a connection has broken."""
ANSWER_S = 10.0
"""How long a rank waits to learn why a connection broke, and for its own post."""
TICK_S = 0.25
"""How often code that waits for another rank calls `check`."""

FIRST = "first"
LEFT = "left"
DIED = "its process ended without a word. If the system killed it for want of memory, dmesg says so."
SILENT = "it has given no sign of life. Its process was stopped, or its machine or network is gone."
NO_STORE = "the store of all ranks, which torchrun or the first rank keeps, no longer answers."


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank."""

    host: str
    """The name of its machine, for people."""
    machine: str
    """What tells its machine and its process numbers from others."""
    process: int
    """The number of its process."""

    @classmethod
    def here(cls) -> Self:
        """This process."""
        # Containers of one machine have the same boot, but number their processes apart.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(socket.gethostname(), f"{boot} {namespace}", os.getpid())


class Store(Protocol):
    """A store of `torch.distributed`, as far as it is used here."""

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
    """The time that a thread has waited for other ranks since the last look ended. Each has its own count."""

    num_ended = 0
    """The looks that had ended when it last waited."""
    seconds = 0.0
    """The time that it has waited since."""


class PeerMonitor:
    """The other ranks of a run, as this one watches them. `end` stops that."""

    def __init__(
        self, store: Store, rank: int, members: Sequence[Member], held: object, stop: Callable[[], None]
    ) -> None:
        """Begin to watch.

        Args:
            store: a connection of its own, under a prefix of this run.
            rank: this rank.
            members: the processes of all ranks.
            held: stays alive until this process ends, if a rank fails.
            stop: makes collectives that are under way end; called again and again once a rank has failed.
        """
        self._owner = Owner("this rank of a run")
        self._store = store
        self._rank = rank
        self._members = members
        self._stop = stop
        self._held = held
        self._error: BaseException | None = None
        """The error with which this rank failed."""
        self._own: str | None = None
        """The cause of this rank's failure, until it is posted."""
        self._first: tuple[int, str] | None = None
        """The rank that failed first, and why."""
        self._known = _native.Latch()
        """Set together with it."""
        self._looked = _native.Latch()
        """Set once this rank looks no more."""
        self._is_leaving = False
        self._has_ended = False
        self._has_broken = False
        self._waited = _Waited()
        self._num_looks = 0
        self._num_ended = 0
        """How many looks have ended. Its thread alone writes it."""
        self._heartbeats = [b""] * len(members)
        self._num_still = [0] * len(members)
        """For how many looks each heartbeat has stood still."""

        self._wake = os.eventfd(0)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._processes: dict[int, int] = {}
        """The ranks of this machine, by descriptors of their processes."""
        self._dead: set[int] = set()
        for number, member in enumerate(members):
            if number != rank and member.machine == members[rank].machine:
                self._watch(number, member.process)

        # Every rank has a heartbeat before anybody looks.
        store.set(f"heartbeat {rank}", "0")
        self._thread = threading.Thread(target=self._run, name="megatier-peers", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for everybody

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are processes of one machine, which know each other by their numbers."""
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
        """Call this in a wait for another rank, every TICK_S.

        Args:
            waited_s: how long the caller has waited since it called last.

        Raises:
            PeerError: a rank has failed.
        """
        self._owner.check()

        # Added up, because the clock goes on while this process is stopped. For each thread alone, because threads that
        # wait at once wait for no longer than one of them.
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
        """Post why this rank fails, unless another one failed before, or has caused this. A forked child is no rank."""
        if not self._owner.is_here or comes_of_peers(error):
            return

        # The first error counts: those after it are mostly what it has led to.
        self._error = self._error or error
        cause = cause_of(error)
        self._fail(cause)

    def _fail(self, cause: str) -> None:
        """Have the cause posted, and wait for that."""
        self._own = cause
        if self._has_ended:
            # Nobody looks any more, and another file may have the number of the descriptor.
            return

        # By the thread that looks, since it alone uses the store. If that never answers, this does not wait for ever.
        os.eventfd_write(self._wake, 1)
        self._known.wait(ANSWER_S)

    def explain(self, error: Exception) -> PeerError:
        """Wait until it is known why a collective failed, and return the error that says so."""
        self._has_broken = True

        # Most often the connection broke because another rank has failed, and that one knows why.
        if not self._known.wait(ANSWER_S):
            self._fail(sentence(f"its connection to another rank broke: {error}"))

        found = self.failed()
        if found is None:
            # Not even this rank's own post came back.
            found = PeerError(self._rank, self._members[self._rank].host, NO_STORE)
        return found

    def leave(self) -> None:
        """Say that this rank has come to its end, and that its silence means nothing from now on."""
        # Told at once and not at the next look, because this process may be gone by then.
        self._is_leaving = True
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Stop watching. It is safe to call this twice."""
        if self._has_ended:
            return
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        has_looked = self._looked.wait(ANSWER_S)

        # After a failure the thread goes on until the process ends, and may use them. So may one that still looks.
        if has_looked and self._first is None:
            for descriptor in (*self._processes, self._wake):
                os.close(descriptor)

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        """Look until this rank has left or any has failed."""
        try:
            while not self._has_ended and self._first is None:
                self._wait(LOOK_S)
                self._look()
        except RuntimeError:
            # If the store was in the process of a rank that died, that is why it is gone. The last ranks to leave may
            # not find it any more.
            self._wait(TICK_S)
            if not self._is_leaving:
                first = (min(self._dead), DIED) if self._dead else (0, NO_STORE)
                self._note(first)

        # A process group of gloo cannot be told to stop. To destroy it waits for the collectives under way, and so for
        # ever; if this thread never ends, nobody destroys it.
        self._looked.set()
        while self._first is not None:
            self._stop()
            _native.Latch().wait(TICK_S)

    def _wait(self, seconds: float) -> None:
        """Wait for the next look, and take note of processes that end meanwhile."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._dead.add(self._processes.pop(descriptor))
                self._poll.unregister(descriptor)
                os.close(descriptor)

    def _look(self) -> None:
        """Give a sign of life, post what is known here, and see what others have posted."""
        # Before what is found of others: this rank knows its cause, and of others only that they are silent.
        if self._own is not None:
            self._post(self._rank, self._own)

        # A number that changes, and no time: clocks of two machines differ.
        self._num_looks += 1
        own_heartbeat = LEFT if self._is_leaving else str(self._num_looks)
        self._store.set(f"heartbeat {self._rank}", own_heartbeat)

        keys = [f"heartbeat {rank}" for rank in range(len(self._members))]
        for rank, heartbeat in enumerate(self._store.multi_get(keys)):
            self._see(rank, heartbeat)

        if self._store.check([FIRST]):
            posted = self._store.get(FIRST)
            rank, cause = json.loads(posted)
            self._note((rank, cause))
        self._num_ended += 1

    def _see(self, rank: int, heartbeat: bytes) -> None:
        """Compare a rank's heartbeat with that of the last look, and post that it died or is silent."""
        is_still = heartbeat == self._heartbeats[rank]
        num_still = self._num_still[rank] + 1 if is_still else 0
        self._num_still[rank] = num_still
        self._heartbeats[rank] = heartbeat

        # A rank that has left ends its process without failing.
        if heartbeat == LEFT.encode() or rank == self._rank:
            return
        patience = BROKEN_LOOKS if self._has_broken else SILENT_LOOKS
        if rank in self._dead:
            self._post(rank, DIED)
        elif num_still >= patience:
            self._post(rank, SILENT)

    def _post(self, rank: int, cause: str) -> None:
        """Tell all ranks that one has failed, unless one has before."""
        self._store.compare_set(FIRST, "", json.dumps([rank, cause]))

    def _note(self, first: tuple[int, str]) -> None:
        """Take note of the failure, and end what waits for it."""
        # In this order: a thread that is woken asks `failed`.
        self._first = first
        self._stop()
        self._known.set()

    def _watch(self, rank: int, process: int) -> None:
        """Have the system say when a process of this machine ends. Some containers do not allow it."""
        # A descriptor and not a number, which another process may have by the time that this one has ended.
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
    """Return whether an error is what the failure of another rank has led to here."""
    # A chain may lead back into itself, since Python lets an error be raised from itself.
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, PeerError):
            return True
        seen.append(found)
        found = found.__cause__ or found.__context__
    return False
