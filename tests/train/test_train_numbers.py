"""The numbers of `megatier train`: weights that no placement changes, learning rates, and models of Hugging Face."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_adamw import PlainAdamW
from safetensors.torch import load_file
from small_commands import IMMEDIATE, MODEL, PLACES, command, leftovers, metrics, write_chats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from warm_python import MEGATIER, WarmPython

from megatier.cli import main
from megatier.config.file import load_saved
from megatier.config.schema import TrainConfig
from megatier.config.values import parse_bytes
from megatier.data.packed_text import PackedText
from megatier.data.tokenizer import byte_tokenizer
from megatier.train.loop import learning_rate_at

MODES: list[dict[str, Any]] = [
    {"train.clip": 0.5, "train.activations": "keep"},
    {**IMMEDIATE, "train.activations": "offload", "train.slices": 2},
    {"train.clip": 0.5, "train.groups": 2, "train.slices": 2, "train.activations": "recompute"},
    {"train.clip": "null", "train.groups": 2, "train.activations": "offload"},
]


def trained(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Masters at the end of a run in a new folder."""
    folder.mkdir()
    assert main(command(folder, {"output.export_dtype": "fp32", **settings})) == 0
    return load_file(folder / "run" / "model" / "model.safetensors")


def least_ram(folder: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> int:
    """The budget, in bytes, that refused runs ask for."""
    least = 1
    while True:  # for gradients, perhaps, then for slots
        folder.mkdir()
        code = main(command(folder, {**settings, "tiers.ram": least}))
        shutil.rmtree(folder)
        if code == 0:
            return least
        [(number, unit)] = re.findall(r"Raise tiers.ram to at least ([\d.]+) (\w+)", capsys.readouterr().err)
        least = parse_bytes(number + unit)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# The exactness tests have the others, and every pair of a place and a policy.
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[pytest.mark.slow] * (n > 1)) for n, mode in enumerate(MODES)],
    ids=lambda mode: "-".join(str(value) for value in mode.values()),
)
def test_train_any_placement_moves_what_it_demands_and_gives_the_same_weights(
    mode: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    few = "gpu", "nvme", "gpu_ram_nvme"
    for place, tiers in PLACES.items() if mode is MODES[0] else ((place, PLACES[place]) for place in few):
        settings = {**tiers, **mode, "tiers.nvme": f"{tmp_path}:16MiB", "model.config.num_hidden_layers": 8}
        if settings.get("tiers.ram", "") is None:
            # RAM takes activations and sums of groups before it takes state.
            more = 400 << 10 if mode["train.activations"] == "offload" else 100 << 10
            settings["tiers.ram"] = least_ram(tmp_path / place, settings, capsys) + more
        found[place] = trained(tmp_path / place, {**settings, "train.evaluate_every": 2})
        report = capsys.readouterr().out
        moves = {row[0]: row[1:] for row in re.findall(r"(\w+_to_\w+)\s+│\s+([\d,]+) │\s+([\d,]+) │\s+(\S+) │", report)}
        assert {row[2] for row in moves.values()} == {"none"}, report
        assert len(moves) == (6 if place == "ram_streamed" else 4)
        lies = dict(re.findall(r"│ (gpu|ram|nvme)\s+│\s+(\S+)", report))
        assert {tier for tier, size in lies.items() if size != "0"} == {*place.split("_")} - {"streamed"}, report
    assert [place for place, weights in found.items() if not equal(weights, found["gpu"])] == []


def test_train_conversations_any_placement_and_policy_give_the_same_weights(tmp_path: Path) -> None:
    settings = {"data.files": write_chats(tmp_path), "data.sequence_length": 64, "tiers.nvme": f"{tmp_path}:16MiB"}
    runs: dict[str, dict[str, Any]] = {
        "gpu": {},
        "nvme": {**PLACES["nvme"], "train.activations": "offload"},
        "gpu_ram": {**PLACES["gpu_ram"], "train.activations": "recompute"},
    }
    found = {name: trained(tmp_path / name, {**settings, **run}) for name, run in runs.items()}
    assert [name for name, weights in found.items() if not equal(weights, found["gpu"])] == []
    records = metrics(tmp_path / "gpu")
    assert all(0 < record["tokens"] < 4 * 64 for record in records if "tokens" in record), "the fill does not count"
    assert "generation" in AutoTokenizer.from_pretrained(tmp_path / "gpu" / "run" / "model").chat_template
    crossing = trained(tmp_path / "crossing", {**settings, "data.cross_documents": True})
    assert not equal(crossing, found["gpu"])


def test_train_documents_apart_on_recurrent_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"model.config.layer_types": "[linear_attention, full_attention, full_attention]"}
    settings = {**layers, "model.config.model_type": "qwen3_next", "data.cross_documents": False}
    assert main(command(tmp_path, settings)) != 0
    assert "layers (linear_attention) that do not stop at the borders of documents" in capsys.readouterr().err


def test_train_evaluations_in_between_change_no_bit(tmp_path: Path) -> None:
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "ram,nvme", "train.steps": 4}
    for name, mode in (("deferred", {"train.clip": 0.5}), ("immediate", IMMEDIATE)):
        runs = [
            trained(tmp_path / f"{name}-{every}", {**settings, **mode, "train.evaluate_every": every})
            for every in (0, 1)
        ]
        assert equal(*runs)
        [seldom, often] = [metrics(tmp_path / f"{name}-{every}") for every in (0, 1)]
        assert len(often) == len(seldom) + 3
        assert [r["loss"] for r in seldom if "loss" in r] == [r["loss"] for r in often if "loss" in r]
        assert seldom[-1]["heldout_loss"] == often[-1]["heldout_loss"]


def test_train_another_process_gives_the_same_bytes(tmp_path: Path, python: WarmPython) -> None:
    settings = {"tiers.nvme": f"{tmp_path}:16MiB", "tiers.state": "nvme", "model.config.attention_dropout": 0.1}
    here, there = tmp_path / "here", tmp_path / "there"
    found = []
    for folder in (here, there):
        folder.mkdir()
        words = command(folder, {**settings, "model.compute_dtype": "bf16"})
        if folder is here:
            assert main(words) == 0
        else:
            # A fork of another interpreter, whose hashes and addresses are others too.
            done = python.run([MEGATIER, *words])
            assert done.returncode == 0, done.stderr
        losses = [record.get("loss", record.get("heldout_loss")) for record in metrics(folder)]
        found.append((losses, (folder / "run" / "model" / "model.safetensors").read_bytes()))
    assert found[0] == found[1]


# ---------------------------------------------------------------------- the same loop, in plain torch

LORA_NAMES = "q_proj", "up_proj", "down_proj"


def plain_start(source: Path, *, is_adapted: bool) -> Any:
    """The model that a run begins with, as transformers and PEFT make it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if is_adapted:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=list(LORA_NAMES))
        model = peft.get_peft_model(model, config).get_base_model()
    return model.train()


def plain_steps(model: Any, text: PackedText, update: Callable[[int, float], object]) -> list[float]:
    """Twenty steps of a loop by hand, over the rows of a run in the order of the run; returns the losses."""
    losses = []
    for step in range(1, 21):
        batch = text.batch(step - 1, 4)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        update(step, 1e-2 * min(1.0, step / 5))
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks by a name that goes
@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "lora"])
def test_train_twenty_steps_are_those_of_a_plain_loop(is_adapted: bool, tmp_path: Path) -> None:
    """In every bit with AdamW in single operations; with torch's own, and with a fused loss, to 1e-6 of the loss."""
    source = tmp_path / "source"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**{**MODEL, "num_hidden_layers": 2})).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    settings: dict[str, Any] = {"model.path": str(source), "model.fused_loss": False, "train.steps": 20}
    settings |= {"train.clip": "null", "train.weight_decay": 0.1, "train.warmup_steps": 5, "train.schedule": "constant"}
    settings |= {"output.checkpoint_every": 0, "train.evaluate_batches": 1, **PLACES["gpu_ram"]}
    if is_adapted:
        settings |= {"model.lora.rank": 4, "model.lora.alpha": 8, "model.lora.targets": ",".join(LORA_NAMES)}
    losses = {}
    for name, fused in (("run", False), ("fused", True)):
        folder = tmp_path / name
        folder.mkdir()
        words = command(folder, {**settings, "model.fused_loss": fused, "output.export_dtype": "fp32"})
        assert main(words) == 0
        losses[name] = [record["loss"] for record in metrics(folder) if "loss" in record]
    stored = "adapter_model.safetensors" if is_adapted else "model.safetensors"
    found = load_file(tmp_path / "run" / "run" / "model" / stored)

    config = load_saved(tmp_path / "run" / "run" / "config.yaml")
    text = PackedText.build(config.data, byte_tokenizer(), tmp_path / "run" / "run" / "data")
    model = plain_start(source, is_adapted=is_adapted)
    assert plain_steps(model, text, PlainAdamW(model, None).step) == losses["run"]
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    names = {key: f"base_model.model.{key}".replace(".default", "") if is_adapted else key for key in trained}
    assert sorted(names.values()) == sorted(found)
    assert [key for key, name in names.items() if not torch.equal(trained[key], found[name])] == []

    other = plain_start(source, is_adapted=is_adapted)
    matrices = [value for value in other.parameters() if value.requires_grad and value.ndim > 1]
    vectors = [value for value in other.parameters() if value.requires_grad and value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)

    def update(_: int, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

    expected = pytest.approx(plain_steps(other, text, update), rel=1e-6)
    assert losses["run"] == expected
    assert losses["fused"] == expected


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rate_of_any_schedule_follows_its_formula(schedule: str) -> None:
    train = TrainConfig(
        steps=11,
        warmup_steps=4,
        learning_rate=2.0,
        min_learning_rate_ratio=0.1,
        schedule=schedule,  # type: ignore[arg-type]
    )
    rates = [learning_rate_at(step, train) for step in range(1, 12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    for position, rate in enumerate(rates[4:]):
        share = position / 7
        factor = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[schedule]
        floor = 1.0 if schedule == "constant" else 0.1
        assert rate == pytest.approx(2.0 * (floor + (1 - floor) * factor), rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_rate_with_a_warmup_ratio_is_that_of_as_many_steps(schedule: str) -> None:
    changes: dict[str, Any] = {"schedule": schedule, "learning_rate": 2.0}
    # Counted up, as transformers does: 0.3 of 11 steps are 4.
    by_steps, by_ratio = (
        TrainConfig(steps=11, **more, **changes) for more in ({"warmup_steps": 4}, {"warmup_ratio": 0.3})
    )
    assert [learning_rate_at(step, by_steps) for step in range(1, 12)] == [
        learning_rate_at(step, by_ratio) for step in range(1, 12)
    ]


def test_rate_of_wsd_falls_from_the_peak_to_its_minimum_in_the_last_steps_alone() -> None:
    train = TrainConfig(
        steps=20, warmup_steps=2, learning_rate=2.0, schedule="wsd", decay_ratio=0.25, min_learning_rate_ratio=0.1
    )
    rates = [learning_rate_at(step, train) for step in range(1, 22)]
    assert rates[:16] == [1.0, *[2.0] * 15]
    assert rates[15:] == pytest.approx([2.0, 1.64, 1.28, 0.92, 0.56, 0.2], rel=1e-12)

    # Where the warm-up takes more than what the fall leaves, the fall is shorter.
    all_of_it = [learning_rate_at(step, replace(train, decay_ratio=1.0)) for step in range(1, 21)]
    assert all_of_it[:3] == [1.0, 2.0, 2.0]
    assert all(earlier > later for earlier, later in pairwise(all_of_it[2:]))


# ---------------------------------------------------------------------- Hugging Face in and out


def saved_model(folder: Path, dtype: torch.dtype, layers: int = 2) -> LlamaForCausalLM:
    """A model whose one shard has about 6 MB in fp32, with a tokenizer, written by transformers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 32}
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **sizes}))
    model = model.bfloat16() if dtype is torch.bfloat16 else model
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_train_local_folder_larger_than_ram_trains_and_exports(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tmp_path / "source"
    layers = 4 if dtype is torch.float32 else 8
    saved = saved_model(source, dtype, layers)
    settings: dict[str, Any] = {
        "model.path": str(source),
        "data.tokenizer": None,
        "tiers.gpu": "5MiB",
        "tiers.ram": "3MiB",
        "tiers.nvme": f"{tmp_path}:64MiB",
        "train.steps": 2,
        **IMMEDIATE,
        "output.export_dtype": "fp32",
        "model.compute_dtype": "bf16",
    }
    assert (source / "model.safetensors").stat().st_size > 3 << 20
    for rate in (0.0, 1e-3):
        folder = tmp_path / f"rate-{rate}"
        folder.mkdir()
        assert main(command(folder, {**settings, "train.learning_rate": rate})) == 0
        model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
        assert model.dtype is torch.float32
        expected = {name: parameter.float() for name, parameter in saved.named_parameters()}
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys()
        same = [torch.equal(found[name], expected[name]) for name in expected]
        assert all(same) if rate == 0 else not any(same)
        tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
        assert tokenizer.decode(tokenizer("häuser\n")["input_ids"]) == "häuser\n"
        assert list(leftovers(folder)) == []
