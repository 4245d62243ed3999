"""Plans a run: where its state lies, how long a step takes, what bounds it, and which change helps most.

`megatier plan` prints it. It allocates nothing and needs no GPU, since the model is a skeleton and the machine a set of
rates.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatier.checkpoint.drive_space import DriveSpace
from megatier.errors import PlanError
from megatier.forecast.forecast import QUEUES_OF_DISK, Forecast
from megatier.planner.changes import Change, find_helpful_changes, find_hidden_tokens
from megatier.planner.compile_time import compile_seconds
from megatier.planner.memory import CONTEXT_BYTES, ActivationBytes, mask_bytes
from megatier.planner.shortage import add_remedies
from megatier.planner.tower_bytes import TowerBytes, num_conversations, pixel_bytes, tower_bytes
from megatier.planner.trial import Trial, advise_parts
from megatier.schedule.budgets import Budgets
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.lent_room import LentRoom, lent_room
from megatier.schedule.moves import Moves, by_queue
from megatier.schedule.placement import Placement, name_all_shortages, place
from megatier.schedule.sizes import block_bytes, home_bytes
from megatier.schedule.timeline import Access
from megatier.schedule.world import World
from megatier.setup.setup import Setup
from megatier.setup.workload import Workload
from megatier.tier import Kind, Tier
from megatier.trace.events import STEP_EVENT, TraceEvent

SECONDS_PER_DAY = 86_400
GENERATION_USES = {
    "1: updates in place": (1, False),
    "2: updates in the backward": (2, False),
    "2: savepoints": (2, True),
    "3: both": (3, True),
}
"""Uses of generations: how many copies of spilled state there are, and whether savepoints keep one."""
UNLIMITED = 1 << 62
"""A budget that is larger than any drive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a run on a machine. Bytes and seconds are those of one rank, unless a field says otherwise."""

    num_parameters: int
    """All parameters of the model."""
    num_trained: int
    """The parameters that are trained."""
    tokens: int
    """Tokens of a step, over all ranks."""
    world: World
    """The ranks of the run."""
    budgets: Budgets
    """Bytes that each tier may use."""
    unified_bytes: float | None
    """Bytes of unified memory; None: GPU and RAM have separate memory."""
    attention: str
    """Kernel of attention (`model.attention`)."""
    accesses: tuple[Access, ...]
    """The order in which a step uses its units."""
    placement: Placement
    """Homes and slots."""
    state_bytes: Mapping[tuple[Tier, Kind], int]
    """Bytes of state by tier and kind."""
    in_place_bytes: int
    """Bytes of frozen weights that are read from the model's own files, and so take no space in tiers.nvme."""
    spilled_gradient_bytes: int
    """Bytes of gradients that a step writes to NVMe and reads again, because RAM is too short for them."""
    activations: ActivationBytes
    """Estimated GPU memory in addition to the budget."""
    tower_bytes: TowerBytes
    """The part of `activations` that vision towers take."""
    pixel_bytes: Mapping[Tier, int]
    """Bytes of pixels by tier, which no budget counts. Those on the GPU are a part of `activations`."""
    images: float
    """Mean number of images in a step."""
    images_missing: str
    """Why nothing is known of images; empty if something is, or if the run reads none."""
    mask_bytes: int
    """The part of `activations` that is the mask which keeps documents apart."""
    lent_room: LentRoom | None
    """GPU memory for text that a loop generates in lent memory; None: the GPU's memory is not known."""
    forecast: Forecast
    """The simulated step."""
    seconds_range: tuple[float, float]
    """Seconds of a step with drives at their fastest and slowest; equal if that was not measured."""
    compute_seconds: float
    """Seconds of a step's compute alone."""
    compile_seconds: tuple[float, float]
    """Seconds that compilation adds to the first step: with an empty cache, and with a full one."""
    space: DriveSpace
    """Bytes that one checkpoint and the export take in the run directory, over all ranks."""
    checkpoint_seconds: float | None
    """Seconds of writing a checkpoint to the first drive; None: no drive is known."""
    checkpoint_pause_seconds: float | None
    """The part of `checkpoint_seconds` in which training waits; None: no drive is known."""
    savepoint_bytes: int
    """Bytes that one savepoint writes: the state that does not lie on NVMe."""
    savepoint_seconds: float | None
    """Seconds for which a savepoint on the first drive pauses the run; None: no drive is known."""
    generation_bytes: Mapping[str, int]
    """Bytes that the run takes on NVMe, by use of generations (`GENERATION_USES`)."""
    hidden_at: int | None
    """N*: from this many tokens a step, compute hides everything else; None: no number that was tried does."""
    changes: tuple[Change, ...]
    """Settings that would make a step faster, the best first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.forecast.seconds

    @property
    def bound_share(self) -> float:
        """Seconds of compute over those of the step."""
        return self.compute_seconds / self.forecast.seconds

    @property
    def written_bytes_per_step(self) -> float:
        """Bytes that a step writes to NVMe."""
        return self.forecast.moved_bytes.get("ram_to_nvme", 0.0)

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes that the run writes to NVMe in a day, which wears the drive."""
        return self.written_bytes_per_step / self.forecast.seconds * SECONDS_PER_DAY

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        forecast = self.forecast
        return {
            "num_parameters": self.num_parameters,
            "num_trained": self.num_trained,
            "ranks": self.world.num_ranks,
            "hosts": self.world.num_hosts,
            "tokens_per_step": self.tokens,
            "seconds": forecast.seconds,
            "seconds_low": self.seconds_range[0],
            "seconds_high": self.seconds_range[1],
            "tokens_per_s": self.tokens_per_s,
            "bound_share": self.bound_share,
            "bound_by": forecast.bound_by,
            "compile_seconds": self.compile_seconds[0],
            "kept_compile_seconds": self.compile_seconds[1],
            "attention": self.attention,
            "hidden_at_tokens": self.hidden_at,
            "budget_bytes": dataclasses.asdict(self.budgets),
            "unified_bytes": self.unified_bytes,
            "state_bytes": {f"{tier} {kind}": size for (tier, kind), size in self.state_bytes.items()},
            "other_bytes": {str(tier): size for tier, size in self.placement.other_bytes.items()},
            "in_place_bytes": self.in_place_bytes,
            "spilled_gradient_bytes": self.spilled_gradient_bytes,
            "activation_bytes": dataclasses.asdict(self.activations) | {"peak": self.activations.peak},
            "tower_bytes": dataclasses.asdict(self.tower_bytes),
            "pixel_bytes": {str(tier): size for tier, size in self.pixel_bytes.items()},
            "images_per_step": self.images,
            "mask_bytes": self.mask_bytes,
            "lent_room": None if self.lent_room is None else dataclasses.asdict(self.lent_room),
            "homes": {f"{unit} {kind}": str(tier) for (unit, kind), tier in self.placement.homes.items()},
            "streamed": list(self.placement.streamed),
            "busy_seconds": {lane: seconds for lane, seconds in forecast.busy_seconds.items() if seconds},
            "alone_seconds": {lane: seconds for lane, seconds in forecast.alone_seconds.items() if seconds},
            "moved_bytes": dict(forecast.moved_bytes),
            "written_bytes_per_day": self.written_bytes_per_day,
            "checkpoint_bytes": self.space.checkpoint_bytes,
            "export_bytes": self.space.export_bytes,
            "checkpoint_seconds": self.checkpoint_seconds,
            "checkpoint_pause_seconds": self.checkpoint_pause_seconds,
            "savepoint_bytes": self.savepoint_bytes,
            "savepoint_seconds": self.savepoint_seconds,
            "generation_bytes": dict(self.generation_bytes),
            "changes": [dataclasses.asdict(change) for change in self.changes],
        }

    def events(self) -> list[TraceEvent]:
        """Return the forecast as trace events, for the picture."""
        events = [
            TraceEvent(
                lane=STEP_EVENT,
                name="as planned",
                start_ns=0,
                end_ns=int(self.forecast.seconds * 1e9),
            )
        ]
        for span in self.forecast.spans:
            # A picture has no lane for the host.
            if span.lane != "host":
                event = TraceEvent(
                    lane=span.lane,
                    name=span.name,
                    start_ns=int(span.start * 1e9),
                    end_ns=int(span.end * 1e9),
                )
                events.append(event)
        return events


def make_plan(setup: Setup) -> Plan:
    """Plan a run.

    Raises:
        PlanError: the run does not fit; names what is short.
    """
    config = setup.config
    world = setup.machine.world
    trial = Trial.of(setup)
    work = trial.work
    placement = _place(trial, setup)
    forecast = trial.forecast(placement)
    tokens = config.train.batch * config.data.sequence_length

    # Each rank writes its shard to its own drives.
    drives = trial.rates.drives

    # All ranks write into one directory, so the room is that of all.
    space = DriveSpace.of(config.output, setup.model, work.units, is_made=False)
    shard_bytes = space.checkpoint_bytes // world.num_ranks
    spilled_bytes = placement.state_bytes.get(Tier.NVME, 0)
    written_s = checkpoint_seconds(shard_bytes, spilled_bytes, drives)

    # A savepoint writes only the state that does not lie on NVMe.
    resident = placement.state_bytes.get(Tier.GPU, 0) + placement.state_bytes.get(Tier.RAM, 0)
    return Plan(
        num_parameters=work.num_parameters,
        num_trained=work.num_trained,
        tokens=tokens,
        world=world,
        budgets=trial.budgets,
        unified_bytes=trial.rates.unified_bytes,
        attention=config.model.attention,
        accesses=trial.accesses,
        placement=placement,
        state_bytes=_state_bytes(work, placement),
        in_place_bytes=_in_place_bytes(work, placement),
        spilled_gradient_bytes=_spilled_gradient_bytes(work, placement),
        activations=trial.activations,
        tower_bytes=tower_bytes(setup),
        pixel_bytes=pixel_bytes(setup),
        images=setup.tower.mean_images * num_conversations(setup),
        images_missing=setup.tower.missing,
        mask_bytes=mask_bytes(setup),
        lent_room=_lent_room(trial, placement),
        forecast=forecast,
        seconds_range=trial.seconds_range(placement, forecast),
        compute_seconds=trial.compute_seconds,
        compile_seconds=compile_seconds(setup),
        space=space,
        checkpoint_seconds=written_s,
        checkpoint_pause_seconds=pause_seconds(written_s, forecast) if written_s is not None else None,
        savepoint_bytes=resident,
        savepoint_seconds=checkpoint_seconds(resident, 0, drives),
        generation_bytes=generation_bytes(trial, placement),
        hidden_at=find_hidden_tokens(trial, placement, tokens),
        changes=find_helpful_changes(trial, placement, config.train, tokens, forecast.seconds),
    )


def _place(trial: Trial, setup: Setup) -> Placement:
    """Choose where everything lies.

    Raises:
        PlanError: it does not fit; says what is short, and which settings would fit.
    """
    try:
        return trial.placed()
    except PlanError as short:
        refusal = advise_parts(short, setup)
        if refusal is short:
            # More parts of experts would not help, so the error names everything that is short.
            refusal = name_all_shortages(short, trial.work.specs, trial.budgets, trial.work.policy)
        # A refusal alone leaves users to guess, so settings that would fit are tried first.
        raise add_remedies(refusal, setup, lambda other: Trial.of(other).placed()) from short


def _lent_room(trial: Trial, placement: Placement) -> LentRoom | None:
    """Return how much GPU memory generated text has in lent memory."""
    if trial.gpu_bytes is None:
        return None
    gpu_bytes = max(0, round(trial.gpu_bytes) - CONTEXT_BYTES)
    is_unified = trial.rates.unified_bytes is not None
    return lent_room(trial.work.specs, placement, trial.work.policy, gpu_bytes, is_unified=is_unified)


def _state_bytes(work: Workload, placement: Placement) -> dict[tuple[Tier, Kind], int]:
    """Return the bytes of state by tier and kind."""
    units = {spec.name: spec for spec in work.specs}
    sizes: Counter[tuple[Tier, Kind]] = Counter()
    for (name, kind), home in placement.homes.items():
        num_bytes = home_bytes(units[name], kind, home)
        sizes[home, kind] += num_bytes
    return dict(sizes)


def _in_place_bytes(work: Workload, placement: Placement) -> int:
    """Return the bytes of weights at home on NVMe that the model's own files hold."""
    num_bytes = 0
    for spec in work.specs:
        if placement.homes[spec.name, Kind.WEIGHT] is Tier.NVME:
            # `home_bytes` leaves out what the model's files have, so the difference is read in place.
            num_bytes += block_bytes(spec, Kind.WEIGHT)
            num_bytes -= home_bytes(spec, Kind.WEIGHT, Tier.NVME)
    return num_bytes


def _spilled_gradient_bytes(work: Workload, placement: Placement) -> int:
    """Return the bytes of gradients that a step writes to NVMe."""
    units = {spec.name: spec for spec in work.specs}
    moves = Moves(units, placement, work.policy)
    num_bytes = 0
    for unit in placement.grad_homes:
        # Among these moves only gradients go to NVMe, namely those that do not fit into RAM.
        num_bytes += by_queue(moves.gradients(unit))["ram_to_nvme"]
    return num_bytes


def checkpoint_seconds(num_bytes: int, spilled_bytes: int, drives: Sequence[DriveRates]) -> float | None:
    """Return the seconds of writing a checkpoint to the first drive; None: no drive is known.

    Args:
        num_bytes: bytes of the checkpoint.
        spilled_bytes: bytes of state on NVMe, which are read from the same drive meanwhile.
        drives: the drives of the machine.
    """
    if not drives:
        return None

    # The files of a checkpoint are new, and drives are slower at writing bytes for the first time.
    drive = drives[0]
    written_s = num_bytes / (drive.first_write_bytes_per_s or drive.write_bytes_per_s)
    if not spilled_bytes:
        return written_s

    # Reads and writes share the drive, so its mixed rate counts as well.
    mixed_s = (num_bytes + spilled_bytes) / drive.mixed_bytes_per_s
    return max(written_s, mixed_s)


def pause_seconds(written_s: float, step: Forecast) -> float:
    """Return the seconds for which training waits for a checkpoint, since the state may not change while it is read.

    The checkpoint is written while the next step runs, and training waits for what is left. The step's own reads and
    writes are assumed to use the same drives, and to come first.

    Args:
        written_s: seconds of writing the checkpoint.
        step: the forecast.
    """
    # The queues share the drives, so their times add up.
    drives_s = sum(step.alone_seconds.get(queue, 0.0) for queue in QUEUES_OF_DISK)
    free_s = max(0.0, step.seconds - drives_s)
    return max(0.0, written_s - free_s)


def generation_bytes(trial: Trial, placement: Placement) -> dict[str, int]:
    """Return the bytes that a run takes on NVMe for each use of generations; an empty mapping if nothing spills.

    A use is left out if RAM has no room for its slots.
    """
    sizes: dict[str, int] = {}
    work = trial.work

    # The immediate mode updates in place, so it can have no second generation.
    if not (placement.spilled and work.policy.deferred):
        return sizes

    # Users compare these bytes with the size of a drive, so no drive is too small here.
    budgets = replace(trial.budgets, nvme=UNLIMITED)
    for use, (count, saves) in GENERATION_USES.items():
        policy = replace(work.policy, generations=count, savepoints=saves)
        with contextlib.suppress(PlanError):
            tried = place(work.specs, budgets, policy)
            state_bytes = tried.state_bytes.get(Tier.NVME, 0)
            sizes[use] = state_bytes + tried.other_bytes.get(Tier.NVME, 0)
    return sizes
