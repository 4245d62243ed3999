"""What a store pins under a limit, and what it does with the rest of RAM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from from_outside import pattern
from small_driver import SmallDriver, check_codes_alone

from megatier.errors import PageLockError
from megatier.page_lock import SPARE_PIECES
from megatier.store import staging as staging_module
from megatier.store.reservation import Reservation
from megatier.store.staging import NUM_PIECES, PIECE_BYTES, Staging
from megatier.store.store import TieredStore
from megatier.tier import COPY_QUEUES, PAGE_BYTES, RING_BYTES, BlockSpec, Kind, Tier

MIB = 1 << 20
CLOCK: Any = object()
"""Stands for that of a CUDA device: its times are asked by nobody here."""
STEP = 2 * MIB
PIECES = NUM_PIECES * len(COPY_QUEUES)
HOMES, SLOTS = 40 * MIB, 10 * MIB


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled: a sixteenth of the pieces and steps."""
    monkeypatch.setattr(staging_module, "PIECE_BYTES", MIB)
    monkeypatch.setattr("megatier.page_lock.LOCK_STEP_BYTES", STEP)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_codes_alone(monkeypatch)


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    reservation = Reservation({Tier.RAM: 1 << 30})
    yield reservation
    reservation.close()


def allocate(reservation: Reservation) -> Staging | None:
    reservation.reserve_home(BlockSpec("home", HOMES, Tier.RAM), Tier.RAM)
    reservation.reserve_slots(Tier.RAM, Kind.GRAD, MIB, SLOTS // MIB)
    return reservation.allocate(torch.device("cuda"), CLOCK)


def locked_of(driver: SmallDriver, first: int, end: int) -> int:
    return sum(size for address, size in driver.locked.items() if first <= address < end)


def test_driver_that_takes_all_leaves_nothing_to_rings(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(1 << 30, 1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert allocate(reservation) is None
    assert sum(driver.locked.values()) == HOMES + SLOTS


@pytest.mark.parametrize("most", [32 * MIB, 32 * MIB + PAGE_BYTES, 40 * MIB])
def test_driver_with_a_limit_locks_rings_then_slots_then_homes(
    most: int, reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(1 << 30, most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    staging = allocate(reservation)
    assert staging is not None
    first, end = staging.locked
    slots = reservation.view(Tier.RAM, HOMES, SLOTS)
    assert end == slots.data_ptr() + SLOTS
    assert first <= slots.data_ptr()
    assert locked_of(driver, first, end) == end - first
    assert sum(driver.locked.values()) == end - first + staging.num_bytes
    assert staging.num_bytes == PIECES * MIB
    assert staging.unlocked_bytes == HOMES + SLOTS - (end - first)

    # torch needs some for itself.
    spare = most - sum(driver.locked.values())
    assert SPARE_PIECES * STEP <= spare < (SPARE_PIECES + 1) * STEP
    assert staging.is_locked(slots)
    assert not staging.is_locked(reservation.view(Tier.RAM, 0, HOMES + SLOTS))
    staging.close()
    reservation.close()
    assert not driver.locked


def test_homes_that_compute_waits_for_are_locked_before_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are registered in turns, as the blocks of units are."""
    driver = SmallDriver(1 << 30, 1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    size = 4 * MIB
    kinds = [Kind.WEIGHT, Kind.EXP_AVG, Kind.GRAD, Kind.REMAINDER, Kind.ACTIVATION]
    reservation = Reservation({Tier.RAM: 1 << 30}, None, PIECES * MIB + 7 * size)
    specs = [BlockSpec(f"{kind}{unit}", size, Tier.RAM, kind) for unit in range(2) for kind in kinds]
    offsets = [reservation.reserve_home(spec, Tier.RAM) for spec in specs]
    reservation.reserve_slots(Tier.RAM, Kind.GRAD, size, 1)
    staging = reservation.allocate(torch.device("cuda"), CLOCK)
    assert staging is not None
    views = [reservation.view(Tier.RAM, offset, size) for offset in offsets]
    assert len({view.data_ptr() for view in views}) == len(specs)
    for spec, view in zip(specs, views, strict=True):
        assert staging.is_locked(view) == (spec.kind not in (Kind.EXP_AVG, Kind.REMAINDER)), spec.key
    staging.close()
    reservation.close()


def test_limit_of_the_user_holds_where_the_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SmallDriver(1 << 30, 1 << 30)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    limit = PIECES * MIB * 2 + 12345
    reservation = Reservation({Tier.RAM: 1 << 30}, None, limit)
    staging = allocate(reservation)
    assert staging is not None
    assert limit - PAGE_BYTES < sum(driver.locked.values()) <= limit
    staging.close()
    reservation.close()


def test_driver_that_takes_less_than_the_rings_gets_smaller_ones(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(1 << 30, 5 * MIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    staging = allocate(reservation)
    assert staging is not None
    assert staging.num_bytes == PIECES * MIB // 4
    assert staging.locked[0] == staging.locked[1], "torch needs what is left"
    staging.close()


def test_driver_that_takes_nothing_is_refused_by_its_error_and_nothing_stays(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SmallDriver(1 << 30, 100_000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(PageLockError, match=r"error 2.*ulimit -l"):
        allocate(reservation)
    assert not driver.locked


def test_pieces_of_all_rings_are_as_large_as_a_plan_counts() -> None:
    assert PIECES * PIECE_BYTES == RING_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("locked", [1, 8 * MIB, 24 * MIB])
def test_store_on_a_gpu_brings_right_bytes_through_rings(locked: int) -> None:
    """Copies both ways at once, of blocks that are pinned, that are not, and of one that is in part."""
    size = 3 * MIB + 4097
    with TieredStore.open(gpu=8 * MIB, ram=40 * MIB, device="cuda", locked=locked) as store:
        keys = [f"block{number}" for number in range(12)]
        for key in keys:
            store.register(BlockSpec(key, size, Tier.RAM))
        store.reserve(Tier.GPU, None, size, 2)
        for number, key in enumerate(keys):
            with store.lease(key, Tier.RAM) as block:
                block.bytes.copy_(pattern(number, size))
                store.mark_dirty(key, Tier.RAM)
        for number, key in enumerate(keys * 3):
            with store.lease(key, Tier.GPU, wait=True) as block:
                block.bytes.bitwise_xor_(number)
                store.mark_dirty(key, Tier.GPU)
                store.write_back(key, Tier.GPU)
        for number, key in enumerate(keys):
            store.settle(key)
            with store.lease(key, Tier.RAM) as block:
                keys_of = [place for place in range(36) if place % 12 == number]
                expected = pattern(number, size)
                for place in keys_of:
                    expected.bitwise_xor_(place)
                assert torch.equal(block.bytes, expected), key
        assert store.staging is not None
