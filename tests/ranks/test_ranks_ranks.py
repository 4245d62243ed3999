"""What ranks send each other: shards and pieces of gradients."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import POOL

from megatier.errors import ConfigError
from megatier.ranks import peer_copies
from megatier.ranks import ranks as rank_module
from megatier.ranks.peer_copies import PeerCopies
from megatier.ranks.ranks import Ranks, check_groups
from megatier.ranks.rendezvous import joined
from megatier.ranks.signal_pad import SignalPad
from megatier.tier import Transport


def move_bytes() -> tuple[list[int], list[int], int]:
    """What comes of a gather and of a scatter, and the bytes that came from others."""
    with joined("cpu") as ranks:
        assert ranks is not None
        own = torch.tensor([10 * ranks.rank, 10 * ranks.rank + 1], dtype=torch.uint8)
        whole = torch.empty(2 * ranks.size, dtype=torch.uint8)
        ranks.all_gather(whole, own)
        received = torch.empty(ranks.size, dtype=torch.uint8)
        ranks.all_to_all(received, torch.arange(ranks.size, dtype=torch.uint8) + 10 * ranks.rank)
        return whole.tolist(), received.tolist(), ranks.moved_bytes["ranks"]


class SlowGroup:
    """A group of NCCL, whose end takes as long as until all threads have come to it."""

    def __init__(self) -> None:
        self.aborts: list[int] = []

    def abort(self) -> None:
        self.aborts.append(threading.get_ident())
        time.sleep(0.05)


def stop_in_threads() -> int:
    """How often a group is aborted that four threads stop at once."""
    group = SlowGroup()
    barrier = threading.Barrier(4)
    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        patch.setattr(ranks, "_is_nccl", True)
        patch.setattr(ranks, "_data", group)

        def stop() -> None:
            barrier.wait()
            ranks._stop()

        threads = [threading.Thread(target=stop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(group.aborts)


def test_group_that_several_threads_stop_is_aborted_once() -> None:
    assert POOL.run(stop_in_threads, 2) == [1, 1]


def test_gather_has_all_shards_and_scatter_gives_each_rank_its_pieces() -> None:
    whole = [0, 1, 10, 11, 20, 21]
    assert POOL.run(move_bytes, 3) == [(whole, [rank, 10 + rank, 20 + rank], 4 + 2) for rank in range(3)]


class FakeSignals:
    """Signals of a GPU that can be had on some ranks."""

    def __init__(self, pad: SignalPad, check: object) -> None:
        if pad.rank == 1 and os.environ["REFUSED"] == "signals":
            raise OSError("no driver")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeRam:
    """Shared RAM of GPUs."""

    def close(self) -> None:
        pass


def share_memory(refused: str) -> tuple[str, str, int]:
    """What moves bytes if one step of sharing memory is refused, why, and the size of the memory."""

    def open_ram(*_: object, **__: object) -> FakeRam:
        if refused == "signals" and ranks is not None:
            raise OSError("none to share")
        return FakeRam()

    def map_memories(memory: torch.Tensor, group: object) -> list[torch.Tensor]:
        if refused == "views":
            raise RuntimeError("pidfd_getfd: Operation not permitted\nmore of it")
        return [memory, memory]

    with joined("cpu") as ranks, pytest.MonkeyPatch.context() as patch:
        assert ranks is not None
        patch.setenv("REFUSED", refused)
        patch.setattr(rank_module, "why_no_peer_access", lambda *_: None)
        patch.setattr(rank_module, "allocate", lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
        patch.setattr(peer_copies, "StreamSignals", FakeSignals)
        patch.setattr(peer_copies, "map_memories", map_memories)
        patch.setattr(PeerCopies, "try_out", lambda _: refused != "trial" or ranks.rank == 0)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(rank_module, "open_shared_ram", open_ram)
        patch.setattr(ranks, "_is_nccl", True)
        memory = ranks.allocate_gpu_tier(100, 4096, prefers=Transport.KERNELS if refused == "views" else None)
        assert ranks.shared_bytes == memory.numel()
        way = ranks.transport

        # Memory that is lent is nobody's, and is shared again by the way that it had.
        limits: list[int] = []
        patch.setattr(rank_module, "change_limit", limits.append)
        ranks.lend_memory()
        ranks.lend_memory()
        assert (ranks.shared_bytes, ranks._backend, limits) == (0, None, [100])
        memory = ranks.allocate_gpu_tier(100, 4096, prefers=Transport.KERNELS if refused == "views" else None)
        assert (ranks.transport, ranks.shared_bytes) == (way, 100)
        ranks.drop_memory()
        assert ranks.shared_bytes == 0
        patch.undo()
        return ranks.transport, ranks.transport_reason, memory.numel()


@pytest.mark.parametrize(
    ("refused", "way", "why"),
    [
        ("nothing", Transport.COPIES, ""),
        ("trial", Transport.RAM, "a trial of copies between GPUs failed"),
        ("signals", Transport.KERNELS, "no driver; none to share"),
        (
            "views",
            Transport.KERNELS,
            "pidfd_getfd: Operation not permitted; NCCL's kernels were measured to be faster than shared RAM",
        ),
    ],
)
def test_memory_that_cannot_be_shared_on_one_rank_is_read_by_the_next_way_on_all(
    refused: str, way: Transport, why: str
) -> None:
    assert POOL.run(share_memory, 2, refused) == [(way, why, 100)] * 2


def move_bytes_by(port: int) -> tuple[list[int], list[int], int]:
    """The same, by a store that is there already, as that of torchrun is when it starts ranks again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        return move_bytes()


def test_ranks_that_are_started_again_find_each_other_by_the_same_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    for size in (2, 2, 3):
        found = POOL.run(move_bytes_by, size, store.port)
        assert [received for _, received, _ in found] == [[rank + 10 * r for r in range(size)] for rank in range(size)]

        # They are other processes the next time.
        POOL.close()


def test_groups_that_ranks_cannot_share_equally_are_refused_with_the_numbers_that_can() -> None:
    check_groups(6, 3)
    with pytest.raises(ConfigError, match=r"train\.groups is 6, which 4 ranks cannot .* Start 1, 2, 3, 6 of them"):
        check_groups(6, 4)


def test_groups_are_dealt_to_ranks_by_turns() -> None:
    all_ranks: list[Any] = [SimpleNamespace(rank=rank, size=3) for rank in range(3)]
    assert [list(Ranks.own_groups(ranks, 6)) for ranks in all_ranks] == [[0, 3], [1, 4], [2, 5]]
