"""Writes and reads the results of measurements: one flat JSON row for each system and shape, with its circumstances.

A row has `COMMON_KEYS`. It has `MEASURED_KEYS` too, unless it says why not: `error` (the system could not run) or
`source` (a figure quoted from elsewhere). All sizes are bytes and all times are seconds.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]

COMMON_KEYS: dict[str, type | tuple[type, ...]] = {
    "system": str,
    "shape": str,
    "sequence_length": int,
    "tokens_per_step": int,
}
MEASURED_KEYS: dict[str, type | tuple[type, ...]] = {
    "num_parameters": int,
    "batch": int,
    "seconds": list,
    "median_seconds": (int, float),
    "tokens_per_s": (int, float),
    "model_tflops": (int, float),
    "tflops_formula": str,
    "peak_ram_bytes": int,
    "peak_gpu_bytes": (int, type(None)),
    "clip": bool,
    "master_dtype": str,
    "first_step_seconds": (int, float),
    "date": str,
    "commit": str,
    "is_changed": bool,
    "command": str,
    "machine": dict,
    "versions": dict,
}
"""`seconds` are those of the steps after the first. `batch` counts sequences. `clip` means by the exact global norm."""

VERSIONS_OF = ("torch", "transformers", "numpy", "triton", "deepspeed", "liger-kernel")


class RowError(ValueError):
    """A file that should hold rows does not; the text names the file and what is wrong."""


def facts() -> dict[str, Any]:
    """Return when, where and with what this is measured.

    BENCH_COMMIT in the environment names the commit of a tree that was copied without its history.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("BENCH_COMMIT") or _git("rev-parse", "HEAD"),
        "is_changed": "BENCH_COMMIT" not in os.environ and bool(_git("status", "--short")),
        "command": _command(sys.argv),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def machine() -> dict[str, Any]:
    """CPU, the cores that this process may use, RAM, load, and the GPU with its driver (None without a GPU)."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = Counter(line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return {
        "cpu": next(iter(models), platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "load_before": psutil.getloadavg(),
        "gpu": _gpu(),
    }


def row(
    system: str,
    shape: str,
    *,
    batch: int,
    sequence_length: int,
    num_parameters: int,
    seconds: list[float],
    first_step_seconds: float,
    model_flops: float,
    tflops_formula: str,
    peak_ram_bytes: int,
    peak_gpu_bytes: int | None,
    clip: bool,
    master_dtype: str,
    **more: object,
) -> Row:
    """Make a row. Its rates follow from its seconds.

    Args:
        system: the system that was measured.
        shape: a name in `peers.shapes.SHAPES`.
        batch: sequences a step.
        sequence_length: tokens a sequence.
        num_parameters: the number of all parameters, the embedding's included.
        seconds: the seconds of each step but the first.
        first_step_seconds: the seconds of the first step, which compiles, records or allocates.
        model_flops: the FLOPs of a step, without those of a recompute.
        tflops_formula: how FLOPs are counted.
        peak_ram_bytes: as the operating system counts it.
        peak_gpu_bytes: as the driver counts it, context included; None without a GPU.
        clip: whether gradients are clipped by their exact global norm.
        master_dtype: type of the weights that AdamW updates.
        more: further keys.
    """
    tokens = batch * sequence_length
    middle = median(seconds)
    return {
        "system": system,
        "shape": shape,
        "num_parameters": num_parameters,
        "batch": batch,
        "sequence_length": sequence_length,
        "tokens_per_step": tokens,
        "seconds": seconds,
        "median_seconds": middle,
        "tokens_per_s": tokens / middle,
        "model_tflops": model_flops / middle / 1e12,
        "tflops_formula": tflops_formula,
        "peak_ram_bytes": peak_ram_bytes,
        "peak_gpu_bytes": peak_gpu_bytes,
        "clip": clip,
        "master_dtype": master_dtype,
        "first_step_seconds": first_step_seconds,
        **more,
        **facts(),
    }


def failed_row(system: str, shape: str, *, batch: int, sequence_length: int, error: str) -> Row:
    """Make the row of a system that could not run."""
    known = {"system": system, "shape": shape, "batch": batch, "sequence_length": sequence_length}
    return known | {"tokens_per_step": batch * sequence_length, "error": error} | facts()


def folder_of(where: dict[str, Any]) -> Path:
    """Folder of a machine's results: named after its first GPU (`h200`), or after its cores if it has none (`2_cores`).

    Args:
        where: what `machine` returned.
    """
    gpu = (where["gpu"] or "").partition(",")[0].removeprefix("NVIDIA ")
    name = re.sub(r"\W+", "_", gpu).lower() or f"{where['cores']}_cores"
    return RESULTS / name


def default_output(result: Row) -> Path:
    """File of a row in its machine's folder: by its row number, or by system, shape and tokens a step if it has none.

    The name holds no date or commit, so a newer result takes the place of the older one.
    """
    peer = f"{result['system']}_{result['shape']}_{result['tokens_per_step']}"
    name = f"row{result['row']}" if "row" in result else peer
    return folder_of(result["machine"]) / f"{name}.json"


def write_row(result: Row, path: Path) -> None:
    """Write a row, and make its directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file that holds one, or a list of them.

    Raises:
        RowError: the file cannot be read, is no JSON, or a row lacks a key or has one of another type.
    """
    rows = _parsed(path)
    for index, entry in enumerate(rows):
        _check(entry, f"{path}, row {index + 1}" if len(rows) > 1 else str(path))
    return rows


def has_rows(path: Path) -> bool:
    """Return whether a file's JSON names systems. Other measurements lie in the same directory.

    Raises:
        RowError: the file cannot be read, or is no JSON.
    """
    return any(isinstance(entry, dict) and "system" in entry for entry in _parsed(path))


def _parsed(path: Path) -> list[Any]:
    """Return the entries of a JSON file."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RowError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RowError(f"{path}: not JSON: {error}") from error

    return parsed if isinstance(parsed, list) else [parsed]


def _check(entry: object, where: str) -> None:
    """Refuse an entry that is no row."""
    if not isinstance(entry, dict):
        raise RowError(f"{where}: a row is an object, not {type(entry).__name__}")
    is_quoted = "source" in entry
    is_failed = "error" in entry
    # A quoted row, or one of a system that could not run, was not measured here.
    keys = COMMON_KEYS | ({} if is_quoted or is_failed else MEASURED_KEYS)
    if is_quoted and not is_failed:
        keys = keys | {"tokens_per_s": (int, float)}
    if missing := sorted(keys.keys() - entry.keys()):
        raise RowError(f"{where}: no {', '.join(missing)}; bench/record.py lists the keys of a row")

    for key, kinds in (COMMON_KEYS | MEASURED_KEYS).items():
        if key in entry and not _is(entry[key], kinds):
            raise RowError(f"{where}: {key} is {entry[key]!r}, which is {type(entry[key]).__name__}")

    if not entry.get("tokens_per_s", 1) > 0:
        raise RowError(f"{where}: tokens_per_s is {entry['tokens_per_s']}, which cannot be")


def _is(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Whether a value is of one of these types. True and false are no numbers, although Python takes them for some."""
    return isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))


def _command(words: list[str]) -> str:
    """Return the command that was typed, without paths: those of one machine say nothing on another."""
    text = " ".join(["python", *words])
    text = re.sub(r" --(output|trace)[= ]\S+", "", text)
    return re.sub(r"( --nvme[= ])\S+", r"\1DIR", text)


def _git(*arguments: str) -> str:
    """Return the answer of git for this checkout. It is empty if there is no git or no checkout."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()


def _gpu() -> str | None:
    """Return the name and the driver of the first GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return next(iter(done.stdout.splitlines()), None) if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue

    return found
