"""What ranks tell each other: records, pieces of different sizes, and errors that all raise."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from rank_pool import POOL

from megatier.errors import CapacityError, MegatierError, TransferError
from megatier.ranks.channel import PIECE_BYTES, Channel
from megatier.ranks.rendezvous import joined

FULL = TransferError("writing", "disk", "/mnt/a", 8, errno.ENOSPC)
NO_ROOM = CapacityError("a checkpoint", 7, 5, "Free space.")


def fail(channel: Channel, errors: dict[int, Exception]) -> object:
    """What a rank raises if some of them fail: its kind, its words and its fields."""
    try:
        with channel.failing_together():
            if channel.rank in errors:
                raise errors[channel.rank]
    except MegatierError as error:
        return type(error), str(error), vars(error), getattr(error, "errno", None)
    return None


def fail_in_turn() -> list[object]:
    with joined("cpu") as ranks:
        assert ranks is not None
        turns: list[dict[int, Exception]] = [{}, {1: FULL}, {0: NO_ROOM, 2: FULL}, {2: ValueError("odd")}]
        return [fail(channel, turn) for channel in (ranks, ranks.beside) for turn in turns]


def test_together_raises_on_all_ranks_the_error_of_the_first_that_failed() -> None:
    full = TransferError, str(FULL), vars(FULL), errno.ENOSPC
    no_room = CapacityError, str(NO_ROOM), vars(NO_ROOM), None
    odd: tuple[object, ...] = MegatierError, "rank 2 failed: ValueError('odd')", {}, None
    assert POOL.run(fail_in_turn, 3) == [2 * [None, full, no_room, odd]] * 3


def refuse() -> int:
    raise NO_ROOM


def ask_first() -> tuple[int, str]:
    with joined("cpu") as ranks:
        assert ranks is not None
        made = ranks.broadcast(lambda: 10 + ranks.rank)
        try:
            ranks.broadcast(refuse)
        except CapacityError as error:
            return made, str(error)
        return made, ""


def test_first_gives_all_ranks_what_the_first_made_or_its_error() -> None:
    assert POOL.run(ask_first, 2) == [(10, str(NO_ROOM))] * 2


def refuse_unpicklable() -> str:
    """What a rank raises when the first one makes something that no other rank can be told."""
    with joined("cpu") as ranks:
        assert ranks is not None
        try:
            ranks.broadcast(lambda: threading.Lock())
        except MegatierError as error:
            return str(error)
        return ""


def test_first_that_makes_what_cannot_be_told_fails_on_all_ranks_alike() -> None:
    (said,) = set(POOL.run(refuse_unpicklable, 2))
    assert said.startswith("rank 0 failed: TypeError(")


def memory(figure: str) -> int:
    """A figure of this process in bytes: VmRSS, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(figure))


def told_images(size: int) -> tuple[int, int]:
    """The bytes that come to this rank, and what memory grows by meanwhile in units of them."""
    with joined("cpu") as ranks:
        assert ranks is not None
        image = torch.full((size if ranks.rank == 0 else 0,), 7, dtype=torch.uint8)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        told = ranks.broadcast(lambda: image.numpy())
        return int(told.sum()), (memory("VmHWM") - before) // size


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel gives no peak of its own")
def test_first_that_tells_many_bytes_takes_memory_for_them_twice_whatever_the_number_of_ranks() -> None:
    """Once as they come, and once as the object. There is more than one piece."""
    size = PIECE_BYTES + 4096
    for total, grown in POOL.run(told_images, 3, size):
        assert (total, grown <= 2) == (7 * size, True)


def all_to_all_floats(table: list[list[int]]) -> list[float]:
    """The numbers that come, where rank r sends table[r][other] times its own number."""
    with joined("cpu") as ranks:
        assert ranks is not None
        given = table[ranks.rank]
        sent = torch.full((sum(given),), float(ranks.rank))
        return ranks.beside.all_to_all_floats(sent, given, [row[ranks.rank] for row in table]).tolist()


def test_exchange_of_pieces_of_different_sizes_brings_each_to_its_rank() -> None:
    table = [[0, 3, 0], [0, 0, 2], [1, 1, 0]]
    assert POOL.run(all_to_all_floats, 3, table) == [[2.0], [0.0, 0.0, 0.0, 2.0], [1.0, 1.0]]
    assert POOL.run(all_to_all_floats, 2, [[0, 0], [0, 0]]) == [[], []]


def talk() -> tuple[list[str], list[bool], list[float], list[int]]:
    with joined("cpu") as ranks:
        assert ranks is not None
        records = ranks.all_gather_object("a" * (1 + 1000 * ranks.rank) if ranks.rank != 1 else None)
        flags = [ranks.any(False), ranks.any(ranks.rank == 2), ranks.any(True)]
        total = ranks.all_gather_tensor(torch.full((ranks.rank,), float(ranks.rank)))
        texts = [record[:2] + str(len(record)) for record in records if record is not None]
        assert [record is None for record in records] == [rank == 1 for rank in range(ranks.size)]
        return texts, flags, total.tolist(), list(ranks.own_groups(6))


def test_records_flags_totals_and_groups_come_in_the_order_of_the_ranks() -> None:
    shared = ["a1", "aa2001"], [False, True, True], [1.0, 2.0, 2.0]
    assert POOL.run(talk, 3) == [(*shared, [rank, rank + 3]) for rank in range(3)]
