"""Tokenises a dataset into two files of plain integers, one to train on and one held out.

This happens before a run begins. `packed_text` reads the files, and `token_note` says whether they still hold.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatier.config.data_section import DataConfig
from megatier.data.holdout import split_documents
from megatier.data.packer import FIRST_MARK, LEARNT_MARK, MARK_BITS, Packer
from megatier.data.records import BadRecords
from megatier.data.token_note import Content, read_or_make
from megatier.data.token_range import TokenRange
from megatier.data.tokenizer import vocabulary_size
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.files import create_file

TOKEN_FILES = "train.tokens", "holdout.tokens"
"""Names of the files of tokens: to train on, and held out."""


def tokenise(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None] = lambda _: None,
    unknown: UnknownTokens = NONE_UNKNOWN,
) -> tuple[TokenRange, TokenRange, str | None]:
    """Tokenise the dataset into two files, to train on and held out; of a stream, what is held out alone.

    Files that are there already are used if `tokens.json` has the same settings and checksums.

    Returns:
        The tokens to train on, the held-out tokens, and the damaged file, if that is why they were made again.

    Raises:
        DataError: a path is missing, a line is malformed, there is no text or no room for the files, or something else
            is in their place.
    """
    # A token's marks lie below its id, so 16 bits are enough for an id of 14.
    is_small = vocabulary_size(tokenizer) <= 1 << (16 - MARK_BITS)
    dtype: np.dtype[np.unsignedinteger] = np.dtype(np.uint16 if is_small else np.uint32)
    settings = describe_settings(config, tokenizer)
    make = partial(_write_tokens, config, tokenizer, dtype, directory, bad, progress, unknown)
    contents, damaged = read_or_make(directory, settings, TOKEN_FILES, make)
    train, held_out = (
        TokenRange(
            path=directory / name,
            dtype=dtype,
            start=0,
            num_tokens=content.num_bytes // dtype.itemsize,
            is_apart=config.is_apart,
            crc32=content.crc32,
            num_documents=content.num_documents,
            num_learnt=content.num_learnt,
        )
        for name, content in zip(TOKEN_FILES, contents, strict=True)
    )
    return train, held_out, damaged


def describe_settings(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return everything that the tokens follow from, but for the contents of files, as JSON."""
    settings = dataclasses.asdict(config)
    size = vocabulary_size(tokenizer)
    settings["made_by"] = [type(tokenizer).__name__, tokenizer.name_or_path, size, tokenizer.eos_token_id]
    settings["template"] = tokenizer.chat_template

    # Versions that had no such settings left nothing out either, had no such bound, and read no images.
    for name in ("skip_bad", "max_samples", "images", "max_patches"):
        if not settings[name]:
            del settings[name]

    # Documents that are laid end to end give the same tokens for any length of a row.
    if not config.is_apart:
        settings["sequence_length"] = None
    return json.dumps(settings, sort_keys=True)


def _write_tokens(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype[Any],
    directory: Path,
    bad: BadRecords,
    progress: Callable[[int], None],
    unknown: UnknownTokens,
) -> list[Content]:
    """Tokenise into two files, which get their names when both are whole and on the drive; return what is in each."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.partial" for name in TOKEN_FILES]
    with create_file(paths[0]) as to_train, create_file(paths[1]) as to_held_out:
        # A packer each, since a row is of one of the two files.
        writers = []
        for file in (to_train, to_held_out):
            packer = Packer(config, tokenizer, bad, unknown)
            writers.append(_TokenWriter(file, dtype, packer, config.is_apart))

        for is_for_evaluation, document in split_documents(config, bad):
            # False is 0 and True is 1, in the order of `TOKEN_FILES`.
            writer = writers[is_for_evaluation]
            num_tokens = writer.write(writer.packer.add(document))
            progress(num_tokens)
        for writer in writers:
            writer.write(writer.packer.finish())
            writer.file.flush()
            os.fsync(writer.file.fileno())

    # The folder is not synced. If a power failure undoes a name, the note is missing or its checksums do not fit, and
    # the text is tokenised again.
    for path, name in zip(paths, TOKEN_FILES, strict=True):
        path.rename(directory / name)
    return [Content(w.num_bytes, w.crc32, w.packer.num_documents, w.num_learnt) for w in writers]


@dataclass(slots=True)
class _TokenWriter:
    """One of the files, and what was written to it."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    packer: Packer
    is_apart: bool
    num_bytes: int = 0
    crc32: int = 0
    num_learnt: int = 0

    def write(self, pieces: Iterable[NDArray[np.int64]]) -> int:
        """Append marked tokens; return their number."""
        count = 0
        for piece in pieces:
            count += len(piece)

            # The first token of a document that is apart has nothing before it from which it could be told.
            marks = LEARNT_MARK | FIRST_MARK if self.is_apart else LEARNT_MARK
            is_learnt = piece & marks == LEARNT_MARK
            self.num_learnt += int(np.count_nonzero(is_learnt))
            raw = piece.astype(self.dtype).tobytes()
            self.file.write(raw)
            self.num_bytes += len(raw)
            self.crc32 = zlib.crc32(raw, self.crc32)
        return count
