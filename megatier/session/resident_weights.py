"""Holds all weights on the GPU while texts are generated: they are loaded once, and no forward moves any.

`session.held` takes as many weights as fit beside forwards that stream, for one call of `generate`. Here all of them
are loaded before the first forward, for as many calls as there are inside. So no pass is played. Modules have their
weights for a whole forward (`engine.resident_modules`), whichever thread calls the model, and transformers' continuous
batching runs as over any other.

The modules run as in an evaluation that streams, so a text has the same tokens. If the GPU's memory is lent meanwhile,
weights at home there come from RAM, where the store keeps them, and there is room for them where the arena was.

Threads: one at a time calls the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from megatier.engine.resident_modules import ResidentModules
from megatier.engine.stage import WeightSource, WeightUse
from megatier.errors import CapacityError
from megatier.schedule.lent_room import LentRoom, lent_room
from megatier.session.held import HeldUse
from megatier.session.ram_weights import RamWeights
from megatier.session.session import Session
from megatier.setup.machine import free_gpu_bytes
from megatier.store.copies import POISON
from megatier.tier import Kind, Phase, Tier

HOLD_PASS = "hold"
"""The name of the pass that visits all units."""


class ResidentWeights:
    """All weights of a session on the GPU. It is the source of weights meanwhile."""

    def __init__(self, session: Session, limit_bytes: int | None) -> None:
        """Load nothing yet.

        Args:
            session: the session. Each rank holds all weights.
            limit_bytes: as for `HeldWeights`.
        """
        self._model = session.engine.model
        self._stage = session.engine.model.stage
        self._source: WeightSource = session.player.weights
        self._device = session.engine.options.device
        self._limit_bytes = limit_bytes
        self._player = session.player
        self._all_ranks = session.all_ranks
        self._store = session.store
        self._blocks = session.blocks
        self._is_unified = session.setup.machine.rates.unified_bytes is not None
        self._in_ram = RamWeights(session)
        self._units = [unit.name for unit in session.own_units]
        self._uses: dict[str, HeldUse] = {}
        """What each unit's modules compute with."""
        self._modules = ResidentModules(self._model.nodes, lambda unit: self._uses[unit].bytes)
        self.num_bytes = 0
        """The bytes of weights that were copied the last time, beside those at home on the GPU."""
        self.left_bytes = 0
        """The bytes of the GPU that were left then, for keys and values and for the forward itself."""

    @property
    def is_loaded(self) -> bool:
        """Whether all weights are there."""
        return self._stage.is_resident

    def lent_room(self) -> LentRoom:
        """Return what there would be if memory was lent now. Nothing is moved.

        Raises:
            CapacityError: the weights would not fit.
        """
        gpu_bytes = self._free_bytes() + self._arena_bytes
        blocks = self._blocks
        room = lent_room(blocks.units.values(), blocks.placement, blocks.policy, gpu_bytes, is_unified=self._is_unified)
        if room.left_bytes < 0:
            raise self._short(gpu_bytes - room.left_bytes, gpu_bytes, is_lent=True)
        return room

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, all weights are on the GPU. Every update is over, and weights do not change. All ranks come here.

        Raises:
            CapacityError: they do not fit, on this rank or another one. Nothing is held then.
            TransferError, IntegrityError: weights could not be read.
        """
        with contextlib.ExitStack() as leases:
            try:
                self._load(leases)
                self._stage.source = cast(WeightSource, self)
                self._stage.is_resident = True
                yield
            finally:
                self._stage.is_resident = False
                self._stage.source = self._source
                self._drop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run one forward of the model inside, without gradients and without a pass; see `evaluating`."""
        self._stage.gradients.group = 0
        with torch.inference_mode(mode=False), torch.no_grad(), self._model.running(), self._modules.bound():
            yield

    # ------------------------------------------------------------------ the source of weights

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """Return a unit's weights, which stay where they are; see `WeightSource.enter`."""
        return self._uses[unit]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the source
        """All else is the source's own, as of `HeldWeights`."""
        return getattr(self._source, name)

    # ------------------------------------------------------------------ memory

    def _load(self, leases: contextlib.ExitStack) -> None:
        """Lease weights at home on the GPU, and copy all others there."""
        # An interrupt of the last `_drop` may have left weights there that are not those of now.
        self._modules.forget()
        is_lent = self._store.loan.is_lent
        away = [unit for unit in self._units if is_lent or not self._is_at_home(unit)]
        with self._all_ranks.failing_together():
            self._reserve(away)
        for unit in self._units:
            if unit not in away:
                # An interrupt between a lease and its entry on the stack would leave one that nobody gives back.
                with self._store.consistency.call:
                    lease = self._store.lease(self._blocks.compute_key(unit), Tier.GPU)
                    leases.enter_context(lease)
                self._uses[unit] = HeldUse(lease.bytes)

        if is_lent:
            self._in_ram.copy({unit: self._uses[unit].bytes for unit in away})
        elif away:
            self._fill_by_pass(away)
        self._wait()

    def _reserve(self, units: list[str]) -> None:
        """Take the memory for weights of units."""
        held_bytes = sum(self._blocks.compute_bytes(unit) for unit in units)
        is_lent = self._store.loan.is_lent
        needed = held_bytes + (self._in_ram.shard_bytes if is_lent else 0)
        free = max(0, self._free_bytes())
        if needed > free:
            raise self._short(needed, free, is_lent=is_lent)
        self.num_bytes = held_bytes
        self.left_bytes = free - needed
        try:
            for unit in units:
                held = torch.empty(self._blocks.compute_bytes(unit), dtype=torch.uint8, device=self._device)
                self._uses[unit] = HeldUse(held)
        except torch.OutOfMemoryError as error:
            raise self._short(needed, self._free_bytes(), is_lent=is_lent) from error

    def _fill_by_pass(self, units: list[str]) -> None:
        """Copy weights of units as a forward uses them: they come ahead of use, from all tiers and ranks."""
        self._player.begin(HOLD_PASS)
        try:
            for unit in units:
                use = self._source.enter(unit, Phase.FORWARD, 0)
                self._uses[unit].bytes.copy_(use.bytes)
                use.leave()
        except BaseException:
            self._player.cancel()
            raise
        self._player.end()
        self._player.take_events()  # nobody asks what happened in it

    def _drop(self) -> None:
        """Let all weights go, once the device is through with them."""
        self._wait()
        self._modules.forget()
        self._model.forget(self._units)
        if self._device.type == "cpu":
            # As the store does with slots: a view that outlives them is noticed.
            for unit, use in self._uses.items():
                if self._store.loan.is_lent or not self._is_at_home(unit):
                    use.bytes.fill_(POISON)
        self._uses.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_at_home(self, unit: str) -> bool:
        """Return whether a unit's weights are at home on the GPU, and not a shard of them alone."""
        return self._all_ranks.size == 1 and self._blocks.placement.homes[unit, Kind.WEIGHT] is Tier.GPU

    def _free_bytes(self) -> int:
        """Return the bytes of the GPU's memory that nobody has taken."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            return free_gpu_bytes(self._limit_bytes)[1]
        # RAM stands for it, of which the arena takes a part.
        return (self._limit_bytes or self._arena_bytes) - (0 if self._store.loan.is_lent else self._arena_bytes)

    @property
    def _arena_bytes(self) -> int:
        """The bytes of the gpu tier, which are lent."""
        usage = self._store.usage(Tier.GPU)
        return sum(usage.values()) - usage["budget"]

    def _short(self, needed: int, free: int, *, is_lent: bool) -> CapacityError:
        """Make the error of weights that do not fit."""
        lends = "Use " if is_lent else "Lend the memory of training too (Streamed.lends_memory), or use "
        remedy = "model.generate alone with lends_memory off, which streams what does not fit."
        return CapacityError("all weights on the GPU at once", needed, free, f"{lends}{remedy}")

    def _wait(self) -> None:
        """Wait for the device, on whichever streams it works."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
