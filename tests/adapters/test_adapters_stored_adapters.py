"""Adapters that are there already: runs go on with them, and refuse those that do not fit."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_commands import command
from tiny_adapters import base_folder, peft, stored_adapter

import megatier
from megatier.adapters.base import check_base, identity_of
from megatier.adapters.stored_adapters import noted_base, read_settings
from megatier.cli import main
from megatier.config.lora import LoraConfig
from megatier.config.schema import TiersConfig
from megatier.errors import ConfigError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


def words(folder: Path, base: Path, adapter: Path, **settings: Any) -> list[str]:
    given = {"model.path": str(base), "model.lora.adapter": str(adapter), "train.steps": 1, **settings}
    return command(folder, given)


def test_train_goes_on_with_an_adapter_of_peft(base: Path, tmp_path: Path) -> None:
    """Without a learning rate what is written is what was read, bit by bit, with all that its config says."""
    given = stored_adapter(
        base,
        tmp_path / "given",
        use_dora=True,
        use_rslora=True,
        lora_dropout=0.25,
        rank_pattern={"down_proj": 2},
        alpha_pattern={"down_proj": 5},
        target_modules=r"model\.layers\.[02]\..*_proj",
        exclude_modules=["k_proj"],
        modules_to_save=["lm_head"],
    )
    assert main(words(tmp_path, base, given, **{"train.learning_rate": 0, "model.fused_loss": False})) == 0
    written = tmp_path / "run" / "model"
    before, after = load_file(given / WEIGHTS), load_file(written / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert read_settings(written) == read_settings(given)


def test_train_goes_on_with_its_own_adapter_which_names_its_base(base: Path, tmp_path: Path) -> None:
    first = {"model.path": str(base), "model.lora.rank": 4, "train.steps": 2}
    assert main(command(tmp_path, {**first, "output.directory": str(tmp_path / "first")})) == 0
    adapter = tmp_path / "first" / "model"
    assert noted_base(adapter) == identity_of(base)
    assert main(words(tmp_path, base, adapter)) == 0
    assert read_settings(tmp_path / "run" / "model") == read_settings(adapter)
    assert not torch.equal(
        *(next(iter(load_file(folder / WEIGHTS).values())) for folder in (adapter, tmp_path / "run/model"))
    )


@pytest.mark.parametrize("noted", ["{oops", "[1]", "org/model", '{"a": "1", "a": "2"}', ""])
def test_adapter_whose_note_of_a_base_is_another_programs_names_none(noted: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / WEIGHTS, metadata={"format": "pt", "base": noted})
    assert noted_base(tmp_path) is None


def other_base(given: Path, base: Path) -> None:
    tensors = load_file(given / WEIGHTS)
    noted = dict.fromkeys(identity_of(base), "1 byte, checksum 00")
    save_file(tensors, given / WEIGHTS, metadata={"format": "pt", "base": json.dumps(noted)})


def other_shape(given: Path, base: Path) -> None:
    tensors = load_file(given / WEIGHTS)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3, 3)}, given / WEIGHTS)


def missing(given: Path, base: Path) -> None:
    tensors = load_file(given / WEIGHTS)
    del tensors[next(iter(tensors))]
    save_file(tensors, given / WEIGHTS)


def with_base_weights(given: Path, base: Path) -> None:
    """As PEFT saves adapters of embeddings by default."""
    tensors = load_file(given / WEIGHTS)
    save_file({**tensors, "base_model.model.embed.base_layer.weight": torch.zeros(3)}, given / WEIGHTS)


def superfluous(given: Path, base: Path) -> None:
    save_file({**load_file(given / WEIGHTS), "a.layer": torch.zeros(1)}, given / WEIGHTS)


def integers(given: Path, base: Path) -> None:
    save_file({name: value.to(torch.int8) for name, value in load_file(given / WEIGHTS).items()}, given / WEIGHTS)


def without_weights(given: Path, base: Path) -> None:
    (given / WEIGHTS).unlink()


def without_config(given: Path, base: Path) -> None:
    (given / CONFIG).unlink()


def setting(key: str, value: object) -> Any:
    def change(given: Path, base: Path) -> None:
        settings = json.loads((given / CONFIG).read_text())
        (given / CONFIG).write_text(json.dumps({**settings, key: value}))

    return change


REFUSED: dict[str, tuple[Any, str]] = {
    "other base": (other_base, "was trained over another base than .*: model.safetensors was 1 byte"),
    "other shape": (other_shape, r"has shape \(3, 3\); this base asks for .* adapter for another base\?"),
    "missing": (missing, "lacks base_model.model.* such adapters of LlamaForCausalLM"),
    "weights of the base": (with_base_weights, "base_layer.weight. Load it .*save_embedding_layers=False"),
    "superfluous": (superfluous, "holds a.layer, which is no part of such adapters"),
    "integers": (integers, "is I8; adapters are read in F32, BF16, F16"),
    "no weights": (without_weights, f"has no {WEIGHTS}"),
    "no config": (without_config, f"has no {CONFIG}"),
    "kind": (setting("peft_type", "IA3"), "is of the kind IA3; LORA alone is trained here"),
    "biases": (setting("bias", "all"), "sets bias to all, and such adapters are not trained here"),
    "parameters": (
        setting("target_parameters", ["experts.down_proj"]),
        "target_parameters: 'experts.down_proj' names no parameter of LlamaForCausalLM, which has no stacked ones",
    ),
    "first values": (setting("init_lora_weights", "pissa"), "sets init_lora_weights to pissa"),
    "unknown": (setting("a_new_way", True), "sets a_new_way to True"),
    "targets": (setting("target_modules", ["qq_proj"]), "PEFT .* makes no such adapters: Target modules"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses_an_adapter_that_does_not_fit(
    case: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, message = REFUSED[case]
    given = stored_adapter(base, tmp_path / "given")
    harm(given, base)
    assert main(words(tmp_path, base, given)) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "model.lora" in error
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(error)


def test_train_and_stream_refuse_a_model_with_adapters_beside_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = shutil.copytree(base, tmp_path / "both")
    stored_adapter(base, both)
    said = "holds adapters beside the model (adapter_config.json), which from_pretrained would put into it"
    for settings in ({}, {"model.lora.rank": 4}):
        assert main(command(tmp_path, {"model.path": str(both), **settings})) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    for options in ({}, {"peft_config": peft.LoraConfig(target_modules=["q_proj"])}):
        with pytest.raises(ConfigError, match="holds adapters beside the model"):
            megatier.stream(both, tiers=TiersConfig(gpu=8 << 20, ram=64 << 20), **options)
    assert main(words(tmp_path, both, both)) == 0


def test_train_refuses_an_adapter_whose_named_base_has_other_weights(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = stored_adapter(base, tmp_path / "given")
    other = shutil.copytree(base, tmp_path / "other")
    weights = {name: value + 1 for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    setting("base_model_name_or_path", str(base))(given, base)
    assert main(words(tmp_path, other, given)) == 2
    assert f"is for {base}, whose weights are others than those of {other}" in capsys.readouterr().err


def test_check_base_that_is_stored_in_other_numbers_warns_that_nothing_is_compared(base: Path, tmp_path: Path) -> None:
    given = stored_adapter(base, tmp_path / "given")
    other = shutil.copytree(base, tmp_path / "other")
    weights = {name: value.float() for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    setting("base_model_name_or_path", str(base))(given, base)
    with pytest.warns(UserWarning, match="stores its weights in other numbers"):
        check_base(given, other, identity_of(other), str(other))


@pytest.mark.parametrize(("named", "is_told"), [("/gone/llama", True), ("org/llama", True), ("/gone/base", False)])
def test_check_base_of_an_adapter_whose_base_is_not_here_warns_unless_the_names_agree(
    named: str, is_told: bool, base: Path, tmp_path: Path
) -> None:
    given = stored_adapter(base, tmp_path / "given")
    moved = shutil.copytree(base, tmp_path / "base")
    setting("base_model_name_or_path", named)(given, base)
    told = pytest.warns(UserWarning, match="not here to be compared") if is_told else contextlib.nullcontext()
    with told:
        check_base(given, moved, identity_of(moved), str(moved))


def test_train_with_adapters_as_its_model_says_what_they_are(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = stored_adapter(base, tmp_path / "given")
    assert main(command(tmp_path, {"model.path": str(given)})) == 2
    assert "set model.path to their base and model.lora.adapter to this folder" in capsys.readouterr().err


def test_lora_with_an_adapter_takes_no_other_setting() -> None:
    assert LoraConfig(adapter="a").targets == LoraConfig().targets
    with pytest.raises(ConfigError, match=r"model\.lora\.adapter brings its own settings: leave out model\.lora\.rank"):
        LoraConfig(adapter="a", rank=4)
