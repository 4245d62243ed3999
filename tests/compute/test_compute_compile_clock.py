"""The clock of torch's compiler: what is compiled counts once, backwards too, and whoever computes waits meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_commands import command, metrics
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from megatier.cli import main
from megatier.compute.compilation import Compilation
from megatier.compute.compile_clock import CLOCK, CompileClock
from megatier.trace.events import COMPILER, TraceEvent, account, own_seconds

LATE_S = 0.2
"""What the compiler of these tests takes for each graph."""
pytestmark = pytest.mark.usefixtures("slow_compiler")


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each graph takes as long as a slow compiler does."""

    def late(graph: Any, examples: Any) -> Any:
        time.sleep(LATE_S)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=late, bw_compiler=late)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def doubled(x: Tensor) -> Tensor:
    return (x * x).tanh()


def run(function: Any, length: int) -> None:
    x = torch.ones(2, length, 4, requires_grad=True)
    function(x).sum().backward()


def test_clock_counts_forward_and_backward_once_and_after_the_compiler_was_reset() -> None:
    compiled = Compilation(any_shape=True)(doubled, "doubled")
    waits: list[float] = []

    @contextlib.contextmanager
    def wait() -> Iterator[None]:
        began = time.perf_counter()
        yield
        waits.append(time.perf_counter() - began)

    with CLOCK.pausing(wait):
        for _ in range(2):
            before, waits[:] = CLOCK.seconds, []
            for length in (5, 9, 7):
                run(compiled, length)
            assert sum(waits) == pytest.approx(CLOCK.seconds - before, rel=0.05)
            assert 2 * LATE_S <= sum(waits) < 2 * LATE_S + 10
            before = CLOCK.seconds
            run(compiled, 11)
            assert CLOCK.seconds == before
            torch.compiler.reset()
    before, waits[:] = CLOCK.seconds, []
    run(compiled, 5)
    assert CLOCK.seconds - before >= 2 * LATE_S
    assert not waits


def test_clock_counts_a_compilation_that_fails() -> None:
    clock = CompileClock()
    clock._begin(None)
    clock._end(None)
    first = clock.seconds
    clock._begin(None)
    clock._end(None)
    assert clock.seconds > first > 0


def test_account_leaves_the_compiler_out_of_the_step() -> None:
    def event(lane: str, start_ns: int, end_ns: int, cause: str = "") -> TraceEvent:
        return TraceEvent(lane=lane, name="a", start_ns=start_ns, end_ns=end_ns, cause=cause)

    second = 10**9
    events = [
        event("compute", 0, second),
        event("stall", second, 3 * second, COMPILER),
        event("stall", 3 * second, 4 * second, "ram_to_gpu"),
        event("compute", 4 * second, 5 * second),
    ]
    spent = account(events, 0, 6 * second)
    assert spent.compile_seconds == 2
    assert spent.stall_seconds == {"ram_to_gpu": 1}
    assert spent.compute_seconds == 2
    assert spent.host_seconds == 1
    assert own_seconds(events) == 3


def test_train_compiler_counts_in_no_step_and_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model.compile": True, "train.evaluate_batches": 1, "output.export": False}
    began = time.perf_counter()
    assert main(command(tmp_path, settings)) == 0
    lasted = time.perf_counter() - began

    first, *others = [record for record in metrics(tmp_path) if "loss" in record]
    # Three kinds of modules with a backward, and the loss, which makes its gradients itself.
    assert 5 * LATE_S <= first["compile_seconds"] < lasted
    assert [record["compile_seconds"] for record in others] == [0, 0]
    for record in (first, *others):
        causes = record["compute_seconds"], *record["stall_seconds"].values(), record["host_seconds"]
        assert min(causes) >= 0
        assert sum(causes) == pytest.approx(record["seconds"], rel=1e-6)
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
        assert COMPILER not in record["stall_seconds"]
    assert first["seconds"] + first["compile_seconds"] < lasted
    assert 0 < first["host_busy_seconds"] <= first["seconds"]
    said = capsys.readouterr().out
    assert "compiled for " in said
    assert said.count("  compiled ") == 1
