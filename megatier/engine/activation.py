"""Saves and restores the activations of a unit, from its forward to its backward, as each policy does.

All three policies run the same graph in the forward, the training graph, so that they agree bit for bit and compile
once. They differ in what stays of it.

keep: the graph stays. A saved tensor that lies in the unit's weight slot is packed as (offset, dtype, size, stride). At
unpack it is bound again to wherever the unit's weights lie by then. So weights leave while activations stay.
recompute: saved tensors are dropped at once. The backward runs the forward again, with the same random numbers.
offload: recompute, with the unit's input in RAM or on NVMe in between.

A compiled forward that saves its inputs alone (`Compilation.saved_share` 0) computes again inside its own backward. So
recompute is keep then, and offload is keep with the input bound again as well. What attention gave, if it is kept, may
go with an offloaded input and come back with it (`SideOffload`).

The policies themselves are `tier.Activations`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatier.guards.crossing import lost_gradient_error


@dataclass(frozen=True, slots=True)
class _InRegion:
    """A saved tensor that is a view of the unit's weights, or of its offloaded input."""

    region: int
    """The number of the region that it lies in."""
    offset: int
    """Its first byte in the region."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    """A tensor that went off the GPU beside an offloaded input."""

    number: int
    """How many went before it."""


class SideOffload:
    """The tensors that one call sends off the GPU beside its input: attention's, which a backward needs."""

    def __init__(self, stash: Callable[[Tensor], bool]) -> None:
        """Begin before anything went.

        Args:
            stash: takes a tensor off the GPU; False: there is no room for it.
        """
        self._stash = stash
        self._num_offloaded = 0
        self._fetched: Sequence[Tensor] = ()

    def offload(self, value: Any) -> Any:  # noqa: ANN401 - whatever an operator gives
        """Send a value away if it is a tensor of floats and there is room; returns what `restore` takes for it."""
        # States of random numbers stay: they are integers, and small.
        if not torch.is_tensor(value) or not value.is_floating_point() or not self._stash(value):
            return value
        self._num_offloaded += 1
        return _OffloadedTensor(self._num_offloaded - 1)

    def set_fetched(self, tensors: Sequence[Tensor]) -> None:
        """Say where the tensors are in the backward, in the order in which they went."""
        self._fetched = tensors

    def restore(self, value: Any) -> Any:  # noqa: ANN401
        """Give back what `offload` was given."""
        return self._fetched[value.number] if isinstance(value, _OffloadedTensor) else value


class Rebinding:
    """Saved-tensor hooks of one slice: a tensor in memory that will leave is saved as an address."""

    def __init__(
        self, module_name: str, *regions: Tensor, beside: SideOffload | None = None, given: Iterable[Any] = ()
    ) -> None:
        """Say what will leave.

        Args:
            module_name: the module whose forward it is, for messages.
            regions: contiguous memory: the unit's weight slot and, if it is offloaded, the unit's input.
            beside: takes what the forward has made itself and saves; None: that stays.
            given: the arguments of the forward, which it has not made.
        """
        self._module_name = module_name
        self._regions = regions
        self._beside = beside
        # By storage, since the forward may save a view of an argument.
        self._given = {x.untyped_storage().data_ptr() for x in given if torch.is_tensor(x)} if beside else set()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Run the forward inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        # An unpack before `bind` must be refused, and not read whichever unit lies there by then.
        self._regions = ()

    def bind(self, *regions: Tensor) -> None:
        """Say where the same bytes lie in the backward."""
        self._regions = regions

    def _pack(self, tensor: Tensor) -> Tensor | _InRegion | _OffloadedTensor:
        """Save a tensor, or its address."""
        assert self._regions

        # By address: a view of the slot has no other mark, whatever the forward has made of it.
        for index, region in enumerate(self._regions):
            offset = tensor.data_ptr() - region.data_ptr()
            if 0 <= offset < region.nbytes:
                return _InRegion(index, offset, tensor.dtype, tensor.size(), tensor.stride())

        # Without its graph: a result that a step of the graph saves would hold that step, which holds it. Nobody would
        # free that circle if no backward came.
        tensor = tensor.detach()

        # Arguments that layers share, such as position embeddings, are in memory once, so they stay.
        if self._beside is not None and tensor.untyped_storage().data_ptr() not in self._given:
            packed: Tensor | _OffloadedTensor = self._beside.offload(tensor)
            return packed
        return tensor

    def _unpack(self, packed: Tensor | _InRegion | _OffloadedTensor) -> Tensor:
        """Give a saved tensor back, where its bytes lie now.

        Raises:
            UnsupportedModelError: a backward came here past the node's own.
        """
        if isinstance(packed, Tensor):
            return packed
        # The node's own backward binds the regions first.
        if not self._regions:
            raise lost_gradient_error(self._module_name)

        if isinstance(packed, _OffloadedTensor):
            assert self._beside is not None
            back: Tensor = self._beside.restore(packed)
            return back

        # `as_strided` counts from the start of the storage, in elements of the dtype, and not from the view.
        region = self._regions[packed.region].view(-1).view(torch.uint8)
        start = (int(region.storage_offset()) + packed.offset) // packed.dtype.itemsize
        return region.view(packed.dtype).as_strided(packed.size, packed.stride, start)


@contextlib.contextmanager
def dropping(module_name: str) -> Iterator[None]:
    """Drop what the forward of a module saves inside: it is the training graph, without its memory."""

    def refuse(_: object) -> Tensor:
        # The node's own backward runs the forward again, so it never comes here.
        raise lost_gradient_error(module_name)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield
