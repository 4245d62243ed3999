"""Finds the images that a record names, and puts their places into its messages.

A message says where an image stands by a part of its content, such as OpenAI's or Hugging Face's, or by the mark
`<image>` in its text, as LLaMA-Factory and LLaVA have it. The part may hold the image itself, or name it. What parts
and marks leave open is taken in order from the record's list of images.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from megatier.errors import DataError
from megatier.foreign import quoted

MARK = "<image>"
"""Stands in a text for an image of the record's list."""

ImageSource = str | bytes
"""The path of an image, or the bytes of its file."""

IMAGE_KEYS = ("images", "image")
"""Keys under which records have their images, if no `dataset_info.json` names another one."""
IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images."""
PART_IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
"""Keys under which such a part holds or names its image; the first that is there counts."""
IMAGE_PLACE = {"type": "image"}
"""An image's place, as chat templates take it."""


def holds_image(part: object) -> bool:
    """Return whether a part of a content is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES


def text_of(content: object) -> str:
    """Return what a content says: a text as it is, or the texts of its parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def parts_of(content: object, place: str) -> list[dict[str, Any]]:
    """Return a content as parts, each a text or an image.

    Raises:
        DataError: a part is neither.
    """
    given: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = []
    for part in given:
        # A table gives each part the keys of all parts, with None for those that it does not have.
        plain_part: dict[str, Any] = {}
        if isinstance(part, dict):
            plain_part = {key: value for key, value in part.items() if value is not None}
        is_text = plain_part.get("type") == "text" and isinstance(plain_part.get("text"), str)
        if not is_text and not holds_image(plain_part):
            raise DataError(
                f"{place}: a part of a turn is {quoted(part)}; parts of the types text, image and image_url are read."
            )
        if is_text:
            # JSON can spell half of a surrogate pair, for which UTF-8 has no bytes.
            text = plain_part["text"].encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
            plain_part = {"type": "text", "text": text}
        parts.append(plain_part)
    return parts


def place_images(
    messages: Sequence[dict[str, Any]], given: object, place: str
) -> tuple[list[dict[str, Any]], tuple[ImageSource, ...]]:
    """Return messages in which each image is a part of its own, and the images in that order.

    Args:
        messages: their contents are texts, or parts as `parts_of` gives them.
        given: what the record has beside its messages: a list of images, one image, or nothing.
        place: the place of the record, for errors.

    Raises:
        DataError: the places and the images are not as many, or an image is none.
    """
    listed = given if isinstance(given, list) else [] if given is None else [given]
    left = iter(listed)
    images = list[ImageSource]()
    placed = []
    num_open = 0
    for message in messages:
        if "content" not in message:
            placed.append(message)
            continue
        parts = []
        for part in _split(message["content"], has_marks=bool(listed)):
            if not holds_image(part):
                parts.append(part)
                continue
            parts.append(dict(IMAGE_PLACE))
            image = _own(part)
            if image is None:
                num_open += 1

                # Not an error yet: the counts are compared below, where the message has both.
                image = next(left, None)
            if image is not None:
                images.append(find_source(image, place))
        placed.append({**message, "content": parts})

    if num_open != len(listed):
        raise DataError(
            f"{place}: the record lists {len(listed)} images, and its turns have {num_open} places for them ({MARK}, "
            "or parts of the type image). Give each image a place, or leave the record out."
        )
    return placed, tuple(images)


def find_source(value: object, place: str) -> ImageSource:
    """Return the path or the bytes that a record gives for an image.

    Raises:
        DataError: it is neither, or lies on the network.
    """
    if isinstance(value, dict):
        # As `datasets` stores an image, or as OpenAI nests an address.
        inner = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)

        # One level alone: a hostile record could nest without end.
        if inner is not None and not isinstance(inner, dict):
            return find_source(inner, place)
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: an image is {quoted(value)}, neither a path nor the bytes of a file.")

    scheme, mark, rest = value.partition(":")
    if mark and scheme == "data":
        return _data_of(rest, place)
    if value.startswith(("http://", "https://")):
        raise DataError(
            f"{place}: the image {quoted(value)} lies on the network, and megatier downloads none. Download it, and "
            "give its path."
        )
    return value.removeprefix("file://")


def _split(content: object, *, has_marks: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content, with an image instead of each mark if the record lists images."""
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        # In a record that lists no images the mark is a text like any other.
        if part.get("type") != "text" or not has_marks:
            yield part
            continue
        first, *others = part["text"].split(MARK)

        # A part without a mark stays even if it is empty: a turn may say nothing.
        if first or not others:
            yield {"type": "text", "text": first}
        for text in others:
            yield dict(IMAGE_PLACE)
            if text:
                yield {"type": "text", "text": text}


def _own(part: dict[str, Any]) -> object:
    """Return what a part holds or names as its image; None: it is a place alone."""
    if "base64" in part:
        return f"data:;base64,{part['base64']}"
    return next((part[key] for key in PART_IMAGE_KEYS if key in part), None)


def _data_of(rest: str, place: str) -> bytes:
    """Return the bytes of a `data:` address, given what follows its scheme."""
    head, _, body = rest.partition(",")
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{place}: an image is no valid base64: {error}.") from error
    if not content:
        raise DataError(f"{place}: an image is a data address without bytes.")
    return content
