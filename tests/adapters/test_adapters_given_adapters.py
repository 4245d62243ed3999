"""megatier.stream and the Trainer with adapters that PEFT has made or described."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import torch
from plain_adamw import PlainAdamW
from safetensors.torch import load_file
from streamed_loops import same, streamed_on, train_config
from tiny_adapters import peft, stored_adapter
from tiny_models import tiny_config
from tiny_runs import MIB, ModelWeights, exactness_config, plain_model, random_groups
from tiny_vision import image_batch, vision_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainingArguments

import megatier
from megatier.config.lora import LoraConfig
from megatier.config.schema import TiersConfig, TrainConfig
from megatier.errors import CheckpointError, ConfigError, UnsupportedModelError
from megatier.integrations.streamed import Streamed
from megatier.integrations.transformers_trainer import MegatierTrainer

TIERS = TiersConfig(device="cpu", gpu=8 * MIB, ram=8 * MIB, update_threads=2, io_threads=2)
TRAIN = TrainConfig(steps=5, batch=6)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks by a name that goes
LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "up_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    plain_model(tiny_config("llama")).bfloat16().save_pretrained(folder)
    return folder


def peft_model(base: Path, **settings: Any) -> Any:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(2)
    return peft.get_peft_model(plain, peft.LoraConfig(**{**LORA, **settings})).train()


def batch_of(step: int) -> dict[str, Tensor]:
    (batch,) = random_groups(TRAIN, 160, step)
    return dict(batch)


def loop(streamed: Streamed, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = streamed.model(**batch_of(step)).loss
        loss.backward()
        streamed.optimizer.step()
        losses.append(loss.item())
    return losses


def test_stream_of_a_peft_model_takes_the_steps_of_the_plain_one_bit_for_bit(base: Path, tmp_path: Path) -> None:
    model = peft_model(base, lora_dropout=0.2, use_dora=True, modules_to_save=["model.norm"])
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "lr": 1e-2, "weight_decay": 0.1}
    with megatier.stream(model, tiers=TIERS, **options) as streamed:
        found = loop(streamed, (1, 2, 3))
        weights = streamed.state_dict()
        streamed.export(tmp_path / "out")
    optimizer = PlainAdamW(model.base_model.model, 1.0)
    for step, loss_found in enumerate(found, 1):
        torch.manual_seed(step)
        loss = model(**batch_of(step)).loss
        loss.backward()
        optimizer.step(step, 1e-2)
        assert loss.item() == loss_found
    plain = dict(model.base_model.model.named_parameters())
    assert weights.keys() == plain.keys()
    assert [name for name, value in plain.items() if not torch.equal(weights[name], value)] == []

    # The folder is that of PEFT itself.
    model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_stream_with_peft_config_streams_the_base_from_its_folder(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA)
    found = []
    for model in (base, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)):
        with megatier.stream(model, tiers=TIERS, lr=1e-2, peft_config=config, seed=3) as streamed:
            found.append(loop(streamed, (1, 2)))
            if model is base:
                streamed.save(tmp_path / "saved")
            found[-1] += loop(streamed, (3,))
    assert found[0] == found[1]
    with megatier.stream(base, tiers=TIERS, lr=1e-2, peft_config=config, seed=4) as streamed:
        assert loop(streamed, (1,)) != found[0][:1] or loop(streamed, (2,)) != found[0][1:2]
        streamed.restore(tmp_path / "saved")
        assert loop(streamed, (3,)) == found[0][2:]
    names = {path.name for path in (tmp_path / "saved" / "step-00000002" / "params").iterdir()}
    assert not [name for name in names - {"zarr.json"} if ".lora_" not in name]

    other = tmp_path / "other"
    plain_model(tiny_config("llama", initializer_range=0.1)).bfloat16().save_pretrained(other)
    with (
        megatier.stream(other, tiers=TIERS, peft_config=config) as streamed,
        pytest.raises(CheckpointError, match="of adapters over another base"),
    ):
        streamed.restore(tmp_path / "saved")


def test_stream_of_a_vision_language_model_with_adapters_takes_the_steps_of_the_plain_one() -> None:
    """Also its tower has adapters."""
    plain = plain_model(vision_config("qwen2_5_vl"))
    targets = [name for name, module in plain.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets), plain)
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "lr": 1e-2, "weight_decay": 0.1}
    with megatier.stream(model, tiers=TIERS, **options) as streamed:
        for step in (1, 2):
            streamed.model(**image_batch("qwen2_5_vl", 2, step)).loss.backward()
            streamed.optimizer.step()
        found = streamed.state_dict()
    optimizer = PlainAdamW(model, 1.0)
    for step in (1, 2):
        model(**image_batch("qwen2_5_vl", 2, step)).loss.backward()
        optimizer.step(step, 1e-2)
    adapters = {name: value for name, value in model.named_parameters() if ".lora_" in name}
    assert any("visual" in name for name in adapters)
    assert [name for name, value in adapters.items() if not torch.equal(found[name], value)] == []


def several(model: Any) -> Any:
    model.add_adapter("other", peft.LoraConfig(**LORA))
    return model


def merged(model: Any) -> Any:
    model.merge_adapter()
    return model


def untrained(model: Any) -> Any:
    return model.requires_grad_(False)


def other_kind(model: Any) -> Any:
    return peft.get_peft_model(model.unload(), peft.IA3Config(task_type="CAUSAL_LM"))


def also_trained(model: Any) -> Any:
    model.base_model.model.model.norm.requires_grad_(True)
    return model


def partly_frozen(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            parameter.requires_grad_(False)
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "several": (several, "adapters with the names default, other; only one is streamed"),
    "merged": (merged, r"merged into its base. Call unmerge_adapter\(\)"),
    "untrained": (untrained, "is_trainable=True"),
    "kind": (other_kind, "peft_config is of the kind IA3"),
    "also trained": (also_trained, "model.norm.weight is trained, but no part of the adapters"),
    "partly frozen": (partly_frozen, "lora_A.default.weight is not trained, but a part of the adapters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stream_refuses_a_peft_model_that_it_would_not_train_as_peft_does(case: str, base: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        megatier.stream(change(peft_model(base)), tiers=TIERS)


def test_stream_refuses_peft_config_that_is_none_or_comes_twice(base: Path) -> None:
    with pytest.raises(ConfigError, match="peft_config is a dict; it must be a LoraConfig of PEFT"):
        megatier.stream(base, tiers=TIERS, peft_config={"r": 4})
    with pytest.raises(UnsupportedModelError, match="has adapters already"):
        megatier.stream(peft_model(base), tiers=TIERS, peft_config=peft.LoraConfig(**LORA))
    with pytest.raises(ConfigError, match=r"lora_A.* is not trained, but a part of the adapters\. Leave frozen out"):
        megatier.stream(base, tiers=TIERS, peft_config=peft.LoraConfig(**LORA), frozen="*.lora_A")


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = batch_of(1 + index // 6)
        return {name: values[index % 6] for name, values in batch.items()}


def test_trainer_over_adapters_saves_a_folder_of_adapters(base: Path, tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=6, use_cpu=True, report_to=[]
    )
    with megatier.stream(stored_model(base, tmp_path), tiers=TIERS, lr=1e-2) as streamed:
        before = streamed.state_dict()
        trainer = MegatierTrainer(streamed, args, train_dataset=Rows())
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        after = streamed.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if ".lora_" in name}
    stored = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded: nn.Module = peft.PeftModel.from_pretrained(plain, tmp_path / "saved")
    for name, value in loaded.state_dict().items():
        if ".lora_" in name:
            assert torch.equal(value, after[name.removeprefix("base_model.model.")])
    assert len(stored) == len(changed)


def stored_model(base: Path, folder: Path) -> Any:
    """A PeftModel as PEFT loads it to train on."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(plain, stored_adapter(base, folder / "given"), is_trainable=True)


def test_disabled_adapters_give_the_reference_of_a_step_as_with_peft(base: Path) -> None:
    model = peft_model(base, use_dora=True, modules_to_save=["model.norm"])
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "lr": 1e-2, "weight_decay": 0.1}

    def preference(called: Any, disabled: Any, step: int) -> Tensor:
        """A loss over two forwards, with two more by the base, as preference trainers make it."""
        pair = [batch_of(step), batch_of(step + 50)]
        losses = [called(**batch).loss for batch in pair]
        with torch.no_grad(), disabled():
            references = [called(**batch).loss for batch in pair]
        margin = losses[0] - references[0] - losses[1] + references[1]
        loss: Tensor = losses[0] - nn.functional.logsigmoid(-margin)
        return loss

    with megatier.stream(model, tiers=TIERS, **options) as streamed:
        found = []
        for step in (1, 2, 3):
            loss = preference(streamed.model, streamed.disable_adapter, step)
            loss.backward()
            streamed.optimizer.step()
            found.append(loss.item())
        weights = streamed.state_dict()
    optimizer = PlainAdamW(model.base_model.model, 1.0)
    for step, loss_found in enumerate(found, 1):
        loss = preference(model, model.disable_adapter, step)
        loss.backward()
        optimizer.step(step, 1e-2)
        assert loss.item() == loss_found
    plain = dict(model.base_model.model.named_parameters())
    assert [name for name, value in plain.items() if not torch.equal(weights[name], value)] == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_preference_over_adapters_has_the_same_bits_on_any_place(device: str, tmp_path: Path) -> None:
    config, lora = exactness_config("tied"), LoraConfig(rank=4, dropout=0.1)
    source = ModelWeights(tiny_adapters.peft_model(config, lora))

    def preference(streamed: Streamed, step: int) -> Tensor:
        """A loss over two forwards, and over two more by the base, as preference trainers make it."""
        torch.manual_seed(step)
        pair = [{key: value.to(device) for key, value in batch_of(step + n).items()} for n in (0, 50)]
        with torch.no_grad(), streamed.disable_adapter():
            references = [streamed.model(**batch).loss for batch in pair]
        losses = [streamed.model(**batch).loss for batch in pair]
        loss: Tensor = losses[0] - nn.functional.logsigmoid(losses[1] - references[1] - losses[0] + references[0])
        return loss

    found = []
    for place in ("gpu", "ram", "nvme"):
        train = train_config("tied", groups=1, activations="recompute")
        options: dict[str, Any] = {"lora": lora, "source": source, "device": device, "compile": False}
        with streamed_on(place, tmp_path, train, **options) as (_, streamed):
            losses = []
            for step in (1, 2, 3):
                loss = preference(streamed, step)
                loss.backward()
                streamed.optimizer.step()
                losses.append(loss.item())
            found.append((losses, streamed.state_dict()))
    assert len(set(found[0][0])) == 3
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert same(weights, found[0][1])
