"""The layout of a unit: the offset of each tensor in its blocks, in elements, so that one layout serves every kind.

The layout's schema says which kinds there are. Element k of the weight plane, the remainder, both moments and the
gradient belong together; a kind only differs in bytes per element. Offsets are multiples of 128 elements (256 bytes in
bf16): matrix libraries pick kernels by alignment, and equal alignment on every tier keeps the bits equal. The whole is
padded to 2,048 elements, so that every plane is a multiple of 4 KiB. Padding stays 0 under AdamW.

Frozen parameters are only in the weight plane, after the trained ones. All other planes end with the trained ones.

If several ranks share the state, each unit is cut into equal shards, one for each rank. A shard has its own layout,
whose tensors are runs of the unit's tensors. `Layout.padded` pads a unit so that it can be cut, and `Layout.shard` cuts
it. If updates need whole matrices, whole parameters are distributed over the shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatier.state import ADAMW_BF16, StateSchema

ALIGN_ELEMENTS = 128
"""Each tensor starts at a multiple of so many elements."""
PAD_ELEMENTS = 2048
"""The weight plane of a unit has a multiple of so many elements: 4 KiB, a page, in bf16, and two pages in fp32."""
CHECKED_ELEMENTS = 32 << 10
"""The frozen parameters of a unit begin at a multiple of so many elements: a granule, which is 64 KiB of bf16. So an
update, which writes whole granules, never writes bytes of a frozen parameter."""
SHARD_ELEMENTS = 64 << 10
"""A shard begins at a multiple of this. It is a multiple of everything that is counted from a unit's start: alignment,
pages, checksummed granules, and the tiles of the norm."""
NO_CODES: Mapping[str, int] = MappingProxyType({})
"""No parameter carries codes of a quantised one."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A parameter in its unit, or a run of its elements if several units share it."""

    name: str
    """Full parameter name in the model, such as `model.layers.0.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    """Shape of the slice itself."""
    start: int
    """First element inside the unit."""
    whole: tuple[int, ...] | None = None
    """Shape of the parameter if the slice is only a run of its elements; None: the slice is all of it."""
    offset: int = 0
    """First element of the slice inside its parameter."""
    stands_for: int = 1
    """The number of the model's parameters for each element: several if it carries their codes, 0 if it is a scale."""

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.whole is None else self.whole

    @property
    def num_elements(self) -> int:
        """Elements of the slice itself, without padding."""
        return math.prod(self.shape)

    @property
    def num_parameters(self) -> int:
        """The number of the model's parameters in these elements."""
        return self.num_elements * self.stands_for

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.num_elements

    @property
    def elements(self) -> tuple[int, int]:
        """The elements [start, stop) of the parameter in the slice."""
        return self.offset, self.offset + self.num_elements

    def place(self, element: int) -> int:
        """Return the index in the unit of an element of the parameter."""
        return self.start + element - self.offset


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters of one unit, in order, without overlap."""

    tensors: tuple[TensorSlice, ...]
    """The trained parameters in the order of the model, and after them the frozen ones."""
    num_elements: int
    """Padded size of the unit's weight plane, in elements."""
    num_trained: int
    """Padded size of all other planes, which have only the trained parameters."""
    schema: StateSchema = ADAMW_BF16
    """The planes of state of an element that is trained."""
    has_base: bool = False
    """Whether the frozen parameters are a base, which a run reads whenever it begins, and which checkpoints leave
    out."""

    @staticmethod
    def of(
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        frozen: Collection[str] = (),
        stands_for: Mapping[str, int] = NO_CODES,
    ) -> Layout:
        """Place (name, shape) pairs one after another, those named as frozen last.

        Args:
            shapes: the pairs.
            frozen: names of parameters that are not trained.
            stands_for: of parameters that carry codes or scales, how many of the model an element stands for.
        """
        of_trained: list[tuple[str, tuple[int, ...], int]] = []
        of_frozen: list[tuple[str, tuple[int, ...], int]] = []
        for name, shape in shapes:
            pairs = of_frozen if name in frozen else of_trained
            pairs.append((name, shape, stands_for.get(name, 1)))

        # Even a unit without parameters gets a page, so that no block is empty.
        trained, offset = _placed(of_trained, 0)
        if not of_frozen:
            size = max(PAD_ELEMENTS, _padded(offset, PAD_ELEMENTS))
            return Layout(trained, size, size)

        # Frozen parameters begin in a new granule, which no update writes.
        num_trained = _padded(offset, CHECKED_ELEMENTS)
        others, offset = _placed(of_frozen, num_trained)
        num_elements = _padded(offset, PAD_ELEMENTS)
        return Layout((*trained, *others), num_elements, num_trained)

    @property
    def trained(self) -> Layout:
        """The layout of the trained parameters alone, which is that of gradients and moments."""
        if self.num_trained == self.num_elements:
            return self
        tensors = tuple(tensor for tensor in self.tensors if tensor.start < self.num_trained)
        return replace(self, tensors=tensors, num_elements=self.num_trained)

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that are not trained."""
        names = {tensor.name for tensor in self.tensors}
        trained = {tensor.name for tensor in self.trained.tensors}
        return frozenset(names - trained)

    def without(self, names: Collection[str]) -> Layout:
        """Return a layout of the other parameters, which are whole."""
        shapes = []
        stands_for = {}
        for tensor in self.tensors:
            if tensor.name not in names:
                shapes.append((tensor.name, tensor.shape))
                stands_for[tensor.name] = tensor.stands_for
        placed = Layout.of(shapes, self.frozen, stands_for)
        return replace(placed, schema=self.schema, has_base=self.has_base)

    def padded(self, num_ranks: int) -> Layout:
        """Return a layout with more padding, so that trained and frozen elements can be cut into equal shards.

        If updates are by matrix, trained parameters are in another order as well: no shard has a part of one.
        """
        if num_ranks == 1:
            return self

        # Trained and frozen elements are cut separately, so that every rank updates equally many. The padding after the
        # trained ones grows by that, and the frozen ones move up.
        multiple = num_ranks * SHARD_ELEMENTS
        trained = self.trained.tensors
        num_trained = _padded(self.num_trained, multiple)
        if self.schema.by_matrix:
            trained, num_trained = _dealt(trained, num_ranks)

        shift = num_trained - self.num_trained
        frozen = [tensor for tensor in self.tensors if tensor.start >= self.num_trained]
        moved = [replace(tensor, start=tensor.start + shift) for tensor in frozen]
        num_frozen = _padded(self.num_elements - self.num_trained, multiple)
        return replace(
            self,
            tensors=(*trained, *moved),
            num_elements=num_trained + num_frozen,
            num_trained=num_trained,
        )

    def shard(self, rank: int, num_ranks: int) -> Layout:
        """Return the layout of a rank's shard: its trained elements, and after them its frozen ones.

        Args:
            rank: the rank, from 0.
            num_ranks: how many there are; the layout was `padded` for them.
        """
        tensors: list[TensorSlice] = []
        for first, last, start in self.shard_runs(rank, num_ranks):
            tensors += self._runs_within(first, last, start)
        return replace(
            self,
            tensors=tuple(tensors),
            # `padded` has made both divisible.
            num_elements=self.num_elements // num_ranks,
            num_trained=self.num_trained // num_ranks,
        )

    def part(self, first: int, last: int) -> Layout:
        """Return the layout of a run [first, last) of the elements, with its tensors and runs of tensors in place."""
        tensors = self._runs_within(first, last, first)
        return replace(self, tensors=tuple(tensors))

    def _runs_within(self, first: int, last: int, start: int) -> list[TensorSlice]:
        """Return the runs of tensors' elements in [first, last), which begins at `start` now."""
        runs = [_clip(tensor, first, last, start) for tensor in self.tensors]
        return [tensor for tensor in runs if tensor is not None]

    def shard_runs(self, rank: int, num_ranks: int) -> tuple[tuple[int, int, int], ...]:
        """Return the runs [first, last) of elements that a rank owns, each with its first element inside the shard."""
        num_trained = self.num_trained // num_ranks
        num_frozen = self.num_elements // num_ranks - num_trained
        first_trained = rank * num_trained
        first_frozen = self.num_trained + rank * num_frozen
        runs = []
        # A unit may have no frozen elements, and one that is frozen as a whole has no trained ones.
        if num_trained:
            runs.append((first_trained, first_trained + num_trained, 0))
        if num_frozen:
            runs.append((first_frozen, first_frozen + num_frozen, num_trained))
        return tuple(runs)


def _dealt(tensors: Sequence[TensorSlice], num_ranks: int) -> tuple[tuple[TensorSlice, ...], int]:
    """Deal tensors out to equal shards, whole and as evenly as can be; returns them, and the elements of all shards."""
    shards: list[list[TensorSlice]] = [[] for _ in range(num_ranks)]
    sizes = [0] * num_ranks

    # The largest come first, each to the shard that has least. The sort is stable, so all ranks deal alike.
    largest_first = sorted(tensors, key=lambda tensor: -tensor.num_elements)
    for tensor in largest_first:
        least = sizes.index(min(sizes))
        dealt = replace(tensor, start=sizes[least])
        shards[least].append(dealt)
        sizes[least] += _padded(tensor.num_elements, ALIGN_ELEMENTS)

    # Shards lie one after another, all as large as the largest.
    size = _padded(max(sizes), SHARD_ELEMENTS)
    placed = []
    for rank, shard in enumerate(shards):
        for tensor in shard:
            placed.append(replace(tensor, start=rank * size + tensor.start))
    return tuple(placed), num_ranks * size


def _clip(tensor: TensorSlice, first: int, last: int, start: int) -> TensorSlice | None:
    """Return the run of a tensor's elements in [first, last), which begins at `start` now; None if there is none."""
    lower = max(tensor.start, first)
    upper = min(tensor.stop, last)
    if lower >= upper:
        return None

    # A slice that is cut is a flat run of elements, and notes the shape of its parameter. One that lies whole in the
    # shard keeps its own shape.
    is_whole = (lower, upper) == (tensor.start, tensor.stop)
    return replace(
        tensor,
        shape=tensor.shape if is_whole else (upper - lower,),
        start=start + lower - first,
        whole=tensor.whole if is_whole else tensor.parameter_shape,
        offset=tensor.offset + lower - tensor.start,
    )


def _placed(shapes: Iterable[tuple[str, tuple[int, ...], int]], offset: int) -> tuple[tuple[TensorSlice, ...], int]:
    """Return slices from an offset on, and the first aligned element after them."""
    tensors = []
    for name, shape, stands_for in shapes:
        tensor = TensorSlice(name, tuple(shape), offset, stands_for=stands_for)
        tensors.append(tensor)
        offset += _padded(tensor.num_elements, ALIGN_ELEMENTS)
    return tuple(tensors), offset


def _padded(num_elements: int, multiple: int) -> int:
    return -(-num_elements // multiple) * multiple
