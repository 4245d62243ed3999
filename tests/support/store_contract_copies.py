"""The contract of the tiered store: copies that are dirty, stale, written back or evicted."""

from __future__ import annotations

import pytest
import torch
from from_outside import GRANULE_BYTES, pattern, probe
from opened_store import OpenedStore
from store_blocks import KEYS, NUM_BYTES, has_copy, read, send_home, write

from megatier.errors import (
    BlockNotFoundError,
    DirtyBlockError,
    LastCopyError,
)
from megatier.store.store import TieredStore
from megatier.tier import Tier


class CopyContract(OpenedStore):
    """The newest bytes are never lost, and never mixed with old ones."""

    def test_evict_home_copy_raises(self, store: TieredStore) -> None:
        with pytest.raises(LastCopyError, match="at home"):
            store.evict("a", self.home)

    def test_evict_dirty_copy_raises_until_written_back(self, store: TieredStore) -> None:
        write(store, "a", self.away, pattern(1, NUM_BYTES))
        assert store.is_dirty("a")
        with pytest.raises(DirtyBlockError, match="write them back"):
            store.evict("a", self.away)
        send_home(store, "a")
        store.evict("a", self.away)
        store.evict("a", self.away)  # there is none any more
        assert torch.equal(probe(store, "a"), pattern(1, NUM_BYTES))

    def test_evict_while_bytes_are_on_their_way_loses_nothing(self, store: TieredStore, tier: Tier) -> None:
        for seed in range(20):
            key = KEYS[seed % 3]
            write(store, key, tier, pattern(seed, NUM_BYTES))
            for step in (Tier.GPU, Tier.RAM):
                if has_copy(store, key, step) and self.home is not step:
                    store.write_back(key, step, wait=True)
                    store.evict(key, step)
            assert torch.equal(read(store, key, tier), pattern(seed, NUM_BYTES))

    def test_write_back_of_clean_block_is_none(self, store: TieredStore, tier: Tier) -> None:
        store.lease("a", tier).release()
        assert store.write_back("a", tier) is None

    def test_write_back_of_absent_copy_raises(self, store: TieredStore) -> None:
        with pytest.raises(BlockNotFoundError, match="has no copy"):
            store.write_back("a", self.away)
        with pytest.raises(BlockNotFoundError, match="has no copy"):
            store.mark_dirty("a", self.away)

    def test_write_back_of_the_whole_takes_every_dirty_span(self, store: TieredStore) -> None:
        store.lease("a", self.away).release()
        for start in (0, 4 * GRANULE_BYTES):
            write(store, "a", self.away, pattern(start, GRANULE_BYTES), start)
        send_home(store, "a")
        assert not store.is_dirty("a")
        assert torch.equal(probe(store, "a"), read(store, "a", self.away))

    def test_write_back_twice_leaves_the_newest_bytes(self, store: TieredStore) -> None:
        for seed in range(30):
            write(store, "a", self.away, pattern(seed, NUM_BYTES))
            store.write_back("a", self.away, wait=True)
        send_home(store, "a")
        assert torch.equal(probe(store, "a"), pattern(29, NUM_BYTES))

    def test_mark_dirty_drops_stale_copies(self, store: TieredStore) -> None:
        other = Tier.RAM if self.away is Tier.GPU else Tier.GPU
        for tier in (other, self.away):
            store.lease("a", tier).release()
        write(store, "a", self.away, pattern(7, NUM_BYTES))
        assert other not in store.residency("a")
        send_home(store, "a")
        assert torch.equal(read(store, "a", other), pattern(7, NUM_BYTES))

    def test_lease_where_another_tier_alone_has_the_newest_bytes_raises(self, store: TieredStore) -> None:
        write(store, "a", self.away, pattern(8, NUM_BYTES))
        other = Tier.RAM if self.away is Tier.GPU else Tier.GPU
        with pytest.raises(DirtyBlockError, match="newer bytes"):
            store.lease("a", other)
        with pytest.raises(DirtyBlockError, match="newer bytes"):
            store.prefetch("a", other)
