"""Looks at the first conversations with images of a run, for plans: how many images and pixels they have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatier.compute.modality import is_pixels
from megatier.config.schema import RunConfig
from megatier.data.conversation import Conversation
from megatier.data.holdout import split_documents
from megatier.data.image_file import decode_all
from megatier.data.image_packs import check_room
from megatier.data.image_rows import raw_images
from megatier.data.processor import load_processor
from megatier.data.records import BadRecords
from megatier.errors import DataError

SAMPLED = 32
"""Conversations that are looked at. Each takes about 20 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """What the first conversations of a run have of images."""

    columns: Mapping[str, Tensor]
    """What the model takes of the conversation with most pixels, one row without padding, but for labels."""
    pixel_bytes: int
    """Bytes of its pixels."""
    mean_tokens: float = 0.0
    """Tokens of a conversation, on the mean."""
    mean_pixel_bytes: float
    """Bytes of pixels of a conversation, on the mean."""
    mean_images: float
    """Images of a conversation, on the mean."""


def sample_images(config: RunConfig) -> ImageSample | None:
    """Return what the first conversations of a run's files have of images; None if they have none.

    Args:
        config: a run with `data.images`.

    Raises:
        DataError: there is no file or no processor, the data is a dataset of the hub, a record is bad and not to be
            left out, or all records with images are.
    """
    # A dataset of the hub would be downloaded for it.
    if config.data.dataset is not None:
        raise DataError("data.dataset is read by the run alone.")
    processor = load_processor(config)
    sizes = list[int]()
    num_images = 0
    num_tokens = 0
    largest: Mapping[str, Tensor] = {}
    bad = BadRecords(skips=config.data.skip_bad)
    bad_record: DataError | None = None
    for _, document in itertools.islice(split_documents(config.data, bad), SAMPLED):
        if not isinstance(document, Conversation):
            continue
        try:
            images = decode_all([raw for _, raw in raw_images(document)], document.place)
            text, ids, _, num_patches = processor.tokenise(document, images)
            check_room(len(ids), num_patches, len(images), config.data, document.place)
            columns = processor.columns([text], [images], len(ids), document.place)
        except DataError as error:
            bad.leave_out(error)
            bad_record = bad_record or error
            continue
        size = _pixel_bytes(columns)
        if size > max(sizes, default=0):
            largest = columns
        sizes.append(size)
        num_images += len(images)
        num_tokens += len(ids)
    if not any(sizes):
        # Of texts alone nothing would be counted, though the run may find images further on.
        if bad_record is not None:
            raise bad_record
        return None
    return ImageSample(
        columns=largest,
        pixel_bytes=max(sizes),
        mean_pixel_bytes=sum(sizes) / len(sizes),
        mean_images=num_images / len(sizes),
        mean_tokens=num_tokens / len(sizes),
    )


def _pixel_bytes(columns: Mapping[str, Tensor]) -> int:
    """Return the bytes of the pixels among what a model takes."""
    return sum(column.nbytes for name, column in columns.items() if is_pixels(name, column))
