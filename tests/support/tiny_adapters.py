"""Tiny models with adapters, as PEFT makes them of plain models of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_adamw import PlainAdamW
from small_commands import MODEL
from tiny_gradients import attention_of
from tiny_runs import ModelWeights, Place, opened, plain_model, random_groups, read_parameters, run_steps
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from megatier.config.lora import ALL_LINEAR, LoraConfig
from megatier.config.schema import TrainConfig
from megatier.tier import Kind

peft = pytest.importorskip("peft")
"""PEFT itself. Tests that need it are left out where it is not installed."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""The experts of a layer, each a matrix of one parameter."""


def peft_model(config: PretrainedConfig, lora: LoraConfig, attention: str = "sdpa") -> PreTrainedModel:
    """The plain model with PEFT's adapters, all of which add something."""
    plain = plain_model(config, attention)
    given = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.scaled_alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        target_parameters=list(lora.target_parameters) or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        fan_in_fan_out=config.model_type == "gpt2",
    )
    model: PreTrainedModel = peft.inject_adapter_in_model(given, plain)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def check_steps_of_peft(
    config: PretrainedConfig, lora: LoraConfig, place: Place, train: TrainConfig, mount: Path
) -> None:
    """Three steps in fp32 have the losses, norms, weights and moments of PEFT over a plain model, in every bit."""
    model = peft_model(config, lora, attention_of(config))
    options: dict[str, Any] = {"source": ModelWeights(model), "lora": lora, "compute_dtype": "fp32", "seed": None}
    with opened(config, mount, place, train, **options) as session:
        torch.manual_seed(5)
        results = run_steps(session, train, 3)
        found = {kind: read_parameters(session, kind) for kind in (Kind.WEIGHT, Kind.EXP_AVG, Kind.EXP_AVG_SQ)}

    expected = PlainAdamW(model, train.clip)
    torch.manual_seed(5)
    for step, result in enumerate(results, 1):
        [batch] = random_groups(train, config.vocab_size, step)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = expected.step(step, 1e-2)
        assert result.loss == loss.item(), f"loss of step {step}"
        assert result.grad_norm == pytest.approx(norm, rel=1e-14)

    weights = dict(model.named_parameters())
    assert [name for name, value in found[Kind.WEIGHT].items() if not torch.equal(value, weights[name])] == []
    for kind, moments in ((Kind.EXP_AVG, expected.exp_avg), (Kind.EXP_AVG_SQ, expected.exp_avg_sq)):
        assert found[kind].keys() == moments.keys()
        assert [name for name, value in moments.items() if not torch.equal(found[kind][name], value)] == []


def check_gradients_of_peft(
    config: PretrainedConfig, lora: LoraConfig, place: Place, activations: Any, mount: Path, device: str
) -> None:
    """Loss and gradients in fp32 are those of PEFT over a plain model on the same device, in every bit."""
    # Without momentum and clipping, the first moment is the gradient.
    train = TrainConfig(steps=1, batch=6, clip=None, beta1=0.0, activations=activations)
    model = peft_model(config, lora, attention_of(config))
    nn.Module.to(model, device)
    given: dict[str, Any] = {"source": ModelWeights(model), "lora": lora, "compute_dtype": "fp32", "seed": None}
    with opened(config, mount, place, train, device=device, compile=False, **given) as session:
        torch.manual_seed(5)
        [result] = run_steps(session, train, 1)
        found = read_parameters(session, Kind.EXP_AVG)
    torch.manual_seed(5)
    [batch] = random_groups(train, config.vocab_size, 1)
    loss = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False).loss
    loss.backward()
    assert result.loss == loss.item()
    grads = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == grads.keys()
    assert [key for key, grad in grads.items() if grad is None or not torch.equal(found[key], grad.cpu())] == []


def base_folder(folder: Path, **settings: Any) -> Path:
    """A folder with a small model whose weights are bf16, as a base."""
    model = plain_model(LlamaConfig(**{**MODEL, **settings})).bfloat16()
    model.save_pretrained(folder)
    return folder


def stored_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """A folder as PEFT itself writes it, of adapters over a base that all add something."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "down_proj"], **settings}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        model = peft.get_peft_model(plain, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder
