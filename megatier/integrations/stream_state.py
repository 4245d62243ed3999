"""The state of a streamed model between two steps: its masters as tensors, and its checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatier.checkpoint.checkpoint import UNBOUND, is_bound, last_checkpoint, read_state, settle_replaced
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.errors import BlockNotFoundError, CapacityError, CheckpointError
from megatier.hardware import ram_available_bytes
from megatier.layout import TensorSlice
from megatier.models.decoder import Unit
from megatier.models.experts import places_of
from megatier.session.session import Session

Settings = list[dict[str, Any]]
"""The settings of each group of an optimizer, as plain JSON."""


def read_master(session: Session, name: str) -> Tensor:
    """Return the fp32 master of a parameter as a copy on the CPU; see `Streamed.read`."""
    places = places_of(session.units)
    if name not in places:
        raise BlockNotFoundError(
            f"{type(session.model).__name__} has no parameter {name!r}; a tied one has its first name"
        )
    return _read(session, places[name])


def read_all(session: Session) -> dict[str, Tensor]:
    """Return all masters and persistent buffers as copies on the CPU; see `Streamed.state_dict`."""
    places = places_of(session.units)

    # Checked before the first copy: a process that runs out of RAM half way is killed, and says nothing.
    needed = 4 * sum(tensor.num_elements for parts in places.values() for _, tensor in parts)
    if needed > (free := ram_available_bytes()):
        raise CapacityError("ram", needed, free, "Write the weights to files with export(folder): that streams.")

    state = session.model.state_dict(keep_vars=True)
    buffers = {name: tensor.cpu() for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}
    return {name: _read(session, parts) for name, parts in places.items()} | buffers


def save_state(session: Session, folder: Path, step: int, settings: Settings) -> Path:
    """Write a checkpoint into a folder and return its path; see `Streamed.save`.

    Args:
        session: the model, all of whose updates are done.
        folder: made if it is missing.
        step: number of the last step.
        settings: those of the optimizer.
    """
    folder.mkdir(parents=True, exist_ok=True)

    # A process that was killed between the two renames of a switch has left the old checkpoint under another name.
    settle_replaced(folder)
    return CheckpointWriter(session, folder, step, {"streamed": settings}).wait()


def find_saved(folder: Path) -> tuple[Path, Sequence[Mapping[str, Any]]]:
    """Return the last checkpoint of a folder, and the settings of the optimizer that it was saved with.

    Raises:
        CheckpointError: there is none, or it is of a run of `megatier train`, or it is damaged.
    """
    settle_replaced(folder)
    if (checkpoint := last_checkpoint(folder)) is None:
        raise CheckpointError(f"{folder} holds no checkpoint of a streamed model; Streamed.save writes them.")
    settings = read_state(checkpoint).get("streamed")
    if not isinstance(settings, list):
        raise CheckpointError(f"{checkpoint} is of a `megatier train` run; go on with `megatier resume`.")

    # The warning shows the line that called `Streamed.restore`.
    if not is_bound(checkpoint):
        warnings.warn(UNBOUND.format(checkpoint), stacklevel=3)
    return checkpoint, settings


def _read(session: Session, parts: Sequence[tuple[Unit, TensorSlice]]) -> Tensor:
    """Read a whole parameter, whose parts may lie in several units (experts that were cut)."""
    found = [session.read_master(unit, tensor.start, tensor.stop) for unit, tensor in parts]
    return (found[0] if len(found) == 1 else torch.cat(found)).view(parts[0][1].parameter_shape)
