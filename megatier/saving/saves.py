"""Decides when a run makes checkpoints and savepoints, begins them, and says when they are whole.

The training loop calls it between steps. A checkpoint is then written on its own queue while training goes on
(`checkpoint_writer`); a savepoint is made at once.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from megatier.byte_counts import format_bytes
from megatier.checkpoint.best import Best
from megatier.checkpoint.checkpoint import prune, remove
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, SAVEPOINT_FOLDER, last_checkpoint, parse_step
from megatier.checkpoint.run_state import RunState
from megatier.checkpoint.savepoint import drop_savepoint, save_savepoint
from megatier.config.schema import RunConfig
from megatier.errors import CapacityError, MegatierError, StallError, TransferError
from megatier.report.metrics import format_seconds
from megatier.saving.save_plan import SavePlan
from megatier.session.session import Session
from megatier.watch.watchdog import Watchdog
from megatier.watch.work_count import WorkCount

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full drive. The run goes on after these, because somebody may free space."""
Say = Callable[[str], None]
"""Prints a line for a person."""
Record = Callable[[Mapping[str, object]], None]
"""Adds figures to the run's records."""


class Saves:
    """The checkpoints and savepoints of a run. All ranks make the same calls, each from its training thread.

    If a decision depends on the clock or the drive, the first rank decides for all. It alone removes checkpoints.

    Attributes:
        writer: the checkpoint that is being written; None: there is none.
        best: the held-out losses so far, which are saved as well.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        text_state: Callable[[], dict[str, Any]],
        origin: Mapping[str, str],
        plan: SavePlan,
        watchdog: Watchdog,
        record: Record,
    ) -> None:
        """Prepare to save. Nothing is written yet.

        Args:
            config: the run.
            session: holds the run's state, which must be filled.
            text_state: returns the position in the text.
            origin: identifies model and tokenizer (`read_origin`).
            plan: says how many checkpoints are kept, and when one is due if the config does not.
            watchdog: watches the waits for a checkpoint.
            record: adds the figures of each save to the records.
        """
        self._config = config
        self._session = session
        self._all_ranks = session.all_ranks
        self._text_state = text_state
        self._watchdog = watchdog
        self._record = record
        self._origin = origin
        self._space = plan.space
        self._clock = plan.start_clock()

        # Even if the plan keeps no checkpoint, one is written when the run is stopped or its export fails.
        self._num_kept = plan.num_kept or config.output.keep_checkpoints
        self._device = session.engine.options.device
        directory = self._directory = Path(config.output.directory)
        self._read_identity = self._all_ranks.broadcast(lambda: _read_identity(directory))
        self._folder = directory / CHECKPOINT_FOLDER
        self._savepoints = directory / SAVEPOINT_FOLDER
        self._has_updated = False
        """Whether a weight has changed since the last checkpoint."""
        self._may_fail = False
        """Whether a full drive only leaves the current checkpoint out, because no setting asked for it."""
        self._position: dict[str, Any] | None = None
        """The position in the text at the step to save, if the text has been read further since; None: it has not."""
        self.writer: CheckpointWriter | None = None
        self.best = Best()
        self._between_steps_s = 0.0
        """Seconds for which the current checkpoint has held training up between two steps."""
        self._within_steps_s = 0.0
        """Seconds for which it has held compute up within steps."""

    # ------------------------------------------------------------------ called after each step

    def note_step(self, seconds: float, waited_s: float, *, has_updated: bool) -> None:
        """Take note of a step that has ended.

        Args:
            seconds: the time that it took.
            waited_s: the part of that time in which compute waited for a checkpoint.
            has_updated: whether the step changes a weight.
        """
        self._within_steps_s += waited_s
        self._has_updated |= has_updated
        if self._clock is not None:
            self._clock.note_step(seconds, is_beside=self.writer is not None)

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is kept because its held-out loss is the lowest; None: there is none."""
        return self.best.step if self._config.output.load_best_model_at_end else None

    def save_after(self, step: int, say: Say, *, is_last: bool, stops: bool) -> None:
        """Begin the checkpoint or savepoint that is due after a step, if any, and report the one before if it is whole.

        Args:
            step: the step that has ended.
            say: prints a line for a person.
            is_last: whether it was the run's last step.
            stops: whether the run was told to stop after it.

        Raises:
            MegatierError: saving failed, and a setting or a signal had asked for it.
        """
        # This comes first: a whole checkpoint that nobody has reported counts as being written, and the clock would
        # begin no other.
        self.finish_checkpoint(say, waits=False)
        output = self._config.output
        every = output.checkpoint_every
        is_due = every != "auto" and every > 0 and (is_last or step % every == 0)

        # One of these at most, since a checkpoint makes a savepoint of the same step needless.
        if stops or is_due:
            self._begin_checkpoint(step, say)
        elif self._is_best(step, is_last):
            # The clock counts this checkpoint as one of its own. It must hear the cost of the one before first, because
            # `note_begin` forgets the steps during that one.
            self.finish_checkpoint(say)
            if self._clock is not None:
                self._clock.note_begin()
            self._begin_checkpoint(step, say)
        elif self._is_due_by_clock(is_last):
            self._begin_timed_checkpoint(step, say)
        elif output.savepoint_every and step % output.savepoint_every == 0:
            self._make_savepoint(step, say)

    def _is_best(self, step: int, is_last: bool) -> bool:
        """Return whether a checkpoint is due because this step has the lowest held-out loss so far."""
        # The export at the end takes this step's weights from the session, so it needs no checkpoint.
        is_exported = is_last and self._config.output.export
        return self.best_step == step and not is_exported

    def _is_due_by_clock(self, is_last: bool) -> bool:
        """Return whether a checkpoint is due by the clock."""
        if (clock := self._clock) is None:
            return False

        # An export follows the last step. If it succeeds, no checkpoint is needed; if it fails, one is written then.
        if is_last:
            return self._all_ranks.broadcast(clock.is_long) and not self._config.output.export
        return self.writer is None and self._all_ranks.broadcast(clock.is_due)

    def check_directory(self) -> None:
        """Refuse to save if another directory lies at the run's path now, for example because its drive was unmounted.

        A checkpoint would go to another drive, and would be hidden as soon as the right one is mounted again.

        Raises:
            TransferError: the directory is another one.
        """
        self._all_ranks.broadcast(self._check_directory)

    def _check_directory(self) -> None:
        if _read_identity(self._directory) != self._read_identity:
            raise TransferError("saving a run", "disk", str(self._directory), 0, errno.ENODEV)

    # ------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self, step: int, say: Say, *, prunes: bool = True) -> None:
        """Begin a checkpoint, which is written while the next steps run."""
        # Only one checkpoint is written at a time, so this waits for the one before.
        self.finish_checkpoint(say)
        self.check_directory()
        began = time.perf_counter()
        self._drain()

        # After the drain no update is pending, so the writer reads the state of exactly this step.
        num_kept = self._num_kept if prunes else None
        state = self._run_state(step)
        self.writer = CheckpointWriter(self._session, self._folder, step, state, num_kept, self.best_step)
        self._has_updated = False
        self._may_fail = False

        # These are events of the drain, which must not count for the next step.
        self._session.player.take_events()
        self._between_steps_s = time.perf_counter() - began
        self._within_steps_s = 0.0

    def _begin_timed_checkpoint(self, step: int, say: Say) -> None:
        """Begin a checkpoint that is due by the clock alone, if the drive has room for it."""
        assert self._clock is not None
        self.finish_checkpoint(say)
        self._clock.note_begin()
        if not self._all_ranks.broadcast(lambda: self._space.takes_another(self._num_kept)):
            free = format_bytes(self._space.free_bytes)
            size = format_bytes(self._space.checkpoint_bytes)
            say(f"step {step}: no checkpoint: {self._folder} takes {size} and has {free} free; tried again later")
            return

        # This comes after `_begin_checkpoint`, which sets it to False.
        self._begin_checkpoint(step, say)
        self._may_fail = True

    def finish_checkpoint(self, say: Say, *, waits: bool = True) -> None:
        """Report the checkpoint that is being written, once it is whole.

        Args:
            say: prints a line for a person.
            waits: whether to wait until it is whole.

        Raises:
            MegatierError: writing failed. A full drive is no error if the checkpoint was due by the clock alone.
        """
        writer = self.writer

        # What follows takes all ranks, so they have to agree on whether the checkpoint is whole.
        if writer is None or not (waits or all(self._all_ranks.all_gather_object(writer.is_over()))):
            return

        # Cleared before anything can fail, so that an error is raised once.
        began = time.perf_counter()
        self.writer = None
        try:
            with self._watchdog.watch(self._session.player):
                writer.wait()
        except (CapacityError, TransferError) as error:
            is_about_room = isinstance(error, CapacityError) or error.errno in NO_ROOM
            if not (self._may_fail and is_about_room):
                raise

            # The changes since the checkpoint before are still in no checkpoint.
            self._has_updated = True
            say(f"step {writer.step}: no checkpoint, tried again later: {error}")
            return

        self._between_steps_s += time.perf_counter() - began
        if self._clock is not None:
            self._clock.note_end(self._between_steps_s, writer.seconds)
        paused = self._between_steps_s + self._within_steps_s
        size = format_bytes(writer.num_bytes)
        seconds = format_seconds(writer.seconds)
        waited = format_seconds(paused)
        say(f"step {writer.step}: checkpoint written ({size} in {seconds}; training waited {waited})")
        self._record(
            {
                "step": writer.step,
                "checkpoint_bytes": writer.num_bytes,
                "checkpoint_seconds": writer.seconds,
                "checkpoint_pause_seconds": paused,
            }
        )

        # The checkpoint is newer than any savepoint, and only now is it whole.
        drop_savepoint(self._session, self._savepoints)

    def _drain(self) -> None:
        """Finish all updates on all ranks. If one rank fails, all of them do, so that none waits for it."""
        with self._watchdog.watch(self._session.player), self._all_ranks.failing_together():
            self._session.player.drain()

    def save_after_non_finite(self, step: int, say: Say) -> None:
        """Save a run that ends because too many steps were not finite, so that it can be resumed after them.

        If no weight has changed since the last checkpoint, the new one replaces it. Otherwise all checkpoints stay,
        because nobody knows which of them still has good weights.
        """
        self.finish_checkpoint(say)
        twin = None if self._has_updated else self._find_last(self._folder)
        if self._has_updated or twin is not None:
            self._begin_checkpoint(step, say, prunes=False)
            self.finish_checkpoint(say)
        if twin is not None and parse_step(twin) != self.best_step:
            self._all_ranks.broadcast(lambda: remove(twin))

    def describe_resume(self, say: Say) -> str:
        """Return a sentence that says how to resume the run. Waits for the checkpoint that is being written, if any."""
        self._finish_or_say(say)

        # The first rank looks for all, so every rank has to ask for both.
        newest = [self._find_last(folder) for folder in (self._folder, self._savepoints)]
        saved = [path for path in newest if path is not None]
        run = self._config.output.directory
        if not saved:
            return (
                f"Nothing was saved in {run}, so the run has to begin anew: set output.checkpoint_every or "
                "output.savepoint_every as well."
            )
        return f"`megatier resume {run}` goes on from {max(saved, key=parse_step)}."

    def save_last_step(self, step: int, say: Say) -> None:
        """Save a run that has to end after a step, whatever becomes of the checkpoint on its way.

        Raises:
            StallError: the drive never answered.
        """
        self._finish_or_say(say)
        self.save_at_end(step, say)

    def _finish_or_say(self, say: Say) -> None:
        """Wait for the checkpoint that is on its way, and tell of its error if it fails."""
        try:
            self.finish_checkpoint(say)
        except StallError:
            raise
        except MegatierError as error:
            say(f"no checkpoint: {error}")

    # ------------------------------------------------------------------ savepoints

    def _make_savepoint(self, step: int, say: Say) -> None:
        """Make a savepoint, once the checkpoint that is being written is whole."""
        self.finish_checkpoint(say)
        self.check_directory()
        began = time.perf_counter()
        self._drain()
        num_bytes = save_savepoint(self._session, self._savepoints, step, self._run_state(step))
        seconds = time.perf_counter() - began

        # The drain is no part of the next step, as with a checkpoint.
        self._session.player.take_events()
        say(f"step {step}: savepoint ({format_bytes(num_bytes)} written, {format_seconds(seconds)})")
        self._record(
            {
                "step": step,
                "savepoint_bytes": num_bytes,
                "savepoint_seconds": seconds,
            }
        )

    def save_after_memory_error(self, step: int, position: dict[str, Any] | None, say: Say) -> None:
        """Try to save a run whose next step ran out of GPU memory.

        A run on several ranks is not saved, because the other ranks are still in that step.

        Args:
            step: the last whole step.
            position: the position in the text after it; None: there are several ranks.
            say: prints a line for a person.
        """
        # If no weight has changed since the last checkpoint, that one is as good.
        if position is None or not self._has_updated:
            return
        self._position = position
        try:
            saved = self.save_at_end(step, say)
        except torch.OutOfMemoryError as error:
            say(f"step {step}: no checkpoint: {error}")
            return
        if saved is not None:
            say(f"`megatier resume {self._config.output.directory}` goes on from {saved}")

    # ------------------------------------------------------------------ the end

    def watch_export(self, done: WorkCount) -> AbstractContextManager[None]:
        """Let the watchdog watch an export by the number of pieces that it has written."""
        return self._watchdog.watch(self._session.player, lambda: done.count)

    def save_at_end(self, step: int, say: Say) -> Path | None:
        """Save the last step of a run that cannot be exported or cannot go on.

        A checkpoint is tried first. If that fails, a savepoint is, provided that the run makes savepoints.

        Returns:
            The checkpoint or savepoint of this step. None if neither could be written; then what was saved before, and
            the block files of an older savepoint, stay.

        Raises:
            StallError: the drive does not answer.
        """
        # The loop may have saved this step already.
        for folder in (self._folder, self._savepoints):
            last = self._find_last(folder)
            if last is not None and parse_step(last) == step:
                return last

        # On a full drive all checkpoints but the last one are removed first. They would be removed afterwards anyway.
        try:
            self._all_ranks.broadcast(self._make_room)
            self._begin_checkpoint(step, say)
            self.finish_checkpoint(say)
            return self._find_last(self._folder)
        except StallError:
            # A drive that does not answer takes no savepoint either.
            raise
        except (MegatierError, OSError) as error:
            say(f"step {step}: no checkpoint: {error}")

        if not self._config.output.savepoint_every:
            return None
        try:
            self._make_savepoint(step, say)
        except StallError:
            raise
        except (MegatierError, OSError) as error:
            say(f"step {step}: no savepoint: {error}")
            return None
        return self._find_last(self._savepoints)

    def _make_room(self) -> None:
        """Remove all checkpoints but the last and the best one, if there is no room for another one."""
        if not self._space.has_room_for_checkpoint:
            prune(self._folder, 1, self.best_step)

    def _find_last(self, folder: Path) -> Path | None:
        """Return the newest whole checkpoint or savepoint in a folder."""
        return self._all_ranks.broadcast(lambda: last_checkpoint(folder))

    def _run_state(self, step: int) -> dict[str, Any]:
        """Return what is saved besides the arrays: step, config, text position, origin, tiles and losses."""
        tiles = self._session.engine.model.tiles
        text = self._position
        if text is None:
            text = self._text_state()
        state = RunState.of(step, self._config, self._device, text, self._origin, tiles, self.best)
        return state.to_dict()


def _read_identity(directory: Path) -> tuple[int, int] | None:
    """Return the device and inode of a directory, which tell it from another one at its path; None: it is not there."""
    try:
        status = directory.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransferError("saving a run", "disk", str(directory), 0, error.errno or 0) from error
    return status.st_dev, status.st_ino
