"""Finds parts of a model that its modules hold otherwise than as parameters, buffers and modules.

A model in RAM is copied for training, and its weights lie on tiers. What a module holds is copied with it, and holds
the copies of modules then. But Python copies no function: a hook with a variable in which the model lies would go on to
use the model that was given, and train nothing. Nor does a view of a weight change when the weight on its tier does.
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
"""What modules hold as such."""
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Dictionaries of the hooks that run in a forward or a backward."""
STATE_HOOKS = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)
"""Those of hooks that a streamed model never calls."""
TRUSTED_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "numpy", "functools", "megatier"})
"""Packages whose functions find no model of a user's among their globals."""
PLAIN_TYPES = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size),
    PretrainedConfig,
)
"""What holds no part of a model."""
OF_PYTHON = (
    *(nn.Module, type, functools.partial),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
)
"""What can be called and is no object that a user wrote to note something."""
ITEMS_MAX = 1000
"""Items of a container that are looked at: a container of a model's parts has one among the first."""
HELD_MODEL_REMEDY = (
    "The model is copied for training, and functions are not. Take what you need from the module that a hook is called "
    "with, or make it a method: of the module's class, or by types.MethodType(function, module)."
)


class HeldParts:
    """Looks for parts of a model in the attributes, hooks and methods of its modules.

    Attributes:
        shared: objects whose methods are hooks or functions of the model, by their ids. They are the user's, who may
            read there what they note, so a copy of the model uses the very same ones.
    """

    def __init__(self, model: nn.Module) -> None:
        """Note what the parts of a model are, and where its weights lie."""
        self.shared: dict[int, object] = {}
        self._model = model
        self._seen: set[tuple[int, bool]] = set()
        self._parts: dict[int, str] = {}
        """The names of all modules, parameters and buffers, by their ids."""
        self._memory: list[tuple[int, int, str]] = []
        """Where each weight begins and ends, and its name."""

        for name, module in model.named_modules():
            self._parts[id(module)] = name or type(module).__name__
        for name, parameter in model.named_parameters():
            self._parts[id(parameter)] = name
            if parameter.numel() and not parameter.is_meta:
                start, stop = _span(parameter)
                self._memory.append((start, stop, name))
        for name, buffer in model.named_buffers():
            self._parts[id(buffer)] = name

        # Sorted, so that one look at neighbours finds overlaps, and a bisection the weight that a view is of.
        self._memory.sort()

    def check(self) -> None:
        """Look at all modules.

        Raises:
            UnsupportedModelError: names what holds a part that is not the copy's, and the part.
        """
        self._check_memory()
        kinds: set[type] = set()
        for name, module in self._model.named_modules():
            self._check_module(module, name or type(module).__name__)
            kinds.update(type(module).__mro__)

        # Classes are not copied, and a method or property of one may have the model in a closure as well.
        for kind in kinds:
            for leaf, value in vars(kind).items():
                # A static or class method has its function as __func__, and a property as fget.
                getter = getattr(value, "fget", value)
                function = getattr(value, "__func__", getter)
                if isinstance(function, types.FunctionType) and not _is_of_library(function):
                    self._check(function, f"{leaf} of the class {kind.__name__}", is_copied=False)

    def _check_memory(self) -> None:
        """Refuse parameters that lie in each other's memory."""
        for (_, stop, first), (start, _, second) in pairwise(self._memory):
            if start < stop:
                raise UnsupportedModelError(
                    f"the parameters {first} and {second} share memory, so an update of one changes the other. Clone "
                    "one of them, or make both the same nn.Parameter."
                )

    def _check_module(self, module: nn.Module, path: str) -> None:
        """Look at the buffers, attributes and hooks of a module."""
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                where = f"the buffer {leaf} of {path}"
                self._check_tensor(buffer, where, is_copied=True)

        for leaf, value in vars(module).items():
            if leaf in FORWARD_HOOKS:
                for hook in value.values():
                    self._check_attribute(hook, f"a hook of {path} ({_called(hook)})")
            elif leaf not in TREE and leaf not in STATE_HOOKS:
                self._check_attribute(value, f"{leaf} of {path}")

    def _check_attribute(self, value: object, where: str) -> None:
        """Look at an attribute or a hook."""
        owner: object = value
        if isinstance(value, types.MethodType):
            owner = value.__self__

        # An object that can be called is the user's, who may read there what it notes: it is shared, and not copied.
        is_users = callable(value) and not isinstance(owner, OF_PYTHON)
        if is_users:
            self.shared[id(owner)] = owner
            self._check(owner, where, is_copied=False)

        # A hook may be a method of the same object, which is shared by then.
        is_shared = id(owner) in self.shared
        self._check(value, where, is_copied=not is_shared)

    def _check(self, value: object, where: str, *, is_copied: bool) -> None:
        """Look at a value and at all that it holds.

        Args:
            value: the value.
            where: names what holds it, for messages.
            is_copied: whether a copy of the model has a copy of it.
        """
        waiting = [(value, is_copied)]
        while waiting:
            held, is_own = waiting.pop()

            # Seen as something that is copied says nothing of it where it is not: there it must hold no part.
            if isinstance(held, PLAIN_TYPES) or (id(held), is_own) in self._seen:
                continue
            self._seen.add((id(held), is_own))
            if (part := self._parts.get(id(held))) is not None:
                if not is_own:
                    raise UnsupportedModelError(
                        f"{where} holds {part} of the model that was given. {HELD_MODEL_REMEDY}"
                    )
            elif isinstance(held, Tensor):
                self._check_tensor(held, where, is_copied=is_own)
            else:
                waiting += [(inside, is_own and goes_along) for inside, goes_along in _inside(held)]

    def _check_tensor(self, tensor: Tensor, where: str, *, is_copied: bool) -> None:
        """Refuse a tensor that would have to change when a weight does, or be trained itself."""
        if tensor.requires_grad and is_copied:
            raise UnsupportedModelError(
                f"{where} holds a tensor that requires a gradient and is no parameter, so its copy would not be "
                "trained. Register it as an nn.Parameter, or detach it."
            )
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return

        # Weights do not overlap, so only the last one that begins before the tensor ends can reach into it.
        start, stop = _span(tensor)
        place = bisect_left(self._memory, (stop,))
        if place and start < self._memory[place - 1][1]:
            raise UnsupportedModelError(
                f"{where} holds a view of the weight {self._memory[place - 1][2]}, which is trained elsewhere, so the "
                "view would stay as it is. Make it of the weight in each forward, or clone it if it is to stay."
            )


def _inside(value: Any) -> Iterator[tuple[object, bool]]:  # noqa: ANN401 - anything
    """Yield the parts of a value, and whether each is copied where the value is."""
    match value:
        case types.FunctionType():
            yield from ((held, False) for held in _held_by(value))
        case types.MethodType():
            yield value.__self__, True
            yield value.__func__, False
        case types.BuiltinFunctionType():
            yield value.__self__, False
        case functools.partial():
            yield from ((held, True) for held in (value.func, *value.args, *value.keywords.values()))
        case Mapping():
            yield from ((held, True) for pair in islice(value.items(), ITEMS_MAX) for held in pair)
        case list() | tuple() | set() | frozenset():
            yield from ((held, True) for held in islice(value, ITEMS_MAX))
        case _:
            yield from ((held, True) for held in getattr(value, "__dict__", {}).values())
            yield from ((getattr(value, name), True) for name in slots_of(type(value)) if hasattr(value, name))


def _held_by(function: types.FunctionType) -> Iterator[object]:
    """Yield the values that a function finds without being given them."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing was put into it yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()

    # The globals of a library hold no model of the user's, and are too many to look at.
    if not _is_of_library(function):
        names = set(_globals_of(function.__code__))
        yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, or functions in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)

    # A function that is made inside has its code among the constants.
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


def slots_of(kind: type) -> Iterator[str]:
    """Yield the names of the fields of a class that do not lie in `__dict__`."""
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
    """Return whether a function is one of a library's."""
    return str(function.__module__).partition(".")[0] in TRUSTED_LIBRARIES


def _called(hook: object) -> str:
    """Return the name of a hook, or its kind."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    # A view may skip elements, so its last one lies further on than there are elements.
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride

    num_bytes = (last + 1) * tensor.element_size()
    start = tensor.data_ptr()
    return start, start + num_bytes
