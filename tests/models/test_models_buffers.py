"""Buffers of a skeleton: those of a model that was built as usual, whoever gives them their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from tiny_runs import plain_model
from tiny_vision import VISION_FAMILIES, vision_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatier.errors import UnsupportedModelError
from megatier.models.buffers import REAL_ELEMENTS_MAX, initialise_buffers, parameters_on_meta
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.initialiser import Initialiser

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    **{family: partial(tiny_config, family) for family in FAMILIES},
    **{family: partial(vision_config, family) for family in VISION_FAMILIES},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_buffers_family_are_those_of_a_usual_model(family: str) -> None:
    skeleton = build_skeleton(CONFIGS[family](), "sdpa")
    usual = plain_model(CONFIGS[family](), skeleton.config._attn_implementation)
    expected, found = dict(usual.named_buffers()), dict(skeleton.named_buffers())
    assert found.keys() == expected.keys()
    assert [name for name, buffer in found.items() if buffer.device.type != "cpu"] == []
    assert [name for name, buffer in expected.items() if found[name].dtype != buffer.dtype] == []
    assert [name for name, buffer in expected.items() if not torch.equal(found[name], buffer)] == []


def test_buffers_of_a_constructor_keep_its_values() -> None:
    """Apertus' activation has constants that no initialisation sets again."""
    activation = build_skeleton(tiny_config("apertus"), "sdpa").get_submodule("model.layers.0.mlp.act_fn")
    assert activation.get_buffer("beta").item() == 0.5
    assert activation.get_buffer("eps").item() == pytest.approx(-1e-6)


class Made(nn.Module):
    """What constructors make in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drawn = nn.Parameter(torch.randn(4), requires_grad=False)
        self.drawn.is_marked = True  # type: ignore[attr-defined]
        self.large = nn.Parameter(torch.zeros(REAL_ELEMENTS_MAX + 1))
        self.scale = 2.0 * torch.tensor(1.5)
        self.register_buffer("table", torch.arange(6.0).view(2, 3).cos(), persistent=False)
        self.register_buffer("random", torch.randn(4))
        self.register_buffer("mask", torch.ones(REAL_ELEMENTS_MAX + 1, dtype=torch.bool))


def test_parameters_are_on_meta_and_what_else_a_constructor_makes_is_real() -> None:
    state = torch.get_rng_state()
    with parameters_on_meta():
        made, again = Made(), Made()
    assert all(parameter.is_meta for parameter in made.parameters())
    assert made.drawn.is_marked  # type: ignore[attr-defined]
    assert not made.drawn.requires_grad
    assert made.scale.item() == 3.0
    assert torch.equal(made.get_buffer("table"), torch.arange(6.0).view(2, 3).cos())
    assert made.get_buffer("random").isfinite().all()
    assert made.get_buffer("mask").is_meta
    assert not torch.equal(made.get_buffer("random"), again.get_buffer("random"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not nn.Linear(2, 2).weight.is_meta


class Drawn(TorchDispatchMode):
    """Notes the devices on which values are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.devices: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            self.devices.append(args[0].device.type)
        return function(*args, **(kwargs or {}))


def test_skeleton_draws_values_for_what_is_real_alone() -> None:
    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("noise", nn.init.normal_(torch.zeros(4)))

    with Drawn() as drawn, parameters_on_meta():
        noisy = Noisy()
    assert drawn.devices == ["cpu"]
    assert noisy.get_buffer("noise").count_nonzero() == 4

    with Drawn() as drawn:
        build_skeleton(tiny_config("gpt2"), "sdpa")
    assert drawn.devices == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.complex64], ids=str)
def test_buffer_that_is_left_on_meta_and_never_set_is_refused(dtype: torch.dtype) -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    model.register_buffer("table", torch.empty(3, dtype=dtype, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM: nothing initialises the buffer table\."):
        initialise_buffers(model)


def test_parameter_that_no_initialisation_sets_has_the_value_of_its_constructor() -> None:
    model = build_skeleton(tiny_config("apertus"), "sdpa")
    unit = next(unit for unit in find_units(model) if unit.is_layer)
    pieces = zip(Initialiser(model, 0).read(unit), unit.layout.tensors, strict=True)
    values = {tensor.name: piece.clone() for (_, piece), tensor in pieces}
    usual = AutoModelForCausalLM.from_config(tiny_config("apertus"), dtype=torch.float32)
    for name in ("alpha_p", "alpha_n"):
        key = f"model.layers.0.mlp.act_fn.{name}"
        assert torch.equal(values[key], usual.get_parameter(key))
