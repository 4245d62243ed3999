"""What scripts around the Trainer do: MegatierTrainer does the same in fp32, or refuses it by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import exactness_config, plain_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from trainer_runs import Rows, arguments, open_streamed
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from megatier.errors import CheckpointError, ConfigError, MegatierError

pytest.importorskip("accelerate")

from megatier.integrations.transformers_trainer import MegatierTrainer


def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    loss: Tensor = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)
    return loss


def counted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    return shifted(outputs.logits, labels, reduction="sum") / num_items_in_batch


class OwnLoss:
    """From logits, by a forward without labels and one without gradients."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            target = model(**inputs).logits * 0.9
        loss = shifted(outputs.logits, labels) + 0.1 * (outputs.logits - target).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class TwoForwards:
    """Of the same weights, with one backward."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = (outputs.loss + 2 * model(**inputs).loss) / 3
        return (loss, outputs) if return_outputs else loss


class OwnRows:
    """Drawn with weights."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler(
            [1.0 + row % 3 for row in range(24)], 24, generator=torch.Generator().manual_seed(3)
        )


class WithLoader:
    """One that accelerate has not seen."""

    train_dataset: Any

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2)


class OwnStep:
    """Changes the batch before it."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"] = (inputs["input_ids"] + 1) % 160
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class MoreMetrics:
    """Adds to what an evaluation gives."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs) | {"eval_more": 1.0}  # type: ignore[misc]


class Settings(TrainerCallback):
    """Sets rate and decay of each step in the optimizer."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.3
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (state.global_step + 1)


class Generating(TrainerCallback):
    """Completes a text after each step, and asks for a checkpoint and an evaluation."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.eval()
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        control.should_save = control.should_evaluate = True


class Unsized(IterableDataset[Any]):
    """A stream of rows."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        rows = Rows(24)
        return (rows[number] for number in range(self._count))


def train(trainer: Any) -> None:
    trainer.train()


def train_twice(trainer: Any) -> None:
    trainer.train()
    trainer.args.max_steps, trainer.args.learning_rate = 2, 5e-4
    trainer.train()


def change_and_train(trainer: Any) -> None:
    """The batch was noted at construction, the others are read in the call."""
    args = trainer.args
    args.per_device_train_batch_size, args.learning_rate, args.weight_decay = 5, 3e-4, 0.2
    args.lr_scheduler_type, args.adam_beta1 = "constant", 0.7
    trainer.train()


def evaluate_train_predict(trainer: Any) -> Any:
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [first, trainer.evaluate()["eval_loss"], float(trainer.predict(Rows(6)).predictions.sum())]


def resume_twice(trainer: Any) -> None:
    trainer.train()
    trainer.args.max_steps = 5
    trainer.train(resume_from_checkpoint=True)


STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
TAKEN: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "train twice": (train_twice, {}),
    "change and train": (change_and_train, {}),
    "evaluate, train, predict": (evaluate_train_predict, {}),
    "resume": (resume_twice, {"options": SAVES}),
    "own loss": (train, {"kind": OwnLoss}),
    "two forwards": (train, {"kind": TwoForwards}),
    "loss function": (train, {"compute_loss_func": counted_loss}),
    "own rows": (train, {"kind": OwnRows}),
    "own loader": (train, {"kind": WithLoader}),
    "own step": (train, {"kind": OwnStep}),
    "settings": (train, {"callbacks": [Settings()]}),
    "generating": (train, {"callbacks": [Generating()]}),
    "stream": (train, {"train_dataset": Unsized(24)}),
    "best": (
        train,
        {
            "kind": MoreMetrics,
            "callbacks": [EarlyStoppingCallback(1)],
            "options": {**STEPS, **SAVES, "load_best_model_at_end": True, "metric_for_best_model": "loss"},
        },
    ),
    "two evaluations with metrics": (
        train,
        {
            "eval_dataset": {"a": Rows(4), "b": Rows(6)},
            "compute_metrics": lambda found: {"mean": float(found.predictions.mean())},
            "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
            "options": {**STEPS, "include_for_metrics": ["loss", "inputs"]},
        },
    ),
}
SLOW = ("change and train", "own loader", "own rows", "own step", "settings", "resume", "loss function", "best")


def made(parent: Any, model: Any, folder: Path, **given: Any) -> Any:
    chosen = {"train_dataset": Rows(24), "eval_dataset": Rows(6), **given}
    options = {
        "max_steps": 3,
        "warmup_steps": 1,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-6,
        **chosen.pop("options", {}),
    }
    kind = chosen.pop("kind", None)
    made_kind = type("Script", (kind, parent), {}) if kind else parent
    return made_kind(model, arguments(folder, **options), **chosen)


def numbers(trainer: Trainer) -> list[dict[str, float]]:
    timed = ("runtime", "per_second", "flos", "preparation_time")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in TAKEN])
def test_script_has_the_numbers_of_the_plain_trainer(name: str, tmp_path: Path) -> None:
    script, given = TAKEN[name]
    plain = made(Trainer, plain_model(exactness_config("plain")), tmp_path / "plain", **given)
    expected = script(plain)
    with open_streamed(tmp_path, fused_loss=False) as streamed:
        trainer = made(MegatierTrainer, streamed, tmp_path / "streamed", **given)
        assert script(trainer) == (expected and pytest.approx(expected, rel=1e-6))
        assert len(numbers(trainer)) == len(numbers(plain)) > 0
        for found, entry in zip(numbers(trainer), numbers(plain), strict=True):
            assert found == pytest.approx(entry, rel=2e-6)
        state = streamed.state_dict()
        assert all(torch.allclose(state[key], p, rtol=0, atol=1e-6) for key, p in plain.model.named_parameters())


class OfParameters:
    """A penalty over the weights."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss + sum(p.pow(2).sum() for p in model.parameters())


class OfEmbeddings:
    """Calls a module outside of the forward."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        found = model.get_input_embeddings()(inputs["input_ids"])
        return model(inputs_embeds=found + 0.01, labels=inputs["labels"]).loss


class Doing(TrainerCallback):
    """Does something to the model at an event."""

    def __init__(self, event: str, act: Callable[[Any], Any]) -> None:
        setattr(self, event, functools.partial(self._do, act))

    def _do(self, act: Callable[[Any], Any], *_: Any, model: Any = None, **__: Any) -> None:
        with torch.no_grad():
            act(model)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "penalty": ({"kind": OfParameters}, "the weight .* lies on megatier's tiers"),
    "embeddings": ({"kind": OfEmbeddings}, r"embed_tokens was called outside .* streamed\.one_forward"),
    "gradients": (
        {"callbacks": [Doing("on_pre_optimizer_step", lambda m: [p.grad for p in m.parameters()])]},
        r"never in \.grad",
    ),
    "freezing": (
        {"callbacks": [Doing("on_step_end", lambda m: m.lm_head.weight.requires_grad_(False))]},
        "whether lm_head.weight is trained was decided",
    ),
    "weights": (
        {"callbacks": [Doing("on_step_end", lambda m: m.lm_head.weight.mul_(0.5))]},
        "the weight lm_head.weight is changed where it is not bound",
    ),
    "state": ({"callbacks": [Doing("on_step_end", lambda m: m.state_dict())]}, r"Streamed\.state_dict"),
    "pretrained": ({"callbacks": [Doing("on_step_end", lambda m: m.save_pretrained("x"))]}, r"Streamed\.export"),
    "own optimizer": ({"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})}, "brings its optimizer"),
    "stream that ends within a step": (
        {"train_dataset": Unsized(22), "options": {"max_steps": 8}},
        "train_dataset does not say how many rows it has, and ended within a step",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_script_that_a_streamed_model_cannot_follow_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, message = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    with open_streamed(tmp_path, fused_loss=False) as streamed, pytest.raises(MegatierError, match=message):
        made(MegatierTrainer, streamed, tmp_path / "run", **given).train()
    assert not (tmp_path / "x").exists()


def test_checkpoint_without_masters_is_refused_by_what_it_is(tmp_path: Path) -> None:
    options = {"options": {**SAVES, "save_only_model": True, "max_steps": 1}}
    with open_streamed(tmp_path) as streamed:
        trainer = made(MegatierTrainer, streamed, tmp_path / "run", **options)
        trainer.train()
        with pytest.raises(CheckpointError, match="was saved with save_only_model, or by another trainer"):
            trainer.train(resume_from_checkpoint=True)
        with pytest.raises(CheckpointError, match="nothing has no megatier/"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "nothing"))
    with open_streamed(tmp_path) as streamed, pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        made(MegatierTrainer, streamed, tmp_path / "run", options={"gradient_accumulation_steps": 1})
