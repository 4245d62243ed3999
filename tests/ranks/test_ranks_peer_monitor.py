"""How a rank learns that another one failed: with a store in this process, and looks every few milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from megatier import _native
from megatier.errors import DataError, PeerError
from megatier.ranks import peer_monitor
from megatier.ranks.peer_monitor import DIED, NO_STORE, SILENT, Member, PeerMonitor, cause_of, comes_of_peers

SOON_S = 20.0
AWAY = Member("far", "another machine", 1)


class Shelf:
    """A store of keys and values, which can break or hang."""

    def __init__(self) -> None:
        self.values = dict[str, bytes]()
        self.error: Exception | None = None
        self.answers = _native.Latch()
        self.answers.set()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        if self.error is not None:
            raise self.error
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values.get(key, b"") for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.set(key, value)
        return self.values[key]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(peer_monitor, "LOOK_S", 0.005)
    monkeypatch.setattr(peer_monitor, "SILENT_LOOKS", 1 << 30)
    return Shelf()


Watch = Callable[..., PeerMonitor]


@pytest.fixture
def watch(shelf: Shelf) -> Iterator[Watch]:
    """Starts to watch as one of several ranks, which run in this process if nothing else is said."""
    started: list[PeerMonitor] = []

    def start(rank: int, *members: Member, stop: Callable[[], None] = lambda: None) -> PeerMonitor:
        started.append(PeerMonitor(shelf, rank, members or [Member.here()] * 3, None, stop))
        return started[-1]

    yield start
    for watcher in started:
        watcher.end()


def eventually(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while (result := found()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return result


def fields(error: PeerError) -> tuple[int, str, str]:
    return error.rank, error.host, error.cause


def test_failure_is_told_to_all_ranks_and_the_first_counts(watch: Watch) -> None:
    stopped = _native.Latch()
    watchers = [watch(0, stop=stopped.set), watch(1), watch(2)]
    watchers[2].check()
    watchers[1].fail(DataError("no luck"))
    watchers[2].fail(DataError("another reason"))
    first = 1, Member.here().host, "no luck."
    assert [fields(eventually(watcher.failed)) for watcher in watchers] == [first] * 3
    assert stopped.wait(SOON_S)
    with pytest.raises(PeerError, match=r"rank 1 on .* failed, and all ranks stop with it: no luck\. Fix that"):
        watchers[0].check()


def test_failure_after_the_end_is_kept_and_writes_to_no_descriptor(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = watch(0)
    watcher.end()
    written: list[int] = []
    monkeypatch.setattr(os, "eventfd_write", lambda descriptor, _: written.append(descriptor))
    watcher.fail(DataError("too late"))
    assert written == []
    # The second end of the fixture closes nothing either.
    monkeypatch.setattr(os, "close", written.append)
    watcher.end()
    assert written == []


def test_rank_that_ends_without_a_word_is_named(watch: Watch) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    assert child.pid is not None
    here = Member.here()
    members = here, Member("near", here.machine, child.pid)
    watcher = watch(0, *members)
    child.kill()
    child.join()
    assert fields(eventually(watcher.failed)) == (1, "near", DIED)
    assert fields(eventually(watch(0, *members).failed)) == (1, "near", DIED)


def test_rank_of_another_machine_that_falls_silent_is_named(
    watch: Watch, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_monitor, "SILENT_LOOKS", 20)
    shelf.set("heartbeat 1", "7")
    began = time.monotonic()
    assert fields(eventually(watch(0, Member.here(), AWAY).failed)) == (1, "far", SILENT)
    assert time.monotonic() - began >= 20 * peer_monitor.LOOK_S


def test_rank_whose_connection_broke_is_named_sooner(watch: Watch, shelf: Shelf) -> None:
    shelf.set("heartbeat 1", "7")
    assert fields(watch(0, Member.here(), AWAY).explain(RuntimeError("Connection reset"))) == (1, "far", SILENT)


def test_broken_connection_of_ranks_that_live_names_the_rank_that_saw_it(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_monitor, "ANSWER_S", 0.2)
    monkeypatch.setattr(peer_monitor, "BROKEN_LOOKS", 1 << 30)
    watchers = watch(0), watch(1), watch(2)
    cause = "its connection to another rank broke: Connection reset."
    assert fields(watchers[1].explain(RuntimeError("Connection reset"))) == (1, Member.here().host, cause)


def test_rank_that_has_left_may_be_silent(watch: Watch, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_monitor, "SILENT_LOOKS", 2)
    shelf.set("heartbeat 1", peer_monitor.LEFT_HEARTBEAT)
    watcher = watch(0, Member.here(), AWAY)
    eventually(lambda: int(shelf.get("heartbeat 0")) > 10 or None)
    watcher.check()


def test_rank_that_leaves_and_ends_during_a_look_has_left(
    watch: Watch, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, goes_on = _native.Latch(), _native.Latch()
    real = shelf.multi_get

    def late(keys: list[str]) -> list[bytes]:
        looks.set()
        goes_on.wait()
        return real(keys)

    monkeypatch.setattr(shelf, "multi_get", late)
    watcher = watch(0)
    assert looks.wait(SOON_S)
    watcher.leave()
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(watcher.end)
        eventually(lambda: watcher._has_ended or None)
        goes_on.set()
        ending.result(SOON_S)
    assert shelf.values["heartbeat 0"].decode() == peer_monitor.LEFT_HEARTBEAT


def test_store_that_is_gone_is_named_unless_this_rank_is_leaving(watch: Watch, shelf: Shelf) -> None:
    watcher, leaving = watch(0), watch(1)
    leaving.leave()
    eventually(lambda: shelf.get("heartbeat 1") == b"left" or None)
    shelf.error = RuntimeError("Broken pipe")
    assert fields(eventually(watcher.failed)) == (0, Member.here().host, NO_STORE)
    assert leaving._looked.wait(SOON_S)
    assert leaving.failed() is None


def test_store_that_never_answers_is_named_by_who_waits(
    watch: Watch, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_monitor, "SILENT_LOOKS", 60)
    watcher = watch(0)
    shelf.answers = _native.Latch()
    deadline = time.monotonic() + SOON_S
    with pytest.raises(PeerError, match="no longer answers"):
        while time.monotonic() < deadline:
            watcher.check(peer_monitor.TICK_S)
    shelf.answers.set()


def test_store_that_is_slow_is_not_given_up_sooner_because_several_threads_wait(
    watch: Watch, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_monitor, "SILENT_LOOKS", 600)
    watcher = watch(0)
    shelf.answers = _native.Latch()
    time.sleep(50 * peer_monitor.LOOK_S)
    limit_s = peer_monitor.SILENT_LOOKS * peer_monitor.LOOK_S
    with ThreadPoolExecutor(3) as threads:
        together = Barrier(3)

        def wait(_: int) -> None:
            together.wait(SOON_S)
            watcher.check(0.6 * limit_s)

        list(threads.map(wait, range(3)))

    # One thread alone has the whole of its patience, and no more.
    watcher.check(0.9 * limit_s)
    with pytest.raises(PeerError, match="no longer answers"):
        watcher.check(0.2 * limit_s)
    shelf.answers.set()


def test_cause_is_a_sentence_with_the_kind_of_a_foreign_error() -> None:
    assert cause_of(DataError("row 3 is odd")) == "row 3 is odd."
    assert cause_of(ValueError("odd")) == "ValueError: odd."
    assert cause_of(KeyboardInterrupt()) == "KeyboardInterrupt."


def test_error_that_was_raised_from_itself_comes_of_no_peer() -> None:
    error = ValueError("odd")
    error.__cause__ = error
    assert not comes_of_peers(error)
    error.__cause__ = KeyError("odd")
    error.__cause__.__context__ = PeerError(1, "host", "It died.")
    assert comes_of_peers(error)
