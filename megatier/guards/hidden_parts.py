"""Finds parts of a model in places other than the parameters, buffers and submodules of its modules.

A model in RAM is copied for training, and its weights move to tiers. The attributes of a module are copied with it. But
Python does not copy functions, so a hook whose closure holds the model would keep using the original model, and train
nothing. And a view of a weight does not change when the weight on its tier does.
"""

from __future__ import annotations

import dis
import functools
import types
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatier.errors import UnsupportedModelError

TREE = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module keeps its parameters, buffers and submodules."""
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes with the hooks that run in a forward or a backward."""
STATE_HOOKS = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)
"""Attributes with the hooks that a streamed model never calls."""
TRUSTED_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "numpy", "functools", "megatier"})
"""Packages whose globals hold no model of the user."""
PLAIN_TYPES = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size),
    PretrainedConfig,
)
"""Types of values that hold no part of a model."""
OF_PYTHON = (
    *(nn.Module, type, functools.partial),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
"""Callables that are not objects of a class which the user wrote."""
ITEMS_MAX = 1000
"""Items of a container that are searched, since a container of model parts has one among the first."""
HIDDEN_PART_REMEDY = (
    "The model is copied for training, and functions are not. Take what you need from the module that a hook is called "
    "with, or make it a method: of the module's class, or by types.MethodType(function, module)."
)


class HiddenParts:
    """Searches the attributes, hooks and methods of a model's modules for parts of the model.

    Attributes:
        shared: callable objects of the user, by id. The user may read results from them, so a copy of the model shares
            them.
    """

    def __init__(self, model: nn.Module) -> None:
        """List the parts of a model, and the memory of its weights."""
        self.shared: dict[int, object] = {}
        self._model = model
        self._seen: set[tuple[int, bool]] = set()
        self._parts: dict[int, str] = {}
        """Names of all modules, parameters and buffers, by id."""
        self._memory: list[tuple[int, int, str]] = []
        """First and last address of each weight, and its name."""

        for name, module in model.named_modules():
            self._parts[id(module)] = name or type(module).__name__
        for name, parameter in model.named_parameters():
            self._parts[id(parameter)] = name
            if parameter.numel() and not parameter.is_meta:
                start, stop = _span(parameter)
                self._memory.append((start, stop, name))
        for name, buffer in model.named_buffers():
            self._parts[id(buffer)] = name

        # Sorted, so that overlaps are between neighbours, and a bisection finds the weight of a view.
        self._memory.sort()

    def check(self) -> None:
        """Search all modules.

        Raises:
            UnsupportedModelError: something would hold a part of the original model. The message names both.
        """
        self._check_memory()
        kinds: set[type] = set()
        for name, module in self._model.named_modules():
            self._check_module(module, name or type(module).__name__)
            kinds.update(type(module).__mro__)

        # Classes are not copied, and the closure of a method or property may hold the model as well.
        for kind in kinds:
            for attribute, value in vars(kind).items():
                # Static and class methods have their function in __func__, and properties in fget.
                getter = getattr(value, "fget", value)
                function = getattr(value, "__func__", getter)
                if isinstance(function, types.FunctionType) and not _is_of_library(function):
                    self._check(function, f"{attribute} of the class {kind.__name__}", is_copied=False)

    def _check_memory(self) -> None:
        """Refuse parameters that share memory."""
        for (_, stop, first), (start, _, second) in pairwise(self._memory):
            if start < stop:
                raise UnsupportedModelError(
                    f"the parameters {first} and {second} share memory, so an update of one changes the other. Clone "
                    "one of them, or make both the same nn.Parameter."
                )

    def _check_module(self, module: nn.Module, path: str) -> None:
        """Search the buffers, attributes and hooks of a module."""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                where = f"the buffer {name} of {path}"
                self._check_tensor(buffer, where, is_copied=True)

        for attribute, value in vars(module).items():
            if attribute in FORWARD_HOOKS:
                for hook in value.values():
                    self._check_attribute(hook, f"a hook of {path} ({_called(hook)})")
            elif attribute not in TREE and attribute not in STATE_HOOKS:
                self._check_attribute(value, f"{attribute} of {path}")

    def _check_attribute(self, value: object, where: str) -> None:
        """Search an attribute or a hook."""
        owner: object = value
        if isinstance(value, types.MethodType):
            owner = value.__self__

        # The user may read results from a callable object, so it is shared and not copied.
        is_users = callable(value) and not isinstance(owner, OF_PYTHON)
        if is_users:
            self.shared[id(owner)] = owner
            self._check(owner, where, is_copied=False)

        # The hook may be a method of an object that is shared by now.
        is_shared = id(owner) in self.shared
        self._check(value, where, is_copied=not is_shared)

    def _check(self, value: object, where: str, *, is_copied: bool) -> None:
        """Search a value and everything that it holds.

        Args:
            value: the value.
            where: names its holder, for messages.
            is_copied: whether copying the model copies it.
        """
        waiting = [(value, is_copied)]
        while waiting:
            item, is_own = waiting.pop()

            # A value may be both copied and shared. Each case is searched, since a shared one may hold no part.
            if isinstance(item, PLAIN_TYPES) or (id(item), is_own) in self._seen:
                continue
            self._seen.add((id(item), is_own))
            if (part := self._parts.get(id(item))) is not None:
                if not is_own:
                    raise UnsupportedModelError(
                        f"{where} holds {part} of the model that was given. {HIDDEN_PART_REMEDY}"
                    )
            elif isinstance(item, Tensor):
                self._check_tensor(item, where, is_copied=is_own)
            else:
                waiting += [(inside, is_own and goes_along) for inside, goes_along in _inside(item)]

    def _check_tensor(self, tensor: Tensor, where: str, *, is_copied: bool) -> None:
        """Refuse a tensor that would have to be trained, or that is a view of a weight."""
        if tensor.requires_grad and is_copied:
            raise UnsupportedModelError(
                f"{where} holds a tensor that requires a gradient and is no parameter, so its copy would not be "
                "trained. Register it as an nn.Parameter, or detach it."
            )
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return

        # Weights do not overlap, so only the last one that begins before the end of the tensor can overlap it.
        start, stop = _span(tensor)
        place = bisect_left(self._memory, (stop,))
        if place and start < self._memory[place - 1][1]:
            raise UnsupportedModelError(
                f"{where} holds a view of the weight {self._memory[place - 1][2]}, which is trained elsewhere, so the "
                "view would stay as it is. Make it of the weight in each forward, or clone it if it is to stay."
            )


def _inside(value: Any) -> Iterator[tuple[object, bool]]:  # noqa: ANN401 - anything
    """Yield the values inside a value, and whether copying the value copies each of them."""
    match value:
        case types.FunctionType():
            yield from ((item, False) for item in _reachable_from(value))
        case types.MethodType():
            yield value.__self__, True
            yield value.__func__, False
        case types.BuiltinFunctionType():
            yield value.__self__, False
        case functools.partial():
            yield from ((item, True) for item in (value.func, *value.args, *value.keywords.values()))
        case Mapping():
            yield from ((item, True) for pair in islice(value.items(), ITEMS_MAX) for item in pair)
        case list() | tuple() | set() | frozenset():
            yield from ((item, True) for item in islice(value, ITEMS_MAX))
        case _:
            yield from ((item, True) for item in getattr(value, "__dict__", {}).values())
            yield from ((getattr(value, name), True) for name in slots_of(type(value)) if hasattr(value, name))


def _reachable_from(function: types.FunctionType) -> Iterator[object]:
    """Yield the values that a function can reach without arguments: closure, defaults, attributes and globals."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing was put into it yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()

    # The globals of libraries hold no model of the user, and there are too many of them.
    if not _is_of_library(function):
        names = set(_globals_of(function.__code__))
        yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, including the code of inner functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)

    # The code of inner functions is among the constants.
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class."""
    for owner in kind.__mro__:
        # A class with a single field may name it without a tuple.
        slots = owner.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        for name in names:
            if name in ("__dict__", "__weakref__"):
                continue

            # Python mangles private names with that of their class.
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _is_of_library(function: types.FunctionType) -> bool:
    """Return whether a function belongs to a trusted library."""
    return str(function.__module__).partition(".")[0] in TRUSTED_LIBRARIES


def _called(hook: object) -> str:
    """Return the name of a hook, or that of its class."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last one."""
    # A view may skip elements, so strides count.
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride

    num_bytes = (last + 1) * tensor.element_size()
    start = tensor.data_ptr()
    return start, start + num_bytes
