"""Readback: what is read is what was computed, and copies of another stream do not wait for it."""

from __future__ import annotations

import threading

import pytest
import torch

from megatier.readback import on_host

CYCLES = 1_000_000_000
"""Half a second of a GPU."""


def test_a_tensor_on_the_cpu_is_read_as_it_is() -> None:
    assert on_host(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_a_tensor_of_the_gpu_is_read_once_compute_has_made_it() -> None:
    made = torch.zeros(3, device="cuda")
    torch.cuda._sleep(CYCLES // 10)
    made += 1
    assert on_host(made).tolist() == [1, 1, 1]


@pytest.mark.gpu
def test_a_copy_of_another_stream_does_not_wait_for_a_result_that_is_read() -> None:
    result = torch.zeros(1, device="cuda")
    leaving = torch.ones(1 << 20, device="cuda")
    home = torch.empty(1 << 20, pin_memory=True)
    apart = torch.cuda.Stream()
    torch.cuda.synchronize()

    # Another thread reads what this stream makes after a long time. Meanwhile a tensor leaves on a stream of its own.
    compute = torch.cuda.current_stream()
    torch.cuda._sleep(CYCLES)
    result += 1
    is_reading = threading.Event()

    def read() -> float:
        with torch.cuda.stream(compute):
            is_reading.set()
            return on_host(result).item()

    reader = threading.Thread(target=read)
    reader.start()
    is_reading.wait()
    reader.join(0.05)
    with torch.cuda.stream(apart):
        home.copy_(leaving, non_blocking=True)
        apart.synchronize()

    assert not compute.query(), "the copy was over while compute went on"
    reader.join()
    assert on_host(result).item() == 1
