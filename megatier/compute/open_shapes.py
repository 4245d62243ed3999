"""Compiles code once for batches of any size, and gives a batch the same bits whichever came before.

torch compiles code for open sizes if their dimensions are marked (`open_up`). Two things then depend on the first batch
that is seen. torch asks how sizes compare, and compiles again where another batch answers otherwise. That is harmless:
which of these variants a batch gets follows from its own size, since all ask the same questions in the same order. But
the compiler also plans with the sizes of the first batch: how a sum is cut, which activations a layer saves, how large
blocks are. The same batch would get other bits after another one. So the compiler is given sizes by rule to plan with
(`planning`), the same in all processes. Questions are answered with the true sizes still.

Source: `torch._inductor.sizevars`, where hints for heuristics and hints for guards are told apart.
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
"""The rows that a batch is planned to have."""
PLANNED_LENGTH = 2048
"""The tokens that a row is planned to have, and any other open size."""
PLANNED_TOKENS = 4096
"""The size that is planned where a single one is open: tokens of one row, or of a chunk."""

_thread = threading.local()
_OURS = "_megatier_plans"
"""The attribute of those of torch's collections of sizes that are planned by rule."""


@dataclass(frozen=True, slots=True)
class Rule(CustomGraphPass):
    """Names what code depends on, so that torch takes no other stored code. It changes no graph."""

    any_shape: bool
    """Whether the code is for batches of any size."""

    def __call__(self, graph: Graph) -> None:
        """Leave the graph as it is."""

    def uuid(self) -> str:
        """Return the name under which torch stores what it has compiled so."""
        sizes = f"{PLANNED_ROWS} {PLANNED_LENGTH} {PLANNED_TOKENS}" if self.any_shape else "its own"

        # The compiler chooses attention's kernel by settings that torch's own key leaves out.
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
    """Return whether a mask by blocks is among arguments. Its sizes are constants of the code: one for each length."""
    if isinstance(value, list | tuple):
        return any(map(holds_blocks, value))
    if isinstance(value, Mapping):
        return any(map(holds_blocks, value.values()))
    return isinstance(value, BlockMask)


def open_up(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Mark those dimensions of arguments that differ from batch to batch; returns False if they cannot be open.

    The last dimension of hidden states and of tables of angles is the model's. That of masks, of positions and of
    images is the batch's.
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
    """Plan what this thread compiles with sizes by rule, for a while. The backward is too, in any thread."""
    before = getattr(_thread, "plans", False)
    _thread.plans = True
    try:
        yield
    finally:
        _thread.plans = before


def planned(sizes: ShapeEnv, expression: Any) -> Any:  # noqa: ANN401 - of sympy, which has no types
    """Put the sizes of the rule in place of all open ones, if these are planned by it."""
    # A backward is compiled later, and perhaps by another thread: its sizes are known by the attribute.
    is_by_rule = getattr(_thread, "plans", False) or hasattr(sizes, _OURS)
    if not is_by_rule:
        return expression

    # Sizes that are found to be equal become one. What is planned for them is looked up for each of many questions.
    version = len(sizes.replacements), len(sizes.backed_var_to_val)
    planned_version, _ = getattr(sizes, _OURS, (None, {}))
    if planned_version != version:
        setattr(sizes, _OURS, (version, _sizes(sizes)))

    resolved = sizes.replace(expression)
    _, plans = getattr(sizes, _OURS)
    return resolved.xreplace(plans)


def _sizes(sizes: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Return the planned number of each open size."""
    known = sizes.backed_var_to_val
    roots = set[sympy.Symbol]()
    for symbol in known:
        roots |= sizes.replace(symbol).free_symbols & known.keys()

    is_alone = len(roots) == 1
    return {symbol: _size(sizes, symbol, alone=is_alone) for symbol in known}


def _size(sizes: ShapeEnv, symbol: sympy.Symbol, *, alone: bool) -> sympy.Integer:
    """Return the size that is planned for a symbol."""
    # The first dimension of an argument is its rows, if the length is open too.
    source = next(iter(sizes.var_to_sources.get(symbol, ())), None)
    if alone:
        size = PLANNED_TOKENS
    elif getattr(source, "idx", None) == 0:
        size = PLANNED_ROWS
    else:
        size = PLANNED_LENGTH

    # What a guard has ruled out would mislead the compiler.
    bounds = sizes.var_to_range.get(symbol)
    if bounds is not None and bounds.lower.is_Integer:
        size = max(size, int(bounds.lower))
    if bounds is not None and bounds.upper.is_Integer:
        size = min(size, int(bounds.upper))
    return sympy.Integer(size)


# ---------------------------------------------------------------------- in torch

_HINTS = ("symbolic_hint", "optimization_hint", "replace_backed_symbols_with_hints", "stride_hints")
"""What Inductor asks for heuristics alone. Each version of torch has some of them."""
_TRUTHS = ("size_hint_or_throw", "guarding_hint_or_throw", "to_symint_or_int")
"""What it asks for guards, and for numbers that become part of the code."""
_PARTITION = ("size_hint", "optimization_hint", "hint_int")
"""What the cut of forward and backward asks."""
_WIDTHS = ("expr_fits_within_32bit",)
"""What the makers of kernels ask, which then guard the answer. Up to torch 2.12 it asks for a hint in between."""


@functools.cache
def install() -> None:
    """Let torch's compiler plan by the rule, where it is asked for."""
    _wrap(SizeVarAllocator, _HINTS, _planning)
    _wrap(SizeVarAllocator, _TRUTHS, _telling)
    _wrap(partitioners, _PARTITION, _cutting)
    # Only now: these modules take seconds to load, and are loaded with the first compiled function anyway.
    for maker in ("simd", "triton_utils"):
        _wrap(importlib.import_module(f"torch._inductor.codegen.{maker}"), _WIDTHS, _telling)


def _wrap(owner: object, names: Sequence[str], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put wrapped functions in the place of those of torch's that this version has."""
    for name in names:
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, wrapper(function))


def _planning(hint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Inductor that gives a hint."""

    @functools.wraps(hint)
    def by_rule(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # A question for the truth may ask for a hint in between, which has to be the true one then.
        has_to_be_true = getattr(_thread, "tells", False)
        if not has_to_be_true and isinstance(expression, sympy.Basic):
            resolved = self.remove_precomputed_replacements(expression)
            expression = planned(self.shape_env, resolved)
        return hint(self, expression, *args, **kwargs)

    return by_rule


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a question of Inductor that has to be answered by the true sizes."""

    @functools.wraps(method)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before = getattr(_thread, "tells", False)
        _thread.tells = True
        try:
            return method(self, *args, **kwargs)
        finally:
            _thread.tells = before

    return telling


def _cutting(hint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that gives a hint of a size of torch."""

    @functools.wraps(hint)
    def by_rule(size: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not isinstance(size, torch.SymInt):
            return hint(size, *args, **kwargs)

        # A size that is not planned by the rule has symbols left.
        number = planned(size.node.shape_env, size.node.expr)
        if number.is_number:
            return int(number)
        return hint(size, *args, **kwargs)

    return by_rule
