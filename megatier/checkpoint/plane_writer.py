"""Planes of state, written to a checkpoint's arrays as they are read from their tiers.

Planes at home in RAM are read where they lie. Others pass through a few buffers, past all slots of the store.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from megatier import _native
from megatier.checkpoint.arrays import ArrayWriter
from megatier.checkpoint.checkpoint import tensors_of
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid
from megatier.errors import StepAbandonedError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.numerics.masters import join_master, plane_dtype
from megatier.play.generations import Generation
from megatier.session.session import Session
from megatier.store.arena import Arena
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier, round_up


class Buffers:
    """RAM for planes that are not at home there: for each kind two runs of elements, one of which is on its way."""

    def __init__(self, session: Session, run_elements: int) -> None:
        """Allocate the buffers, unless all state is in RAM.

        Args:
            session: the run.
            run_elements: elements that are read at once, at most.
        """
        self.run_elements = run_elements
        self._places: dict[Kind, tuple[int, int]] = {}
        schema = session.schema
        num_bytes = 0
        for kind in schema.kinds:
            size = round_up(run_elements * schema.width(kind))
            self._places[kind] = num_bytes, size
            num_bytes += 2 * size

        # Pinned, because copies from the GPU come here.
        passes = any(home is not Tier.RAM for home in session.placement.homes.values())
        is_cuda = session.store.device.type == "cuda"
        self._arena = Arena(num_bytes, torch.device("cpu"), pin=is_cuda) if passes else None

    def of(self, kind: Kind, number: int) -> Tensor:
        """Return the place of a run of a kind, uint8. The run after the next one has the same place."""
        assert self._arena is not None, "all state is in RAM"
        start, size = self._places[kind]
        return self._arena.view(start + number % 2 * size, size)

    def close(self) -> None:
        """Unlock the pages and free them."""
        if self._arena is not None:
            self._arena.close()


class PlaneWriter:
    """Writes the masters, or one of the moments, to files of its own. Use it from one thread at a time.

    Attributes:
        files: the staging buffers and the threads that write.
        checksums: CRC32C of each chunk, by the path of its array in the checkpoint.
    """

    def __init__(
        self,
        session: Session,
        files: ChunkFiles,
        folder: Path,
        name: str,
        kinds: Sequence[Kind],
        buffers: Buffers,
    ) -> None:
        """Prepare the arrays of one group of a checkpoint.

        Args:
            session: the run.
            files: staging buffers for these arrays alone.
            folder: the checkpoint's folder.
            name: the group, such as `params`.
            kinds: kinds of state that the group's numbers are made of: one, or weight and remainder.
            buffers: for planes that are not at home in RAM.
        """
        self._reader = session.reader
        self._store = session.store
        self._blocks = session.blocks
        self.files = files
        self._folder = folder / name
        self._name = name
        self._kinds = kinds
        self._buffers = buffers
        self._schema = session.schema
        self._arrays: dict[str, ArrayWriter] = {}
        """Arrays of parameters some parts of which are still to come, by the parameter's name."""
        self.checksums: dict[str, list[int]] = {}

    def write(self, unit: Unit, generation: Generation) -> None:
        """Copy all elements of a unit into chunks, the last of which may still be on their way to the drive.

        Args:
            unit: the unit; one that holds a part of a parameter comes after those that hold the parts before it.
            generation: the generation of its state that is valid.

        Raises:
            TransferError, IntegrityError: reading or writing failed.
            StepAbandonedError: the session was closed meanwhile.
        """
        tensors = tensors_of(unit, self._name)
        writers = [self._array(tensor) for tensor in tensors]

        # Closed whatever happens, because the generator holds leases and transfers.
        with closing(self._runs(unit, generation)) as runs:
            for (start, stop), planes in runs:
                for tensor, writer in zip(tensors, writers, strict=True):
                    lower = max(start, tensor.start)
                    upper = min(stop, tensor.stop)
                    for first, target in writer.rooms(upper - lower) if lower < upper else ():
                        _copy_fp32(planes, lower - start + first, target)

    def _array(self, tensor: TensorSlice) -> ArrayWriter:
        """Return the array of a parameter. The units that hold parts of it come in the order of its elements."""
        array = self._arrays.pop(tensor.name, None)
        if array is None:
            array = ArrayWriter(self.files, self._folder / tensor.name, Grid.of(tensor.parameter_shape))
            self.checksums[f"{self._name}/{tensor.name}"] = array.checksums

        # The last part makes the array whole. Until then it waits for the next unit.
        if tensor.elements[1] < math.prod(tensor.parameter_shape):
            self._arrays[tensor.name] = array
        return array

    def _runs(self, unit: Unit, generation: Generation) -> Generator[tuple[tuple[int, int], list[Tensor]]]:
        """Yield runs of a unit's elements with their planes, valid until the next run, which is on its way."""
        # Frozen elements come last in a layout, and have a weight alone. So no run has both sorts.
        runs = self._cut(0, unit.layout.num_trained)
        if Kind.WEIGHT in self._kinds:
            runs += self._cut(unit.layout.num_trained, unit.layout.num_elements)
        if not runs:
            return

        with ExitStack() as stack:
            ahead = self._ask(stack, unit, generation, runs[0], 0)
            for number, run in enumerate(runs):
                if self._reader.is_closed:
                    raise StepAbandonedError("the run was closed before its checkpoint was whole")

                planes = ahead
                if number + 1 < len(runs):
                    ahead = self._ask(stack, unit, generation, runs[number + 1], number + 1)

                for _, transfer in planes:
                    if transfer is not None:
                        transfer.wait()
                yield run, [plane for plane, _ in planes]

    def _cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut elements [start, stop) into runs that fit a buffer."""
        step = self._buffers.run_elements
        return [(first, min(first + step, stop)) for first in range(start, stop, step)]

    def _ask(
        self, stack: ExitStack, unit: Unit, generation: Generation, run: tuple[int, int], number: int
    ) -> list[tuple[Tensor, Transfer | None]]:
        """Return the planes of a run, and the transfer that brings each; None: it lies where it is read.

        Args:
            stack: ends leases and transfers.
            unit: the unit.
            generation: the generation of its state that is valid.
            run: elements [start, stop). If they are frozen there are weights alone.
            number: number of the run, which decides which buffers take it.
        """
        found: list[tuple[Tensor, Transfer | None]] = []
        for kind in self._kinds if run[0] < unit.layout.num_trained else (Kind.WEIGHT,):
            key = self._blocks.key(unit.name, kind, generation)
            span = self._blocks.span(unit.name, kind, run)
            dtype = plane_dtype(self._schema, kind)
            if self._blocks.placement.homes[unit.name, kind] is Tier.RAM:
                # No copy is needed: the update of this unit waits until the lane is through with it.
                lease = self._store.lease(key, Tier.RAM, span)
                found.append((stack.enter_context(lease).bytes.view(dtype), None))
                continue

            target = self._buffers.of(kind, number)
            transfer = self._store.copy_out(key, span, target)

            # Also after an error: nothing may fill a buffer that has gone to others by then.
            stack.callback(transfer.over)
            found.append((target.view(dtype), transfer))

        return found


def _copy_fp32(planes: Sequence[Tensor], first: int, target: Tensor) -> None:
    """Copy elements of a plane, or of a master in two planes, to fp32.

    Args:
        planes: a plane in fp32 or bf16; or the weights in bf16 and their remainders.
        first: number of the first element to copy.
        target: fp32 [n], which takes them.
    """
    source = planes[0][first : first + target.numel()]
    if len(planes) == 2:
        join_master(source, planes[1][first : first + target.numel()], target)
    elif source.dtype is torch.float32:
        _native.copy(target.data_ptr(), source.data_ptr(), 4 * target.numel())
    else:
        target.copy_(source)  # frozen weights, which have no remainder
