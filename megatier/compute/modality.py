"""Tells batches of text from those with pixels, which use other units of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

PIXELS = "pixel_values"
"""The prefix of all arguments that transformers' models take as pixels of images and videos."""


def is_pixels(name: str, tensor: Tensor) -> bool:
    """Return whether an argument of a model's forward may be pixels, since its numbers are not integers."""
    return name.startswith(PIXELS) or tensor.is_floating_point() or tensor.is_complex()


def is_text(batch: Mapping[str, object]) -> bool:
    """Return whether a batch certainly has no pixels, nor anything else for a tower.

    Args:
        batch: the arguments of a model's forward, by name.
    """
    for name, value in batch.items():
        # Anything but a tensor or a plain value may contain tensors.
        if isinstance(value, Tensor):
            if is_pixels(name, value):
                return False
        elif not (value is None or isinstance(value, bool | int | float | str)):
            return False
    return True


def num_images(batch: Mapping[str, Tensor]) -> int:
    """Return the number of images, or pieces of images, in a processor's batch."""
    # For models with variable image sizes, each row of the grid describes an image.
    if "image_grid_thw" in batch:
        return len(batch["image_grid_thw"])
    pixels = batch.get(PIXELS)
    return 0 if pixels is None else len(pixels)


def evaluation_name(*batches: Mapping[str, object]) -> str:
    """Return the name of evaluations that use the same units: each kind of pixels has its own order of units.

    Args:
        batches: the batches that are evaluated together, on all ranks.
    """
    sees = {name for batch in batches for name in _pixels_of(batch)}
    return " ".join(["evaluate", *sorted(sees)])


def _pixels_of(batch: Mapping[str, object]) -> Iterable[str]:
    """Return the names of a batch's pixels."""
    return (name for name, value in batch.items() if name.startswith(PIXELS) and value is not None)
