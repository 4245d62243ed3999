"""The training run: from a config to a trained Hugging Face folder.

directory -> skeleton -> plan -> data -> reserve -> weights in -> steps -> weights out
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from megatier.config import RunConfig, TrainConfig
from megatier.data.packing import PackedText, num_real_tokens
from megatier.data.tokenizer import load_tokenizer
from megatier.engine.optimizer import learning_rate
from megatier.errors import ConfigError, NonFiniteError, mib
from megatier.models.decoder import check_stops_at_borders
from megatier.schedule.forecast import Forecast
from megatier.schedule.placement import Placement
from megatier.schedule.speculation import Speculation
from megatier.schedule.trace import TraceEvent, busy_seconds, stall_seconds, write_trace
from megatier.store.store import TieredStore
from megatier.store.tier import Tier
from megatier.store.transfer import QUEUES
from megatier.train.checkpoint import (
    check_room,
    last_checkpoint,
    read_state,
    remove,
    remove_leftovers,
    restore,
)
from megatier.train.checkpoint_writer import CheckpointWriter
from megatier.train.choices import fix_choices, plan_choices
from megatier.train.export import write_model
from megatier.train.history import opening
from megatier.train.metrics import MetricsLog, format_count, format_seconds
from megatier.train.process import make_repeatable, memory_bytes, seed, share_interpreter
from megatier.train.report import Progress, QueueBytes, StepReport, TierState, TierUse, print_moves, print_placement
from megatier.train.run_directory import (
    CHECKPOINT_FOLDER,
    DATA_FOLDER,
    METRICS_FILE,
    MODEL_FOLDER,
    SAVEPOINT_FOLDER,
    STALL_FILE,
    TENSORBOARD_FOLDER,
    TRACE_FILE,
    RunDirectory,
)
from megatier.train.run_state import RunState
from megatier.train.savepoint import (
    Savepoint,
    check_savepoint_room,
    drop_savepoint,
    remove_savepoints,
    save_savepoint,
)
from megatier.train.session import Session, WeightReader, choose_device, open_model
from megatier.train.stop import StopRequest
from megatier.train.tensorboard import Scalars, load_tensorboard
from megatier.train.watchdog import Watchdog

TRACED_STEPS = 3
"""The trace keeps the last steps only: one step of a large model has thousands of spans."""


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
        given: dotted names of the settings that stay as they are (`config_file.given`).
        resumes: go on with the run in `output.directory`, from its last checkpoint or savepoint; from the start if it
            has none.
        accepts_changes: go on although numeric choices, text or libraries are not those of the checkpoint.

    Writes, in `output.directory`: config.yaml, metrics.jsonl, data/, checkpoints/, savepoints/, model/ (the export); by
    option trace.json and tensorboard/. SIGINT and SIGTERM let the step end and write a checkpoint; the second one ends
    the run at once.

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
        expected_s = 0.0 if expected is None else expected.seconds
        watchdog = stack.enter_context(Watchdog(stall_file, config.train.stall_timeout, expected_s))
        run_directory = stack.enter_context(RunDirectory(config, resumes=resumes))
        directory = run_directory.path
        checkpoint, savepoint = last_checkpoint(directory / CHECKPOINT_FOLDER), Savepoint.last(directory)
        state = _state_of(checkpoint, savepoint, config, accepts_changes)
        if resumes:
            _check_resumes(directory, config, state, console)
        model, reader = open_model(config)
        _check_borders(model, config)
        session = _open_session(stack, model, config, run_directory, savepoint)
        tokenizer = load_tokenizer(config)
        _check_vocabulary(model, len(tokenizer))
        text = PackedText.build(config.data, tokenizer, directory / DATA_FOLDER)
        fingerprint = text.fingerprint()
        if state is not None and not accepts_changes:
            state.check_text(fingerprint)
        session.store.seal()
        remove_leftovers(directory / CHECKPOINT_FOLDER)
        _check_room(config, session)
        _describe(console, config, session, text)
        _fill(console, session, reader, checkpoint, savepoint)
        if resumes:  # nothing refuses these settings any more
            run_directory.write_config(config)
        log = stack.enter_context(MetricsLog(directory / METRICS_FILE))
        last_step = 0 if state is None else state.step
        log.cut_after(last_step)
        scalars = None
        if config.output.tensorboard:
            scalars = stack.enter_context(Scalars(directory / TENSORBOARD_FOLDER, last_step + 1))
        log.write({"step": last_step, **opening(session, _tier_states(session), expected)})
        run = _Run(config, console, session, text, fingerprint, log, scalars, expected, watchdog)
        is_whole = run.steps(state)
        run.report("whole" if is_whole else "stopped")
        if not is_whole:
            console.print(f"stopped; `megatier resume {directory}` goes on", highlight=False, soft_wrap=True)
        else:
            if config.output.export:
                session.player.drain()
                dtype, units, read = config.output.export_dtype, session.units, session.read_master
                write_model(console, directory / MODEL_FOLDER, model, units, read, tokenizer, dtype)
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


def _check_room(config: RunConfig, session: Session) -> None:
    """Refuse a run that could not save what it is told to."""
    directory, output = Path(config.output.directory), config.output
    if output.checkpoint_every:
        check_room(directory / CHECKPOINT_FOLDER, session.units, output.keep_checkpoints)
    if output.savepoint_every:
        check_savepoint_room(session, directory / SAVEPOINT_FOLDER)


class _Run:
    """The loop over steps."""

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        session: Session,
        text: PackedText,
        fingerprint: dict[str, int],
        log: MetricsLog,
        scalars: Scalars | None,
        expected: Forecast | None,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._console, self._session, self._text, self._log = config, console, session, text, log
        self._scalars, self._expected, self._watchdog = scalars, expected, watchdog
        self._has_learnt = False
        """A weight has changed since the last checkpoint."""
        self._last_step = 0
        self._device = session.engine.options.device
        self._directory = Path(config.output.directory)
        self._folder = self._directory / CHECKPOINT_FOLDER
        self._fingerprint = fingerprint
        self._moved_before = session.store.moved_bytes.copy()
        self._checkpoint: CheckpointWriter | None = None
        """It is on its way."""
        self._paused = 0.0
        """Seconds that it held up this thread so far."""
        self.traced: list[tuple[int, list[TraceEvent]]] = []

    def steps(self, state: RunState | None) -> bool:
        """All steps after a state, with evaluations and checkpoints; False where the run was told to stop before."""
        train, output = self._config.train, self._config.output
        if state is None:
            seed(train.seed)
        else:
            state.set_random(self._device)
        self._last_step = 0 if state is None else state.step
        first, stops = self._last_step + 1, False
        with Progress(self._console, train.steps) as progress, StopRequest(progress.note) as stop:
            for step in range(first, train.steps + 1):
                try:
                    self._step(step, progress)
                except NonFiniteError:
                    if self._session.optimizer.hyper.deferred:  # then no weight has changed
                        self._save_behind(step, progress)
                    raise
                is_last = step == train.steps
                if is_last or (train.evaluate_every and step % train.evaluate_every == 0):
                    self._evaluate(step, progress)
                self._end_checkpoint(progress, waits=False)
                is_due = output.checkpoint_every and (is_last or step % output.checkpoint_every == 0)
                stops = stop.is_asked and not is_last  # asked once: a signal may come between two looks
                if is_due or stops:
                    self._save(step, progress)
                elif output.savepoint_every and step % output.savepoint_every == 0:
                    self._save_in_place(step, progress)
                if stops:
                    break
            self._end_checkpoint(progress)
        return not stops

    def _save_behind(self, step: int, progress: Progress) -> None:
        """The run ends on bad steps: it may go on behind them. Of equal weights one checkpoint stays, of others all."""
        self._end_checkpoint(progress)
        twin = None if self._has_learnt else last_checkpoint(self._folder)
        if self._has_learnt or twin is not None:
            self._save(step, progress, prunes=False)
            self._end_checkpoint(progress)
        if twin is not None:
            remove(twin)

    def _save(self, step: int, progress: Progress, *, prunes: bool = True) -> None:
        """Begin a checkpoint; the steps after it go on while it is written."""
        self._end_checkpoint(progress)
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            self._session.player.drain()
        state = RunState.of(step, self._config, self._device, self._fingerprint)
        num_kept = self._config.output.keep_checkpoints if prunes else None
        self._checkpoint = CheckpointWriter(self._session, self._folder, step, state.to_dict(), num_kept)
        self._has_learnt = False
        self._session.player.take_events()
        self._paused = time.perf_counter() - began

    def _end_checkpoint(self, progress: Progress, *, waits: bool = True) -> None:
        """Tell of the checkpoint that was begun, if it is whole; wait for that if it `waits`."""
        writer = self._checkpoint
        if writer is None or not (waits or writer.is_over()):
            return
        began, self._checkpoint = time.perf_counter(), None
        with self._watchdog.watch(self._session.player):
            writer.wait()
        self._paused += time.perf_counter() - began
        size, seconds, paused = mib(writer.num_bytes), format_seconds(writer.seconds), format_seconds(self._paused)
        progress.note(f"step {writer.step}: checkpoint written ({size}, {seconds}, of which training waited {paused})")
        self._record(
            {
                "step": writer.step,
                "checkpoint_bytes": writer.num_bytes,
                "checkpoint_seconds": writer.seconds,
                "checkpoint_pause_seconds": self._paused,
            }
        )
        drop_savepoint(self._session, self._directory / SAVEPOINT_FOLDER)  # which is older

    def _save_in_place(self, step: int, progress: Progress) -> None:
        """Make a savepoint, which takes the place of a checkpoint before it."""
        self._end_checkpoint(progress)
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            self._session.player.drain()
        state = RunState.of(step, self._config, self._device, self._fingerprint)
        num_bytes = save_savepoint(self._session, self._directory / SAVEPOINT_FOLDER, step, state.to_dict())
        seconds = time.perf_counter() - began
        self._session.player.take_events()
        progress.note(f"step {step}: savepoint ({mib(num_bytes)} written, {format_seconds(seconds)})")
        self._log.write({"step": step, "savepoint_bytes": num_bytes, "savepoint_seconds": seconds})

    def report(self, outcome: str) -> None:
        """How the run ended, and what moved, against what the placement demands."""
        store, player = self._session.store, self._session.player
        moved = store.moved_bytes - self._moved_before
        rows = [QueueBytes(queue, moved[queue], player.demanded[queue]) for queue in QUEUES]
        if self._session.placement.speculative:
            _describe_speculation(self._console, player.updates.speculation)
        shown = [row for row in rows if row.queue != "nvme_to_gpu" or store.gpu_path is not None]
        is_streamed = bool(self._session.placement.streamed)
        print_moves(self._console, [row for row in shown if is_streamed or not row.queue.startswith("state")])
        if store.gpu_path is not None:
            self._console.print(f"nvme_to_gpu: {store.gpu_path}", highlight=False, soft_wrap=True)
        self._record({"step": self._last_step, "run": outcome, **self._moves()})

    def _record(self, record: Mapping[str, object]) -> None:
        self._log.write(record)
        if self._scalars is not None:
            self._scalars.write(record)

    def _moves(self) -> dict[str, dict[str, int]]:
        """Bytes per queue since this process began to train, those of checkpoints aside."""
        moved = self._session.store.moved_bytes - self._moved_before
        return {"moved_bytes": dict(moved), "demanded_bytes": dict(self._session.player.demanded)}

    def _step(self, step: int, progress: Progress) -> None:
        train, session = self._config.train, self._session
        began = time.perf_counter()
        rate = rate_of(step, train)
        batch = self._text.batch(step - 1, train.batch)
        columns = [value.chunk(train.groups) for value in batch.values()]
        groups = [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]
        with self._watchdog.watch(session.player):
            result = session.engine.train_step(step, rate, groups)
        seconds = time.perf_counter() - began
        events = session.player.take_events()
        self.traced = [*self.traced[1 - TRACED_STEPS :], (step, events)]
        stalls, busy = stall_seconds(events), busy_seconds(events)
        self._paused += stalls.get("checkpoint", 0.0)
        count = num_real_tokens(batch)
        tiers = tuple(TierUse(tier, used, budget) for tier, used, budget in _tier_uses(session))
        attainment = None if self._expected is None else self._expected.seconds / seconds
        bound_by = "" if self._expected is None else self._expected.bound_by
        progress.update(
            StepReport(
                step, result.loss, rate, result.grad_norm, count, seconds, stalls, tiers, attainment, bound_by, busy
            )
        )
        self._has_learnt |= result.skipped is None
        self._last_step = step
        if result.skipped is not None:
            what = "the loss" if result.skipped == "loss" else f"the gradient of {result.skipped}"
            progress.note(f"step {step} is left out, so that no weight changes: {what} is not finite")
        self._record(
            {
                "step": step,
                "loss": result.loss,
                "learning_rate": rate,
                "grad_norm": result.grad_norm,
                "clip_coefficient": result.clip_coefficient,
                "skipped": result.skipped,
                "tokens": count,
                "seconds": seconds,
                "tokens_per_s": count / seconds,
                "attainment": attainment,
                "stall_seconds": stalls,
                "busy_seconds": busy,
                "speculation": session.player.updates.speculation.outcome,
                **self._moves(),
                **memory_bytes(self._device),
                "nvme_path": nvme_path(session.store),
            }
        )

    def _evaluate(self, step: int, progress: Progress) -> None:
        train = self._config.train
        batches = [b for b, _ in zip(self._text.holdout(train.batch), range(train.evaluate_batches), strict=False)]
        if not batches:
            progress.note("no held-out text to evaluate on")
            return
        began = time.perf_counter()
        with self._watchdog.watch(self._session.player):
            loss = self._session.engine.evaluate(batches)
        self._session.player.take_events()
        progress.note(f"step {step}: held-out loss {loss:.4f} ({format_seconds(time.perf_counter() - began)})")
        self._record({"step": step, "heldout_loss": loss})


def rate_of(step: int, train: TrainConfig) -> float:
    """Learning rate of step 1, 2, ... of a run."""
    return learning_rate(
        step,
        peak=train.learning_rate,
        schedule=train.schedule,
        warmup=train.warmup_steps,
        steps=train.steps,
        minimum_ratio=train.min_learning_rate_ratio,
    )


def nvme_path(store: TieredStore) -> str:
    """How bytes really go to and from NVMe."""
    access = {None: "no NVMe tier", True: "NVMe by O_DIRECT", False: "NVMe by buffered access (O_DIRECT was refused)"}
    return access[store.is_direct] + (f", to the GPU by {store.gpu_path}" if store.gpu_path is not None else "")


def _check_borders(model: PreTrainedModel, config: RunConfig) -> None:
    if config.data.is_apart:
        check_stops_at_borders(model)


def _check_vocabulary(model: PreTrainedModel, num_tokens: int) -> None:
    size = model.config.get_text_config().vocab_size
    if num_tokens > size:
        raise ConfigError(
            f"the tokenizer has {num_tokens} tokens, the model's vocab_size is {size}. Raise model.config.vocab_size "
            "or choose the model's own tokenizer."
        )


def _describe(console: Console, config: RunConfig, session: Session, text: PackedText) -> None:
    num_parameters = sum(tensor.num_elements for unit in session.units for tensor in unit.layout.tensors)
    console.print(
        f"{format_count(num_parameters)} parameters in {len(session.units)} units, {config.model.compute_dtype}, on "
        f"{session.engine.options.device}; {format_count(text.num_tokens)} tokens to train on; "
        f"{nvme_path(session.store)}",
        highlight=False,
        soft_wrap=True,
    )
    placement = session.placement
    if config.tiers.streamed_share:  # given up where no update waits for the norm, RAM spills, or the GPU has no room
        count = len(placement.streamed)
        console.print(f"{count} units stream their state through the GPU to be updated there", highlight=False)
    if placement.spilled:
        console.print(_safety(config, placement), highlight=False, soft_wrap=True)
    if count := sum(home is Tier.NVME for home in placement.grad_homes.values()):
        console.print(f"gradients of {count} units wait on NVMe, because RAM is too short for them", highlight=False)
    print_placement(console, _tier_states(session))


def _safety(config: RunConfig, placement: Placement) -> str:
    """How state on NVMe is updated, and what that leaves of a run that is killed."""
    output = config.output
    how, last = "in place", "begins again (output.checkpoint_every would save it)"
    if placement.speculative:
        how = "in the backward, before the norm is known"
    elif output.savepoint_every:
        how = "when the norm is known, beside the savepoint"
    if output.savepoint_every:
        last = f"goes on from its last savepoint ({output.savepoint_every} steps apart)"
    elif output.checkpoint_every:
        last = f"goes on from its last checkpoint ({output.checkpoint_every} steps apart)"
    return f"{len(placement.spilled)} units spill to NVMe and are updated {how}; killed, the run {last}"


def _describe_speculation(console: Console, speculation: Speculation) -> None:
    kept, void = speculation.outcomes["kept"], speculation.outcomes["void"]
    console.print(
        f"updates in the backward: kept in {kept} steps, void in {void} that clipped or were left out, which moved "
        f"{mib(speculation.void_bytes)} in vain",
        highlight=False,
        soft_wrap=True,
    )


def _state_of(
    checkpoint: Path | None, savepoint: Savepoint | None, config: RunConfig, accepts_changes: bool
) -> RunState | None:
    """What the run goes on from; None: its start."""
    if savepoint is not None:
        path, state = savepoint.path, savepoint.state
    elif checkpoint is not None:
        path, state = checkpoint, RunState.read(read_state(checkpoint))
    else:
        return None
    if not accepts_changes:
        state.check(config, choose_device(config.tiers))
    if state.step > config.train.steps or (state.step == config.train.steps and not config.output.export):
        raise ConfigError(
            f"{path} is of step {state.step}, and train.steps is {config.train.steps}: nothing is left to do. "
            "Raise train.steps to train on, with --accept-changes, since the learning rate depends on it."
        )
    return state


def _check_resumes(directory: Path, config: RunConfig, state: RunState | None, console: Console) -> None:
    """Refuse what could not be exported in the end; say where a run without a checkpoint begins."""
    if config.output.export and (directory / MODEL_FOLDER).exists():
        raise ConfigError(
            f"{directory} holds a whole run: {MODEL_FOLDER} is there. To train on, move that folder away, raise "
            "train.steps, and add --accept-changes, since the learning rate depends on it."
        )
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
        restore(session, checkpoint)
        what = f"{checkpoint.name}: weights and moments"
    else:
        session.load(reader)
        what = "weights"
    console.print(f"{what} in place ({format_seconds(time.perf_counter() - began)})", highlight=False)


def _tier_states(session: Session) -> list[TierState]:
    state, other = session.placement.state_bytes, session.placement.other_bytes
    return [
        TierState(tier, state.get(tier, 0), other.get(tier, 0), session.store.usage(tier)["budget"]) for tier in Tier
    ]


def _tier_uses(session: Session) -> Iterator[tuple[str, int, int]]:
    for tier in Tier:
        usage = session.store.usage(tier)
        budget = usage.pop("budget")
        if budget:
            yield str(tier), sum(usage.values()), budget
