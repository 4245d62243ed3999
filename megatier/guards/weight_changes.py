"""Refuses forwards that change weights, which the optimizer alone may change.

If a forward writes into its weights, that goes into a slot, or into the home of a unit on the GPU. From there it may or
may not reach the state, so the result would depend on the tiers. So every such change is refused. If torch knows of it,
the weight's version has gone up. A change past torch (by `.data`, by a kernel) is found by sums over the bits. These
are taken in a module's first forwards only, since the host waits for them. A write of the bits that were there already
is no change: Gemma 3n clamps weights that are small enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.readback import on_host

WEIGHT_CHANGE_REMEDY = (
    "megatier's weights change by the optimizer alone, so this model cannot be streamed as it is: switch that off in "
    "its config, as by rescale_every: 0 for RWKV."
)


class Unchanged:
    """The weights of one forward, as they were before."""

    def __init__(self, names: Sequence[str], leaves: Sequence[Tensor], *, by_bits: bool) -> None:
        """Note what the weights are.

        Args:
            names: the names of the weights.
            leaves: the weights, in the same order.
            by_bits: take sums over their bits as well.
        """
        self._names = names
        self._leaves = leaves
        self._versions = [leaf._version for leaf in leaves]
        self._sums = _sums(leaves) if by_bits else None

    def check(self, module_name: str) -> bool:
        """Look at the weights after the forward; returns whether it wrote into one what was there already.

        Raises:
            UnsupportedModelError: it changed one of them.
        """
        pairs = zip(self._leaves, self._versions, strict=True)
        written = [leaf._version != version for leaf, version in pairs]

        # With sums, a weight that was written is forgiven if its bits are the same.
        changed = written
        if self._sums is not None:
            differs = _sums(self._leaves) != self._sums
            changed = on_host(differs).tolist()

        for name, is_changed in zip(self._names, changed, strict=True):
            if is_changed:
                raise changed_weight_error(module_name, name)
        return any(written)


def check_evaluates(model: PreTrainedModel) -> None:
    """Check that an evaluation will not change weights.

    Raises:
        UnsupportedModelError: it would.
    """
    # RWKV halves the weights of its upper layers in an evaluation.
    for name, module in model.named_modules():
        rescales = hasattr(module, "layers_are_rescaled") and model.config.rescale_every > 0
        if rescales:
            raise UnsupportedModelError(
                f"{name} would change weights in place in an evaluation. {WEIGHT_CHANGE_REMEDY}"
            )


def changed_weight_error(module_name: str, name: str) -> UnsupportedModelError:
    """Make the error of a module whose forward changes a weight, or in which somebody has put another one."""
    return UnsupportedModelError(
        f"{module_name} changes the weight {name} in its forward, or something else has put another tensor in its "
        f"place. {WEIGHT_CHANGE_REMEDY}"
    )


def _sums(leaves: Sequence[Tensor]) -> Tensor:
    """Return a sum over the bits of each leaf, int64 [len(leaves)]."""
    # Sums of integers wrap, so they do not depend on their order.
    sums = []
    for leaf in leaves:
        flat = leaf.data.view(-1)

        # Words of eight bytes take the fewest operations. A leaf of another length is summed byte by byte.
        width = torch.int64 if flat.nbytes % 8 == 0 else torch.uint8
        sums.append(flat.view(width).sum(dtype=torch.int64))
    if not sums:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.stack(sums)
