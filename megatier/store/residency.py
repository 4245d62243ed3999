"""The residency of blocks: where their valid bytes are, and which of these are not at home yet.

A block always lies in its home tier, and may have copies in slots of gpu and ram. A `Copy` has the bytes in one place
and their states, and a `Block` has all its copies. A copy keeps two maps of disjoint spans: `fills` has the bytes that
are valid once a transfer has succeeded, and `unwritten` those that are newer than at home. No two copies of a block in
one tier overlap.

This file only keeps the books: it moves nothing, and callers hold the store's lock. It never waits for a transfer that
is under way. Because a transfer may end at any moment, a method asks each one once and relies on that answer.

The table has the states of a copy's bytes, which may differ from span to span. Dirty bytes, and those being written or
not written, are valid too.

state           | the fields that say so            | what it means, and what comes next
----------------|-----------------------------------|-----------------------------------------------------------------
empty           | the span is missing in `fills`    | `Fills.bring` makes it filling; a fresh lease makes it valid at
                |                                   | once. A copy in a slot that has no bytes when its last lease
                |                                   | ends gives the slot back.
filling         | fills[span]: a transfer that has  | The bytes may be leased (the lease waits for the transfer) and
                | not ended                         | sent on (that move comes after it). If the copy is evicted, it
                |                                   | gives its slot back at once, and the next move into the slot
                |                                   | waits for the transfers in `Slot.pending`. It becomes valid or
                |                                   | not arrived, as the transfer ends.
not arrived     | fills[span]: a transfer that      | `forget_failures` makes it empty.
                | failed                            |
valid           | fills[span]: None, or a transfer  | The bytes may be read, changed, sent on, and evicted.
                | that ended well                   | `mark_dirty` makes them dirty.
dirty           | unwritten[span]: None             | The bytes are in no other place, so `Copies.evict` refuses the
                |                                   | copy (DirtyBlockError) unless the block has no home, and else
                |                                   | only `Copies.discard` drops it. `WriteBacks.begin` starts
                |                                   | the transfer by which it is being written.
being written   | unwritten[span]: a transfer that  | The bytes may be read and leased. If they change, they are dirty
                | has not ended                     | again, and the transfer goes on as one of the `users`. `settle`
                |                                   | makes it clean once the transfer ended well. If the copy is
                |                                   | evicted meanwhile, it keeps its slot if the transfer is one of
                |                                   | `writes`; else it gives its slot back at once.
not written     | unwritten[span]: a transfer that  | It counts as dirty, except that evicting it raises the error of
                | failed                            | the transfer. It may be written back again.
superseded      | the span was cut from `fills`     | Newer bytes are in another tier. It is as if it were empty.

Three more fields concern the copy as a whole:

- `slot` is None for the copy at home. It is never evicted.
- `num_leases` above 0: nobody evicts the copy or takes its slot.
- `is_evicted`: the copy was evicted while state was being written from it. It keeps its slot until `writes` is empty.
  Then the next look for a slot, or `TieredStore.settle`, evicts it for good. Meanwhile nobody gets the copy: whoever
  wants its bytes waits. If a write fails, the copy is the only place that has the bytes, so it is usable again.

If something broke off a change of the store (`consistency`), nothing of this holds for any copy until `Copies.forget`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatier.drives.extent import Extent
from megatier.errors import BlockNotFoundError
from megatier.store.arena import Slot
from megatier.store.transfer import Transfer
from megatier.tier import BlockSpec, Tier

Span = tuple[int, int]
"""Bytes [start, stop) of a block."""


def overlap(first: Span, second: Span) -> int:
    """Return the number of bytes that two spans share."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that no other span covers, in order."""
    left = []
    start = span[0]
    covering = sorted(other for other in others if overlap(span, other))
    for first, stop in covering:
        if start < first:
            left.append((start, first))

        # An earlier one may reach further, because the others may overlap each other.
        start = max(start, stop)

    if start < span[1]:
        left.append((start, span[1]))
    return left


def cut(marks: dict[Span, Transfer | None], span: Span) -> list[Transfer]:
    """Remove the marks of a span and return them. A mark that reaches beyond the span stays on its other bytes."""
    removed = []
    overlapping = [other for other in marks if overlap(span, other)]
    for other in overlapping:
        # The rest on both sides keeps the mark, because the transfer covers those bytes too.
        mark = marks.pop(other)
        for end in without(other, [span]):
            marks[end] = mark
        if mark is not None:
            removed.append(mark)
    return removed


def assign(marks: dict[Span, Transfer | None], span: Span, mark: Transfer | None) -> None:
    """Set the mark of a span, in place of its old marks."""
    cut(marks, span)
    marks[span] = mark


def restore(marks: dict[Span, Transfer | None], span: Span, earlier: dict[Span, Transfer | None]) -> None:
    """Restore the earlier marks of a span. Other bytes keep their present marks."""
    cut(marks, span)
    for marked, mark in earlier.items():
        if overlap(marked, span):
            start = max(marked[0], span[0])
            stop = min(marked[1], span[1])
            marks[start, stop] = mark


@dataclass(slots=True, eq=False, kw_only=True)
class Copy:
    """Bytes of a block in gpu or ram. The head of this file has a table of their states."""

    block: Block
    """The block."""
    tier: Tier
    """The tier of the copy: gpu or ram."""
    span: Span
    """The bytes of the block that the copy has room for."""
    offset: int
    """The offset of the first byte in the tier's arena."""
    slot: Slot | None = None
    """The slot of the copy; None: it is the home copy, which is never evicted."""
    fills: dict[Span, Transfer | None] = field(default_factory=dict)
    """Bytes that are valid once the transfer has succeeded; None: they are valid now."""
    unwritten: dict[Span, Transfer | None] = field(default_factory=dict)
    """Bytes that home does not have, and the transfer that takes them there; None: no transfer was started."""
    users: list[Transfer] = field(default_factory=list)
    """Other moves and compute that may still touch the bytes."""
    num_leases: int = 0
    """The number of leases, with one for the store itself while it waits and needs the copy."""
    is_ahead: bool = False
    """Whether the copy was prefetched and not leased yet, so that its slot is the last to be taken."""
    is_evicted: bool = False
    """Whether the copy was evicted, so that its slot is free once the bytes are home."""

    def holds(self, span: Span) -> bool:
        """Return whether the span lies inside the copy."""
        return self.span[0] <= span[0] and span[1] <= self.span[1]

    def missing(self, span: Span) -> list[Span]:
        """Return the parts of a span that are empty."""
        # Mostly one move has filled exactly this span, so look for that first.
        if span in self.fills:
            return []
        return without(span, self.fills)

    def arriving(self, span: Span) -> list[Transfer]:
        """Return the transfers after which the span is valid."""
        # This includes transfers that have ended or failed. A wait for a failed one raises its error.
        fills = self.fills.items()
        return [fill for filled, fill in fills if fill is not None and overlap(filled, span)]

    def in_use(self) -> list[Transfer]:
        """Return the moves and the compute that may still touch the bytes."""
        transfers = (*self.fills.values(), *self.unwritten.values(), *self.users)
        return [transfer for transfer in transfers if transfer is not None and not transfer.done()]

    def writes(self) -> list[Transfer]:
        """Return the writes of state that have not ended, even those of bytes that are no longer the newest."""
        # These two queues carry state home. Only state has to survive a failed move. A gradient or an activation is
        # lost with its step, so no slot is kept for it.
        return [transfer for transfer in self.in_use() if transfer.queue in ("ram_to_nvme", "state_to_ram")]

    def use(self, *transfers: Transfer) -> None:
        """Note that these transfers touch the bytes, and forget those that have ended."""
        users = (*self.users, *transfers)
        self.users = [user for user in users if not user.done()]

    def dirty(self, span: Span) -> None:
        """Note that the bytes of a span have changed, so that they are dirty."""
        # A write-back under way moves the old bytes, so its mark is removed. It still reads the slot, so it stays a
        # user.
        self.use(*cut(self.unwritten, span))
        self.unwritten[span] = None

    def supersede(self, span: Span) -> None:
        """Note that another tier has newer bytes of the span, so that these are no longer valid."""
        # A move that still brings old bytes writes into the slot, so it stays a user.
        self.use(*cut(self.fills, span))

        # Writes under way keep their marks even inside the span, because they use the slot until they end. All other
        # marks lose the span, because its bytes are not needed and so not dirty. Each write is asked once, so it is in
        # exactly one of the two groups. If it ends later, `settle` or `evict` finds out.
        under_way: dict[Span, Transfer | None] = {}
        others: dict[Span, Transfer | None] = {}
        for marked, transfer in self.unwritten.items():
            is_under_way = transfer is not None and not transfer.done()
            marks = under_way if is_under_way else others
            marks[marked] = transfer

        cut(others, span)
        self.unwritten = under_way | others

    def settle(self) -> None:
        """Mark bytes as clean whose write-back has succeeded."""
        # The mark of a failed transfer stays, because the bytes are nowhere else. `evict` raises its error.
        marks = list(self.unwritten.items())
        for span, transfer in marks:
            if transfer is not None and transfer.succeeded():
                del self.unwritten[span]

    def forget_failures(self) -> None:
        """Mark bytes whose transfer failed as empty, and forget the transfers of those that have arrived."""
        fills = list(self.fills.items())
        for span, transfer in fills:
            if transfer is not None and transfer.done():
                del self.fills[span]
                if transfer.wait_for_end():
                    self.fills[span] = None

    def reset(self) -> None:
        """Make this home copy valid, with no leases and no moves."""
        self.fills = {self.span: None}
        self.unwritten = {}
        self.users = []
        self.num_leases = 0
        self.is_ahead = False
        self.is_evicted = False

    def is_usable(self) -> bool:
        """Return whether the copy may be used: it was not evicted, or its write-back failed."""
        return not self.is_evicted or self.unsafe(self.span)

    def unsafe(self, span: Span) -> bool:
        """Return whether bytes of the span are nowhere else, and not being written home."""
        for marked, transfer in self.unwritten.items():
            if overlap(span, marked) and (transfer is None or transfer.failed()):
                return True
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A registered block, and its copies in gpu and ram."""

    spec: BlockSpec
    """Its key, size, home and kind."""
    extent: Extent | None = None
    """Its place on NVMe, if it is at home there; else None."""
    copies: list[Copy] = field(default_factory=list)
    """Its copies in gpu and ram, including those that are evicted but not home yet."""
    reads: list[Transfer] = field(default_factory=list)
    """Moves from NVMe to the GPU past RAM that may not have ended. A write of the extent waits for them."""
    outside: dict[Span, Transfer | None] = field(default_factory=dict)
    """The last moves between bytes on NVMe and memory outside of the store (`outside`)."""

    def write_backs(self) -> list[Transfer]:
        """Return the moves that take bytes of the block home. Some may have ended."""
        # A write-back is a mark on the bytes that it takes and, if home is a copy too, a fill of that copy.
        transfers: list[Transfer] = []
        for copy in self.copies:
            transfers += [mark for mark in copy.unwritten.values() if mark is not None]
            if copy.slot is None:
                transfers += copy.arriving(copy.span)
        return transfers

    @property
    def whole(self) -> Span:
        """All bytes of the block."""
        return 0, self.spec.num_bytes

    def on(self, tier: Tier) -> list[Copy]:
        """Return the block's copies in a tier."""
        return [copy for copy in self.copies if copy.tier is tier]

    def find(self, tier: Tier, span: Span) -> Copy:
        """Return the copy in a tier that has a span, or will have it when transfers under way have ended.

        Raises:
            BlockNotFoundError: no copy there has it.
        """
        for copy in self.on(tier):
            if copy.holds(span) and not copy.missing(span):
                return copy

        key = self.spec.key
        raise BlockNotFoundError(f"block {key} has no copy of bytes {span} on {tier}.")

    def is_dirty(self) -> bool:
        """Return whether a copy has bytes that home does not have."""
        for copy in self.copies:
            copy.settle()
        return any(copy.unwritten for copy in self.copies)

    def residency(self) -> dict[Tier, tuple[Span, ...]]:
        """Return the spans of the block that each tier has in their newest version."""
        by_tier: dict[Tier, tuple[Span, ...]] = {}
        newer: list[Span] = []

        # From the tier furthest from home towards home: bytes that are dirty in one tier are stale in all later ones.
        towards_home = (Tier.RAM, Tier.GPU) if self.spec.home is Tier.GPU else (Tier.GPU, Tier.RAM)
        for tier in towards_home:
            spans: list[Span] = []
            changed: list[Span] = []
            for copy in self.on(tier):
                copy.settle()
                for span, fill in copy.fills.items():
                    if fill is None or fill.succeeded():
                        spans += without(span, newer)
                changed += copy.unwritten

            # Dirty bytes are valid in this tier, and stale in the next ones.
            newer += changed
            if spans:
                by_tier[tier] = tuple(sorted(spans))

        at_home = without(self.whole, newer)
        if self.extent is not None and at_home:
            by_tier[Tier.NVME] = tuple(at_home)
        return by_tier
