"""A model, its store, its player, its optimizer and its engine: opened together, filled, closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.engine.step import Engine, EngineOptions
from megatier.errors import ConfigError, PlanError, mib
from megatier.hardware import cores_usable, cpu_has_bf16, default_budgets, ram_total_bytes, set_cuda_defaults
from megatier.measure.probe import cached_rates, io_threads
from megatier.models.decoder import Unit, build_skeleton, decays
from megatier.models.experts import cut_units
from megatier.models.frozen import freeze
from megatier.models.weights import Initialiser, SafetensorsFolder, resolve
from megatier.numerics.compilation import Compilation
from megatier.numerics.optimizer import AdamW, Hyperparameters, join_master, split_master
from megatier.play.player import Player
from megatier.schedule.placement import Placement, place
from megatier.schedule.rates import Rates
from megatier.schedule.sizes import Budgets
from megatier.schedule.slots import CHUNK_ELEMENTS_MAX
from megatier.session.workload import COMPUTE_DTYPES, Workload, advised, read_model_config
from megatier.store.store import TieredStore
from megatier.tier import Kind, Tier


class WeightReader(Protocol):
    """Where initial weights come from."""

    def read(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """(first element, flat fp32 tensor) pieces of a unit's layout, in increasing order."""


class Session:
    """A streamed model in training. Use as a context: its memory, threads and files end with it.

    Attributes:
        model: the skeleton; `model(**batch)` streams inside a pass.
        units: in module order.
        engine: steps and evaluation.
        store: holds all blocks of the run.
        placement: their homes, and the slots.
        optimizer: does the arithmetic of updates, and measures gradients.
        player: begins and ends passes.
        blocks: names and leases of the units' blocks.
        reader: reads state for checkpoints, while passes go on.
        speculation: updates before the norm is known.
        io_threads: native threads that read and write NVMe, each way, and why so many.
        rates: of the mounts, where they were measured on this machine.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_config: ModelConfig,
        tiers: TiersConfig,
        train: TrainConfig,
        numerics: NumericsConfig,
        tokens: int,
        run_id: str | None = None,
        *,
        savepoints: bool = False,
        reuses: bool = False,
    ) -> None:
        """Plan. Memory and files are reserved by `store.seal`, or by the first use of a block.

        Args:
            model: a skeleton (`models.decoder.build_skeleton`).
            model_config: compute dtype and loss.
            tiers: budgets and mounts.
            train: optimizer, groups, slices, activations.
            numerics: the guard.
            tokens: tokens per sequence.
            run_id: names the block files; random where not given.
            savepoints: one generation of what spills may be kept (`checkpoint.savepoint`).
            reuses: take the block files that a savepoint kept, with the bytes in them.

        Raises:
            PlanError, CapacityError, ConfigError, RunLockedError, UnsupportedModelError: before training starts.
        """

        def cut(parts: int) -> Workload:
            units = cut_units(model, parts)
            return Workload.of(model, units, model_config, tiers, train, numerics, tokens, savepoints=savepoints)

        parts = model_config.expert_parts
        work = cut(parts)
        self.model = model
        self.units = work.units
        dtype = COMPUTE_DTYPES[model_config.compute_dtype]
        device = choose_device(tiers)
        gpu, ram = budgets_of(tiers, device)
        if device.type == "cuda":
            _limit_gpu(tiers.gpu_limit)

        layouts = {unit.name: unit.layout.trained for unit in self.units if unit.layout.num_trained}
        with ExitStack() as stack:
            self.rates = _measured(tiers, device)
            self.io_threads = io_threads(tiers.io_threads, self.rates)
            drives = self.rates.drives if self.rates is not None and len(tiers.mounts) > 1 else ()
            shares = tuple(drive.mixed_bytes_per_s for drive in drives)
            options = replace(work.options, num_threads=self.io_threads[0], shares=shares, reuses=reuses)
            store = TieredStore.open(
                gpu=gpu, ram=ram, nvme=tiers.nvme, device=str(device), run_id=run_id, options=options
            )
            self.store = stack.enter_context(store)
            budgets = Budgets(gpu, ram, store.usage(Tier.NVME)["budget"])

            try:
                self.placement: Placement = place(work.specs, budgets, work.policy)
            except PlanError as short:
                raise advised(short, model, parts, lambda n: place(cut(n).specs, budgets, work.policy)) from short

            decay = train.weight_decay
            deferred = work.policy.deferred
            hyper = Hyperparameters(
                beta1=train.beta1,
                beta2=train.beta2,
                eps=train.eps,
                weight_decay=decay,
                clip=train.clip,
                deferred=deferred,
            )
            threads = tiers.update_threads or cores_usable()
            self.optimizer = AdamW(layouts, decays(model), hyper, dtype=dtype, groups=train.groups, num_threads=threads)
            stack.callback(self.optimizer.close)
            self.player = Player(store, work.specs, self.placement, work.policy, self.optimizer)
            stack.callback(self.player.close)
            self.blocks = self.player.blocks
            self.reader = self.player.reader
            self.speculation = self.player.updates.speculation
            engine_options = EngineOptions(
                dtype=dtype,
                device=device,
                activations=work.activations,
                groups=train.groups,
                slices=train.slices,
                fused_loss=model_config.fused_loss,
                loss_chunk=model_config.loss_chunk,
                compilation=Compilation(model_config.saved_share) if compiles(model_config, device) else None,
                fp32_products=_takes_fp32_products(model_config, device),
                max_skips=numerics.max_skips if numerics.guard else 0,
            )
            self.engine = Engine(model, self.units, self.player, self.optimizer, engine_options)
            stack.callback(self.engine.close)
            self._opened = stack.pop_all()

        self._dtype = dtype

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the lanes, free the memory, remove the block files."""
        self._opened.close()

    def load(self, source: WeightReader, progress: Callable[[Unit], None] = lambda _: None) -> None:
        """Fill every unit's master weights, piece by piece; moments are zero already.

        Frozen weights are rounded to the compute dtype as torch does, to nearest even.
        """
        for unit in self.units:
            self.fill(unit, self.master_kinds, source.read(unit))
            progress(unit)
        self.player.drain()

    @property
    def master_kinds(self) -> tuple[Kind, ...]:
        """The planes of the fp32 master."""
        return (Kind.WEIGHT, Kind.REMAINDER) if self._dtype is torch.bfloat16 else (Kind.WEIGHT,)

    def fill(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[tuple[int, Tensor]]) -> None:
        """Overwrite planes of a unit's state: those of its master, or one moment.

        Args:
            unit: one of `units`.
            kinds: `master_kinds`, or one kind that is fp32.
            pieces: (first element, flat fp32) of the unit's layout, in increasing order; what they leave out is 0.
                Frozen elements belong to the master alone.

        What fails in here leaves the state torn.
        """
        with self.store.tear.change:
            self._fill(unit, kinds, pieces)

    def _fill(self, unit: Unit, kinds: Sequence[Kind], pieces: Iterator[tuple[int, Tensor]]) -> None:
        ahead: tuple[int, Tensor] | None = None
        runs = list(self._runs(unit))
        is_master = Kind.WEIGHT in kinds
        buffer = torch.empty(max(stop - start for start, stop in runs))
        for elements in runs:
            is_frozen = elements[0] >= unit.layout.num_trained
            if is_frozen and not is_master:
                continue
            values = buffer[: elements[1] - elements[0]]
            ahead = _assemble(values, elements, pieces, ahead)
            planes = (Kind.WEIGHT,) if is_frozen else kinds

            with self.blocks.open_state(unit.name, elements, planes, fresh=planes) as state:
                if Kind.REMAINDER in planes:
                    weight = state.planes[Kind.WEIGHT]
                    remainder = state.planes[Kind.REMAINDER]
                    split_master(values, weight.view(self._dtype), remainder.view(torch.int16))
                else:
                    state.planes[planes[0]].view(self._dtype if is_master else torch.float32).copy_(values)
                state.write_back()

        if is_master:
            self.blocks.share_frozen(unit.name)

    def _runs(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """A unit's elements in runs of bounded size; one at home on the GPU, which is updated whole, is cut as well."""
        for (start, stop), _ in self.blocks.runs(unit.name):
            for first in range(start, stop, CHUNK_ELEMENTS_MAX):
                yield first, min(first + CHUNK_ELEMENTS_MAX, stop)

    def read_master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a unit's fp32 master weights, flat, on the CPU. Call `player.drain` first.

        Frozen weights have no master: theirs is what the compute dtype holds.
        """
        weight = self.read_plane(unit, Kind.WEIGHT, start, stop)
        master = weight.float()
        if self._dtype is torch.bfloat16 and (trained := min(stop, unit.layout.num_trained) - start) > 0:
            remainder = self.read_plane(unit, Kind.REMAINDER, start, start + trained)
            join_master(weight[:trained], remainder, master[:trained])
        return master

    def read_plane(self, unit: Unit, kind: Kind, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of one kind of a unit's state, flat, on the CPU, in the kind's dtype.

        Only weights have frozen elements.
        """
        dtype = {Kind.WEIGHT: self._dtype, Kind.REMAINDER: torch.int16}.get(kind, torch.float32)
        result = torch.empty(stop - start, dtype=dtype)
        for (first, last), _ in self.blocks.runs(unit.name):
            lower = max(first, start)
            upper = min(last, stop)
            if lower >= upper:
                continue
            with self.blocks.open_state(unit.name, (first, last), [kind]) as state:
                plane = state.planes[kind].view(dtype)
                result[lower - start : upper - start].copy_(plane[lower - first : upper - first])

        return result


def open_model(config: RunConfig) -> tuple[PreTrainedModel, WeightReader]:
    """The skeleton of a run's model, with its buffers and generation settings, and its first weights.

    Raises:
        ConfigError, UnsupportedModelError: there is no such model, or it cannot be streamed.
    """
    folder = resolve(config.model.path) if config.model.path is not None else None
    model = build_skeleton(read_model_config(config.model, folder), config.model.attention)
    freeze(model, config.model.frozen)
    return model, SafetensorsFolder(folder, model) if folder is not None else Initialiser(model, config.train.seed)


def choose_device(tiers: TiersConfig) -> torch.device:
    """The device that computes.

    Raises:
        ConfigError: cuda was asked for and is not there.
    """
    set_cuda_defaults()
    available = torch.cuda.is_available()
    if tiers.device == "cuda" and not available:
        raise ConfigError(
            "tiers.device is cuda, but torch sees no GPU. Check the driver (nvidia-smi) and that torch was built with "
            "CUDA, or set tiers.device to auto or cpu."
        )
    return torch.device("cuda" if available and tiers.device != "cpu" else "cpu")


def compiles(model: ModelConfig, device: torch.device) -> bool:
    """Whether layers and loss are compiled: by default on a GPU; never where bf16 products are taken in fp32."""
    wanted = device.type == "cuda" if model.compile is None else model.compile
    return wanted and not _takes_fp32_products(model, device)


def _takes_fp32_products(model: ModelConfig, device: torch.device) -> bool:
    return device.type == "cpu" and model.compute_dtype == "bf16" and not cpu_has_bf16()


def budgets_of(tiers: TiersConfig, device: torch.device) -> tuple[int, int]:
    """Bytes of GPU memory and RAM: as set, or from the machine.

    Raises:
        ConfigError: more RAM than there is. The kernel would promise it, and end the process when it is filled.
    """
    total_bytes = ram_total_bytes()
    if tiers.ram is not None and tiers.ram > total_bytes:
        raise ConfigError(
            f"tiers.ram is {mib(tiers.ram)}, but this machine, or its container, has {mib(total_bytes)} of RAM. Lower "
            "it, or leave it out for what is free."
        )

    if tiers.gpu is not None and tiers.ram is not None:
        return tiers.gpu, tiers.ram
    machine = default_budgets(device.type)
    return (
        machine.gpu_bytes if tiers.gpu is None else tiers.gpu,
        machine.ram_bytes if tiers.ram is None else tiers.ram,
    )


def _measured(tiers: TiersConfig, device: torch.device) -> Rates | None:
    """Rates of the mounts, where `megatier bench` measured them on this machine: stripes and threads follow them."""
    return cached_rates([mount.directory for mount in tiers.mounts], device.type) if tiers.mounts else None


def _limit_gpu(limit_bytes: int | None) -> None:
    """Let this process take so much GPU memory and no more; the driver's own part counts."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    context_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    share = 1.0 if limit_bytes is None else (limit_bytes - context_bytes) / total_bytes
    if share <= 0:
        raise ConfigError(
            f"tiers.gpu_limit is {mib(limit_bytes or 0)}, but the GPU's driver and other programs hold "
            f"{mib(context_bytes)} already; raise it."
        )

    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def _assemble(
    master: Tensor, elements: tuple[int, int], pieces: Iterator[tuple[int, Tensor]], ahead: tuple[int, Tensor] | None
) -> tuple[int, Tensor] | None:
    """Copy what belongs to a run of elements, zeros between; returns the piece that reaches beyond it."""
    start, stop = elements
    done = start
    while (piece := ahead or next(pieces, None)) is not None:
        first, values = piece
        lower = max(first, start)
        upper = min(first + values.numel(), stop)
        if lower < upper:
            master[done - start : lower - start] = 0
            master[lower - start : upper - start] = values[lower - first : upper - first]
            done = upper

        if first + values.numel() > stop or first >= stop:
            break
        ahead = None

    master[done - start :] = 0
    return piece
