"""Names attention's kernels as operators, and runs a forward again without what its backward can do without.

A kernel's backward needs its output and log-sum-exp. Both are small, and attention over long sequences is most of a
step. So they may stay from the forward to the backward (`KeptAttention`), though the rest of the layer is computed
again there. What the kernel gave is then put in the place of the kernel, so it has the same bits.

A module at the end of a layer, such as an MLP in tiles of tokens, may give what is only added to something else. No
backward needs the numbers of that, so the module need not run again (`LastModule`).
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
"""Flex attention as an operator of a compiled graph."""
KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        OPERATOR,
    }
)
"""What `scaled_dot_product_attention` runs, and what runs over images of any sizes. Without one of them attention is a
chain of products, of which nothing is kept."""

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
"""Operators whose backward needs none of the numbers that they are given, nor of those that they give."""


def is_attention(target: object) -> bool:
    """Return whether an operator is a kernel of attention."""
    return target is FLEX or target in KERNELS


def allowed_kernels() -> tuple[bool, ...]:
    """Return which kernels `scaled_dot_product_attention` may take, and how; torch's compiler asks this only once."""
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
    """Keep attention from choosing cuDNN's kernel for a while, if other fused ones may take its place.

    cuDNN makes a plan for each size of a batch, in about 0.13 s, and never drops it: a loop whose batches all have
    other sizes would plan at each step, and its memory would grow.
    """
    cuda = torch.backends.cuda
    # Without them attention would be left with a chain of products.
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
    """The results of attention in one forward, to run the same forward again without it.

    Kernels that draw random numbers run again: those after them would draw others if they did not.
    """

    def __init__(self) -> None:
        """Begin before anything has run."""
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
        # Kernels run again in their order, and the end of a list is where one can be taken out at no cost.
        self._results.reverse()
        with _Around(self._replay):
            yield

    def _note(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        results = kernel(*args, **kwargs)
        if _draws(kernel, args, kwargs):
            return results

        # Detached, because a result holds its graph, which has to go. Nobody changes a result in place: the kernel's
        # backward needs it as it is.
        kept = tuple(x.detach() if torch.is_tensor(x) else x for x in results)
        self._results.append(kept)
        return results

    def _replay(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        # The first result comes last since `replaying`, and each is let go of as soon as it was used.
        if _draws(kernel, args, kwargs):
            return kernel(*args, **kwargs)
        return self._results.pop()


class LastModule:
    """A note whether a forward needs the result of its last module, to run it again without that.

    It does not if only `PASSING_ON` runs after the module: a graph then saves nothing that depends on it.
    """

    def __init__(self) -> None:
        """Begin before anything has run."""
        self._count = 0
        """The number of modules that have run."""
        self._is_needed = True
        """Whether anything has run after the last one that uses what it gave."""
        self._again: int | None = None
        """The number of modules that have run again; None: the first forward."""
        self.is_spared = False
        """Whether the module did not run again, so that what came of it was made up."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Run the forward inside."""
        with _Around(self._note, lambda _: True):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Run the forward again inside, once."""
        self._again = 0
        self.is_spared = False
        yield

    def is_needless(self) -> bool:
        """Return whether the module that runs now need not run."""
        # The last module alone is spared: what the others gave is used by those after them.
        return self._again == self._count - 1 and not self._is_needed

    def ran(self) -> None:
        """Note that a module has run."""
        if self._again is not None:
            self.is_spared |= self.is_needless()
            self._again += 1
            return
        self._count += 1
        self._is_needed = False

    def _note(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._is_needed |= operator not in PASSING_ON
        return operator(*args, **kwargs)


class _Around(TorchDispatchMode):
    """A mode in which something else runs around operators, such as the kernels of attention."""

    def __init__(self, around: Callable[..., Any], concerns: Callable[[object], bool] = KERNELS.__contains__) -> None:
        """Say what runs, with the operator and its arguments, and around which of them."""
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
        """Run an operator, which gives what it would give without the mode."""
        kwargs = kwargs or {}
        if not self._concerns(func):
            return func(*args, **kwargs)
        return self._around(func, args, kwargs)


def _draws(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:  # noqa: ANN401 - an operator
    """Return whether a kernel is called with dropout."""
    # The schema tells where dropout_p is, since kernels have it in different places.
    names = [argument.name for argument in kernel._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(arguments.get("dropout_p", 0.0))
