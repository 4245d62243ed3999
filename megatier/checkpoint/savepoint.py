"""Savepoints: state on NVMe is kept where it lies, and state in RAM or on the GPU is written to a folder.

    step-00000100/
        manifest.json            the state that is no array, and for each rank: the kept generation of each unit, a
                                 digest of where blocks lie, and the checksums of the files in its folder; with a digest
        rank-0/state/<block>/    raw blocks that are at home in RAM or on the GPU
        rank-0/checksums/        checksums of every granule that is kept on NVMe, block after block
        rank-1/...

A savepoint belongs to one run with its tiers, drives and number of ranks. A checkpoint is the portable copy. Spilled
state is not written again, because updates after a savepoint write another generation (`Generations.advance`), and the
block files outlive the process.

Files are chunk files (`checkpoint.chunkfile`): raw words, each file with its CRC32C. They lie in the run directory and
not on the mounts, so that one rename completes a savepoint: the first rank renames the folder when all files, and the
block files of all ranks, are on the drives. Only then is the savepoint before dropped, and its generation overwritten.

Nothing is unpickled, and no path is read from the manifest. The places of blocks are compared with the run's placement.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatier.checkpoint.checkpoint import WRITING, prune, remove, remove_leftovers
from megatier.checkpoint.manifest import Manifest, digest_of, read_json
from megatier.checkpoint.run_directory import (
    CHECKPOINT_FOLDER,
    SAVEPOINT_FOLDER,
    checkpoints,
    last_checkpoint,
    parse_step,
    step_path,
)
from megatier.checkpoint.run_state import RunState
from megatier.checkpoint.savepoint_blocks import fingerprint, read_blocks, resident_bytes, verify_spilled, write_blocks
from megatier.config.schema import RunConfig
from megatier.durable import committing, free_bytes, sync_tree
from megatier.errors import (
    BaseChangedError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    IntegrityError,
    PeerError,
    SavepointError,
    TransferError,
)
from megatier.play.generations import Generation
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.session.session import Session

SAVEPOINT_FORMAT = 3
"""The format that is written."""
UNBOUND_SAVEPOINT = 1
"""The format of older versions, without checksums of files."""
MANIFEST_FILE = "manifest.json"
UNBOUND_PART = {"placement": str, "generations": dict}
PART_FIELDS = {**UNBOUND_PART, "manifest": dict}
"""The fields of a rank's part, with their types."""
SAVEPOINT_FIELDS: dict[int, dict[str, type]] = {
    SAVEPOINT_FORMAT: {"state": dict, "hosts": int, "parts": list},
    2: {"state": dict, **PART_FIELDS},
    UNBOUND_SAVEPOINT: {"state": dict, **UNBOUND_PART},
}
"""The fields of a manifest by format, without those that all formats share. Older formats have the fields of the only
process beside the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """The part of a savepoint that belongs to one rank."""

    folder: str
    """Its folder inside the savepoint; empty if an older version wrote it."""
    placement: str
    """A digest of where its blocks lie (`savepoint_blocks.fingerprint`)."""
    generations: dict[str, int]
    """The kept place on NVMe of each spilled unit."""
    manifest: Manifest | None
    """Checksums of the folder's files; None if an older version wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Savepoint:
    """A savepoint as its manifest describes it."""

    path: Path
    """The folder of the savepoint."""
    before: str
    """What the run would be resumed from without this savepoint; for messages."""
    state: RunState
    """The state of the run without its arrays."""
    hosts: int
    """The number of hosts whose ranks made it."""
    parts: tuple[RankPart, ...]
    """The parts, in the order of the ranks."""

    @classmethod
    def last(cls, run: Path) -> Self | None:
        """Return the savepoint of a run; None if there is none that is newer than the last checkpoint.

        Args:
            run: the run directory.

        Raises:
            SavepointError: it is damaged.
        """
        # Savepoints have the names of checkpoints.
        path = last_checkpoint(run / SAVEPOINT_FOLDER)
        checkpoint = last_checkpoint(run / CHECKPOINT_FOLDER)
        if path is None:
            return None
        if checkpoint is not None and parse_step(checkpoint) >= parse_step(path):
            return None

        before = "its start" if checkpoint is None else str(checkpoint)
        with _refusing(path, before):
            state, hosts, parts = _read_manifest(path / MANIFEST_FILE)
        return cls(path=path, before=before, state=state, hosts=hosts, parts=tuple(parts))

    def check_ranks(self, ranks: Ranks | None) -> None:
        """Refuse a number of ranks or hosts that differs from the savepoint's.

        Raises:
            SavepointError: it differs. The message names both.
        """
        # A part has the raw blocks of one shard, which other numbers of ranks cannot use. On another host a rank may
        # not see the drives of its block files.
        all_ranks = ranks or SingleRank()
        noted = f"ranks: {len(self.parts)}, hosts: {self.hosts}"
        now = f"ranks: {all_ranks.size}, hosts: {_num_hosts(all_ranks)}"
        if noted != now:
            reason = f"it is of other processes ({noted}; now {now}). Start as many as there were."
            raise SavepointError(str(self.path), reason, self.before)

    def check(self, session: Session, config: RunConfig) -> None:
        """Allocate the memory of a session, and reuse the kept block files. All ranks have to call it.

        Args:
            session: opened, and not sealed yet.
            config: the run, for the message.

        Raises:
            SavepointError: the placement of blocks has changed, or a file is missing.
        """
        all_ranks = session.all_ranks
        part = self.parts[all_ranks.rank]

        # The manifest is only compared. Bytes are read and written where this run has placed them.
        with all_ranks.failing_together():
            if not _fits(part, session):
                changes = "; ".join(self.state.changes_of_blocks(config)) or "by other settings, or rates of the drives"
                reason = f"its blocks lay elsewhere ({changes}). Give it what it had."
                raise SavepointError(str(self.path), reason, self.before)

            with _refusing(self.path, self.before):
                session.seal()

    def restore(self, session: Session) -> None:
        """Fill the whole state of a run, and verify every kept byte. All ranks have to call it.

        Raises:
            SavepointError: the savepoint is damaged, or a drive failed.
        """
        all_ranks = session.all_ranks
        part = self.parts[all_ranks.rank]
        blocks = session.blocks

        # This comes before any read, because the keys of blocks depend on it. `keep` protects it from updates.
        for unit, place in part.generations.items():
            blocks.generations.valid[unit] = Generation(nvme=place)
        blocks.generations.keep()

        with session.player.loading(), all_ranks.failing_together(), _refusing(self.path, self.before):
            read_blocks(session, self.path.resolve() / part.folder, part.manifest)
            verify_spilled(session)

            # Only the kept generation has checksums. Updates do not write frozen weights, so these are copied to the
            # other generations.
            for unit in session.placement.spilled:
                blocks.share_frozen(unit)

        all_ranks.broadcast(lambda: prune(self.path.parent, 1))


def _fits(part: RankPart, session: Session) -> bool:
    """Return whether a session places its blocks where those of a part lie."""
    placement = session.placement
    for place in part.generations.values():
        # The type is compared, because True is an int in Python.
        if type(place) is not int or not 0 <= place < placement.generations:
            return False
    has_same_units = part.generations.keys() == set(placement.spilled)
    return has_same_units and part.placement == fingerprint(session)


def save_savepoint(session: Session, folder: Path, step: int, state: Mapping[str, Any]) -> int:
    """Make a savepoint after all updates of a step, and drop the one before. All ranks have to call it.

    Args:
        session: the run, after `player.drain`.
        folder: the folder of the run's savepoints.
        step: the last step.
        state: everything besides the arrays, as plain JSON.

    Returns:
        The bytes that all ranks wrote: the state that is not on NVMe, and the checksums of the rest.

    Raises:
        TransferError: a rank could not write. The unfinished savepoint is removed, and the one before stays whole.
    """
    # After an interrupt too, block files that are marked as kept would stay on the drives with no use.
    try:
        num_bytes = _write(session, step_path(folder, step), step, state)
    except BaseException as error:
        _free_files(session, folder, error)
        raise

    # Until the new savepoint is whole, the run may need the generation that the one before keeps.
    session.blocks.generations.keep()
    session.all_ranks.broadcast(lambda: prune(folder, 1))
    return num_bytes


def _write(session: Session, target: Path, step: int, state: Mapping[str, Any]) -> int:
    """Write a savepoint, or remove it after an error. The first rank renames it when all ranks have written."""
    all_ranks = session.all_ranks
    partial = target.with_name(f".{target.name}{WRITING}")
    # The regions are nested as in `CheckpointWriter._finish`, for the same reasons.
    named = committing(partial, target, "a savepoint") if all_ranks.rank == 0 else contextlib.nullcontext()
    with all_ranks.failing_together(), named:
        all_ranks.broadcast(lambda: _make_folder(partial))
        with all_ranks.failing_together():
            num_bytes, part = _write_part(session, partial, step)

        written = all_ranks.all_gather_object((num_bytes, part))
        with all_ranks.failing_together():
            if all_ranks.rank == 0:
                parts = [part for _, part in written]
                _write_manifest(partial / MANIFEST_FILE, state, _num_hosts(all_ranks), parts)

            # This comes before the rename, since a savepoint is lost if its block files are removed with the process.
            _keep_files(session, True)
    return sum(num_bytes for num_bytes, _ in written)


def _make_folder(partial: Path) -> None:
    # A kill may have left a folder with the same hidden name.
    partial.parent.mkdir(mode=0o700, exist_ok=True)
    remove_leftovers(partial.parent)
    partial.mkdir(mode=0o700)


def _write_part(session: Session, partial: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Write the part of this rank, and return its bytes and its entry in the manifest."""
    all_ranks = session.all_ranks
    folder = partial / _folder_of(all_ranks.rank)
    folder.mkdir(mode=0o700)
    num_bytes, checksums = write_blocks(session, folder)

    # The first rank synchronises the files of its host at the rename.
    if all_ranks.rank != 0:
        sync_tree(folder)
    valid = session.blocks.generations.valid
    generations = {unit: valid[unit].nvme for unit in session.placement.spilled}
    manifest = Manifest(step, checksums).to_dict()
    return num_bytes, {"placement": fingerprint(session), "generations": generations, "manifest": manifest}


def _free_files(session: Session, folder: Path, error: BaseException) -> None:
    """Unmark the block files after a savepoint could not be made, unless an older savepoint needs them.

    If the ranks cannot agree on that, the files stay marked. A rank that is gone may have been the first one, after the
    rename, and a rank that an interrupt ends leaves the others inside the savepoint.
    """
    all_ranks = session.all_ranks
    if all_ranks.size > 1 and not isinstance(error, Exception):
        return
    with contextlib.suppress(OSError, PeerError):
        if not all_ranks.broadcast(lambda: bool(checkpoints(folder))):
            _keep_files(session, False)


def drop_savepoint(session: Session, folder: Path) -> None:
    """Remove a run's savepoint, if it has one. From now on the block files are removed with the run.

    Raises:
        TransferError: it cannot be removed.
    """
    # The order matters: a savepoint without its block files would be useless.
    session.all_ranks.broadcast(lambda: remove_savepoints(folder))
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

    # This fails if a user has put something there.
    with contextlib.suppress(OSError):
        folder.rmdir()


def check_savepoint_room(session: Session, folder: Path) -> None:
    """Refuse a run whose drive has no room for its savepoints: another one, or two if it has none yet.

    Raises:
        CapacityError: there is less room.
    """
    # A savepoint is removed only when the next one is whole, so a run without any needs room for two.
    all_ranks = session.all_ranks
    num_savepoints = 1 if checkpoints(folder) else 2
    needed = num_savepoints * all_ranks.size * resident_bytes(session)
    free = free_bytes(folder.parent)
    if needed > free:
        remedy = "Free space there, set output.savepoint_every to 0, or name another output.directory."
        wanted = "another savepoint" if num_savepoints == 1 else "2 savepoints"
        raise CapacityError(f"{wanted} in {folder}", needed, free, remedy)


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
    except (BaseChangedError, CheckpointError, ConfigError, IntegrityError, TransferError) as error:
        raise SavepointError(str(path), str(error), before) from error


def _num_hosts(all_ranks: Ranks | SingleRank) -> int:
    return all_ranks.size // all_ranks.local_size


def _folder_of(rank: int) -> str:
    return f"rank-{rank}"


def _write_manifest(path: Path, state: Mapping[str, Any], hosts: int, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write the manifest of a savepoint."""
    content = {"state": state, "hosts": hosts, "parts": parts}
    head = {"format": SAVEPOINT_FORMAT, "digest": digest_of(content)}
    text = json.dumps(head | content)

    # For this user alone from the first moment on, and never through a link that somebody put in its place.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _read_manifest(path: Path) -> tuple[RunState, int, list[RankPart]]:
    """Read the manifest of a savepoint: the state, the number of hosts, and the part of each rank.

    Raises:
        CheckpointError: it is no manifest of ours, or damaged.
    """
    stored = read_json(path)
    number = stored.get("format")
    if number not in tuple(SAVEPOINT_FIELDS):
        reason = f"{path} is no savepoint that this version of megatier reads (format {SAVEPOINT_FORMAT})"
        raise CheckpointError(f"{reason}. Use the version that wrote it.")

    # The digest covers what the format has, so an older one is read with its own fields.
    content = _fields(path, stored, SAVEPOINT_FIELDS[number])
    if stored.get("digest") != digest_of(content):
        raise DamagedCheckpointError(str(path), "is damaged: its digest is not that of its content")

    state = RunState.read(content["state"])
    if number != SAVEPOINT_FORMAT:
        fields = UNBOUND_PART if number == UNBOUND_SAVEPOINT else PART_FIELDS
        return state, 1, [_read_part(path, content, "", fields)]

    parts = []
    for rank, part in enumerate(content["parts"]):
        parts.append(_read_part(path, part, _folder_of(rank), PART_FIELDS))
    return state, content["hosts"], parts


def _read_part(path: Path, stored: Any, folder: str, fields: Mapping[str, type]) -> RankPart:  # noqa: ANN401
    """Return the part that lies in a folder, as the manifest at a path has it.

    Raises:
        DamagedCheckpointError: it is none.
    """
    values = _fields(path, stored, fields)
    manifest = None
    if "manifest" in values:
        manifest = Manifest.read(path, values.pop("manifest"))
        if manifest.step != parse_step(path.parent):
            raise DamagedCheckpointError(str(path), f"is of another savepoint: that of step {manifest.step}")
    return RankPart(folder=folder, manifest=manifest, **values)


def _fields(path: Path, stored: Any, fields: Mapping[str, type]) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields of an object of JSON.

    Raises:
        DamagedCheckpointError: one is missing or of another type.
    """
    if not isinstance(stored, dict):
        raise DamagedCheckpointError(str(path), "is damaged: a part of it is no JSON object")
    for name, kind in fields.items():
        # By type and not by isinstance, because True is no number of hosts.
        if type(stored.get(name)) is not kind:
            raise DamagedCheckpointError(str(path), f"is damaged: its field {name} is missing or of another type")
    return {name: stored[name] for name in fields}
