"""Registers the blocks of a store by their keys, and checks the spans of them that are asked for.

A span of a block at home on NVMe starts where a granule does, and ends with one or with the block, because every
granule has one checksum.

Every method is called with the lock of `Copies` held.
"""

from __future__ import annotations

from megatier.drives.blockfile import BlockFiles
from megatier.drives.extent import Extent
from megatier.errors import BlockError, BlockNotFoundError, CapacityError, SpanError
from megatier.store.reservation import Reservation
from megatier.store.residency import Block, Copy, Span
from megatier.tier import BlockSpec, Tier


class Blocks:
    """The registered blocks of one store."""

    def __init__(self, reservation: Reservation, files: BlockFiles | None) -> None:
        """Take the reservation in which homes are set aside, and the files for those on NVMe."""
        self._reservation = reservation
        self._files = files
        self.by_key: dict[str, Block] = {}
        """Every block."""
        self.extents: dict[str, Extent] = {}
        """The place of each block that is at home on NVMe, by its key."""

    def add(self, spec: BlockSpec) -> None:
        """Add a block, and set its home aside.

        Raises:
            CapacityError: the home tier's budget is used up.
            BlockError: the key exists, or its size is no whole number of bytes, at least 1, of which `elsewhere` are a
                part.
        """
        if spec.key in self.by_key:
            raise BlockError(f"block {spec.key} is registered already. Give each block a key of its own.")

        size = spec.num_bytes
        elsewhere = spec.elsewhere
        are_whole = type(size) is int and type(elsewhere) is int
        if not are_whole or size < 1 or not 0 <= elsewhere <= size:
            raise BlockError(f"block {spec.key} has {size!r} bytes, {elsewhere!r} elsewhere. Give it 1 at least.")

        # A scratch block has no home: its bytes are in slots and in no other place.
        block = Block(spec=spec)
        if spec.home is Tier.NVME:
            if self._files is None:
                raise CapacityError("nvme", size, 0, "Give the store at least one mount.")
            block.extent = self._files.reserve(size, elsewhere)
            self.extents[spec.key] = block.extent
            self._reservation.reserve_home(spec, Tier.NVME)
        elif spec.home is not None:
            # A home has all bytes of its block, and they are valid: an arena is full of zeros.
            home = Copy(
                block=block,
                tier=spec.home,
                span=block.whole,
                offset=self._reservation.reserve_home(spec, spec.home),
                fills={block.whole: None},
            )
            block.copies.append(home)
        # Last, so that a block whose home was refused is not registered.
        self.by_key[spec.key] = block

    def find(self, key: str) -> Block:
        """Return the block of a key.

        Raises:
            BlockNotFoundError: no block was registered under it.
        """
        try:
            return self.by_key[key]
        except KeyError:
            raise BlockNotFoundError(f"no block {key!r} is registered.") from None

    def span(self, key: str, span: Span | None) -> tuple[Block, Span]:
        """Return a block, and the span of it that a caller means: all of it if none is given.

        Raises:
            BlockNotFoundError: no block was registered under the key.
            SpanError: the span is not within the block, or cuts a granule.
        """
        block = self.find(key)
        size = block.spec.num_bytes
        start, stop = span or block.whole
        granule = 1
        if self._files is not None and block.extent is not None:
            granule = self._files.options.granule_bytes

        # The last granule may be cut by the end of the block, and by nothing else.
        is_inside = 0 <= start < stop <= size
        starts_well = start % granule == 0
        ends_well = stop % granule == 0 or stop == size
        if not (is_inside and starts_well and ends_well):
            raise SpanError(key, (start, stop), size, granule)
        return block, (start, stop)
