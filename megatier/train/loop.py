"""The loop over a run's steps, with evaluations, checkpoints, savepoints, and what is told of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from megatier.config import RunConfig, TrainConfig
from megatier.data.packing import PackedText, num_real_tokens
from megatier.data.stream import TextStream
from megatier.engine.optimizer import learning_rate
from megatier.errors import NonFiniteError, mib
from megatier.schedule.speculation import Speculation
from megatier.schedule.trace import TraceEvent, busy_seconds, stall_seconds
from megatier.store.store import TieredStore
from megatier.store.tier import Tier
from megatier.store.transfer import QUEUES
from megatier.train.checkpoint import last_checkpoint, remove
from megatier.train.checkpoint_writer import CheckpointWriter
from megatier.train.metrics import MetricsLog, format_seconds
from megatier.train.prediction import Prediction
from megatier.train.process import memory_bytes, seed
from megatier.train.report import Progress, QueueBytes, StepReport, TierUse, print_moves
from megatier.train.run_directory import CHECKPOINT_FOLDER, SAVEPOINT_FOLDER
from megatier.train.run_state import RunState
from megatier.train.savepoint import drop_savepoint, save_savepoint
from megatier.train.session import Session
from megatier.train.stop import StopRequest
from megatier.train.tensorboard import Scalars
from megatier.train.watchdog import Watchdog

TRACED_STEPS = 3
"""The trace keeps the last steps only: one step of a large model has thousands of spans."""


class Loop:
    """The steps of one run, in one process.

    Attributes:
        traced: the last steps' numbers and events, for a trace.
    """

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        session: Session,
        text: PackedText | TextStream,
        log: MetricsLog,
        scalars: Scalars | None,
        expected: Prediction | None,
        watchdog: Watchdog,
    ) -> None:
        """Nothing runs before `steps`.

        Args:
            config: the run.
            console: what a person sees.
            session: filled.
            text: what it trains on.
            log: metrics.jsonl.
            scalars: for TensorBoard, if wanted.
            expected: the planned step, where the machine was measured; the first steps correct it.
            watchdog: watches passes.
        """
        self._config, self._console, self._session, self._text, self._log = config, console, session, text, log
        self._scalars, self._expected, self._watchdog = scalars, expected, watchdog
        self._has_learnt = False
        """A weight has changed since the last checkpoint."""
        self._last_step = 0
        self._device = session.engine.options.device
        self._directory = Path(config.output.directory)
        self._folder = self._directory / CHECKPOINT_FOLDER
        self._moved_before = session.store.moved_bytes.copy()
        self._checkpoint: CheckpointWriter | None = None
        """It is on its way."""
        self._paused = 0.0
        """Seconds that it held up this thread so far."""
        self.traced: list[tuple[int, list[TraceEvent]]] = []

    def steps(self, state: RunState | None) -> bool:
        """All steps after a state, with evaluations and checkpoints; False where the run was told to stop before."""
        train, output = self._config.train, self._config.output
        if state is None:
            seed(train.seed)
        else:
            state.set_random(self._device)
        self._last_step = 0 if state is None else state.step
        first, stops = self._last_step + 1, False
        with Progress(self._console, train.steps) as progress, StopRequest(progress.note) as stop:
            for step in range(first, train.steps + 1):
                try:
                    self._step(step, progress)
                except NonFiniteError:
                    if self._session.optimizer.hyper.deferred:  # then no weight has changed
                        self._save_behind(step, progress)
                    raise
                is_last = step == train.steps
                if is_last or (train.evaluate_every and step % train.evaluate_every == 0):
                    self._evaluate(step, progress)
                self._end_checkpoint(progress, waits=False)
                is_due = output.checkpoint_every and (is_last or step % output.checkpoint_every == 0)
                stops = stop.is_asked and not is_last  # asked once: a signal may come between two looks
                if is_due or stops:
                    self._save(step, progress)
                elif output.savepoint_every and step % output.savepoint_every == 0:
                    self._save_in_place(step, progress)
                if stops:
                    break
            self._end_checkpoint(progress)
        return not stops

    def _save_behind(self, step: int, progress: Progress) -> None:
        """The run ends on bad steps: it may go on behind them. Of equal weights one checkpoint stays, of others all."""
        self._end_checkpoint(progress)
        twin = None if self._has_learnt else last_checkpoint(self._folder)
        if self._has_learnt or twin is not None:
            self._save(step, progress, prunes=False)
            self._end_checkpoint(progress)
        if twin is not None:
            remove(twin)

    def _save(self, step: int, progress: Progress, *, prunes: bool = True) -> None:
        """Begin a checkpoint; the steps after it go on while it is written."""
        self._end_checkpoint(progress)
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            self._session.player.drain()
        state = RunState.of(step, self._config, self._device, self._text.state)
        num_kept = self._config.output.keep_checkpoints if prunes else None
        self._checkpoint = CheckpointWriter(self._session, self._folder, step, state.to_dict(), num_kept)
        self._has_learnt = False
        self._session.player.take_events()
        self._paused = time.perf_counter() - began

    def _end_checkpoint(self, progress: Progress, *, waits: bool = True) -> None:
        """Tell of the checkpoint that was begun, if it is whole; wait for that if it `waits`."""
        writer = self._checkpoint
        if writer is None or not (waits or writer.is_over()):
            return
        began, self._checkpoint = time.perf_counter(), None
        with self._watchdog.watch(self._session.player):
            writer.wait()
        self._paused += time.perf_counter() - began
        size, seconds, paused = mib(writer.num_bytes), format_seconds(writer.seconds), format_seconds(self._paused)
        progress.note(f"step {writer.step}: checkpoint written ({size} in {seconds}; training waited {paused})")
        self._record(
            {
                "step": writer.step,
                "checkpoint_bytes": writer.num_bytes,
                "checkpoint_seconds": writer.seconds,
                "checkpoint_pause_seconds": self._paused,
            }
        )
        drop_savepoint(self._session, self._directory / SAVEPOINT_FOLDER)  # which is older

    def _save_in_place(self, step: int, progress: Progress) -> None:
        """Make a savepoint, which takes the place of a checkpoint before it."""
        self._end_checkpoint(progress)
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            self._session.player.drain()
        state = RunState.of(step, self._config, self._device, self._text.state)
        num_bytes = save_savepoint(self._session, self._directory / SAVEPOINT_FOLDER, step, state.to_dict())
        seconds = time.perf_counter() - began
        self._session.player.take_events()
        progress.note(f"step {step}: savepoint ({mib(num_bytes)} written, {format_seconds(seconds)})")
        self._log.write({"step": step, "savepoint_bytes": num_bytes, "savepoint_seconds": seconds})

    def report(self, outcome: str) -> None:
        """How the run ended, and what moved, against what the placement demands."""
        store, player = self._session.store, self._session.player
        moved = store.moved_bytes - self._moved_before
        rows = [QueueBytes(queue, moved[queue], player.demanded[queue]) for queue in QUEUES]
        if self._session.placement.speculative:
            _describe_speculation(self._console, player.updates.speculation)
        shown = [row for row in rows if row.queue != "nvme_to_gpu" or store.gpu_path is not None]
        is_streamed = bool(self._session.placement.streamed)
        print_moves(self._console, [row for row in shown if is_streamed or not row.queue.startswith("state")])
        if store.gpu_path is not None:
            self._console.print(f"nvme_to_gpu: {store.gpu_path}", highlight=False, soft_wrap=True)
        self._record({"step": self._last_step, "run": outcome, **self._moves()})

    def _record(self, record: Mapping[str, object]) -> None:
        self._log.write(record)
        if self._scalars is not None:
            self._scalars.write(record)

    def _moves(self) -> dict[str, dict[str, int]]:
        """Bytes per queue since this process began to train, those of checkpoints aside."""
        moved = self._session.store.moved_bytes - self._moved_before
        return {"moved_bytes": dict(moved), "demanded_bytes": dict(self._session.player.demanded)}

    def _step(self, step: int, progress: Progress) -> None:
        train, session = self._config.train, self._session
        began = time.perf_counter()
        rate = rate_of(step, train)
        batch = self._text.batch(step - 1, train.batch)
        waited = time.perf_counter() - began
        columns = [value.chunk(train.groups) for value in batch.values()]
        groups = [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]
        with self._watchdog.watch(session.player):
            result = session.engine.train_step(step, rate, groups)
        seconds = time.perf_counter() - began
        events = session.player.take_events()
        self.traced = [*self.traced[1 - TRACED_STEPS :], (step, events)]
        stalls, busy = stall_seconds(events), busy_seconds(events)
        if self._config.data.streaming:
            stalls["data"] = waited
        self._paused += stalls.get("checkpoint", 0.0)
        count = num_real_tokens(batch)
        tiers = tuple(TierUse(tier, used, budget) for tier, used, budget in _tier_uses(session))
        attainment = None if self._expected is None else self._expected.forecast.seconds / seconds
        bound_by = "" if self._expected is None else self._expected.forecast.bound_by
        progress.update(
            StepReport(
                step, result.loss, rate, result.grad_norm, count, seconds, stalls, tiers, attainment, bound_by, busy
            )
        )
        self._has_learnt |= result.skipped is None
        self._last_step = step
        if result.skipped is not None:
            what = "the loss" if result.skipped == "loss" else f"the gradient of {result.skipped}"
            progress.note(f"step {step} is left out, so that no weight changes: {what} is not finite")
        self._record(
            {
                "step": step,
                "loss": result.loss,
                "learning_rate": rate,
                "grad_norm": result.grad_norm,
                "clip_coefficient": result.clip_coefficient,
                "skipped": result.skipped,
                "tokens": count,
                "seconds": seconds,
                "tokens_per_s": count / seconds,
                "attainment": attainment,
                "stall_seconds": stalls,
                "busy_seconds": busy,
                "speculation": session.player.updates.speculation.outcome,
                **self._moves(),
                **memory_bytes(self._device),
                "nvme_path": nvme_path(session.store),
            }
        )
        self._correct(step, events, progress)

    def _correct(self, step: int, events: Sequence[TraceEvent], progress: Progress) -> None:
        """Let the first steps say what the drives do in this run. A checkpoint on its way would take its share."""
        if self._expected is None or self._checkpoint is not None:
            return
        correction = self._expected.observe(events)
        if correction is None:
            return
        self._watchdog.expect(correction.seconds)
        if correction.is_worth_saying:
            progress.note(str(correction))
        self._log.write({"step": step, "correction": correction.as_dict()})

    def _evaluate(self, step: int, progress: Progress) -> None:
        train = self._config.train
        batches = [b for b, _ in zip(self._text.holdout(train.batch), range(train.evaluate_batches), strict=False)]
        if not batches:
            progress.note("no held-out text to evaluate on")
            return
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            loss = self._session.engine.evaluate(batches)
        self._session.player.take_events()
        progress.note(f"step {step}: held-out loss {loss:.4f} ({format_seconds(time.perf_counter() - began)})")
        self._record({"step": step, "heldout_loss": loss})


def rate_of(step: int, train: TrainConfig) -> float:
    """Learning rate of step 1, 2, ... of a run."""
    return learning_rate(
        step,
        peak=train.learning_rate,
        schedule=train.schedule,
        warmup=train.warmup_steps,
        steps=train.steps,
        minimum_ratio=train.min_learning_rate_ratio,
    )


def nvme_path(store: TieredStore) -> str:
    """How bytes really go to and from NVMe."""
    access = {None: "no NVMe tier", True: "NVMe by O_DIRECT", False: "NVMe by buffered access (O_DIRECT was refused)"}
    return access[store.is_direct] + (f", to the GPU by {store.gpu_path}" if store.gpu_path is not None else "")


def _describe_speculation(console: Console, speculation: Speculation) -> None:
    kept, void = speculation.outcomes["kept"], speculation.outcomes["void"]
    console.print(
        f"updates in the backward: kept in {kept} steps, void in {void} that clipped or were left out, which moved "
        f"{mib(speculation.void_bytes)} in vain",
        highlight=False,
        soft_wrap=True,
    )


def _tier_uses(session: Session) -> Iterator[tuple[str, int, int]]:
    for tier in Tier:
        usage = session.store.usage(tier)
        budget = usage.pop("budget")
        if budget:
            yield str(tier), sum(usage.values()), budget
