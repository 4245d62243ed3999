"""Tiny models in RAM, and what people change on such models: attributes, modules, hooks, modes, parameters, buffers.

Each change is made on a model, and a streamed one has to take the steps of the plain one, or has to be refused by name.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tiny_models import tiny_config
from tiny_runs import MIB, plain_model
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import LlamaForSequenceClassification, PretrainedConfig

import megatier
from megatier.errors import MegatierError
from megatier.models.decoder import decoder_layers

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


@dataclass(frozen=True)
class Change:
    """A change that somebody makes on a model."""

    apply: Callable[[Any], None]
    """Makes it."""
    named: tuple[str, ...] = ()
    """What a refusal has to name, at least one of them. Without any, the change may not be refused."""

    @property
    def name(self) -> str:
        return self.apply.__name__


CHANGES: list[Change] = []


def change(*named: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Add a change to the list."""

    def add(apply: Callable[[Any], None]) -> Callable[[Any], None]:
        CHANGES.append(Change(apply, named))
        return apply

    return add


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


def layer_of(model: Any, index: int = 0) -> Any:
    return decoder_layers(model)[-index]


def norm_of(model: Any) -> Any:
    """The last norm."""
    return next(reversed([m for m in model.modules() if type(m).__name__.endswith(("Norm", "LayerNorm"))]))


def mlp_of(model: Any, index: int = 0) -> Any:
    return layer_of(model, index).mlp


def linear_of(model: Any) -> tuple[Any, str]:
    """A module of the first layer's attention, and a name of a linear map in it."""
    layer = layer_of(model)
    return (layer.attn, "c_attn") if hasattr(layer, "attn") else (layer.self_attn, "q_proj")


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


# ---------------------------------------------------------------------- attributes


@change()
def other_epsilon(model: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.5)


@change()
def other_activation(model: Any) -> None:
    for module in model.modules():
        for name in ("act_fn", "act"):
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, nn.ReLU())


@change()
def activation_that_is_a_function(model: Any) -> None:
    for module in model.modules():
        for name in ("act_fn", "act"):
            if getattr(module, name, None) is not None:
                delattr(module, name)
                setattr(module, name, lambda x: torch.tanh(x) * 2)


@change()
def other_scaling_of_attention(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.1


@change()
def dropout_off(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


@change()
def own_loss(model: Any) -> None:
    def loss(logits: Tensor, labels: Tensor, *_: object, **options: Any) -> Tensor:
        logits = options.get("pooled_logits", logits)
        return logits.square().mean()

    model.loss_function = loss


@change("loss_function")
def loss_that_holds_the_head(model: Any) -> None:
    head = model.get_output_embeddings() or model.score
    model.loss_function = lambda logits, *_, **__: logits.square().mean() + head.weight.square().sum()


@change("loss_function")
def loss_that_is_a_module(model: Any) -> None:
    model.loss_function = nn.MSELoss()


@change("scale", "view")
def view_of_a_weight(model: Any) -> None:
    norm = norm_of(model)
    norm.scale = norm.weight.detach()[:1]
    norm.register_forward_hook(lambda module, _, output: output * (1 + module.scale))


@change()
def tensor_that_is_no_buffer(model: Any) -> None:
    norm = norm_of(model)
    norm.scale = torch.tensor(1.25)
    norm.register_forward_hook(lambda module, _, output: output * module.scale)


@change("requires a gradient")
def tensor_with_a_gradient_that_is_no_parameter(model: Any) -> None:
    norm_of(model).scales = [torch.tensor(1.25, requires_grad=True)]


@change("cached")
def tensor_with_a_graph(model: Any) -> None:
    norm = norm_of(model)
    norm.cached = norm.weight * 2


@change("lock")
def attribute_that_cannot_be_copied(model: Any) -> None:
    norm_of(model).lock = threading.Lock()


@change()
def config_after_construction(model: Any) -> None:
    text = model.config.get_text_config()
    for config in (model.config, text):
        vars(config)["hidden_act"] = "relu"
        vars(config)["hidden_size"] = 40


@change("num_hidden_layers")
def fewer_layers_in_the_config(model: Any) -> None:
    model.config.get_text_config().num_hidden_layers = 1


@change()
def checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


@change()
def other_generation(model: Any) -> None:
    if model.can_generate():
        model.generation_config.max_new_tokens = 3


# ---------------------------------------------------------------------- modules


@change()
def head_untied(model: Any) -> None:
    if (head := model.get_output_embeddings()) is not None:
        head.weight = nn.Parameter(head.weight.detach() * 1.5)


@change()
def head_tied(model: Any) -> None:
    if (head := model.get_output_embeddings()) is not None:
        head.weight = model.get_input_embeddings().weight


@change()
def other_norm(model: Any) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("Norm") and "layers.0" in name and module.weight.numel() == 32:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.LayerNorm(32))


@change()
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


@change()
def other_mlp(model: Any) -> None:
    torch.manual_seed(3)
    layer_of(model, 1).mlp = OwnMLP()


@change()
def head_that_nothing_uses(model: Any) -> None:
    model.value = nn.Linear(32, 1)


@change("num_hidden_layers")
def layer_removed(model: Any) -> None:
    del decoder_layers(model)[-1]


@change("one module", "layers.0", "h.0")
def layer_shared(model: Any) -> None:
    decoder_layers(model)[-1] = decoder_layers(model)[0]


@change("share", "is used by")
def weight_shared(model: Any) -> None:
    for name, module in layer_of(model, 1).named_modules():
        if type(module).__name__.endswith(("Norm", "LayerNorm")):
            module.weight = layer_of(model, 0).get_submodule(name).weight


@change("share memory")
def memory_shared(model: Any) -> None:
    norms = [m for m in model.modules() if type(m).__name__.endswith(("Norm", "LayerNorm"))]
    both = torch.ones(2, norms[0].weight.numel())
    norms[0].weight = nn.Parameter(both.view(-1)[: norms[0].weight.numel()])
    norms[-1].weight = nn.Parameter(both.view(-1)[4 : 4 + norms[-1].weight.numel()])


@change("parametrized")
def weight_parametrized(model: Any) -> None:
    parametrize.register_parametrization(norm_of(model), "weight", nn.Identity())


@change("torch.nn.utils computes")
def weight_pruned(model: Any) -> None:
    owner, name = linear_of(model)
    inner = getattr(owner, name)
    prune.l1_unstructured(inner[0] if isinstance(inner, nn.Sequential) else inner, "weight", amount=0.5)


@change("compiled")
def module_compiled(model: Any) -> None:
    mlp_of(model).compile()


# ---------------------------------------------------------------------- forwards and hooks


@change()
def own_forward_of_a_module(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        found = type(self).forward(self, x)
        return tuple(y * 1.5 for y in found) if isinstance(found, tuple) else found * 1.5

    mlp = mlp_of(model)
    mlp.forward = types.MethodType(forward, mlp)


@change("forward of", "gain")
def own_forward_that_holds_the_module(model: Any) -> None:
    mlp = mlp_of(model)
    inner = mlp.forward

    def forward(x: Tensor) -> Any:
        found = inner(x)
        return tuple(y * 1.5 for y in found) if isinstance(found, tuple) else found * 1.5

    mlp.forward = forward


@change()
def own_forward_of_the_model(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self).forward(self, *args, **kwargs)
        found.loss = found.loss * 3
        return found

    model.forward = types.MethodType(forward, model)


@change()
def class_of_its_own(model: Any) -> None:
    kind = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.forward(self, *args, **kwargs)
        found.loss = found.loss + found.logits.square().mean()
        return found

    model.__class__ = type("Own", (kind,), {"forward": forward})


@change()
def parameter_of_the_model(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type(self).forward(self, *args, **kwargs)
        found.loss = found.loss * self.gain
        return found

    model.gain = nn.Parameter(torch.tensor(1.5))
    model.forward = types.MethodType(forward, model)


@change("gain")
def parameter_in_a_hook_of_the_model(model: Any) -> None:
    def scale(module: Any, _: Any, output: Any) -> Any:
        output.loss = output.loss * module.gain
        return output

    model.gain = nn.Parameter(torch.tensor(1.5))
    model.register_forward_hook(scale)


@change()
def parameter_in_a_module_inside(model: Any) -> None:
    owner, name = linear_of(model)
    getattr(owner, name).gain = nn.Parameter(torch.tensor(1.5))
    getattr(owner, name).register_forward_hook(lambda module, _, output: output * module.gain)


@change()
def parameter_that_nothing_uses(model: Any) -> None:
    mlp_of(model).idle = nn.Parameter(torch.ones(3))


@change()
def hook_of_a_layer(model: Any) -> None:
    def scale(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5

    layer_of(model).register_forward_hook(scale)


@change()
def hooks_of_modules_inside(model: Any) -> None:
    for module in layer_of(model).modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: output * 1.25)
            module.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:]))


@change()
def hook_of_a_head(model: Any) -> None:
    head = model.get_output_embeddings() or model.score
    head.register_forward_hook(lambda _, __, output: torch.tanh(output))


@change()
def hook_with_keywords(model: Any) -> None:
    def look(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args[0] * 1.5, *args[1:]), kwargs

    layer_of(model, 1).register_forward_pre_hook(look, with_kwargs=True)


@change("hook", "norm", "ln_")
def hook_that_holds_a_module(model: Any) -> None:
    norm = norm_of(model)
    layer_of(model).register_forward_pre_hook(lambda _, args: (args[0] * norm.weight.mean(), *args[1:]))


@change("hook")
def hook_whose_object_holds_the_model(model: Any) -> None:
    holder = types.SimpleNamespace(inner={"model": model})

    def hook(self: Any, _: Any, __: Any) -> None:
        assert self.inner

    layer_of(model).register_forward_pre_hook(types.MethodType(lambda s, m, a: hook(s, m, a), holder))


@change()
def hook_on_gradients_of_a_layer(model: Any) -> None:
    layer_of(model, 1).register_full_backward_hook(lambda _, given, __: tuple(g if g is None else g * 2 for g in given))


@change()
def hook_on_gradients_inside(model: Any) -> None:
    mlp_of(model).register_full_backward_pre_hook(lambda _, grads: tuple(g if g is None else g * 2 for g in grads))


@change("register_backward_hook")
def hook_on_gradients_of_the_old_kind(model: Any) -> None:
    mlp_of(model).register_backward_hook(lambda _, given, __: tuple(g if g is None else g * 2 for g in given))


# ---------------------------------------------------------------------- modes, parameters, buffers, dtypes


@change()
def all_in_eval_mode(model: Any) -> None:
    model.eval()


@change()
def one_layer_in_eval_mode(model: Any) -> None:
    layer_of(model).eval()


@change()
def some_frozen(model: Any) -> None:
    layer_of(model).requires_grad_(False)
    model.get_input_embeddings().requires_grad_(False)


@change("hook on its gradient")
def hook_on_a_gradient(model: Any) -> None:
    norm_of(model).weight.register_hook(lambda grad: grad * 2)


@change("hook on its gradient")
def hook_behind_a_gradient(model: Any) -> None:
    norm_of(model).weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))


@change("has a gradient already")
def gradient_left(model: Any) -> None:
    norm = norm_of(model)
    norm.weight.grad = torch.ones_like(norm.weight)


@change("on meta")
def parameter_on_meta(model: Any) -> None:
    norm = norm_of(model)
    norm.weight = nn.Parameter(norm.weight.detach().to("meta"))


@change()
def buffer_that_nothing_uses(model: Any) -> None:
    model.register_buffer("tick", torch.zeros(1))


@change()
def buffer_that_is_not_stored(model: Any) -> None:
    norm = norm_of(model)
    norm.register_buffer("scale_of_own", torch.tensor([1.5]), persistent=False)
    norm.register_forward_hook(lambda module, _, output: output * module.scale_of_own)


@change()
def buffer_that_counts(model: Any) -> None:
    def count(module: Any, _: Any, output: Any) -> Any:
        module.calls += 1
        return output * (1 + module.calls / 10)

    norm = norm_of(model)
    norm.register_buffer("calls", torch.zeros(()))
    norm.register_forward_hook(count)


@change()
def buffer_in_fp64(model: Any) -> None:
    norm = norm_of(model)
    norm.register_buffer("wide", torch.full((32,), 1.1, dtype=torch.float64))
    norm.register_forward_hook(lambda module, _, output: (output * module.wide).float())


@change()
def buffers_with_other_values(model: Any) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


@change("torch.bfloat16")
def one_norm_in_bf16(model: Any) -> None:
    norm_of(model).to(torch.bfloat16)


@change("torch.float64")
def one_norm_in_fp64(model: Any) -> None:
    norm_of(model).double()


@change("torch.float64")
def all_in_fp64(model: Any) -> None:
    model.double()
