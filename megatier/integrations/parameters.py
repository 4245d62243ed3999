"""What TieredAdamW asks of parameters, and the order in which it takes their elements: that of memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from megatier.errors import OptimizerError


class Form(NamedTuple):
    """What of a parameter the state depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_parameters(parameters: Collection[Tensor]) -> None:
    """Refuse parameters that cannot be taken.

    Raises:
        OptimizerError: one is not bf16 or fp32, no plain dense tensor, or elsewhere than the others.
    """
    for parameter in parameters:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            what, remedy = f"is {parameter.dtype}", "Convert it to bfloat16 or float32"
        elif type(parameter.detach()) is not Tensor or parameter.layout is not torch.strided:
            what, remedy = f"is a {type(parameter.detach()).__name__}", "Use plain dense tensors"
        elif torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            what, remedy = f"has strides {parameter.stride()}, with gaps or overlaps", "Make it contiguous"
        else:
            continue
        raise OptimizerError(f"a parameter of shape {tuple(parameter.shape)} {what}. {remedy}, or leave it out.")
    devices = {parameter.device for parameter in parameters}
    taken = {torch.device("cpu")}
    if any(device.type == "cuda" for device in devices):
        taken.add(torch.device("cuda", torch.cuda.current_device()))
    if len(devices) > 1 or devices - taken:
        names = ", ".join(sorted(map(str, devices)))
        raise OptimizerError(
            f"parameters lie on {names}. Use one TieredAdamW a device, and torch.cuda.set_device before a GPU's."
        )


def form_of(parameter: Tensor) -> Form:
    """What its state depends on, as it is now."""
    return Form(parameter.shape, parameter.stride(), parameter.dtype, parameter.device)


def in_order(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the parameter's shape, flat [n], in the order in which the parameter's elements lie in memory.

    A view where the tensor's lie so too.
    """
    if tensor.stride() != parameter.stride():
        size, stride = parameter.size(), parameter.stride()
        tensor = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))
