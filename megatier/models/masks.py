"""Masks by blocks, which flex attention takes: one for each length of a sequence, not one for each forward and row.

Hugging Face makes a mask once in each forward, for every row of the batch. It depends on the batch only if it reads a
tensor, as a mask that keeps documents apart does. All others are made once, for one row, which stands for every row and
every slice. A mask has 16 bytes for each pair of blocks of 128 tokens: 16 MiB for 131,072 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MASKS_MAX = 8
"""Masks that are held at once. A run has one for each length and kind of layer."""


class BlockMasks:
    """The masks of a model."""

    def __init__(self) -> None:
        """There are none yet."""
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
        """Make a mask, or give one that was made before; see `create_block_mask` of PyTorch.

        Args:
            mask_mod: says for (row, head, query, key) whether the query sees the key.
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
            return self._make(mask_mod, B, H, Q_LEN, KV_LEN, device, **others)

        key = (constants, H, Q_LEN, KV_LEN, str(device), tuple(sorted(others.items())))
        if key not in self._made:
            if len(self._made) >= MASKS_MAX:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(mask_mod, None, H, Q_LEN, KV_LEN, device, **others)
        return self._made[key]

    def _make(self, mask_mod: Callable[..., Any], *sizes: Any, **others: Any) -> BlockMask:  # noqa: ANN401
        """Make a mask. On a GPU this is compiled, so that the pairs of all tokens never lie in memory."""
        if torch.device(sizes[-1] or "cpu").type == "cpu":
            return create_block_mask(mask_mod, *sizes, **others)
        self._compiled = self._compiled or torch.compile(create_block_mask)
        return self._compiled(mask_mod, *sizes, **others)


def _constants(value: object) -> Hashable | None:
    """All that a mask's function is made of, if that is code and constants alone; None: it reads a tensor, say."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        parts = tuple(_constants(part) for part in value)
    elif isinstance(value, FunctionType):
        held = tuple(cell.cell_contents for cell in value.__closure__ or ())
        parts = (value.__code__, *(_constants(part) for part in (*held, value.__defaults__ or ())))
    else:
        return None

    return None if None in parts else parts
