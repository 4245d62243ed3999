"""Copies of memory that several native threads make together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from block_files import memory

from megatier import _native


@pytest.fixture
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(3, 4)
    yield pool
    pool.close()


@pytest.mark.parametrize("num_bytes", [1, 999, 1000, 1001, 123_457])
@pytest.mark.parametrize("request_bytes", [1000, 1 << 20])
def test_copy_brings_every_byte_and_touches_nothing_else(
    pool: _native.ThreadPool, num_bytes: int, request_bytes: int
) -> None:
    source, target = memory(num_bytes + 20, seed=1), memory(num_bytes + 20, seed=2)
    expected = np.concatenate([target[:10], source[5 : 5 + num_bytes], target[10 + num_bytes :]])
    batch = pool.submit_copy(target.ctypes.data + 10, source.ctypes.data + 5, num_bytes, request_bytes)
    assert batch.wait()
    assert batch.error() is None
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("num_bytes", "request_bytes"), [(0, 10), (10, 0)])
def test_copy_of_nothing_is_refused(pool: _native.ThreadPool, num_bytes: int, request_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        pool.submit_copy(0, 0, num_bytes, request_bytes)
