"""The description of a run that is printed before its first step: model, tiers, and what a kill would cost."""

from __future__ import annotations

from rich.console import Console
from transformers import PreTrainedModel

from megatier.config.schema import RunConfig
from megatier.data.packing import PackedText
from megatier.data.stream import TextStream
from megatier.report.figures import TierState
from megatier.report.metrics import format_count
from megatier.report.report import print_placement
from megatier.schedule.placement import Placement
from megatier.session.session import Session
from megatier.store.store import TieredStore
from megatier.tier import Tier
from megatier.train.outlet import say
from megatier.train.save_plan import SavePlan


def describe(
    console: Console, config: RunConfig, session: Session, text: PackedText | TextStream, plan: SavePlan
) -> None:
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
    say(console, f"{_model(session, config)}; {_tokens(text)}; {nvme_path(session.store)}{_io_threads(session)}")
    if config.tiers.gpu_limit is not None and session.engine.options.device.type != "cuda":
        say(console, "tiers.gpu_limit is ignored, because this run has no GPU.")

    # Said also if there are none: where no update waits for the norm, RAM spills, or the GPU has no room for their
    # slots, the planner gives streamed units up.
    placement = session.placement
    if config.tiers.streamed_share:
        say(console, f"{len(placement.streamed)} units stream their state through the GPU to be updated there")
    if placement.spilled:
        say(console, _safety(config, placement, plan.num_kept))
    if count := sum(home is Tier.NVME for home in placement.grad_homes.values()):
        what = "sums of groups" if placement.sums_on_gpu else "gradients"
        say(console, f"{what} of {count} units lie on NVMe, because RAM is too short for them")
    print_placement(console, tier_states(session), placement.ranks)
    if session.ranks is not None:
        why = f" ({session.ranks.why})" if session.ranks.why else ""
        say(console, f"weights and gradients go between ranks by {session.ranks.way}{why}")
    if (promise := plan.promise()) is not None:
        say(console, promise)


def describe_positions(console: Console, model: PreTrainedModel, sequence_length: int) -> None:
    """Warn if sequences are longer than those that the model was made for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < sequence_length:
        say(
            console,
            f"data.sequence_length is {sequence_length}, and the model was made for {positions} positions "
            "(max_position_embeddings). Positions beyond these are new to it.",
        )


def nvme_path(store: TieredStore) -> str:
    """Return how bytes really go to and from NVMe."""
    access = {None: "no NVMe tier", True: "NVMe by O_DIRECT", False: "NVMe by buffered access (O_DIRECT was refused)"}
    return access[store.is_direct] + (f", to the GPU by {store.gpu_path}" if store.gpu_path is not None else "")


def tier_states(session: Session) -> list[TierState]:
    """Return what the placement puts in each tier."""
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


def _model(session: Session, config: RunConfig) -> str:
    num_parameters = sum(tensor.num_elements for unit in session.wholes for tensor in unit.layout.tensors)
    num_trained = sum(tensor.num_elements for unit in session.wholes for tensor in unit.layout.trained.tensors)
    trained = f" ({format_count(num_trained)} trained)" if num_trained < num_parameters else ""
    return (
        f"{format_count(num_parameters)} parameters{trained} in {len(session.units)} units, "
        f"{config.model.compute_dtype}, on {session.engine.options.device}"
    )


def _tokens(text: PackedText | TextStream) -> str:
    if isinstance(text, PackedText):
        return f"{format_count(text.num_tokens)} tokens to train on"
    return "a stream of tokens to train on"


def _io_threads(session: Session) -> str:
    count, why = session.io_threads
    return f", {count} I/O threads each way ({why})" if session.store.files is not None else ""


def _safety(config: RunConfig, placement: Placement, num_kept: int) -> str:
    """Return how state on NVMe is updated, and what a run has left after a kill."""
    output = config.output
    how = "in place"
    if placement.speculative:
        how = "in the backward, before the norm is known"
    elif output.savepoint_every:
        how = "when the norm is known, apart from the savepoint"

    then = "restarts from step 1; set output.checkpoint_every to keep progress"
    if output.savepoint_every:
        then = f"goes on from its last savepoint (every {output.savepoint_every} steps)"
    elif num_kept:
        apart = "by time" if output.checkpoint_every == "auto" else f"every {output.checkpoint_every} steps"
        then = f"goes on from its last checkpoint ({apart})"
    return f"{len(placement.spilled)} units spill to NVMe and are updated {how}. If the run is killed it {then}."
