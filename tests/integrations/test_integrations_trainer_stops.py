"""MegatierTrainer that a callback or an error stops within a step: weights of before, and it can train again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import exactness_config, plain_model
from trainer_runs import Rows, arguments, logged, open_streamed
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megatier.errors import ConfigError

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer


class Stopping(TrainerCallback):
    """Stops training, or the epoch, within the second step; saves at the end of the epoch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer: Any = None

    def on_substep_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            setattr(control, self.name, True)

    def on_epoch_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.trainer.save_model(args.output_dir)


def test_trainer_that_a_callback_stops_within_a_step_has_the_weights_of_before(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        stopping = Stopping("should_training_stop")
        stopping.trainer = trainer = MegatierTrainer(
            streamed, arguments(tmp_path / "run"), train_dataset=Rows(60), callbacks=[stopping]
        )
        trainer.train()
        assert (streamed.steps, streamed.is_in_step) == (1, False)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32).state_dict()
        assert all(torch.equal(value, saved[name]) for name, value in streamed.state_dict().items())


def test_trainer_epoch_that_a_callback_stops_within_a_step_is_refused(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        stopping = Stopping("should_epoch_stop")
        given = arguments(tmp_path / "run", max_steps=-1, num_train_epochs=2)
        stopping.trainer = trainer = MegatierTrainer(streamed, given, train_dataset=Rows(60), callbacks=[stopping])
        with pytest.raises(ConfigError, match="should_epoch_stop in on_substep_end"):
            trainer.train()


class ShortOfMemory:
    """Mixin: memory runs out once, in the second step of the first batches, in or after a forward or in a backward."""

    place = ""
    state: Any
    args: Any
    has_run_out = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        runs_out = self.state.global_step == 1 and not self.has_run_out
        self.has_run_out |= runs_out
        remove = None
        if runs_out and self.place == "forward":
            layer = model.model.layers[1]
            remove = layer.register_forward_pre_hook(_run_out)
        try:
            loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            if remove is not None:
                remove.remove()
        if runs_out and self.place == "loss":
            _run_out()
        if runs_out and self.place == "backward":
            loss.register_hook(_run_out)
        return loss


def _run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
def test_trainer_that_runs_out_of_memory_goes_on_with_smaller_batches_as_the_plain_trainer_does(
    place: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 3,
        "max_steps": 3,
        "dataloader_drop_last": True,
    }
    plain_kind = type("ShortPlain", (ShortOfMemory, Trainer), {"place": place})
    plain = plain_kind(plain_model(exactness_config("plain")), arguments(tmp_path, **options), train_dataset=Rows(12))
    plain.train()
    with open_streamed(tmp_path) as streamed:
        kind = type("ShortStreamed", (ShortOfMemory, MegatierTrainer), {"place": place})
        trainer = kind(streamed, arguments(tmp_path, **options), train_dataset=Rows(12))
        trainer.train()
        assert trainer._train_batch_size == plain._train_batch_size == 2
        assert streamed.steps == 4
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
        found = streamed.state_dict()
        assert all(torch.allclose(found[n], p, rtol=0, atol=2e-6) for n, p in plain.model.named_parameters())


def test_trainer_that_an_error_ended_within_a_step_trains_again(tmp_path: Path) -> None:
    plain_kind = type("EndedPlain", (ShortOfMemory, Trainer), {"place": "loss"})
    plain = plain_kind(plain_model(exactness_config("plain")), arguments(tmp_path, max_steps=2), train_dataset=Rows(12))
    with open_streamed(tmp_path) as streamed:
        kind = type("EndedStreamed", (ShortOfMemory, MegatierTrainer), {"place": "loss"})
        trainer = kind(streamed, arguments(tmp_path, max_steps=2), train_dataset=Rows(12))
        for each in (plain, trainer):
            with pytest.raises(torch.OutOfMemoryError):
                each.train()
            each.train()
            each.train()
        assert streamed.steps == 5
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
        found = streamed.state_dict()
        assert all(torch.allclose(found[n], p, rtol=0, atol=2e-6) for n, p in plain.model.named_parameters())
