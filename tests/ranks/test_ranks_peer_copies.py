"""Copies from other GPUs' memory: what ranks read, in which order, and how a wait for a failed rank ends."""

from __future__ import annotations

import random
import time
import unittest.mock
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_pool import POOL

from megatier.ranks.peer_copies import PeerCopies
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.ranks.shared_memory import share_memory
from megatier.ranks.signal_pad import Signal, SignalPad
from megatier.ranks.signals import HostSignals
from megatier.workers import Workers

MEMORY_BYTES = 4096
SIZE = 3
ROUNDS = 40


class CountingSignals(HostSignals):
    """Signals of the host that say whether a wait has begun."""

    waits = 0

    def wait(self, peer: int, signal: Signal, number: int) -> None:
        self.waits += 1
        super().wait(peer, signal, number)


def opened(ranks: Ranks, folder: Path) -> tuple[PeerCopies, torch.Tensor, CountingSignals]:
    """The peer_copies of this rank by memory of the host, which all ranks map; its own memory, and its signals."""
    names = [str(folder / f"memory {rank}") for rank in range(ranks.size)]
    memories = [torch.from_file(name, shared=True, size=MEMORY_BYTES, dtype=torch.uint8) for name in names]
    pad = SignalPad(share_memory(ranks, SignalPad.num_bytes(ranks.size)), ranks.rank, ranks.size)
    signals = CountingSignals(pad, lambda _: None)
    return PeerCopies(ranks.rank, memories, signals), memories[ranks.rank], signals


def content(rank: int, number: int, num_bytes: int) -> torch.Tensor:
    """What a rank has in a collective."""
    return torch.arange(num_bytes).mul(7).add(50 * rank + number).to(torch.uint8)


def pull_in_turn(folder: Path) -> int:
    """Gather and scatter, with sources at other places on each rank and delays; count what came wrong."""
    wrong = 0
    with joined("cpu") as ranks:
        assert ranks is not None
        peer_copies, memory, _ = opened(ranks, folder)
        chance = random.Random(ranks.rank)
        for number in range(ROUNDS):
            is_all_gather = number % 2 == 0
            size = 96 if is_all_gather else 96 * ranks.size
            first = chance.randrange(MEMORY_BYTES - size)
            time.sleep(chance.choice((0, 0, 0.002)))

            # Each writes over what others may have been reading: this must not begin before they are done.
            source = memory[first : first + size]
            source.copy_(content(ranks.rank, number, size))
            target = torch.empty(96 * ranks.size, dtype=torch.uint8)
            (peer_copies.all_gather if is_all_gather else peer_copies.all_to_all)(target, source)
            memory.fill_(255)

            start = 0 if is_all_gather else 96 * ranks.rank
            expected = [content(rank, number, size)[start : start + 96] for rank in range(ranks.size)]
            wrong += not torch.equal(target, torch.cat(expected))
    return wrong


def test_copies_with_delays_bring_each_piece_and_leave_sources_until_all_have_them(tmp_path: Path) -> None:
    assert POOL.run(pull_in_turn, SIZE, tmp_path) == [0] * SIZE


def wait_for_nobody(folder: Path) -> bool:
    """Wait for a rank that never comes, and end it by `abort`; return whether the wait had begun before."""
    with joined("cpu") as ranks:
        assert ranks is not None
        _, memory, signals = opened(ranks, folder)
        if ranks.rank:
            return True

        peer_copies = PeerCopies(0, [memory] * ranks.size, signals)
        with (
            closing(Workers(1, "abort")) as workers,
            unittest.mock.patch.object(signals, "exchange_offsets", lambda *_: [0, 0]),
        ):
            workers.submit(partial(abort_later, peer_copies, signals))
            peer_copies.all_gather(torch.empty(64 * ranks.size, dtype=torch.uint8), memory[:64])
        return signals.waits > 0


def abort_later(peer_copies: PeerCopies, signals: CountingSignals) -> None:
    """Release the waits once one of them has begun."""
    while not signals.waits:
        time.sleep(0.001)
    peer_copies.abort()


def test_abort_ends_waits_for_a_rank_that_does_not_come(tmp_path: Path) -> None:
    assert POOL.run(wait_for_nobody, 2, tmp_path) == [True, True]


def test_source_outside_of_the_shared_memory_is_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    peer_copies = PeerCopies(0, [memory], HostSignals(SignalPad(bytearray(256), 0, 1), lambda _: None))
    with pytest.raises(AssertionError, match="others cannot see"):
        peer_copies.all_gather(torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8))
