"""The pool of processes that stand for ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

import pytest
import rank_pool
from rank_pool import POOL, RankPool


def variable(name: str) -> str | None:
    """An environment variable, as a rank sees it."""
    return os.environ.get(name)


def stay() -> int:
    """The process does not end when it is asked to, since a thread goes on."""
    threading.Thread(target=threading.Event().wait).start()
    return os.getpid()


@pytest.fixture
def few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "END_S", 0.5)
    monkeypatch.setattr(rank_pool, "KILL_S", 0.5)


def opened(function: Any, *arguments: Any) -> tuple[RankPool, list[Any]]:
    """A pool of two processes that have run something, and these."""
    pool = RankPool()
    pool.run(function, 2, *arguments)
    return pool, [process for process, _ in pool._workers]


def test_rank_has_the_environment_of_the_test_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_TEST", "first")
    assert POOL.run(variable, 2, "OF_THIS_TEST") == ["first"] * 2

    # The processes stay. They must not keep what they were started with.
    monkeypatch.delenv("OF_THIS_TEST")
    assert POOL.run(variable, 2, "OF_THIS_TEST") == [None] * 2
    assert POOL.run(variable, 2, "RANK") == ["0", "1"]


def test_close_asks_processes_to_end_and_kills_none_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    pool, processes = opened(variable, "RANK")
    pool.close()
    assert [process.exitcode for process in processes] == [0, 0]
    assert capsys.readouterr().err == ""
    assert pool.run(variable, 1, "RANK") == ["0"]
    pool.close()


@pytest.mark.usefixtures("few_seconds")
def test_close_kills_processes_that_do_not_end_and_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    pool, processes = opened(stay)
    pool.close()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
    said = capsys.readouterr().err.splitlines()
    assert said == [f"rank's process {process.pid} has not ended within 0.5 s: killed" for process in processes]


@pytest.mark.usefixtures("few_seconds")
def test_close_leaves_processes_behind_that_no_kill_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that waits inside a driver. Nothing waits for it when Python exits either."""
    pool, processes = opened(stay)
    for process in processes:
        monkeypatch.setattr(process, "kill", lambda: None)
    pool.close()
    assert capsys.readouterr().err.count("goes on 0.5 s after a kill: left behind") == 2
    assert not {process.pid for process in processes} & {child.pid for child in multiprocessing.active_children()}
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
