"""Updates unit by unit, in the tier that holds a unit's state, when its gradient is final.

The queue `update` runs AdamW on the CPU for units whose state is in RAM, and sums groups there. The queue `update_nvme`
does so for units that spill (`spilled_updates`); it is a queue of its own so that no drive waits for the other. The
queue `update_gpu` runs AdamW on the GPU.

A streamed unit's state comes to GPU slots during the backward, when links and memory have time. It is updated there as
soon as the norm is known, and goes home when the CPU is through with its own updates, which need all that memory gives.

If a unit has a spare generation of state, its update may run before the norm is known: `speculation` says when. If the
generation that holds is kept as a savepoint, the update writes a spare one, which holds from then on.

Threads: the thread that computes submits updates and sums (autograd's, in a backward). Any thread may ask for one of
them (`latest`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

from megatier.errors import NonFiniteError, StepAbandonedError
from megatier.play.gate import Gate
from megatier.play.grad_blocks import grad_key, sum_key
from megatier.play.matrix_carrier import MatrixCarrier
from megatier.play.optimizer_protocol import Optimizer
from megatier.play.speculation import Speculation
from megatier.play.spilled_updates import SpilledUpdates
from megatier.play.unit_blocks import UnitBlocks, block_key
from megatier.play.update_under_way import UpdateUnderWay
from megatier.schedule.demand import Demand
from megatier.schedule.timeline import Exchange, Update
from megatier.store.queue import Queue
from megatier.store.transfer import Transfer
from megatier.tier import Kind, Tier
from megatier.trace.recorder import Recorder


class Updates:
    """The updates of a run's units, and the sums of groups before them. `close` stops their queues."""

    def __init__(
        self,
        blocks: UnitBlocks,
        optimizer: Optimizer,
        gate: Gate,
        recorder: Recorder,
        demand: Demand,
    ) -> None:
        """Start the queues.

        Args:
            blocks: the run's blocks.
            optimizer: does the arithmetic.
            gate: counts the accesses of the pass that are over; a fed load waits for its slot there.
            recorder: notes updates.
            demand: counts the bytes that speculative updates move.
        """
        self._blocks = blocks
        self._optimizer = optimizer
        self._recorder = recorder
        self._store = blocks.store
        self._placement = blocks.placement
        self._policy = blocks.policy

        self.exchange: Transfer | None = None
        """The last transfer that was submitted to take streamed state home and bring it again."""
        self._last: dict[str, Transfer] = {}
        """The update or sum of each unit that was submitted last, but for speculative updates. One that failed stays,
        so its error stops every step that follows."""
        self._fetched: dict[str, Transfer] = {}
        """Sums of groups on their way to the GPU that nobody has taken yet."""
        self.ahead: frozenset[str] = frozenset()
        """The streamed units whose state is on the GPU, or on its way there, for the next update."""
        self._is_closed = False
        self._last_queue = "update"
        """The queue of the update or sum that was submitted last."""
        self._updated: list[str] = []
        """In the immediate mode: the units whose update in this step has begun, on whichever queue."""

        recorder.busy.update(update="update", update_nvme="nvme_to_ram", update_gpu="update_gpu")

        # The immediate mode looks at sums of squares on the GPU. Otherwise the CPU's queues need no stream.
        clock = None if self._policy.deferred else self._store.clock

        # Items wait for loads and slots, so for compute, which submits them. Therefore no queue has a bound.
        self._in_ram = Queue("update", clock)
        self._on_nvme = Queue("update_nvme", clock)
        self._on_gpu = Queue("update_gpu", self._store.clock)
        self.queues = (self._in_ram, self._on_nvme, self._on_gpu)
        """The three queues."""

        self._carrier = MatrixCarrier(self._store, optimizer)
        self._spilled = SpilledUpdates(blocks, optimizer, self._carrier, gate, recorder, self._on_nvme, self._check)
        self.speculation = Speculation(blocks, optimizer, self._carrier, recorder, demand, self._in_ram, self._on_nvme)
        """The updates that run before the norm is known."""

    # ------------------------------------------------------------------ the player's side

    def begin(self) -> None:
        """Begin a training pass: none of its updates has run."""
        self._updated.clear()
        self.speculation.begin()

    def submit(self, update: Update, gradient: Transfer | None, load: Transfer | None = None) -> None:
        """Update a unit, on the queue of the tier where that is done.

        Args:
            update: the unit, and the load to feed.
            gradient: the point of compute that made its gradient; None if compute is not asynchronous.
            load: the load of a streamed unit's weights. The update comes behind it even if it was given up: an update
                that is due has to run.
        """
        requires = [] if gradient is None else [gradient]
        with self._store.consistency.change:
            self._submit(update, requires, load)

    def _submit(self, update: Update, requires: list[Transfer], load: Transfer | None) -> None:
        """Append an update to its queue, inside a region of `TieredStore.consistency`."""
        # An interrupt half-way would leave a unit whose new generation holds, and that nobody updates.
        unit = update.unit
        old, new = self._blocks.generations.advance(unit)

        # Behind all that still reads the generation that this update overwrites, such as a checkpoint. The load is not
        # in `requires`: the update runs even if that failed or was given up.
        follows = self._blocks.generations.readers(unit, new)
        if load is not None:
            follows.append(load)

        # This update takes the place of a speculative one: all that asks for the unit waits for this one.
        self.speculation.drop(unit)

        self._last_queue = self._placement.update_queue(unit)
        if self._last_queue == "update_gpu":
            work = partial(self._update_on_gpu, unit)
            transfer = self._on_gpu.submit(unit, 0, work, requires, follows)
            self._recorder.watch(transfer)
        elif self._last_queue == "update_nvme":
            # Sums are taken on another queue, `update`, so the order of this queue alone would not do.
            summed = self._last.get(unit)
            if self._policy.groups > 1 and summed is not None:
                requires.append(summed)
            transfer = self._spilled.submit(update, old=old, new=new, requires=requires, follows=follows)
        else:
            in_ram = partial(self._update_in_ram, unit)
            transfer = self._in_ram.submit(unit, 0, in_ram, requires, follows)
        self._last[unit] = transfer

    def submit_sum(self, unit: str, group: int) -> None:
        """Add a group's gradient, which is in RAM or on its way there, to those before it."""
        work = partial(self._accumulate, unit, group)
        with self._store.consistency.change:
            self.speculation.drop(unit)
            self._last_queue = "update"
            self._last[unit] = self._in_ram.submit(unit, 0, work)

    def submit_fetch(self, unit: str) -> None:
        """Bring the sum of the groups before to the GPU, for this group's gradient to be added."""
        work = partial(self._fetch, unit)
        with self._store.consistency.change:
            self._fetched[unit] = self._in_ram.submit(unit, 0, work)

    def take_fetch(self, unit: str) -> Transfer | None:
        """Take the transfer after which the unit's sum is on the GPU, or on its way there. It is given once."""
        return self._fetched.pop(unit, None)

    def submit_speculative(self, unit: str, gradient: Transfer | None) -> None:
        """Update a unit whose gradient is final, if this pass speculates."""
        made_by = [] if gradient is None else [gradient]

        # With several groups `_last` has the sum of this step: it took the place of the update before.
        if self._policy.groups > 1 and unit in self._last:
            made_by.append(self._last[unit])
        self.speculation.submit(unit, made_by)

    def check_exchange(self) -> None:
        """Raise the error of the last exchange, if it failed: nobody else waits for it."""
        if self.exchange is not None and self.exchange.failed():
            self.exchange.wait()

    def submit_exchange(self, exchange: Exchange) -> None:
        """Take streamed state home behind the updates before, and bring it to the GPU for the next ones."""
        # The CPU's updates take all that memory gives, so state goes home when they are over (docs/decisions/0011).
        on_cpu = []
        if exchange.home:
            for unit, transfer in self._last.items():
                if self._placement.update_queue(unit) != "update_gpu":
                    on_cpu.append(transfer)

        work = partial(self._exchange_state, exchange, on_cpu)
        self.exchange = self._on_gpu.submit("streamed state", 0, work)

        # In this order: what goes home may come again in the same exchange.
        still_ahead = self.ahead - set(exchange.home)
        self.ahead = still_ahead | set(exchange.fetched)

    def latest(self, unit: str) -> Transfer | None:
        """Return the unit's update or sum that was submitted last."""
        # A queue may ask while another thread submits. It never asks about a unit whose update is just being submitted:
        # a unit's load is submitted after its update, and a gradient is final after the unit's last use. A sum may be
        # submitted meanwhile, but that changes no weights.
        return self.speculation.latest(unit) or self._last.get(unit)

    def wait(self) -> None:
        """Wait until every update and sum is done, but not for speculative updates, the exchange or write-backs.

        Raises:
            TransferError, NonFiniteError: what stopped one of them. The latter names the units that were updated in
                this step, and tears the state if there are any.
        """
        try:
            for transfer in self._last.values():
                self._recorder.wait_until_done(transfer)
        except NonFiniteError as error:
            # Another queue may be at an update that it began before.
            self.wait_for_end()
            updated = [unit for unit in self._blocks.units if unit in self._updated]
            self._store.consistency.is_torn |= bool(updated)
            steps = _described(updated, len(self._placement.grad_homes))
            raise NonFiniteError(f"{error}. {steps}", updated) from error

    @property
    def is_partial(self) -> bool:
        """Whether units have been updated in a pass that has not come to its end."""
        return bool(self._updated)

    @property
    def wait_cause(self) -> str:
        """What the queue of the update, or sum, that was submitted last is at: those before it hold the slots."""
        return self._recorder.busy[self._last_queue]

    def wait_for_end(self) -> None:
        """Wait until every update, every sum and the exchange have ended, well or not."""
        # Also sums on their way to the GPU that nobody will take: they still write to a slot.
        transfers = [*self._all(), *self._fetched.values()]
        for transfer in transfers:
            transfer.wait_for_end()
        self._fetched.clear()

    def drain(self) -> None:
        """Finish every update that was submitted and every write-back. Streamed state is at home after it.

        Raises:
            TransferError, NonFiniteError: what stopped an update.
        """
        # Updates first: they start the write-backs that are waited for then.
        for transfer in self._all():
            transfer.wait()

        generations = self._blocks.generations
        for unit, kind in self._placement.homes:
            for place in generations.places(unit, kind):
                key = block_key(unit, kind, place)
                self._store.settle(key)
        for unit, home in self._placement.grad_homes.items():
            if home is Tier.NVME:
                self._store.settle(grad_key(unit))

        # Updates of streamed units brought weights into GPU slots, and a pass begins with empty ones.
        for unit in self._placement.streamed:
            self._blocks.drop_shard(unit)

    def forget(self) -> None:
        """Forget every update: all have ended, and the state is overwritten next."""
        self.speculation.forget()
        self._spilled.forget()
        self._last.clear()
        self._fetched.clear()
        self.exchange = None
        self.ahead = frozenset()
        self._blocks.generations.forget_readers()

    def close(self) -> None:
        """Abandon what has not begun and stop the queues. Abandon the gate first: an update may wait on it."""
        # Before the queues close, since each of them first does what it was given.
        self._is_closed = True
        self.speculation.close()
        for queue in self.queues:
            queue.close()

    def _all(self) -> list[Transfer]:
        """Return every update or sum that was submitted last, and the exchange."""
        exchange = [self.exchange] if self.exchange is not None else []
        return [*self._last.values(), *self.speculation.all(), *exchange]

    # ------------------------------------------------------------------ queue update_gpu

    def _update_on_gpu(self, unit: str) -> None:
        """Run AdamW on the GPU, on state at home there or on state that came to it. The forward reads these weights."""
        self._check(unit)
        (elements,) = self._blocks.chunks(unit)
        streamed = unit in self._placement.streamed
        self._recorder.busy["update_gpu"] = "state_to_gpu" if streamed else "update_gpu"

        # Kernels of different streams can start in the order in which they were enqueued: one that waits on its stream
        # for a copy would hold up compute. So the host waits.
        if streamed:
            key = self._blocks.key(unit, Kind.WEIGHT)
            for transfer in self._store.prefetch(key, Tier.GPU, wait=True):
                transfer.wait()

        with (
            self._blocks.grads.open(unit, elements) as grad,
            self._blocks.open_state(unit, elements, self._blocks.kinds(unit), streamed=streamed) as state,
        ):
            work = self._optimizer.apply(unit, elements, state.planes, grad, state.before)
            if work is not None:
                work.wait()  # on the CPU that stands for a GPU
            state.write_back()

    def _exchange_state(self, exchange: Exchange, on_cpu: Sequence[Transfer]) -> None:
        """Take the state of units home, then fetch that of others, and of these as soon as their old bytes are home."""
        for transfer in on_cpu:
            transfer.wait_for_end()
        for unit in exchange.home:
            self._blocks.return_state(unit)

        # A fetch waits until the copy on the GPU, which is leaving, is home: the store sees to that.
        for unit in exchange.fetched:
            if not self._is_closed:
                self._blocks.fetch_state(unit)

    # ------------------------------------------------------------------ queue update

    def _update_in_ram(self, unit: str) -> UpdateUnderWay | None:
        """Run AdamW on a unit in RAM."""
        try:
            self._check(unit)
            applied = self._begin_update(unit)

            # In the immediate mode the slot goes next, and AdamW must have read it. In the deferred mode the gradient
            # is at home in RAM, and the queue goes on.
            if applied is not None and not self._policy.deferred:
                applied.wait()
            return applied
        finally:
            # Even after an error, since a backward would wait for the slot for ever.
            self._blocks.grads.free(unit)

    def _begin_update(self, unit: str) -> UpdateUnderWay | None:
        """Start AdamW on a whole unit; None if it is done."""
        blocks = self._blocks
        (elements,) = blocks.chunks(unit)
        kinds = blocks.kinds(unit)
        with contextlib.ExitStack() as leases:
            open_grad = blocks.grads.open(unit, elements)
            grad = leases.enter_context(open_grad)
            open_state = blocks.open_state(unit, elements, kinds)
            state = leases.enter_context(open_state)

            start_ns = time.perf_counter_ns()
            apply = self._carrier.in_ram(self._optimizer.apply)
            work = apply(unit, elements, state.planes, grad, state.before)

            # The stack unwinds backwards: the span is noted, state is marked dirty and sent home while it is still
            # leased, and the leases end.
            leases.callback(state.write_back)
            if work is None:
                self._recorder.work("update", unit, start_ns, time.perf_counter_ns())
                return None
            leases.callback(lambda: self._recorder.work("update", unit, *work.span_ns()))

            # The thread that waits for the update ends the leases.
            taken_over = leases.pop_all()
            return UpdateUnderWay(work, taken_over, self._store.consistency)

    def _accumulate(self, unit: str, group: int) -> None:
        """Add a group's gradient to the sum of those before."""
        store = self._store
        grad = grad_key(unit)
        try:
            with (
                store.lease(sum_key(unit), Tier.RAM) as total,
                store.lease(grad, Tier.RAM) as part,
            ):
                self._optimizer.sums.accumulate(unit, total.bytes, part.bytes, group=group)
        finally:
            # Even after an error, since a backward would wait for the slot for ever.
            store.evict(grad, Tier.RAM)

    def _fetch(self, unit: str) -> None:
        """Ask for the sum of the groups before, on the GPU."""
        # On a queue, since slots may have to become free first, and the thread that computes has better things to do.
        self._store.prefetch(grad_key(unit), Tier.GPU, wait=True)

    def _check(self, unit: str) -> None:
        """Refuse to update once the run is closed, and in the immediate mode with a gradient that is not finite."""
        if self._is_closed:
            raise StepAbandonedError(f"the run was closed before {unit} was updated")
        if not self._policy.deferred:
            self._optimizer.sums.check(unit)
            self._updated.append(unit)


def _described(updated: Sequence[str], num_units: int) -> str:
    """Return in words which units are a step ahead of the others."""
    if not updated:
        return "No update of this step was written"
    return (
        f"Updates run inside the backward, because train.clip and numerics.guard are off, and {len(updated)} of "
        f"{num_units} units had theirs: {', '.join(updated)}. So the weights are of two steps, and no step can follow "
        "on them"
    )
