"""Residency: where the valid copies of a block are now, and which of their bytes home does not have.

Bytes are counted in half-open spans of a block. A copy keeps two maps of disjoint spans: `fills`, bytes that are valid
once a transfer has ended, and `unwritten`, bytes that are newer than home's. Copies of a block in one tier never
overlap. This is pure bookkeeping: nothing moves here, and whoever calls holds the store's lock.

The states of a copy's bytes. Different spans of one copy may be in different states, and dirty or written bytes are
valid as well.

state           | fields that say so                | what may happen to the bytes
----------------|-----------------------------------|------------------------------------------------------------------
home            | slot is None                      | The copy is never evicted, so it is never leaving. Its bytes may
                |                                   | be in any other state below.
empty           | span missing in `fills`           | `Fills.bring` starts to fill them. A copy that is empty when its
                |                                   | last lease ends gives its slot back.
filling         | fills[span]: transfer under way   | They may be leased (the lease waits) and sent on (that move comes
                |                                   | after). An evicted copy gives its slot back at once: whoever
                |                                   | fills it next comes behind the moves in `Slot.pending`.
not arrived     | fills[span]: transfer failed      | `forget_failures` makes them empty again.
valid           | fills[span]: None, or ended well  | They may be read, changed, sent on and evicted.
dirty           | unwritten[span]: None             | They are nowhere else: evicting is refused (DirtyBlockError), only
                |                                   | `Copies.discard` drops them.
being written   | unwritten[span]: under way        | They may be read and leased. If they change, they are dirty again,
                |                                   | and the write goes on among `users`. Evicted, the copy is leaving.
not written     | unwritten[span]: transfer failed  | They count as dirty; evicting raises the transfer's error. They
                |                                   | may be written back again.
superseded      | span cut from `fills`             | Newer bytes are in another tier; these are as if empty.
leaving         | is_leaving                        | The slot is free once its writes to NVMe, or of state to RAM, have
                |                                   | ended well. Until then nobody gets the copy: whoever wants its
                |                                   | bytes waits. If a write fails, it is as if never evicted.

Two more fields concern the copy as a whole. While `num_leases` is not 0 nobody evicts it and nobody takes its slot.
`is_ahead` says that nobody has leased it since it was prefetched: it is taken last. A store that is torn (`tear`) says
nothing about single copies: none of them counts any more, until `Copies.forget`.
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
    """The parts of a span that no other one covers, in order."""
    left = []
    start = span[0]
    for first, stop in sorted(other for other in others if overlap(span, other)):
        if start < first:
            left.append((start, first))
        start = max(start, stop)
    return [*left, (start, span[1])] if start < span[1] else left


def cut(marks: dict[Span, Transfer | None], span: Span) -> list[Transfer]:
    """Remove a span's marks, and return them; spans that reach beyond it keep theirs there."""
    found = []
    for other in [other for other in marks if overlap(span, other)]:
        mark = marks.pop(other)
        marks.update(dict.fromkeys(without(other, [span]), mark))
        found += [mark] if mark is not None else []
    return found


def assign(marks: dict[Span, Transfer | None], span: Span, mark: Transfer | None) -> None:
    """Set a span's mark."""
    cut(marks, span)
    marks[span] = mark


@dataclass(slots=True, eq=False, kw_only=True)
class Copy:
    """Bytes of a block in gpu or ram, at an arena offset. The module's head has the states that they can be in.

    Attributes:
        block: the block that it is a copy of.
        tier: gpu or ram.
        span: bytes of the block that it has room for.
        offset: where they lie in the tier's arena.
        slot: where it lies; None for the home copy, which is never evicted.
        fills: bytes that are valid once their transfer has ended well (None: already).
        unwritten: bytes that home does not have, and the transfer that takes them there (None: not begun).
        users: moves and compute that may still touch the bytes.
        num_leases: how many leases there are; `Copies` takes one too while it waits with a copy in its hands.
        is_ahead: it was prefetched, and not leased since.
        is_leaving: it was evicted; the slot is free once the bytes are home.
    """

    block: Block
    tier: Tier
    span: Span
    offset: int
    slot: Slot | None = None
    fills: dict[Span, Transfer | None] = field(default_factory=dict)
    unwritten: dict[Span, Transfer | None] = field(default_factory=dict)
    users: list[Transfer] = field(default_factory=list)
    num_leases: int = 0
    is_ahead: bool = False
    is_leaving: bool = False

    def holds(self, span: Span) -> bool:
        """True if the span lies inside the copy."""
        return self.span[0] <= span[0] and span[1] <= self.span[1]

    def missing(self, span: Span) -> list[Span]:
        """Parts of a span that nothing brought yet."""
        return [] if span in self.fills else without(span, self.fills)

    def arriving(self, span: Span) -> list[Transfer]:
        """Transfers after which the span is valid."""
        return [t for filled, t in self.fills.items() if t is not None and overlap(filled, span)]

    def in_use(self) -> list[Transfer]:
        """Moves and compute that have not ended."""
        moves = (*self.fills.values(), *self.unwritten.values(), *self.users)
        return [t for t in moves if t is not None and not t.done()]

    def writes(self) -> list[Transfer]:
        """Writes of state home that have not ended, whether the bytes are the newest or not."""
        return [transfer for transfer in self.in_use() if transfer.queue in ("ram_to_nvme", "state_to_ram")]

    def use(self, *transfers: Transfer) -> None:
        """Note who touches the bytes."""
        self.users = [t for t in (*self.users, *transfers) if not t.done()]

    def dirty(self, span: Span) -> None:
        """The bytes changed: a write-back that is under way takes older ones."""
        self.use(*cut(self.unwritten, span))
        self.unwritten[span] = None

    def supersede(self, span: Span) -> None:
        """Newer bytes are elsewhere. A write of the old ones that is under way is still waited for."""
        self.use(*cut(self.fills, span))

        # Writes under way keep their marks, also inside the span: the slot is theirs until they end. Of all others the
        # span is cut out, so that bytes that nobody wants do not count as dirty.
        marks = self.unwritten
        self.unwritten = {}
        under_way = [other for other, t in marks.items() if t is not None and not t.done()]
        self.unwritten.update((other, marks.pop(other)) for other in under_way)
        cut(marks, span)
        self.unwritten.update(marks)

    def settle(self) -> None:
        """Bytes that were written well are clean from now on."""
        for span, transfer in list(self.unwritten.items()):
            if transfer is not None and transfer.done() and transfer.over():
                del self.unwritten[span]

    def forget_failures(self) -> None:
        """Bytes that did not arrive are missing again; those that did need no transfer any more."""
        for span, transfer in list(self.fills.items()):
            if transfer is not None and transfer.done():
                del self.fills[span]
                if transfer.over():
                    self.fills[span] = None

    def reset(self) -> None:
        """Make it a home copy that nobody leases or moves; its bytes count as valid, whatever they are."""
        self.fills = {self.span: None}
        self.unwritten = {}
        self.users = []
        self.num_leases = 0
        self.is_ahead = False
        self.is_leaving = False

    def is_usable(self) -> bool:
        """False once it was evicted, unless its write-back failed: then it is all there is."""
        return not self.is_leaving or self.unsafe(self.span)

    def unsafe(self, span: Span) -> bool:
        """True if bytes of the span are nowhere else, and not on their way home either."""
        return any(overlap(span, other) and (t is None or t.failed()) for other, t in self.unwritten.items())


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A registered block and its copies in gpu and ram.

    Attributes:
        spec: its key, size, home and kind.
        extent: where it lies on NVMe, if that is its home.
        copies: those in gpu and ram; those that are leaving too.
        reads: moves from NVMe past RAM, perhaps not over yet: a write of the extent comes behind them.
    """

    spec: BlockSpec
    extent: Extent | None = None
    copies: list[Copy] = field(default_factory=list)
    reads: list[Transfer] = field(default_factory=list)

    def write_backs(self) -> list[Transfer]:
        """Moves that take its bytes home, ended or not."""
        leaving = [mark for copy in self.copies for mark in copy.unwritten.values() if mark is not None]
        return leaving + [t for copy in self.copies if copy.slot is None for t in copy.arriving(copy.span)]

    @property
    def whole(self) -> Span:
        """All of its bytes."""
        return 0, self.spec.num_bytes

    def on(self, tier: Tier) -> list[Copy]:
        """Its copies in a tier."""
        return [copy for copy in self.copies if copy.tier is tier]

    def find(self, tier: Tier, span: Span) -> Copy:
        """The copy with a valid, or arriving, span.

        Raises:
            BlockNotFoundError: there is none.
        """
        for copy in self.on(tier):
            if copy.holds(span) and not copy.missing(span):
                return copy
        raise BlockNotFoundError(f"block {self.spec.key} has no copy of bytes {span} on {tier}.")

    def is_dirty(self) -> bool:
        """True if a copy has bytes that home does not have."""
        for copy in self.copies:
            copy.settle()
        return any(copy.unwritten for copy in self.copies)

    def residency(self) -> dict[Tier, tuple[Span, ...]]:
        """Per tier, the spans that are there now and as new as any."""
        found: dict[Tier, tuple[Span, ...]] = {}
        newer: list[Span] = []

        # From the tier furthest from home to home: what is dirty in one tier is stale in all that come after it.
        for tier in (Tier.RAM, Tier.GPU) if self.spec.home is Tier.GPU else (Tier.GPU, Tier.RAM):
            spans = []
            changed = []
            for copy in self.on(tier):
                copy.settle()
                valid = [span for span, t in copy.fills.items() if t is None or (t.done() and t.over())]
                spans += [part for span in valid for part in without(span, newer)]
                changed += list(copy.unwritten)
            newer += changed
            if spans:
                found[tier] = tuple(sorted(spans))

        if self.extent is not None and (spans := without(self.whole, newer)):
            found[Tier.NVME] = tuple(spans)
        return found
