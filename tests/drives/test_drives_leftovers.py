"""What killed processes leave on mounts: found, removed, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatier.config.values import MountBudget
from megatier.drives import leftovers
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.drives.leftovers import find_leftovers, is_abandoned, left_bytes
from megatier.errors import ConfigError, RunLockedError, TransferError
from megatier.private import lock_directory

NAME = "megatier-0123456789ab"
KILLED = """
import os, signal, sys
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Tier
store = TieredStore.open(ram="1MiB", nvme=[f"{sys.argv[1]}:1MiB"])
store.register(BlockSpec("a", 64 << 10, Tier.NVME))
store.seal()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a killed run leaves, on a mount of its own."""
    return make_left(tmp_path / "mount" / NAME)


def make_left(directory: Path) -> Path:
    directory.mkdir(parents=True, mode=0o700)
    (directory / "lock").touch(mode=0o600)
    (directory / "blocks").touch(mode=0o600)
    (directory / "blocks").write_bytes(b"x" * (64 << 10))
    return directory


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def reasons(mount: Path) -> list[str]:
    """Why each directory stays; all of them are still there afterwards."""
    before = tree(mount)
    found = list(find_leftovers(mount, remove=True))
    assert tree(mount) == before
    return [each.stays for each in found]


def test_leftover_of_a_killed_process_is_found_then_removed(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60).returncode == -signal.SIGKILL
    [directory] = tmp_path.iterdir()
    for remove in (False, True):
        assert {path.name for path in directory.iterdir()} == {"blocks", "lock", "note.json"}
        [found] = find_leftovers(tmp_path, remove=remove)
        assert (found.path, found.stays) == (directory, "")
        assert found.num_bytes >= 64 << 10
        assert found.age_s >= 0
        assert found.note is not None
        assert found.note.owner == f"a program in {Path.cwd()}"
    assert not list(tmp_path.iterdir())


def test_leftover_of_a_run_killed_before_its_first_block_is_removed(left: Path) -> None:
    (left / "blocks").unlink()
    [found] = find_leftovers(left.parent, remove=True)
    assert (found.stays, found.num_bytes) == ("", 0)
    assert not left.exists()


def test_leftover_is_locked_while_it_is_removed(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, tried = os.unlink, []

    def unlink_late(name: str, *, dir_fd: int) -> None:
        with pytest.raises(RunLockedError):
            lock_directory(left)
        tried.append(name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_late)
    list(find_leftovers(left.parent, remove=True))
    assert tried == ["savepoint", "blocks", "note.json", "lock"]
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"owner": "me"}', b"[" * 20000])
def test_leftover_whose_note_cannot_be_read_has_none(content: bytes, left: Path) -> None:
    (left / "note.json").touch(mode=0o600)
    (left / "note.json").write_bytes(content)
    [found] = find_leftovers(left.parent, remove=True)
    assert (found.note, found.stays) == (None, "")
    assert not left.exists()


def test_directory_of_a_live_run_stays(tmp_path: Path) -> None:
    files = BlockFiles([MountBudget(tmp_path, 1 << 20)], NAME.removeprefix("megatier-"), IoOptions(num_threads=1))
    files.reserve(64 << 10)
    files.allocate()
    assert reasons(tmp_path) == ["a run uses it"]
    files.close()
    assert not list(tmp_path.iterdir())


def test_lock_whose_file_its_last_holder_removed_is_no_leftovers(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = leftovers._take

    def take_late(lock: int, kind: int) -> bool:
        """Another run comes between our open and our lock."""
        (left / "lock").unlink()
        (left / "lock").touch(mode=0o600)
        return take(lock, kind)

    monkeypatch.setattr(leftovers, "_take", take_late)
    assert reasons(left.parent) == ["a run uses it"]


def test_left_bytes_are_those_that_a_run_frees_when_it_locks_its_directories(left: Path) -> None:
    make_left(left.with_name(f"{NAME}-1"))
    run_id = NAME.removeprefix("megatier-")
    taken = (left / "blocks").stat().st_blocks * 512
    assert taken
    for ids, count in [([], 0), ([run_id], 1), ([run_id, f"{run_id}-1"], 2), ([f"{run_id}-2"], 0)]:
        assert left_bytes(left.parent, ids) == count * taken

    # The ranks of a host look at the same time, and have to see the same.
    with (left / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert left_bytes(left.parent, [run_id]) == taken
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert left_bytes(left.parent, [run_id]) == 0, "a run uses it"

    (left / "savepoint").touch(mode=0o600)
    assert left_bytes(left.parent, [run_id]) == 0, "a run could go on from it"


def link_instead(directory: Path) -> None:
    """Its files, through a link, are somebody's elsewhere."""
    directory.rename(directory.parent.parent / "elsewhere")
    directory.symlink_to(directory.parent.parent / "elsewhere")


def link_instead_of(name: str) -> Callable[[Path], None]:
    def put(directory: Path) -> None:
        (directory / name).rename(directory.parent.parent / "elsewhere")
        (directory / name).symlink_to(directory.parent.parent / "elsewhere")

    return put


def file_instead(directory: Path) -> None:
    directory.rename(directory.parent.parent / "elsewhere")
    directory.write_bytes(b"mine")


def folder_of_blocks(directory: Path) -> None:
    (directory / "blocks").unlink()
    (directory / "blocks").mkdir()


def second_name_of_blocks(directory: Path) -> None:
    """What is written here is written there."""
    (directory.parent.parent / "elsewhere").hardlink_to(directory / "blocks")


def pipe_instead_of_lock(directory: Path) -> None:
    (directory / "lock").unlink()
    os.mkfifo(directory / "lock")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link_instead, "it is no directory"),
        (file_instead, "it is no directory"),
        (lambda directory: (directory / "lock").unlink(), "it has no lock"),
        (link_instead_of("lock"), "its lock is a link"),
        (link_instead_of("blocks"), "no run made 'blocks' in it"),
        (folder_of_blocks, "no run made 'blocks' in it"),
        (pipe_instead_of_lock, "no run made 'lock' in it"),
        (second_name_of_blocks, "no run made 'blocks' in it"),
        (lambda directory: (directory / "blocks").chmod(0o666), "no run made 'blocks' in it"),
        (lambda directory: directory.chmod(0o777), "other users may open it"),
        (lambda directory: (directory / "notes\n.txt").touch(), "no run made 'notes\\n.txt' in it"),
    ],
)
def test_look_alike_stays_and_says_why(change: Callable[[Path], Any], reason: str, left: Path) -> None:
    change(left)
    outside = {path: path.is_dir() or path.read_bytes() for path in left.parent.parent.glob("elsewhere*")}
    assert reasons(left.parent) == [reason]
    assert all(path.is_dir() or path.read_bytes() == before for path, before in outside.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
@pytest.mark.parametrize(("name", "reason"), [("", "it is another user's"), ("blocks", "no run made 'blocks' in it")])
def test_directory_with_another_users_files_stays(name: str, reason: str, left: Path) -> None:
    os.chown(left / name, 65534, 65534)
    assert reasons(left.parent) == [reason]


@pytest.mark.parametrize(
    "name", ["megatier-run", "megatier-0123456789a", "megatier-0123456789abc", "megatier-0123456789AB", f"x{NAME}"]
)
def test_directory_of_another_name_is_not_even_listed(name: str, tmp_path: Path) -> None:
    make_left(tmp_path / name)
    assert reasons(tmp_path) == []


@pytest.mark.parametrize("name", ["megatier-bench-0123456789ab", f"{NAME}-11"])
def test_leftover_of_bench_or_of_a_rank_is_removed(name: str, tmp_path: Path) -> None:
    make_left(tmp_path / name)
    assert [each.stays for each in find_leftovers(tmp_path, remove=True)] == [""]
    assert not list(tmp_path.iterdir())


def test_leftover_of_one_run_is_found_by_its_id(tmp_path: Path) -> None:
    made = [make_left(tmp_path / name) for name in (NAME, f"{NAME}-1", "megatier-aaaaaaaaaaaa")]
    found = find_leftovers(tmp_path, remove=True, run_id=NAME.removeprefix("megatier-"))
    assert [leftover.path for leftover in found] == made[:2]
    assert [path.exists() for path in made] == [False, False, True]


def test_drive_that_does_not_let_go_is_an_error(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *, dir_fd: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(TransferError, match=f"removing failed on tier nvme, {left}.*Read-only file system"):
        list(find_leftovers(left.parent, remove=True))


def test_mount_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
        list(find_leftovers(tmp_path / "none"))


def test_directory_is_abandoned_once_its_holder_is_gone(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)
    lock = lock_directory(tmp_path)
    assert not is_abandoned(tmp_path)
    os.close(lock)
    assert is_abandoned(tmp_path)
