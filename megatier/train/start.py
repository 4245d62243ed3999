"""Finds the point that a run starts from: its last savepoint, its last checkpoint, or its beginning.

A run that is resumed is compared with what was saved. Another numeric choice, text, model or tokenizer would silently
change its numbers, so each change is refused by name unless the user accepts it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console

from megatier.checkpoint.checkpoint import UNBOUND, is_bound, read_state
from megatier.checkpoint.restore import restore
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    METRICS_FILE,
    NUMBERS_FILE,
    last_checkpoint,
    step_path,
)
from megatier.checkpoint.run_state import RunState, check_numbers, read_noted_origin
from megatier.checkpoint.savepoint import Savepoint
from megatier.config.schema import RunConfig, TrainConfig
from megatier.errors import CheckpointError, ConfigError
from megatier.models.decoder import Unit
from megatier.models.weights import WeightReader
from megatier.report.console import say
from megatier.report.history import read_what_there_is
from megatier.report.metrics import format_count, format_seconds
from megatier.report.report import WorkBar
from megatier.saving.origin import UNKNOWN_ORIGIN, Origin, check_origin, find_changes
from megatier.session.session import Session
from megatier.setup.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The point that a run starts from."""

    directory: Path
    """The run directory."""
    checkpoint: Path | None
    """The last checkpoint, if the run has one."""
    savepoint: Savepoint | None
    """The savepoint, if the run has one that is newer than the last checkpoint."""
    state: RunState | None
    """The saved state of the savepoint or checkpoint; None: the run begins."""
    accepts_changes: bool
    """Whether the user accepts changes that alter the numbers of the run."""

    @classmethod
    def of(cls, directory: Path, *, accepts_changes: bool) -> Self:
        """Find the point that the run in a directory starts from.

        Raises:
            CheckpointError, SavepointError: what was saved last is damaged or missing.
        """
        checkpoint = last_checkpoint(directory / CHECKPOINT_FOLDER)
        savepoint = Savepoint.last(directory)
        state = None
        if checkpoint is None and savepoint is None:
            _check_never_saved(directory)

        # `Savepoint.last` returns a savepoint only if it is newer than the last checkpoint.
        if savepoint is not None:
            state = savepoint.state
        elif checkpoint is not None:
            state = RunState.read(read_state(checkpoint))
        return cls(
            directory=directory,
            checkpoint=checkpoint,
            savepoint=savepoint,
            state=state,
            accepts_changes=accepts_changes,
        )

    @property
    def step(self) -> int:
        """Number of the last saved step; 0 if the run begins."""
        return 0 if self.state is None else self.state.step

    def is_done(self, train: TrainConfig) -> bool:
        """Return whether no step is left to take, so that at most the export is missing."""
        if self.state is None:
            return False
        return self.step == train.steps or self.state.best.is_over(train.early_stopping_patience)

    def check_evaluations(self, config: RunConfig) -> None:
        """Refuse a run that early stopping has ended and that needs no export, or whose best checkpoint is missing.

        Raises:
            ConfigError: the run is over.
            CheckpointError: the checkpoint of its best evaluation is not there.
        """
        if self.state is None:
            return
        best = self.state.best
        is_done = self.is_done(config.train)
        if is_done and self.step < config.train.steps and not config.output.export:
            raise ConfigError(
                f"{self.directory} ended early after step {self.step}: {best.why_over()}. To train on, raise "
                "train.early_stopping_patience, or set it to null."
            )

        # Here the last save has the best weights itself, and no step will change them.
        if not config.output.load_best_model_at_end or best.step is None or (is_done and best.step == self.step):
            return
        path = step_path(self.directory / CHECKPOINT_FOLDER, best.step)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not there, which has the lowest held-out loss so far. Bring it back, or set "
                "output.load_best_model_at_end to false."
            )

    def check_config(self, setup: Setup) -> list[str]:
        """Return the changes of numeric choices, libraries and devices since the run began or was saved.

        Raises:
            ConfigError: there are some that the user has not accepted, or another optimizer.
        """
        if self.state is None:
            return check_numbers(self.directory / NUMBERS_FILE, setup.config, accepts_changes=self.accepts_changes)

        # The comparison is with the last save and not with the beginning, since changes before it were accepted.
        changes = self.state.changes(setup.config, setup.machine.device)
        if changes:
            self.state.check(changes, changes if self.accepts_changes else self._accepted_before)
        return changes

    def check_origin(self, now: Origin, config: RunConfig, console: Console) -> list[str]:
        """Return the changes of the model's and the tokenizer's files since the run began or was saved.

        Raises:
            ConfigError: there are some that the user has not accepted.
        """
        if self.state is None:
            # The run was killed before its first save, so all that is known is what it noted when it began.
            before = read_noted_origin(self.directory / NUMBERS_FILE)
            source = str(self.directory)
        else:
            before = self.state.origin
            source = f"step {self.step} of {self.directory}"
        if not before:
            say(console, UNKNOWN_ORIGIN.format(source))

        changes = find_changes(before, now)
        accepted = set(changes) if self.accepts_changes else self._accepted_before
        check_origin(changes, config, accepted, ", or add --accept-changes to go on with these")
        return changes

    @property
    def _accepted_before(self) -> set[str]:
        """Changes that the user has accepted earlier for a resume from the same step.

        That process may have been killed before its first checkpoint. The user need not accept them again.
        """
        accepted: set[str] = set()
        for opening in read_what_there_is(self.directory / METRICS_FILE).openings:
            if opening.step == self.step:
                accepted.update(opening.changes)
        return accepted

    def fill(self, session: Session, reader: WeightReader, console: Console) -> None:
        """Fill the whole state of a session, and say where it came from and how long it took.

        Args:
            session: with its memory allocated.
            reader: reads the first weights of a run that begins.
            console: what a person sees.

        Raises:
            CheckpointError, SavepointError, TransferError: the saved state is damaged, or a drive failed.
        """
        began = time.perf_counter()
        source = "weights"
        if self.savepoint is not None:
            source = f"savepoint {self.savepoint.path.name}: weights and moments"
        elif self.checkpoint is not None:
            if not is_bound(self.checkpoint):
                say(console, UNBOUND.format(self.checkpoint.name))
            source = f"{self.checkpoint.name}: weights and moments"

        # A checkpoint leaves out the frozen base of adapters, so the first weights are loaded below it.
        has_base = any(unit.layout.has_base for unit in session.own_units)
        loads = self.savepoint is None and (self.checkpoint is None or has_base)
        num_elements = sum(unit.layout.num_elements for unit in session.own_units)

        # The bar counts elements, and each of them is filled twice in that case.
        rounds = 2 if loads and self.checkpoint is not None else 1
        with WorkBar(console, f"{source} of parameters", rounds * num_elements, format_count) as work:

            def advance(unit: Unit) -> None:
                work.advance(unit.layout.num_elements)

            if loads:
                session.load(reader, advance)
            if self.savepoint is not None:
                self.savepoint.restore(session)
            elif self.checkpoint is not None:
                restore(session, self.checkpoint, advance)

        # The choice of modules that run in tiles was made with other weights, and has to stay.
        if self.state is not None:
            session.engine.model.take_tiles(self.state.tiles)
        seconds = time.perf_counter() - began
        say(console, f"{source} in place ({format_seconds(seconds)})")


def _check_never_saved(directory: Path) -> None:
    """Refuse to begin a run anew if its folder of checkpoints is empty, since their drive may not be mounted.

    Raises:
        CheckpointError: the records of the run say that there was a checkpoint.
    """
    # A user who removes the folder itself wants the run to begin anew. A link may lead to the drive.
    folder = directory / CHECKPOINT_FOLDER
    if not (folder.is_symlink() or folder.is_dir()):
        return
    saved = read_what_there_is(directory / METRICS_FILE).checkpoints
    if saved:
        raise CheckpointError(
            f"{folder} holds no checkpoint, but {METRICS_FILE} says that one was written after step {saved[-1].step}. "
            "Mount its drive, or bring it back. To begin the run again, remove that folder."
        )
