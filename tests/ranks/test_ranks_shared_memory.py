"""Memory that ranks share, and that nobody else can open."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from rank_pool import POOL

from megatier.ranks.rendezvous import joined
from megatier.ranks.shared_memory import share_memory

SIZE = 3


def mapped() -> set[str]:
    """The addresses of shared memory that this process has mapped."""
    maps = re.findall(r".*memfd:megatier.*", Path("/proc/self/maps").read_text())
    return {line.split()[0] for line in maps}


def share(num_bytes: int) -> tuple[bytes, bytes, list[str], int]:
    """Write a byte for each rank into shared memory; what it holds before and then, the names of it, and its mode."""
    with joined("cpu") as ranks:
        assert ranks is not None
        # A process of the pool may still have what a failure of an earlier test holds.
        others = mapped()
        memory = share_memory(ranks, num_bytes)
        before = memory[-ranks.size :]
        ranks.all_gather_object(0)
        memory[num_bytes - 1 - ranks.rank] = 7 + ranks.rank
        ranks.all_gather_object(0)
        named = [path.name for path in Path("/dev/shm").iterdir() if "megatier" in path.name]
        (entry,) = mapped() - others
        mode = stat.S_IMODE((Path("/proc/self/map_files") / entry).stat().st_mode) if os.geteuid() == 0 else 0o600
        return before, memory[-ranks.size :], named, mode


def test_shared_memory_is_the_same_for_all_ranks_and_has_no_name() -> None:
    found = POOL.run(share, SIZE, 8192)
    assert found == [(bytes(3), bytes([9, 8, 7]), [], 0o600)] * SIZE


def share_nothing(what: str) -> str:
    """What memory says that cannot be had on one rank."""
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        if what == "room" and ranks.rank == 0:
            patch.setattr("megatier.ranks.shared_memory.os.posix_fallocate", _refuse)
        if what == "open" and ranks.rank == 1:
            patch.setattr("megatier.ranks.shared_memory.os.open", _refuse)
        with pytest.raises(OSError) as error:
            share_memory(ranks, 8192)
        return str(error.value)


def _refuse(*_: object) -> None:
    raise OSError("none left")


@pytest.mark.parametrize("what", ["room", "open"])
def test_shared_memory_that_one_rank_cannot_have_is_an_error_of_all(what: str) -> None:
    assert POOL.run(share_nothing, 2, what) == ["none left"] * 2
