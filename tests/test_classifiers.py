"""Classifiers, such as reward models: the bits of plain loops on any place, folders in and out; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from small_optimizers import close_optimizer
from tiny_gradients import attention_of
from tiny_models import FAMILIES, config_class, tiny_config
from tiny_runs import plain_model, read_parameters
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import megatier
from megatier.config.schema import ModelConfig
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.integrations.streamed import Streamed
from megatier.models.model_class import is_classifier
from megatier.setup.skeleton import model_config_of, skeleton_of
from megatier.tier import Kind

SMALL: dict[str, Any] = {"device": "cpu", "gpu": 8 << 20, "ram": 8 << 20, "update_threads": 2, "io_threads": 2}
PLACES: dict[str, dict[str, Any]] = {
    "gpu": {"state": ("gpu",)},
    "ram": {"state": ("ram",)},
    "ram_streamed": {"state": ("ram",), "streamed_share": 1.0},
    "nvme": {"state": ("nvme",)},
    "nvme_twice": {"state": ("nvme",), "generations": 2},
}
FP32: dict[str, Any] = {"compute_dtype": "fp32", "clip": None, "lr": 1e-2}
STEPS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEQUENCES = tuple(
    family for family in FAMILIES if config_class(family) in AutoModelForSequenceClassification._model_mapping
)
"""Families of which transformers has classifiers of sequences."""


def classifier(
    family: str = "llama", auto: Any = AutoModelForSequenceClassification, **options: Any
) -> PreTrainedModel:
    """A plain classifier in fp32, with every parameter moved off its default."""
    config = tiny_config(family, **{"num_labels": 3, "pad_token_id": 0, **options})
    config.architectures = [auto._model_mapping[type(config)].__name__]
    return plain_model(config, attention_of(config))


def batch_of(step: int, *, per_token: bool = False, device: str = "cpu") -> dict[str, Tensor]:
    """Four rows that end in padding, with a label for each row or token."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 150, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(4):
        ids[row, 12 - row :] = mask[row, 12 - row :] = 0
    labels = torch.randint(0, 3, (4, 12) if per_token else (4,), generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def pair_loss(model: Any, step: int, **options: Any) -> Tensor:
    """The loss of a reward model, in two forwards: the first row of each pair is preferred."""
    batch = batch_of(step, **options)
    rewards = [
        model(input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows]).logits[:, 0]
        for rows in (slice(2), slice(2, 4))
    ]
    return -nn.functional.logsigmoid(rewards[0] - rewards[1]).mean()


def own_loss(model: Any, step: int, **options: Any) -> Tensor:
    """The loss that the model computes from labels."""
    loss: Tensor = model(**batch_of(step, **options)).loss
    return loss


def take(model: nn.Module, optimizer: Any, loss_of: Any = own_loss, **options: Any) -> list[float]:
    """The losses of steps of any loop."""
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, step, **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_steps(model: PreTrainedModel, **options: Any) -> list[float]:
    """The losses of a plain loop."""
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "ram": "64MiB"}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with megatier.TieredAdamW(trained, **settings) as optimizer:
        return take(model, optimizer, **options)


def opened(
    model: PreTrainedModel | str, mount: Path, place: str = "ram", *, device: str = "cpu", **options: Any
) -> Streamed:
    """A streamed classifier, training."""
    tiers = megatier.TiersConfig(**{**SMALL, "device": device, "nvme": (f"{mount}:16MiB",), **PLACES[place]})
    streamed = megatier.stream(model, tiers=tiers, **{**FP32, "weight_decay": 0.0, "compile": False, **options})
    streamed.model.train()
    return streamed


def check_weights(found: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    plain = dict(model.named_parameters())
    assert plain.keys() <= found.keys()
    assert [name for name, value in plain.items() if not torch.equal(found[name], value.cpu())] == []


@pytest.mark.parametrize(("family", "loss_of"), [("llama", own_loss), ("qwen3", pair_loss)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", DEVICES)
def test_classifier_in_fp32_takes_the_steps_of_a_plain_loop(
    device: str, place: str, family: str, loss_of: Any, tmp_path: Path
) -> None:
    model = classifier(family)
    with opened(model, tmp_path, place, device=device) as streamed:
        losses = take(streamed.model, streamed.optimizer, loss_of, device=device)
        weights = streamed.state_dict()
    nn.Module.to(model, device)
    assert losses == plain_steps(model, loss_of=loss_of, device=device)
    check_weights(weights, model)


@pytest.mark.parametrize(("place", "activations"), [("gpu", "keep"), ("ram", "recompute"), ("nvme", "keep")])
def test_classifier_in_fp32_has_the_gradients_of_a_plain_backward(place: str, activations: Any, tmp_path: Path) -> None:
    model = classifier("qwen3")
    with opened(model, tmp_path, place, betas=(0.0, 0.999), activations=activations) as streamed:
        own_loss(streamed.model, 0).backward()
        streamed.optimizer.step()
        # Without momentum and clipping, the first moment is the gradient.
        found = read_parameters(streamed._session, Kind.EXP_AVG)
    own_loss(model, 0).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not torch.equal(found[name], grad)] == []
    assert found["score.weight"].any()


@pytest.mark.parametrize("family", some(SEQUENCES, by=2))
def test_classifier_of_each_family_takes_the_steps_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    model = classifier(family)
    with opened(model, tmp_path) as streamed:
        losses, weights = take(streamed.model, streamed.optimizer), streamed.state_dict()
    assert losses == plain_steps(model)
    check_weights(weights, model)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_classifier_of_tokens_takes_the_steps_of_a_plain_loop(family: str, tmp_path: Path) -> None:
    model = classifier(family, AutoModelForTokenClassification)
    with opened(model, tmp_path) as streamed:
        losses = take(streamed.model, streamed.optimizer, per_token=True)
        weights = streamed.state_dict()
    assert losses == plain_steps(model, per_token=True)
    check_weights(weights, model)


def test_classifier_with_frozen_layers_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    model = classifier()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.3", "score")))
    with opened(model, tmp_path, "nvme") as streamed:
        losses, weights = take(streamed.model, streamed.optimizer), streamed.state_dict()
    assert losses == plain_steps(model)
    check_weights(weights, model)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_classifier_streams_from_a_folder_is_restored_and_exported(auto: Any, tmp_path: Path) -> None:
    per_token = auto is AutoModelForTokenClassification
    model = classifier("qwen3", auto)
    model.save_pretrained(tmp_path / "model")
    with opened(str(tmp_path / "model"), tmp_path, "nvme") as streamed:
        losses = take(streamed.model, streamed.optimizer, per_token=per_token)
        streamed.save(tmp_path / "saved")
        losses += take(streamed.model, streamed.optimizer, per_token=per_token)
    with opened(str(tmp_path / "model"), tmp_path, "ram") as streamed:
        streamed.restore(tmp_path / "saved")
        assert losses[STEPS:] == take(streamed.model, streamed.optimizer, per_token=per_token)
        streamed.export(tmp_path / "trained", dtype="fp32")
        weights = streamed.state_dict()

    trained, notes = auto.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert type(trained) is type(model)
    assert not any(notes.values())
    assert trained.config.num_labels == 3
    check_weights(weights, trained)
    assert losses[:STEPS] == plain_steps(model, per_token=per_token)


def test_classifier_gives_logits_though_losses_are_fused(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    batch = batch_of(0)
    model = classifier()
    with opened(model, tmp_path, fused_loss=True) as streamed:
        streamed.model.eval()
        with torch.no_grad():
            found = streamed.model(**batch)
    assert found.logits.shape == (4, 3)
    assert torch.equal(found.logits, model.eval()(**batch).logits)
    assert not list(recwarn)


@pytest.mark.parametrize("device", DEVICES)
def test_classifier_in_bf16_has_the_same_bits_on_any_place(device: str, tmp_path: Path) -> None:
    found = []
    for place in PLACES:
        with opened(classifier(), tmp_path, place, device=device, compute_dtype="bf16", clip=1.0) as streamed:
            losses = take(streamed.model, streamed.optimizer, pair_loss, device=device)
            found.append((losses, streamed.state_dict()))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in weights.items())


def test_classifier_made_of_the_config_of_a_language_model_is_streamed_as_its_class_says(tmp_path: Path) -> None:
    plain_model(tiny_config("llama")).save_pretrained(tmp_path / "language")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language", num_labels=3).train()
    assert model.config.architectures == ["LlamaForCausalLM"]
    with opened(model, tmp_path) as streamed:
        assert type(streamed.model) is type(model)
        losses = take(streamed.model, streamed.optimizer)
    assert losses == plain_steps(model)


def test_classifier_whose_padding_token_is_chosen_later_keeps_the_gradient_of_its_row(tmp_path: Path) -> None:
    model = classifier(pad_token_id=None)
    model.config.pad_token_id = int(batch_of(0)["input_ids"][0, 0])
    with opened(model, tmp_path) as streamed:
        losses, weights = take(streamed.model, streamed.optimizer), streamed.state_dict()
    assert losses == plain_steps(model)
    check_weights(weights, model)


@pytest.mark.filterwarnings("default")  # of the Trainer
def test_classifier_under_the_trainer_has_the_losses_and_metrics_of_the_plain_one(tmp_path: Path) -> None:
    trainer_module = pytest.importorskip("megatier.integrations.transformers_trainer")
    rows = [
        dict(zip(batch_of(0), row, strict=True)) for n in range(4) for row in zip(*batch_of(n).values(), strict=True)
    ]
    given: dict[str, Any] = {
        "args": TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            max_grad_norm=0.0,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        "train_dataset": rows,
        "eval_dataset": rows,
        "compute_metrics": lambda found: {"hits": int((found.predictions.argmax(-1) == found.label_ids).sum())},
    }
    model = classifier()
    with opened(model, tmp_path, accumulation_steps=2) as streamed:
        streaming = trainer_module.MegatierTrainer(streamed, **given)
        plain = Trainer(model, **given)
        plain.optimizer_cls_and_kwargs = (megatier.TieredAdamW, {"lr": 1e-2, "weight_decay": 0.0, "ram": "64MiB"})
        found = []
        for trainer in (streaming, plain):
            set_seed(3)
            trainer.train()
            metrics = trainer.evaluate()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            found.append((losses, metrics["eval_loss"], metrics["eval_hits"]))
        close_optimizer(plain)
    assert found[0] == found[1]
    assert len(found[0][0]) == 3


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_language_model_with_num_labels_begins_with_the_score_of_from_pretrained(family: str, tmp_path: Path) -> None:
    language = plain_model(tiny_config(family))
    language.save_pretrained(tmp_path / "language")
    set_seed(11)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language", num_labels=3).train()
    model.config.pad_token_id = 0
    with opened(str(tmp_path / "language"), tmp_path, "nvme", num_labels=3, seed=11) as streamed:
        assert streamed.model.config.architectures == [type(model).__name__]
        streamed.model.config.pad_token_id = 0
        losses, weights = take(streamed.model, streamed.optimizer), streamed.state_dict()
        streamed.export(tmp_path / "trained", dtype="fp32")
    assert losses == plain_steps(model)
    check_weights(weights, model)
    check_weights(weights, AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained"))


def test_num_labels_that_cannot_be_had_are_refused_by_name(tmp_path: Path) -> None:
    model = classifier()
    model.save_pretrained(tmp_path / "three")
    plain_model(tiny_config("granite")).save_pretrained(tmp_path / "granite")
    refused: list[tuple[Any, int, str]] = [
        (model, 3, "num_labels is for a folder or hub id"),
        (str(tmp_path / "three"), 1, "the classifier has 3 labels, and num_labels is 1"),
        (str(tmp_path / "granite"), 1, "transformers has no classifier of sequences over granite"),
    ]
    for given, number, message in refused:
        with pytest.raises(UnsupportedModelError, match=message):
            opened(given, tmp_path, num_labels=number)
    with pytest.raises(ConfigError, match="num_labels is 0; it must be at least 1"):
        opened(str(tmp_path / "three"), tmp_path, num_labels=0)
    quantised = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UnsupportedModelError, match="is quantised; num_labels takes a language model in bf16 or fp32"):
        opened(str(tmp_path), tmp_path, num_labels=1)


def test_classifier_in_a_run_of_megatier_train_is_refused_by_name(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    for config in (
        ModelConfig(path=str(tmp_path)),
        ModelConfig(config={"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}),
    ):
        for ask in (model_config_of, skeleton_of):
            with pytest.raises(
                UnsupportedModelError,
                match=r"names LlamaForSequenceClassification, and runs train language models alone\. Train a cl",
            ):
                ask(config)


def test_config_with_odd_names_of_classes_is_that_of_a_language_model() -> None:
    config = AutoConfig.for_model("llama")
    for odd in (5, "LlamaForSequenceClassification", [None], {"LlamaForSequenceClassification": 1}, []):
        vars(config)["architectures"] = odd  # some versions of transformers refuse to set it
        assert not is_classifier(config)
