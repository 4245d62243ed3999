"""Refuses to compute with parameters of a module while its weights are not bound.

An unbound parameter has a shape, a dtype and a device, but no numbers. Torch does not refuse to compute with it: a sum
with a tensor that has numbers leaves that one as it was, and some products and norms read whatever lies at address 0.
So an unbound parameter lets itself be looked at, and refuses all else: changes, copies, and every computation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatier.errors import AbsentWeightError, StreamedModelError, UnsupportedModelError
from megatier.guards.weight_changes import WEIGHT_CHANGE_REMEDY

ALIASES = (Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions that give the same place under another name, to callers that look at it and do not compute."""
GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
"""The function that gives a gradient."""
SETS_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]
"""The function that sets a gradient."""
DELETES_GRADIENT = Tensor.grad.__delete__  # type: ignore[union-attr]
"""The function that takes a gradient away."""
HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
"""Functions that ask to be called with a gradient, which never comes."""
FREEZES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""Functions that say whether a parameter is trained."""
IN_PLACE_FUNCTIONS = (Tensor.__setitem__, Tensor.data.__set__)  # type: ignore[attr-defined]
"""Functions that change their first argument, though their names do not say so."""
OPERATORS = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)__")
"""Names of operators that change their first argument."""
KEEPING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""Names that end like those of functions that change a tensor, but leave its numbers as they are."""
LOOKS = re.compile(
    r"__(get|set|delete|len|repr|hash|format)__|dim|ndimension|numel|nelement|size|stride|storage_offset|element_size"
    r"|untyped_storage|get_device|dim_order|has_names|type|result_type|retain_grad"
    r"|is_(complex|conj|contiguous|floating_point|inference|neg|pinned|same_size|shared|signed)"
)
"""Names of functions that look at a tensor's form. What they give has no numbers of it."""
MOVES = frozenset({"to", "half", "bfloat16", "float", "double"})
"""Names of functions that move or cast a tensor."""
FORMS = re.compile(r"(empty|full|ones|rand|randn|zeros)_like|new_(empty|empty_strided|full|ones|zeros)")
"""Names of functions that make a tensor of a tensor's form, with numbers of their own."""


class Unbound(nn.Parameter):
    """A parameter on meta that names the device and the dtype in which its weights compute.

    Llama 4 sends token ids to its embedding's device. Vision towers take pixels in the dtype of their weights.
    """

    bound_device: torch.device
    """The device on which the weights are bound."""
    bound_dtype: torch.dtype
    """The dtype of the weights that are bound."""
    full_name: str
    """The name of the parameter in the model."""
    has_gradient: Callable[[], bool] | None = None
    """In somebody else's loop, which may ask for a gradient and take None for nothing to clip: whether the open step
    has one."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the weights are bound."""
        return self.bound_device

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the weights that are bound."""
        return self.bound_dtype

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AbsentWeightError(
            f"the weight {self.full_name} lies on megatier's tiers, not in the model: whatever copies it here, or "
            f"computes with it, would do so without its numbers. Streamed.read({self.full_name!r}) gives its fp32 "
            "master between two steps, Streamed.state_dict() all of them, and Streamed.export(folder) writes them. A "
            "trainer takes the Streamed itself, by the mixin StreamedTraining, or StreamedTrl for those of TRL."
        )

    def _refuse_move(self, name: str) -> NoReturn:
        raise AbsentWeightError(
            f".{name}() asks for the weight {self.full_name}, which lies on megatier's tiers, not in the model. "
            f"Streamed.read({self.full_name!r}) gives its fp32 master between two steps, Streamed.state_dict() all of "
            f"them. A module stays where it computes, on {self.bound_device} in {self.bound_dtype}: leave .{name}() "
            "out, or choose another place by tiers.device and compute_dtype of megatier.stream. A trainer takes the "
            "Streamed itself, by the mixin StreamedTraining, or StreamedTrl for those of TRL."
        )

    def cpu(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be moved."""
        self._refuse_move("cpu")

    def cuda(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be moved."""
        self._refuse_move("cuda")

    numpy = tolist = item = __deepcopy__ = __reduce_ex__ = _refuse

    @classmethod
    def __torch_function__(
        cls,
        function: Any,  # noqa: ANN401 - whatever torch does with a tensor
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run a function of torch that looks at such parameters.

        Raises:
            UnsupportedModelError: it changes one.
            AbsentWeightError: it copies one, or computes with it.
            StreamedModelError: it asks for a gradient, or for another choice of what is trained, in somebody's loop.
        """
        kwargs = kwargs or {}
        _check_trains_elsewhere(function, args)
        for target in _targets(function, args, kwargs):
            raise UnsupportedModelError(
                f"the weight {target.full_name} is changed where it is not bound, which would change nothing. "
                f"{WEIGHT_CHANGE_REMEDY}"
            )

        # Refused before it runs, since torch may read from address 0. One of the arguments is such a parameter, else
        # torch would not have called this.
        name = str(getattr(function, "__name__", ""))
        used = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Unbound))
        if name in MOVES:
            used._refuse_move(name)
        is_form = FORMS.fullmatch(name) is not None
        if not (function in ALIASES or is_form or name in KEEPING or LOOKS.fullmatch(name)):
            used._refuse()

        # Otherwise the function would come here again, without end.
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)

        # An alias is such a parameter itself: else its holder could change it.
        if function in ALIASES:
            result.__class__ = type(args[0])
            result.__dict__ = dict(vars(args[0]))

        # A view of it would be a tensor that nobody guards.
        elif torch.is_tensor(result) and not is_form and not isinstance(result, Unbound):
            used._refuse()

        return result


class Guarded(Unbound):
    """A parameter of a layer whose modules are nodes of their own. Nobody but its module may compute with it."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedModelError(
            "this model computes with a weight outside of the module that owns it, where it is not bound. "
            "Set model.expert_parts to 1: then a layer is one unit."
        )

    _refuse_move = _refuse


def make_unbound(parameter: Tensor, device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Turn a parameter on meta into an unbound one, in place.

    Args:
        parameter: the parameter.
        device: the device on which its weights are bound.
        dtype: the dtype of its weights then.
        name: its name in the model.
    """
    parameter.__class__ = Unbound
    unbound = cast("Unbound", parameter)
    unbound.bound_device = device
    unbound.bound_dtype = dtype
    unbound.full_name = name


def mark_streamed(parameters: Iterable[nn.Parameter], has_gradient: Callable[[], bool]) -> None:
    """Let nobody ask unbound parameters for their gradients, or choose anew which of them are trained.

    Args:
        parameters: those of the model.
        has_gradient: says whether the open step has gradients that a `zero_grad` would clear.
    """
    for parameter in parameters:
        if isinstance(parameter, Unbound):
            # On the instance, where a function is no method.
            parameter.has_gradient = has_gradient


def check_gradient_hooks(model: nn.Module) -> None:
    """Refuse a model in RAM with hooks on gradients of its weights.

    Raises:
        UnsupportedModelError: it has one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedModelError(
                f"{name} has a hook on its gradient, which would never be called: gradients of a streamed model are "
                "on their way to its tiers. Remove the hook; streamed.clip clips, and streamed.grad_norm() reads the "
                "norm."
            )


def _check_trains_elsewhere(function: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401
    """Refuse functions that belong to a training in which gradients come to the parameters.

    Raises:
        StreamedModelError: the function is one of them.
    """
    first = args[0] if args else None
    if not isinstance(first, Unbound) or first.has_gradient is None:
        return

    sets_none = function == DELETES_GRADIENT or (function == SETS_GRADIENT and args[1] is None)
    # The streamed model has a `zero_grad` of its own. That of a module in it or around it, such as Lightning's, asks
    # each parameter.
    clears = function == GRADIENT and _caller().f_code.co_name == "zero_grad"
    if (clears or sets_none) and first.has_gradient():
        call = "grad = None" if sets_none else "zero_grad()"
        raise StreamedModelError(
            f"{call} of a module with {first.full_name} would clear gradients of the open step, which are on "
            "megatier's tiers: all of them or none. Drop the whole step with streamed.optimizer.zero_grad()."
        )
    if function == SETS_GRADIENT and not sets_none:
        raise StreamedModelError(
            f"the gradient of {first.full_name} is set to a tensor, which the update would not see: gradients of a "
            "streamed model come by backward() alone. Add to the loss what gives this gradient, or train a plain model."
        )
    if function == GRADIENT and not clears and isinstance(_caller().f_locals.get("self"), torch.optim.Optimizer):
        raise StreamedModelError(
            "an optimizer over the parameters of a streamed model would update nothing: weights, gradients and moments "
            "are on megatier's tiers. Call streamed.optimizer.step(), and give streamed.optimizer to schedulers; the "
            "arguments optimizer, lr and train of megatier.stream choose it."
        )
    if function in HOOKS or (function == GRADIENT and not clears):
        raise StreamedModelError(
            "gradients of a streamed model are on their way to its tiers, and never in .grad. torch's "
            "clip_grad_norm_ would find none: set streamed.clip instead, and read the norm from "
            "streamed.grad_norm(). A GradScaler would scale the norm as well: train in bf16 without one."
        )
    if function in FREEZES and (args[1] if len(args) > 1 else True) != first.requires_grad:
        raise StreamedModelError(
            f"whether {first.full_name} is trained was decided when the model was opened. Name it in frozen of "
            "megatier.stream, or set requires_grad before, on the model in RAM."
        )


def _caller() -> FrameType:
    """Return the frame that asks an unbound parameter for something."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _targets(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Unbound]:  # noqa: ANN401
    """Yield the unbound parameters that a function of torch writes into."""
    # By torch's own convention, the name of a function that changes its first argument ends with one underscore.
    name = str(getattr(function, "__name__", ""))
    has_underscore = name.endswith("_") and not name.endswith("__")
    is_in_place = has_underscore and name not in KEEPING
    written: tuple[Any, ...] = ()
    if is_in_place or OPERATORS.fullmatch(name) or function in IN_PLACE_FUNCTIONS:
        # The first argument may be given by its name, and then comes first among those.
        given = args or tuple(kwargs.values())
        written = given[:1]

    for leaf in tree_leaves((written, kwargs.get("out"))):
        if isinstance(leaf, Unbound):
            yield leaf


@contextmanager
def refused_outside(model: nn.Module) -> Iterator[None]:
    """Run a forward of the model inside.

    Raises:
        UnsupportedModelError: it computes with a weight past the module that owns it, where that is not bound.
    """
    try:
        yield
    except RuntimeError as error:
        # What no guard has seen torch refuses itself, in a message that names the device meta.
        if not isinstance(error, AbsentWeightError) and "meta" not in str(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} computes with a weight outside the forward of the module that owns it, so it "
            f"cannot be streamed: {str(error).splitlines()[0]}"
        ) from error
