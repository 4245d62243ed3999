"""Defaults: what torch makes where nobody says it, which a user may have changed for the whole process.

What we make ourselves names its dtype and its device. But opening a model runs the code of transformers and PEFT, which
leaves them out in places; a rotary table would be rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Make tensors as in a fresh process for a while: fp32, on the CPU, and not for inference alone.

    The user's own choices hold again outside. As a decorator it is around each call of a function.
    """
    # torch has contexts for the other two, and none for this one.
    before = torch.get_default_dtype()
    with torch.device("cpu"), torch.inference_mode(mode=False):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


__all__ = ["usual_defaults"]
