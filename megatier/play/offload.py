"""Activation offload: the input of each unit is in RAM or NVMe from the unit's forward to its backward.

Kept attention may be offloaded with it. All tensors of a unit share a block, and each begins at a granule.

Threads: only the thread that computes calls these methods; in a backward that is autograd's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatier.errors import ConfigError
from megatier.play.unit_blocks import activation_key
from megatier.schedule.activations import SPILLING_MAX, AwayActivations
from megatier.schedule.demand import Demand
from megatier.schedule.moves import Moves
from megatier.schedule.unit_spec import UnitSpec
from megatier.store.store import TieredStore
from megatier.store.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stashed:
    """A tensor that has left the GPU."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Its first byte in the block of its unit."""
    num_bytes: int
    """Its size."""

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.start + self.num_bytes


class Offload:
    """The offloaded activations of a pass, of which the last one comes back first."""

    def __init__(self, store: TieredStore, units: Mapping[str, UnitSpec], moves: Moves, demand: Demand) -> None:
        """Begin with nothing stashed.

        Args:
            store: has a block for each unit with `activation_bytes`.
            units: sizes of every unit, by name.
            moves: the moves to and from an activation's home.
            demand: adds up the bytes that move.
        """
        self._store = store
        self._units = units
        self._moves = moves
        self._demand = demand
        self._activations = AwayActivations()
        """Says which activation comes back when."""
        self._stashed: dict[str, list[_Stashed]] = {}
        """The tensors of each unit's activation at home."""
        self._spilling: deque[Transfer] = deque(maxlen=SPILLING_MAX)
        """The last activations that go to NVMe: the transfers after which they have left the GPU."""
        self._fetched: dict[str, list[tuple[torch.Tensor, Transfer]]] = {}
        """The tensors of each unit that come back, and the transfers that fill them."""
        self._next: str | None = None
        """The unit whose activation `ask_ahead` requests next."""

    def forget(self) -> None:
        """Forget the activations of a pass that was abandoned."""
        self._activations = AwayActivations()
        self._stashed.clear()
        self._spilling.clear()
        self._fetched.clear()
        self._next = None

    def stash(self, unit: str, tensor: torch.Tensor) -> None:
        """Start to move a unit's input (contiguous, on the GPU) home. Wait for older ones if drives are slow.

        Raises:
            ConfigError: the unit has run in this group before, or its input is larger than planned.
        """
        if unit in self._stashed:
            raise ConfigError(
                f"{unit} runs more than once in a forward of this model, and train.activations: offload has room for "
                "one input of each layer. Set train.activations to recompute or keep."
            )
        planned = self._units[unit].activation_bytes
        if tensor.nbytes > planned:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"the input of {unit} is {tuple(tensor.shape)} in {dtype}, "
                f"{tensor.nbytes} bytes; train.activations: offload has set {planned} aside, by train.batch and "
                "data.sequence_length, for one hidden state a token in model.compute_dtype. If the batch is no larger, "
                "layers of this model take more. Set train.activations to recompute or keep."
            )

        # If drives are slower than compute, activations wait on the GPU for slots in RAM. GPU memory was set aside for
        # SPILLING_MAX of them.
        if len(self._spilling) == SPILLING_MAX:
            self._spilling[0].wait_for_end()

        left = self._push(unit, tensor, tensor, 0)

        # With two moves it goes on from RAM to NVMe.
        moves = self._moves.stash(unit, tensor.nbytes)
        if len(moves) > 1:
            self._spilling.append(left)
        self._activations.stash(unit)

    def stash_beside(self, unit: str, tensor: torch.Tensor) -> bool:
        """Start to move another tensor of a unit home, after its input. Return whether its block has room for it.

        Args:
            unit: the unit.
            tensor: a tensor on the GPU. It may be permuted, but has no gaps and no overlaps.
        """
        last = self._stashed[unit][-1]
        start = self._moves.next_part(last.stop)
        fits = start + tensor.nbytes <= self._units[unit].activation_bytes
        flat = _in_memory_order(tensor)
        if not fits or not flat.is_contiguous():
            return False

        # This copy replaces that of the input in the list, because the queue ends it later.
        left = self._push(unit, tensor, flat, start)
        moves = self._moves.stash(unit, tensor.nbytes, start)
        if len(moves) > 1:
            self._spilling[-1] = left
        return True

    def fetch(self, unit: str) -> list[torch.Tensor]:
        """Return a unit's tensors on the GPU, in the order of `stash`. Compute that is enqueued next waits for them.

        Call `ask_ahead` then, so that those of the next unit come meanwhile.

        Raises:
            TransferError, IntegrityError: a move home or back has failed.
        """
        # Without a call of `ask_ahead` since the last fetch, this unit was not requested yet.
        self.ask_ahead()
        for asked in self._activations.fetch(unit):
            if asked == unit:
                self._ask(unit)
            else:
                self._next = asked

        # Compute waits on its stream, and the host can enqueue the rest of the unit.
        fetched = self._fetched.pop(unit)
        for _, transfer in fetched:
            transfer.wait_on_stream()
        return [tensor for tensor, _ in fetched]

    def ask_ahead(self) -> None:
        """Start to bring back the tensors of the next unit of the backward, unless that has begun."""
        if self._next is not None:
            self._ask(self._next)
            self._next = None

    def _ask(self, unit: str) -> None:
        """Start to bring a unit's tensors back."""
        fetched = self._fetched[unit] = []
        key = activation_key(unit)
        for stashed in self._stashed.pop(unit):
            # With the same strides, because they decide the kernel, and the kernel decides the bits.
            tensor = torch.empty_strided(
                stashed.shape,
                stashed.stride,
                dtype=stashed.dtype,
                device=self._store.device,
            )
            flat = _in_memory_order(tensor)
            transfer = self._store.pull(key, flat, stashed.start)
            fetched.append((tensor, transfer))
            moves = self._moves.unstash(unit, stashed.num_bytes, stashed.start)
            self._demand.add(moves)

    def _push(self, unit: str, tensor: torch.Tensor, flat: torch.Tensor, start: int) -> Transfer:
        """Start to move a tensor home. Return the transfer after which it has left the GPU."""
        left = self._store.push(activation_key(unit), flat, start)
        stashed = _Stashed(
            shape=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            start=start,
            num_bytes=tensor.nbytes,
        )
        self._stashed.setdefault(unit, []).append(stashed)
        self._demand.add(self._moves.stash(unit, tensor.nbytes, start))
        return left


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the dimensions in the order of memory, which is contiguous if the tensor has no gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order)
