"""Machine: the device on which a run computes, its budgets there, and what was measured on it."""

from __future__ import annotations

import torch

from megatier.config.schema import ModelConfig, TiersConfig
from megatier.errors import ConfigError, mib
from megatier.hardware import cpu_has_bf16, default_budgets, ram_total_bytes, set_cuda_defaults
from megatier.measure.probe import cached_rates
from megatier.ranks.ranks import Ranks
from megatier.schedule.rates import ALONE, Rates, World
from megatier.tier import Way


def choose_device(tiers: TiersConfig, ranks: Ranks | None = None) -> torch.device:
    """Return the device that computes. A rank has the GPU of its number on its host.

    Raises:
        ConfigError: cuda was asked for and is not there.
    """
    # These settings are read with the first CUDA context, so they come before torch is asked for a GPU.
    set_cuda_defaults()
    available = torch.cuda.is_available()
    if tiers.device == "cuda" and not available:
        raise ConfigError(
            "tiers.device is cuda, but torch sees no GPU. Check the driver (nvidia-smi) and that torch was built with "
            "CUDA, or set tiers.device to auto or cpu."
        )
    if not available or tiers.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda") if ranks is None else torch.device("cuda", ranks.local_rank)


def world_of(ranks: Ranks | None) -> World:
    """Return the number of ranks of a run, and of the hosts that have equally many of them."""
    return ALONE if ranks is None else World(ranks.size, ranks.size // ranks.local_size)


def check_attention(attention: str, device: torch.device) -> None:
    """Refuse an attention that gives wrong numbers on the device.

    Raises:
        ConfigError: flex attention on a CPU. It has no backward there. Its forward gives NaN in about half of the calls
            on CPUs without AVX-512 (torch 2.13 with rows of 16 tokens, also in plain transformers).
    """
    if attention == "flex_attention" and device.type == "cpu":
        raise ConfigError(
            "model.attention is flex_attention, which needs a GPU: on a CPU it has no backward and can give NaN. Set "
            "model.attention to sdpa."
        )


def compiles(model: ModelConfig, device: torch.device) -> bool:
    """Return whether layers and loss are compiled: by default on a GPU; never if bf16 products are taken in fp32."""
    wanted = device.type == "cuda" if model.compile is None else model.compile
    return wanted and not takes_fp32_products(model, device)


def takes_fp32_products(model: ModelConfig, device: torch.device) -> bool:
    """Return whether bf16 products are taken in fp32, as they are on a CPU without bf16 instructions."""
    return device.type == "cpu" and model.compute_dtype == "bf16" and not cpu_has_bf16()


def budgets_of(tiers: TiersConfig, device: torch.device) -> tuple[int, int]:
    """Return the bytes of GPU memory and RAM: as they are set, or from the machine.

    Raises:
        ConfigError: more RAM is set than there is. The kernel would promise it, and end the process when it is filled.
    """
    total_bytes = ram_total_bytes()
    if tiers.ram is not None and tiers.ram > total_bytes:
        raise ConfigError(
            f"tiers.ram is {mib(tiers.ram)}, but this machine, or its container, has {mib(total_bytes)} of RAM. Lower "
            "it, or leave it out for what is free."
        )

    # Without a GPU both budgets are RAM.
    if device.type == "cpu" and (tiers.gpu or 0) + (tiers.ram or 0) > total_bytes:
        raise ConfigError(
            f"tiers.gpu is {mib(tiers.gpu or 0)}, and there is no GPU: RAM stands for it. With tiers.ram that is more "
            f"than the {mib(total_bytes)} of RAM that this machine, or its container, has. Lower it, or leave it out."
        )

    if tiers.gpu is not None and tiers.ram is not None:
        return tiers.gpu, tiers.ram
    machine = default_budgets(device.type)
    return (
        machine.gpu_bytes if tiers.gpu is None else tiers.gpu,
        machine.ram_bytes if tiers.ram is None else tiers.ram,
    )


def measured_rates(tiers: TiersConfig, device: torch.device) -> Rates | None:
    """Return the rates of the mounts, if `megatier bench` measured them here. Stripes and I/O threads follow them."""
    return cached_rates([mount.directory for mount in tiers.mounts], device.type) if tiers.mounts else None


def measured_way(device: torch.device) -> Way | None:
    """What moved bytes between ranks fastest, if `megatier bench` measured that on this machine."""
    links = cached_rates((), device.type)
    return None if links is None else links.ranks_way


def limit_gpu(limit_bytes: int | None) -> None:
    """Let this process take so much GPU memory and no more; None: all of it. The driver's own part counts.

    Raises:
        ConfigError: the driver and other programs hold more than that already.
    """
    # torch limits only what it takes itself, so what others hold is taken off.
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    context_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    share = 1.0 if limit_bytes is None else (limit_bytes - context_bytes) / total_bytes
    if share <= 0:
        raise ConfigError(
            f"tiers.gpu_limit is {mib(limit_bytes or 0)}, but the GPU's driver and other programs hold "
            f"{mib(context_bytes)} already; raise it."
        )

    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def free_gpu_bytes(limit_bytes: int | None) -> tuple[int, int]:
    """Return the bytes of the GPU that this process may take, and those of them that nobody has taken.

    Args:
        limit_bytes: as for `limit_gpu`.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    most_bytes = total_bytes if limit_bytes is None else min(limit_bytes, total_bytes)
    return most_bytes, min(free_bytes, most_bytes - (total_bytes - free_bytes))
