"""The machine of a run: its device, its budgets there, and the rates that were measured on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from megatier.byte_counts import format_bytes
from megatier.compute.fp8 import FP8_FROM
from megatier.config.schema import ModelConfig, TiersConfig
from megatier.config.values import MountBudget
from megatier.drives.leftovers import left_bytes
from megatier.drives.mounts import budget_bytes, rank_id
from megatier.errors import ConfigError
from megatier.hardware import (
    cpu_has_bf16,
    default_budgets,
    gpu_memory,
    gpus,
    ram_available_bytes,
    ram_total_bytes,
    set_cuda_defaults,
)
from megatier.measure.probe import rates_or_assumed
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates import Rates
from megatier.schedule.world import ONE_PROCESS, World
from megatier.setup.attention_rule import HOPPER, Capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine of a run, and what the run may take of it. Everything is read once, before the run is opened."""

    device: torch.device
    """The device that computes. Each rank has the GPU of its local rank."""
    capability: Capability | None
    """Compute capability of the GPU; None: the device is a CPU."""
    has_bf16: bool
    """Whether the CPU has instructions for bf16 products."""
    budgets: Budgets
    """Bytes of each tier of a host, and of each GPU: the minimum over all ranks."""
    mounts: tuple[MountBudget, ...]
    """The mounts of a host, each with its size."""
    rates: Rates
    """The rates of a host."""
    assumed: tuple[str, ...] = ()
    """Names of the rates that were not measured."""
    world: World = ONE_PROCESS
    """The ranks of the run."""

    @classmethod
    def here(
        cls,
        tiers: TiersConfig,
        device: torch.device | None = None,
        ranks: Ranks | None = None,
        run_id: str | None = None,
    ) -> Self:
        """Describe this machine. Every rank has to call it.

        Args:
            tiers: budgets and mounts, as far as they are set.
            device: the device from an earlier `choose_device`; None: it is chosen here.
            ranks: the ranks of the run.
            run_id: id of a run that is resumed. Block files of it that a kill has left count as free space.

        Raises:
            ConfigError: a budget, a mount or a device does not fit this machine.
        """
        device = choose_device(tiers.device) if device is None else device
        is_gpu = device.type == "cuda"
        if ranks is not None and is_gpu:
            # Each process sees all GPUs of its host, and uses that of its local rank.
            device = torch.device("cuda", ranks.local_rank)

        # Homes and slots follow from the budgets, so all ranks need the same ones.
        all_ranks = ranks or SingleRank()
        with all_ranks.failing_together():
            ids = _read_host_ids(run_id, ranks)
            rank_sizes = (
                *choose_budgets(tiers, device),
                *(budget_bytes(mount, left_bytes(mount.directory, ids)) for mount in tiers.mounts),
            )
        gpu, ram, *sizes = map(min, zip(*all_ranks.all_gather_object(rank_sizes), strict=True))
        directories = [mount.directory for mount in tiers.mounts]
        rates, assumed = rates_or_assumed(directories, device.type)
        if rates.unified_bytes is not None:
            # CUDA would hand out memory that other programs hold, and the kernel would then kill one of them.
            left = min(rates.unified_bytes, ram_available_bytes())
            rates = replace(rates, unified_bytes=left)
        return cls(
            device=device,
            capability=torch.cuda.get_device_capability(device) if is_gpu else None,
            has_bf16=cpu_has_bf16(),
            budgets=Budgets(gpu, ram, sum(sizes)),
            mounts=tuple(map(MountBudget, directories, sizes)),
            rates=rates.with_locked(tiers.locked),
            assumed=assumed,
            world=ONE_PROCESS if ranks is None else World(ranks.size, ranks.size // ranks.local_size),
        )

    @classmethod
    def elsewhere(cls, tiers: TiersConfig, rates: Rates, budgets: Budgets, world: World = ONE_PROCESS) -> Self:
        """Describe another machine by its rates. If they do not name its GPU, it is a Hopper.

        Args:
            tiers: device and mounts.
            rates: the rates of a host.
            budgets: bytes of each tier of a host, and of each GPU.
            world: the ranks of the run.

        Raises:
            ConfigError: unified memory is smaller than the budgets of GPU and RAM together.
        """
        # A machine elsewhere has a GPU, unless the settings say cpu.
        is_gpu = tiers.device != "cpu"
        if is_gpu and rates.unified_bytes is not None:
            check_unified(world.num_host_ranks * budgets.gpu, budgets.ram, round(rates.unified_bytes))
        return cls(
            device=torch.device("cuda" if is_gpu else "cpu"),
            capability=_read_capability(rates) if is_gpu else None,
            # That CPU cannot be examined from here.
            has_bf16=True,
            budgets=budgets,
            mounts=tiers.mounts,
            rates=rates.with_locked(tiers.locked),
            world=world,
        )

    @property
    def is_measured(self) -> bool:
        """Whether `megatier bench` has measured the run's mounts and, for several ranks, the links between them."""
        return not self.assumed and not self.rates.assumed(self.world)

    @property
    def measured_rates(self) -> Rates | None:
        """The rates, if all rates that one process needs were measured."""
        return None if self.assumed else self.rates

    def takes_fp32_products(self, model: ModelConfig) -> bool:
        """Return whether bf16 products are taken in fp32, as they are on a CPU without bf16 instructions."""
        return self.device.type == "cpu" and model.compute_dtype == "bf16" and not self.has_bf16

    def check_products(self, products: str) -> None:
        """Refuse products in FP8 on a GPU without them. A CPU computes them slowly.

        Raises:
            ConfigError: the GPU has none. The message names the GPUs that have.
        """
        if products == "fp8" and self.capability is not None and self.capability < FP8_FROM:
            capability = ".".join(map(str, self.capability))
            raise ConfigError(
                f"numerics.products is fp8, but this GPU (compute capability {capability}) has no FP8 products. GPUs "
                "of the Ada and Hopper generations and later (8.9) have. Set it to bf16."
            )


def choose_device(asked: str, setting: str = "tiers.device") -> torch.device:
    """Return the device that computes.

    Args:
        asked: auto, cuda or cpu.
        setting: the setting that asks for it, for messages.

    Raises:
        ConfigError: cuda is asked for, and there is no GPU.
    """
    # CUDA reads its settings with the first context, so they come before torch looks for a GPU.
    set_cuda_defaults()
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ConfigError(
            f"{setting} is cuda, but torch sees no GPU. Check the driver (nvidia-smi) and that torch was built with "
            f"CUDA, or set {setting} to auto or cpu."
        )
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def _read_host_ids(run_id: str | None, ranks: Ranks | None) -> list[str]:
    """Return the names of a run's directories on the mounts of this host; none without a run id."""
    if run_id is None:
        return []
    if ranks is None:
        return [run_id]

    # torchrun gives the ranks of a host consecutive numbers.
    first = ranks.rank - ranks.local_rank
    return [rank_id(run_id, rank) for rank in range(first, first + ranks.local_size)]


def check_attention(attention: str, device: torch.device) -> None:
    """Refuse an attention kernel that gives wrong numbers on the device.

    Raises:
        ConfigError: flex attention on a CPU. It has no backward there. Its forward gives NaN in about half of the calls
            on CPUs without AVX-512 (torch 2.13 with rows of 16 tokens, also in plain transformers).
    """
    if attention == "flex_attention" and device.type == "cpu":
        raise ConfigError(
            "model.attention is flex_attention, which needs a GPU: on a CPU it has no backward and can give NaN. Set "
            "model.attention to sdpa."
        )


def should_compile(model: ModelConfig, machine: Machine) -> bool:
    """Return whether layers and loss are compiled: by default on a GPU, and never if bf16 products are in fp32."""
    wanted = machine.device.type == "cuda" if model.compile is None else model.compile
    return wanted and not machine.takes_fp32_products(model)


def _read_capability(rates: Rates) -> Capability:
    """Return the compute capability of a GPU, which is Hopper's if the rates do not name one."""
    if rates.compute_capability is None:
        return HOPPER
    # Files of rates have it as a number, such as 9.0.
    major, _, minor = f"{rates.compute_capability:.1f}".partition(".")
    return int(major), int(minor)


def choose_budgets(tiers: TiersConfig, device: torch.device) -> tuple[int, int]:
    """Return the budgets of GPU memory and RAM: the given ones, or what the machine has.

    Raises:
        ConfigError: more RAM is given than there is. The kernel would allow it, and kill the process once it is filled.
    """
    # `gpus` asks CUDA, so it is called only if there is a GPU.
    is_unified = device.type == "cuda" and any(gpu.is_unified for gpu in gpus())

    # In a container this is its limit, and not the RAM of the host.
    total_bytes = ram_total_bytes()
    if tiers.ram is not None and tiers.ram > total_bytes:
        raise ConfigError(
            f"tiers.ram is {format_bytes(tiers.ram)}, but this machine, or its container, has "
            f"{format_bytes(total_bytes)} of RAM. Lower it, or leave it out for what is free."
        )

    # Without a GPU both budgets are RAM.
    if device.type == "cpu" and (tiers.gpu or 0) + (tiers.ram or 0) > total_bytes:
        raise ConfigError(
            f"tiers.gpu is {format_bytes(tiers.gpu or 0)}, and there is no GPU: RAM stands for it. With tiers.ram that "
            f"is more than the {format_bytes(total_bytes)} of RAM that this machine, or its container, has. Lower it, "
            "or leave it out."
        )

    if is_unified:
        check_unified(tiers.gpu or 0, tiers.ram or 0, total_bytes)

    # If both are given, CUDA need not be asked what is free.
    if tiers.gpu is not None and tiers.ram is not None:
        return tiers.gpu, tiers.ram
    machine = default_budgets(device.type)
    gpu = machine.gpu_bytes if tiers.gpu is None else tiers.gpu
    ram = machine.ram_bytes if tiers.ram is None else tiers.ram
    if is_unified:
        # A budget that is not given gets at most what the other one leaves.
        both = machine.gpu_bytes + machine.ram_bytes
        gpu = min(gpu, max(0, both - ram)) if tiers.gpu is None else gpu
        ram = min(ram, max(0, both - gpu)) if tiers.ram is None else ram
    return gpu, ram


def check_unified(gpu_bytes: int, ram_bytes: int, unified_bytes: int) -> None:
    """Refuse budgets of GPU and RAM that exceed the unified memory together.

    Raises:
        ConfigError: they do. The message names all three sizes.
    """
    if gpu_bytes + ram_bytes > unified_bytes:
        raise ConfigError(
            f"tiers.gpu is {format_bytes(gpu_bytes)} and tiers.ram is {format_bytes(ram_bytes)}, but GPU memory and "
            f"RAM are one memory of {format_bytes(unified_bytes)} here. Lower tiers.ram, or leave one of the two out."
        )


def limit_gpu(limit_bytes: int | None) -> None:
    """Cap the GPU memory of this process, including the part of the driver; None: no cap.

    Raises:
        ConfigError: the driver and other programs hold more than that already; or the GPU has unified memory, where
            nobody can tell the parts of a program.
    """
    if limit_bytes is not None and torch.cuda.get_device_properties(torch.cuda.current_device()).is_integrated:
        raise ConfigError(
            f"tiers.gpu_limit is {format_bytes(limit_bytes)}, but the memory of this GPU is RAM, where nobody can tell "
            "what a program holds of the GPU. Leave it out: tiers.gpu bounds state and slots."
        )

    # torch limits only its own allocations, so the memory of others is taken off.
    free_bytes, total_bytes = gpu_memory()
    context_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    share = 1.0 if limit_bytes is None else (limit_bytes - context_bytes) / total_bytes
    if share <= 0:
        raise ConfigError(
            f"tiers.gpu_limit is {format_bytes(limit_bytes or 0)}, but the GPU's driver and other programs hold "
            f"{format_bytes(context_bytes)} already; raise it."
        )

    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def free_gpu_bytes(limit_bytes: int | None) -> tuple[int, int]:
    """Return the bytes of GPU memory that this process may take, and how many of them are free.

    Args:
        limit_bytes: as for `limit_gpu`.
    """
    free_bytes, total_bytes = gpu_memory()
    most_bytes = total_bytes
    if limit_bytes is not None:
        most_bytes = min(limit_bytes, total_bytes)

    # Memory of other programs counts as ours, as in `limit_gpu`.
    taken_bytes = total_bytes - free_bytes
    return most_bytes, min(free_bytes, most_bytes - taken_bytes)
