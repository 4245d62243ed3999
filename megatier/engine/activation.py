"""Saves the activations of a unit in its forward, and restores them in its backward, as each policy says.

All three policies run the same training graph in the forward, so they agree bit for bit and compile once. They differ
in what stays of the graph until the backward.

- keep: the graph stays. A saved tensor that lies in the unit's weight slot is packed as (offset, dtype, size, stride),
  and bound again at unpack to wherever the weights lie by then. So weights can leave while activations stay.
- recompute: saved tensors are dropped at once. The backward runs the forward again with the same random numbers.
- offload: like recompute, while the unit's input waits in RAM or on NVMe.

A compiled forward that saves only its inputs (`Compilation.saved_share` 0) recomputes inside its own backward. For such
a unit recompute is the same as keep, and offload is keep with the input rebound as well. Attention results that are
kept can be offloaded together with the input (`SideOffload`).

`unit_function` uses this on the thread that computes. The policies are defined in `tier.Activations`.
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
    """The index of the region in which it lies."""
    offset: int
    """Its first byte in the region."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    """A saved tensor that was offloaded together with the unit's input."""

    number: int
    """Its index among the tensors that were offloaded so."""


class SideOffload:
    """The tensors that one call offloads together with its input: results of attention that the backward needs."""

    def __init__(self, stash: Callable[[Tensor], bool]) -> None:
        """Begin with no tensor offloaded.

        Args:
            stash: offloads a tensor. It returns False if there is no room, and the tensor then stays.
        """
        self._stash = stash
        self._num_offloaded = 0
        self._fetched: Sequence[Tensor] = ()

    def offload(self, value: Any) -> Any:  # noqa: ANN401 - whatever an operator gives
        """Offload a floating-point tensor if there is room. Return what `restore` takes in its place."""
        # States of random generators stay, since they are small tensors of integers.
        if not torch.is_tensor(value) or not value.is_floating_point() or not self._stash(value):
            return value
        self._num_offloaded += 1
        return _OffloadedTensor(self._num_offloaded - 1)

    def set_fetched(self, tensors: Sequence[Tensor]) -> None:
        """Set the fetched tensors for the backward, in the order in which they were offloaded."""
        self._fetched = tensors

    def restore(self, value: Any) -> Any:  # noqa: ANN401
        """Return the value that `offload` was given."""
        return self._fetched[value.number] if isinstance(value, _OffloadedTensor) else value


class Rebinding:
    """Saved-tensor hooks of one slice, which save a tensor in memory that will be reused as an address."""

    def __init__(
        self, module_name: str, *regions: Tensor, beside: SideOffload | None = None, given: Iterable[Any] = ()
    ) -> None:
        """Take the memory that will be reused before the backward.

        Args:
            module_name: the name of the module, for messages.
            regions: contiguous memory that will be reused: the weight slot, and the unit's input if that is offloaded.
            beside: offloads what the forward saves of its own results; None: those stay.
            given: the arguments of the forward, which are never offloaded.
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
        # An unpack before `bind` must fail instead of reading another unit's weights from the slot.
        self._regions = ()

    def bind(self, *regions: Tensor) -> None:
        """Set where the same bytes lie in the backward."""
        self._regions = regions

    def _pack(self, tensor: Tensor) -> Tensor | _InRegion | _OffloadedTensor:
        """Save a tensor, or its address."""
        assert self._regions

        # By address, since nothing else marks a view of the slot, whatever the forward has made of it.
        for index, region in enumerate(self._regions):
            offset = tensor.data_ptr() - region.data_ptr()
            if 0 <= offset < region.nbytes:
                return _InRegion(index, offset, tensor.dtype, tensor.size(), tensor.stride())

        # Detached, since a result that a graph node saves would hold that node, which holds the result. Nothing would
        # free this reference cycle if no backward came.
        tensor = tensor.detach()

        # Arguments that layers share, such as position embeddings, are in memory anyway, so they stay.
        if self._beside is not None and tensor.untyped_storage().data_ptr() not in self._given:
            packed: Tensor | _OffloadedTensor = self._beside.offload(tensor)
            return packed
        return tensor

    def _unpack(self, packed: Tensor | _InRegion | _OffloadedTensor) -> Tensor:
        """Return a saved tensor, at the place where its bytes lie now.

        Raises:
            UnsupportedModelError: a backward reached this tensor without going through the node.
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
    """Drop what the forward of a module saves inside, so that it runs the training graph without its memory."""

    def refuse(_: object) -> Tensor:
        # The node's backward recomputes the forward, so it never unpacks these.
        raise lost_gradient_error(module_name)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield
