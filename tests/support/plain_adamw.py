"""AdamW in single torch operations, as the reference for runs in fp32."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatier.models.decoder import decay_parameter_names


class PlainAdamW:
    """AdamW of megatier's definition in single torch operations, which are each rounded on their own."""

    def __init__(self, model: PreTrainedModel, clip: float | None) -> None:
        self.clip, self.decayed = clip, decay_parameter_names(model)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.exp_avg = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in self.trained.items()}

    @torch.no_grad()
    def step(self, step: int, rate: float) -> float:
        """Update every parameter that is trained; returns the global norm."""
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.trained.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        scale = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        for name, parameter in self.trained.items():
            grad = grads[name] * scale
            moment = self.exp_avg[name] = settle(self.exp_avg[name] * 0.9 + grad * (1 - 0.9))
            square = self.exp_avg_sq[name] = settle(self.exp_avg_sq[name] * 0.999 + grad * grad * (1 - 0.999))
            change = moment / (root(square) / (1 - 0.999**step) ** 0.5 + 1e-8)
            decay = 1 - rate * 0.1 if name in self.decayed else 1.0
            parameter.copy_(parameter * decay - change * (rate / (1 - 0.9**step)))
            parameter.grad = None
        return norm


def root(square: Tensor) -> Tensor:
    """Square root, correctly rounded; torch's own on the CPU is not."""
    return torch.from_numpy(np.sqrt(square.numpy()))


def settle(moment: Tensor) -> Tensor:
    """Subnormals become 0."""
    return torch.where(moment.abs() < 2.0**-126, 0.0, moment)
