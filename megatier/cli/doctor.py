"""`megatier doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console
from rich.table import Table

from megatier import hardware
from megatier.errors import mib

PAGE_BYTES = 4096
MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
LOW_RAM_BYTES = 2 << 30
LOW_DISK_BYTES = 10 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    state: str
    """"ok", "warn" (works, but slower or less) or "fail" (training will not run)."""
    found: str
    remedy: str = ""


def run(argv: Sequence[str]) -> int:
    """Print the table of checks; 1 when one failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="megatier doctor",
        description="Check what megatier needs on this machine, and say what to do about what is missing.",
        epilog="example: megatier doctor --nvme /mnt/a",
    )
    parser.add_argument("--nvme", type=Path, default=Path(), metavar="DIR", help="where to spill (default: here)")
    directory: Path = parser.parse_args(argv).nvme
    found = list(checks(directory))
    table = Table("check", "", "found", "remedy")
    for check in found:
        table.add_row(check.name, MARKS[check.state], check.found, check.remedy)
    Console().print(table)
    return 1 if any(check.state == "fail" for check in found) else 0


def checks(directory: Path) -> Iterator[Check]:
    """All checks, the software first, for spilling to a directory."""
    yield _python()
    yield from map(_package, ("torch", "transformers", "zarr", "safetensors"))
    yield _native()
    yield _cpu()
    yield from _cuda()
    yield _ram()
    yield _memlock()
    yield _huge_pages()
    yield from _drive(directory)


def _python() -> Check:
    state = "ok" if sys.version_info >= (3, 11) else "fail"
    return Check("Python", state, platform.python_version(), "" if state == "ok" else "Python 3.11 or newer is needed.")


def _package(name: str) -> Check:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Check(name, "fail", str(error), f"pip install {name}")
    return Check(name, "ok", str(getattr(module, "__version__", "installed")))


def _native() -> Check:
    try:
        native = importlib.import_module("megatier._native")
    except ImportError as error:
        return Check("native module", "fail", str(error), "Install megatier again, with a C compiler.")
    return Check("native module", "ok", f"instruction sets: {', '.join(native.isa_levels())}")


def _cpu() -> Check:
    cores = hardware.cores_usable()
    remedy = "" if cores >= 4 else "AdamW and NVMe share these cores; 8 or more keep up with a GPU."
    return Check("cores", "ok" if cores >= 4 else "warn", f"{cores} usable of {os.cpu_count()}", remedy)


def _cuda() -> Iterator[Check]:
    gpus = hardware.gpus() if _package("torch").state == "ok" else ()
    for gpu in gpus:
        yield Check("GPU", "ok", f"{gpu.name}, {mib(gpu.free_bytes)} free of {mib(gpu.total_bytes)}")
    if not gpus:
        yield Check("GPU", "warn", "none", "Runs on the CPU, an arena in RAM in its place. Check nvidia-smi.")
        yield Check("kvikio", "ok", "not used: no GPU")
        return
    # Looked at, not opened: it hangs where the driver is not whole.
    kvikio = _package("kvikio")
    remedy = "NVMe is read through RAM; GPUDirect Storage is not used yet."
    yield Check("kvikio", "ok" if kvikio.state == "ok" else "warn", kvikio.found, remedy)


def _ram() -> Check:
    available, limit = hardware.ram_available_bytes(), hardware.ram_limit_bytes()
    state = "ok" if available >= LOW_RAM_BYTES else "warn"
    found = f"{mib(available)} available, " + ("no cgroup limit" if limit is None else f"cgroup limit {mib(limit)}")
    return Check("RAM", state, found, "" if state == "ok" else "Set tiers.ram, and tiers.nvme for the rest.")


def _memlock() -> Check:
    limit = hardware.memlock_limit_bytes()
    if limit is None:
        return Check("memlock", "ok", "no limit")
    return Check("memlock", "ok", f"{mib(limit)}; CUDA pins RAM without it")


def _huge_pages() -> Check:
    mode = hardware.transparent_huge_pages()
    if mode in ("always", "madvise"):
        return Check("huge pages", "ok", mode)
    remedy = "Disk reads into RAM get slower. echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Check("huge pages", "warn", mode, remedy)


def _drive(directory: Path) -> Iterator[Check]:
    mount = hardware.mount_of(directory)
    in_memory = (
        "Files here lie in RAM, so a run refuses it. Give --nvme a directory on a drive." if mount.is_memory else ""
    )
    yield Check("file system", "fail" if in_memory else "ok", f"{mount.file_system} on {mount.directory}", in_memory)
    low = mount.free_bytes < LOW_DISK_BYTES
    remedy = "State takes 12 bytes a parameter. Free space or give another directory." if low else ""
    yield Check("free space", "warn" if low else "ok", f"{mib(mount.free_bytes)} of {mib(mount.total_bytes)}", remedy)
    yield _direct_io(directory)


def _direct_io(directory: Path) -> Check:
    """Write and read one page past the page cache."""
    pattern = bytes(range(256)) * (PAGE_BYTES // 256)
    try:
        with NamedTemporaryFile(dir=directory, prefix="megatier-doctor-") as file, mmap.mmap(-1, PAGE_BYTES) as page:
            page[:] = pattern
            try:
                descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                return Check("O_DIRECT", "warn", f"refused: {error.strerror}", "Works through the page cache, slower.")
            try:
                written = os.pwrite(descriptor, page, 0)
                page[:] = bytes(PAGE_BYTES)
                read = os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)
            if (written, read, page[:]) != (PAGE_BYTES, PAGE_BYTES, pattern):
                return Check("O_DIRECT", "fail", "read back other bytes than written", "Do not use this drive.")
    except OSError as error:
        return Check("O_DIRECT", "fail", f"{directory}: {error.strerror}", "Give --nvme a directory you may write to.")
    return Check("O_DIRECT", "ok", "wrote and read one page")
