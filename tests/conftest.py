"""Fixtures of all tests, and the check around those of the store, drives and schedule that nothing is left open."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # several at once: torch's threads would only wait for each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A test may take what a test of another room has made.
sys.path.extend(str(room) for room in sorted(Path(__file__).parent.iterdir()) if room.is_dir())

import pytest
import torch
from from_outside import FAULTS, open_files, threads
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from warm_python import WarmPython

from megatier import durable
from megatier.hardware import scratch_directory

torch.set_num_threads(1)
"""Tiny operations are faster on one thread, and the bits of a test do not depend on how many tests run at once."""

pytest.register_assert_rewrite(
    "plain_ways",
    "store_contract_bytes",
    "store_contract_copies",
    "store_contract_figures",
    "store_contract_leases",
)
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(scratch_directory()))
"""Parent of every tmp_path: a mount of the NVMe tier may not lie in RAM, and on many machines /tmp does."""


if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}_tests"
"""What tests compile is kept for other test runs, and not in the user's own place."""


FIRST = (
    "test_adapters_parameters.py",
    "test_compiled_attention.py",
    "test_compute_open_shapes.py",
    "test_integrations_lengths.py",
    "test_muon.py",
    "test_play_offload.py",
    "test_ranks_checkpoints.py",
    "test_ranks_faults.py",
    "test_ranks_savepoints.py",
    "test_ranks_streamed.py",
    "test_ranks_trainer.py",
    "test_ranks_trainer_rows.py",
    "test_recipes.py",
    "test_soak.py",
    "test_train_numbers.py",
    "test_train_verify.py",
)
"""Files of few tests that take long."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files that several processes take one by one, so that none is left alone with a long one at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        num_tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path.name not in FIRST, -num_tests[item.path]))


def pytest_collection_finish() -> None:
    """What was imported stays, so Python's collector need not look at its 400,000 objects again and again."""
    gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument. Some differ from process to process (gzip notes the time), and workers compare."""
    return argname if isinstance(val, bytes) else None


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


@pytest.fixture
def quick_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of FP8 numbers on a CPU by those of fp32 ones: torch's own take 35 ns for each pair of numbers."""
    real = torch._scaled_mm

    def multiply(left: Tensor, right: Tensor, scale: Tensor, other_scale: Tensor, **options: Any) -> Tensor:
        if left.is_cuda:
            return real(left, right, scale, other_scale, **options)
        assert left.dtype == right.dtype == torch.float8_e4m3fn
        assert left.is_contiguous()
        assert right.t().is_contiguous()
        product = left.float() @ right.float() * (scale * other_scale)
        return product.to(options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", multiply)


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


@pytest.fixture(autouse=True)
def free_kernels() -> Iterator[None]:
    """After a test torch may choose any kernels again. A run asks for deterministic ones, for its whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def no_open_accumulation() -> Iterator[None]:
    """After a test accelerate, whose state is that of the process, is within no accumulation of gradients.

    A Trainer that an error ends within one leaves it so. The optimizer of the next loop with accelerate made no steps.
    """
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].GradientState()._set_sync_gradients(True)


def settings_of_compiler() -> dict[tuple[str, str], Any]:
    """What `Compilation` sets, by module and name."""
    return {
        (config, name): getattr(sys.modules[config], name)
        for config, name in (
            ("torch._functorch.config", "activation_memory_budget"),
            ("torch._functorch.config", "force_non_lazy_backward_lowering"),
            ("torch._inductor.config", "deterministic"),
            ("torch._inductor.config", "joint_custom_post_pass"),
            ("torch._inductor.config", "joint_custom_pre_pass"),
            ("torch._dynamo.config", "recompile_limit"),
            ("torch._dynamo.config", "accumulated_recompile_limit"),
        )
    }


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


@pytest.fixture(autouse=True, scope="session")
def sync_file_system() -> Iterator[Callable[[int, Path], None]]:
    """Nothing waits for the whole drive, where other tests write too: no test looks at it after a loss of power.

    Processes of their own do wait, and so do the tests of `durable`, which take the real call from here.
    """
    real = durable._sync_file_system
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "_sync_file_system", lambda directory, folder: None)
        yield real


@pytest.fixture(autouse=True, scope="session")
def sync_file() -> Iterator[None]:
    """Nor does anything wait for a file, unless it is in a process of its own. A file that is not open is an error."""

    def look(file: int) -> None:
        os.fstat(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", look)
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
