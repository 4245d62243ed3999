"""The text of a run. The first rank reads it, and sends the other ranks their rows.

A run in one process uses the same code, and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from megatier.config.schema import STEPS_UNBOUND, TrainConfig
from megatier.data.columns import split_groups
from megatier.data.image_chats import ImageChats
from megatier.data.packed_text import PackedText
from megatier.data.text_stream import TextStream
from megatier.ranks.channel import SingleRank
from megatier.ranks.ranks import Ranks
from megatier.report.console import say

Text = PackedText | TextStream | ImageChats
"""The kinds of text that a run trains on."""
Rows = dict[str, torch.Tensor]
"""The arguments of the model for some rows, by name."""


def count_steps(text: Text, train: TrainConfig) -> int:
    """Return how many steps the epochs of a run take. The last step may reach into the next epoch."""
    assert not isinstance(text, TextStream), "a stream has no epochs"
    assert train.epochs is not None
    steps = train.epochs * text.num_sequences / train.batch
    return max(1, math.ceil(steps))


class SharedText:
    """The text of a run, which the first rank reads for all. All ranks have to make the same calls."""

    def __init__(self, ranks: Ranks | None, text: Text | None) -> None:
        """Share a text.

        Args:
            ranks: the ranks of the run; None: there is one process.
            text: the text on the first rank; None on the others.
        """
        self._all_ranks = ranks or SingleRank()
        self._text = text

    def read_groups(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return the groups of a step's training batch. Steps are counted from 0."""

        def made() -> Rows | list[Rows]:
            text = self.own
            if isinstance(text, ImageChats):
                return text.groups(step, train.batch, train.groups)
            return text.batch(step, train.batch)

        # Only the first rank calls `made`, because only it has a text.
        return _split(self._all_ranks.broadcast(made), train.groups)

    def read_rehearsal(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return the groups that `Engine.rehearse` takes before a step; none if it needs no rehearsal."""

        def made() -> list[Rows]:
            text = self.own
            return text.rehearsal(step, train.batch, train.groups) if isinstance(text, ImageChats) else []

        return self._all_ranks.broadcast(made)

    def read_holdout(self, train: TrainConfig) -> Iterator[list[Rows]]:
        """Yield the held-out batches in order, each as a list of groups."""
        # Only the first rank has a text. When that is read, its None ends the loop on all ranks.
        batches: Iterator[Rows | list[Rows]] = iter(())
        if isinstance(self._text, ImageChats):
            batches = self._text.holdout(train.batch, train.groups)
        elif self._text is not None:
            batches = self._text.holdout(train.batch)
        while True:
            rows = self._all_ranks.broadcast(lambda: next(batches, None))
            if rows is None:
                return
            yield _split(rows, train.groups)

    def with_steps(self, train: TrainConfig, console: Console) -> TrainConfig:
        """Return the settings with epochs converted to steps. `train.steps` wins if it is given and smaller.

        Raises:
            ConfigError: the warm-up takes all of these steps.
        """
        if train.epochs is None:
            return train

        # Only the first rank knows how many sequences there are.
        steps = self._all_ranks.broadcast(lambda: count_steps(self.own, train))
        fewest = min(steps, train.steps)

        # Unless steps were given, there is no second number to tell of.
        if train.steps != STEPS_UNBOUND:
            say(
                console,
                f"train.epochs {train.epochs:g} takes {steps:,} steps, and train.steps is {train.steps:,}: the smaller "
                f"one ends the run, after {fewest:,} steps.",
            )

        # From here on the length of the run is counted in steps alone.
        return replace(train, steps=fewest, epochs=None)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint saves of the text: what identifies it, and the position in it."""
        return self._all_ranks.broadcast(lambda: self.own.state)

    @property
    def own(self) -> Text:
        """The text itself. Only the first rank has it."""
        assert self._text is not None
        return self._text


def _split(rows: Rows | list[Rows], count: int) -> list[Rows]:
    """Return a batch as a list of groups. Rows with images come in groups already, because they cannot be split."""
    return rows if isinstance(rows, list) else split_groups(rows, count)
