"""Directories on mounts that others write to: what they may have put there is refused."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatier.config.values import MountBudget
from megatier.drives.blockfile import BlockFiles, IoOptions
from megatier.errors import ConfigError, RunLockedError, TransferError
from megatier.private import PrivateDirectory, lock_directory

NOBODY = 65534
NUM_BYTES = 64 << 10


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """To which everybody may write."""
    mount = tmp_path / "mount"
    mount.mkdir()
    mount.chmod(0o777)
    return mount


@pytest.fixture
def kept(mount: Path) -> Path:
    """A run's directory there, kept for a savepoint."""
    files = block_files(mount, reuses=False)
    files.allocate()
    files.keep(True)
    files.close()
    return mount / "megatier-run"


def block_files(mount: Path, *, reuses: bool) -> BlockFiles:
    files = BlockFiles([MountBudget(mount, 1 << 20)], "run", IoOptions(num_threads=1, reuses=reuses))
    files.reserve(NUM_BYTES)
    return files


def elsewhere(path: Path) -> Path:
    """A place outside the mount, for what had this path."""
    return path.rename(path.parents[2 if path.parent.name == "megatier-run" else 1] / "elsewhere")


def link(path: Path) -> None:
    path.symlink_to(elsewhere(path))


def link_to_nothing(path: Path) -> None:
    target = elsewhere(path)
    path.symlink_to(target.with_name("nothing"))


def second_name(path: Path) -> None:
    path.hardlink_to(elsewhere(path))


def pipe(path: Path) -> None:
    elsewhere(path)
    os.mkfifo(path)


def folder(path: Path) -> None:
    elsewhere(path)
    path.mkdir()


def file(path: Path) -> None:
    elsewhere(path)
    path.touch(mode=0o600)


def open_to_others(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


def open_to_the_group(path: Path) -> None:
    path.chmod(0o710 if path.is_dir() else 0o640)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Kind, mode and content of everything below."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def refused(mount: Path, message: str, *, reuses: bool) -> None:
    """Opening must fail with this message and change nothing."""
    before = snapshot(mount.parent)
    with pytest.raises((ConfigError, TransferError), match=message) as caught:
        files = block_files(mount, reuses=reuses)
        try:
            files.allocate()
        finally:
            files.close()
    assert str(mount) in str(caught.value)
    assert snapshot(mount.parent) == before


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (link, "megatier-run: it is a link. .* remove it, or name another directory"),
        (link_to_nothing, "megatier-run: it is a link"),
        (file, "megatier-run: it is no directory"),
        (pipe, "megatier-run: it is no directory"),
        (open_to_others, r"megatier-run: other users may open it \(mode 0777\)"),
        (open_to_the_group, r"megatier-run: other users may open it \(mode 0710\)"),
    ],
)
def test_directory_that_others_may_have_planted_is_refused(
    harm: Callable[[Path], None], message: str, reuses: bool, kept: Path
) -> None:
    harm(kept)
    refused(kept.parent, message, reuses=reuses)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (link, "megatier-run/lock: it is a link"),
        (link_to_nothing, "megatier-run/lock: it is a link"),
        (second_name, r"megatier-run/lock: it has another name as well \(a hard link\)"),
        (pipe, "megatier-run/lock: it is no regular file"),
        (folder, "megatier-run/lock: Is a directory"),
        (open_to_others, r"megatier-run/lock: other users may open it \(mode 0666\)"),
    ],
)
def test_lock_that_others_may_have_planted_is_refused(
    harm: Callable[[Path], None], message: str, reuses: bool, kept: Path
) -> None:
    harm(kept / "lock")
    refused(kept.parent, message, reuses=reuses)


BLOCKS = [
    (link, "blocks at byte 0: Too many levels of symbolic links"),
    (link_to_nothing, "blocks at byte 0: Too many levels of symbolic links"),
    (second_name, "megatier-run/blocks: it has another name as well"),
    (pipe, "megatier-run/blocks.* (it is no regular file|Invalid argument)"),
    (folder, "blocks at byte 0: Is a directory"),
    (open_to_others, r"megatier-run/blocks: other users may open it \(mode 0666\)"),
    (open_to_the_group, r"megatier-run/blocks: other users may open it \(mode 0640\)"),
]


@pytest.mark.parametrize(("harm", "message"), BLOCKS)
def test_kept_block_file_that_others_may_have_planted_is_refused(
    harm: Callable[[Path], None], message: str, kept: Path
) -> None:
    harm(kept / "blocks")
    refused(kept.parent, message, reuses=True)


@pytest.mark.parametrize("harm", [link, link_to_nothing, second_name, pipe, open_to_others])
def test_new_run_makes_its_block_file_in_the_place_of_any_other(harm: Callable[[Path], None], kept: Path) -> None:
    harm(kept / "blocks")
    outside = kept.parents[1] / "elsewhere"
    before = outside.read_bytes() if outside.exists() else b""
    files = block_files(kept.parent, reuses=False)
    files.allocate()
    files.fill()
    found = (kept / "blocks").lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (stat.S_IMODE(found.st_mode), found.st_nlink, found.st_size) == (0o600, 1, NUM_BYTES)
    files.close()
    assert not kept.exists()
    assert (outside.read_bytes() if outside.exists() else b"") == before


def test_block_file_that_appears_while_a_run_starts_is_not_written(mount: Path) -> None:
    files = block_files(mount, reuses=False)
    (mount / "megatier-run" / "blocks").write_bytes(b"mine")
    with pytest.raises(TransferError, match=r"opening failed .*blocks at byte 0: File exists"):
        files.allocate()
    assert (mount / "megatier-run" / "blocks").read_bytes() == b"mine"
    files.close()


@pytest.mark.parametrize("name", ["", "lock", "blocks"])
def test_directory_or_file_of_another_user_is_refused(name: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, fstat = (kept / name).stat(), os.fstat

    def fstat_of_nobody(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        return os.stat_result((*found[:4], NOBODY, *found[5:])) if os.path.samestat(found, owner) else found

    monkeypatch.setattr(os, "fstat", fstat_of_nobody)
    refused(kept.parent, rf"{kept / name}: it belongs to another user \(uid {NOBODY}\)", reuses=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
@pytest.mark.parametrize("name", ["", "lock", "blocks"])
def test_directory_or_file_given_away_is_refused(name: str, kept: Path) -> None:
    os.chown(kept / name, NOBODY, NOBODY)
    refused(kept.parent, rf"{kept / name}: it belongs to another user \(uid {NOBODY}\)", reuses=True)


def test_mount_that_is_a_link_is_fine(mount: Path) -> None:
    named = mount.parent / "named"
    named.symlink_to(mount)
    files = block_files(named, reuses=False)
    files.allocate()
    files.sync()
    assert (mount / "megatier-run" / "blocks").stat().st_size == NUM_BYTES
    files.close()
    assert not list(mount.iterdir())


def test_directory_exchanged_under_a_run_is_not_touched(mount: Path) -> None:
    files = block_files(mount, reuses=False)
    away, planted = mount / "away", mount / "megatier-run"
    planted.rename(away)
    planted.mkdir()
    for name in ("blocks", "lock", "savepoint"):
        (planted / name).write_bytes(b"mine")
    files.allocate()
    files.fill()
    files.keep(True)
    files.keep(False)
    assert (away / "blocks").stat().st_size == NUM_BYTES
    files.close()
    assert not list(away.iterdir())
    assert {path.name: path.read_bytes() for path in planted.iterdir()} == dict.fromkeys(
        ("blocks", "lock", "savepoint"), b"mine"
    )


# ---- locks ----


@pytest.mark.parametrize("removes_directory", [False, True])
@pytest.mark.parametrize("is_private", [False, True])
def test_lock_removed_by_its_last_holder_is_taken_anew(
    is_private: bool, removes_directory: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    first = lock_directory(directory)
    really_locked = fcntl.flock

    def locked_late(file: int, operation: int) -> None:
        """The last holder goes between our open and our lock."""
        if not gone:
            gone.append(directory / "lock")
            gone[0].unlink()
            if removes_directory:
                directory.rmdir()
            os.close(first)
        really_locked(file, operation)

    gone: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", locked_late)
        second = PrivateDirectory(directory) if is_private else lock_directory(directory)
    assert gone
    with pytest.raises(RunLockedError):
        lock_directory(directory)
    if isinstance(second, PrivateDirectory):
        second.close(["lock"])
        assert not directory.exists()
    else:
        assert os.path.samestat(os.fstat(second), (directory / "lock").stat())
        os.close(second)


def test_directory_that_the_user_named_may_be_shared(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    os.close(lock_directory(tmp_path / "run"))


@pytest.mark.parametrize(("harm", "message"), [(link, "it is a link"), (pipe, "it is no regular file")])
def test_lock_of_a_run_directory_that_is_no_file_is_refused(
    harm: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "lock").touch()
    harm(tmp_path / "runs" / "run" / "lock")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=f"run/lock: {message}"):
        lock_directory(tmp_path / "runs" / "run")
    assert snapshot(tmp_path) == before
