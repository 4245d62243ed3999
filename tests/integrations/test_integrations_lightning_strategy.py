"""MegatierStrategy against Lightning's own strategy: the same losses, norms, rates and weights; save and resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_durable import watched
from tiny_runs import exactness_config, plain_model
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from trainer_runs import Rows, open_streamed
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import megatier
from megatier.checkpoint import chunkfile
from megatier.errors import CheckpointError, ConfigError, StreamedModelError, TransferError
from megatier.integrations.streamed import Streamed
from megatier.models.decoder import decay_parameter_names

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from megatier.integrations.lightning_strategy import MegatierStrategy

pytestmark = pytest.mark.filterwarnings("default")  # of Lightning
STEPS = 10
# With a small eps the sign of a gradient that is nearly zero, which is noise, decides a whole step of its weight.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-2}


class Causal(LightningModule):
    """A language model with warm-up and cosine; notes losses, norms and rates."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, norm: Callable[[], float]) -> None:
        super().__init__()
        self.model, self.adamw, self.norm = model, optimizer, norm
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.norms.append(self.norm())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        schedule = get_cosine_schedule_with_warmup(self.adamw, 3, STEPS)
        return {"optimizer": self.adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def plain_module(optimizer: type[Optimizer] = AdamW, **options: Any) -> Causal:
    model = plain_model(exactness_config("plain"))
    decayed = decay_parameter_names(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) == decay], "weight_decay": amount}
        for decay, amount in ((True, 0.1), (False, 0.0))
    ]

    def norm() -> float:
        return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))

    return Causal(model, optimizer(groups, **ADAMW, **options), norm)


def module_of(streamed: Streamed) -> Causal:
    return Causal(streamed.model, streamed.optimizer, streamed.grad_norm)


def open_model(tmp_path: Path, **options: Any) -> Streamed:
    return open_streamed(tmp_path, **{**ADAMW, "weight_decay": 0.1, **options})


def trainer_of(streamed: Streamed | None = None, **options: Any) -> Trainer:
    """Accumulation, and clipping that fires."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.5,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if streamed is not None:
        chosen["strategy"] = MegatierStrategy(streamed)
    return Trainer(**{**chosen, **options})


def loader(count: int = 60) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(count), batch_size=2)


def test_lightning_ten_steps_agree_with_the_plain_strategy(tmp_path: Path) -> None:
    """The first loss is equal to the last bit; later ones differ as torch's AdamW does, by some last digits."""
    plain, trainer = plain_module(), trainer_of()
    trainer.fit(plain, loader(), loader(8))
    expected = trainer.validate(plain, loader(8), verbose=False)[0]["val_loss"]
    with open_model(tmp_path) as streamed:
        module, trainer = module_of(streamed), trainer_of(streamed, enable_model_summary=True)
        trainer.fit(module, loader(), loader(8))
        assert streamed.steps == STEPS
        assert len(plain.losses) == 2 * STEPS
        assert any(norm > 1.5 for norm in plain.norms)
        assert any(norm < 1.5 for norm in plain.norms)
        assert module.losses[0] == plain.losses[0]
        assert module.losses == pytest.approx(plain.losses, rel=1e-6)
        assert module.norms == pytest.approx(plain.norms, rel=1e-6)
        assert module.rates == plain.rates
        assert trainer.validate(module, loader(8), verbose=False)[0]["val_loss"] == pytest.approx(expected, rel=1e-6)
        found = streamed.state_dict()
        assert all(torch.allclose(found[n], p, rtol=0, atol=2e-6) for n, p in plain.model.named_parameters())


@pytest.mark.gpu
def test_lightning_on_a_gpu_agrees_with_the_plain_strategy(tmp_path: Path) -> None:
    """Products of a batch's rows are summed in another order where the loss is fused, on a GPU."""
    options: dict[str, Any] = {"accelerator": "cuda", "devices": 1}
    plain = plain_module()
    trainer_of(**options).fit(plain, loader(), loader(8))
    with open_model(tmp_path, device="cuda", compile=False) as streamed:
        module = module_of(streamed)
        trainer_of(streamed, **options).fit(module, loader(), loader(8))
        assert module.losses == pytest.approx(plain.losses, rel=1e-5)
        assert module.norms == pytest.approx(plain.norms, rel=1e-4)
        assert module.rates == plain.rates


def test_lightning_with_the_same_adamw_and_no_clipping_agrees_bit_by_bit(tmp_path: Path) -> None:
    """The plain strategy over TieredAdamW, which has megatier's order of operations."""
    plain = plain_module(megatier.TieredAdamW, ram="64MiB")
    trainer_of(gradient_clip_val=None).fit(plain, loader())
    with open_model(tmp_path, fused_loss=False) as streamed:
        module = module_of(streamed)
        trainer_of(streamed, gradient_clip_val=None).fit(module, loader())
        assert module.losses == plain.losses
        assert module.norms == pytest.approx(plain.norms, rel=1e-6)
        found = streamed.state_dict()
        assert all(torch.equal(found[name], parameter) for name, parameter in plain.model.named_parameters())


def test_lightning_run_makes_the_steps_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        module = module_of(streamed)
        trainer_of(streamed).fit(module, loader())
        weights = streamed.state_dict()
    with open_model(tmp_path, clip=1.5) as streamed:
        schedule = get_cosine_schedule_with_warmup(streamed.optimizer, 3, STEPS)
        batches, losses, norms = iter(loader()), [], []
        for _ in range(STEPS):
            for _ in range(2):
                loss = streamed.model(**next(batches)).loss
                (loss / 2).backward()
                losses.append(loss.item())
            norms.append(streamed.grad_norm())
            streamed.optimizer.step()
            schedule.step()
        assert module.losses == losses
        assert module.norms == norms
        assert all(torch.equal(value, weights[name]) for name, value in streamed.state_dict().items())


def test_lightning_resumed_from_a_checkpoint_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """An epoch has four steps."""
    saves = ModelCheckpoint(tmp_path / "run", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    with open_model(tmp_path) as streamed:
        module = module_of(streamed)
        trainer_of(streamed, callbacks=[saves], enable_checkpointing=True).fit(module, loader(16))
        weights = streamed.state_dict()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step=4.ckpt", "step=8.ckpt"]
    with open_model(tmp_path) as streamed:
        resumed = module_of(streamed)
        trainer_of(streamed).fit(resumed, loader(16), ckpt_path=tmp_path / "run" / "step=4.ckpt")
        assert streamed.steps == STEPS
        assert resumed.losses == module.losses[8:]
        assert resumed.norms == module.norms[4:]
        assert resumed.rates == module.rates[4:]
        assert all(torch.equal(value, weights[name]) for name, value in streamed.state_dict().items())


def test_lightning_checkpoint_takes_the_place_of_one_of_its_name(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        trainer = trainer_of(streamed, max_steps=1)
        trainer.fit(module_of(streamed), loader())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        streamed.steps += 1
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert sorted(path.name for path in (tmp_path / "last.ckpt").iterdir()) == ["lightning.ckpt", "step-00000002"]


def test_lightning_checkpoint_of_its_name_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    seen: list[Path] = []

    def see(name: str, args: tuple[Any, ...]) -> None:
        """What a kill before this call would leave."""
        seen.append(shutil.copytree(tmp_path / "saved", tmp_path / f"{len(seen)} {name}"))

    with open_model(tmp_path) as streamed:
        trainer = trainer_of(streamed, max_steps=1)
        trainer.fit(module_of(streamed), loader())
        (tmp_path / "saved").mkdir()
        trainer.save_checkpoint(tmp_path / "saved" / "last.ckpt")
        streamed.steps += 1
        with pytest.MonkeyPatch.context() as patch:
            watched(patch, see)
            trainer.save_checkpoint(tmp_path / "saved" / "last.ckpt")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["last.ckpt"]
        steps = []
        for snapshot in seen:
            trainer.strategy.load_checkpoint(snapshot / "last.ckpt", weights_only=False)
            steps.append(streamed.steps)
    assert steps == sorted(steps)
    assert {1, 2} == set(steps)


def test_lightning_checkpoint_that_a_full_drive_refuses_leaves_the_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(tmp_path) as streamed:
        trainer = trainer_of(streamed, max_steps=1)
        trainer.fit(module_of(streamed), loader())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        streamed.steps += 1
        monkeypatch.setattr(chunkfile, "create", lambda _: os.open("/dev/full", os.O_WRONLY))
        with pytest.raises(TransferError, match="Free space"):
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert not (tmp_path / ".last.ckpt.partial").exists()
        trainer.strategy.load_checkpoint(tmp_path / "last.ckpt", weights_only=False)
        assert streamed.steps == 1


def test_lightning_checkpoint_of_weights_alone_is_what_from_pretrained_loads(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        module, trainer = module_of(streamed), trainer_of(streamed, max_steps=2)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
        weights = streamed.state_dict()
        with pytest.raises(CheckpointError, match="no checkpoint"):
            trainer.validate(module, loader(8), ckpt_path=tmp_path / "weights", verbose=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())


def test_lightning_module_keeps_what_it_has_beside_the_model(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        module, trainer = module_of(streamed), trainer_of(streamed, max_steps=1)
        module.other = nn.Linear(2, 2).requires_grad_(False)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        expected = module.other.weight.clone()
        module.other.weight.zero_()
        trainer.validate(module, loader(8), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
        assert torch.equal(module.other.weight, expected)
        assert module.model is streamed.model


class StopsAfter(Callback):
    """What max_time does: the run ends after so many batches."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx + 1 >= self._batches


def test_lightning_run_stopped_within_a_step_validates_saves_and_trains_again(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        trainer = trainer_of(streamed, callbacks=[StopsAfter(5)])
        trainer.fit(module_of(streamed), loader(), loader(8))
        trainer.save_checkpoint(tmp_path / "cut.ckpt")
        assert streamed.steps == 2
        again = module_of(streamed)
        trainer_of(streamed, callbacks=[StopsAfter(3)]).fit(again, loader())
        trainer_of(streamed, max_steps=1).fit(again, loader())
        assert streamed.steps == 4


def test_lightning_exception_within_a_step_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                raise KeyError("gone")

    with open_model(tmp_path) as streamed:
        callbacks = [Fails(), OnExceptionCheckpoint(tmp_path, "broken")]
        with pytest.raises(KeyError, match="gone"):
            trainer_of(streamed, callbacks=callbacks, enable_checkpointing=True).fit(module_of(streamed), loader())
        weights = streamed.state_dict()
    with open_model(tmp_path) as streamed:
        trainer_of(streamed).validate(module_of(streamed), loader(8), ckpt_path=tmp_path / "broken.ckpt", verbose=False)
        assert streamed.steps == 2
        assert all(torch.equal(value, weights[name]) for name, value in streamed.state_dict().items())


def test_lightning_validation_before_training_leaves_no_trace(tmp_path: Path) -> None:
    """`Trainer.validate` runs in inference mode, whose tensors know no backward."""
    with open_model(tmp_path) as streamed:
        straight = module_of(streamed)
        trainer_of(streamed).fit(straight, loader())
    with open_model(tmp_path) as streamed:
        module = module_of(streamed)
        trainer_of(streamed).validate(module, loader(8), verbose=False)
        trainer_of(streamed).fit(module, loader())
        assert module.losses == straight.losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 4}, "name the same number in both"),
        ({"precision": "bf16-mixed"}, "leave precision out"),
        ({"devices": 2}, "devices=1"),
        ({"num_nodes": 2}, "num_nodes=1"),
        ({"gradient_clip_algorithm": "value"}, "gradient_clip_val alone"),
        ({"limit_train_batches": 5}, "an epoch has 5 batches, no multiple of accumulate_grad_batches"),
        ({"val_check_interval": 3}, "val_check_interval has 3 batches"),
    ],
)
def test_lightning_trainer_that_does_not_fit_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        module = module_of(streamed)
        with pytest.raises(ConfigError, match=message):
            trainer_of(streamed, **options).fit(module, loader(), loader(8))
        assert not module.losses


class Manual(Causal):
    @property
    def automatic_optimization(self) -> bool:
        return False


class ClipsItself(Causal):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Manual, {"accumulate_grad_batches": 1, "gradient_clip_val": None}, "manual optimization"),
        (ClipsItself, {}, "gradient_clip_val alone"),
    ],
)
def test_lightning_module_that_does_not_fit_is_refused(
    kind: type[Causal], options: Any, message: str, tmp_path: Path
) -> None:
    with open_model(tmp_path) as streamed, pytest.raises(ConfigError, match=message):
        trainer_of(streamed, **options).fit(kind(streamed.model, streamed.optimizer, streamed.grad_norm), loader())


def test_lightning_module_with_another_model_optimizer_or_parameter_is_refused(tmp_path: Path) -> None:
    with open_model(tmp_path) as streamed:
        with pytest.raises(ConfigError, match="does not hold the streamed model"):
            trainer_of(streamed).fit(plain_module(), loader())
        module = module_of(streamed)
        module.adamw = AdamW(streamed.model.parameters())
        with pytest.raises(ConfigError, match=r"has to give streamed\.optimizer"):
            trainer_of(streamed).fit(module, loader())
        module = module_of(streamed)
        module.other = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"other\.weight, other\.bias: only streamed parameters"):
            trainer_of(streamed).fit(module, loader())


def test_lightning_checkpoint_between_the_backwards_of_a_step_is_refused(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "early.ckpt")

    with open_model(tmp_path) as streamed, pytest.raises(StreamedModelError, match="middle of a step"):
        trainer_of(streamed, callbacks=[Saves()]).fit(module_of(streamed), loader())
