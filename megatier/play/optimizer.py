"""The optimizer as the lanes that update see it: a protocol, and work that is under way.

The optimizer itself knows no tier. The lanes bring it planes and gradients, and take the planes home. Units that are
updated by matrix are updated on the device that computes. If their planes are in RAM, one matrix after the other is
carried there and back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

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


def in_ram(store: TieredStore, optimizer: Optimizer, apply: Apply) -> Apply:
    """Return an update for planes in RAM: of any run of elements there, of matrices on the device that computes."""
    return partial(_apply_in_ram, store, optimizer, apply)


def _apply_in_ram(
    store: TieredStore,
    optimizer: Optimizer,
    apply: Apply,
    unit: str,
    elements: Elements,
    planes: Planes,
    grad: torch.Tensor,
    before: Planes,
) -> Work | None:
    runs = optimizer.matrices(unit)
    if not runs:
        return apply(unit, elements, planes, grad, before)

    # Each plane is read where the generation before has it, and written where the new one has it.
    sources = {**planes, **before, Kind.GRAD: grad}
    for run in runs:
        parts = {kind: _part(plane, elements, run) for kind, plane in sources.items()}
        carried = {kind: torch.empty_like(part, device=store.device) for kind, part in parts.items()}
        _wait([store.carry(unit, carried[kind], part, to_gpu=True) for kind, part in parts.items()])

        apply(unit, run, {kind: carried[kind] for kind in planes}, carried[Kind.GRAD], {})
        targets = {kind: _part(plane, elements, run) for kind, plane in planes.items()}
        _wait([store.carry(unit, target, carried[kind], to_gpu=False) for kind, target in targets.items()])

    return None


def _wait(moves: Sequence[Transfer]) -> None:
    """Wait for all moves, also if one fails: none may outlive the leases of the planes.

    Raises:
        TransferError: one failed.
    """
    ended_well = [move.over() for move in moves]
    for move, is_well in zip(moves, ended_well, strict=True):
        if not is_well:
            move.wait()


def _part(plane: torch.Tensor, elements: Elements, run: Elements) -> torch.Tensor:
    """The bytes that a run has in a plane of some elements."""
    start, stop = elements
    width = plane.numel() // (stop - start)
    return plane[(run[0] - start) * width : (run[1] - start) * width]


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
