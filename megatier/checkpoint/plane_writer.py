"""Writes planes of state to a checkpoint's arrays as they are read from their tiers.

Planes at home in RAM are read where they lie. Others pass through a few buffers, past all slots of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megatier import _native
from megatier.address import address_of
from megatier.checkpoint.arrays import ArrayWriter
from megatier.checkpoint.checkpoint import list_tensors
from megatier.checkpoint.chunk_owners import ChunkOwners, sizes_of
from megatier.checkpoint.chunkfile import ChunkFiles
from megatier.checkpoint.grid import Grid
from megatier.errors import StepAbandonedError
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.optim.masters import join_master, plane_dtype, widen
from megatier.play.generations import Generation
from megatier.ranks.channel import Channel, SingleRank
from megatier.session.session import Session
from megatier.state import MASTERS
from megatier.store.arena import Arena
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier, round_up

GetBuffers = Callable[[int, int], Iterator[tuple[int, Tensor]]]
"""Gives buffers for so many elements of a parameter, from a first one on; see `ArrayWriter.buffers`."""


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

        # Units may have several schemas, so a kind's buffer takes the widest of its planes.
        widths: dict[Kind, int] = {}
        for schema in {unit.layout.schema for unit in session.own_units}:
            for kind in schema.kinds:
                widths[kind] = max(widths.get(kind, 0), schema.width(kind))

        num_bytes = 0
        for kind, width in widths.items():
            size = round_up(run_elements * width)
            self._places[kind] = num_bytes, size
            num_bytes += 2 * size

        # Pinned, because copies from the GPU come here, unless they pass through rings.
        passes = any(home is not Tier.RAM for home in session.placement.homes.values())
        store = session.store
        pins = store.device.type == "cuda" and store.staging is None
        self._arena = Arena(num_bytes, torch.device("cpu"), pin=pins) if passes else None

    def of(self, kind: Kind, number: int) -> Tensor:
        """Return the place of a run of a kind, uint8. The run after the next one has the same place."""
        # Two places are enough: a run is asked for when the one before the last is done with (`PlaneWriter._runs`).
        assert self._arena is not None, "all state is in RAM"
        start, size = self._places[kind]
        place = start + number % 2 * size
        return self._arena.view(place, size)

    def close(self) -> None:
        """Unlock the pages and free them."""
        if self._arena is not None:
            self._arena.close()


class PlaneWriter:
    """Writes the masters, or one of the moments, to files of its own. Use it from one thread at a time.

    Attributes:
        files: the staging buffers and the threads that write.
    """

    def __init__(
        self,
        session: Session,
        files: ChunkFiles,
        folder: Path,
        name: str,
        buffers: Buffers,
        owners: ChunkOwners,
    ) -> None:
        """Prepare the arrays of one group of a checkpoint.

        Args:
            session: the run.
            files: staging buffers for these arrays alone.
            folder: the checkpoint's folder.
            name: the group, such as `params`.
            buffers: for planes that are not at home in RAM.
            owners: which rank writes which chunk.
        """
        self._reader = session.reader
        self._store = session.store
        self._blocks = session.blocks
        self.files = files
        self._folder = folder / name
        self._name = name
        self._buffers = buffers
        self._owners = owners
        self._arrays: dict[str, ArrayWriter] = {}
        """The array of each parameter. If a parameter lies in several units, each of them brings its own elements."""
        self._sent = torch.empty(0, dtype=torch.float32, device="cpu")
        """The elements that other ranks write of the unit that was copied last: fp32, in the order of these ranks."""

    @property
    def checksums(self) -> dict[str, dict[int, int]]:
        """CRC32C of each chunk that was written here, by the path of its array in the checkpoint and its number."""
        return {f"{self._name}/{name}": array.checksums for name, array in self._arrays.items()}

    def write(self, unit: Unit, generation: Generation) -> None:
        """Copy all elements of a unit into chunks, the last of which may still be on their way to the drive.

        What other ranks write is copied for `exchange` instead.

        Args:
            unit: the unit.
            generation: the generation of its state that is valid.

        Raises:
            TransferError, IntegrityError: reading or writing failed.
            StepAbandonedError: the session was closed meanwhile.
        """
        targets = list(self._targets(unit))

        # Closed whatever happens, because the generator holds leases and transfers.
        with closing(self._runs(unit, generation)) as runs:
            for (start, stop), planes in runs:
                for tensor, (first, last), get_buffers in targets:
                    # The part of the tensor that lies in this run. Padding between tensors has no target.
                    lower = max(start, tensor.place(first))
                    upper = min(stop, tensor.place(last))
                    if lower >= upper:
                        continue

                    element = tensor.offset + lower - tensor.start
                    for done, target in get_buffers(element, upper - lower):
                        _copy_fp32(planes, self._name, lower - start + done, target)

    def _targets(self, unit: Unit) -> Iterator[tuple[TensorSlice, tuple[int, int], GetBuffers]]:
        """Yield elements [first, last) of the parameters of a unit, each in its tensor, with their buffers.

        The first ones of a tensor may be in a chunk that another rank writes.
        """
        # A chunk may have elements of several ranks' shards, and one of them writes all of it.
        by_rank = self._owners.sent(unit.name, self._name)
        pieces = list(chain.from_iterable(by_rank))
        sizes = [piece.num_elements for piece in pieces]
        self._sent = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")

        # A rank sends at most one piece of each parameter, the first one (`ChunkOwners`).
        sent = {}
        for piece, to in zip(pieces, self._sent.split(sizes), strict=True):
            sent[piece.name] = piece, to

        for tensor in list_tensors(unit.layout, self._name):
            first, last = tensor.elements
            if tensor.name in sent:
                piece, to = sent[tensor.name]
                yield tensor, (first, piece.stop), partial(_buffer_in, to, first)
                first = piece.stop
            yield tensor, (first, last), self._array(tensor).buffers

    def _array(self, tensor: TensorSlice) -> ArrayWriter:
        """Return the array of a parameter."""
        # Made once, since the next unit that holds a part of the parameter goes on in its chunks.
        name = tensor.name
        if name not in self._arrays:
            grid = Grid.of(tensor.parameter_shape)
            self._arrays[name] = ArrayWriter(self.files, self._folder / name, grid)
        return self._arrays[name]

    def exchange(self, unit: Unit, channel: Channel | SingleRank) -> Tensor:
        """Send other ranks what they write of a unit, and return what they have for this one. All ranks call it."""
        # Every rank counts both sides by itself, from the layout that all have, so no sizes are sent.
        given = self._owners.sent(unit.name, self._name)
        taken = self._owners.received(unit.name, self._name)
        received = channel.all_to_all_floats(self._sent, sizes_of(given), sizes_of(taken))
        self._sent = torch.empty(0, dtype=torch.float32, device="cpu")
        return received

    def take(self, unit: Unit, received: Tensor) -> None:
        """Copy what other ranks have of a unit into the chunks that this rank has begun.

        Raises:
            TransferError: writing failed.
        """
        by_rank = self._owners.received(unit.name, self._name)
        pieces = list(chain.from_iterable(by_rank))
        sizes = [piece.num_elements for piece in pieces]
        parts = received.split(sizes)
        for piece, values in zip(pieces, parts, strict=True):
            array = self._arrays[piece.name]

            # A piece may reach over several chunks, each with memory of its own.
            for first, target in array.buffers(piece.start, piece.num_elements):
                stop = first + target.numel()
                target.copy_(values[first:stop])

    def _runs(self, unit: Unit, generation: Generation) -> Generator[tuple[tuple[int, int], list[Tensor]]]:
        """Yield runs of a unit's elements with their planes, valid until the next run, which is on its way."""
        # Frozen elements come last in a layout, and have a weight alone. So no run has both sorts.
        has_array = self._name in unit.layout.schema.arrays
        runs = self._cut(0, unit.layout.num_trained) if has_array else []

        # A base of adapters is in no checkpoint: it is what it was in the model's own files.
        if self._name == MASTERS and not unit.layout.has_base:
            runs += self._cut(unit.layout.num_trained, unit.layout.num_elements)
        if not runs:
            return

        with ExitStack() as stack:
            # Two runs are on their way at most. A run has the same buffers as the run before the last (`Buffers.of`),
            # which the caller is through with when it asks for the next one.
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
        planes: list[tuple[Tensor, Transfer | None]] = []
        schema = unit.layout.schema
        is_trained = run[0] < unit.layout.num_trained
        kinds = schema.arrays[self._name] if is_trained else (Kind.WEIGHT,)
        for kind in kinds:
            key = self._blocks.key(unit.name, kind, generation)
            span = self._blocks.span(unit.name, kind, run)
            dtype = plane_dtype(schema, kind)
            if self._blocks.placement.homes[unit.name, kind] is Tier.RAM:
                # No copy is needed: the update of this unit waits until the queue is through with it.
                lease = self._store.lease(key, Tier.RAM, span)
                planes.append((stack.enter_context(lease).bytes.view(dtype), None))
                continue

            target = self._buffers.of(kind, number)
            transfer = self._store.copy_out(key, span, target)

            # Also after an error: nothing may fill a buffer that has gone to others by then.
            stack.callback(transfer.wait_for_end)
            planes.append((target.view(dtype), transfer))

        return planes


def _buffer_in(values: Tensor, start: int, first: int, num_elements: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the place of consecutive elements in a tensor whose own first element has the number `start`."""
    place = first - start
    yield 0, values[place : place + num_elements]


def _copy_fp32(planes: Sequence[Tensor], name: str, first: int, target: Tensor) -> None:
    """Copy elements of a plane, or of a master in two planes, to fp32.

    Args:
        planes: a plane; or the weights in bf16 and their remainders.
        name: of the group, which is that of the kind if it is no master.
        first: number of the first element to copy.
        target: fp32 [n], which takes them.
    """
    count = target.numel()
    source, *remainder = [plane[first : first + count] for plane in planes]
    if remainder:
        join_master(source, remainder[0], target)
    elif source.dtype is torch.float32:
        to = address_of(target, torch.float32, count)
        _native.copy(to, address_of(source, torch.float32, count), 4 * count)
    else:
        # Moments in fewer bits, and frozen weights, which have no remainder.
        widen(Kind.WEIGHT if name == MASTERS else Kind(name), source, target)
