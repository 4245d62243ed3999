"""Room for checkpoints and the export, asked for before the first step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatier.checkpoint.drive_space import DriveSpace
from megatier.config.output_section import OutputConfig
from megatier.errors import CapacityError, TransferError

SIZE, EXPORT = 1200, 200


def make_space(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, present: int = 0, export: int = EXPORT
) -> DriveSpace:
    for step in range(1, present + 1):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    return DriveSpace(folder, SIZE, export)


@pytest.mark.parametrize(
    ("num_kept", "present", "export", "needed"),
    [
        (0, 0, EXPORT, EXPORT),
        (0, 0, 0, 0),
        (2, 0, EXPORT, 3 * SIZE),
        (2, 1, EXPORT, 2 * SIZE),
        (2, 2, EXPORT, SIZE),
        (2, 3, EXPORT, SIZE),
        (1, 0, 2 * SIZE, 3 * SIZE),
        (1, 1, 2 * SIZE, 2 * SIZE),
    ],
)
def test_needed_bytes_are_those_of_the_fullest_moment(
    num_kept: int, present: int, export: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make_space(tmp_path, monkeypatch, needed, present, export)
    assert found.needed_bytes(num_kept) == needed
    found.check(num_kept)
    if needed:
        with pytest.raises(CapacityError, match="Free space there"):
            make_space(tmp_path, monkeypatch, needed - 1, 0, export).check(num_kept)


@pytest.mark.parametrize(
    ("free", "num_kept", "words"),
    [
        (EXPORT - 1, 2, r"there is no room for the export in \S+: needs 200 B, 199 B free"),
        (
            3 * SIZE - 1,
            2,
            r"there is no room for 3 checkpoints in \S+/checkpoints: .* set a smaller output.keep_checkpoints",
        ),
    ],
)
def test_check_says_what_does_not_fit(
    free: int, num_kept: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match=words):
        make_space(tmp_path, monkeypatch, free).check(num_kept)


@pytest.mark.parametrize(("free", "count"), [(3 * SIZE, 2), (3 * SIZE - 1, 1), (2 * SIZE, 1), (2 * SIZE - 1, 0)])
def test_as_many_are_kept_as_fit(free: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_space(tmp_path, monkeypatch, free).num_that_fit(2) == count


@pytest.mark.parametrize(
    ("free", "present", "takes"),
    [
        (SIZE + EXPORT, 0, True),
        (SIZE + EXPORT - 1, 0, False),  # the export would have none
        (SIZE, 2, True),  # the oldest goes
        (SIZE - 1, 2, False),
    ],
)
def test_another_is_taken_if_the_export_still_fits(
    free: int, present: int, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_space(tmp_path, monkeypatch, free, present).takes_another(2) == takes


@pytest.mark.parametrize(
    ("free", "settings", "kept"),
    [
        (4 * SIZE, {}, 2),
        (4 * SIZE - 1, {}, 1),
        (3 * SIZE, {"checkpoint_every": 0, "keep_checkpoints": 1}, 1),
        (3 * SIZE - 1, {}, None),
    ],
)
def test_run_that_keeps_its_best_checkpoint_needs_room_for_one_more(
    free: int, settings: dict[str, Any], kept: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(make_space(tmp_path, monkeypatch, free), keeps_best=True)
    output = OutputConfig(load_best_model_at_end=True, **settings)
    if kept is not None:
        assert found.num_kept(output) == kept
        return
    with pytest.raises(CapacityError, match=r"no room for 3 checkpoints in \S+"):
        found.num_kept(output)


@pytest.mark.parametrize(
    ("free", "settings", "kept"),
    [
        (3 * SIZE, {}, 2),
        (3 * SIZE - 1, {}, 1),
        (EXPORT, {}, 0),
        (3 * SIZE, {"checkpoint_every": 5}, 2),
        (EXPORT, {"checkpoint_every": 0}, 0),
        (EXPORT, {"savepoint_every": 5}, 0),
        (EXPORT - 1, {}, None),
        (3 * SIZE - 1, {"checkpoint_every": 5}, None),
    ],
)
def test_run_keeps_what_it_is_told_to_or_what_fits(
    free: int, settings: dict[str, Any], kept: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make_space(tmp_path, monkeypatch, free)
    if kept is not None:
        assert found.num_kept(OutputConfig(**settings)) == kept
        return
    with pytest.raises(CapacityError):
        found.num_kept(OutputConfig(**settings))
    with pytest.raises(CapacityError):
        found.described(OutputConfig(**settings), here=True)


@pytest.mark.parametrize(
    ("free", "settings", "words"),
    [
        (3 * SIZE, {}, "takes up to 3.5 KiB: 2 checkpoints, then one more or the export (200 B)."),
        (2 * SIZE, {}, "Its drive has 2.3 KiB free, so 1 of the checkpoints will be kept. Name an output.directory"),
        (SIZE, {}, "Its drive has 1.2 KiB free, so no checkpoint will be written. Name an output.directory"),
        (SIZE, {"checkpoint_every": 0}, "takes up to 200 B: the export (200 B)."),
    ],
)
def test_room_is_described(
    free: int, settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in make_space(tmp_path, monkeypatch, free).described(OutputConfig(**settings), here=True)


def test_room_of_a_run_on_another_machine_is_not_asked_for(tmp_path: Path) -> None:
    said = DriveSpace(tmp_path / "gone", 1 << 62, 0).described(OutputConfig(keep_checkpoints=1), here=False)
    assert said.endswith(": 1 checkpoint, then one more.")
    assert DriveSpace(tmp_path / "gone", SIZE, 0).described(OutputConfig(checkpoint_every=0), here=True) == ""


def test_room_of_a_directory_that_is_not_made_yet_is_that_of_its_drive(tmp_path: Path) -> None:
    found = DriveSpace(tmp_path / "not" / "there", SIZE, EXPORT, is_made=False)
    found.check(2)
    assert found.free_bytes > 0


def test_drive_that_is_gone_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="asking for room failed"):
        DriveSpace(tmp_path / "gone", SIZE, EXPORT).check(2)
