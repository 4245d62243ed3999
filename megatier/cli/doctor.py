"""`megatier doctor`: checks what this machine has and what is missing, and says what to do about it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatier import hardware
from megatier.byte_counts import format_bytes
from megatier.cli.output import print_json
from megatier.config.values import MountBudget, parse_mount
from megatier.state import ADAMW_BF16

PAGE_BYTES = 4096
"""The bytes that are written and read to try O_DIRECT."""
STATUS_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
LOW_RAM_BYTES = 2 << 30
"""Less available RAM than this is worth a warning."""
LOW_DISK_BYTES = 10 << 30
"""Less free space on a drive than this is worth a warning."""
EXTRAS = {
    "data": "pyarrow>=18",
    "datasets": "datasets>=5.2",
    "images": "pillow>=11",
    "lora": "peft>=0.18",
    "trainer": "accelerate>=1.1",
    "trl": "trl>=1.16",
    "lightning": "lightning>=2.6",
    "tensorboard": "tensorboard>=2.20",
    "trackio": "trackio>=0.43",
    "wandb": "wandb>=0.31",
    "mlflow": "mlflow>=3",
}
"""The extras of the package, each with what it brings. That of kvikio is tried by itself."""
UNTRIED = "Nobody has tried megatier on such a machine; begin with `megatier verify`."
"""The remedy on machines that are known from data sheets alone."""
KVIKIO_SECONDS = 120
"""The most seconds that the trial of kvikio may take."""
KVIKIO_PROBE = """
import sys
from megatier import BlockSpec, Tier, TieredStore
from megatier.drives.blockfile import IoOptions
options = IoOptions(gpu_direct=True)
mounts = [f"{directory}:4MiB" for directory in sys.argv[1:]]
with TieredStore.open(gpu="4MiB", nvme=mounts, device="cuda", options=options) as store:
    store.register(BlockSpec("probe", 4 << 20, Tier.NVME))
    store.lease("probe", Tier.GPU).release()
    print(f"{sys.modules['kvikio'].__version__}: {store.gpu_path}")
"""
"""Reads a block as a run would: its checksums are verified, and kvikio's counters say which way it took."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    state: str
    """"ok", "warn" (it works, but slower or with less) or "fail" (training will not run)."""
    name: str
    """The thing that was checked."""
    found: str
    """The finding, in a few words."""
    remedy: str = ""
    """The remedy, if there is something to do."""


_ok = partial(Check, "ok")
_warn = partial(Check, "warn")
_fail = partial(Check, "fail")


def run(argv: Sequence[str]) -> int:
    """Print the table of checks; returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="megatier doctor",
        description="Check whether this machine has what megatier needs, and say what to do if something is missing.",
        epilog="example: megatier doctor --nvme /mnt/a:500GiB,/mnt/b",
    )
    parser.add_argument(
        "--nvme",
        default=".",
        metavar="DIR[:SIZE],...",
        help="drives to which state would spill (default: the drive of the working directory)",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as one JSON document")
    options = parser.parse_args(argv)

    results = list(checks([parse_mount(word, "--nvme") for word in options.nvme.split(",") if word]))
    code = 1 if any(check.state == "fail" for check in results) else 0
    if options.json:
        print_json({"ok": code == 0, "checks": [dataclasses.asdict(check) for check in results]})
        return code

    table = Table("check", "", "found", "remedy")
    for check in results:
        # rich would take the brackets of an extra for its own marks.
        table.add_row(escape(check.name), STATUS_MARKS[check.state], escape(check.found), escape(check.remedy))

    Console().print(table)
    return code


def checks(mounts: Sequence[MountBudget]) -> Iterator[Check]:
    """Yield all checks, the software first. The mounts are those to which state would spill."""
    yield _python()

    # First, since what is missing here is why checks further down fail.
    yield from map(_package, ("torch", "transformers", "zarr", "safetensors"))
    yield from (_extra(name, wanted) for name, wanted in EXTRAS.items())
    yield _native()
    yield _cpu()

    # A broken torch is one row of the table: the other checks may say why it is broken.
    gpus: Sequence[hardware.Gpu] = ()
    try:
        gpus = hardware.gpus()
    except (ImportError, OSError) as error:
        # torch is missing, or does not fit the driver's libraries.
        yield _fail("GPU", f"torch cannot be loaded: {error}", "pip install --force-reinstall torch")
    else:
        yield from _cuda(gpus)

    yield from _gds(bool(gpus), mounts)
    yield _ram()
    yield _page_lock() if gpus else _memlock()
    yield _huge_pages()
    for mount in mounts:
        yield from _drive(mount)


def _python() -> Check:
    version = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    return _ok("Python", version) if is_new else _fail("Python", version, "Python 3.11 or newer is needed.")


def _extra(name: str, wanted: str) -> Check:
    """Say whether the package of an extra is there, and of a version that is taken. None of them is needed to train."""
    # The text is that of pyproject.toml, so that a test can compare the two.
    package, least = wanted.split(">=")
    extra = f"{name} ({package})"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _ok(extra, f"not installed: pip install 'megatier[{name}]'")
    if _numbers(version) < _numbers(least):
        return _warn(extra, f"{version}, and {least} is the least", f"pip install 'megatier[{name}]'")
    return _ok(extra, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, by which a least one is decided."""
    # What stands behind them does not matter, such as rc1 or +cu130.
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _package(name: str) -> Check:
    """Check that a package is there, without loading it, which would take seconds."""
    if importlib.util.find_spec(name) is None:
        return _fail(name, "not installed", f"pip install {name}")

    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # The package runs from its source, where it has no metadata.
        version = "installed"
    return _ok(name, version)


def _native() -> Check:
    try:
        # Loaded, and not only looked for: a module that was built for another system fails only then.
        native = importlib.import_module("megatier._native")
    except ImportError as error:
        return _fail("native module", str(error), "Install megatier again, with a C compiler.")
    return _ok("native module", f"instruction sets: {', '.join(native.isa_levels())}")


def _cpu() -> Check:
    cores = hardware.cores_usable()
    usable = f"{cores} usable of {os.cpu_count()}"

    # Fewer cores train as well, only slower, so this is no failure.
    if cores >= 4:
        return _ok("cores", usable)
    return _warn("cores", usable, "AdamW and NVMe share these cores; 8 or more keep up with a GPU.")


def _cuda(gpus: Sequence[hardware.Gpu]) -> Iterator[Check]:
    if not gpus:
        yield _warn("GPU", "none", "Training runs on the CPU. If there should be a GPU, check nvidia-smi.")
        return

    links = hardware.pcie_links()
    for gpu in gpus:
        yield _ok("GPU", f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}")
        if gpu.is_unified:
            memory = f"unified: RAM and GPU memory are one of {format_bytes(hardware.ram_total_bytes())}"
            yield _warn("GPU memory", memory, f"tiers.gpu and tiers.ram are parts of it. {UNTRIED}")
        elif gpu.is_coherent:
            yield _warn("GPU link", "NVLink-C2C: `megatier bench` measures its rate", UNTRIED)
        else:
            yield _pcie(links.get(gpu.uuid))


def _pcie(link: hardware.PcieLink | None) -> Check:
    if link is None:
        return _ok("PCIe link", "unknown: nvidia-smi does not say")

    links = (
        f"generation {link.generation} of {link.generation_max}, {link.lanes} of {link.lanes_max} lanes: "
        f"{link.bytes_per_s / 1e9:.0f} GB/s each way"
    )

    # Lanes do not go down while a GPU is idle, as the generation does.
    if link.lanes < link.lanes_max:
        return _warn("PCIe link", links, "Copies are as slow as that. Seat the card anew, or use another slot.")

    # An idle GPU lowers the generation, so this alone is no reason to warn.
    is_slow = link.generation < link.generation_max
    return _ok("PCIe link", links, "An idle GPU lowers the generation; look again while it works." if is_slow else "")


def _gds(has_gpu: bool, mounts: Sequence[MountBudget]) -> Iterator[Check]:
    """Check what GPUDirect Storage needs, and whether it runs."""
    # It is not imported here, since it may hang (`_kvikio`).
    has_kvikio = has_gpu and importlib.util.find_spec("kvikio") is not None
    if has_kvikio:
        kvikio = _kvikio(mounts)
    else:
        why = "not installed: only tiers.gpu_direct needs it (megatier[gds])" if has_gpu else "not used: no GPU"
        kvikio = _ok("kvikio", why)
    yield kvikio

    # What is missing matters only if kvikio is there to use it.
    is_wanted = has_kvikio and kvikio.state == "ok"
    for name, is_there, found, remedy in (
        (
            "nvidia-fs",
            hardware.nvidia_fs_is_loaded(),
            "loaded",
            "Reads to the GPU pass through RAM, unless cuFile can use PCI P2PDMA (driver 565, kernel 6.2, or newer).",
        ),
        (
            "/run/udev",
            hardware.udev_is_readable(),
            "readable",
            "kvikio reads through RAM (compat mode). In a container, add --volume /run/udev:/run/udev:ro",
        ),
    ):
        if is_there:
            yield _ok(name, found)
        elif is_wanted:
            yield _warn(name, f"not {found}", remedy)
        else:
            yield _ok(name, f"not {found}")


def _kvikio(mounts: Sequence[MountBudget]) -> Check:
    """Read a block into GPU memory, in a process of its own, because kvikio hangs if the driver is incomplete."""
    remedy = "Leave tiers.gpu_direct off: megatier then reads NVMe through RAM."
    # A directory in RAM has no drive that could be read past RAM.
    drives = [mount.directory for mount in mounts if not hardware.mount_of(mount.directory).is_memory]
    if not drives:
        return _warn("kvikio", "not tried: no directory on a drive", "Give one with --nvme.")

    with contextlib.ExitStack() as opened:
        try:
            folders = [opened.enter_context(TemporaryDirectory(dir=d, prefix="megatier-doctor-")) for d in drives]
            command = [sys.executable, "-c", KVIKIO_PROBE, *folders]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=KVIKIO_SECONDS,
                check=False,
            )
        except OSError as error:
            return _warn("kvikio", f"not tried: {error}", "Give --nvme a directory you may write to.")
        except subprocess.TimeoutExpired:
            return _warn("kvikio", f"hangs, for {KVIKIO_SECONDS} s at least", f"Check the driver. {remedy}")

    # The last line of a traceback has the error. A process that a signal ended has said nothing.
    if done.returncode:
        return _warn("kvikio", (done.stderr.strip().splitlines() or ["ended by a signal"])[-1], remedy)
    return _ok("kvikio", done.stdout.strip())


def _ram() -> Check:
    available = hardware.ram_available_bytes()
    limit = hardware.ram_limit_bytes()
    sizes = f"{format_bytes(available)} available, " + (
        "no cgroup limit" if limit is None else f"cgroup limit {format_bytes(limit)}"
    )
    if available >= LOW_RAM_BYTES:
        return _ok("RAM", sizes)
    return _warn("RAM", sizes, "Set tiers.ram to less, and give tiers.nvme a mount for the rest.")


def _page_lock() -> Check:
    """Pin RAM until the CUDA driver refuses, since no figure of the system tells where it does."""
    # Here, since a GPU was found, so that torch is there and can be loaded.
    from megatier.measure.lock_probe import locked_limit
    from megatier.page_lock import PIN_REMEDY

    limit = locked_limit()
    if limit is None:
        return _ok("pinned RAM", "no limit met")
    return _warn(
        "pinned RAM", format_bytes(limit), f"The rest of tiers.ram goes through rings, which is slower. {PIN_REMEDY}"
    )


def _memlock() -> Check:
    # Told for those who look for it, and never warned of: without a GPU nothing is pinned.
    limit = hardware.memlock_limit_bytes()
    return _ok("memlock", "no limit" if limit is None else f"{format_bytes(limit)}; only a GPU needs pinned RAM")


def _huge_pages() -> Check:
    mode = hardware.transparent_huge_pages()

    # The arena asks for huge pages by madvise, so it gets them in both modes.
    if mode in ("always", "madvise"):
        return _ok("huge pages", mode)

    remedy = "Reads from drives into RAM are slower. echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return _warn("huge pages", mode, remedy)


def _drive(given: MountBudget) -> Iterator[Check]:
    """Check one mount: its file system, free space and O_DIRECT."""
    directory = given.directory
    if not directory.is_dir():
        yield _fail("drive", f"{directory} is no directory", "Create it, or give --nvme one that exists.")
        return

    mount = hardware.mount_of(directory)
    found = f"{directory}: {mount.file_system} on {mount.directory}"
    if mount.is_memory:
        remedy = "Files here lie in RAM, so a run refuses it. Give --nvme a directory on a drive."
        yield _fail("file system", found, remedy)
    else:
        yield _ok("file system", found)

    # A mount without a size takes what is free, so any amount is enough for it.
    found = f"{directory}: {format_bytes(mount.free_bytes)} of {format_bytes(mount.total_bytes)} on {mount.directory}"
    if mount.free_bytes < (given.num_bytes or 0):
        remedy = (
            f"Less than the {format_bytes(given.num_bytes or 0)} given. Free space, or give less: {directory}:SIZE."
        )
        yield _fail("free space", found, remedy)
    elif mount.free_bytes < LOW_DISK_BYTES:
        remedy = (
            f"State takes {ADAMW_BF16.bytes_per_parameter} bytes a parameter. Free space, or give another directory."
        )
        yield _warn("free space", found, remedy)
    else:
        yield _ok("free space", found)

    yield _direct_io(directory)


def _direct_io(directory: Path) -> Check:
    """Write and read one page with O_DIRECT, past the page cache."""
    pattern = bytes(range(256)) * (PAGE_BYTES // 256)
    try:
        # O_DIRECT wants memory at a multiple of the block size. An anonymous mapping begins at a page, bytes do not.
        with NamedTemporaryFile(dir=directory, prefix="megatier-doctor-") as file, mmap.mmap(-1, PAGE_BYTES) as page:
            page[:] = pattern
            try:
                descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                return _warn(
                    "O_DIRECT",
                    f"{directory}: refused, {error.strerror}",
                    "It works through the page cache, but slower.",
                )

            try:
                written = os.pwrite(descriptor, page, 0)
                page[:] = bytes(PAGE_BYTES)  # so that a read which moves nothing is found
                read = os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)

            if (written, read, page[:]) != (PAGE_BYTES, PAGE_BYTES, pattern):
                return _fail("O_DIRECT", f"{directory}: read back other bytes than written", "Do not use this drive.")
    except OSError as error:
        return _fail("O_DIRECT", f"{directory}: {error.strerror}", "Give --nvme a directory you may write to.")
    return _ok("O_DIRECT", f"{directory}: wrote and read one page")
