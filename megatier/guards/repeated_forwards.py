"""Checks forwards that are recomputed in the backward, as under activation checkpointing.

A forward that changes an argument in place, a buffer, or a random generator other than torch's would compute something
else when it runs again. So it is refused under activations other than keep. Hooks inside a layer are called again too.
Their results are needed, but nobody knows what else they do, so a warning names them.

Other state of a forward, such as an attribute that it counts up or a generator in a closure, is found by its effect:
some numbers of each result of a module's first forwards are kept, and compared when the forward runs again.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from megatier.errors import UnsupportedModelError
from megatier.guards.token_rows import COARSE, ROUNDING_TOLERANCES

REPEATED_FORWARD_REMEDY = "Open the model with activations='keep', under which each forward runs once."
SAMPLES_NOTED = 1024
"""Least numbers of a result that are kept, and half of the most. All of them would take as much as activations."""
OWN_HOOKS = ("transformers", "peft", "accelerate", "torch", "megatier")
"""Packages whose hooks may be called any number of times."""


class GivenTensors:
    """The argument tensors of a forward, with their versions before it."""

    def __init__(self, flat: Sequence[Any]) -> None:
        """Take the versions of these arguments."""
        # Tensors of inference mode have no versions, and cannot be changed outside of it.
        self._tensors = [(i, x) for i, x in enumerate(flat) if torch.is_tensor(x) and not x.is_inference()]

        # torch counts the in-place changes of a tensor, so nothing has to be copied.
        self._versions = [x._version for _, x in self._tensors]

    def check(self, module_name: str, why: str) -> None:
        """Check that no argument has changed.

        Args:
            module_name: the module whose arguments they are.
            why: what may have changed them, for the message.

        Raises:
            UnsupportedModelError: an argument was changed in place.
        """
        for (position, tensor), version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise UnsupportedModelError(
                    f"argument {position} of {module_name}, {tuple(tensor.shape)}, was changed in place {why}, so the "
                    f"forward would find other numbers when it runs again. {REPEATED_FORWARD_REMEDY}"
                )


class StateBefore:
    """The state that a recomputed module may not change: its buffers, and random generators other than torch's."""

    def __init__(self, module: nn.Module) -> None:
        """Take the state before a forward."""
        self._module = module
        self._before = list(_state(module))
        self._draws = list(_generators())

    def check(self, module_name: str) -> None:
        """Compare the state after the forward.

        Raises:
            UnsupportedModelError: the forward has changed it.
        """
        after = list(_state(self._module))

        # Identity counts too, because a tensor that replaces a buffer has versions of its own.
        for (name, buffer, version), (_, other, later) in zip(self._before, after, strict=False):
            if buffer is not other or version != later:
                raise UnsupportedModelError(
                    f"{module_name} changes its buffer {name} in its forward. {REPEATED_FORWARD_REMEDY}"
                )
        for (name, before), (_, later) in zip(self._draws, _generators(), strict=False):
            if before != later:
                raise UnsupportedModelError(
                    f"{module_name} draws random numbers from {name} in its forward, which would draw others when it "
                    f"runs again. Let it draw from torch. {REPEATED_FORWARD_REMEDY}"
                )


class NotedResults:
    """Some numbers of the results of a forward, which have to be the same when it runs again."""

    def __init__(self, results: Sequence[Tensor | None]) -> None:
        """Take the numbers, without waiting for the device."""
        self._noted = [_some(x) for x in results]

    def check(self, module_name: str, results: Sequence[Tensor | None], *, is_plain: bool) -> None:
        """Compare the results of the second run. The host waits for the device.

        Args:
            module_name: the module.
            results: the results of the second run.
            is_plain: whether both runs were uncompiled.

        Raises:
            UnsupportedModelError: the results differ.
        """
        pairs = zip(self._noted, map(_some, results), strict=False)
        if len(results) != len(self._noted) or any(_differ(*pair, is_plain=is_plain) for pair in pairs):
            raise UnsupportedModelError(
                f"{module_name} gave other numbers when it ran again for its backward, so something in it goes on from "
                "one forward to the next: an attribute that it changes, a random generator of its own, or a variable "
                f"that is none of its arguments. {REPEATED_FORWARD_REMEDY}"
            )


def hooks_inside(module: nn.Module) -> Iterator[str]:
    """Yield the names of submodules whose forwards have hooks of the user."""
    # Global hooks are in no module.
    if _has_own(hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks):
        yield "*"
    for name, part in module.named_modules():
        # Hooks of the layer itself are called outside of the part that runs again.
        if part is not module and _has_own(part._forward_hooks, part._forward_pre_hooks):
            yield name


def warn_of_hooks(names: Iterable[str]) -> None:
    """Warn of hooks that are called again when a forward runs again.

    Args:
        names: names of the modules with such hooks.
    """
    warnings.warn(
        f"forwards of layers run again in the backward (activations other than keep), and so do the hooks inside of "
        f"them, as under torch's checkpointing: {', '.join(names)}. What a hook returns counts both times, so numbers "
        "are right; what it counts or collects comes twice. Hooks on a whole layer are called once. "
        + REPEATED_FORWARD_REMEDY,
        stacklevel=2,
    )


def _has_own(*hooks: dict[int, Any]) -> bool:
    """Return whether hooks are of somebody who may not expect to be called twice."""
    return any(
        str(getattr(hook, "__module__", "")).partition(".")[0] not in OWN_HOOKS
        for registered in hooks
        for hook in registered.values()
    )


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Yield each buffer of a module with its version."""
    for name, buffer in module.named_buffers():
        if not buffer.is_inference():
            yield name, buffer, buffer._version


def _generators() -> Iterator[tuple[str, Any]]:
    """Yield the states of random generators that are not torch's."""
    yield "Python's random", random.getstate()

    # Not imported for this: a numpy that nobody has imported draws nothing.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, key, *rest = numpy.random.get_state()

        # As bytes, because arrays are not compared as a whole.
        yield "numpy", (key.tobytes(), *rest)


def _some(result: Tensor | None) -> Tensor | None:
    """Copy some numbers of a result, from all over it; None if it has none that are rounded."""
    if result is None or not result.is_floating_point() or not result.numel():
        return None
    flat = result.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLES_NOTED)

    # A copy, since the result may be overwritten before it is made again.
    return flat[::step].clone()


def _differ(before: Tensor | None, after: Tensor | None, *, is_plain: bool) -> bool:
    """Return whether numbers are others than before.

    On a GPU some kernels add up in any order, and a module may be compiled anew meanwhile. Then roundings may change.
    """
    if before is None or after is None or before.shape != after.shape:
        # None is a result without numbers to compare, and two of these are alike.
        return before is not after

    is_exact = is_plain and not before.is_cuda
    tolerance = 0.0 if is_exact else ROUNDING_TOLERANCES.get(before.dtype, COARSE)

    # Not finite is no difference: the step is skipped for that.
    one = before.double()
    other = after.double()
    change = (other - one).norm()
    return bool(change > tolerance * one.norm())
