"""The registered blocks of a store by their keys, and the check of spans.

A span of a block at home on NVMe begins and ends at granules, or at the end of the block, because every granule has one
checksum.

The caller of each method holds the lock of `Copies`.
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
        """Begin without blocks. Homes come from the reservation, and on NVMe from the files."""
        self._reservation = reservation
        self._files = files
        self.by_key: dict[str, Block] = {}
        """All blocks by their keys."""
        self.extents: dict[str, Extent] = {}
        """The extent of each block that is at home on NVMe, by key."""

    def add(self, spec: BlockSpec) -> None:
        """Add a block, and reserve its home.

        Raises:
            CapacityError: the home tier's budget is used up.
            BlockError: the key exists, or the sizes are not valid.
        """
        if spec.key in self.by_key:
            raise BlockError(f"block {spec.key} is registered already. Give each block a key of its own.")

        size = spec.num_bytes
        elsewhere = spec.elsewhere
        are_whole = type(size) is int and type(elsewhere) is int
        if not are_whole or size < 1 or not 0 <= elsewhere <= size:
            raise BlockError(f"block {spec.key} has {size!r} bytes, {elsewhere!r} elsewhere. Give it 1 at least.")

        # A scratch block has no home, so its bytes are only in slots.
        block = Block(spec=spec)
        if spec.home is Tier.NVME:
            if self._files is None:
                raise CapacityError("nvme", size, 0, "Give the store at least one mount.")
            block.extent = self._files.reserve(size, elsewhere)
            self.extents[spec.key] = block.extent
            self._reservation.reserve_home(spec, Tier.NVME)
        elif spec.home is not None:
            # A new arena is filled with zeros, so all bytes of a home are valid.
            home = Copy(
                block=block,
                tier=spec.home,
                span=block.whole,
                offset=self._reservation.reserve_home(spec, spec.home),
                fills={block.whole: None},
            )
            block.copies.append(home)

        # Last, so that a block without room for its home is not registered.
        self.by_key[spec.key] = block

    def find(self, key: str) -> Block:
        """Return the block with a key.

        Raises:
            BlockNotFoundError: there is no such block.
        """
        try:
            return self.by_key[key]
        except KeyError:
            raise BlockNotFoundError(f"no block {key!r} is registered.") from None

    def span(self, key: str, span: Span | None) -> tuple[Block, Span]:
        """Return a block and the given span of it, which is the whole block if it is None.

        Raises:
            BlockNotFoundError: there is no such block.
            SpanError: the span is not within the block, or cuts a granule.
        """
        block = self.find(key)
        size = block.spec.num_bytes
        start, stop = span or block.whole
        granule = 1
        if self._files is not None and block.extent is not None:
            granule = self._files.options.granule_bytes

        # Only the end of the block may cut a granule.
        is_inside = 0 <= start < stop <= size
        starts_well = start % granule == 0
        ends_well = stop % granule == 0 or stop == size
        if not (is_inside and starts_well and ends_well):
            raise SpanError(key, (start, stop), size, granule)
        return block, (start, stop)
