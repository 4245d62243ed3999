"""Activations of a unit between its forward and its backward: how each policy saves and restores them.

All three policies run the same graph in the forward, the training graph, so that they agree bit for bit and compile
once. They differ in what stays of it.

keep: the graph stays. A saved tensor that lies in the unit's weight slot is packed as (offset, dtype, size, stride). At
unpack it is bound again to wherever the unit's weights lie by then. So weights leave while activations stay.
recompute: saved tensors are dropped at once. The backward runs the forward again, with the same random numbers.
offload: recompute, with the unit's input in RAM in between.

A compiled forward that saves its inputs alone (`Compilation.saved_share` 0) computes again inside its own backward. So
recompute is keep then, and offload is keep with the input bound again as well.

The policies themselves are `tier.Activations`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatier.guards.crossing import refused


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


class Rebinding:
    """Saved-tensor hooks of one slice: a tensor in memory that will leave is saved as an address."""

    def __init__(self, module_name: str, *regions: Tensor) -> None:
        """Say what will leave.

        Args:
            module_name: the module whose forward it is, for messages.
            regions: contiguous memory: the unit's weight slot and, if it is offloaded, the unit's input.
        """
        self._module_name = module_name
        self._regions = regions

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Run the forward inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._regions = ()

    def bind(self, *regions: Tensor) -> None:
        """Say where the same bytes lie in the backward."""
        self._regions = regions

    def _pack(self, tensor: Tensor) -> Tensor | _InRegion:
        """Save a tensor, or its address."""
        assert self._regions
        for index, region in enumerate(self._regions):
            offset = tensor.data_ptr() - region.data_ptr()
            if 0 <= offset < region.nbytes:
                return _InRegion(index, offset, tensor.dtype, tensor.size(), tensor.stride())
        return tensor

    def _unpack(self, packed: Tensor | _InRegion) -> Tensor:
        """Give a saved tensor back, where its bytes lie now.

        Raises:
            UnsupportedModelError: a backward came here past the node's own.
        """
        if isinstance(packed, Tensor):
            return packed
        # The node's own backward binds the regions first.
        if not self._regions:
            raise refused(self._module_name)

        region = self._regions[packed.region].view(-1).view(torch.uint8)
        start = (int(region.storage_offset()) + packed.offset) // packed.dtype.itemsize
        return region.view(packed.dtype).as_strided(packed.size, packed.stride, start)


@contextlib.contextmanager
def dropping(module_name: str) -> Iterator[None]:
    """Drop what the forward of a module saves inside: it is the training graph, without its memory."""

    def refuse(_: object) -> Tensor:
        # The node's own backward runs the forward again, so it never comes here.
        raise refused(module_name)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield


class Replay:
    """The random state and the autocast settings of a forward, to run it again with the same result."""

    def __init__(self, device: torch.device) -> None:
        """Note them. Call it just before the forward."""
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kinds = {"cpu", device.type}
        self._autocast = {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore them inside. The present random state is as it was afterwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([self._device] if self._cuda is not None else []))
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield
