"""The rest of the host: time inside of nested contexts counts once."""

from __future__ import annotations

import time

import pytest

from megatier.rest import Rest

SECONDS = 0.02


def test_rest_counts_nested_contexts_once_and_ends_with_an_error() -> None:
    rest = Rest()
    began = time.perf_counter_ns()
    with pytest.raises(KeyError), rest:
        with rest:
            time.sleep(SECONDS)
        assert rest.ns == 0
        time.sleep(SECONDS)
        raise KeyError
    assert 2 * SECONDS * 1e9 <= rest.ns <= time.perf_counter_ns() - began
    counted = rest.ns
    time.sleep(SECONDS)
    assert rest.ns == counted
    rest.restart()
    assert rest.ns == 0
