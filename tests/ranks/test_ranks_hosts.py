"""Ranks on two hosts, which are network namespaces with a cable between them: runs, restarts, and faults."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS
from rank_pool import free_port
from small_commands import command, leftovers, metrics, outcome
from test_ranks_faults import wait_until
from test_ranks_savepoints import savepoints, words_of
from warm_python import MEGATIER, Process, WarmPython

HOSTS = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
EACH = 2
"""Ranks of each host."""
LOOKS = 4
"""Looks, as many ticks of who waits for a store, and the search for who broke a connection."""
NUMBERS = itertools.count()

pytestmark = pytest.mark.slow


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


class Cable:
    """Two hosts and the cable between them."""

    def __init__(self) -> None:
        number = f"{os.getpid()}x{next(NUMBERS)}"
        self.namespaces = [f"{host}{number}" for host in HOSTS]
        self.ends = [f"m{side}{number}" for side in "ab"]

    def plug(self) -> None:
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for namespace, end, address in zip(self.namespaces, self.ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", namespace)
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.namespaces[0], "link", "set", self.ends[0], "down")

    def remove(self) -> None:
        for namespace in self.namespaces:
            ip("netns", "del", namespace, check=False)


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.plug()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"network namespaces are not allowed here ({error})")
    yield made
    made.remove()


@contextlib.contextmanager
def ranks(
    python: WarmPython, cable: Cable, words: Sequence[str], hosts: int = 2, killed: tuple[int, str] = (-1, "")
) -> Iterator[list[Process]]:
    """The ranks of a command, EACH on a host. The store is in the first one. One rank may be killed at a place."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(hosts * EACH):
            host = rank // EACH
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(hosts * EACH),
                "LOCAL_RANK": str(rank % EACH),
                "LOCAL_WORLD_SIZE": str(EACH),
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(port),
                # The name of a host leads to its address elsewhere.
                "GLOO_SOCKET_IFNAME": cable.ends[host],
                "KILLED_IN": killed[1] if rank == killed[0] else "",
            }
            program: list[str | Path] = [FAULTS / "on_host.py", cable.namespaces[host], HOSTS[host], str(LOOKS), *words]
            started.append(stack.enter_context(python.start(program, environment)))
        yield started


def settings(folder: Path, **changed: Any) -> list[str]:
    """The command of a run of four groups a step."""
    return command(folder, {"train.groups": 4, "tiers.gpu": "8MiB", "tiers.ram": "32MiB", **changed})


def check_end(started: Sequence[Process]) -> None:
    for process in started:
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors


def test_run_on_two_hosts_has_the_bits_of_one_process_and_goes_on_with_other_numbers_of_hosts(
    cable: Cable, tmp_path: Path, python: WarmPython
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    changed: dict[str, Any] = {"train.steps": 6, "output.checkpoint_every": 2, "output.keep_checkpoints": 3}
    for folder in (alone, shared):
        folder.mkdir()
    done = python.run([MEGATIER, *settings(alone, **changed)])
    assert done.returncode == 0, done.stderr
    with ranks(python, cable, settings(shared, **changed)) as started:
        check_end(started)
    assert outcome(shared / "run") == outcome(alone / "run")

    # From step 2 on one host, and from step 4 of that on two again.
    for step, hosts in ((2, 1), (4, 2)):
        for later in range(step + 2, 8, 2):
            shutil.rmtree(shared / f"run/checkpoints/step-{later:08d}")
        shutil.rmtree(shared / "run/model")
        with ranks(python, cable, ["resume", str(shared / "run")], hosts) as started:
            check_end(started)
        assert outcome(shared / "run") == outcome(alone / "run")


@contextlib.contextmanager
def training(python: WarmPython, cable: Cable, folder: Path) -> Iterator[list[Process]]:
    """Ranks on two hosts that have done some steps of many."""
    drive = folder / "drive"
    drive.mkdir()
    changed = {"tiers.state": "nvme", "tiers.nvme": f"{drive}:64MiB", "train.steps": 10_000}
    with ranks(python, cable, settings(folder, **changed)) as started:
        wait_until(lambda: (folder / "run" / "metrics.jsonl").exists() and len(metrics(folder)) > 2)
        yield started


def check_ends(started: Sequence[Process], told: Mapping[int, str]) -> None:
    """Ranks end, each with what it has to say."""
    for rank, text in told.items():
        output, errors = started[rank].communicate()
        assert started[rank].returncode == 2, errors
        assert re.search(text, errors), errors
        assert "Traceback" not in output + errors


def test_told_rank_of_another_host_stops_all_with_a_checkpoint(
    cable: Cable, tmp_path: Path, python: WarmPython
) -> None:
    with training(python, cable, tmp_path) as started:
        started[3].send_signal(signal.SIGTERM)
        check_end(started)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{max(record['step'] for record in metrics(tmp_path)):08d}"


@pytest.mark.parametrize("killed", [3, 0])
def test_rank_that_is_killed_ends_the_ranks_of_both_hosts(
    killed: int, cable: Cable, tmp_path: Path, python: WarmPython
) -> None:
    with training(python, cable, tmp_path) as started:
        started[killed].send_signal(signal.SIGKILL)
        text = rf"rank {killed} on {HOSTS[killed // EACH]} failed"
        check_ends(started, {rank: text for rank in range(4) if rank != killed})


def test_cable_that_is_cut_ends_the_ranks_of_both_hosts(cable: Cable, tmp_path: Path, python: WarmPython) -> None:
    with training(python, cable, tmp_path) as started:
        cable.cut()
        silent = rf"rank [23] on {HOSTS[1]} failed, .* no sign of life"
        no_store = rf"rank 0 on {HOSTS[0]} failed, .* no longer answers"
        check_ends(started, {0: silent, 1: silent, 2: no_store, 3: no_store})
    assert [path for path in leftovers(tmp_path) if path.name == "lock"] == []


@pytest.mark.parametrize(("killed", "place", "last"), [(3, "mark", 2), (0, "name", 4)])
def test_savepoint_of_two_hosts_of_which_a_rank_is_killed_goes_on_to_the_bits_of_one_process(
    killed: int, place: str, last: int, cable: Cable, tmp_path: Path, python: WarmPython
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    done = python.run([MEGATIER, *words_of(alone, "ram", **{"output.savepoint_every": 0})])
    assert done.returncode == 0, done.stderr

    # The budget of RAM is that of a host, so that some state lies on each tier of each of four ranks.
    words = words_of(shared, "all", **{"tiers.ram": "7MiB"})
    with ranks(python, cable, words, killed=(killed, place)) as started:
        assert started[killed].wait() == -signal.SIGKILL
        text = rf"rank {killed} on {HOSTS[killed // EACH]} failed"
        check_ends(started, {rank: text for rank in range(4) if rank != killed})
    folder = shared / f"run/savepoints/step-{last:08d}"
    assert savepoints(shared)[-1] == folder.name
    assert [len(list(folder.glob(f"rank-{rank}/state/*"))) > 0 for rank in range(4)] == [True] * 4

    # One host of two has not all of it.
    with ranks(python, cable, ["resume", str(shared / "run")], hosts=1) as started:
        refusal = r"\(ranks: 4, hosts: 2; now ranks: 2, hosts: 1\)\. Start as many as there were\."
        check_ends(started, {0: refusal, 1: refusal})

    with ranks(python, cable, ["resume", str(shared / "run")]) as started:
        said, errors = started[0].communicate()
        assert f"savepoint {folder.name}: weights and moments in place" in said, errors
        check_end(started[1:])
    assert outcome(shared / "run") == outcome(alone / "run")
    assert list((shared / "drive").iterdir()) == []
