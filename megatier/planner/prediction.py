"""Predicts the time of a step, and corrects the prediction by the first steps of the run.

The speed of drives varies, and in some runs they are slower than `megatier bench` has measured. So the first steps
measure the drives under the load of the run, and the step is simulated again with that speed. This changes the
prediction alone; placement and settings stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from megatier.forecast.forecast import QUEUES_OF_DISK, Forecast
from megatier.planner.search import Choice
from megatier.trace.events import TraceEvent

MEASURED_STEPS = 3
"""Steps that are measured, after the first one, which records the order of units."""
WORTH_SAYING = 0.05
"""A correction by less than this share of a step is not printed."""
ROUNDS = 4
"""Most simulations of a correction."""
CLOSE = 0.01
"""A correction ends at this relative difference from the measured rate. Reads and writes mix differently in each
simulation, so the rate of a step follows that of the drives only roughly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A step as planned, and as predicted with the drives as measured in this run."""

    planned_seconds: float
    """Seconds of the step as planned."""
    planned_bytes_per_s: float
    """Bytes a second of all busy drives together, as planned."""
    seconds: float
    """Seconds of the step as corrected."""
    measured_bytes_per_s: float
    """Bytes a second of all busy drives together, as measured in this run."""

    @property
    def is_worth_saying(self) -> bool:
        """Whether the correction is large enough to be printed."""
        return abs(self.seconds / self.planned_seconds - 1) > WORTH_SAYING

    def __str__(self) -> str:
        planned = self.planned_bytes_per_s / 1e9
        measured = self.measured_bytes_per_s / 1e9
        return (
            f"the plan said {self.planned_seconds:.3g} s a step with drives that do {planned:.3g} GB/s; in this run "
            f"they do {measured:.3g} GB/s: {self.seconds:.3g} s"
        )


class Prediction:
    """The predicted step of a run, which its first steps correct. Only the training thread may use it."""

    def __init__(self, choice: Choice) -> None:
        """Begin with the planned step, by the rates that `megatier bench` has measured."""
        self._choice = choice
        self.forecast = choice.forecast
        self.seconds_range = choice.seconds_range
        """Seconds of a step with drives at their fastest and slowest."""
        self._num_seen = 0
        self._rates: list[float] = []

    @property
    def flops_per_s(self) -> float:
        """FLOPs a second of large products, as `megatier bench` has measured them."""
        return self._choice.trial.rates.flops_per_s

    def observe(self, events: Iterable[TraceEvent]) -> Correction | None:
        """Take the events of the next step of this process.

        Steps in which the drives were idle do not count, such as a step after one that was skipped.

        Returns:
            The correction, once, after enough steps. From then on the forecast is the corrected one.
        """
        # The first step of a process loads on demand, so its moves differ from those of later steps.
        self._num_seen += 1

        # There is one correction, because later steps are compared with the forecast.
        is_over = len(self._rates) == MEASURED_STEPS
        if self._num_seen == 1 or is_over or not planned_rate(self.forecast):
            return None
        if rate := measured_rate(events):
            self._rates.append(rate)
        if len(self._rates) < MEASURED_STEPS:
            return None

        # The median leaves out single steps with unusual drives.
        return self._correct(median(self._rates))

    def _correct(self, rate: float) -> Correction:
        """Simulate the step with the measured speed of drives, and take the result as the forecast."""
        planned = self.forecast
        trial = self._choice.trial

        # The rate of a step follows that of the drives only roughly (CLOSE), so the ratio is applied several times.
        forecast = planned
        factor = 1.0
        for _ in range(ROUNDS):
            # A drive may become so fast that it takes no time in the simulation. Then its planned rate is 0.
            factor *= rate / (planned_rate(forecast) or rate)
            forecast = replace(trial, rates=trial.rates.times(factor)).forecast(self._choice.placement)
            if abs(planned_rate(forecast) / rate - 1) < CLOSE:
                break

        self.forecast = forecast

        # The range belonged to the drives as `megatier bench` has measured them.
        self.seconds_range = (forecast.seconds, forecast.seconds)
        return Correction(
            planned_seconds=planned.seconds,
            planned_bytes_per_s=planned_rate(planned),
            seconds=forecast.seconds,
            measured_bytes_per_s=rate,
        )


def measured_rate(events: Iterable[TraceEvent]) -> float:
    """Return the bytes a second of busy drives in a measured step; 0 if they were idle."""
    num_bytes = 0
    spans = []
    for event in events:
        if event.lane in QUEUES_OF_DISK and event.num_bytes:
            num_bytes += event.num_bytes
            spans.append((event.start_ns, event.end_ns))
    busy_s = measure_covered(spans) / 1e9
    return num_bytes / busy_s if busy_s else 0.0


def planned_rate(forecast: Forecast) -> float:
    """Return the bytes a second of busy drives in a forecast; 0 if they are idle."""
    # A move across the border of the step belongs to its neighbour in part.
    spans = []
    for span in forecast.spans:
        if span.lane in QUEUES_OF_DISK:
            spans.append((max(0.0, span.start), min(forecast.seconds, span.end)))
    busy_s = measure_covered(spans)
    if not busy_s:
        return 0.0
    return sum(forecast.moved_bytes.get(queue, 0.0) for queue in QUEUES_OF_DISK) / busy_s


def measure_covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each a start and an end."""
    # The spans are sorted by start, so each counts from the end of those before it.
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        begin = max(start, until)
        total += max(0.0, end - begin)
        until = max(until, end)
    return total
