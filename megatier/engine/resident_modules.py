"""Binds weights that stay where they are to all modules at once, for a whole forward.

A node binds its weights for each call of its module, since they come for it and go again. Weights that are all held on
the GPU (`session.resident_weights`) do neither. So modules have them from a forward's beginning to its end, and run as
those of any model: the host has little time to launch what the device computes for one token. Between two forwards
parameters are unbound, as ever.

What a node checks in each call is checked once a forward: that the weights are the same tensors, and that nobody has
written into them. Modules of which a call needs more bind their weights by themselves, as do those whose first forwards
are looked at (`Node.can_stay_bound`).

Threads: one at a time runs a forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatier.engine.bound_module import assignment
from megatier.engine.node import Node
from megatier.guards.weight_changes import changed_weight_error


class ResidentModules:
    """The modules of a model whose weights stay where they are."""

    def __init__(self, nodes: Sequence[Node], weights: Callable[[str], Tensor]) -> None:
        """Bind nothing yet.

        Args:
            nodes: those of the model.
            weights: gives the weights of a unit by its name: uint8 [block].
        """
        self._nodes = nodes
        self._weights = weights
        self._ready: list[Node] | None = None
        """The nodes that are bound for a whole forward; None: what follows was not noted to its end."""
        self._names: list[tuple[str, str]] = []
        """The module and the parameter of each place of a weight."""
        self._versions: list[int] = []
        """The version of each weight, which goes up when it is written."""

        # The places of weights come first, in all of these.
        self._owners: list[dict[str, Any]] = []
        """The dictionaries into which something is put."""
        self._keys: list[str] = []
        """Its key there."""
        self._unbound: list[Any] = []
        """What lies there between two forwards."""
        self._bound: list[Any] = []
        """What lies there during one."""

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Run one forward inside, without gradients. All modules that are ready for it have their weights.

        Raises:
            UnsupportedModelError: it changes a weight, or somebody has put another one in its place.
        """
        ready = [node for node in self._nodes if node.can_stay_bound]
        if ready != self._ready:
            self._take(ready)

        # As `BoundModule` does it for one module: looked at before and after, and both functions are made before
        # either is called.
        self._check_held(self._unbound)
        bind = assignment(self._owners, self._keys, self._bound)
        unbind = assignment(self._owners, self._keys, self._unbound)
        try:
            bind()
            yield
            self._check_held(self._bound)
        finally:
            unbind()
        self._check_unchanged()

    def forget(self) -> None:
        """Drop the weights: their memory goes to others."""
        self._take([])

    def _take(self, ready: list[Node]) -> None:
        """Note what is bound for these nodes, and where."""
        # An interrupt may come at any line, and what it leaves is not taken for that of any nodes.
        self._ready = None
        self._names, self._owners, self._keys, self._unbound, self._bound = [], [], [], [], []
        notes: list[tuple[Node, list[Tensor]]] = []
        for node in ready:
            by_name = dict(zip(node.names, node.leaves(self._weights(node.unit)), strict=True))
            inside = [by_name[tensor.name] for _, _, tensor in node.bindings]
            self._names += [(node.module_name, tensor.name) for _, _, tensor in node.bindings]
            self._owners += [owner for owner, _, _ in node.bindings]
            self._keys += [leaf for _, leaf, _ in node.bindings]
            self._unbound += node.held
            self._bound += inside
            notes.append((node, inside))
        self._versions = [weight._version for weight in self._bound]

        # Nodes know what their modules hold. They are told in the same assignment, into which no interrupt comes.
        for node, inside in notes:
            self._owners += [vars(node)] * 2
            self._keys += ["held", "stays_bound"]
            self._unbound += [node.held, False]
            self._bound += [inside, True]
        self._ready = ready

    def _check_held(self, tensors: Sequence[Any]) -> None:
        """Check that nobody has put another parameter in the place of one."""
        # The names are fewer: there is none for what nodes are told.
        for name, owner, key, tensor in zip(self._names, self._owners, self._keys, tensors, strict=False):
            if owner.get(key) is not tensor:
                raise changed_weight_error(*name)

    def _check_unchanged(self) -> None:
        """Check that the forward has written into no weight."""
        for name, weight, version in zip(self._names, self._bound, self._versions, strict=False):
            if weight._version != version:
                raise changed_weight_error(*name)
