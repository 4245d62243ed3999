"""Where the time of a step goes: compute, waits by cause, and the host add up to all of it, in every mode.

A wait that nobody counts would be the host's. So here every latch and every move that the training thread waits for in
a step is timed, which no load of the machine disturbs, and the stalls on record have to be as long as that. Only where
workers share the thread's own work, such as the squares of a gradient on the CPU, waiting for them is work too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_reads import slow_reads
from small_commands import IMMEDIATE, command, metrics

from megatier import _native
from megatier.cli import main
from megatier.engine.step import Engine
from megatier.store.transfer import Transfer
from megatier.workers import Workers

LATE_S = 0.01
"""What each read of a slow drive takes longer, so that there are waits in each step."""
SHORT_S = 0.001
"""Waits shorter than this may be left to the host."""
ON_NVME: dict[str, Any] = {"tiers.state": "nvme", "tiers.gpu": "512KiB", "tiers.ram": None}
MODES: dict[str, dict[str, Any]] = {
    "immediate": IMMEDIATE,
    "immediate_in_groups": {**IMMEDIATE, "train.groups": 2},
    "deferred_in_groups": {"train.groups": 2},
    "offloaded": {"train.activations": "offload"},
    "savepoints": {"output.savepoint_every": 1, "tiers.generations": 2, "train.evaluate_every": 1},
}


class Watch:
    """Times what one thread waits for while steps run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_on = False
        self._depth = 0
        self._thread = threading.get_ident()

    def around(self, wait: Callable[..., Any], is_over: Callable[..., bool]) -> Callable[..., Any]:
        """A call that waits, timed. `is_over` takes its first arguments, and tells whether it would return at once."""

        def timed(*words: Any) -> Any:
            # A busy machine may stop a thread between any two statements, also where nothing is waited for.
            if not self.is_on or threading.get_ident() != self._thread or 0.0 in words or is_over(*words[:1]):
                return wait(*words)
            self._depth += 1
            began = time.perf_counter()
            try:
                return wait(*words)
            finally:
                self._depth -= 1
                lasted = time.perf_counter() - began
                if not self._depth and lasted >= SHORT_S:
                    self.seconds += lasted

        return timed

    def sharing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Work of the caller that others share, in which nothing is timed."""

        def shared(*words: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*words)
            self._depth += 1
            try:
                return work(*words)
            finally:
                self._depth -= 1

        return shared


class TimedLatch:
    """A native latch whose waits are timed."""

    watch: Watch

    def __init__(self) -> None:
        latch = self.real()
        self.set, self.is_set = latch.set, latch.is_set
        self.wait = self.watch.around(latch.wait, lambda *_: latch.is_set())

    real = _native.Latch


@pytest.mark.parametrize("mode", MODES)
def test_account_of_a_step_adds_up_and_has_all_that_training_waited_for(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = TimedLatch.watch = Watch()
    step = Engine.train_step

    def train_step(*words: Any) -> Any:
        watch.is_on = True
        try:
            return step(*words)
        finally:
            watch.is_on = False

    slow_reads(monkeypatch, LATE_S)
    monkeypatch.setattr(Engine, "train_step", train_step)
    monkeypatch.setattr(_native, "Latch", TimedLatch)
    monkeypatch.setattr(Workers, "map", watch.sharing(Workers.map))
    monkeypatch.setattr(Transfer, "wait", watch.around(Transfer.wait, Transfer.done))
    settings = {**ON_NVME, "tiers.nvme": f"{tmp_path}:16MiB", "output.export": False, **MODES[mode]}
    assert main(command(tmp_path, settings)) == 0

    records = [record for record in metrics(tmp_path) if "host_seconds" in record]
    assert {"loss", "heldout_loss"} <= {name for record in records for name in record}
    for record in records:
        causes = record["compute_seconds"], *record["stall_seconds"].values(), record["host_seconds"]
        assert min(causes) >= 0
        assert sum(causes) == pytest.approx(record["seconds"], rel=1e-6)
    steps = [record for record in records if "loss" in record]
    assert all(0 < step["host_busy_seconds"] <= step["seconds"] for step in steps)
    assert sum(step["seconds"] - step["host_busy_seconds"] for step in steps) > 3 * LATE_S
    waited = sum(sum(record["stall_seconds"].values()) for record in records if "loss" in record)
    assert waited >= 0.99 * watch.seconds > 3 * LATE_S
