"""The thread pool and block I/O of the native core, on real files, with faults preloaded in fresh processes."""

import errno
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from from_outside import FAULTS

from megatier import _native

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

GRANULE_BYTES = 16384
NUM_BYTES = 16 * GRANULE_BYTES  # as in faults/transfer.py
REQUEST_BYTES = 4 * GRANULE_BYTES
NO_FAILURE = None


def page_aligned(num_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    area = page_aligned(num_bytes)
    area[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return area


def address_of(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@pytest.fixture
def pool() -> Iterator[_native.ThreadPool]:
    pool = _native.ThreadPool(2, 8)
    yield pool
    pool.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "buffered", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


class Work:
    """AdamW over the same small planes again and again: CPU work of any length, one request per repeat.

    For pools of one thread: the repeats overlap.
    """

    def __init__(self, num_elements: int = 1 << 18) -> None:
        self.planes = [np.zeros(num_elements, np.float32) for _ in range(4)]
        self.num_elements = num_elements

    def submit(self, pool: _native.ThreadPool, repeats: int) -> _native.Batch:
        weight, exp_avg, exp_avg_sq, grad = map(address_of, self.planes)
        scalars = (0.9, 0.1, 0.999, 0.001, 1e-8, 1e-3, 1.0, 1.0)
        segments = [(0, self.num_elements, 1.0)] * repeats
        return pool.submit_adamw((weight, 0, exp_avg, exp_avg_sq, grad), False, segments, scalars)


# ---- round trips ----


@pytest.mark.parametrize("request_bytes", [GRANULE_BYTES, 5 * 4096, 1 << 20])
def test_submit_io_direct_round_trip_gives_bytes(pool: _native.ThreadPool, tmp_path: Path, request_bytes: int) -> None:
    source, target = random_bytes(NUM_BYTES), page_aligned(NUM_BYTES)
    checksums = np.zeros(NUM_BYTES // GRANULE_BYTES, np.uint32)
    fds = [open_direct(tmp_path / "a"), open_direct(tmp_path / "b")]
    half = NUM_BYTES // 2
    for write, area in ((True, source), (False, target)):
        segments = [(fds[0], 4096, address_of(area), half), (fds[1], 0, address_of(area) + half, half)]
        batch = pool.submit_io(write, segments, address_of(checksums), GRANULE_BYTES, request_bytes)
        assert batch.wait()
        assert batch.error() is NO_FAILURE
    assert np.array_equal(source, target)
    assert (tmp_path / "a").read_bytes()[4096:] == source[:half].tobytes()
    assert (tmp_path / "b").read_bytes() == source[half:].tobytes()
    for fd in fds:
        os.close(fd)


def test_submit_io_write_stores_checksum_of_each_granule_even_of_ragged_end(pool: _native.ThreadPool, fd: int) -> None:
    num_bytes = 5 * GRANULE_BYTES + 777
    source = random_bytes(num_bytes)
    checksums = np.zeros(6, np.uint32)
    cut = 2 * GRANULE_BYTES
    segments = [(fd, num_bytes, address_of(source), cut), (fd, 0, address_of(source) + cut, num_bytes - cut)]
    batch = pool.submit_io(True, segments, address_of(checksums), GRANULE_BYTES, GRANULE_BYTES)
    assert batch.wait()
    assert batch.error() is NO_FAILURE
    for granule, start in enumerate(range(0, num_bytes, GRANULE_BYTES)):
        length = min(GRANULE_BYTES, num_bytes - start)
        assert checksums[granule] == _native.checksum(address_of(source) + start, length)


def test_submit_io_without_checksums_takes_any_length(pool: _native.ThreadPool, fd: int) -> None:
    source, target = random_bytes(10_001), page_aligned(10_001)
    assert pool.submit_io(True, [(fd, 3, address_of(source), 10_001)], 0, 0, 1000).wait()
    assert pool.submit_io(False, [(fd, 3, address_of(target), 10_001)], 0, 0, 777).wait()
    assert np.array_equal(source, target)


@pytest.mark.parametrize("segments", [[], [(0, 0, 0, 0)]])
def test_submit_io_of_nothing_is_done(pool: _native.ThreadPool, segments: list[tuple[int, int, int, int]]) -> None:
    batch = pool.submit_io(False, segments, 0, 0, 4096)
    assert batch.done()
    assert batch.error() is NO_FAILURE
    assert batch.span_ns()[0] > 0


# ---- failures ----


def test_submit_io_read_of_changed_file_reports_granule(pool: _native.ThreadPool, fd: int) -> None:
    source = random_bytes(NUM_BYTES)
    checksums = np.zeros(NUM_BYTES // GRANULE_BYTES, np.uint32)
    segments = [(fd, 0, address_of(source), NUM_BYTES)]
    assert pool.submit_io(True, segments, address_of(checksums), GRANULE_BYTES, REQUEST_BYTES).wait()
    os.pwrite(fd, bytes([source[3 * GRANULE_BYTES + 5] ^ 1]), 3 * GRANULE_BYTES + 5)
    batch = pool.submit_io(False, segments, address_of(checksums), GRANULE_BYTES, REQUEST_BYTES)
    assert batch.wait()
    found = _native.checksum(address_of(source) + 3 * GRANULE_BYTES, GRANULE_BYTES)
    assert batch.error() == ("checksum", 0, 0, 3 * GRANULE_BYTES, int(checksums[3]), found)


@pytest.mark.parametrize("file_bytes", [0, 3 * 4096, 3 * 4096 + 100, REQUEST_BYTES - 1])
@pytest.mark.parametrize("direct", [False, True])
def test_submit_io_read_of_truncated_file_is_short(
    pool: _native.ThreadPool, tmp_path: Path, file_bytes: int, direct: bool
) -> None:
    path = tmp_path / "truncated"
    path.write_bytes(b"x" * file_bytes)
    fd = open_direct(path) if direct else os.open(path, os.O_RDONLY)
    target = page_aligned(REQUEST_BYTES)
    batch = pool.submit_io(False, [(fd, 0, address_of(target), REQUEST_BYTES)], 0, 0, REQUEST_BYTES)
    assert batch.wait()
    assert batch.error() == ("short", 0, 0, file_bytes, REQUEST_BYTES, file_bytes)
    os.close(fd)


def test_submit_io_on_bad_descriptor_names_errno_and_segment(pool: _native.ThreadPool, fd: int) -> None:
    source = random_bytes(4096)
    batch = pool.submit_io(True, [(fd, 0, address_of(source), 4096), (-1, 8192, address_of(source), 4096)], 0, 0, 4096)
    assert batch.wait()
    assert batch.error() == ("io", errno.EBADF, 1, 8192, 4096, 0)


def test_submit_io_into_unmapped_memory_is_reported(pool: _native.ThreadPool, fd: int) -> None:
    os.ftruncate(fd, 4096)
    batch = pool.submit_io(False, [(fd, 0, 4096, 4096)], 0, 0, 4096)
    assert batch.wait()
    assert batch.error() == ("io", errno.EFAULT, 0, 0, 4096, 0)


def run_transfer(path: Path, environment: dict[str, str], *limits: int) -> dict[str, Any]:
    command = [sys.executable, str(FAULTS / "transfer.py"), str(_native.__file__), str(path), *map(str, limits)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_with_fault(faulty: dict[str, str], path: Path, op: str, kind: str, offset: int = 0) -> dict[str, Any]:
    fault = {"FAULT_PATH": path.name, "FAULT_OP": op, "FAULT_KIND": kind, "FAULT_OFFSET": str(offset)}
    return run_transfer(path, {**faulty, **fault})


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("kind", ["short", "eintr"])
def test_transfer_interrupted_or_short_is_continued(faulty: dict[str, str], tmp_path: Path, op: str, kind: str) -> None:
    assert run_with_fault(faulty, tmp_path / "target", op, kind) == {"write": None, "read": None, "same": True}


@pytest.mark.parametrize(("op", "code"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)], ids=str)
def test_transfer_refused_reports_errno_and_offset(faulty: dict[str, str], tmp_path: Path, op: str, code: int) -> None:
    offset = NUM_BYTES // 2 + REQUEST_BYTES + 4096  # in the second request of the second segment
    report = run_with_fault(faulty, tmp_path / "target", op, str(code), offset)
    assert report[op] == ["io", code, 1, offset, REQUEST_BYTES, 4096]
    assert report["write" if op == "read" else "read"] != report[op]
    assert not report["same"]


def test_transfer_with_flipped_bit_fails_the_checksum(faulty: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "target"
    report = run_with_fault(faulty, path, "read", "flip", 9 * GRANULE_BYTES + 1234)
    what, code, segment, offset, expected, found = report["read"]
    assert (what, code, segment, offset) == ("checksum", 0, 1, 9 * GRANULE_BYTES)
    granule = np.frombuffer(path.read_bytes(), np.uint8)[9 * GRANULE_BYTES : 10 * GRANULE_BYTES].copy()
    assert expected == _native.checksum(address_of(granule), GRANULE_BYTES)
    granule[1234] ^= 4
    assert found == _native.checksum(address_of(granule), GRANULE_BYTES)


def test_transfer_over_file_size_limit_reports_efbig(tmp_path: Path) -> None:
    limit = REQUEST_BYTES + 3 * 4096
    report = run_transfer(tmp_path / "target", dict(os.environ), limit)
    assert report["write"] == ["io", errno.EFBIG, 0, limit, REQUEST_BYTES, 3 * 4096]
    assert report["read"] == ["short", 0, 0, limit, REQUEST_BYTES, 3 * 4096]


# ---- waiting, queueing, closing ----


def test_wait_lets_other_python_threads_run() -> None:
    pool, work, stop, counter = _native.ThreadPool(1, 1000), Work(), threading.Event(), itertools.count()
    thread = threading.Thread(target=lambda: [next(counter) for _ in iter(stop.is_set, True)])
    thread.start()
    batch = work.submit(pool, 100)
    before = next(counter)
    assert batch.wait()
    assert next(counter) - before > 1000
    stop.set()
    thread.join()
    pool.close()


def test_wait_with_timeout_returns_false_until_done() -> None:
    pool, work = _native.ThreadPool(1, 1000), Work()
    start_ns = time.perf_counter_ns()
    batch = work.submit(pool, 200)
    assert not batch.wait(0)
    assert not batch.wait(timeout_s=0.001)
    assert not batch.done()
    assert batch.wait(60.0)
    assert batch.done()
    first_ns, last_ns = batch.span_ns()
    assert start_ns <= first_ns < last_ns <= time.perf_counter_ns()
    pool.close()


@pytest.mark.parametrize(("queue_depth_max", "blocks"), [(2, True), (1000, False)])
def test_submit_blocks_only_while_queue_is_full(queue_depth_max: int, blocks: bool) -> None:
    pool, work = _native.ThreadPool(1, queue_depth_max), Work()
    batch = work.submit(pool, 400)
    submitted_ns = time.perf_counter_ns()
    assert batch.wait()
    start_ns, end_ns = batch.span_ns()
    assert (submitted_ns > (start_ns + end_ns) // 2) is blocks
    pool.close()


def test_close_finishes_what_was_submitted_then_refuses() -> None:
    pool, work = _native.ThreadPool(1, 1000), Work()
    batch = work.submit(pool, 50)
    pool.close()
    assert batch.done()
    with pytest.raises(RuntimeError, match="closed"):
        work.submit(pool, 1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit_io(False, [], 0, 0, 4096)
    pool.close()


def test_close_from_several_threads_lets_blocked_submit_finish() -> None:
    pool, work, batches = _native.ThreadPool(1, 1), Work(), list[_native.Batch]()
    submitter = threading.Thread(target=lambda: batches.append(work.submit(pool, 50)))
    submitter.start()
    time.sleep(0.005)
    closers = [threading.Thread(target=pool.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in (submitter, *closers):
        thread.join(60)
        assert not thread.is_alive()
    assert batches[0].done()


def test_batch_dropped_in_flight_still_runs(fd: int) -> None:
    pool, source = _native.ThreadPool(2, 4), random_bytes(NUM_BYTES)
    pool.submit_io(True, [(fd, 0, address_of(source), NUM_BYTES)], 0, 0, 4096)
    del pool
    assert os.pread(fd, NUM_BYTES, 0) == source.tobytes()


def test_pool_in_forked_child_refuses_and_exits() -> None:
    script = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("megatier._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
pool = native.ThreadPool(2, 2)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    pool.submit_io(False, [], 0, 0, 1)
except RuntimeError:
    sys.exit(7)
"""
    command = [sys.executable, "-c", script, str(_native.__file__)]
    assert subprocess.run(command, timeout=60).returncode == 7


def test_many_batches_from_several_threads_move_the_right_bytes(tmp_path: Path) -> None:
    pool, num_threads, region_granules = _native.ThreadPool(3, 5), 4, 32
    fd = open_direct(tmp_path / "shared")
    problems = list[object]()

    def move(thread: int) -> None:
        choose, base = random.Random(thread), thread * region_granules * GRANULE_BYTES
        expected = np.zeros(region_granules * GRANULE_BYTES, np.uint8)
        checksums, area = np.zeros(region_granules, np.uint32), page_aligned(region_granules * GRANULE_BYTES)
        for turn in range(40):
            first = 0 if turn == 0 else choose.randrange(region_granules)
            stop = region_granules if turn == 0 else choose.randrange(first, region_granules) + 1
            span, address = slice(first * GRANULE_BYTES, stop * GRANULE_BYTES), address_of(area) + first * GRANULE_BYTES
            expected[span] = area[span] = np.frombuffer(choose.randbytes(span.stop - span.start), np.uint8)
            segments = [(fd, base + span.start, address, span.stop - span.start)]
            request_bytes = choose.choice([4096, GRANULE_BYTES, 5 * GRANULE_BYTES])
            written = pool.submit_io(True, segments, address_of(checksums[first:]), GRANULE_BYTES, request_bytes)
            written.wait()
            area[:] = 0
            whole = [(fd, base, address_of(area), len(area))]
            read = pool.submit_io(False, whole, address_of(checksums), GRANULE_BYTES, request_bytes)
            read.wait()
            if written.error() or read.error() or not np.array_equal(area, expected):
                problems.append((thread, turn, written.error(), read.error()))

    threads = [threading.Thread(target=move, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    os.close(fd)
    assert not problems


# ---- arguments ----


@pytest.mark.parametrize(("num_threads", "queue_depth_max"), [(0, 1), (1, 0), (-1, 1), (5000, 1)])
def test_pool_of_impossible_size_is_refused(num_threads: int, queue_depth_max: int) -> None:
    with pytest.raises(ValueError, match="must"):
        _native.ThreadPool(num_threads, queue_depth_max)


@pytest.mark.parametrize(
    ("segments", "checksums", "granule_bytes", "request_bytes", "message"),
    [
        ([(0, 0, 0, 4096)], 0, 0, 0, "request_bytes"),
        ([(0, 0, 0, 4096)], 64, 0, 4096, "positive"),
        ([(0, 0, 0, 4095), (0, 0, 0, 4096)], 64, 4096, 4096, "multiple"),
        ([(0, 0, 0, 4096)], 63, 4096, 4096, "aligned"),
        ([(0, -1, 0, 4096)], 0, 0, 4096, "negative"),
    ],
)
def test_submit_io_of_impossible_request_is_refused(
    pool: _native.ThreadPool,
    segments: list[tuple[int, int, int, int]],
    checksums: int,
    granule_bytes: int,
    request_bytes: int,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        pool.submit_io(False, segments, checksums, granule_bytes, request_bytes)


def test_submit_io_of_something_else_is_a_type_error(pool: _native.ThreadPool) -> None:
    wrong: Any = [[0, 0, 0, 0]]
    with pytest.raises(TypeError):
        pool.submit_io(False, wrong, 0, 0, 4096)
    with pytest.raises(TypeError):
        _native.Batch()


def test_latch_lets_pass_once_it_is_set_and_ever_after() -> None:
    latch, passed = _native.Latch(), list[bool]()
    threads = [threading.Thread(target=lambda: passed.append(latch.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.01)
    assert (latch.is_set(), passed) == (False, [])
    latch.set()
    for thread in threads:
        thread.join(10)
    assert passed == [True] * 3
    latch.set()
    assert latch.wait(0.0)
    assert latch.is_set()


def test_latch_waited_for_is_left_by_an_interrupt_and_works_on() -> None:
    latch, before = _native.Latch(), signal.getsignal(signal.SIGALRM)

    def raise_interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            latch.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    latch.set()
    assert latch.wait()
