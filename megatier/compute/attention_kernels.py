"""Names the attention kernels as operators, and recomputes a forward without what its backward does not need.

An attention kernel's backward needs its output and log-sum-exp. Both are small, while attention over long sequences is
most of a step. So they can be kept from the forward to the backward (`KeptAttention`) though the rest of the layer is
recomputed. The recomputation then uses the kept results instead of running the kernel, so it has the same bits.

The result of a module at the end of a layer, such as an MLP in tiles of tokens, may only be added to something else. No
backward needs the numbers of that, so the module need not be recomputed (`LastModule`). `unit_function` uses both, on
the thread that computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatier.compute.varlen_attention import OPERATOR

FLEX = torch.ops.higher_order.flex_attention
"""Flex attention, as an operator of a compiled graph."""
KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        OPERATOR,
    }
)
"""The kernels of `scaled_dot_product_attention`, and the one over images of any sizes. Without them attention is a
chain of matrix products, of which nothing is kept."""

_aten = torch.ops.aten
PASSING_ON = frozenset(
    {
        _aten.add.Tensor,
        _aten.add_.Tensor,
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.permute.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten._to_copy.default,
        _aten._unsafe_view.default,
    }
)
"""Operators whose backward needs neither their inputs nor their outputs."""


def is_attention(target: object) -> bool:
    """Return whether an operator is an attention kernel."""
    return target is FLEX or target in KERNELS


def allowed_kernels() -> tuple[bool, ...]:
    """Return which kernels `scaled_dot_product_attention` may use, and how. torch's compiler asks this only once."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Keep attention from choosing cuDNN's kernel inside, if other fused kernels can replace it.

    cuDNN makes a plan for each batch shape, in about 0.13 s, and never drops it. A loop whose batches all have
    different shapes would plan in each step, and its memory would grow.
    """
    cuda = torch.backends.cuda
    # Without other fused kernels, attention would fall back to a chain of matrix products.
    has_others = cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()
    if not (has_others and cuda.cudnn_sdp_enabled()):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


class KeptAttention:
    """The results of attention in one forward, kept for recomputing the forward without attention.

    Kernels with dropout run again, since the random numbers drawn after them must not change.
    """

    def __init__(self) -> None:
        """Begin before anything has run."""
        self._results: list[tuple[Any, ...]] = []

    def noting(self) -> AbstractContextManager[object]:
        """Run the forward inside."""
        return _Around(self._note)

    def replace(self, function: Callable[[Any], Any]) -> None:
        """Apply a function to each result. Before `replaying`, the originals must be back."""
        self._results = [tuple(map(function, results)) for results in self._results]

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Recompute the forward inside, once. Attention kernels return their kept results."""
        # Kernels run again in the same order, and popping from the end of a list is cheap.
        self._results.reverse()
        with _Around(self._replay):
            yield

    def _note(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        results = kernel(*args, **kwargs)
        if _draws(kernel, args, kwargs):
            return results

        # Detached, since a result holds its graph, which must be freed. Nothing changes a result in place, because the
        # kernel's backward needs it.
        kept = tuple(x.detach() if torch.is_tensor(x) else x for x in results)
        self._results.append(kept)
        return results

    def _replay(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        # Since `replaying` the first result is last. Each one is freed as soon as it was used.
        if _draws(kernel, args, kwargs):
            return kernel(*args, **kwargs)
        return self._results.pop()


class LastModule:
    """Records whether the rest of a forward needs the result of its last module, so that it can be skipped.

    If only `PASSING_ON` operators run after the module, the graph saves nothing that depends on its result.
    """

    def __init__(self) -> None:
        """Begin before anything has run."""
        self._count = 0
        """The number of modules that ran in the first forward."""
        self._is_needed = True
        """Whether anything that ran after the last module needs its result."""
        self._again: int | None = None
        """The number of modules that ran in the recomputation; None: it has not begun."""
        self.was_skipped = False
        """Whether the module was skipped in the recomputation, so that its result is a placeholder."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Run the forward inside."""
        with _Around(self._note, lambda _: True):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Recompute the forward inside, once."""
        self._again = 0
        self.was_skipped = False
        yield

    def can_skip(self) -> bool:
        """Return whether the current module can be skipped."""
        # Only the last module is skipped, since the results of the others are used by those after them.
        return self._again == self._count - 1 and not self._is_needed

    def note_run(self) -> None:
        """Note that a module has run, or was skipped."""
        if self._again is not None:
            self.was_skipped |= self.can_skip()
            self._again += 1
            return
        self._count += 1
        self._is_needed = False

    def _note(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._is_needed |= operator not in PASSING_ON
        return operator(*args, **kwargs)


class _Around(TorchDispatchMode):
    """A dispatch mode that wraps some operators, such as the attention kernels."""

    def __init__(self, around: Callable[..., Any], concerns: Callable[[object], bool] = KERNELS.__contains__) -> None:
        """Take the wrapper, which gets the operator and its arguments, and which operators it wraps."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around
        self._concerns = concerns

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as PyTorch has it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, or its wrapper."""
        kwargs = kwargs or {}
        if not self._concerns(func):
            return func(*args, **kwargs)
        return self._around(func, args, kwargs)


def _draws(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:  # noqa: ANN401 - an operator
    """Return whether a kernel is called with dropout."""
    # By the schema, since kernels have dropout_p in different positions.
    names = [argument.name for argument in kernel._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(arguments.get("dropout_p", 0.0))
