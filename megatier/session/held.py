"""Holds weights on the GPU, beside the arena, while a model generates text.

Each token of a text takes a forward, which uses all weights once. Weights that are not at home on the GPU would have to
come from RAM or drives for every token. But generation has no backward, so the memory for activations is free. Weights
are copied there as long as they fit, and the others stream.

The code measures how much fits instead of planning it, because the KV cache and other processes use the same memory. It
leaves a share of the GPU free for them:

1. The first forward holds nothing. It reads the prompt, so it takes as much memory as any forward. torch keeps that
   memory for the next ones.
2. The second forward copies the weights of each unit while it has them in a slot, as long as two shares stay free.
3. Before each later forward the free memory is measured. If it is less than one share, held units are dropped until two
   shares are free.

If memory still runs out, the text is generated again with nothing held (`session.generation`).

A pass has another name, and so a timeline of its own, whenever other units are held, because it uses other units.

Everything runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from megatier.engine.stage import WeightSource, WeightUse
from megatier.session.session import Session
from megatier.setup.machine import free_gpu_bytes
from megatier.store.copies import POISON
from megatier.tier import Kind, Phase, Tier

GPU_SHARES = 16
"""The GPU's memory has this many shares, of which one or two stay free."""
PROMPT = 1
"""Number of the forward that reads the prompt. The next one copies weights."""


class HeldUse:
    """A use of held weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.bytes = weights
        """uint8 [block]."""

    def leave(self) -> None:
        """Do nothing, because the weights stay."""


class HeldWeights:
    """The weights that a session holds on the GPU while its model generates. Meanwhile it wraps their source."""

    def __init__(self, session: Session, limit_bytes: int | None) -> None:
        """Hold nothing.

        Args:
            session: the session. Several ranks hold nothing, because an all-gather needs all of them.
            limit_bytes: the GPU memory that the process may take; None: all of it. On a CPU this is the memory of the
                GPU that the arena stands for; None: no more than the arena.
        """
        self._model = session.engine.model
        self._stage = session.engine.model.stage
        self._source: WeightSource = session.player.weights
        self._device = session.engine.options.device
        self._limit_bytes = limit_bytes
        homes = session.placement.homes
        is_alone = session.ranks is None
        self._away = {
            unit.name for unit in session.own_units if is_alone and homes[unit.name, Kind.WEIGHT] is not Tier.GPU
        }
        """The units whose weights are not at home on the GPU."""
        usage = session.store.usage(Tier.GPU)
        self._arena_bytes = sum(usage.values()) - usage["budget"]

        self._bytes: dict[str, torch.Tensor] = {}
        """Held weights by unit, in the order in which they were copied."""
        self._taken: dict[str, torch.Tensor] = {}
        """Weights that this forward has copied for the next ones. Its own pass has planned a load for every use."""
        self._is_open = False
        """Whether a text is being generated."""
        self._forwards = 0
        """Number of forwards of the text so far."""
        self._room = 0
        """Bytes that this forward may still copy; below 0: a unit did not fit, and no other is copied."""
        self._names: dict[tuple[str, ...], str] = {}
        """Suffixes of the names of passes, by the units that are held in them."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return sum(held.numel() for held in (*self._bytes.values(), *self._taken.values()))

    @property
    def is_needless(self) -> bool:
        """Whether `session.resident_weights` holds all weights already."""
        return self._stage.source not in (self._source, self)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold weights inside this context, in which text is generated."""
        # Some models call `generate` inside `generate`. The inner call belongs to the outer one.
        if self._is_open or not self._away:
            yield
            return

        # torch has kept memory since the last step, which is free now.
        self._give_back()
        try:
            self._is_open = True
            self._stage.source = cast(WeightSource, self)
            yield
        finally:
            self._stage.source = self._source
            self._is_open = False
            self.drop_all()

    def begin(self, name: str) -> str:
        """Prepare for a forward, and return the name of its pass.

        Args:
            name: the name of the pass if nothing is held.
        """
        if not self._is_open:
            return name

        self._bytes |= self._taken
        self._taken.clear()
        self._forwards += 1
        share, free = self._memory()

        # The prompt is the longest forward, so the memory that is free after it stays free.
        takes = self._forwards == PROMPT + 1
        self._room = free - 2 * share if takes else 0
        if self._bytes and free < share:
            # torch may keep much memory in pieces that are never used again, so that goes first.
            self._give_back()
            self._shrink(2 * share - self._memory()[1])

        # The pass uses other units than usual, so it needs its own name and timeline.
        held = tuple(self._bytes)
        return name + self._names.setdefault(held, f" held {len(self._names)}") if held else name

    def drop_all(self) -> None:
        """Drop all held weights, because they are about to change or training needs the memory."""
        self._forwards = 0
        self._room = 0
        self._bytes |= self._taken
        self._taken.clear()
        self._drop(list(self._bytes))

    def refuse(self) -> None:
        """Drop all held weights and hold none from now on, because memory has run out."""
        self.drop_all()
        self._away = set()
        self._give_back()

    # ------------------------------------------------------------------ the source of weights

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """Return a unit's held weights, or else those from the tiers; see `WeightSource.enter`."""
        # Held weights need no lease and no wait, because nobody else writes to them.
        if (held := self._bytes.get(unit)) is not None:
            return HeldUse(held)
        use = self._source.enter(unit, phase, group)
        if self._room > 0 and unit in self._away and unit not in self._taken:
            self._take(unit, use.bytes)
        return use

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the source
        """Return any other attribute from the source."""
        return getattr(self._source, name)

    # ------------------------------------------------------------------ memory

    def _take(self, unit: str, weights: torch.Tensor) -> None:
        """Copy the weights that compute is using, if there is room for them."""
        # The bytes are taken off first, so that no unit after the first that does not fit is copied. Otherwise the held
        # units would differ from their order.
        self._room -= weights.numel()
        if self._room < 0:
            return
        try:
            self._taken[unit] = weights.clone()
        except torch.OutOfMemoryError:
            # Somebody else has taken the memory since it was measured.
            self._room = 0

    def _shrink(self, num_bytes: int) -> None:
        """Drop held units of `num_bytes` or more, the last ones first."""
        gone = []
        for unit in reversed(self._bytes):
            if num_bytes <= 0:
                break
            num_bytes -= self._bytes[unit].numel()
            gone.append(unit)
        self._drop(gone)
        self._give_back()

    def _drop(self, units: list[str]) -> None:
        """Drop the held weights of some units."""
        if not units:
            return

        # This comes first, so that an interrupt in between leaves no views of weights that are gone.
        self._model.forget(units)
        for unit in units:
            weights = self._bytes.pop(unit)

            # The store does the same with slots, so that a view which outlives its weights is found.
            if self._device.type == "cpu":
                weights.fill_(POISON)

    def _memory(self) -> tuple[int, int]:
        """Return the bytes of one share of the GPU, and the free bytes."""
        if self._device.type == "cpu":
            # RAM stands for the GPU's memory, in which only the arena and held weights count.
            total = self._limit_bytes or self._arena_bytes
            free = total - self._arena_bytes - self.num_bytes
            return total // GPU_SHARES, free
        total, free = free_gpu_bytes(self._limit_bytes)
        return total // GPU_SHARES, free

    def _give_back(self) -> None:
        """Return memory that torch keeps unused to the device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
