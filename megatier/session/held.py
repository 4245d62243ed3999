"""Holds weights on the GPU, beside the arena, while a model generates text.

Each token of a text takes a forward, which uses all weights once. Those that are not at home on the GPU would come from
RAM or drives for each of them. But no backward follows, so the memory that training leaves to activations is free. As
many weights as fit there are copied, and the others stream.

How much fits is found out and not planned, because others take of the same memory: the keys and values of the tokens so
far, and other processes. A share of the GPU stays free for them:

1. The first forward holds nothing. It reads the prompt, so it takes as much memory as a forward may need. torch keeps
   that memory for the next ones, and nothing is held in it.
2. The second forward copies the weights of one unit after the other, when it has them in a slot, as long as two shares
   are left free.
3. Before each later forward the free memory is looked at. If it is less than a share, units are let go until it is two.

If memory runs out nevertheless, the text is generated again with nothing held (`session.generation`).

Passes in which different units are held use different units, so they have different names, and timelines of their own.

Threads: that of the caller alone.
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
"""The shares of the GPU's memory, of which one or two stay free."""
PROMPT = 1
"""The number of the forward that reads the prompt. The next one copies what is held."""


class HeldUse:
    """A use of weights that are held."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.bytes = weights
        """uint8 [block]."""

    def leave(self) -> None:
        """Do nothing: they stay where they are."""


class HeldWeights:
    """The weights that a session holds on the GPU while its model generates. It stands before their source then."""

    def __init__(self, session: Session, limit_bytes: int | None) -> None:
        """Hold nothing.

        Args:
            session: the session. Several ranks hold nothing: a gather takes all of them.
            limit_bytes: the GPU memory that the process may take; None: all there is. On a CPU it is the memory of the
                GPU that the arena stands for, which has no more than the arena if this is None.
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
        """What is held, by unit, in the order in which it was taken."""
        self._taken: dict[str, torch.Tensor] = {}
        """What this forward has taken, for those that follow. Its own pass has planned to load it for every use."""
        self._is_open = False
        """A text is being generated."""
        self._forwards = 0
        """The forwards of the text so far."""
        self._room = 0
        """Bytes that this forward may still take; below 0: it found no room for one unit, and takes no other."""
        self._names: dict[tuple[str, ...], str] = {}
        """What is added to the name of a pass, by the units that are held in it."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return sum(held.numel() for held in (*self._bytes.values(), *self._taken.values()))

    @property
    def is_needless(self) -> bool:
        """Whether all weights are held already, by another source (`session.resident_weights`)."""
        return self._stage.source not in (self._source, self)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold weights inside, where text is generated."""
        # A `generate` inside of another one, as some models call theirs, belongs to the outer one.
        if self._is_open or not self._away:
            yield
            return

        # Memory that torch has kept since a step is free memory again.
        self._give_back()
        try:
            self._is_open = True
            self._stage.source = cast(WeightSource, self)
            yield
        finally:
            self._stage.source = self._source
            self._is_open = False
            self.let_go()

    def begin(self, name: str) -> str:
        """Say that an evaluation follows; returns the name of its pass.

        Args:
            name: the name that it has if nothing is held.
        """
        if not self._is_open:
            return name

        self._bytes |= self._taken
        self._taken.clear()
        self._forwards += 1
        share, free = self._memory()

        # The prompt is the longest forward, so what is free after it is what stays free.
        takes = self._forwards == PROMPT + 1
        self._room = free - 2 * share if takes else 0
        if self._bytes and free < share:
            # First what torch keeps for itself, of which much may be in pieces that nobody uses again.
            self._give_back()
            self._shrink(2 * share - self._memory()[1])

        # Other units are used in the pass, so it has a name, and a timeline, of its own.
        held = tuple(self._bytes)
        return name + self._names.setdefault(held, f" held {len(self._names)}") if held else name

    def let_go(self) -> None:
        """Hold nothing any more: weights are about to change, or training needs the memory."""
        self._forwards = 0
        self._room = 0
        self._bytes |= self._taken
        self._taken.clear()
        self._drop(list(self._bytes))

    def refuse(self) -> None:
        """Hold nothing from now on, because memory has run out."""
        self.let_go()
        self._away = set()
        self._give_back()

    # ------------------------------------------------------------------ the source of weights

    def enter(self, unit: str, phase: Phase, group: int) -> WeightUse:
        """Return a unit's weights: those that are held, or else from the tiers; see `WeightSource.enter`."""
        # No lease and no wait: nobody else writes to memory that is held.
        if (held := self._bytes.get(unit)) is not None:
            return HeldUse(held)
        use = self._source.enter(unit, phase, group)
        if self._room > 0 and unit in self._away and unit not in self._taken:
            self._take(unit, use.bytes)
        return use

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the source
        """All else is the source's own: what is held changes nothing about activations."""
        return getattr(self._source, name)

    # ------------------------------------------------------------------ memory

    def _take(self, unit: str, weights: torch.Tensor) -> None:
        """Copy weights that are in compute's hands, if there is room for them."""
        # Taken off first, so that one unit without room ends the taking: those after it would be found in another
        # order.
        self._room -= weights.numel()
        if self._room < 0:
            return
        try:
            self._taken[unit] = weights.clone()
        except torch.OutOfMemoryError:
            # Somebody else has taken the memory since it was looked at.
            self._room = 0

    def _shrink(self, num_bytes: int) -> None:
        """Let so many bytes go, and what was taken last first."""
        gone = []
        for unit in reversed(self._bytes):
            if num_bytes <= 0:
                break
            num_bytes -= self._bytes[unit].numel()
            gone.append(unit)
        self._drop(gone)
        self._give_back()

    def _drop(self, units: list[str]) -> None:
        """Let the weights of some units go."""
        if not units:
            return

        # First: an interrupt in between leaves weights that are held still, and no views of some that are not.
        self._model.forget(units)
        for unit in units:
            weights = self._bytes.pop(unit)

            # As the store does with slots: a view that outlives them is noticed.
            if self._device.type == "cpu":
                weights.fill_(POISON)

    def _memory(self) -> tuple[int, int]:
        """Return the bytes of a share of the GPU, and those that are free."""
        if self._device.type == "cpu":
            # RAM stands for the GPU's memory, and nothing but the arena and what is held is counted in it.
            total = self._limit_bytes or self._arena_bytes
            free = total - self._arena_bytes - self.num_bytes
            return total // GPU_SHARES, free
        total, free = free_gpu_bytes(self._limit_bytes)
        return total // GPU_SHARES, free

    def _give_back(self) -> None:
        """Give memory that torch keeps, and nobody uses, back to the device."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
