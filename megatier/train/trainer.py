"""Trains a run, from its config to a trained Hugging Face folder. `megatier train` and `megatier resume` call `train`.

The order is: plan, lock the run directory, open the data, allocate the tiers, fill the weights, take the steps, export.
All of it happens on the training thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatier.byte_counts import format_bytes
from megatier.checkpoint.checkpoint import remove_leftovers
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    DATA_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    NUMBERS_FILE,
    SAVEPOINT_FOLDER,
    TENSORBOARD_FOLDER,
    TRACE_FILE,
    check_can_resume,
    read_run_id,
)
from megatier.checkpoint.run_state import write_numbers
from megatier.checkpoint.savepoint import drop_savepoint, remove_savepoints
from megatier.config import file as config_file
from megatier.config.schema import RunConfig
from megatier.data.image_chats import ImageChats
from megatier.data.image_packs import positions_of
from megatier.data.packed_text import PackedText
from megatier.data.processor import Processor, load_tokens
from megatier.data.text_stream import TextStream
from megatier.data.tokenizer import vocabulary_size
from megatier.data.unknown_tokens import UnknownTokens, beyond_vocabulary
from megatier.drives.leftovers import find_leftovers
from megatier.errors import DataError
from megatier.foreign import one_version
from megatier.models.weights import WeightReader
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.ranks.rendezvous import joined
from megatier.report.console import say
from megatier.report.metrics import MetricsLog, format_count
from megatier.report.report import WorkBar
from megatier.report.tensorboard import ScalarEvents
from megatier.report.trackers import Sender, TrackedRun, load_trackers
from megatier.saving.end_export import export_at_end
from megatier.saving.origin import Origin, read_origin
from megatier.saving.save_plan import SavePlan
from megatier.saving.saves import Saves
from megatier.saving.upload import check_login, upload
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.setup.machine import Machine, choose_device
from megatier.trace.events import write_trace
from megatier.train.begun_run import BegunRun
from megatier.train.description import (
    describe_left_out,
    describe_positions,
    describe_reserved,
    describe_run,
    list_tier_states,
    make_opening_record,
)
from megatier.train.loop import Loop, Outcome
from megatier.train.record_writers import Figures, RecordWriters
from megatier.train.restart import find_restarted_run
from megatier.train.shared_setup import plan_setup
from megatier.train.shared_text import SharedText, Text
from megatier.watch.work_count import WorkCount


def train(
    config: RunConfig,
    console: Console,
    given: frozenset[str] = frozenset(),
    *,
    resumes: bool = False,
    accepts_changes: bool = False,
) -> None:
    """Train as the config says. If the machine was measured, the planner chooses the settings that are not given.

    The run writes into `output.directory`: config.yaml, metrics.jsonl, data/, checkpoints/, savepoints/, and the export
    in model/; trace.json and tensorboard/ if settings ask for them. `output.push_to_hub` uploads the export. After
    SIGINT, SIGTERM or SIGHUP the step ends and a checkpoint is written; a second signal ends the run at once.

    Args:
        config: the run.
        console: what a person sees.
        given: dotted names of the settings that stay as they are (`config.file.load_given`).
        resumes: resume the run in `output.directory` from its last checkpoint or savepoint, or from its beginning if it
            has none. A run that `torchrun --max-restarts` starts again is always resumed.
        accepts_changes: resume although numeric choices, text or libraries differ from those of the checkpoint.

    Raises:
        MegatierError: before training where possible; the message says what to change.
    """
    # A tracker that is not installed fails here, before minutes of planning.
    trackers = load_trackers(config.output)

    # The rank comes from torchrun's variable, since the ranks join later.
    if config.output.push_to_hub is not None and os.environ.get("RANK", "0") == "0":
        check_login(console, "output.push_to_hub")
    make_repeatable(config)
    share_interpreter()

    # Whatever fails from here on, all that is open is closed, the last part first.
    with ExitStack() as stack:
        device = choose_device(config.tiers.device)
        ranks = stack.enter_context(joined(device.type))
        restarted = None if resumes else find_restarted_run(config, given, ranks)
        if restarted is not None:
            config, given = restarted
            resumes = True
        config = replace(config, train=config.train.bounded(steps_given="train.steps" in given))

        # Planner, tokenizer and origin read the model's files one after the other. If a file is replaced meanwhile, the
        # run is refused.
        with one_version():
            machine = _describe_machine(config, device, ranks, resumes=resumes)
            setup, reader, expected = plan_setup(config, given, machine, ranks, console)
            run = BegunRun.begin(
                stack, setup, expected, ranks, console, resumes=resumes, accepts_changes=accepts_changes
            )
            sources = _check_and_open_tokens(run)

        # A run that is killed before its first save is compared with these when it is resumed.
        if not resumes and run.writes:
            write_numbers(run.directory.path / NUMBERS_FILE, setup.config, sources.origin)
        outcome, record = _run_session(run, sources, reader, trackers)

    # This comes last, because a large model takes long to upload and memory and drives are free by now.
    repository = config.output.push_to_hub
    if repository is not None and outcome != "stopped" and run.writes:
        upload(run.console, run.directory.path / MODEL_FOLDER, repository, private=config.output.hub_private_repo)

    # Only now, when nothing is left that it could keep from being saved.
    record.check()


class Sources(NamedTuple):
    """What a run makes its text with, and what has changed of its model and tokenizer."""

    tokens: PreTrainedTokenizerBase | Processor
    """The tokenizer, or the processor if images are read."""
    origin: Origin
    """What tokenizer and model were made of."""
    changes: list[str]
    """The changes since the run began or was saved, all of which the user has accepted."""


def _run_session(
    run: BegunRun, sources: Sources, reader: WeightReader, trackers: Mapping[str, Any]
) -> tuple[Outcome, RecordWriters]:
    """Open the session, fill it, take all steps, and export the model; return how the steps ended, and the records.

    Args:
        run: begun, with its setup.
        sources: tokenizer and origin.
        reader: gives the first weights of a run that begins.
        trackers: the libraries of trackers, by name.

    Raises:
        MegatierError: the session cannot be opened, or a step, a save or the export failed.
    """
    session, text = _open_session(run, sources.tokens)

    # Only the text says how many sequences there are, and so how many steps an epoch takes.
    config = replace(run.setup.config, train=text.with_steps(run.setup.config.train, run.console))

    # The room on the drive is checked before the weights are filled, which takes minutes for a large model.
    forecast = None if run.expected is None else run.expected.forecast
    plan = SavePlan.of(config.output, session, forecast, is_done=run.start.is_done(config.train))
    if run.writes:
        describe_run(run.console, config, session, text.own, plan)

    # A drive may hang here as well, long before the first step.
    with run.watchdog.watch(session.player, lambda: session.filling.num_runs):
        run.start.fill(session, reader, run.console)
    if run.writes:
        _write_final_config(run, config, sources.origin)

    record = _open_records(run, config, trackers)
    first = make_opening_record(session, list_tier_states(session), run.expected, sources.changes)
    record({"step": run.start.step, **first})
    record.check()
    saves = Saves(config, session, lambda: text.state, sources.origin, plan, run.watchdog, record)
    loop = Loop(config, run.console, session, text, record, run.expected, run.watchdog, saves)
    outcome = loop.run(run.start.state)
    loop.report_end(outcome)

    _finish(run, config, session, sources.tokens, saves, outcome, loop.last_step)
    if config.output.trace and run.writes:
        write_trace(run.directory.path / TRACE_FILE, loop.traced)
    return outcome, record


def _describe_machine(config: RunConfig, device: torch.device, ranks: Ranks | None, *, resumes: bool) -> Machine:
    """Return the machine that runs. Block files that this run has left there after a kill count as free space."""
    # The run reuses their space. All ranks have to agree on it, so the first one reads the directory for all.
    all_ranks = ranks or SingleRank()
    directory = Path(config.output.directory)
    left_id = None
    if resumes:
        left_id = all_ranks.broadcast(lambda: read_run_id(directory))
    return Machine.here(config.tiers, device, ranks, left_id)


def _write_final_config(run: BegunRun, config: RunConfig, origin: Origin) -> None:
    """Write the final config and origin of a run, once nothing can refuse it any more.

    Args:
        run: the run.
        config: its config, with epochs converted to steps.
        origin: what identifies its model and tokenizer.
    """
    counts_epochs = run.setup.config.train.epochs is not None
    if not (run.resumes or counts_epochs):
        return
    assert run.directory.own is not None

    # This has to come before the config is replaced, since the old one names the old mounts.
    _remove_moved_blocks(run, config)
    write_numbers(run.directory.path / NUMBERS_FILE, config, origin)
    run.directory.own.write_config(config)


def _remove_moved_blocks(run: BegunRun, config: RunConfig) -> None:
    """Remove block files that a kill has left on mounts which the run no longer uses, and say so.

    Nothing else would find these files, which are as large as the state that lay there.
    """
    before = config_file.load_saved(run.directory.path / CONFIG_FILE).tiers.mounts
    present = [os.path.realpath(mount.directory) for mount in config.tiers.mounts]
    for mount in before:
        # The drive of a mount may have been removed, and its files with it.
        if os.path.realpath(mount.directory) in present or not mount.directory.is_dir():
            continue
        for leftover in find_leftovers(mount.directory, remove=True, run_id=run.directory.run_id):
            fate = f"stays, {leftover.stays}"
            if not leftover.stays:
                fate = f"{format_bytes(leftover.num_bytes)} removed"
            say(run.console, f"{leftover.path}: block files from before the run was resumed, {fate}")


def _check_and_open_tokens(run: BegunRun) -> Sources:
    """Open the tokenizer or processor, and refuse a model or tokenizer that the run cannot use.

    Raises:
        ConfigError, DataError, UnsupportedModelError: names what to change.
    """
    config, model = run.setup.config, run.setup.model
    start = run.start
    if run.resumes:
        check_can_resume(start.directory, config)
        start.check_evaluations(config)
        if start.state is None:
            say(run.console, "There is no checkpoint yet, so the run begins again.")
    changes = start.check_config(run.setup)

    tokens, tokenizer = load_tokens(config)
    origin = read_origin(config, model, tokenizer)
    if run.resumes:
        changes += start.check_origin(origin, config, run.console)

    _unknown_tokens(model, tokens)
    describe_positions(run.console, model, config.data.sequence_length)
    return Sources(tokens, origin, changes)


def _unknown_tokens(model: PreTrainedModel, tokens: PreTrainedTokenizerBase | Processor) -> UnknownTokens:
    """Return the tokens for which a model has no embeddings.

    Raises:
        ConfigError: they may come with any text, or with any image.
    """
    size = model.config.get_text_config().vocab_size
    if isinstance(tokens, PreTrainedTokenizerBase):
        return UnknownTokens.of(tokens, size)

    # A processor writes special tokens where images are.
    if (needed := vocabulary_size(tokens.tokenizer)) > size:
        raise beyond_vocabulary(needed, size)
    return UnknownTokens(size)


def _open_session(run: BegunRun, tokens: PreTrainedTokenizerBase | Processor) -> tuple[Session, SharedText]:
    """Open the session and the text, and allocate all memory and files, with a progress bar.

    A run that is resumed from a savepoint reuses its block files. Any other run makes new ones.
    """
    config, directory, savepoint = run.setup.config, run.directory, run.start.savepoint

    # An older savepoint becomes void here, because its block files are replaced.
    if savepoint is not None:
        savepoint.check_ranks(run.ranks)
    elif run.writes:
        remove_savepoints(directory.path / SAVEPOINT_FOLDER)
    session = Session(
        run.setup,
        directory.run_id,
        seed=config.train.seed,
        reuses=savepoint is not None,
        run=str(directory.path),
        ranks=run.ranks,
        # The number of patches differs from image to image.
        any_shape=config.data.images,
    )
    run.stack.enter_context(session)
    if savepoint is not None:
        savepoint.check(session, config)

    # The text is opened before memory and files are allocated, so that a text that is refused costs no time for that.
    text = None
    if run.writes:
        text = _open_text(run, tokens)
        _check_held_out(config, text)
        remove_leftovers(directory.path / CHECKPOINT_FOLDER)

    describe_reserved(run.console, session)
    with WorkBar(run.console, "NVMe filled", None, format_bytes) as work:
        filled = WorkCount()
        with run.watchdog.watch(session.player, lambda: filled.begun):
            session.seal(filled.counting(work.advance))
    return session, SharedText(run.ranks, text)


def _open_text(run: BegunRun, tokens: PreTrainedTokenizerBase | Processor) -> Text:
    """Open the text that the run trains on. A stream continues at the position in the saved state.

    Raises:
        DataError: the text differs from that of the saved state, and the user has not accepted a change.
    """
    data = run.setup.config.data
    folder = run.directory.path / DATA_FOLDER
    state, accepts_changes = run.start.state, run.start.accepts_changes
    unknown = _unknown_tokens(run.setup.model, tokens)
    if isinstance(tokens, PreTrainedTokenizerBase) and data.streaming:
        noted = None if state is None else state.text
        stream = TextStream(data, tokens, folder, noted, accepts_changes=accepts_changes, unknown=unknown)

        # This runs after the stream has closed, because its thread may leave out records until then.
        run.stack.callback(describe_left_out, run.console, stream)
        return run.stack.enter_context(stream)

    with WorkBar(run.console, "text", None, lambda count: f"{format_count(count)} tokens") as work:
        text: PackedText | ImageChats
        if isinstance(tokens, Processor):
            positions = positions_of(run.setup.model) if data.max_patches is not None else None
            text = run.stack.enter_context(ImageChats(data, tokens, folder, work.advance, positions))
        else:
            text = PackedText.build(data, tokens, folder, work.advance, unknown)
    if state is not None and not accepts_changes:
        state.check_text(text.state)
    return text


def _check_held_out(config: RunConfig, text: Text) -> None:
    """Refuse a text of which nothing is held out, if a setting depends on the held-out loss.

    Raises:
        DataError: names the settings.
    """
    if (asked := config.by_evaluations) is None:
        return
    holds_out = len(text.held_out) > 0 if isinstance(text, ImageChats) else next(text.holdout(1), None) is not None
    if not holds_out:
        raise DataError(
            f"no text is held out, and {asked} goes by the held-out loss. Give more text, raise "
            f"data.{config.data.holdout_setting}, or leave {asked} out."
        )


def _open_records(run: BegunRun, config: RunConfig, trackers: Mapping[str, Any]) -> RecordWriters:
    """Open metrics.jsonl, and TensorBoard's files and trackers if settings ask for them.

    Args:
        run: the run.
        config: its config, with epochs converted to steps.
        trackers: the libraries of trackers, by name.

    Returns:
        What writes figures to all of them. On all ranks but the first it does nothing.
    """
    if not run.writes:
        return RecordWriters()
    stack, console, directory = run.stack, run.console, run.directory
    last_step = run.start.step
    log = stack.enter_context(MetricsLog(directory.path / METRICS_FILE))

    # Steps after the last saved one are repeated, so their records are removed.
    not_records, last_recorded = log.cut_after(last_step)
    for number in not_records:
        say(console, f"{METRICS_FILE}, line {number}: this is no record, perhaps because a kill cut it. It is dropped.")

    writers: list[Callable[[Figures], None]] = [log.write]
    if config.output.writes_tensorboard:
        scalars = stack.enter_context(ScalarEvents(directory.path / TENSORBOARD_FOLDER, last_step + 1))
        writers.append(scalars.write)

    path = directory.path.absolute()
    tracked = TrackedRun(
        name=path.name,
        run_id=directory.run_id,
        directory=path,
        config=config_file.to_dict(config),
        repeated=range(last_step + 1, last_recorded + 1),
    )
    for name, library in trackers.items():
        sender = stack.enter_context(Sender(name, library, tracked, partial(say, console)))
        writers.append(sender.write)

    return RecordWriters(writers)


def _finish(
    run: BegunRun,
    config: RunConfig,
    session: Session,
    tokens: PreTrainedTokenizerBase | Processor,
    saves: Saves,
    outcome: Outcome,
    last_step: int,
) -> None:
    """Export the model of a run whose steps are done, or say how to resume a run that was stopped.

    Raises:
        ExportError: the model cannot be written.
    """
    directory = Path(config.output.directory)
    if outcome == "stopped":
        say(run.console, f"stopped; `megatier resume {directory}` goes on")
        return

    # The savepoint is dropped last, because the run is resumed from it if the export fails.
    if config.output.export:
        export_at_end(run.console, config, session, tokens, saves, last_step)
    drop_savepoint(session, directory / SAVEPOINT_FOLDER)
