"""Reads back small results of compute on the host, while copies go on.

CUDA makes all copies from a GPU in the order in which they were enqueued, whatever their streams. A small one that is
enqueued behind compute therefore holds up every gradient and activation that wants to leave after it. So the host waits
for compute first, and enqueues its copy then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatier.host_wait import HOST_WAIT


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in RAM once the current stream has made it. Other copies from its GPU go on meanwhile."""
    if tensor.is_cuda:
        with HOST_WAIT:
            torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()
