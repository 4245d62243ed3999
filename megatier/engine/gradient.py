"""Sums the gradients of units in fp32 over slices, uses and groups, and rounds them once to the weights' dtype.

A unit's gradient of a group is complete when every forward use has had its backward, or when the backward ends without
reaching all of them. A group may have several forwards, and its one backward goes over all of them, the last one first.
The first summand is kept as autograd made it, and the last one is added on the way into the sink's buffer, so two
slices take one pass over memory. Parameters without a gradient count as zero. Everything is addressed by parameter,
never by a running offset.

A backward for gradients of inputs alone, before the group's own, adds nothing. Forwards whose graphs it frees are
spent: the group's backward need not reach them.

A unit that no backward of a step reached has no gradient and is not updated, as in torch. If only some groups of a step
left it out, they contribute zero.

Threads: all of it is called by the thread that computes (autograd's, in a backward).
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor
from torch.autograd import Variable

from megatier.engine.grad_sink import GradMeter, GradSink
from megatier.errors import StreamedModelError
from megatier.layout import Layout
from megatier.optim.masters import weight_dtype

_WITHOUT_GRADIENT = (
    "{} had no gradient in a step that used other parameters of its unit. It counts as zero there: moments and weight "
    "decay go on, where optimizers of torch pass over the parameter. Freeze it, or let each step use it."
)


@dataclass(slots=True)
class _Accumulation:
    """What has come of a unit's gradient in the current group."""

    num_summands: int = 0
    """The expected number of summands: one for each slice of each use."""
    num_added: int = 0
    """The number of summands that have come."""
    uses_left: int = 0
    """The number of uses whose backward has not come yet."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """For each parameter, flat: the only summand so far, which is autograd's and must not be changed, or the fp32 sum
    of several. The last summand never comes here."""
    summed: set[str] = field(default_factory=set)
    """The parameters that have a sum of several summands."""
    buffer: Tensor | None = None
    """The sink's buffer, once it holds the gradient."""


class Gradients:
    """Collects the gradients of one step."""

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        sink: GradSink,
        meter: GradMeter,
        *,
        groups: int,
        is_shared: bool = False,
    ) -> None:
        """Begin before the first group.

        Args:
            layouts: the layout of the trained parameters of each unit.
            sink: takes the gradients.
            meter: measures the final gradients, for their norm.
            groups: the number of groups in a step that this rank computes.
            is_shared: whether other ranks compute groups too. The sink then adds them up and measures its own shards.
        """
        self._layouts = layouts
        self._dtypes = {name: weight_dtype(layout.schema) for name, layout in layouts.items()}
        """The dtype of each unit's weights, and of its final gradient."""
        self._sink = sink
        self._meter = meter
        self._groups = groups
        self._is_shared = is_shared
        self.group = 0
        """The current group."""
        self.forward = 0
        """The number of the current forward, which grows through the run."""
        self._first_forward = 0
        """The number of this group's first forward."""
        self._reached: set[int] = set()
        """The forwards of this group that its backward has reached."""
        self._spent: set[int] = set()
        """The forwards whose graphs were freed by a backward for gradients of inputs alone."""
        self._task = -1
        """Autograd's task id of the last such backward."""

        self._accumulations = defaultdict[str, _Accumulation](_Accumulation)
        """The accumulation of each unit in this group, in the order of their first uses."""
        self._present: dict[str, set[str]] = {}
        """For each unit, the parameters that have a gradient in this step."""
        self._known: dict[str, set[str]] = {}
        """For each unit, the parameters that have had a gradient in any step."""
        self._has_warned = False
        self._num_submitted: Counter[str] = Counter()
        """The number of groups of this step for which each unit has submitted a gradient."""
        self._is_watched = False
        """Whether the backward of this group has begun."""
        self._is_over = False
        """Whether the backward of this group has ended."""

    def begin_group(self, group: int) -> None:
        """Begin a group."""
        self.group = group
        self._is_watched = False
        self._is_over = False
        self.begin_forward()
        self._first_forward = self.forward
        self._reached.clear()
        self._spent.clear()
        if not group:
            self._num_submitted.clear()
            self._present.clear()

        self._accumulations.clear()

    def drop(self) -> None:
        """Drop a step that is given up. No backward may reach its forwards any more."""
        self._accumulations.clear()
        self._spent.clear()
        self._is_watched = False
        self._is_over = False
        self._first_forward = self.forward + 1

    def begin_forward(self) -> None:
        """Begin another forward of the group, which the group's backward will go over too.

        Raises:
            StreamedModelError: the backward has begun.
        """
        self._check_waits("it cannot go over a further forward. Make all forwards before loss.backward()")
        self.forward += 1

    def is_trained(self, unit: str, name: str) -> bool:
        """Return whether a parameter of a unit is trained rather than frozen."""
        return unit in self._layouts and any(tensor.name == name for tensor in self._layouts[unit].tensors)

    @property
    def is_open(self) -> bool:
        """Whether a forward of this group may still have its backward, or a backward stopped before its end."""
        # A backward for gradients of inputs alone has begun too, though it adds nothing.
        has_begun = self._is_watched or bool(self._spent)
        if has_begun and not self._is_over:
            return True
        return any(accumulated.uses_left for accumulated in self._accumulations.values())

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward of this group is running, or stopped before its end."""
        return self._is_watched and not self._is_over

    @property
    def can_evaluate(self) -> bool:
        """Whether a forward without gradients may run within the step now: before a backward, and not during one."""
        return self.group < self._groups - 1 if self._is_over else not self._is_watched

    def begin_evaluation(self) -> None:
        """Begin a forward without gradients. After a group's backward it belongs to the next group."""
        if self._is_over:
            self.begin_group(self.group + 1)

    def expect_use(self, unit: str, num_slices: int) -> None:
        """Expect the backward of a forward use, in so many slices."""
        accumulated = self._accumulations[unit]
        accumulated.num_summands += num_slices
        accumulated.uses_left += 1

    def cancel_use(self, unit: str, num_slices: int) -> None:
        """Expect no backward of such a use any more."""
        accumulated = self._accumulations[unit]
        accumulated.num_summands -= num_slices
        accumulated.uses_left -= 1

    def watch_backward(self, forward: int) -> None:
        """Note that this group's backward has reached a forward. Call it during the backward, whose end ends the group.

        Args:
            forward: the number of the forward.

        Raises:
            StreamedModelError: the forward's group has had its backward, or its step was dropped.
        """
        self._check_own(forward)
        self._reached.add(forward)

        # Autograd calls it when the whole backward has ended, even one that also goes over other graphs.
        if not self._is_watched:
            self._is_watched = True
            Variable._execution_engine.queue_callback(self.end_group)

    def watch_inputs(self, forward: int, task: int, *, ends: bool) -> bool:
        """Note that a backward for gradients of inputs alone has reached a forward of this group.

        Args:
            forward: the number of the forward.
            task: autograd's id of the backward.
            ends: whether it frees the graph.

        Returns:
            Whether this is the first node that it reaches.

        Raises:
            StreamedModelError: the group has begun its backward, or other ranks would have to take part.
        """
        self._check_own(forward)
        self._check_waits("there are no gradients of inputs inside of it. Take them before loss.backward()")
        if self._is_shared:
            raise StreamedModelError(
                "a backward for gradients of inputs alone (torch.autograd.grad, or backward with inputs) would be one "
                "that other ranks do not take part in. With several ranks every forward has one loss.backward()."
            )

        if ends:
            self._spent.add(forward)
        is_new = task != self._task
        self._task = task
        return is_new

    def _check_own(self, forward: int) -> None:
        """Refuse a backward that goes over a forward of another group.

        Raises:
            StreamedModelError: the forward's group has had its backward.
        """
        if self._is_over or forward < self._first_forward:
            raise StreamedModelError(
                "this backward goes over a forward of a group that has had its backward, or of a step that was "
                "dropped. All forwards of a group have one backward: add up their losses, or call each one's backward "
                "before the next forward."
            )

    def _check_waits(self, why: str) -> None:
        """Check that the backward of this group has not begun.

        Raises:
            StreamedModelError: it has begun.
        """
        if self._is_watched:
            raise StreamedModelError(
                f"a backward has begun and has not come to its end, so {why}, or drop the step with abandon()."
            )

    def end_group(self) -> None:
        """Submit the gradients that are left when the backward is over.

        Raises:
            StreamedModelError: it has not reached all forwards of the group.
        """
        forwards = {*range(self._first_forward, self.forward + 1)} - (self._spent - self._reached)
        if self._reached and self._reached != forwards:
            raise StreamedModelError(
                f"the backward came to {len(self._reached)} of the {len(forwards)} forwards before it. Add up the "
                "losses of all of them and call backward once, run forwards that need none under torch.no_grad(), or "
                "call each one's backward before the next forward. This step cannot go on: drop it with abandon()."
            )

        # Some uses have no output that leads to the loss, so no backward reached them, but others of the unit made a
        # gradient.
        for unit, accumulated in self._accumulations.items():
            if accumulated.uses_left and accumulated.num_added:
                self._submit(unit)
        self._accumulations.clear()

        # A unit may be left out of the last groups, while its update waits for a gradient of every group. With several
        # ranks the sink knows what was left out.
        if not self._is_shared and self.group == self._groups - 1:
            for unit in list(self._num_submitted):
                self._catch_up(unit, self._groups)

        self._is_over = True

    def add(self, unit: str, of_slice: Sequence[tuple[str, Tensor | None]]) -> None:
        """Add the gradients of one slice of one use, by parameter name. Parameters that are not named count as zero."""
        grads = {name: grad.reshape(-1) for name, grad in of_slice if grad is not None}
        accumulated = self._accumulations[unit]
        accumulated.num_added += 1
        if accumulated.num_added == accumulated.num_summands:
            self._write(unit, grads)
            return

        for name, grad in grads.items():
            if name in accumulated.summed:
                accumulated.sums[name].add_(grad)
            elif name in accumulated.sums:
                # A copy, even if it is in fp32 already: the first summand is autograd's own.
                accumulated.sums[name] = accumulated.sums[name].to(torch.float32, copy=True).add_(grad)
                accumulated.summed.add(name)
            else:
                accumulated.sums[name] = grad

    def end_use(self, unit: str) -> None:
        """End the backward of a use. After the last use of the group, the gradient is submitted."""
        accumulated = self._accumulations[unit]
        accumulated.uses_left -= 1
        if not accumulated.uses_left:
            self._submit(unit)

    def _submit(self, unit: str) -> None:
        """Submit a unit's gradient of this group."""
        accumulated = self._accumulations[unit]
        buffer = accumulated.buffer

        # If an expected summand did not come, nothing has been written yet.
        if buffer is None:
            buffer = self._write(unit, {})
        accumulated.buffer = None
        self._send(unit, self.group, buffer)

    def _catch_up(self, unit: str, group: int) -> None:
        """Submit a gradient of zero for each earlier group that left the unit out."""
        for missing in range(self._num_submitted[unit], group):
            buffer = self._acquire(unit)
            if not self._adds(unit, missing):
                buffer.zero_()
            self._send(unit, missing, buffer)

    def _write(self, unit: str, grads: Mapping[str, Tensor]) -> Tensor:
        """Write the last summand plus the sum of the others into the sink's buffer, rounded once. Return it."""
        if not self._is_shared:
            self._catch_up(unit, self.group)
        accumulated = self._accumulations[unit]
        before = accumulated.sums
        # Released as soon as the buffer is written, since they are as large as the weights.
        accumulated.sums = {}
        self._present.setdefault(unit, set()).update(before, grads)

        # A single summand keeps autograd's dtype. A sum is not rounded before all groups are in it.
        fits = self._is_shared and not before and all(grad.dtype is self._dtypes[unit] for grad in grads.values())
        buffer = self._acquire(unit, fits=fits)
        adds = self._adds(unit, self.group)

        layout = self._layouts[unit]
        zeroed = [] if adds else _padding_of(layout, buffer)
        copied: list[Tensor] = []
        copied_from: list[Tensor] = []

        for tensor in layout.tensors:
            target = buffer[tensor.start : tensor.stop]
            summands = [by_name[tensor.name] for by_name in (before, grads) if tensor.name in by_name]
            # Otherwise a sum of two bf16 tensors would be rounded before it is written.
            if len(summands) == 2 and target.dtype is torch.float32:
                summands[0] = summands[0].float()

            if adds:
                if summands:
                    target.add_(reduce(torch.add, summands))
            elif len(summands) == 2:
                # `torch.add` computes in fp32, and rounds the result.
                torch.add(*summands, out=target)
            elif summands:
                copied.append(target)
                copied_from.append(summands[0])
            else:
                zeroed.append(target)

        # In one call, since a call for each parameter takes the host longer than the GPU.
        if copied:
            torch._foreach_copy_(copied, copied_from)
        if zeroed:
            torch._foreach_zero_(zeroed)
        accumulated.buffer = buffer
        return buffer

    def _acquire(self, unit: str, *, fits: bool = False) -> Tensor:
        """Acquire a buffer from the sink, viewed in the dtype of its elements."""
        is_summand = (self._groups > 1 or self._is_shared) and not fits
        return self._sink.acquire_grad_buffer(unit, fits=fits).view(torch.float32 if is_summand else self._dtypes[unit])

    def _adds(self, unit: str, group: int) -> bool:
        """Return whether the buffer holds the sum of the groups before."""
        return group > 0 and self._sink.sums_in_buffer(unit)

    def _send(self, unit: str, group: int, buffer: Tensor) -> None:
        """Hand the buffer over to the sink."""
        last = group == self._groups - 1

        # A gradient that is final is measured here. Sums that are taken in RAM are rounded and measured there.
        is_alone = self._groups == 1 and not self._is_shared
        if last and (is_alone or self._sink.sums_in_buffer(unit)):
            dtype = self._dtypes[unit]
            if buffer.dtype is not dtype:
                rounded = buffer.to(dtype)
                # In place: the rounded numbers take the first half of the sink's buffer.
                buffer = buffer.view(dtype)[: rounded.numel()].copy_(rounded)
            self._meter.measure(unit, buffer)

        # A rank sees only its own groups, and a parameter without a gradient here may have one on another rank.
        if last and not self._is_shared:
            self._warn_if_absent(unit)
        self._sink.submit_grad(unit, group=group)
        self._num_submitted[unit] = group + 1

    def _warn_if_absent(self, unit: str) -> None:
        """Warn once if a parameter that had a gradient before has none in a step, while others of its unit have one."""
        present = self._present.pop(unit, set())
        known = self._known.setdefault(unit, set())
        absent = known - present

        if absent and present and not self._has_warned:
            self._has_warned = True
            warnings.warn(_WITHOUT_GRADIENT.format(min(absent)), stacklevel=2)
        known |= present


def _padding_of(layout: Layout, buffer: Tensor) -> list[Tensor]:
    """Return the parts of a unit's buffer that lie before, between and after its tensors."""
    # AdamW updates padding like any element, so padding must not keep what the slot held before.
    padding: list[Tensor] = []
    end = 0
    for tensor in layout.tensors:
        if tensor.start > end:
            padding.append(buffer[end : tensor.start])
        end = tensor.stop
    if layout.num_elements > end:
        padding.append(buffer[end : layout.num_elements])
    return padding
