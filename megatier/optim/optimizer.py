"""Updates a run's parameters: AdamW on split masters, and Muon for units that are updated by matrix.

AdamW has one definition. The C kernel and the Triton kernel give the same bits, without fused multiply-add:

    g = grad * scale                              m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) (g g)
    x = x (1 - lr wd) - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))

x is the fp32 master, which may be split into weight plane and remainder. m and v below 2^-126 are set to 0. `scale` is
the clip coefficient, min(1, clip / (norm + 1e-6)). Moments in bf16 or 8 bits are rounded stochastically, with random
numbers that depend on the run's seed, the step, the unit, and the index of the element in the whole unit.

`gradient_sums` does what comes before an update: it sums over groups and takes the norm.

Source: Loshchilov and Hutter, arXiv 1711.05101. The split is megatier's: 12 bytes of state a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from megatier import _native
from megatier.layout import Layout
from megatier.optim.adamw import Scalars, adamw_threads, rounding_of
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.muon import Muon
from megatier.optim.rules import RULES, Hyperparameters
from megatier.planes import Apply, Elements, Planes


class RunOptimizer:
    """The optimizer of one run: Muon for units whose schema is by matrix, and one of `RULES` for all others.

    Threads: the training loop calls `begin_step`, `revise` and `clip`. The queues that update call `apply`.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        decayed: frozenset[str],
        hyper: Hyperparameters,
        sums: GradientSums,
        *,
        num_threads: int,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        """Start the threads of AdamW on the CPU.

        Args:
            layouts: the trained tensors of each unit that has any. With several ranks, those of this rank's shards.
            decayed: the names of the parameters with weight decay.
            hyper: the settings.
            sums: measures the gradients that are applied here.
            num_threads: the threads of AdamW on the CPU.
            rank: this rank's number, which says where its shards begin.
            seed: seeds the random numbers by which narrow moments are rounded.
        """
        self._layouts = dict(layouts)
        self.sums = sums
        """Sums gradients over groups, and computes their norm."""
        self.hyper = hyper
        """The settings, which `begin_step`, `revise` and `clip` read. All but `deferred` may change between steps."""
        self._decayed = decayed
        self._rank = rank
        self._seed = seed
        self._pool = adamw_threads(num_threads)
        nothing = Scalars(
            decay=1.0,
            step=0,
            learning_rate=0.0,
            momentum=0.0,
            of_kernels=(0.0,) * 8,
        )
        self._unclipped_scalars = nothing
        """The scalars of the step that has begun, without clipping."""
        self._scalars = nothing
        """The scalars that updates read, fixed by the last norm."""
        self._muon = Muon(layouts)

        # All units that are not updated by matrix have the same rule.
        rules = [layout.schema.rule for layout in layouts.values() if not layout.schema.by_matrix]
        self._rule = RULES[rules[0] if rules else "adamw"]

    def begin_step(self, step: int, learning_rate: float) -> None:
        """Drop the last step's gradients, and set the scalars of step 1, 2, ...

        Deferred updates of the last step run during this one, so they read the old scalars until `clip` is called.
        """
        self._unclipped_scalars = self._scalars_of(step, learning_rate)
        self.sums.forget_gradients()

        # In the immediate mode no update of the last step is pending, and no norm comes.
        if not self.hyper.deferred:
            self._scalars = self._unclipped_scalars

    def revise(self, step: int, learning_rate: float) -> bool:
        """Set the scalars of the step again. Return whether they changed, so that `unclipped` used wrong ones."""
        before = self._unclipped_scalars
        self._unclipped_scalars = self._scalars_of(step, learning_rate)
        return self._unclipped_scalars != before

    def clip(self, norm: float) -> float:
        """Return the clip coefficient for this norm. From now on updates use it, with the scalars of the step begun."""
        coefficient = 1.0
        if self.hyper.clip is not None:
            coefficient = min(1.0, self.hyper.clip / (norm + 1e-6))

        # The coefficient comes last. `_unclipped_scalars` keeps 1, since speculative updates use it and `revise`
        # compares with it.
        others = self._unclipped_scalars.of_kernels[:-1]
        self._scalars = replace(self._unclipped_scalars, of_kernels=(*others, coefficient))
        return coefficient

    def _scalars_of(self, step: int, learning_rate: float) -> Scalars:
        """Return the scalars of a step in which nothing is clipped."""
        hyper = self.hyper
        of_step = self._rule.scalars(step, learning_rate, hyper)
        return Scalars(
            decay=1 - learning_rate * hyper.weight_decay,
            step=step,
            learning_rate=learning_rate,
            momentum=hyper.momentum,
            of_kernels=(*of_step, 1.0),
        )

    # ------------------------------------------------------------------ update

    def apply(
        self, unit: str, elements: Elements, planes: Planes, grad: Tensor, before: Planes
    ) -> _native.Batch | None:
        """Begin the update of elements [start, stop) of a unit, clipped as the last norm decided.

        Args:
            unit: its unit.
            elements: the run of elements that the planes hold.
            planes: uint8 tensors of each kind of state, all on one device.
            grad: uint8, the final gradient of the same elements, in the dtype of the unit's weights.
            before: the planes to read for kinds that are not updated in place; on the CPU only.

        Returns:
            The work to wait for; None if it is on the GPU's current stream.
        """
        return self._apply(self._scalars, unit, elements, planes, grad, before)

    def unclipped(self) -> Apply:
        """Return `apply` without clipping for the step that has begun, for use before the norm is known."""
        return partial(self._apply, self._unclipped_scalars)

    # HOP 5/6: gradient and state -> new state
    def _apply(
        self,
        scalars: Scalars,
        unit: str,
        elements: Elements,
        planes: Planes,
        grad: Tensor,
        before: Planes,
    ) -> _native.Batch | None:
        layout = self._layouts[unit]
        if layout.schema.by_matrix:
            assert not before, "matrices are updated in place"
            self._muon.apply(unit, elements, planes, grad, scalars)
            return None

        start, stop = elements
        segments = self._segments(layout, start, stop, scalars.decay)

        # A unit's shards are equally long and in the order of the ranks. Elements are numbered in the whole unit, so
        # that moments are rounded alike however it is cut.
        first = self._rank * layout.num_elements + start
        rounding = rounding_of(layout.schema, self._seed, scalars.step, unit, first)
        return self._rule.begin(self._pool, planes, grad, segments, scalars, before, rounding)

    def matrices(self, unit: str) -> Sequence[Elements]:
        """Return the runs of a unit's elements that must be updated one at a time; see `optimizer_protocol`."""
        return self._muon.runs(unit)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()

    def _segments(self, layout: Layout, start: int, stop: int, factor: float) -> list[tuple[int, int, float]]:
        """Cut elements [start, stop) into runs of equal decay, relative to `start` and without gaps.

        Padding belongs to the run before it, or to the first run. Its gradient and state are 0 and stay 0.
        """
        starts: list[int] = []
        decays: list[float] = []
        for tensor in layout.tensors:
            is_outside = tensor.start >= stop or tensor.stop <= start
            if is_outside:
                continue
            decay = factor if tensor.name in self._decayed else 1.0
            if not decays or decays[-1] != decay:
                # The first run starts at 0 even if its tensor begins earlier.
                starts.append(tensor.start - start if starts else 0)
                decays.append(decay)

        # Nothing but padding.
        if not starts:
            return [(0, stop - start, 1.0)]

        stops = [*starts[1:], stop - start]
        return list(zip(starts, stops, decays, strict=True))
