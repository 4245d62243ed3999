"""Lets vision towers whose images have any number of patches run their attention as one operator.

Transformers has two ways for these towers. With FlashAttention they hand the lengths of images to the kernel. With any
other attention they loop over images, by lengths that the host reads inside of each block, which the compiler refuses.
So the towers that would loop get an attention by a name that transformers takes for FlashAttention. It computes by
`compute.varlen_attention`, or loops where that has no kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatier.compute.varlen_attention import has_kernel, varlen_attention
from megatier.models.decoder import decoder_layers
from megatier.readback import on_host

VARLEN = "megatier_flash_varlen"
"""The attention's name. Transformers looks for "flash" in it."""
LOOPED = "sdpa"
"""The attention in whose place it comes."""
ENDS = "cu_seqlens"
LONGEST = "max_seqlen"
"""Transformers' names of where images end, and of the patches of the largest one."""


@dataclass(frozen=True, slots=True)
class TowerAttention:
    """The attention of a model's towers while they run."""

    configs: Sequence[PretrainedConfig] = ()
    """The settings of these towers. Nothing changes before `applied`."""

    def __post_init__(self) -> None:
        """Tell transformers the name."""
        ALL_ATTENTION_FUNCTIONS.register(VARLEN, attend)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Find the towers of a model that would loop over images."""
        return cls(list(_configs(model)))

    def serves(self, module: nn.Module) -> bool:
        """Return whether a module, or one in it, has this attention."""
        return any(_config(part) is config for part in module.modules() for config in self.configs)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the towers this attention for a while.

        Outside, settings of the model are its own: whoever makes another model of them could not use such a name.
        """
        before = [config._attn_implementation for config in self.configs]
        try:
            for config in self.configs:
                config._attn_implementation = VARLEN
            yield
        finally:
            for config, attention in zip(self.configs, before, strict=True):
                config._attn_implementation = attention


def longest_as_tensor(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a block with the largest image's length as a tensor, so that no code depends on it."""
    longest = kwargs.get(LONGEST)
    if not isinstance(longest, int):
        return kwargs
    return {**kwargs, LONGEST: torch.tensor(longest, dtype=torch.int64, device="cpu")}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: Tensor | int,
    dropout: float = 0.0,
    **others: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Compute the attention of patches within their own images, as transformers calls it.

    Args:
        module: the tower's module of attention.
        query: [1, heads, patches, width]. `key` and `value` are alike.
        key: the keys.
        value: the values.
        attention_mask: none.
        scaling: the factor of products.
        cu_seq_lens_q: int32 [images + 1]: where images end.
        max_length_q: the patches of the largest image.
        dropout: the share of products that are left out at random.
        others: what the attention in whose place this comes is given too.

    Returns:
        [1, patches, heads, width], and no weights.
    """
    if not dropout and has_kernel(query, key, value):
        longest = torch.as_tensor(max_length_q, dtype=torch.int64, device="cpu")
        output, _ = varlen_attention(query, key, value, cu_seq_lens_q, longest, scaling)
        return output, None

    lengths: list[int] = on_host(cu_seq_lens_q.diff()).tolist()
    looped = ALL_ATTENTION_FUNCTIONS[LOOPED]
    pieces = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        looped(module, *piece, attention_mask=None, scaling=scaling, dropout=dropout, is_causal=False)[0]
        for piece in pieces
    ]
    return torch.cat(outputs, dim=1), None


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    """Yield the configs of towers that loop over images. That of the decoder's layers is none of them."""
    layers = decoder_layers(model)
    of_layers = {id(_config(module)) for module in layers.modules()}
    yielded = set[int]()
    for module in model.modules():
        config = _config(module)
        if config is None or id(config) in of_layers | yielded:
            continue
        takes = inspect.signature(module.forward).parameters
        if {ENDS, LONGEST} <= takes.keys() and config._attn_implementation == LOOPED:
            yielded.add(id(config))
            yield config


def _config(module: nn.Module) -> PretrainedConfig | None:
    """Return the config that a module reads, if it has one."""
    config = getattr(module, "config", None)
    return config if isinstance(config, PretrainedConfig) else None
