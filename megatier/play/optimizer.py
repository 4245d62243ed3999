"""The optimizer as the lanes that update see it: a protocol, and work that is under way.

The optimizer itself knows no tier. The lanes bring it planes and gradients, and take the planes home. Units that are
updated by matrix are updated on the device that computes. If their planes are in RAM, the carrier takes one matrix
after the other there and back.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from megatier.schedule.slots import MATRICES_CARRIED
from megatier.store.store import TieredStore
from megatier.store.transfer import FAILURES, Transfer
from megatier.tear import Tear
from megatier.tier import Kind

Elements = tuple[int, int]
"""A run of a unit's elements: the first one, and one past the last."""


class Work(Protocol):
    """A piece of work that native threads do."""

    def wait(self) -> bool:
        """Block until it is done."""

    def done(self) -> bool:
        """True when wait() would not block."""

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""


Planes = Mapping[Kind, torch.Tensor]
"""The plane of each kind of state, as uint8."""

Apply = Callable[[str, Elements, Planes, torch.Tensor, Planes], Work | None]
"""A function that begins AdamW on a run of a unit's elements. It takes the unit, the run, the planes to write, the
gradient, and the planes to read for kinds that are not updated in place. It returns the work to wait for, or None if
that is done already, or enqueued on the GPU."""


class Optimizer(Protocol):
    """The arithmetic of a run, as its lanes need it."""

    def apply(self, unit: str, elements: Elements, planes: Planes, grad: torch.Tensor, before: Planes) -> Work | None:
        """Begin AdamW on a run of a unit's elements, clipped as the last norm decided; see `Apply`."""

    def unclipped(self) -> Apply:
        """AdamW of the step that has begun, with a clip coefficient of 1."""

    def matrices(self, unit: str) -> Sequence[Elements]:
        """The runs of a unit's elements that are updated one at a time, on the device that computes.

        They have no gaps between them. There are none if any run of elements may be updated wherever it lies.
        """

    def accumulate(self, unit: str, total: torch.Tensor, part: torch.Tensor, *, group: int) -> None:
        """Add one group's fp32 gradient to the sum in RAM.

        After the last group, the sum is rounded to the dtype of the unit's weights in place, and measured.
        """

    def sum_groups(
        self,
        unit: str,
        total: torch.Tensor,
        pieces: torch.Tensor,
        spare: torch.Tensor,
        *,
        adds: bool,
        is_last: bool,
    ) -> None:
        """Add the gradients of several groups to an fp32 sum where they lie, in their order.

        After the last groups, the sum is rounded to the dtype of the unit's weights, and measured.

        Args:
            unit: its name.
            total: uint8, the sum if a step has more groups than these; in the end, the gradient.
            pieces: uint8 [groups, bytes], the gradients, in fp32 or in the dtype of the unit's weights.
            spare: uint8, room for an fp32 sum, if the gradients are in a narrower dtype.
            adds: whether there is a sum of groups before these.
            is_last: whether no groups come after them.
        """

    def check(self, unit: str) -> None:
        """Raise NonFiniteError when the unit's measured gradient is not finite."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in memory of its own on the device that computes."""

    planes: dict[Kind, torch.Tensor]
    """Its state, and its gradient until it was updated."""
    moves: list[Transfer]
    """Its copies that were submitted last, those that bring it or those that take it home."""


class Carrier:
    """Carries matrices in RAM to the device that computes, for their updates, and home again.

    While one is multiplied, the next one comes and the one before leaves. So there are three at most
    (`MATRICES_CARRIED`).

    Why no copy meets what others do with its memory: the host sees the end of each stage before it begins the next one.
    It takes memory for a matrix while no products are under way, enqueues products when all copies of their matrix have
    come, copies it home when these products are over, and gives the memory back when it is home. All of this memory,
    and that of the products, is allocated on the carrier's stream, and torch's allocator hands it out again on that
    stream alone. Planes in RAM are leased by the caller, who has them until all copies have ended.

    No copy waits for products on the device either: it would hold up those behind it that compute waits for.

    Threads: the lanes that update. They take turns, a unit each: one of them keeps the link and the GPU busy, and the
    memory is that of one. Whoever has its turn waits for copies and products alone, and these wait for nobody's turn.
    """

    def __init__(self, store: TieredStore, optimizer: Optimizer) -> None:
        """Take the store, whose lanes copy, and the optimizer, which knows the matrices of units."""
        self._store = store
        self._optimizer = optimizer
        self._turn = threading.Lock()
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
        sources = _cut({**planes, **before, Kind.GRAD: grad}, elements, runs)
        targets = _cut(planes, elements, runs)
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._turn, stream:
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

                _wait(matrix.moves)
                grad = matrix.planes.pop(Kind.GRAD)
                apply(unit, run, matrix.planes, grad, {})
                if self._stream is not None:
                    self._stream.synchronize()
                del grad

                target = targets[index]
                matrix.moves.clear()
                for kind, plane in target.items():
                    matrix.moves.append(self._store.carry(unit, plane, matrix.planes[kind], to_gpu=False))

            _end(under_way, 0)
        finally:
            # After an error as well, none may outlive the leases of the planes, or its memory on the device.
            for matrix in under_way:
                for move in matrix.moves:
                    move.wait_for_end()

    def _bring(self, unit: str, parts: Planes, under_way: deque[_Matrix]) -> None:
        """Take memory on the device for a matrix, and start copying it there."""
        matrix = _Matrix({}, [])
        for kind, part in parts.items():
            matrix.planes[kind] = torch.empty_like(part, device=self._store.device)

        # In the list before its first copy begins: whatever fails then, `_carry` waits for those that did.
        under_way.append(matrix)
        for kind, part in parts.items():
            matrix.moves.append(self._store.carry(unit, matrix.planes[kind], part, to_gpu=True))


def _end(under_way: deque[_Matrix], left: int) -> None:
    """Wait for matrices on their way home, the oldest first, until so many are left. Their memory is free then."""
    while len(under_way) > left:
        # It leaves the list after the wait, as the list is what keeps its memory.
        _wait(under_way[0].moves)
        under_way.popleft()


def _wait(moves: Sequence[Transfer]) -> None:
    """Wait for all moves, also if one fails.

    Raises:
        TransferError: one failed.
    """
    ended_well = [move.wait_for_end() for move in moves]
    for move, is_well in zip(moves, ended_well, strict=True):
        if not is_well:
            move.wait()


def _cut(planes: Planes, elements: Elements, runs: Sequence[Elements]) -> list[Planes]:
    """Return the bytes that each run has in the planes of some elements."""
    first, stop = elements
    cut: list[Planes] = []
    for a, b in runs:
        parts = {}
        for kind, plane in planes.items():
            width = plane.numel() // (stop - first)
            parts[kind] = plane[(a - first) * width : (b - first) * width]
        cut.append(parts)
    return cut


class Applied:
    """AdamW under way on a unit in RAM. Its leases end when somebody has waited for it.

    The lane `update` goes on to the next unit meanwhile, so that the native threads never run dry.
    """

    def __init__(self, work: Work, leases: contextlib.ExitStack, tear: Tear) -> None:
        """Take over the work and its leases.

        Args:
            work: what the native threads do.
            leases: marks the state dirty and gives back what the work holds, when it is closed.
            tear: the store's.
        """
        self._work = work
        self._leases = leases
        self._tear = tear
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """The error of ending the leases, for everyone who waits."""

    def wait(self) -> None:
        """Block until it is done. Any thread may call it, any number of times."""
        self._work.wait()

        # Whoever waits first marks the state dirty and ends the leases, perhaps the training thread, which an interrupt
        # may stop half-way. All others wait at the lock until that is done, and get the same error.
        with self._lock:
            try:
                with self._tear.call:
                    self._leases.close()
            except FAILURES as error:
                self._error = error
            if self._error is not None:
                raise self._error

    def done(self) -> bool:
        """True when wait() would not block."""
        return self._work.done()

    def span_ns(self) -> tuple[int, int]:
        """Start and end, in time.perf_counter_ns."""
        return self._work.span_ns()
