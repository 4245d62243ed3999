"""Fields of TrainingArguments and of TRL's configs: each is in the table, and followed or refused as it says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import exactness_config, plain_model
from trainer_runs import Rows, arguments, open_streamed
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from megatier.config.schema import TiersConfig
from megatier.errors import ConfigError
from megatier.trainer_guards.fields import CHECKED_FIELDS, FOLLOWED_FIELDS, REFUSED_FIELDS, WITHOUT_EFFECT, check_fields
from megatier.trainer_guards.trl_fields import TRL_FOLLOWED, TRL_REFUSED, TRL_WITHOUT_EFFECT

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer
from megatier.trainer_guards.arguments import ADAMW_NAMES, accumulation_of, check_training_arguments

TIERS = TiersConfig(device="cpu", gpu=1 << 20, ram=8 << 20, update_threads=2, io_threads=2)
TABLES = [*FOLLOWED_FIELDS.values(), *WITHOUT_EFFECT.values(), " ".join(CHECKED_FIELDS), " ".join(REFUSED_FIELDS)]
TRL_TABLES = [*TRL_FOLLOWED.values(), *TRL_WITHOUT_EFFECT.values(), " ".join(TRL_REFUSED)]


def test_fields_of_training_arguments_are_each_in_one_place_of_the_table() -> None:
    found = Counter(name for names in TABLES for name in names.split())
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {name: found[name] for name in fields} == dict.fromkeys(fields, 1)
    assert set(found.values()) == {1}


def test_fields_of_trls_configs_are_each_in_one_place_of_the_table() -> None:
    trl = pytest.importorskip("trl")
    found = Counter(name for names in (*TABLES, *TRL_TABLES) for name in names.split())
    configs = (trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.GRPOConfig, trl.RewardConfig)
    fields = {field.name for kind in configs for field in dataclasses.fields(kind)}
    assert {name: found[name] for name in fields} == dict.fromkeys(fields, 1)
    assert set(found.values()) == {1}


def _with_field(module: str) -> Any:
    """Arguments of a class with one more field, as one of some module."""
    namespace = {"__annotations__": {"of_a_later_version": int}, "of_a_later_version": 0, "__module__": module}
    return dataclasses.dataclass(type("LaterArguments", (TrainingArguments,), namespace))


def test_field_that_the_table_does_not_know_warns_unless_it_is_a_scripts_own() -> None:
    chosen: dict[str, Any] = {"output_dir": "run", "report_to": [], "use_cpu": True}
    check_fields(_with_field("transformers.training_args")(**chosen))
    check_fields(_with_field("pathlib")(of_a_later_version=3, **chosen))
    with pytest.warns(UserWarning, match="of_a_later_version=3 of LaterArguments is an argument that megatier does"):
        check_fields(_with_field("transformers.training_args")(of_a_later_version=3, **chosen))


@pytest.mark.parametrize("name", [*REFUSED_FIELDS, *TRL_REFUSED])
def test_field_that_is_refused_is_named(name: str) -> None:
    check_fields(SimpleNamespace(**{name: None}))
    with pytest.raises(ConfigError, match=name.removesuffix("_backend").removesuffix("_mode")):
        check_fields(SimpleNamespace(**{name: "given"}))


LATER: dict[str, Any] = {
    **dict.fromkeys(REFUSED_FIELDS, "given"),
    "gradient_accumulation_steps": 4,
    "bf16_full_eval": True,
    "label_smoothing_factor": 0.1,
    "optim": OptimizerNames.SGD,
}
"""Values that are refused, whenever they are set."""


def test_field_that_is_set_after_construction_is_refused_before_anything_is_trained_or_evaluated(
    tmp_path: Path,
) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60), eval_dataset=Rows(2))
        for name, value in LATER.items():
            before = getattr(trainer.args, name)
            setattr(trainer.args, name, value)
            for call in (trainer.train, trainer.evaluate):
                with pytest.raises(ConfigError, match=name.removesuffix("_backend").removesuffix("_mode")):
                    call()
            setattr(trainer.args, name, before)
        assert streamed.steps == 0
        assert trainer.evaluate()["eval_loss"] > 0


class Setting(TrainerCallback):
    """Sets an argument when a step begins, or within it."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._set)

    def _set(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            args.gradient_accumulation_steps = 4


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_substep_end"])
def test_field_that_a_callback_sets_is_refused_before_the_next_backward(event: str, tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60), callbacks=[Setting(event)])
        with pytest.raises(ConfigError, match="gradient_accumulation_steps is 4"):
            trainer.train()
        assert streamed.steps == 1


@pytest.mark.parametrize("optimizer", [name for name in OptimizerNames if name.value not in ADAMW_NAMES])
def test_optimizer_of_another_name_is_refused(optimizer: OptimizerNames) -> None:
    args = arguments(Path("run"), optim=optimizer)
    with pytest.raises(ConfigError, match=f"optim is {optimizer.value}; a streamed model has AdamW"):
        check_training_arguments(args, accumulation_steps=2, ranks=1, device=torch.device("cpu"), dtype=torch.float32)


def test_arguments_of_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="the Trainer computes on cpu, and the streamed model on cuda:0: set use_cpu"):
        check_training_arguments(
            arguments(Path("run")),
            accumulation_steps=2,
            ranks=1,
            device=torch.device("cuda:0"),
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision fp16"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "configured to compile"),
    ],
)
def test_what_accelerates_launcher_asks_for_is_refused_as_the_argument_is(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_streamed(tmp_path) as streamed:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=message):
            MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60))


def test_accumulation_that_accelerates_settings_name_is_taken() -> None:
    settings: dict[str, Any] = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = arguments(Path("run"), gradient_accumulation_steps=1, accelerator_config=settings)
    assert accumulation_of(args) == 2
    assert accumulation_of(arguments(Path("run"), gradient_accumulation_steps=3)) == 3
    assert accumulation_of(None) == 1


def _metrics(_: Any) -> dict[str, float]:
    return {}


def _loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "compute_metrics": lambda folder: {"args": arguments(folder), "compute_metrics": _metrics},
    "compute_loss_func": lambda folder: {"args": arguments(folder), "compute_loss_func": _loss},
    "label_smoothing_factor": lambda folder: {"args": arguments(folder, label_smoothing_factor=0.1)},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_needs_logits_opens_a_folder_with_them_and_is_refused_over_a_fused_loss(name: str, tmp_path: Path) -> None:
    given = GIVEN[name](tmp_path)
    plain_model(exactness_config("plain")).save_pretrained(tmp_path / "model")
    trainer = MegatierTrainer(str(tmp_path / "model"), tiers=TIERS, **given)
    with trainer.streamed as streamed:
        assert streamed.has_logits
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match=f"{name} needs logits"):
        MegatierTrainer(streamed, **given)


class Asking(TrainerCallback):
    """Asks for a checkpoint before the second step, as a signal does at any moment."""

    trainer: Any = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        jit = next(one for one in self.trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        jit.jit_manager.is_checkpoint_requested = state.global_step == 1


def test_checkpoint_that_a_signal_asks_for_within_a_step_is_saved_after_it(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        args = arguments(tmp_path / "run", enable_jit_checkpoint=True, max_steps=4)
        asking = Asking()
        trainer = MegatierTrainer(streamed, args, train_dataset=Rows(60), callbacks=[asking])
        asking.trainer = trainer
        trainer.train()
        assert streamed.steps == 2
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
        streamed.restore(tmp_path / "run" / "checkpoint-2" / "megatier")


def test_models_that_the_trainer_would_make_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_init would make another model"):
        MegatierTrainer(None, arguments(tmp_path), model_init=lambda: None)  # type: ignore[arg-type]
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60))
        with pytest.raises(ConfigError, match="hyperparameter_search makes a new model for each trial"):
            trainer.hyperparameter_search(n_trials=2)
