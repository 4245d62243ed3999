"""Runs the forward and backward of a module as an autograd function that asks for weights and gives them back.

In between, the graph of a slice is either kept, or dropped and recomputed (`activation`). A kept graph has saved memory
that will be reused as addresses, which are bound again in the backward.

`Node` applies it. With CUDA a backward runs on autograd's thread, while the main thread waits in `backward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatier.compute.attention_kernels import KeptAttention, LastModule
from megatier.engine.activation import Rebinding, SideOffload, dropping
from megatier.engine.backward import GRAPH_FREED, Purpose, begin_backward
from megatier.engine.bound_module import BoundModule
from megatier.engine.call import Call, concatenate
from megatier.engine.replay import Replay
from megatier.errors import StreamedModelError
from megatier.guards.crossing import check_inside
from megatier.guards.repeated_forwards import GivenTensors, NotedResults, StateBefore
from megatier.tier import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceGraph:
    """The graph of one slice, from its forward to its backward."""

    inputs: list[Tensor]
    """The differentiable inputs, as leaves of the graph."""
    leaves: list[Tensor]
    """Views of the unit's weights, as leaves of the graph."""
    outputs: list[GradientEdge | None]
    """The outputs that require a gradient, as edges, since tensors would keep their memory."""
    rows: list[int]
    """The number of rows of each output."""
    rebinding: Rebinding
    """Binds the addresses in the graph to memory."""

    @classmethod
    def of(
        cls, outputs: Sequence[Tensor | None], inputs: list[Tensor], leaves: list[Tensor], rebinding: Rebinding
    ) -> Self:
        """Return the graph that ends in these outputs."""
        return cls(
            inputs=inputs,
            leaves=leaves,
            outputs=[get_gradient_edge(x) if x is not None and x.requires_grad else None for x in outputs],
            # Kept separately, since an edge has no shape.
            rows=[0 if x is None or not x.dim() else x.shape[0] for x in outputs],
            rebinding=rebinding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun:
    """What is needed to recompute the forward of one slice."""

    replay: Replay
    """The surroundings of the forward. Each slice draws its own random numbers."""
    kept: KeptAttention | None
    """The results of attention, if they are kept."""
    last: LastModule | None
    """Tells whether the last module in tiles has to be recomputed, if there are any."""

    @classmethod
    def of(cls, node: BoundModule) -> Self:
        """Record the surroundings of a forward that is about to run."""
        return cls(
            replay=Replay(node.stage.device, node.module),
            kept=KeptAttention() if node.keeps_attention else None,
            last=LastModule() if node.is_plain and node.tiled else None,
        )

    @contextlib.contextmanager
    def around(self, node: BoundModule, *, is_again: bool) -> Iterator[None]:
        """Surround the first forward, which records what can be skipped, or its recomputation, which skips it."""
        with contextlib.ExitStack() as stack:
            parts = [part for part in (self.kept, self.last) if part is not None]
            for part in parts:
                stack.enter_context(part.replaying() if is_again else part.noting())
            for tiled in node.tiled.values():
                tiled.last = self.last
                stack.callback(setattr, tiled, "last", None)
            yield


@dataclass(slots=True, kw_only=True)
class _ForwardRecord:
    """What a forward keeps for its backward, except for tensors that autograd saves. Lists have an entry per slice."""

    call: Call
    """The call."""
    forward_number: int
    """The number of the model's forward that the call is a part of."""
    keeps_graphs: bool
    """Whether graphs are kept; otherwise they are recomputed."""
    offloaded: int | None = None
    """The position of the offloaded input; None: none is offloaded."""
    beside: SideOffload | None = None
    """The tensors that are offloaded together with that input."""
    graphs: list[_SliceGraph | None] = field(default_factory=list)
    """The kept graphs; None after the backward of a slice."""
    reruns: list[_Rerun] = field(default_factory=list)
    """What is needed to recompute the graphs."""
    given: GivenTensors | None = None
    """The state of the arguments, which must be the same when a graph is recomputed."""
    gave: list[NotedResults] = field(default_factory=list)
    """Samples of the results, in the module's first forwards. Recomputed results must match them."""
    is_plain: bool = True
    """Whether the forward ran uncompiled."""


class UnitFunction(torch.autograd.Function):
    """The forward and backward of one call, whose slices lie end to end.

    The autograd context holds a `_ForwardRecord`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Run the module on each slice."""
        node = call.node
        stage = node.stage

        # Asked only here, since a compiler that refuses the module changes the answer during the forward.
        keeps = node.keeps_graph
        record = _ForwardRecord(call=call, forward_number=stage.gradients.forward, keeps_graphs=keeps)
        ctx.record = record
        present = _offload_input(record, inputs)

        # All slices of a call see the same arguments, so none may change them for the next, whether graphs are kept or
        # not.
        given = GivenTensors(call.flat) if call.num_slices > 1 or not keeps else None
        state_before = StateBefore(node.module) if node.is_new and not keeps else None
        record.given = None if keeps else given

        # Not in a `finally`: after an error the step is abandoned, and the player takes everything back.
        use = stage.source.enter(node.unit, Phase.FORWARD, stage.gradients.group)
        leaves = node.leaves(use.bytes)
        memory_reused_later = [use.bytes] if record.offloaded is None else [use.bytes, present[record.offloaded]]
        of_slices = []

        for slice_inputs, flat in call.cut(present):
            outputs = _run_slice(record, leaves, memory_reused_later, slice_inputs, flat)
            # Detached, since outside this function autograd continues with the function itself.
            of_slices.append([None if x is None else x.detach() for x in outputs])

        if given is not None:
            given.check(node.module_name, "by its forward")
        if state_before is not None:
            state_before.check(node.module_name)

        # Asked again, since a compiler that refused the module has left it uncompiled.
        record.is_plain = node.is_plain
        # Given back before the slices are concatenated, so that the next load into this slot can start.
        use.leave()
        results = concatenate(of_slices)

        # A kept graph has already saved what it needs of the inputs.
        if not keeps:
            ctx.save_for_backward(*(None if i == record.offloaded else x for i, x in enumerate(present)))
        ctx.mark_non_differentiable(*(x for x in results if x is not None and not x.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Add up the gradients of the weights, and return those of the inputs."""
        record: _ForwardRecord = ctx.record
        call = record.call
        node = call.node
        stage = node.stage
        purpose = begin_backward(stage, record.forward_number)
        # A backward for gradients of inputs alone uses weights like a forward (`Leg.INPUTS`).
        phase = Phase.BACKWARD if purpose.trains else Phase.FORWARD
        if purpose.retains_graph:
            _check_retain_graph(record)
        if record.given is not None:
            record.given.check(node.module_name, "between its forward and its backward")

        # The activation first, since its load was started during the backward of the unit before.
        fetched = _fetch(record)
        use = stage.source.enter(node.unit, phase, stage.gradients.group)
        input_grads: list[list[Tensor | None]] = []
        slices: Iterator[tuple[list[Tensor], list[Any]]] = iter(())
        if not record.keeps_graphs:
            slices = call.cut(_saved_inputs(record, ctx.saved_tensors, fetched))

        for index in range(call.num_slices):
            if record.keeps_graphs:
                graph = _take_graph(record, index, purpose, use.bytes, *fetched[:1])
            else:
                graph = _make_graph(record, index, next(slices), use.bytes)
            num_inputs = len(graph.inputs)
            trained = [leaf for leaf in graph.leaves if leaf.requires_grad] if purpose.trains else []
            wanted = [*graph.inputs, *trained]
            retains = record.keeps_graphs and purpose.retains_graph
            with stage.arithmetic(), node.resumed():
                output_grads = _cut_grads(grads, graph.rows, index, call.num_slices)
                wanted_grads = _grads(graph.outputs, output_grads, wanted, retains=retains)

            # This slice's graph is freed before its gradients are added up, and before the next slice recomputes its
            # own.
            del graph, trained, wanted
            if node.trained and purpose.trains:
                summands = list(zip(node.trained, wanted_grads[num_inputs:], strict=True))
                stage.gradients.add(node.unit, summands)
                del summands
            input_grads.append(list(wanted_grads[:num_inputs]))

            # The gradients of the weights are freed too, since they are as large as the weights.
            del wanted_grads

        # The fetched tensors are held no longer than the graphs that read them.
        if record.beside is not None:
            record.beside.set_fetched(())

        # Weights are given back first: `end_use` may wait for the last group's sum, and no load should wait for that.
        use.leave()
        if node.trained and purpose.trains:
            stage.gradients.end_use(node.unit)
        elif node.trained and not purpose.retains_graph:
            stage.gradients.cancel_use(node.unit, call.num_slices)
        return (None, None, *_join_grads(input_grads, call))


def _run_slice(
    record: _ForwardRecord,
    leaves: list[Tensor],
    memory_reused_later: Sequence[Tensor],
    inputs: list[Tensor],
    flat: Sequence[Any],
) -> list[Tensor | None]:
    """Run the module on one slice, and record what its backward needs. Return the outputs with their graph.

    Args:
        record: the record of the call.
        leaves: views of the unit's weights.
        memory_reused_later: memory of weights and the offloaded input, which others use until the backward.
        inputs: the differentiable inputs of the slice, as leaves.
        flat: all flat inputs of the slice.
    """
    node = record.call.node
    rebinding = Rebinding(node.module_name, *memory_reused_later, beside=record.beside, given=flat)

    # Recorded before the forward, which may draw random numbers and change settings.
    rerun = None if record.keeps_graphs else _Rerun.of(node)
    with contextlib.ExitStack() as around:
        around.enter_context(torch.enable_grad())
        if rerun is None:
            around.enter_context(rebinding.hooks())
        else:
            around.enter_context(dropping(node.module_name))
            around.enter_context(rerun.around(node, is_again=False))
        outputs = record.call.run(leaves, flat)

    if node.is_new:
        check_inside(node.module_name, outputs, [*inputs, *leaves], node.stage.model)

    if rerun is None:
        # Autograd holds the leaf of an offloaded input. Its memory can be freed, since the graph has saved an address.
        if record.offloaded is not None:
            leaf = inputs[record.offloaded]
            leaf.data = leaf.data.new_empty(0)
        record.graphs.append(_SliceGraph.of(outputs, inputs, leaves, rebinding))
        return outputs

    record.reruns.append(rerun)
    if node.is_new:
        record.gave.append(NotedResults(outputs))
    if record.beside is not None and rerun.kept is not None:
        rerun.kept.replace(record.beside.offload)
    return outputs


def _offload_input(record: _ForwardRecord, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Start offloading the largest input if the policy says so. Return the inputs to work with."""
    call = record.call
    node = call.node
    result = list(inputs)

    # Tensors in containers stay, since other units read them too. So do weights that are lent.
    stays = call.arguments.in_containers
    candidates = [i for i, at in enumerate(call.differentiable) if at not in stays and not call.is_lent(at)]
    if node.activations.offloads_input and candidates:
        largest = max(candidates, key=lambda i: inputs[i].numel())
        tensor = inputs[largest].detach().contiguous()
        record.offloaded = largest
        result[largest] = tensor

        # The input is offloaded and fetched first. Other tensors are identified by their place in that order.
        source = node.stage.source
        source.stash(node.unit, tensor)
        if node.stage.offloads_attention:
            record.beside = SideOffload(functools.partial(source.stash_beside, node.unit))

    return result


def _fetch(record: _ForwardRecord) -> list[Tensor]:
    """Fetch the offloaded input, if there is one, and what was offloaded with it."""
    if record.offloaded is None:
        return []
    node = record.call.node
    fetched = node.stage.source.fetch(node.unit)
    if record.beside is not None:
        record.beside.set_fetched(fetched[1:])
    return fetched


def _saved_inputs(record: _ForwardRecord, saved: Sequence[Tensor], fetched: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of the forward, the offloaded one included."""
    inputs = list(saved)
    if record.offloaded is not None:
        inputs[record.offloaded] = fetched[0]
    return inputs


def _check_retain_graph(record: _ForwardRecord) -> None:
    """Check that a graph can serve a backward with retain_graph=True.

    Raises:
        StreamedModelError: it serves one backward only.
    """
    node = record.call.node
    if record.offloaded is not None:
        why = "its input was offloaded, and comes back once"
    elif record.keeps_graphs and not record.is_plain:
        why = "it is compiled, and its backward overwrites what it has kept"
    else:
        return
    raise StreamedModelError(
        f"retain_graph=True, of autograd.grad or of a backward with inputs: {node.module_name} has one backward only, "
        f"since {why}. Leave retain_graph out and run the forward again, or open the model with "
        "activations='recompute'."
    )


def _take_graph(record: _ForwardRecord, index: int, purpose: Purpose, *regions: Tensor) -> _SliceGraph:
    """Return the kept graph of a slice, bound to where its memory lies now."""
    graph = record.graphs[index]
    if graph is None:
        raise RuntimeError(GRAPH_FREED)
    graph.rebinding.bind(*regions)

    # Autograd frees saved tensors as it goes, but only if nothing else holds the graph.
    if not purpose.retains_graph:
        record.graphs[index] = None
    return graph


def _make_graph(
    record: _ForwardRecord, index: int, cut: tuple[list[Tensor], list[Any]], weights: Tensor
) -> _SliceGraph:
    """Recompute the graph of a slice, from what `Call.cut` gives for it."""
    node = record.call.node
    inputs, flat = cut
    leaves = node.leaves(weights)
    rebinding = Rebinding(node.module_name, weights)
    rerun = record.reruns[index]
    if rerun.kept is not None and record.beside is not None:
        rerun.kept.replace(record.beside.restore)

    # A weight that the forward rewrites with its own bits would count as changed since it was saved.
    hooks = rebinding.hooks() if node.is_written else contextlib.nullcontext()
    with torch.enable_grad(), rerun.replay.again(), hooks, rerun.around(node, is_again=True):
        outputs = record.call.run(leaves, flat)

    # The result of a skipped module is only a placeholder.
    was_skipped = rerun.last is not None and rerun.last.was_skipped
    if record.gave and not was_skipped:
        is_plain = record.is_plain and node.is_plain
        record.gave[index].check(node.module_name, outputs, is_plain=is_plain)
    rebinding.bind(weights)
    return _SliceGraph.of(outputs, inputs, leaves, rebinding)


def _cut_grads(grads: Sequence[Tensor | None], rows: Sequence[int], index: int, count: int) -> list[Tensor | None]:
    """Return the rows of each output's gradient that belong to one slice."""
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
    retains: bool,
) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs; None for those that no output depends on."""
    edges: list[GradientEdge] = []
    output_grads: list[Tensor] = []
    for edge, grad in zip(outputs, grads, strict=True):
        if edge is not None and grad is not None:
            edges.append(edge)
            output_grads.append(grad)

    # Autograd raises an error for empty lists.
    if not (edges and inputs):
        return [None] * len(inputs)
    try:
        return torch.autograd.grad(edges, inputs, output_grads, retain_graph=retains, allow_unused=True)
    except RuntimeError as error:
        # torch raises this from inside such a hook.
        if "_will_engine_execute_node" not in str(error):
            raise
        raise StreamedModelError(
            "a hook on the gradients of several tensors (register_multi_grad_hook) of a layer cannot be called in the "
            "backward of a streamed one. FlopCounterMode sets such hooks: put it around the forward alone."
        ) from error


def _join_grads(parts: list[list[Tensor | None]], call: Call) -> list[Tensor | None]:
    """Concatenate gradients of batched inputs, and add up those of inputs that all slices share."""
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
            # Always in the order of the slices, since the order changes the bits of a sum.
            total = present[0]
            for grad in present[1:]:
                total = total + grad
            joined.append(total)

    return joined
