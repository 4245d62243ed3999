"""Adapters over a quantised base give the numbers of PEFT over the same base decoded, on any tier."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import some
from plain_adamw import PlainAdamW
from safetensors.torch import load_file, save_file
from small_commands import command
from tiny_adapters import peft, stored_adapter
from tiny_quantised import float_quantised, quantised_folders
from tiny_runs import (
    KIB,
    MIB,
    PLACES,
    Outcome,
    opened,
    outcome,
    random_groups,
    read_parameters,
    run_steps,
)
from transformers import AutoConfig, AutoModelForCausalLM

import megatier
from megatier.adapters.first_weights import AdaptedWeights
from megatier.adapters.lora import stored_names
from megatier.adapters.quantised_base import open_quantised
from megatier.cli import main
from megatier.compute.quantised_linear import QuantisedLinear
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import ConfigError, NonFiniteError, UnsupportedModelError
from megatier.models.decoder import find_units
from megatier.session.session import Session
from megatier.setup.skeleton import open_model
from megatier.tier import Kind, Tier

TRAIN = TrainConfig(steps=3, batch=6, clip=0.5, weight_decay=0.1)
ROOMY = {
    "ram": PLACES["ram"],
    "gpu": PLACES["gpu"],
    "ram_streamed": replace(PLACES["ram_streamed"], gpu=4 * MIB),
    "nvme": PLACES["nvme"],
    "gpu_ram_nvme": replace(PLACES["gpu_ram_nvme"], gpu=350 * KIB, ram=32 * KIB),
}
LORA: dict[str, dict[str, Any]] = {"dropped": {"lora_dropout": 0.1}, "dora": {"use_dora": True}, "plain": {}}

# Adapters over a decoded base go on over the quantised one, as people do it, and are told that nothing is compared.
pytestmark = pytest.mark.filterwarnings("ignore:the adapter .* stores its weights in other numbers:UserWarning")


def run_over(folder: Path, adapter: Path, dtype: Any = "fp32") -> RunConfig:
    """A run that goes on with an adapter over a base."""
    model = ModelConfig(path=str(folder), compute_dtype=dtype, lora={"adapter": str(adapter)})
    return RunConfig(model=model, data=DataConfig(files=("x",)))


@contextlib.contextmanager
def opened_over(
    folder: Path, adapter: Path, mount: Path, name: str, train: TrainConfig, dtype: str, **options: Any
) -> Iterator[Session]:
    """A session of such a run, whose state lies where the place says."""
    skeleton, reader = open_model(run_over(folder, adapter, dtype))
    options |= {"source": reader, "skeleton": skeleton, "seed": None, "compute_dtype": dtype}
    with opened(skeleton.config, mount, ROOMY[name], train, **options) as session:
        held = {tier for tier, size in session.placement.state_bytes.items() if size}
        assert held == {Tier(tier) for tier in ROOMY[name].tiers}
        yield session


@pytest.mark.parametrize(
    ("kind", "lora", "name", "activations"),
    some(
        [
            ("channel", "dropped", "nvme", "keep"),
            ("tensor", "plain", "gpu", "recompute"),
            ("block", "dora", "ram", "offload"),
            ("nf4", "plain", "ram_streamed", "keep"),
            ("nested", "dropped", "gpu_ram_nvme", "recompute"),
        ],
        by=2,
    ),
)
def test_adapters_over_a_quantised_base_take_three_steps_like_peft_over_the_decoded_one_bit_for_bit(
    kind: str, lora: str, name: str, activations: Any, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, kind, num_hidden_layers=4)
    targets = ["q_proj", "o_proj", "down_proj"]
    adapter = stored_adapter(plain, tmp_path / "adapter", target_modules=targets, **LORA[lora])
    train = replace(TRAIN, activations=activations)
    with opened_over(quantised, adapter, tmp_path, name, train, "fp32") as session:
        torch.manual_seed(5)
        results = run_steps(session, train, 3)
        found = {kind: read_parameters(session, kind) for kind in (Kind.WEIGHT, Kind.EXP_AVG)}

    decoded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        model = peft.PeftModel.from_pretrained(decoded, adapter, is_trainable=True).get_base_model().train()
    expected = PlainAdamW(model, train.clip)
    torch.manual_seed(5)
    for step, result in enumerate(results, 1):
        [batch] = random_groups(train, model.config.vocab_size, step)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        assert result.loss == loss.item(), f"loss of step {step}"
        assert result.grad_norm == pytest.approx(expected.step(step, 1e-2), rel=1e-14)
    weights = dict(model.named_parameters())
    trained = found[Kind.EXP_AVG].keys()
    assert trained == expected.exp_avg.keys()
    assert [name for name in trained if not torch.equal(found[Kind.WEIGHT][name], weights[name])] == []
    assert [name for name in trained if not torch.equal(found[Kind.EXP_AVG][name], expected.exp_avg[name])] == []


def trained_on(
    folder: Path, adapter: Path, mount: Path, name: str, activations: Any, **options: Any
) -> tuple[Outcome, Any]:
    """Three steps in bf16: what came out, and the adapters."""
    train = replace(TRAIN, activations=activations)
    with opened_over(folder, adapter, mount, name, train, "bf16", **options) as session:
        torch.manual_seed(5)
        before = session.store.moved_bytes.copy()
        results = run_steps(session, train, 3)
        session.player.drain()
        assert session.store.moved_bytes - before == session.player.demanded
        masters = read_parameters(session, Kind.WEIGHT)
        return outcome(session, results), {name: masters[name] for name in stored_names(session.model).values()}


@pytest.mark.parametrize("kind", [pytest.param("channel", marks=pytest.mark.slow), "nested"])
def test_adapters_over_a_quantised_base_in_bf16_have_the_bits_of_a_decoded_one_on_any_tier(
    kind: str, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, kind, num_hidden_layers=4)
    adapter = stored_adapter(plain, tmp_path / "adapter", lora_dropout=0.1)
    policies = ("keep", "recompute", "offload")
    found = {
        name: trained_on(quantised, adapter, tmp_path, name, policies[index % 3]) for index, name in enumerate(ROOMY)
    }
    assert [name for name, (result, _) in found.items() if result != found["ram"][0]] == []
    decoded, adapters = trained_on(plain, adapter, tmp_path, "ram", "keep")
    assert (decoded.losses, decoded.norms) == (found["ram"][0].losses, found["ram"][0].norms)
    assert all(torch.equal(value, found["ram"][1][name]) for name, value in adapters.items())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "compiles"),
    [*((kind, False) for kind in ("channel", "tensor", "block", "nf4", "nested")), ("channel", True), ("nested", True)],
)
def test_adapters_over_a_quantised_base_on_a_gpu_have_the_same_bits_on_any_tier(
    kind: str, compiles: bool, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, kind, num_hidden_layers=4)
    adapter = stored_adapter(plain, tmp_path / "adapter")
    options: dict[str, Any] = {"device": "cuda", "compile": compiles}
    found = [trained_on(quantised, adapter, tmp_path, name, "keep", **options)[0] for name in ROOMY]
    assert found == [found[0]] * len(ROOMY)
    if not compiles:
        # A compiled layer may round once where a decoded weight was rounded twice.
        decoded, _ = trained_on(plain, adapter, tmp_path, "ram", "keep", **options)
        assert (decoded.losses, decoded.norms) == (found[0].losses, found[0].norms)


@pytest.mark.parametrize("kind", ["channel", "nested"])
def test_step_that_is_not_finite_blames_no_unit_for_its_codes(kind: str, tmp_path: Path) -> None:
    """As bf16, bytes of codes and scales may be NaN."""
    quantised, plain = quantised_folders(tmp_path, kind, num_hidden_layers=4)
    adapter = stored_adapter(plain, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    strict = NumericsConfig(max_skips=0)
    with opened_over(quantised, adapter, tmp_path, "ram", TRAIN, "bf16", numerics=strict) as session:
        norm = session.model.get_submodule("model.norm")
        forward = norm.forward
        norm.forward = lambda x: forward(x) * math.inf
        [step] = random_groups(TRAIN, session.model.config.vocab_size, 1)
        with pytest.raises(NonFiniteError) as raised:
            session.engine.train_step(1, 1e-2, [step])
    assert "unit model.layers" not in str(raised.value)


def spoil(folder: Path, file: str, ends: str) -> None:
    """Make the first number of a stored tensor infinite, or NaN where its dtype has no infinity."""
    tensors = load_file(folder / file)
    [name] = [name for name in tensors if name.endswith(ends)]
    if tensors[name].dtype is torch.float8_e4m3fn:
        tensors[name].view(torch.uint8).view(-1)[0] = 0x7F
    else:
        tensors[name].view(-1)[0] = math.inf
    save_file(tensors, folder / file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "spoilt", "activations"),
    [
        ("channel", "weight", "recompute"),
        ("tensor", "weight_scale", "offload"),
        ("block", "weight_scale_inv", "recompute"),
        ("nf4", "weight.absmax", "offload"),
        ("nested", "weight.nested_absmax", "recompute"),
        ("channel", "lora_A.weight", "offload"),
        ("nested", "lora_B.weight", "recompute"),
    ],
)
def test_step_that_is_not_finite_names_the_unit_whose_codes_or_adapter_are_not(
    kind: str, spoilt: str, activations: Any, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, kind, num_hidden_layers=4)
    adapter = stored_adapter(plain, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    if spoilt.startswith("lora"):
        spoil(adapter, "adapter_model.safetensors", f"layers.1.self_attn.q_proj.{spoilt}")
    else:
        spoil(quantised, "model.safetensors", f"layers.1.self_attn.k_proj.{spoilt}")
    train, strict = replace(TRAIN, activations=activations), NumericsConfig(max_skips=0)
    with opened_over(quantised, adapter, tmp_path, "ram", train, "bf16", numerics=strict) as session:
        [step] = random_groups(TRAIN, session.model.config.vocab_size, 1)
        with pytest.raises(NonFiniteError, match=r"of unit model\.layers\.1 .* is not finite") as raised:
            session.engine.train_step(1, 1e-2, [step])
    assert str(raised.value).count("of unit ") == 1


def test_codes_are_read_in_shards_as_whole(tmp_path: Path) -> None:
    quantised, plain = quantised_folders(tmp_path, "nested")
    adapter = stored_adapter(plain, tmp_path / "adapter")
    model, reader = open_model(run_over(quantised, adapter, "bf16"))
    assert isinstance(reader, AdaptedWeights)
    for unit in find_units(model):
        unit = replace(unit, layout=unit.layout.padded(3))
        whole = torch.zeros(unit.layout.num_elements)
        shards = torch.zeros(unit.layout.num_elements)
        for start, values in reader.read(unit):
            whole[start : start + values.numel()] = values
        for rank in range(3):
            shard = torch.zeros(unit.layout.num_elements // 3)
            for start, values in reader.read(unit, unit.layout.shard(rank, 3)):
                shard[start : start + values.numel()] = values
            for first, last, own in unit.layout.shard_runs(rank, 3):
                shards[first:last] = shard[own : own + last - first]
        assert torch.equal(shards.view(torch.int32), whole.view(torch.int32)), unit.name


def test_quantised_base_takes_a_byte_or_half_a_byte_a_parameter(tmp_path: Path) -> None:
    sizes = {}
    for kind in ("channel", "nf4"):
        quantised, plain = quantised_folders(tmp_path / kind, kind)
        config = AutoConfig.from_pretrained(quantised)
        model, _ = open_quantised(quantised, config, "sdpa", torch.bfloat16)
        expected = AutoModelForCausalLM.from_pretrained(plain)
        units = find_units(model)
        tensors = [tensor for unit in units for tensor in unit.layout.tensors]
        assert sum(tensor.num_parameters for tensor in tensors) == expected.num_parameters()
        codes = [tensor for tensor in tensors if tensor.name.endswith(".codes")]
        sizes[kind] = 2 * sum(t.num_elements for t in codes) / sum(t.num_parameters for t in codes)
        assert not hasattr(model.config, "quantization_config")
        assert type(model.get_output_embeddings()) is torch.nn.Linear
        assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == 7 * 3
    assert sizes == {"channel": 1.0, "nf4": 0.5}


def test_run_over_a_quantised_base_exports_an_adapter_that_peft_loads_and_merges_like_the_decoded_one(
    tmp_path: Path,
) -> None:
    quantised, plain = quantised_folders(tmp_path, "block")
    runs = {}
    for folder in (quantised, plain):
        place = tmp_path / f"of_{folder.name}"
        place.mkdir()
        words = {"model.path": str(folder), "model.lora.rank": 4, "model.lora.dora": True, "train.steps": 2}
        settings = {**words, "output.checkpoint_every": 2, "tiers.gpu": "4MiB", "tiers.ram": "16MiB"}
        assert main(command(place, settings)) == 0
        assert main(["plan", str(place / "run" / "config.yaml"), "--output.directory", str(place / "other")]) == 0
        assert main(["export", str(place / "run"), str(place / "merged"), "--merge", "--dtype", "fp32"]) == 0
        runs[folder] = place
    one, other = (load_file(place / "run" / "model" / "adapter_model.safetensors") for place in runs.values())
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert not any("codes" in name for name in one)

    # The merged model is a plain one, of full precision.
    models = [AutoModelForCausalLM.from_pretrained(place / "merged", dtype=torch.float32) for place in runs.values()]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert "quantization_config" not in json.loads((runs[quantised] / "merged" / "config.json").read_text())
    decoded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that it gives up
        merged = peft.PeftModel.from_pretrained(decoded, runs[quantised] / "run" / "model").merge_and_unload()
    assert all(torch.equal(value, states[0][name]) for name, value in merged.state_dict().items())

    # A run that is resumed reads the codes again.
    for place in runs.values():
        (place / "run" / "model").rename(place / "before")
        assert main(["resume", str(place / "run"), "--train.steps", "3", "--accept-changes"]) == 0
    again, other = (load_file(place / "run" / "model" / "adapter_model.safetensors") for place in runs.values())
    assert all(torch.equal(value, other[name]) for name, value in again.items())
    assert any(not torch.equal(value, one[name]) for name, value in again.items())


def test_stream_over_a_quantised_base_has_the_losses_of_the_decoded_one(tmp_path: Path) -> None:
    quantised, plain = quantised_folders(tmp_path, "channel")
    ids = torch.arange(64).view(4, 16)
    losses: dict[Path, list[float]] = {}
    for folder in (quantised, plain):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
        tiers = TiersConfig(device="cpu", gpu=8 * MIB, ram=16 * MIB, io_threads=2, update_threads=1)
        with megatier.stream(folder, tiers=tiers, peft_config=config, lr=1e-2) as streamed:
            for _ in range(3):
                loss = streamed.model(input_ids=ids, labels=ids).loss
                loss.backward()
                streamed.optimizer.step()
                losses.setdefault(folder, []).append(loss.item())
            with torch.no_grad(), streamed.disable_adapter():
                losses[folder].append(streamed.model(input_ids=ids, labels=ids).loss.item())
            if folder == quantised:
                with pytest.raises(UnsupportedModelError, match=r"cannot be merged with its adapter.*it is quantised"):
                    streamed.weights()
    assert losses[quantised] == losses[plain]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq"),
        (float_quantised(num_bits=4, type="int"), "int of 4 bits"),
        (float_quantised(symmetric=False), "float of 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "no tensor is FP8 or NF4"),
    ],
)
def test_base_quantised_in_another_way_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, "channel")
    adapter = stored_adapter(plain, tmp_path / "adapter")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(UnsupportedModelError, match=f"{message}.*Decoded are FP8 of compressed-tensors"):
        open_model(run_over(quantised, adapter))


@pytest.mark.parametrize(
    ("kind", "name", "changed", "message"),
    [
        ("channel", "weight_scale", None, "is FP8 and has no scale"),
        ("channel", "weight_scale", torch.ones(5), "in blocks of None"),
        ("channel", "weight_scale", torch.ones(32, 1, dtype=torch.uint8), "scales of U8"),
        ("block", "weight_scale_inv", torch.ones(2, 5), r"has scales of shape \(2, 5\), in blocks of \(24, 20\)"),
        ("nf4", "weight.absmax", None, "does not fit its part absmax"),
        ("nf4", "weight.quant_map", torch.ones(8), "does not fit its part quant_map"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(4, dtype=torch.uint8), "JSON"),
        ("nested", "weight.nested_absmax", torch.ones(9), "does not fit its part nested_absmax"),
    ],
)
def test_quantised_matrix_that_lacks_or_contradicts_a_part_is_refused_by_name(
    kind: str, name: str, changed: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    quantised, plain = quantised_folders(tmp_path, kind)
    adapter = stored_adapter(plain, tmp_path / "adapter")
    path = quantised / "model.safetensors"
    stored = load_file(path)
    full = f"model.layers.1.self_attn.q_proj.{name}"
    del stored[full]
    save_file({**stored, **({} if changed is None else {full: changed})}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"layers.1.self_attn.q_proj.*{message}"):
        open_model(run_over(quantised, adapter))


def test_quantised_layer_that_is_trained_whole_is_refused_and_so_is_a_quantised_model_without_adapters(
    tmp_path: Path,
) -> None:
    quantised, _ = quantised_folders(tmp_path, "channel")
    model = ModelConfig(path=str(quantised), lora={"targets": "q_proj", "modules_to_save": "down_proj"})
    with pytest.raises(ConfigError, match=r"weight of model.layers.0.mlp.down_proj.* is quantised, so it cannot be"):
        open_model(RunConfig(model=model, data=DataConfig(files=("x",))))
    for name in ("lm_head.weight", "down_proj.codes"):
        model = ModelConfig(path=str(quantised), lora={"targets": "q_proj", "target_parameters": name})
        with pytest.raises(ConfigError, match=rf"target_parameters: .*{name} is of a quantised base|PEFT .* makes no"):
            open_model(RunConfig(model=model, data=DataConfig(files=("x",))))
    with pytest.raises(UnsupportedModelError, match=r"quantised.*Train adapters over it \(model.lora"):
        open_model(RunConfig(model=ModelConfig(path=str(quantised)), data=DataConfig(files=("x",))))
    with pytest.raises(UnsupportedModelError, match=r"quantised.*Train adapters over it \(model.lora"):
        megatier.stream(quantised)
