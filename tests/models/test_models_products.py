"""Which modules take their products in FP8: one rule, and names to except."""

from __future__ import annotations

from typing import Any

import pytest
from small_setups import NOTHING, ROUND
from tiny_models import FAMILIES, tiny_config
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from megatier.adapters.lora import add_adapters
from megatier.compute.fp8 import Fp8Linear
from megatier.config.lora import LoraConfig
from megatier.config.schema import OF_LOOP, ModelConfig, NumericsConfig, RunConfig
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import with_schemas
from megatier.models.products import LEFT_OUT, ODD, Products, products_of, set_products
from megatier.setup.machine import Machine

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(family: str, **sizes: Any) -> PretrainedConfig:
    if family in FAMILIES:
        return tiny_config(family, **{**SIZES, **sizes})
    return AutoConfig.for_model(family, vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **SIZES, **sizes)


def found(family: str, *excepted: str, lora: LoraConfig | None = None, **sizes: Any) -> Products:
    model = build_skeleton(config_of(family, **sizes), "sdpa")
    if lora is not None:
        add_adapters(model, lora, "base")
    return products_of(model, with_schemas(model, find_units(model), "bf16"), excepted)


def kinds(names: Any) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def test_fp8_layers_are_the_linear_ones_inside_of_decoder_layers() -> None:
    made = found("llama")
    assert kinds(made.fp8) == SEVEN
    assert len(made.fp8) == 14
    assert all(name.startswith("model.layers.") for name in made.fp8)
    assert list(made.described()) == [f"products of 14 modules ({', '.join(SEVEN)}) in fp8, all others in bf16"]


def test_fp8_layers_of_odd_sizes_and_those_named_stay_in_bf16_and_a_run_says_so() -> None:
    made = found("llama", "model.layers.0", "*.o_proj", intermediate_size=40)
    assert {name.rpartition(".")[2] for name in made.fp8} == {"q_proj", "k_proj", "v_proj"}
    reasons = dict(made.bf16)
    assert reasons["model.layers.0.self_attn.q_proj"] == reasons["model.layers.1.self_attn.o_proj"] == LEFT_OUT
    assert reasons["model.layers.1.mlp.up_proj"] == ODD
    _, named, odd = made.described()
    assert named.endswith(f", {LEFT_OUT}")
    assert odd == f"in bf16 stay 3 modules (gate_proj, up_proj, down_proj), {ODD}"


def test_fp8_layers_of_adapters_are_the_base_alone() -> None:
    pytest.importorskip("peft")
    made = found("llama", "*.down_proj", lora=LoraConfig(rank=16))
    assert all(name.endswith("_proj.base_layer") for name in made.fp8)
    assert len(made.fp8) == 12
    with pytest.raises(ConfigError, match=r"Near it are \*\.down_proj"):
        found("llama", "*.dwn_proj", lora=LoraConfig(rank=16))


def test_fp8_stacks_of_experts_are_meant_unless_they_are_excepted_or_of_odd_sizes() -> None:
    sizes: dict[str, Any] = {"num_experts": 16, "moe_intermediate_size": 16}
    made = found("qwen3_moe", **sizes)
    assert kinds(made.fp8) == [*SEVEN[:4], "experts"]
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= made.weights
    assert "products of 10 modules (q_proj, k_proj, v_proj, o_proj, experts) in fp8" in " ".join(made.described())
    for reason, names, more in ((LEFT_OUT, ["*.experts"], {}), (ODD, [], {"moe_intermediate_size": 24})):
        made = found("qwen3_moe", *names, **{**sizes, **more})
        assert kinds(made.fp8) == SEVEN[:4]
        assert dict(made.bf16)["model.layers.0.mlp.experts"] == reason


def test_fp8_stacks_that_compute_in_a_way_of_their_own_are_refused_by_name_unless_they_are_excepted() -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 48}
    with pytest.raises(UnsupportedModelError, match=r"\.experts \(Llama4TextExperts\) holds experts .*'\*\.experts'"):
        found("llama4_text", **sizes)
    made = found("llama4_text", "*.experts", **sizes)
    assert "q_proj" in kinds(made.fp8)
    assert "experts" not in kinds(made.fp8)


def test_fp8_leaves_routers_that_are_linear_layers() -> None:
    made = found("afmoe", "*.experts", num_experts=16, num_dense_layers=0, moe_intermediate_size=16)
    assert "gate" not in kinds(made.fp8)


@pytest.mark.parametrize(
    ("excepted", "message"),
    [
        (
            ("*.dwn_proj",),
            r"numerics\.products_except: '\*\.dwn_proj' names no linear layer .* Near it are \*\.down_proj",
        ),
        (("lm_head",), "'lm_head' names no linear layer of this model's decoder layers"),
        (("*",), r"no linear layer of LlamaForCausalLM is left for it \(named in numerics\.products_except\)"),
    ],
)
def test_fp8_patterns_that_name_nothing_or_leave_nothing_are_refused(excepted: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found("llama", *excepted)


def test_fp8_layers_of_a_skeleton_are_those_that_were_set_last() -> None:
    model = build_skeleton(tiny_config("llama", **SIZES), "sdpa")
    units = with_schemas(model, find_units(model), "bf16")
    for excepted in ((), ("*.mlp",), ()):
        names = products_of(model, units, excepted).fp8
        set_products(model, names)
        assert [name for name, module in model.named_modules() if type(module) is Fp8Linear] == list(names)
    set_products(model, ())
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


def test_fp8_leaves_a_layer_whose_forward_was_replaced_or_whose_class_is_another() -> None:
    class Other(nn.Linear):
        pass

    model = build_skeleton(tiny_config("llama", **SIZES), "sdpa")
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    mlp.up_proj.forward = lambda rows: rows
    mlp.gate_proj.__class__ = Other
    names = products_of(model, with_schemas(model, find_units(model), "bf16"), ()).fp8
    assert len(names) == 12


def test_fp8_products_of_fp32_weights_are_refused() -> None:
    model = ModelConfig(path="m", compute_dtype="fp32")
    with pytest.raises(
        ConfigError, match=r"numerics\.products is 'fp8'; it must be bf16 with model\.compute_dtype fp32"
    ):
        RunConfig(model=model, data=OF_LOOP, numerics=NumericsConfig(products="fp8"))


@pytest.mark.parametrize(("capability", "is_taken"), [((8, 0), False), ((8, 9), True), ((9, 0), True), (None, True)])
def test_fp8_products_on_a_gpu_without_them_are_refused(capability: tuple[int, int] | None, is_taken: bool) -> None:
    machine = Machine(
        device=None,  # type: ignore[arg-type]
        capability=capability,
        has_bf16=True,
        budgets=NOTHING,
        mounts=(),
        rates=ROUND,
    )
    machine.check_products("bf16")
    if is_taken:
        machine.check_products("fp8")
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.0\) has no FP8 products"):
        machine.check_products("fp8")
