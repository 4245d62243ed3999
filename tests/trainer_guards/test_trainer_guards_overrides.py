"""Overrides of the Trainer's methods: each is known, and called over a streamed model or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Rows, arguments, logged, open_streamed
from transformers import Trainer

from megatier.errors import ConfigError

pytest.importorskip("accelerate")

from megatier.integrations.trainer_files import TrainerFiles
from megatier.integrations.trainer_rows import TrainerRows
from megatier.integrations.transformers_trainer import MegatierTrainer, StreamedTraining
from megatier.trainer_guards.overrides import (
    COMPARED,
    EXTENDED,
    EXTENDED_BY_RANKS,
    FOLLOWED_METHODS,
    REPLACED_METHODS,
    UNCALLED,
    check_overrides,
)

SETS = (FOLLOWED_METHODS, REPLACED_METHODS, EXTENDED, EXTENDED_BY_RANKS, COMPARED, UNCALLED)


def replaced(self: Any, *args: Any, **kwargs: Any) -> None:
    """A method that calls none of super's."""


def test_methods_of_the_trainer_are_each_in_one_set_of_the_table() -> None:
    methods = {name for name in vars(Trainer) if callable(getattr(Trainer, name)) and name != "__class__"}
    assert {name: sum(name in names for names in SETS) for name in methods} == dict.fromkeys(methods, 1)


def test_methods_that_the_mixin_has_in_place_of_the_trainers_are_known_as_such() -> None:
    own = {**vars(TrainerRows), **vars(TrainerFiles), **vars(StreamedTraining)}
    for name in own.keys() & vars(Trainer).keys():
        function = getattr(own[name], "__code__", None)
        if function is not None:
            assert (name in REPLACED_METHODS) == (name not in function.co_names), name


@pytest.mark.parametrize("name", sorted((REPLACED_METHODS | EXTENDED | UNCALLED) - {"create_optimizer"}))
def test_override_that_would_not_be_called_or_calls_no_super_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine\.{name} "):
        check_overrides(type("Mine", (MegatierTrainer,), {name: replaced}), StreamedTraining, 1)
    if name not in EXTENDED:
        below = type("Mine", (Trainer,), {name: replaced})
        with pytest.raises(ConfigError, match=rf"Mine\.{name} would not be called"):
            check_overrides(type("Made", (StreamedTraining, below), {}), StreamedTraining, 1)


def test_override_of_the_step_calls_super_if_there_are_ranks() -> None:
    mine = type("Mine", (MegatierTrainer,), {"training_step": replaced})
    check_overrides(mine, StreamedTraining, 1)
    with pytest.raises(ConfigError, match=r"Mine\.training_step does not call super"):
        check_overrides(mine, StreamedTraining, 2)


def test_override_of_a_method_that_is_not_known_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "of_a_later_version", replaced, raising=False)
    mine = type("Mine", (MegatierTrainer,), {"of_a_later_version": replaced})
    with pytest.warns(UserWarning, match=r"Mine\.of_a_later_version overrides a method"):
        check_overrides(mine, StreamedTraining, 1)


class Halved(Trainer):
    """Overrides that are called wherever the class stands."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(*args, **kwargs)
        return loss / 2

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        assert self.optimizer is not None
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.5)
        return self.lr_scheduler


class WithEpsilon(MegatierTrainer):
    """An override that calls super's."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            group["eps"] = 1e-3
        return optimizer


@pytest.mark.gpu
def test_overrides_on_a_gpu_are_called_or_refused(tmp_path: Path) -> None:
    test_overrides_of_loss_schedule_and_settings_are_called(tmp_path, "cuda")
    test_override_that_puts_another_optimizer_in_its_place_is_refused(tmp_path, "cuda")


def test_overrides_of_loss_schedule_and_settings_are_called(tmp_path: Path, device: str = "cpu") -> None:
    class Streamed(StreamedTraining, Halved):
        pass

    losses = []
    for kind in (MegatierTrainer, Streamed, WithEpsilon):
        with open_streamed(tmp_path, device, compile=False) as streamed:
            trainer = kind(streamed, arguments(tmp_path, max_steps=1, use_cpu=device == "cpu"), train_dataset=Rows(60))
            trainer.train()
            losses += logged(trainer, "loss")
            rate = logged(trainer, "learning_rate")[0]
            assert (rate == 5e-4) == (kind is Streamed)
            assert (streamed.optimizer.param_groups[0]["eps"] == 1e-3) == (kind is WithEpsilon)
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_override_that_puts_another_optimizer_in_its_place_is_refused(tmp_path: Path, device: str = "cpu") -> None:
    class Other(MegatierTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.create_optimizer_and_scheduler(1)
            return super().create_optimizer(*args, **kwargs)

    with open_streamed(tmp_path, device, compile=False) as streamed:
        trainer = Other(streamed, arguments(tmp_path, use_cpu=device == "cpu"), train_dataset=Rows(60))
        with pytest.raises(ConfigError, match="brings its optimizer"):
            trainer.train()


def test_override_of_the_parameters_that_decay_is_compared(tmp_path: Path) -> None:
    class Same(MegatierTrainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return super().get_decay_parameter_names(model)

    class All(MegatierTrainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

    with open_streamed(tmp_path) as streamed:
        Same(streamed, arguments(tmp_path), train_dataset=Rows(60))
        with pytest.raises(ConfigError, match=r"get_decay_parameter_names of All: \S*norm\S* decays by it"):
            All(streamed, arguments(tmp_path), train_dataset=Rows(60))
        All(streamed, arguments(tmp_path, weight_decay=0.0), train_dataset=Rows(60))
