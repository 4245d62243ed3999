"""Random weights: those of a normally constructed model, whatever the order of units."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from model_folders import flat_blocks, tensors_of
from tiny_models import FUSED, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.models import weights
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import with_schemas
from megatier.models.experts import cut_units
from megatier.models.initialiser import Initialiser


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models come in several pieces too."""
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 1000)


# Initialiser
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama_tied", 1),
        ("gpt2", 1),
        ("gemma3_text", 1),
        ("qwen3_moe", 1),
        ("qwen3_next", 1),
        ("gpt_oss", 1),
        ("lfm2", 1),
        *((family, 2) for family in FUSED),
    ],
)
def test_initialiser_family_draws_from_the_distributions_of_a_normal_model(family: str, parts: int) -> None:
    """GPT-2 scales its residual projections by depth, Qwen3-Next draws A_log and dt_bias in ways of its own."""
    model = build_skeleton(tiny_config(family), "sdpa")
    units = cut_units(model, parts)
    ours = tensors_of(flat_blocks(Initialiser(model, seed=3), units), units)
    assert ours.keys() == dict(model.named_parameters()).keys()
    check_distributions(ours, tiny_config(family))


@pytest.mark.parametrize("family", [name for name in ("glm4_moe", "deepseek_v4", "hy_v4") if name in FUSED])
def test_initialiser_draws_parameters_that_stay_in_fp32_from_the_same_distributions(family: str) -> None:
    """They are a unit of their own, far from their modules' other units."""
    config = tiny_config(family, hidden_size=128)
    model = build_skeleton(config, "sdpa")
    units = with_schemas(model, find_units(model), "bf16")
    lent = tuple(unit for unit in units if unit.is_lent)
    check_distributions(tensors_of(flat_blocks(Initialiser(model, seed=3), lent), lent), config)
    assert all(parameter.is_meta for parameter in model.parameters())


def check_distributions(ours: Mapping[str, Tensor], config: PretrainedConfig) -> None:
    """Compare what was drawn with what a normal model draws."""
    torch.manual_seed(3)
    normal = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, found in ours.items():
        expected = normal.get_parameter(name).detach()
        if expected.unique().numel() == 1:
            assert torch.equal(found, expected), name
        elif expected.numel() >= 1000:
            tolerance = 6 * float(expected.std()) / math.sqrt(expected.numel())
            assert float(found.mean()) == pytest.approx(float(expected.mean()), abs=2 * tolerance), name
            assert float(found.std()) == pytest.approx(float(expected.std()), abs=tolerance), name


def test_initialiser_unit_depends_on_seed_and_name_alone() -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    units = find_units(model)
    state = torch.get_rng_state()
    whole = flat_blocks(Initialiser(model, seed=5), units)
    alone = flat_blocks(Initialiser(model, seed=5), units[3:4])
    other = flat_blocks(Initialiser(model, seed=6), units[3:4])
    assert torch.equal(whole[units[3].name], alone[units[3].name])
    assert not torch.equal(whole[units[3].name], other[units[3].name])
    assert not torch.equal(whole[units[3].name], whole[units[2].name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_initialiser_parameter_that_nothing_sets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_skeleton(tiny_config("llama"), "sdpa")
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(UnsupportedModelError, match=r"no initial value for model\.embed_tokens\.weight"):
        next(Initialiser(model, seed=0).read(find_units(model)[0]))
