"""What people change on a model: modes, parameters, buffers and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from model_changes import Changes, layer_of, norm_of
from torch import nn

CHANGES = Changes()


@CHANGES.add()
def all_in_eval_mode(model: Any) -> None:
    model.eval()


@CHANGES.add()
def one_layer_in_eval_mode(model: Any) -> None:
    layer_of(model).eval()


@CHANGES.add()
def some_frozen(model: Any) -> None:
    layer_of(model).requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)


@CHANGES.add("hook on its gradient")
def hook_on_a_gradient(model: Any) -> None:
    norm_of(model).weight.register_hook(lambda grad: grad * 2)


@CHANGES.add("hook on its gradient")
def hook_behind_a_gradient(model: Any) -> None:
    norm_of(model).weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))


@CHANGES.add("has a gradient already")
def gradient_left(model: Any) -> None:
    norm = norm_of(model)
    norm.weight.grad = torch.ones_like(norm.weight)


@CHANGES.add("on meta")
def parameter_on_meta(model: Any) -> None:
    norm = norm_of(model)
    norm.weight = nn.Parameter(norm.weight.detach().to("meta"))


@CHANGES.add()
def buffer_that_nothing_uses(model: Any) -> None:
    model.register_buffer("tick", torch.zeros(1))


@CHANGES.add()
def buffer_that_is_not_stored(model: Any) -> None:
    norm = norm_of(model)
    norm.register_buffer("scale_of_own", torch.tensor([1.5]), persistent=False)
    norm.register_forward_hook(lambda module, _, output: output * module.scale_of_own)


@CHANGES.add()
def buffer_that_counts(model: Any) -> None:
    def count(module: Any, _: Any, output: Any) -> Any:
        module.calls += 1
        return output * (1 + module.calls / 10)

    norm = norm_of(model)
    norm.register_buffer("calls", torch.zeros(()))
    norm.register_forward_hook(count)


@CHANGES.add()
def buffer_in_fp64(model: Any) -> None:
    norm = norm_of(model)
    norm.register_buffer("wide", torch.full((32,), 1.1, dtype=torch.float64))
    norm.register_forward_hook(lambda module, _, output: (output * module.wide).float())


@CHANGES.add()
def buffers_with_other_values(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


@CHANGES.add("torch.bfloat16")
def one_norm_in_bf16(model: Any) -> None:
    norm_of(model).to(torch.bfloat16)


@CHANGES.add("torch.float64")
def one_norm_in_fp64(model: Any) -> None:
    norm_of(model).double()


@CHANGES.add("torch.float64")
def all_in_fp64(model: Any) -> None:
    model.double()
