"""Shared RAM: what ranks bring each other through it, in runs that fit a buffer or do not, and how waits end."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from rank_pool import POOL

from megatier.errors import PeerError, StepAbandonedError
from megatier.ranks import shared_ram
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.ranks.shared_ram import SharedRam, open_shared_ram, why_not_shared
from megatier.ranks.signal_pad import NUMBER_RANGE
from megatier.ranks.signals import HostSignals
from megatier.tier import PAGE_BYTES, SHARED_STAGES, Transport

ROUNDS = 12
SIZES = (64, PAGE_BYTES, PAGE_BYTES + 64, 5 * PAGE_BYTES + 192)
"""Bytes of a shard: parts of a buffer, a buffer, and several."""


def content(rank: int, number: int, num_bytes: int) -> torch.Tensor:
    """What a rank has in a collective."""
    return torch.arange(num_bytes).mul(7).add(50 * rank + number).to(torch.uint8)


def move(ranks: Ranks, number: int, size: int) -> bool:
    """Gather or scatter, and write over what was sent; whether the right bytes came."""
    is_all_gather = number % 2 == 0
    source = content(ranks.rank, number, size if is_all_gather else size * ranks.size)
    target = torch.empty(size * ranks.size, dtype=torch.uint8)
    (ranks.all_gather if is_all_gather else ranks.all_to_all)(target, source)
    source.fill_(255)

    start = 0 if is_all_gather else size * ranks.rank
    expected = [content(rank, number, start + size)[start:] for rank in range(ranks.size)]
    return torch.equal(target, torch.cat(expected))


def count_from(ranks: Ranks, first: int) -> None:
    """Let the numbers of rounds and collectives of all ranks go on from this one."""
    backend = ranks._backend
    assert isinstance(backend, SharedRam) and isinstance(backend._signals, HostSignals)
    backend._round = backend._collective = first
    backend._signals._pad.numbers[ranks.rank] = first % NUMBER_RANGE
    ranks.all_gather_object(0)


def move_in_turn(first: int = 0) -> tuple[str, list[bool], int]:
    """Gather and scatter with delays, by buffers of a page."""
    with joined("cpu") as ranks:
        assert ranks is not None
        ranks.share_ram(PAGE_BYTES)
        count_from(ranks, first)
        chance = random.Random(ranks.rank)
        right = []
        for number in range(ROUNDS):
            time.sleep(chance.choice((0, 0, 0.002)))
            right.append(move(ranks, number, SIZES[number % len(SIZES)]))
        ranks.drop_memory()
        return f"{ranks.transport}{ranks.transport_reason}", right, ranks.moved_bytes["ranks"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_ram_with_delays_brings_each_piece_and_leaves_buffers_until_all_have_read(size: int) -> None:
    moved = (size - 1) * sum(SIZES[number % len(SIZES)] for number in range(ROUNDS))
    assert POOL.run(move_in_turn, size) == [("shared RAM", [True] * ROUNDS, moved)] * size


@pytest.mark.parametrize("first", [2**31 - 9, 2**32 - 9])
def test_shared_ram_brings_each_piece_where_numbers_of_rounds_begin_again(first: int) -> None:
    (_, first_right, _), (_, second_right, _) = POOL.run(move_in_turn, 2, first)
    assert first_right == second_right == [True] * ROUNDS


def give_up() -> str:
    """Give a gather up to which the other rank does not come."""
    with joined("cpu") as ranks:
        assert ranks is not None
        ranks.share_ram(PAGE_BYTES)
        if ranks.rank:
            return ""
        ranks.give_up()
        with pytest.raises(StepAbandonedError) as error:
            move(ranks, 0, 64)
        return str(error.value)


def test_gather_that_a_rank_has_given_up_raises() -> None:
    first, _ = POOL.run(give_up, 2)
    assert "the step was abandoned" in first


def fail_alone() -> str:
    """Fail on one rank while the other waits for it; what ends this rank."""
    try:
        with joined("cpu") as ranks:
            assert ranks is not None
            ranks.share_ram(PAGE_BYTES)
            if ranks.rank == 1:
                int("odd")
            move(ranks, 0, 64)
    except (PeerError, ValueError) as error:
        return str(error)
    return ""


def test_wait_for_a_rank_that_fails_ends_with_its_cause() -> None:
    first, second = POOL.run(fail_alone, 2)
    POOL.close()
    assert "rank 1 on " in first
    assert "'odd'" in first
    assert "'odd'" in second


def share_ram(case: str) -> tuple[str, str, list[bool]]:
    """What moves bytes where RAM cannot be shared, or another way is preferred; and whether it does."""
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        if case == "refused" and ranks.rank == 1:
            patch.setattr("megatier.ranks.shared_memory.mmap.mmap", _refuse)
        if case == "hosts":
            ranks.local_size = 1
        if case == "order" and ranks.rank == 1:
            patch.setattr("megatier.ranks.shared_ram.platform.machine", lambda: "aarch64")
        ranks.share_ram(PAGE_BYTES, prefers=Transport.GLOO if case == "preferred" else None)
        return ranks.transport, ranks.transport_reason, [move(ranks, number, 64) for number in range(2)]


def _refuse(*_: object) -> None:
    raise OSError("no memory to map")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("refused", "no memory to map"),
        ("hosts", "several hosts"),
        ("order", "stores of aarch64 may be seen in another order"),
        ("preferred", "gloo was measured to be faster than shared RAM"),
    ],
)
def test_ranks_that_do_not_share_ram_say_why_and_use_gloo(case: str, why: str) -> None:
    assert POOL.run(share_ram, 2, case) == [("gloo", why, [True, True])] * 2


def test_gpus_share_ram_whatever_the_processor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatier.ranks.shared_ram.platform.machine", lambda: "aarch64")
    assert why_not_shared(is_on_gpu=True) is None


class FakeStream:
    """A stream that does at once what it is asked for."""

    def wait_stream(self, other: object) -> None:
        pass


class FakeEvents:
    """Makes events, and knows how many rounds were asked for at most whose end the host had not seen."""

    def __init__(self) -> None:
        self.open = 0
        self.most = 0

    def __call__(self) -> FakeEvents:
        return self

    def record(self) -> None:
        self.open += 1
        self.most = max(self.most, self.open)

    def synchronize(self) -> None:
        self.open -= 1


class FakeLock:
    """Notes how many pieces are locked, of which none may end within a buffer."""

    def __init__(self, locks: list[str], address: int, pieces: Iterable[tuple[int, int]]) -> None:
        found = list(pieces)
        assert all(stop % PAGE_BYTES == 0 for _, stop in found)
        assert max(stop - start for start, stop in found) <= 2 * PAGE_BYTES
        self.locks = locks
        locks.append(f"lock of {found[-1][1] // PAGE_BYTES} buffers in {len(found)}")

    def close(self) -> None:
        self.locks.append("unlock")


def move_by_streams(refused: str) -> tuple[str, list[bool], int, list[str]]:
    """What GPUs do, with streams of the host: whether bytes are right, the most rounds at once, and what was locked."""
    events = FakeEvents()
    locks: list[str] = []
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        right = refused != "trial" or ranks.rank == 0
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", FakeStream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", events)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(shared_ram, "StreamSignals", HostSignals)
        refuses_lock = refused == "lock" and ranks.rank == 1
        patch.setattr(shared_ram, "PageLock", (lambda *_: _refuse()) if refuses_lock else partial(FakeLock, locks))
        patch.setattr(shared_ram, "LOCKED_BYTES", 2 * PAGE_BYTES)
        patch.setattr(SharedRam, "try_out", lambda *_: None if right else _refuse())
        try:
            ranks._backend = open_shared_ram(ranks, PAGE_BYTES, lambda _: None, device="cuda")
        except OSError as error:
            return str(error), [], 0, locks
        found = [move(ranks, number, SIZES[number % len(SIZES)]) for number in range(ROUNDS)]
        ranks.drop_memory()
        return "", found, events.most, locks


def test_gpus_are_asked_for_few_rounds_at_a_time() -> None:
    lock = f"lock of {3 * SHARED_STAGES} buffers in {-(-3 * SHARED_STAGES // 2)}"
    expected = "", [True] * ROUNDS, SHARED_STAGES, [lock, "unlock"]
    assert POOL.run(move_by_streams, 3, "nothing") == [expected] * 3


def test_trial_that_fails_on_one_gpu_gives_memory_back_on_all() -> None:
    for found in POOL.run(move_by_streams, 2, "trial"):
        assert found == (
            "no memory to map",
            [],
            0,
            [f"lock of {2 * SHARED_STAGES} buffers in {SHARED_STAGES}", "unlock"],
        )


def test_lock_that_one_gpu_is_refused_gives_memory_back_on_all() -> None:
    (said, _, _, locks), (refused, _, _, none) = POOL.run(move_by_streams, 2, "lock")
    assert said == refused == "no memory to map"
    assert locks == [f"lock of {2 * SHARED_STAGES} buffers in {SHARED_STAGES}", "unlock"]
    assert none == []


def move_between_gpus(buffer_bytes: int) -> tuple[str, list[bool]]:
    """Gather and scatter between GPUs through shared RAM, as often as buffers are used again and again."""
    with joined("cuda") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        patch.setenv("NCCL_P2P_DISABLE", "1")
        memory = ranks.allocate_gpu_tier(1 << 20, buffer_bytes)
        found = []
        for number in range(ROUNDS):
            size = 16 * SIZES[number % len(SIZES)]
            is_all_gather = number % 2 == 0
            source = memory[: size if is_all_gather else size * ranks.size]
            source.copy_(content(ranks.rank, number, len(source)))
            target = torch.empty(size * ranks.size, dtype=torch.uint8, device="cuda")
            (ranks.all_gather if is_all_gather else ranks.all_to_all)(target, source)
            source.fill_(255)
            start = 0 if is_all_gather else size * ranks.rank
            expected = [content(rank, number, start + size)[start:] for rank in range(ranks.size)]
            found.append(torch.equal(target.cpu(), torch.cat(expected)))
        ranks.drop_memory()
        return ranks.transport, found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("buffer_bytes", [PAGE_BYTES, 1 << 20])
def test_gpus_bring_each_other_right_bytes_through_shared_ram(buffer_bytes: int) -> None:
    assert POOL.run(move_between_gpus, 2, buffer_bytes) == [(Transport.RAM, [True] * ROUNDS)] * 2
