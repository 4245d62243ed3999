"""Describes a run before its first step: model, tiers, and what a kill would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import torch
from rich.console import Console
from transformers import PreTrainedModel

from megatier.byte_counts import format_bytes
from megatier.config.remarks import list_remarks
from megatier.config.schema import RunConfig
from megatier.data.text_stream import TextStream
from megatier.models.limits import max_positions
from megatier.planner.prediction import Prediction
from megatier.report.console import say
from megatier.report.figures import NO_GPU, TierState, unified_memory
from megatier.report.metrics import format_count
from megatier.report.report import print_placement
from megatier.saving.save_plan import SavePlan
from megatier.schedule.placement import Placement
from megatier.session.session import Session
from megatier.store.store import TieredStore
from megatier.tier import STATE_KINDS, Kind, Tier
from megatier.train.shared_text import Text

EPOCHS_MAX = 10
"""A run that trains on its text more often than that is told so."""


def describe_reserved(console: Console, session: Session) -> None:
    """Say how much memory is about to be reserved, which takes seconds for each 10 GiB."""
    has_gpu = session.engine.options.device.type != "cpu"
    # Without a GPU an arena in RAM stands for it, and the kernel has to give that RAM as well.
    names = {
        Tier.GPU: "GPU memory" if has_gpu else "RAM for gpu",
        Tier.RAM: "RAM",
        Tier.NVME: "NVMe",
    }
    sizes = []
    for state in list_tier_states(session):
        num_bytes = state.state_bytes + state.other_bytes
        if num_bytes:
            sizes.append(f"{format_bytes(num_bytes)} of {names[Tier(state.tier)]}")
    say(console, f"reserving {', '.join(sizes)}")


def describe_text(console: Console, config: RunConfig, text: Text) -> None:
    """Print how much text there is, and how long the run is in epochs of it."""
    if isinstance(text, TextStream):
        say(console, "a stream of tokens to train on")
        return

    # Before the figures, which count what is left.
    describe_left_out(console, text)
    amount = f"{format_count(text.num_tokens)} tokens to train on"
    # Older versions tokenised texts without a count.
    if (count := text.train.num_documents) is not None:
        things = "conversations" if config.data.is_chat else "documents"
        amount = f"{count:,} {things if count != 1 else things[:-1]}, {amount}"
    learnt = text.train.num_learnt
    if learnt is not None and learnt < text.num_tokens:
        amount += f", of which {format_count(learnt)} are learnt"

    # Not rounded: an epoch may end within a step, and a short text takes a part of one.
    steps = text.num_sequences / config.train.batch
    epochs = config.train.steps / steps
    say(console, f"{amount}; an epoch is {steps:,.4g} steps, and {config.train.steps:,} steps are {epochs:,.3g} epochs")
    if epochs > EPOCHS_MAX:
        say(
            console, f"Note that this trains on the same text {epochs:,.0f} times. train.epochs sets how often it does."
        )


def describe_left_out(console: Console, text: Text) -> None:
    """Say which bad records were left out. A stream knows that only at the end of the run."""
    if text.bad is not None and text.bad.count:
        say(console, text.bad.said)


def describe_run(console: Console, config: RunConfig, session: Session, text: Text, plan: SavePlan) -> None:
    """Print what a run trains, what lies where, and what it saves on its way.

    Args:
        console: what a person sees.
        config: the run.
        session: planned.
        text: the text that the run trains on.
        plan: what the run saves.
    """
    if text.damaged is not None:
        say(console, f"{text.damaged} was damaged, so the text was tokenised again.")
    # What the run has chosen by itself is said with its reason.
    count, why = session.io_threads
    threads = f", {count} I/O threads each way ({why})" if session.store.files is not None else ""
    paths = f"{describe_nvme_path(session.store)}{threads}{_describe_ram_path(session.store)}"
    say(console, f"{_describe_model(session, config)}; {paths}")
    describe_text(console, config, text)
    if config.tiers.gpu_limit is not None and session.engine.options.device.type != "cuda":
        say(console, "tiers.gpu_limit is ignored, because this run has no GPU.")

    # Said also if there are none: where no update waits for the norm, RAM spills, or the GPU has no room for their
    # slots, the planner gives streamed units up.
    placement = session.placement
    if config.tiers.streamed_share:
        say(console, f"{len(placement.streamed)} units stream their state through the GPU to be updated there")
    if placement.spilled:
        say(console, _describe_safety(config, placement, plan.num_kept))
    generations = _describe_generations(placement)
    for sentence in (
        *generations,
        *session.setup.work.products.described(),
        *_describe_base(session),
        *_describe_unified(session),
        *list_remarks(config),
    ):
        say(console, sentence)
    if count := sum(home is Tier.NVME for home in placement.grad_homes.values()):
        gradients = "sums of groups" if placement.sums_on_gpu else "gradients"
        say(console, f"{gradients} of {count} units lie on NVMe, because RAM is too short for them")
    if session.engine.options.device.type == "cpu":
        say(console, NO_GPU)
    print_placement(console, list_tier_states(session), placement.num_ranks)
    if session.ranks is not None:
        why = f" ({session.ranks.transport_reason})" if session.ranks.transport_reason else ""
        say(console, f"weights and gradients go between ranks by {session.ranks.transport}{why}")
    if (promised := plan.describe_clock()) is not None:
        say(console, promised)


def _describe_unified(session: Session) -> Iterator[str]:
    """Yield what has to be known where GPU memory and RAM are one memory."""
    setup = session.setup
    if (num_bytes := setup.machine.rates.unified_bytes) is not None:
        yield unified_memory(num_bytes, setup.budgets, session.placement)


def describe_positions(console: Console, model: PreTrainedModel, sequence_length: int) -> None:
    """Warn if sequences are longer than those that the model was made for."""
    positions = max_positions(model.config)
    if positions is not None and positions < sequence_length:
        say(
            console,
            f"data.sequence_length is {sequence_length}, and the model was made for {positions} positions "
            "(max_position_embeddings). Positions beyond these are new to it.",
        )


def describe_nvme_path(store: TieredStore) -> str:
    """Return how bytes really go to and from NVMe."""
    access = {None: "no NVMe tier", True: "NVMe by O_DIRECT", False: "NVMe by buffered access (O_DIRECT was refused)"}
    return access[store.is_direct] + (f", to the GPU by {store.gpu_path}" if store.gpu_path is not None else "")


def _describe_ram_path(store: TieredStore) -> str:
    """Return how bytes go between RAM and the GPU, if not all of RAM is pinned."""
    if store.staging is None:
        return ""
    unlocked = format_bytes(store.staging.unlocked_bytes)
    return f"; {unlocked} of RAM are not pinned and pass through rings, which is slower"


def list_tier_states(session: Session) -> list[TierState]:
    """Return the bytes that the placement puts in each tier."""
    state = session.placement.state_bytes
    other = session.placement.other_bytes
    return [
        TierState(
            tier=tier,
            state_bytes=state.get(tier, 0),
            other_bytes=other.get(tier, 0),
            budget_bytes=session.store.usage(tier)["budget"],
        )
        for tier in Tier
    ]


def make_opening_record(
    session: Session, tiers: Sequence[TierState], expected: Prediction | None, changes: Sequence[str] = ()
) -> dict[str, object]:
    """Return the opening record of a process, without its step.

    Args:
        session: open, with its placement.
        tiers: what the placement puts in each tier.
        expected: the planned step, if there is one.
        changes: changes of numbers since the step that the run goes on from.
    """
    placement = session.placement
    device = session.engine.options.device
    homes = {}
    for unit in session.own_units:
        homes[unit.name] = {str(kind): str(tier) for kind, tier in _homes(session, unit.name)}

    forecast = None
    if expected is not None:
        names = ("seconds", "bound_by", "busy_seconds", "moved_bytes")

        # Recorded as it was planned, since a report may be made on a machine that knows other rates.
        forecast = {name: getattr(expected.forecast, name) for name in names}
        forecast["seconds_range"] = expected.seconds_range

    return {
        "run": "begins",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "num_parameters": session.setup.work.num_parameters,
        "homes": homes,
        "streamed": placement.streamed,
        "speculative": placement.speculative,
        "tiers": [dataclasses.asdict(tier) for tier in tiers],
        "expected": forecast,
        "flops_per_s": None if expected is None else expected.flops_per_s,
        "changes": changes,
    }


def _describe_generations(placement: Placement) -> Iterator[str]:
    """Yield how many units in RAM have a second place there, if any may have one, as a sentence."""
    if placement.generations > 1:
        count = len(set(placement.speculative) - set(placement.spilled))
        yield f"{count} units in RAM have a second place there and are updated in the backward"


def _describe_base(session: Session) -> Iterator[str]:
    """Yield how the frozen weights of a base get from NVMe to the run, in sentences."""
    num_on_nvme = 0
    for unit in session.own_units:
        is_frozen = unit.layout.has_base and unit.layout.num_trained < unit.layout.num_elements
        if is_frozen and session.placement.homes[unit.name, Kind.WEIGHT] is Tier.NVME:
            num_on_nvme += 1

    if session.in_place:
        yield (
            f"the base of {len(session.in_place)} units is read from the model's own files, which take no room in "
            "tiers.nvme and are never written"
        )
    if copied := num_on_nvme - len(session.in_place):
        yield f"the base of {copied} units is copied to tiers.nvme: {session.why_copied}"


def _homes(session: Session, unit: str) -> Iterator[tuple[Kind, str]]:
    """Yield the kinds of a unit's blocks with their homes."""
    placement = session.placement
    for kind in STATE_KINDS:
        if (unit, kind) in placement.homes:
            yield kind, placement.homes[unit, kind]
    # A gradient that is only on its way has no home.
    if unit in placement.grad_homes:
        yield Kind.GRAD, placement.grad_homes[unit] or "slot"


def _describe_model(session: Session, config: RunConfig) -> str:
    work = session.setup.work
    train = config.train

    # Only what is no default is told: all parameters trained, by AdamW with fp32 moments.
    trained = f" ({format_count(work.num_trained)} trained)" if work.num_trained < work.num_parameters else ""
    # Lion has none: its momentum is fp32 whatever the setting says.
    moments = f" with {train.moments} moments" if train.moments != "fp32" else ""
    optimizer = f", optimizer {train.optimizer}" if train.optimizer != "adamw" else ""
    return (
        f"{format_count(work.num_parameters)} parameters{trained} in {len(session.own_units)} units, "
        f"{config.model.compute_dtype}{moments}{optimizer}, on {session.engine.options.device}"
    )


def _describe_safety(config: RunConfig, placement: Placement, num_kept: int) -> str:
    """Return how state on NVMe is updated, and what a run has left after a kill."""
    output = config.output
    # In place, a kill during an update leaves parts of two steps in the block files, which nothing goes on from.
    how = "in place"
    if placement.speculative:
        how = "in the backward, before the norm is known"
    elif output.savepoint_every:
        how = "when the norm is known, apart from the savepoint"

    then = "restarts from step 1, or from a checkpoint that is there; set output.checkpoint_every to keep progress"
    if output.savepoint_every:
        then = f"goes on from its last savepoint (every {output.savepoint_every} steps)"
    elif num_kept:
        apart = "by time" if output.checkpoint_every == "auto" else f"every {output.checkpoint_every} steps"
        then = f"goes on from its last checkpoint ({apart})"
    return f"{len(placement.spilled)} units spill to NVMe and are updated {how}. If the run is killed it {then}."
