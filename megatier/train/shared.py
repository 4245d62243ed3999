"""Shared parts of a run with several ranks: choices, directory, text. The first rank has them, and tells the others.

One process alone goes the same way, and has nobody to tell.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatier.checkpoint.run_directory import CONFIG_FILE, RUN_ID_FILE, RunDirectory
from megatier.config.file import from_dict, given_in, load_saved, to_dict
from megatier.config.schema import STEPS_UNBOUND, RunConfig, TrainConfig
from megatier.data.image_chats import ImageChats
from megatier.data.packer import groups_of
from megatier.data.packing import PackedText
from megatier.data.text_stream import TextStream
from megatier.errors import ConfigError
from megatier.models.weights import WeightReader
from megatier.planner.prediction import Prediction
from megatier.ranks.channel import Alone
from megatier.ranks.ranks import Ranks
from megatier.setup.attention_choice import with_kernel
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of, open_model
from megatier.train.choices import WITHOUT_FLEX, fit_positions, plan_choices, settled, with_budgets_kept
from megatier.train.outlet import say

Text = PackedText | TextStream | ImageChats
"""What a run trains on."""
Rows = dict[str, torch.Tensor]
"""What the model takes of some rows."""


def setup_of(
    config: RunConfig, given: frozenset[str], machine: Machine, ranks: Ranks | None, console: Console
) -> tuple[Setup, WeightReader, Prediction | None]:
    """Return a run with the choices that it leaves open, the reader of its weights, and the step that is expected.

    The first rank plans for all, with what every rank and host has. Without a plan each rank computes one group, unless
    the config says otherwise, and no step is expected.

    Args:
        config: the run.
        given: dotted names of the settings that stay as they are.
        machine: the one that runs.
        ranks: the ranks of the run.
        console: what a person sees.

    Raises:
        ConfigError, UnsupportedModelError: the run cannot be planned or opened; the message says what to change.
    """
    # Each rank has one group then, which is what data parallelism usually means.
    if ranks is not None and "train.groups" not in given:
        config = config.changed({"train.groups": ranks.size})

    # The kernel of attention depends on how long sequences are.
    crew = ranks or Alone()
    model_config = model_config_of(config.model)

    def fitted() -> tuple[RunConfig, str]:
        return with_kernel(fit_positions(config, given, model_config), model_config, machine)

    chosen, why_not_flex = crew.from_first(fitted)
    if why_not_flex:
        say(console_of(ranks, console), WITHOUT_FLEX.format(chosen.model.attention, why_not_flex))

    # Each rank has its own skeleton, and the first one alone plans on it.
    model, reader = open_model(chosen, model_config)
    setup = settled(Setup.of(chosen, model, machine))
    setup = with_budgets_kept(setup)
    planned, expected = crew.from_first(lambda: plan_choices(setup, given, console))
    return setup.with_config(planned), reader, expected


def run_before_restart(
    config: RunConfig, given: frozenset[str], ranks: Ranks | None
) -> tuple[RunConfig, frozenset[str]] | None:
    """Return the run that `torchrun` has started again after a rank failed, and the settings that stay as they are.

    It has the settings that it was begun with, with those of its command on top, as `megatier resume` lays them there.
    So the number of ranks may be another one now.

    Args:
        config: the run, as its command has it.
        given: dotted names of the settings that the command gives.
        ranks: the ranks of the run.

    Returns:
        None if nothing was started again, or nothing was begun before.

    Raises:
        ConfigError: the stored config cannot be read.
    """
    crew = ranks or Alone()

    # Each host's torchrun counts for itself, and one that came later has seen no failure.
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not crew.any(num_restarts > 0):
        return None
    path = Path(config.output.directory) / CONFIG_FILE
    stored = crew.from_first(lambda: to_dict(load_saved(path)) if path.is_file() else None)
    if stored is None:
        return None

    # The directory is taken from the command: it may have been moved since its config was written.
    from_command = to_dict(config)
    for dotted in sorted(given | {"output.directory"}):
        section, _, name = dotted.partition(".")
        stored[section][name] = from_command[section][name]

    # A stored config has every setting, so all of them count as given, and no planner changes them on the way.
    return from_dict(stored), given_in(stored)


def console_of(ranks: Ranks | None, console: Console) -> Console:
    """Return the console of a run, which is silent on all ranks but the first."""
    return console if ranks is None or ranks.rank == 0 else Console(quiet=True)


class SharedDirectory:
    """The run directory, which the first rank locks and writes.

    Attributes:
        path: the directory.
        own: what writes there, on the first rank; None on the others.
        run_id: the name of the run's block files.
    """

    def __init__(self, opened: ExitStack, config: RunConfig, ranks: Ranks | None, *, resumes: bool) -> None:
        """Open it on the first rank, until the stack closes; see `RunDirectory`."""
        crew = ranks or Alone()
        self.path = Path(config.output.directory)

        # One lock on one host: the others would be refused by it.
        own = opened.enter_context(RunDirectory(config, resumes=resumes)) if crew.rank == 0 else None
        self.own = own

        # The others read there only once it is locked.
        self.run_id = crew.from_first(lambda: "" if own is None else own.run_id)
        with crew.together():
            self._check_is_shared(crew.rank)

    def _check_is_shared(self, rank: int) -> None:
        """Refuse a rank that sees another directory, since all of them write checkpoints there.

        Raises:
            ConfigError: names the rank.
        """
        noted = ""
        with contextlib.suppress(OSError):
            noted = (self.path / RUN_ID_FILE).read_text()
        # Behind the id the file has the directory's own number on its drive, which tells it from a copy of it.
        if noted.split(" ")[0] != self.run_id:
            raise ConfigError(
                f"rank {rank} does not see the run that the first rank has in {self.path}. Name an output.directory on "
                "a file system that all hosts share, and start all ranks in one directory."
            )


def steps_of(text: Text, train: TrainConfig) -> int:
    """Return the steps that the epochs of a run take; the last step may reach into the next epoch."""
    assert not isinstance(text, TextStream), "a stream has no epochs"
    assert train.epochs is not None
    steps = train.epochs * text.num_sequences / train.batch
    return max(1, math.ceil(steps))


class SharedText:
    """The text of a run, which the first rank reads and sends. All ranks have to ask for the same."""

    def __init__(self, ranks: Ranks | None, text: Text | None) -> None:
        """Take the text, on the first rank."""
        self._crew = ranks or Alone()
        self._text = text

    def groups(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return the training batch of a step, counted from 0, in its groups."""

        def made() -> Rows | list[Rows]:
            text = self.own
            if isinstance(text, ImageChats):
                return text.groups(step, train.batch, train.groups)
            return text.batch(step, train.batch)

        return _cut(self._crew.from_first(made), train.groups)

    def rehearsal(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return groups for `Engine.rehearse` before a step, counted from 0; none if it needs no rehearsal."""

        def made() -> list[Rows]:
            text = self.own
            return text.rehearsal(step, train.batch, train.groups) if isinstance(text, ImageChats) else []

        return self._crew.from_first(made)

    def holdout(self, train: TrainConfig) -> Iterator[list[Rows]]:
        """Yield held-out batches in order, each in its groups."""
        # Only the first rank has a text. Its None ends the loop on all ranks, so none waits for a batch in vain.
        batches: Iterator[Rows | list[Rows]] = iter(())
        if isinstance(self._text, ImageChats):
            batches = self._text.holdout(train.batch, train.groups)
        elif self._text is not None:
            batches = self._text.holdout(train.batch)
        while True:
            rows = self._crew.from_first(lambda: next(batches, None))
            if rows is None:
                return
            yield _cut(rows, train.groups)

    def with_steps(self, train: TrainConfig, console: Console) -> TrainConfig:
        """Return the settings with the steps that their epochs take, or `train.steps` if that is given and smaller.

        Raises:
            ConfigError: the warm-up is as long as that or longer.
        """
        if train.epochs is None:
            return train
        steps = self._crew.from_first(lambda: steps_of(self.own, train))
        fewest = min(steps, train.steps)

        # Steps that nobody gave stand for as many as there may be, and are no news.
        if train.steps != STEPS_UNBOUND:
            say(
                console,
                f"train.epochs {train.epochs:g} takes {steps:,} steps, and train.steps is {train.steps:,}: the smaller "
                f"one ends the run, after {fewest:,} steps.",
            )
        return replace(train, steps=fewest, epochs=None)

    @property
    def state(self) -> dict[str, Any]:
        """The note of this text, and of the position in it, that a checkpoint has."""
        return self._crew.from_first(lambda: self.own.state)

    @property
    def own(self) -> Text:
        """The text itself, which only the first rank has."""
        assert self._text is not None
        return self._text


def _cut(rows: Rows | list[Rows], count: int) -> list[Rows]:
    """Return the rows of a batch in so many groups. Rows with images come in groups already: these cannot be cut."""
    return rows if isinstance(rows, list) else groups_of(rows, count)
