"""Tiny models in RAM that somebody has changed.

A streamed one has to take the steps of the plain one, or has to be refused by the name of what was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import changed_attributes
import changed_forwards
import changed_modules
import changed_state
import torch
from model_changes import Change
from tiny_models import tiny_config
from tiny_runs import MIB, plain_model
from torch import Tensor
from transformers import LlamaForSequenceClassification, PretrainedConfig

import megatier
from megatier.errors import MegatierError

SMALL = {"hidden_size": 32, "intermediate_size": 24, "head_dim": 8, "vocab_size": 64, "num_hidden_layers": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SMALL, "attention_dropout": 0.2}),
    "qwen3_moe": ("qwen3_moe", {**SMALL, "num_experts": 3, "moe_intermediate_size": 8}),
    "gemma3": (
        "gemma3_text",
        {**SMALL, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 64}),
    "classifier": ("llama", {**SMALL, "num_labels": 3, "architectures": ["LlamaForSequenceClassification"]}),
}
TIERS: dict[str, Any] = {"device": "cpu", "gpu": 4 * MIB, "ram": 4 * MIB, "update_threads": 1, "io_threads": 1}
OPTIONS: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "clip": None, "lr": 1e-2, "weight_decay": 0.0}
STEPS = 2


CHANGES: list[Change] = [
    *changed_attributes.CHANGES,
    *changed_modules.CHANGES,
    *changed_forwards.CHANGES,
    *changed_state.CHANGES,
]


def make(family: str, seed: int = 0) -> Any:
    """A model of a family, with every parameter moved off its default."""
    model_type, options = FAMILIES[family]
    config: PretrainedConfig = tiny_config(model_type, **options)
    torch.manual_seed(seed)
    return plain_model(config)


def batch_of(model: Any, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    is_classifier = isinstance(model, LlamaForSequenceClassification)
    return {"input_ids": ids, "labels": torch.randint(0, 3, (2,), generator=generator) if is_classifier else ids}


def plain_steps(model: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a plain loop over the model itself, and its state."""
    losses = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with megatier.TieredAdamW(trained, lr=1e-2, weight_decay=0.0, ram="4MiB") as optimizer:
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(**batch_of(model, step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.state_dict()


def streamed_steps(model: Any, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a streamed copy of it."""
    losses = []
    with megatier.stream(model, tiers=TIERS, **{**OPTIONS, **options}) as streamed:
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = streamed.model(**batch_of(model, step)).loss
            loss.backward()
            streamed.optimizer.step()
            losses.append(loss.item())
        return losses, streamed.state_dict()


def check_same_or_refused(model: Any, named: Sequence[str], **options: Any) -> str | None:
    """Check that a streamed copy has the bits of the model, or is refused with one of these names.

    Returns:
        The message, if it was refused.
    """
    try:
        losses, weights = streamed_steps(model, **options)
    except MegatierError as refusal:
        message = str(refusal)
        assert any(name in message for name in named), message
        return message
    plain_losses, plain_weights = plain_steps(model)
    assert losses == plain_losses
    assert {name for name, _ in model.named_parameters()} <= weights.keys() <= plain_weights.keys()
    assert [name for name, value in weights.items() if not torch.equal(plain_weights[name], value)] == []
    return None


def some_changes(seed: int) -> tuple[str, list[Change]]:
    """A family and one to three changes, in an order."""
    random = Random(seed)
    return random.choice(list(FAMILIES)), random.sample(CHANGES, random.randint(1, 3))
