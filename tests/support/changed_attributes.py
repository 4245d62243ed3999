"""What people change on a model: attributes of its modules, its loss and its config."""

from __future__ import annotations

import threading
from typing import Any

import torch
from model_changes import Changes, norm_of
from torch import Tensor, nn

CHANGES = Changes()


@CHANGES.add()
def other_epsilon(model: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.5)


@CHANGES.add()
def other_activation(model: Any) -> None:
    for module in model.modules():
        for name in ("act_fn", "act"):
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, nn.ReLU())


@CHANGES.add()
def activation_that_is_a_function(model: Any) -> None:
    for module in model.modules():
        for name in ("act_fn", "act"):
            if getattr(module, name, None) is not None:
                delattr(module, name)
                setattr(module, name, lambda x: torch.tanh(x) * 2)


@CHANGES.add()
def other_scaling_of_attention(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.1


@CHANGES.add()
def dropout_off(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


@CHANGES.add()
def own_loss(model: Any) -> None:
    def loss(logits: Tensor, labels: Tensor, *_: object, **options: Any) -> Tensor:
        logits = options.get("pooled_logits", logits)
        return logits.square().mean()

    model.loss_function = loss


@CHANGES.add("loss_function")
def loss_that_holds_the_head(model: Any) -> None:
    head = model.get_output_embeddings() or model.score
    model.loss_function = lambda logits, *_, **__: logits.square().mean() + head.weight.square().sum()


@CHANGES.add("loss_function")
def loss_that_is_a_module(model: Any) -> None:
    model.loss_function = nn.MSELoss()


@CHANGES.add("scale", "view")
def view_of_a_weight(model: Any) -> None:
    norm = norm_of(model)
    norm.scale = norm.weight.detach()[:1]
    norm.register_forward_hook(lambda module, _, output: output * (1 + module.scale))


@CHANGES.add()
def tensor_that_is_no_buffer(model: Any) -> None:
    norm = norm_of(model)
    norm.scale = torch.tensor(1.25)
    norm.register_forward_hook(lambda module, _, output: output * module.scale)


@CHANGES.add("requires a gradient")
def tensor_with_a_gradient_that_is_no_parameter(model: Any) -> None:
    norm_of(model).scales = [torch.tensor(1.25, requires_grad=True)]


@CHANGES.add("cached")
def tensor_with_a_graph(model: Any) -> None:
    norm = norm_of(model)
    norm.cached = norm.weight * 2


@CHANGES.add("lock")
def attribute_that_cannot_be_copied(model: Any) -> None:
    norm_of(model).lock = threading.Lock()


@CHANGES.add()
def config_after_construction(model: Any) -> None:
    text = model.config.get_text_config()
    for config in (model.config, text):
        vars(config)["hidden_act"] = "relu"
        vars(config)["hidden_size"] = 40


@CHANGES.add("num_hidden_layers")
def fewer_layers_in_the_config(model: Any) -> None:
    model.config.get_text_config().num_hidden_layers = 1


@CHANGES.add()
def checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@CHANGES.add()
def other_generation(model: Any) -> None:
    if model.can_generate():
        model.generation_config.max_new_tokens = 3
