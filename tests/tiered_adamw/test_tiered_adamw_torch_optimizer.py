"""TieredAdamW and TieredMuon: torch's numbers, torch's manners, and typed refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from muon_reference import let_torch_iterate_as_we_do
from small_optimizers import ALL, STEPS, TINY, Make, close, optimizers, parameters_of, placements, same, take_steps
from torch import Tensor, nn

import megatier
from megatier.errors import CapacityError, ConfigError, OptimizerError, PlanError
from megatier.tier import Tier
from megatier.tiered_adamw import torch_optimizer
from megatier.tiered_adamw.torch_optimizer import TieredAdamW, TieredMuon


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with optimizers(tmp_path) as make:
        yield make


@placements
def test_numbers_in_fp32_are_torchs_to_a_tolerance(make: Make, ram: str) -> None:
    ours, theirs = parameters_of(), parameters_of()
    optimizer = make(ours, lr=1e-2, weight_decay=0.1, ram=ram)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    take_steps(optimizer, ours, range(20))
    take_steps(reference, theirs, range(20))
    assert close(ours, theirs)
    state, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for index, entry in expected.items():
        assert state[index].keys() == entry.keys()
        assert close(state[index].values(), entry.values())


def test_groups_schedulers_and_decay_are_those_of_torch(make: Make) -> None:
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        rest: dict[str, Any] = {"params": parameters[1:], "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}
        return [{"params": parameters[:1], "weight_decay": 0.3}, rest]

    ours, theirs = parameters_of(), parameters_of()
    optimizer, reference = make(groups(ours), ram=TINY), torch.optim.AdamW(groups(theirs))
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(each, [1e-2, 3e-2], total_steps=10, base_momentum=0.7)
        for each in (optimizer, reference)
    ]
    for step in range(8):
        take_steps(optimizer, ours, [step])
        take_steps(reference, theirs, [step])
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert close(ours, theirs)


def test_group_is_added_before_the_first_step_alone(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters[:2], ram=TINY)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.0, "weight_decay": 0.0})
    before = parameters[4].detach().clone()
    take_steps(optimizer, parameters, range(1))
    assert torch.equal(parameters[4], before)
    with pytest.raises(OptimizerError, match="add groups before it"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_closure_gives_the_loss(make: Make) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], ram=TINY)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    assert optimizer.step(closure) < 3.0


def test_backward_through_a_changed_parameter_is_refused_by_autograd(make: Make) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], ram=TINY)
    loss = (weight**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_model_converted_after_the_optimizer_was_made_is_trained(make: Make) -> None:
    model = nn.Linear(40, 30)
    optimizer = make(model.parameters(), ram=TINY)
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does; nothing is placed by it
    model.bfloat16()
    model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert "remainder" in optimizer.state_dict()["state"][0]


def test_empty_state_forgets_what_was_there(make: Make) -> None:
    parameters, expected = parameters_of(), parameters_of()
    optimizer, fresh = make(parameters, ram=TINY), make(expected, ram=TINY)
    empty = optimizer.state_dict()
    take_steps(optimizer, parameters, range(1))
    optimizer.load_state_dict(empty)
    for parameter, other in zip(parameters, expected, strict=True):
        parameter.data.copy_(other.detach())
    take_steps(optimizer, parameters, range(STEPS))
    take_steps(fresh, expected, range(STEPS))
    assert same(parameters, expected)


def test_state_passes_to_and_from_torchs_adamw(make: Make) -> None:
    ours, theirs = parameters_of(), parameters_of()
    optimizer, reference = make(ours, ram=TINY), torch.optim.AdamW(theirs)
    take_steps(optimizer, ours, range(STEPS))
    take_steps(reference, theirs, range(STEPS))
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(state)
    take_steps(optimizer, ours, range(STEPS, 2 * STEPS))
    take_steps(reference, theirs, range(STEPS, 2 * STEPS))
    assert close(ours, theirs)


def test_scheduler_still_steers_after_a_load(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in parameters]
    take_steps(optimizer, parameters, range(1))
    assert same(parameters, before)


def test_state_before_the_first_step_is_empty(make: Make, tmp_path: Path) -> None:
    optimizer = make(parameters_of(), ram=TINY)
    assert optimizer.state_dict()["state"] == {}
    optimizer.save_state(tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_state_larger_than_ram_is_refused_in_favour_of_the_file(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    monkeypatch.setattr(torch_optimizer, "ram_available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match="save_state"):
        optimizer.state_dict()
    optimizer.save_state(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda state: state["state"][0].update(exp_avg=torch.zeros(3)), OptimizerError, "the same model"),
        (lambda state: state["state"][0].pop("step"), OptimizerError, "the same model"),
        (lambda state: state["state"].update({99: {"step": 1}}), OptimizerError, "parameter 99"),
        (lambda state: state["param_groups"][0].update(amsgrad=True), OptimizerError, "amsgrad"),
        (lambda state: state["param_groups"].append({}), ValueError, "number of parameter groups"),
    ],
)
def test_state_of_something_else_is_refused_and_changes_nothing(
    make: Make, harm: Callable[[Any], None], error: type[Exception], words: str
) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=TINY)
    take_steps(optimizer, parameters, range(1))
    before = optimizer.state_dict()
    harmed = copy.deepcopy(before)
    harm(harmed)
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(harmed)
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
        (torch.zeros(4, dtype=torch.float16), "float16"),
        (torch.zeros(4, 4)[:, :2], "gaps"),
        (torch.zeros(4, device="meta"), "lie on .*meta"),
    ],
)
def test_parameter_that_cannot_be_taken_is_refused_at_once(make: Make, parameter: Tensor, words: str) -> None:
    with pytest.raises(OptimizerError, match=words):
        make([nn.Parameter(parameter)], ram=TINY)
    optimizer = make(parameters_of(), ram=TINY)
    with pytest.raises(OptimizerError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": torch.tensor(1e-3)},
        {"betas": (0.9, 1.0)},
        {"eps": -1.0},
        {"weight_decay": -0.1},
        {"moments": "fp16"},
        {"seed": -1},
    ],
)
def test_setting_that_cannot_be_used_is_refused(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make(parameters_of(), ram=TINY, **settings)


def test_one_mount_may_be_a_string(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(100_000))
    with TieredAdamW([parameter], ram="512KiB", nvme=f"{tmp_path}:8MiB") as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert list(tmp_path.iterdir())


def test_budget_that_is_too_small_is_refused_before_a_step(make: Make, tmp_path: Path) -> None:
    large = [nn.Parameter(torch.zeros(1 << 20))]
    for ram, nvme, words in [
        (TINY, [], "Raise ram to at least 8.0 MiB, or name a drive"),
        ("8KiB", [f"{tmp_path}:16MiB"], "Raise ram to at least"),
        (TINY, [f"{tmp_path}:1MiB"], "Give nvme more space"),
    ]:
        with pytest.raises(PlanError, match=words):
            make(large, ram=ram, nvme=nvme)
    with pytest.raises(ConfigError, match="is not a directory"):
        make(large, ram=TINY, nvme=[str(tmp_path / "missing")])


def test_name_in_the_package_is_loaded_when_it_is_used() -> None:
    assert megatier.TieredAdamW is TieredAdamW
    assert megatier.TieredMuon is TieredMuon


def matrices(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(64, 60), (60, 65)] * 6 + [(8, 8), (0, 4)]
    return [nn.Parameter(torch.randn(shape, generator=draw).to(device, dtype)) for shape in shapes]


def test_muon_in_fp32_has_torchs_numbers_with_our_iterations(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    let_torch_iterate_as_we_do(monkeypatch)
    ours, theirs = matrices()[:13], matrices()[:13]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.2, "momentum": 0.9}
    optimizer = make(ours, TieredMuon, ram=ALL, **options)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    take_steps(optimizer, ours, range(5))
    take_steps(reference, theirs, range(5))
    assert close(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_has_the_same_bits_wherever_its_state_lies_and_after_a_load(
    make: Make, dtype: torch.dtype, device: str
) -> None:
    expected = matrices(dtype, device)
    take_steps(make(expected, TieredMuon, ram=ALL), expected, range(STEPS))
    for ram in ("130KiB", "170KiB"):
        found = matrices(dtype, device)
        before = make(found, TieredMuon, ram=ram)
        assert before._plan().num_bytes(Tier.NVME)
        take_steps(before, found, range(2))
        optimizer = make(found, TieredMuon, ram=ALL)
        optimizer.load_state_dict(before.state_dict())
        take_steps(optimizer, found, range(2, STEPS))
        assert same(found, expected)
        assert before.state_dict()["state"][0]["momentum"].shape == (64, 60)


def test_muon_refuses_vectors_and_the_state_of_another_optimizer(make: Make) -> None:
    with pytest.raises(OptimizerError, match=r"shape \(5,\) is no contiguous matrix, .* Give it to a TieredAdamW"):
        make([nn.Parameter(torch.ones(5))], TieredMuon, ram=ALL)
    with pytest.raises(ConfigError, match=r"momentum is 1\.0"):
        make(matrices(), TieredMuon, momentum=1.0, ram=ALL)
    made = {}
    for kind in (TieredMuon, TieredAdamW):
        parameters = matrices()
        made[kind] = make(parameters, kind, ram=ALL)
        take_steps(made[kind], parameters, [0])
    for kind, other in ((TieredMuon, TieredAdamW), (TieredAdamW, TieredMuon)):
        state = made[other].state_dict()
        with pytest.raises(OptimizerError, match="it is of another optimizer"):
            made[kind].load_state_dict(state)
        groups = made[kind].state_dict()["param_groups"]
        with pytest.raises(OptimizerError, match="the state of parameter 0 has shapes"):
            made[kind].load_state_dict({**state, "param_groups": groups})
