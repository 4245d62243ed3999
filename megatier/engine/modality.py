"""Tells batches of text alone from those with pixels, which use other units of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

PIXELS = "pixel_values"
"""Begins the names of all that transformers' models take as pixels, of images and of videos."""


def is_text(batch: Mapping[str, object]) -> bool:
    """Return whether a batch surely has no pixels, nor anything else that a tower could take.

    Args:
        batch: the arguments of a model's forward, by name.
    """
    for name, value in batch.items():
        # What a tower takes is a tensor of numbers that are not whole, or something with tensors in it.
        if torch.is_tensor(value):
            is_plain = not (value.is_floating_point() or value.is_complex() or name.startswith(PIXELS))
        else:
            is_plain = value is None or isinstance(value, bool | int | float | str)
        if not is_plain:
            return False
    return True


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
