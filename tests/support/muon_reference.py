"""torch's Muon with our iterations, whose other operations ours has to equal."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.optim import _muon

from megatier.optim.newton_schulz import EPS, SCALE, orthogonal


def let_torch_iterate_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `orthogonal`, whose own tests compare it with torch's, in the place of torch's iterations."""

    def iterate(matrix: Tensor, *_: object) -> Tensor:
        x = matrix * (SCALE / matrix.norm().clamp(min=EPS))
        return orthogonal(x.half()).float() / SCALE

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", iterate)
