"""Tells batches of text alone from those with pixels, which use other units of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

PIXELS = "pixel_values"
"""Begins the names of all that transformers' models take as pixels, of images and of videos."""


def is_pixels(name: str, tensor: Tensor) -> bool:
    """Return whether an argument of a model's forward is what a tower could take: numbers that are not whole."""
    return name.startswith(PIXELS) or tensor.is_floating_point() or tensor.is_complex()


def is_text(batch: Mapping[str, object]) -> bool:
    """Return whether a batch surely has no pixels, nor anything else that a tower could take.

    Args:
        batch: the arguments of a model's forward, by name.
    """
    for name, value in batch.items():
        # Anything but a tensor and a plain value may have tensors in it.
        if isinstance(value, Tensor):
            if is_pixels(name, value):
                return False
        elif not (value is None or isinstance(value, bool | int | float | str)):
            return False
    return True


def num_images(batch: Mapping[str, Tensor]) -> int:
    """Return the number of images, and of pieces of images, that a processor has put into a batch."""
    # Of models whose images have any number of patches, a row of the grid describes an image.
    if "image_grid_thw" in batch:
        return len(batch["image_grid_thw"])
    pixels = batch.get(PIXELS)
    return 0 if pixels is None else len(pixels)


def evaluation_name(*batches: Mapping[str, object]) -> str:
    """Return the name that all evaluations share which use the same units: each kind of pixels has an order of its own.

    Args:
        batches: what is evaluated at once, on all ranks.
    """
    sees = {name for batch in batches for name in _pixels_of(batch)}
    return " ".join(["evaluate", *sorted(sees)])


def _pixels_of(batch: Mapping[str, object]) -> Iterable[str]:
    """Return the names of a batch's pixels."""
    return (name for name, value in batch.items() if name.startswith(PIXELS) and value is not None)
