from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatier import files
from megatier.files import create_file, open_regular, read_regular, replace_file


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a pipe"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND], ids=["read", "append"])
def test_open_regular_of_something_else_is_refused_at_once(kind: str, flags: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
        path = tmp_path / "pipe" if kind == "pipe" else path
    with pytest.raises(OSError, match="it is no regular file"):
        open_regular(path, flags)


def test_open_regular_of_a_pipe_that_came_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, path, looks = files._check_regular, tmp_path / "file", list[Path]()
    path.touch()

    def check_and_replace(path: Path, found: os.stat_result) -> None:
        check(path, found)
        looks.append(path)
        path.unlink()
        os.mkfifo(path)

    monkeypatch.setattr(files, "_check_regular", check_and_replace)
    with pytest.raises(OSError, match="it is no regular file"):
        open_regular(path)
    assert looks == [path], "the second look refused"


def test_read_regular_follows_a_link_unless_told_not_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", 2) == b"te"
    with pytest.raises(OSError, match="it is no regular file"):
        read_regular(tmp_path / "link", flags=os.O_NOFOLLOW)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


def test_replace_file_takes_the_place_of_a_pipe_and_of_what_a_kill_left(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    os.mkfifo(tmp_path / ".file.partial")
    replace_file(tmp_path / "file", b"new")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_replace_file_that_is_refused_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def refuse(_: int) -> None:
        raise OSError

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"^$"):
        replace_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_create_file_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "file").symlink_to(tmp_path / "mine")
    with create_file(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "mine").read_text() == "mine"
