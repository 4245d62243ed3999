"""Opens a model's own processor, which makes pixels and tokens of conversations with images.

A conversation is rendered by the chat template, as texts are (`template`). The processor then takes the text with its
images: it writes as many tokens of an image as the model wants for it, and makes the pixels. Which of these tokens are
learnt is told by the characters that they stand for, which the processor moved, and says by how many.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from megatier.compute.modality import PIXELS
from megatier.config.data_section import PROCESSOR_FILES
from megatier.config.schema import RunConfig
from megatier.data.columns import IGNORE_INDEX
from megatier.data.conversation import Conversation
from megatier.data.template import UNLEARNT, Template, mask_ranges
from megatier.data.tokenizer import folder_of, load_tokenizer
from megatier.errors import DataError
from megatier.foreign import SETTINGS_BYTES_MAX, printable, read_object, reading

CALL: dict[str, Any] = {"add_special_tokens": False, "truncation": False, "padding_side": "right"}
"""How a processor is called. The template writes special tokens itself, and nothing is cut off in silence."""
PROCESSOR_REMEDY = "data.images needs the folder or hub id of a model with images, in model.path or data.tokenizer."


class Processor:
    """A model's processor, and the tokenizer in it."""

    def __init__(self, processor: ProcessorMixin, name: str) -> None:
        """Take a processor of transformers.

        Raises:
            DataError: it has no fast tokenizer with a token for padding, or takes no images.
        """
        self.own = processor
        """The processor itself, which an export writes."""
        self._called = copy.deepcopy(processor)
        """What is called: a call leaves its padding in a fast tokenizer, and an export must not write that."""
        self._name = f"the processor {type(processor).__name__} of {printable(name)}"
        tokenizer = getattr(processor, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase) or getattr(processor, "image_processor", None) is None:
            raise DataError(f"{self._name} does not take both texts and images. {PROCESSOR_REMEDY}")
        self.tokenizer = tokenizer
        """Its tokenizer."""
        if not tokenizer.is_fast:
            raise DataError(
                f"{self._name} does not say which characters a token has, as data.chat needs. Use a fast tokenizer, "
                "which has a tokenizer.json."
            )
        self._image_ids = [number for number in _image_ids(processor) if number is not None]
        if tokenizer.pad_token_id is None:
            raise DataError(f"{self._name} has no pad_token, which fills a sequence; set it in tokenizer_config.json.")

    @property
    def made_by(self) -> list[str]:
        """The classes of its parts. Another one may make other pixels of the same image."""
        parts = [self.own, *(getattr(self.own, name) for name in self.own.get_attributes())]
        return [type(part).__name__ for part in parts]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write its files, those of its tokenizer among them, into a folder."""
        self.own.save_pretrained(save_directory)

    def tokenise(
        self, conversation: Conversation, images: Sequence[Any]
    ) -> tuple[str, NDArray[np.int64], NDArray[np.bool_], int]:
        """Return a conversation as text, its token ids, whether each of them is learnt, and the number of its patches.

        Args:
            conversation: the conversation.
            images: its images, decoded.

        Raises:
            DataError: template or processor refuses it, or the assistant's turns cannot be told.
        """
        text, ranges = Template(conversation, self.tokenizer).rendered()
        options = {**CALL, "return_offsets_mapping": True, "return_text_replacement_offsets": True}
        encoding = self._call([text], [images], conversation.place, **options)
        ids = np.asarray(encoding["input_ids"][0], np.int64)
        spans = np.asarray(encoding["offset_mapping"][0], np.int64).reshape(-1, 2)
        replaced = (encoding.get("text_replacement_offsets") or [[]])[0]
        if len(replaced) != len(images):
            raise DataError(
                f"{conversation.place}: {self._name} does not say where it wrote the tokens of its images, so it is "
                "not known which tokens are learnt. Its model cannot be trained with data.images."
            )

        # The model would look for an image at each of these, and find one too few.
        of_images = _find_touched(spans, [image["new_span"] for image in replaced])
        if (np.isin(ids, self._image_ids) & ~of_images).any():
            raise DataError(
                f"{conversation.place}: a text spells a token that stands for an image or a video. Write it otherwise, "
                "or leave the record out."
            )

        learnt = mask_ranges(spans, _move_ranges(ranges, replaced)) & ~of_images
        if not learnt.any():
            raise DataError(f"{conversation.place}: {UNLEARNT}")
        return text, ids, learnt, len(encoding.get(PIXELS, ()))

    def columns(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], length: int, place: str
    ) -> dict[str, Tensor]:
        """Return what the model takes of some conversations, padded to the right, but for labels.

        Args:
            texts: as `tokenise` gives them.
            images: the images of each, decoded.
            length: tokens of a row.
            place: where they come from, for errors.

        Raises:
            DataError: the processor refuses them.
        """
        options = {**CALL, "padding": "max_length", "max_length": length, "return_tensors": "pt"}
        encoding = self._call(texts, images, place, **options)
        for name, value in encoding.items():
            if not isinstance(value, Tensor):
                raise DataError(f"{place}: {self._name} gives {name} as {type(value).__name__}, and not as a tensor.")
        return dict(encoding)

    def _call(
        self,
        texts: Sequence[str],
        images: Sequence[Sequence[Any]],
        place: str,
        **options: Any,  # noqa: ANN401 - transformers' own
    ) -> Mapping[str, Any]:
        """Return what the processor makes of texts and their images."""
        # None says that no text has images.
        given = None
        if any(images):
            given = list(map(list, images))

        with reading(f"{place}: {self._name} refuses the conversation", DataError):
            encoding: Any = self._called(text=list(texts), images=given, **options)
            return dict(encoding)


def load_processor(config: RunConfig) -> Processor:
    """Return the run's processor: that of `data.tokenizer`, else the model's own; with the run's chat template.

    Raises:
        DataError: there is none, or a library that it needs is missing.
    """
    name = config.data.tokenizer or config.model.path
    assert name is not None, "a run has one of them (RunConfig), and images leave out the byte tokenizer"

    # Looks at the tokenizer's files before transformers does, and takes the template that the user gave.
    tokenizer = load_tokenizer(config)
    folder = folder_of(name)
    if folder is not None:
        # Refuses what is too large or no JSON object, before transformers reads it.
        for file in PROCESSOR_FILES:
            with contextlib.suppress(FileNotFoundError):
                read_object(folder / file, SETTINGS_BYTES_MAX, DataError)
    with reading(f"no processor at {printable(name)}", DataError, remedy=PROCESSOR_REMEDY):
        loaded = AutoProcessor.from_pretrained(str(folder or name), trust_remote_code=False)

    # transformers gives the tokenizer alone where a folder has no more.
    if not isinstance(loaded, ProcessorMixin):
        raise DataError(f"no processor at {printable(name)}, but {type(loaded).__name__} alone. {PROCESSOR_REMEDY}")
    processor = Processor(loaded, name)

    # Older folders have the template with the processor alone.
    template = getattr(loaded, "chat_template", None)
    if config.data.chat_template is not None or template is None:
        template = tokenizer.chat_template
    loaded.chat_template = template
    processor.tokenizer.chat_template = template
    return processor


def load_tokens(config: RunConfig) -> tuple[PreTrainedTokenizerBase | Processor, PreTrainedTokenizerBase]:
    """Return the tokenizer of a run, or its processor if it reads images, and the tokenizer by itself.

    Raises:
        DataError: see `load_processor` and `load_tokenizer`.
    """
    if config.data.images:
        processor = load_processor(config)
        return processor, processor.tokenizer
    tokenizer = load_tokenizer(config)
    return tokenizer, tokenizer


def _image_ids(processor: ProcessorMixin) -> list[int | None]:
    """Return the tokens that stand for images, or for what else a model sees or hears, as a processor names them."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [*(getattr(processor, name, None) for name in names), *getattr(processor, "image_token_ids", ())]


def _find_touched(spans: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens have a character in one of some ranges, given the characters of each."""
    begins, ends = spans.T
    is_touched = np.zeros(len(spans), np.bool_)
    for start, stop in ranges:
        is_touched |= (begins < stop) & (ends > start)
    return is_touched


def make_labels(ids: Tensor, learnt: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return labels of rows: ids, or -100 for a token that is not learnt. The model shifts them.

    Args:
        ids: int64 [rows, length].
        learnt: of each row the ranges of tokens that are learnt.
    """
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, ranges in enumerate(learnt):
        for start, stop in ranges:
            labels[row, start:stop] = ids[row, start:stop]
    return labels


def checksum_of(ids: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the CRC32 of token ids."""
    # The same bytes on any machine, since a run may go on elsewhere.
    return zlib.crc32(np.asarray(ids, "<i8").tobytes())


def _move_ranges(ranges: Sequence[tuple[int, int]], replaced: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return ranges of characters where they are after the places of images were replaced by longer texts."""
    ends = []
    gained = [0]
    for image in replaced:
        _, end = image["span"]
        _, new_end = image["new_span"]
        ends.append(end)
        gained.append(int(new_end - end))

    def moved(character: int) -> int:
        num_before = bisect.bisect_right(ends, character)
        return character + gained[num_before]

    return [(moved(start), moved(stop)) for start, stop in ranges]
