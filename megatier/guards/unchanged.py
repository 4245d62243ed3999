"""Weights that a forward must leave as they are: the optimizer alone changes them.

What a forward writes into its weights goes into a slot, or into the home of a unit on the GPU, from where it may or may
not reach the state: what comes of it would depend on the tiers. So it is refused, whatever way it takes. A change that
torch knows of bumps the weight's version. One past it (by `.data`, by a kernel) is found by sums over the bits, which
are taken in a module's first forwards only, since the host waits for them. A write of the bits that were there already
is none: Gemma 3n clamps weights that are small enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.errors import UnsupportedModelError

REMEDY = (
    "megatier's weights change by the optimizer alone, so this model cannot be streamed as it is: switch that off in "
    "its config, as by rescale_every: 0 for RWKV."
)


class Unchanged:
    """The weights of one forward, as they were before."""

    def __init__(self, names: Sequence[str], leaves: Sequence[Tensor], *, by_bits: bool) -> None:
        """Names and weights, in the same order; whether to take sums too."""
        self._names = names
        self._leaves = leaves
        self._versions = [leaf._version for leaf in leaves]
        self._sums = _sums(leaves) if by_bits else None

    def check(self, module_name: str) -> bool:
        """After the forward: whether it wrote into a weight what was there already.

        Raises:
            UnsupportedModelError: it changed one of them.
        """
        written = [a != b._version for a, b in zip(self._versions, self._leaves, strict=True)]
        changed = written if self._sums is None else (_sums(self._leaves) != self._sums).tolist()
        for name, is_changed in zip(self._names, changed, strict=True):
            if is_changed:
                raise refused(module_name, name)
        return any(written)


def check_evaluates(model: PreTrainedModel) -> None:
    """Before a run that will be evaluated: RWKV halves weights of its upper layers when it is.

    Raises:
        UnsupportedModelError: it would.
    """
    for name, module in model.named_modules():
        if hasattr(module, "layers_are_rescaled") and model.config.rescale_every > 0:
            raise UnsupportedModelError(f"{name} would change weights in place in an evaluation. {REMEDY}")


def refused(module_name: str, name: str) -> UnsupportedModelError:
    """What to raise when a module's forward changes a weight."""
    return UnsupportedModelError(f"{module_name} changes the weight {name} in its forward. {REMEDY}")


def _sums(leaves: Sequence[Tensor]) -> Tensor:
    """A sum over each one's bits, int64 [len(leaves)]; it wraps round, and has no order."""
    sums = []
    for leaf in leaves:
        flat = leaf.data.view(-1)
        words = flat.view(torch.int64 if flat.nbytes % 8 == 0 else torch.uint8)
        sums.append(words.sum(dtype=torch.int64))
    return torch.stack(sums) if sums else torch.empty(0)
