"""The updates of units: AdamW runs on each unit when its gradient is final, in the tier of the unit's state.

The queue `update` updates units in RAM on the CPU, and sums groups there. The queue `update_nvme` updates units that
spill (`spilled_updates`), so that updates in RAM never wait for drives. The queue `update_gpu` updates on the GPU.

The state of a streamed unit comes to GPU slots during the backward, when links and RAM have spare bandwidth. It is
updated there when the norm is known, and goes home after the CPU's updates, which need all the bandwidth of RAM.

A unit with a spare generation of state may be updated before the norm is known (`speculation`). If the valid generation
is kept as a savepoint, the update writes a spare one, which is valid from then on.

Threads: the thread that computes submits updates and sums; in a backward that is autograd's. Any thread may call
`latest`.
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
            gate: counts the accesses of the pass that are over. A fed load waits there for its slot.
            recorder: records updates.
            demand: counts the bytes that speculative updates move.
        """
        self._blocks = blocks
        self._optimizer = optimizer
        self._recorder = recorder
        self._store = blocks.store
        self._placement = blocks.placement
        self._policy = blocks.policy

        self.exchange: Transfer | None = None
        """The last exchange of streamed state that was submitted."""
        self._last: dict[str, Transfer] = {}
        """The last update or sum of each unit, without speculative updates. One that failed stays, so that its error
        stops every later step."""
        self._fetched: dict[str, Transfer] = {}
        """Sums of groups that come to the GPU, and that `take_fetch` has not returned yet."""
        self.ahead: frozenset[str] = frozenset()
        """The streamed units whose state is on the GPU, or on its way there, for the next update."""
        self._is_closed = False
        self._last_queue = "update"
        """The queue of the update or sum that was submitted last."""
        self._updated: list[str] = []
        """In the immediate mode, the units whose update has begun in this step."""

        recorder.busy.update(update="update", update_nvme="nvme_to_ram", update_gpu="update_gpu")

        # In the immediate mode updates read sums of squares from the GPU. Otherwise the CPU's queues need no stream.
        clock = None if self._policy.deferred else self._store.clock

        # The queues have no bound, because compute submits items that may wait for compute itself.
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
        """Begin a training pass."""
        self._updated.clear()
        self.speculation.begin()

    def submit(self, update: Update, gradient: Transfer | None, load: Transfer | None = None) -> None:
        """Append an update to the queue that does it.

        Args:
            update: the unit, and the load to feed.
            gradient: the point in compute's stream after which its gradient is there; None if compute is synchronous.
            load: the load of a streamed unit's weights. The update runs behind it even if it was given up, because a
                due update has to run.
        """
        requires = [] if gradient is None else [gradient]
        with self._store.consistency.change:
            self._submit(update, requires, load)

    def _submit(self, update: Update, requires: list[Transfer], load: Transfer | None) -> None:
        """Append an update to its queue, inside a region of `TieredStore.consistency`."""
        # An interrupt after this line would leave a unit with a new valid generation that nobody writes.
        unit = update.unit
        old, new = self._blocks.generations.advance(unit)

        # The update follows the readers of the generation that it overwrites, such as a checkpoint. It also follows the
        # load, but does not require it, because it runs even if the load failed.
        follows = self._blocks.generations.readers(unit, new)
        if load is not None:
            follows.append(load)

        # This update replaces a speculative one. Whatever waits for the unit waits for this one.
        self.speculation.drop(unit)

        self._last_queue = self._placement.update_queue(unit)
        if self._last_queue == "update_gpu":
            work = partial(self._update_on_gpu, unit)
            transfer = self._on_gpu.submit(unit, 0, work, requires, follows)
            self._recorder.watch(transfer)
        elif self._last_queue == "update_nvme":
            # Sums run on another queue (`update`), so the order of this queue does not suffice.
            summed = self._last.get(unit)
            if self._policy.groups > 1 and summed is not None:
                requires.append(summed)
            transfer = self._spilled.submit(update, old=old, new=new, requires=requires, follows=follows)
        else:
            in_ram = partial(self._update_in_ram, unit)
            transfer = self._in_ram.submit(unit, 0, in_ram, requires, follows)
        self._last[unit] = transfer

    def submit_sum(self, unit: str, group: int) -> None:
        """Add a group's gradient, which is in RAM or comes there, to the sum of the groups before."""
        work = partial(self._accumulate, unit, group)
        with self._store.consistency.change:
            self.speculation.drop(unit)
            self._last_queue = "update"
            self._last[unit] = self._in_ram.submit(unit, 0, work)

    def submit_fetch(self, unit: str) -> None:
        """Bring the sum of the groups before to the GPU, where this group's gradient is added."""
        work = partial(self._fetch, unit)
        with self._store.consistency.change:
            self._fetched[unit] = self._in_ram.submit(unit, 0, work)

    def take_fetch(self, unit: str) -> Transfer | None:
        """Return the transfer that brings the unit's sum to the GPU, once."""
        return self._fetched.pop(unit, None)

    def submit_speculative(self, unit: str, gradient: Transfer | None) -> None:
        """Update a unit whose gradient is final, if this pass speculates."""
        made_by = [] if gradient is None else [gradient]

        # With several groups `_last` has the sum of this step, which replaced the update before.
        if self._policy.groups > 1 and unit in self._last:
            made_by.append(self._last[unit])
        self.speculation.submit(unit, made_by)

    def check_exchange(self) -> None:
        """Raise the error of the last exchange if it failed. Nobody else waits for it."""
        if self.exchange is not None and self.exchange.failed():
            self.exchange.wait()

    def submit_exchange(self, exchange: Exchange) -> None:
        """Append an exchange: streamed state goes home after its updates, and comes to the GPU for the next ones."""
        # State goes home after the CPU's updates, which need all the bandwidth of RAM (docs/decisions/0011).
        on_cpu = []
        if exchange.home:
            for unit, transfer in self._last.items():
                if self._placement.update_queue(unit) != "update_gpu":
                    on_cpu.append(transfer)

        work = partial(self._exchange_state, exchange, on_cpu)
        self.exchange = self._on_gpu.submit("streamed state", 0, work)

        # State that goes home may come back in the same exchange.
        still_ahead = self.ahead - set(exchange.home)
        self.ahead = still_ahead | set(exchange.fetched)

    def latest(self, unit: str) -> Transfer | None:
        """Return the unit's last update or sum."""
        # A queue may call this while another thread submits, but never for a unit whose update is just being submitted:
        # a unit's load is submitted after its update, and its gradient is final after its last use. A sum may be
        # submitted meanwhile, but it changes no weights.
        return self.speculation.latest(unit) or self._last.get(unit)

    def wait(self) -> None:
        """Wait for all updates and sums, but not for speculative updates, the exchange or write-backs.

        Raises:
            TransferError, NonFiniteError: one of them failed. A NonFiniteError names the units that were updated in
                this step. If there are any, the state is torn.
        """
        try:
            for transfer in self._last.values():
                self._recorder.wait_until_done(transfer)
        except NonFiniteError as error:
            # Another queue may still run an update.
            self.wait_for_end()
            updated = [unit for unit in self._blocks.units if unit in self._updated]
            self._store.consistency.is_torn |= bool(updated)
            steps = _describe_updated(updated, len(self._placement.grad_homes))
            raise NonFiniteError(f"{error}. {steps}", updated) from error

    @property
    def is_partial(self) -> bool:
        """Whether units were updated in a pass that has not ended."""
        return bool(self._updated)

    @property
    def wait_cause(self) -> str:
        """What the queue of the last update or sum is busy with. Items before it hold the slots."""
        return self._recorder.busy[self._last_queue]

    def wait_for_end(self) -> None:
        """Wait until all updates, all sums and the exchange have ended or failed."""
        # Sums that still come to the GPU write to slots, although nobody will use them.
        transfers = [*self._all(), *self._fetched.values()]
        for transfer in transfers:
            transfer.wait_for_end()
        self._fetched.clear()

    def drain(self) -> None:
        """Finish all submitted updates and write-backs. Afterwards streamed state is at home.

        Raises:
            TransferError, NonFiniteError: an update failed.
        """
        # Updates come first, because they start write-backs.
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

        # Updates of streamed units have filled GPU slots, but a pass begins with empty ones.
        for unit in self._placement.streamed:
            self._blocks.drop_shard(unit)

    def forget(self) -> None:
        """Forget all updates. All have ended, and the state will be overwritten."""
        self.speculation.forget()
        self._spilled.forget()
        self._last.clear()
        self._fetched.clear()
        self.exchange = None
        self.ahead = frozenset()
        self._blocks.generations.forget_readers()

    def close(self) -> None:
        """Abandon updates that have not begun, and stop the queues. Abandon the gate before."""
        # Set before the queues close, because a queue first does its submitted items.
        self._is_closed = True
        self.speculation.close()
        for queue in self.queues:
            queue.close()

    def _all(self) -> list[Transfer]:
        """Return the last update or sum of each unit, speculative updates, and the exchange."""
        exchange = [self.exchange] if self.exchange is not None else []
        return [*self._last.values(), *self.speculation.all(), *exchange]

    # ------------------------------------------------------------------ queue update_gpu

    def _update_on_gpu(self, unit: str) -> None:
        """Update a unit on the GPU, in its home there or in slots. The forward reads these weights."""
        self._check(unit)
        (elements,) = self._blocks.chunks(unit)
        streamed = unit in self._placement.streamed
        self._recorder.busy["update_gpu"] = "state_to_gpu" if streamed else "update_gpu"

        # Kernels may start in the order of enqueueing even on different streams, so one that waits for a copy could
        # hold up compute. So the host waits.
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
                work.wait()  # without CUDA, native threads do the work
            state.write_back()

    def _exchange_state(self, exchange: Exchange, on_cpu: Sequence[Transfer]) -> None:
        """Take the state of units home, and then fetch state for the next updates."""
        for transfer in on_cpu:
            transfer.wait_for_end()
        for unit in exchange.home:
            self._blocks.return_state(unit)

        # The store lets a fetch wait until the old copy has left the GPU.
        for unit in exchange.fetched:
            if not self._is_closed:
                self._blocks.fetch_state(unit)

    # ------------------------------------------------------------------ queue update

    def _update_in_ram(self, unit: str) -> UpdateUnderWay | None:
        """Update a unit in RAM."""
        try:
            self._check(unit)
            applied = self._begin_update(unit)

            # In the immediate mode the gradient is in a slot, which is freed below, so AdamW must have read it. In the
            # deferred mode the gradient is at home, and the queue goes on.
            if applied is not None and not self._policy.deferred:
                applied.wait()
            return applied
        finally:
            # Even after an error, because the backward may wait for the slot.
            self._blocks.grads.free(unit)

    def _begin_update(self, unit: str) -> UpdateUnderWay | None:
        """Start AdamW on a whole unit. Return None if it is done already."""
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

            # The stack unwinds backwards: record the span, mark state as dirty and send it home, release the leases.
            leases.callback(state.write_back)
            if work is None:
                self._recorder.work("update", unit, start_ns, time.perf_counter_ns())
                return None
            leases.callback(lambda: self._recorder.work("update", unit, *work.span_ns()))

            # The thread that waits for the update releases the leases.
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
            # Even after an error, because the backward may wait for the slot.
            store.evict(grad, Tier.RAM)

    def _fetch(self, unit: str) -> None:
        """Bring the sum of the groups before to the GPU."""
        # On a queue, because slots may have to become free first, and compute must not wait for them.
        self._store.prefetch(grad_key(unit), Tier.GPU, wait=True)

    def _check(self, unit: str) -> None:
        """Raise if the run is closed, or in the immediate mode if the gradient is not finite."""
        if self._is_closed:
            raise StepAbandonedError(f"the run was closed before {unit} was updated")
        if not self._policy.deferred:
            self._optimizer.sums.check(unit)
            self._updated.append(unit)


def _describe_updated(updated: Sequence[str], num_units: int) -> str:
    """Return a sentence that names the units that are a step ahead of the others."""
    if not updated:
        return "No update of this step was written"
    return (
        f"Updates run inside the backward, because train.clip and numerics.guard are off, and {len(updated)} of "
        f"{num_units} units had theirs: {', '.join(updated)}. So the weights are of two steps, and no step can follow "
        "on them"
    )
