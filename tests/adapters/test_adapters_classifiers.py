"""Adapters of classifiers, beside which PEFT trains the score whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_classifiers import DEVICES, check_weights, classifier, opened, plain_steps, take
from tiny_adapters import peft
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, set_seed

from megatier.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks by a name that goes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_adapters_of_a_classifier_train_its_score_and_load_with_peft(
    auto: Any, is_new: bool, device: str, tmp_path: Path
) -> None:
    per_token = auto is AutoModelForTokenClassification
    task = "TOKEN_CLS" if per_token else "SEQ_CLS"
    classifier("llama", auto).save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {"task_type": task, "r": 4, "target_modules": ["q_proj"], "lora_dropout": 0.1}
    base = auto.from_pretrained(tmp_path / "base")
    set_seed(7)
    model = peft.get_peft_model(base, peft.LoraConfig(**settings)).train()
    given: tuple[Any, dict[str, Any]] = (model, {})
    if is_new:
        given = str(tmp_path / "base"), {"peft_config": peft.LoraConfig(**settings), "seed": 7}
    with opened(given[0], tmp_path, "nvme", device=device, **given[1]) as streamed:
        losses = take(streamed.model, streamed.optimizer, per_token=per_token, device=device)
        streamed.export(tmp_path / "adapter")
    model.to(device)
    assert losses == plain_steps(model, per_token=per_token, device=device)

    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert type(loaded) is type(model)
    check_weights(dict(loaded.named_parameters()), model)
    first = model.base_model.model.score.original_module.weight.cpu()
    assert not torch.equal(first, loaded.base_model.model.score.weight)


def test_adapters_of_a_classifier_for_another_task_are_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"task_type CAUSAL_LM, and LlamaFor.* is a classifier\. Set it to SEQ_CL"):
        opened(classifier(), tmp_path, peft_config=config)


def test_adapters_of_a_classifier_without_a_task_leave_its_score_alone(tmp_path: Path) -> None:
    model = classifier()
    with opened(model, tmp_path, peft_config=peft.LoraConfig(target_modules=["q_proj"])) as streamed:
        take(streamed.model, streamed.optimizer)
        assert torch.equal(streamed.read("score.weight"), model.get_parameter("score.weight"))
        streamed.export(tmp_path / "adapter")
    assert type(peft.PeftModel.from_pretrained(model, tmp_path / "adapter")) is peft.PeftModel
