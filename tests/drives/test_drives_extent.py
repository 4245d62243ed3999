"""Extents: how blocks are spread over mounts, and what a reservation refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from block_files import GRANULE_BYTES, MIB, NUM_BYTES, memory, open_files, prepared, read, write

from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Striping
from megatier.errors import CapacityError
from megatier.tier import PAGE_BYTES


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = open_files(tmp_path)
    yield files
    files.close()


def test_stripes_go_round_mounts_by_the_shares_given_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.drives.extent.STRIPE_BYTES", GRANULE_BYTES)
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir()
    mounts = [MountBudget(tmp_path / "fast", 12 * GRANULE_BYTES), MountBudget(tmp_path / "slow", 100 * GRANULE_BYTES)]
    options = IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES, shares=(3e9, 1e9))
    files = BlockFiles(mounts, "run", options)

    def taken(num_granules: int) -> list[int]:
        stripes = files.reserve(num_granules * GRANULE_BYTES).stripes
        return [sum(s.num_bytes for s in stripes if s.mount == mount) // GRANULE_BYTES for mount in (0, 1)]

    assert taken(8) == [6, 2]
    assert taken(16) == [6, 10]  # the fast one is full
    files.close()


def test_stripes_go_round_mounts_by_free_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.drives.extent.STRIPE_BYTES", 2 * GRANULE_BYTES)
    large, small = tmp_path / "large", tmp_path / "small"
    large.mkdir()
    small.mkdir()
    mounts = [MountBudget(large, 64 * GRANULE_BYTES), MountBudget(small, 16 * GRANULE_BYTES)]
    files = BlockFiles(mounts, "run", IoOptions(num_threads=2, granule_bytes=GRANULE_BYTES))
    extents = prepared(files, *[NUM_BYTES] * 4)
    taken = [sum(s.num_bytes for e in extents for s in e.stripes if s.mount == mount) for mount in (0, 1)]
    assert sum(taken) == 4 * NUM_BYTES
    assert abs(taken[0] / taken[1] - 4) < 1
    for seed, extent in enumerate(extents):
        write(files, extent, memory(NUM_BYTES, seed))
    for seed, extent in enumerate(extents):
        assert np.array_equal(read(files, extent, 0, NUM_BYTES), memory(NUM_BYTES, seed))
    files.close()


def test_reserve_uses_every_mount_to_its_last_granule(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    files = open_files(*directories, budget=7 * GRANULE_BYTES)
    extent = files.reserve(20 * GRANULE_BYTES)
    assert sorted(stripe.num_bytes // GRANULE_BYTES for stripe in extent.stripes) == [6, 7, 7]
    assert files.used_bytes == 20 * GRANULE_BYTES
    with pytest.raises(CapacityError) as caught:
        files.reserve(2 * GRANULE_BYTES)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (2 * GRANULE_BYTES, GRANULE_BYTES)
    assert files.used_bytes == 20 * GRANULE_BYTES
    files.close()


def test_reserve_beyond_the_budget_leaves_no_trace(files: BlockFiles) -> None:
    files.reserve(MIB // 2)
    with pytest.raises(CapacityError, match="add a mount") as caught:
        files.reserve(MIB)
    assert (caught.value.tier, caught.value.needed_bytes, caught.value.free_bytes) == ("nvme", MIB, MIB // 2)
    assert files.used_bytes == MIB // 2


def test_disk_smaller_than_the_reservation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = open_files(tmp_path)
    files.reserve(NUM_BYTES)
    with pytest.raises(CapacityError, match=r"smaller size in tiers\.nvme") as caught:
        files.allocate()
    assert caught.value.needed_bytes == NUM_BYTES
    files.close()
    assert not list(tmp_path.iterdir())


def test_every_granule_but_the_last_lies_on_one_mount_whatever_the_budgets() -> None:
    granule = 16 * PAGE_BYTES
    striping = Striping([3 * granule + PAGE_BYTES, 5 * granule + 2 * PAGE_BYTES], [1, 1], granule)
    stripes = striping.reserve(7 * granule + PAGE_BYTES).stripes
    assert {stripe.mount for stripe in stripes} == {0, 1}
    assert [stripe.start % granule for stripe in stripes] == [0] * len(stripes)
