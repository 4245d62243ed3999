"""Mounts: budgets, locks, private files, and files that are kept."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from block_files import NUM_BYTES, memory, open_files, prepared, read, write

from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.extent import Extent
from megatier.drives.mounts import budget_bytes
from megatier.errors import ConfigError, RunLockedError, TransferError
from megatier.private import PrivateDirectory


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    files = open_files(tmp_path)
    yield files
    files.close()


def test_budget_of_a_mount_beyond_its_drive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers.nvme gives .* 4096.0 TiB, but its drive has .* in all. Lower"):
        budget_bytes(MountBudget(tmp_path, 1 << 52))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_files_of_a_process_that_ends_without_closing_are_removed_unless_kept(
    keeps: bool, forgets: bool, tmp_path: Path
) -> None:
    code = f"""
import os
from pathlib import Path
from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
files = BlockFiles([MountBudget(Path({str(tmp_path)!r}), 1 << 20)], "0123456789ab", IoOptions())
files.reserve(65536)
files.allocate()
files.keep({keeps})
if {forgets}:
    del files
if os.fork() == 0:
    raise SystemExit  # a child ends as well, and leaves the files
os.wait()
assert os.path.exists({str(tmp_path / "megatier-0123456789ab" / "blocks")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert bool(list(tmp_path.iterdir())) is keeps


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
    assert {path.name for path in (tmp_path / "megatier-run").iterdir()} == {"blocks", "lock", "note.json", "savepoint"}
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
    assert {path.name for path in (tmp_path / "megatier-run").iterdir()} == {"lock", "note.json"}
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
