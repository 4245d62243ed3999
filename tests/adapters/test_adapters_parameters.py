"""Adapters of single parameters, such as stacked experts, give the numbers of PEFT over plain transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from safetensors.torch import load_file
from small_commands import after_step, command
from test_adapters import POLICIES, ROOMY
from tiny_adapters import ATTENTION, STACKS, check_gradients_of_peft, check_steps_of_peft, peft, peft_model
from tiny_gradients import attention_of, streamed_gradients
from tiny_models import tiny_config
from tiny_runs import (
    MIB,
    ModelWeights,
    opened,
    outcome,
    plain_model,
    random_groups,
    run_steps,
)
from transformers import AutoModelForCausalLM

import megatier
from megatier.adapters import in_place
from megatier.cli import main
from megatier.config.lora import LoraConfig
from megatier.config.schema import TiersConfig, TrainConfig
from megatier.errors import ConfigError

CASES: dict[str, tuple[str, LoraConfig]] = {
    "qwen3": ("qwen3_moe", LoraConfig(rank=3, targets=ATTENTION, target_parameters=STACKS)),
    "mixtral": ("mixtral", LoraConfig(rank=4, rslora=True, targets=(), target_parameters=STACKS)),
    "one": ("mixtral", LoraConfig(rank=4, targets=("q_proj",), target_parameters=(STACKS[1],))),
    "router": ("qwen3_moe", LoraConfig(rank=2, targets=(), target_parameters=("mlp.gate.weight", STACKS[0]))),
    "transposed": ("gpt_oss", LoraConfig(rank=2, targets=ATTENTION, target_parameters=STACKS)),
    "plain": ("llama", LoraConfig(rank=2, targets=("q_proj",), target_parameters=("o_proj.weight", "lm_head.weight"))),
}


@pytest.mark.parametrize(
    ("case", "name", "activations"),
    [
        *((case, list(ROOMY)[number % len(ROOMY)], POLICIES[number % 3]) for number, case in enumerate(CASES)),
        *some([("qwen3", name, POLICIES[number % 3]) for number, name in enumerate(list(ROOMY)[1:], 1)], by=5),
    ],
)
def test_adapted_parameters_take_three_steps_like_peft_over_a_plain_model_bit_for_bit(
    case: str, name: str, activations: Any, tmp_path: Path
) -> None:
    family, lora = CASES[case]
    config = tiny_config(family)
    train = TrainConfig(steps=3, batch=6, clip=0.5, weight_decay=0.1, activations=activations)
    check_steps_of_peft(config, lora, ROOMY[name], train, tmp_path)


@pytest.mark.parametrize(
    ("case", "device", "places"),
    [
        ("qwen3", "cpu", ("gpu", "ram_streamed", "nvme")),
        pytest.param("qwen3", "cpu", tuple(ROOMY), marks=pytest.mark.slow),
        *(pytest.param(case, "cuda", tuple(ROOMY), marks=pytest.mark.gpu) for case in ("qwen3", "transposed")),
    ],
)
def test_adapted_parameters_in_bf16_give_the_same_bits_on_any_tier(
    case: str, device: str, places: tuple[str, ...], tmp_path: Path
) -> None:
    family, lora = CASES[case]
    config = tiny_config(family)
    source = ModelWeights(peft_model(config, lora, attention_of(config)))
    found = []
    for index, name in enumerate(places):
        policy: Any = POLICIES[index % 3]
        train = TrainConfig(steps=2, batch=6, clip=0.5, weight_decay=0.1, groups=2, activations=policy)
        options: dict[str, Any] = {"source": source, "lora": lora, "device": device, "compile": False}
        with opened(config, tmp_path, ROOMY[name], train, **options) as session:
            results = run_steps(session, train, 2)
            session.player.drain()
            found.append(outcome(session, results))
    assert [name for name, result in zip(places, found, strict=True) if result != found[0]] == []
    assert len(set(found[0].losses)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "name", "activations"),
    [("qwen3", "nvme", "recompute"), ("mixtral", "ram", "keep"), ("plain", "gpu", "keep")],
)
def test_adapted_parameters_on_a_gpu_have_the_gradients_of_peft_over_a_plain_model_bit_for_bit(
    case: str, name: str, activations: Any, tmp_path: Path
) -> None:
    family, lora = CASES[case]
    check_gradients_of_peft(tiny_config(family), lora, ROOMY[name], activations, tmp_path, "cuda")


@pytest.mark.parametrize("routers", [True, False])
@pytest.mark.filterwarnings("ignore:.*runs whole")
def test_adapted_parameters_in_tiles_have_nearly_the_gradients_of_whole_modules(routers: bool, tmp_path: Path) -> None:
    """With logits of routers the experts run in tiles by themselves, and else as a part of the MLP."""
    family, lora = CASES["qwen3"]
    config = tiny_config(family, output_router_logits=routers)
    source = ModelWeights(peft_model(config, lora))
    expected = streamed_gradients(config, tmp_path, source, lora=lora)
    found = streamed_gradients(config, tmp_path, source, "recompute", tile_tokens=16, lora=lora)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert any(".experts.base_layer.lora_A" in name and grad.any() for name, grad in expected[1].items())
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.slow
def test_compiled_layers_with_adapted_parameters_give_the_same_bits_under_any_policy(tmp_path: Path) -> None:
    family, lora = CASES["qwen3"]
    config = tiny_config(family, output_router_logits=False)
    source = ModelWeights(peft_model(config, lora))
    plain = streamed_gradients(config, tmp_path, source, lora=lora)
    found = []
    for policy, share in (("keep", 1.0), ("recompute", 0.0), ("offload", 0.0)):
        options: dict[str, Any] = {"lora": lora, "compile": True, "saved_share": share}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*runs uncompiled")
            found.append(streamed_gradients(config, tmp_path, source, policy, **options))
    for loss, grads in found:
        assert loss == found[0][0] == pytest.approx(plain[0], rel=1e-6)
        assert [name for name, grad in grads.items() if not torch.equal(grad, found[0][1][name])] == []
    for name, grad in plain[1].items():
        assert (found[0][1][name] - grad).norm() <= 1e-4 * grad.norm(), name


def test_stream_takes_adapted_experts_of_peft_and_switches_them_off(tmp_path: Path) -> None:
    base = moe_folder(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], target_parameters=list(STACKS))
    [batch] = random_groups(TrainConfig(steps=1, batch=2), 320, 1)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    unadapted = plain(**batch).loss
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        model = peft.get_peft_model(plain, config)

    tiers = TiersConfig(device="cpu", gpu=8 * MIB, ram=16 * MIB, update_threads=2, io_threads=2)
    options: dict[str, Any] = {"compute_dtype": "fp32", "fused_loss": False, "lr": 1e-2, "seed": 0}
    found = []
    for index, (given, more) in enumerate(((model, {}), (base, {"peft_config": config}))):
        with megatier.stream(given, tiers=tiers, **options, **more) as streamed:
            for _ in range(2):
                streamed.model(**batch).loss.backward()
                streamed.optimizer.step()
            with torch.no_grad():
                assert streamed.model(**batch).loss < unadapted
                with streamed.disable_adapter():
                    assert torch.equal(streamed.model(**batch).loss, unadapted)
            streamed.export(tmp_path / str(index))
        found.append(load_file(tmp_path / str(index) / "adapter_model.safetensors"))
        settings = json.loads((tmp_path / str(index) / "adapter_config.json").read_text())
        assert sorted(settings["target_parameters"]) == sorted(STACKS)
    assert found[0].keys() == found[1].keys()
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


def moe_folder(folder: Path) -> Path:
    plain_model(tiny_config("qwen3_moe", vocab_size=320, eos_token_id=256)).bfloat16().save_pretrained(folder)
    return folder


def run_words(folder: Path, base: Path, **settings: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    lora = {"rank": 4, "targets": "q_proj", "target_parameters": ",".join(STACKS)}
    given = {f"model.lora.{key}": value for key, value in lora.items()}
    return command(folder, {"model.path": str(base), "data.tokenizer": "bytes", "train.steps": 4, **given, **settings})


def test_run_that_adapts_experts_over_a_base_in_place_resumes_and_writes_what_peft_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "RUN_BYTES_MIN", 1)
    base = moe_folder(tmp_path / "base")
    assert main(run_words(tmp_path / "ram", base, **{"model.compute_dtype": "bf16"})) == 0
    place = {"model.compute_dtype": "bf16", "tiers.state": "nvme", "tiers.nvme": f"{tmp_path}:16MiB"}
    capsys.readouterr()

    def end() -> None:
        raise ConfigError("ended by the test")

    with after_step(3, end):
        assert main(run_words(tmp_path / "nvme", base, **place, **{"output.checkpoint_every": 2})) == 2
    assert "units is read from the model's own files" in " ".join(capsys.readouterr().out.split())
    assert main(["resume", str(tmp_path / "nvme" / "run")]) == 0
    folder, other = (tmp_path / name / "run" / "model" for name in ("ram", "nvme"))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    assert (other / "adapter_model.safetensors").read_bytes() == weights

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(plain, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], value) for name, value in expected.items())
    assert any(".experts.base_layer.lora_B" in name and value.any() for name, value in stored.items())
