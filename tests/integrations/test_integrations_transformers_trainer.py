"""MegatierTrainer against Hugging Face's own Trainer: the same losses, norms, rates and weights; save and resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from tiny_runs import exactness_config, plain_model
from torch import Tensor
from trainer_runs import STEPS, Rows, arguments, logged, open_streamed
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megatier
from megatier.compute.fp8 import Fp8Linear
from megatier.errors import ConfigError
from megatier.integrations import stream_state

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer


def test_trainer_ten_steps_agree_with_the_plain_trainer(tmp_path: Path) -> None:
    """The first step's loss is equal to the last bit; later ones differ as torch's AdamW does, by some last digits."""
    plain = Trainer(
        plain_model(exactness_config("plain")), arguments(tmp_path), train_dataset=Rows(60), eval_dataset=Rows(8)
    )
    plain.train()
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(60), eval_dataset=Rows(8))
        trainer.train()
        losses, norms = logged(plain, "loss"), logged(plain, "grad_norm")
        assert len(losses) == STEPS
        assert any(norm > 1.5 for norm in norms)
        assert any(norm < 1.5 for norm in norms)
        assert logged(trainer, "loss")[0] == losses[0]
        assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-6)
        assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-6)
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
        assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
        assert plain.model is not None
        found = streamed.state_dict()
        assert all(torch.allclose(found[n], p, rtol=0, atol=2e-6) for n, p in plain.model.named_parameters())


def test_trainer_with_bf16_autocast_and_a_fused_loss_agrees_with_the_plain_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": True, "max_steps": 4}
    plain = Trainer(plain_model(exactness_config("plain")), arguments(tmp_path, **options), train_dataset=Rows(60))
    plain.train()
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path, **options), train_dataset=Rows(60))
        trainer.train()
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
        assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)


@pytest.mark.gpu
def test_trainer_on_a_gpu_agrees_with_the_plain_trainer(tmp_path: Path) -> None:
    """Products of a batch's rows are summed in another order where the loss is fused, on a GPU."""
    options: dict[str, Any] = {"use_cpu": False}
    on_one = arguments(tmp_path, **options)

    # transformers would use all GPUs of the machine, with as many times the rows.
    assert on_one.n_gpu
    on_one._n_gpu = 1
    plain = Trainer(plain_model(exactness_config("plain")), on_one, train_dataset=Rows(60))
    plain.train()
    with open_streamed(tmp_path, "cuda", compile=False) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path, **options), train_dataset=Rows(60))
        trainer.train()
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
        assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")


def test_trainer_with_the_same_adamw_and_no_clipping_agrees_bit_by_bit(tmp_path: Path) -> None:
    """The plain Trainer over TieredAdamW, which has megatier's order of operations."""
    adamw: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "ram": "64MiB"}
    plain = Trainer(
        plain_model(exactness_config("plain")),
        arguments(tmp_path, max_grad_norm=0.0),
        train_dataset=Rows(60),
        optimizer_cls_and_kwargs=(megatier.TieredAdamW, adamw),
    )
    plain.train()
    close_optimizer(plain)
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path, max_grad_norm=0.0), train_dataset=Rows(60))
        trainer.train()
        assert logged(trainer, "loss") == logged(plain, "loss")
        assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-6)
        assert plain.model is not None
        found = streamed.state_dict()
        assert all(torch.equal(found[name], parameter) for name, parameter in plain.model.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"compute_dtype": "bf16", "products": "fp8"}, id="fp8", marks=pytest.mark.slow),
    ],
)
def test_trainer_resumed_from_a_checkpoint_goes_on_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    with open_streamed(tmp_path, **options) as streamed:
        layers = [module for module in streamed.model.modules() if isinstance(module, Fp8Linear)]
        assert bool(layers) == bool(options)
        trainer = MegatierTrainer(streamed, arguments(tmp_path / "run", **saves), train_dataset=Rows(60))
        trainer.train()
        expected, weights = logged(trainer, "grad_norm"), streamed.state_dict()
    with open_streamed(tmp_path, **options) as streamed:
        resumed = MegatierTrainer(streamed, arguments(tmp_path / "run", **saves), train_dataset=Rows(60))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
        assert streamed.steps == STEPS
        assert logged(resumed, "grad_norm") == expected
        assert all(torch.equal(value, weights[name]) for name, value in streamed.state_dict().items())


def test_trainer_saves_what_from_pretrained_loads(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path / "run", max_steps=2), train_dataset=Rows(60))
        trainer.train()
        for _ in range(2):  # a second one takes the first one's place
            (tmp_path / "run" / ".export").mkdir(parents=True)  # of a process that was killed
            (tmp_path / "run" / ".export" / "half").write_text("half")
            trainer.save_model()
        weights = streamed.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())


def test_trainer_save_over_an_older_one_with_other_shards_leaves_the_new_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    plain_model(exactness_config("plain")).save_pretrained(folder)
    (folder / "model-notes.txt").write_text("the user's own")
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path / "run", max_steps=1), train_dataset=Rows(60))
        trainer.train()
        weights = streamed.state_dict()
        for num_bytes, names in ((1 << 30, {"model.safetensors"}), (60_000, {"model.safetensors.index.json"})):
            monkeypatch.setattr(stream_state, "SHARD_BYTES", num_bytes)
            trainer.save_model(str(folder))
            left = {path.name for path in folder.iterdir()}
            assert left & {"model.safetensors", "model.safetensors.index.json"} == names
            assert "model-notes.txt" in left
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(ConfigError, match="holds an adapter"):
            trainer.save_model(str(folder))


class Setting(TrainerCallback):
    """Sets the norm to clip to after the first step."""

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        args.max_grad_norm = 0.25


@pytest.mark.parametrize("norm", [-1.0, 0.0])
def test_trainer_norm_at_0_or_below_clips_nothing_until_a_callback_sets_another(norm: float, tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        given = arguments(tmp_path, max_steps=2)
        given.max_grad_norm = norm
        trainer = MegatierTrainer(streamed, given, train_dataset=Rows(60), callbacks=[Setting()])
        before = streamed.clip
        trainer.train()
        assert (before, streamed.clip) == (None, 0.25)
        assert streamed.last is not None
        assert streamed.last.clip_coefficient == min(1.0, 0.25 / (streamed.last.grad_norm + 1e-6))


def test_trainer_schedule_with_a_least_rate_has_the_plain_trainers_rates(tmp_path: Path) -> None:
    least: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = Trainer(model, arguments(tmp_path, **least), optimizers=(plain, None)).create_scheduler(STEPS, plain)
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path, **least), train_dataset=Rows(60))
        optimizer = trainer.create_optimizer()
        found = trainer.create_scheduler(STEPS, optimizer)
        for _ in range(STEPS):
            plain.step()
            expected.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no step was made
                found.step()
            assert found.get_last_lr()[0] == expected.get_last_lr()[0]


def test_trainer_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "max_steps": 4,
        "learning_rate": 0.5,
        "warmup_steps": 0,
    }
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(
            streamed, arguments(tmp_path / "run", **best), train_dataset=Rows(60), eval_dataset=Rows(8)
        )
        trainer.train()
        losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        assert losses[2] != losses[4]
        assert trainer.evaluate()["eval_loss"] == min(losses.values())


def test_trainer_best_model_is_weights_alone(tmp_path: Path) -> None:
    """Moments and the number of the step stay those of the last step, as under the plain Trainer."""
    given = arguments(tmp_path / "run", max_steps=1, warmup_steps=0)
    with open_streamed(tmp_path) as streamed:
        MegatierTrainer(streamed, given, train_dataset=Rows(60)).train()
        streamed.save(tmp_path / "first")
        best = streamed.state_dict()
        MegatierTrainer(streamed, given, train_dataset=Rows(60)).train()
        last = streamed.save(tmp_path / "second")
        streamed.restore_weights(tmp_path / "first")
        assert streamed.steps == 2
        assert all(torch.equal(value, best[name]) for name, value in streamed.state_dict().items())
        mixed = streamed.save(tmp_path / "third")
    for group, are_equal in (("params", False), ("exp_avg", True), ("exp_avg_sq", True)):
        files = [path.relative_to(last) for path in (last / group).rglob("*/c/*") if path.is_file()]
        assert files
        assert all((last / path).read_bytes() == (mixed / path).read_bytes() for path in files) == are_equal


def test_trainer_scheduler_of_another_optimizer_is_refused_and_of_its_own_is_taken(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(other)
        with pytest.raises(ConfigError, match=r"make it over streamed\.optimizer"):
            MegatierTrainer(streamed, arguments(tmp_path), optimizers=(None, scheduler))
        own = torch.optim.lr_scheduler.LambdaLR(streamed.optimizer, lambda _: 0.5)
        trainer = MegatierTrainer(streamed, arguments(tmp_path), optimizers=(streamed.optimizer, own))
        assert trainer.lr_scheduler is own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "name the same number in both"),
        ({"optim": "sgd"}, "leave optim out"),
        ({"optim": "adamw_torch_8bit"}, "optim is adamw_torch_8bit"),
        ({"max_grad_norm": float("nan")}, "the norm to clip to is nan"),
        ({"torch_compile": True}, "pass compile=True"),
        (
            {
                "load_best_model_at_end": True,
                "save_only_model": True,
                "save_strategy": "steps",
                "eval_strategy": "steps",
            },
            "save_only_model",
        ),
    ],
)
def test_trainer_arguments_that_do_not_fit_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match=message):
        MegatierTrainer(streamed, arguments(tmp_path, **options), train_dataset=Rows(60), eval_dataset=Rows(8))


def test_trainer_with_an_optimizer_of_its_own_is_refused(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        with pytest.raises(ConfigError, match="brings its optimizer"):
            MegatierTrainer(streamed, arguments(tmp_path), optimizers=(other, None))


def test_trainer_metrics_of_logits_want_logits(tmp_path: Path) -> None:
    def compute_metrics(prediction: Any) -> dict[str, float]:
        return {"logits": prediction.predictions.shape[-1]}

    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match="fused_loss=False"):
        MegatierTrainer(streamed, arguments(tmp_path), compute_metrics=compute_metrics)
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), eval_dataset=Rows(8), compute_metrics=compute_metrics)
        assert trainer.evaluate()["eval_logits"] == 160


def test_trainer_predictions_of_a_folder_want_logits(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), eval_dataset=Rows(8))
        assert trainer.evaluate()["eval_loss"] > 0
        with pytest.raises(ConfigError, match=r"predictions are logits.*fused_loss=False"):
            trainer.predict(Rows(8))
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), eval_dataset=Rows(8))
        found = trainer.predict(Rows(8)).predictions
        assert isinstance(found, np.ndarray)
        assert found.shape[-1] == 160


def test_trainer_epoch_that_ends_in_half_a_step_is_refused_before_it_trains(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(10))
        with pytest.raises(ConfigError, match=r"has 10 rows, 5 batches .* takes 4 rows .* leaves 2 rows out of each"):
            trainer.train()


def test_trainer_with_drop_last_takes_the_whole_steps_of_each_epoch(tmp_path: Path) -> None:
    """Each epoch leaves out other rows, since they are shuffled; those that are taken are the plain Trainer's first."""
    taken: list[list[int]] = []

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        taken[-1] += [int(row["input_ids"][0]) for row in rows]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 3, "dataloader_drop_last": True}
    for is_plain in (True, False):
        taken.append([])
        with open_streamed(tmp_path) as streamed:
            model: Any = plain_model(exactness_config("plain")) if is_plain else streamed
            kind = Trainer if is_plain else MegatierTrainer
            kind(model, arguments(tmp_path, **options), train_dataset=Rows(11), data_collator=collate).train()
    plain, found = taken
    assert len(found) == 3 * 8
    assert found == [row for epoch in range(3) for row in plain[epoch * 10 : epoch * 10 + 8]]


def test_trainer_of_fewer_rows_than_a_step_is_refused(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed:
        trainer = MegatierTrainer(streamed, arguments(tmp_path, dataloader_drop_last=True), train_dataset=Rows(3))
        with pytest.raises(ConfigError, match=r"has 3 rows, 1 batch .* takes 4 rows"):
            trainer.train()
        with pytest.raises(ConfigError, match="train_dataset has no rows"):
            MegatierTrainer(streamed, arguments(tmp_path), train_dataset=Rows(0))


def test_trainer_over_the_model_of_a_streamed_one_names_the_way(tmp_path: Path) -> None:
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match="give the Streamed itself"):
        MegatierTrainer(streamed.model, arguments(tmp_path), train_dataset=Rows(10))  # type: ignore[arg-type]


def test_trainer_takes_a_folder_and_opens_it_with_its_own_accumulation(tmp_path: Path) -> None:
    plain_model(exactness_config("plain")).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(100, (8, 8))]
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    options = {"optimizer": "muon", "tile_tokens": 8}
    folder = str(tmp_path / "model")
    trainer = MegatierTrainer(folder, args, train_dataset=rows, tiers=TIERS, stream_kwargs=options)
    assert trainer.streamed.accumulation_steps == 2
    trainer.train()
    assert trainer.streamed.steps == 1
    assert [group["momentum"] for group in trainer.streamed.optimizer.param_groups] == [0.95, 0.95]
    for given in ({"tiers": TIERS}, {"stream_kwargs": options}):
        with pytest.raises(ConfigError, match=r"tiers and stream_kwargs belong to megatier\.stream"):
            MegatierTrainer(trainer.streamed, args, train_dataset=rows, **given)
    trainer.streamed.close()
    for name, words in {"lr": "from TrainingArguments", "tiers": "to the trainer", "colour": "It takes"}.items():
        with pytest.raises(ConfigError, match=rf"{name}.*{words}"):
            MegatierTrainer(folder, args, train_dataset=rows, stream_kwargs={name: 1})
