"""One autograd node per unit, under Hugging Face's own forward.

The modules of a unit lie on meta. Each one's `forward` is replaced, on the instance, by a call of this node: it asks
for the unit's weights, binds views of their GPU slot, runs the original forward, and unbinds; its backward asks again,
runs the unit's backward, and hands the gradients over. Masks, rotary tables, auxiliary losses and scales stay Hugging
Face's business, which is why one node serves every family.

A group's batch is cut into slices along the batch dimension of its batched arguments; they share one binding. Which
arguments are batched is learnt by calling the model with one row and with two (`learning`), never guessed by size.

Source: the mechanism of gradient checkpointing (torch.utils.checkpoint) with the weights taken out as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten

from megatier.engine.activation import Activations, Rebinding, Replay, dropping
from megatier.engine.call import Call, collector, join
from megatier.engine.compilation import Compiled
from megatier.engine.stage import Stage
from megatier.engine.unbound import make_unbound
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.store.layout import TensorSlice
from megatier.store.tier import Phase

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class Node:
    """One module of one unit, streamed."""

    def __init__(
        self,
        stage: Stage,
        unit: str,
        module_name: str,
        module: nn.Module,
        bindings: Sequence[tuple[dict[str, Tensor | None], str, TensorSlice]],
        *,
        activations: Activations,
        compiles: bool = True,
    ) -> None:
        """Replace the module's forward on the instance."""
        self.stage, self.unit, self.module_name, self.module = stage, unit, module_name, module
        self.activations = activations
        self.bindings = bindings
        self._forward: Callable[..., Any] = module.forward
        self._compiled: Compiled[..., Any] | None = None
        if compiles and stage.compilation is not None and not isinstance(module, nn.Embedding):
            self._compiled = stage.compilation(module.forward, type(module).__name__)
        self._leaves: dict[int, list[Tensor]] = {}
        self._slices = {tensor.name: tensor for _, _, tensor in bindings}
        self.is_trained = {name: stage.gradients.takes(unit, name) for name in self._slices}
        """Of each parameter, in the order of `leaves`."""
        self.batched: list[bool | None] | None = None
        """Per flat argument, whether it is cut (None: it was no tensor while learning); None: not learnt yet."""
        for parameters, leaf, _ in bindings:
            unbound = parameters[leaf]
            assert unbound is not None
            make_unbound(unbound, stage.device, stage.dtype)
        module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """The module's forward, with streamed weights."""
        training = torch.is_grad_enabled()
        if training:
            # A replay would append keys and values a second time: the same loss, wrong gradients.
            kwargs = {k: None if k in CACHE_ARGUMENTS else v for k, v in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        flat, spec = tree_flatten((args, kwargs))
        if any(torch.is_tensor(x) and x.is_meta for x in flat):
            raise UnsupportedModelError(f"{self.module_name} was given a tensor on meta, made from an unbound weight.")
        self._learn(flat)
        collected = tuple(key for key, value in (collector.get() or {}).items() if isinstance(value, list))
        differentiable = [i for i, x in enumerate(flat) if torch.is_tensor(x) and x.requires_grad]
        call = Call(self, flat, spec, differentiable, tuple(key for key in collected if key != "hidden_states"))
        if not training:
            return call.run_plain()
        if not (self.trains or call.differentiable):  # no gradient passes: no backward
            return call.run_plain(is_cut=True)
        inputs = [flat[i] for i in call.differentiable]
        for i in call.differentiable:
            call.flat[i] = None
        if self.trains:
            self.stage.gradients.expect(self.unit, call.num_slices)
        results = _UnitFunction.apply(call, self.stage.anchor, *inputs)  # type: ignore[no-untyped-call]
        return call.unpack(list(results))

    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Views of the unit's parameters in a slot, one per tensor, each an autograd leaf; cached by address.

        Those that are frozen require no gradient.
        """
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data`, for a version counter of its own: all slots of an arena share one, and a load into a neighbour
            # must not look like a change of weights that autograd has saved.
            plane = weights.data.view(self.stage.dtype)
            self._leaves[key] = [
                plane[t.start : t.stop].view(t.shape).detach().requires_grad_(self.is_trained[t.name])
                for t in self._slices.values()
            ]
        return self._leaves[key]

    def forget_leaves(self) -> None:
        """Drop the views that `leaves` made."""
        self._leaves.clear()

    def run(self, leaves: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """The module's own forward with these weights bound."""
        with self._bound(leaves), self.stage.arithmetic():
            forward = self._compiled if self._compiled is not None and torch.is_grad_enabled() else self._forward
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _bound(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        by_name = dict(zip(self._slices, leaves, strict=True))
        before = [parameters[leaf] for parameters, leaf, _ in self.bindings]
        for parameters, leaf, tensor in self.bindings:
            parameters[leaf] = by_name[tensor.name]
        try:
            yield
        finally:
            for (parameters, leaf, _), parameter in zip(self.bindings, before, strict=True):
                parameters[leaf] = parameter

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph stays for the backward, rather than being made again there."""
        lean = self._compiled is not None and self._compiled.saves_inputs_alone
        return lean or self.activations is Activations.KEEP

    @property
    def names(self) -> list[str]:
        """Parameter names, in the order of `leaves`."""
        return list(self._slices)

    @property
    def trained(self) -> list[str]:
        """Those of them that are trained."""
        return [name for name in self._slices if self.is_trained[name]]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters is trained; else a backward has gradients of inputs alone."""
        return any(self.is_trained.values())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Copies of the weights lie in the module inside, for code that computes with them past its forward.

        They live until the backward, beside the slots.
        """
        if self.trains and torch.is_grad_enabled():
            self.stage.gradients.expect(self.unit, 1)
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            copies = _Lent.apply(self, self.stage.anchor)  # type: ignore[no-untyped-call]
        with self._bound(copies):
            yield

    def _learn(self, flat: Sequence[Any]) -> None:
        learnt = self.stage.learnt
        if learnt is None:
            return
        shapes = [tuple(x.shape) if torch.is_tensor(x) and x.dim() else None for x in flat]
        if self.module_name not in learnt:
            learnt[self.module_name] = shapes
            return
        one = learnt[self.module_name]
        if len(one) != len(shapes) or any(
            a is not None and b is not None and a[1:] != b[1:] for a, b in zip(one, shapes, strict=True)
        ):
            raise ConfigError(
                f"train.slices: the arguments of {self.module_name} cannot be cut along the batch; set it to 1."
            )
        self.batched = [None if a is None or b is None else a[0] != b[0] for a, b in zip(one, shapes, strict=True)]

    def learn_outputs(self, outputs: Sequence[Tensor | None]) -> None:
        """While learning, after a run: whether what slices make can be joined. Captured outputs count.

        Raises:
            ConfigError: it cannot.
        """
        learnt = self.stage.learnt_outputs
        if learnt is None:
            return
        shapes = [None if x is None else tuple(x.shape) for x in outputs]
        one = learnt.setdefault(self.module_name, shapes)
        if one == shapes:
            # A batched argument that the module does not use (BioGPT's mask, for its positions): it runs uncut.
            self.batched = [False] * len(self.batched or ())
            return
        doubled = [None if shape is None else (2 * shape[0], *shape[1:]) if shape else shape for shape in one]
        if not all(shape and shape == found for shape, found in zip(doubled, shapes, strict=True) if found is not None):
            raise ConfigError(
                f"train.slices: the outputs of {self.module_name} cannot be joined along the batch; set it to 1."
            )


@dataclass(frozen=True, slots=True)
class _Kept:
    """The graph of one slice, from its forward to its backward. Edges, since tensors would keep their memory."""

    inputs: list[Tensor]
    leaves: list[Tensor]
    outputs: list[GradientEdge | None]
    rows: list[int]
    """Of each output."""
    rebinding: Rebinding


# HOP 3/6: GPU slot -> weights: views, no copy
class _UnitFunction(torch.autograd.Function):
    """Forward and backward of one use of one unit."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        node, stage = call.node, call.node.stage
        ctx.call, ctx.kept, ctx.replays = call, [], []
        present = _stash(ctx, inputs)
        keep = node.keeps_graph
        use = stage.source.enter(node.unit, Phase.FORWARD, stage.gradients.group)
        leaves = node.leaves(use.bytes)
        parts = []
        for slice_inputs, flat in call.cut(present):
            rebinding = Rebinding(use.bytes, *([] if ctx.stashed is None else [present[ctx.stashed]]))
            if not keep:
                ctx.replays.append(Replay(stage.device))
            with torch.enable_grad(), rebinding.hooks() if keep else dropping():
                outputs = call.run(leaves, flat)
            if keep:
                if ctx.stashed is not None:  # autograd holds the leaf; its bytes may go
                    slice_inputs[ctx.stashed].data = slice_inputs[ctx.stashed].data.new_empty(0)
                edges = [get_gradient_edge(x) if x is not None and x.requires_grad else None for x in outputs]
                rows = [0 if x is None or not x.dim() else x.shape[0] for x in outputs]
                ctx.kept.append(_Kept(slice_inputs, leaves, edges, rows, rebinding))
            parts.append([None if x is None else x.detach() for x in outputs])
        use.leave()
        results = join(parts)
        saved = [None if i == ctx.stashed else x for i, x in enumerate(present)]
        ctx.save_for_backward(*(() if keep else saved))
        ctx.mark_non_differentiable(*[x for x in results if x is not None and not x.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        call: Call = ctx.call
        node, stage = call.node, call.node.stage
        stage.gradients.watch_backward()
        fetched = _fetch(ctx)
        use = stage.source.enter(node.unit, Phase.BACKWARD, stage.gradients.group)
        input_grads: list[list[Tensor | None]] = []
        pieces = iter(()) if ctx.kept else call.cut(_saved_inputs(ctx, fetched))
        outputs: Sequence[Tensor | GradientEdge | None]
        for index in range(call.num_slices):
            if ctx.kept:
                kept: _Kept = ctx.kept[index]
                slice_inputs, leaves, outputs, rows = kept.inputs, kept.leaves, kept.outputs, kept.rows
                kept.rebinding.bind(use.bytes, *fetched)
                ctx.kept[index] = kept = None  # type: ignore[assignment]
            else:
                slice_inputs, flat = next(pieces)
                leaves = node.leaves(use.bytes)
                with torch.enable_grad(), ctx.replays[index].again():
                    made = call.run(leaves, flat)
                rows = [0 if x is None or not x.dim() else x.shape[0] for x in made]
                outputs = [x if x is not None and x.requires_grad else None for x in made]
                del made
            with stage.arithmetic():
                wanted = [*slice_inputs, *(leaf for leaf in leaves if leaf.requires_grad)]
                found = _grads(outputs, _cut_grads(grads, rows, index, call.num_slices), wanted)
            del outputs
            if node.trains:
                stage.gradients.add(node.unit, list(zip(node.trained, found[len(slice_inputs) :], strict=True)))
            input_grads.append(list(found[: len(slice_inputs)]))
        use.leave()
        if node.trains:
            stage.gradients.close(node.unit)
        return (None, None, *_join_grads(input_grads, call))


class _Lent(torch.autograd.Function):
    """A unit's weights as tensors of their own, whose gradients are one summand of the unit's."""

    @staticmethod
    def forward(ctx: Any, node: Node, anchor: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.node = node
        use = node.stage.source.enter(node.unit, Phase.FORWARD, node.stage.gradients.group)
        leaves = node.leaves(use.bytes)
        copies = tuple(leaf.detach().clone() for leaf in leaves)
        use.leave()
        frozen = (copy for copy, leaf in zip(copies, leaves, strict=True) if not leaf.requires_grad)
        ctx.mark_non_differentiable(*frozen)
        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:  # noqa: ANN401
        node: Node = ctx.node
        node.stage.gradients.watch_backward()
        parts = zip(node.names, grads, strict=True)
        node.stage.gradients.add(node.unit, [(name, grad) for name, grad in parts if node.is_trained[name]])
        node.stage.gradients.close(node.unit)
        return None, None


def _stash(ctx: Any, inputs: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    """Where the policy says so, start offloading the largest input, and note which; returns the inputs to work with."""
    node: Node = ctx.call.node
    ctx.stashed, result = None, list(inputs)
    if node.activations is Activations.OFFLOAD and inputs:
        ctx.stashed = max(range(len(inputs)), key=lambda i: inputs[i].numel())
        tensor = result[ctx.stashed] = inputs[ctx.stashed].detach().contiguous()
        node.stage.source.stash(node.unit, tensor)
    return result


def _fetch(ctx: Any) -> list[Tensor]:  # noqa: ANN401
    """The offloaded input, if any."""
    if ctx.stashed is None:
        return []
    node: Node = ctx.call.node
    return [node.stage.source.fetch(node.unit)]


def _saved_inputs(ctx: Any, fetched: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    inputs = list(ctx.saved_tensors)
    if ctx.stashed is not None:
        inputs[ctx.stashed] = fetched[0]
    return inputs


def _cut_grads(grads: Sequence[Tensor | None], rows: Sequence[int], index: int, count: int) -> list[Tensor | None]:
    if count == 1:
        return list(grads)
    return [
        None if grad is None else grad[index * size : (index + 1) * size]
        for grad, size in zip(grads, rows, strict=True)
    ]


def _grads(
    outputs: Sequence[Tensor | GradientEdge | None], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
    if not pairs:
        return [None] * len(inputs)
    edges = [get_gradient_edge(o) if torch.is_tensor(o) else o for o, _ in pairs]
    return torch.autograd.grad(edges, inputs, [g for _, g in pairs], allow_unused=True)


def _join_grads(parts: list[list[Tensor | None]], call: Call) -> list[Tensor | None]:
    """Gradients of batched inputs end to end, of shared ones added up."""
    if len(parts) == 1:
        return parts[0]
    joined: list[Tensor | None] = []
    for position, column in zip(call.differentiable, zip(*parts, strict=True), strict=True):
        present = [grad for grad in column if grad is not None]
        if not present:
            joined.append(None)
        elif call.node.batched is not None and call.node.batched[position]:
            joined.append(torch.cat(present))
        else:
            total = present[0]
            for grad in present[1:]:
                total = total + grad
            joined.append(total)
    return joined
