"""One autograd node per unit, under Hugging Face's own forward.

The modules of a unit lie on meta. Each one's `forward` is replaced, on the instance, by a call of this node: it asks
for the unit's weights, binds views of their GPU slot, runs the original forward, and unbinds; its backward asks again,
runs the unit's backward, and hands the gradients over. Masks, rotary tables, auxiliary losses and scales stay Hugging
Face's business, which is why one node serves every family.

A group's batch is cut into slices along the batch dimension of its batched arguments (`Rows`); they share one binding.

Source: the mechanism of gradient checkpointing (torch.utils.checkpoint) with the weights taken out as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatier.engine.activation import Rebinding, Replay, dropping
from megatier.engine.call import Call, collector, join
from megatier.engine.carried import Arguments
from megatier.engine.rows import Rows
from megatier.engine.stage import Stage
from megatier.errors import UnsupportedModelError
from megatier.guards.crossing import CHECKED, check_inside, claim
from megatier.guards.unbound import make_unbound
from megatier.guards.unchanged import REMEDY, Unchanged, refused
from megatier.layout import TensorSlice
from megatier.numerics.compilation import Compiled
from megatier.tier import Activations, Phase

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


class Node:
    """One module of one unit, whose weights are bound only while it runs.

    Attributes:
        stage: what all nodes of the model share.
        unit: name of the unit that brings the weights.
        module_name: name of the module in the model, for messages.
        module: the module itself; its `forward` on the instance is this node.
        bindings: for each place of a weight in the module, the dictionary, the key and the slice of the unit's layout.
        activations: policy between forward and backward.
        rows: which arguments and results of the module have the batch in front.
        is_trained: by parameter name, in the order of `leaves`, whether the parameter is trained.
        is_new: whether this is one of the module's first forwards, which are looked at closely.
        is_written: whether a forward of the module has written a weight's own bits into it.
    """

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
        self.stage = stage
        self.unit = unit
        self.module_name = module_name
        self.module = module
        self.activations = activations
        self.bindings = bindings
        self._forward: Callable[..., Any] = module.forward
        self._compiled: Compiled[..., Any] | None = None
        if compiles and stage.compilation is not None and not isinstance(module, nn.Embedding):
            self._compiled = stage.compilation(module.forward, type(module).__name__)
        self._leaves: dict[int, list[Tensor]] = {}
        """Views of the weights, by the address of the slot that they lie in."""
        self._held: list[Tensor] = []
        """The tensors that lie in the module now, one per binding: its unbound parameters, or weights."""
        self._forwards: Counter[bool] = Counter()
        """Number of forwards, with a gradient (True) and without."""
        self.is_new = True
        self.is_written = False

        # A tied weight may have several bindings in one module; it has one slice.
        self._slices = {tensor.name: tensor for _, _, tensor in bindings}
        self.is_trained = {name: stage.gradients.takes(unit, name) for name in self._slices}
        self.rows = Rows(module_name)

        for parameters, leaf, tensor in bindings:
            unbound = parameters[leaf]
            assert unbound is not None
            is_in_fp32 = tensor.name in stage.in_fp32
            make_unbound(unbound, stage.device, torch.float32 if is_in_fp32 else stage.dtype, tensor.name)
            self._held.append(unbound)

        module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """The module's forward, with streamed weights."""
        stage = self.stage
        training = torch.is_grad_enabled()
        if training:
            # A replay would append keys and values a second time: the same loss, wrong gradients.
            kwargs = {k: None if k in CACHE_ARGUMENTS else v for k, v in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False

        self._forwards[training] += 1
        self.is_new = self._forwards[training] <= CHECKED
        arguments = Arguments(args, kwargs)
        flat = arguments.leaves
        if any(torch.is_tensor(x) and x.is_meta for x in flat):
            raise UnsupportedModelError(f"{self.module_name} was given a tensor on meta, made from an unbound weight.")
        if stage.learnt is not None:
            self.rows.learn(stage.learnt, flat)

        # Hugging Face takes hidden states by hooks on whole layers, which run outside of the node, as in any model.
        # Only what hooks take inside of the module has to be handed out.
        collected = tuple(key for key, value in (collector.get() or {}).items() if isinstance(value, list))
        differentiable = [i for i, x in enumerate(flat) if torch.is_tensor(x) and x.requires_grad]
        call = Call(
            node=self,
            arguments=arguments,
            flat=flat,
            differentiable=differentiable,
            collected=tuple(key for key in collected if key != "hidden_states"),
        )
        if stage.learnt is not None:
            return call.run_plain(is_cut=False)
        if not training:
            return call.evaluate(args, kwargs)
        if not (self.trains or call.differentiable):  # no gradient passes: no backward
            return call.run_plain(is_cut=True)

        # The call lives until the backward. An input that it held would live as long, though a policy drops it.
        inputs = [flat[i] for i in call.differentiable]
        for i in call.differentiable:
            call.flat[i] = None

        # The backward counts down what is announced here, so it is announced before autograd knows of the call.
        if self.trains:
            stage.gradients.expect(self.unit, call.num_slices)
        results = _UnitFunction.apply(call, stage.anchor, *inputs)  # type: ignore[no-untyped-call]

        return call.unpack(list(results))

    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Views of the unit's parameters in a slot, one per tensor, each an autograd leaf; cached by address.

        Those that are frozen require no gradient.

        Args:
            weights: uint8 [block], the slot or the home in which the unit's weights lie on the GPU.
        """
        # Slots are pieces of one arena that lives as long as the run, so an address never comes to mean other memory.
        key = weights.data_ptr()
        if key not in self._leaves:
            # `.data`, for a version counter of its own: all slots of an arena share one, and a load into a neighbour
            # must not look like a change of weights that autograd has saved. Nor must one weight look like another.
            plane = weights.data.view(self.stage.dtype)
            name = self.module_name
            self._leaves[key] = [
                claim(plane[t.start : t.stop].view(t.shape).data, name).requires_grad_(self.is_trained[t.name])
                for t in self._slices.values()
            ]

        return self._leaves[key]

    def forget_leaves(self) -> None:
        """Drop the views that `leaves` made."""
        self._leaves.clear()

    def run(self, leaves: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """The module's own forward with these weights bound.

        Raises:
            UnsupportedModelError: it changes one of them.
        """
        # Autograd knows this cast: the gradient comes back in the compute copy's dtype, rounded once, as all others.
        in_fp32 = self.stage.in_fp32
        weights = [leaf.float() if name in in_fp32 else leaf for name, leaf in zip(self._slices, leaves, strict=True)]
        unchanged = Unchanged(self.names, weights, by_bits=self.is_new or self.is_written)

        with self._bound(weights), self.stage.arithmetic():
            # Evaluation runs uncompiled: the training graph alone is compiled, so no second one has to agree with it.
            forward = self._compiled if self._compiled is not None and torch.is_grad_enabled() else self._forward
            try:
                result = forward(*args, **kwargs)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise UnsupportedModelError(
                    f"{self.module_name} changes a weight or an argument in place in its forward. {REMEDY}"
                ) from error

        self.is_written = unchanged.check(self.module_name) or self.is_written
        return result

    @contextlib.contextmanager
    def _bound(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        by_name = dict(zip(self._slices, leaves, strict=True))
        before = self._held

        # Looked at before and after: a parameter that somebody put here would be lost when ours take its place.
        self._check_held()
        self._hold([by_name[tensor.name] for _, _, tensor in self.bindings])

        try:
            yield
            self._check_held()
        finally:
            self._hold(before)

    def _hold(self, tensors: list[Tensor]) -> None:
        self._held = tensors
        for (parameters, leaf, _), tensor in zip(self.bindings, tensors, strict=True):
            parameters[leaf] = tensor

    def _check_held(self) -> None:
        """Check that nobody has put another parameter in the place of one.

        Raises:
            UnsupportedModelError: somebody has.
        """
        for (parameters, leaf, tensor), held in zip(self.bindings, self._held, strict=True):
            if parameters.get(leaf) is not held:
                raise refused(self.module_name, tensor.name)

    @property
    def keeps_graph(self) -> bool:
        """Whether the forward's graph stays for the backward, rather than being made again there."""
        # A compiled forward that saves its inputs alone computes again by itself, inside its own backward.
        lean = self._compiled is not None and self._compiled.saves_inputs_alone
        return lean or self.activations.keeps_graph

    @property
    def names(self) -> list[str]:
        """Parameter names, in the order of `leaves`."""
        return list(self._slices)

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained, in the order of `leaves`."""
        return [name for name in self._slices if self.is_trained[name]]

    @property
    def trains(self) -> bool:
        """Whether any of the parameters is trained; else a backward has gradients of inputs alone."""
        return any(self.is_trained.values())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, copies of the weights lie in the module, for code that computes with them past its forward.

        They live until the backward, in addition to the slots.
        """
        if self.trains and torch.is_grad_enabled():
            self.stage.gradients.expect(self.unit, 1)
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            copies = _Lent.apply(self, self.stage.anchor)  # type: ignore[no-untyped-call]
        with self._bound(copies):
            yield


@dataclass(frozen=True, slots=True)
class _Kept:
    """The graph of one slice, from its forward to its backward.

    Outputs are kept as edges, since tensors would keep their memory.
    """

    inputs: list[Tensor]
    leaves: list[Tensor]
    outputs: list[GradientEdge | None]
    rows: list[int]
    """Number of rows of each output."""
    rebinding: Rebinding


# HOP 3/6: GPU slot -> weights: views, no copy
class _UnitFunction(torch.autograd.Function):
    """Forward and backward of one use of one unit."""

    @staticmethod
    def forward(ctx: Any, call: Call[Node], anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        node = call.node
        stage = call.node.stage
        ctx.call = call
        ctx.kept = []
        ctx.replays = []
        present = _stash(ctx, inputs)

        # Asked once: a compiler that refuses the module changes the answer in the forward below.
        keep = node.keeps_graph

        # No `finally` gives the weights back. After an error the step is abandoned, and the player takes back all.
        use = stage.source.enter(node.unit, Phase.FORWARD, stage.gradients.group)
        leaves = node.leaves(use.bytes)
        parts = []

        for slice_inputs, flat in call.cut(present):
            rebinding = Rebinding(node.module_name, use.bytes, *([] if ctx.stashed is None else [present[ctx.stashed]]))
            # Taken for each slice: each draws its own random numbers.
            if not keep:
                ctx.replays.append(Replay(stage.device))
            with torch.enable_grad(), rebinding.hooks() if keep else dropping(node.module_name):
                outputs = call.run(leaves, flat)
            if node.is_new:
                check_inside(node.module_name, outputs, [*slice_inputs, *leaves], stage.model)
            if keep:
                if ctx.stashed is not None:  # autograd holds the leaf; its bytes may go
                    slice_inputs[ctx.stashed].data = slice_inputs[ctx.stashed].data.new_empty(0)
                edges = [get_gradient_edge(x) if x is not None and x.requires_grad else None for x in outputs]
                rows = [0 if x is None or not x.dim() else x.shape[0] for x in outputs]
                ctx.kept.append(_Kept(slice_inputs, leaves, edges, rows, rebinding))

            parts.append([None if x is None else x.detach() for x in outputs])

        # Given back before the slices are joined, so that the next load into this slot may start.
        use.leave()
        results = join(parts)
        saved = [None if i == ctx.stashed else x for i, x in enumerate(present)]
        ctx.save_for_backward(*(() if keep else saved))
        ctx.mark_non_differentiable(*[x for x in results if x is not None and not x.is_floating_point()])

        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        call: Call[Node] = ctx.call
        node = call.node
        stage = call.node.stage
        stage.gradients.watch_backward()

        # With CUDA this is autograd's thread. It is the one that computes now: the main thread waits in `backward`.
        fetched = _fetch(ctx)
        use = stage.source.enter(node.unit, Phase.BACKWARD, stage.gradients.group)
        input_grads: list[list[Tensor | None]] = []
        pieces = iter(()) if ctx.kept else call.cut(_saved_inputs(ctx, fetched))
        outputs: Sequence[Tensor | GradientEdge | None]

        for index in range(call.num_slices):
            if ctx.kept:
                kept: _Kept = ctx.kept[index]
                slice_inputs = kept.inputs
                leaves = kept.leaves
                outputs = kept.outputs
                rows = kept.rows
                kept.rebinding.bind(use.bytes, *fetched)

                # Autograd frees what it saved as it goes, but only if nobody else holds the graph.
                ctx.kept[index] = kept = None  # type: ignore[assignment]
            else:
                slice_inputs, flat = next(pieces)
                leaves = node.leaves(use.bytes)
                rebinding = Rebinding(node.module_name, use.bytes)

                # Autograd would take a weight's own bits, written into it, for a change since it was saved.
                hooks = rebinding.hooks() if node.is_written else contextlib.nullcontext()
                with torch.enable_grad(), ctx.replays[index].again(), hooks:
                    made = call.run(leaves, flat)
                rebinding.bind(use.bytes)
                rows = [0 if x is None or not x.dim() else x.shape[0] for x in made]
                outputs = [x if x is not None and x.requires_grad else None for x in made]
                del made

            with stage.arithmetic():
                wanted = [*slice_inputs, *(leaf for leaf in leaves if leaf.requires_grad)]
                found = _grads(outputs, _cut_grads(grads, rows, index, call.num_slices), wanted)

            # The graph of this slice goes before the gradients are summed and before the next slice makes its own.
            del outputs
            if node.trains:
                stage.gradients.add(node.unit, list(zip(node.trained, found[len(slice_inputs) :], strict=True)))
            input_grads.append(list(found[: len(slice_inputs)]))

        # The weights first: `close` may wait for the sum of the group before, and no load should wait for that.
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

        # Slots are filled again when the use is over; these outlive it.
        copies = tuple(leaf.detach().clone() for leaf in leaves)
        use.leave()
        frozen = (copy for copy, leaf in zip(copies, leaves, strict=True) if not leaf.requires_grad)
        ctx.mark_non_differentiable(*frozen)

        return copies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:  # noqa: ANN401
        node: Node = ctx.node
        node.stage.gradients.watch_backward()

        # The weights are not asked for: the copies were enough for whoever computed with them.
        parts = zip(node.names, grads, strict=True)
        node.stage.gradients.add(node.unit, [(name, grad) for name, grad in parts if node.is_trained[name]])
        node.stage.gradients.close(node.unit)
        return None, None


def _stash(ctx: Any, inputs: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    """If the policy says so, start offloading the largest input, and note which; returns the inputs to work with."""
    node: Node = ctx.call.node
    ctx.stashed = None
    result = list(inputs)

    # What lies in a container stays: other units read it as well.
    own = [i for i, position in enumerate(ctx.call.differentiable) if position not in ctx.call.arguments.carried]
    if node.activations.offloads_input and own:
        ctx.stashed = max(own, key=lambda i: inputs[i].numel())
        tensor = result[ctx.stashed] = inputs[ctx.stashed].detach().contiguous()
        node.stage.source.stash(node.unit, tensor)

    return result


def _fetch(ctx: Any) -> list[Tensor]:  # noqa: ANN401
    """Bring the offloaded input back, if there is one."""
    if ctx.stashed is None:
        return []
    node: Node = ctx.call.node
    return [node.stage.source.fetch(node.unit)]


def _saved_inputs(ctx: Any, fetched: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    """The inputs of the forward, with the offloaded one in its place."""
    inputs = list(ctx.saved_tensors)
    if ctx.stashed is not None:
        inputs[ctx.stashed] = fetched[0]
    return inputs


def _cut_grads(grads: Sequence[Tensor | None], rows: Sequence[int], index: int, count: int) -> list[Tensor | None]:
    """The rows of each output's gradient that belong to one slice of so many."""
    if count == 1:
        return list(grads)
    return [
        None if grad is None else grad[index * size : (index + 1) * size]
        for grad, size in zip(grads, rows, strict=True)
    ]


def _grads(
    outputs: Sequence[Tensor | GradientEdge | None], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of the inputs; None for those that no output depends on."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
    if not pairs:
        return [None] * len(inputs)
    edges = [get_gradient_edge(o) if torch.is_tensor(o) else o for o, _ in pairs]
    return torch.autograd.grad(edges, inputs, [g for _, g in pairs], allow_unused=True)


def _join_grads(parts: list[list[Tensor | None]], call: Call[Node]) -> list[Tensor | None]:
    """Lay gradients of batched inputs end to end, and add up those of inputs that all slices share."""
    if len(parts) == 1:
        return parts[0]
    joined: list[Tensor | None] = []
    for position, column in zip(call.differentiable, zip(*parts, strict=True), strict=True):
        present = [grad for grad in column if grad is not None]
        if not present:
            joined.append(None)
        elif call.node.rows.are_cut(position):
            joined.append(torch.cat(present))
        else:
            # In the order of the slices, always: a sum in another order has other bits.
            total = present[0]
            for grad in present[1:]:
                total = total + grad
            joined.append(total)

    return joined
