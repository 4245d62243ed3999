"""Carries matrices in RAM to the device that computes, for updates that are by matrix, and home again.

Units that are updated by matrix are updated on the device that computes, wherever their planes are. If these are in
RAM, the carrier takes one matrix after the other there and back.
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
    """A matrix in memory of its own on the device that computes."""

    planes: dict[Kind, torch.Tensor]
    """Its state, and its gradient until it was updated."""
    transfers: list[Transfer]
    """Its copies that were submitted last, those that bring it or those that take it home."""


class MatrixCarrier:
    """Carries matrices in RAM to the device that computes, for their updates, and home again.

    While one is multiplied, the next one comes and the one before leaves. So there are three at most
    (`MATRICES_CARRIED`).

    Why no copy meets what others do with its memory: the host sees the end of each stage before it begins the next one.
    It takes memory for a matrix while no products are under way, enqueues products when all copies of their matrix have
    come, copies it home when these products are over, and gives the memory back when it is home. All of this memory,
    and that of the products, is allocated on the carrier's stream, and torch's allocator hands it out again on that
    stream alone. Planes in RAM are leased by the caller, who has them until all copies have ended.

    No copy waits for products on the device either: it would hold up those behind it that compute waits for.

    Threads: the queues that update. One at a time carries a unit: that keeps the link and the GPU busy, and takes the
    memory of one. It waits for copies and products alone, and these wait for no queue that updates.
    """

    def __init__(self, store: TieredStore, optimizer: Optimizer) -> None:
        """Take the store, whose queues copy, and the optimizer, which knows the matrices of units."""
        self._store = store
        self._optimizer = optimizer
        self._one_unit = threading.Lock()
        """Held by the queue that carries a unit."""
        self._stream = torch.cuda.Stream() if store.clock is not None else None

    def in_ram(self, apply: Apply) -> Apply:
        """Return an update for planes in RAM: of any elements there, of matrices on the device that computes."""
        return partial(self._apply, apply)

    def _apply(
        self, apply: Apply, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes
    ) -> Work | None:
        runs = self._optimizer.matrices(unit)
        if not runs:
            return apply(unit, elements, planes, grad, before)

        # Each plane is read where the generation before has it, and written where the new one has it.
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
        """Update matrices whose planes lie in RAM; the arguments have an entry for each."""
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

                # The host sees the end of the products before it enqueues copies, which must not wait on the device.
                if self._stream is not None:
                    self._stream.synchronize()

                # The gradient's memory serves the next matrix while the state goes home.
                del grad

                matrix.transfers.clear()
                for kind, target in targets[index].items():
                    transfer = self._store.carry(unit, target, matrix.planes[kind], to_gpu=False)
                    matrix.transfers.append(transfer)

            _end(under_way, 0)
        finally:
            # After an error as well, none may outlive the leases of the planes, or its memory on the device.
            for matrix in under_way:
                for transfer in matrix.transfers:
                    transfer.wait_for_end()

    def _bring(self, unit: str, sources: Planes, under_way: deque[_Matrix]) -> None:
        """Take memory on the device for a matrix, and start copying it there."""
        device = self._store.device
        planes = {kind: torch.empty_like(source, device=device) for kind, source in sources.items()}
        matrix = _Matrix(planes, [])

        # In the list before its first copy begins: whatever fails then, `_carry` waits for those that did.
        under_way.append(matrix)
        for kind, source in sources.items():
            transfer = self._store.carry(unit, planes[kind], source, to_gpu=True)
            matrix.transfers.append(transfer)


def _end(under_way: deque[_Matrix], left: int) -> None:
    """Wait for matrices on their way home, the oldest first, until so many are left. Their memory is free then."""
    while len(under_way) > left:
        # A matrix leaves the list after the wait, as the list is what keeps its memory.
        _wait(under_way[0].transfers)
        under_way.popleft()


def _wait(transfers: Sequence[Transfer]) -> None:
    """Wait for all transfers, also if one fails.

    Raises:
        TransferError: one failed.
    """
    ended_well = [transfer.wait_for_end() for transfer in transfers]
    for transfer, is_well in zip(transfers, ended_well, strict=True):
        if not is_well:
            transfer.wait()


def _cut(planes: Planes, elements: Elements, runs: Sequence[Elements]) -> list[Planes]:
    """Return the bytes that each run has in the planes of some elements."""
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
