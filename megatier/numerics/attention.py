"""Attention's kernels as operators, and a forward that is run again without them.

A kernel's backward needs its output and log-sum-exp. Both are small, and attention over long sequences is most of a
step. So they may stay from the forward to the backward (`KeptAttention`), though the rest of the layer is computed
again there. What the kernel gave is then put in the place of the kernel, so it has the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FLEX = torch.ops.higher_order.flex_attention
"""Flex attention as an operator of a compiled graph."""
KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What `scaled_dot_product_attention` runs. Without one of them it is a chain of products, of which nothing is kept."""


def is_attention(target: object) -> bool:
    """Whether an operator is a kernel of attention."""
    return target is FLEX or target in KERNELS


class KeptAttention:
    """What the attention of one forward gave, to run the same forward again without it.

    Kernels that draw random numbers run again: those after them would draw others if they did not.
    """

    def __init__(self) -> None:
        """Nothing has run yet."""
        self._results: list[tuple[Any, ...]] = []

    def noting(self) -> AbstractContextManager[object]:
        """Run the forward inside."""
        return _Around(self._note)

    def replace(self, function: Callable[[Any], Any]) -> None:
        """Put what a function makes of each result in its place. Before `replaying` the results are as they were."""
        self._results = [tuple(map(function, results)) for results in self._results]

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Run the forward again inside, once. The kernels of attention give what they gave."""
        self._results.reverse()
        with _Around(self._replay):
            yield

    def _note(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        results = kernel(*args, **kwargs)

        # Detached, because a result holds its graph, which has to go. Nobody changes a result in place: the kernel's
        # backward needs it as it is.
        self._results.append(tuple(x.detach() if torch.is_tensor(x) else x for x in results))
        return results

    def _replay(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        return self._results.pop()


class _Around(TorchDispatchMode):
    """A mode in which something else runs around the kernels of attention."""

    def __init__(self, around: Callable[..., Any]) -> None:
        """Say what runs, with the kernel and its arguments."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as PyTorch has it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, which gives what it would give without the mode."""
        kwargs = kwargs or {}
        if func not in KERNELS or _draws(func, args, kwargs):
            return func(*args, **kwargs)
        return self._around(func, args, kwargs)


def _draws(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:  # noqa: ANN401 - an operator
    """Whether a kernel is called with dropout."""
    names = [argument.name for argument in kernel._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))
