"""The contract of the tiered store, inherited by each back end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from from_outside import GRANULE_BYTES, check_invariants, pattern, probe
from store_blocks import KEYS, MIB, NUM_BYTES, NUM_GRANULES, SPAN, ZERO, has_copy, read, send_home, write

from megatier.drives.blockfile import IoOptions
from megatier.drives.io_engine import IoEngine, NativeEngine
from megatier.errors import (
    BlockError,
    BlockNotFoundError,
    CapacityError,
    DirtyBlockError,
    LastCopyError,
    LeaseHeldError,
    RunLockedError,
    SpanError,
)
from megatier.store.store import TieredStore
from megatier.tier import BlockSpec, Kind, Tier, round_up


class StoreContract:
    """What every back end promises. A subclass says where blocks live and which device stands for the GPU."""

    home: Tier
    direct = True
    gpu_direct = False
    engine: Callable[[int], IoEngine] = NativeEngine
    device = "cpu"

    def open(self, directory: Path, *, gpu_slots: int = 2, ram_slots: int = 3) -> TieredStore:
        """Four blocks at home in the tier under test, and one scratch block; few slots elsewhere."""
        size = round_up(NUM_BYTES)
        budgets = {Tier.GPU: gpu_slots * size, Tier.RAM: ram_slots * size}
        if self.home is not Tier.NVME:
            budgets[self.home] += len(KEYS) * size
        options = IoOptions(
            num_threads=2,
            engine=type(self).engine,
            direct=self.direct,
            granule_bytes=GRANULE_BYTES,
            gpu_direct=self.gpu_direct,
        )
        store = TieredStore.open(
            gpu=budgets[Tier.GPU],
            ram=budgets[Tier.RAM],
            nvme=[f"{directory}:1MiB"],
            device=self.device,
            run_id="test",
            options=options,
        )
        for key in KEYS:
            store.register(BlockSpec(key, NUM_BYTES, self.home))
        store.register(BlockSpec("scratch", NUM_BYTES, None))
        store.reserve(Tier.GPU, None, NUM_BYTES, gpu_slots)
        store.reserve(Tier.RAM, None, NUM_BYTES, ram_slots)
        return store

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        store = self.open(tmp_path)
        yield store
        check_invariants(store)
        store.close()
        assert not list(tmp_path.iterdir())

    @pytest.fixture(params=[Tier.RAM, Tier.GPU])
    def tier(self, request: pytest.FixtureRequest) -> Tier:
        """Where the blocks are used."""
        found: Tier = request.param
        return found

    @property
    def away(self) -> Tier:
        """A tier other than home that has slots."""
        return Tier.RAM if self.home is Tier.GPU else Tier.GPU

    # ---- bytes ----

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

    # ---- prefetch ----

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

    # ---- leases ----

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

    # ---- evict, dirty, stale ----

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

    # ---- scratch ----

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

    # ---- names, figures, order ----

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

    # ---- many threads ----

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
