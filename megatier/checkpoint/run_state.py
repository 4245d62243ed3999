"""The state of a run besides its arrays, and the comparison of a run that is resumed with the one that was saved.

Numbers depend on the config's numeric choices, on the text, and on the machine's kernels. A run goes on with those of
its checkpoint. Whatever differs is refused by name, unless the user accepts that the numbers change from here on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from megatier.checkpoint.best import Best
from megatier.checkpoint.environment import find_differences, find_environment_changes, read_environment
from megatier.checkpoint.manifest import digest_of
from megatier.compute.token_tiles import Decision
from megatier.config.file import to_dict
from megatier.config.schema import RunConfig
from megatier.errors import CheckpointError, ConfigError, DataError
from megatier.files import read_regular, replace_file

FREE_SECTIONS = ("tiers", "output")
"""Sections of the config that change no number."""
FREE_SETTINGS = (
    "train.activations",
    "train.kept_layers",
    "train.kept_attention",
    "train.offload_attention",
    "train.evaluate_every",
    "train.evaluate_batches",
    "train.early_stopping_patience",
    "train.early_stopping_threshold",
    "train.stall_timeout",
    "numerics.max_skips",
)
"""Settings outside of free sections that change no number of later steps."""
MODEL_PATH = "model.path"
"""The setting with the path of the model. It may change, because the model's files are compared in the origin."""
ADDED = {
    "train.moments": "fp32",
    "train.optimizer": "adamw",
    "train.momentum": 0.95,
    "numerics.products": "bf16",
    "numerics.products_except": [],
}
"""Settings that change numbers and that older versions lacked, with the values that those versions used."""
WIDTH_SETTINGS = ("model.compute_dtype", "train.moments", "train.optimizer")
"""Settings that decide the kinds of state and the bytes of their elements."""
KEPT = "train.optimizer"
"""The setting that may never change, because a checkpoint has the state of one optimizer."""
STATE_FIELDS = {"step": int, "config": dict, "environment": dict, "text": dict, "origin": dict}
"""The fields of `RunState` in JSON, with their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The state of a run after a step, without its arrays."""

    step: int
    """The last step."""
    config: dict[str, Any]
    """The config, from `config.file.to_dict`."""
    environment: dict[str, Any]
    """Libraries and devices, since their kernels decide bits."""
    text: dict[str, Any]
    """The position in the text: `PackedText.state` or `TextStream.state`."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What identifies model and tokenizer (`origin.read_origin`); empty in checkpoints of older versions."""
    tiles: Mapping[str, Decision] = field(default_factory=dict)
    """Which modules run in tiles of tokens (`UnitModel.tiles`); empty in checkpoints of older versions."""
    best: Best = field(default_factory=Best)
    """The held-out losses so far; none in checkpoints of older versions."""

    @classmethod
    def of(
        cls,
        step: int,
        config: RunConfig,
        device: torch.device,
        text: dict[str, Any],
        origin: Mapping[str, str] = MappingProxyType({}),
        tiles: Mapping[str, Decision] = MappingProxyType({}),
        best: Best | None = None,
    ) -> Self:
        """Return the present state of this process.

        Args:
            step: the last step.
            config: the run.
            device: the device whose kernels count.
            text: position in the text.
            origin: model and tokenizer.
            tiles: which modules run in tiles of tokens.
            best: the held-out losses so far; None: nothing was evaluated.
        """
        return cls(
            step=step,
            config=_plain(config),
            environment=read_environment(device),
            text=text,
            origin=dict(origin),
            tiles=dict(tiles),
            best=best or Best(),
        )

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Return the state that a checkpoint holds.

        Raises:
            CheckpointError: something is missing, or of another type.
        """
        stored = {"origin": {}, **stored}

        # `isinstance` would accept True as the number of a step.
        for name, kind in STATE_FIELDS.items():
            value = stored.get(name)
            if type(value) is not kind:
                shown = str(value)[:100]
                raise CheckpointError(f"the checkpoint is damaged: {name} is {shown!r}.")
        if not all(isinstance(settings, dict) for settings in stored["config"].values()):
            raise CheckpointError("the checkpoint is damaged: its config has a section without settings.")

        if stored["step"] < 0:
            raise CheckpointError(f"the checkpoint is damaged: step is {stored['step']}.")
        # What else the file has is of a newer version, and was not asked for.
        fields = {name: stored[name] for name in STATE_FIELDS}
        return cls(**fields, tiles=read_tiles(stored), best=Best.read(stored))

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return asdict(self)

    def changes(self, config: RunConfig, device: torch.device) -> list[str]:
        """Return the settings that would give other numbers now, each with both values.

        Args:
            config: the run as it is now.
            device: its device.

        Returns:
            One line for each numeric choice, library or device that is another one.
        """
        # The checkpoint has what was trained, and the origin describes the rest.
        free = {MODEL_PATH} if self.origin else set()
        now = _numeric(_plain(config))
        changes = list(find_differences(_numeric(self.config), now, free))

        # Another library or GPU may choose another kernel, so it counts like a setting.
        changes += find_environment_changes(self.environment, read_environment(device))
        return changes

    def check(self, changes: Collection[str], accepted: Container[str] = ()) -> None:
        """Refuse to go on with other numbers, and with another optimizer even if that was accepted.

        Args:
            changes: those that `changes` returned.
            accepted: changes that the user has accepted.

        Raises:
            ConfigError: one of the changes was not accepted, or may not be.
        """
        for change in changes:
            if change.startswith(f"{KEPT} "):
                raise ConfigError(
                    f"{change}, whose state step {self.step} does not have. Go on with what it was, or export the "
                    "model and begin a run with it."
                )

        refused = [change for change in changes if change not in accepted]
        if refused:
            raise ConfigError(
                f"the numbers of this run would change after step {self.step}: {'; '.join(refused)}. Go on with "
                "what it was, or add --accept-changes."
            )

    def changes_of_blocks(self, config: RunConfig) -> list[str]:
        """Return the settings of places and sizes of blocks that differ, each with both values."""
        now = _plain(config)

        # All of this section, because each of its settings may move a block.
        tiers = find_differences(self.config.get("tiers", {}), now["tiers"])
        changes = [f"tiers.{change}" for change in tiers]

        old = _numeric(self.config)
        new = _numeric(now)

        # Of the others none decides how large a block is.
        others = {*old, *new}.difference(WIDTH_SETTINGS)
        changes += find_differences(old, new, free=others)
        return changes

    def check_text(self, present: dict[str, Any]) -> None:
        """Refuse to go on with other text.

        Args:
            present: `PackedText.state` of the text as it is now.

        Raises:
            DataError: the tokens are not those of the checkpoint.
        """
        # Older checkpoints noted less, so only what they noted is compared.
        noted = {name: present.get(name) for name in self.text}
        if noted != self.text:
            count = present["num_tokens"]
            before = self.text.get("num_tokens")
            difference = "its tokens differ"
            if count != before:
                difference = f"it has {count} tokens to train on instead of {before}"
            raise DataError(
                f"the text is not that of the checkpoint: {difference}. Bring the old text back, or add "
                "--accept-changes."
            )


def read_tiles(stored: Mapping[str, Any]) -> dict[str, Decision]:
    """Return which modules run in tiles of tokens, from the state of a checkpoint; empty if it is of an older version.

    Raises:
        CheckpointError: what is there is of another type.
    """
    # Whatever else than mappings of these keywords the file has ends in one of these errors.
    try:
        decisions = {path: _decision(**decision) for path, decision in stored.get("tiles", {}).items()}
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint is damaged: tiles is {str(stored['tiles'])[:100]!r}.") from error
    return decisions


def _decision(why_whole: object, keywords: Any) -> Decision:  # noqa: ANN401 - whatever the file has
    """Return the note of a checkpoint about one module; a TypeError says that it is none."""
    if not isinstance(keywords, list) or not isinstance(why_whole, str | None):
        raise TypeError(why_whole)
    for name in keywords:
        if not isinstance(name, str):
            raise TypeError(name)
    return Decision(why_whole, tuple(keywords))


def write_numbers(path: Path, config: RunConfig, origin: Mapping[str, str]) -> None:
    """Note the numeric choices that a run begins with, and its model and tokenizer.

    They are compared if the run is resumed before it has a checkpoint.

    Args:
        path: the file.
        config: the run.
        origin: model and tokenizer, as `origin.read_origin` gives them.

    Raises:
        ConfigError: it cannot be written.
    """
    note = {"config": _numeric(_plain(config)), "origin": dict(origin)}
    # The digest tells a damaged file from one with other numbers (`check_numbers`).
    text = json.dumps({**note, "digest": digest_of(note)})
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"output.directory: cannot write {path}: {error.strerror}. Check the drive and your rights there."
        ) from error


def check_numbers(path: Path, config: RunConfig, *, accepts_changes: bool) -> list[str]:
    """Refuse to begin a run again with other numbers than it began with.

    Args:
        path: the file that `write_numbers` wrote.
        config: the run as it is now.
        accepts_changes: whether the user accepts other numbers.

    Returns:
        What has changed, each with both values.

    Raises:
        ConfigError: something differs that was not accepted, or the file cannot be read.
    """
    try:
        text = read_regular(path)
    except FileNotFoundError:  # an older version began it
        return []
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Move it away.") from error

    # A damaged file says nothing about the numbers, so it counts as one change that the user may accept. The origin
    # describes the weights of a base of adapters, and no others.
    note = _noted_numbers(text)
    if note is None:
        changes = [f"{path.name} is damaged"]
    else:
        is_bound = config.model.lora is not None and note.get("origin")
        free = {MODEL_PATH} if is_bound else set()
        # What an older version did not have counts as what it did.
        before = ADDED | note["config"]
        changes = list(find_differences(before, _numeric(_plain(config)), free))

    if changes and not accepts_changes:
        raise ConfigError(
            f"these are not the numbers that {path.parent} began with: {'; '.join(changes)}. Set them in its "
            "config.yaml as they were, or add --accept-changes to begin again with the new ones."
        )

    return changes


def read_noted_origin(path: Path) -> dict[str, Any]:
    """Return the model and tokenizer that a run began with, after `check_numbers`; empty if nobody noted them."""
    try:
        note = _noted_numbers(read_regular(path))
    except FileNotFoundError:  # an older version began it
        return {}
    origin: dict[str, Any] = {} if note is None else note.get("origin", {})
    return origin


def _noted_numbers(text: bytes) -> dict[str, Any] | None:
    """Return the numbers that `write_numbers` noted, without their digest; None if they are damaged."""
    try:
        note = json.loads(text)
        digest = note.pop("digest")
        is_whole = isinstance(note["config"], dict) and digest == digest_of(note)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    return note if is_whole else None


def _plain(config: RunConfig) -> dict[str, Any]:
    """Return a config as it looks after it was stored as JSON."""
    # JSON has no tuples and no paths. Without this every such setting would differ from the stored one.
    plain: dict[str, Any] = json.loads(json.dumps(to_dict(config), default=str))
    return plain


def _numeric(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change numbers, by their dotted names."""
    # What an older version did not have counts as what it did.
    numeric = dict(ADDED)
    for section, settings in config.items():
        if section in FREE_SECTIONS:
            continue
        for name, value in settings.items():
            if f"{section}.{name}" not in FREE_SETTINGS:
                numeric[f"{section}.{name}"] = value
    return numeric
