"""Decides which documents are held out for evaluation, so that nothing is trained on them."""

from __future__ import annotations

from collections.abc import Iterator

from megatier.config.data_section import DataConfig
from megatier.data import hub
from megatier.data.conversation import Conversation
from megatier.data.records import BadRecords
from megatier.data.shuffle import hash_numbers
from megatier.data.text import read_documents, read_numbered_documents, read_rows


def split_documents(config: DataConfig, bad: BadRecords) -> Iterator[tuple[bool, str | Conversation]]:
    """Yield whether a document is held out, and the document; of a stream, those that are held out.

    Raises:
        DataError: as `read_numbered_documents` and `read_rows`.
    """
    split = config.holdout_split
    if config.streaming:
        # A stream has no known end, so its first rows are held out.
        split = split or config.split
        dataset, _ = hub.stream(config, split)
        rows = read_rows(config, split, dataset.take(config.holdout_rows), bad)
        yield from ((True, document) for document in rows if document)
        return

    count = 0
    for number, document in read_numbered_documents(config, bad=bad):
        held_out = split is None and is_held_out(number, config.holdout_fraction, config.seed)

        # A file that is named several times is trained on as often, and what is held out of it is evaluated once.
        if not held_out or number >= count:
            yield held_out, document
        count = max(count, number + 1)
    if split is not None:
        yield from ((True, document) for document in read_documents(config, split, bad))


def is_held_out(number: int, fraction: float, seed: int) -> bool:
    """Return whether a document is for evaluation: each 1 / fraction-th one, beginning at one that the seed chooses.

    Out of n documents n * fraction are chosen, rounded up or down. This needs no count of documents beforehand.
    """
    # The product of number and fraction grows by 1 at most with each document. A document is held out if a whole
    # number is passed with it, which happens evenly; the phase moves these points by a part of their distance.
    phase = hash_numbers((seed,)) / 2**64
    return int((number + 1) * fraction + phase) > int(number * fraction + phase)
