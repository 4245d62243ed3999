"""The dtypes in which a model computes: those that `from_pretrained` gives its buffers and parameters.

MiniMax multiplies activations with its buffers. Routers of ERNIE 4.5 and convolutions of Inkling 2 compute in fp32
even if all other weights are in bf16.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel


def place_buffers(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move a skeleton's buffers to the device, in the dtypes that they compute in if the weights have this dtype."""
    dtypes = buffer_dtypes(model, dtype)
    for name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device, dtypes.get(f"{name}.{leaf}".lstrip("."), buffer.dtype))


def buffer_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every buffer, by its name, in a model that `from_pretrained` loads in a dtype.

    A constructor that names no dtype takes that one; what the model's class keeps in fp32 stays so if it is stored.

    Args:
        model: a skeleton; its class makes another one on meta.
        dtype: of the compute copy of weights.
    """
    # Built once more in the dtype itself, because only the constructor knows which buffers follow it.
    with torch.device("meta"):
        other = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    stored = model.state_dict(keep_vars=True)
    in_fp32 = names_in_fp32(model, stored)
    return {
        name: torch.float32 if buffer.dtype is dtype and name in in_fp32 else buffer.dtype
        for name, buffer in other.named_buffers(remove_duplicate=False)
    }


def names_in_fp32(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return those of some stored tensors' names that the model's class keeps in fp32 if weights are in bf16."""
    patterns = [pattern.replace("*", ".*") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    return frozenset(name for name in names if any(re.search(pattern, name) for pattern in patterns))
