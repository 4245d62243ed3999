"""Addresses of tensors for native code, checked before it gets them.

C code reads and writes as many bytes as its caller says, of the type that it was written for. A tensor of another
dtype, with gaps, too short or on another device would be read as noise, or memory beside it overwritten. So code that
hands out an address says here what the code will take it for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatier import _native
from megatier.errors import AddressError


def address_of(tensor: Tensor, dtype: torch.dtype, num_elements: int) -> int:
    """Return the address of a tensor in RAM for native code.

    Args:
        tensor: a tensor of this dtype, or of plain bytes (uint8) that hold such numbers.
        dtype: of the elements that the code reads or writes.
        num_elements: how many of them it reads or writes, from the first one on.

    Raises:
        AddressError: the tensor is another one than the code takes.
    """
    # Counted by bytes, because plain bytes may hold the numbers.
    num_present = tensor.nbytes // dtype.itemsize
    if tensor.dtype not in (dtype, torch.uint8):
        raise AddressError(f"is {tensor.dtype}", f"{dtype}")
    if not tensor.is_cpu:
        raise AddressError(f"lies on {tensor.device}", "memory of the CPU")
    if not tensor.is_contiguous():
        raise AddressError(f"has strides {tensor.stride()}", "elements without gaps")
    if num_present < num_elements:
        raise AddressError(f"holds {num_present} elements of {dtype}", f"{num_elements}")
    return tensor.data_ptr()


def fill_bytes(tensor: Tensor, byte: int) -> None:
    """Overwrite each byte of uint8 [n], which lies in RAM, without the GIL."""
    _native.fill(address_of(tensor, torch.uint8, tensor.numel()), byte, tensor.numel())


__all__ = ["address_of", "fill_bytes"]
