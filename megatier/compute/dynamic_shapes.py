"""Compiles code once for batches of any size, so that a batch gets the same bits whichever batches came before it.

torch compiles code for dynamic shapes if the dimensions are marked (`mark_dynamic`). Two things then depend on the
first batch. First, torch guards on comparisons of sizes and recompiles when a guard fails. That is harmless: all
variants check the same guards in the same order, so a batch's own size decides which variant it gets. Second, the
compiler's heuristics use the sizes of the first batch as hints: how to split a sum, which activations to save, how
large blocks are. This would change bits. So heuristics are given fixed sizes, the same in all processes (`planning`),
while guards still see the true ones.

`compilation` calls this before each compiled call. Source: `torch._inductor.sizevars`, which has hints for heuristics
and hints for guards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._functorch.partitioners as partitioners
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.sizevars import SizeVarAllocator
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import BlockMask

from megatier.compute.attention_kernels import allowed_kernels

PLANNED_ROWS = 8
"""The number of rows that heuristics assume."""
PLANNED_LENGTH = 2048
"""The number of tokens in a row that heuristics assume, and any other dynamic size."""
PLANNED_TOKENS = 4096
"""The size that heuristics assume if only one is dynamic: the tokens of one row, or of a chunk."""

_thread = threading.local()
_PLANS = "_megatier_plans"
"""The attribute that marks torch's shape environments whose heuristics use the fixed sizes."""


@dataclass(frozen=True, slots=True)
class PlanningRule(CustomGraphPass):
    """A pass that changes no graph, but is a part of the key under which torch caches code."""

    any_shape: bool
    """Whether the code is for batches of any size."""

    def __call__(self, graph: Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> str:
        """Return the part of the cache key that names the planned sizes and the allowed attention kernels."""
        sizes = f"{PLANNED_ROWS} {PLANNED_LENGTH} {PLANNED_TOKENS}" if self.any_shape else "its own"

        # torch's own key leaves out the settings by which the compiler chooses attention's kernel.
        kernels = allowed_kernels(), torch._C._get_sdp_priority_order()
        return f"megatier plans {sizes}, attention {kernels}"


def tensors_in(value: Any) -> Iterator[Tensor]:  # noqa: ANN401 - whatever a module is called with
    """Yield the tensors among arguments and in their containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)


def holds_blocks(value: Any) -> bool:  # noqa: ANN401
    """Return whether a block mask is among the arguments. Its sizes are constants, so there is code for each length."""
    if isinstance(value, list | tuple):
        return any(map(holds_blocks, value))
    if isinstance(value, Mapping):
        return any(map(holds_blocks, value.values()))
    return isinstance(value, BlockMask)


def mark_dynamic(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Mark the dimensions that differ from batch to batch as dynamic. Return False if they cannot be.

    The last dimension of hidden states and of rotary tables belongs to the model. That of masks, positions and images
    belongs to the batch.
    """
    if holds_blocks(args) or holds_blocks(kwargs):
        return False

    for tensor in (*tensors_in(args), *tensors_in(kwargs)):
        # Masks and positions go to every unit, so they may be marked already.
        is_marked = hasattr(tensor, "_dynamo_weak_dynamic_indices")
        if is_marked or not tensor.dim():
            continue

        is_hidden = tensor.is_floating_point() and 1 < tensor.dim() < 4
        num_open = tensor.dim() - is_hidden
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(num_open)))
    return True


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Let heuristics use the fixed sizes for what this thread compiles inside, and for its backward in any thread."""
    before = getattr(_thread, "plans", False)
    _thread.plans = True
    try:
        yield
    finally:
        _thread.plans = before


def planned(sizes: ShapeEnv, expression: Any) -> Any:  # noqa: ANN401 - of sympy, which has no types
    """Replace all dynamic sizes in an expression by the fixed ones, if its shape environment is planned with them."""
    # A backward is compiled later, perhaps by another thread, so its shape environment carries the mark.
    is_by_rule = getattr(_thread, "plans", False) or hasattr(sizes, _PLANS)
    if not is_by_rule:
        return expression

    # Sizes that turn out to be equal become one symbol. The table is cached, since the compiler asks many times.
    version = len(sizes.replacements), len(sizes.backed_var_to_val)
    planned_version, _ = getattr(sizes, _PLANS, (None, {}))
    if planned_version != version:
        setattr(sizes, _PLANS, (version, _sizes(sizes)))

    resolved = sizes.replace(expression)
    _, plans = getattr(sizes, _PLANS)
    return resolved.xreplace(plans)


def _sizes(sizes: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Return the fixed size of each dynamic one."""
    known = sizes.backed_var_to_val
    roots = set[sympy.Symbol]()
    for symbol in known:
        roots |= sizes.replace(symbol).free_symbols & known.keys()

    is_alone = len(roots) == 1
    return {symbol: _size(sizes, symbol, alone=is_alone) for symbol in known}


def _size(sizes: ShapeEnv, symbol: sympy.Symbol, *, alone: bool) -> sympy.Integer:
    """Return the fixed size of a symbol."""
    # If the length is dynamic too, an argument's first dimension is its rows.
    source = next(iter(sizes.var_to_sources.get(symbol, ())), None)
    if alone:
        size = PLANNED_TOKENS
    elif getattr(source, "idx", None) == 0:
        size = PLANNED_ROWS
    else:
        size = PLANNED_LENGTH

    # A size that a guard has ruled out would mislead the compiler.
    bounds = sizes.var_to_range.get(symbol)
    if bounds is not None and bounds.lower.is_Integer:
        size = max(size, int(bounds.lower))
    if bounds is not None and bounds.upper.is_Integer:
        size = min(size, int(bounds.upper))
    return sympy.Integer(size)


# ---------------------------------------------------------------------- in torch

_HINTS = ("symbolic_hint", "optimization_hint", "replace_backed_symbols_with_hints", "stride_hints")
"""Inductor's methods that give hints to heuristics alone. Each version of torch has some of them."""
_EXACT = ("size_hint_or_throw", "guarding_hint_or_throw", "to_symint_or_int")
"""Inductor's methods that answer guards, or give numbers that become part of the code."""
_PARTITION = ("size_hint", "optimization_hint", "hint_int")
"""The partitioner's functions that give hints."""
_WIDTHS = ("expr_fits_within_32bit",)
"""The kernel generators' function whose answer becomes a guard. Up to torch 2.12 it asks for a hint on the way."""


@functools.cache
def install_planning() -> None:
    """Patch torch's compiler, once in a process, so that `planning` takes effect."""
    _wrap(SizeVarAllocator, _HINTS, _planned_hint)
    _wrap(SizeVarAllocator, _EXACT, _with_true_sizes)
    _wrap(partitioners, _PARTITION, _planned_partition)
    # Imported only now, since these modules take seconds to load, and the first compiled function needs them anyway.
    for maker in ("simd", "triton_utils"):
        _wrap(importlib.import_module(f"torch._inductor.codegen.{maker}"), _WIDTHS, _with_true_sizes)


def _wrap(owner: object, names: Sequence[str], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace those of torch's functions that this version has by wrapped ones."""
    for name in names:
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, wrapper(function))


def _planned_hint(hint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Inductor that gives a hint, so that it gives the fixed size."""

    @functools.wraps(hint)
    def by_rule(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # An exact answer may ask for a hint on the way, which then has to be exact too.
        has_to_be_exact = getattr(_thread, "is_exact", False)
        if not has_to_be_exact and isinstance(expression, sympy.Basic):
            resolved = self.remove_precomputed_replacements(expression)
            expression = planned(self.shape_env, resolved)
        return hint(self, expression, *args, **kwargs)

    return by_rule


def _with_true_sizes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Inductor that must answer by the true sizes."""

    @functools.wraps(method)
    def with_true_sizes(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before = getattr(_thread, "is_exact", False)
        _thread.is_exact = True
        try:
            return method(self, *args, **kwargs)
        finally:
            _thread.is_exact = before

    return with_true_sizes


def _planned_partition(hint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the partitioner that gives a hint."""

    @functools.wraps(hint)
    def by_rule(size: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not isinstance(size, torch.SymInt):
            return hint(size, *args, **kwargs)

        # A size without a fixed one still contains symbols.
        number = planned(size.node.shape_env, size.node.expr)
        if number.is_number:
            return int(number)
        return hint(size, *args, **kwargs)

    return by_rule
