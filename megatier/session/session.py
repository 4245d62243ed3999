"""A session: a streamed model with its store, player, optimizer and engine.

`train`, `megatier.stream` and the commands open one from a `Setup`. It is used on the thread that has opened it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from megatier.compute.compilation import Compilation, import_compiler
from megatier.compute.compile_clock import CLOCK
from megatier.defaults import usual_defaults
from megatier.drives.blockfile import IoOptions
from megatier.drives.mounts import rank_id
from megatier.engine.engine_options import EngineOptions
from megatier.engine.step import Engine
from megatier.engine.unit_model import UnitModel
from megatier.errors import PlanError
from megatier.hardware import cores_usable
from megatier.measure.probe import io_threads
from megatier.models.decoder import Unit, decay_parameter_names
from megatier.models.weights import PartReader, WeightReader
from megatier.optim.gradient_sums import GradientSums
from megatier.optim.masters import join_master, plane_dtype
from megatier.optim.optimizer import RunOptimizer
from megatier.optim.rules import Hyperparameters
from megatier.owner import Owner
from megatier.play.player import Player
from megatier.play.unit_blocks import block_key
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.schedule.budgets import Budgets, shared_buffer_bytes
from megatier.schedule.placement import Placement, name_all_shortages, place
from megatier.session.filling import Filling, Progress, Sources
from megatier.session.kept_code import keep_code
from megatier.session.rank_shards import Read, WholeMasters, cut_shards, reading_masters
from megatier.setup.kernel_trial import try_kernels
from megatier.setup.machine import check_attention, limit_gpu
from megatier.setup.setup import Setup, advise_expert_parts
from megatier.setup.workload import COMPUTE_DTYPES, Workload
from megatier.store.store import TieredStore
from megatier.tier import Kind, Tier
from megatier.trace.events import COMPILER
from megatier.workers import Workers


class Session:
    """A streamed model in training. Use it as a context, which frees its memory, threads and files at the end.

    Attributes:
        setup: the run, as it was opened.
        model: the skeleton. `model(**batch)` streams inside a pass.
        own_units: the units, in module order, with the layout of this rank's shards.
        whole_units: the same units with the layout of the shards of all ranks.
        ranks: the ranks that share the state; None: this process has all of it.
        all_ranks: the same, or a `SingleRank` that answers the same calls.
        engine: runs steps and evaluations.
        store: holds all blocks of the run.
        placement: their homes, and the slots.
        optimizer: computes updates and the norms of gradients.
        player: begins and ends passes.
        blocks: names and leases of the units' blocks.
        reader: reads state for checkpoints while passes go on.
        speculation: runs updates before the norm is known.
        in_place: names of the units whose frozen weights are read from the model's own files.
        why_copied: why other frozen weights on NVMe are not read in place, in words.
        io_threads: the number of native threads that read NVMe, which is also that of those that write, and the reason.
        owner: the process that has opened the session.
    """

    @usual_defaults()
    def __init__(
        self,
        setup: Setup,
        run_id: str | None = None,
        *,
        seed: int | None = None,
        reuses: bool = False,
        run: str = "",
        ranks: Ranks | None = None,
        any_shape: bool = False,
    ) -> None:
        """Choose homes and slots, and open all parts.

        `seal`, or the first use of a block, allocates memory and files.

        Args:
            setup: the run.
            run_id: names the block files; None: random.
            seed: seed of the random numbers of forwards; None: the caller has seeded torch's generators.
            reuses: whether to reuse the block files of a savepoint with their contents.
            run: the run directory, which is noted beside the block files; empty: there is none.
            ranks: the ranks that share the state. Budgets of RAM and NVMe are those of a host, for all its ranks.
            any_shape: whether batches may have any shape, so that layers are compiled with dynamic shapes.

        Raises:
            PlanError, CapacityError, ConfigError, RunLockedError, UnsupportedModelError: the run cannot start.
        """
        self.owner = Owner("this streamed model")
        self.setup = setup
        self.model = setup.model
        self.ranks = ranks
        self.all_ranks = ranks or SingleRank()
        work = setup.work
        self.whole_units = work.units
        self.own_units = work.units if ranks is None else cut_shards(work.units, ranks)

        # This refuses a run that the device cannot compute, so it comes before anything is opened.
        options = _engine_options(setup, seed, any_shape=any_shape)
        if setup.compiles:
            keep_code()
        rates = setup.machine.measured_rates
        self.io_threads = io_threads(setup.config.tiers.io_threads, rates)

        # Each statement opens a part and puts its closing on the stack. If a later one fails, all open parts are
        # closed, the last one first. `close` does the same.
        with ExitStack() as opened:
            # A block has moved when its slowest mount is done. Reads and writes come mixed, so mounts get shares by
            # their mixed rates.
            drives = rates.drives if rates is not None and len(setup.machine.mounts) > 1 else ()
            shares = tuple(drive.mixed_bytes_per_s for drive in drives)
            io = replace(
                work.options,
                num_threads=self.io_threads[0],
                shares=shares,
                reuses=reuses,
                run=run,
            )
            self.store, budgets = _open_store(opened, setup, io, run_id, ranks)
            self.placement = _place(setup, budgets)
            self.optimizer = self._open_optimizer(opened, setup)
            self._open_player(opened, work)

            # This comes after the player, which has registered all blocks and so given them extents.
            self.in_place = self._attach_base(work)
            self.why_copied = work.in_place.why_not

            # The model installs the nodes in the skeleton's modules.
            model = UnitModel(self.model, work.units, self.player, self.optimizer.sums, options, self.all_ranks)
            opened.callback(model.close)
            self.engine = Engine(model, self.player, self.optimizer, self.all_ranks)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The other ranks may wait for this one, and closing for them. A forked child owns none of this.
        ranks = self.ranks if self.owner.is_here else None
        try:
            if error is not None and ranks is not None:
                ranks.fail(error)
        finally:
            # Telling them takes seconds, in which a second interrupt may come.
            self.close()

    def close(self) -> None:
        """Stop the queues, free the memory, remove the block files. In a forked child this does nothing."""
        if self.owner.is_here:
            self._opened.close()

    def seal(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Take all memory and files, as `TieredStore.seal` does. What torch's compiler needs is imported meanwhile."""
        # In another thread, since the memory is touched, locked and cleared without the interpreter.
        with closing(Workers(1, "megatier-compiler")) as workers:
            imported = workers.submit(import_compiler) if self.setup.compiles else None
            self.store.seal(progress)
            if imported is not None:
                imported.result()

    def _open_optimizer(self, opened: ExitStack, setup: Setup) -> RunOptimizer:
        """Start the optimizer of what is trained, with its threads."""
        train, policy = setup.config.train, setup.work.policy
        hyper = Hyperparameters(
            beta1=train.beta1,
            beta2=train.beta2,
            eps=train.eps,
            weight_decay=train.weight_decay,
            momentum=train.momentum,
            clip=train.clip,
            deferred=policy.deferred,
        )

        # The ranks of a host share its cores.
        host_ranks = setup.machine.world.num_host_ranks
        num_threads = max(1, (setup.config.tiers.update_threads or cores_usable()) // host_ranks)
        layouts = {unit.name: unit.layout.trained for unit in self.own_units if unit.layout.num_trained}
        sums = GradientSums(layouts, groups=policy.groups, num_threads=num_threads, ranks=self.ranks)
        opened.callback(sums.close)
        optimizer = RunOptimizer(
            layouts,
            decay_parameter_names(self.model),
            hyper,
            sums,
            num_threads=num_threads,
            rank=self.all_ranks.rank,
            seed=train.seed,
        )
        opened.callback(optimizer.close)
        return optimizer

    def _open_player(self, opened: ExitStack, work: Workload) -> None:
        """Start the queues that play the timeline, and name those of its parts that others use."""
        self.player = Player(self.store, work.specs, self.placement, work.policy, self.optimizer, self.ranks)
        opened.callback(self.player.close)
        opened.enter_context(CLOCK.pausing(partial(self.player.waiting, COMPILER)))
        self.blocks = self.player.blocks
        self.filling = Filling(self.blocks)
        self.reader = self.player.reader
        self.speculation = self.player.updates.speculation

    def _attach_base(self, work: Workload) -> tuple[str, ...]:
        """Say where frozen weights lie that are read from the model's own files; returns the units that have some."""
        homes = self.placement.homes
        on_nvme = tuple(name for name in work.in_place.parts if homes[name, Kind.WEIGHT] is Tier.NVME)
        for name in on_nvme:
            # Frozen weights never change, so all generations of a unit read the same bytes.
            for number in self.blocks.generations.places(name, Kind.WEIGHT):
                assert self.store.files is not None
                key = block_key(name, Kind.WEIGHT, number)
                self.store.files.attach(self.store.extents[key], work.in_place.parts[name])
        return on_nvme

    @usual_defaults()
    def load(self, source: WeightReader, progress: Progress = lambda _: None) -> None:
        """Fill the master weights of all units, piece by piece. Moments are zero already.

        Frozen weights are rounded to the dtype of their plane as torch does, to nearest even.

        Args:
            source: gives the weights. If several threads may read it, all cores do.
            progress: is called after each unit.
        """
        # An error or interrupt in here leaves units of two models, which nobody may train or export: the state is torn.
        with self.player.loading():
            if isinstance(source, PartReader):
                self.filling.fill_masters(self.whole_units, self.own_units, source, self.num_cores, progress)
                return
            for whole, unit in zip(self.whole_units, self.own_units, strict=True):
                shard = None if self.ranks is None else unit.layout
                pieces = source.read(whole, shard)
                self.filling.fill(unit, unit.layout.schema.master_kinds, pieces, base=True)
                progress(unit)

    @property
    def num_cores(self) -> int:
        """Cores of this process: the ranks of a host share its cores."""
        return max(1, cores_usable() // self.setup.machine.world.num_host_ranks)

    def fill_arrays(self, sources: Sources, threads: int, progress: Progress) -> None:
        """Overwrite planes of all units, in several threads. Frozen elements of a base stay as they are.

        Args:
            sources: gives the planes of a unit that are filled together, as for `Filling.fill`, each with what opens
                their pieces. It is called for a unit in this thread, and what it gives in others.
            threads: most threads that fill what is not at home on NVMe.
            progress: is called after each unit, in this thread.
        """
        # Some planes would be new and others old after an interrupt in here.
        with self.store.consistency.change:
            self.filling.fill_arrays(self.own_units, sources, threads, progress)

    def read_master(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a unit's fp32 masters, flat, on the CPU. Call `player.drain` first.

        Frozen weights have no remainder, so their master is the weight as it is.
        """
        # The trained elements come first in every unit, so those that have a remainder are the front of what was asked
        # for.
        weight = self.read_plane(unit, Kind.WEIGHT, start, stop)
        master = weight.float()
        is_split = Kind.REMAINDER in unit.layout.schema.kinds
        num_trained = min(stop, unit.layout.num_trained) - start
        if is_split and num_trained > 0:
            remainder = self.read_plane(unit, Kind.REMAINDER, start, start + num_trained)
            join_master(weight[:num_trained], remainder, master[:num_trained])
        return master

    def reading_masters(self) -> AbstractContextManager[Read | None]:
        """Give the first rank a function that reads masters of `whole_units`; see `rank_shards.reading_masters`."""
        return reading_masters(self.ranks, self.whole_units, self.own_units, self.read_master)

    def read_whole(self, whole: Unit, start: int, stop: int) -> Tensor:
        """Return elements of one of `whole_units`, as `read_master` does of `own_units`. Every rank calls it alike."""
        if self.ranks is None:
            return self.read_master(whole, start, stop)
        masters = WholeMasters(self.ranks, self.whole_units, self.own_units, self.read_master)
        return masters.share(whole.name, start, stop)

    def read_plane(self, unit: Unit, kind: Kind, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of one kind of a unit's state, flat, on the CPU, in the kind's dtype.

        Only weights have frozen elements.
        """
        dtype = plane_dtype(unit.layout.schema, kind)
        result = torch.empty(stop - start, dtype=dtype, device="cpu")

        for (first, last), _ in self.blocks.runs(unit.name):
            lower = max(first, start)
            upper = min(last, stop)
            if lower >= upper:
                continue

            # A plane is copied while its lease is held, since its slot goes to another run after that.
            with self.blocks.open_state(unit.name, (first, last), [kind]) as state:
                plane = state.planes[kind].view(dtype)
                wanted = plane[lower - first : upper - first]
                result[lower - start : upper - start].copy_(wanted)

        return result


def _open_store(
    opened: ExitStack, setup: Setup, options: IoOptions, run_id: str | None, ranks: Ranks | None
) -> tuple[TieredStore, Budgets]:
    """Open the tiers, in which nothing is reserved yet; returns their budgets too.

    With ranks, each has its share of the host's RAM and mounts, and all have the least of all budgets: homes and slots
    follow from them, and have to be the same everywhere.
    """
    machine = setup.machine
    local_size = machine.world.num_host_ranks

    # A host's RAM and drives are cut evenly among its ranks, because their shards are of equal size.
    rank_budgets = setup.budgets.of_rank(machine.world)
    nvme = [f"{mount.directory}:{(mount.num_bytes or 0) // local_size}" for mount in machine.mounts]
    if ranks is not None:
        # Each rank has a directory of its own on every mount, which `leftovers` knows by this form of name.
        run_id = rank_id(ranks.broadcast(lambda: run_id or secrets.token_hex(6)), ranks.rank)
    if machine.device.type == "cuda":
        limit_gpu(setup.config.tiers.gpu_limit)

    allocate = None
    if ranks is not None:
        # Other ranks may read this memory, so the ranks allocate it together. They drop it after the store has closed,
        # since this is on the stack before the store.
        opened.callback(ranks.drop_memory)
        buffer = shared_buffer_bytes(setup.budgets.ram // local_size)
        if machine.device.type == "cuda":
            allocate = partial(ranks.allocate_gpu_tier, buffer_bytes=buffer, prefers=machine.rates.ranks_way)
        else:
            ranks.share_ram(buffer)
    device = str(machine.device)
    locked = setup.config.tiers.locked
    store = TieredStore.open(
        gpu=rank_budgets.gpu,
        ram=rank_budgets.ram,
        nvme=nvme,
        device=device,
        run_id=run_id,
        options=options,
        allocate=allocate,
        # The driver's limit is one for all processes of a host.
        locked=None if locked is None else locked // local_size,
    )
    opened.enter_context(store)
    budgets = replace(rank_budgets, nvme=store.usage(Tier.NVME)["budget"])
    if ranks is not None:
        budgets = Budgets.least(ranks.all_gather_object(budgets))
    return store, budgets


def _place(setup: Setup, budgets: Budgets) -> Placement:
    """Choose homes and slots.

    Raises:
        PlanError: it does not fit; says so if more parts of experts would do.
    """
    work = setup.work
    try:
        return place(work.specs, budgets, work.policy)
    except PlanError as short:
        refusal = advise_expert_parts(short, setup, lambda other: place(other.work.specs, budgets, other.work.policy))
        if refusal is not short:
            raise refusal from short
        # Nobody is to raise one budget and meet the next one that is too small.
        raise name_all_shortages(short, work.specs, budgets, work.policy) from short


def _engine_options(setup: Setup, seed: int | None, *, any_shape: bool) -> EngineOptions:
    """Turn the settings into options of the engine, and refuse those that the device cannot compute."""
    config, machine, work = setup.config, setup.machine, setup.work
    model = config.model
    check_attention(model.attention, machine.device)
    machine.check_products(config.numerics.products)
    try_kernels(setup)
    compilation = Compilation(model.saved_share, work.keeps_attention, any_shape)
    return EngineOptions(
        dtype=COMPUTE_DTYPES[model.compute_dtype],
        device=machine.device,
        activations=work.activations,
        groups=config.train.groups,
        slices=config.train.slices,
        fused_loss=model.fused_loss,
        loss_chunk=model.loss_chunk,
        tile_tokens=model.tile_tokens,
        compilation=compilation if setup.compiles else None,
        keeps_attention=work.keeps_attention,
        offloads_attention=work.offloads_attention,
        fp8_products=work.products.fp8,
        fp32_products=machine.takes_fp32_products(model),
        any_shape=any_shape,
        seed=seed,
        # Without the guard the first step that is not finite ends the run.
        max_skips=config.numerics.max_skips if config.numerics.guard else 0,
    )
