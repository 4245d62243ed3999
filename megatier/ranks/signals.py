"""Signals between the ranks of a host: how a rank writes numbers to the signal pad for others, and waits for theirs.

On GPUs CUDA streams write and wait without a kernel (`StreamSignals`), so no host waits for a GPU. On CPUs the hosts do
so themselves (`HostSignals`). `abort` ends a wait for a rank that has failed, by a plain store of the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from megatier.errors import MegatierError
from megatier.hardware import CUDA_DRIVER
from megatier.page_lock import PageLock
from megatier.ranks.signal_pad import NUMBER_RANGE, Check, Signal, SignalPad

GREATER_OR_EQUAL = 0
"""CU_STREAM_WAIT_VALUE_GEQ of the CUDA driver, which compares numbers that wrap around."""


class Signals(Protocol):
    """Numbers that a rank writes for others and waits for, in the order of its current stream."""

    def write(self, peer: int, signal: Signal, number: int) -> None:
        """Write a number for another rank. When that rank sees it, it sees all earlier writes too."""

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        """Wait until another rank has written this number, or a greater one, for this rank."""

    def exchange_offsets(self, number: int, offset: int) -> list[int]:
        """Wait until all ranks have come to a collective, and return the offsets of their bytes, in their order."""

    def abort(self) -> None:
        """End all waits of this rank. Call it repeatedly, because another rank may still write an older number."""

    def close(self) -> None:
        """Free what they hold. No stream may be waiting."""


class HostSignals:
    """Signals that the host writes and waits for, on a processor whose stores others see in order."""

    def __init__(self, pad: SignalPad, check: Check) -> None:
        """Use the pad of the host. `check` raises if a rank has failed; see `PeerMonitor.check`."""
        self._pad = pad
        self._check = check

    def write(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`."""
        self._pad.write(peer, signal, number)

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`.

        Raises:
            PeerError: a rank has failed.
        """
        self._pad.awaited = number
        self._pad.wait(lambda: self._pad.has_come(peer, signal, number), self._check)

        # After `abort` the bytes are not there.
        if self._pad.is_aborted:
            self._check(0.0)

    def exchange_offsets(self, number: int, offset: int) -> list[int]:
        """See `Signals`."""
        return self._pad.exchange_offsets(number, offset, self._check)

    def abort(self) -> None:
        """See `Signals`."""
        self._pad.abort()

    def close(self) -> None:
        """See `Signals`."""


class StreamSignals:
    """Signals that CUDA streams write and wait for."""

    def __init__(self, pad: SignalPad, check: Check) -> None:
        """Pin the pad for the GPU.

        Args:
            pad: the pad of the host.
            check: raises if a rank has failed; see `PeerMonitor.check`.

        Raises:
            OSError: there is no CUDA driver.
            MegatierError: CUDA refused.
        """
        self._pad = pad
        self._check = check

        # torch has no call for these two. Signals of its symmetric memory are kernels, which cannot be ended.
        driver = ctypes.CDLL(CUDA_DRIVER)
        self._write = driver.cuStreamWriteValue32_v2
        self._wait = driver.cuStreamWaitValue32_v2
        # Without types ctypes would truncate an address to a C int.
        for function in (self._write, self._wait):
            function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

        # Streams can only use memory of the host that is pinned.
        address = int(pad.numbers.ctypes.data)
        whole = 0, pad.numbers.nbytes
        self._lock = PageLock(address, [whole])

    def write(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`."""
        # The driver puts a memory barrier before it, so other GPUs see all that the stream has written before.
        address = self._pad.address(peer, signal, self._pad.rank)
        self._call(self._write, address, number % NUMBER_RANGE, 0)

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`."""
        self._pad.awaited = number
        address = self._pad.address(self._pad.rank, signal, peer)
        self._call(self._wait, address, number % NUMBER_RANGE, GREATER_OR_EQUAL)

    def exchange_offsets(self, number: int, offset: int) -> list[int]:
        """See `Signals`."""
        return self._pad.exchange_offsets(number, offset, self._check)

    def abort(self) -> None:
        """See `Signals`."""
        self._pad.abort()

    def close(self) -> None:
        """See `Signals`."""
        self._lock.close()

    def _call(self, function: Callable[..., int], address: int, number: int, flags: int) -> None:
        # The stream that moves the bytes also writes the signal, which so comes after them.
        stream = torch.cuda.current_stream()
        code = function(stream.cuda_stream, address, number, flags)
        if code:
            raise MegatierError(f"CUDA refused an operation on a stream (CUresult {code}).")
