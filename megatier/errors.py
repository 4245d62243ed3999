"""The errors of megatier. They have typed fields, and every message has figures and a remedy.

Each class also derives from the builtin error that fits, if there is one. An error is raised where its cause is known.
Callers catch it only to undo their own work, to try something else, or to add what they know. All others reach `cli/`,
which prints the message and exits with code 2.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from megatier.byte_counts import format_bytes

LESS_ACTIVATIONS = (
    "Try in this order: raise train.slices; lower model.loss_chunk or model.saved_share; set train.activations to "
    "recompute, then to offload with train.kept_attention false; raise train.groups; lower tiers.gpu (without a GPU "
    "tiers.ram); set model.tile_tokens. docs/troubleshooting.md says what each costs."
)
"""What to do if memory for activations is short, the cheapest first."""


class MegatierError(Exception):
    """The base of every error that megatier raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Give message and fields to pickle, because other ranks raise the same error."""
        return _again, (type(self), self.args, vars(self))


def _again(kind: type[MegatierError], args: tuple[object, ...], fields: dict[str, object]) -> MegatierError:
    """Return an error as it was. The kind itself would be asked for fields, and make the message of them again."""
    error = kind.__new__(kind)
    super(MegatierError, error).__init__(*args)
    vars(error).update(fields)
    return error


class ConfigError(MegatierError, ValueError):
    """A setting is unknown, mistyped, out of range, or contradicts another."""


class ModelNotFoundError(ConfigError):
    """A model is neither in a local folder nor on the hub."""


class PlanError(MegatierError):
    """The run does not fit the budgets. Raised before any large allocation."""

    def __init__(self, what: str, needed_bytes: int, had_bytes: int, remedy: str, tier: str = "") -> None:
        """Keep the figures; the message states them. The tier is the one whose budget is too small, if any."""
        self.what = what
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.had_bytes = had_bytes
        self.remedy = remedy
        super().__init__(f"{what}: needs {format_bytes(needed_bytes)}, there is {format_bytes(had_bytes)}. {remedy}")


class CapacityError(MegatierError):
    """A tier has no room for the bytes that were asked for."""

    def __init__(self, tier: str, needed_bytes: int, free_bytes: int, remedy: str) -> None:
        """Keep the figures; the message states them."""
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.remedy = remedy
        full = f"tier {tier} is full" if tier in TIERS else f"there is no room for {tier}"
        super().__init__(f"{full}: needs {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} free. {remedy}")


class PageLockError(CapacityError):
    """The CUDA driver pins no more RAM."""


class GpuMemoryError(MegatierError, MemoryError):
    """A step took more GPU memory than there is, though the plan had let it through."""

    def __init__(self, step: int, said: str) -> None:
        """Keep the step and what CUDA said; the message names the settings to lower."""
        self.step = step
        self.said = said
        super().__init__(
            f"step {step} ran out of GPU memory ({said}). Resume the run with a lower tiers.gpu, which leaves more of "
            f"it to activations and changes no result; or begin anew with fewer activations. {LESS_ACTIVATIONS}"
        )


class BlockError(MegatierError, ValueError):
    """A block cannot be registered: its key or its size, or the time, is wrong."""


class SpanError(MegatierError, ValueError):
    """Bytes [start, stop) of a block cannot be moved by themselves."""

    def __init__(self, key: str, span: tuple[int, int], num_bytes: int, multiple: int) -> None:
        """Name block and span, the size of the block, and the number of which both ends have to be multiples."""
        self.key = key
        self.span = span
        self.num_bytes = num_bytes
        super().__init__(
            f"bytes {span[0]} to {span[1]} of block {key}: a span lies within the {num_bytes} bytes of its block, is "
            f"not empty, and begins and ends at a multiple of {multiple} or at the end of the block."
        )


class SharedMemoryError(MegatierError, RuntimeError):
    """Workers of a DataLoader found no room in shared memory for their batches."""

    def __init__(self, room: str) -> None:
        """Say how much there is."""
        super().__init__(
            f"workers of a DataLoader hand their batches over through /dev/shm, which is too small ({room}). Make it "
            "larger (docker run --shm-size 8g; mount -o remount,size=8g /dev/shm), or set dataloader_num_workers "
            "(num_workers of a DataLoader) to 0."
        )


class AddressError(MegatierError, ValueError):
    """A tensor is not what native code takes, which would read or overwrite other bytes than it holds."""

    def __init__(self, found: str, wanted: str) -> None:
        """Say what the tensor is, and what the code takes."""
        super().__init__(f"native code was to be given a tensor that {found}, and takes {wanted}.")


class ClosedError(MegatierError, RuntimeError):
    """A store was used after it was closed."""


class UnsealedError(ClosedError):
    """A store was used that could not take its memory or its files."""

    def __init__(self, cause: BaseException) -> None:
        """Tell why it could not."""
        super().__init__(
            f"this store could not take its memory or its files ({str(cause) or type(cause).__name__}). Close it, "
            "and open another one once the cause is gone."
        )


class BlockNotFoundError(MegatierError, KeyError):
    """No block was registered under this key."""

    def __str__(self) -> str:
        """Return the message as it was given, without the quotes of KeyError."""
        return str(self.args[0])


class LeaseHeldError(MegatierError):
    """The operation needs a copy that somebody still holds a lease on."""


class DirtyBlockError(MegatierError):
    """The operation would drop bytes that were not written home yet."""


class LastCopyError(MegatierError):
    """The operation would drop the only copy of a block."""


# As text: this module is below all others, so it does not know `tier.Tier`.
TIERS = ("gpu", "ram", "nvme")
"""Names that a message calls a tier. Whatever else has no room, or fails, is named as it is."""
_GONE = "The drive is gone; check that it is connected and mounted (dmesg, lsblk)."
REMEDIES = {
    errno.ENOSPC: "Free space on this drive, or name another one.",
    errno.EDQUOT: "Raise your quota on this drive, or name another one.",
    errno.EFBIG: "Raise the file size limit (ulimit -f).",
    errno.EIO: "Check the drive (dmesg, smartctl).",
    errno.EROFS: "A file system turns read-only when its drive fails (dmesg): repair it, or name another one.",
    errno.ENODEV: _GONE,
    errno.ENXIO: _GONE,
    errno.ESTALE: _GONE,
}


class TransferError(MegatierError, OSError):
    """A device failed to move bytes. The bytes at the source are whole. Those at the target may be anything."""

    def __init__(self, what: str, tier: str, path: str, offset: int, code: int) -> None:
        """Name tier, path, byte offset in the file, and errno (0 if the system gave none)."""
        self.tier = tier
        self.path = path
        self.offset = offset
        reason = os.strerror(code) if code else "the device ended early"
        remedy = REMEDIES.get(code, f"Check {path} and its drive.")
        place = f"on tier {tier}, {path}" if tier in TIERS else f"in {path}"

        # OSError has two arguments, and gives them as `errno` and `strerror`.
        super().__init__(code, f"{what} failed {place} at byte {offset}: {reason}. {remedy}")

    def __str__(self) -> str:
        """Return the sentence alone. The errno is a field."""
        return str(self.strerror)


class IntegrityError(MegatierError):
    """Bytes that were read from NVMe are not those that were written."""

    def __init__(self, key: str, path: str, offset: int, expected: int, found: int) -> None:
        """Name block, file, byte offset of the granule, and both checksums."""
        self.key = key
        self.path = path
        self.offset = offset
        self.expected = expected
        self.found = found
        super().__init__(
            f"block {key} is damaged in {path} at byte {offset}: checksum {found:#010x}, expected {expected:#010x}. "
            "The drive or the file was changed from outside; nothing was overwritten."
        )


class FileChangedError(MegatierError):
    """A file was replaced or written between two looks at it, of which both count."""

    def __init__(self, path: str) -> None:
        """Name the file."""
        self.path = path
        super().__init__(
            f"{path} was replaced or written while it was read, so what was read is of two files. Open it again when "
            "nobody writes there any more."
        )


class BaseChangedError(MegatierError):
    """A file of the base was written while a run reads its frozen weights from it."""

    def __init__(self, path: str, before_bytes: int, now_bytes: int) -> None:
        """Name the file, and its size before and now."""
        self.path = path
        size = "its size is the same" if before_bytes == now_bytes else f"{before_bytes:,} bytes became {now_bytes:,}"
        super().__init__(
            f"{path} was written while this run reads the frozen weights of its base from it ({size}), so the run "
            "stops. Put the file back as it was, and resume the run; what it saved is whole."
        )


class CheckpointError(MegatierError):
    """A checkpoint is missing, incomplete, damaged, or of another run."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or not as it was written."""

    def __init__(self, path: str, what: str) -> None:
        """Name the file and say what is wrong with it."""
        self.reason = f"{path} {what}."
        super().__init__(f"{self.reason} Move this checkpoint away; then the one before it is used.")

    def add_remedy(self, words: str) -> None:
        """Say what else helps."""
        # An exception has its message in its arguments alone.
        self.args = (f"{self} {words}",)


class SavepointError(CheckpointError):
    """A run cannot go on from its savepoint."""

    def __init__(self, path: str, reason: str, before: str) -> None:
        """Name the savepoint, say why, and say what the run goes on from without it."""
        self.path = path
        self.before = before
        super().__init__(
            f"the run cannot go on from its savepoint {path}: {reason} Without it (move that folder away) the run "
            f"goes on from {before}."
        )


class ExportError(MegatierError):
    """The steps of a run are done, but its model could not be written."""

    def __init__(self, reason: str, step: int, saved: str) -> None:
        """Say why, which step was the last, what was saved, and how to go on."""
        self.reason = reason
        self.step = step
        self.saved = saved
        super().__init__(f"all {step} steps are done, and the model could not be written: {reason} {saved}")


class UploadError(MegatierError):
    """A model was written, but could not be uploaded."""

    def __init__(self, folder: str, repository: str, reason: str, command: str) -> None:
        """Say where the model is, where it was to go, why it is not there, and by which command it goes there."""
        self.folder = folder
        self.repository = repository
        super().__init__(
            f"the model is in {folder}, but its upload to {repository} failed: {reason}. `{command}` uploads it again."
        )


class RunLockedError(MegatierError):
    """Another process uses this directory."""


class ForkedError(MegatierError, RuntimeError):
    """A forked child uses what its parent has opened."""

    def __init__(self, what: str, process: int) -> None:
        """Name what was opened, and its process."""
        self.process = process
        super().__init__(
            f"{what} belongs to process {process}, of which this is a forked child: its threads are not here, and its "
            "files are not the child's. Use it there alone, and open another one here if this process needs one."
        )


class OptimizerError(MegatierError, RuntimeError):
    """A parameter, gradient or call that an optimizer cannot take."""


class TornStateError(MegatierError, RuntimeError):
    """Weights and moments are not those of one step."""

    def __init__(self) -> None:
        """Say what helps."""
        super().__init__(
            "something (Ctrl-C, a signal, a failed load, or a gradient that is not finite without clip and guard) "
            "broke off while state was changed, so weights and moments may be those of different steps. Load all of "
            "it: Streamed.restore(folder), or megatier resume. Or open the model anew."
        )


class StreamedModelError(MegatierError, RuntimeError):
    """A streamed model cannot take this call at this point of a step, or does not hold the weight that is asked for."""


class AbsentWeightError(StreamedModelError):
    """Somebody copies a weight, or computes with it, where the model does not hold it."""


class UnsupportedModelError(MegatierError):
    """The architecture or checkpoint cannot be streamed."""


class DataError(MegatierError, ValueError):
    """The dataset is missing, empty or malformed."""


class UnknownTokenError(DataError, IndexError):
    """A batch has a token that the model has no embedding for."""


class NonFiniteError(MegatierError, ArithmeticError):
    """A loss or gradient is NaN or infinite. The weights are those of the last whole step, unless it names units."""

    def __init__(self, message: str, updated: Sequence[str] = ()) -> None:
        """Keep the units that were updated before it was found: they are a step ahead of the others."""
        self.updated = tuple(updated)
        super().__init__(message)


class StepAbandonedError(MegatierError):
    """A move was given up because the step that needed it will not go on."""


class StepDroppedError(MegatierError):
    """Another rank dropped the step, so none of its updates is made. All ranks can go on with the next one."""

    def __init__(self, step: int, causes: Sequence[tuple[int, str]]) -> None:
        """Name the step, and the ranks that dropped it, each with its cause, which is a sentence."""
        self.step = step
        self.causes = tuple(causes)
        reasons = " ".join(f"Rank {rank}: {cause}" for rank, cause in causes)
        super().__init__(
            f"step {step} was dropped, and no weight has changed on any rank. {reasons} Catch this error and go on "
            "with the next rows, or let it end all ranks."
        )


class TimelineError(MegatierError):
    """A step used its units in another order than the first step did, or one that the first step left out."""


class PeerError(MegatierError):
    """Another rank failed, died or fell silent, so this one stops as well."""

    def __init__(self, rank: int, host: str, cause: str) -> None:
        """Name the rank that was the first, its host, and why; the cause is a sentence."""
        self.rank = rank
        self.host = host
        self.cause = cause
        super().__init__(
            f"rank {rank} on {host} failed, and all ranks stop with it: {cause} Fix that, and start all ranks again; "
            "what was saved is whole."
        )


class StallError(MegatierError):
    """A pass did not move on for so long that it never will."""

    def __init__(self, quiet_s: float, path: str) -> None:
        """Keep the seconds without progress, and the file that has the state of every queue."""
        self.quiet_s = quiet_s
        self.path = path
        super().__init__(
            f"no transfer, update or use of weights moved on for {quiet_s:.0f} s, so the run stops. {path} says what "
            "each queue waits for: check that drive (dmesg, smartctl) or the GPU (nvidia-smi). If the machine is only "
            "slow, raise train.stall_timeout."
        )
