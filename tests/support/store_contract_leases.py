"""The contract of the tiered store: leases, also those of several threads."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from from_outside import GRANULE_BYTES, check_invariants, pattern, probe
from opened_store import OpenedStore
from store_blocks import KEYS, NUM_BYTES, NUM_GRANULES, ZERO, read, write

from megatier.errors import (
    CapacityError,
    LeaseHeldError,
)
from megatier.store.store import TieredStore
from megatier.tier import Tier, round_up


class LeaseContract(OpenedStore):
    """Leased bytes stay where they are, and two threads agree on them."""

    def test_lease_held_is_never_evicted(self, store: TieredStore) -> None:
        num_slots = store.usage(self.away)["slots"] // round_up(NUM_BYTES)
        leases = [store.lease(key, self.away) for key in KEYS[:num_slots]]
        for seed, lease in enumerate(leases):
            lease.bytes.copy_(pattern(seed, NUM_BYTES))
        with pytest.raises(LeaseHeldError, match="leased"):
            store.evict("a", self.away)
        with pytest.raises(CapacityError, match="slots are leased"):
            store.lease("d", self.away)
        with pytest.raises(CapacityError, match="slots are leased"):
            store.prefetch("d", self.away)
        for seed, lease in enumerate(leases):
            assert torch.equal(lease.bytes.cpu(), pattern(seed, NUM_BYTES))
            lease.release()
        store.lease("d", self.away).release()

    def test_lease_released_twice_asserts_and_leaves_the_other_holder_alone(self, store: TieredStore) -> None:
        first, second = store.lease("a", self.away), store.lease("a", self.away)
        first.release()
        with pytest.raises(AssertionError, match="a was released twice"):
            first.release()
        with pytest.raises(LeaseHeldError):
            store.evict("a", self.away)
        second.release()
        store.evict("a", self.away)

    def test_lease_waits_for_a_slot_when_asked(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, gpu_slots=1, ram_slots=1)
        held, got = store.lease("a", self.away), threading.Event()

        def use() -> None:
            with store.lease("b", self.away, wait=True):
                got.set()

        thread = threading.Thread(target=use)
        thread.start()
        assert not got.wait(0.05)
        held.release()
        assert got.wait(10)
        thread.join()
        check_invariants(store)
        store.close()

    def test_lease_by_two_threads_at_once_makes_one_copy(self, tmp_path: Path) -> None:
        store = self.open(tmp_path, gpu_slots=1, ram_slots=1)
        held, barrier = store.lease("a", self.away), threading.Barrier(3)

        def use() -> None:
            with store.lease("b", self.away, wait=True):
                barrier.wait(10)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)  # both wait for the slot
        held.release()
        barrier.wait(10)  # both hold the one copy
        for thread in threads:
            thread.join()
        check_invariants(store)
        store.close()

    @pytest.mark.parametrize("seed", range(3))
    def test_random_interleavings_agree_with_a_dictionary(self, tmp_path: Path, seed: int) -> None:
        print(f"seed {seed}")  # noqa: T201 - shown when it fails
        store = self.open(tmp_path, ram_slots=4)
        model = dict.fromkeys(KEYS, ZERO)
        keys = {key: threading.Lock() for key in KEYS}
        problems: list[object] = []

        def play(number: int) -> None:
            choose, key = random.Random(1000 * seed + number), ""
            try:
                for _ in range(60):
                    key = choose.choice(KEYS)
                    with keys[key]:
                        self.act(store, model, key, choose)
                    check_invariants(store)
            except Exception as error:
                problems.append((number, key, error))

        threads = [threading.Thread(target=play, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not problems
        for key in KEYS:
            store.settle(key)
            assert not store.is_dirty(key)
            assert torch.equal(probe(store, key), model[key])
        store.close()

    def act(self, store: TieredStore, model: dict[str, torch.Tensor], key: str, choose: random.Random) -> None:
        """One random use of a block that nobody else uses meanwhile; it ends clean, or on its way home."""
        tier = choose.choice([Tier.GPU, Tier.RAM])
        start = choose.randrange(NUM_GRANULES) * GRANULE_BYTES
        span = (start, min(start + choose.randrange(1, 4) * GRANULE_BYTES, NUM_BYTES))
        match choose.randrange(5):
            case 0:
                store.prefetch(key, tier, span, wait=True)
            case 1:
                assert torch.equal(read(store, key, tier), model[key])
            case 2:
                assert torch.equal(read(store, key, tier, span), model[key][slice(*span)])
            case _:
                values = pattern(choose.randrange(1 << 30), span[1] - span[0])
                write(store, key, tier, values, start)
                model[key] = torch.cat([model[key][:start], values, model[key][span[1] :]])
                for step in (Tier.GPU, Tier.RAM) if self.home is Tier.NVME and tier is Tier.GPU else (tier,):
                    store.write_back(key, step, span, wait=True)
                    if self.home is not step and choose.randrange(2):
                        for copy in store._blocks.find(key).on(step):
                            store.evict(key, step, copy.span)
