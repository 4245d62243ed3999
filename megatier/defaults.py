"""torch's default dtype, device and mode, which a user may have changed for the whole process.

megatier always names dtype and device. But opening a model runs code of transformers and PEFT, which sometimes does
not, so that for example a rotary table would be rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def usual_defaults() -> Iterator[None]:
    """Make tensors as in a fresh process: in fp32, on the CPU, and outside of inference mode.

    The user's defaults are restored afterwards. It can be used as a decorator too.
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
