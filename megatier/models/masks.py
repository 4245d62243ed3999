"""Makes the block masks of flex attention, once for each sequence length.

Hugging Face makes a mask in each forward, for every row of the batch. But a mask depends on the batch only if it reads
a tensor, as one that keeps documents apart does. All others are made once, for one row that stands for every row and
slice. A mask takes 16 bytes for each pair of blocks of 128 tokens: 16 MiB for 131,072 tokens.

The kernel is faster if it can assume that every query in a block sees one of its first keys, and that the blocks of a
row are contiguous. Both hold for causal attention over whole blocks, but not with sliding windows, packed documents or
a partial last block. Which kind a mask is, is read from the mask itself. The kernel adds the same numbers in the same
order either way, so the bits are the same. `UnitModel` makes the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_FLEX = "flex_attention"
CAUSAL_KERNEL_OPTIONS = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
"""Kernel options that are valid for causal attention over whole blocks."""
MASKS_MAX = 8
"""The most masks that are cached. A run has one for each length and kind of layer."""


class BlockMasks:
    """The masks of a model."""

    def __init__(self) -> None:
        """Register `attend` as transformers' flex attention, unless somebody has replaced that already."""
        if ALL_ATTENTION_FUNCTIONS[_FLEX] is flex_attention_forward:
            ALL_ATTENTION_FUNCTIONS.register(_FLEX, attend)
        self._made: dict[Hashable, BlockMask] = {}
        self._compiled: Callable[..., BlockMask] | None = None

    def create(
        self,
        mask_mod: Callable[..., Any],
        B: int | None,  # noqa: N803 - the names are PyTorch's
        H: int | None,  # noqa: N803
        Q_LEN: int,  # noqa: N803
        KV_LEN: int,  # noqa: N803
        device: torch.device | str | None = None,
        **others: Any,  # noqa: ANN401
    ) -> BlockMask:
        """Make a mask or return a cached one; see `create_block_mask` of PyTorch.

        Args:
            mask_mod: returns for (row, head, query, key) whether the query sees the key.
            B: rows of the batch.
            H: heads; None: all are alike.
            Q_LEN: queries of a row.
            KV_LEN: keys of a row.
            device: where the mask lies.
            others: further arguments. Whether to compile is decided here.
        """
        others.pop("_compile", None)
        constants = _constants(mask_mod)
        if constants is None:
            # The mask reads a tensor, whose values may differ in the next forward.
            return self._make(mask_mod, B, H, Q_LEN, KV_LEN, device, **others)

        key = (constants, H, Q_LEN, KV_LEN, str(device), tuple(sorted(others.items())))
        if key not in self._made:
            if len(self._made) >= MASKS_MAX:
                # A loop may have batches of ever new lengths. Dictionaries keep their order, so the first mask is the
                # oldest.
                oldest = next(iter(self._made))
                del self._made[oldest]
            mask = self._make(mask_mod, None, H, Q_LEN, KV_LEN, device, **others)
            self._made[key] = mask

            # `is_causal` reads the mask, so the host waits for it once per length.
            if is_causal(mask):
                mask.mask_mod = causal
        return self._made[key]

    def _make(
        self,
        mask_mod: Callable[..., Any],
        rows: int | None,
        heads: int | None,
        queries: int,
        keys: int,
        device: torch.device | str | None,
        **others: Any,  # noqa: ANN401
    ) -> BlockMask:
        """Make a mask. On a GPU this is compiled, so that the matrix of all token pairs is never in memory."""
        make: Callable[..., BlockMask] = create_block_mask
        is_on_cpu = torch.device(device or "cpu").type == "cpu"
        if not is_on_cpu:
            self._compiled = self._compiled or torch.compile(create_block_mask)
            make = self._compiled
        return make(mask_mod, rows, heads, queries, keys, device, **others)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return whether a query sees a key: itself and what comes before it."""
    return query >= key


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor,
    **others: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor | None]:
    """Run flex attention as transformers does, with the faster kernel options for our causal masks."""
    if isinstance(attention_mask, BlockMask) and attention_mask.mask_mod is causal:
        # The caller's own options take precedence.
        given = others.get("kernel_options") or {}
        others["kernel_options"] = CAUSAL_KERNEL_OPTIONS | given
    output: tuple[Tensor, Tensor | None] = flex_attention_forward(module, query, key, value, attention_mask, **others)
    return output


def is_causal(mask: BlockMask) -> bool:
    """Return whether a mask is causal, the same for all rows, square, and in whole blocks."""
    block, width = mask.BLOCK_SIZE
    queries, keys = mask.seq_lengths
    num_masks = mask.kv_num_blocks.shape[:2].numel()
    is_square = block == width and queries == keys
    if num_masks != 1 or not is_square or queries % block:
        return False

    # Queries of a block see their own block in part and all earlier blocks in full. Keys are seen in full by all later
    # blocks.
    order = torch.arange(queries // block, dtype=torch.int64, device=mask.kv_num_blocks.device)
    one = torch.ones_like(order)
    none = torch.zeros_like(order)
    return (
        _are_blocks(mask.kv_num_blocks, mask.kv_indices, order, one)
        and _are_blocks(mask.q_num_blocks, mask.q_indices, order, one)
        and _are_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, none, order)
        and _are_blocks(mask.full_q_num_blocks, mask.full_q_indices, order + 1, order.flip(0))
        and _is_diagonal_causal(mask, order, block)
    )


def _are_blocks(counts: Tensor | None, indices: Tensor | None, first: Tensor, number: Tensor) -> bool:
    """Return whether each list has the expected number of consecutive blocks, from the expected first one on."""
    # A mask without any full block has no such lists.
    if counts is None or indices is None:
        return False
    if not torch.equal(counts[0, 0].long(), number):
        return False

    # A list has room for all blocks. Entries after the valid ones mean nothing.
    order = torch.arange(len(first), dtype=torch.int64, device=first.device)
    is_behind = order >= number[:, None]
    is_expected = indices == first[:, None] + order
    return bool((is_expected | is_behind).all())


def _is_diagonal_causal(mask: BlockMask, order: Tensor, block: int) -> bool:
    """Return whether the blocks on the diagonal are those of causal attention."""
    within = torch.arange(block, dtype=torch.int64, device=order.device)
    zero = within.new_zeros(())

    def sees(number: Tensor, query: Tensor, key: Tensor) -> Tensor:
        first = number * block
        seen: Tensor = mask.mask_mod(zero, zero, first + query, first + key)
        return seen

    # A mask function takes scalars, so it is mapped over keys, queries and blocks, from the inside out.
    over_keys = torch.vmap(sees, (None, None, 0))
    over_queries = torch.vmap(over_keys, (None, 0, None))
    over_blocks = torch.vmap(over_queries, (0, None, None))
    seen = over_blocks(order, within, within)
    expected = within[:, None] >= within
    return bool((seen == expected).all())


def _constants(value: object) -> Hashable | None:
    """Return the code and constants of a mask function; None if it depends on anything else."""
    if isinstance(value, bool | int | float | str):
        return value

    if isinstance(value, tuple):
        parts = tuple(_constants(item) for item in value)
    elif isinstance(value, FunctionType):
        # Two masks with the same code differ in their closures, such as a window's width, and in their defaults.
        captured = tuple(cell.cell_contents for cell in value.__closure__ or ())
        defaults = value.__defaults__ or ()
        parts = (value.__code__, *(_constants(item) for item in (*captured, defaults)))
    else:
        return None

    return None if None in parts else parts
