"""Savepoints: a run's state kept where it lies on NVMe, with a folder for what lies in RAM or on the GPU.

    step-00000100/
        manifest.json        which generation of each unit is kept, where blocks lie, what is no array, and the checksum
                             of each other file by its place; with a digest
        state/<block>/       blocks at home in RAM or on the GPU, as they are
        checksums/           of every granule that is kept on NVMe, block after block

A savepoint belongs to one run on its tiers and drives; the portable copy is a checkpoint. State that spills is not
written again, because the updates after a savepoint write another generation (`Generations.advance`). Block files then
outlive the process.

Files are chunk files (`checkpoint.chunkfile`): raw words, each file with its CRC32C. They lie in the run directory, not
on the mounts, so that one rename decides: the folder gets its name when all of it, and the block files, are on the
drives. The savepoint before is dropped after that, and only updates after that overwrite its generation.

Nothing is unpickled, and the manifest leads nowhere: where blocks lie is compared with what the run has placed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatier.checkpoint.checkpoint import (
    WRITING,
    checkpoints,
    last_checkpoint,
    prune,
    remove,
    remove_leftovers,
    step_of,
)
from megatier.checkpoint.manifest import Manifest, digest_of, read_json
from megatier.checkpoint.run_directory import CHECKPOINT_FOLDER, SAVEPOINT_FOLDER
from megatier.checkpoint.run_state import RunState
from megatier.checkpoint.savepoint_blocks import fingerprint, read_blocks, resident_bytes, verify_spilled, write_blocks
from megatier.config.schema import RunConfig
from megatier.durable import becoming
from megatier.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    IntegrityError,
    SavepointError,
    TransferError,
)
from megatier.play.generations import Generation
from megatier.ranks import Alone
from megatier.session.session import Session

FORMAT = 2
"""The format that is written."""
MANIFEST_FILE = "manifest.json"
FIELDS = {"state": dict, "placement": str, "generations": dict}
"""The fields of a manifest without those that all formats have, with their types."""
UNBOUND_FORMAT = 1
"""The format of versions that wrote no checksums of files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Savepoint:
    """A savepoint as its manifest describes it."""

    path: Path
    before: str
    """Where the run goes on from without it, for messages."""
    state: RunState
    placement: str
    """Digest of where blocks lie."""
    generations: dict[str, int]
    """The place on NVMe that is kept, of each unit that spills."""
    manifest: Manifest | None
    """Checksums of the files; None if an older version wrote it."""

    @classmethod
    def last(cls, run: Path) -> Self | None:
        """Return the savepoint of a run; None if there is none, or a checkpoint is as new.

        Args:
            run: the run directory.

        Raises:
            SavepointError: it is damaged.
        """
        # Savepoints are named as checkpoints are. One that is not newer than the last checkpoint has nothing to add.
        path = last_checkpoint(run / SAVEPOINT_FOLDER)
        checkpoint = last_checkpoint(run / CHECKPOINT_FOLDER)
        if path is None or (checkpoint is not None and step_of(checkpoint) >= step_of(path)):
            return None
        before = "its start" if checkpoint is None else str(checkpoint)
        with _refusing(path, before):
            state, placement, generations, manifest = _read_manifest(path / MANIFEST_FILE)
        return cls(
            path=path,
            before=before,
            state=state,
            placement=placement,
            generations=generations,
            manifest=manifest,
        )

    def check(self, session: Session, config: RunConfig) -> None:
        """Allocate what the session planned, with the block files that were kept.

        Args:
            session: planned, and not sealed yet.
            config: the run, for the message.

        Raises:
            SavepointError: blocks would lie elsewhere than they lay, or a file is missing.
        """
        if session.ranks is not None:
            reason = "one process made it, and several ranks cannot read it. Resume without torchrun."
            raise SavepointError(str(self.path), reason, self.before)

        # The manifest says only what to compare with. Where bytes are read and written follows from this run's
        # placement.
        last = session.placement.generations
        fits = all(type(place) is int and 0 <= place < last for place in self.generations.values())
        lies = set(self.generations) == set(session.placement.spilled) and self.placement == fingerprint(session)
        if not (fits and lies):
            changes = "; ".join(self.state.changes_of_tiers(config)) or "by other settings, or rates of the drives"
            reason = f"its blocks lay elsewhere ({changes}). Give it what it had."
            raise SavepointError(str(self.path), reason, self.before)

        with _refusing(self.path, self.before):
            session.store.seal()

    def restore(self, session: Session) -> None:
        """Fill the whole state of a run, and compare every byte that was kept with its checksum.

        Raises:
            SavepointError: something is damaged, or a drive failed.
        """
        blocks = session.blocks
        blocks.generations.valid.update({unit: Generation(nvme=place) for unit, place in self.generations.items()})
        blocks.generations.keep()

        with _refusing(self.path, self.before):
            read_blocks(session, self.path.resolve(), self.manifest)
            verify_spilled(session)

            # Checksums are known of the generation that was kept alone. No update writes frozen weights, so they are
            # copied to the other generations before these are read.
            for unit in session.placement.spilled:
                blocks.share_frozen(unit)
            session.player.drain()

        prune(self.path.parent, 1)


def save_savepoint(session: Session, folder: Path, step: int, state: Mapping[str, Any]) -> int:
    """Make a savepoint of a step whose updates are done, and drop the one before.

    Args:
        session: the run, after `player.drain`.
        folder: the folder of the run's savepoints.
        step: the last step.
        state: everything that is no array, as plain JSON.

    Returns:
        The bytes written: what does not lie on NVMe, and the checksums of what does.

    Raises:
        TransferError: writing failed. What was written is removed, and the savepoint before is whole.
    """
    target = folder / f"step-{step:08d}"
    partial = folder / f".{target.name}{WRITING}"
    try:
        with becoming(partial, target, "a savepoint"):
            folder.mkdir(mode=0o700, exist_ok=True)
            remove_leftovers(folder)
            partial.mkdir(mode=0o700)
            num_bytes, checksums = write_blocks(session, partial)
            _write_manifest(session, partial / MANIFEST_FILE, state, Manifest(step, checksums))

            # Before the folder gets its name: a savepoint whose block files go with the process would be lost.
            _keep_files(session, True)
    except BaseException:
        # The savepoint before, if there is one, still needs the block files.
        with contextlib.suppress(TransferError):
            _keep_files(session, bool(checkpoints(folder)))
        raise

    # Only now: until the new one is whole, the run may have to go on from the generation that the one before keeps.
    session.blocks.generations.keep()
    prune(folder, 1)
    return num_bytes


def drop_savepoint(session: Session, folder: Path) -> None:
    """Give up a run's savepoint, if it has one. The block files go with the run from now on.

    Raises:
        TransferError: it cannot be removed.
    """
    (session.ranks or Alone()).first(lambda: remove_savepoints(folder))
    session.blocks.generations.release()
    _keep_files(session, False)


def remove_savepoints(folder: Path) -> None:
    """Remove a run's savepoints, and their folder if nothing else is in it.

    Raises:
        TransferError: one cannot be removed.
    """
    remove_leftovers(folder)
    for path in checkpoints(folder):
        remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


def check_savepoint_room(session: Session, folder: Path) -> None:
    """Refuse a run whose drive has no room for a savepoint while the one before is still there.

    Raises:
        CapacityError: there is less room.
    """
    # The one before is removed only when the next one is whole, so a run without any needs room for two.
    needed = (1 + (not checkpoints(folder))) * resident_bytes(session)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        remedy = "Free space there, set output.savepoint_every to 0, or name another output.directory."
        raise CapacityError(f"2 savepoints in {folder}", needed, free, remedy)


def _keep_files(session: Session, keeps: bool) -> None:
    """Mark the block files as needed after the process has ended, or no longer."""
    if session.store.files is not None:
        session.store.files.keep(keeps)


@contextlib.contextmanager
def _refusing(path: Path, before: str) -> Iterator[None]:
    """Turn errors of reading into one that names the savepoint, and where the run goes on from without it."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise SavepointError(str(path), error.reason, before) from error
    except (CheckpointError, ConfigError, IntegrityError, TransferError) as error:
        raise SavepointError(str(path), str(error), before) from error


def _write_manifest(session: Session, path: Path, state: Mapping[str, Any], manifest: Manifest) -> None:
    """Write the manifest of a savepoint.

    Raises:
        OSError: the drive failed.
    """
    blocks = session.blocks
    generations = {unit: blocks.generations.valid[unit].nvme for unit in session.placement.spilled}
    lies = {"placement": fingerprint(session), "generations": generations}
    found = {"state": state, **lies, "manifest": manifest.to_dict()}
    text = json.dumps({"format": FORMAT, "digest": digest_of(found), **found})
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)


def _read_manifest(path: Path) -> tuple[RunState, str, dict[str, int], Manifest | None]:
    """Return a manifest's state, placement, generations, and the checksums of the savepoint's files.

    Raises:
        CheckpointError: it is no manifest of ours, or damaged.
    """
    stored = read_json(path)
    if stored.get("format") not in (FORMAT, UNBOUND_FORMAT):
        raise CheckpointError(
            f"{path} is no savepoint that this version of megatier reads (format {FORMAT}). Use the version that wrote "
            "it."
        )

    # The digest covers what the format has, so an older one is read with its own fields.
    fields = FIELDS if stored["format"] == UNBOUND_FORMAT else FIELDS | {"manifest": dict}
    found = {name: stored.get(name) for name in fields}
    if any(type(found[name]) is not kind for name, kind in fields.items()) or stored.get("digest") != digest_of(found):
        raise DamagedCheckpointError(str(path), "is damaged: its digest is not that of its content")

    manifest = Manifest.read(path, stored["manifest"]) if "manifest" in fields else None
    if manifest is not None and manifest.step != step_of(path.parent):
        raise DamagedCheckpointError(str(path), f"is of another savepoint: that of step {manifest.step}")
    return RunState.read(stored["state"]), stored["placement"], stored["generations"], manifest
