"""Writes and finds the checkpoints of a streamed model.

`StreamedState` holds one `StreamCheckpoints`, and decides when a checkpoint may be written or restored. All ranks make
each of these calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatier.adapters.base import noted_identity
from megatier.checkpoint.checkpoint import settle_replaced
from megatier.checkpoint.checkpoint_writer import CheckpointWriter
from megatier.checkpoint.environment import read_environment
from megatier.integrations.saved_stream import SavedStream
from megatier.session.session import Session


class StreamCheckpoints:
    """The checkpoints of one streamed model."""

    def __init__(self, session: Session) -> None:
        """Take the model's session."""
        train = session.setup.config.train
        self._session = session
        self._groups = train.groups
        self._kept = {"optimizer": train.optimizer, "moments": train.moments}
        """The settings that a checkpoint must share with the model."""

    def write(self, folder: Path, step: int, settings: Sequence[Mapping[str, Any]]) -> Path:
        """Write a checkpoint of a step, with the optimizer's settings; see `Streamed.save`."""
        # On the first rank, before any rank writes there.
        self._session.all_ranks.broadcast(lambda: _make_ready(folder))
        engine = self._session.engine
        state = {
            # By this key `restore` tells this kind of checkpoint from one of `megatier train`.
            "streamed": settings,
            "environment": read_environment(engine.options.device),
            "groups": self._groups,
            "tiles": {module: asdict(decision) for module, decision in engine.model.tiles.items()},
            "base": noted_identity(self._session.model),
            "compiled": self._describe_compilation(),
            "fp8_products": list(engine.options.fp8_products),
            **self._kept,
        }
        writer = CheckpointWriter(self._session, folder, step, state)
        return writer.wait()

    def find_last(self, folder: Path) -> SavedStream:
        """Return the last checkpoint of a folder, and check that it fits the model.

        A warning names settings that will round the next steps differently.
        """

        def find() -> SavedStream:
            saved = SavedStream.find(folder)
            saved.check(self._kept, noted_identity(self._session.model))
            options = self._session.engine.options
            environment = read_environment(options.device)
            for remark in saved.remarks(self._describe_compilation(), options.fp8_products, environment):
                warnings.warn(remark, stacklevel=5)  # the line that called `restore` or `restore_weights`
            return saved

        return self._session.all_ranks.broadcast(find)

    def _describe_compilation(self) -> str:
        """Say how layers and loss are compiled, which affects the order of sums."""
        compilation = self._session.engine.options.compilation
        if compilation is None:
            return "not at all"
        return "for batches of any size" if compilation.any_shape else "for batches of one size"


def _make_ready(folder: Path) -> None:
    """Create a folder of checkpoints, or repair what a killed process has left half replaced."""
    folder.mkdir(parents=True, exist_ok=True)

    # A process that was killed between two renames has left the old checkpoint under another name.
    settle_replaced(folder)
