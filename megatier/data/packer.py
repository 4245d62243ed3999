"""Lays documents into rows of marked tokens: end to end, or packed where they fit best.

An integer is a token's id, with two more bits below it that say whether the token is learnt and whether a document
begins there. Texts are closed by the end token and laid end to end; a row is a cut of `sequence_length` tokens.

If documents are apart (`DataConfig.is_apart`), a conversation stays whole in its row unless it is longer. A window of
them is packed at once, the longest first, each into the fullest row that has room. The rest of a row is filled with end
tokens, each alone in a document of its own, so that nothing sees them or learns them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import BYTE_TOKENIZER, DataConfig
from megatier.data.conversation import Conversation
from megatier.data.long_text import PIECE_CHARACTERS, tokenise_long_text
from megatier.data.records import BadRecords
from megatier.data.template import tokenise_chats
from megatier.data.tokenizer import TOKENIZER_REMEDY, find_special_tokens
from megatier.errors import DataError

MARK_BITS = 2
"""Number of bits below a token's id."""
LEARNT_MARK = 1
"""Mark of a token whose label counts."""
FIRST_MARK = 2
"""Mark of the first token of a document."""

WINDOW_ROWS = 128
"""Rows of tokens that a window of conversations fills at least. In a stream its last row stays as it is, half empty in
the mean: 0.4 % of so many."""

BYTES_PER_TOKEN = 4
"""Bytes of text a token, by which the tokens of a window are guessed before anything is tokenised."""


class Packer:
    """Takes documents and gives marked tokens, in pieces that lie end to end.

    Attributes:
        num_documents: documents that became tokens.
        is_blind: whether no text has had any token so far that is neither special nor unknown.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, bad: BadRecords) -> None:
        """Begin at the beginning of a row.

        Args:
            config: how documents become rows.
            tokenizer: makes tokens.
            bad: takes the conversations that the chat template refuses.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._bad = bad
        self.num_documents = 0
        self.is_blind = True
        self._row = config.sequence_length
        self._left = self._row
        """Tokens that fit in the row that was begun."""
        self._window: list[Conversation] = []
        """Conversations that wait to be packed."""
        self._window_bytes = 0
        self._empty = find_special_tokens(tokenizer)
        self._handed_on: list[NDArray[np.int64]] = []
        """The pieces of a window's emptiest row, which are packed with the next window."""

    def lay(self, document: str | Conversation) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens that come next with this document: none, its own, or those of a window."""
        if self._config.is_apart and isinstance(document, Conversation):
            self._window.append(document)
            self._window_bytes += document.num_bytes
            if is_window(self._config, len(self._window), self._window_bytes):
                yield from self._lay_window(hands_on=True)
            return

        # A text is not packed, so it comes after the conversations that wait.
        yield from self._lay_window(hands_on=False)
        first = FIRST_MARK
        for piece in self._marked(document):
            if len(piece):
                piece[0] |= first
                first = 0

            # A piece may end several rows further on.
            taken = self._row - self._left + len(piece)
            self._left = self._row - taken % self._row
            yield piece

    def end(self) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens that still wait, and the fill of a row that was begun, if documents are apart.

        More documents may follow, from the beginning of a row on.

        Raises:
            DataError: the tokenizer knew nothing of any text so far.
        """
        yield from self._lay_window(hands_on=False)
        yield from self._end_row()
        self.check()

    def check(self) -> None:
        """Refuse texts of which the tokenizer knew nothing so far.

        Raises:
            DataError: it did not.
        """
        if self.num_documents and self.is_blind:
            raise DataError(
                f"the tokenizer {self._tokenizer.name_or_path} makes nothing but special and unknown tokens of the "
                f"{self.num_documents:,} texts. {TOKENIZER_REMEDY}"
            )

    def _lay_window(self, *, hands_on: bool) -> Iterator[NDArray[np.int64]]:
        """Yield whole rows of the conversations that wait.

        Args:
            hands_on: keep what the emptiest row holds for the next window. Else each window would end in a row that is
                half empty, and of long rows a window has few.
        """
        if not (self._window or self._handed_on):
            return
        yield from self._end_row()

        # These come first, since they have waited longest.
        pieces = list(self._handed_on)
        for tokens in self._tokenise_chats(self._window):
            pieces += _cut(tokens, self._row)
        self._window = []
        self._window_bytes = 0
        self._handed_on = []

        sizes = [len(piece) for piece in pieces]
        rows = best_fit(sizes, self._row)
        used = [sum(sizes[number] for number in numbers) for numbers in rows]
        emptiest = min(range(len(rows)), key=used.__getitem__, default=None)

        for place, numbers in enumerate(rows):
            if hands_on and place == emptiest:
                self._handed_on = [pieces[number] for number in numbers]
                continue
            for number in numbers:
                yield pieces[number]
            self._left = self._row - used[place]
            yield from self._end_row()

    def _end_row(self) -> Iterator[NDArray[np.int64]]:
        """Yield the fill of a row that was begun, if documents are apart."""
        is_begun = 0 < self._left < self._row
        # Each token of the fill is a document of its own, so that none of them is learnt from another one.
        if self._config.is_apart and is_begun:
            fill = self._tokenizer.eos_token_id << MARK_BITS | FIRST_MARK
            yield np.full(self._left, fill)
        self._left = self._row

    def _marked(self, document: str | Conversation) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of a document with their marks, in pieces."""
        if isinstance(document, Conversation):
            yield from self._tokenise_chats([document])
            return
        self.num_documents += 1
        for ids in _tokens(document, self._config, self._tokenizer):
            self._look_at(ids)
            yield ids << MARK_BITS | LEARNT_MARK

        # The end of a text is learnt too.
        end = self._tokenizer.eos_token_id << MARK_BITS | LEARNT_MARK
        yield np.asarray([end])

    def _tokenise_chats(self, conversations: Sequence[Conversation]) -> Iterator[NDArray[np.int64]]:
        """Yield the marked tokens of each conversation that is not left out."""
        for ids, learnt in tokenise_chats(conversations, self._tokenizer, self._bad):
            self.num_documents += 1
            self._look_at(ids)
            marks = np.where(learnt, LEARNT_MARK, 0)
            yield ids << MARK_BITS | marks

    def _look_at(self, ids: NDArray[np.int64]) -> None:
        """Note whether the tokenizer knows anything of a text."""
        # Once a text was understood, nothing is compared any more.
        self.is_blind = self.is_blind and bool(np.isin(ids, self._empty).all())


def is_window(config: DataConfig, count: int, num_bytes: int | None) -> bool:
    """Return whether so many documents make a window: `data.window_rows`, and enough bytes if they stay whole.

    Args:
        config: has the length of a row.
        count: number of documents.
        num_bytes: bytes of conversations that stay whole; None: they do not stay whole.
    """
    least = WINDOW_ROWS * config.sequence_length * BYTES_PER_TOKEN
    return count >= config.window_rows and (num_bytes is None or num_bytes >= least)


def best_fit(sizes: Sequence[int], row: int) -> list[list[int]]:
    """Return which pieces share a row: the longest first, each in the row with the least room that takes it.

    Rows come in the order of their first pieces, so that long pieces do not come before short ones.

    Args:
        sizes: sizes of the pieces, none above `row`.
        row: room of a row.
    """
    rows: list[list[int]] = []

    # Room left and number of each row, the least room first.
    rooms: list[tuple[int, int]] = []
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        size = sizes[piece]

        # Rooms are sorted, so the first one that is large enough is the one with the least room.
        place = bisect.bisect_left(rooms, (size, 0))
        if place < len(rooms):
            left, number = rooms.pop(place)
        else:
            left = row
            number = len(rows)
            rows.append([])

        rows[number].append(piece)
        bisect.insort(rooms, (left - size, number))

    return sorted(sorted(pieces) for pieces in rows)


def _cut(tokens: NDArray[np.int64], row: int) -> Iterator[NDArray[np.int64]]:
    """Yield pieces of a row at most, each a document of its own."""
    for start in range(0, len(tokens), row):
        piece = tokens[start : start + row]
        # Nothing in a row sees the row before.
        piece[0] |= FIRST_MARK
        yield piece


def _tokens(text: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int64]]:
    """Yield the token ids of a text, in pieces."""
    if config.tokenizer != BYTE_TOKENIZER:
        yield from tokenise_long_text(text, tokenizer)
        return

    # The same as the byte tokenizer gives, about two hundred times faster.
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS].encode("utf-8")
        yield np.frombuffer(piece, np.uint8).astype(np.int64)
