"""What torch, its schedulers and its checkpoint libraries do to any optimizer: right, or refused by name."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_optimizers import SOME, Make, close, give_gradients, optimizers, parameters_of, same, take_steps
from streamed_loops import train_config
from tiny_runs import exactness_config, plain_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler, swa_utils

import megatier
from megatier.config.schema import TiersConfig
from megatier.errors import ConfigError, MegatierError, OptimizerError, StreamedModelError
from megatier.integrations.streamed import Streamed


class Plateau(lr_scheduler.ReduceLROnPlateau):
    """Steps by a metric that never becomes better."""

    def step(self, *_: Any) -> None:
        super().step(1.0)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "cyclic_range": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, mode="exp_range", gamma=0.9),
    "cyclic_rate": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "one_cycle_phases": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8, three_phase=True, base_momentum=0.8),
    "plateau": lambda o: Plateau(o, patience=0, factor=0.5, min_lr=3e-4),
    "averaged": lambda o: swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=3),
    "averaged_linear": lambda o: swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=3, anneal_strategy="linear"),
    "lambda_of_groups": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n] * len(o.param_groups)),
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with optimizers(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def streamed() -> Iterator[Streamed]:
    tiers = TiersConfig(device="cpu", gpu=1 << 20, ram=8 << 20, update_threads=1, io_threads=1)
    train = train_config("plain")
    with megatier.stream(plain_model(exactness_config("plain")), tiers=tiers, lr=train.learning_rate) as opened:
        yield opened


class Model(nn.Module):
    """Parameters with names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], last: int, first: int = 0) -> Any:
    """The state after steps."""
    take_steps(optimizer, parameters, range(first, last))
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_both_optimizers_the_settings_of_torchs(name: str, make: Make, streamed: Streamed) -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    plain = torch.optim.AdamW(parameters, lr=2e-3)
    tiered = make(parameters, lr=2e-3, ram=SOME)
    for group in streamed.optimizer.param_groups:
        group.update(lr=2e-3, betas=(0.9, 0.999))
        group.pop("initial_lr", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no steps are made
        each = [SCHEDULES[name](optimizer) for optimizer in (plain, tiered, streamed.optimizer)]
        for _ in range(5):
            for schedule in each:
                schedule.step()
            expected = plain.param_groups[0]
            for group in (tiered.param_groups[0], *streamed.optimizer.param_groups):
                assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])
            streamed.optimizer.settings()
    for optimizer in (streamed.optimizer, tiered):
        vars(optimizer).pop("step", None)  # schedules wrap it


def test_checkpoint_api_of_torch_gives_the_state_and_changes_nothing(make: Make) -> None:
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    optimizer = make(parameters, lr=1e-2, ram=SOME)
    before = stepped(optimizer, parameters, 2)
    found = get_optimizer_state_dict(model, optimizer)
    assert same(optimizer.state_dict(), before)
    names = [name for name, _ in model.named_parameters()]
    assert same({names[index]: entry for index, entry in before["state"].items()}, found["state"])

    other.load_state_dict(model.state_dict())
    twins = list(other.parameters())
    loaded = make(twins, lr=1e-2, ram=SOME)
    set_optimizer_state_dict(other, loaded, found)
    assert same(stepped(loaded, twins, 3, 2), stepped(optimizer, parameters, 3, 2))
    assert same(twins, parameters)


def test_state_shows_copies_that_refuse_to_be_changed(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=SOME)
    assert not optimizer.state
    expected = stepped(optimizer, parameters, 1)["state"]
    assert len(optimizer.state) == len(expected)
    assert parameters[0] in optimizer.state
    assert all(same(dict(optimizer.state[p]), expected[index]) for index, p in enumerate(parameters))
    entry = optimizer.state[parameters[0]]
    entry["exp_avg"] = entry["exp_avg"].clone()  # the same numbers, as of trainers that move a state
    with pytest.raises(RuntimeError, match="inference"):
        entry["exp_avg"].zero_()
    with pytest.raises(OptimizerError, match="changes nothing"):
        entry["exp_avg"] = torch.zeros(1)
    for change in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.update({parameters[0]: {}}),
        lambda: setattr(optimizer, "state", {}),
    ):
        with pytest.raises(OptimizerError, match="load_state_dict"):
            change()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_by_name(copied: Callable[[Any], Any], make: Make, streamed: Streamed) -> None:
    for optimizer in (make(parameters_of(), ram=SOME), streamed.optimizer):
        with pytest.raises(OptimizerError, match="cannot be copied or pickled"):
            copied(optimizer)


@pytest.mark.parametrize(
    "change",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"differentiable": True},
        {"decoupled_weight_decay": False},
        {"momentum": 0.9},
        {"lr": "1e-3"},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_setting_that_cannot_be_followed_is_refused_whenever_it_comes(
    change: dict[str, Any], make: Make, streamed: Streamed
) -> None:
    refused = (ConfigError, OptimizerError)
    parameters = parameters_of()
    with pytest.raises(refused, match=next(iter(change))):
        make([{"params": parameters, **change}], ram=SOME)

    optimizer = make(parameters, lr=1e-2, ram=SOME)
    before, values = stepped(optimizer, parameters, 1), copy.deepcopy(parameters)
    good = dict(optimizer.param_groups[0])
    optimizer.param_groups[0].update(change)
    give_gradients(parameters, 1)
    with pytest.raises(refused, match=next(iter(change))):
        optimizer.step()
    optimizer.param_groups[0].clear()
    optimizer.param_groups[0].update(good)
    assert same(parameters, values)
    assert same(optimizer.state_dict(), before)

    with pytest.raises(refused, match=next(iter(change))):
        optimizer.load_state_dict({**before, "param_groups": [{**before["param_groups"][0], **change}]})
    assert same(optimizer.state_dict(), before)

    group = streamed.optimizer.param_groups[0]
    good = dict(group)
    group.update(change)
    with pytest.raises(refused, match=next(iter(change))):
        streamed.optimizer.settings()
    group.clear()
    group.update(good)
    streamed.optimizer.settings()


def test_groups_that_change_between_steps_are_followed_as_torch_does(make: Make) -> None:
    def run(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[nn.Parameter], Any]:
        parameters = parameters_of()
        groups = [{"params": parameters[:1], "lr": 1e-2}, {"params": parameters[1:], "lr": 3e-2}]
        optimizer = make_optimizer(groups)
        take_steps(optimizer, parameters, [0])
        optimizer.param_groups.reverse()
        take_steps(optimizer, parameters, [1])
        optimizer.load_state_dict(optimizer.state_dict())
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].append(moved)
        take_steps(optimizer, parameters, [2])
        reversed_state = copy.deepcopy(optimizer.state_dict()["state"])
        del optimizer.param_groups[1]
        take_steps(optimizer, parameters, [3])
        return parameters, reversed_state

    ours, theirs = run(lambda groups: make(groups, ram=SOME)), run(torch.optim.AdamW)
    assert close(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert all(close(ours[1][index].values(), entry.values()) for index, entry in theirs[1].items())


def test_parameter_that_is_replaced_or_stands_twice_is_refused(make: Make, streamed: Streamed) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=SOME)
    before = stepped(optimizer, parameters, 1)
    own = optimizer.param_groups[0]["params"]
    for other, words in ((nn.Parameter(torch.zeros(2)), "came into the groups"), (own[1], "in two groups")):
        optimizer.param_groups[0]["params"] = [other, *own[1:]]
        with pytest.raises(OptimizerError, match=words):
            optimizer.step()
    optimizer.param_groups[0]["params"] = own
    assert same(optimizer.state_dict(), before)

    streamed.optimizer.param_groups.reverse()
    with pytest.raises(StreamedModelError, match="in their order"):
        streamed.optimizer.settings()
    streamed.optimizer.param_groups.reverse()
    streamed.optimizer.settings()


def test_hooks_of_state_and_load_see_the_numbers(make: Make) -> None:
    parameters = parameters_of()
    optimizer = make(parameters, ram=SOME)
    first = stepped(optimizer, parameters, 1)
    stepped(optimizer, parameters, 3, 1)
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(copy.deepcopy(state)))
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.state_dict()))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(copy.deepcopy(state)))
    optimizer.load_state_dict(first)
    assert [same(each, first) for each in seen] == [True, True, True]


def test_streamed_optimizer_takes_no_moments_and_shows_none(streamed: Streamed) -> None:
    optimizer, model = streamed.optimizer, streamed.model
    rates = [group["lr"] for group in optimizer.param_groups]
    settings = optimizer.state_dict()
    assert settings["state"] == {}
    optimizer.load_state_dict(settings)
    with pytest.raises(StreamedModelError, match=r"Streamed\.save"):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(StreamedModelError, match=r"Streamed\.restore"):
        optimizer.state[next(model.parameters())]
    settings["state"] = {0: {"exp_avg": torch.zeros(1)}}
    with pytest.raises(OptimizerError, match="moments, which are not loaded"):
        optimizer.load_state_dict(settings)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    optimizer.settings()


def test_inputs_of_torchs_own_tests_have_torchs_numbers_or_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("expecttest") is None:
        # torch's test tools import it for tests of another kind.
        absent = types.ModuleType("expecttest")
        vars(absent)["TestCase"] = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", absent)
    # They also freeze the settings of torch's back ends, for all tests that this process runs later.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    found = pytest.importorskip("torch.testing._internal.common_optimizers")
    info = next(each for each in found.optim_db if each.optim_cls is torch.optim.AdamW)
    taken = 0
    for given in info.optim_inputs_func(device="cpu"):
        ours, theirs = parameters_of(), parameters_of()
        try:
            optimizer = make([{"params": ours, **given.kwargs}], ram=SOME)
        except (ConfigError, OptimizerError):
            assert given.kwargs.keys() & {"amsgrad", "maximize", "lr", "differentiable"}, given
            continue
        take_steps(optimizer, ours, range(3))
        take_steps(torch.optim.AdamW(theirs, **given.kwargs), theirs, range(3))
        assert close(ours, theirs), given
        taken += 1
    assert taken


def test_average_of_a_model_follows_tiered_state_and_of_a_streamed_one_is_refused_by_name(
    make: Make, streamed: Streamed
) -> None:
    averages = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = Model()
        given = model.parameters()
        optimizer = torch.optim.AdamW(given, lr=1e-2) if is_plain else make(given, lr=1e-2, ram=SOME)
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
        for step in range(3):
            take_steps(optimizer, list(model.parameters()), [step])
            average.update_parameters(model)
        averages.append(list(average.parameters()))
    assert close(*averages)
    with pytest.raises(MegatierError, match="whatever copies it here"):
        swa_utils.AveragedModel(streamed.model)


ERROR_INPUTS: tuple[dict[str, Any], ...] = (
    {"lr": -1e-2},
    {"eps": -1e-3},
    {"betas": (1.0, 0.0)},
    {"betas": (-0.1, 0.9)},
    {"weight_decay": -1},
)
"""Those of torch's own tests of AdamW."""


@pytest.mark.parametrize("given", ERROR_INPUTS, ids=str)
def test_setting_that_torchs_own_optimizer_refuses_is_refused(
    given: dict[str, Any], make: Make, streamed: Streamed
) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        torch.optim.AdamW(parameters_of(), **given)
    with pytest.raises(ConfigError, match=next(iter(given))):
        make(parameters_of(), ram=SOME, **given)
    group = streamed.optimizer.param_groups[0]
    before = dict(group)
    group.update(given)
    with pytest.raises(ConfigError, match=next(iter(given))):
        streamed.optimizer.settings()
    group.update(before)


@pytest.mark.parametrize("parameters", [None, [], torch.zeros(3), ["weight"]], ids=str)
def test_parameters_that_torchs_own_optimizer_refuses_are_refused(parameters: Any, make: Make) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        torch.optim.AdamW(parameters)
    with pytest.raises((TypeError, ValueError)) as error:
        make(parameters, ram=SOME)
    assert error.type is expected.type
