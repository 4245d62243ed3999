"""Compiles units and the loss, with kernels chosen by rule and never by a stopwatch.

All units of one class share one compilation, since their modules differ in nothing that the code reads. The training
graph alone is compiled: keep, recompute and offload run the same one, so that they agree bit for bit. Evaluation runs
uncompiled.

Code is compiled for one size of batches, or once for all (`dynamic_shapes`). Which one holds is set beforehand.

A compiled layer may save only part of its activations and compute the rest again in its backward, cheapest first
(products with an activation function and norms cost next to nothing; attention more; matrix products most). That is
chosen inside the compiled graph, so nothing runs again that the backward does not need: at 0 the layer saves its
inputs alone, and its last projection is still not repeated. Attention's output may be saved there as well.
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
from megatier.compute.fp8 import find_quantized_weights, find_scales

_P = ParamSpec("_P")
_R = TypeVar("_R")

LEAST_SHARE = 1e-9
"""The saved share that stands for 0 if attention is saved. At 0 itself torch saves inputs alone, whatever is marked."""
RECOMPILES_MAX = 1 << 30
"""The most variants of one forward that are compiled: as many as there are. With a limit (torch's is 8) it would depend
on the batches before whether a batch is compiled."""
LIMITS = ("recompile_limit", "accumulated_recompile_limit")
"""torch's names of such limits."""
EAGER_BACKWARD = "force_non_lazy_backward_lowering"
"""torch's name of the setting by which a backward is compiled together with its forward."""
FUSES_UNASKED = "mix_order_reduction_non_strict_mode"
"""torch's name of the setting by which sums along rows and along columns become one kernel, whatever a batch's size is.
Else torch asks for the size, and compiles a layer again where the answer is another one."""
REFUSED_GUARDS = "Guard failed on the same frame"
"""How torch's message begins if code that it has just compiled does not serve the batch that it was compiled for."""
EACH_SIZE = (
    "is compiled anew for each size of batches, which takes seconds each time: the masks of flex attention hold their "
    "sizes. Pad batches to few sizes, or open the model with attention='sdpa', for which one compilation serves all."
)
"""The warning to users of a loop whose shapes cannot be dynamic."""
COST = "It takes more time, and more memory where layers save a share of their activations"
"""What a user should know of code that runs uncompiled."""


def import_compiler() -> None:
    """Import what torch would import at the first compiled call. Nobody may compile before this is over."""
    # What is missing the first compiled call says, which can do without.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._inductor.compile_fx")


@dataclass(frozen=True, slots=True)
class Compilation:
    """The way to compile. One setting at a time holds in a process."""

    saved_share: float = 1.0
    """The share of a layer's activations that its forward saves, 0 to 1."""
    keeps_attention: bool = False
    """At a share of 0: whether attention's output and log-sum-exp are saved besides the inputs. At other shares they
    compete with products for the room, by what they save; torch cannot tell what flex attention's are worth, so these
    are always saved."""
    any_shape: bool = False
    """Whether code is compiled for batches of any size; else for the one size that all have."""
    _warned: set[str] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, function: Callable[_P, _R], name: str) -> Compiled[_P, _R]:
        """Return the function, to be compiled at its first call.

        What the compiler refuses runs as it is, and a warning says so.
        """
        self._adopt()
        return Compiled(
            function,
            name,
            saves_inputs_alone=self.saved_share == 0,
            any_shape=self.any_shape,
            warned=self._warned,
        )

    def of_tile(self, function: Callable[_P, _R], name: str) -> Compiled[_P, _R]:
        """Return the function, to be compiled so that it saves all its activations: a tile has a short life."""
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
        """Set torch's compiler, whose settings are those of the process."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        share = self.saved_share
        marking: Marking | None = None
        if share or self.keeps_attention:
            marking = Marking(flex_alone=share > 0)
            share = share or LEAST_SHARE

        rule = PlanningRule(self.any_shape)
        if self.any_shape:
            install_planning()

        # Code that was compiled under other settings would be used again.
        wanted = (share, deterministic, marking, rule)
        present = (torch._functorch.config.activation_memory_budget, _inductor_is_deterministic(), *_passes())
        if present != wanted:
            torch.compiler.reset()
            _forget_kernels()

        torch._functorch.config.activation_memory_budget = share
        torch._inductor.config.deterministic = deterministic
        torch._inductor.config.joint_custom_post_pass = marking
        torch._inductor.config.joint_custom_pre_pass = rule

        # With the forward, in whose call a refusal is heard. In the backward it would end the run.
        if hasattr(torch._functorch.config, EAGER_BACKWARD):
            setattr(torch._functorch.config, EAGER_BACKWARD, True)
        if hasattr(torch._inductor.config.triton, FUSES_UNASKED):
            setattr(torch._inductor.config.triton, FUSES_UNASKED, self.any_shape)
        for name in LIMITS:
            setattr(torch._dynamo.config, name, RECOMPILES_MAX)
        flop_counter.sdpa_flop_count = _attention_flops


@dataclass(frozen=True, slots=True)
class Marking(CustomGraphPass):
    """Marks attention in the graph of forward and backward as what the forward has to save."""

    flex_alone: bool
    """Whether this is flex attention alone, or every kernel."""

    def __call__(self, graph: Graph) -> None:
        """Mark its nodes. The compiler then cuts the graph so that the backward does not repeat them.

        Scales of FP8 inputs are marked as well, and FP8 weights as what the backward makes again.
        """
        for node in graph.nodes:
            is_marked = node.target is FLEX or (not self.flex_alone and is_attention(node.target))
            if is_marked:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in find_scales(graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        # Otherwise the compiler would save them for the backward, as they are half as large as what they are made of.
        for node in find_quantized_weights(graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> str:
        """Return the name under which torch stores what it has compiled so."""
        return f"megatier attention {self.flex_alone}, scales"


class Compiled(Generic[_P, _R]):
    """A compiled function or, where the compiler refuses it, the function itself."""

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
        """Note the function, which is compiled at the first call.

        Args:
            function: the function.
            name: its name, for the warning.
            saves_inputs_alone: whether its backward computes everything again.
            saves_all: whether all its activations are saved, whatever the setting is.
            any_shape: whether it is compiled for batches of any size.
            warned: the names of functions that are refused, and were warned of.
        """
        self.is_refused = False
        """Whether the function runs uncompiled with the arguments that it was last called with, or that it last met."""
        # The share is a setting of the process, and a tile has another one than its layer: it is set for calls alone.
        # One object for all calls, since torch 2.13 keeps a few bytes of each such object for ever.
        self._all_saved = torch._functorch.config.patch(activation_memory_budget=1.0) if saves_all else None
        self._name = name
        self._function = function
        self._saves_inputs_alone = saves_inputs_alone
        self._any_shape = any_shape
        self._warned = set() if warned is None else warned
        self._sizes: set[tuple[torch.Size, ...]] = set()
        """The shapes of tensors that came with a mask by blocks."""
        self._refused: set[tuple[torch.Size, ...]] | None = set()
        """The shapes of tensors with which the compiler refuses the function; None: with any."""

        # With `fullgraph` code that cannot be compiled raises an error, instead of running uncompiled without a word.
        # Shapes are taken as fixed but for what is marked, and never by what batches before had (automatic dynamic).
        self._run: Callable[_P, _R] = torch.compile(function, dynamic=False, fullgraph=True)

    @property
    def saves_inputs_alone(self) -> bool:
        """Whether its backward computes everything again, but for attention if that is saved."""
        return self._saves_inputs_alone and not self.is_refused

    def meet(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - tensors, and containers with some
        """Find out whether the function runs uncompiled with these arguments, which it is called with next."""
        if self._refused is None:
            self.is_refused = True
        else:
            # Shapes are looked at only if some are refused, since this runs before each call.
            self.is_refused = bool(self._refused) and _shapes(args, kwargs) in self._refused

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run the function, compiled or, where that is refused, uncompiled."""
        self.meet(*args, **kwargs)
        if self.is_refused:
            return self._function(*args, **kwargs)

        _heed_kernels()
        try:
            with self._compiling(args, kwargs):
                return self._run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit, AssertionError) as error:
            # torch says by an AssertionError that its guards do not hold. Any other one is the model's own.
            if isinstance(error, AssertionError) and REFUSED_GUARDS not in str(error):
                raise
            self._refuse(error, args, kwargs)
            return self._function(*args, **kwargs)

    def _compiling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Return a context for the call. torch reads all this when it compiles, in whichever call that is."""
        CLOCK.watch()
        if self._any_shape and not mark_dynamic(args, kwargs):
            self._look_at_size(_shapes(args, kwargs))
        if self._all_saved is None:
            return planning() if self._any_shape else contextlib.nullcontext()
        within = contextlib.ExitStack()
        within.enter_context(self._all_saved)
        if self._any_shape:
            within.enter_context(planning())
        return within

    def _look_at_size(self, shapes: tuple[torch.Size, ...]) -> None:
        """Say once that another size of batches is compiled anew, though the loop may have any."""
        if EACH_SIZE in self._warned:
            return
        self._sizes.add(shapes)
        if len(self._sizes) > 1:
            self._warned.add(EACH_SIZE)
            warnings.warn(f"{self._name} {EACH_SIZE}", stacklevel=4)

    def _refuse(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run uncompiled from now on: with any shapes if the code itself is refused, else with these alone.

        So it does not depend on the batches before whether a batch runs compiled.
        """
        # torch's word for code that it cannot trace. Whatever else it refuses may be due to these sizes.
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
"""The kernels of attention that were allowed at the last compiled call; none before the first."""


def _heed_kernels() -> None:
    """Compile everything anew if other kernels of attention are allowed than before.

    torch chooses the kernel when it compiles, and would go on with it: a batch's bits would depend on the past.
    """
    global _kernels
    allowed = allowed_kernels()
    if allowed == _kernels:
        return
    # Before the first call nothing is compiled that could be of other kernels.
    if _kernels:
        torch.compiler.reset()
        text = (
            "Other kernels of attention are allowed than before, so all layers are compiled anew, which takes seconds."
        )
        warnings.warn(text, stacklevel=4)
    _kernels = allowed


def _forget_kernels() -> None:
    """Let the next compiled call take any kernels that are allowed then, since nothing is compiled."""
    global _kernels
    _kernels = ()


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Size, ...]:
    """Return the shapes of all tensors among arguments."""
    return tuple(tensor.shape for value in (args, kwargs) for tensor in tensors_in(value))


# Kept, since `Compilation` puts `_attention_flops` in its place.
_counted_flops = flop_counter.sdpa_flop_count


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Count the FLOPs of attention, for the choice of what to save. Shapes are [B, heads, T, D].

    If a key and value head serves several query heads, torch 2.11 refuses to count, and so to compile at all.
    """
    batch, heads, *_ = query
    # Counted as if each query head had a key and value head of its own, which takes as many operations.
    return int(_counted_flops(query, (batch, heads, *key[2:]), (batch, heads, *value[2:])))  # type: ignore[no-untyped-call]


def _inductor_is_deterministic() -> bool:
    return bool(torch._inductor.config.deterministic)


def _passes() -> tuple[object, object]:
    return torch._inductor.config.joint_custom_post_pass, torch._inductor.config.joint_custom_pre_pass


def _cause(message: str) -> str:
    """Return the reason in one line. A backend's own error begins on the second line, after "backend=... raised:"."""
    first, *rest = (line.strip() for line in message.splitlines() if line.strip())
    return f"{first} {rest[0]}" if first.endswith("raised:") and rest else first
