"""Sizes of what lies around the layers of a decoder and takes pixels: vision towers and projectors. For plans.

The skeleton runs on what the processor made of one conversation, up to its decoder. Its weights lie on meta, so
only shapes are computed. Autograd says what each unit saves, and the dispatcher which products it takes. So no family
has code of its own here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from megatier.compute.modality import PIXELS
from megatier.data.image_sample import ImageSample
from megatier.errors import UnsupportedModelError
from megatier.foreign import reading
from megatier.models.decoder import Unit, decoder_layers

Sizes = dict[int, int]
"""Bytes of storages, by their numbers. Tensors that share memory count once."""


@dataclass(slots=True)
class TowerUnit:
    """What a unit that takes pixels, or what became of them, has in one conversation."""

    inputs: Sizes = field(default_factory=dict)
    """What it takes, and keeps if its backward computes the rest again."""
    saved: Sizes = field(default_factory=dict)
    """What autograd saves in it, without weights."""
    flops: int = 0
    """Floating-point operations of products and attention in its forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """What images take in one conversation of a run, that with most pixels among the first ones."""

    units: Mapping[str, TowerUnit] = field(default_factory=dict)
    """Units outside of the decoder's layers, by name; those that run after the layers are not among them."""
    beside: Sizes = field(default_factory=dict)
    """What autograd saves between the units."""
    pixel_bytes: int = 0
    """Bytes of pixels, as they come to the GPU."""
    num_patches: int = 0
    """Patches of this one."""
    mean_tokens: float = 0.0
    """Tokens of a conversation, on the mean."""
    mean_share: float = 0.0
    """Pixels of a conversation, on the mean, over those of this one."""
    mean_images: float = 0.0
    """Images of a conversation, on the mean."""
    missing: str = ""
    """Why nothing is known; empty: it is known, or there are no images."""

    @classmethod
    def of(cls, model: PreTrainedModel, units: Sequence[Unit], sample: ImageSample, dtype: torch.dtype) -> Tower:
        """Measure the tower of a skeleton that nothing has changed yet.

        Args:
            model: the skeleton.
            units: its units.
            sample: the conversations that it takes.
            dtype: the dtype in which it computes.

        Raises:
            UnsupportedModelError: it cannot run on shapes alone.
        """
        trace = _Trace(model, dtype)
        trace.run(units, sample.columns)
        return cls(
            units=trace.units,
            beside=trace.beside,
            pixel_bytes=sample.pixel_bytes,
            num_patches=len(sample.columns.get(PIXELS, ())),
            mean_tokens=sample.mean_tokens,
            mean_share=sample.mean_pixel_bytes / sample.pixel_bytes,
            mean_images=sample.mean_images,
        )


class _DecoderReachedError(Exception):
    """The forward has come to the decoder, so the towers are through."""


class _Trace(TorchDispatchMode):
    """One forward on shapes, and what was seen in it."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units: dict[str, TowerUnit] = {}
        self.beside: Sizes = {}
        self._model = model
        self._open: TowerUnit | None = None
        self._kept_alive: list[Tensor] = []
        """Every tensor seen, so that no storage gets the number of another."""
        self._weights = {
            name: parameter.to(dtype) if parameter.is_floating_point() else parameter
            for name, parameter in model.named_parameters()
        }
        self._own = {self._number(tensor) for tensor in (*self._weights.values(), *model.buffers())}

    def run(self, units: Sequence[Unit], columns: Mapping[str, Tensor]) -> None:
        """Run the forward up to the module that runs the layers."""
        layers = decoder_layers(self._model)
        decoder = next(module for module in self._model.modules() if layers in module.children())
        given = {
            # The mask serves the layers alone, and pixels are as large as it gets.
            name: column.to("meta") if column.is_floating_point() else column
            for name, column in columns.items()
            if name != "attention_mask"
        }
        with contextlib.ExitStack() as hooks:
            hooks.callback(decoder.register_forward_pre_hook(_reach).remove)
            for unit in units:
                if not unit.is_layer:
                    self._watch(unit, hooks)
            # This is outside of the next one, so that to reach the decoder is no failure of the tower.
            hooks.enter_context(reading("its tower cannot be run on shapes alone", UnsupportedModelError))
            hooks.enter_context(contextlib.suppress(_DecoderReachedError))
            # Without gradients autograd would save nothing.
            hooks.enter_context(torch.enable_grad())
            hooks.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            hooks.enter_context(self)
            hooks.enter_context(_FusedAttention(self))
            functional_call(self._model, self._weights, (), {**given, "use_cache": False})

    def _watch(self, unit: Unit, hooks: contextlib.ExitStack) -> None:
        """Note what a unit takes, and that it runs."""
        for name in unit.module_names:
            module = self._model.get_submodule(name)

            def begin(_: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - a module's own arguments
                self._open = self.units.setdefault(unit.name, TowerUnit())
                for tensor in tree_leaves((args, kwargs)):
                    if isinstance(tensor, Tensor):
                        self._open.inputs[self._number(tensor)] = tensor.nbytes

            def end(*_: object) -> None:
                self._open = None

            hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)

    def _save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves, unless it is a weight or a buffer."""
        number = self._number(tensor)
        if number not in self._own:
            saved = self.beside if self._open is None else self._open.saved
            saved[number] = tensor.untyped_storage().nbytes()
        return tensor

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage."""
        self._kept_alive.append(tensor)
        number: int = tensor.untyped_storage()._cdata
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation on shapes, if one of its tensors has no more, and count its FLOPs."""
        given = args, kwargs or {}
        tensors = [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]

        # Grids and positions are real, and a few of them meet what is on meta.
        if any(tensor.is_meta for tensor in tensors):
            given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), given)
        result = func(*given[0], **given[1])
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.count(count(*given[0], **given[1], out_val=result))
        return result

    def count(self, flops: int) -> None:
        """Add operations to those of the unit that runs."""
        if self._open is not None:
            self._open.flops += flops


class _FusedAttention(TorchFunctionMode):
    """Attention with the shapes of a fused kernel. Tensors on meta have none, and would save all pairs of patches."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Replace attention, and let everything else be."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]

        # One product with the keys, and one with the values.
        num_queries = query.shape[:-1].numel()
        num_pairs = num_queries * key.shape[-2]
        widths = query.shape[-1] + value.shape[-1]
        self._trace.count(2 * num_pairs * widths)
        return _AttentionShapes.apply(query, key, value)  # type: ignore[no-untyped-call]


class _AttentionShapes(torch.autograd.Function):
    """What a fused kernel of attention saves: its inputs, its output and a log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Return an output of the right shape."""
        # Kernels write it token by token, so that heads lie side by side.
        *batch, heads, tokens, _ = query.shape
        width = value.shape[-1]
        by_token = query.new_empty((*batch, tokens, heads, width), device="meta")
        output = by_token.transpose(-3, -2)

        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32, device="meta")
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401 - torch's own
        """Nothing computes gradients of shapes."""
        raise NotImplementedError


def _reach(*_: object) -> None:
    raise _DecoderReachedError


def union(sizes: Iterable[Sizes]) -> int:
    """Return the bytes of some storages, of which several may name the same."""
    joined: Sizes = {}
    for some in sizes:
        joined.update(some)
    return sum(joined.values())
