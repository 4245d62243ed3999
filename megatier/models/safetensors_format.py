"""Reads the safetensors format: a little-endian u64 header length, a JSON header, and the tensors' bytes.

Files may be damaged or malicious, so everything in a header is checked against the file before a tensor is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatier.errors import FileChangedError, UnsupportedModelError
from megatier.files import FileVersion
from megatier.foreign import TABLE_BYTES_MAX, opened, parse_json, printable

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""torch's dtypes, by their names in the format."""
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
MAX_DIMENSIONS = 64
"""The most dimensions of a tensor. torch supports no more, and multiplying many large numbers takes hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor's place on disk."""

    path: Path
    """The file."""
    name: str
    """The stored name."""
    dtype: str
    """The format's name, such as `BF16`. It may be missing in SAFETENSORS_DTYPES."""
    shape: tuple[int, ...]
    """The stored shape."""
    offset: int
    """The offset of its first byte in the file."""
    num_bytes: int
    """Its size in bytes."""
    version: FileVersion | None = None
    """The version of the file when its header was read; None: unknown, so it is not compared."""

    def check(self, file: int) -> None:
        """Check that an open file is the one whose header was read, and was not written since.

        Raises:
            FileChangedError: it is another file, or was written.
        """
        if self.version not in (None, FileVersion.of(file)):
            raise FileChangedError(str(self.path))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one shard.

    Raises:
        UnsupportedModelError: the file is not a complete and consistent safetensors file. The message names file and
            tensor.
    """
    with opened(path, UnsupportedModelError) as file:
        # Taken before the header is read, so that a write in between is noticed when a tensor is read.
        version = FileVersion.of(file.fileno())
        file_bytes = version.num_bytes
        header_bytes = int.from_bytes(file.read(8), "little")

        # Checked before it is read, since a malicious file may claim any size.
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, TABLE_BYTES_MAX):
            raise UnsupportedModelError(
                f"{path} is no safetensors file, or is cut off: its header does not fit. Download it again."
            )
        raw = file.read(header_bytes)

    header = parse_json(raw, f"{path}: the safetensors header", UnsupportedModelError)
    if not isinstance(header, dict):
        raise UnsupportedModelError(f"{path}: the safetensors header is no JSON object.")

    start = 8 + header_bytes
    tensors = [
        replace(_checked(path, name, entry, start, file_bytes), version=version)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    _refuse_overlap(tensors)
    return {tensor.name: tensor for tensor in tensors}


def write_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return the header of a shard whose tensors (name, dtype, shape) follow one another without gaps.

    The metadata is added to the format's own entry.

    The header's length is a multiple of 8, so tensors are aligned if wider dtypes come first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0

    for name, dtype, shape in tensors:
        stop = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, stop],
        }
        offset = stop

    raw = json.dumps(header, separators=(",", ":")).encode()

    # JSON may end with spaces, which pad the header.
    padding = -len(raw) % 8
    raw += b" " * padding
    return len(raw).to_bytes(8, "little") + raw


def _checked(path: Path, name: str, entry: object, start: int, file_bytes: int) -> StoredTensor:
    """Return the tensor of a header's entry. Its offsets count from the end of the header.

    Args:
        path: the file.
        name: the tensor's name.
        entry: the header's entry.
        start: the header's end.
        file_bytes: the size of the file.

    Raises:
        UnsupportedModelError: the entry is malformed, or does not fit the file.
    """
    tensor = f"{path}: tensor {printable(name)}"
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise UnsupportedModelError(f"{path}: the header's entry for tensor {printable(name)} is malformed.")

    # Bounded before they are multiplied, since multiplying many large numbers would take hours.
    is_bounded = len(shape) <= MAX_DIMENSIONS and all(_is_count(number) for number in (*shape, begin, end))
    if not is_bounded or not begin <= end <= file_bytes - start:
        raise UnsupportedModelError(f"{tensor} lies outside the file ({file_bytes} bytes). Copy or download it again.")

    stored = StoredTensor(
        path=path,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=start + begin,
        num_bytes=end - begin,
    )
    # A dtype that torch does not have is refused when the tensor is needed.
    if dtype in SAFETENSORS_DTYPES and stored.num_bytes != math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize:
        raise UnsupportedModelError(f"{tensor} has {end - begin} bytes, which is not {dtype} of shape {tuple(shape)}.")
    return stored


def _is_count(number: object) -> bool:
    """Return whether a number in a header is a non-negative integer of 63 bits."""
    # Not isinstance, because True is an int too.
    return type(number) is int and 0 <= number < 1 << 63


def _refuse_overlap(tensors: list[StoredTensor]) -> None:
    """Refuse tensors that overlap."""
    # When sorted by offset, only neighbours can overlap. Empty tensors overlap nothing.
    placed = [tensor for tensor in tensors if tensor.num_bytes]
    placed.sort(key=lambda tensor: tensor.offset)
    for one, other in pairwise(placed):
        end = one.offset + one.num_bytes
        if other.offset < end:
            raise UnsupportedModelError(
                f"{one.path}: tensors {printable(one.name)} and {printable(other.name)} overlap."
            )
