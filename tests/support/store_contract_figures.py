"""The contract of the tiered store: names, budgets and what it says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from from_outside import GRANULE_BYTES, pattern
from opened_store import OpenedStore
from store_blocks import KEYS, MIB, NUM_BYTES, ZERO, read, send_home, write

from megatier.errors import (
    BlockError,
    BlockNotFoundError,
    CapacityError,
    RunLockedError,
    SpanError,
)
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Kind, Tier, round_up


class FiguresContract(OpenedStore):
    """What cannot be is refused with figures, and leaves no trace."""

    def test_unknown_key_raises(self, store: TieredStore, tier: Tier) -> None:
        for use in (store.lease, store.prefetch, store.evict, store.mark_dirty, store.write_back):
            with pytest.raises(BlockNotFoundError, match="'nobody'"):
                use("nobody", tier)
        with pytest.raises(BlockNotFoundError, match="'nobody'"):
            store.residency("nobody")

    def test_span_off_the_granules_or_outside_is_refused(self, store: TieredStore) -> None:
        for span in ((0, NUM_BYTES + 1), (GRANULE_BYTES, GRANULE_BYTES), (-GRANULE_BYTES, GRANULE_BYTES)):
            with pytest.raises(SpanError, match=f"within the {NUM_BYTES} bytes"):
                store.lease("a", Tier.RAM, span)
        if self.home is Tier.NVME:
            for span in ((100, GRANULE_BYTES), (0, 100)):
                with pytest.raises(SpanError, match=f"a multiple of {GRANULE_BYTES}"):
                    store.lease("a", Tier.RAM, span)

    def test_register_twice_or_late_raises(self, store: TieredStore) -> None:
        with pytest.raises(BlockError, match="a is registered already"):
            store.register(BlockSpec("a", NUM_BYTES, self.home))
        store.seal()
        with pytest.raises(BlockError, match="z comes too late"):
            store.register(BlockSpec("z", NUM_BYTES, self.home))

    def test_register_beyond_the_budget_raises_with_figures_and_leaves_no_trace(self, store: TieredStore) -> None:
        usage = store.usage(self.home)
        with pytest.raises(CapacityError) as caught:
            store.register(BlockSpec("huge", 1 << 40, self.home))
        assert (caught.value.tier, caught.value.needed_bytes) == (self.home, 1 << 40)
        taken = sum(size for name, size in usage.items() if name != "budget")
        assert caught.value.free_bytes == usage["budget"] - taken
        assert store.usage(self.home) == usage
        with pytest.raises(BlockNotFoundError):
            store.residency("huge")

    def test_reserve_beyond_the_budget_raises(self, store: TieredStore, tier: Tier) -> None:
        with pytest.raises(CapacityError, match=f"Raise the {tier} budget"):
            store.reserve(tier, Kind.GRAD, NUM_BYTES, 1)

    def test_usage_counts_homes_by_kind_and_slots(self, store: TieredStore) -> None:
        size = round_up(NUM_BYTES)
        assert store.usage(self.home)["weight"] == len(KEYS) * size
        assert store.usage(self.away)["slots"] == (2 if self.away is Tier.GPU else 3) * size
        assert "weight" not in store.usage(self.away)
        assert store.usage(Tier.NVME)["budget"] == MIB

    def test_residency_names_valid_copies_only(self, store: TieredStore) -> None:
        whole = (0, NUM_BYTES)
        assert store.residency("a") == {self.home: (whole,)}
        # A lease on a GPU may come before its bytes, which compute alone waits for. Who reads them has waited.
        read(store, "a", self.away)
        assert self.away in store.residency("a")
        write(store, "a", self.away, pattern(1, NUM_BYTES))
        assert self.home not in store.residency("a")
        send_home(store, "a")
        assert store.residency("a")[self.home] == (whole,)

    def test_open_with_a_run_id_in_use_is_refused(self, store: TieredStore, tmp_path: Path) -> None:
        with pytest.raises(RunLockedError, match="megatier-test is in use"):
            self.open(tmp_path)

    def test_close_twice_and_with_moves_in_flight_is_fine(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, ram_slots=4)
        for key in KEYS[:3]:
            write(store, key, self.away if key != "c" else self.home if self.home is not Tier.NVME else Tier.RAM, ZERO)
            store.write_back(key, self.away) if key != "c" else None
        store.prefetch("d", Tier.RAM)
        store.close()
        store.close()
        assert not list(tmp_path.iterdir())
