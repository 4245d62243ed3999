"""A text as sequences of equal length, in an order that follows from the step alone.

Documents are tokenised once, before the run begins (`token_files`). A sequence is a cut of `sequence_length` tokens,
addressed by its number (`token_range`), and each epoch shuffles these numbers (`shuffle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import DataConfig
from megatier.data.records import BadRecords
from megatier.data.shuffle import permute
from megatier.data.token_files import tokenise
from megatier.data.token_range import TokenRange
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedText:
    """A tokenised dataset: shuffled training sequences and held-out ones."""

    train: TokenRange
    """The tokens to train on."""
    held_out: TokenRange
    """The tokens to evaluate on."""
    sequence_length: int
    """The tokens of a sequence."""
    seed: int
    """Decides the order of sequences (`data.seed`)."""
    damaged: str | None = None
    """The file that made it necessary to tokenise again."""
    bad: BadRecords | None = None
    """The records that were left out when the text was tokenised."""

    @staticmethod
    def build(
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path,
        progress: Callable[[int], None] = lambda _: None,
        unknown: UnknownTokens = NONE_UNKNOWN,
    ) -> PackedText:
        """Tokenise the dataset into `train.tokens` and `holdout.tokens` in a directory.

        Args:
            config: the dataset, and how it becomes sequences.
            tokenizer: makes tokens.
            directory: where the files lie.
            progress: is called with the number of tokens that came since the last call.
            unknown: the tokens for which the model has no embeddings; a text that spells one is refused.

        Raises:
            DataError: a path is missing, a line is malformed, there is no text or less than one sequence, or no room
                for the files.
        """
        bad = BadRecords(skips=config.skip_bad)
        train, held_out, damaged = tokenise(config, tokenizer, directory, bad, progress, unknown)
        train, held_out = _split_few(train, held_out, config)
        if train.num_tokens < config.sequence_length:
            raise DataError(
                f"the dataset has {train.num_tokens} tokens to train on, less than one sequence of "
                f"{config.sequence_length}. Give it more text or lower data.sequence_length."
            )
        return PackedText(
            train=train,
            held_out=held_out,
            sequence_length=config.sequence_length,
            seed=config.seed,
            damaged=damaged,
            bad=bad,
        )

    @property
    def state(self) -> dict[str, Any]:
        """The note of a checkpoint that tells this text from another: numbers of tokens and their CRC32."""
        # Held-out text too: another one would give other losses of evaluations, with the same weights.
        held_out = {"num_tokens": self.held_out.num_tokens, "crc32": self.held_out.crc32}
        return {"num_tokens": self.num_tokens, "crc32": self.train.crc32, "held_out": held_out}

    @property
    def num_tokens(self) -> int:
        """Tokens to train on, with end tokens and fill, without held-out text."""
        return self.train.num_tokens

    @property
    def num_sequences(self) -> int:
        """Whole sequences to train on: one epoch."""
        return self.train.num_tokens // self.sequence_length

    def batch(self, step: int, batch: int) -> dict[str, torch.Tensor]:
        """Return the training batch of a step, counted from 0, as `TokenRange.read` gives it."""
        count = self.num_sequences
        numbers = []
        for position in range(step * batch, (step + 1) * batch):
            # Each epoch has a permutation of its own, and a batch may reach into the next one.
            epoch, place = divmod(position, count)
            numbers.append(permute(place, count, (self.seed, epoch)))
        return self.train.read(numbers, self.sequence_length)

    def holdout(self, batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield held-out batches in order, the last one perhaps smaller; none if the dataset is too small."""
        return self.held_out.batches(batch, self.sequence_length)


def _split_few(train: TokenRange, held_out: TokenRange, config: DataConfig) -> tuple[TokenRange, TokenRange]:
    """Hold out the last tokens, where documents are too few to hold one out."""
    if config.holdout_fraction == 0 or (train.num_tokens and held_out.num_tokens):
        return train, held_out
    whole = train if train.num_tokens else held_out
    length = config.sequence_length

    # Whole sequences, at least one if one is left to train on.
    wanted = int(whole.num_tokens * config.holdout_fraction) // length * length
    if whole.num_tokens >= 2 * length:
        wanted = max(wanted, length)
    cut = whole.num_tokens - wanted

    # Nobody counted the documents and learnt tokens of each part.
    part = replace(whole, num_documents=None, num_learnt=None)
    return replace(part, num_tokens=cut), replace(part, start=cut, num_tokens=wanted)
