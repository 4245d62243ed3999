"""The environment of a run: libraries, devices and variables, whose kernels decide bits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from megatier.engine.replay import KERNEL_ORDER, settings_now
from megatier.hardware import cpu_has_bf16, cpu_instructions, driver_version

NUMERIC_LIBRARIES = ("torch", "transformers", "numpy")
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DYNAMIC",
    "OMP_DYNAMIC",
)
"""Environment variables by which libraries choose their kernels. ATEN_CPU_CAPABILITY and OMP_NUM_THREADS show in the
instructions and threads that torch says."""

WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
"""Those by which GPU libraries choose them, apart because older versions did not note them."""


def read_environment(device: torch.device) -> dict[str, Any]:
    """Return everything that decides bits besides the config, as plain JSON.

    Args:
        device: the device that computes.
    """
    # Of torch the version that runs, with the build in it (+cu130, +cpu), which the package does not always name.
    environment: dict[str, Any] = {name: _version(name) for name in NUMERIC_LIBRARIES}
    environment["torch"] = str(torch.__version__)
    # A program around may have set it, and it decides how torch multiplies.
    environment["matmul precision"] = _matmul_precision()
    environment["variables"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    environment |= settings_now(device)
    if device.type == "cuda":
        environment["workspaces"] = {name: os.environ[name] for name in WORKSPACES if name in os.environ}
        environment |= {"triton": _version("triton") or _version("pytorch-triton"), "driver": driver_version()}
        return {**environment, "cudnn": torch.backends.cudnn.version(), "device": torch.cuda.get_device_name(device)}

    # On a CPU kernels depend on its instructions, and the order of sums on the number of threads.
    return {
        **environment,
        "device": platform.machine(),
        "bf16": cpu_has_bf16(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "instructions": cpu_instructions(),
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def find_environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts that decide bits and differ between two environments, as `find_differences`.

    Older versions noted less, and only what they noted is compared. The order of attention's kernels is not compared:
    torch sets it at the first attention on a GPU, so one and the same environment may have been noted with two orders.
    """
    noted = {name: value for name, value in now.items() if name in before}
    return find_differences(before, noted, free=(KERNEL_ORDER.name,))


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()) -> Iterator[str]:
    """Yield each name that is not free and whose value is another one now, with both values."""
    names = {*before, *now}.difference(free)
    for name in sorted(names):
        old = before.get(name)
        new = now.get(name)
        if old != new:
            yield f"{name} was {old!r} and is {new!r}"


def _matmul_precision() -> str:
    """Return how products of fp32 matrices are rounded."""
    # torch's older getter refuses to answer once somebody has used the newer setters.
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        getter = torch._C._get_fp32_precision_getter
        return ", ".join(f"{backend} {getter(backend, 'matmul')}" for backend in ("cuda", "mkldnn"))


def _version(name: str) -> str | None:
    """Return the version of an installed package; None: there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None
