"""The training run: from a config to a trained Hugging Face folder.

directory -> skeleton -> plan -> data -> reserve -> weights in -> steps -> weights out
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatier.checkpoint.checkpoint import UNBOUND, is_bound, last_checkpoint, read_state, remove_leftovers, restore
from megatier.checkpoint.pace import Pace
from megatier.checkpoint.room import Room
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    DATA_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    NUMBERS_FILE,
    SAVEPOINT_FOLDER,
    STALL_FILE,
    TENSORBOARD_FOLDER,
    TRACE_FILE,
    RunDirectory,
)
from megatier.checkpoint.run_state import RunState, check_numbers, noted_origin, write_numbers
from megatier.checkpoint.savepoint import Savepoint, check_savepoint_room, drop_savepoint, remove_savepoints
from megatier.config.data_section import DataConfig
from megatier.config.schema import RunConfig
from megatier.data.packing import PackedText
from megatier.data.stream import TextStream
from megatier.data.tokenizer import load_tokenizer
from megatier.errors import ConfigError
from megatier.guards.unchanged import check_evaluates
from megatier.models.decoder import check_stops_at_borders
from megatier.play.trace import write_trace
from megatier.report.figures import TierState
from megatier.report.history import opening, read_what_there_is
from megatier.report.metrics import MetricsLog, format_count, format_seconds
from megatier.report.report import print_placement
from megatier.report.tensorboard import Scalars, load_tensorboard
from megatier.schedule.placement import Placement
from megatier.session.machine import choose_device
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.session.skeleton import WeightReader, open_model
from megatier.tier import Tier
from megatier.train.choices import fix_choices, plan_choices
from megatier.train.export import export_end
from megatier.train.loop import Loop, nvme_path
from megatier.train.origin import UNKNOWN, Origin, check_origin, differences, origin_of
from megatier.train.saves import Record, Saves, expected_cost, promise
from megatier.train.watchdog import Watchdog


def train(
    config: RunConfig,
    console: Console,
    given: frozenset[str] = frozenset(),
    *,
    resumes: bool = False,
    accepts_changes: bool = False,
) -> None:
    """Train as the config says; settings that nobody gave are chosen by the planner where the machine was measured.

    Args:
        config: the run.
        console: what a person sees.
        given: dotted names of the settings that stay as they are (`config.file.given`).
        resumes: go on with the run in `output.directory`, from its last checkpoint or savepoint; from the start if it
            has none.
        accepts_changes: go on although numeric choices, text or libraries are not those of the checkpoint.

    Writes, in `output.directory`: config.yaml, metrics.jsonl, data/, checkpoints/, savepoints/, model/ (the export); by
    option trace.json and tensorboard/. SIGINT, SIGTERM and SIGHUP let the step end and write a checkpoint; the second
    one ends the run at once.

    Raises:
        MegatierError: before training where possible; the message says what to change.
    """
    if config.output.tensorboard:
        load_tensorboard()
    make_repeatable(config)
    share_interpreter()
    config, expected = plan_choices(fix_choices(config), given, console)
    with ExitStack() as stack:
        stall_file = Path(config.output.directory) / STALL_FILE
        expected_s = 0.0 if expected is None else expected.forecast.seconds
        watchdog = stack.enter_context(Watchdog(stall_file, config.train.stall_timeout, expected_s))
        run_directory = stack.enter_context(RunDirectory(config, resumes=resumes))
        directory = run_directory.path
        checkpoint = last_checkpoint(directory / CHECKPOINT_FOLDER)
        savepoint = Savepoint.last(directory)
        state = _state_of(checkpoint, savepoint)
        if resumes:
            _check_resumes(directory, config, state, console)

        changes = _check_changes(state, config, directory, accepts_changes)
        model, reader = open_model(config)
        tokenizer = load_tokenizer(config)
        origin = origin_of(config, model, tokenizer)
        if resumes:
            changes += _check_origin(state, origin, config, directory, console, accepts_changes)
        else:
            write_numbers(directory / NUMBERS_FILE, config, origin)

        _check_borders(model, config)
        _check_evaluations(model, config.data)
        session = _open_session(stack, model, config, run_directory, savepoint)
        _check_vocabulary(model, len(tokenizer))
        _check_positions(model, config.data.sequence_length, console)
        text = _open_text(stack, config.data, tokenizer, directory, state, accepts_changes)
        session.store.seal()
        remove_leftovers(directory / CHECKPOINT_FOLDER)
        room = Room.of(config.output, session)
        is_done = state is not None and state.step == config.train.steps
        num_kept = _check_room(config, session, room, is_done)
        _describe(console, config, session, text, num_kept)
        cost_s = expected_cost(session, None if expected is None else expected.forecast)
        if config.output.saves_by_time and not is_done:
            console.print(promise(config.output, room, num_kept, cost_s), markup=False, highlight=False, soft_wrap=True)

        _fill(console, session, reader, checkpoint, savepoint)
        if resumes:  # nothing refuses these settings any more
            write_numbers(directory / NUMBERS_FILE, config, origin)
            run_directory.write_config(config)
        log = stack.enter_context(MetricsLog(directory / METRICS_FILE))
        last_step = 0 if state is None else state.step
        _cut_records(console, log, last_step)
        scalars = None
        if config.output.tensorboard:
            scalars = stack.enter_context(Scalars(directory / TENSORBOARD_FOLDER, last_step + 1))

        log.write({"step": last_step, **opening(session, _tier_states(session), expected, changes)})
        record = _recorder(log, scalars)
        pace = Pace(cost_s) if config.output.saves_by_time and num_kept else None
        num_kept = num_kept or config.output.keep_checkpoints
        saves = Saves(config, session, text, origin, room, num_kept, pace, watchdog, record)
        run = Loop(config, console, session, text, record, expected, watchdog, saves)
        is_whole = run.steps(state)
        run.report("whole" if is_whole else "stopped")

        if not is_whole:
            console.print(f"stopped; `megatier resume {directory}` goes on", highlight=False, soft_wrap=True)
        else:
            if config.output.export:
                export_end(console, config, session, tokenizer, saves)
            drop_savepoint(session, directory / SAVEPOINT_FOLDER)

        if config.output.trace:
            write_trace(directory / TRACE_FILE, run.traced)


def _open_session(
    stack: ExitStack,
    model: PreTrainedModel,
    config: RunConfig,
    run_directory: RunDirectory,
    savepoint: Savepoint | None,
) -> Session:
    """With the block files of a savepoint, or new ones; then a savepoint older than the checkpoint goes."""
    if savepoint is None:
        remove_savepoints(run_directory.path / SAVEPOINT_FOLDER)
    session = Session(
        model,
        config.model,
        config.tiers,
        config.train,
        config.numerics,
        config.data.sequence_length,
        run_directory.run_id,
        savepoints=config.output.savepoint_every > 0,
        reuses=savepoint is not None,
    )
    stack.enter_context(session)
    if savepoint is not None:
        savepoint.check(session, config)

    return session


def _open_text(
    stack: ExitStack,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: RunState | None,
    accepts_changes: bool,
) -> PackedText | TextStream:
    """What the run trains on: a stream from where the state says, or files whose tokens are those of the state."""
    folder = directory / DATA_FOLDER
    if config.streaming:
        noted = None if state is None else state.text
        return stack.enter_context(TextStream(config, tokenizer, folder, noted, accepts_changes=accepts_changes))
    text = PackedText.build(config, tokenizer, folder)
    found = text.state
    if state is not None and not accepts_changes:
        state.check_text(found)

    return text


def _cut_records(console: Console, log: MetricsLog, last_step: int) -> None:
    """Steps after the last one that was saved come again, so their records go."""
    for number in log.cut_after(last_step):
        console.print(f"{METRICS_FILE}, line {number}: no record, as where a kill cut it; dropped", highlight=False)


def _recorder(log: MetricsLog, scalars: Scalars | None) -> Record:
    """Keeps figures in metrics.jsonl, and for TensorBoard where that is wanted."""

    def record(figures: Mapping[str, object]) -> None:
        log.write(figures)
        if scalars is not None:
            scalars.write(figures)

    return record


def _check_room(config: RunConfig, session: Session, room: Room, is_done: bool) -> int:
    """Refuse a run that could not save what it is told to, or not export; returns how many checkpoints are kept.

    By time there are as many as the drive takes: none where it has no room for two of them. A run of which the export
    alone is left needs room for that alone.
    """
    output = config.output
    if is_done:
        room.check(0)
        return output.keep_checkpoints
    num_kept = output.keep_checkpoints if output.checkpoint_every != 0 else 0
    if output.checkpoint_every == "auto":
        num_kept = room.num_that_fit(num_kept) if output.saves_by_time else 0

    room.check(num_kept)
    if output.savepoint_every:
        check_savepoint_room(session, Path(output.directory) / SAVEPOINT_FOLDER)
    return num_kept


def _check_borders(model: PreTrainedModel, config: RunConfig) -> None:
    if config.data.is_apart:
        check_stops_at_borders(model)


def _check_evaluations(model: PreTrainedModel, data: DataConfig) -> None:
    """The last one comes when the run is over: too late to find that the model cannot be evaluated."""
    if data.holdout_split is not None or (data.holdout_rows if data.streaming else data.holdout_fraction):
        check_evaluates(model)


def _check_vocabulary(model: PreTrainedModel, num_tokens: int) -> None:
    size = model.config.get_text_config().vocab_size
    if num_tokens > size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model's vocab_size is {size}. Raise model.config.vocab_size "
            "or choose the model's own tokenizer."
        )


def _check_positions(model: PreTrainedModel, sequence_length: int, console: Console) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < sequence_length:
        console.print(
            f"data.sequence_length is {sequence_length}, and the model is made for {positions} positions "
            "(max_position_embeddings): what it learns beyond is another model's",
            highlight=False,
            soft_wrap=True,
        )


def _describe(
    console: Console, config: RunConfig, session: Session, text: PackedText | TextStream, num_kept: int
) -> None:
    if text.damaged is not None:
        words = f"{text.damaged} was damaged: the text was tokenised again"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    tokens = "a stream of tokens to train on"
    if isinstance(text, PackedText):
        tokens = f"{format_count(text.num_tokens)} tokens to train on"

    num_parameters = sum(tensor.num_elements for unit in session.units for tensor in unit.layout.tensors)
    num_trained = sum(tensor.num_elements for unit in session.units for tensor in unit.layout.trained.tensors)
    trained = f" ({format_count(num_trained)} trained)" if num_trained < num_parameters else ""
    console.print(
        f"{format_count(num_parameters)} parameters{trained} in {len(session.units)} units, "
        f"{config.model.compute_dtype}, on {session.engine.options.device}; {tokens}; "
        f"{nvme_path(session.store)}{_io_threads(session)}",
        highlight=False,
        soft_wrap=True,
    )
    placement = session.placement
    if config.tiers.gpu_limit is not None and session.engine.options.device.type != "cuda":
        console.print("tiers.gpu_limit is ignored: there is no GPU in this run", highlight=False)

    if config.tiers.streamed_share:  # given up where no update waits for the norm, RAM spills, or the GPU has no room
        count = len(placement.streamed)
        console.print(f"{count} units stream their state through the GPU to be updated there", highlight=False)
    if placement.spilled:
        console.print(_safety(config, placement, num_kept), highlight=False, soft_wrap=True)

    if count := sum(home is Tier.NVME for home in placement.grad_homes.values()):
        words = "sums of groups" if placement.sums_on_gpu else "gradients"
        console.print(f"{words} of {count} units lie on NVMe, because RAM is too short for them", highlight=False)
    print_placement(console, _tier_states(session))


def _io_threads(session: Session) -> str:
    count, why = session.io_threads
    return f", {count} I/O threads each way ({why})" if session.store.files is not None else ""


def _safety(config: RunConfig, placement: Placement, num_kept: int) -> str:
    """How state on NVMe is updated, and what that leaves of a run that is killed."""
    output = config.output
    how = "in place"
    last = "begins again (output.checkpoint_every would save it)"
    if placement.speculative:
        how = "in the backward, before the norm is known"
    elif output.savepoint_every:
        how = "when the norm is known, beside the savepoint"

    if output.savepoint_every:
        last = f"goes on from its last savepoint ({output.savepoint_every} steps apart)"
    elif num_kept:
        apart = "by time" if output.checkpoint_every == "auto" else f"{output.checkpoint_every} steps apart"
        last = f"goes on from its last checkpoint ({apart})"
    return f"{len(placement.spilled)} units spill to NVMe and are updated {how}; killed, the run {last}"


def _state_of(checkpoint: Path | None, savepoint: Savepoint | None) -> RunState | None:
    """What the run goes on from; None: its start."""
    if savepoint is not None:
        return savepoint.state
    return None if checkpoint is None else RunState.read(read_state(checkpoint))


def _check_changes(state: RunState | None, config: RunConfig, directory: Path, accepts_changes: bool) -> list[str]:
    """Refuse other numbers than those that the run goes on from, or began with; what has changed."""
    if state is None:
        return check_numbers(directory / NUMBERS_FILE, config, accepts_changes=accepts_changes)
    return _check_state(state, config, directory, accepts_changes)


def _check_state(state: RunState, config: RunConfig, directory: Path, accepts_changes: bool) -> list[str]:
    """Refuse other numbers than those of the state, and a run of which no step is left; what has changed.

    What was accepted once, after the same step, is accepted: the process that was told to may have been killed.
    """
    changes = state.changes(config, choose_device(config.tiers))
    if changes and not accepts_changes:
        state.check(changes, _accepted(directory, state.step))
    if state.step > config.train.steps or (state.step == config.train.steps and not config.output.export):
        raise ConfigError(
            f"{directory} goes on from step {state.step}, and train.steps is {config.train.steps}: nothing is left to "
            "do. Raise train.steps to train on, with --accept-changes, since the learning rate depends on it."
        )

    return changes


def _accepted(directory: Path, step: int) -> set[str]:
    """Changes that were accepted before, after the same step."""
    begun = read_what_there_is(directory / METRICS_FILE).openings
    return {change for each in begun if each.step == step for change in each.changes}


def _check_origin(
    state: RunState | None,
    now: Origin,
    config: RunConfig,
    directory: Path,
    console: Console,
    accepts_changes: bool,
) -> list[str]:
    """Refuse another model or tokenizer than the one that the run goes on from, or began with; what has changed."""
    before = noted_origin(directory / NUMBERS_FILE) if state is None else state.origin
    if not before:
        what = directory if state is None else f"step {state.step} of {directory}"
        console.print(UNKNOWN.format(what), markup=False, highlight=False, soft_wrap=True)
    changes = differences(before, now)
    accepted = changes if accepts_changes else _accepted(directory, 0 if state is None else state.step)
    check_origin(changes, config, accepted, ", or add --accept-changes to go on with these")
    return changes


def _check_resumes(directory: Path, config: RunConfig, state: RunState | None, console: Console) -> None:
    """Refuse what could not be exported in the end; say where a run without a checkpoint begins."""
    if config.output.export and (directory / MODEL_FOLDER).exists():
        remedy = (
            "To train on, move that folder away, raise train.steps, and add --accept-changes, since the learning rate "
            "depends on it."
        )
        if state is None:
            remedy = "It has no checkpoint to go on from: train its model in another run, with model.path."
        raise ConfigError(f"{directory} holds a whole run: {MODEL_FOLDER} is there. {remedy}")

    if state is None:
        console.print("no checkpoint yet: the run begins again")


def _fill(
    console: Console, session: Session, reader: WeightReader, checkpoint: Path | None, savepoint: Savepoint | None
) -> None:
    began = time.perf_counter()
    if savepoint is not None:
        savepoint.restore(session)
        what = f"savepoint {savepoint.path.name}: weights and moments"
    elif checkpoint is not None:
        if not is_bound(checkpoint):
            console.print(UNBOUND.format(checkpoint.name), highlight=False, soft_wrap=True)
        restore(session, checkpoint)
        what = f"{checkpoint.name}: weights and moments"
    else:
        session.load(reader)
        what = "weights"

    console.print(f"{what} in place ({format_seconds(time.perf_counter() - began)})", highlight=False)


def _tier_states(session: Session) -> list[TierState]:
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
