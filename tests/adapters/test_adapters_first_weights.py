"""First weights of a model with adapters: the base's own, and what PEFT would begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import STACKS, base_folder, peft
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatier.adapters.first_weights import AdaptedWeights, base_name, is_of_adapter
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TrainConfig
from megatier.layout import Layout
from megatier.models.decoder import Unit, find_units
from megatier.setup.skeleton import open_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


def read_all(base: Path, seed: int = 0, **lora: Any) -> dict[str, Tensor]:
    config = RunConfig(
        model=ModelConfig(path=str(base), lora=lora), data=DataConfig(files=("x",)), train=TrainConfig(seed=seed)
    )
    model, reader = open_model(config)
    assert isinstance(reader, AdaptedWeights)
    found = {}
    for unit in find_units(model):
        plane = filled(reader, unit)
        found.update({t.name: plane[t.start : t.stop].view(t.shape) for t in unit.layout.tensors})
    return found


def filled(reader: AdaptedWeights, unit: Unit, shard: Layout | None = None) -> Tensor:
    plane = torch.zeros((shard or unit.layout).num_elements)
    for start, values in reader.read(unit, shard):
        plane[start : start + values.numel()] = values
    return plane


def test_adapted_weights_are_those_of_the_folder_and_of_peft(base: Path) -> None:
    targets = ["q_proj", "down_proj"]
    found = read_all(base, seed=3, rank=4, dora=True, targets=targets, modules_to_save="lm_head")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, use_dora=True, lora_alpha=8, target_modules=targets, modules_to_save=["lm_head"])
    torch.manual_seed(3)
    check_equal(found, peft.inject_adapter_in_model(config, plain))


def check_equal(found: dict[str, Tensor], expected: nn.Module) -> None:
    parameters = dict(expected.named_parameters())
    assert found.keys() == parameters.keys()
    assert [name for name, value in found.items() if not torch.equal(value, parameters[name])] == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_adapted_weights_of_all_kinds_of_modules_begin_as_with_peft(family: str, tmp_path: Path) -> None:
    plain_model(tiny_config(family)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    targets = {"llama": ("embed_tokens", "o_proj", "gate_proj"), "gpt2": ("wpe", "c_attn")}.get(family, ("o_proj",))
    parameters = STACKS if family == "qwen3_moe" else ()
    found = read_all(tmp_path, seed=7, rank=4, targets=targets, target_parameters=parameters)
    config = peft.LoraConfig(
        r=4,
        target_modules=list(targets),
        target_parameters=list(parameters) or None,
        fan_in_fan_out=family == "gpt2",
    )
    torch.manual_seed(7)
    check_equal(found, peft.inject_adapter_in_model(config, plain))


def test_adapted_weights_depend_on_the_seed(base: Path) -> None:
    some, other = (read_all(base, seed=seed, rank=4, targets=("q_proj",)) for seed in (0, 1))
    drawn = [name for name in some if ".lora_A." in name]
    assert len({tuple(some[name].flatten().tolist()) for name in drawn}) == len(drawn)
    assert not any(torch.equal(some[name], other[name]) for name in drawn)


@pytest.mark.parametrize("dora", [False, True])
def test_adapted_weights_of_shards_are_those_of_the_whole(base: Path, dora: bool) -> None:
    config = RunConfig(model=ModelConfig(path=str(base), lora={"rank": 4, "dora": dora}), data=DataConfig(files=("x",)))
    model, reader = open_model(config)
    assert isinstance(reader, AdaptedWeights)
    unit = next(unit for unit in find_units(model) if unit.is_layer)
    unit = replace(unit, layout=unit.layout.padded(2))
    whole = filled(reader, unit)
    for rank in range(2):
        shard = filled(reader, unit, unit.layout.shard(rank, 2))
        for first, last, start in unit.layout.shard_runs(rank, 2):
            assert torch.equal(shard[start : start + last - first], whole[first:last])


def test_base_name_is_the_name_without_peft() -> None:
    assert base_name("model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    assert base_name("lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert base_name("lm_head.original_module.weight") == base_name("lm_head.weight") == "lm_head.weight"
    assert is_of_adapter("a.q_proj.lora_A.default.weight")
    assert is_of_adapter("a.embed.lora_embedding_A.default")
    assert is_of_adapter("a.q_proj.lora_magnitude_vector.default.weight")
    assert not is_of_adapter("a.q_proj.base_layer.weight")
