"""The chunks of an optimizer's state, and the home of each. Pure.

A chunk is one block of the store. It has both moments of a number of elements, of one parameter or several, and for
bf16 parameters also the remainder of the fp32 master. Chunks at home in RAM and on NVMe alternate as evenly as the
budget allows, so that drives work while chunks in RAM are updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatier.byte_counts import format_bytes_up
from megatier.errors import PlanError
from megatier.layout import ALIGN_ELEMENTS
from megatier.state import StateSchema
from megatier.tier import Kind, Tier, round_up

STATE_CHUNK_ELEMENTS_MAX = 4 << 20
"""Elements of a chunk at most: 16 to 40 MiB, and drives and links are at full speed below that."""
CHUNK_ELEMENTS_MIN = 2048
"""Elements of a chunk at least, however small the RAM budget is; a multiple of the alignment."""
AHEAD = 2
"""Chunks on their way while one is updated."""
SLOTS = 5
"""Chunks in slots at once: AHEAD, the one that is updated, the one whose update begins, and one that leaves."""
SLOTS_SHARE = 2
"""Chunks are cut so small that slots take at most one part in so many of the RAM budget."""


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """The facts of a parameter that decide how its state is cut."""

    index: int
    """Number of the parameter among all parameters of the optimizer."""
    num_elements: int
    """Its elements."""
    schema: StateSchema
    """The planes of its state: bf16 has a master with a remainder, fp32 is its own master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementRun:
    """Elements [start, stop) of a parameter inside a chunk."""

    parameter: int
    """Number of the parameter among all parameters of the optimizer."""
    start: int
    """First element in the parameter."""
    stop: int
    """One past the last element."""
    schema: StateSchema
    """The planes of the parameter's state."""
    offset: int
    """First byte of the run in the chunk."""

    @property
    def planes(self) -> dict[Kind, tuple[int, int]]:
        """Bytes [start, stop) of the chunk by kind; each plane starts at a multiple of 256 bytes."""
        spans = {}
        offset = self.offset
        padded = round_up(self.stop - self.start, ALIGN_ELEMENTS)
        for kind, width in _widths(self.schema).items():
            spans[kind] = (offset, offset + width * (self.stop - self.start))
            offset += width * padded
        return spans

    @property
    def num_bytes(self) -> int:
        """Bytes of the run, with the padding at the end of each plane."""
        return sum(_widths(self.schema).values()) * round_up(self.stop - self.start, ALIGN_ELEMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateChunk:
    """A piece of state that moves at once: a block of the store."""

    key: str
    """The name of the block."""
    runs: tuple[ElementRun, ...]
    """The elements whose state it holds, in the order of their bytes."""
    num_bytes: int
    """Its size, before it is rounded up to pages."""
    home: Tier = Tier.RAM
    """The tier where it lies between two updates."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of an optimizer, in the order of its parameters."""

    chunks: tuple[StateChunk, ...]
    slot_bytes: int
    """Bytes of the largest chunk, before they are rounded up to pages."""
    num_ram_slots: int
    """Slots in RAM for chunks at home on NVMe; 0 if all chunks are at home in RAM."""

    def num_bytes(self, home: Tier) -> int:
        """Return the bytes of the chunks at home in a tier, in whole pages."""
        return sum(round_up(chunk.num_bytes) for chunk in self.chunks if chunk.home is home)


def plan_chunks(sizes: Sequence[ParameterSize], ram: int, nvme: int) -> ChunkPlan:
    """Cut the state and give each chunk its home.

    Args:
        sizes: the parameters, in the order in which they are updated.
        ram: RAM budget in bytes, slots included.
        nvme: NVMe budget in bytes.

    Raises:
        PlanError: the state does not fit the budgets.
    """
    # All of it in RAM needs no slots, so chunks may have their largest size.
    whole = _cut(sizes, STATE_CHUNK_ELEMENTS_MAX)
    needed = sum(round_up(chunk.num_bytes) for chunk in whole)
    if needed <= ram:
        return _plan(whole, 0)
    if not nvme:
        raise PlanError(
            "optimizer state in RAM",
            needed,
            ram,
            f"Raise ram to at least {format_bytes_up(needed)}, or name a drive in nvme.",
        )

    # Slots have the size of the largest chunk and come out of the RAM budget, so with little RAM chunks are smaller.
    # Parameters of several dtypes may share a chunk, so the widest state bounds what a chunk takes.
    per_element = max(sum(_widths(size.schema).values()) for size in sizes)
    most = ram // (SLOTS_SHARE * SLOTS * per_element)
    # A multiple of the alignment, on which `_cut` counts.
    aligned = most // CHUNK_ELEMENTS_MIN * CHUNK_ELEMENTS_MIN
    chunk_elements = min(max(aligned, CHUNK_ELEMENTS_MIN), STATE_CHUNK_ELEMENTS_MAX)
    chunks = _cut(sizes, chunk_elements)
    slots = SLOTS * round_up(max(chunk.num_bytes for chunk in chunks))
    if slots > ram:
        raise PlanError("RAM slots for state on NVMe", slots, ram, f"Raise ram to at least {format_bytes_up(slots)}.")

    plan = _plan(_spread(chunks, ram - slots), SLOTS)
    if (spilled := plan.num_bytes(Tier.NVME)) > nvme:
        raise PlanError("optimizer state on NVMe", spilled, nvme, "Give nvme more space, or raise ram.")
    return plan


def _plan(chunks: Sequence[StateChunk], num_ram_slots: int) -> ChunkPlan:
    """Return the plan of chunks that have their homes."""
    # There may be no chunk at all, if no parameter is trained.
    return ChunkPlan(tuple(chunks), max((chunk.num_bytes for chunk in chunks), default=0), num_ram_slots)


def _cut(sizes: Iterable[ParameterSize], chunk_elements: int) -> list[StateChunk]:
    """Return the chunks, all of them at home in RAM. Large parameters are cut, and small ones share a chunk.

    A parameter that is updated by matrix has a chunk of its own, whatever its size.
    """
    chunks: list[StateChunk] = []
    runs: list[ElementRun] = []
    room = chunk_elements
    offset = 0
    for size in sizes:
        start = 0
        while start < size.num_elements:
            # A matrix is updated as a whole, so it may be larger than other chunks.
            stop = size.num_elements
            if not size.schema.by_matrix:
                stop = min(stop, start + room)
            run = ElementRun(
                parameter=size.index,
                start=start,
                stop=stop,
                schema=size.schema,
                offset=offset,
            )
            runs.append(run)
            start = run.stop
            offset += run.num_bytes

            # Padding takes room too. Chunks have a multiple of the alignment, so the room comes to exactly 0.
            room -= round_up(run.stop - run.start, ALIGN_ELEMENTS)
            if not room or size.schema.by_matrix:
                chunks.append(_chunk(len(chunks), runs, offset))
                runs = []
                room = chunk_elements
                offset = 0
    return [*chunks, _chunk(len(chunks), runs, offset)] if runs else chunks


def _chunk(number: int, runs: Iterable[ElementRun], num_bytes: int) -> StateChunk:
    """Return a chunk with the name of its number."""
    return StateChunk(key=f"chunk{number}", runs=tuple(runs), num_bytes=num_bytes)


def _spread(chunks: Sequence[StateChunk], room: int) -> list[StateChunk]:
    """Return the chunks with as many of them at home in RAM as fit, spread evenly, and the others on NVMe."""
    placed = []
    sizes = [round_up(chunk.num_bytes) for chunk in chunks]
    total = sum(sizes)

    # Each chunk earns its share of the room and pays its whole size to be in RAM. The credit, counted in bytes times
    # `total` so that it is a whole number, is never below 0: so those in RAM never take more than the room.
    credit = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        credit += size * room
        is_in_ram = credit >= size * total
        placed.append(chunk if is_in_ram else replace(chunk, home=Tier.NVME))
        credit -= size * total if is_in_ram else 0
    return placed


def _widths(schema: StateSchema) -> dict[Kind, int]:
    """Return the bytes an element by kind, of the state without the weights, which are the parameter itself."""
    return {kind: schema.width(kind) for kind in schema.passing_kinds}
