"""A rank that fails, dies or hangs: all ranks end soon, and name the rank and the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from from_outside import FAULTS
from small_commands import command, metrics
from warm_python import MEGATIER, Process, WarmPython

from megatier.tier import Transport

START_S = 120.0
PLACES = ("forward", "backward", "gather", "scatter")


@contextmanager
def ranks(python: WarmPython, programs: Sequence[Sequence[str | Path]]) -> Iterator[list[Process]]:
    """Ranks of a run, each with its program. The store is in this process, as it is in that of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                python.start(
                    words,
                    {
                        **os.environ,
                        "RANK": str(rank),
                        "WORLD_SIZE": str(len(programs)),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                    },
                )
            )
            for rank, words in enumerate(programs)
        ]


def endings(python: WarmPython, folder: Path, kind: str, place: str, *way: str) -> list[dict[str, Any] | int]:
    """What each of two ranks says at its end, or the signal that ended it."""
    found: list[dict[str, Any] | int] = []
    program: list[str | Path] = [FAULTS / "ranks.py", folder, kind, place, *way]
    with ranks(python, [program, program]) as started:
        for process in started:
            if found and kind == "SIGSTOP":
                process.send_signal(signal.SIGKILL)
            output, errors = process.communicate()
            assert "Traceback" not in errors, errors
            # With torch 2.10 gloo says on standard output to whom it is connected.
            said = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
            found.append(json.loads("".join(said)) if said else process.wait())
    return found


def check_other(ending: dict[str, Any] | int, cause: str) -> None:
    """The rank that did not fail names the one that did, and leaves nothing behind."""
    assert isinstance(ending, dict)
    assert (ending["error"], ending["rank"]) == ("PeerError", 1), ending["text"]
    assert f"rank 1 on {socket.gethostname()} failed" in ending["text"]
    assert cause in ending["text"]
    assert ending["left"] == []


def cases(*usual: str) -> list[object]:
    """All places. The default run takes some."""
    return [place if place in usual else pytest.param(place, marks=pytest.mark.slow) for place in PLACES]


@pytest.mark.parametrize("place", [*cases(), "exchange"])
def test_rank_with_an_error_ends_all_ranks_with_it(place: str, tmp_path: Path, python: WarmPython) -> None:
    other, failed = endings(python, tmp_path, "error", place)
    check_other(other, f"ValueError: odd in {place}.")
    assert isinstance(failed, dict)
    assert (failed["error"], failed["text"], failed["left"]) == ("ValueError", f"odd in {place}", [])


@pytest.mark.parametrize("place", [*cases("gather"), pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_rank_that_is_killed_ends_all_ranks(place: str, tmp_path: Path, python: WarmPython) -> None:
    other, failed = endings(python, tmp_path, "SIGKILL", place)
    check_other(other, "its process ended without a word")
    assert failed == -signal.SIGKILL


@pytest.mark.parametrize("place", [*cases("backward"), pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_rank_that_is_stopped_ends_the_others_once_it_was_silent_for_long(
    place: str, tmp_path: Path, python: WarmPython
) -> None:
    other, failed = endings(python, tmp_path, "SIGSTOP", place)
    check_other(other, "it has given no sign of life")
    assert failed == -signal.SIGKILL


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [Transport.COPIES, Transport.RAM, Transport.KERNELS])
@pytest.mark.parametrize("kind", ["error", "SIGKILL"])
def test_rank_that_fails_on_a_gpu_ends_all_ranks(
    kind: str, way: Transport, place: str, tmp_path: Path, python: WarmPython
) -> None:
    other, failed = endings(python, tmp_path, kind, place, way)
    check_other(other, f"odd in {place}" if kind == "error" else "its process ended without a word")
    assert failed == -signal.SIGKILL if kind == "SIGKILL" else isinstance(failed, dict)


def check_drive(place: str, folder: Path, python: WarmPython, kind: str, cause: str) -> None:
    """The rank whose drive fails ends with its own error, and the other one with that."""
    other, failed = endings(python, folder, kind, place)
    check_other(other, cause)
    assert isinstance(failed, dict)
    assert failed["error"] == "TransferError"


@pytest.mark.parametrize("place", cases("forward"))
def test_rank_whose_drive_cannot_be_read_ends_all_ranks(place: str, tmp_path: Path, python: WarmPython) -> None:
    check_drive(place, tmp_path, python, "EIO", "Input/output error")


@pytest.mark.parametrize("place", cases("backward"))
def test_rank_whose_drive_is_full_ends_all_ranks(place: str, tmp_path: Path, python: WarmPython) -> None:
    check_drive(place, tmp_path, python, "full", "No space left on device")


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_train_of_which_a_rank_is_killed_ends_with_a_message_and_leaves_no_block_files(
    number: int, tmp_path: Path, python: WarmPython
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    with training(python, tmp_path, drive) as started:
        started[number].send_signal(signal.SIGKILL)

        # As torchrun does when a rank has died.
        started[1 - number].send_signal(signal.SIGTERM)
        output, errors = started[1 - number].communicate()

    assert started[1 - number].returncode == 2
    assert re.search(
        rf"^megatier: error: rank {number} on \S+ failed, .* its process ended without a word", errors, re.M
    )
    assert "Traceback" not in output + errors
    assert [path.name.rpartition("-")[2] for path in drive.iterdir()] == [str(number)]


@pytest.mark.parametrize("told", [[1], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_train_of_which_ranks_are_told_to_stop_stops_on_all_with_a_checkpoint(
    told: list[int], tmp_path: Path, python: WarmPython
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    with training(python, tmp_path, drive) as started:
        for number in told:
            started[number].send_signal(signal.SIGTERM)
        for process in started:
            assert process.wait() == 0, process.communicate()

    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    last = max(record["step"] for record in metrics(tmp_path))
    assert saved.name == f"step-{last:08d}"
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow, id="terminate"), pytest.param(signal.SIGINT, id="interrupt")],
)
def test_train_that_waits_for_other_ranks_ends_at_a_signal(
    number: signal.Signals, tmp_path: Path, python: WarmPython
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with lone_rank(python, tmp_path, 0, store.port) as process:
        wait_until(lambda: store.check(["megatier"]))
        check_ends(process, number)


def test_train_whose_store_does_not_answer_ends_at_a_signal(tmp_path: Path, python: WarmPython) -> None:
    """torch waits in C++ for the answer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        lone_rank(python, tmp_path, 1, server.getsockname()[1]) as process,
        server.accept()[0],
    ):
        check_ends(process, signal.SIGTERM)


def lone_rank(python: WarmPython, folder: Path, rank: int, port: int) -> Process:
    """A rank of two, of which the other one does not come."""
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return python.start([MEGATIER, *command(folder, {"train.groups": 2})], {**os.environ, **environment})


def check_ends(process: Process, number: signal.Signals) -> None:
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "megatier: interrupted.\n")


@contextmanager
def training(python: WarmPython, folder: Path, drive: Path) -> Iterator[list[Process]]:
    """Two ranks of `megatier train` that have done some steps of many."""
    settings = {"tiers.state": "nvme", "tiers.nvme": f"{drive}:64MiB", "train.steps": 10_000, "train.groups": 2}
    with ranks(python, 2 * [[MEGATIER, *command(folder, settings)]]) as started:
        wait_until(lambda: (folder / "run" / "metrics.jsonl").exists() and len(metrics(folder)) > 2)
        yield started


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
