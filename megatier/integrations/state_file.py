"""A state_dict written to a file that `torch.load` reads, without ever being in RAM.

torch lays the file out from a description, tensors without numbers, and leaves their places empty. Then the file is
mapped, and the numbers are written where they belong.
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

from megatier.durable import becoming
from megatier.errors import TransferError

StateDict = dict[str, Any]


def write_state_file(
    path: str | os.PathLike[str], describe: Callable[[], StateDict], fill: Callable[[StateDict], None]
) -> None:
    """Write a file under a hidden name, and rename it when all of it is on the drive.

    Args:
        path: of the file; one that is there is replaced.
        describe: makes the state_dict; its tensors get no memory.
        fill: writes the numbers into the state_dict that it is given.

    Raises:
        TransferError: the file cannot be written. What was at `path` is still there.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    with becoming(partial, target, "optimizer state"):
        partial.touch(0o600)  # torch would not say what is wrong with it
        with FakeTensorMode():
            described = describe()
        _lay_out(described, partial)
        with partial.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)  # where a page had no room, writing would kill
        with set_default_mmap_options(mmap.MAP_SHARED):
            fill(torch.load(partial, mmap=True))


def _lay_out(described: StateDict, path: Path) -> None:
    """A file with everything but the tensors' numbers."""
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(described, path)
    except RuntimeError as error:  # torch does not pass the system's error on
        raise TransferError("writing optimizer state", "disk", str(path), 0, 0) from error
