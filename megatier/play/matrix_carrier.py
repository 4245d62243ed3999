"""The carrier of matrices: it takes matrices from RAM to the GPU for their updates (Muon), and back.

The update queues use it for units that are updated by matrix. These are updated on the device that computes, wherever
their planes are. If the planes are in RAM, the carrier takes one matrix after the other there and back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatier.planes import Apply, Elements, Planes, Work
from megatier.play.optimizer_protocol import Optimizer
from megatier.schedule.slots import MATRICES_CARRIED
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer
from megatier.tier import Kind


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix on the device that computes."""

    planes: dict[Kind, torch.Tensor]
    """Its state, and before the update its gradient."""
    transfers: list[Transfer]
    """Its last copies: those to the device, or those home."""


class MatrixCarrier:
    """The carrier of a run's matrices from RAM to the device that computes, and home.

    While one matrix is updated, the next one arrives and the one before leaves, so there are at most three
    (`MATRICES_CARRIED`).

    Copies and products never use the same memory at once, because the host waits for each stage before it begins the
    next one. It allocates memory for a matrix while no products run. It enqueues the products when all copies of the
    matrix have come, copies it home when the products are over, and frees the memory when the copies are. All of this
    memory is allocated on the carrier's stream, and torch's allocator reuses it only on that stream. The caller leases
    the planes in RAM until all copies have ended.

    Copies do not wait for products on the device, because they would hold up later copies, for which compute waits.

    Threads: the update queues. One at a time carries a unit, which keeps link and GPU busy and needs the memory for
    one. It waits only for copies and products, and these wait for no update queue.
    """

    def __init__(self, store: TieredStore, optimizer: Optimizer) -> None:
        """Use the queues of the store for copies. The optimizer knows the matrices of units."""
        self._store = store
        self._optimizer = optimizer
        self._one_unit = threading.Lock()
        """The queue that carries a unit holds it."""
        self._stream = torch.cuda.Stream() if store.clock is not None else None

    def in_ram(self, apply: Apply) -> Apply:
        """Return an update for planes in RAM, which carries matrices and runs on all other elements in place."""
        return partial(self._apply, apply)

    def _apply(
        self, apply: Apply, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes
    ) -> Work | None:
        runs = self._optimizer.matrices(unit)
        if not runs:
            return apply(unit, elements, planes, grad, before)

        # Planes are read from the old generation and written to the new one.
        read = {**planes, **before, Kind.GRAD: grad}
        sources = _cut(read, elements, runs)
        targets = _cut(planes, elements, runs)
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._one_unit, stream:
            self._carry(apply, unit, runs, sources, targets)
        return None

    def _carry(
        self, apply: Apply, unit: str, runs: Sequence[Elements], sources: Sequence[Planes], targets: Sequence[Planes]
    ) -> None:
        """Update matrices whose planes are in RAM. The arguments have an entry for each matrix."""
        under_way: deque[_Matrix] = deque()
        try:
            self._bring(unit, sources[0], under_way)
            for index, run in enumerate(runs):
                matrix = under_way[-1]
                if index + 1 < len(runs):
                    _end(under_way, MATRICES_CARRIED - 1)
                    self._bring(unit, sources[index + 1], under_way)

                _wait(matrix.transfers)
                grad = matrix.planes.pop(Kind.GRAD)
                apply(unit, run, matrix.planes, grad, {})

                # The host waits for the products, because copies must not wait on the device.
                if self._stream is not None:
                    self._stream.synchronize()

                # The next matrix can use the gradient's memory while the state goes home.
                del grad

                matrix.transfers.clear()
                for kind, target in targets[index].items():
                    transfer = self._store.carry(unit, target, matrix.planes[kind], to_gpu=False)
                    matrix.transfers.append(transfer)

            _end(under_way, 0)
        finally:
            # Even after an error no copy may outlive the leases of the planes, or the memory on the device.
            for matrix in under_way:
                for transfer in matrix.transfers:
                    transfer.wait_for_end()

    def _bring(self, unit: str, sources: Planes, under_way: deque[_Matrix]) -> None:
        """Allocate memory on the device for a matrix, and start to copy it there."""
        device = self._store.device
        planes = {kind: torch.empty_like(source, device=device) for kind, source in sources.items()}
        matrix = _Matrix(planes, [])

        # Listed before its first copy begins, so that `_carry` waits for its copies after an error.
        under_way.append(matrix)
        for kind, source in sources.items():
            transfer = self._store.carry(unit, planes[kind], source, to_gpu=True)
            matrix.transfers.append(transfer)


def _end(under_way: deque[_Matrix], left: int) -> None:
    """Wait for matrices that go home, the oldest first, until so many are left. The memory of the others is free."""
    while len(under_way) > left:
        # Removed after the wait, because the list keeps its memory alive.
        _wait(under_way[0].transfers)
        under_way.popleft()


def _wait(transfers: Sequence[Transfer]) -> None:
    """Wait for all transfers, even if one fails.

    Raises:
        TransferError: a transfer failed.
    """
    ended_well = [transfer.wait_for_end() for transfer in transfers]
    for transfer, is_well in zip(transfers, ended_well, strict=True):
        if not is_well:
            transfer.wait()


def _cut(planes: Planes, elements: Elements, runs: Sequence[Elements]) -> list[Planes]:
    """Return the bytes of each run in the planes of some elements."""
    start, stop = elements
    num_elements = stop - start
    cut: list[Planes] = []
    for first, last in runs:
        parts = {}
        for kind, plane in planes.items():
            width = plane.numel() // num_elements
            parts[kind] = plane[(first - start) * width : (last - start) * width]
        cut.append(parts)
    return cut
