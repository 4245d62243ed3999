"""`megatier clean`: lists first, removes with --yes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatier.cli import main
from megatier.drives.mounts import Note
from megatier.private import lock_directory

NAME = "megatier-0123456789ab"


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """With one leftover, and a directory that holds a file of somebody's."""
    mount = tmp_path / "a mount"
    for name in (NAME, "megatier-bench-0123456789ab"):
        (mount / name).mkdir(mode=0o700, parents=True)
        (mount / name / "lock").touch(mode=0o600)
        (mount / name / "blocks").touch(mode=0o600)
        (mount / name / "blocks").write_bytes(bytes(1 << 20))
    (mount / "megatier-bench-0123456789ab" / "notes.txt").touch()
    return mount


def test_clean_lists_and_removes_nothing_unless_told(mount: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(mount.rglob("*"))
    assert main(["clean", str(mount)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{mount}/{NAME}: 1.0 MiB, last written ")
    assert second == f"{mount}/megatier-bench-0123456789ab: stays, no run made 'notes.txt' in it"
    assert last == f"1.0 MiB in all. To remove: megatier clean '{mount}' --yes"
    assert sorted(mount.rglob("*")) == before


def test_clean_with_yes_removes_and_says_so(mount: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--yes", str(mount)]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.endswith(", removed")
    assert last == "1.0 MiB removed."
    assert [path.name for path in mount.iterdir()] == ["megatier-bench-0123456789ab"]


def test_clean_says_that_a_savepoint_is_among_what_it_finds(mount: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mount / NAME / "savepoint").touch(mode=0o600)
    for words, end in (([], " ago, with a run's savepoint"), (["--yes"], " ago, with a run's savepoint, removed")):
        assert main(["clean", *words, str(mount)]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(end)
    assert not (mount / NAME).exists()


def test_clean_names_the_run_of_what_it_finds(
    mount: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mount)
    note = Note.of("runs/a\nb")
    (mount / NAME / "note.json").touch(mode=0o600)
    (mount / NAME / "note.json").write_bytes(note.written())
    assert main(["clean", str(mount)]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.endswith(rf" ago, of the run {mount}/runs/a\nb, begun {note.began}")


def test_clean_where_nothing_is_left_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert capsys.readouterr().out == "No killed run left block files here.\n"


def test_clean_missing_directory_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", str(tmp_path / "none")]) == 2
    assert "Name a directory, as in tiers.nvme." in capsys.readouterr().err


@pytest.mark.parametrize("inside", [True, False])
def test_clean_mentions_a_killed_runs_directory_and_leaves_it(
    inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    lock = lock_directory(run)
    words = ["clean", str(run if inside else run.parent), "--yes"]
    assert main(words) == 0
    assert "killed run;" not in capsys.readouterr().out
    os.close(lock)
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"{run}: a killed run; `megatier resume` goes on with it")
    assert {path.name for path in run.iterdir()} == {"config.yaml", "lock"}
