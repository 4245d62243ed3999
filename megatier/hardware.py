"""The machine: memory and cores inside its container, drives, GPUs, and the budgets that follow from them.

Limits of a container count instead of the host's. They are read from the cgroup (v1 or v2) of this process and all its
parents, because each may have a limit and the tightest one holds. Files of the kernel are read below `root`, which
tests replace. The RAM and the mounts of the machine itself come from psutil, whatever `root` is. This module loads
neither torch nor CUDA, so that `megatier plan` starts fast. Only functions that ask for GPUs load torch, if there is a
driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")

GPU_SHARE = 0.5
"""The share of the free GPU memory in a default budget. The rest is for activations, which are outside of the arena,
and for the workspaces of libraries."""
RAM_SHARE = 0.8
"""The share of the available RAM in a default budget. The rest is for Python, staging buffers and the page cache."""
PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bytes a second that one lane carries in each direction, by the generation of PCIe."""
CUDA_DRIVER = "libcuda.so.1"
HOST_PAGE_TABLES = 100
"""The driver's attribute of a GPU that uses the page tables of the CPU."""
ROCM_DEVICE = Path("/dev/kfd")
"""Without the CUDA driver and this device no build of torch sees a GPU."""
INSTRUCTIONS = re.compile(r"GenuineIntel|AuthenticAMD|fma|(avx|amx|sve|asimd|i8mm|bf16)\w*")
"""Words of /proc/cpuinfo by which libraries choose kernels."""
SMI_SECONDS = 30
"""The time limit of nvidia-smi in seconds, which can hang with a broken driver."""
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
"""The types of file systems in RAM."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The drive under a directory."""

    directory: Path
    """The directory at which the drive is mounted."""
    file_system: str
    """The type of its file system, such as ext4; "unknown" if the system does not tell."""
    total_bytes: int
    """The size of the file system."""
    free_bytes: int
    """The free bytes for this user."""

    @property
    def is_memory(self) -> bool:
        """Whether its files are in RAM, so that spilling state to it saves no RAM."""
        return self.file_system in MEMORY_FILE_SYSTEMS


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    name: str
    """The model, such as NVIDIA H100 80GB HBM3."""
    total_bytes: int
    """Its memory."""
    free_bytes: int
    """The free bytes."""
    uuid: str = ""
    """Its id without the prefix "GPU-", by which its link is found (`pcie_links`)."""
    compute_capability: float | None = None
    """Its generation, such as 9.0; None: not known."""
    is_unified: bool = False
    """Whether its memory is the RAM of the machine, as that of an integrated GPU is (GB10)."""
    is_coherent: bool = False
    """Whether it has memory of its own, and reads RAM as the CPU does, over NVLink-C2C (GH200)."""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The link between a GPU and its slot. An idle GPU may lower the generation."""

    generation: int
    """The generation of PCIe that it runs at now."""
    generation_max: int
    """The highest generation that both GPU and slot can run at."""
    lanes: int
    """The number of lanes that are in use."""
    lanes_max: int
    """The number of lanes that both GPU and slot have."""

    @property
    def bytes_per_s(self) -> float:
        """The bytes a second in each direction now, with the headers of packets; 0 if the generation is not known."""
        return PCIE_LANE_BYTES_PER_S.get(self.generation, 0.0) * self.lanes


@dataclass(frozen=True, slots=True)
class DefaultBudgets:
    """The default budgets of a run, in bytes."""

    gpu_bytes: int
    """The default of `tiers.gpu`."""
    ram_bytes: int
    """The default of `tiers.ram`."""


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """The names that one version of cgroups has for its files."""

    controllers: tuple[str, str]
    """The names of the memory and cpu controllers in /proc/self/cgroup."""
    limit: str
    """The file that has the limit, in bytes."""
    usage: str
    """The file that has the bytes in use, page cache included."""
    reclaimable: str
    """The key in memory.stat of the page cache that the kernel gives up first."""


V1 = _CgroupFiles(("memory", "cpu"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _CgroupFiles(("", ""), "memory.max", "memory.current", "inactive_file")


def ram_available_bytes(root: Path = ROOT) -> int:
    """Return the RAM that can be taken without swapping: the machine's, or the tightest cgroup's if that is less."""
    # The usage of a group includes its page cache. The part that was not read lately is given up before anything swaps,
    # so it counts as free, as it does in the kernel's own figure for the machine.
    available = psutil.virtual_memory().available
    for version, group, limit in _memory_limits(root):
        usage = _number(group / version.usage) or 0
        reclaimable = _statistic(group / "memory.stat", version.reclaimable)
        taken = max(0, usage - reclaimable)
        available = min(available, limit - taken)
    return max(0, available)


def ram_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the tightest memory limit of a cgroup; None if there is none below the machine's RAM."""
    # A group without a limit may have a number too, because version 1 writes the largest one.
    total = psutil.virtual_memory().total
    limits = [limit for _, _, limit in _memory_limits(root) if limit < total]
    return min(limits, default=None)


def ram_total_bytes(root: Path = ROOT) -> int:
    """Return the RAM of the machine, or the tightest cgroup's limit if that is less."""
    limit = ram_limit_bytes(root)
    return psutil.virtual_memory().total if limit is None else limit


def cores_usable(root: Path = ROOT) -> int:
    """Return the number of cores for this process, by its affinity and the cgroup's quota; at least 1."""
    # A quota of 2.5 cores counts as 2. A third thread would be paused for half of the time, and others wait for it.
    affinity = len(os.sched_getaffinity(0))
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    return max(1, min([affinity, *quotas]))


def cpu_has_bf16(root: Path = ROOT) -> bool:
    """Return whether the CPU multiplies bf16 numbers itself (AVX-512 BF16, AMX, Arm BF16)."""
    flags = set(text_of(root / "proc/cpuinfo").split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def cpu_instructions(root: Path = ROOT) -> str:
    """Return the maker of the CPU and the instructions by which libraries choose their kernels, in one line."""
    flags = set(text_of(root / "proc/cpuinfo").split())
    instructions = [word for word in flags if INSTRUCTIONS.fullmatch(word)]
    return " ".join(sorted(instructions))


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of NVIDIA's driver; None: there is none, or it does not say."""
    text = text_of(root / "proc/driver/nvidia/version")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else None


def set_cuda_defaults() -> None:
    """Set what CUDA and torch's allocator need for many streams and large memories, unless the environment has values.

    It has to come before the first CUDA context is made, which reads both.
    """
    # If there are more streams than hardware queues, streams share a queue. Then compute waits for unrelated copies.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

    # Kept activations have many sizes. Without this their memory becomes fragmented.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def memlock_limit_bytes() -> int | None:
    """Return the bytes that this process may lock in RAM; None: there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def transparent_huge_pages(root: Path = ROOT) -> str:
    """Return the kernel's mode: "always", "madvise", "never", or "unknown"."""
    # The file lists all modes and has brackets around the one that is on: always [madvise] never.
    text = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def mount_of(directory: Path) -> Mount:
    """Return the drive that holds a directory, or would hold it: the nearest parent that exists counts."""
    # Resolved afterwards, because a missing path cannot be. A link may lead to another drive.
    named = directory.expanduser().absolute()
    existing = next(parent for parent in (named, *named.parents) if parent.exists())
    path = existing.resolve()

    file_systems = {}
    for partition in psutil.disk_partitions(all=True):
        file_systems[Path(partition.mountpoint)] = partition.fstype

    mountpoint = Path(path.anchor)
    # The innermost mount counts, because mounts may be nested.
    for parent in (path, *path.parents):
        if parent in file_systems:
            mountpoint = parent
            break

    usage = psutil.disk_usage(str(path))
    file_system = file_systems.get(mountpoint, "unknown")
    return Mount(mountpoint, file_system, usage.total, usage.free)


def scratch_directory() -> Path:
    """Return a directory for temporary files on a drive: the system's default, or /var/tmp if that is in RAM."""
    usual = Path(tempfile.gettempdir())
    return Path("/var/tmp") if mount_of(usual).is_memory else usual


def cache_directory() -> Path:
    """Return the directory of this user's caches, which may not exist yet.

    Raises:
        RuntimeError: this user has no home.
    """
    # An empty variable counts as unset, by the XDG specification.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatier"


def gpus() -> tuple[Gpu, ...]:
    """Return the CUDA devices that this process sees."""
    if not _has_gpu_driver():
        return ()
    import torch  # slow, so only if it may see a GPU

    if not torch.cuda.is_available():
        return ()
    devices = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = gpu_memory(index)
        properties = torch.cuda.get_device_properties(index)
        is_unified = bool(properties.is_integrated)
        gpu = Gpu(
            name=properties.name,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            uuid=str(properties.uuid),
            compute_capability=float(f"{properties.major}.{properties.minor}"),
            is_unified=is_unified,
            is_coherent=not is_unified and _has_host_page_tables(index),
        )
        devices.append(gpu)
    return tuple(devices)


def gpu_memory(index: int | None = None) -> tuple[int, int]:
    """Return the free and the total bytes of a GPU; None: the current one."""
    import torch  # slow

    device = torch.cuda.current_device() if index is None else index
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        # CUDA counts the page cache as used, but the kernel frees it on demand.
        free_bytes = min(total_bytes, ram_available_bytes())
    return free_bytes, total_bytes


def _has_host_page_tables(index: int) -> bool:
    """Return whether a GPU uses the page tables of the CPU. The driver says so, and torch does not."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    device = ctypes.c_int()
    value = ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(device), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), HOST_PAGE_TABLES, device)
    return not failed and bool(value.value)


def _has_gpu_driver() -> bool:
    """Return whether torch may see a GPU, without loading torch."""
    if ROCM_DEVICE.exists():
        return True
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def device_for(asked: str) -> str:
    """Return the device of a run, "cuda" or "cpu", for a `tiers.device` of "auto", "cuda" or "cpu"."""
    if asked != "auto":
        return asked
    return "cuda" if gpus() else "cpu"


def pcie_links() -> dict[str, PcieLink]:
    """Return the links of the GPUs by uuid, from nvidia-smi; empty if that is missing, fails or hangs."""
    # torch has no function for links, and nvidia-smi comes with the driver.
    fields = ",".join(f"pcie.link.{name}" for name in ("gen.current", "gen.max", "width.current", "width.max"))
    command = ["nvidia-smi", f"--query-gpu=uuid,{fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}

    links = {}
    for line in done.stdout.splitlines():
        uuid, *numbers = [word.strip() for word in line.split(",")]

        # A virtual machine may hide a link. Then nvidia-smi prints words such as [N/A].
        is_known = len(numbers) == 4 and all(number.isdigit() for number in numbers)
        if is_known:
            links[uuid.removeprefix("GPU-")] = PcieLink(*map(int, numbers))
    return links


def nvidia_fs_is_loaded(root: Path = ROOT) -> bool:
    """Return whether the kernel module of GPUDirect Storage is loaded."""
    return (root / "proc/driver/nvidia-fs").exists() or (root / "sys/module/nvidia_fs").exists()


def udev_is_readable(root: Path = ROOT) -> bool:
    """Return whether udev's records can be read, by which cuFile finds drives. Containers often lack them."""
    return os.access(root / "run/udev", os.R_OK)


def default_budgets(device: str, root: Path = ROOT) -> DefaultBudgets:
    """Return the default budgets of a run on "cuda" or "cpu". On a CPU the gpu tier is in RAM too.

    On a GPU with unified memory both are parts of what is available, and most is the GPU's: it uses what lies there in
    place, while it copies what lies in RAM to a slot first.
    """
    ram_bytes = ram_available_bytes(root) * RAM_SHARE
    if device == "cuda":
        import torch  # slow, and a plan with budgets of its own does without

        current = gpus()[torch.cuda.current_device()]
        gpu_bytes = current.free_bytes * GPU_SHARE
        if current.is_unified:
            ram_bytes = max(0.0, ram_bytes - gpu_bytes)
        return DefaultBudgets(readable_bytes(gpu_bytes), readable_bytes(ram_bytes))

    half = readable_bytes(ram_bytes / 2)
    return DefaultBudgets(half, half)


def readable_bytes(num_bytes: float) -> int:
    """Return a budget in whole mebibytes, which can be read and typed; one below a gibibyte as it is.

    Of larger ones, what is left out is less than a thousandth.
    """
    whole = int(num_bytes)
    return whole - whole % (1 << 20) if whole >= 1 << 30 else whole


def _memory_limits(root: Path) -> Iterator[tuple[_CgroupFiles, Path, int]]:
    """Yield every memory limit of this process's groups, as (names, group, bytes)."""
    for version, group in _groups(root, 0):
        limit = _number(group / version.limit)
        if limit is not None:
            yield version, group, limit


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield every cpu quota of this process's groups, in cores."""
    for version, group in _groups(root, 1):
        # Both versions of control groups have two numbers: microseconds of cores in each period, and the length of the
        # period. The first is "max" or -1 if there is no quota. A quota below one core still leaves one core to plan
        # with.
        quota = text_of(group / "cpu.max").split() if version is V2 else _v1_quota(group)
        is_quota = len(quota) == 2 and all(word.isdigit() for word in quota)
        if is_quota:
            microseconds, period = map(int, quota)
            yield max(1.0, microseconds / period)


def _v1_quota(group: Path) -> list[str]:
    return text_of(group / "cpu.cfs_quota_us").split() + text_of(group / "cpu.cfs_period_us").split()


def _groups(root: Path, controller: int) -> Iterator[tuple[_CgroupFiles, Path]]:
    """Yield the directories of this process's cgroup and of all above it, for memory (0) or cpu (1)."""
    # A line of the file is `number:controllers:path`. Version 2 has one group for all controllers, and names none.
    top = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        version = V1 if names else V2
        if version.controllers[controller] not in names.split(","):
            continue
        base = top / names if names else top

        # A controller may be mounted under its own name, although the file names it with others: cpu,cpuacct.
        if names and not base.exists():
            base = top / version.controllers[controller]

        # A container often sees its own group as the root, under a path that exists on the host alone.
        group = base / path.lstrip("/")
        while group != base and group != group.parent:
            yield version, group
            group = group.parent
        yield version, base


def _statistic(path: Path, name: str) -> int:
    """Return the value of a line `name value` of memory.stat; 0 if it is missing."""
    for line in text_of(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None if it says "max" or is missing."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel; empty if it is missing or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
