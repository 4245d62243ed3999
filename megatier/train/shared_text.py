"""The text of a run, which the first rank reads and sends to the others.

One process alone goes the same way, and has nobody to tell.
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
"""What a run trains on."""
Rows = dict[str, torch.Tensor]
"""What the model takes of some rows."""


def count_steps(text: Text, train: TrainConfig) -> int:
    """Return the steps that the epochs of a run take; the last step may reach into the next epoch."""
    assert not isinstance(text, TextStream), "a stream has no epochs"
    assert train.epochs is not None
    steps = train.epochs * text.num_sequences / train.batch
    return max(1, math.ceil(steps))


class SharedText:
    """The text of a run, which the first rank reads and sends. All ranks have to ask for the same."""

    def __init__(self, ranks: Ranks | None, text: Text | None) -> None:
        """Take the text, on the first rank."""
        self._all_ranks = ranks or SingleRank()
        self._text = text

    def read_groups(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return the training batch of a step, counted from 0, in its groups."""

        def made() -> Rows | list[Rows]:
            text = self.own
            if isinstance(text, ImageChats):
                return text.groups(step, train.batch, train.groups)
            return text.batch(step, train.batch)

        # The first rank alone calls `made`, since only it has a text.
        return _split(self._all_ranks.broadcast(made), train.groups)

    def read_rehearsal(self, step: int, train: TrainConfig) -> list[Rows]:
        """Return groups for `Engine.rehearse` before a step, counted from 0; none if it needs no rehearsal."""

        def made() -> list[Rows]:
            text = self.own
            return text.rehearsal(step, train.batch, train.groups) if isinstance(text, ImageChats) else []

        return self._all_ranks.broadcast(made)

    def read_holdout(self, train: TrainConfig) -> Iterator[list[Rows]]:
        """Yield held-out batches in order, each in its groups."""
        # Only the first rank has a text. Its None ends the loop on all ranks, so none waits for a batch in vain.
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
        """Return the settings with the steps that their epochs take, or `train.steps` if that is given and smaller.

        Raises:
            ConfigError: the warm-up is as long as that or longer.
        """
        if train.epochs is None:
            return train

        # The first rank alone knows how many sequences there are.
        steps = self._all_ranks.broadcast(lambda: count_steps(self.own, train))
        fewest = min(steps, train.steps)

        # Steps that nobody gave stand for as many as there may be, and are no news.
        if train.steps != STEPS_UNBOUND:
            say(
                console,
                f"train.epochs {train.epochs:g} takes {steps:,} steps, and train.steps is {train.steps:,}: the smaller "
                f"one ends the run, after {fewest:,} steps.",
            )

        # From here on steps alone say how long the run is.
        return replace(train, steps=fewest, epochs=None)

    @property
    def state(self) -> dict[str, Any]:
        """The note of this text, and of the position in it, that a checkpoint has."""
        return self._all_ranks.broadcast(lambda: self.own.state)

    @property
    def own(self) -> Text:
        """The text itself, which only the first rank has."""
        assert self._text is not None
        return self._text


def _split(rows: Rows | list[Rows], count: int) -> list[Rows]:
    """Return the rows of a batch in so many groups. Rows with images come in groups already: these cannot be cut."""
    return rows if isinstance(rows, list) else split_groups(rows, count)
