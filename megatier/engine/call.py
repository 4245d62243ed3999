"""A call of a node: one use of one unit in one group, cut into slices.

What the module takes is kept flat; the inputs that require a gradient are held apart, since autograd passes them on.
Hugging Face collects some outputs by hooks (router logits): a slice collects its own, and the call hands them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from megatier.errors import ConfigError, NonFiniteError, UnsupportedModelError
from megatier.store.tier import Phase

if TYPE_CHECKING:
    from megatier.engine.node import Node

collector: ContextVar[dict[str, Any] | None] = _active_collector  # type: ignore[assignment]
"""Where Hugging Face collects what its hooks capture, such as router logits."""


@dataclass(slots=True)
class Call:
    """One use of a node in one group."""

    node: Node
    flat: list[Any]
    spec: TreeSpec
    differentiable: list[int]
    """Positions of the inputs that require a gradient; their places in `flat` are empty in a training call."""
    collected: tuple[str, ...]
    """What Hugging Face collects by hooks in this pass (router logits); a recompute must collect it again."""
    captured: list[tuple[str, int]] = field(default_factory=list)
    """Outputs so collected: key and how many."""
    outgoing: TreeSpec | None = None
    """How what the module returns is nested."""

    @property
    def num_slices(self) -> int:
        """1 where no argument is batched, such as for position embeddings."""
        count, batched = self.node.stage.slices, self.node.batched
        assert count == 1 or batched is not None, "slices are learnt before training"
        return count if batched is None or any(batched) else 1

    def cut(self, inputs: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Any]]]:
        """Per slice: the differentiable inputs, detached and requiring a gradient, and all flat arguments."""
        for index in range(self.num_slices):
            leaves = [
                self._part(tensor, i, index).detach().requires_grad_()
                for tensor, i in zip(inputs, self.differentiable, strict=True)
            ]
            flat = [self._part(x, i, index) for i, x in enumerate(self.flat)]
            for position, leaf in zip(self.differentiable, leaves, strict=True):
                flat[position] = leaf
            yield leaves, flat

    def _part(self, value: Any, position: int, index: int) -> Any:  # noqa: ANN401
        count, batched = self.num_slices, self.node.batched
        if count == 1 or not torch.is_tensor(value) or not value.dim() or batched is None:
            return value
        if (is_cut := batched[position]) is None:
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

    def run(self, leaves: Sequence[Tensor], flat: Sequence[Any]) -> list[Tensor | None]:
        """Outputs and captured outputs of one slice."""
        args, kwargs = tree_unflatten(flat, self.spec)
        caught: dict[str, list[Tensor]] = {key: [] for key in self.collected}
        token = collector.set(caught)
        try:
            output = self.node.run(leaves, args, kwargs)
        finally:
            collector.reset(token)
        self.captured = [(key, len(value)) for key, value in caught.items() if value]
        outputs, self.outgoing = tree_flatten(output)
        others = sorted({type(x).__name__ for x in outputs if x is not None and not torch.is_tensor(x)})
        if others:
            raise UnsupportedModelError(
                f"{self.node.module_name} returns something other than tensors ({', '.join(others)}); it cannot be "
                "streamed."
            )
        outputs += [tensor for values in caught.values() for tensor in values]
        if self.node.stage.checks_finite:
            self._check(leaves, outputs)
        return outputs

    def _check(self, leaves: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        for what, tensors in (("a weight", leaves), ("an output", outputs)):
            if any(t is not None and t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors):
                raise NonFiniteError(f"{what} of unit {self.node.unit} ({self.node.module_name}) is not finite")

    def run_plain(self, *, is_cut: bool = False) -> Any:  # noqa: ANN401
        """Without a backward; uncut for evaluation, and for learning what is batched."""
        stage = self.node.stage
        use = stage.source.enter(self.node.unit, Phase.FORWARD, stage.gradients.group)
        try:
            leaves = self.node.leaves(use.bytes)
            parts = [flat for _, flat in self.cut(())] if is_cut else [self.flat]
            results = join([self.run(leaves, flat) for flat in parts])
        finally:
            use.leave()
        self.node.learn_outputs(results)
        return self.unpack(results)

    def unpack(self, results: list[Tensor | None]) -> Any:  # noqa: ANN401
        """What the module returns; captured outputs go to Hugging Face's collector."""
        count = sum(number for _, number in self.captured)
        caught = results[len(results) - count :]
        outer = collector.get()
        for key, number in self.captured:
            if outer is not None:
                outer[key].extend(caught[:number])
            caught = caught[number:]
        assert self.outgoing is not None, "a call is unpacked when it has run"
        return tree_unflatten(results[: len(results) - count], self.outgoing)


def join(parts: list[list[Any]]) -> list[Any]:
    """Slices end to end along the batch."""
    if len(parts) == 1:
        return parts[0]
    return [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
