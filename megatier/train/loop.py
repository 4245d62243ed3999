"""The loop over a run's steps: training, evaluations and saves, and the figures that it tells of each."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from megatier.checkpoint.run_directory import METRICS_FILE
from megatier.checkpoint.run_state import RunState
from megatier.config.schema import RunConfig, TrainConfig
from megatier.data.packing import num_real_tokens
from megatier.engine.step import StepResult
from megatier.errors import GpuMemoryError, NonFiniteError, mib
from megatier.optim.learning_rate import learning_rate
from megatier.planner.prediction import Prediction
from megatier.report.figures import QueueBytes, SlowestRank, StepReport
from megatier.report.history import read_what_there_is
from megatier.report.metrics import format_seconds
from megatier.report.report import Progress, print_moves
from megatier.rest import REST
from megatier.session.process import memory_bytes
from megatier.session.session import Session
from megatier.tier import QUEUES
from megatier.trace.events import STEP, Account, ByName, TraceEvent, account, busy_seconds
from megatier.train.description import nvme_path
from megatier.train.outlet import say
from megatier.train.saves import Record, Saves
from megatier.train.shared import SharedText
from megatier.train.stop import StopRequest
from megatier.train.watchdog import Watchdog

RANKS = "ranks"
"""The lane by which bytes come from other ranks."""
TRACED_STEPS = 3
"""The number of last steps that the trace keeps: few, because one step of a large model has thousands of events."""
OUTCOMES = {"confirmed": "kept", "void": "void", None: None}
"""The words of `metrics.jsonl` for the outcome of speculative updates. They stay, since users' files have them."""


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
        text: SharedText,
        record: Record,
        expected: Prediction | None,
        watchdog: Watchdog,
        saves: Saves,
    ) -> None:
        """Prepare the loop; nothing runs before `steps`.

        Args:
            config: the run.
            console: what a person sees.
            session: its whole state is filled.
            text: the text that the run trains on.
            record: keeps the figures of each step.
            expected: the planned step, if the machine was measured; the first steps correct it.
            watchdog: watches passes.
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
        self._last_step = 0
        self._tokens_seen = 0
        """Tokens of all steps so far, those of earlier processes included."""
        self._compile_seconds = 0.0
        """Seconds in which steps of this process waited for the compiler."""
        self._crew = session.crew
        self._hosts = self._crew.agree(platform.node())
        self._device = session.engine.options.device

        # Loading has moved bytes too, but no placement demanded those of a step.
        self._moved_before = session.store.moved_bytes.copy()
        self.traced: list[tuple[int, list[TraceEvent]]] = []

    def steps(self, state: RunState | None) -> bool:
        """Run all steps after a state, with evaluations and checkpoints.

        Args:
            state: the state that the run goes on from; None: the run begins.

        Returns:
            False if the run was told to stop before its last step.

        Raises:
            MegatierError: a step, an evaluation or a save failed.
        """
        train = self._config.train
        self._last_step = 0 if state is None else state.step
        before = read_what_there_is(Path(self._config.output.directory) / METRICS_FILE)
        self._tokens_seen = round(sum(step.tokens for step in before.steps))
        first = self._last_step + 1
        stops = False
        with Progress(self._console, train.steps) as progress, StopRequest(progress.note) as stop:
            for step in range(first, train.steps + 1):
                position = self._text.own.state if self._session.ranks is None else None
                try:
                    self._step(step, progress)
                except GpuMemoryError:
                    self._saves.rescue(step - 1, position, progress.note)
                    raise
                except NonFiniteError as error:
                    if self._session.optimizer.hyper.deferred:
                        self._saves.behind(step, progress.note)
                        raise

                    # In the immediate mode weights may have changed by now, and are not worth saving.
                    raise NonFiniteError(f"{error} {self._saves.way_on(progress.note)}", error.updated) from error

                is_last = step == train.steps
                if is_last or (train.evaluate_every and step % train.evaluate_every == 0):
                    self._evaluate(step, progress)

                # Asked once: a signal may come between two looks, and saving and breaking have to agree. So have all
                # ranks, any of which may have been told to stop.
                stops = self._crew.any(stop.is_asked) and not is_last
                self._saves.after(step, progress.note, is_last=is_last, stops=stops)
                if stops:
                    break

            self._saves.end(progress.note)

        return not stops

    def report(self, outcome: str) -> None:
        """Tell how the run ended, and what moved, against what the placement demands.

        Args:
            outcome: `whole` or `stopped`, for the record.
        """
        store = self._session.store
        player = self._session.player
        moved = self._moved_bytes()
        rows = [QueueBytes(queue, moved[queue], player.demanded[queue]) for queue in (*QUEUES, RANKS)]
        if self._session.placement.speculative:
            speculation = self._session.speculation
            outcomes = speculation.outcomes
            say(
                self._console,
                f"updates in the backward: confirmed in {outcomes['confirmed']} steps, void in {outcomes['void']} that "
                f"clipped or were left out, which moved {mib(speculation.void_bytes)} in vain",
            )

        if self._compile_seconds:
            say(self._console, f"compiled for {format_seconds(self._compile_seconds)}, which count in no step")

        # Queues that this run has no use for are left out.
        shown = [row for row in rows if row.queue != "nvme_to_gpu" or store.gpu_path is not None]
        shown = [row for row in shown if row.queue != RANKS or self._session.ranks is not None]
        is_streamed = bool(self._session.placement.streamed)
        print_moves(self._console, [row for row in shown if is_streamed or not row.queue.startswith("state")])
        if store.gpu_path is not None:
            say(self._console, f"nvme_to_gpu: {store.gpu_path}")
        odd = [row.queue for row in rows if row.moved_bytes != row.demanded_bytes]
        for rank, queues in enumerate(self._crew.agree(odd)):
            if rank and queues:
                words = ", ".join(queues)
                say(self._console, f"rank {rank} on {self._hosts[rank]} moved other bytes than demanded: {words}")
        self._record(
            {
                "step": self._last_step,
                "run": outcome,
                **self._moves(),
            }
        )

    def _moves(self) -> dict[str, dict[str, int]]:
        """Return bytes per queue since this process began to train, without those of checkpoints."""
        return {"moved_bytes": dict(self._moved_bytes()), "demanded_bytes": dict(self._session.player.demanded)}

    def _moved_bytes(self) -> Counter[str]:
        """Return the bytes that each queue moved, and that came from other ranks, since this process began to train."""
        ranks = self._session.ranks
        others = Counter[str]() if ranks is None else ranks.moved_bytes
        # The difference of two Counters leaves out queues that moved nothing.
        return self._session.store.moved_bytes - self._moved_before + others

    def _step(self, step: int, progress: Progress) -> None:
        """Run one step, and tell and record it."""
        train = self._config.train
        session = self._session
        began_ns = time.perf_counter_ns()
        rate = rate_of(step, train)
        batch = self._text.batch(step - 1, train.batch)
        read_ns = time.perf_counter_ns()

        # A group has the same rows of every column: ids, labels, and positions if documents are apart.
        columns = [value.chunk(train.groups) for value in batch.values()]
        groups = [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]

        REST.restart()
        with self._watchdog.watch(session.player):
            result = session.engine.train_step(step, rate, groups)

        # The loss was read, so the device is through with forward and backward. In the deferred mode updates of this
        # step may still be running; the next step waits for them, and has their time.
        ended_ns = time.perf_counter_ns()
        self._last_step = step

        # The same events give the printed figures, the records, the picture and the trace.
        events = session.player.take_events()
        events.append(
            TraceEvent(
                lane=STEP,
                name=f"step {step}",
                start_ns=began_ns,
                end_ns=ended_ns,
            )
        )

        # The other ranks are given their rows by the first one.
        if cause := "data" if self._config.data.streaming else "ranks" if self._crew.rank else "":
            events.append(
                TraceEvent(
                    lane="stall",
                    name="text",
                    start_ns=began_ns,
                    end_ns=read_ns,
                    cause=cause,
                )
            )
        self.traced = [*self.traced[1 - TRACED_STEPS :], (step, events)]
        spent = account(events, began_ns, ended_ns)
        seconds = (ended_ns - began_ns) / 1e9 - spent.compile_seconds
        self._compile_seconds += spent.compile_seconds
        busy = busy_seconds(events)
        self._saves.step(seconds, spent.stall_seconds.get("checkpoint", 0.0), learnt=result.skipped is None)
        memory, others = self._of_ranks(seconds, spent, busy)

        slowest = self._slowest(result.own_seconds)
        forecast = None if self._expected is None else self._expected.forecast
        report = StepReport(
            step=step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens=num_real_tokens(batch),
            seconds=seconds,
            compile_seconds=spent.compile_seconds,
            compute_seconds=spent.compute_seconds,
            stall_seconds=spent.stall_seconds,
            host_seconds=spent.host_seconds,
            host_busy_seconds=(ended_ns - read_ns - REST.ns) / 1e9,
            attainment=None if forecast is None else forecast.seconds / seconds,
            bound_by="" if forecast is None else forecast.bound_by,
            busy_seconds=busy,
            slowest_rank=slowest,
            slowest_busy_seconds=others[slowest.rank - 1]["busy_seconds"] if slowest and slowest.rank else {},
        )
        progress.update(report)
        if result.skipped is not None:
            what = "the loss" if result.skipped == "loss" else f"the gradient of {result.skipped}"
            progress.note(f"step {step} is left out, so that no weight changes: {what} is not finite")

        self._tokens_seen += round(report.tokens)
        self._record(
            {
                **self._figures(report, result),
                **memory,
                "other_ranks": others,
            }
        )
        self._correct(step, events, progress)

    def _slowest(self, seconds: Sequence[float]) -> SlowestRank | None:
        """Return the rank that took longest itself in a step, from the seconds of each; None if there is one alone."""
        if len(seconds) < 2:
            return None
        rank = seconds.index(max(seconds))
        return SlowestRank(
            rank=rank,
            host=self._hosts[rank],
            seconds=seconds[rank],
            least_seconds=min(seconds),
        )

    def _figures(self, report: StepReport, result: StepResult) -> dict[str, object]:
        """Return the record of a step but for what other ranks told, whose names `report.history` knows."""
        figures = asdict(report)
        del figures["bound_by"], figures["slowest_busy_seconds"]
        return {
            **figures,
            "clip_coefficient": result.clip_coefficient,
            "skipped": result.skipped,
            "tokens_seen": self._tokens_seen,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "tokens_per_s": report.tokens / report.seconds,
            "speculation": OUTCOMES[self._session.speculation.outcome],
            **self._moves(),
            "nvme_path": nvme_path(self._session.store),
        }

    def _of_ranks(self, seconds: float, spent: Account, busy: ByName) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Return what the ranks tell each other of a step.

        Returns:
            The most memory of any process, by name, and the lanes of each rank but the first, as they are recorded.
        """
        lanes = {
            "seconds": seconds,
            **asdict(spent),
            "busy_seconds": busy,
            "moved_bytes": dict(self._moved_bytes()),
        }
        found = self._crew.agree((memory_bytes(self._device, self._session.ranks), lanes))
        memory = {name: max(own[name] for own, _ in found) for name in found[0][0]}
        others = [
            {
                "rank": rank,
                "host": self._hosts[rank],
                **told,
            }
            for rank, (_, told) in enumerate(found)
            if rank > 0
        ]
        return memory, others

    def _correct(self, step: int, events: Sequence[TraceEvent], progress: Progress) -> None:
        """Let the first steps say what the drives do in this run, and correct the expected step by it."""
        # A checkpoint on its way would take its share of the drives.
        if self._expected is None or self._saves.writer is not None:
            return
        if (correction := self._expected.observe(events)) is None:
            return

        self._watchdog.expect(correction.seconds)
        if correction.is_worth_saying:
            progress.note(str(correction))
        self._record({"step": step, "correction": asdict(correction)})

    def _evaluate(self, step: int, progress: Progress) -> None:
        """Run one evaluation on held-out text, and tell and record its loss."""
        train = self._config.train
        batches = [b for b, _ in zip(self._text.holdout(train.batch), range(train.evaluate_batches), strict=False)]
        if not batches:
            progress.note("no held-out text to evaluate on")
            return

        began_ns = time.perf_counter_ns()
        with self._watchdog.watch(self._session.player):
            loss = self._session.engine.evaluate(batches)

        # Nobody asks for a trace of evaluations, and their events must not count for the next step.
        ended_ns = time.perf_counter_ns()
        spent = account(self._session.player.take_events(), began_ns, ended_ns)
        seconds = (ended_ns - began_ns) / 1e9
        progress.note(f"step {step}: held-out loss {loss:.4f} ({format_seconds(seconds)})")
        self._record(
            {
                "step": step,
                "heldout_loss": loss,
                "seconds": seconds,
                **asdict(spent),
            }
        )


def rate_of(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step; the first one is step 1."""
    return learning_rate(
        step,
        peak=train.learning_rate,
        schedule=train.schedule,
        warmup=train.warmup_steps,
        steps=train.steps,
        minimum_ratio=train.min_learning_rate_ratio,
    )
