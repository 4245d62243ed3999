from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatier import hardware

LARGE = 1 << 60


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def test_ram_available_without_cgroup_is_the_machines(tmp_path: Path) -> None:
    available = hardware.ram_available_bytes(tmp_path)
    assert available == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert hardware.ram_limit_bytes(tmp_path) is None


def test_ram_available_cgroup_v2_counts_tightest_group_and_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/outer/inner"
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "5000\n",
        "sys/fs/cgroup/outer/memory.max": "10000000\n",
        "sys/fs/cgroup/outer/memory.current": "4000000\n",
        "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 1500000\n",
    }
    root = write(tmp_path, files)
    assert hardware.ram_available_bytes(root) == 7_500_000
    assert hardware.ram_limit_bytes(root) == hardware.ram_total_bytes(root) == 10_000_000


def test_ram_available_cgroup_v1_of_a_container_reads_its_root(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
        f"{group}/memory.limit_in_bytes": "8000000",
        f"{group}/memory.usage_in_bytes": "3000000",
        f"{group}/memory.stat": "total_inactive_file 1000000",
    }
    assert hardware.ram_available_bytes(write(tmp_path, files)) == 6_000_000


def test_ram_available_over_limit_is_zero(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100",
        "sys/fs/cgroup/memory.current": "200",
    }
    assert hardware.ram_available_bytes(write(tmp_path, files)) == 0


def test_ram_limit_unlimited_v1_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(LARGE),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    }
    assert hardware.ram_limit_bytes(write(tmp_path, files)) is None


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 64)])
def test_cores_usable_cgroup_v2_quota_cuts(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": quota + "\n"}
    assert hardware.cores_usable(write(tmp_path, files)) == cores


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 64)])
def test_cores_usable_cgroup_v1_quota_cuts(tmp_path: Path, folder: str, quota: str, cores: int) -> None:
    files = {
        "proc/self/cgroup": "2:cpu,cpuacct:/\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": quota,
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": "100000",
    }
    assert hardware.cores_usable(write(tmp_path, files)) == cores


def test_cores_usable_here_is_within_affinity() -> None:
    assert 1 <= hardware.cores_usable() <= len(os.sched_getaffinity(0))


def test_transparent_huge_pages_reads_the_chosen_mode(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"})
    assert hardware.transparent_huge_pages(root) == "madvise"
    assert hardware.transparent_huge_pages(tmp_path / "none") == "unknown"


def test_memlock_limit_unlimited_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert hardware.memlock_limit_bytes() is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert hardware.memlock_limit_bytes() == 65536


def test_mount_of_missing_directory_is_its_parents(tmp_path: Path) -> None:
    mount = hardware.mount_of(tmp_path / "not" / "there")
    assert mount.directory in (tmp_path, *tmp_path.resolve().parents)
    assert 0 < mount.free_bytes <= mount.total_bytes


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_mount_of_shared_memory_is_memory() -> None:
    assert hardware.mount_of(Path("/dev/shm")).is_memory


def test_scratch_directory_is_the_systems_unless_it_lies_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path(tempfile.gettempdir())
    for file_system, expected in (("ext4", usual), ("tmpfs", Path("/var/tmp"))):
        found = hardware.Mount(usual, file_system, 2, 1)
        monkeypatch.setattr(hardware, "mount_of", lambda directory, found=found: found)
        assert hardware.scratch_directory() == expected


def test_default_budgets_cpu_halves_share_of_available(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "2000000",
        "sys/fs/cgroup/memory.current": "1000000",
    }
    assert hardware.default_budgets("cpu", write(tmp_path, files)) == hardware.DefaultBudgets(400_000, 400_000)


@pytest.mark.parametrize(
    ("given", "readable"), [(400_000.5, 400_000), ((1 << 30) - 1, (1 << 30) - 1), (9649009459, 9202 << 20)]
)
def test_readable_bytes_are_whole_mebibytes_from_a_gibibyte_on(given: float, readable: int) -> None:
    assert hardware.readable_bytes(given) == readable


@pytest.mark.parametrize(("current", "budget"), [(0, 500), (1, 1500)])
def test_default_budgets_cuda_takes_free_memory_of_the_current_device(
    monkeypatch: pytest.MonkeyPatch, current: int, budget: int
) -> None:
    found = (hardware.Gpu("made up", 2000, 1000), hardware.Gpu("its twin", 4000, 3000))
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert hardware.default_budgets("cuda").gpu_bytes == budget


def test_default_budgets_of_unified_memory_are_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hardware.Gpu("NVIDIA GB10", 2000, 1000, is_unified=True)
    monkeypatch.setattr(hardware, "gpus", lambda: (found,))
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda root=None: 1000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert hardware.default_budgets("cuda") == hardware.DefaultBudgets(500, 300)


@dataclass
class Properties:
    """What torch tells of a device, made up."""

    name: str = "NVIDIA GB10"
    uuid: str = "here"
    major: int = 12
    minor: int = 1
    is_integrated: int = 1


class Driver:
    """A CUDA driver that knows one attribute of its first device alone."""

    def __init__(self, value: int, code: int) -> None:
        self._value, self._code = value, code

    def cuDeviceGet(self, device: object, index: int) -> int:  # noqa: N802
        return self._code

    def cuDeviceGetAttribute(self, value: Any, name: int, device: object) -> int:  # noqa: N802
        assert name == hardware.HOST_PAGE_TABLES
        value._obj.value = self._value
        return self._code


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Properties:
    """A GPU that is made up, of which 1,000 of 4,000 bytes are free, where 3,000 bytes of RAM are."""
    properties = Properties()
    monkeypatch.setattr(hardware, "_has_gpu_driver", lambda: True)
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda root=None: 3000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def test_integrated_gpu_has_unified_memory_and_what_ram_is_available(device: Properties) -> None:
    (found,) = hardware.gpus()
    assert (found.is_unified, found.is_coherent) == (True, False)
    assert (found.free_bytes, found.total_bytes) == hardware.gpu_memory() == (3000, 4000)
    assert found.compute_capability == 12.1


@pytest.mark.parametrize(("value", "code", "expected"), [(1, 0, True), (0, 0, False), (1, 3, False)])
def test_gpu_with_a_coherent_link_is_known_by_the_driver(
    value: int, code: int, expected: bool, device: Properties, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.is_integrated = 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(value, code))
    (found,) = hardware.gpus()
    assert (found.is_unified, found.is_coherent) == (False, expected)
    assert hardware.gpu_memory(0) == (1000, 4000)


def test_gpu_without_the_driver_of_cuda_has_no_coherent_link(
    device: Properties, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    device.is_integrated = 0
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert not hardware.gpus()[0].is_coherent


CUDA_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")


def test_cuda_defaults_are_set_where_the_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUDA_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    hardware.set_cuda_defaults()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", CUDA_VARIABLES)
def test_cuda_defaults_leave_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in CUDA_VARIABLES:
        monkeypatch.setenv(other, "")
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, "of my own")
    hardware.set_cuda_defaults()
    assert os.environ[name] == "of my own"
    assert all(other in os.environ for other in CUDA_VARIABLES)


@pytest.mark.gpu
def test_gpus_here_have_memory() -> None:
    assert all(0 < gpu.free_bytes <= gpu.total_bytes for gpu in hardware.gpus())


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi of ours first on the path."""

    def put(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return put


def test_pcie_links_are_by_uuid(smi: Callable[[str], None]) -> None:
    smi("echo 'GPU-aa-1, 5, 5, 16, 16'; echo 'GPU-bb-2, [N/A], 5, 16, 16'; echo 'GPU-cc-3, 3, 4, 8, 16'")
    links = hardware.pcie_links()
    assert links == {"aa-1": hardware.PcieLink(5, 5, 16, 16), "cc-3": hardware.PcieLink(3, 4, 8, 16)}
    assert links["cc-3"].bytes_per_s == pytest.approx(7.88e9)
    assert hardware.PcieLink(9, 9, 16, 16).bytes_per_s == 0


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "exec sleep 60"])
def test_pcie_links_where_nvidia_smi_fails_are_none(
    script: str, smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "SMI_SECONDS", 1)
    smi(script)
    assert hardware.pcie_links() == {}


def test_pcie_links_without_nvidia_smi_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.pcie_links() == {}


@pytest.mark.parametrize("name", ["proc/driver/nvidia-fs/version", "sys/module/nvidia_fs/version"])
def test_nvidia_fs_is_loaded_where_the_kernel_says_so(name: str, tmp_path: Path) -> None:
    assert not hardware.nvidia_fs_is_loaded(tmp_path)
    assert hardware.nvidia_fs_is_loaded(write(tmp_path, {name: "2.20\n"}))


def test_udev_is_readable_where_its_records_are(tmp_path: Path) -> None:
    assert not hardware.udev_is_readable(tmp_path)
    assert hardware.udev_is_readable(write(tmp_path, {"run/udev/data/b259:0": ""}))


@pytest.mark.gpu
def test_pcie_links_here_are_those_of_the_gpus() -> None:
    links = hardware.pcie_links()
    assert not links or {gpu.uuid for gpu in hardware.gpus()} <= set(links)


def test_instructions_and_driver_are_told_by_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text(
        "vendor_id : AuthenticAMD\nflags : fpu avx2 sse avx512_bf16 fma amx_tile\n"
    )
    assert hardware.cpu_instructions(tmp_path) == "AuthenticAMD amx_tile avx2 avx512_bf16 fma"
    assert hardware.driver_version(tmp_path) is None
    told = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:11:23 UTC 2025\n"
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text(told)
    assert hardware.driver_version(tmp_path) == "570.124.06"
