"""GPUDirect Storage: reads of block files from NVMe into GPU memory past RAM, by the library kvikio.

The queue `nvme_to_gpu` calls it, and only this file uses kvikio. If the machine has GPUDirect Storage, the drive writes
into GPU memory. Otherwise kvikio reads into its own buffers in RAM and copies from there (its compatibility mode).
kvikio chooses, and its byte counters say how; KVIKIO_COMPAT_MODE=ON in the environment forbids GPUDirect Storage.

kvikio ignores CUDA streams, so all work that uses the target must be over before a read begins. Its own copies come
after the work on CUDA's default stream. A read blocks until its bytes are on the GPU and verified there.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatier.byte_counts import format_bytes
from megatier.drives.blockfile import BlockFiles
from megatier.drives.extent import Extent, Stripe, zero_checksums
from megatier.drives.io_engine import REQUEST_BYTES
from megatier.errors import ConfigError, IntegrityError, TransferError
from megatier.hardware import nvidia_fs_is_loaded

PROBE_BYTES = 1 << 20
"""The bytes that are read from each file at the start. For reads below 16 KiB kvikio does not use GPUDirect Storage."""
GPU_DIRECT_REMEDY = "tiers.gpu_direct: false reads through RAM instead"
"""The remedy that a message about a failed read names."""


@dataclass(frozen=True, slots=True)
class IoPath:
    """How kvikio has read in this process, by its own counters."""

    gds_bytes: int
    """The bytes read by cuFile, the library of GPUDirect Storage."""
    posix_bytes: int
    """The bytes read in compatibility mode."""
    has_nvidia_fs: bool
    """Whether the kernel module is loaded. Without it cuFile uses the PCIe peer-to-peer of newer kernels, or falls back
    to reads through RAM."""

    def __str__(self) -> str:
        """Return a description for people."""
        posix = format_bytes(self.posix_bytes)
        if not self.gds_bytes:
            return f"kvikio in compatibility mode ({posix})"

        doubt = "" if self.has_nvidia_fs else "; nvidia-fs is not loaded: peer-to-peer, or cuFile's own fallback"
        gds = format_bytes(self.gds_bytes)
        return f"kvikio GDS ({gds}; {posix} in compatibility mode{doubt})"


class GpuReader:
    """The reader of one store's blocks from NVMe into GPU memory.

    Threads: `open` and `close` are called from one thread while nothing is read. Any thread may call `read`.
    """

    def __init__(self, files: BlockFiles, device: torch.device) -> None:
        """Import kvikio, without opening files yet.

        Raises:
            ConfigError: there is no GPU, or no kvikio.
        """
        self._files = files
        self._library = load_library(device)
        self._opened = contextlib.ExitStack()
        self._handles: list[Any] = []
        """The open file of kvikio for each mount."""
        self._counters: Any = None

    def open(self, device: torch.device) -> None:
        """Open the files, which were filled with zeros, and read the first bytes of each, so that the path is known.

        Raises:
            TransferError, IntegrityError: a read failed.
        """
        options = self._files.options
        settings = {
            "num_threads": options.num_threads,
            "task_size": REQUEST_BYTES,
            "bounce_buffer_size": REQUEST_BYTES,
            "auto_direct_io_read": self._files.is_direct,
        }

        # kvikio's defaults are those of the whole process, so closing restores them.
        self._opened.enter_context(self._library.defaults.set(settings))
        self._counters = self._opened.enter_context(self._library.SummaryMonitor())

        for mount, path in enumerate(self._files.paths):
            opened = self._files.opened(mount)
            with self._typed_errors("opening", path, 0):
                file = self._library.CuFile(opened, "r")
                handle = self._opened.enter_context(file)
                self._handles.append(handle)

            # Only a read shows whether kvikio bypasses RAM.
            size = min(PROBE_BYTES, path.stat().st_size)
            if size:
                stripe = Stripe(mount=mount, file_offset=0, start=0, num_bytes=size)
                checksums_of_zeros = zero_checksums(size, options.granule_bytes)
                zeros = Extent(size, (stripe,), checksums_of_zeros)
                target = torch.empty(size, dtype=torch.uint8, device=device)
                self.read("(zeros)", zeros, 0, target)

    # Hops 1 and 2 of a byte's journey in one; the marks are in blockfile.py and store/tier_queues.py.
    def read(self, key: str, extent: Extent, start: int, target: torch.Tensor) -> None:
        """Read a block's bytes from `start` on into uint8 [n] on the GPU, page-aligned. Every granule is verified.

        It blocks, with the GIL free, until the bytes are there, and until everything that is enqueued on the current
        stream is over.

        Raises:
            TransferError, IntegrityError: the bytes in `target` are not those of the block.
        """
        # kvikio ignores streams, so earlier work on the stream has to be over on the device.
        if target.is_cuda:
            torch.cuda.current_stream().synchronize()

        # After an error the stack still waits for all reads. Otherwise they could write to the slot when it belongs to
        # another copy.
        with contextlib.ExitStack() as reads:
            stop = start + target.numel()
            for part in extent.stripe_parts(start, stop):
                path = self._files.paths[part.mount]
                handle = self._handles[part.mount]
                memory = target[part.start : part.start + part.num_bytes]
                with self._typed_errors(f"read of block {key}", path, part.file_offset):
                    future = handle.pread(memory, part.num_bytes, part.file_offset)
                reads.callback(self._finish, key, part, future)

        if self._files.options.checksums:
            self._verify(key, extent, start, target)

    def path(self) -> IoPath | None:
        """Return how this process has read so far; None before the files are open."""
        if self._counters is None:
            return None

        by_backend = self._counters.get().by_backend
        gds_bytes = by_backend["GDS"]["bytes_transferred"] if "GDS" in by_backend else 0
        posix_bytes = by_backend["POSIX"]["bytes_transferred"] if "POSIX" in by_backend else 0
        return IoPath(gds_bytes, posix_bytes, nvidia_fs_is_loaded())

    def close(self) -> None:
        """Close the files, before they are removed. It is safe to call this twice."""
        self._opened.close()

    def _finish(self, key: str, part: Stripe, future: Any) -> None:  # noqa: ANN401  kvikio's
        """Wait for the read of a part of a stripe, and check its length."""
        path = self._files.paths[part.mount]
        action = f"read of block {key}"
        with self._typed_errors(action, path, part.file_offset):
            num_bytes = future.get()

        # kvikio reports a file that is too short only by the count.
        if num_bytes != part.num_bytes:
            end = part.file_offset + num_bytes
            raise TransferError(f"{action} by kvikio", "nvme", str(path), end, 0)

    def _verify(self, key: str, extent: Extent, start: int, target: torch.Tensor) -> None:
        """Raise IntegrityError for the first granule whose checksum differs from the stored one."""
        granule = self._files.options.granule_bytes

        # The store lets no write of the extent begin before this (`Block.reads`), so bytes and stored checksums are of
        # the same write.
        computed = checksums(target, granule)
        first = start // granule
        expected = extent.checksums[first : first + computed.size]
        differing = np.flatnonzero(computed != expected)
        if not differing.size:
            return

        index = int(differing[0])
        first_byte = start + index * granule
        part = next(extent.stripe_parts(first_byte, first_byte + 1))
        path = str(self._files.paths[part.mount])
        raise IntegrityError(
            key,
            path,
            part.file_offset,
            int(expected[index]),
            int(computed[index]),
        )

    @contextlib.contextmanager
    def _typed_errors(self, action: str, path: os.PathLike[str], offset: int) -> Iterator[None]:
        """Turn errors of kvikio, which have no errno, into TransferError."""
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            action = f"{action} by kvikio ({error}; {GPU_DIRECT_REMEDY})"
            raise TransferError(action, "nvme", str(path), offset, errno.EIO) from error


def load_library(device: torch.device) -> Any:  # noqa: ANN401  a module that may be missing
    """Import kvikio, if there is a GPU. Without a working driver the import can hang for ever.

    Raises:
        ConfigError: there is no GPU, or no kvikio.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError("tiers.gpu_direct reads into GPU memory, and there is no GPU in use; set it to false.")

    # cuFile writes its log into the working directory unless told otherwise.
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)
    try:
        importlib.import_module("kvikio.defaults")
        library = importlib.import_module("kvikio")
    except ImportError as error:
        raise ConfigError(
            f"tiers.gpu_direct needs kvikio ({error}): pip install 'megatier[gds]' for CUDA 13, 'megatier[gds-cu12]' "
            "for CUDA 12, or set it to false."
        ) from error
    if not hasattr(library, "SummaryMonitor"):
        raise ConfigError("tiers.gpu_direct needs the byte counters of kvikio 26.10 or newer; upgrade kvikio.")
    return library


def checksums(region: torch.Tensor, granule_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the checksum of each granule of uint8 [n] on the GPU, in whole pages."""
    from megatier.drives import gpu_checksums  # Triton comes with torch's CUDA builds alone

    return gpu_checksums.checksums(region, granule_bytes)
