"""The run directory holds one run: its resolved config, and everything that the run writes. A lock protects it.

A new run that is refused before its first step leaves nothing, so the same command works once the cause is gone. A run
that is resumed finds every file whole, or marked as unfinished.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from megatier.config.file import to_dict
from megatier.config.lora import ADAPTER_FILE
from megatier.config.schema import RunConfig
from megatier.config.text import dump
from megatier.drives.leftovers import is_abandoned
from megatier.errors import CheckpointError, ConfigError
from megatier.files import read_regular, replace_file
from megatier.private import LOCK_FILE, lock_directory

# The names in a run directory. A new run refuses a directory that has one of them (`_begin`).
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace.json"
STALL_FILE = "stall.txt"
MODEL_FOLDER = "model"
DATA_FOLDER = "data"
CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
"""Name of a whole checkpoint. Eight digits or more sort like numbers up to a hundred million steps."""
SAVEPOINT_FOLDER = "savepoints"
TENSORBOARD_FOLDER = "tensorboard"
NUMBERS_FILE = "numbers.json"
RUN_ID_FILE = "run-id"
"""File with twelve random hexadecimal digits and the directory's inode, which tells the directory from a copy."""


class RunDirectory:
    """A directory that holds one run. Use it as a context, which releases the lock at its end; the files stay.

    Attributes:
        path: the directory.
    """

    def __init__(self, config: RunConfig, *, resumes: bool = False) -> None:
        """Create and lock the directory, and write the resolved config; or lock that of a run that is resumed.

        Args:
            config: the run, with its directory.
            resumes: whether the run is resumed.

        Raises:
            ConfigError: the directory cannot be written; or a new run finds a run in it; or a resume finds none.
            RunLockedError: a run is under way in it.
        """
        self.path = Path(config.output.directory)
        self._resumes = resumes

        # The lock creates the directory, so this comes first. Only a directory that this run has made is removed again.
        self._is_new = not self.path.exists()
        if resumes:
            check_is_run(self.path)

        _refuse_files(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.directory: cannot create {self.path.parent}: {error.strerror}. Name another directory."
            ) from error

        self._lock = lock_directory(self.path)
        try:
            if resumes:
                self._remove_partial_exports()
            else:
                self._begin(config)
        except BaseException:
            self._unlock()
            raise

    def _begin(self, config: RunConfig) -> None:
        """Write the config of a new run.

        Raises:
            ConfigError: a run is there already, or the config cannot be written.
        """
        # Otherwise records and weights of another run would be mixed with those of this one.
        _refuse_run(self.path)
        self.write_config(config)

    @property
    def run_id(self) -> str:
        """The name of the run's block files, which stays when the run is resumed.

        So a run that is resumed reuses block files that a kill has left. The name is random, so that nobody can create
        this directory on a mount before the run does.

        Raises:
            ConfigError: the name cannot be read or written.
        """
        if (noted := read_run_id(self.path)) is not None:
            return noted
        run_id = secrets.token_hex(6)
        self._write(RUN_ID_FILE, f"{run_id} {self.path.stat().st_ino}\n")
        return run_id

    def write_config(self, config: RunConfig) -> None:
        """Write the resolved config, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        self._write(CONFIG_FILE, dump(to_dict(config)))

    def _write(self, name: str, text: str) -> None:
        """Replace a file, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise ConfigError(
                f"output.directory: cannot write to {self.path}: {error.strerror}. Check the drive and your rights "
                "there."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On a drive that is gone or read-only these files stay. The error that ended the run says so.
        with contextlib.suppress(OSError):
            has_begun = self._resumes or (self.path / METRICS_FILE).exists()
            if error is not None and not has_begun:
                self._remove_traces()
        self._unlock()

    def _remove_partial_exports(self) -> None:
        """Remove the leftovers of killed exports. This process holds the lock, so nobody is writing them."""
        # Folders that cannot be removed do no harm, since their names are hidden.
        for path in self.path.glob(f".{MODEL_FOLDER}.*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_traces(self) -> None:
        """Remove the files of this run. None was there before, since a run refuses such a directory."""
        files = [self.path / name for name in (CONFIG_FILE, NUMBERS_FILE, RUN_ID_FILE)]
        data = self.path / DATA_FOLDER
        for path in (*files, *data.glob("*tokens*")):
            path.unlink(missing_ok=True)

        # The folder may be missing, or hold a file of the user.
        with contextlib.suppress(OSError):
            data.rmdir()

    def _unlock(self) -> None:
        """Remove the lock file, release the lock, and remove the directory if it is new and empty."""
        with contextlib.suppress(OSError):
            # The file is removed while the lock is held. Later it might be that of the next run.
            (self.path / LOCK_FILE).unlink(missing_ok=True)
            if self._is_new:
                self.path.rmdir()  # refused if it holds anything
        os.close(self._lock)


def read_run_id(path: Path) -> str | None:
    """Return the name of a run's block files (`RunDirectory.run_id`); None: this directory has none.

    Raises:
        ConfigError: the name cannot be read.
    """
    file = path / RUN_ID_FILE
    try:
        text = read_regular(file, 64)
        inode = path.stat().st_ino
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}.") from error

    # A copy of the directory has another inode. It may not reuse the block files of the original.
    noted = re.fullmatch(rb"([0-9a-f]{12}) (\d{1,20})\n", text)
    return noted[1].decode() if noted is not None and int(noted[2]) == inode else None


def check_is_free(path: Path) -> None:
    """Refuse a directory in which a new run cannot begin. This writes nothing.

    Raises:
        ConfigError: the directory or one above it is a file, or it holds a run already.
    """
    _refuse_files(path)

    # If a run is under way there, the lock refuses a new one, with a better message.
    if not (path / LOCK_FILE).exists() or is_abandoned(path):
        _refuse_run(path)


def check_is_run(path: Path) -> None:
    """Refuse a directory that holds no run.

    Raises:
        ConfigError: there is no run, or no directory.
    """
    if not path.exists():
        raise ConfigError(f"there is no directory {path}. Give the output.directory of a run.")
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{path} holds no run to go on with: {CONFIG_FILE} is missing. Give the output.directory of a run."
        )


def check_can_resume(path: Path, config: RunConfig) -> None:
    """Refuse to resume a run that is over.

    Args:
        path: the run directory.
        config: the run as it is to be resumed.

    Raises:
        ConfigError: the trained model is there already, no step is left, or epochs would be counted again.
    """
    # Savepoints have the names of checkpoints, and a run is resumed from whichever is newer.
    saved = [last_checkpoint(path / folder) for folder in (CHECKPOINT_FOLDER, SAVEPOINT_FOLDER)]
    step = max((parse_step(each) for each in saved if each is not None), default=None)

    if config.output.export and (path / MODEL_FOLDER).exists():
        remedy = (
            "To train on, move that folder away, raise train.steps, and add --accept-changes, since the learning rate "
            "depends on it. If evaluations ended it early, raise train.early_stopping_patience instead."
        )
        if step is None:
            remedy = "It has no checkpoint to go on from: train its model in another run, with model.path."
        raise ConfigError(f"{path} holds a finished run: {MODEL_FOLDER} is there. {remedy}")
    if step is None:
        return

    if config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs is {config.train.epochs:g}, but the steps of {path} were counted when it began. Leave it "
            "out, or set train.steps instead."
        )

    # If all steps are done, the export may still be missing.
    steps = config.train.steps
    if step > steps or (step == steps and not config.output.export):
        raise ConfigError(
            f"{path} goes on from step {step}, and train.steps is {steps}: nothing is left to do. Raise train.steps to "
            "train on, with --accept-changes, since the learning rate depends on it."
        )


def _refuse_files(path: Path) -> None:
    """Refuse a directory if it or one above it is a file.

    Raises:
        ConfigError: it is. The message names the file.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):  # what may not be looked at is refused when it is opened
            if place.exists():
                if not place.is_dir():
                    raise ConfigError(
                        f"output.directory is {path}, but {place} is a file. Name another directory, or move it away."
                    )
                return


def _refuse_run(path: Path) -> None:
    """Refuse a directory that holds a run.

    Raises:
        ConfigError: it does. The message names what is there.
    """
    folders = (MODEL_FOLDER, DATA_FOLDER, CHECKPOINT_FOLDER, SAVEPOINT_FOLDER, TENSORBOARD_FOLDER)
    names = (CONFIG_FILE, METRICS_FILE, *folders)
    taken = [name for name in names if (path / name).exists()]

    # Only its owner knows what an empty folder is for, so it is not removed.
    if taken and all(_is_empty_folder(path / name) for name in taken):
        raise ConfigError(
            f"{path} holds a folder that a run would write to ({', '.join(taken)}). It is empty: remove it (rmdir), or "
            "name another --output.directory."
        )
    if taken:
        goes_on = (path / CONFIG_FILE).is_file() and not (path / MODEL_FOLDER).exists()
        remedy = f"go on with it (`megatier resume {path}`), " if goes_on else ""
        raise ConfigError(
            f"{path} holds a run already ({taken[0]}). Nothing was changed; {remedy}name another --output.directory or "
            "move the old run away."
        )


def _is_empty_folder(path: Path) -> bool:
    """Return whether this is a folder with nothing in it."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, oldest first.

    Raises:
        CheckpointError: a file or a broken link is in its place, so that a run would silently begin anew.
    """
    if not folder.is_dir():
        if folder.is_symlink() or folder.exists():
            state = f"a link to {folder.readlink()}, which is not there" if folder.is_symlink() else "no folder"
            raise CheckpointError(f"{folder} is {state}. Bring back what was there, or move it away.")
        return []

    # Anything else in the folder belongs to somebody else. Long names do not sort like numbers, so steps are compared.
    whole = [path for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(whole, key=parse_step)


def step_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies in a folder of checkpoints."""
    return folder / f"step-{step:08d}"


def parse_step(path: Path) -> int:
    """Return the last step of the state that a checkpoint holds."""
    return int(path.name.removeprefix("step-"))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder; None if there is none."""
    whole = checkpoints(folder)
    return whole[-1] if whole else None


def find_adapter(path: Path) -> Path | None:
    """Return the folder of adapters at a path, or that of a run there without a checkpoint; None: there is none."""
    folders = [path]
    if last_checkpoint(path / CHECKPOINT_FOLDER) is None:
        folders.append(path / MODEL_FOLDER)

    for folder in folders:
        if (folder / ADAPTER_FILE).is_file():
            return folder
    return None


def check_no_saved_run(folder: Path) -> None:
    """Refuse to write a model where it would count as a run's last checkpoint or savepoint.

    Raises:
        ConfigError: the folder lies among these, and has a name like theirs.
    """
    target = Path(os.path.realpath(folder))
    if CHECKPOINT_NAME.fullmatch(target.name) and target.parent.name in (CHECKPOINT_FOLDER, SAVEPOINT_FOLDER):
        raise ConfigError(
            f"{folder} would count as one of the {target.parent.name} of a run, which could not go on from a model. "
            "Choose another folder."
        )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, or the last whole one of the run directory there.

    Raises:
        CheckpointError: there is none.
    """
    # Resolved, because the path may be `.` or end in `..`.
    if CHECKPOINT_NAME.fullmatch(Path(os.path.realpath(path)).name) and path.is_dir():
        return path
    checkpoint = last_checkpoint(path / CHECKPOINT_FOLDER)
    if checkpoint is None and (path / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{path} is a folder of adapters, which PEFT loads as it is. `megatier export {path} FOLDER --merge` "
            "merges them into their base."
        )
    if checkpoint is None and (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a model already, which from_pretrained loads as it is. Name a run directory, one of its "
            "checkpoints, or with --merge a folder of adapters."
        )
    if checkpoint is None and (path / MODEL_FOLDER).is_dir():
        raise CheckpointError(
            f"{path} holds no checkpoint, but its model is in {path / MODEL_FOLDER} already, as the run exported it."
        )
    if checkpoint is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none. Name a run directory or one of its {CHECKPOINT_FOLDER}/step-... "
            "folders; a run writes them with output.checkpoint_every."
        )

    return checkpoint


def find_killed_runs(directory: Path) -> Iterator[Path]:
    """Yield run directories of processes that were killed: this directory, or those in it.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in (directory, *sorted(directory.iterdir())):
        if _was_killed(path):
            yield path


def _was_killed(path: Path) -> bool:
    """Return whether a directory holds a run whose process was killed."""
    with contextlib.suppress(PermissionError):  # another user's
        return (path / CONFIG_FILE).is_file() and is_abandoned(path)
    return False
