"""Tensors that travel between units in containers: what one layer leaves in a mapping and a later one reads.

Gemma 3n and 4 hand keys and values on in a dictionary that every layer takes as an argument. Autograd sees only what a
node takes and returns, so a call is taken apart: every tensor that can be reached from its arguments through mappings,
sequences and attributes of objects is an input of the node. The forward runs on copies of these containers, also when
it is run again, so that each run writes into copies of its own. What it wrote is an output of the node, and only that
is written into the containers outside.

Modules, configs, callables and what torch makes (block masks) are handed on as they are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PretrainedConfig

from megatier.errors import UnsupportedModelError

Place = tuple[str, Hashable]
"""Where in a container: an item by its key or number, or a field by its name."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Enum, nn.Module, PretrainedConfig)
_bases: dict[type, type | None] = {}
BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, deque, list, SimpleNamespace)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What is no container."""

    index: int


@dataclass(frozen=True, slots=True)
class _Given:
    """In what a forward wrote: a leaf that the call was given."""

    index: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A container: several may hold it, and it may hold itself."""

    index: int


@dataclass(frozen=True, slots=True)
class _Tuple:
    """A tuple, or whatever else torch can take apart and nobody can write into."""

    spec: TreeSpec
    children: tuple[_Form, ...]


_Form = _Leaf | _Given | _Held | _Tuple


@dataclass(frozen=True, slots=True)
class _Container:
    """What a copy of a container is made from. It does not hold the container: that holds the node's outputs."""

    kind: type
    maxlen: int | None
    path: str
    contents: dict[Place, _Form]


@dataclass(slots=True)
class _Walk:
    """Takes values apart into leaves and containers."""

    leaves: list[Any] = field(default_factory=list)
    containers: list[_Container] = field(default_factory=list)
    originals: list[Any] = field(default_factory=list)
    """Of the containers, in their order."""
    known: dict[int, _Form] = field(default_factory=dict)
    """By id: what has been seen; tensors only where a container holds them."""
    inside: list[int] = field(default_factory=list)
    """Leaves that lie in a container."""

    def take(self, value: Any, path: str, *, is_inside: bool) -> _Form:  # noqa: ANN401 - whatever a module takes
        """The form of a value."""
        if (known := self.known.get(id(value))) is not None:
            return known
        if not (torch.is_tensor(value) or isinstance(value, PLAIN)):
            if _base(type(value)) is not None:
                return self._take_container(value, path)
            children, spec = tree_flatten(value, is_leaf=lambda x: x is not value)
            if not spec.is_leaf():
                forms = (self.take(x, f"{path}[{n}]", is_inside=is_inside) for n, x in enumerate(children))
                return _Tuple(spec, tuple(forms))

        form = _Leaf(len(self.leaves))
        self.leaves.append(value)
        if is_inside:
            self.inside.append(form.index)
            if torch.is_tensor(value):
                self.known[id(value)] = form

        return form

    def _take_container(self, value: Any, path: str) -> _Form:  # noqa: ANN401
        self.known[id(value)] = form = _Held(len(self.containers))
        contents: dict[Place, _Form] = {}
        maxlen = value.maxlen if isinstance(value, deque) else None
        self.containers.append(_Container(type(value), maxlen, path, contents))
        self.originals.append(value)
        for (kind, key), child in _contents(value).items():
            at = f"{path}[{key!r}]" if kind == "item" else f"{path}.{key}"
            contents[kind, key] = self.take(child, at, is_inside=True)

        return form


class Arguments:
    """What a module is called with, taken apart.

    Attributes:
        leaves: tensors and whatever else is no container, in order.
        carried: positions of those of them that lie in containers.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Looks at the containers as they are now."""
        walk = _Walk()
        self._args = [walk.take(x, f"argument {n}", is_inside=False) for n, x in enumerate(args)]
        self._kwargs = {name: walk.take(x, name, is_inside=False) for name, x in kwargs.items()}
        self.leaves: list[Any] = walk.leaves
        self.carried = frozenset(walk.inside)
        self._containers = walk.containers
        self._outside: tuple[list[Any], list[Any]] | None = (walk.originals, list(walk.leaves))

    def copy(self, leaves: Sequence[Any]) -> ContainerCopy:
        """The arguments made anew from these leaves, with containers of their own."""
        return ContainerCopy(self._args, self._kwargs, self._containers, leaves, self.carried)

    def write(self, written: Written, tensors: Sequence[Tensor | None]) -> None:
        """Write what a forward wrote into the containers that the module was given; the last thing to be done.

        Args:
            written: by the forward.
            tensors: in place of those that it wrote, in order.
        """
        assert self._outside is not None, "a call writes once"
        originals, given = self._outside
        self._outside = None  # they hold the node's outputs, which hold the node's call: they would never be freed
        new = [_empty(container) for container in written.new]
        made = _Maker(written.fill(tensors), [*originals, *new], given)
        for container, form in zip(new, written.new, strict=True):
            _fill(container, made.contents(form.contents))
        for index, contents in written.changed.items():
            _fill(originals[index], made.contents(contents))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a forward wrote into its copies of the containers."""

    changed: dict[int, dict[Place, _Form]]
    """By container that was given: what it holds now."""
    new: list[_Container]
    """Containers that were made in the forward."""
    leaves: list[Any]
    """What was written; None in place of tensors."""
    places: list[tuple[int, str]]
    """Of the tensors: their positions in `leaves`, and where they were written."""

    def is_like(self, other: Written) -> bool:
        """Whether the same places were written."""
        mine, others = (
            (x.changed, [(c.kind, c.contents) for c in x.new], [at for at, _ in x.places]) for x in (self, other)
        )
        return mine == others

    def fill(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """The leaves, with these tensors."""
        leaves = list(self.leaves)
        for (position, _), tensor in zip(self.places, tensors, strict=True):
            leaves[position] = tensor
        return leaves


class ContainerCopy:
    """Arguments made for one run of a forward."""

    def __init__(
        self,
        args: Sequence[_Form],
        kwargs: Mapping[str, _Form],
        containers: Sequence[_Container],
        leaves: Sequence[Any],
        carried: frozenset[int],
    ) -> None:
        """Made from forms and leaves."""
        self._containers = containers
        self._leaves = leaves
        self._carried = carried
        self._held = [_empty(container) for container in containers]
        made = _Maker(leaves, self._held, ())
        self._before = [made.contents(container.contents) for container in containers]
        for container, contents in zip(self._held, self._before, strict=True):
            _fill(container, contents)
        self.args = [made.value(form) for form in args]
        self.kwargs = {name: made.value(form) for name, form in kwargs.items()}
        self._versions = {i: x._version for i, x in self._tensors() if i in carried}
        self._required = [i for i, x in self._tensors() if x.requires_grad]

    def written(self, module_name: str) -> tuple[Written, list[Tensor]]:
        """What the forward wrote, and the tensors in it.

        Raises:
            UnsupportedModelError: it changed a tensor in place that others hold too.
        """
        self._check_in_place(module_name)
        walk = _Walk(known={id(held): _Held(index) for index, held in enumerate(self._held)})
        walk.containers = list(self._containers)
        count = len(self._containers)
        walk.known |= {id(x): _Given(i) for i, x in self._tensors()}
        now = [_contents(held) for held in self._held]
        changed: dict[int, dict[Place, _Form]] = {}
        places: list[tuple[int, str]] = []

        for index, (before, after) in enumerate(zip(self._before, now, strict=True)):
            if list(before) == list(after) and all(before[place] is after[place] for place in before):
                continue
            path = self._containers[index].path
            first = len(walk.leaves)
            changed[index] = {place: walk.take(x, path, is_inside=True) for place, x in after.items()}
            places += [(n, path) for n, x in enumerate(walk.leaves[first:], first) if torch.is_tensor(x)]

        tensors = [walk.leaves[position] for position, _ in places]
        rest = [None if torch.is_tensor(x) else x for x in walk.leaves]
        return Written(changed=changed, new=walk.containers[count:], leaves=rest, places=places), tensors

    def _check_in_place(self, module_name: str) -> None:
        changed = [i for i, version in self._versions.items() if self._leaves[i]._version != version]
        drawn_in = [i for i, x in self._tensors() if x.requires_grad and i not in self._required]

        for position in [*changed, *drawn_in]:
            shape = tuple(self._leaves[position].shape)
            raise UnsupportedModelError(
                f"{module_name} writes into a tensor {shape} that it was given, and that other modules hold too; its "
                "forward would write again when it is run again, and no gradient would pass. It cannot be streamed "
                "as it is: let it make a new tensor instead."
            )

    def _tensors(self) -> Iterator[tuple[int, Tensor]]:
        return ((i, x) for i, x in enumerate(self._leaves) if torch.is_tensor(x) and not x.is_inference())


@dataclass(frozen=True, slots=True)
class _Maker:
    """Puts values together."""

    leaves: Sequence[Any]
    held: Sequence[Any]
    given: Sequence[Any]

    def value(self, form: _Form) -> Any:  # noqa: ANN401
        match form:
            case _Leaf(index):
                return self.leaves[index]
            case _Given(index):
                return self.given[index]
            case _Held(index):
                return self.held[index]
            case _Tuple(spec, children):
                return tree_unflatten([self.value(child) for child in children], spec)

    def contents(self, forms: Mapping[Place, _Form]) -> dict[Place, Any]:
        return {place: self.value(form) for place, form in forms.items()}


def _base(kind: type) -> type | None:
    """What makes an empty container of this kind; None where it is none."""
    if kind not in _bases:
        _bases[kind] = _find_base(kind)
    return _bases[kind]


def _find_base(kind: type) -> type | None:
    if issubclass(kind, PLAIN) or kind.__module__.partition(".")[0] == "torch":
        return None
    for base in BASES:
        if issubclass(kind, base):
            return base

    is_called = any("__call__" in owner.__dict__ for owner in kind.__mro__)
    has_fields = kind.__dictoffset__ or any(True for _ in _slots(kind))
    is_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if is_called or not has_fields or (is_python and not issubclass(kind, UserDict | UserList)):
        return None

    try:
        object.__new__(kind)
    except TypeError:  # made in C, or a kind of number: who knows what it holds
        return None

    return object


def _slots(kind: type) -> Iterator[str]:
    """Names of the fields that do not lie in `__dict__`."""
    for owner in kind.__mro__:
        names = owner.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{owner.__name__.lstrip('_')}{name}" if is_private else name


def _contents(container: Any) -> dict[Place, Any]:  # noqa: ANN401
    """All that a container holds."""
    base = cast("Any", _base(type(container)))
    found: dict[Place, Any] = {}
    if issubclass(base, dict):
        found = {("item", key): base.__getitem__(container, key) for key in base.__iter__(container)}
    elif issubclass(base, list | deque):
        found = {("item", number): value for number, value in enumerate(base.__iter__(container))}

    if base is defaultdict:
        found["field", "default_factory"] = container.default_factory
    found |= {("field", name): value for name, value in getattr(container, "__dict__", {}).items()}
    names = [name for name in _slots(type(container)) if hasattr(container, name)]
    return found | {("field", name): getattr(container, name) for name in names}


def _empty(container: _Container) -> Any:  # noqa: ANN401
    base = cast("Any", _base(container.kind))
    made = base.__new__(container.kind)
    if base is deque:
        deque.__init__(made, (), container.maxlen)
    return made


def _fill(container: Any, contents: Mapping[Place, Any]) -> None:  # noqa: ANN401
    """Make a container hold this and nothing else, past whatever its class does when it is written to."""
    base = cast("Any", _base(type(container)))
    if issubclass(base, dict | list | deque):
        base.clear(container)
    getattr(container, "__dict__", {}).clear()
    for name in _slots(type(container)):
        if hasattr(container, name):
            object.__delattr__(container, name)

    for (kind, key), value in contents.items():
        if kind == "field":
            object.__setattr__(container, cast("str", key), value)
        elif issubclass(base, dict):
            base.__setitem__(container, key, value)
        else:
            base.append(container, value)
