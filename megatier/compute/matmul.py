"""Computes bf16 products on CPUs that have no bf16 instructions.

There, a library's bf16 product runs at a quarter of its fp32 speed. This mode takes the product of the same numbers in
fp32 and rounds the result once to bf16: what bf16 hardware does, up to the order of the fp32 sums. It is a numeric
choice that follows from the machine, the same for every placement and activation policy.
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
"""The operators, and the places of those results that are rounded. Attention's second result is the log-sum-exp, which
is fp32 anyhow."""


class Fp32Products(TorchDispatchMode):
    """A mode in which bf16 matrix products and attention on the CPU are taken in fp32 and rounded once."""

    def __init__(self) -> None:
        """Make the mode. It is active while it is entered as a context."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator takes and gives
        """Run products in fp32, and everything else as it is."""
        kwargs = kwargs or {}
        if func not in _ROUNDED_RESULTS or args[0].dtype is not torch.bfloat16:
            return func(*args, **kwargs)

        results = _widely(func, args, kwargs)
        if torch.is_tensor(results):
            return results.to(torch.bfloat16)

        # Attention has several results, and its log-sum-exp stays as it is.
        rounded = list(results)
        for place in _ROUNDED_RESULTS[func]:
            rounded[place] = rounded[place].to(torch.bfloat16)
        return tuple(rounded)


def _widely(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run an operator on fp32 copies, which are gone when this returns, before its results are copied in turn."""
    wide_args = [_widen(value) for value in args]
    wide_kwargs = {name: _widen(value) for name, value in kwargs.items()}
    return func(*wide_args, **wide_kwargs)


def _widen(value: Any) -> Any:  # noqa: ANN401
    is_bf16 = torch.is_tensor(value) and value.dtype is torch.bfloat16
    return value.float() if is_bf16 else value
