"""cuDNN's causal attention, deterministic, through NVIDIA's frontend, as an operator that a compiled layer may call.

torch refuses its own cuDNN backend where algorithms have to be deterministic. The frontend is the wheel
`nvidia-cudnn-frontend`. Deterministic, the backward wants a workspace of 2 bytes for each pair of tokens and head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORKSPACE_MAX = 24 << 30
"""The most bytes of workspace that are taken."""


class WorkspaceError(RuntimeError):
    """A kernel wants more workspace than is taken."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A kernel that was built for one shape."""

    graph: Any
    """What the frontend built."""
    inputs: tuple[Any, ...]
    """Its inputs, in the order in which they are given."""
    outputs: tuple[Any, ...]
    """Its outputs."""

    def run(self, given: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Run it on the stream of torch.

        Raises:
            WorkspaceError: it wants too much memory.
        """
        size = int(self.graph.get_workspace_size())
        if size > WORKSPACE_MAX:
            raise WorkspaceError(f"a workspace of {size / 2**30:.0f} GiB")
        workspace = torch.empty(max(1, size), device=given[0].device, dtype=torch.uint8)
        tensors = dict(zip((*self.inputs, *self.outputs), (*given, *found), strict=True))
        self.graph.execute(tensors, workspace, handle=_handle())


@torch.library.custom_op("bench::cudnn_attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend; returns the output, laid out as [B, T, heads, D] is, and the log-sum-exp [B, heads, T, 1] in fp32.

    Args:
        query: [B, heads, T, D] in bf16.
        key: [B, key heads, T, D].
        value: as `key`.
        scale: what scores are multiplied with.
    """
    output, stats = _outputs(query)
    layout = _layout(query), _layout(key), _layout(value), _layout(output), scale
    _forward(*layout).run((query, key, value), (output, stats))
    return output, stats


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _outputs(query)


@torch.library.custom_op("bench::cudnn_attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, stats: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, by that of the output."""
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    layout = tuple(_layout(x) for x in (query, key, value, output, grad, *found))
    _backward(*layout, scale).run((query, key, value, output, grad, stats), found)
    return found


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, stats: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    return (*attention_backward(grad, *ctx.saved_tensors, ctx.scale), None)


attention.register_autograd(_differentiate, setup_context=_save)


def _outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what the forward gives."""
    batch, heads, tokens, size = query.shape
    output = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, 1, dtype=torch.float32)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


@functools.cache
def _handle() -> Any:  # noqa: ANN401 - the frontend has no types
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    return handle


def _graph() -> Any:  # noqa: ANN401
    import cudnn

    half, single = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    types = {"io_data_type": half, "intermediate_data_type": single, "compute_data_type": single}
    return cudnn.pygraph(**types, handle=_handle())


def _input(graph: Any, layout: Layout, *, single: bool = False) -> Any:  # noqa: ANN401
    import cudnn

    kind = cudnn.data_type.FLOAT if single else cudnn.data_type.BFLOAT16
    return graph.tensor(dim=list(layout[0]), stride=list(layout[1]), data_type=kind)


def _stats_of(query: Layout) -> Layout:
    batch, heads, tokens, _ = query[0]
    return (batch, heads, tokens, 1), (heads * tokens, tokens, 1, 1)


def _built(graph: Any) -> Any:  # noqa: ANN401
    import cudnn

    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph


@functools.cache
def _forward(query: Layout, key: Layout, value: Layout, output: Layout, scale: float) -> Graph:
    """Build the forward for one shape."""
    import cudnn

    graph = _graph()
    given = tuple(_input(graph, layout) for layout in (query, key, value))
    options = {"generate_stats": True, "attn_scale": scale, "use_causal_mask": True}
    found, stats = graph.sdpa(name="forward", q=given[0], k=given[1], v=given[2], **options)
    found.set_output(True).set_dim(list(output[0])).set_stride(list(output[1]))
    shape, strides = _stats_of(query)
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT).set_dim(list(shape)).set_stride(list(strides))
    return Graph(_built(graph), given, (found, stats))


@functools.cache
def _backward(*layouts: Any) -> Graph:  # noqa: ANN401
    """Build the backward for the layouts of query, key, value, output, its gradient, three gradients, and a scale."""
    graph = _graph()
    given = tuple(_input(graph, layout) for layout in layouts[:5])
    stats = _input(graph, _stats_of(layouts[0]), single=True)
    names = ("q", "k", "v", "o", "dO")
    options = {"attn_scale": layouts[8], "use_causal_mask": True, "use_deterministic_algorithm": True}
    tensors = dict(zip(names, given, strict=True))
    found = graph.sdpa_backward(name="backward", **tensors, stats=stats, **options)
    for tensor, (shape, strides) in zip(found, layouts[5:8], strict=True):
        tensor.set_output(True).set_dim(list(shape)).set_stride(list(strides))
    return Graph(_built(graph), (*given, stats), tuple(found))
