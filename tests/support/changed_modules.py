"""What people change on a model: modules that are put in, taken out, shared or wrapped."""

from __future__ import annotations

from typing import Any

import torch
from model_changes import Changes, layer_of, linear_of, mlp_of, norm_of
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from megatier.models.decoder import decoder_layers

CHANGES = Changes()


@CHANGES.add()
def head_untied(model: Any) -> None:
    if (head := model.get_output_embeddings()) is not None:
        head.weight = nn.Parameter(head.weight.detach() * 1.5)


@CHANGES.add()
def head_tied(model: Any) -> None:
    if (head := model.get_output_embeddings()) is not None:
        head.weight = model.get_input_embeddings().weight


@CHANGES.add()
def other_norm(model: Any) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("Norm") and "layers.0" in name and module.weight.numel() == 32:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.LayerNorm(32))


@CHANGES.add()
def module_in_a_list(model: Any) -> None:
    owner, name = linear_of(model)
    setattr(owner, name, nn.Sequential(getattr(owner, name), nn.Tanh()))


class OwnMLP(nn.Module):
    """An MLP of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48)
        self.gate = nn.Parameter(torch.full((48,), 0.5))
        self.outer = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.inner(x)) * self.gate)
        return found


@CHANGES.add()
def other_mlp(model: Any) -> None:
    torch.manual_seed(3)
    layer_of(model, 1).mlp = OwnMLP()


@CHANGES.add()
def head_that_nothing_uses(model: Any) -> None:
    model.value = nn.Linear(32, 1)


@CHANGES.add("num_hidden_layers")
def layer_removed(model: Any) -> None:
    del decoder_layers(model)[-1]


@CHANGES.add("one module", "layers.0", "h.0")
def layer_shared(model: Any) -> None:
    decoder_layers(model)[-1] = decoder_layers(model)[0]


@CHANGES.add("share", "is used by")
def weight_shared(model: Any) -> None:
    for name, module in layer_of(model, 1).named_modules():
        if type(module).__name__.endswith(("Norm", "LayerNorm")):
            module.weight = layer_of(model, 0).get_submodule(name).weight


@CHANGES.add("share memory")
def memory_shared(model: Any) -> None:
    norms = [m for m in model.modules() if type(m).__name__.endswith(("Norm", "LayerNorm"))]
    both = torch.ones(2, norms[0].weight.numel())
    norms[0].weight = nn.Parameter(both.view(-1)[: norms[0].weight.numel()])
    norms[-1].weight = nn.Parameter(both.view(-1)[4 : 4 + norms[-1].weight.numel()])


@CHANGES.add("parametrized")
def weight_parametrized(model: Any) -> None:
    parametrize.register_parametrization(norm_of(model), "weight", nn.Identity())


@CHANGES.add("torch.nn.utils computes")
def weight_pruned(model: Any) -> None:
    owner, name = linear_of(model)
    inner = getattr(owner, name)
    prune.l1_unstructured(inner[0] if isinstance(inner, nn.Sequential) else inner, "weight", amount=0.5)


@CHANGES.add("compiled")
def module_compiled(model: Any) -> None:
    mlp_of(model).compile()
