"""Reads of small results of compute by the host, which do not block other copies.

CUDA does all copies from a GPU in the order of enqueueing, whatever their streams. So a small copy that waits for
compute would block all gradients and activations that leave after it. To avoid that, the host first waits for compute,
and then enqueues the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatier.host_wait import HOST_WAIT


def on_host(tensor: Tensor) -> Tensor:
    """Wait until the current stream has made a tensor, and return it in RAM. Other copies go on meanwhile."""
    if tensor.is_cuda:
        with HOST_WAIT:
            torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()
