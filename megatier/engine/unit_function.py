"""The autograd functions of a unit: its forward and its backward. Each asks for the weights, and gives them back.

Between the two, the graph of a slice either stays or is dropped and made again (`activation`). If it stays, what it
saved of memory that will leave is saved as addresses, and bound again in the backward.

Threads: with CUDA, a backward runs on autograd's thread. That is the one that computes then, since the main thread
waits in `backward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatier.compute.attention import KeptAttention, LastModule
from megatier.engine.activation import Beside, Rebinding, dropping
from megatier.engine.backward import GONE, Purpose, begin_backward
from megatier.engine.bound_module import BoundModule
from megatier.engine.call import Call, join
from megatier.engine.replay import Replay
from megatier.errors import StreamedModelError
from megatier.guards.crossing import check_inside
from megatier.guards.rerun import Gave, Given, Left
from megatier.tier import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceGraph:
    """The graph of one slice, from its forward to its backward."""

    inputs: list[Tensor]
    """The differentiable inputs, as leaves of the graph."""
    leaves: list[Tensor]
    """Views of the unit's weights, as leaves of the graph."""
    outputs: list[GradientEdge | None]
    """The outputs that require a gradient, as edges: tensors would keep their memory."""
    rows: list[int]
    """The number of rows of each output."""
    rebinding: Rebinding
    """Says where the memory lies that the graph has as addresses."""

    @classmethod
    def of(
        cls, outputs: Sequence[Tensor | None], inputs: list[Tensor], leaves: list[Tensor], rebinding: Rebinding
    ) -> Self:
        """The graph that ends in these outputs."""
        return cls(
            inputs=inputs,
            leaves=leaves,
            outputs=[get_gradient_edge(x) if x is not None and x.requires_grad else None for x in outputs],
            rows=[0 if x is None or not x.dim() else x.shape[0] for x in outputs],
            rebinding=rebinding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun:
    """What is needed to run the forward of one slice again, for its backward."""

    replay: Replay
    """What stood around the forward. Each slice draws its own random numbers."""
    kept: KeptAttention | None
    """What attention gave, if that stays."""
    last: LastModule | None
    """Whether the last module in tiles has to run again, if there are any."""

    @classmethod
    def of(cls, node: BoundModule) -> Self:
        """Note what stands around a forward that is about to run."""
        return cls(
            replay=Replay(node.stage.device, node.module),
            kept=KeptAttention() if node.keeps_attention else None,
            last=LastModule() if node.is_plain and node.tiled else None,
        )

    @contextlib.contextmanager
    def around(self, node: BoundModule, *, is_again: bool) -> Iterator[None]:
        """Inside, the forward runs and tells what need not run again; or it runs again without that."""
        with contextlib.ExitStack() as stack:
            parts = [part for part in (self.kept, self.last) if part is not None]
            for part in parts:
                stack.enter_context(part.replaying() if is_again else part.noting())
            for tiled in node.tiled.values():
                tiled.last = self.last
                stack.callback(setattr, tiled, "last", None)
            yield


class UnitFunction(torch.autograd.Function):
    """Forward and backward of one use of one unit, of which all slices lie end to end.

    Its context holds the call, the number of its forward, the position of the input that is offloaded (`stashed`), what
    goes with it (`beside`), whether graphs stay (`keeps`), the graphs, and what is needed to make them again
    (`reruns`; `given`: the arguments as they were; `gave`: some numbers of the results, in first forwards). Graphs,
    reruns and numbers have one entry a slice.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Run the module on each slice."""
        node = call.node
        stage = node.stage
        ctx.call = call
        ctx.number = stage.gradients.forward
        ctx.graphs = []
        ctx.reruns = []
        ctx.gave = []
        present = _stash(ctx, inputs)

        # Asked once: a compiler that refuses the module changes the answer in the forward below.
        keeps = ctx.keeps = node.keeps_graph

        given = Given(call.flat) if call.num_slices > 1 or not keeps else None
        left = Left(node.module) if node.is_new and not keeps else None
        ctx.given = None if keeps else given

        # No `finally` gives the weights back. After an error the step is abandoned, and the player takes back all.
        use = stage.source.enter(node.unit, Phase.FORWARD, stage.gradients.group)
        leaves = node.leaves(use.bytes)
        leaving = [use.bytes] if ctx.stashed is None else [use.bytes, present[ctx.stashed]]
        parts = []

        for slice_inputs, flat in call.cut(present):
            rebinding = Rebinding(node.module_name, *leaving, beside=ctx.beside, given=flat)

            # Noted before the forward, which may draw random numbers and change settings.
            rerun = None if keeps else _Rerun.of(node)
            with contextlib.ExitStack() as around:
                around.enter_context(torch.enable_grad())
                around.enter_context(rebinding.hooks() if rerun is None else dropping(node.module_name))
                if rerun is not None:
                    around.enter_context(rerun.around(node, is_again=False))
                outputs = call.run(leaves, flat)

            if node.is_new:
                check_inside(node.module_name, outputs, [*slice_inputs, *leaves], stage.model)
            if rerun is not None:
                ctx.reruns.append(rerun)
                ctx.gave += [Gave(outputs)] if node.is_new else []
                if ctx.beside is not None and rerun.kept is not None:
                    rerun.kept.replace(ctx.beside.leave)
            else:
                # Autograd holds the leaf of an offloaded input. Its bytes may go: what was saved of it is an address.
                if ctx.stashed is not None:
                    slice_inputs[ctx.stashed].data = slice_inputs[ctx.stashed].data.new_empty(0)
                ctx.graphs.append(_SliceGraph.of(outputs, slice_inputs, leaves, rebinding))

            # Detached: outside, the graph goes on with this function.
            parts.append([None if x is None else x.detach() for x in outputs])

        if given is not None:
            given.check(node.module_name, "by its forward")
        if left is not None:
            left.check(node.module_name)

        ctx.is_plain = node.is_plain
        # Given back before the slices are joined, so that the next load into this slot may start.
        use.leave()
        results = join(parts)
        saved = [None if i == ctx.stashed else x for i, x in enumerate(present)]
        ctx.save_for_backward(*(() if keeps else saved))
        ctx.mark_non_differentiable(*[x for x in results if x is not None and not x.is_floating_point()])

        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Hand the gradients of the weights over, and return those of the inputs."""
        call: Call = ctx.call
        node = call.node
        stage = node.stage
        purpose = begin_backward(stage, ctx.number)
        phase = Phase.BACKWARD if purpose.trains else Phase.FORWARD
        if purpose.comes_again:
            _check_comes_again(ctx)
        if ctx.given is not None:
            ctx.given.check(node.module_name, "between its forward and its backward")

        # The activation first: it was asked for while the unit before was worked on.
        fetched = _fetch(ctx)
        use = stage.source.enter(node.unit, phase, stage.gradients.group)
        input_grads: list[list[Tensor | None]] = []
        pieces = iter(()) if ctx.keeps else call.cut(_saved_inputs(ctx, fetched))

        for index in range(call.num_slices):
            if ctx.keeps:
                graph = _take_graph(ctx, index, purpose, use.bytes, *fetched[:1])
            else:
                graph = _make_graph(ctx, index, next(pieces), use.bytes)
            num_inputs = len(graph.inputs)
            trained = [leaf for leaf in graph.leaves if leaf.requires_grad] if purpose.trains else []
            wanted = [*graph.inputs, *trained]
            keeps = ctx.keeps and purpose.comes_again
            with stage.arithmetic(), node.resumed():
                slopes = _cut_grads(grads, graph.rows, index, call.num_slices)
                found = _grads(graph.outputs, slopes, wanted, keeps=keeps)

            # The graph of this slice goes before the gradients are added up, and before the next slice makes its own.
            del graph, trained, wanted
            if node.trained and purpose.trains:
                stage.gradients.add(node.unit, list(zip(node.trained, found[num_inputs:], strict=True)))
            input_grads.append(list(found[:num_inputs]))

            # Nor may the gradients of the weights outlast it: they are as large as these.
            del found

        if ctx.beside is not None:
            ctx.beside.come(())

        # The weights go first: `close` may wait for the sum of the group before, and no load should wait for that.
        use.leave()
        if node.trained and purpose.trains:
            stage.gradients.close(node.unit)
        elif node.trained and not purpose.comes_again:
            stage.gradients.forgo(node.unit, call.num_slices)
        return (None, None, *_join_grads(input_grads, call))


class LentWeights(torch.autograd.Function):
    """Copies of a unit's weights, in the order of `leaves`, whose gradients are one summand of the unit's."""

    @staticmethod
    def forward(ctx: Any, node: BoundModule, anchor: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Copy the weights."""
        ctx.node = node
        ctx.number = node.stage.gradients.forward
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
        """Hand the gradients of the copies over."""
        node: BoundModule = ctx.node
        gradients = node.stage.gradients
        purpose = begin_backward(node.stage, ctx.number)

        # The weights are not asked for: the copies were enough for whoever computed with them.
        if purpose.trains:
            parts = zip(node.names, grads, strict=True)
            gradients.add(node.unit, [(name, grad) for name, grad in parts if node.is_trained[name]])
            gradients.close(node.unit)
        elif not purpose.comes_again:
            gradients.forgo(node.unit, 1)
        return None, None


def _stash(ctx: Any, inputs: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    """Start offloading the largest input, if the policy says so, and note which; returns the inputs to work with."""
    call: Call = ctx.call
    node = call.node
    ctx.stashed = None
    ctx.beside = None
    result = list(inputs)

    # What lies in a container stays: other units read it as well. So do weights that are lent.
    stays = call.arguments.carried
    own = [i for i, at in enumerate(call.differentiable) if at not in stays and not call.is_lent(at)]
    if node.activations.offloads_input and own:
        ctx.stashed = max(own, key=lambda i: inputs[i].numel())
        tensor = result[ctx.stashed] = inputs[ctx.stashed].detach().contiguous()
        node.stage.source.stash(node.unit, tensor)
        if node.stage.offloads_attention:
            ctx.beside = Beside(functools.partial(node.stage.source.stash_beside, node.unit))

    return result


def _fetch(ctx: Any) -> list[Tensor]:  # noqa: ANN401
    """Bring the offloaded input back, if there is one, and what went with it."""
    if ctx.stashed is None:
        return []
    node: BoundModule = ctx.call.node
    fetched = node.stage.source.fetch(node.unit)
    if ctx.beside is not None:
        ctx.beside.come(fetched[1:])
    return fetched


def _saved_inputs(ctx: Any, fetched: Sequence[Tensor]) -> list[Tensor]:  # noqa: ANN401
    """The inputs of the forward, with the offloaded one in its place."""
    inputs = list(ctx.saved_tensors)
    if ctx.stashed is not None:
        inputs[ctx.stashed] = fetched[0]
    return inputs


def _check_comes_again(ctx: Any) -> None:  # noqa: ANN401
    """Refuse a backward with retain_graph=True over a graph that serves one backward only.

    Raises:
        StreamedModelError: it does.
    """
    node: BoundModule = ctx.call.node
    if ctx.stashed is not None:
        why = "its input was offloaded, and comes back once"
    elif ctx.keeps and not ctx.is_plain:
        why = "it is compiled, and its backward overwrites what it has kept"
    else:
        return
    raise StreamedModelError(
        f"retain_graph=True, of autograd.grad or of a backward with inputs: {node.module_name} has one backward only, "
        "since " + why + ". Leave retain_graph out and make the forward again, or open the model with "
        "activations='recompute'."
    )


def _take_graph(ctx: Any, index: int, purpose: Purpose, *regions: Tensor) -> _SliceGraph:  # noqa: ANN401
    """The graph of a slice that the forward left, bound to where its memory lies now."""
    graph: _SliceGraph = ctx.graphs[index]
    if graph is None:
        raise RuntimeError(GONE)
    graph.rebinding.bind(*regions)

    # Autograd frees what it saved as it goes, but only if nobody else holds the graph.
    if not purpose.comes_again:
        ctx.graphs[index] = None
    return graph


def _make_graph(ctx: Any, index: int, piece: tuple[list[Tensor], list[Any]], weights: Tensor) -> _SliceGraph:  # noqa: ANN401
    """Make the graph of a slice again."""
    node: BoundModule = ctx.call.node
    inputs, flat = piece
    leaves = node.leaves(weights)
    rebinding = Rebinding(node.module_name, weights)
    rerun: _Rerun = ctx.reruns[index]
    if rerun.kept is not None and ctx.beside is not None:
        rerun.kept.replace(ctx.beside.back)

    # Autograd would take a weight's own bits, written into it, for a change since it was saved.
    hooks = rebinding.hooks() if node.is_written else contextlib.nullcontext()
    with torch.enable_grad(), rerun.replay.again(), hooks, rerun.around(node, is_again=True):
        outputs = ctx.call.run(leaves, flat)

    # What a spared module gives is made up.
    if ctx.gave and not (rerun.last is not None and rerun.last.is_spared):
        ctx.gave[index].check(node.module_name, outputs, is_plain=ctx.is_plain and node.is_plain)
    rebinding.bind(weights)
    return _SliceGraph.of(outputs, inputs, leaves, rebinding)


def _cut_grads(grads: Sequence[Tensor | None], rows: Sequence[int], index: int, count: int) -> list[Tensor | None]:
    """The rows of each output's gradient that belong to one slice of so many."""
    if count == 1:
        return list(grads)
    return [
        None if grad is None else grad[index * size : (index + 1) * size]
        for grad, size in zip(grads, rows, strict=True)
    ]


def _grads(
    outputs: Sequence[GradientEdge | None],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    keeps: bool,
) -> Sequence[Tensor | None]:
    """The gradients of the inputs; None for those that no output depends on. The graph stays if it is kept."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
    if not (pairs and inputs):
        return [None] * len(inputs)
    slopes = [g for _, g in pairs]
    try:
        return torch.autograd.grad([o for o, _ in pairs], inputs, slopes, retain_graph=keeps, allow_unused=True)
    except RuntimeError as error:
        # torch's own refusal, from inside of such a hook.
        if "_will_engine_execute_node" not in str(error):
            raise
        raise StreamedModelError(
            "a hook on the gradients of several tensors (register_multi_grad_hook) of a layer cannot be called in the "
            "backward of a streamed one. FlopCounterMode sets such hooks: put it around the forward alone."
        ) from error


def _join_grads(parts: list[list[Tensor | None]], call: Call) -> list[Tensor | None]:
    """Lay gradients of batched inputs end to end, and add up those of inputs that all slices share."""
    if len(parts) == 1:
        return parts[0]
    joined: list[Tensor | None] = []
    for position, column in zip(call.differentiable, zip(*parts, strict=True), strict=True):
        present = [grad for grad in column if grad is not None]

        if not present:
            joined.append(None)
        elif call.is_cut(position):
            joined.append(torch.cat(present))
        else:
            # In the order of the slices, always: a sum in another order has other bits.
            total = present[0]
            for grad in present[1:]:
                total = total + grad
            joined.append(total)

    return joined
