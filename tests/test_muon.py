"""Runs with Muon: the bits of any tier, torch's numbers, the bytes that move, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from muon_reference import let_torch_iterate_as_we_do
from plain_adamw import PlainAdamW
from tiny_runs import (
    PLACES,
    ModelWeights,
    Run,
    Short,
    exactness_config,
    opened,
    outcome,
    placements_that_differ,
    plain_model,
    random_groups,
    read_parameters,
    run_in_fresh_process,
    run_steps,
)

from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import matrices_of_layers
from megatier.tier import Kind

EVERYWHERE = [(place, ("keep", "recompute", "offload")[n % 3]) for n, place in enumerate(PLACES)]
SOME = [
    ("gpu", "offload"),
    ("ram_streamed", "keep"),
    ("nvme", "recompute"),
    ("nvme_twice", "keep"),
    ("ram_twice", "offload"),
]
RUNS = {
    "all places": (Short(model="untied"), [*SOME, ("gpu_ram_nvme", "keep"), ("nvme_grads", "offload")]),
    "groups, slices": (Short(model="tied", groups=3, slices=2), [*SOME[1::2], ("nvme_grads", "keep")]),
    "immediate": (Short(model="untied", dtype="fp32", clip=None), SOME[::2]),
    "experts": (Short(model="moe", clip=None, groups=3), SOME[1::2]),
    "experts in parts": (Short(model="moe", expert_parts=3), SOME[::2]),
    "routers in fp32": (Short(model="routers", moments="bf16"), SOME[1::2]),
    "tiles": (Short(model="tied", tile_tokens=10, fused_loss=True), SOME[:2]),
}
"""Runs, and settings that must not change their numbers. The slow tests try them everywhere."""


@pytest.mark.parametrize("name", RUNS)
def test_muon_any_tier_and_activation_policy_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    run, settings = RUNS[name]
    run = replace(run, optimizer="muon")
    expected, others = placements_that_differ(run, settings, tmp_path)
    assert others == []
    assert expected.losses[1] != replace(run, optimizer="adamw", steps=2)(tmp_path).losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_muon_gives_the_same_bits_everywhere(name: str, tmp_path: Path) -> None:
    run, _ = RUNS[name]
    run = replace(run, optimizer="muon")
    # The other models lie on fewer tiers there, and where updates are immediate no gradient waits.
    places = [
        pair
        for pair in EVERYWHERE
        if (run.model == "untied" or "ram_nvme" not in pair[0]) and (run.clip or "grads" not in pair[0])
    ]
    assert placements_that_differ(run, places, tmp_path)[1] == []


def test_muon_updates_before_the_norm_is_known_give_the_same_bits(tmp_path: Path) -> None:
    """One of the steps is clipped: its updates are void."""
    run = Run(model="untied", optimizer="muon", clip=1e9, place="nvme_twice")
    run = replace(run, clip=0.999 * max(run(tmp_path).norms))
    with opened(exactness_config("untied"), tmp_path, PLACES["nvme_twice"], run.train) as session:
        before = session.store.moved_bytes.copy()
        results = run_steps(session, run.train)
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        assert session.speculation.outcomes["void"] == 1
        found = outcome(session, results)
    assert found == replace(run, place="ram")(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["untied", "moe"])
def test_muon_on_a_gpu_has_the_same_bits_on_any_tier(model: str, tmp_path: Path) -> None:
    run = Run(model=model, optimizer="muon", device="cuda", compile=False)
    # With experts this place holds nothing on its drive, on a CPU too.
    places = [place for place in PLACES if (model, place) != ("moe", "gpu_ram_nvme")]
    first, *others = run_in_fresh_process([replace(run, place=place) for place in places], tmp_path)
    assert [result for result in others if result != first] == []


@pytest.mark.parametrize(("model", "clip"), [("untied", 0.5), ("tied", None)])
def test_muon_in_fp32_is_torchs_with_our_iterations_on_a_plain_model(
    model: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_torch_iterate_as_we_do(monkeypatch)
    config, train = exactness_config(model), Run(model=model, clip=clip, optimizer="muon").train
    plain = plain_model(config)
    skeleton = build_skeleton(config, "sdpa")
    matrices = matrices_of_layers(skeleton, find_units(skeleton))
    source = ModelWeights(plain)
    place = PLACES["gpu_ram_nvme"]
    with opened(config, tmp_path, place, train, source=source, compute_dtype="fp32", seed=None) as session:
        torch.manual_seed(5)
        results = run_steps(session, train)
        found = read_parameters(session, Kind.WEIGHT)

    options: dict[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    parameters = dict(plain.named_parameters())
    muon = torch.optim.Muon([parameters[name] for name in sorted(matrices)], lr=1e-2, weight_decay=0.1, **options)
    others = PlainAdamW(plain, None)
    others.trained = {name: p for name, p in others.trained.items() if name not in matrices}
    torch.manual_seed(5)
    for step, result in enumerate(results, 1):
        [batch] = random_groups(train, config.vocab_size, step)
        loss = plain(**batch, use_cache=False).loss
        loss.backward()
        grads = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
        for grad in grads:
            grad.mul_(1.0 if clip is None else min(1.0, clip / (norm + 1e-6)))
        muon.step()
        others.step(step, 1e-2)
        muon.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    far = {name: float((found[name] - p).norm() / p.norm()) for name, p in plain.state_dict().items() if name in found}
    assert {name: distance for name, distance in far.items() if distance > 1e-6} == {}
