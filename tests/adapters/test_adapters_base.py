"""The identity of a base: its files by name, size and checksum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatier.adapters.base import _NUM_SAMPLES, _SAMPLE_BYTES, identity_of
from megatier.errors import UnsupportedModelError


def test_identity_changes_with_any_byte_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0)}, path)
    before = identity_of(tmp_path)
    assert list(before) == [path.name]
    assert before[path.name].startswith(f"{path.stat().st_size:,} bytes, checksum ")
    content = path.read_bytes()
    for place in (2000, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert identity_of(tmp_path) != before
    path.write_bytes(content)
    assert identity_of(tmp_path) == before


def test_identity_of_a_large_file_is_that_of_bytes_all_over_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2 * _NUM_SAMPLES * _SAMPLE_BYTES // 4)}, path)
    before = identity_of(tmp_path)
    with path.open("r+b") as file:
        for quarter in range(4):
            # A run of other bytes as long as the distance between two places cannot be missed.
            start = quarter * path.stat().st_size // 5 + 1000
            file.seek(start)
            kept = file.read(3 * _SAMPLE_BYTES)
            file.seek(start)
            file.write(b"\1" * len(kept))
            file.flush()
            assert identity_of(tmp_path) != before
            file.seek(start)
            file.write(kept)
            file.flush()
    assert identity_of(tmp_path) == before


def test_identity_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors nor"):
        identity_of(tmp_path)
