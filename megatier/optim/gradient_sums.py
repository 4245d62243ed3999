"""Sums a run's gradients over groups, and computes their exact global norm.

The norm is that of the rounded gradients. Squares are summed in fp64, in a fixed order, for each tensor and each tile
of its unit (65,536 elements), or for each tile of the tensor itself if the unit is updated by matrix. These partial
sums are added exactly and rounded once. So the norm has the same bits for all slots, slices and devices, and wherever a
unit is cut between tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.errors import NonFiniteError
from megatier.layout import Layout, TensorSlice
from megatier.optim.masters import weight_dtype
from megatier.optim.norm_tiles import PIECE_ELEMENTS, TILE_ELEMENTS, cut_at_tiles, num_tiles, sum_squares
from megatier.ranks.ranks import Ranks
from megatier.readback import on_host
from megatier.workers import Workers


class GradientSums:
    """The sums of the current step's gradients, by unit.

    Threads: the training loop calls `norm`, the update queues call `accumulate` and `check`, and both call `measure`.
    """

    def __init__(self, layouts: Mapping[str, Layout], *, groups: int, num_threads: int, ranks: Ranks | None) -> None:
        """Start the threads that sum.

        Args:
            layouts: the trained tensors of each unit that has any; with several ranks, those of this rank's shards.
            groups: the groups of a step that this process computes.
            num_threads: the threads that share the work of a unit in RAM.
            ranks: the ranks that share the state; None: this process has all of it.
        """
        self.layouts = dict(layouts)
        """The trained tensors of each unit that has any."""
        self._groups = groups
        self._ranks = ranks
        self._workers = Workers(num_threads, "megatier-gradient")
        self._sums: dict[str, list[Tensor]] = {}
        """The sums of squares of each unit that was measured in this step."""
        self._tile_runs_of: dict[str, tuple[Tensor, bool]] = {}
        """For each unit, the runs of elements in each tile, on the GPU. They are the same in every step."""
        self._refused: str | None = None
        """The parameter whose gradient was not finite, once `check` has found one in this step."""

        # Triton comes with torch's CUDA builds alone.
        if torch.cuda.is_available():
            from megatier.optim import kernels

            self._kernels = kernels

    def forget_gradients(self) -> None:
        """Forget the last step's gradients."""
        self._sums.clear()
        self._refused = None

    # ------------------------------------------------------------------ the norm

    def norm(self) -> float:
        """Return the global norm of the measured gradients: the root of the exact sum of the partial sums."""
        of_gpu = list[Tensor]()

        # Never empty, since torch cannot concatenate an empty list.
        of_cpu = [torch.empty(0, dtype=torch.float64, device="cpu")]
        for partials in self._sums.values():
            for partial_sums in partials:
                if partial_sums.is_cuda:
                    of_gpu.append(partial_sums)
                else:
                    of_cpu.append(partial_sums)

        # Concatenated on the GPU first, since each read makes the host wait.
        if of_gpu:
            of_cpu.append(on_host(torch.cat(of_gpu)))
        sums = torch.cat(of_cpu)
        if self._ranks is not None:
            sums = self._ranks.all_gather_tensor(sums)

        # The sum is exact, so the order of units and ranks does not matter.
        count = sums.numel()
        address = address_of(sums, torch.float64, count)
        return math.sqrt(_native.sum_exactly(address, count))

    def first_non_finite(self) -> str | None:
        """Return the first parameter, in backward order, whose measured gradient is not finite.

        With several ranks, all of them must call this.
        """
        # Layouts are in the order of the forward.
        units = [unit for unit in reversed(self.layouts) if unit in self._sums]
        own_first: list[tuple[int, str]] = []
        for index, unit in enumerate(units):
            name = self._non_finite_in(unit)
            if name is not None:
                own_first.append((index, name))
                break
        by_rank = [own_first] if self._ranks is None else self._ranks.all_gather_object(own_first)

        # A unit's shards are in the order of the ranks, so for one unit the lower rank counts.
        firsts = [(index, rank, name) for rank, first_of_rank in enumerate(by_rank) for index, name in first_of_rank]
        if not firsts:
            return None
        _, _, name = min(firsts)
        return name

    def _non_finite_in(self, unit: str) -> str | None:
        """Return the first parameter of a unit, in its layout, whose measured gradient is not finite."""
        # A shard that is only padding has no sums.
        if not self._sums[unit]:
            return None

        # The sum of squares of finite bf16 or fp32 numbers is finite in fp64, so the sums tell.
        sums = on_host(torch.cat(self._sums[unit]))
        tensors = self.layouts[unit].tensors
        counts = [num_tiles(tensor, self._origin(unit, tensor)) for tensor in tensors]
        for tensor, of_tensor in zip(tensors, sums.split(counts), strict=True):
            if not of_tensor.isfinite().all():
                return tensor.name
        return None

    # ------------------------------------------------------------------ one gradient

    def measure(self, unit: str, grad: Tensor) -> None:
        """Take the sums of squares of a final gradient.

        Args:
            unit: its unit.
            grad: flat [num_elements] in the dtype of the unit's weights, on any device.
        """
        if grad.is_cuda:
            # One launch for all parameters, since a launch for each takes the host longer than the GPU.
            runs, aligned = self._tile_runs(unit, grad.device)
            self._sums[unit] = [self._kernels.sum_runs(grad, runs, aligned=aligned)]
            return

        pieces = [
            grad[start:stop]
            for tensor in self.layouts[unit].tensors
            for start, stop in cut_at_tiles(tensor, self._origin(unit, tensor), PIECE_ELEMENTS)
        ]
        self._sums[unit] = self._workers.map(sum_squares, pieces)

    def _tile_runs(self, unit: str, device: torch.device) -> tuple[Tensor, bool]:
        """Return the runs of a unit's parameters in each tile, and whether they are aligned for `sum_runs`."""
        if unit in self._tile_runs_of:
            return self._tile_runs_of[unit]

        runs = list[tuple[int, int]]()
        for tensor in self.layouts[unit].tensors:
            origin = self._origin(unit, tensor)
            for start, stop in cut_at_tiles(tensor, origin, TILE_ELEMENTS):
                # The first run is empty if a tensor begins at a tile border.
                if stop > start:
                    runs.append((start, stop - start))

        is_aligned = all(start % 16 == 0 for start, _ in runs)
        on_device = torch.tensor(runs, dtype=torch.int64, device=device)

        # The view gives an empty list its shape.
        self._tile_runs_of[unit] = on_device.view(-1, 2), is_aligned
        return self._tile_runs_of[unit]

    def _origin(self, unit: str, tensor: TensorSlice) -> int:
        """Return the element of a unit at which a tensor's tiles begin."""
        # Usually the unit's start, so that a run of whole tiles has its own partial sums. If ranks own whole tensors,
        # the tensor's start, since its place in the unit depends on the world size.
        return tensor.start if self.layouts[unit].schema.by_matrix else 0

    def accumulate(self, unit: str, total: Tensor, part: Tensor, *, group: int) -> None:
        """Add a group's gradient to the sum in RAM. After the last group, round the sum once and measure it.

        Args:
            unit: its unit.
            total: uint8, the fp32 sum. After the last group its front holds the gradient, in the dtype of the
                unit's weights.
            part: uint8, the fp32 gradient of this group. It may be overwritten.
            group: 0, 1, ...
        """
        count = self.layouts[unit].num_elements
        sums = total.view(torch.float32)[:count]
        grads = part.view(torch.float32)[:count]

        # Elements are added independently, so the division into pieces changes no bit.
        self._in_pieces(partial(_add, is_first=group == 0), sums, grads)
        if group < self._groups - 1:
            return

        # Rounded bf16 numbers are half as long, so a piece of them would overlap sums that another thread still reads.
        # So they are rounded into `part`, and copied when all are done.
        dtype = self._dtype(unit)
        final = total.view(dtype)[:count]
        if dtype is torch.bfloat16:
            rounded = part.view(dtype)[:count]
            self._in_pieces(_round, sums, rounded)
            self._in_pieces(_copy, final, rounded)
        self.measure(unit, final)

    def sum_groups(self, unit: str, total: Tensor, pieces: Tensor, spare: Tensor, *, adds: bool, is_last: bool) -> None:
        """Add the gradients of several groups, one of each rank, in place; see `play.optimizer_protocol`.

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
        is_fp32 = pieces.shape[1] == 4 * count
        grads = pieces.view(torch.float32 if is_fp32 else dtype)
        sums = self._memory_of_sums(total, grads, spare)
        if adds:
            sums.add_(grads[0])
        else:
            sums.copy_(grads[0])

        # One after the other, as a single rank adds them, since fp32 sums depend on their order.
        for grad in grads[1:]:
            sums.add_(grad)

        if is_last:
            # If both are at the same address, rounded numbers would overwrite sums that are not read yet.
            final = total.view(dtype)[:count]
            overlaps = sums.data_ptr() == final.data_ptr()
            final.copy_(sums.to(dtype) if overlaps else sums)
            self.measure(unit, final)

    def _memory_of_sums(self, total: Tensor, grads: Tensor, spare: Tensor) -> Tensor:
        """Return the memory of the fp32 sum of groups, flat. It is in `total` if more groups follow."""
        has_one_group = self._groups == 1
        if has_one_group and grads.dtype is torch.float32:
            return grads[0]

        memory = spare if has_one_group else total
        num_elements = grads.shape[1]
        return memory.view(torch.float32)[:num_elements]

    def _dtype(self, unit: str) -> torch.dtype:
        """Return the dtype of a unit's weights and of its final gradient."""
        return weight_dtype(self.layouts[unit].schema)

    def _in_pieces(self, work: Callable[[Tensor, Tensor], None], one: Tensor, other: Tensor) -> None:
        """Run the same work on all pieces of two flat tensors of equal length, on several threads, and wait."""
        # One thread cannot use the full memory bandwidth, and in a backward the computing thread waits for this. If the
        # wait is interrupted the threads go on, so they hold tensors rather than addresses.
        pieces = zip(one.split(PIECE_ELEMENTS), other.split(PIECE_ELEMENTS), strict=True)
        self._workers.map(lambda pair: work(*pair), pieces)

    def check(self, unit: str) -> None:
        """Check that a gradient is finite before the immediate mode applies it. After one failure all later units fail.

        Raises:
            NonFiniteError: names the parameter.
        """
        # After a failure, each further update would leave more of the weights one step ahead. Queues check units
        # concurrently, so a check that finds nothing must not overwrite what another one has found.
        if self._refused is None:
            name = self._non_finite_in(unit)
            if name is not None:
                self._refused = name
        if self._refused is not None:
            raise NonFiniteError(f"the gradient of {self._refused} is not finite")

    def close(self) -> None:
        """Stop the threads."""
        self._workers.close()


def _add(sums: Tensor, grads: Tensor, *, is_first: bool) -> None:
    """Add fp32 numbers to sums, or write them if they are the first."""
    count = sums.numel()
    target = address_of(sums, torch.float32, count)
    source = address_of(grads, torch.float32, count)
    _native.accumulate(target, source, count, is_first)


def _round(values: Tensor, rounded: Tensor) -> None:
    """Write fp32 numbers as bf16."""
    count = values.numel()
    source = address_of(values, torch.float32, count)
    target = address_of(rounded, torch.bfloat16, count)
    _native.round_bf16(source, target, count)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor to another one of the same dtype."""
    # As bytes, for any dtype.
    num_bytes = source.nbytes
    to_address = address_of(target.view(torch.uint8), torch.uint8, num_bytes)
    from_address = address_of(source.view(torch.uint8), torch.uint8, num_bytes)
    _native.copy(to_address, from_address, num_bytes)
