"""Tokenises a long text piece by piece, as the tokenizer would do with the whole.

Tokenisers take about 200 bytes of RAM a token, so a long text is not given to them at once. A cut changes the tokens
around it: a word, a run of blanks, the mark that some tokenizers put before a text. So pieces overlap, and one is left
for the next where both have had the same tokens for a while. Where they never agree, the piece is made longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 17
"""Characters that are tokenised at once."""
OVERLAP_CHARACTERS = 1 << 13
"""Characters that two pieces share."""
AGREEING_TOKENS = 64
"""Tokens in a row that both pieces have where one is left for the other, half of them before that place."""


@dataclass(frozen=True, slots=True)
class _TokenRun:
    """The tokens of some characters of a text."""

    stop: int
    """The number of the character after the last one."""
    ids: NDArray[np.int64]
    """The tokens."""
    spans: NDArray[np.int64]
    """The characters [start, stop) of each, counted in the whole text: [tokens, 2]."""

    @staticmethod
    def of(text: str, start: int, size: int, tokenizer: PreTrainedTokenizerBase) -> _TokenRun:
        """Tokenise so many characters of a text, as far as there are."""
        piece = text[start : start + size]
        encoding = tokenizer(
            piece,
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = np.asarray(encoding["input_ids"], np.int64)
        spans = np.asarray(encoding["offset_mapping"], np.int64)

        # A piece without tokens has no spans, and still two columns.
        in_whole_text = spans.reshape(-1, 2) + start
        return _TokenRun(start + len(piece), ids, in_whole_text)


def tokenise_long_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of a text in pieces that lie end to end.

    A tokenizer that does not say which characters a token has is given the whole text.
    """
    if len(text) <= PIECE_CHARACTERS or not tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=False, verbose=False)
        yield np.asarray(encoding["input_ids"], np.int64)
        return

    start = 0
    first = 0
    size = PIECE_CHARACTERS
    piece = _TokenRun.of(text, start, size, tokenizer)
    while piece.stop < len(text):
        # The next piece begins where a token does, so that it agrees at once if what is before does not matter.
        starts = piece.spans[:, 0]

        # Tokens near the end of the piece may be others than in the whole text, so the pieces share some thousands of
        # characters.
        begins = starts[starts >= piece.stop - OVERLAP_CHARACTERS]
        after = None
        place = None
        if len(begins):
            after = _TokenRun.of(text, int(begins[0]), PIECE_CHARACTERS, tokenizer)
            place = _agreement(piece, after)
        # Pieces that never agree end in the whole text, which is slow and right.
        if after is None or place is None or place[0] < first:
            # All of it again, and as much after it.
            size *= 2
            piece = _TokenRun.of(text, start, size, tokenizer)
            continue

        here, there = place
        yield piece.ids[first:here]
        start = int(begins[0])
        first = there
        size = PIECE_CHARACTERS
        piece = after
    yield piece.ids[first:]


def _agreement(piece: _TokenRun, after: _TokenRun) -> tuple[int, int] | None:
    """Return the numbers of one token in both pieces, in the middle of the first long run of tokens that they share.

    None: there is no such run, but for tokens beside the end of the earlier piece, which the cut may have changed.
    """
    length = AGREEING_TOKENS
    stop = piece.stop - OVERLAP_CHARACTERS // 4
    for there in range(len(after.ids) - length):
        begin = after.spans[there, 0]
        if begin >= stop:
            return None
        here = int(np.searchsorted(piece.spans[:, 0], begin))
        last = here + length
        if last > len(piece.ids) or piece.spans[last - 1, 1] > stop:
            continue

        # Of the same characters too: equal tokens of a text that repeats itself may be of another place.
        in_piece = slice(here, last)
        in_after = slice(there, there + length)
        has_same_ids = np.array_equal(piece.ids[in_piece], after.ids[in_after])
        if has_same_ids and np.array_equal(piece.spans[in_piece], after.spans[in_after]):
            return here + length // 2, there + length // 2
    return None
