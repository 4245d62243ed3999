"""TRL's RewardTrainer over a streamed classifier, against itself over a plain one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_optimizers import close_optimizer
from streamed_loops import TIERS
from tiny_adapters import peft
from tiny_models import tiny_config
from tiny_runs import plain_model
from torch import nn
from trainer_runs import logged
from transformers import AutoModelForSequenceClassification, Trainer, set_seed

import megatier
from megatier.errors import ConfigError
from megatier.integrations.streamed import Streamed

pytest.importorskip("trl")

import trl
from test_classifiers import classifier
from test_integrations_trl_trainer import texts, tokenizer

from megatier.integrations.trl_trainer import StreamedTrl

pytestmark = pytest.mark.filterwarnings("default")  # of TRL and datasets
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "ram": "64MiB"}
"""Settings of a plain trainer's `TieredAdamW`, which has megatier's order of operations."""
FP32 = {"compute_dtype": "fp32", "compile": False}
ADAPTERS: dict[str, Any] = {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"}


class StreamedReward(StreamedTrl, trl.RewardTrainer):  # type: ignore[misc]
    """What a user writes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of a tiny classifier and of a tiny language model."""
    path = tmp_path_factory.mktemp("models")
    models = {"classifier": classifier("qwen3", num_labels=1), "language": plain_model(tiny_config("qwen3"))}
    for name, model in models.items():
        model.save_pretrained(path / name)
        tokenizer().save_pretrained(path / name)
    return {name: str(path / name) for name in models}


def build(make: Any, model: Any, folder: Path, *, given: dict[str, Any], **options: Any) -> Trainer:
    """A trainer for ten steps without clipping."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "center_rewards_coefficient": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    args = trl.RewardConfig(output_dir=str(folder), **{**chosen, **options})
    rows = texts({"prompt": 6, "chosen": 8, "rejected": 5})
    trainer: Trainer = make(model, args=args, train_dataset=rows, processing_class=tokenizer(), **given)
    return trainer


def steps_of(trainer: Trainer, resumed: str | None = None) -> dict[str, list[float]]:
    """What a run logs, in which whatever is drawn is seeded."""
    set_seed(3)
    trainer.train(resume_from_checkpoint=resumed)
    return {name: logged(trainer, name) for name in ("loss", "mean_reward", "margin", "grad_norm")}


def check_takes_the_same_steps(plain: Trainer, trainer: Trainer, streamed: Streamed) -> None:
    """Losses, rewards and weights are equal. Norms are not: torch adds their squares up in fp32."""
    plain.optimizer_cls_and_kwargs = (megatier.TieredAdamW, {**ADAMW, "weight_decay": 0.0})
    expected, found = steps_of(plain), steps_of(trainer)
    close_optimizer(plain)
    assert len(found["loss"]) == 10
    assert found.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=1e-6)
    assert found == expected

    assert plain.model is not None
    weights = {name.removeprefix("base_model.model."): value for name, value in plain.model.named_parameters()}
    state = streamed.state_dict()
    assert weights.keys() == state.keys()
    assert [name for name, value in weights.items() if not torch.equal(state[name], value.cpu())] == []


def adapters(**settings: Any) -> Any:
    """Adapters as a script of TRL's asks for them, each time anew, since PEFT writes into them."""
    return peft.LoraConfig(**{"task_type": "SEQ_CLS", **ADAPTERS, **settings})


# On a GPU transformers draws the score of a language model there, where the same seed gives other numbers.
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("source", "device"),
    [("classifier", "cpu"), ("language", "cpu"), pytest.param("classifier", "cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_reward_trainer_over_a_folder_takes_the_steps_of_the_plain_one_bit_for_bit(
    is_adapted: bool, source: str, device: Any, folders: dict[str, str], tmp_path: Path
) -> None:
    path, use_cpu = folders[source], device == "cpu"
    given: list[dict[str, Any]] = [{"peft_config": adapters()} if is_adapted else {} for _ in range(2)]
    plain = build(trl.RewardTrainer, path, tmp_path / "plain", given=given[0], use_cpu=use_cpu)
    options = {"tiers": replace(TIERS, device=device), "stream_kwargs": FP32, **given[1]}
    trainer: Any = build(StreamedReward, path, tmp_path / "streamed", given=options, use_cpu=use_cpu)
    with trainer.streamed as streamed:
        check_takes_the_same_steps(plain, trainer, streamed)
        trainer.save_model(str(tmp_path / "saved"))

    # What was saved gives the rewards of what was trained.
    ids = torch.arange(4, 12, device=device)[None]
    base = AutoModelForSequenceClassification.from_pretrained(path if is_adapted else tmp_path / "saved", num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved") if is_adapted else base
    assert plain.model is not None
    nn.Module.to(loaded, device)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, plain.model.eval()(input_ids=ids).logits)


def test_reward_trainer_over_a_streamed_classifier_takes_the_steps_of_the_plain_one_bit_for_bit(tmp_path: Path) -> None:
    model = classifier(num_labels=1)
    settings: dict[str, Any] = {"tiers": TIERS, "accumulation_steps": 2, **FP32}
    with megatier.stream(model, **settings) as streamed:
        plain = build(trl.RewardTrainer, model, tmp_path / "plain", given={})
        trainer = build(StreamedReward, streamed, tmp_path / "streamed", given={})
        check_takes_the_same_steps(plain, trainer, streamed)


def test_reward_trainer_evaluates_saves_and_goes_on_bit_for_bit(folders: dict[str, str], tmp_path: Path) -> None:
    found = []
    for resumed in (None, str(tmp_path / "run" / "checkpoint-4")):
        given = {"peft_config": adapters(), "tiers": TIERS, "stream_kwargs": FP32}
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
        trainer: Any = build(StreamedReward, folders["language"], tmp_path / "run", given=given, **options)
        with trainer.streamed:
            found.append(steps_of(trainer, resumed))
            assert trainer.evaluate(trainer.train_dataset.select(range(8)))["eval_margin"] != 0
    assert found[0] == found[1], "the state of a Trainer's checkpoint has the logs of the steps before"


def test_reward_trainer_with_a_model_that_gives_no_rewards_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tiers": TIERS, "accumulation_steps": 2}
    with (
        megatier.stream(folders["language"], fused_loss=False, **settings) as streamed,
        pytest.raises(ConfigError, match=r"a reward model is a classifier, and this is a .* num_labels=1"),
    ):
        build(StreamedReward, streamed, tmp_path, given={})
    with (
        megatier.stream(folders["language"], num_labels=2, **settings) as streamed,
        pytest.raises(ValueError, match="reward models require `num_labels=1`"),
    ):
        build(StreamedReward, streamed, tmp_path, given={})
    make: Any = type("StreamedSFT", (StreamedTrl, trl.SFTTrainer), {})
    with pytest.raises(
        ConfigError, match="SFTTrainer trains a language model, and Qwen3ForSequenceClassification is a cl"
    ):
        make(folders["classifier"], trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False), tiers=TIERS)
    with pytest.raises(ConfigError, match=r"has the task_type CAUSAL_LM, and Qwen3ForSequenceC"):
        given = {"peft_config": adapters(task_type="CAUSAL_LM"), "tiers": TIERS}
        build(StreamedReward, folders["classifier"], tmp_path, given=given)
