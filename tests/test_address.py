"""Addresses for native code: of what it takes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatier.address import address_of, fill_bytes
from megatier.errors import AddressError
from megatier.optim.masters import join_master, split_master


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_address_of_what_native_code_takes_is_that_of_its_first_element(dtype: torch.dtype) -> None:
    tensor = torch.zeros(16, dtype=torch.float32).view(dtype)
    assert address_of(tensor, torch.float32, 16) == tensor.data_ptr()
    assert address_of(tensor, torch.float32, 3) == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), "is torch.bfloat16"),
        (torch.zeros(4, dtype=torch.float64), "is torch.float64"),
        (torch.zeros(4, device="meta"), "lies on meta"),
        (torch.zeros(4, 2)[:, 0], "has strides"),
        (torch.zeros(3), "holds 3 elements"),
        (torch.zeros(15, dtype=torch.uint8), "holds 3 elements"),
    ],
)
def test_address_of_anything_else_is_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(AddressError, match=words):
        address_of(tensor, torch.float32, 4)


def test_masters_of_another_dtype_are_refused_and_nothing_is_written() -> None:
    weight, remainder = torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int16)
    with pytest.raises(AddressError, match=r"torch.bfloat16, and takes torch.float32"):
        split_master(torch.zeros(4, dtype=torch.bfloat16), weight, remainder)
    with pytest.raises(AddressError, match="holds 2 elements"):
        join_master(weight, remainder, torch.zeros(2))
    assert bool((weight == 1).all())


def test_fill_overwrites_bytes() -> None:
    tensor = torch.zeros(5, dtype=torch.uint8)
    fill_bytes(tensor, 9)
    assert tensor.tolist() == [9] * 5
