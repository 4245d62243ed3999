"""Files of weights that are replaced or written while they are read: refused by name, never half old and half new."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_config
from tiny_quantised import quantised_folders
from transformers import AutoModelForCausalLM

import megatier
from megatier.adapters.base import identity_of
from megatier.adapters.quantised_base import CodesReader
from megatier.config.schema import ModelConfig
from megatier.drives.base_files import BaseFiles
from megatier.drives.extent import FilePart
from megatier.errors import ConfigError, FileChangedError
from megatier.foreign import note, one_version, read_input
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.weight_files import read_headers
from megatier.models.weights import SafetensorsFolder
from megatier.setup.skeleton import open_base

FILE = "model.safetensors"


def replaced(path: Path) -> None:
    """As a download or a save does: another file takes the name."""
    other = path.with_name("other")
    shutil.copyfile(path, other)
    other.replace(path)


def rewritten(path: Path) -> None:
    """Other bytes in the same file."""
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))


WAYS = pytest.mark.parametrize("change", [replaced, rewritten])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@WAYS
@pytest.mark.parametrize("after_pieces", [0, 3])
def test_folder_whose_file_changes_while_it_loads_is_refused(
    change: Callable[[Path], None], after_pieces: int, folder: Path
) -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    units = find_units(model)
    source = SafetensorsFolder(folder, model)
    pieces = (piece for unit in units for piece in source.read(unit))
    for _ in range(after_pieces):
        next(pieces)
    change(folder / FILE)
    with pytest.raises(FileChangedError, match=FILE):
        for _ in pieces:
            pass


@WAYS
def test_identity_of_a_base_is_that_of_the_files_that_are_read(change: Callable[[Path], None], folder: Path) -> None:
    stored = read_headers(folder)
    assert identity_of(folder, stored) == identity_of(folder)
    change(folder / FILE)
    with pytest.raises(FileChangedError, match=FILE):
        identity_of(folder, stored)


@WAYS
def test_base_that_changed_before_it_is_read_in_place_is_refused(change: Callable[[Path], None], folder: Path) -> None:
    tensor = next(iter(read_headers(folder).values()))
    part = FilePart(
        path=tensor.path, file_offset=tensor.offset, start=0, num_bytes=tensor.num_bytes, version=tensor.version
    )
    files = BaseFiles(direct=False)
    files.open([part])
    files.close()
    change(folder / FILE)
    files = BaseFiles(direct=False)
    with pytest.raises(FileChangedError, match=FILE):
        files.open([part])
    files.close()


def put(path: Path) -> None:
    """A file that was not there."""
    path.write_text("{}")


@pytest.mark.parametrize("change", [replaced, rewritten, Path.unlink, put])
@pytest.mark.parametrize("reads_again", [False, True])
def test_file_that_is_opened_twice_is_the_same_one_or_named(
    change: Callable[[Path], object], reads_again: bool, tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    if change is not put:
        path.write_text('{"a": 1, "b": 2}')

    def read() -> None:
        with contextlib.suppress(FileNotFoundError):
            read_input(path, 100, ConfigError)

    with one_version(), one_version():
        read()
        read()
    with pytest.raises(FileChangedError, match=r"settings\.json"), one_version():
        with one_version():
            read()
        change(path)
        if reads_again:
            read()
            pytest.fail("another file was read")
    read()
    note(path)


class Changing(os.PathLike[str]):
    """A path whose file of a name is another one from the third time on that somebody asks for the path."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.times = folder, name, 0

    def __fspath__(self) -> str:
        self.times += 1
        if self.times == 3:
            replaced(self.folder / self.name)
        return str(self.folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", FILE])
def test_model_whose_file_changes_while_it_is_opened_is_refused(name: str, folder: Path) -> None:
    tiers = {"gpu": "8MiB", "ram": "64MiB", "device": "cpu"}
    with pytest.raises(FileChangedError, match=name):
        megatier.stream(Changing(folder, name), tiers=tiers, compile=False)


@WAYS
def test_identity_of_a_quantised_base_is_that_of_the_files_that_are_read(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder, _ = quantised_folders(tmp_path, "channel")
    _, reader = open_base(ModelConfig(path=str(folder), lora={}), 0)
    assert isinstance(reader, CodesReader)
    assert identity_of(folder, reader.stored) == identity_of(folder)
    change(folder / FILE)
    with pytest.raises(FileChangedError, match=FILE):
        identity_of(folder, reader.stored)
