"""Reads the last checkpoint of a streamed model in a folder, and checks that it fits the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatier.checkpoint.checkpoint import UNBOUND, is_bound, read_state, settle_replaced
from megatier.checkpoint.environment import find_environment_changes
from megatier.checkpoint.run_directory import last_checkpoint
from megatier.errors import CheckpointError
from megatier.foreign import printable

KEPT_BEFORE = {"optimizer": "adamw", "moments": "fp32"}
"""The values of older versions, which did not store them."""


@dataclass(frozen=True, slots=True)
class SavedStream:
    """A checkpoint of a streamed model."""

    path: Path
    """Its folder."""
    state: Mapping[str, Any]
    """Everything in it besides its arrays."""

    @classmethod
    def find(cls, folder: Path) -> Self:
        """Return the last checkpoint of a folder.

        Raises:
            CheckpointError: there is none, or it is of a run of `megatier train`, or damaged.
        """
        # Before the search, since a process that was killed while it replaced a checkpoint has left it under another
        # name.
        settle_replaced(folder)
        if (path := last_checkpoint(folder)) is None:
            raise CheckpointError(f"{folder} holds no checkpoint of a streamed model; Streamed.save writes them.")
        state = read_state(path)
        if not isinstance(state.get("streamed"), list):
            raise CheckpointError(f"{path} is of a `megatier train` run; go on with `megatier resume`.")
        return cls(path, state)

    @property
    def groups(self) -> int | None:
        """The number of backwards of all ranks in its steps; None: an older version wrote it."""
        groups = self.state.get("groups")
        return groups if isinstance(groups, int) else None

    def check(self, kept: Mapping[str, str], base: Mapping[str, str]) -> None:
        """Check that it fits a model.

        Args:
            kept: the model's optimizer and type of moments.
            base: the identity of the model's base; empty: it has none, or came from RAM.

        Raises:
            CheckpointError: it is of another optimizer, of other moments, or of adapters over another base, which it
                does not hold.
        """
        for name, now in kept.items():
            if now != (before := self.state.get(name, KEPT_BEFORE[name])):
                raise CheckpointError(
                    f"{self.path} has {name} {printable(before)}, and this model has {now}. Open the model by "
                    f"megatier.stream(..., {name}={printable(before)!r}) to go on from it."
                )
        # A base from RAM has no identity that could be compared.
        of_base = self.state.get("base") or {}
        if base and of_base and of_base != base:
            raise CheckpointError(f"{self.path} is of adapters over another base. Stream the base that they belong to.")

    def remarks(self, compiled: str, fp8: Sequence[str], environment: Mapping[str, Any]) -> Iterator[str]:
        """Yield remarks for a user who resumes from it. What older versions did not store is not compared.

        Args:
            compiled: how layers are compiled now.
            fp8: the modules that multiply in FP8 now.
            environment: libraries and devices now.
        """
        # Each chunk of a bound checkpoint is checked against what was written in its place.
        if not is_bound(self.path):
            yield UNBOUND.format(self.path)
        before = self.state.get("compiled", compiled)
        if before != compiled:
            yield (
                f"{self.path} was written where layers are compiled {before}, and here they are compiled {compiled}. "
                "State is taken bit by bit, but steps are rounded in other places from now on. Open the model with "
                f"compile={before != 'not at all'} to go on as before."
            )
        # Older checkpoints have no such entry.
        num_fp8 = len(self.state.get("fp8_products", ()))
        if self.state.get("fp8_products", []) != list(fp8):
            yield (
                f"{self.path} was written where {num_fp8} modules take their products in FP8, and here "
                f"{len(fp8)} do, or others. State is taken bit by bit, but steps are rounded in other places from now "
                "on. Open the model with the same products and products_except to go on as before."
            )
        noted = self.state.get("environment")
        if isinstance(noted, dict) and (others := list(find_environment_changes(noted, environment))):
            yield (
                f"{self.path} was written in another environment: {printable('; '.join(others))}. State is taken bit "
                "by bit, but steps may be rounded in other ways from now on."
            )
