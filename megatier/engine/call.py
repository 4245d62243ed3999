"""Runs one call of a module in one group, cut into slices of the batch.

The arguments of the module are flattened. Those that require a gradient are kept apart, since autograd passes them to
the node. Outputs that Hugging Face collects by hooks, such as router logits, are collected for each slice and handed
on. Whatever the module writes into containers among its arguments is an output too. `Node` makes a `Call`, and
`UnitFunction` runs it when a backward will follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatier.engine.bound_module import BoundModule
from megatier.engine.call_arguments import Arguments, Written, copied_out
from megatier.engine.captures import capturing, collector
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.guards.crossing import check_inside, note_owner
from megatier.tier import Phase


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a node in one group."""

    node: BoundModule
    """The node that is called."""
    arguments: Arguments
    """The module's arguments, taken apart."""
    flat: list[Any]
    """The leaves of the arguments in order, then the weights that are lent to the module."""
    differentiable: list[int]
    """The positions of the inputs that require a gradient. In a training call their entries of `flat` are empty."""
    collected: tuple[str, ...]
    """The keys under which Hugging Face's hooks collect outputs in this pass. A recomputation collects them again."""
    captured: list[tuple[str, int]] = field(default_factory=list)
    """The outputs that hooks collected: each key with their number."""
    outgoing: TreeSpec | None = None
    """The structure of the module's result."""
    written: Written | None = None
    """What the last slice wrote into containers."""

    @property
    def num_slices(self) -> int:
        """The number of slices of this call: 1 if no argument has a batch dimension, as for position embeddings."""
        count = self.node.stage.slices
        batched = self.node.rows.batched
        assert count == 1 or batched is not None, "slices are learnt before training"
        return count if batched is None or any(batched) else 1

    def cut(self, inputs: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Any]]]:
        """Yield the differentiable inputs of each slice as autograd leaves, and all its flat arguments."""
        # As leaves, the graph of each slice ends here, and its gradients can be handed on one by one.
        for index in range(self.num_slices):
            leaves = [
                note_owner(self._rows_of_slice(tensor, i, index).detach().requires_grad_(), self.node.module_name)
                for tensor, i in zip(inputs, self.differentiable, strict=True)
            ]
            flat = [self._rows_of_slice(x, i, index) for i, x in enumerate(self.flat)]
            for position, leaf in zip(self.differentiable, leaves, strict=True):
                flat[position] = leaf
            yield leaves, flat

    def _rows_of_slice(self, value: Any, position: int, index: int) -> Any:  # noqa: ANN401
        """Return the rows of an argument for one slice. An argument without a batch dimension belongs to all slices.

        Raises:
            ConfigError: it is not known how to cut the argument, or the slices do not divide its rows.
        """
        count = self.num_slices
        if count == 1 or not torch.is_tensor(value) or not value.dim():
            return value
        if (is_cut := self.is_cut(position)) is None:
            raise ConfigError(
                f"train.slices: argument {position} of {self.node.module_name} was not there in the first step, so "
                "megatier does not know how to cut it. Give every batch the same keys, or set train.slices to 1."
            )

        if not is_cut:
            return value
        rows, rest = divmod(value.shape[0], count)
        if rest:
            raise ConfigError(f"train.slices is {count}, but a group has {value.shape[0]} rows; it must divide them.")

        return value[index * rows : (index + 1) * rows]

    def take_inputs(self) -> list[Any]:
        """Remove the inputs that require a gradient, and return them in order."""
        # The call lives until the backward, so it must not hold an input that the activation policy drops.
        inputs = [self.flat[i] for i in self.differentiable]
        for i in self.differentiable:
            self.flat[i] = None
            if not self.is_lent(i):
                self.arguments.leaves[i] = None
        return inputs

    def is_lent(self, position: int) -> bool:
        """Return whether a flat input is a weight that is lent to the module, rather than an argument."""
        return position >= len(self.arguments.leaves)

    def is_cut(self, position: int) -> bool | None:
        """Return whether a flat input is cut into slices; None: that is not known."""
        return False if self.is_lent(position) else self.node.rows.are_cut(position)

    def run(self, leaves: Sequence[Tensor], flat: Sequence[Any]) -> list[Tensor | None]:
        """Run the module on one slice. Return its outputs, what hooks captured, and what it wrote into containers.

        Args:
            leaves: views of the unit's weights.
            flat: all flat inputs of the slice.

        Raises:
            NonFiniteError: a weight or an output is not finite, if the stage checks that.
            UnsupportedModelError: the slices of a batch write to different places.
        """
        # The forward writes into copies of the containers, so that a recomputation finds them as the first run did.
        count = len(self.arguments.leaves)
        copy = self.arguments.copy(flat[:count])
        weights = [*leaves, *flat[count:]]
        outputs = self._run(weights, copy.args, copy.kwargs)
        written, tensors = copy.written(self.node.module_name)
        if self.written is not None and not written.is_like(self.written):
            raise UnsupportedModelError(
                f"{self.node.module_name} writes different things into its arguments for different rows of a batch. "
                "Set train.slices to 1."
            )

        self.written = written
        outputs = copied_out([*outputs, *tensors], weights)

        if self.node.stage.checks_finite:
            self.node.check_finite(weights, outputs)
        return outputs

    def _run(self, weights: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
        """Run the module. Return its outputs and what hooks captured."""
        # Hugging Face's hooks would append to its own collector again in each slice and each recomputation. Also, the
        # graph of a tensor from inside the node ends there, so it has to be an output of the node.
        with capturing(self.collected) as caught:
            output = self.node.run(weights, args, kwargs)

        self.captured = [(key, len(value)) for key, value in caught.items() if value]
        outputs, self.outgoing = tree_flatten(output)
        others = {type(x).__name__ for x in outputs if x is not None and not torch.is_tensor(x)}
        if others:
            raise UnsupportedModelError(
                f"{self.node.module_name} returns something other than tensors ({', '.join(sorted(others))}); it "
                "cannot be streamed."
            )

        return outputs + [tensor for values in caught.values() for tensor in values]

    def evaluate(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run the module once, on the whole batch and on the very containers that it was given."""
        with self._weights() as leaves:
            weights = [*leaves, *self.flat[len(self.arguments.leaves) :]]
            results = copied_out(self._run(weights, args, kwargs), weights)
            self.arguments.copy_written(weights)
            if self.node.stage.checks_finite:
                self.node.check_finite(weights, results)
        return self.unpack(results)

    def run_plain(self, *, is_cut: bool) -> Any:  # noqa: ANN401
        """Run the module without a backward.

        Args:
            is_cut: whether to run slice by slice, as in training. Otherwise the whole batch runs, to learn what is
                batched.
        """
        node = self.node
        slices = [self.flat]
        if is_cut:
            slices = [flat for _, flat in self.cut(())]
        with self._weights() as leaves:
            results = concatenate([self.run(leaves, flat) for flat in slices])

        # No argument requires a gradient. So if a result does, a tensor came in another way.
        if any(x is not None and x.requires_grad for x in results):
            check_inside(node.module_name, results, (), node.stage.model)
        return self.unpack(results)

    @contextlib.contextmanager
    def _weights(self) -> Iterator[list[Tensor]]:
        """Hold the unit's weights during a forward without a backward."""
        stage = self.node.stage
        use = stage.source.enter(self.node.unit, Phase.FORWARD, stage.gradients.group)

        try:
            yield self.node.leaves(use.bytes)
        finally:
            use.leave()

    def unpack(self, results: list[Tensor | None]) -> Any:  # noqa: ANN401
        """Return the module's result. The other outputs go to Hugging Face's collector and into the containers.

        Args:
            results: the module's outputs, what hooks captured, and what was written into containers, in this order.
        """
        assert self.outgoing is not None, "a call is unpacked when it has run"
        # In the order in which `run` gives them.
        rest = iter(results)
        outputs = list(islice(rest, self.outgoing.num_leaves))
        outer = collector.get()
        for key, number in self.captured:
            captured = list(islice(rest, number))
            if outer is not None:
                outer[key].extend(captured)
        tensors = list(rest)

        # Removed, since the call lives until the backward, where a recomputation notes its writes again.
        written = self.written
        self.written = None
        is_learning = self.node.stage.is_learning
        if written is not None:
            if is_learning:
                self.node.rows.learn_written(tensors)
            elif self.num_slices > 1:
                self.node.rows.check_joined(written)
            self.arguments.write(written, tensors)
        if is_learning:
            self.node.rows.learn_outputs(results[: len(results) - len(tensors)])
        return tree_unflatten(outputs, self.outgoing)


def concatenate(slices: list[list[Any]]) -> list[Any]:
    """Concatenate the outputs of slices along the batch dimension."""
    # One slice is the common case, and needs no copy.
    if len(slices) == 1:
        return slices[0]

    whole = []
    for pieces in zip(*slices, strict=True):
        whole.append(None if pieces[0] is None else torch.cat(pieces))
    return whole
