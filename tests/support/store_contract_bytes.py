"""The contract of the tiered store: which bytes a lease finds, and that they move once."""

from __future__ import annotations

import random

import pytest
import torch
from from_outside import GRANULE_BYTES, pattern, probe
from opened_store import OpenedStore
from store_blocks import KEYS, NUM_BYTES, SPAN, ZERO, read, send_home, write

from megatier.errors import (
    BlockNotFoundError,
)
from megatier.store.store import TieredStore
from megatier.tier import Tier, round_up


class BytesContract(OpenedStore):
    """Bytes that were written are read, wherever they lie."""

    def test_lease_new_block_holds_zeros(self, store: TieredStore, tier: Tier) -> None:
        assert torch.equal(read(store, "a", tier), ZERO)
        assert torch.equal(probe(store, "a"), ZERO)

    def test_write_back_brings_bytes_home(self, store: TieredStore, tier: Tier) -> None:
        for seed, key in enumerate(KEYS):
            write(store, key, tier, pattern(seed, NUM_BYTES))
            send_home(store, key)
            assert not store.is_dirty(key)
        for seed, key in enumerate(KEYS):
            assert torch.equal(probe(store, key), pattern(seed, NUM_BYTES))
            assert torch.equal(read(store, key, tier), pattern(seed, NUM_BYTES))

    def test_bytes_written_in_one_tier_are_read_in_the_other(self, store: TieredStore, tier: Tier) -> None:
        write(store, "a", tier, pattern(1, NUM_BYTES))
        send_home(store, "a")
        for other in (Tier.GPU, Tier.RAM):
            assert torch.equal(read(store, "a", other), pattern(1, NUM_BYTES))

    def test_spans_written_apart_make_the_whole(self, store: TieredStore, tier: Tier) -> None:
        expected = pattern(2, NUM_BYTES)
        for start in random.Random(3).sample(range(0, NUM_BYTES, 2 * GRANULE_BYTES), 4):
            span = (start, min(start + 2 * GRANULE_BYTES, NUM_BYTES))
            write(store, "a", tier, expected[slice(*span)], start)
            send_home(store, "a", span)
            if self.home is not tier:
                store.evict("a", tier, None if tier is Tier.GPU else span)
        assert torch.equal(probe(store, "a"), expected)
        assert torch.equal(read(store, "a", tier), expected)

    def test_partial_prefetch_then_lease_of_the_whole_brings_the_rest(self, store: TieredStore, tier: Tier) -> None:
        write(store, "a", tier, pattern(4, NUM_BYTES))
        send_home(store, "a")
        if self.home is not tier:
            store.evict("a", tier)
        store.prefetch("a", tier, SPAN)
        assert torch.equal(read(store, "a", tier), pattern(4, NUM_BYTES))
        assert torch.equal(read(store, "a", tier, SPAN), pattern(4, NUM_BYTES)[slice(*SPAN)])

    def test_lease_fresh_reads_nothing(self, store: TieredStore, tier: Tier) -> None:
        before = store.moved_bytes.copy()
        with store.lease("a", tier, fresh=True) as block:
            block.bytes.copy_(pattern(5, NUM_BYTES))
            store.mark_dirty("a", tier)
        assert store.moved_bytes == before
        send_home(store, "a")
        assert torch.equal(probe(store, "a"), pattern(5, NUM_BYTES))

    def test_prefetch_then_lease_moves_bytes_once(self, store: TieredStore, tier: Tier) -> None:
        for transfer in store.prefetch("a", tier):
            transfer.wait()
        moved = store.moved_bytes.copy()
        assert store.prefetch("a", tier) == []
        with store.lease("a", tier), store.lease("a", tier, SPAN):
            store.prefetch("a", tier, SPAN)
        assert store.moved_bytes == moved
        assert all(size in (NUM_BYTES, round_up(NUM_BYTES)) for size in moved.values())
        logged = store.take_log()
        assert sum(transfer.num_bytes for transfer in logged) == moved.total()
        assert store.take_log() == []

    def test_prefetch_of_more_blocks_than_slots_drops_the_oldest(self, store: TieredStore) -> None:
        for key in KEYS:
            store.prefetch(key, self.away)
        with store.lease("d", self.away), store.lease("c", self.away):
            moved = store.moved_bytes.copy()
        assert store.moved_bytes == moved
        assert self.away not in store.residency("a")

    def test_slot_of_the_block_that_was_not_used_for_longest_is_taken_first(self, store: TieredStore) -> None:
        num_slots = store.usage(self.away)["slots"] // round_up(NUM_BYTES)
        assert 2 <= num_slots < len(KEYS)
        for key in (*KEYS[:num_slots], KEYS[0], KEYS[num_slots]):
            store.lease(key, self.away).release()
        assert self.away in store.residency(KEYS[0]), "used again since"
        assert self.away not in store.residency(KEYS[1])

    def test_scratch_block_lives_while_a_copy_is_resident(self, store: TieredStore) -> None:
        with pytest.raises(BlockNotFoundError, match="lease it fresh"):
            store.lease("scratch", Tier.RAM)
        with store.lease("scratch", Tier.GPU, fresh=True) as block:
            block.bytes.copy_(pattern(9, NUM_BYTES))
            store.mark_dirty("scratch", Tier.GPU)
        transfer = store.write_back("scratch", Tier.GPU)
        assert transfer is not None
        store.evict("scratch", Tier.GPU)
        transfer.wait()
        assert list(store.residency("scratch")) == [Tier.RAM]
        assert torch.equal(read(store, "scratch", Tier.RAM), pattern(9, NUM_BYTES))
        store.evict("scratch", Tier.RAM)
        assert store.residency("scratch") == {}
        with pytest.raises(BlockNotFoundError, match="lease it fresh"):
            store.lease("scratch", Tier.RAM)

    @pytest.mark.parametrize("tier", [Tier.GPU, Tier.RAM])
    def test_scratch_block_without_bytes_is_not_leased_unless_fresh(self, store: TieredStore, tier: Tier) -> None:
        with pytest.raises(BlockNotFoundError, match="no bytes"):
            store.lease("scratch", tier)

    def test_scratch_block_is_never_evicted_to_make_room(self, store: TieredStore) -> None:
        with store.lease("scratch", self.away, fresh=True) as block:
            block.bytes.copy_(pattern(10, NUM_BYTES))
        for key in KEYS:
            store.lease(key, self.away).release()
        assert torch.equal(read(store, "scratch", self.away), pattern(10, NUM_BYTES))
