"""The optimizer of a run: AdamW on split masters, Muon for units that are by matrix, and the exact global norm.

AdamW has one definition. The C kernel and the Triton kernel give the same bits, without fused multiply-add:

    g = grad * scale                              m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) (g g)
    x = x (1 - lr wd) - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

x is the fp32 master, which may be split into weight plane and remainder. m and v below 2^-126 are set to 0. `scale` is
the clip coefficient, min(1, clip / (norm + 1e-6)). Moments may be stored in bf16; then they are rounded stochastically,
by random numbers that depend on the run's seed, the step, the unit, and the number of the element in the whole unit.

The norm is that of the rounded gradients. Sums of squares are taken in fp64, in a fixed order, of what each tensor has
of each tile of its unit, 65,536 elements, or of its own tiles if the unit is updated by matrix. They are added exactly
and rounded once, so slots, slices and devices do not matter, nor does it if a unit is cut between tiles.

Source: Loshchilov and Hutter, arXiv 1711.05101. The split is megatier's: 12 bytes of state a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.errors import NonFiniteError
from megatier.layout import Layout, TensorSlice
from megatier.optim.adamw import (
    Planes,
    Scalars,
    adamw_threads,
    begin_adamw,
    lion_scalars,
    rounding_of,
    step_scalars,
)
from megatier.optim.masters import weight_dtype
from megatier.optim.muon import Muon
from megatier.ranks.ranks import Ranks
from megatier.readback import on_host
from megatier.state import LION
from megatier.workers import Workers

TILE_ELEMENTS = 65_536
"""Elements of a tile of a unit. Each tensor has one partial sum of squares for what it has of a tile."""
PIECE_ELEMENTS = 64 * TILE_ELEMENTS
"""Elements of one call if several threads share a gradient in RAM: whole tiles, so that no partial sum is cut."""
Apply = Callable[[str, tuple[int, int], Planes, Tensor, Planes], _native.Batch | None]
"""Updates some elements of a unit: see `RunOptimizer.apply`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """The settings of AdamW that do not change from step to step, unlike the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.95
    """The decay of Muon's momentum."""
    clip: float | None = 1.0
    """The global norm to which gradients are clipped; None: not at all."""
    deferred: bool = True
    """Whether updates wait until the norm is known. Otherwise they run inside the backward, and nothing is clipped."""


class RunOptimizer:
    """The optimizer of one run: Muon for units whose schema is by matrix, AdamW for all others.

    Threads: the training loop calls `begin_step` and `norm`. The lanes that update call `apply`, `accumulate` and
    `check`. Both call `measure`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        decayed: frozenset[str],
        hyper: Hyperparameters,
        *,
        groups: int,
        num_threads: int,
        ranks: Ranks | None = None,
        seed: int = 0,
    ) -> None:
        """Start the threads.

        With ranks, layouts and all that is measured and updated are those of this rank's shards, and `groups` counts
        the groups that it computes. The schemas of layouts are those of AdamW. The seed is that of the random numbers
        by which moments in bf16 are rounded.
        """
        self.hyper = hyper
        """Read by `begin_step`, `revise` and `clip`; all but `deferred` may be others in the next step."""
        self.layouts = dict(layouts)
        """Trained tensors of each unit that has any."""
        self._decayed = decayed
        self._groups = groups
        self._ranks = ranks
        self._seed = seed
        self._pool = adamw_threads(num_threads)
        self._workers = Workers(num_threads, "megatier-gradient")
        self._begun = self._scalars = Scalars(1.0, 0, 0.0, 0.0, (0.0,) * 8)
        self._muon = Muon(layouts)

        # Lion trains all units or none.
        self._is_lion = any(layout.schema in LION.values() for layout in layouts.values())
        self._sums: dict[str, list[Tensor]] = {}
        self._refused: str | None = None

        # Triton comes with torch's CUDA builds alone.
        if torch.cuda.is_available():
            from megatier.optim import kernels

            self._kernels = kernels

    def begin_step(self, step: int, learning_rate: float) -> None:
        """Forget the last step's gradients, and note the scalars of step 1, 2, ...

        Deferred updates of the last step run during this one, so they read its scalars until `clip` is called.
        """
        self._begun = self._scalars_of(step, learning_rate)
        self._sums.clear()
        self._refused = None
        if not self.hyper.deferred:
            self._scalars = self._begun

    def revise(self, step: int, learning_rate: float) -> bool:
        """Note the scalars of the step again. Returns whether they changed, so that `unclipped` used wrong ones."""
        before = self._begun
        self._begun = self._scalars_of(step, learning_rate)
        return self._begun != before

    def clip(self, norm: float) -> float:
        """Return the coefficient for this norm. From now on updates read it, and the scalars of the step begun."""
        limit = self.hyper.clip
        coefficient = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        self._scalars = replace(self._begun, of_kernels=(*self._begun.of_kernels[:-1], coefficient))
        return coefficient

    def _scalars_of(self, step: int, learning_rate: float) -> Scalars:
        """The scalars of a step in which nothing is clipped."""
        hyper = self.hyper
        betas = hyper.beta1, hyper.beta2
        if self._is_lion:
            scalars = lion_scalars(learning_rate, betas)
        else:
            scalars = step_scalars(step, learning_rate, betas, hyper.eps)
        decay = 1 - learning_rate * hyper.weight_decay
        return Scalars(decay, step, learning_rate, hyper.momentum, (*scalars, 1.0))

    def norm(self) -> float:
        """The global norm of the measured gradients: the root of the exact sum of the partial sums."""
        parts = [part for sums in self._sums.values() for part in sums]
        by_device = [[part for part in parts if part.is_cuda is on_gpu] for on_gpu in (False, True)]

        # Put together on the GPU first, since each read of it makes the host wait.
        found = [on_host(torch.cat(parts)) for parts in by_device if parts]
        sums = torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *found])
        if self._ranks is not None:
            sums = self._ranks.total(sums)
        return math.sqrt(_native.sum_exactly(address_of(sums, torch.float64, sums.numel()), sums.numel()))

    def first_non_finite(self) -> str | None:
        """A parameter whose measured gradient is not finite, of the first such unit that the backward came to.

        With ranks, every rank has to call it.
        """
        # Layouts are in the order of the forward.
        units = [unit for unit in reversed(self.layouts) if unit in self._sums]
        named = ((index, self._non_finite_in(unit)) for index, unit in enumerate(units))
        found = next(((index, name) for index, name in named if name is not None), None)
        if self._ranks is None:
            return None if found is None else found[1]

        # Shards of one unit follow each other in the order of the ranks.
        others = enumerate(self._ranks.agree((found,)))
        firsts = [(index, rank, name) for rank, one in others for index, name in filter(None, one)]
        return min(firsts)[2] if firsts else None

    def _non_finite_in(self, unit: str) -> str | None:
        """The first parameter of a unit, in its layout, whose measured gradient is not finite."""
        sums = on_host(torch.cat(self._sums[unit]))
        tensors = self.layouts[unit].tensors
        parts = sums.split([_num_tiles(tensor, self._origin(unit, tensor)) for tensor in tensors])
        return next((t.name for t, part in zip(tensors, parts, strict=True) if not part.isfinite().all()), None)

    # ------------------------------------------------------------------ gradients

    def measure(self, unit: str, grad: Tensor) -> None:
        """Note the sums of squares of a final gradient.

        Args:
            unit: its unit.
            grad: flat [num_elements] in the dtype of the unit's weights, on any device.
        """
        tensors = [(tensor, self._origin(unit, tensor)) for tensor in self.layouts[unit].tensors]
        if grad.is_cuda:
            sum_squares = self._kernels.sum_squares
            self._sums[unit] = [sum_squares(grad[t.start : t.stop], t.start - origin) for t, origin in tensors]
            return

        sums = torch.empty(sum(_num_tiles(*tensor) for tensor in tensors), dtype=torch.float64, device="cpu")
        pieces: list[tuple[int, int, bool, int]] = []
        done = 0
        dtype = torch.bfloat16 if grad.dtype is torch.bfloat16 else torch.float32
        source = address_of(grad, dtype, max((tensor.stop for tensor, _ in tensors), default=0))
        target = address_of(sums, torch.float64, sums.numel())

        for start, stop in (piece for tensor in tensors for piece in _pieces(*tensor)):
            place = source + start * dtype.itemsize
            pieces.append((place, stop - start, dtype is torch.bfloat16, target + done * sums.element_size()))
            done += -(-(stop - start) // TILE_ELEMENTS)

        self._at_once(_native.sum_squares, pieces, (grad, sums))
        self._sums[unit] = [sums]

    def _origin(self, unit: str, tensor: TensorSlice) -> int:
        """The element of a unit from which the tiles of a tensor are counted."""
        # From the unit's start, so that runs of whole tiles have exactly their own of all these sums. Where ranks deal
        # out whole tensors, from the tensor's, since its place in the unit depends on how many they are.
        return tensor.start if self.layouts[unit].schema.by_matrix else 0

    def accumulate(self, unit: str, total: Tensor, part: Tensor, *, group: int) -> None:
        """Add a group's gradient to the sum in RAM; after the last group, round the sum once and measure it.

        Args:
            unit: its unit.
            total: uint8, the fp32 sum. After the last group its front holds the gradient, in the dtype of the
                unit's weights.
            part: uint8, the fp32 gradient of this group. It may be overwritten.
            group: 0, 1, ...
        """
        count = self.layouts[unit].num_elements
        runs = [(start, min(PIECE_ELEMENTS, count - start)) for start in range(0, count, PIECE_ELEMENTS)]
        source = address_of(part, torch.float32, count)
        target = address_of(total, torch.float32, count)
        sums = [(target + 4 * start, source + 4 * start, size, group == 0) for start, size in runs]
        self._at_once(_native.accumulate, sums, (total, part))
        if group < self._groups - 1:
            return

        # If weights are bf16, rounded numbers are half as long, so a piece of them lies where another thread still
        # reads its sums. They go to the part first, and are copied when all of them are rounded.
        dtype = self._dtype(unit)
        if dtype is torch.bfloat16:
            rounded = [(target + 4 * start, source + 2 * start, size) for start, size in runs]
            self._at_once(_native.round_bf16, rounded, (total, part))
            copied = [(target + 2 * start, source + 2 * start, 2 * size) for start, size in runs]
            self._at_once(_native.copy, copied, (total, part))

        self.measure(unit, total.view(dtype)[:count])

    def sum_groups(self, unit: str, total: Tensor, pieces: Tensor, spare: Tensor, *, adds: bool, is_last: bool) -> None:
        """Add the gradients of several groups, one of each rank, where they lie; see play.optimizer.Optimizer.

        Args:
            unit: its unit.
            total: uint8, fp32 sum if a step has more groups than these; after the last group its front holds the
                gradient in the dtype of the unit's weights.
            pieces: uint8 [groups, bytes], gradients in that dtype, or in fp32. The first may be overwritten.
            spare: uint8, room for an fp32 sum, if the pieces are in a narrower dtype.
            adds: whether `total` has the sum of groups before.
            is_last: whether no groups come after these.
        """
        count = self.layouts[unit].num_elements
        dtype = self._dtype(unit)
        grads = pieces.view(torch.float32 if pieces.shape[1] == 4 * count else dtype)
        summed = self._room_for_sum(total, grads, spare)
        if adds:
            summed.add_(grads[0])
        else:
            summed.copy_(grads[0])

        # One after the other, as one rank alone adds them: fp32 sums depend on their order.
        for grad in grads[1:]:
            summed.add_(grad)

        if is_last:
            final = total.view(dtype)[:count]
            final.copy_(summed.to(dtype) if summed.data_ptr() == final.data_ptr() else summed)
            self.measure(unit, final)

    def _room_for_sum(self, total: Tensor, grads: Tensor, spare: Tensor) -> Tensor:
        """Where the fp32 sum of groups is taken, flat: it stays in `total` if there are groups that come later."""
        if self._groups > 1:
            return total.view(torch.float32)[: grads.shape[1]]
        return grads[0] if grads.dtype is torch.float32 else spare.view(torch.float32)[: grads.shape[1]]

    def _dtype(self, unit: str) -> torch.dtype:
        """The dtype of a unit's weights and of its final gradient."""
        return weight_dtype(self.layouts[unit].schema)

    def _at_once(self, work: Callable[..., None], calls: Sequence[tuple[Any, ...]], memory: tuple[Tensor, ...]) -> None:
        """Make native calls, which drop the GIL, on several threads, and wait for them.

        Args:
            work: the native function.
            calls: its arguments, call by call, with addresses in the memory.
            memory: the tensors that hold it. If the wait is interrupted, calls go on, so each of them holds these.
        """
        self._workers.map(partial(_call, work, memory), calls)

    def check(self, unit: str) -> None:
        """Refuse a gradient that is not finite, before the immediate mode applies it, and every gradient after it.

        Raises:
            NonFiniteError: names the parameter.
        """
        self._refused = self._refused or self._non_finite_in(unit)
        if self._refused is not None:
            raise NonFiniteError(f"the gradient of {self._refused} is not finite")

    # ------------------------------------------------------------------ update

    def apply(
        self, unit: str, elements: tuple[int, int], planes: Planes, grad: Tensor, before: Planes
    ) -> _native.Batch | None:
        """Begin AdamW on elements [start, stop) of a unit, clipped as the last norm decided.

        Args:
            unit: its unit.
            elements: the run of elements that the planes hold.
            planes: uint8 tensors of each kind of state, all on one device.
            grad: uint8, the final gradient of the same elements, in the dtype of the unit's weights.
            before: the planes to read of kinds that are not updated in place; on the CPU only.

        Returns:
            What to wait on; None where it lies on the GPU's current stream.
        """
        return self._apply(self._scalars, unit, elements, planes, grad, before)

    def unclipped(self) -> Apply:
        """Return `apply` for the step begun as if nothing were clipped, for use before the norm is known."""
        return partial(self._apply, self._begun)

    # HOP 5/6: gradient and state -> new state
    def _apply(
        self,
        scalars: Scalars,
        unit: str,
        elements: tuple[int, int],
        planes: Planes,
        grad: Tensor,
        before: Planes,
    ) -> _native.Batch | None:
        start, stop = elements
        if self.layouts[unit].schema.by_matrix:
            assert not before, "matrices are updated in place"
            self._muon.apply(unit, elements, planes, grad, scalars)
            return None

        segments = self._segments(self.layouts[unit], start, stop, scalars.decay)

        # Shards of a unit are equally long and follow each other in the order of the ranks. Elements are counted in the
        # whole unit, so that moments are rounded alike whatever it is cut into.
        layout = self.layouts[unit]
        first = start if self._ranks is None else self._ranks.rank * layout.num_elements + start
        rounding = rounding_of(layout.schema, self._seed, scalars.step, unit, first)
        return begin_adamw(self._pool, planes, grad, segments, scalars.of_kernels, before, rounding)

    def matrices(self, unit: str) -> Sequence[tuple[int, int]]:
        """Return the runs of a unit's elements that are updated one at a time; see play.optimizer.Optimizer."""
        return self._muon.runs(unit)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()
        self._workers.close()

    def _segments(self, layout: Layout, start: int, stop: int, factor: float) -> list[tuple[int, int, float]]:
        """Cut elements [start, stop) into runs of equal decay, relative to `start`, without gaps.

        Padding belongs to the run before it, or to the first one. Its gradient and state are 0 and stay 0.
        """
        starts: list[tuple[int, float]] = []
        for tensor in layout.tensors:
            if tensor.start >= stop or tensor.stop <= start:
                continue
            decay = factor if tensor.name in self._decayed else 1.0
            if not starts or starts[-1][1] != decay:
                starts.append((tensor.start - start if starts else 0, decay))

        # Nothing but padding.
        starts = starts or [(0, 1.0)]
        stops = [*(first for first, _ in starts[1:]), stop - start]
        return [(first, last, decay) for (first, decay), last in zip(starts, stops, strict=True)]


def _call(work: Callable[..., None], memory: tuple[Tensor, ...], arguments: tuple[Any, ...]) -> None:
    """Make a native call. The memory that it works on lives until it is over, since it is an argument here."""
    work(*arguments)


def _num_tiles(tensor: TensorSlice, origin: int) -> int:
    """Return the number of tiles that a tensor has elements in. They are counted from an element of its unit."""
    start, stop = tensor.start - origin, tensor.stop - origin
    return -(-stop // TILE_ELEMENTS) - start // TILE_ELEMENTS if tensor.num_elements else 0


def _pieces(tensor: TensorSlice, origin: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor into a head and runs of whole tiles. A native call takes one, and counts tiles from its start."""
    border = origin - (origin - tensor.start) // TILE_ELEMENTS * TILE_ELEMENTS
    return pairwise([tensor.start, *range(border, tensor.stop, PIECE_ELEMENTS), tensor.stop])


__all__ = ["Hyperparameters", "RunOptimizer"]
