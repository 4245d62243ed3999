"""Takes the arguments of a call apart, since layers pass tensors on in containers, which one fills and another reads.

Gemma 3n and 4 pass keys and values on in a dictionary that is an argument of every layer. Autograd sees only what a
node takes and returns. So the arguments of a call are taken apart: every tensor that can be reached through mappings,
sequences and attributes of objects becomes an input of the node. The forward runs on copies of these containers, also
when it is recomputed. What it wrote into its copies is an output of the node, and only that is written into the
containers outside.

Modules, configs, callables and torch's own objects (block masks) are passed on as they are.

A value that was taken apart is a `_Form`: a tree of leaves, containers and tuples that refer to each other by number.
So a container that appears twice, or holds itself, is rebuilt as it was. `Call` uses all of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatier.engine.containers import LEAF_TYPES, ContainerKey, contents_of, empty, fill, is_container
from megatier.errors import UnsupportedModelError
from megatier.guards.crossing import TORCH_ATTRIBUTES


class _Kind(Enum):
    """What a form refers to."""

    LEAF = "a value that is no container"
    GIVEN = "a leaf that the call was given, in the form of what a forward wrote"
    CONTAINER = "a container; several others may hold it, and it may hold itself"


@dataclass(frozen=True, slots=True)
class _Ref:
    """A reference to a value, by its number among those of its kind."""

    kind: _Kind
    index: int


@dataclass(frozen=True, slots=True)
class _Tuple:
    """A tuple, or any other immutable pytree node."""

    spec: TreeSpec
    children: tuple[_Form, ...]


_Form = _Ref | _Tuple


@dataclass(frozen=True, slots=True)
class _Container:
    """How to copy a container. The container itself is not kept, since it will hold the node's outputs."""

    kind: type
    maxlen: int | None
    """The bound of a deque."""
    path: str
    """The path to the container from the arguments, for messages."""
    contents: dict[ContainerKey, _Form]


@dataclass(slots=True)
class _Walk:
    """Takes values apart into leaves and containers."""

    leaves: list[Any] = field(default_factory=list)
    """All values that are not containers, in the order in which they were found."""
    containers: list[_Container] = field(default_factory=list)
    """All containers, in the order in which they were found."""
    originals: list[Any] = field(default_factory=list)
    """The containers themselves, in the same order."""
    known: dict[int, _Form] = field(default_factory=dict)
    """The form of each value seen so far, by its id. Tensors are included only if a container holds them."""
    inside: list[int] = field(default_factory=list)
    """The leaves that lie in a container."""

    def take(self, value: Any, path: str, *, is_inside: bool) -> _Form:  # noqa: ANN401 - whatever a module takes
        """Take a value apart and return its form."""
        if (known := self.known.get(id(value))) is not None:
            return known

        if not (torch.is_tensor(value) or isinstance(value, LEAF_TYPES)):
            if is_container(type(value)):
                return self._take_container(value, path)
            # One level deep. torch's function leaves a reference cycle, which would keep the value until garbage
            # collection.
            outer = [value]
            children, spec = tree_flatten(value, is_leaf=lambda x: x is not outer[0])
            outer[0] = None
            if not spec.is_leaf():
                forms = (self.take(x, f"{path}[{n}]", is_inside=is_inside) for n, x in enumerate(children))
                return _Tuple(spec, tuple(forms))

        # A tensor that is itself an argument may come twice. Then it is two inputs, as for any module.
        form = _Ref(_Kind.LEAF, len(self.leaves))
        self.leaves.append(value)
        if is_inside:
            self.inside.append(form.index)
            if torch.is_tensor(value):
                self.known[id(value)] = form

        return form

    def _take_container(self, value: Any, path: str) -> _Form:  # noqa: ANN401
        """Take a container apart."""
        form = _Ref(_Kind.CONTAINER, len(self.containers))
        contents: dict[ContainerKey, _Form] = {}
        maxlen = value.maxlen if isinstance(value, deque) else None
        recipe = _Container(type(value), maxlen, path, contents)

        # Registered before its contents are visited, since it may hold itself.
        self.known[id(value)] = form
        self.containers.append(recipe)
        self.originals.append(value)

        for place, child in contents_of(value).items():
            kind, key = place
            at = f"{path}[{key!r}]" if kind == "item" else f"{path}.{key}"
            contents[place] = self.take(child, at, is_inside=True)

        return form


class Arguments:
    """The arguments of a call, taken apart into leaves and containers."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the arguments apart, with their containers as they are now."""
        walk = _Walk()
        self.args = [walk.take(x, f"argument {n}", is_inside=False) for n, x in enumerate(args)]
        self.kwargs = {name: walk.take(x, name, is_inside=False) for name, x in kwargs.items()}
        """The forms of the positional arguments and of the keyword arguments."""
        self.leaves: list[Any] = walk.leaves
        """The tensors and other values that are not containers, in order."""
        self.in_containers = frozenset(walk.inside)
        """The positions of those leaves that lie in containers."""
        self.containers = walk.containers
        """The containers in these forms."""
        self._outside: tuple[list[Any], list[Any]] | None = (walk.originals, list(walk.leaves))
        """The caller's containers and leaves, until they are written to."""

    def copy(self, leaves: Sequence[Any]) -> ContainerCopy:
        """Rebuild the arguments from these leaves, with new containers."""
        return ContainerCopy(self, leaves)

    def copy_written(self, memory: Sequence[Tensor]) -> None:
        """Replace views of memory that will be reused, written into the caller's containers, by copies."""
        assert self._outside is not None, "a call writes once"
        if originals := self._outside[0]:
            copy_inside(originals, memory)

    def write(self, written: Written, tensors: Sequence[Tensor | None]) -> None:
        """Write what a forward wrote into the caller's containers. A call does this once, at its end.

        Args:
            written: what the forward wrote.
            tensors: the tensors to write instead of the forward's own, in order.
        """
        assert self._outside is not None, "a call writes once"
        originals, given = self._outside

        # Dropped, since from now on the containers hold the node's outputs, which hold the call. That reference cycle
        # would never be freed.
        self._outside = None
        new = _empty_ones(written.new)
        leaves = written.leaves_with(tensors)
        maker = _Maker(leaves, [*originals, *new], given)
        for container, recipe in zip(new, written.new, strict=True):
            contents = maker.contents(recipe.contents)
            fill(container, contents)

        for index, forms in written.changed.items():
            contents = maker.contents(forms)
            fill(originals[index], contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The changes that a forward made to its copies of the containers."""

    changed: dict[int, dict[ContainerKey, _Form]]
    """The new contents of each given container that changed, by its number."""
    new: list[_Container]
    """The containers that were made in the forward."""
    leaves: list[Any]
    """The leaves that were written. Tensors are None here, or they would be held until the backward."""
    places: list[tuple[int, str]]
    """For each tensor that was written, its position in `leaves` and the path of its container."""

    def is_like(self, other: Written) -> bool:
        """Return whether another run wrote to the same places."""
        return self._shape() == other._shape()

    def _shape(self) -> tuple[object, ...]:
        """Return what must be equal for all slices of a batch: everything except values and paths."""
        kinds = [recipe.kind for recipe in self.new]
        contents = [recipe.contents for recipe in self.new]
        positions = [position for position, _ in self.places]
        return self.changed, kinds, contents, positions

    def leaves_with(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        """Return the leaves that were written, with these tensors instead of the forward's own."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            position, _ = place
            leaves[position] = tensor
        return leaves


class ContainerCopy:
    """A call's arguments with copies of its containers, for one run of the forward."""

    def __init__(self, arguments: Arguments, leaves: Sequence[Any]) -> None:
        """Rebuild the arguments from these leaves."""
        self._containers = arguments.containers
        self._leaves = leaves

        # All copies are made before any is filled, since they may hold each other.
        self._copies = _empty_ones(self._containers)
        maker = _Maker(leaves, self._copies)
        self._before = [maker.contents(recipe.contents) for recipe in self._containers]
        for container, contents in zip(self._copies, self._before, strict=True):
            fill(container, contents)

        self.args = [maker.value(form) for form in arguments.args]
        """The arguments for the forward."""
        self.kwargs = {name: maker.value(form) for name, form in arguments.kwargs.items()}
        """The named arguments for the forward."""
        self._versions: dict[int, int] = {}
        """The version of each tensor in a container, by its position."""
        self._required: set[int] = set()
        """The positions of tensors that required a gradient before the forward."""
        for position, tensor in self._tensors():
            if position in arguments.in_containers:
                self._versions[position] = tensor._version
            if tensor.requires_grad:
                self._required.add(position)

    def written(self, module_name: str) -> tuple[Written, list[Tensor]]:
        """Compare the containers with their contents before the forward. Return what it wrote, and the tensors in it.

        Raises:
            UnsupportedModelError: the forward changed a shared tensor in place.
        """
        self._check_in_place(module_name)

        # The call's own containers and tensors are known already, so forms refer to them by number.
        walk = _Walk(containers=list(self._containers))
        for index, copy in enumerate(self._copies):
            walk.known[id(copy)] = _Ref(_Kind.CONTAINER, index)
        for index, tensor in self._tensors():
            walk.known[id(tensor)] = _Ref(_Kind.GIVEN, index)

        changed: dict[int, dict[ContainerKey, _Form]] = {}
        places: list[tuple[int, str]] = []
        tensors: list[Tensor] = []

        for index, copy in enumerate(self._copies):
            before = self._before[index]
            after = contents_of(copy)
            if _holds_the_same(before, after):
                continue
            path = self._containers[index].path
            first = len(walk.leaves)
            changed[index] = {place: walk.take(x, path, is_inside=True) for place, x in after.items()}
            for position, leaf in enumerate(walk.leaves[first:], first):
                if torch.is_tensor(leaf):
                    places.append((position, path))
                    tensors.append(leaf)

        written = Written(
            changed=changed,
            new=walk.containers[len(self._containers) :],
            leaves=[None if torch.is_tensor(leaf) else leaf for leaf in walk.leaves],
            places=places,
        )
        return written, tensors

    def _check_in_place(self, module_name: str) -> None:
        """Refuse a forward that changed a tensor of a container in place.

        Raises:
            UnsupportedModelError: a tensor was changed.
        """
        # The version counter shows in-place changes that torch knows of. A tensor that newly requires a gradient shows
        # that something differentiable was written into it.
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
        """Return the tensors among the leaves with their positions, except inference tensors, which have no version."""
        return ((i, x) for i, x in enumerate(self._leaves) if torch.is_tensor(x) and not x.is_inference())


def copy_inside(values: Sequence[Any], memory: Sequence[Tensor]) -> bool:
    """Replace tensors inside containers that lie in memory which will be reused by copies.

    Args:
        values: containers and other values.
        memory: tensors in that memory.

    Returns:
        Whether there were any.
    """
    walk = _Walk()
    for value in values:
        walk.take(value, "", is_inside=False)
    leaves = copied_out(walk.leaves, memory)
    if all(new is old for new, old in zip(leaves, walk.leaves, strict=True)):
        return False

    maker = _Maker(leaves, walk.originals)
    for original, recipe in zip(walk.originals, walk.containers, strict=True):
        before = contents_of(original)
        after = maker.contents(recipe.contents)

        if not _holds_the_same(before, after):
            fill(original, after)
    return True


def _holds_the_same(before: Mapping[ContainerKey, Any], after: Mapping[ContainerKey, Any]) -> bool:
    """Return whether a container holds the same objects in the same places and order."""
    # By identity, since comparing tensors by value would need the device, and a class may define equality as it likes.
    return list(before) == list(after) and all(before[place] is after[place] for place in before)


def _empty_ones(recipes: Sequence[_Container]) -> list[Any]:
    """Return an empty container for each recipe."""
    return [empty(recipe.kind, recipe.maxlen) for recipe in recipes]


def copy_attributes(module: nn.Module, memory: Sequence[Tensor]) -> bool:
    """Replace tensors in a module's attributes and buffers that lie in memory which will be reused by copies.

    Args:
        module: the module, with its submodules.
        memory: tensors in that memory.

    Returns:
        Whether there were any.
    """
    has_copied = False
    for submodule in module.modules():
        # torch's own attributes (parameters, hooks, submodules) are handled elsewhere.
        attributes = {
            name: value
            for name, value in vars(submodule).items()
            if name not in TORCH_ATTRIBUTES and isinstance(value, Tensor | list | tuple | dict)
        }
        if copy_inside([attributes, submodule._buffers], memory):
            vars(submodule).update(attributes)
            has_copied = True
    return has_copied


def copied_out(values: Sequence[Any], memory: Sequence[Tensor]) -> list[Any]:
    """Return the values, with copies of those tensors that share storage with the given memory.

    A copy is differentiable, like `clone`.
    """
    # By storage rather than address. All slots are parts of one arena, and a module can return nothing from it but
    # weights.
    addresses = {_address(tensor) for tensor in memory} - {0}
    return [x.clone() if torch.is_tensor(x) and _address(x) in addresses else x for x in values]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


class _Maker:
    """Rebuilds values from their forms."""

    def __init__(self, leaves: Sequence[Any], containers: Sequence[Any], given: Sequence[Any] = ()) -> None:
        """Take the values of each kind. Only the form of what a forward wrote refers to given leaves."""
        self._values = {_Kind.LEAF: leaves, _Kind.CONTAINER: containers, _Kind.GIVEN: given}

    def value(self, form: _Form) -> Any:  # noqa: ANN401
        """Return the value of a form."""
        if isinstance(form, _Ref):
            of_kind = self._values[form.kind]
            return of_kind[form.index]
        children = [self.value(child) for child in form.children]
        return tree_unflatten(children, form.spec)

    def contents(self, forms: Mapping[ContainerKey, _Form]) -> dict[ContainerKey, Any]:
        """Return the values in the places of a container."""
        return {place: self.value(form) for place, form in forms.items()}
