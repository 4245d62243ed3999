"""Estimates how long torch's compiler takes in the first step of a run, from the kinds of modules there are."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from megatier.setup.setup import Setup

KIND_SECONDS = 3.0
"""Seconds for each kind. On an H100 3B and 8B, with three kinds, took 5 to 13 s."""
KEPT_KIND_SECONDS = 0.7
"""Seconds for each kind whose code is kept from an earlier process. There the same took 2 s."""


def compile_seconds(setup: Setup) -> tuple[float, float]:
    """Estimate what a run's first step takes in addition, if nothing was compiled before, and if all of it was."""
    if not setup.compiles:
        return 0.0, 0.0

    # A head that is fused with the loss is not compiled by itself: the loss is a kind of its own.
    model = setup.model
    is_fused = setup.config.model.fused_loss
    head = model.get_output_embeddings() if is_fused else None
    kinds = set()
    for unit in setup.work.units:
        if unit.is_lent:
            continue
        for name in unit.module_names:
            module = model.get_submodule(name)
            if module is not head and not isinstance(module, nn.Embedding):
                kinds.add(_kind(module))
    num_kinds = len(kinds) + is_fused
    return KIND_SECONDS * num_kinds, KEPT_KIND_SECONDS * num_kinds


def _kind(module: nn.Module) -> Hashable:
    """Return a key that modules with the same code share: of parts, shapes, and what attention sees."""
    parts = []
    for part in module.modules():
        # Layers with a sliding window are of the same class as others, and compiled by themselves.
        attention = getattr(part, "attention_type", getattr(part, "layer_type", ""))
        parts.append((type(part), attention))
    shapes = tuple(parameter.shape for parameter in module.parameters())
    return tuple(parts), shapes
