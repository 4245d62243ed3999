"""Compiles units and the loss, with kernels chosen by rule and never by timing.

All units of one class share one compilation, since their modules differ in nothing that the code reads. Only the
training graph is compiled, and keep, recompute and offload all run it, so they agree bit for bit. Evaluation runs
uncompiled.

Code is compiled for one batch shape, or once for all shapes (`dynamic_shapes`). Which one is decided when the model is
opened.

A compiled layer may save only a part of its activations and recompute the rest in its backward, cheapest first
(products with an activation function and norms cost next to nothing, attention more, matrix products most). torch's
partitioner chooses them inside the compiled graph, so nothing is recomputed that the backward does not need: at a share
of 0 the layer saves only its inputs, and its last projection is still not repeated. Attention's output can be saved
there as well. The nodes of `engine` call what is compiled here, on the thread that computes.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, Unsupported
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy

from megatier.compute.attention_kernels import FLEX, allowed_kernels, is_attention
from megatier.compute.compile_clock import CLOCK
from megatier.compute.dynamic_shapes import PlanningRule, install_planning, mark_dynamic, planning, tensors_in
from megatier.compute.fp8 import find_quantised_weights, find_scales

_P = ParamSpec("_P")
_R = TypeVar("_R")

LEAST_SHARE = 1e-9
"""The share that is used for 0 if attention is saved. At exactly 0 torch saves only inputs, whatever is marked."""
RECOMPILES_MAX = 1 << 30
"""The limit on compiled variants of one forward: practically none. With a limit (torch's is 8), whether a batch runs
compiled would depend on earlier batches."""
LIMITS = ("recompile_limit", "accumulated_recompile_limit")
"""torch's names of these limits."""
EAGER_BACKWARD = "force_non_lazy_backward_lowering"
"""torch's setting that compiles a backward together with its forward."""
FUSES_UNASKED = "mix_order_reduction_non_strict_mode"
"""torch's setting that fuses reductions along rows and columns into one kernel without a guard on the batch size, which
would cause recompilations."""
REFUSED_GUARDS = "Guard failed on the same frame"
"""How torch's message begins if freshly compiled code fails its own guards."""
EACH_SIZE = (
    "is compiled anew for each size of batches, which takes seconds each time: the masks of flex attention hold their "
    "sizes. Pad batches to few sizes, or open the model with attention='sdpa', for which one compilation serves all."
)
"""The warning to users of a loop whose shapes cannot be dynamic."""
COST = "It takes more time, and more memory where layers save a share of their activations"
"""The warning about code that runs uncompiled."""


def import_compiler() -> None:
    """Import what torch imports at the first compiled call. Nothing may compile before this is over."""
    # If something is missing, the first compiled call says so and runs uncompiled.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.compile_fx")


@dataclass(frozen=True, slots=True)
class Compilation:
    """How to compile. A process has one such setting at a time."""

    saved_share: float = 1.0
    """The share of a layer's activations that its forward saves, 0 to 1."""
    keeps_attention: bool = False
    """At a share of 0, whether attention's output and log-sum-exp are saved besides the inputs. At other shares they
    compete with matrix products by the work that they save. torch cannot tell that of flex attention, whose results are
    therefore always saved."""
    any_shape: bool = False
    """Whether code is compiled for batches of any shape; otherwise for the one shape that all have."""
    _warned: set[str] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, function: Callable[_P, _R], name: str) -> Compiled[_P, _R]:
        """Return a function that is compiled at its first call.

        If the compiler refuses it, it runs uncompiled, with a warning.
        """
        self._adopt()
        return Compiled(
            function,
            name,
            saves_inputs_alone=self.saved_share == 0,
            any_shape=self.any_shape,
            warned=self._warned,
        )

    def compile_tile(self, function: Callable[_P, _R], name: str) -> Compiled[_P, _R]:
        """Return a function that is compiled so that it saves all its activations, since a tile lives briefly."""
        self._adopt()
        return Compiled(
            function,
            name,
            saves_inputs_alone=False,
            saves_all=True,
            any_shape=self.any_shape,
            warned=self._warned,
        )

    def _adopt(self) -> None:
        """Set torch's compiler, whose settings are global to the process."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        share = self.saved_share
        marks: AttentionMarks | None = None
        if share or self.keeps_attention:
            marks = AttentionMarks(flex_alone=share > 0)
            share = share or LEAST_SHARE

        rule = PlanningRule(self.any_shape)
        if self.any_shape:
            install_planning()

        # Code that was compiled under other settings would be reused otherwise.
        wanted = (share, deterministic, marks, rule)
        present = (torch._functorch.config.activation_memory_budget, _inductor_is_deterministic(), *_passes())
        if present != wanted:
            torch.compiler.reset()
            _forget_kernels()

        torch._functorch.config.activation_memory_budget = share
        torch._inductor.config.deterministic = deterministic
        torch._inductor.config.joint_custom_post_pass = marks
        torch._inductor.config.joint_custom_pre_pass = rule

        # A refusal can be handled in the forward's call, but in the backward it would end the run.
        if hasattr(torch._functorch.config, EAGER_BACKWARD):
            setattr(torch._functorch.config, EAGER_BACKWARD, True)
        if hasattr(torch._inductor.config.triton, FUSES_UNASKED):
            setattr(torch._inductor.config.triton, FUSES_UNASKED, self.any_shape)
        for name in LIMITS:
            setattr(torch._dynamo.config, name, RECOMPILES_MAX)
        flop_counter.sdpa_flop_count = _attention_flops


@dataclass(frozen=True, slots=True)
class AttentionMarks(CustomGraphPass):
    """A pass that marks attention in the joint graph as results that the forward must save."""

    flex_alone: bool
    """Whether only flex attention is marked, instead of every kernel."""

    def __call__(self, graph: Graph) -> None:
        """Mark the nodes of attention. The partitioner then does not repeat them in the backward.

        Scales of FP8 inputs are marked as saved too, and FP8 weights as recomputed.
        """
        for node in graph.nodes:
            is_marked = node.target is FLEX or (not self.flex_alone and is_attention(node.target))
            if is_marked:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in find_scales(graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # Otherwise the compiler would save them for the backward, since they are half as large as the weights.
        for node in find_quantised_weights(graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> str:
        """Return the key of this pass in torch's code cache."""
        return f"megatier attention {self.flex_alone}, scales"


class Compiled(Generic[_P, _R]):
    """A compiled function, or the function itself where the compiler refuses it."""

    def __init__(
        self,
        function: Callable[_P, _R],
        name: str,
        *,
        saves_inputs_alone: bool,
        saves_all: bool = False,
        any_shape: bool = False,
        warned: set[str] | None = None,
    ) -> None:
        """Take the function, which is compiled at the first call.

        Args:
            function: the function.
            name: its name, for the warning.
            saves_inputs_alone: whether its backward recomputes everything.
            saves_all: whether all its activations are saved, whatever the global share is.
            any_shape: whether it is compiled for batches of any shape.
            warned: the names of refused functions that a warning has mentioned.
        """
        self.is_refused = False
        """Whether the function runs uncompiled with the arguments that it was last given."""
        # The share is global, and a tile's differs from its layer's, so it is set for each call. One object serves all
        # calls, since torch 2.13 leaks a few bytes of each such object.
        self._all_saved = torch._functorch.config.patch(activation_memory_budget=1.0) if saves_all else None
        self._name = name
        self._function = function
        self._saves_inputs_alone = saves_inputs_alone
        self._any_shape = any_shape
        self._warned = set() if warned is None else warned
        self._sizes: set[tuple[torch.Size, ...]] = set()
        """The shapes of tensors that came with a block mask."""
        self._refused: set[tuple[torch.Size, ...]] | None = set()
        """The shapes of tensors for which the compiler refuses the function; None: for all."""

        # With `fullgraph`, code that cannot be compiled raises an error instead of silently running uncompiled. Shapes
        # are static except for dimensions that are marked, and never become dynamic because of earlier batches.
        self._run: Callable[_P, _R] = torch.compile(function, dynamic=False, fullgraph=True)

    @property
    def saves_inputs_alone(self) -> bool:
        """Whether its backward recomputes everything, except attention if that is saved."""
        return self._saves_inputs_alone and not self.is_refused

    def check_refused(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tensors, and containers with some
        """Find out whether the function will run uncompiled with these arguments, and set `is_refused`."""
        if self._refused is None:
            self.is_refused = True
        else:
            # Shapes are compared only if some are refused, since this runs before each call.
            self.is_refused = bool(self._refused) and _shapes(args, kwargs) in self._refused

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the function, compiled unless the compiler has refused it."""
        self.check_refused(*args, **kwargs)
        if self.is_refused:
            return self._function(*args, **kwargs)

        _reset_for_new_kernels()
        try:
            with self._compiling(args, kwargs):
                return self._run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit, AssertionError) as error:
            # torch raises an AssertionError if its guards fail. Any other one is the model's own.
            if isinstance(error, AssertionError) and REFUSED_GUARDS not in str(error):
                raise
            self._refuse(error, args, kwargs)
            return self._function(*args, **kwargs)

    def _compiling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Return a context for the call, which torch reads if it compiles in this call."""
        CLOCK.watch()
        if self._any_shape and not mark_dynamic(args, kwargs):
            self._warn_of_new_shape(_shapes(args, kwargs))
        if self._all_saved is None:
            return planning() if self._any_shape else contextlib.nullcontext()
        within = contextlib.ExitStack()
        within.enter_context(self._all_saved)
        if self._any_shape:
            within.enter_context(planning())
        return within

    def _warn_of_new_shape(self, shapes: tuple[torch.Size, ...]) -> None:
        """Warn once if another batch shape is compiled separately, though the loop may have any shapes."""
        if EACH_SIZE in self._warned:
            return
        self._sizes.add(shapes)
        if len(self._sizes) > 1:
            self._warned.add(EACH_SIZE)
            warnings.warn(f"{self._name} {EACH_SIZE}", stacklevel=4)

    def _refuse(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run uncompiled from now on: for all shapes if the code itself is refused, otherwise for these.

        So earlier batches do not decide whether a batch runs compiled.
        """
        # torch raises this for code that it cannot trace. Other refusals may be due to these shapes.
        is_of_code = isinstance(error, Unsupported)
        self.is_refused = True
        if is_of_code or self._refused is None:
            self._refused = None
        else:
            self._refused.add(_shapes(args, kwargs))

        if self._name not in self._warned:
            self._warned.add(self._name)
            which = "" if is_of_code else " with batches of this size"
            reason = _cause(str(error)).rstrip(".")
            text = f"{self._name} runs uncompiled{which}, because torch.compile refuses it: {reason}. {COST}."
            warnings.warn(text, stacklevel=3)


_kernels: tuple[bool, ...] = ()
"""The attention kernels that were allowed at the last compiled call; empty before the first."""


def _reset_for_new_kernels() -> None:
    """Recompile everything if other attention kernels are allowed than before.

    torch chooses the kernel when it compiles and would keep it, so a batch's bits would depend on the past.
    """
    global _kernels
    allowed = allowed_kernels()
    if allowed == _kernels:
        return
    # Before the first call nothing has been compiled.
    if _kernels:
        torch.compiler.reset()
        text = (
            "Other kernels of attention are allowed than before, so all layers are compiled anew, which takes seconds."
        )
        warnings.warn(text, stacklevel=4)
    _kernels = allowed


def _forget_kernels() -> None:
    """Forget the allowed kernels, since nothing is compiled any more."""
    global _kernels
    _kernels = ()


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Size, ...]:
    """Return the shapes of all tensors among arguments."""
    return tuple(tensor.shape for value in (args, kwargs) for tensor in tensors_in(value))


# Kept, since `Compilation` replaces it by `_attention_flops`.
_counted_flops = flop_counter.sdpa_flop_count


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count the FLOPs of attention, for torch's choice of what to save. Shapes are [B, heads, T, D].

    With grouped-query attention torch 2.11 refuses to count, and so to compile at all.
    """
    batch, heads, *_ = query
    # Counted as if each query head had its own key and value head, which takes as many operations.
    return int(_counted_flops(query, (batch, heads, *key[2:]), (batch, heads, *value[2:])))  # type: ignore[no-untyped-call]


def _inductor_is_deterministic() -> bool:
    return bool(torch._inductor.config.deterministic)


def _passes() -> tuple[object, object]:
    return torch._inductor.config.joint_custom_post_pass, torch._inductor.config.joint_custom_pre_pass


def _cause(message: str) -> str:
    """Return the reason in one line. A backend's own error is on the second line, after "backend=... raised:"."""
    first, *rest = (line.strip() for line in message.splitlines() if line.strip())
    return f"{first} {rest[0]}" if first.endswith("raised:") and rest else first
