"""Refuses models that let one document of a row see another although masks keep them apart, by trying.

Two rows of few tokens hold two documents each. The first ones differ and the second ones are the same, so whatever a
model makes of these has to be the same as well. Each row has a forward of its own, so that the same kernels take the
same numbers in the same places: on a CPU every bit has to be equal, unless experts take other numbers of tokens then.
On a GPU that was not measured, so roundings are allowed there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatier.errors import UnsupportedModelError
from megatier.guards.token_rows import are_alike

DOCUMENT_TOKENS_MAX = 64
"""The most tokens of each document that is tried. Flex attention has other kernels for rows of fewer than 128."""
TOGETHER = "Set data.cross_documents to true, or with data.images data.max_patches to null."
"""How a model is trained that does not keep documents apart."""
TRIALS = 2
"""Trials that a model has to fail. A router may send a token elsewhere because of a rounding, but not each time."""


def check_documents(run: Callable[[dict[str, Tensor]], Tensor], ids: Tensor, vocab_size: int, model: nn.Module) -> None:
    """Check that a model keeps the documents of a row apart.

    Args:
        run: gives the logits, or the hidden states before them, of a batch of ids and positions, [rows, tokens, W].
        ids: tokens of a row to try it with, [tokens].
        vocab_size: the number of tokens that there are.
        model: the model.

    Raises:
        UnsupportedModelError: it does not.
    """
    count = min(DOCUMENT_TOKENS_MAX, len(ids) // 2)
    if not count:
        return

    # Positions that begin anew are what tells a model where the second document begins.
    order = torch.arange(count, dtype=torch.int64, device=ids.device).repeat(2)[None]
    has_experts = any("expert" in name for name, _ in model.named_modules())
    is_exact = not ids.is_cuda and not has_experts

    def second_of(first: Tensor, second: Tensor) -> Tensor:
        row = torch.cat([first, second])
        return run({"input_ids": row[None], "position_ids": order})[0, count:]

    for trial in range(TRIALS):
        tokens = (ids + trial) % vocab_size
        first = tokens[:count]
        second = tokens[count : 2 * count]
        one = second_of(first, second)
        other = second_of((first + 1) % vocab_size, second)

        # Not finite counts as different.
        if bool(are_alike(one, other, is_exact=is_exact).all()):
            return

    raise UnsupportedModelError(
        f"{type(model).__name__} lets a document of a row see the one before it: with other tokens there, it gave "
        f"something else. Its documents cannot be kept apart. {TOGETHER}"
    )
