"""The parameters of a tiered optimizer: which ones it can take, and the order of their elements in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from megatier.errors import OptimizerError
from megatier.state import ADAMW, MUON, StateSchema


class Form(NamedTuple):
    """The properties of a parameter on which its state depends."""

    shape: torch.Size
    """Its shape."""
    stride: tuple[int, ...]
    """Its strides, which say the order of its elements in memory."""
    dtype: torch.dtype
    """Its dtype, which says whether it has a remainder."""
    device: torch.device
    """The device that it lies on."""


def check_parameters(parameters: Collection[Tensor], kept: str = "fp32") -> None:
    """Refuse parameters that cannot be taken; `kept` is that of `schema_of`.

    Raises:
        OptimizerError: one is not bf16 or fp32, no plain dense tensor, no matrix for Muon, or on another device than
            the others.
    """
    # The kernels get an address and a length, so the elements have to fill one piece of memory without gaps.
    for parameter in parameters:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            complaint = f"is {parameter.dtype}"
            remedy = "Convert it to bfloat16 or float32"
        elif type(parameter.detach()) is not Tensor or parameter.layout is not torch.strided:
            # A `Parameter` hides the class of what it holds, such as a DTensor, and gives it when it is detached.
            complaint = f"is a {type(parameter.detach()).__name__}"
            remedy = "Use plain dense tensors"
        elif torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            # `empty_like` takes the order of the strides over, and neither gaps nor overlaps.
            complaint = f"has strides {parameter.stride()}, with gaps or overlaps"
            remedy = "Make it contiguous"
        elif kept == "muon" and (parameter.ndim != 2 or not parameter.is_contiguous()):
            complaint = "is no contiguous matrix, which Muon needs"
            remedy = "Give it to a TieredAdamW"
        else:
            continue
        raise OptimizerError(f"a parameter of shape {tuple(parameter.shape)} {complaint}. {remedy}, or leave it out.")

    # Kernels, and slots in GPU memory, use the current device.
    devices = {parameter.device for parameter in parameters}
    taken = {torch.device("cpu")}
    if any(device.type == "cuda" for device in devices):
        taken.add(torch.device("cuda", torch.cuda.current_device()))
    if len(devices) > 1 or devices - taken:
        names = ", ".join(sorted(map(str, devices)))
        raise OptimizerError(
            f"parameters lie on {names}. Make one optimizer for each device, after torch.cuda.set_device for a GPU."
        )


def schema_of(dtype: torch.dtype, kept: str = "fp32") -> StateSchema:
    """Return the planes of a parameter of this dtype, which is its own master if it is fp32.

    Args:
        dtype: bf16 or fp32.
        kept: the state of AdamW with moments in fp32 or bf16, or that of muon.
    """
    compute = "bf16" if dtype is torch.bfloat16 else "fp32"
    return MUON[compute] if kept == "muon" else ADAMW[compute, kept]


def form_of(parameter: Tensor) -> Form:
    """Return the properties on which a parameter's state depends, as they are now."""
    return Form(parameter.shape, parameter.stride(), parameter.dtype, parameter.device)


def in_order(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor of the parameter's shape as flat [n], in the order of the parameter's elements in memory.

    Args:
        parameter: a dense tensor, whose strides say the order.
        tensor: a tensor of its shape.

    Returns:
        A view of the tensor if its elements lie in the same order, else a view of a copy.
    """
    # A gradient may come in another memory format than its parameter, such as channels last.
    if tensor.stride() != parameter.stride():
        copy = torch.empty_strided(
            parameter.size(),
            parameter.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        tensor = copy.copy_(tensor)

    # Elements fill one piece of memory without gaps (`check_parameters`), so its order is that of a flat view.
    num_elements = tensor.numel()
    return tensor.detach().as_strided((num_elements,), (1,))
