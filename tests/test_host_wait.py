"""The waits of the host: time inside of nested contexts counts once."""

from __future__ import annotations

import time

import pytest

from megatier.host_wait import HostWait

SECONDS = 0.02


def test_rest_counts_nested_contexts_once_and_ends_with_an_error() -> None:
    host_wait = HostWait()
    began = time.perf_counter_ns()
    with pytest.raises(KeyError), host_wait:
        with host_wait:
            time.sleep(SECONDS)
        assert host_wait.ns == 0
        time.sleep(SECONDS)
        raise KeyError
    assert 2 * SECONDS * 1e9 <= host_wait.ns <= time.perf_counter_ns() - began
    counted = host_wait.ns
    time.sleep(SECONDS)
    assert host_wait.ns == counted
    host_wait.restart()
    assert host_wait.ns == 0
