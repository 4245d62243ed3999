"""Computes bf16 products on CPUs that have no bf16 instructions.

On such CPUs a library's bf16 product runs at a quarter of its fp32 speed. This mode multiplies the same numbers in fp32
and rounds the result once to bf16, as bf16 hardware does up to the order of the fp32 sums. It is a numeric choice that
follows from the machine, the same for every placement and activation policy. `UnitModel` enters it around each forward
and backward of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDED_RESULTS: dict[Callable[..., Any], tuple[int, ...]] = {
    torch.ops.aten.mm.default: (0,),
    torch.ops.aten.addmm.default: (0,),
    torch.ops.aten.bmm.default: (0,),
    torch.ops.aten.baddbmm.default: (0,),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2),
}
"""The operators, and the positions of the results that are rounded. Attention's log-sum-exp is fp32 anyway."""


class Fp32Products(TorchDispatchMode):
    """A dispatch mode that computes bf16 matrix products and attention on the CPU in fp32 and rounds them once."""

    def __init__(self) -> None:
        """Create the mode, which is active as a context manager."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator takes and gives
        """Run products in fp32, and everything else unchanged."""
        kwargs = kwargs or {}
        if func not in _ROUNDED_RESULTS or args[0].dtype is not torch.bfloat16:
            return func(*args, **kwargs)

        results = _widely(func, args, kwargs)
        if torch.is_tensor(results):
            return results.to(torch.bfloat16)

        # Attention has several results, of which the log-sum-exp stays in fp32.
        rounded = list(results)
        for place in _ROUNDED_RESULTS[func]:
            rounded[place] = rounded[place].to(torch.bfloat16)
        return tuple(rounded)


def _widely(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run an operator on fp32 copies, which are freed before its results are copied."""
    wide_args = [_widen(value) for value in args]
    wide_kwargs = {name: _widen(value) for name, value in kwargs.items()}
    return func(*wide_args, **wide_kwargs)


def _widen(value: Any) -> Any:  # noqa: ANN401
    is_bf16 = torch.is_tensor(value) and value.dtype is torch.bfloat16
    return value.float() if is_bf16 else value
