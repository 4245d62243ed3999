"""Gradients of units: summed in fp32 over slices, uses and groups, rounded once to the compute dtype, handed over.

A unit's gradient of a group is whole when every forward use has had its backward, or when the backward is over without
having come to all of them. The first summand waits as autograd made it, and the last one is added on the way into the
buffer that is handed over: two slices are one pass over memory. Parameters without a gradient count as zero; everything
is addressed by parameter, never by a running offset.

A unit to which no backward of a step came has no gradient and is not updated, as in torch. Where only some of a step's
groups left it out, theirs is zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from megatier.layout import Layout


class GradSink(Protocol):
    """Where gradients go; it knows the tiers."""

    def take_grad(self, unit: str) -> Tensor:
        """A uint8 buffer for fp32 (several groups) or the compute dtype; it keeps its contents if `sums_here`."""

    def ship_grad(self, unit: str, *, group: int) -> None:
        """Hand it over."""

    def sums_here(self, unit: str) -> bool:
        """True when groups are added up in the buffer itself: at home on the GPU, or RAM is too short."""


class Measure(Protocol):
    """Whoever takes the norm."""

    def measure(self, unit: str, grad: Tensor) -> None:
        """Note the sums of squares of a final gradient, flat, in the compute dtype."""


class Gradients:
    """Collects the gradients of one step."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        dtype: torch.dtype,
        sink: GradSink,
        norm: Measure,
        *,
        groups: int,
    ) -> None:
        """Layouts of what is trained; the compute dtype; who takes gradients and their norm; the groups of a step."""
        self._layouts = layouts
        self._dtype = dtype
        self._sink = sink
        self._norm = norm
        self._groups = groups
        self._gaps = {name: _gaps(layout) for name, layout in layouts.items()}
        self._summands: Counter[str] = Counter()
        self._added: Counter[str] = Counter()
        """How many of them have come."""
        self._left: Counter[str] = Counter()
        self._firsts: dict[str, dict[str, Tensor]] = {}
        """Of a unit by parameter, flat: the only summand so far, which is autograd's and must not be changed."""
        self._sums: dict[str, dict[str, Tensor]] = {}
        """Of several so far, fp32; the last summand of a unit comes to neither."""
        self._buffers: dict[str, Tensor] = {}
        self._shipped: Counter[str] = Counter()
        """Groups of this step whose gradients of a unit are out."""
        self._is_watched = self._is_over = False
        """The backward of this group has begun; has come to its end."""
        self.group = 0

    def begin_group(self, group: int) -> None:
        """Forget what an abandoned group left behind."""
        self.group = group
        self._is_watched = False
        self._is_over = False
        if not group:
            self._shipped.clear()
        for counts in (self._summands, self._added, self._left):
            counts.clear()
        self._firsts.clear()
        self._sums.clear()
        self._buffers.clear()

    def takes(self, unit: str, name: str) -> bool:
        """Whether a parameter has a gradient: the others are frozen."""
        return unit in self._layouts and any(tensor.name == name for tensor in self._layouts[unit].tensors)

    @property
    def is_open(self) -> bool:
        """Whether a forward use of this group may still have its backward, or the backward did not come to its end."""
        return self._is_watched > self._is_over or any(self._left.values())

    def expect(self, unit: str, num_slices: int) -> None:
        """A forward use happened; a backward in so many slices will follow."""
        self._summands[unit] += num_slices
        self._left[unit] += 1

    def watch_backward(self) -> None:
        """Call it inside a backward, which is that of this group: the group is over when it is."""
        if not self._is_watched:
            self._is_watched = True
            Variable._execution_engine.queue_callback(self.end_group)

    def end_group(self) -> None:
        """The backward is over, and came to no more uses."""
        for unit in [unit for unit, left in self._left.items() if left and self._added[unit]]:
            self._ship(unit)  # what its other uses made
        self._left.clear()
        if self.group == self._groups - 1:
            for unit in list(self._shipped):
                self._catch_up(unit, self._groups)

        self._is_over = True

    def add(self, unit: str, parts: Sequence[tuple[str, Tensor | None]]) -> None:
        """Gradients of one slice of one use, by parameter name; those that are not named are zero."""
        grads = {name: grad.reshape(-1) for name, grad in parts if grad is not None}
        self._added[unit] += 1
        if self._added[unit] == self._summands[unit]:
            self._write(unit, grads)
            return

        firsts = self._firsts.setdefault(unit, {})
        sums = self._sums.setdefault(unit, {})

        for name, grad in grads.items():
            if name in sums:
                sums[name].add_(grad)
            elif name in firsts:
                sums[name] = firsts.pop(name).to(torch.float32, copy=True).add_(grad)
            else:
                firsts[name] = grad

    def close(self, unit: str) -> None:
        """A use's backward is over; after the last, the group's gradient goes out."""
        self._left[unit] -= 1
        if not self._left[unit]:
            self._ship(unit)

    def _ship(self, unit: str) -> None:
        if unit not in self._buffers:
            self._write(unit, {})
        self._send(unit, self.group)

    def _catch_up(self, unit: str, group: int) -> None:
        """Groups before this one that left the unit out have a gradient of zero."""
        for missing in range(self._shipped[unit], group):
            buffer = self._take(unit)
            if not self._adds(unit, missing):
                buffer.zero_()
            self._send(unit, missing)

    def _write(self, unit: str, grads: Mapping[str, Tensor]) -> None:
        """Lay the last summand and what the others made into the sink's buffer, rounded once."""
        self._catch_up(unit, self.group)
        buffer = self._take(unit)
        adds = self._adds(unit, self.group)
        before = {**self._firsts.pop(unit, {}), **self._sums.pop(unit, {})}
        for start, stop in () if adds else self._gaps[unit]:
            buffer[start:stop].zero_()

        for tensor in self._layouts[unit].tensors:
            piece = buffer[tensor.start : tensor.stop]
            summands = [found[tensor.name] for found in (before, grads) if tensor.name in found]
            if len(summands) == 2 and piece.dtype is torch.float32:
                summands[0] = summands[0].float()  # else a sum of bf16 would be rounded
            if adds:
                if summands:
                    piece.add_(reduce(torch.add, summands))
            elif len(summands) == 2:
                torch.add(*summands, out=piece)  # computes in fp32, rounds what it writes
            elif summands:
                piece.copy_(summands[0])
            else:
                piece.zero_()

    def _take(self, unit: str) -> Tensor:
        """The sink's buffer, flat."""
        buffer = self._sink.take_grad(unit).view(torch.float32 if self._groups > 1 else self._dtype)
        self._buffers[unit] = buffer
        return buffer

    def _adds(self, unit: str, group: int) -> bool:
        """Whether the buffer holds the sum of the groups before."""
        return group > 0 and self._sink.sums_here(unit)

    def _send(self, unit: str, group: int) -> None:
        """Hand the buffer over."""
        last = group == self._groups - 1
        buffer = self._buffers.pop(unit)
        if last and (self._groups == 1 or self._sink.sums_here(unit)):
            if buffer.dtype is not self._dtype:
                rounded = buffer.to(self._dtype)
                buffer = buffer.view(self._dtype)[: rounded.numel()].copy_(rounded)
            self._norm.measure(unit, buffer)

        self._sink.ship_grad(unit, group=group)
        self._shipped[unit] = group + 1


def _gaps(layout: Layout) -> list[tuple[int, int]]:
    """Padding between and after tensors."""
    gaps = []
    offset = 0

    for tensor in layout.tensors:
        if tensor.start > offset:
            gaps.append((offset, tensor.start))
        offset = tensor.stop

    return [*gaps, (offset, layout.num_elements)] if offset < layout.num_elements else gaps
