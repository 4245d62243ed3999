"""Packs documents into rows of marked tokens: end to end, or whole into the rows that they fit best.

A marked token is its id with two more bits below: whether the token is learnt, and whether a document begins with it.
Texts end with the end token and follow each other; each `sequence_length` tokens are a row.

If documents are apart (`DataConfig.is_apart`), a conversation stays whole in one row, unless it is longer than a row. A
window of conversations is packed at once, the longest first, each into the fullest row that has room. The rest of a row
is padded with end tokens. Each of these is a document by itself, so no other token sees it and it is not learnt.
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
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.errors import DataError

MARK_BITS = 2
"""Number of bits below the id of a token."""
LEARNT_MARK = 1
"""Marks a token whose label counts."""
FIRST_MARK = 2
"""Marks the first token of a document."""

WINDOW_ROWS = 128
"""Least rows that a window of conversations fills. In a stream its last row is half empty on average: 0.4 %."""

SHOWN_CHARACTERS = 40
"""Characters by which an error names a text."""

BYTES_PER_TOKEN = 4
"""Assumed bytes of text for each token, to guess the tokens of a window before it is tokenised."""


class Packer:
    """Packs documents, and returns marked tokens in consecutive pieces.

    Attributes:
        num_documents: documents that were tokenised.
        understands_nothing: whether all tokens so far are special or unknown ones.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        bad: BadRecords,
        unknown: UnknownTokens = NONE_UNKNOWN,
    ) -> None:
        """Begin with an empty row.

        Args:
            config: how documents become rows.
            tokenizer: the tokenizer.
            bad: collects conversations that the chat template refuses, and documents that spell an unknown token.
            unknown: the tokens for which the model has no embeddings.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._bad = bad
        self._unknown = unknown
        self.num_documents = 0
        self.understands_nothing = True
        self._row = config.sequence_length
        self._left = self._row
        """Tokens that still fit into the current row."""
        self._window: list[Conversation] = []
        """Conversations that are not packed yet."""
        self._window_bytes = 0
        self._empty = find_special_tokens(tokenizer)
        self._carried_over: list[NDArray[np.int64]] = []
        """The pieces of the emptiest row of a window, which are packed with the next window."""

    def add(self, document: str | Conversation) -> Iterator[NDArray[np.int64]]:
        """Add a document, and yield the tokens that are ready: none, its own, or those of a window."""
        if self._config.is_apart and isinstance(document, Conversation):
            self._window.append(document)
            self._window_bytes += document.num_bytes
            if is_window(self._config, len(self._window), self._window_bytes):
                yield from self._pack_window(carries_over=True)
            return

        # A text is not packed, so the conversations before it have to be packed now.
        yield from self._pack_window(carries_over=False)
        first = FIRST_MARK
        for piece in self._mark_tokens(document):
            if len(piece):
                piece[0] |= first
                first = 0

            # A piece may be several rows long.
            taken = self._row - self._left + len(piece)
            self._left = self._row - taken % self._row
            yield piece

    def finish(self) -> Iterator[NDArray[np.int64]]:
        """Yield all remaining tokens, and the padding of the last row if documents are apart.

        More documents may follow, which begin in a new row.

        Raises:
            DataError: the tokenizer has made nothing but special and unknown tokens so far.
        """
        yield from self._pack_window(carries_over=False)
        yield from self._end_row()
        self.check()

    def check(self) -> None:
        """Refuse texts that the tokenizer does not understand.

        Raises:
            DataError: it has made nothing but special and unknown tokens so far.
        """
        if self.num_documents and self.understands_nothing:
            raise DataError(
                f"the tokenizer {self._tokenizer.name_or_path} makes nothing but special and unknown tokens of the "
                f"{self.num_documents:,} texts. {TOKENIZER_REMEDY}"
            )

    def _pack_window(self, *, carries_over: bool) -> Iterator[NDArray[np.int64]]:
        """Yield whole rows of the conversations that are not packed yet.

        Args:
            carries_over: keep the pieces of the emptiest row for the next window. Otherwise each window would end in a
                row that is half empty, which counts if rows are long.
        """
        if not (self._window or self._carried_over):
            return
        yield from self._end_row()

        # These come first, because they have waited longest.
        pieces = list(self._carried_over)
        for tokens in self._tokenise_chats(self._window):
            pieces += _cut(tokens, self._row)
        self._window = []
        self._window_bytes = 0
        self._carried_over = []

        sizes = [len(piece) for piece in pieces]
        rows = best_fit(sizes, self._row)
        used = [sum(sizes[number] for number in numbers) for numbers in rows]
        emptiest = min(range(len(rows)), key=used.__getitem__, default=None)

        for place, numbers in enumerate(rows):
            if carries_over and place == emptiest:
                self._carried_over = [pieces[number] for number in numbers]
                continue
            for number in numbers:
                yield pieces[number]
            self._left = self._row - used[place]
            yield from self._end_row()

    def _end_row(self) -> Iterator[NDArray[np.int64]]:
        """Yield the padding of the current row, if documents are apart."""
        is_begun = 0 < self._left < self._row
        # Each token of the padding is a document by itself, so that none is learnt from another one.
        if self._config.is_apart and is_begun:
            fill = self._tokenizer.eos_token_id << MARK_BITS | FIRST_MARK
            yield np.full(self._left, fill)
        self._left = self._row

    def _mark_tokens(self, document: str | Conversation) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of a document with their marks, in pieces."""
        if isinstance(document, Conversation):
            yield from self._tokenise_chats([document])
            return
        pieces = _tokens(document, self._config, self._tokenizer)
        if self._unknown.names:
            # All of it is looked at before any of it is packed, so that it can be left out.
            looked_at = list(pieces)
            place = f"the text that begins with {document[:SHOWN_CHARACTERS]!r}"
            for ids in looked_at:
                if (error := self._unknown.error_of(ids, place)) is not None:
                    self._bad.leave_out(error)
                    return
            pieces = iter(looked_at)

        self.num_documents += 1
        for ids in pieces:
            self._look_at(ids)
            yield ids << MARK_BITS | LEARNT_MARK

        # The end of a text is learnt too.
        end = self._tokenizer.eos_token_id << MARK_BITS | LEARNT_MARK
        yield np.asarray([end])

    def _tokenise_chats(self, conversations: Sequence[Conversation]) -> Iterator[NDArray[np.int64]]:
        """Yield the marked tokens of each conversation, unless it is left out."""
        for ids, learnt in tokenise_chats(conversations, self._tokenizer, self._bad, self._unknown):
            self.num_documents += 1
            self._look_at(ids)
            marks = np.where(learnt, LEARNT_MARK, 0)
            yield ids << MARK_BITS | marks

    def _look_at(self, ids: NDArray[np.int64]) -> None:
        """Take note of whether the tokenizer understands anything of a text."""
        # Once it has, nothing is compared any more.
        self.understands_nothing = self.understands_nothing and bool(np.isin(ids, self._empty).all())


def is_window(config: DataConfig, count: int, num_bytes: int | None) -> bool:
    """Return whether documents are enough for a window: `data.window_rows`, and enough bytes if they stay whole.

    Args:
        config: has the length of a row.
        count: number of documents.
        num_bytes: bytes of the conversations; None: they do not stay whole.
    """
    least = WINDOW_ROWS * config.sequence_length * BYTES_PER_TOKEN
    return count >= config.window_rows and (num_bytes is None or num_bytes >= least)


def best_fit(sizes: Sequence[int], row: int) -> list[list[int]]:
    """Return the pieces of each row by best-fit decreasing: the longest first, each into the fullest row with room.

    Rows are in the order of their first pieces, so that long pieces do not come first.

    Args:
        sizes: sizes of the pieces, none above `row`.
        row: size of a row.
    """
    rows: list[list[int]] = []

    # The room left and the number of each row, the least room first.
    rooms: list[tuple[int, int]] = []
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        size = sizes[piece]

        # Rooms are sorted, so the first one that is large enough is the smallest such one.
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
    """Yield pieces of at most a row. Each is a document by itself."""
    for start in range(0, len(tokens), row):
        piece = tokens[start : start + row]
        # No row sees the row before it.
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
