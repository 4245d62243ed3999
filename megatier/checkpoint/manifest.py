"""The manifest of a checkpoint or savepoint: the checksums of its files by their places.

A chunk has its own checksum, which says that its bytes are those of one write, but not of which one. A drive that
misdirects or loses a write leaves whole chunks of another array, place or step, each with its right checksum. So the
manifest, which is written last, has the CRC32C of every file by its place, and files are compared with it as they are
read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatier import _native
from megatier.checkpoint.grid import Grid, StoredArray
from megatier.errors import DamagedCheckpointError
from megatier.files import read_regular

METADATA_FILE = "zarr.json"
"""The file of a Zarr node, whether group or array, that says what it is."""
METADATA_BYTES_MAX = 64 << 20
"""A larger file is no metadata of ours: the largest holds 8 bytes for each chunk of 32 MiB."""
CHECKSUM = np.dtype(">u4")
"""A checksum as the manifest has it, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums by place: of the metadata file of a Zarr node, if it has one, then of each chunk of its array."""

    step: int
    """The last step before it was written."""
    checksums: Mapping[str, Sequence[int]]
    """The checksums by the node's path below the checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, in which each checksum is eight hexadecimal digits."""
        digits = {node: np.array(values, CHECKSUM).tobytes().hex() for node, values in self.checksums.items()}
        return {"step": self.step, "checksums": digits}

    @classmethod
    def read(cls, path: Path, stored: Any) -> Self:  # noqa: ANN401
        """Return the manifest that a file holds.

        Args:
            path: the file, for errors.
            stored: the JSON value that should be a manifest.

        Raises:
            DamagedCheckpointError: it is none.
        """
        try:
            # Whatever a damaged file holds fails in here, and as nothing but these errors.
            step = int(stored["step"])
            digits = dict(stored["checksums"])
            checksums = {}
            for node, text in digits.items():
                checksums[str(node)] = np.frombuffer(bytes.fromhex(text), CHECKSUM).tolist()
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise DamagedCheckpointError(str(path), "is damaged: it has no manifest") from error
        return cls(step, checksums)

    def array(self, root: Path, node: str, grid: Grid, *, has_metadata: bool = True) -> StoredArray:
        """Return an array with the checksums of its chunks.

        Args:
            root: the checkpoint, with all links resolved.
            node: path of the array below it.
            grid: how the array is cut.
            has_metadata: whether it is a Zarr array, with a metadata file, which is compared here.

        Raises:
            DamagedCheckpointError: its metadata is another one, a chunk is not named here, or a file is not its own.
        """
        keys = {chunk.key for chunk in grid.chunks()}
        if has_metadata:
            self.check_metadata(root, node)
            keys.add(METADATA_FILE)

        # A file more or less than noted is damage too, so the numbers are compared first.
        noted = self.checksums.get(node, ())
        if len(noted) != len(keys):
            raise DamagedCheckpointError(str(root / node), f"is noted in the manifest with {len(noted)} checksums")

        for name in _files(root / node):
            if name not in keys:
                raise _stranger(root / node / name)

        # The first checksum is that of the metadata, if there is any.
        return StoredArray(root / node, grid, noted[has_metadata:])

    def check_metadata(self, root: Path, node: str) -> None:
        """Compare the metadata file of a node with its checksum.

        Raises:
            DamagedCheckpointError: it is another one.
        """
        path = root / node / METADATA_FILE
        noted = self.checksums.get(node)
        if not noted or checksum_of(read_bytes(path)) != noted[0]:
            raise DamagedCheckpointError(str(path), "is not the one that was written there, by its checksum")

    def check_folder(self, root: Path, folder: str, files: Collection[str]) -> None:
        """Refuse everything in a folder of the checkpoint but some files and the nodes that are named here.

        Args:
            root: the checkpoint.
            folder: path below it; empty: the checkpoint itself.
            files: names of the files that belong there.

        Raises:
            DamagedCheckpointError: names the first thing that does not belong there.
        """
        start = f"{folder}/" if folder else ""
        known = set(files)

        # A node is named by its whole path, so what lies directly in the folder is the first part behind it.
        for node in self.checksums:
            if node.startswith(start):
                name, _, _ = node.removeprefix(start).partition("/")
                known.add(name)

        for path in sorted((root / folder).iterdir()):
            if path.name not in known and not path.name.startswith("."):
                raise _stranger(path)


def checksum_of(content: bytes) -> int:
    """Return the CRC32C of some bytes."""
    return _native.crc32c(np.frombuffer(content, np.uint8).ctypes.data, len(content))


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of plain JSON, which is the same before and after it was stored."""
    # Keys are sorted, since JSON that was stored and read may have them in another order.
    text = json.dumps(state, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return a file of a checkpoint that is no chunk, as far as METADATA_BYTES_MAX.

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    try:
        return read_regular(path, METADATA_BYTES_MAX, os.O_NOFOLLOW)
    except OSError as error:
        raise DamagedCheckpointError(str(path), f"cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of a checkpoint holds.

    Raises:
        DamagedCheckpointError: it cannot be read, or holds none.
    """
    # JSON that is nested very deeply ends in a RecursionError.
    text = read_bytes(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(str(path), "is damaged: it is no JSON") from error
    if not isinstance(document, dict):
        raise DamagedCheckpointError(str(path), "is damaged: it holds no JSON object")
    return document


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of the files below a folder, links to folders among them, without hidden ones."""
    # Network file systems put hidden files of their own next to files that are open, such as .nfs0001.
    for path in folder.rglob("*"):
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and not path.name.startswith("."):
            yield str(path.relative_to(folder))


def _stranger(path: Path) -> DamagedCheckpointError:
    return DamagedCheckpointError(str(path), "is no file of this checkpoint; move it away")
