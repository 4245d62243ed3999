"""Loops over the steps of a run: trains, evaluates, saves, and reports the figures of each step.

`trainer` makes a `Loop` once the weights are in place, and runs it on the training thread.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from megatier.checkpoint.run_directory import METRICS_FILE
from megatier.checkpoint.run_state import RunState
from megatier.config.schema import RunConfig, TrainConfig
from megatier.errors import GpuMemoryError, NonFiniteError
from megatier.host_wait import HOST_WAIT
from megatier.optim.learning_rate import learning_rate
from megatier.planner.prediction import Prediction
from megatier.report.console import say
from megatier.report.history import read_what_there_is
from megatier.report.metrics import format_seconds
from megatier.report.report import Progress
from megatier.saving.saves import Saves, Say
from megatier.session.session import Session
from megatier.trace.events import STEP_EVENT, TraceEvent, account
from megatier.train.record_writers import RecordWriters
from megatier.train.shared_text import Rows, SharedText
from megatier.train.step_report import StepReports, StepTimes
from megatier.train.stop import StopRequest
from megatier.watch.watchdog import Watchdog

Outcome = Literal["whole", "early", "stopped"]
"""How the steps of a run ended: all were taken; held-out losses stopped falling; or somebody stopped the run."""
TRACED_STEPS = 3
"""The trace keeps this many of the last steps: few, because a step of a large model has thousands of events."""


class Loop:
    """The steps of one run, in one process.

    Attributes:
        traced: numbers and events of the last steps, for the trace.
        last_step: number of the last step that has ended.
    """

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        session: Session,
        text: SharedText,
        record: RecordWriters,
        expected: Prediction | None,
        watchdog: Watchdog,
        saves: Saves,
    ) -> None:
        """Prepare the loop. No step is taken before `run`.

        Args:
            config: the run.
            console: what a person sees.
            session: holds the run's state, which must be filled.
            text: the text that the run trains on.
            record: adds the figures of a step to the run's records.
            expected: the planned step, if the machine was measured. The first steps correct it.
            watchdog: watches every pass.
            saves: writes checkpoints and savepoints between steps.
        """
        self._config = config
        self._console = console
        self._session = session
        self._text = text
        self._record = record
        self._expected = expected
        self._watchdog = watchdog
        self._saves = saves
        self.last_step = 0
        self._is_rehearsed = False
        self._is_reading = False
        """Whether an evaluation is waiting for rows."""
        self._all_ranks = session.all_ranks
        self._reports = StepReports(session)
        self.traced: list[tuple[int, list[TraceEvent]]] = []

    def run(self, state: RunState | None) -> Outcome:
        """Take all steps that are left, with their evaluations and checkpoints.

        Args:
            state: the saved state that the run is resumed from; None: the run begins.

        Returns:
            How the steps ended.

        Raises:
            MegatierError: a step, an evaluation or a save failed.
        """
        if state is not None:
            self.last_step = state.step
            self._saves.best = state.best
        # If only the export of a run failed, its steps are over already.
        if self._is_over():
            return self._tell_outcome(partial(say, self._console))

        train = self._config.train

        # Tokens and images are counted over all processes of a run, and only its records have these counts.
        before = read_what_there_is(Path(self._config.output.directory) / METRICS_FILE)
        self._reports.tokens_seen = round(sum(step.tokens for step in before.steps))
        self._reports.images_seen = round(sum(step.images or 0 for step in before.steps))
        first = self.last_step + 1
        stops = False
        with Progress(self._console, train.steps) as progress, StopRequest(progress.note) as stop:
            for step in range(first, train.steps + 1):
                # Taken before the step reads its rows, because a step that runs out of memory is repeated on a resume.
                position = self._text.own.state if self._session.ranks is None else None
                try:
                    self._step(step, progress)
                except GpuMemoryError:
                    self._saves.save_after_memory_error(step - 1, position, progress.note)
                    raise
                except NonFiniteError as error:
                    if self._session.optimizer.hyper.deferred:
                        self._saves.save_after_non_finite(step, progress.note)
                        raise

                    # In the immediate mode some weights have changed by now, so they are not worth saving.
                    raise NonFiniteError(
                        f"{error} {self._saves.describe_resume(progress.note)}", error.updated
                    ) from error

                if step == train.steps or (train.evaluate_every and step % train.evaluate_every == 0):
                    self._evaluate(step, progress)

                # Read once, because a signal may come at any time, and saving and stopping have to agree. All ranks
                # have to agree too, since any of them may have been told to stop.
                is_last = self._is_over()
                told = self._all_ranks.all_gather_object((stop.is_asked, self._record.error is not None))
                if any(is_unwritten for _, is_unwritten in told) and not is_last:
                    self._saves.save_last_step(step, progress.note)
                    return "stopped"
                stops = any(is_asked for is_asked, _ in told) and not is_last
                self._saves.save_after(step, progress.note, is_last=is_last, stops=stops)
                if stops or is_last:
                    break

            self._saves.finish_checkpoint(progress.note)
            return "stopped" if stops else self._tell_outcome(progress.end)

    def _is_over(self) -> bool:
        """Return whether no step is left to take."""
        train = self._config.train
        return self.last_step >= train.steps or self._saves.best.is_over(train.early_stopping_patience)

    def _tell_outcome(self, say: Say) -> Outcome:
        """Return how the steps ended, and print the reason if they ended early."""
        if self.last_step >= self._config.train.steps:
            return "whole"
        say(f"ended early after step {self.last_step}: {self._saves.best.why_over()}")
        return "early"

    def report_end(self, outcome: Outcome) -> None:
        """Print and record how the run ended, and how many bytes moved beside those that the placement demands.

        Args:
            outcome: as `run` returned it.
        """
        self._reports.print_step_moves(self._console)
        why = self._saves.best.why_over() if outcome == "early" else ""
        self._record(
            {
                "step": self.last_step,
                "run": outcome,
                "why": why,
                **self._reports.count_moves(),
            }
        )

    def _step(self, step: int, progress: Progress) -> None:
        """Take one step, print it and record it."""
        train = self._config.train
        session = self._session
        began_ns = time.perf_counter_ns()
        rate = learning_rate_at(step, train)
        groups = self._text.read_groups(step - 1, train)
        if not self._is_rehearsed:
            self._rehearse(step)
        read_ns = time.perf_counter_ns()

        # Waits of the host from here on are taken off its busy time (`StepTimes.host_busy_seconds`).
        HOST_WAIT.restart()
        with self._watchdog.watch(session.player):
            result = session.engine.train_step(step, rate, groups)

        # The loss was read, so the device has finished forward and backward. In the deferred mode updates of this step
        # may still run. The next step waits for them, and their time counts there.
        ended_ns = time.perf_counter_ns()
        self.last_step = step

        # The printed figures, the records, the picture and the trace all come from these events.
        events = session.player.take_events()
        events += self._make_own_events(step, began_ns, read_ns, ended_ns)
        self.traced = [*self.traced[1 - TRACED_STEPS :], (step, events)]
        times = StepTimes.of(events, began_ns=began_ns, read_ns=read_ns, ended_ns=ended_ns)
        waited_s = times.spent.stall_seconds.get("checkpoint", 0.0)
        self._saves.note_step(times.seconds, waited_s, has_updated=result.skipped is None)

        forecast = None if self._expected is None else self._expected.forecast
        report, figures = self._reports.report_step(step, rate, groups, result, times, forecast)
        progress.update(report)
        if result.skipped is not None:
            number = "the loss" if result.skipped == "loss" else f"the gradient of {result.skipped}"
            progress.note(f"step {step} is skipped, so that no weight changes: {number} is not finite")
        self._record(figures)
        self._correct_forecast(step, events, progress)

    def _rehearse(self, step: int) -> None:
        """Use every unit that a later step may use, before the first step of this process."""
        self._is_rehearsed = True
        if groups := self._text.read_rehearsal(step - 1, self._config.train):
            with self._watchdog.watch(self._session.player):
                self._session.engine.rehearse(groups)

            # These events must not count for the first step.
            self._session.player.take_events()

    def _make_own_events(self, step: int, began_ns: int, read_ns: int, ended_ns: int) -> list[TraceEvent]:
        """Return the events that the player does not record: the step itself, and the wait for its text."""
        events = [
            TraceEvent(
                lane=STEP_EVENT,
                name=f"step {step}",
                start_ns=began_ns,
                end_ns=ended_ns,
            )
        ]

        # The first rank reads the text and sends the others their rows, so they wait for it. If it reads tokens from a
        # file, and neither a stream nor images, that counts as work of its host.
        cause = "ranks" if self._all_ranks.rank else ""
        if self._config.data.streaming or self._config.data.images:
            cause = "data"
        if cause:
            events.append(
                TraceEvent(
                    lane="stall",
                    name="text",
                    start_ns=began_ns,
                    end_ns=read_ns,
                    cause=cause,
                )
            )
        return events

    def _correct_forecast(self, step: int, events: Sequence[TraceEvent], progress: Progress) -> None:
        """Correct the expected step by the speed that the drives have in the first steps."""
        # A checkpoint that is being written would take its share of the drives.
        if self._expected is None or self._saves.writer is not None:
            return
        if (correction := self._expected.observe(events)) is None:
            return

        self._watchdog.expect(correction.seconds)
        if correction.is_worth_saying:
            progress.note(str(correction))
        self._record({"step": step, "correction": asdict(correction)})

    def _evaluate(self, step: int, progress: Progress) -> None:
        """Evaluate on held-out text, and print and record the loss."""
        began_ns = time.perf_counter_ns()
        loss: float | None = None
        why = "there is no held-out text, or no token of it counts"
        try:
            # No queue shows that pixels are being made, so nothing counts as a stall while rows are read.
            with self._watchdog.watch(self._session.player, lambda: None if self._is_reading else 0):
                loss = self._session.engine.evaluate(self._read_held_out())
        except torch.OutOfMemoryError:
            # The weights are unharmed, so one rank goes on. Several ranks cannot, since the others wait for this one.
            if self._session.ranks is not None:
                raise
            why = "memory ran out"
        if loss is None:
            # Outside of the handler, because the error keeps the evaluation's tensors alive.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._session.player.take_events()
            progress.note(f"step {step}: not evaluated, since {why}. The run goes on.")
            return

        # Events of an evaluation are in no trace, and must not count for the next step.
        ended_ns = time.perf_counter_ns()
        spent = account(self._session.player.take_events(), began_ns, ended_ns)
        seconds = (ended_ns - began_ns) / 1e9
        threshold = self._config.train.early_stopping_threshold
        best = self._saves.best = self._saves.best.after(step, loss, threshold)
        progress.note(f"step {step}: held-out loss {loss:.4f} ({format_seconds(seconds)})")
        self._record(
            {
                "step": step,
                "heldout_loss": loss,
                "seconds": seconds,
                "best_step": best.step,
                "best_heldout_loss": best.loss,
                "num_worse": best.num_worse,
                **asdict(spent),
            }
        )

    def _read_held_out(self) -> Iterator[Rows]:
        """Yield the groups of an evaluation. Batches are made one at a time, as in a step, because pixels are large."""
        train = self._config.train
        batches = itertools.islice(self._text.read_holdout(train), train.evaluate_batches)
        while True:
            self._is_reading = True
            batch = next(batches, None)
            self._is_reading = False
            if batch is None:
                return

            # One group at a time, as in training, since memory is planned for so many rows.
            while batch:
                yield batch.pop(0)


def learning_rate_at(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step; the first one is step 1."""
    return learning_rate(
        step,
        peak=train.learning_rate,
        schedule=train.schedule,
        # Part of a step is rounded up, as in transformers.
        warmup=train.warmup_steps or math.ceil(train.warmup_ratio * train.steps),
        decay=math.ceil(train.decay_ratio * train.steps),
        steps=train.steps,
        minimum_ratio=train.min_learning_rate_ratio,
    )
