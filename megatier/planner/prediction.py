"""Predicts how long a step of a run takes, and corrects that by the run's own first steps.

Drives waver, and in some runs they do less than `megatier bench` saw before. So the first steps measure how fast the
drives are in the run's own pattern, and the step is simulated anew with such drives. Only the prediction changes;
placement and settings stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from megatier.forecast.forecast import QUEUES_OF_DISK, Forecast
from megatier.planner.search import Choice
from megatier.trace.events import TraceEvent

MEASURED_STEPS = 3
"""Steps that are measured after the first one, which records the order of units."""
WORTH_SAYING = 0.05
"""Share of a step by which a correction must differ for the user to be told."""
ROUNDS = 4
"""Most simulations of a correction."""
CLOSE = 0.01
"""Difference from the measured rate, as a share of it, at which a correction ends. Reads and writes of a step mix as
they happen to meet, so the rate of a step follows that of the drives only roughly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A step as planned, and as predicted from what the drives do in this run."""

    planned_seconds: float
    """Seconds of the step as planned."""
    planned_bytes_per_s: float
    """Bytes a second of all drives together while they are busy, in the step as planned."""
    seconds: float
    """Seconds of the step as corrected."""
    measured_bytes_per_s: float
    """Bytes a second of all drives together while they are busy, as measured in the run."""

    @property
    def is_worth_saying(self) -> bool:
        """Whether the correction makes the step clearly longer or shorter."""
        return abs(self.seconds / self.planned_seconds - 1) > WORTH_SAYING

    def __str__(self) -> str:
        planned = self.planned_bytes_per_s / 1e9
        measured = self.measured_bytes_per_s / 1e9
        return (
            f"the plan said {self.planned_seconds:.3g} s a step with drives that do {planned:.3g} GB/s; in this run "
            f"they do {measured:.3g} GB/s: {self.seconds:.3g} s"
        )


class Prediction:
    """The planned step of a run, until its first steps correct it. Only the training thread may use it."""

    def __init__(self, choice: Choice) -> None:
        """Begin with the step as planned, by the rates of the machine as `megatier bench` measured them."""
        self._choice = choice
        self.forecast = choice.forecast
        self.seconds_range = choice.seconds_range
        """Shortest and longest step, as the drives waver."""
        self._num_seen = 0
        self._rates: list[float] = []

    @property
    def flops_per_s(self) -> float:
        """Floating point operations a second of large products, as `megatier bench` measured them."""
        return self._choice.trial.rates.flops_per_s

    def observe(self, events: Iterable[TraceEvent]) -> Correction | None:
        """Take the events of the next step of this process.

        A step in which the drives were idle, as after one that was left out, is not counted.

        Returns:
            The correction, once, when enough steps were seen. From then on the forecast is the corrected one.
        """
        # The first step of a process loads on demand, so its moves do not follow the pattern of the others.
        self._num_seen += 1

        # One correction is enough: the forecast is compared with all later steps, and must not follow them.
        is_over = len(self._rates) == MEASURED_STEPS
        if self._num_seen == 1 or is_over or not planned_rate(self.forecast):
            return None
        if rate := measured_rate(events):
            self._rates.append(rate)
        if len(self._rates) < MEASURED_STEPS:
            return None

        # Drives waver from step to step, and a median leaves out the odd one.
        return self._corrected(median(self._rates))

    def _corrected(self, rate: float) -> Correction:
        """Simulate the step with drives as fast as they were measured, and take it as the forecast."""
        planned = self.forecast
        trial = self._choice.trial

        # The rate of a step follows that of the drives only roughly (CLOSE), so the ratio is applied several times.
        made = planned
        factor = 1.0
        for _ in range(ROUNDS):
            # A drive that was planned to do much less may become so fast that it takes no time.
            factor *= rate / (planned_rate(made) or rate)
            made = replace(trial, rates=trial.rates.times(factor)).forecast(self._choice.placement)
            if abs(planned_rate(made) / rate - 1) < CLOSE:
                break

        self.forecast = made

        # The range was that of the probe's drives, and these are others.
        self.seconds_range = (made.seconds, made.seconds)
        return Correction(
            planned_seconds=planned.seconds,
            planned_bytes_per_s=planned_rate(planned),
            seconds=made.seconds,
            measured_bytes_per_s=rate,
        )


def measured_rate(events: Iterable[TraceEvent]) -> float:
    """Return the bytes a second to and from the drives in a step while they were busy; 0 if they were idle."""
    num_bytes = 0
    spans = []
    for event in events:
        if event.lane in QUEUES_OF_DISK and event.num_bytes:
            num_bytes += event.num_bytes
            spans.append((event.start_ns, event.end_ns))
    busy_s = measure_covered(spans) / 1e9
    return num_bytes / busy_s if busy_s else 0.0


def planned_rate(made: Forecast) -> float:
    """Return the bytes a second to and from the drives in a forecast while they are busy; 0 if they are idle."""
    # A move that crosses a border of the step is partly of a neighbour.
    spans = []
    for span in made.spans:
        if span.lane in QUEUES_OF_DISK:
            spans.append((max(0.0, span.start), min(made.seconds, span.end)))
    busy_s = measure_covered(spans)
    if not busy_s:
        return 0.0
    return sum(made.moved_bytes.get(queue, 0.0) for queue in QUEUES_OF_DISK) / busy_s


def measure_covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each a start and an end."""
    # Sorted by their start, each span counts from where those before it ended.
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        begin = max(start, until)
        total += max(0.0, end - begin)
        until = max(until, end)
    return total
