"""Jobs of one of several ranks that share the state, as the queue `ranks` orders them. Pure.

One rank stands for all: each does the same at the same time. In the simulation two lanes, `gather` and `scatter`, stand
for the queue `ranks`, because each has a rate of its own. Every collective waits for the one before, so only one of the
two works at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from megatier.forecast.jobs import ComputeSeconds, StepJobs
from megatier.schedule.placement import Placement
from megatier.schedule.policy import Policy
from megatier.schedule.slots import SLOTS_MIN
from megatier.schedule.timeline import Item, Load, ReduceScatter
from megatier.schedule.unit_spec import UnitSpec


class RankJobs(StepJobs):
    """The jobs of one rank in some steps in a row."""

    def __init__(
        self,
        compute_seconds: ComputeSeconds,
        units: Sequence[UnitSpec],
        placement: Placement,
        policy: Policy,
        parameters_per_flop: float,
    ) -> None:
        """See `StepJobs`."""
        super().__init__(compute_seconds, units, placement, policy, parameters_per_flop)
        self._last: int | None = None
        """The last collective."""
        self._made: dict[tuple[str, int], int] = {}
        """The job that made the gradient of a unit and group."""
        self._shards: deque[tuple[int, ...]] = deque(maxlen=SLOTS_MIN)
        """The jobs that emptied the GPU slot of each of the last shards."""
        self._scatters: deque[int] = deque(maxlen=SLOTS_MIN)
        """The last scatters, each of which emptied a GPU slot for the gradient of a group."""

    def _comes_before(self, item: Item, index: int) -> bool:
        """Return whether an item is added before an access, because all is there that it may wait for."""
        return item.after_access < index

    def _add_item(self, item: Item) -> None:
        """Add the jobs of an item."""
        if isinstance(item, ReduceScatter):
            self._scatter(item)
        else:
            super()._add_item(item)

    def _load(self, load: Load) -> None:
        """Bring this rank's shard to the GPU, if it is not at home there, and then those of all ranks together."""
        unit = load.unit
        spec = self._units[unit]
        *own, gather = self._moves.load(unit)
        updated = self._updates.get(unit)
        arrived = updated
        if own:
            slot = self._shards[0] if len(self._shards) == SLOTS_MIN else ()

            # Pieces let one lane work on what another has brought. With one lane alone they save no time.
            pieces = self._num_pieces(spec.num_elements) if len(own) > 1 else 1
            needs = self._last_end, *slot, updated
            arrived = self._chain(own, unit, *needs, pieces=pieces)

        # A streamed unit's shard leaves its slot for the other ranks, and for home.
        returned: tuple[int, ...] = ()
        if load.updates:
            assert arrived is not None
            home = self._update_streamed(spec, arrived)
            returned = (home,)
            arrived = self._updates[unit]

        # Behind the collective before it, whichever lane of the simulation has that.
        free = self._slot_free(load)
        needs = self._last, arrived, free
        gathered = self._add("gather", unit, gather.num_bytes, *needs)
        self._last = gathered
        self._shards.append((gathered, *returned))
        self._arrivals[unit] = gathered

    def _hand_over(self, spec: UnitSpec, group: int, made: int, before: int | None) -> None:
        """Leave the gradient to the queue `ranks`."""
        self._made[spec.name, group] = made

    def _scatter(self, scatter: ReduceScatter) -> None:
        """Send a group's gradient to the owners of its shards, and add what came to the sum of this rank's shard."""
        unit = scatter.unit
        spec = self._units[unit]
        gradient = self._moves.gradient(unit, scatter.group)
        fetched = None
        if gradient.fetched:
            shipped = self._grads[unit]
            fetched = self._chain(gradient.fetched, unit, shipped, self._last)

        (move,) = self._moves.reduce_scatter(scatter)
        made = self._made.pop((unit, scatter.group))
        scattered = self._add("scatter", unit, move.num_bytes, self._last, made)
        self._scatters.append(scattered)

        # The addition takes next to no time, but it needs the sum of the groups before, or a slot for a new one.
        slot = super()._grad_slot(unit)
        needs = scattered, fetched, slot
        added = self._add("scatter", f"{unit} sum", 0.0, *needs)
        self._last = added
        self._ship(spec, gradient, added)

    def _grad_slot(self, unit: str) -> int | None:
        """Return the job that empties a slot in which a whole gradient of a group is made; None: a slot is free."""
        return self._scatters[0] if len(self._scatters) == SLOTS_MIN else None

    def _awaited(self) -> Iterable[int | None]:
        """Return the jobs that a step awaits besides compute: the norm is known when the last gradient is added."""
        return (self._last,)
