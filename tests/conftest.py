"""Leak checks around every store test, and what store tests look at from outside."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # several at once: torch's threads would only wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A test may take what a test of another room has made.
sys.path.extend(str(room) for room in sorted(Path(__file__).parent.iterdir()) if room.is_dir())

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from warm_python import WarmPython

from megatier import _native
from megatier.drives.blockfile import BlockFiles, FileBatch
from megatier.drives.extent import Extent
from megatier.hardware import scratch_directory
from megatier.store.residency import overlap
from megatier.store.store import TieredStore
from megatier.tier import Tier

pytest.register_assert_rewrite("store_contract")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(scratch_directory()))
"""Parent of every tmp_path: a mount of the NVMe tier may not lie in RAM, and on many machines /tmp does."""


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
"""What tests compile is kept for other test runs, and not in the user's own place."""


def pytest_collection_finish() -> None:
    """What was imported stays, so Python's collector need not look at its 400,000 objects again and again."""
    gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument. Some differ from process to process (gzip notes the time), and workers compare."""
    return argname if isinstance(val, bytes) else None


FAULTS = Path(__file__).parent / "faults"
GRANULE_BYTES = 4096
LEAK_WAIT_S = 2.0
"""A joined thread leaves the process table a moment later."""


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process whose drive misbehaves as FAULT_... say; see faults/shim.c."""
    shim = tmp_path_factory.mktemp("faults") / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, FAULTS / "shim.c", "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(shim)]))}


@pytest.fixture(scope="session")
def python(faulty: dict[str, str]) -> Iterator[WarmPython]:
    """Runs programs in processes of their own, whose drive misbehaves if FAULT_... say so."""
    with WarmPython(faulty) as python:
        yield python


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's graphs and what they save, run by torch's own kernels: nothing to wait for."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["graphs", pytest.param("kernels", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiled runs: the compiler's graphs alone, and with the slow tests its kernels too."""
    if request.param == "graphs":
        request.getfixturevalue("traced")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of this machine, if it has any: a trainer of Hugging Face would take all, each with rows of its own."""
    count = min(1, torch.cuda.device_count())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def compiler_settings() -> Iterator[None]:
    """After a test torch's compiler has its settings of before. They are those of the process, and runs set them."""
    # To import it takes seconds, and no test can set it before.
    if "megatier.compute.compilation" not in sys.modules:
        yield
        return
    found = settings_of_compiler()
    yield
    if settings_of_compiler() != found:
        # Code that was compiled under other settings would be used again.
        torch.compiler.reset()
        for (config, name), value in found.items():
            setattr(sys.modules[config], name, value)


def settings_of_compiler() -> dict[tuple[str, str], Any]:
    """What `Compilation` sets, by module and name."""
    return {
        (config, name): getattr(sys.modules[config], name)
        for config, name in (
            ("torch._functorch.config", "activation_memory_budget"),
            ("torch._inductor.config", "deterministic"),
            ("torch._inductor.config", "joint_custom_post_pass"),
            ("torch._inductor.config", "joint_custom_pre_pass"),
            ("torch._dynamo.config", "recompile_limit"),
            ("torch._dynamo.config", "accumulated_recompile_limit"),
        )
    }


def open_files() -> list[str]:
    """What every descriptor of this process points to."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # the descriptor of the listing itself
            continue
    return sorted(targets)


def threads() -> set[str]:
    """Every thread of this process, native ones too."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


@pytest.fixture(scope="session")
def torch_threads() -> None:
    """Torch starts its own threads at the first large operation and, with a GPU, at the first backward; they stay."""
    torch.rand(1 << 20, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True, scope="session")
def nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `megatier bench` measured on this machine changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of the store, the drives or the schedule no thread and no open file is left."""
    if not request.path.name.startswith(
        ("test_store_", "test_drives_", "test_schedule_")
    ) or request.node.get_closest_marker("gpu"):
        yield
        return
    request.getfixturevalue("torch_threads")
    # Less may be open afterwards than before: what an earlier test left to the garbage collector may go in between.
    files, tasks, names = Counter(open_files()), threads(), {thread.name for thread in threading.enumerate()}
    yield
    deadline = time.monotonic() + LEAK_WAIT_S
    while (threads() - tasks or Counter(open_files()) - files) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not {thread.name for thread in threading.enumerate()} - names
    assert not Counter(open_files()) - files
    assert not threads() - tasks


def pattern(seed: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] that depends on the seed alone."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def granule_checksums(region: torch.Tensor, granule_bytes: int) -> npt.NDArray[np.uint32]:
    """The C code's, of each granule of uint8 [n] on the CPU; the last may be shorter."""
    sizes = [(start, min(granule_bytes, region.numel() - start)) for start in range(0, region.numel(), granule_bytes)]
    return np.array([_native.checksum(region.data_ptr() + start, size) for start, size in sizes], dtype=np.uint32)


def probe(store: TieredStore, key: str) -> torch.Tensor:
    """The bytes at a block's home, read around the store: from its file, or by address."""
    block = store._blocks.find(key)
    if block.extent is None:
        copy = next(copy for copy in block.copies if copy.slot is None)
        view = store._copies.view(copy, copy.span)
        if view.is_cuda:
            return view.cpu()
        return torch.frombuffer(bytearray(ctypes.string_at(view.data_ptr(), view.numel())), dtype=torch.uint8)
    assert store.files is not None
    found = bytearray()
    for stripe in block.extent.stripes:
        file = os.open(store.files.paths[stripe.mount], os.O_RDONLY)
        found += os.pread(file, stripe.num_bytes, stripe.file_offset)
        os.close(file)
    return torch.frombuffer(found, dtype=torch.uint8)[: block.spec.num_bytes]


def check_invariants(store: TieredStore) -> None:
    """What holds at any moment of any store, whatever was done to it."""
    with store._copies.lock:
        copies = [copy for block in store._blocks.by_key.values() for copy in block.copies]
        slotted = [copy for copy in copies if copy.slot is not None]
        assert set(slotted) == set(store._copies._slotted)
        assert len({id(copy.slot) for copy in slotted}) == len(slotted), "a slot has two occupants"
        for pool in store._reservation._pools.values():
            taken = [copy.slot for copy in slotted if copy.slot is not None and copy.slot.pool is pool]
            assert len(taken) + pool.num_free == pool.num_slots, "a slot was lost, or given back twice"
            assert not set(taken) & set(pool._free)
        for copy in copies:
            assert copy.num_leases >= 0
            assert not (copy.num_leases and copy.is_leaving)
            assert copy.slot is None or copy.span[1] - copy.span[0] <= copy.slot.num_bytes
            for marks in (copy.fills, copy.unwritten):
                assert all(copy.holds(span) for span in marks)
                assert disjoint(list(marks))
        for block in store._blocks.by_key.values():
            for tier in (Tier.GPU, Tier.RAM):
                assert disjoint([copy.span for copy in block.on(tier)])
            unsafe = [span for copy in block.copies for span in copy.unwritten if copy.unsafe(span)]
            assert disjoint(unsafe), "two tiers claim the newest bytes"
            if block.spec.home is not None:
                valid = [span for spans in block.residency().values() for span in spans]
                arriving = [span for copy in block.copies for span in copy.fills]
                assert not missing(block.whole, valid + arriving), "bytes are nowhere"
    for tier in (Tier.GPU, Tier.RAM):
        usage = store.usage(tier)
        assert sum(size for name, size in usage.items() if name != "budget") <= usage["budget"]


def disjoint(spans: list[tuple[int, int]]) -> bool:
    """True when no two spans share a byte."""
    return not any(overlap(a, b) for i, a in enumerate(spans) for b in spans[i + 1 :])


def missing(whole: tuple[int, int], spans: list[tuple[int, int]]) -> int:
    """Bytes of `whole` in none of the spans."""
    covered = np.zeros(whole[1], dtype=bool)
    for start, stop in spans:
        covered[start:stop] = True
    return int((~covered).sum())


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A drive whose reads end late."""

    class Late:
        def __init__(self, batch: FileBatch) -> None:
            self.batch, self.end = batch, time.monotonic() + seconds

        def wait(self) -> None:
            time.sleep(max(0.0, self.end - time.monotonic()))
            self.batch.wait()

        def done(self) -> bool:
            return time.monotonic() >= self.end and self.batch.done()

        def span_ns(self) -> tuple[int, int]:
            start, _ = self.batch.span_ns()
            return start, start + int(seconds * 1e9)

    real = BlockFiles.read

    def read(self: BlockFiles, key: str, extent: Extent, start: int, stop: int, address: int) -> Late:
        return Late(real(self, key, extent, start, stop, address))

    monkeypatch.setattr(BlockFiles, "read", read)


def held_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A drive whose reads end when the event is set."""
    ended = threading.Event()

    class Held:
        def __init__(self, batch: FileBatch) -> None:
            self.batch = batch

        def wait(self) -> None:
            ended.wait()
            self.batch.wait()

        def done(self) -> bool:
            return ended.is_set() and self.batch.done()

        def span_ns(self) -> tuple[int, int]:
            return self.batch.span_ns()

    real = BlockFiles.read

    def read(self: BlockFiles, key: str, extent: Extent, start: int, stop: int, address: int) -> Held:
        return Held(real(self, key, extent, start, stop, address))

    monkeypatch.setattr(BlockFiles, "read", read)
    return ended
