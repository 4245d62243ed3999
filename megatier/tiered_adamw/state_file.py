"""The file of a state_dict, which `torch.load` reads, written without the whole state in RAM.

torch lays out the file from tensors without data, and leaves their places empty. Then the file is mapped, and the data
is written into these places.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import set_default_mmap_options, skip_data

from megatier.durable import committing
from megatier.errors import TransferError

StateDict = dict[str, Any]
"""A state as torch's optimizers give it."""


def write_state_file(
    path: str | os.PathLike[str], describe: Callable[[], StateDict], fill: Callable[[StateDict], None]
) -> None:
    """Write a file under a hidden name, and rename it when all of it is on the drive.

    Args:
        path: the file; one that is there is replaced.
        describe: makes the state_dict. It is called in a mode in which tensors get no memory.
        fill: writes the numbers into the state_dict that it is given.

    Raises:
        TransferError: the file cannot be written. A file that was at `path` is still there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    with committing(partial, target, "optimizer state"):
        # If the file cannot be created, this says why, which torch would not.
        partial.touch(0o600)
        with FakeTensorMode():
            described = describe()
        _lay_out(described, partial)

        # The file is sparse now. On a full drive, writing to a mapped page without room would kill the process, so
        # all room is taken first, where a lack of it is an error.
        with partial.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)

        # Shared, so that numbers that are written to the tensors go to the file.
        with set_default_mmap_options(mmap.MAP_SHARED):
            fill(torch.load(partial, mmap=True))


def _lay_out(described: StateDict, path: Path) -> None:
    """Write a file with everything but the tensors' numbers."""
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(described, path)
    except RuntimeError as error:  # torch's own, which does not name the system's error
        raise TransferError("writing optimizer state", "disk", str(path), 0, 0) from error
