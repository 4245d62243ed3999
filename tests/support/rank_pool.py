"""Processes that stand for the ranks of a run, on one CPU: started once, with everything imported, and used again."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

RANKS_MAX = 4
TIMEOUT_S = 120.0
END_S = 5.0
"""Seconds in which processes may end by themselves."""
KILL_S = 10.0
"""Seconds in which a kill may take effect. A process notices none while it waits inside a driver, as of a GPU."""
PRELOADED = ["rank_imports"]
"""What the server of forks imports once, so that a process starts in milliseconds."""


class RankPool:
    """Processes that run a function as the ranks of one run."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """What the function returns on each of `size` ranks, in their order; of one, it is a process that is alone.

        Args:
            function: of a module that the workers can import.
            size: the number of ranks.
            arguments: the same for all ranks.

        Raises:
            AssertionError: it raised on a rank; the message has that rank's traceback.
        """
        while len(self._workers) < size:
            self._start()

        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((function, arguments, dict(os.environ), rank, size, port))

        answers = []
        for _, pipe in self._workers[:size]:
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise AssertionError(f"a rank did not answer within {TIMEOUT_S:.0f} s")
            answers.append(pipe.recv())

        if errors := [text for is_error, text in answers if is_error]:
            self.close()
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes, and say which did not end when they were asked. The next run starts others."""
        # All are asked, and killed, before any is waited for: a rank may wait for another one, and a GPU's driver for
        # what the other one computes.
        processes = [process for process, _ in self._workers]
        for _, pipe in self._workers:
            pipe.close()
        self._workers.clear()

        running = _wait(processes, END_S)
        for process in running:
            sys.stderr.write(f"rank's process {process.pid} has not ended within {END_S:g} s: killed\n")
            process.kill()

        for process in _wait(running, KILL_S):
            sys.stderr.write(f"rank's process {process.pid} goes on {KILL_S:g} s after a kill: left behind\n")

            # Else Python would wait for it without end when it exits.
            vars(multiprocessing.process)["_children"].discard(process)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs,), daemon=True)

        # Python 3.11 does not tell the server of forks where this process finds modules, and the server says nothing of
        # what it could not import: every process would import all of it for itself.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            process.start()
        self._workers.append((process, ours))


def _wait(processes: Sequence[Any], seconds: float) -> list[Any]:
    """Wait so long for all processes together; returns those that go on."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [process for process in processes if process.is_alive()]


def _work(pipe: Connection) -> None:
    """Run what comes by the pipe. This is the body of a process."""
    import torch

    torch.set_num_threads(1)
    dist = torch.distributed
    while True:
        try:
            function, arguments, environment, rank, size, port = pipe.recv()
        except (EOFError, OSError):  # the pool is closed
            return

        # The environment is that of the test that asks, not of the test that started this process: a directory for
        # caches that an earlier test set holds what that test measured.
        os.environ.clear()
        os.environ.update(environment)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )

        # A run inside another program leaves it initialized.
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            pipe.send((False, function(*arguments)))
        except BaseException:
            with contextlib.suppress(OSError):  # the pool was closed meanwhile
                pipe.send((True, f"rank {rank}:\n{traceback.format_exc()}"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


POOL = RankPool()
"""The pool of this process."""
atexit.register(POOL.close)
