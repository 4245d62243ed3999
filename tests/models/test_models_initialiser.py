"""Random weights: those of a normally constructed model, whatever the order of units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

import pytest
import torch
from model_folders import flat_blocks, tensors_of
from tiny_models import FUSED, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatier.errors import UnsupportedModelError
from megatier.models import deferred_init, weights
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import with_schemas
from megatier.models.expert_units import cut_units
from megatier.models.initialiser import Initialiser
from megatier.workers import Workers


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors of tiny models come in several pieces too."""
    monkeypatch.setattr(weights, "READ_ELEMENTS", 1000)


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


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "gemma3_text", "qwen3_moe", "qwen3_next", "gpt_oss"])
def test_initialiser_parameters_with_a_law_are_drawn_from_the_same_distributions(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all but the smallest have one, so that views, constants and several steps are among them."""
    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 500)
    model = build_skeleton(tiny_config(family), "sdpa")
    ours = tensors_of(flat_blocks(Initialiser(model, seed=3), find_units(model)), find_units(model))
    check_distributions(ours, tiny_config(family))


def test_initialiser_any_part_of_a_unit_is_that_part_of_the_whole_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 700)
    model = build_skeleton(tiny_config("llama"), "sdpa")
    source = Initialiser(model, seed=5)
    for unit in find_units(model):
        whole = flat_blocks(source, (unit,))[unit.name]
        cuts = [*range(0, unit.layout.num_elements, 997), unit.layout.num_elements]
        runs = list(itertools.pairwise(cuts))[::-1]
        read = source.part_reader(unit)
        parts = [partial(read, unit.layout.part(*run)) for run in runs]
        with closing(Workers(3, "test")) as workers:
            found = workers.map(lambda part: list(part()), parts)
        for (start, stop), pieces in zip(runs, found, strict=True):
            part = torch.zeros(stop - start)
            for first, values in pieces:
                part[first - start : first - start + values.numel()] = values
            assert torch.equal(part, whole[start:stop])


def test_initialiser_parameter_with_a_law_has_the_same_values_in_any_number_of_expert_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 700)
    model = build_skeleton(tiny_config("qwen3_moe"), "sdpa")
    values = []
    for parts in (1, 2):
        units = cut_units(model, parts)
        values.append(tensors_of(flat_blocks(Initialiser(model, seed=3), units), units))
    large = [name for name, value in values[0].items() if value.numel() > 700]
    assert any("experts" in name for name in large)
    assert all(torch.equal(values[0][name], values[1][name]) for name in large)


INITIALISATIONS: dict[str, Callable[[Tensor], object]] = {
    "trunc_normal": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "a row of zeros": lambda weight: nn.init.normal_(weight)[3].zero_(),
    "scaled": lambda weight: nn.init.uniform_(weight).sub_(0.5).mul_(2),
    "by rows": lambda weight: [row.normal_(std=1 + number) for number, row in enumerate(weight)],
    "copied": lambda weight: weight.copy_(torch.linspace(0, 1, weight.numel()).view_as(weight)),
    "normalised": lambda weight: nn.init.normal_(weight).div_(weight.norm()),
    "of its data": lambda weight: weight.data.normal_(mean=3.0),
}


@pytest.mark.parametrize("name", INITIALISATIONS)
def test_initialiser_takes_any_initialisation_of_a_parameter_with_a_law(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be done chunk by chunk is done at once."""
    initialise = INITIALISATIONS[name]

    def init_weights(_self: PreTrainedModel, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            with torch.no_grad():
                initialise(parameter) if parameter.dim() > 1 else parameter.zero_()

    monkeypatch.setattr(deferred_init, "INIT_CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(PreTrainedModel, "_init_weights", init_weights)
    model = build_skeleton(tiny_config("llama"), "sdpa")
    unit = find_units(model)[2]
    values = tensors_of(flat_blocks(Initialiser(model, seed=1), (unit,)), (unit,))
    again = tensors_of(flat_blocks(Initialiser(model, seed=1), (unit,)), (unit,))
    for parameter, found in values.items():
        assert torch.equal(found, again[parameter])
        if found.dim() > 1:
            torch.manual_seed(1)
            expected = torch.full_like(found, math.nan)
            initialise(expected)
            tolerance = 8 * float(expected.std()) / math.sqrt(expected.numel())
            assert float(found.mean()) == pytest.approx(float(expected.mean()), abs=tolerance)
            assert float(found.std()) == pytest.approx(float(expected.std()), abs=tolerance)
            assert float(found.abs().max()) <= 2 * float(expected.abs().max())
            if name in ("copied",):
                assert torch.equal(found, expected)


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
