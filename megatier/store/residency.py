"""Tells where the valid bytes of a block are now, and which of them its home does not have yet.

A block always lies in its home tier, and may have copies in slots of gpu and ram. `Copy` says which bytes of a block
one place has and in which state they are; `Block` holds all copies of a block. Bytes are counted in half-open spans of
the block. A copy keeps two maps of disjoint spans: `fills` holds the bytes that are valid once a transfer has ended,
and `unwritten` the bytes that are newer than those at home. No two copies of a block in one tier overlap.

This file does the bookkeeping alone: it moves nothing, and its callers hold the store's lock. It waits for no transfer
that has not ended. A transfer may end at any moment, so two looks at the same one may differ: a method asks once and
goes by that answer, and a later question finds what has changed since.

The table has the states of a copy's bytes. Different spans of one copy may be in different states. Bytes that are
dirty, being written or not written are valid as well.

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
                |                                   | evicted meanwhile, it is leaving if the transfer is one of
                |                                   | `writes`; else it gives its slot back at once.
not written     | unwritten[span]: a transfer that  | It counts as dirty, except that evicting it raises the error of
                | failed                            | the transfer. It may be written back again.
superseded      | the span was cut from `fills`     | Newer bytes are in another tier. It is as if it were empty.

Three more fields concern the copy as a whole:

- `slot` is None for the copy at home. It is never evicted, so it is never leaving.
- `num_leases` above 0: nobody evicts the copy or takes its slot.
- `is_leaving`: the copy was evicted while state was being written from it. It keeps its slot until `writes` is empty.
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
    """Count the bytes that two spans share."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """Return the parts of a span that no other span covers, in order."""
    left = []
    start = span[0]
    covering = sorted(other for other in others if overlap(span, other))
    for first, stop in covering:
        if start < first:
            left.append((start, first))

        # Other spans may overlap each other, so an earlier one may reach further than this one.
        start = max(start, stop)

    if start < span[1]:
        left.append((start, span[1]))
    return left


def cut(marks: dict[Span, Transfer | None], span: Span) -> list[Transfer]:
    """Remove the marks of a span and return them. A mark that reaches beyond the span stays on its other bytes."""
    removed = []
    overlapping = [other for other in marks if overlap(span, other)]
    for other in overlapping:
        # What is left on both sides keeps the mark: the same transfer still stands for their bytes.
        mark = marks.pop(other)
        for end in without(other, [span]):
            marks[end] = mark
        if mark is not None:
            removed.append(mark)
    return removed


def assign(marks: dict[Span, Transfer | None], span: Span, mark: Transfer | None) -> None:
    """Set the mark of a span, in place of the marks that it has."""
    cut(marks, span)
    marks[span] = mark


def restore(marks: dict[Span, Transfer | None], span: Span, earlier: dict[Span, Transfer | None]) -> None:
    """Give a span the marks back that it had earlier; the bytes beside it keep those that they have now."""
    cut(marks, span)
    for marked, mark in earlier.items():
        if overlap(marked, span):
            start = max(marked[0], span[0])
            stop = min(marked[1], span[1])
            marks[start, stop] = mark


@dataclass(slots=True, eq=False, kw_only=True)
class Copy:
    """Bytes of a block in gpu or ram, at an offset in the tier's arena. The head of this file has their states."""

    block: Block
    """The block that these are bytes of."""
    tier: Tier
    """The tier that they are in: gpu or ram."""
    span: Span
    """The bytes of the block that the copy has room for."""
    offset: int
    """The place of the first of them in the tier's arena."""
    slot: Slot | None = None
    """The slot that the copy lies in. None: it is the home copy, which is never evicted."""
    fills: dict[Span, Transfer | None] = field(default_factory=dict)
    """Bytes that are valid once this transfer has ended well. None: they are valid now."""
    unwritten: dict[Span, Transfer | None] = field(default_factory=dict)
    """Bytes that home does not have, and the transfer that takes them there. None: no such transfer was started."""
    users: list[Transfer] = field(default_factory=list)
    """Other moves and compute that may still touch the bytes."""
    num_leases: int = 0
    """The number of leases. The store counts one for itself too while it waits with the copy in its hands."""
    is_ahead: bool = False
    """The copy was prefetched and not leased since, so its slot is the last to be taken."""
    is_leaving: bool = False
    """The copy was evicted, and its slot is free once the bytes are home."""

    def holds(self, span: Span) -> bool:
        """Return whether the span lies inside the copy."""
        return self.span[0] <= span[0] and span[1] <= self.span[1]

    def missing(self, span: Span) -> list[Span]:
        """Return the parts of a span that are empty."""
        # The usual question is for the very span that one move filled, so it is answered without looking at all others.
        if span in self.fills:
            return []
        return without(span, self.fills)

    def arriving(self, span: Span) -> list[Transfer]:
        """Return the transfers after which the span is valid."""
        # Transfers that have ended are among them, also those that failed: a wait for them raises the error.
        fills = self.fills.items()
        return [fill for filled, fill in fills if fill is not None and overlap(filled, span)]

    def in_use(self) -> list[Transfer]:
        """Return the moves and the compute that may still touch the bytes."""
        transfers = (*self.fills.values(), *self.unwritten.values(), *self.users)
        return [transfer for transfer in transfers if transfer is not None and not transfer.done()]

    def writes(self) -> list[Transfer]:
        """Return the writes of state that have not ended, also those of bytes that are no longer the newest."""
        # The two queues carry state home. Only state has to outlive a move that fails: a gradient or an activation is
        # lost with its step, so nobody keeps a slot for it.
        return [transfer for transfer in self.in_use() if transfer.queue in ("ram_to_nvme", "state_to_ram")]

    def use(self, *transfers: Transfer) -> None:
        """Note that these transfers touch the bytes, and forget those that have ended."""
        users = (*self.users, *transfers)
        self.users = [user for user in users if not user.done()]

    def dirty(self, span: Span) -> None:
        """Note that the bytes of a span changed: they are dirty from now on."""
        # A write-back that is under way takes the older bytes. Its end says nothing about the new ones, so it loses its
        # mark; but it still reads the slot, so it stays a user.
        self.use(*cut(self.unwritten, span))
        self.unwritten[span] = None

    def supersede(self, span: Span) -> None:
        """Note that newer bytes of the span are in another tier: these are no longer valid."""
        # A move that still brings the old bytes writes into the slot, so it stays a user.
        self.use(*cut(self.fills, span))

        # Writes under way keep their marks, also inside the span: the slot is theirs until they end. The span is cut
        # out of all other marks, since bytes that nobody wants must not count as dirty. Each write is asked once if it
        # has ended, so it is in one of the two groups; if it ends just after, `settle` or `evict` finds that.
        under_way: dict[Span, Transfer | None] = {}
        others: dict[Span, Transfer | None] = {}
        for marked, transfer in self.unwritten.items():
            is_under_way = transfer is not None and not transfer.done()
            marks = under_way if is_under_way else others
            marks[marked] = transfer

        cut(others, span)
        self.unwritten = under_way | others

    def settle(self) -> None:
        """Make bytes clean whose write-back ended well."""
        # A mark whose transfer failed stays. It says that the bytes are in no other place, and `evict` raises its
        # error.
        marks = list(self.unwritten.items())
        for span, transfer in marks:
            if transfer is not None and transfer.succeeded():
                del self.unwritten[span]

    def forget_failures(self) -> None:
        """Make bytes empty that did not arrive, and drop the transfers of those that did."""
        fills = list(self.fills.items())
        for span, transfer in fills:
            if transfer is not None and transfer.done():
                del self.fills[span]
                if transfer.wait_for_end():
                    self.fills[span] = None

    def reset(self) -> None:
        """Make it a home copy that nobody leases or moves. Its bytes count as valid, whatever they are."""
        self.fills = {self.span: None}
        self.unwritten = {}
        self.users = []
        self.num_leases = 0
        self.is_ahead = False
        self.is_leaving = False

    def is_usable(self) -> bool:
        """Return whether the copy may be handed out: it was not evicted, or it was and its write-back failed."""
        return not self.is_leaving or self.unsafe(self.span)

    def unsafe(self, span: Span) -> bool:
        """Return whether bytes of the span are in no other place, and not on their way home either."""
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
    """Its place on NVMe, if it is at home there."""
    copies: list[Copy] = field(default_factory=list)
    """Its copies in gpu and ram, also those that are leaving."""
    reads: list[Transfer] = field(default_factory=list)
    """Moves from NVMe to the GPU past RAM that may not have ended. A write of the extent waits for them."""
    outside: dict[Span, Transfer | None] = field(default_factory=dict)
    """The last move between bytes on NVMe and memory outside of the store (`outside`)."""

    def write_backs(self) -> list[Transfer]:
        """Return the moves that take bytes of the block home; some may have ended."""
        # A write-back shows in two places: as a mark on the bytes that it takes, and, if home is a copy too, as a fill
        # of that copy.
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
        """Return the copy in a tier that has a span, or gets it by transfers that were started.

        Raises:
            BlockNotFoundError: there is no such copy.
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
        """Return, per tier, the spans of the block that are there now and as new as any."""
        by_tier: dict[Tier, tuple[Span, ...]] = {}
        newer: list[Span] = []

        # From the tier furthest from home towards home: bytes that are dirty in one tier are stale in all that follow.
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

            # Only now, since what is dirty in this tier is valid here, and stale in those that follow.
            newer += changed
            if spans:
                by_tier[tier] = tuple(sorted(spans))

        at_home = without(self.whole, newer)
        if self.extent is not None and at_home:
            by_tier[Tier.NVME] = tuple(at_home)
        return by_tier
