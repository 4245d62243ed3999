"""How long torch's compiler takes in the first step of a run: an estimate from the kinds of modules there are."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn

from megatier.setup.setup import Setup

KIND_SECONDS = 3.0
"""Seconds for each kind. On an H100 3B and 8B, with three kinds, took 5 to 13 s."""
KEPT_KIND_SECONDS = 0.7
"""Seconds for each kind whose code is kept from an earlier process. There the same took 2 s."""


@dataclass(frozen=True, slots=True)
class CompileEstimate:
    """The time that a run's first step takes in addition."""

    kinds: int
    """Kinds of modules that are compiled, the fused loss among them; 0: nothing is."""

    @property
    def seconds(self) -> float:
        """Seconds if nothing was compiled before."""
        return KIND_SECONDS * self.kinds

    @property
    def kept_seconds(self) -> float:
        """Seconds if an earlier process has compiled the same."""
        return KEPT_KIND_SECONDS * self.kinds


def compile_time(setup: Setup) -> CompileEstimate:
    """Estimate the time of a run."""
    model = setup.model
    is_fused = setup.config.model.fused_loss
    if not setup.compiles:
        return CompileEstimate(0)
    head = model.get_output_embeddings() if is_fused else None
    names = (name for unit in setup.work.units if not unit.is_lent for name in unit.module_names)
    modules = (model.get_submodule(name) for name in names)
    kinds = {_kind(module) for module in modules if module is not head and not isinstance(module, nn.Embedding)}
    return CompileEstimate(len(kinds) + is_fused)


def _kind(module: nn.Module) -> Hashable:
    """What is alike in modules that share their code: the parts, the shapes, and what attention sees."""
    parts = tuple(
        (type(part), getattr(part, "attention_type", getattr(part, "layer_type", ""))) for part in module.modules()
    )
    return parts, tuple(parameter.shape for parameter in module.parameters())
