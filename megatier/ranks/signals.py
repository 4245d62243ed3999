"""Signals: numbers on the pad of a host that a rank writes for others, and waits for.

CUDA streams write and wait without a kernel (`StreamSignals`), so no host waits for a GPU. On CPUs the hosts do so
themselves (`HostSignals`). A wait for a rank that has failed is ended by a plain store of the host.
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
"""What a stream waits for, to the driver: CU_STREAM_WAIT_VALUE_GEQ, which compares numbers that begin again."""


class Signals(Protocol):
    """Numbers that a rank writes for other ranks, and waits for, when its current stream gets there."""

    def write(self, peer: int, signal: Signal, number: int) -> None:
        """Write a number for another rank, which finds all that was written before."""

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        """Wait until another rank has written this number for this one, or a greater one."""

    def meet(self, number: int, offset: int) -> list[int]:
        """Return the offsets that all ranks give for this number, in their order, once all have come to it."""

    def release(self) -> None:
        """End all waits of this rank. Another rank may still write an older number, so it is called again and again."""

    def close(self) -> None:
        """Give back what they hold. No stream waits any more."""


class HostSignals:
    """Signals that the host writes and waits for, on a CPU whose stores others see in their order."""

    def __init__(self, pad: SignalPad, check: Check) -> None:
        """Take the pad of the host, and what raises if a rank has failed."""
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

        # A wait that was ended has brought nothing.
        if self._pad.is_released:
            self._check(0.0)

    def meet(self, number: int, offset: int) -> list[int]:
        """See `Signals`."""
        return self._pad.meet(number, offset, self._check)

    def release(self) -> None:
        """See `Signals`."""
        self._pad.release()

    def close(self) -> None:
        """See `Signals`."""


class StreamSignals:
    """Signals that CUDA streams write and wait for."""

    def __init__(self, pad: SignalPad, check: Check) -> None:
        """Page-lock the pad for the GPU.

        Args:
            pad: of the host.
            check: raises if a rank has failed; see `PeerMonitor.check`.

        Raises:
            OSError: there is no CUDA driver.
            MegatierError: CUDA refused.
        """
        self._pad = pad
        self._check = check

        # torch has no call for these two. A signal of its symmetric memory is a kernel, which nobody can end.
        driver = ctypes.CDLL(CUDA_DRIVER)
        self._write = driver.cuStreamWriteValue32_v2
        self._wait = driver.cuStreamWaitValue32_v2
        # Without types ctypes takes an address for a C int, and cuts it.
        for function in (self._write, self._wait):
            function.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

        # Streams reach memory of the host only where it is page-locked.
        address = int(pad.numbers.ctypes.data)
        whole = 0, pad.numbers.nbytes
        self._lock = PageLock(address, [whole])

    def write(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`."""
        # The driver puts a memory barrier before it: other GPUs see all that the stream has written so far.
        address = self._pad.place(peer, signal, self._pad.rank)
        self._call(self._write, address, number % NUMBER_RANGE, 0)

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        """See `Signals`."""
        self._pad.awaited = number
        address = self._pad.place(self._pad.rank, signal, peer)
        self._call(self._wait, address, number % NUMBER_RANGE, GREATER_OR_EQUAL)

    def meet(self, number: int, offset: int) -> list[int]:
        """See `Signals`."""
        return self._pad.meet(number, offset, self._check)

    def release(self) -> None:
        """See `Signals`."""
        self._pad.release()

    def close(self) -> None:
        """See `Signals`."""
        self._lock.close()

    def _call(self, function: Callable[..., int], address: int, number: int, flags: int) -> None:
        # On the stream that moves the bytes, so that the signal comes after them.
        stream = torch.cuda.current_stream()
        code = function(stream.cuda_stream, address, number, flags)
        if code:
            raise MegatierError(f"CUDA refused an operation on a stream (CUresult {code}).")
