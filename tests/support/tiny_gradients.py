"""Gradients of tiny models for one batch: of the plain model, streamed, and exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_runs import PLACES, ModelWeights, Place, opened, plain_model, read_parameters
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig, PreTrainedModel

from megatier.config.schema import TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.models.frozen_parameters import freeze
from megatier.tier import Kind

BATCH, TOKENS, VOCAB, CHUNK = 4, 24, 160, 16
Gradients = dict[str, Tensor]


def padded_batch() -> dict[str, Tensor]:
    """Rows of several lengths, padded right, a fifth of the labels masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [17], [20], [9]])).long()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def plain_gradients(
    config: PretrainedConfig,
    attention: str,
    batch: dict[str, Tensor] | None = None,
    frozen: Sequence[str] = (),
) -> tuple[float, Gradients, ModelWeights]:
    """Loss and gradients of the plain model; parameters that are not used have a gradient of 0."""
    model = plain_model(config, attention)
    freeze(model, frozen)
    return *_backward(model, batch or padded_batch()), ModelWeights(model)


def exact_gradients(config: PretrainedConfig, attention: str) -> Gradients:
    """Those of the plain model in fp64."""
    model = plain_model(config, attention).double()
    model.set_experts_implementation("eager")  # the other products take no fp64
    with Fp64():
        return _backward(model, padded_batch())[1]


class Fp64(TorchFunctionMode):
    """Casts to fp32 go to fp64: a model takes its softmax, its norms and its recurrence in fp32 at least."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda arg: torch.float64 if arg is torch.float32 else arg, (args, kwargs or {}))
        return func(*args, **kwargs)


def _backward(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[float, Gradients]:
    torch.manual_seed(3)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}


def streamed_gradients(
    config: PretrainedConfig,
    mount: Path,
    source: ModelWeights,
    activations: Any = "keep",
    slices: int = 1,
    batch: dict[str, Tensor] | None = None,
    place: Place = PLACES["ram"],
    steps: int = 1,
    **options: Any,
) -> tuple[float, Gradients]:
    """Loss and gradients of the last streamed step: with beta1 = 0 the first moment is the gradient itself."""
    train = TrainConfig(steps=1, batch=BATCH, slices=slices, activations=activations, beta1=0.0, clip=1e9)
    options = {"compute_dtype": "fp32", "loss_chunk": CHUNK, "source": source, "tokens": TOKENS, **options}
    with opened(config, mount, place, train, seed=None, **options) as session:
        losses = []
        for step in range(1, steps + 1):
            torch.manual_seed(3)
            losses.append(session.engine.train_step(step, 0.0, [batch or padded_batch()]).loss)
        return losses[-1], read_parameters(session, Kind.EXP_AVG)


def far(found: Gradients, expected: Gradients, most: float = 1e-4) -> dict[str, float]:
    """Relative distance of the gradients that are further than `most` from what is expected."""
    distances = {name: float((found[name] - g).norm() / g.norm().clamp(min=1e-30)) for name, g in expected.items()}
    return {name: distance for name, distance in distances.items() if distance > most}


def attention_of(config: PretrainedConfig) -> str:
    """What a skeleton of the config takes: sdpa where there is one."""
    return str(build_skeleton(config, "sdpa").config._attn_implementation)
