"""Memory of the gpu tier that is lent: its bytes are the same afterwards, whatever happened meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from store_blocks import KEYS, NUM_BYTES, read, write

from megatier.errors import CapacityError, DirtyBlockError, LeaseHeldError
from megatier.store import loan as loan_room
from megatier.store.arena import Arena
from megatier.store.store import TieredStore
from megatier.store.transfer import Completion, Transfer
from megatier.tier import PAGE_BYTES, BlockSpec, Kind, Tier, round_up

BLOCKS: dict[str, tuple[Tier, Kind]] = {
    "a": (Tier.GPU, Kind.WEIGHT),
    "b": (Tier.GPU, Kind.EXP_AVG),
    "c": (Tier.RAM, Kind.WEIGHT),
    "d": (Tier.NVME, Kind.WEIGHT),
}
GRADIENT = "gradient"


ON_GPU = [pytest.param(("cuda", locked), marks=pytest.mark.gpu) for locked in (None, 1)]


@pytest.fixture(params=[("cpu", None), ("cpu", 1), *ON_GPU], ids=["cpu", "cpu-rings", "cuda", "cuda-rings"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredStore]:
    """Blocks with numbers of their own in all tiers, and slots through which those of RAM and NVMe pass.

    In RAM they are pinned, or pass through rings.
    """
    size = round_up(NUM_BYTES)
    device, locked = request.param
    mount = f"{tmp_path}:8MiB"
    with TieredStore.open(gpu=6 * size, ram=4 * size, nvme=mount, device=device, locked=locked) as opened:
        for key, (home, kind) in BLOCKS.items():
            opened.register(BlockSpec(key, NUM_BYTES, home, kind))
        opened.register(BlockSpec(GRADIENT, NUM_BYTES, Tier.GPU, Kind.GRAD))
        for number, (key, (home, _)) in enumerate(BLOCKS.items()):
            write(opened, key, Tier.GPU if home is Tier.GPU else Tier.RAM, numbers(number))
        opened.write_back("d", Tier.RAM)
        opened.settle("d")
        yield opened


def numbers(seed: int) -> torch.Tensor:
    return torch.randint(256, (NUM_BYTES,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def check_bytes(store: TieredStore) -> None:
    """All bytes are those that were written, seen on the GPU."""
    for number, key in enumerate(KEYS):
        assert torch.equal(read(store, key, Tier.GPU), numbers(number))


def test_bytes_of_all_tiers_are_the_same_after_the_memory_was_lent(store: TieredStore) -> None:
    check_bytes(store)
    for _ in range(2):
        moved = store.moved_bytes
        store.loan.lend()
        assert store.loan.is_lent
        for number in (0, 1):
            assert torch.equal(store.loan.saved(KEYS[number])[:NUM_BYTES], numbers(number))
        assert torch.equal(read(store, "d", Tier.RAM), numbers(3)), "other tiers go on"
        store.loan.take_back()
        store.loan.take_back()
        assert store.moved_bytes["state_to_ram"] == moved["state_to_ram"], "no step has asked for it"
        check_bytes(store)


def test_memory_that_is_lent_is_the_systems(store: TieredStore) -> None:
    arena = store._reservation._arenas[Tier.GPU]
    view = arena.view(0, 8)
    store.loan.lend()
    if store.device.type == "cuda":
        assert arena.bytes.untyped_storage().nbytes() == 0
    else:
        assert not arena.bytes.any(), "the kernel has taken its pages"
    with pytest.raises(AssertionError):
        store.lease("a", Tier.GPU)
    store.loan.take_back()
    assert torch.equal(view.cpu(), numbers(0)[:8]), "views see the new memory"


def test_an_arena_that_is_lent_gives_its_pages_back_and_takes_new_ones() -> None:
    num_bytes = 64 << 20
    process = psutil.Process()
    arena = Arena(num_bytes, torch.device("cpu"))
    arena.bytes.fill_(1)
    before = process.memory_info().rss
    arena.lend()
    assert before - process.memory_info().rss > num_bytes // 2
    arena.take_back()
    arena.bytes.fill_(2)
    assert process.memory_info().rss > before - num_bytes // 2


def test_memory_that_other_gpus_could_read_is_allocated_anew_with_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    num_allocated = 0

    def allocate(num_bytes: int) -> torch.Tensor:
        nonlocal num_allocated
        num_allocated += 1
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))  # like that memory, it cannot be resized

    arena = Arena(PAGE_BYTES, torch.device("cuda"), allocate=allocate)
    for number in (1, 2, 3):
        arena.view(0, 8).fill_(number)
        assert arena.bytes.numel() == PAGE_BYTES
        arena.lend()
        assert arena.bytes.numel() == 0, "nothing holds it any more"
        arena.take_back()
        assert num_allocated == number + 1
        assert not arena.view(0, PAGE_BYTES).any()


def test_ram_without_room_refuses_before_anything_is_changed(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loan_room, "ram_available_bytes", lambda: NUM_BYTES)
        with pytest.raises(CapacityError, match=r"state in RAM while its memory is lent.*Lower tiers\.gpu"):
            store.loan.lend()
    assert not store.loan.is_lent
    check_bytes(store)


def test_bytes_in_use_or_not_home_refuse_to_be_lent(store: TieredStore) -> None:
    with store.lease("c", Tier.GPU), pytest.raises(LeaseHeldError):
        store.loan.lend()
    write(store, "c", Tier.GPU, numbers(2))
    with pytest.raises(DirtyBlockError):
        store.loan.lend()
    store.write_back("c", Tier.GPU)
    store.settle("c")
    store.loan.lend()
    store.loan.take_back()
    check_bytes(store)


@pytest.mark.parametrize("at", ["lend", "take_back"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CapacityError("gpu", 1, 0, "Others have it.")])
def test_what_ends_lending_early_loses_no_byte(
    at: str, after: bool, error: BaseException, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(Arena, at)

    def failing(arena: Arena) -> None:
        if after:
            plain(arena)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Arena, at, failing)
        with pytest.raises((KeyboardInterrupt, CapacityError)):
            store.loan.lend()
            store.loan.take_back()
    assert store.loan.is_lent
    store.loan.take_back()
    check_bytes(store)


@pytest.mark.parametrize("to_ram", [True, False])
def test_an_interrupt_while_state_moves_loses_no_byte(
    to_ram: bool, store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = store._queues.copy
    calls = []

    def interrupted(
        queue: str, target: torch.Tensor, source: torch.Tensor, users: Sequence[Transfer] = ()
    ) -> Completion | None:
        calls.append(queue)
        if len(calls) == (2 if to_ram else 4):
            raise SystemExit
        return copy(queue, target, source, users)

    monkeypatch.setattr(store._queues, "copy", interrupted)
    with pytest.raises(Exception, match="SystemExit"):
        store.loan.lend()
        store.loan.take_back()
    assert store.loan.is_lent != to_ram
    store.loan.lend() if to_ram else None
    store.loan.take_back()
    check_bytes(store)
