"""What becomes whole at once: the order of its calls, and what a kill or a failing drive leaves at each of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from from_outside import FAULTS

from megatier import durable
from megatier.errors import TransferError

CALLS = ((durable, "sync"), (durable, "sync_tree"), (durable, "exchange_names"), (os, "rename"), (durable, "discard"))
KINDS = ["file", "folder"]


@pytest.fixture(autouse=True, scope="module")
def _synchronised(sync_file_system: Callable[[int, Path], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "_sync_file_system", sync_file_system)
        yield


def write(path: Path, kind: str, what: str) -> None:
    if kind == "file":
        path.write_text(what)
        return
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_text(what)


def read(path: Path, kind: str) -> str:
    """What is there, if all of it is."""
    if kind == "file":
        return path.read_text()
    found = {(path / name).read_text() for name in ("a", "b")}
    assert len(found) == 1
    return found.pop()


def become(folder: Path, kind: str, **options: Any) -> None:
    partial = folder / ".target.partial"
    with durable.committing(partial, folder / "target", "a test", **options):
        write(partial, kind, "new")


def watched(patch: pytest.MonkeyPatch, see: Callable[[str, tuple[Any, ...]], None]) -> None:
    """`see` is told of each call that reaches the drive, before it is made."""
    for module, name in CALLS:
        call = getattr(module, name)

        def seen(*args: Any, call: Callable[..., Any] = call, name: str = name) -> Any:
            see(name, args)
            return call(*args)

        patch.setattr(module, name, seen)


def recorded(folder: Path, kind: str, **options: Any) -> list[tuple[str, ...]]:
    """Calls in their order, with the names that they are about."""
    calls: list[tuple[str, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        watched(patch, lambda name, args: calls.append((name, *(Path(arg).name for arg in args))))
        become(folder, kind, **options)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_committing_synchronises_before_the_name_and_the_directory_behind_it(kind: str, tmp_path: Path) -> None:
    sync = "sync" if kind == "file" else "sync_tree"
    found = recorded(tmp_path, kind)
    assert found == [(sync, ".target.partial"), ("rename", ".target.partial", "target"), (sync, tmp_path.name)]
    assert read(tmp_path / "target", kind) == "new"


@pytest.mark.parametrize("kind", KINDS)
def test_committing_lets_the_old_one_go_when_the_drive_has_the_new_name(kind: str, tmp_path: Path) -> None:
    sync = "sync" if kind == "file" else "sync_tree"
    write(tmp_path / "target", kind, "old")
    assert recorded(tmp_path, kind, replaces=True) == [
        (sync, ".target.partial"),
        ("exchange_names", ".target.partial", "target"),
        (sync, tmp_path.name),
        ("discard", ".target.partial"),
    ]
    assert read(tmp_path / "target", kind) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_committing_without_a_switch_keeps_the_old_one_under_a_name_until_the_new_one_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "exchange_names", lambda first, second: False)
    write(tmp_path / "target", "folder", "old")
    assert recorded(tmp_path, "folder", replaces=True) == [
        ("sync_tree", ".target.partial"),
        ("exchange_names", ".target.partial", "target"),
        ("discard", ".target.replaced"),
        ("rename", "target", ".target.replaced"),
        ("rename", ".target.partial", "target"),
        ("sync_tree", tmp_path.name),
        ("discard", ".target.replaced"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_switch_that_a_file_system_does_not_know_is_told(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def renameat2(self, *_: object) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: Library())
    monkeypatch.setattr("ctypes.get_errno", lambda: code)
    assert not durable.exchange_names(Path("a"), Path("b"))


def test_switch_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        durable.exchange_names(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("switches", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_committing_that_a_drive_refuses_at_any_call_leaves_one_whole(
    code: int, kind: str, switches: bool, tmp_path: Path
) -> None:
    outcomes = []
    for last in range(20):
        folder = tmp_path / str(last)
        folder.mkdir()
        write(folder / "target", kind, "old")
        count = 0

        def refuse(name: str, args: tuple[Any, ...], last: int = last) -> None:
            nonlocal count
            count += 1
            if count == last + 1:
                raise OSError(code, os.strerror(code), str(args[0]))

        with pytest.MonkeyPatch.context() as patch:
            if not switches:
                patch.setattr(durable, "exchange_names", lambda first, second: False)
            watched(patch, refuse)
            try:
                become(folder, kind, replaces=True)
            except TransferError as error:
                assert error.errno == code
            else:
                assert count == last
                break
        assert read(folder / "target", kind) in ("old", "new")
        outcomes.append(read(folder / "target", kind))
        become_again(folder, kind)
    assert outcomes == sorted(outcomes, reverse=True), "the new one appears once and stays"
    assert {"old", "new"} == set(outcomes)


def become_again(folder: Path, kind: str) -> None:
    """The next one is written, and nothing else stays."""
    durable.restore_replaced(folder / "target")
    durable.discard(folder / ".target.partial")
    become(folder, kind, replaces=True)
    assert read(folder / "target", kind) == "new"
    assert [path.name for path in folder.iterdir()] == ["target"]


@pytest.mark.parametrize("switches", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_process_killed_at_any_call_leaves_one_whole(kind: str, switches: bool, tmp_path: Path) -> None:
    outcomes = []
    for last in range(20):
        folder = tmp_path / str(last)
        folder.mkdir()
        write(folder / "target", kind, "old")
        script = [sys.executable, str(FAULTS / "replace.py"), str(folder), kind, str(last), str(int(switches))]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        durable.restore_replaced(folder / "target")
        outcomes.append(read(folder / "target", kind))
        become_again(folder, kind)
    assert outcomes == sorted(outcomes, reverse=True)
    assert {"old", "new"} == set(outcomes)


def test_committing_that_replaces_nothing_leaves_what_has_the_name(tmp_path: Path) -> None:
    write(tmp_path / "target", "folder", "old")
    with pytest.raises(TransferError, match="writing a test failed"):
        become(tmp_path, "folder")
    assert read(tmp_path / "target", "folder") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_committing_in_the_place_of_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "folder", "old")
    (tmp_path / "target").symlink_to(tmp_path / "elsewhere")
    become(tmp_path, "folder", replaces=True)
    assert read(tmp_path / "target", "folder") == "new"
    assert read(tmp_path / "elsewhere", "folder") == "old"
    assert not (tmp_path / "target").is_symlink()


def test_committing_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    partial = tmp_path / ".target.partial"
    with pytest.raises(KeyboardInterrupt), durable.committing(partial, tmp_path / "target", "a test"):
        partial.write_text("new")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ask", [durable.free_bytes, durable.total_bytes])
def test_room_of_a_drive_that_is_gone_names_the_place(ask: Callable[[Path], int], tmp_path: Path) -> None:
    assert ask(tmp_path) > 0
    with pytest.raises(TransferError, match=r"asking for room failed in .*gone at byte 0: No such file"):
        ask(tmp_path / "gone")
