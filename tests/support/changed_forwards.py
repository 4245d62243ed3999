"""What people change on a model: forwards and hooks."""

from __future__ import annotations

import types
from typing import Any

import torch
from model_changes import Changes, layer_of, linear_of, mlp_of, norm_of
from torch import Tensor, nn

CHANGES = Changes()


@CHANGES.add()
def own_forward_of_a_module(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        found = type(self).forward(self, x)
        return tuple(y * 1.5 for y in found) if isinstance(found, tuple) else found * 1.5

    mlp = mlp_of(model)
    mlp.forward = types.MethodType(forward, mlp)


@CHANGES.add("forward of", "gain")
def own_forward_that_holds_the_module(model: Any) -> None:
    mlp = mlp_of(model)
    inner = mlp.forward

    def forward(x: Tensor) -> Any:
        found = inner(x)
        return tuple(y * 1.5 for y in found) if isinstance(found, tuple) else found * 1.5

    mlp.forward = forward


@CHANGES.add()
def own_forward_of_the_model(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self).forward(self, *args, **kwargs)
        found.loss = found.loss * 3
        return found

    model.forward = types.MethodType(forward, model)


@CHANGES.add()
def class_of_its_own(model: Any) -> None:
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.forward(self, *args, **kwargs)
        found.loss = found.loss + found.logits.square().mean()
        return found

    model.__class__ = type("Own", (kind,), {"forward": forward})


@CHANGES.add()
def parameter_of_the_model(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self).forward(self, *args, **kwargs)
        found.loss = found.loss * self.gain
        return found

    model.gain = nn.Parameter(torch.tensor(1.5))
    model.forward = types.MethodType(forward, model)


@CHANGES.add("gain")
def parameter_in_a_hook_of_the_model(model: Any) -> None:
    def scale(module: Any, _: Any, output: Any) -> Any:
        output.loss = output.loss * module.gain
        return output

    model.gain = nn.Parameter(torch.tensor(1.5))
    model.register_forward_hook(scale)


@CHANGES.add()
def parameter_in_a_module_inside(model: Any) -> None:
    owner, name = linear_of(model)
    getattr(owner, name).gain = nn.Parameter(torch.tensor(1.5))
    getattr(owner, name).register_forward_hook(lambda module, _, output: output * module.gain)


@CHANGES.add()
def parameter_that_nothing_uses(model: Any) -> None:
    mlp_of(model).idle = nn.Parameter(torch.ones(3))


@CHANGES.add()
def hook_of_a_layer(model: Any) -> None:
    def scale(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5

    layer_of(model).register_forward_hook(scale)


@CHANGES.add()
def hooks_of_modules_inside(model: Any) -> None:
    for module in layer_of(model).modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: output * 1.25)
            module.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:]))


@CHANGES.add()
def hook_of_a_head(model: Any) -> None:
    head = model.get_output_embeddings() or model.score
    head.register_forward_hook(lambda _, __, output: torch.tanh(output))


@CHANGES.add()
def hook_with_keywords(model: Any) -> None:
    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args[0] * 1.5, *args[1:]), kwargs

    layer_of(model, 1).register_forward_pre_hook(look, with_kwargs=True)


@CHANGES.add("hook", "norm", "ln_")
def hook_that_holds_a_module(model: Any) -> None:
    norm = norm_of(model)
    layer_of(model).register_forward_pre_hook(lambda _, args: (args[0] * norm.weight.mean(), *args[1:]))


@CHANGES.add("hook")
def hook_whose_object_holds_the_model(model: Any) -> None:
    holder = types.SimpleNamespace(inner={"model": model})

    def hook(self: Any, _: Any, __: Any) -> None:
        assert self.inner

    layer_of(model).register_forward_pre_hook(types.MethodType(lambda s, m, a: hook(s, m, a), holder))


@CHANGES.add()
def hook_on_gradients_of_a_layer(model: Any) -> None:
    layer_of(model, 1).register_full_backward_hook(lambda _, given, __: tuple(g if g is None else g * 2 for g in given))


@CHANGES.add()
def hook_on_gradients_inside(model: Any) -> None:
    mlp_of(model).register_full_backward_pre_hook(lambda _, grads: tuple(g if g is None else g * 2 for g in grads))


@CHANGES.add("register_backward_hook")
def hook_on_gradients_of_the_old_kind(model: Any) -> None:
    mlp_of(model).register_backward_hook(lambda _, given, __: tuple(g if g is None else g * 2 for g in given))
