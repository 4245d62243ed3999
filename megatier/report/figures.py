"""The figures of a run as plain records, which the text, the live panel and the page show."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatier.byte_counts import format_bytes
from megatier.schedule.budgets import Budgets
from megatier.schedule.placement import Placement
from megatier.tier import Kind, Tier
from megatier.trace.events import ByName

NO_GPU = "There is no GPU, so a part of RAM stands for its memory. It is called gpu below."
"""Said once where a run computes on the CPU."""

STALLED_MIN = 0.02
"""Share of a step. If compute waits for less, nothing is said of it."""


def unified_memory(unified_bytes: float, budgets: Budgets, placement: Placement) -> str:
    """Return what a run has to know of its budgets where GPU memory and RAM are one memory, in words."""
    taken = format_bytes(budgets.gpu + budgets.ram)
    whole = format_bytes(unified_bytes)
    sentence = f"GPU memory and RAM are one memory of {whole}: tiers.gpu and tiers.ram take {taken} of it."

    # The GPU could read RAM in place, but a unit is bound to its slot.
    if any(kind is Kind.WEIGHT and home is Tier.RAM for (_, kind), home in placement.homes.items()):
        sentence += (
            " Weights in ram are there twice while they are in a GPU slot; less tiers.ram and more tiers.gpu avoid it."
        )
    return f"{sentence} Nobody has tried megatier on such a machine."


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowestRank:
    """The rank for which the others waited in a step. What a rank takes itself is compute, and waits for its own lanes.

    What it waits for a collective does not count: another rank may be late there.
    """

    rank: int
    """Its number."""
    host: str
    """The name of its host."""
    seconds: float
    """Seconds that it took itself."""
    least_seconds: float
    """Seconds that the fastest rank took itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """The work of one rank in a step, by lane, cause or queue."""

    compute_seconds: float | None = None
    """Seconds in which compute was busy."""
    stall_seconds: ByName = field(default_factory=dict)
    """Seconds that compute waited, by cause."""
    host_seconds: float | None = None
    """Seconds of neither: the host prepares the step, enqueues compute, or ends the step."""
    busy_seconds: ByName = field(default_factory=dict)
    """Seconds that each lane was busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport(RankWork):
    """A finished step, and the first rank's work. The fields are named as in its record in `metrics.jsonl`."""

    step: int
    """Its number, counted from 1."""
    loss: float
    """The mean loss of its tokens, which may be any number."""
    learning_rate: float | None = None
    """The learning rate of its update."""
    grad_norm: float | None
    """The global norm before clipping, which may be any number; None if it was not computed."""
    tokens: float
    """Tokens of this step without those that fill rows."""
    images: float | None = None
    """Images of this step; None: the run reads none."""
    seconds: float
    """Seconds from its batch to its result, without those of the compiler."""
    compile_seconds: float = 0.0
    """Seconds besides, in which compute waited for the compiler."""
    host_busy_seconds: float | None = None
    """Seconds in which the host worked for the step: it ran Python and enqueued compute, which may have hidden that.
    Where the host itself computes, that is in it too."""
    attainment: float | None = None
    """Seconds that the step should take over those that it took; None if the machine was not measured."""
    slowest_rank: SlowestRank | None = None
    """The slowest of the ranks; None: this process is alone."""

    bound_by: str = ""
    """The lane that should bound the step, as planned; empty if the machine was not measured. It is in no record."""
    slowest_busy_seconds: ByName = field(default_factory=dict)
    """Seconds that each lane of the slowest rank was busy; empty if that is this one. They are in no record as such."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds that compute waited, for whatever cause."""
        return sum(self.stall_seconds.values())

    @property
    def main_stall(self) -> str | None:
        """The cause that compute waited longest for; None if it waited for less than `STALLED_MIN` of the step."""
        # Short waits are at every step of every run, and naming one of them would look like a fault.
        stalls = self.stall_seconds
        least = STALLED_MIN * self.seconds
        if not stalls or self.stalled_seconds < least:
            return None
        return max(stalls, key=stalls.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierState:
    """The bytes that the placement puts in a tier."""

    tier: str
    """The tier."""
    state_bytes: int
    """Bytes of weights, remainders and moments that are at home here."""
    other_bytes: int
    """Bytes of gradients, activations and slots."""
    budget_bytes: int
    """Bytes that may be used."""


@dataclass(frozen=True, slots=True)
class QueueBytes:
    """Bytes that went through a queue."""

    queue: str
    """The queue, or `ranks` for bytes that came from other ranks."""
    moved_bytes: int
    """Bytes that moved."""
    demanded_bytes: int
    """Bytes that must move, as the placement says."""
