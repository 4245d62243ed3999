"""Batches that workers of a DataLoader hand over through shared memory, of which containers often have little.

Without room there, torch ends in errors of three kinds, or in none: a worker hands its batch over in a thread of a
queue, which prints what failed and drops the batch, so that the loader waits for it for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOSPC
from multiprocessing import synchronize
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from megatier.byte_counts import format_bytes
from megatier.errors import SharedMemoryError

FOLDER = Path("/dev/shm")
"""Where torch puts shared memory, and Python the locks of its queues."""
LOCKS = synchronize.__name__
"""The module that makes the locks of a loader's queues."""


class SharedBatches:
    """A collator whose batches lie in shared memory before a worker hands them over."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        """Take the collator of a loader."""
        self._collate = collate

    def __call__(self, rows: Any) -> Any:  # noqa: ANN401 - the loader's
        """Return the batch of some rows.

        Raises:
            SharedMemoryError: this is a worker, and there is no room.
        """
        batch = self._collate(rows)

        # In the process of the loader itself nothing is handed over.
        if get_worker_info() is not None:
            with naming_shared_memory():
                for tensor in _tensors(batch):
                    tensor.share_memory_()
        return batch


def sharing(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Let a loader put batches into shared memory where a failure ends it."""
    # accelerate's loader goes through the one that it was made of.
    # Without workers the batch stays in this process, and needs no shared memory.
    real = getattr(loader, "base_dataloader", loader)
    if real.num_workers and not isinstance(real.collate_fn, SharedBatches):
        real.collate_fn = SharedBatches(real.collate_fn)
    return loader


@contextmanager
def naming_shared_memory() -> Iterator[None]:
    """Turn errors of a loader that has no room for its workers' batches into one that names it.

    Raises:
        SharedMemoryError: there was none.
    """
    try:
        yield
    except SharedMemoryError as error:  # as a worker gave it, behind torch's words and a traceback
        raise SharedMemoryError(_room()) from error
    except RuntimeError as error:
        # Of torch's allocator; or of the loader, whose worker touched a page that was not there and was killed.
        if "shared memory" in str(error):
            raise SharedMemoryError(_room()) from error
        raise
    except OSError as error:
        # Of a queue's lock. How much room there is now would not tell: a loader that ends meanwhile makes some.
        if error.errno == ENOSPC and _module_of(error) == LOCKS:
            raise SharedMemoryError(_room()) from error
        raise


def _module_of(error: BaseException) -> str | None:
    """Return the name of the module whose code raised an error, or called what did."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") if frames else None


def _room() -> str:
    """Return how much shared memory there is, in words."""
    total, free = map(format_bytes, _sizes())
    return f"{total}, {free} free"


def _sizes() -> tuple[int, int]:
    """Return the bytes of shared memory, and how many of them are free."""
    status = os.statvfs(FOLDER)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _tensors(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a batch that torch would put into shared memory: those with bytes on the CPU."""
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided and batch.device.type == "cpu" and batch.untyped_storage().nbytes():
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
