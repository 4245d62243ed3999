"""Checks forwards that run again in the backward: what they leave changed, and hooks that run twice.

A forward that changes an argument in place, a buffer, or a random generator other than torch's finds something else
when it runs again, and changes it once more. So it is refused under activations other than keep. Hooks inside of a
layer are called again as well. What they return is needed, and only they know what else they do: so a warning names
them.

Whatever else a forward may go on from (an attribute that it counts up, a generator of its own, a closure) is found by
what it gives: in a module's first forwards, some numbers of each result are noted, and compared when it runs again.
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
"""Numbers of a result that are noted, at least; at most twice as many. All of them would take as much as activations.
"""
OWN_HOOKS = ("transformers", "peft", "accelerate", "torch", "megatier")
"""Packages whose hooks may be called any number of times."""


class GivenTensors:
    """The tensors that a forward was given and that no gradient reaches, as they were before it."""

    def __init__(self, flat: Sequence[Any]) -> None:
        """Note the versions of these arguments."""
        # Tensors of inference mode count no versions, and cannot be changed where gradients are.
        self._tensors = [(i, x) for i, x in enumerate(flat) if torch.is_tensor(x) and not x.is_inference()]

        # torch counts the changes of a tensor in place, so nothing has to be copied or compared.
        self._versions = [x._version for _, x in self._tensors]

    def check(self, module_name: str, why: str) -> None:
        """Check that they are still the same.

        Args:
            module_name: the module that was given them.
            why: what has changed them, for the message.

        Raises:
            UnsupportedModelError: one was changed in place.
        """
        for (position, tensor), version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise UnsupportedModelError(
                    f"argument {position} of {module_name}, {tuple(tensor.shape)}, was changed in place {why}, so the "
                    f"forward would find other numbers when it runs again. {REPEATED_FORWARD_REMEDY}"
                )


class StateBefore:
    """The state that a module which runs again must leave as it is: buffers, and random generators besides torch's."""

    def __init__(self, module: nn.Module) -> None:
        """Note it, before a forward."""
        self._module = module
        self._before = list(_state(module))
        self._draws = list(_generators())

    def check(self, module_name: str) -> None:
        """Look at it after the forward.

        Raises:
            UnsupportedModelError: the forward has changed it.
        """
        after = list(_state(self._module))

        # By identity too: a tensor that is put into the place of a buffer counts versions of its own.
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
    """Some numbers of what a forward gave, which it has to give again."""

    def __init__(self, results: Sequence[Tensor | None]) -> None:
        """Note them. The host does not wait for the device."""
        self._noted = [_some(x) for x in results]

    def check(self, module_name: str, results: Sequence[Tensor | None], *, is_plain: bool) -> None:
        """Look at what it gave when it ran again. The host waits for the device.

        Args:
            module_name: the module.
            results: what it gave now.
            is_plain: whether it ran uncompiled both times.

        Raises:
            UnsupportedModelError: it was something else.
        """
        pairs = zip(self._noted, map(_some, results), strict=False)
        if len(results) != len(self._noted) or any(_differ(*pair, is_plain=is_plain) for pair in pairs):
            raise UnsupportedModelError(
                f"{module_name} gave other numbers when it ran again for its backward, so something in it goes on from "
                "one forward to the next: an attribute that it changes, a random generator of its own, or a variable "
                f"that is none of its arguments. {REPEATED_FORWARD_REMEDY}"
            )


def hooks_inside(module: nn.Module) -> Iterator[str]:
    """Yield the names of those modules inside of a module whose forwards have hooks of the user's."""
    # Hooks for all modules are in none of them.
    if _has_own(hooks_of_all._global_forward_hooks, hooks_of_all._global_forward_pre_hooks):
        yield "*"
    for name, part in module.named_modules():
        # Hooks of the layer itself run around what is run again.
        if part is not module and _has_own(part._forward_hooks, part._forward_pre_hooks):
            yield name


def warn_of_hooks(names: Iterable[str]) -> None:
    """Say which hooks are called again when a forward runs again.

    Args:
        names: of the modules that have them.
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

    # Not finite is no difference: the step is left out for that.
    one = before.double()
    other = after.double()
    change = (other - one).norm()
    return bool(change > tolerance * one.norm())
