"""Token files that are not what was written: made again where they can be, refused by name where they cannot."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatier.config.data_section import DataConfig
from megatier.data.packed_text import PackedText
from megatier.data.token_files import describe_settings
from megatier.data.token_note import content_of
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import DataError

FILES = ("train.tokens", "holdout.tokens", "tokens.json")


def config_of(folder: Path, **settings: Any) -> DataConfig:
    source = folder / "text"
    source.mkdir(exist_ok=True)
    for number in range(8):
        (source / f"{number}.txt").write_text(f"text {number} " * 20)
    return DataConfig(files=(str(source),), tokenizer="bytes", sequence_length=8, holdout_fraction=0.25, **settings)


def pack(folder: Path, **settings: Any) -> PackedText:
    return PackedText.build(config_of(folder, **settings), byte_tokenizer(), folder / "run")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "run").iterdir()}


def flip(path: Path, at: int = 20) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


HARMS: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, 10),
    "empty": lambda path: os.truncate(path, 0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" * 100),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_build_over_a_damaged_file_tokenises_again_and_says_so(name: str, harm: str, tmp_path: Path) -> None:
    before, state = pack(tmp_path), contents(tmp_path)
    assert before.damaged is None
    HARMS[harm](tmp_path / "run" / name)
    again = pack(tmp_path)
    assert again.damaged == str(tmp_path / "run" / name)
    assert (contents(tmp_path), again.state) == (state, before.state)
    assert pack(tmp_path).damaged is None


@pytest.mark.parametrize("name", FILES)
def test_build_over_a_file_whose_text_is_gone_is_refused(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    pack(tmp_path)
    flip(tmp_path / "run" / name)
    for path in (tmp_path / "text").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"holds no file in"):
        PackedText.build(config, byte_tokenizer(), tmp_path / "run")


@pytest.mark.parametrize("name", FILES)
def test_build_over_a_pipe_is_refused_by_name(name: str, tmp_path: Path) -> None:
    pack(tmp_path)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(DataError, match=rf"cannot read .*{name}: it is no regular file\. Move it away"):
        pack(tmp_path)


def test_build_over_pipes_where_files_are_made_replaces_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("train.tokens.partial", "holdout.tokens.partial", ".tokens.json.partial"):
        os.mkfifo(tmp_path / "run" / name)
    assert pack(tmp_path).damaged is None
    assert set(contents(tmp_path)) == set(FILES)


def test_build_by_other_settings_is_no_damage(tmp_path: Path) -> None:
    before = pack(tmp_path).state
    again = pack(tmp_path, seed=99)
    assert again.damaged is None
    assert again.state != before


def test_build_over_files_of_an_older_version_takes_them_and_notes_what_they_are(tmp_path: Path) -> None:
    state, note = pack(tmp_path).state, tmp_path / "run" / "tokens.json"
    whole = note.read_bytes()
    note.write_text(describe_settings(config_of(tmp_path), byte_tokenizer()))
    for path in (tmp_path / "text").iterdir():
        path.write_text("changed since")
    again = PackedText.build(
        DataConfig(files=(str(tmp_path / "text"),), tokenizer="bytes", sequence_length=8, holdout_fraction=0.25),
        byte_tokenizer(),
        tmp_path / "run",
    )
    assert (again.state, again.damaged) == (state, None)

    # Such a version did not count documents, and nobody does so later.
    before, after = (json.loads(text)["files"] for text in (whole, note.read_bytes()))
    assert after == {name: [*content[:2], None, None] for name, content in before.items()}


def test_build_over_a_note_with_any_bit_flipped_tokenises_again_or_takes_what_is_there(tmp_path: Path) -> None:
    state, note, draw = pack(tmp_path).state, tmp_path / "run" / "tokens.json", random.Random(3)
    raw = note.read_bytes()
    for bit in draw.sample(range(8 * len(raw)), 150):
        harmed = bytearray(raw)
        harmed[bit // 8] ^= 1 << bit % 8
        note.write_bytes(harmed)
        assert pack(tmp_path).state == state, f"bit {bit % 8} of byte {bit // 8}"
        assert note.read_bytes() == raw or note.read_bytes() == harmed


def test_content_of_is_that_of_what_was_written(tmp_path: Path) -> None:
    data = pack(tmp_path)
    for span in (data.train, data.held_out):
        found = content_of(span.path)
        assert (found.num_bytes, found.crc32) == (2 * span.num_tokens, span.crc32)
