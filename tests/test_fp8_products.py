"""Products in FP8 are a numeric choice like any other: tiers and activation policies change no bit of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import DrawnWeights
from small_commands import after_step, command
from small_commands import outcome as written
from tiny_adapters import STACKS
from tiny_quantised import quantised_folders
from tiny_runs import (
    PLACES,
    ModelWeights,
    Run,
    Short,
    exactness_config,
    opened,
    outcome,
    placements_that_differ,
    plain_model,
    run_in_fresh_process,
    run_steps,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import megatier
from megatier.cli import main
from megatier.compute.fp8 import Fp8Linear, set_fp8
from megatier.compute.fp8_stacks import Fp8Experts
from megatier.compute.quantised_linear import QuantisedLinear
from megatier.config.lora import LoraConfig
from megatier.config.schema import OF_LOOP, ModelConfig, NumericsConfig, RunConfig
from megatier.errors import ConfigError
from megatier.models.decoder import find_units
from megatier.models.dtypes import with_schemas
from megatier.models.products import products_of
from megatier.setup.skeleton import open_model

FP8 = Short(model="products", products="fp8")
EXPERTS = replace(FP8, model="expert products", groups=3, steps=2)
SOME = [("gpu", "recompute"), ("nvme", "offload")]
ALL = [*SOME, ("ram_streamed", "recompute"), ("gpu_ram_nvme", "keep")]
RUNS = {
    "plain": (FP8, ALL),
    "slices and groups": (replace(FP8, groups=3, slices=2), SOME),
    "unclipped": (replace(FP8, clip=None), ALL[2:]),
    "tiles": (replace(FP8, tile_tokens=10), SOME[1:]),
    "Muon": (replace(FP8, optimizer="muon"), SOME[1:]),
    "some in bf16": (replace(FP8, model="untied"), SOME[:1]),
    "kept attention": (replace(FP8, kept_attention=True), SOME[1:]),
    "bf16 products in fp32": (replace(FP8, fp32_products=True), SOME[1:]),
    "experts": (replace(EXPERTS, slices=2), SOME),
    "experts in parts": (replace(EXPERTS, expert_parts=2), SOME[1:]),
}


@pytest.mark.usefixtures("quick_products")
@pytest.mark.filterwarnings("ignore:.*runs whole")
@pytest.mark.parametrize(
    ("run", "settings"),
    [
        *(pytest.param(*case, id=name) for name, case in RUNS.items()),
        pytest.param(replace(EXPERTS, tile_tokens=10), SOME[1:], id="experts in tiles", marks=pytest.mark.slow),
    ],
)
def test_fp8_products_have_the_same_bits_on_any_tier_under_any_policy(
    run: Run, settings: list[tuple[str, str]], tmp_path: Path
) -> None:
    expected, differing = placements_that_differ(run, settings, tmp_path)
    assert differing == []
    if run == FP8:
        plain = replace(run, products="bf16")(tmp_path)
        assert expected.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
        assert expected.norms[0] != plain.norms[0]
        assert expected.norms[0] == pytest.approx(plain.norms[0], rel=5e-2)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("model", "share"),
    [
        ("plain", 0.8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("plain", 0.0), ("expert products", 0.8))),
    ],
)
def test_fp8_products_of_compiled_layers_have_the_same_bits_under_any_policy(
    model: str, share: float, tmp_path: Path
) -> None:
    run = replace(FP8, model=model, compile=True, saved_share=share, steps=1)
    assert placements_that_differ(run, [("nvme", "recompute")], tmp_path)[1] == []


@pytest.mark.gpu
@pytest.mark.parametrize("is_of_experts", [False, True], ids=["layers", "experts"])
def test_fp8_products_on_cuda_have_the_same_bits_on_any_tier_under_any_policy(
    is_of_experts: bool, tmp_path: Path
) -> None:
    uncompiled = replace(FP8, device="cuda", compile=False, groups=3, slices=2)
    compiled = replace(FP8, model="flash", device="cuda", compile=True, fused_loss=True, loss_chunk=32)
    experts = replace(uncompiled, model="expert products")
    more: dict[str, Any] = {"compile": True, "slices": 1, "fused_loss": True, "loss_chunk": 32}
    of_experts = (experts, replace(experts, expert_parts=2), replace(experts, **more))
    for run in of_experts if is_of_experts else (uncompiled, compiled, replace(compiled, saved_share=0.0)):
        again, *found = run_in_fresh_process(
            [run, run, *(replace(run, place=place, activations=activations) for place, activations in ALL)], tmp_path
        )
        assert [result == again for result in found] == [True] * len(found)
        assert run_in_fresh_process([run], tmp_path) == [again]


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize(
    ("model", "lora", "count"),
    [
        ("products", LoraConfig(rank=4), 14),
        ("products", LoraConfig(rank=4, dora=True, dropout=0.1), 14),
        ("expert products", LoraConfig(rank=4, target_parameters=STACKS), 10),
    ],
    ids=["lora", "dora", "experts"],
)
def test_fp8_adapters_over_a_base_in_fp8_have_the_same_bits_on_any_tier(
    model: str, lora: LoraConfig, count: int, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    numerics = NumericsConfig(guard=False, products="fp8")
    found = []
    for place, activations in [("ram", "keep"), ("nvme", "recompute")]:
        train = replace(FP8, activations=activations).train
        options: dict[str, Any] = {"numerics": numerics, "lora": lora, "source": DrawnWeights()}
        with opened(exactness_config(model), tmp_path, PLACES[place], train, **options) as session:
            modules = session.model.named_modules()
            layers = {name for name, module in modules if isinstance(module, (Fp8Linear, Fp8Experts))}
            results = run_steps(session, train, 2)
        assert len(layers) == count
        assert all(name.endswith(".base_layer") for name in layers)
        found.append([(result.loss, result.grad_norm) for result in results])
    assert found[0] == found[1]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "compiles"),
    [
        ("channel", False),
        ("dora", False),
        pytest.param("tensor", True, marks=pytest.mark.slow),
    ],
)
def test_fp8_adapters_over_a_stored_base_in_fp8_multiply_its_codes_on_any_tier(
    kind: str, compiles: bool, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    has_dora = kind == "dora"
    quantised, _ = quantised_folders(tmp_path, "channel" if has_dora else kind, num_hidden_layers=2)
    lora: dict[str, Any] = {"rank": 4, "dora": has_dora, "dropout": 0.1 * has_dora}
    model = ModelConfig(path=str(quantised), lora=lora)
    found = []
    for place, activations in [("ram", "keep"), ("nvme", "recompute")]:
        train = replace(FP8, activations=activations).train
        skeleton, reader = open_model(RunConfig(model=model, data=OF_LOOP))
        options: dict[str, Any] = {"numerics": NumericsConfig(guard=False, products="fp8"), "compile": compiles}
        with opened(
            skeleton.config, tmp_path, PLACES[place], train, source=reader, skeleton=skeleton, **options
        ) as run:
            layers = [layer for layer in run.model.modules() if isinstance(layer, QuantisedLinear)]
            results = run_steps(run, train, 2)
        assert [layer.multiplies_codes for layer in layers] == [True] * 14
        found.append([(result.loss, result.grad_norm) for result in results])
    assert found[0] == found[1]


def test_fp8_products_leave_codes_that_they_do_not_take(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    quantised, _ = quantised_folders(tmp_path, "block", num_hidden_layers=2)
    config = RunConfig(
        model=ModelConfig(path=str(quantised), lora={"rank": 4}), data=OF_LOOP, numerics=NumericsConfig(products="fp8")
    )
    skeleton, _ = open_model(config)
    with pytest.raises(ConfigError, match=r"is left for it \(whose codes are no FP8 with a scale for each row\)"):
        products_of(skeleton, with_schemas(skeleton, find_units(skeleton), "bf16"), ())


def test_fp8_layer_saves_its_input_in_fp8_alone_and_a_frozen_one_saves_none() -> None:
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    set_fp8(layer)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for is_trained in (True, False):
        saved.clear()
        layer.weight.requires_grad_(is_trained)
        rows = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(rows).sum().backward()
        of_input = [x for x in saved if x.shape == (32, 32)]
        assert [x.dtype for x in of_input] == [torch.float8_e4m3fn] * is_trained
        assert rows.data_ptr() not in {x.data_ptr() for x in saved}


def test_fp8_products_of_a_streamed_loop_are_those_that_its_argument_names(tmp_path: Path) -> None:
    with megatier.stream(
        _saved_model(tmp_path), products="fp8", products_except="*.down_proj", tiers={"ram": "64MiB", "gpu": "64MiB"}
    ) as streamed:
        names = {name.rpartition(".")[2] for name, x in streamed.model.named_modules() if type(x) is Fp8Linear}
        ids = torch.arange(32).view(2, 16)
        streamed.model(input_ids=ids, labels=ids).loss.backward()
        streamed.optimizer.step()
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


@pytest.mark.usefixtures("quick_products")
def test_fp8_frozen_parts_have_the_same_bits_on_any_tier(tmp_path: Path) -> None:
    options: dict[str, Any] = {"numerics": FP8.numerics, "frozen": ("model.layers.0.self_attn", "model.layers.1.mlp")}
    found = []
    for place, activations in [("ram", "keep"), ("nvme", "offload")]:
        train = replace(FP8, activations=activations).train
        with opened(exactness_config("products"), tmp_path, PLACES[place], train, **options) as session:
            found.append(outcome(session, run_steps(session, train, 2)))
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fp8_step_with_a_weight_that_is_not_finite_is_left_out_as_in_bf16(bad: float, tmp_path: Path) -> None:
    model = plain_model(exactness_config("products"))
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = bad
    found = []
    for run in (FP8, replace(FP8, products="bf16")):
        run = replace(run, guard=True)
        options: dict[str, Any] = {"numerics": run.numerics, "source": ModelWeights(model)}
        with opened(exactness_config("products"), tmp_path, PLACES["ram"], run.train, **options) as session:
            [result] = run_steps(session, run.train, 1)
            found.append(result.skipped)
    assert found[0] is not None
    assert found[0] == found[1]


@pytest.mark.usefixtures("quick_products")
def test_fp8_run_goes_on_bit_by_bit_from_a_savepoint_and_refuses_other_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers: dict[str, Any] = {"model.compute_dtype": "bf16", "numerics.products": "fp8", "train.steps": 4}
    savepoints: dict[str, Any] = {
        "tiers.state": "nvme",
        "tiers.nvme": f"{tmp_path}:16MiB",
        "tiers.generations": 2,
        "output.savepoint_every": 1,
    }
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()

    def end() -> None:
        raise ConfigError("ended by the test")

    assert main(command(folders[0], numbers)) == 0
    assert "products of 21 modules" in " ".join(capsys.readouterr().out.split())
    with after_step(3, end):
        assert main(command(folders[1], {**numbers, **savepoints})) == 2
    run = folders[1] / "run"
    capsys.readouterr()
    assert main(["resume", str(run), "--numerics.products=bf16"]) == 2
    assert "numerics.products was 'fp8' and is 'bf16'" in capsys.readouterr().err
    assert main(["resume", str(run), "--numerics.products_except=*.o_proj"]) == 2
    assert "numerics.products_except was [] and is ['*.o_proj']" in capsys.readouterr().err
    assert main(["resume", str(run)]) == 0
    found, expected = (written(folder / "run") for folder in folders)
    assert found == expected
    assert "products" not in (run / "model" / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.num_hidden_layers == 3


def _saved_model(directory: Path) -> Path:
    plain_model(exactness_config("products")).save_pretrained(directory / "model")
    return directory / "model"
