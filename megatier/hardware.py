"""What this machine has for megatier: memory and cores inside its container, drives, GPUs, and budgets that follow.

A container's limits count, not the host's: cgroup v1 and v2 are read from the process's own group up to the root. Files
are looked up below `root`, which tests point at a made-up tree.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")

GPU_SHARE = 0.5
"""Of the free GPU memory; the rest is for activations, which lie outside the arena, and libraries' workspaces."""

RAM_SHARE = 0.8
"""Of the available RAM; the rest is for Python, staging and the page cache."""

PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""By generation, each way."""

CUDA_DRIVER = "libcuda.so.1"
ROCM_DEVICE = Path("/dev/kfd")
"""Without either no build of torch sees a GPU."""

SMI_SECONDS = 30
"""A driver that is not whole can let nvidia-smi hang."""

MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}


@dataclass(frozen=True, slots=True)
class Mount:
    """The drive under a directory."""

    directory: Path
    """Where it is mounted."""
    file_system: str
    """Type, such as ext4; "unknown" where the system does not tell."""
    total_bytes: int
    free_bytes: int
    """Free for this user."""

    @property
    def is_memory(self) -> bool:
        """Whether files here lie in RAM, so that spilling to it gains nothing."""
        return self.file_system in MEMORY_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    name: str
    total_bytes: int
    free_bytes: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Between a GPU and its slot. An idle GPU may lower the generation."""

    generation: int
    generation_max: int
    """Of GPU and slot."""
    lanes: int
    lanes_max: int

    @property
    def bytes_per_s(self) -> float:
        """What it carries now, each way, headers of packets included; 0 where the generation is not known."""
        return PCIE_LANE_BYTES_PER_S.get(self.generation, 0.0) * self.lanes


@dataclass(frozen=True, slots=True)
class DefaultBudgets:
    """Bytes that a run may use when nobody says otherwise."""

    gpu_bytes: int
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """What one version of cgroups calls things."""

    controllers: tuple[str, str]
    """Names of the memory and cpu controllers in /proc/self/cgroup."""
    limit: str
    usage: str
    reclaimable: str
    """Key in memory.stat of the page cache that goes first."""


V1 = _CgroupFiles(("memory", "cpu"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _CgroupFiles(("", ""), "memory.max", "memory.current", "inactive_file")


def ram_available_bytes(root: Path = ROOT) -> int:
    """RAM that can be taken without swapping: of the machine, or of the tightest cgroup if that is less."""
    free = [
        limit - max(0, (_number(group / version.usage) or 0) - _statistic(group / "memory.stat", version.reclaimable))
        for version, group, limit in _memory_limits(root)
    ]
    return max(0, min([psutil.virtual_memory().available, *free]))


def ram_limit_bytes(root: Path = ROOT) -> int | None:
    """The tightest cgroup memory limit; None where there is none below the machine's RAM."""
    limits = [limit for _, _, limit in _memory_limits(root) if limit < psutil.virtual_memory().total]
    return min(limits, default=None)


def ram_total_bytes(root: Path = ROOT) -> int:
    """RAM of the machine, or the tightest cgroup's limit if that is less."""
    limit = ram_limit_bytes(root)
    return psutil.virtual_memory().total if limit is None else limit


def cores_usable(root: Path = ROOT) -> int:
    """Cores that this process may keep busy: its affinity, cut by the cgroup's quota; at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in _cpu_quotas(root))]))


def cpu_has_bf16(root: Path = ROOT) -> bool:
    """Whether the CPU multiplies bf16 numbers itself (AVX-512 BF16, AMX, Arm BF16)."""
    words = set(_text(root / "proc/cpuinfo").split())
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def set_cuda_defaults() -> None:
    """Settings of CUDA and torch's allocator that fit many streams and large memories; the environment's own win.

    Both are read when the first CUDA context is made.
    """
    # Streams share hardware queues when there are more of them than queues: then compute waits for unrelated copies.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Kept activations come and go in many sizes; without it their memory breaks into pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def memlock_limit_bytes() -> int | None:
    """Bytes that this process may lock in RAM; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def transparent_huge_pages(root: Path = ROOT) -> str:
    """Mode of the kernel: "always", "madvise", "never", or "unknown"."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def mount_of(directory: Path) -> Mount:
    """The drive that holds a directory, or would hold it: the nearest parent that exists counts."""
    path = directory.expanduser().absolute()
    path = next(parent for parent in (path, *path.parents) if parent.exists()).resolve()
    places = {Path(partition.mountpoint): partition.fstype for partition in psutil.disk_partitions(all=True)}
    mountpoint = next((parent for parent in (path, *path.parents) if parent in places), Path(path.anchor))
    usage = psutil.disk_usage(str(path))
    return Mount(mountpoint, places.get(mountpoint, "unknown"), usage.total, usage.free)


def scratch_directory() -> Path:
    """Where temporary files lie on a drive: the system's place for them, or /var/tmp where that one lies in RAM."""
    usual = Path(tempfile.gettempdir())
    return Path("/var/tmp") if mount_of(usual).is_memory else usual


def gpus() -> tuple[Gpu, ...]:
    """The CUDA devices that this process sees."""
    if not _has_gpu_driver():
        return ()
    import torch  # slow: only where it may see a GPU

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, total_bytes, free_bytes, str(properties.uuid)))
    return tuple(found)


def _has_gpu_driver() -> bool:
    """Whether torch may see a GPU, without loading it."""
    if ROCM_DEVICE.exists():
        return True
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def device_for(asked: str) -> str:
    """Where a run computes whose `tiers.device` is "auto", "cuda" or "cpu": "cuda" or "cpu"."""
    if asked != "auto":
        return asked
    return "cuda" if gpus() else "cpu"


def pcie_links() -> dict[str, PcieLink]:
    """The links of the GPUs that nvidia-smi tells of, by uuid."""
    fields = ",".join(f"pcie.link.{name}" for name in ("gen.current", "gen.max", "width.current", "width.max"))
    command = ["nvidia-smi", f"--query-gpu=uuid,{fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}

    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    return {
        uuid.removeprefix("GPU-"): PcieLink(*map(int, numbers))
        for uuid, *numbers in rows
        if len(numbers) == 4 and all(number.isdigit() for number in numbers)
    }


def nvidia_fs_is_loaded(root: Path = ROOT) -> bool:
    """Whether the kernel module of GPUDirect Storage is there."""
    return (root / "proc/driver/nvidia-fs").exists() or (root / "sys/module/nvidia_fs").exists()


def udev_is_readable(root: Path = ROOT) -> bool:
    """Whether udev's records are, by which cuFile finds the drive below a file; containers often lack them."""
    return os.access(root / "run/udev", os.R_OK)


def default_budgets(device: str, root: Path = ROOT) -> DefaultBudgets:
    """Budgets for a run on "cuda", or on "cpu", where the arena that stands for the GPU lies in RAM as well."""
    ram_bytes = int(ram_available_bytes(root) * RAM_SHARE)
    if device == "cuda":
        import torch  # slow, and planning does without

        current = gpus()[torch.cuda.current_device()]
        return DefaultBudgets(int(current.free_bytes * GPU_SHARE), ram_bytes)
    return DefaultBudgets(ram_bytes // 2, ram_bytes // 2)


def _memory_limits(root: Path) -> Iterator[tuple[_CgroupFiles, Path, int]]:
    """Every memory limit above this process, as (names, group, bytes)."""
    for version, group in _groups(root, 0):
        limit = _number(group / version.limit)
        if limit is not None:
            yield version, group, limit


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Every cpu quota above this process, in cores."""
    for version, group in _groups(root, 1):
        words = _text(group / "cpu.max").split() if version is V2 else _v1_quota(group)
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            yield max(1.0, int(words[0]) / int(words[1]))


def _v1_quota(group: Path) -> list[str]:
    return _text(group / "cpu.cfs_quota_us").split() + _text(group / "cpu.cfs_period_us").split()


def _groups(root: Path, controller: int) -> Iterator[tuple[_CgroupFiles, Path]]:
    """Directories of this process's cgroup and of all above it, for memory (0) or cpu (1)."""
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        version = V1 if names else V2
        if version.controllers[controller] not in names.split(","):
            continue
        base = top / names if names else top
        if names and not base.exists():
            base = top / version.controllers[controller]

        # A container often sees its own group as the root, under a path that exists on the host alone.
        group = base / path.lstrip("/")
        while group != base and group != group.parent:
            yield version, group
            group = group.parent
        yield version, base


def _statistic(path: Path, name: str) -> int:
    """A line `name value` of memory.stat; 0 where it is missing."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """A file that holds one number; None where it says "max" or is missing."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """A file of the kernel's; empty where it is missing or not ours to read."""
    try:
        return path.read_text()
    except OSError:
        return ""
