"""Steps of a streamed model that run in any way, and the same steps of a plain one, whose bits they have to give."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from plain_adamw import PlainAdamW
from streamed_loops import TIERS
from tiny_runs import exactness_config, plain_model
from torch import Tensor
from transformers import PreTrainedModel

import megatier
from megatier.integrations.streamed import Streamed

POLICIES = ("keep", "recompute")
RATE = 1e-2

Way = Callable[[Any], list[Tensor]]
"""Forwards and backwards of one step of a model; returns what they gave."""


@functools.cache
def model_given(attention: str = "eager") -> PreTrainedModel:
    return plain_model(exactness_config("tied"), attention)


def opened(activations: Any, **options: Any) -> Streamed:
    settings: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "attention": "eager", **options}
    model = model_given(settings["attention"])
    device: Any = torch.get_default_device().type
    tiers = replace(TIERS, device=device)
    settings["compile"] = False
    return megatier.stream(model, tiers=tiers, clip=None, weight_decay=0.1, activations=activations, **settings)


def ids(seed: int = 0) -> Tensor:
    found = torch.randint(3, 160, (2, 8), generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(torch.get_default_device())


def embedded(seed: int = 0) -> Tensor:
    found = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(torch.get_default_device()).requires_grad_()


def loss_of(model: Any, x: Tensor, seed: int = 0) -> Tensor:
    """The loss with given embeddings; dropout draws by the seed."""
    torch.manual_seed(seed)
    loss: Tensor = model(inputs_embeds=x, labels=ids()).loss
    return loss


def trained(model: Any, seed: int = 1) -> Tensor:
    """A forward and a backward of tokens, as a step has them."""
    torch.manual_seed(seed)
    loss: Tensor = model(input_ids=ids(seed), labels=ids(seed)).loss
    loss.backward()
    return loss.detach()


def steps_of(streamed: Streamed, way: Way, num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a way gives in each step, and the weights after them."""
    streamed.model.train()
    found = []
    for _ in range(num_steps):
        for group in streamed.optimizer.param_groups:
            group["lr"] = RATE
        found += way(streamed.model)
        streamed.optimizer.step()
        streamed.optimizer.zero_grad()
    return found, streamed.state_dict()


def plain_steps_of(way: Way, num_steps: int, attention: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model_given(attention)).train()
    optimizer = PlainAdamW(model, None)
    found = []
    for step in range(1, num_steps + 1):
        found += way(model)
        # What has no gradient is not updated, as in torch.
        absent = [(parameter, parameter.clone()) for parameter in model.parameters() if parameter.grad is None]
        optimizer.step(step, RATE)
        with torch.no_grad():
            for parameter, value in absent:
                parameter.copy_(value)
    return found, dict(model.named_parameters())


def check_right(way: Way, activations: str, num_steps: int = 2, **options: Any) -> None:
    """A way gives the bits of a plain model: when it is recorded, and when it is played."""
    with opened(activations, **options) as streamed:
        found, weights = steps_of(streamed, way, num_steps)
    expected, parameters = plain_steps_of(way, num_steps, options.get("attention", "eager"))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)
    assert [name for name, value in parameters.items() if not torch.equal(value, weights[name])] == []
