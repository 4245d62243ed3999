"""The tokens of a tokenizer for which the model has no embeddings, and the texts that spell them.

Gemma 3 1B has one: its tokenizer is that of the larger models, whose token for images lies behind the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.data.tokenizer import vocabulary_size
from megatier.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Special tokens without embeddings. No text brings one but by spelling it."""

    size: int = 0
    """The number of embeddings that the model has."""
    names: Mapping[int, str] = field(default_factory=dict)
    """How a text spells each of them; mostly there are none."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, size: int) -> Self:
        """Return those of a tokenizer.

        Args:
            tokenizer: the run's tokenizer.
            size: the number of embeddings that the model has.

        Raises:
            ConfigError: a token without an embedding may come with any text. The message names what to change.
        """
        needed = vocabulary_size(tokenizer)

        # Fewer are usual, since models round the size of their vocabulary up.
        if needed <= size:
            return cls(size)
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {number: name for number, name in special.items() if number >= size}

        # The end of a text comes with each of them, and the token for what is unknown with many.
        always = {tokenizer.eos_token_id, tokenizer.unk_token_id}
        known = [number for number in tokenizer.get_vocab().values() if number not in names or number in always]
        if max(known, default=-1) >= size or max(names, default=-1) != needed - 1:
            raise beyond_vocabulary(needed, size)
        return cls(size, names)

    def error_of(self, ids: NDArray[np.int64], place: str) -> DataError | None:
        """Return the error of a record that spells one of them; None: it spells none.

        Args:
            ids: the tokens of the record.
            place: where the record comes from.
        """
        # Most tokenizers have none, and then nothing is compared.
        if not self.names:
            return None
        unknown = ids[ids >= self.size]
        if not len(unknown):
            return None
        token = int(unknown[0])
        return DataError(
            f"{place}: the text spells {self.names.get(token)} (token {token}), and the model has embeddings for the "
            f"tokens 0 to {self.size - 1}. Write it otherwise, or leave the record out."
        )


def beyond_vocabulary(needed: int, size: int) -> ConfigError:
    """Return the error of a tokenizer that needs more embeddings than there are."""
    return ConfigError(
        f"the tokenizer has tokens up to {needed - 1}, the model's vocab_size is {size}. Raise model.config.vocab_size "
        f"to {needed} or choose the model's own tokenizer."
    )


NONE_UNKNOWN = UnknownTokens()
"""What a model has that knows all tokens."""
