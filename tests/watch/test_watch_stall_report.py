"""The report of a run in which nothing moves on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from stalled_scene import Scene, stalled_scene

from megatier.watch.stall_report import QUEUES_TITLE, SHOWN_MAX, describe_stall


@pytest.fixture
def scene() -> Iterator[Scene]:
    with stalled_scene() as scene:
        yield scene


def test_report_says_what_each_queue_is_at_and_what_it_waits_for(scene: Scene) -> None:
    source, target = scene.queues
    moves = [source.submit(f"block{number}", 1, lambda: scene.move) for number in range(SHOWN_MAX + 2)]
    assert moves[-1].has_started(60)
    waiting = target.submit("unit1/weight", 1, lambda: None, requires=moves[:1], follows=moves[1:2])
    target.submit("unit2/weight", 1, lambda: None)
    while target.state().current is None:
        assert not waiting.has_started(0.001)
    thread = threading.Thread(target=scene.player.gate.wait_for, args=(2,), name="somebody")
    thread.start()
    while not scene.player.gate.wanted:
        assert not waiting.has_started(0.001)
    lines = re.sub(r"for \d+ s", "for N s", describe_stall(scene.player, 7.0)).splitlines()
    scene.player.gate.open_to(2)
    thread.join()
    flying = [f"    in flight: source block{number}, for N s" for number in range(SHOWN_MAX)]
    assert lines[: lines.index("") + 7 + SHOWN_MAX] == [
        "megatier: nothing has moved on for N s",
        "",
        QUEUES_TITLE,
        f"  source: idle, after {SHOWN_MAX + 2} items",
        *flying,
        "    in flight: 2 more",
        "  target: at unit1/weight (slot) for N s; 1 wait behind it",
        "    after source block0, for N s",
        "    behind source block1, for N s",
    ]
    assert "compute: 1 accesses begun, the last is unit0 (forward, group 0); 0 are over" in lines
    assert "  the gate: somebody waits for the end of access 2, unit1 (forward, group 0)" in lines
    assert "thread megatier-target:" in lines
    assert "thread megatier-source:" not in lines
