"""Runs with Lion: the bits of any tier, and the numbers of its definition in single torch operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_adamw import settle
from tiny_runs import (
    PLACES,
    ModelWeights,
    Run,
    Short,
    exactness_config,
    opened,
    placements_that_differ,
    plain_model,
    random_groups,
    read_parameters,
    run_in_fresh_process,
    run_steps,
)

from megatier.models.decoder import decay_parameter_names
from megatier.tier import Kind

EVERYWHERE = [(place, ("keep", "recompute", "offload")[n % 3]) for n, place in enumerate(PLACES)]
SOME = [("ram_streamed", "keep"), ("nvme_twice", "recompute"), ("nvme_grads", "keep")]
RUNS = {
    "all places": (Short(model="untied"), [*SOME, ("gpu", "offload"), ("nvme", "keep"), ("gpu_ram_nvme", "offload")]),
    "everywhere": (Short(model="untied"), EVERYWHERE),
    "groups, slices": (Short(model="tied", groups=3, slices=2), SOME),
    "experts, immediate": (Short(model="moe", clip=None), SOME[:1]),
    "routers in fp32": (Short(model="routers"), SOME[:2]),
}
"""Runs, and settings that must not change their numbers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "everywhere")) for name in RUNS]
)
def test_lion_any_tier_and_activation_policy_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    run, settings = RUNS[name]
    run = replace(run, optimizer="lion")
    expected, others = placements_that_differ(run, settings, tmp_path)
    assert others == []
    assert expected.losses[1] != replace(run, optimizer="adamw", steps=2)(tmp_path).losses[1]


@pytest.mark.gpu
def test_lion_on_a_gpu_has_the_same_bits_on_any_tier(tmp_path: Path) -> None:
    run = Run(model="untied", optimizer="lion", device="cuda", compile=False)
    first, *others = run_in_fresh_process([replace(run, place=place) for place in PLACES], tmp_path)
    assert [result for result in others if result != first] == []


def test_lion_in_fp32_is_that_of_its_definition_on_a_plain_model(tmp_path: Path) -> None:
    config, train = exactness_config("tied"), Run(model="tied", clip=None, optimizer="lion").train
    plain = plain_model(config)
    source = ModelWeights(plain)
    with opened(
        config, tmp_path, PLACES["gpu_ram_nvme"], train, source=source, compute_dtype="fp32", seed=None
    ) as session:
        torch.manual_seed(5)
        run_steps(session, train)
        found = read_parameters(session, Kind.WEIGHT)

    parameters, decayed = dict(plain.named_parameters()), decay_parameter_names(plain)
    momenta = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    torch.manual_seed(5)
    for step in range(1, train.steps + 1):
        [batch] = random_groups(train, config.vocab_size, step)
        plain(**batch, use_cache=False).loss.backward()
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                change = (momenta[name] * 0.9 + parameter.grad * (1 - 0.9)).sign()
                momenta[name] = settle(momenta[name] * train.beta2 + parameter.grad * (1 - train.beta2))
                parameter.mul_(1 - 1e-2 * 0.1 if name in decayed else 1.0).sub_(1e-2 * change)
                parameter.grad = None

    # The model's own gradients differ in the last digits, and the sign of a number near 0 with them.
    for name, parameter in parameters.items():
        far = ((found[name] - parameter).abs() > 1e-6).float().mean()
        assert far < 1e-3, name
