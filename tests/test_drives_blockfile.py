"""Block files: extents over mounts, checksums, locks, and nothing of anybody else's touched."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Extent
from megatier.drives.mounts import budget_bytes
from megatier.errors import CapacityError, ConfigError, IntegrityError, RunLockedError, TransferError
from megatier.private import PrivateDirectory

GRANULE_BYTES = 4096
NUM_BYTES = 10 * GRANULE_BYTES
MIB = 1 << 20


def memory(num_bytes: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """Page-aligned bytes, random or zero."""
    area = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    if seed is not None:
        area[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return area


def open_files(*directories: Path, budget: int | None = MIB, run_id: str = "run", **options: Any) -> BlockFiles:
    mounts = [MountBudget(directory, budget) for directory in directories]
    return BlockFiles(mounts, run_id, IoOptions(**{"num_threads": 2, "granule_bytes": GRANULE_BYTES, **options}))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = open_files(tmp_path)
    yield files
    files.close()


def prepared(files: BlockFiles, *sizes: int) -> list[Extent]:
    extents = [files.reserve(size) for size in sizes]
    files.allocate()
    files.fill()
    return extents


def write(files: BlockFiles, extent: Extent, source: npt.NDArray[np.uint8], start: int = 0) -> None:
    files.write("block", extent, start, start + len(source), source.ctypes.data).wait()


def read(files: BlockFiles, extent: Extent, start: int, stop: int) -> npt.NDArray[np.uint8]:
    target = memory(stop - start)
    files.read("block", extent, start, stop, target.ctypes.data).wait()
    return target


# ---- bytes ----


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_write_then_read_gives_the_bytes(tmp_path: Path, direct: bool, checksums: bool) -> None:
    files = open_files(tmp_path, direct=direct, checksums=checksums)
    first, second = prepared(files, NUM_BYTES, NUM_BYTES - 100)
    source = memory(NUM_BYTES, seed=1)
    write(files, first, source)
    write(files, second, source[::-1].copy() if not direct else memory(NUM_BYTES, seed=2))
    assert np.array_equal(read(files, first, 0, NUM_BYTES), source)
    assert np.array_equal(
        read(files, first, GRANULE_BYTES, 3 * GRANULE_BYTES), source[GRANULE_BYTES : 3 * GRANULE_BYTES]
    )
    assert (tmp_path / "megatier-run" / "blocks").read_bytes()[:NUM_BYTES] == source.tobytes()
    assert files.is_direct is direct or direct
    files.close()


def test_files_go_on_with_another_number_of_threads(files: BlockFiles) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    for count in (5, 1):
        source = memory(NUM_BYTES, seed=count)
        write(files, extent, source)
        files.set_threads(count)
        assert np.array_equal(read(files, extent, 0, NUM_BYTES), source)


def test_fresh_extent_reads_as_zeros_with_valid_checksums(files: BlockFiles) -> None:
    (ragged,) = prepared(files, NUM_BYTES - GRANULE_BYTES // 2)
    assert ragged.num_bytes == NUM_BYTES
    assert not read(files, ragged, 0, NUM_BYTES).any()


def test_file_is_allocated_and_filled_at_full_size(files: BlockFiles, tmp_path: Path) -> None:
    prepared(files, NUM_BYTES, NUM_BYTES)
    found = (tmp_path / "megatier-run" / "blocks").stat()
    assert found.st_size == files.used_bytes == 2 * NUM_BYTES
    assert found.st_blocks * 512 >= 2 * NUM_BYTES


def test_file_system_without_direct_access_falls_back_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            os.close(
                real(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
            )  # some file systems make it before they refuse
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    files = open_files(tmp_path)
    (extent,) = prepared(files, NUM_BYTES)
    assert not files.is_direct
    source = memory(NUM_BYTES, seed=3)
    write(files, extent, source)
    assert np.array_equal(read(files, extent, 0, NUM_BYTES), source)
    files.close()


def test_changed_file_is_an_integrity_error_naming_the_granule(files: BlockFiles, tmp_path: Path) -> None:
    _, extent = prepared(files, NUM_BYTES, NUM_BYTES)
    write(files, extent, memory(NUM_BYTES, seed=4))
    path = tmp_path / "megatier-run" / "blocks"
    offset = NUM_BYTES + 3 * GRANULE_BYTES
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, offset + 5)[0] ^ 1]), offset + 5)
    os.close(file)
    with pytest.raises(IntegrityError, match="block block is damaged") as caught:
        read(files, extent, 0, NUM_BYTES)
    error = caught.value
    assert (error.key, error.path, error.offset) == ("block", str(path), offset)
    assert error.expected == extent.checksums[3] != error.found
    read(files, extent, 4 * GRANULE_BYTES, NUM_BYTES)


def test_truncated_file_is_a_transfer_error(files: BlockFiles, tmp_path: Path) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    path = tmp_path / "megatier-run" / "blocks"
    os.truncate(path, 2 * GRANULE_BYTES)
    with pytest.raises(TransferError, match="ended early") as caught:
        read(files, extent, 0, NUM_BYTES)
    assert (caught.value.tier, caught.value.path, caught.value.offset) == ("nvme", str(path), 2 * GRANULE_BYTES)


def test_span_off_the_granules_asserts(files: BlockFiles) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    for start, stop in ((100, GRANULE_BYTES), (0, GRANULE_BYTES + 100)):
        with pytest.raises(AssertionError, match="granule"):
            files.read("block", extent, start, stop, 0)


# ---- extents ----


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


# ---- budgets, locks, files ----


def test_budget_is_what_was_given_or_nine_tenths_of_the_free_space(tmp_path: Path) -> None:
    assert budget_bytes(MountBudget(tmp_path, 12345)) == 12345
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    assert budget_bytes(MountBudget(tmp_path, None)) == pytest.approx(0.9 * free, rel=0.05)
    with pytest.raises(ConfigError, match="not a directory"):
        budget_bytes(MountBudget(tmp_path / "missing", 1))


def test_directory_and_file_are_private(files: BlockFiles, tmp_path: Path) -> None:
    prepared(files, NUM_BYTES)
    directory = tmp_path / "megatier-run"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_run_id_in_use_is_refused(files: BlockFiles, tmp_path: Path) -> None:
    with pytest.raises(RunLockedError, match="in use by another run"):
        open_files(tmp_path)
    open_files(tmp_path, run_id="another").close()
    assert [path.name for path in tmp_path.iterdir()] == ["megatier-run"]


def test_blocks_that_a_killed_run_of_this_id_left_give_their_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megatier-run").mkdir(mode=0o700)
    blocks = tmp_path / "megatier-run" / "blocks"
    blocks.write_bytes(b"old")
    monkeypatch.setattr("megatier.drives.mounts.free_bytes", lambda _: 0 if blocks.exists() else 10 << 20)
    files = open_files(tmp_path, budget=None)
    assert files.capacity_bytes == 9 << 20
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_second_process_on_the_run_id_is_refused_and_changes_nothing(files: BlockFiles, tmp_path: Path) -> None:
    (extent,) = prepared(files, NUM_BYTES)
    source = memory(NUM_BYTES, seed=5)
    write(files, extent, source)
    script = """
import sys
from pathlib import Path
from megatier.config.values import MountBudget
from megatier.errors import RunLockedError
from megatier.drives.blockfile import BlockFiles, IoOptions
try:
    BlockFiles([MountBudget(Path(sys.argv[1]), 1 << 20)], "run", IoOptions())
except RunLockedError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "megatier-run is in use by another run" in done.stderr
    assert np.array_equal(read(files, extent, 0, NUM_BYTES), source)


def test_one_locked_mount_of_two_lets_go_of_the_other(tmp_path: Path) -> None:
    free, busy = tmp_path / "free", tmp_path / "busy"
    free.mkdir()
    busy.mkdir()
    holder = open_files(busy)
    with pytest.raises(RunLockedError):
        open_files(free, busy)
    assert not list(free.iterdir())
    assert list(busy.iterdir())
    holder.close()
    assert not list(busy.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_mount_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        open_files(tmp_path)
    tmp_path.chmod(0o700)


def test_mount_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="not a directory"):
        open_files(tmp_path / "file")
    (tmp_path / "megatier-run").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="cannot use"):
        open_files(tmp_path)
    assert (tmp_path / "megatier-run").read_bytes() == b"mine"


def test_close_removes_own_files_alone(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    prepared(files, NUM_BYTES)
    (tmp_path / "megatier-run" / "notes.txt").write_text("mine")
    (tmp_path / "megatier-other").mkdir()
    files.close()
    files.close()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["megatier-other", "megatier-run", "megatier-run/notes.txt"]


def test_directory_left_by_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    directory = tmp_path / "megatier-run"
    directory.mkdir(mode=0o700)
    (directory / "lock").touch(mode=0o600)
    (directory / "blocks").write_bytes(b"x" * 3 * NUM_BYTES)
    files = open_files(tmp_path)
    (extent,) = prepared(files, NUM_BYTES)
    assert not read(files, extent, 0, NUM_BYTES).any()
    files.close()
    assert not list(tmp_path.iterdir())


def test_budget_of_a_full_mount_without_a_size_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatier.drives.mounts.free_bytes", lambda _: 0)
    with pytest.raises(ConfigError, match=f"{tmp_path} is full. Free space on it"):
        budget_bytes(MountBudget(tmp_path, None))


# ---- files that are kept ----


def test_mark_is_made_when_the_files_of_all_mounts_are_on_their_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [tmp_path / "a", tmp_path / "b"]
    for mount in mounts:
        mount.mkdir()
    files = BlockFiles([MountBudget(mount, 4 << 20) for mount in mounts], "run", IoOptions(num_threads=1))
    prepared(files, NUM_BYTES)
    calls: list[tuple[str, str]] = []

    def place(path: Path) -> str:
        return "/".join(path.relative_to(tmp_path).parts)

    def synchronise(file: int) -> None:
        calls.append(("sync", place(Path(f"/proc/self/fd/{file}").readlink())))

    def mark(directory: PrivateDirectory, name: str) -> None:
        calls.append(("mark", place(directory.path / name)))

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(PrivateDirectory, "mark", mark)
    files.keep(True)
    inside = [[f"{name}/megatier-run/blocks", f"{name}/megatier-run", name] for name in "ab"]
    assert calls == [
        *(("sync", path) for paths in inside for path in paths),
        *(("mark", f"{name}/megatier-run/savepoint") for name in "ab"),
        *(("sync", f"{name}/megatier-run") for name in "ab"),
    ]
    calls.clear()
    files.keep(False)
    assert calls == []
    files.close()


def keep_one(directory: Path) -> tuple[Extent, npt.NDArray[np.uint8]]:
    """A process that keeps one block."""
    files, source = open_files(directory), memory(NUM_BYTES, seed=1)
    extent = prepared(files, NUM_BYTES)[0]
    write(files, extent, source)
    files.keep(True)
    files.close()
    return extent, source


def test_files_that_are_kept_are_taken_with_what_is_in_them(tmp_path: Path) -> None:
    extent, source = keep_one(tmp_path)
    assert {path.name for path in (tmp_path / "megatier-run").iterdir()} == {"blocks", "lock", "savepoint"}
    files = open_files(tmp_path, reuses=True)
    again = prepared(files, NUM_BYTES)[0]
    assert again.stripes == extent.stripes
    again.checksums[:] = extent.checksums
    assert (read(files, again, 0, NUM_BYTES) == source).all()
    files.close()
    assert (tmp_path / "megatier-run" / "blocks").exists(), "they are kept until somebody says otherwise"
    files = open_files(tmp_path, reuses=True)
    files.keep(False)
    files.close()
    assert not list(tmp_path.iterdir())


def test_files_that_are_kept_are_made_anew_unless_they_are_asked_for(tmp_path: Path) -> None:
    keep_one(tmp_path)
    files = open_files(tmp_path)
    assert {path.name for path in (tmp_path / "megatier-run").iterdir()} == {"lock"}
    files.close()


def test_files_that_are_kept_are_not_made_where_they_are_missing(tmp_path: Path) -> None:
    files = open_files(tmp_path, reuses=True)
    files.reserve(NUM_BYTES)
    with pytest.raises(TransferError, match=r"opening failed on tier nvme, .*/blocks at byte 0: No such file"):
        files.allocate()
    files.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["sync", "keep"])
def test_files_that_a_drive_does_not_keep_say_so(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files = open_files(tmp_path)
    prepared(files, NUM_BYTES)
    with monkeypatch.context() as patch, pytest.raises(TransferError, match="Check the drive"):
        patch.setattr(os, "fsync", refuse)
        patch.setattr(os, "open", refuse)
        files.sync() if call == "sync" else files.keep(True)
    files.close()
