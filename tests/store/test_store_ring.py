"""Rings: right bytes in both directions while the device is late, and what is left of a copy that failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from from_outside import pattern
from slow_device import SlowDevice

from megatier.errors import MegatierError
from megatier.store.ring import Ring
from megatier.store.transfer import Transfer

SIZES = [1, 99, 100, 101, 300, 1050]
"""Bytes of copies; pieces have 100, so that some end with a piece, and some use each piece several times."""
CLOCK: Any = object()
"""Stands for that of a CUDA device: its times are asked by nobody here."""


class Copies:
    """Host copies, which can be held up."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.num = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.go.wait(60)
        self.num += 1
        target.copy_(source)


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture(params=["cpu", "late"])
def ring(request: pytest.FixtureRequest, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """A ring of three pieces where RAM stands for the GPU, and on a device that is late."""
    device = SlowDevice(monkeypatch) if request.param == "late" else None
    ring = Ring("test", list(torch.zeros(3, 100, dtype=torch.uint8)), copies, None if device is None else CLOCK)
    yield ring
    ring.close()
    if device is not None:
        device.close()


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_ring_brings_right_bytes_both_ways_whatever_the_size(ring: Ring) -> None:
    sent = [pattern(number, size) for number, size in enumerate(SIZES)]
    there = [zeros(size) for size in SIZES]
    back = [zeros(size) for size in SIZES]
    for target, source in zip(there, sent, strict=True):
        ring.up(target, source, ())
        source_was = source.clone()
        source.fill_(255)  # all has left RAM by now
        source.copy_(source_was)
    landings = [ring.down(target, source, ()) for target, source in zip(back, there, strict=True)]
    for landing in landings:
        landing.wait()
        assert landing.done()
    assert all(map(torch.equal, back, sent))


def test_source_may_change_as_soon_as_a_copy_up_returns(ring: Ring) -> None:
    there, sources = [], []
    for number in range(6):
        source, target = pattern(number, 250), zeros(250)
        ring.up(target, source, ())
        source.fill_(255)
        there.append(target)
        sources.append(source)
    ring.settle()
    assert all(torch.equal(target, pattern(number, 250)) for number, target in enumerate(there))


def test_landing_waits_for_those_who_still_use_its_target(ring: Ring, copies: Copies) -> None:
    reader = Transfer("other", "key", 100)
    target = zeros(150)
    landing = ring.down(target, pattern(1, 150), [reader])
    assert not landing.done()
    assert not target.any()
    reader.fail(MegatierError("however it ends"))
    landing.wait()
    assert torch.equal(target, pattern(1, 150))


def test_copy_up_waits_for_the_bytes_and_fails_with_their_error(ring: Ring, copies: Copies) -> None:
    brought, lost = Transfer("other", "key", 100), Transfer("other", "key", 100)
    source, target = zeros(100), zeros(100)

    def bring() -> None:
        source.copy_(pattern(3, 100))
        brought.note_start(None, (0, 0))

    threading.Timer(0.05, bring).start()
    ring.up(target, source, [brought])
    ring.settle()
    assert torch.equal(target, pattern(3, 100))
    lost.fail(MegatierError("not there"))
    with pytest.raises(MegatierError, match="not there"):
        ring.up(target, source, [lost])
    assert copies.num == 1


def test_copy_down_waits_for_a_piece_while_the_host_is_slow(ring: Ring, copies: Copies) -> None:
    copies.go.clear()
    target = zeros(1000)
    landings: list[Any] = []
    thread = threading.Thread(target=lambda: landings.append(ring.down(target, pattern(5, 1000), ())))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "there are ten pieces to fill, and three to be had"
    copies.go.set()
    thread.join()
    landings[0].wait()
    assert torch.equal(target, pattern(5, 1000))


@pytest.mark.parametrize("fails_at", [0, 2, 7])
def test_device_that_fails_fails_the_copy_every_time_and_leaves_nothing_under_way(
    fails_at: int, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SlowDevice(monkeypatch, fails_at)
    ring = Ring("test", list(torch.zeros(3, 100, dtype=torch.uint8)), copies, CLOCK)
    target = zeros(1000)
    landing = ring.down(target, pattern(5, 1000), ())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            landing.wait()
    assert landing.done()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ring.up(target, pattern(6, 1000), ())
    ring.close()
    device.close()


def test_close_finishes_copies_that_fly(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(monkeypatch, delay_s=0.02)
    ring = Ring("test", list(torch.zeros(3, 100, dtype=torch.uint8)), copies, CLOCK)
    target = zeros(250)
    landing = ring.down(target, pattern(5, 250), ())
    ring.close()
    assert landing.done()
    assert torch.equal(target, pattern(5, 250))
    device.close()


def test_landing_that_could_not_begin_leaves_none_of_its_pieces_under_way(
    ring: Ring, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third piece cannot be enqueued, while the first two still land."""
    move, moves = ring._move, iter(range(10))

    def refuse(target: torch.Tensor, source: torch.Tensor) -> None:
        if next(moves) == 2:
            raise RuntimeError("CUDA error: out of memory")
        move(target, source)

    monkeypatch.setattr(ring, "_move", refuse)
    target = zeros(1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        ring.down(target, pattern(5, 1000), ())
    assert copies.num == 2, "both have landed"
    target.fill_(9)
    monkeypatch.setattr(ring, "_move", move)
    ring.down(target, pattern(6, 1000), ()).wait()
    assert torch.equal(target, pattern(6, 1000))
