"""Binds resident weights to all modules at once, for a whole forward.

A node usually binds its weights for each call of its module, since they are loaded for it and leave again. Weights that
are all held on the GPU (`session.resident_weights`) do neither. So modules have them for a whole forward, and run like
those of any model, which matters because the host has little time to launch the kernels of one token. Between two
forwards the parameters are unbound.

What a node checks in each call is checked once a forward: that the weights are the same tensors, and that nothing was
written into them. Modules that need more in a call bind their weights by themselves, as do those in their first,
checked forwards (`Node.can_stay_bound`).

One thread at a time runs a forward.
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
    """The modules of a model with resident weights."""

    def __init__(self, nodes: Sequence[Node], weights: Callable[[str], Tensor]) -> None:
        """Bind nothing yet.

        Args:
            nodes: the nodes of the model.
            weights: returns the weights of a unit by its name: uint8 [block].
        """
        self._nodes = nodes
        self._weights = weights
        self._ready: list[Node] | None = None
        """The nodes that the lists below describe; None: an interrupt came while they were filled."""
        self._names: list[tuple[str, str]] = []
        """The names of the module and the parameter of each place of a weight."""
        self._versions: list[int] = []
        """The version of each weight, which increases when it is written."""

        # In each of these lists the places of weights come first, followed by attributes of nodes.
        self._owners: list[dict[str, Any]] = []
        """The dictionaries that are written to."""
        self._keys: list[str] = []
        """The key in each dictionary."""
        self._unbound: list[Any] = []
        """The value between two forwards."""
        self._bound: list[Any] = []
        """The value during a forward."""

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Run one forward without gradients inside. All modules that can stay bound have their weights.

        Raises:
            UnsupportedModelError: the forward changes a weight, or a parameter was replaced.
        """
        ready = [node for node in self._nodes if node.can_stay_bound]
        if ready != self._ready:
            self._take(ready)

        # As in `BoundModule` for one module: places are checked before and after, and both functions are made before
        # either is called.
        self._check_placed(self._unbound)
        bind = assignment(self._owners, self._keys, self._bound)
        unbind = assignment(self._owners, self._keys, self._unbound)
        try:
            bind()
            yield
            self._check_placed(self._bound)
        finally:
            unbind()
        self._check_unchanged()

    def forget(self) -> None:
        """Drop all references to the weights, whose memory is given to others."""
        self._take([])

    def _take(self, ready: list[Node]) -> None:
        """Fill the lists for these nodes."""
        # An interrupt may come at any line, and half-filled lists must not be used.
        self._ready = None
        self._names, self._owners, self._keys, self._unbound, self._bound = [], [], [], [], []
        notes: list[tuple[Node, list[Tensor]]] = []
        for node in ready:
            by_name = dict(zip(node.names, node.leaves(self._weights(node.unit)), strict=True))
            inside = [by_name[tensor.name] for _, _, tensor in node.bindings]
            self._names += [(node.module_name, tensor.name) for _, _, tensor in node.bindings]
            self._owners += [owner for owner, _, _ in node.bindings]
            self._keys += [attribute for _, attribute, _ in node.bindings]
            self._unbound += node.placed
            self._bound += inside
            notes.append((node, inside))
        self._versions = [weight._version for weight in self._bound]

        # Nodes know what their modules hold. Their attributes change in the same uninterruptible assignment.
        for node, inside in notes:
            self._owners += [vars(node)] * 2
            self._keys += ["placed", "stays_bound"]
            self._unbound += [node.placed, False]
            self._bound += [inside, True]
        self._ready = ready

    def _check_placed(self, tensors: Sequence[Any]) -> None:
        """Check that each place of a weight still holds the expected tensor."""
        # Shorter, since attributes of nodes have no names.
        for name, owner, key, tensor in zip(self._names, self._owners, self._keys, tensors, strict=False):
            if owner.get(key) is not tensor:
                raise changed_weight_error(*name)

    def _check_unchanged(self) -> None:
        """Check that the forward has not written into a weight."""
        for name, weight, version in zip(self._names, self._bound, self._versions, strict=False):
            if weight._version != version:
                raise changed_weight_error(*name)
