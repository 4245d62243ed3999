"""The jobs of one of several ranks that share the state, with the collectives of the queue `ranks`. Pure.

One rank stands for all, because each does the same at the same time. Two lanes of the simulation, `gather` and
`scatter`, stand for the queue `ranks`, because all-gathers and reduce-scatters have different rates. Every collective
waits for the one before, so only one of the two lanes works at a time.
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
    """The jobs of one rank in several steps in a row."""

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
        self._gradient_jobs: dict[tuple[str, int], int] = {}
        """The job that made the gradient of a unit and group."""
        self._shards: deque[tuple[int, ...]] = deque(maxlen=SLOTS_MIN)
        """The jobs that emptied the GPU slots of the last shards."""
        self._scatters: deque[int] = deque(maxlen=SLOTS_MIN)
        """The last reduce-scatters, each of which emptied a GPU slot for a group's gradient."""

    def _comes_before(self, item: Item, index: int) -> bool:
        """Return whether an item is added before an access: what it waits for was added already."""
        return item.after_access < index

    def _add_item(self, item: Item) -> None:
        """Add the jobs of an item."""
        if isinstance(item, ReduceScatter):
            self._scatter(item)
        else:
            super()._add_item(item)

    def _load(self, load: Load) -> None:
        """Bring this rank's shard to the GPU, if it is not at home there, and then all-gather the shards."""
        unit = load.unit
        spec = self._units[unit]
        *shard_moves, gather = self._moves.load(unit)
        updated = self._updates.get(unit)
        arrived = updated
        if shard_moves:
            slot = self._shards[0] if len(self._shards) == SLOTS_MIN else ()

            # Pieces let two lanes overlap. With one lane they save no time.
            pieces = self._list.num_pieces(spec.num_elements) if len(shard_moves) > 1 else 1
            needs = self._last_end, *slot, updated
            arrived = self._list.chain(shard_moves, unit, *needs, pieces=pieces)

        # The shard of a streamed unit leaves its slot only when it is gathered and home.
        returned: tuple[int, ...] = ()
        if load.updates:
            assert arrived is not None
            home = self._update_streamed(spec, arrived)
            returned = (home,)
            arrived = self._updates[unit]

        # The collective before it may be on the other lane.
        free = self._slot_free(load)
        needs = self._last, arrived, free
        gathered = self._list.add("gather", unit, gather.num_bytes, *needs)
        self._last = gathered
        self._shards.append((gathered, *returned))
        self._arrivals[unit] = gathered

    def _hand_over(self, spec: UnitSpec, group: int, gradient_job: int, before: int | None) -> None:
        """Note the gradient for the queue `ranks`."""
        self._gradient_jobs[spec.name, group] = gradient_job

    def _scatter(self, scatter: ReduceScatter) -> None:
        """Reduce-scatter a group's gradient, and add the result to the sum of this rank's shard."""
        unit = scatter.unit
        spec = self._units[unit]
        gradient = self._moves.gradient(unit, scatter.group)
        fetched = None
        if gradient.fetched:
            shipped = self._grads[unit]
            fetched = self._list.chain(gradient.fetched, unit, shipped, self._last)

        (move,) = self._moves.reduce_scatter(scatter)
        gradient_job = self._gradient_jobs.pop((unit, scatter.group))
        scattered = self._list.add("scatter", unit, move.num_bytes, self._last, gradient_job)
        self._scatters.append(scattered)

        # The addition takes almost no time, but it waits for the sum of the groups before, or a slot for a new sum.
        slot = super()._grad_slot(unit)
        needs = scattered, fetched, slot
        added = self._list.add("scatter", f"{unit} sum", 0.0, *needs)
        self._last = added
        self._ship(spec, gradient, added)

    def _grad_slot(self, unit: str) -> int | None:
        """Return the job that empties a GPU slot for a group's whole gradient; None: a slot is free."""
        return self._scatters[0] if len(self._scatters) == SLOTS_MIN else None

    def _list_awaited(self) -> Iterable[int | None]:
        """Return what else the end of a step waits for: the last gradient, without which the norm is not known."""
        return (self._last,)
