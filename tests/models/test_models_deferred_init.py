"""Deferred initialisation: the values of a chunk follow from the seed, the parameter's name and the chunk alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatier.layout import TensorSlice
from megatier.models import deferred_init
from megatier.models.deferred_init import DeferredInit, RecordInits


def drawn(name: str, seed: int) -> Tensor:
    """Values of a parameter that is drawn in chunks."""
    init = DeferredInit(TensorSlice(name, (45, 20), 0), seed)
    with torch.no_grad(), RecordInits([init]):
        init.parameter.normal_(0.0, 0.02)
    return torch.cat([values for _, values in init.draw(0, 900)])


def test_deferred_init_draws_other_values_for_each_seed_parameter_and_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 300)
    found = [drawn(name, seed) for name in ("a.weight", "b.weight") for seed in (0, 1)]
    chunks = {chunk.numpy().tobytes() for values in found for chunk in values.split(300)}
    assert len(chunks) == 2 * 2 * 3
    assert torch.equal(drawn("a.weight", 0), found[0])
