"""Makes the report and the record of a step, from what this rank measured and what the other ranks send.

`loop` calls it after each step, on the training thread of every rank.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from torch import Tensor

from megatier.byte_counts import format_bytes
from megatier.compute.modality import num_images
from megatier.data.columns import count_real_tokens
from megatier.engine.step import StepResult
from megatier.forecast.forecast import Forecast
from megatier.host_wait import HOST_WAIT
from megatier.report.console import say
from megatier.report.figures import QueueBytes, SlowestRank, StepReport
from megatier.report.metrics import format_seconds
from megatier.report.report import print_moves
from megatier.session.process import memory_bytes
from megatier.session.session import Session
from megatier.tier import QUEUES
from megatier.trace.events import Account, ByName, TraceEvent, account, busy_seconds
from megatier.train.description import describe_nvme_path

RANKS = "ranks"
"""The queue by which bytes come from other ranks."""
OUTCOMES = {"confirmed": "kept", "void": "void", None: None}
"""The words of `metrics.jsonl` for the outcome of speculative updates. They stay, since users' files have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When a step began and ended on this rank, in nanoseconds of `time.perf_counter_ns`, and where its time went."""

    began_ns: int
    """The time before its text was read."""
    read_ns: int
    """The time after its text was read."""
    ended_ns: int
    """The time when its loss was read."""
    spent: Account
    """What the time from `began_ns` to `ended_ns` was spent on."""
    busy_seconds: ByName
    """Seconds that each lane was busy."""

    @classmethod
    def of(cls, events: Sequence[TraceEvent], *, began_ns: int, read_ns: int, ended_ns: int) -> StepTimes:
        """Account for the events of a step."""
        return cls(
            began_ns=began_ns,
            read_ns=read_ns,
            ended_ns=ended_ns,
            spent=account(events, began_ns, ended_ns),
            busy_seconds=busy_seconds(events),
        )

    @property
    def seconds(self) -> float:
        """Seconds of the step without those of torch's compiler, which works in the first steps alone."""
        return (self.ended_ns - self.began_ns) / 1e9 - self.spent.compile_seconds

    @property
    def host_busy_seconds(self) -> float:
        """Seconds in which the host worked after the text was read, without its waits (`host_wait`)."""
        return (self.ended_ns - self.read_ns - HOST_WAIT.ns) / 1e9


class StepReports:
    """Makes the reports of a run's steps. All ranks have to make the same calls."""

    def __init__(self, session: Session) -> None:
        """Begin before the first step of this process.

        Args:
            session: its whole state is filled.
        """
        self._reads_images = session.setup.config.data.images
        self._session = session
        self._all_ranks = session.all_ranks
        self._device = session.engine.options.device
        self._hosts = self._all_ranks.all_gather_object(platform.node())
        self.tokens_seen = 0
        """Tokens of all steps so far, including those of earlier processes."""
        self.images_seen = 0
        """Images of all steps so far, including those of earlier processes."""
        self._compile_seconds = 0.0
        """Seconds in which steps of this process waited for the compiler."""

        # Loading has moved bytes too, and these belong to no step.
        self._moved_before = session.store.moved_bytes.copy()

    def report_step(
        self,
        step: int,
        rate: float,
        groups: Sequence[Mapping[str, Tensor]],
        result: StepResult,
        times: StepTimes,
        forecast: Forecast | None,
    ) -> tuple[StepReport, dict[str, object]]:
        """Return the report of a step, and the record of it for `metrics.jsonl`.

        Args:
            step: its number.
            rate: its learning rate.
            groups: its tokens.
            result: what the engine returned.
            times: when the step began and ended on this rank.
            forecast: the planned step; None: there is no plan.
        """
        spent = times.spent
        self._compile_seconds += spent.compile_seconds
        memory_by_name, others = self._ask_ranks(times)

        slowest = self._find_slowest(result.own_seconds)
        slowest_busy = {}
        # The report has the lanes of the first rank anyway.
        if slowest is not None and slowest.rank:
            # `others` begins with the second rank.
            slowest_busy = others[slowest.rank - 1]["busy_seconds"]

        report = StepReport(
            step=step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens=sum(map(count_real_tokens, groups)),
            images=sum(map(num_images, groups)) if self._reads_images else None,
            seconds=times.seconds,
            compile_seconds=spent.compile_seconds,
            compute_seconds=spent.compute_seconds,
            stall_seconds=spent.stall_seconds,
            host_seconds=spent.host_seconds,
            host_busy_seconds=times.host_busy_seconds,
            attainment=None if forecast is None else forecast.seconds / times.seconds,
            bound_by="" if forecast is None else forecast.bound_by,
            busy_seconds=times.busy_seconds,
            slowest_rank=slowest,
            slowest_busy_seconds=slowest_busy,
        )
        self.tokens_seen += round(report.tokens)
        self.images_seen += round(report.images or 0)
        # The figures contain the counts above, so they come after them.
        figures = self._make_figures(report, result)
        return report, {**figures, **memory_by_name, "other_ranks": others}

    def count_moves(self) -> dict[str, dict[str, int]]:
        """Return bytes per queue since this process began to train, without those of checkpoints."""
        demanded = self._session.player.demanded
        return {"moved_bytes": dict(self._moved_bytes()), "demanded_bytes": dict(demanded)}

    def print_step_moves(self, console: Console) -> None:
        """Tell at the end of a run what moved, against what the placement demands."""
        session = self._session
        if session.placement.speculative:
            speculation = session.speculation
            outcomes = speculation.outcomes
            say(
                console,
                f"updates in the backward: confirmed in {outcomes['confirmed']} steps, void in {outcomes['void']} that "
                f"clipped or were skipped, which moved {format_bytes(speculation.void_bytes)} in vain",
            )

        if self._compile_seconds:
            say(console, f"compiled for {format_seconds(self._compile_seconds)}, which count in no step")

        moved = self._moved_bytes()
        demanded = session.player.demanded
        rows = [QueueBytes(queue, moved[queue], demanded[queue]) for queue in (*QUEUES, RANKS)]

        # Queues that this run has no use for are left out.
        print_moves(console, [row for row in rows if self._uses(row.queue)])
        gpu_path = session.store.gpu_path
        if gpu_path is not None:
            say(console, f"nvme_to_gpu: {gpu_path}")

        # The table has this rank's bytes. Of the others only what differs is told.
        odd = [row.queue for row in rows if row.moved_bytes != row.demanded_bytes]
        for rank, queues in enumerate(self._all_ranks.all_gather_object(odd)):
            if rank and queues:
                names = ", ".join(queues)
                say(console, f"rank {rank} on {self._hosts[rank]} moved other bytes than demanded: {names}")

    def _uses(self, queue: str) -> bool:
        """Return whether this run has a use for a queue."""
        session = self._session
        if queue == "nvme_to_gpu":
            return session.store.gpu_path is not None
        if queue == RANKS:
            return session.ranks is not None
        return not queue.startswith("state") or bool(session.placement.streamed)

    def _moved_bytes(self) -> Counter[str]:
        """Return the bytes that each queue moved, and that came from other ranks, since this process began to train."""
        # The difference of two Counters leaves out queues that moved nothing.
        moved = self._session.store.moved_bytes - self._moved_before
        ranks = self._session.ranks
        return moved if ranks is None else moved + ranks.moved_bytes

    def _ask_ranks(self, times: StepTimes) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Exchange the figures of a step with the other ranks.

        Returns:
            The most memory of any process, by name, and the lanes of each rank but the first, as they are recorded.
        """
        own_lanes = {
            "seconds": times.seconds,
            **asdict(times.spent),
            "busy_seconds": times.busy_seconds,
            "moved_bytes": dict(self._moved_bytes()),
        }
        own_memory = memory_bytes(self._device, self._session.ranks)
        of_ranks = self._all_ranks.all_gather_object((own_memory, own_lanes))
        # The process with the most memory decides whether a run fits.
        most_memory = {name: max(memory[name] for memory, _ in of_ranks) for name in own_memory}

        others: list[dict[str, Any]] = []
        for rank, (_, lanes) in enumerate(of_ranks):
            # The figures of the first rank are those of the step itself.
            if rank > 0:
                others.append({"rank": rank, "host": self._hosts[rank], **lanes})
        return most_memory, others

    def _find_slowest(self, seconds: Sequence[float]) -> SlowestRank | None:
        """Return the rank that took longest itself in a step, from the seconds of each; None if there is one alone."""
        if len(seconds) < 2:
            return None
        most = max(seconds)
        rank = seconds.index(most)
        return SlowestRank(
            rank=rank,
            host=self._hosts[rank],
            seconds=most,
            least_seconds=min(seconds),
        )

    def _make_figures(self, report: StepReport, result: StepResult) -> dict[str, object]:
        """Return the record of a step but for what other ranks told, whose names `report.history` knows."""
        figures = asdict(report)
        # The opening record has `bound_by`, and the slowest rank's lanes are among those of the other ranks.
        del figures["bound_by"], figures["slowest_busy_seconds"]
        if report.images is None:
            del figures["images"]
        else:
            figures |= {"images_seen": self.images_seen, "images_per_s": report.images / report.seconds}
        return {
            **figures,
            "clip_coefficient": result.clip_coefficient,
            "skipped": result.skipped,
            "tokens_seen": self.tokens_seen,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "tokens_per_s": report.tokens / report.seconds,
            "speculation": OUTCOMES[self._session.speculation.outcome],
            **self.count_moves(),
            "nvme_path": describe_nvme_path(self._session.store),
        }
