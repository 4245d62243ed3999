"""Files of weights that are replaced or written while they are read: refused by name, never half old and half new."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from megatier.adapters.base import identity_of
from megatier.drives.base_files import BaseFiles
from megatier.drives.extent import FilePart
from megatier.errors import FileChangedError
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.folder import read_headers
from megatier.models.weights import SafetensorsFolder

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
