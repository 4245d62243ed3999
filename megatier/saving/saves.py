"""Saves a run on its way: decides when checkpoints and savepoints are made, and tells of them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from megatier.checkpoint.best import Best
from megatier.checkpoint.checkpoint import prune, remove
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, SAVEPOINT_FOLDER, last_checkpoint, parse_step
from megatier.checkpoint.run_state import RunState
from megatier.checkpoint.savepoint import drop_savepoint, save_savepoint
from megatier.config.schema import RunConfig
from megatier.errors import CapacityError, MegatierError, StallError, TransferError, mib
from megatier.report.metrics import format_seconds
from megatier.saving.save_plan import SavePlan
from megatier.session.session import Session
from megatier.watch.watchdog import Watchdog
from megatier.watch.work_count import WorkCount

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a drive that has no room, which goes away when somebody makes some."""
Say = Callable[[str], None]
"""Tells a person a line."""
Record = Callable[[Mapping[str, object]], None]
"""Keeps figures in the run's records."""


class Saves:
    """Checkpoints and savepoints of a run. Use it from the training thread, on all ranks alike.

    What the clock or the drive decides, the first rank decides for all. It alone removes checkpoints.

    Attributes:
        writer: the checkpoint on its way; None: there is none.
        best: the held-out losses so far, which are saved too.
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
        """Prepare; nothing is saved yet.

        Args:
            config: the run.
            session: the run's state, which is filled.
            text_state: returns the position in the text, which is saved too.
            origin: model and tokenizer (`read_origin`), which are saved too.
            plan: says how many checkpoints are kept, and when one is due if the config does not.
            watchdog: watches waits.
            record: keeps the figures of what was saved.
        """
        self._config = config
        self._session = session
        self._all_ranks = session.all_ranks
        self._text_state = text_state
        self._watchdog = watchdog
        self._record = record
        self._origin = origin
        self._room = plan.room
        self._clock = plan.start_clock()

        # If the plan keeps none, one is written all the same when the run is stopped or its export fails.
        self._num_kept = plan.num_kept or config.output.keep_checkpoints
        self._device = session.engine.options.device
        directory = self._directory = Path(config.output.directory)
        self._read_identity = self._all_ranks.broadcast(lambda: _read_identity(directory))
        self._folder = directory / CHECKPOINT_FOLDER
        self._savepoints = directory / SAVEPOINT_FOLDER
        self._has_updated = False
        """Whether a weight has changed since the last checkpoint."""
        self._may_fail = False
        """Whether the run goes on if the checkpoint on its way finds no room, because nobody asked for it."""
        self._position: dict[str, Any] | None = None
        """The note of the text at the step to save, if the text has gone on; None: it has not."""
        self.writer: CheckpointWriter | None = None
        self.best = Best()
        self._between_steps_s = 0.0
        """Seconds that it has held this thread up between two steps."""
        self._within_steps_s = 0.0
        """Seconds that it has held compute up within steps."""

    # ------------------------------------------------------------------ what the loop tells

    def note_step(self, seconds: float, waited_s: float, *, has_updated: bool) -> None:
        """Note that a step has ended.

        Args:
            seconds: how long it took.
            waited_s: seconds of these in which compute waited for a checkpoint.
            has_updated: whether it changes a weight.
        """
        self._within_steps_s += waited_s
        self._has_updated |= has_updated
        if self._clock is not None:
            self._clock.note_step(seconds, is_beside=self.writer is not None)

    @property
    def best_step(self) -> int | None:
        """The step of the checkpoint that is kept as the best one; None: none is."""
        return self.best.step if self._config.output.load_best_model_at_end else None

    def save_after(self, step: int, say: Say, *, is_last: bool, stops: bool) -> None:
        """Save what is due after a step, and tell of a checkpoint that has become whole meanwhile.

        Args:
            step: the step that has ended.
            say: tells a person.
            is_last: whether it was the run's last step.
            stops: whether the run was told to stop after it.

        Raises:
            MegatierError: saving failed, and the run was told to save.
        """
        # A checkpoint that has become whole is told of first. Otherwise it would still count as on its way, and the
        # clock would begin no other.
        self.finish_checkpoint(say, waits=False)
        output = self._config.output
        every = output.checkpoint_every
        is_due = every != "auto" and every > 0 and (is_last or step % every == 0)

        # At most one of the three: a checkpoint makes a savepoint of the same step needless.
        if stops or is_due:
            self._begin_checkpoint(step, say)
        elif self._is_best(step, is_last):
            # The clock takes it for one of its own. First it is told the cost of one that is still on its way: it then
            # forgets the steps beside that.
            self.finish_checkpoint(say)
            if self._clock is not None:
                self._clock.note_begin()
            self._begin_checkpoint(step, say)
        elif self._is_due_by_clock(is_last):
            self._begin_timed_checkpoint(step, say)
        elif output.savepoint_every and step % output.savepoint_every == 0:
            self._make_savepoint(step, say)

    def _is_best(self, step: int, is_last: bool) -> bool:
        """Return whether a checkpoint is due because no held-out loss was lower."""
        # The export at the end has this step's weights from the session.
        is_exported = is_last and self._config.output.export
        return self.best_step == step and not is_exported

    def _is_due_by_clock(self, is_last: bool) -> bool:
        """Return whether a checkpoint is due by the clock."""
        if (clock := self._clock) is None:
            return False

        # Not before an export: if it goes well a checkpoint is needless, and if it fails one is written then.
        if is_last:
            return self._all_ranks.broadcast(clock.is_long) and not self._config.output.export
        return self.writer is None and self._all_ranks.broadcast(clock.is_due)

    def check_directory(self) -> None:
        """Refuse to save where the run directory is another one now, as under a mount that is gone.

        Folders would be made anew there, on another drive, and hidden once the mount is back.

        Raises:
            TransferError: it is.
        """
        self._all_ranks.broadcast(self._check_directory)

    def _check_directory(self) -> None:
        if _read_identity(self._directory) != self._read_identity:
            raise TransferError("saving a run", "disk", str(self._directory), 0, errno.ENODEV)

    # ------------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self, step: int, say: Say, *, prunes: bool = True) -> None:
        """Begin a checkpoint; the steps after it go on while it is written."""
        # One checkpoint is on its way at a time, so the one before is waited for.
        self.finish_checkpoint(say)
        self.check_directory()
        began = time.perf_counter()
        self._drain()

        # All updates are over after the drain, so the queue reads the state of exactly this step (`checkpoint_writer`).
        num_kept = self._num_kept if prunes else None
        state = self._run_state(step)
        self.writer = CheckpointWriter(self._session, self._folder, step, state, num_kept, self.best_step)
        self._has_updated = False
        self._may_fail = False

        # The drain is no part of the next step, and its events must not count for it.
        self._session.player.take_events()
        self._between_steps_s = time.perf_counter() - began
        self._within_steps_s = 0.0

    def _begin_timed_checkpoint(self, step: int, say: Say) -> None:
        """Begin a checkpoint that nobody asked for, if the drive has room for it."""
        assert self._clock is not None
        self.finish_checkpoint(say)
        self._clock.note_begin()
        if not self._all_ranks.broadcast(lambda: self._room.takes_another(self._num_kept)):
            free = mib(self._room.free_bytes)
            size = mib(self._room.checkpoint_bytes)
            say(f"step {step}: no checkpoint: {self._folder} takes {size} and has {free} free; tried again later")
            return

        # Set after `_begin_checkpoint`, which takes the checkpoint for one that was asked for.
        self._begin_checkpoint(step, say)
        self._may_fail = True

    def finish_checkpoint(self, say: Say, *, waits: bool = True) -> None:
        """Tell of the checkpoint that was begun, if it is whole.

        Args:
            say: tells a person.
            waits: whether to wait until it is whole.

        Raises:
            MegatierError: it failed, unless it found no room and nobody had asked for it.
        """
        writer = self.writer

        # All ranks have to see the same, since they do what follows together.
        if writer is None or not (waits or all(self._all_ranks.all_gather_object(writer.is_over()))):
            return

        # No longer on its way whatever comes of it, so that an error is told once.
        began = time.perf_counter()
        self.writer = None
        try:
            with self._watchdog.watch(self._session.player):
                writer.wait()
        except (CapacityError, TransferError) as error:
            # What is about room goes away when somebody makes some on the drive.
            is_about_room = isinstance(error, CapacityError) or error.errno in NO_ROOM
            if not (self._may_fail and is_about_room):
                raise

            # The changes that it was to hold are in no checkpoint after all.
            self._has_updated = True
            say(f"step {writer.step}: no checkpoint, tried again later: {error}")
            return

        self._between_steps_s += time.perf_counter() - began
        if self._clock is not None:
            self._clock.note_end(self._between_steps_s, writer.seconds)
        paused = self._between_steps_s + self._within_steps_s
        size = mib(writer.num_bytes)
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

        # Only now that the checkpoint is whole, which is newer than any savepoint.
        drop_savepoint(self._session, self._savepoints)

    def _drain(self) -> None:
        """Finish the step on all ranks, or fail on all: one that fails alone would be waited for."""
        with self._watchdog.watch(self._session.player), self._all_ranks.failing_together():
            self._session.player.drain()

    def save_after_non_finite(self, step: int, say: Say) -> None:
        """Save a run that ends because too many steps were not finite, so that it may go on after them.

        If no weight has changed since the last checkpoint, the new one takes its place. Otherwise all of them stay,
        because nobody knows which weights are still good.
        """
        self.finish_checkpoint(say)
        twin = None if self._has_updated else self._find_last(self._folder)
        if self._has_updated or twin is not None:
            self._begin_checkpoint(step, say, prunes=False)
            self.finish_checkpoint(say)
        if twin is not None and parse_step(twin) != self.best_step:
            self._all_ranks.broadcast(lambda: remove(twin))

    def describe_resume(self, say: Say) -> str:
        """Return in words from what the run can go on, once what is on its way is whole. Nothing else is saved."""
        try:
            self.finish_checkpoint(say)
        except StallError:
            raise
        except MegatierError as error:
            say(f"no checkpoint: {error}")

        # All ranks ask for both, also if the first answer is enough: the first rank looks for all.
        newest = [self._find_last(folder) for folder in (self._folder, self._savepoints)]
        saved = [path for path in newest if path is not None]
        run = self._config.output.directory
        if not saved:
            return (
                f"Nothing was saved in {run}, so the run has to begin anew: set output.checkpoint_every or "
                "output.savepoint_every as well."
            )
        return f"`megatier resume {run}` goes on from {max(saved, key=parse_step)}."

    # ------------------------------------------------------------------ savepoints

    def _make_savepoint(self, step: int, say: Say) -> None:
        """Make a savepoint, after a checkpoint that is on its way."""
        self.finish_checkpoint(say)
        self.check_directory()
        began = time.perf_counter()
        self._drain()
        num_bytes = save_savepoint(self._session, self._savepoints, step, self._run_state(step))
        seconds = time.perf_counter() - began

        # The drain is no part of the next step, as with a checkpoint.
        self._session.player.take_events()
        say(f"step {step}: savepoint ({mib(num_bytes)} written, {format_seconds(seconds)})")
        self._record(
            {
                "step": step,
                "savepoint_bytes": num_bytes,
                "savepoint_seconds": seconds,
            }
        )

    def save_after_memory_error(self, step: int, position: dict[str, Any] | None, say: Say) -> None:
        """Save a run that cannot go on after a step, if that can be: all of several ranks would have to take part.

        Args:
            step: the last whole step.
            position: the note of the text after it, of a run that is alone.
            say: tells a person.
        """
        # If no weight has changed since the last checkpoint, that one is as good.
        if position is None or not self._has_updated:
            return
        self._position = position
        try:
            saved = self.save_unexported(step, say)
        except torch.OutOfMemoryError as error:
            say(f"step {step}: no checkpoint: {error}")
            return
        if saved is not None:
            say(f"`megatier resume {self._config.output.directory}` goes on from {saved}")

    # ------------------------------------------------------------------ the end

    def watch_export(self, done: WorkCount) -> AbstractContextManager[None]:
        """Watch an export, whose pieces are counted, for as long as this is entered."""
        return self._watchdog.watch(self._session.player, lambda: done.count)

    def save_unexported(self, step: int, say: Say) -> Path | None:
        """Save the end of a run whose export failed, as a checkpoint or else, if the run makes any, as a savepoint.

        Returns:
            The checkpoint or savepoint of this step, from which the run goes on. None if the drive takes neither; then
            what was saved before, and the block files of an older savepoint, stay.

        Raises:
            StallError: the drive never answered.
        """
        # The loop may have saved this very step already.
        for folder in (self._folder, self._savepoints):
            last = self._find_last(folder)
            if last is not None and parse_step(last) == step:
                return last

        # Without room all checkpoints but the last one go first, as they would go when this one is whole.
        try:
            self._all_ranks.broadcast(self._make_room)
            self._begin_checkpoint(step, say)
            self.finish_checkpoint(say)
            return self._find_last(self._folder)
        except StallError:
            # A drive that never answers takes no savepoint either.
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
        """Remove all checkpoints but the last and the best one, if there is no room for another."""
        if not self._room.has_room_for_checkpoint:
            prune(self._folder, 1, self.best_step)

    def _find_last(self, folder: Path) -> Path | None:
        """Return the newest whole checkpoint or savepoint in a folder."""
        return self._all_ranks.broadcast(lambda: last_checkpoint(folder))

    def _run_state(self, step: int) -> dict[str, Any]:
        """Return everything that is saved besides arrays."""
        tiles = self._session.engine.model.tiles
        text = self._position
        if text is None:
            text = self._text_state()
        state = RunState.of(step, self._config, self._device, text, self._origin, tiles, self.best)
        return state.to_dict()


def _read_identity(directory: Path) -> tuple[int, int] | None:
    """Return the identity of a directory, which another one at its path has not; None: there is none."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransferError("saving a run", "disk", str(directory), 0, error.errno or 0) from error
    return found.st_dev, found.st_ino
