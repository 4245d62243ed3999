"""Runs that train adapters: their folders, as PEFT loads them, and how they go on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_commands import MODEL, after_step, command
from tiny_adapters import base_folder, peft
from tiny_runs import plain_model
from transformers import AutoModelForCausalLM, LlamaConfig

from megatier.adapters.adapter_folder import _pattern, _settings
from megatier.cli import main
from megatier.errors import ConfigError, UnsupportedModelError

RUN: dict[str, Any] = {"model.lora.rank": 4, "model.lora.dropout": 0.1, "data.tokenizer": "bytes", "train.steps": 5}
SPREAD: dict[str, Any] = {"tiers.state": "ram,nvme", "tiers.ram": "2600KiB", "tiers.gpu": "768KiB"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], bytes]:
    """What a run comes to that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(words(folder, base)) == 0
    return trained(folder / "run")


def words(folder: Path, base: Path, **settings: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    return command(folder, {"model.path": str(base), **RUN, **settings})


def test_train_with_adapters_writes_a_folder_that_peft_loads_with_the_same_logits(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    more = {"model.lora.dora": True, "model.lora.modules_to_save": "lm_head,model.norm", "model.fused_loss": False}
    assert main(words(tmp_path, base, **more)) == 0
    assert "adapter written to" in capsys.readouterr().out
    folder = tmp_path / "run" / "model"
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base.resolve())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8.0, 0.1)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    unadapted = plain(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that it gives up
        loaded = peft.PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        logits = loaded(ids).logits
    assert not torch.equal(logits, unadapted)

    # What PEFT itself would save is what is there, name by name and bit by bit.
    stored = load_file(folder / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], value) for name, value in expected.items())
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def layers_of(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}


@pytest.mark.parametrize("rslora", [False, True])
def test_settings_of_layers_whose_scale_was_changed_give_peft_the_scale_that_they_have(rslora: bool) -> None:
    given = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        target_modules=["q_proj", "down_proj"],
        # Of two that fit, PEFT takes the first one in the order of the dict, and the file is in that of the names.
        rank_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 2, "1.mlp.down_proj": 5},
        alpha_pattern={"self_attn.q_proj": 7, "1.self_attn.q_proj": 9},
    )
    model = peft.inject_adapter_in_model(given, plain_model(LlamaConfig(**MODEL)))
    layers = layers_of(model)
    layers["model.layers.0.mlp.down_proj"].scale_layer(0.3)
    layers["model.layers.1.self_attn.q_proj"].scaling["default"] = 0.7

    settings = json.loads(json.dumps(_settings(model), sort_keys=True))
    read = {key: settings[key] for key in ("r", "lora_alpha", "use_rslora", "target_modules")}
    patterns = {key: settings[key] for key in ("rank_pattern", "alpha_pattern")}
    loaded = layers_of(
        peft.inject_adapter_in_model(peft.LoraConfig(**read, **patterns), plain_model(LlamaConfig(**MODEL)))
    )
    assert {name: layer.r["default"] for name, layer in loaded.items()} == {
        name: layer.r["default"] for name, layer in layers.items()
    }
    for name, layer in loaded.items():
        assert layer.scaling["default"] == pytest.approx(layers[name].scaling["default"], rel=1e-15), name


def test_settings_of_layers_as_they_were_made_keep_the_patterns_that_were_given() -> None:
    given = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], alpha_pattern={"0.self_attn.q_proj": 7})
    settings = _settings(peft.inject_adapter_in_model(given, plain_model(LlamaConfig(**MODEL))))
    assert (settings["alpha_pattern"], settings["rank_pattern"]) == ({"0.self_attn.q_proj": 7}, {})


def test_pattern_for_layers_whose_names_end_alike_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no way to say the scales .* --merge"):
        _pattern({}, 1.0, {"a.b": 2.0, "x.a.b": 3.0, "c.x.a.b": 4.0}, "scales")
    assert _pattern({}, 1.0, {"a.b": 1.0, "x.a.b": 3.0}, "scales") == {"x.a.b": 3.0}


def test_train_with_adapters_goes_on_from_checkpoints_and_savepoints_to_the_same_bits(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: tuple[list[float], bytes]
) -> None:
    saved = ended_run(tmp_path / "checkpoint", base, **{"output.checkpoint_every": 2})
    step = saved / "checkpoints" / "step-00000002"
    names = {path.name for group in ("params", "exp_avg", "exp_avg_sq") for path in (step / group).iterdir()}
    assert not [name for name in names - {"zarr.json"} if ".lora_" not in name]
    assert main(["resume", str(saved), *(f"--{name}={value}" for name, value in SPREAD.items())]) == 0
    assert trained(saved) == whole
    again = tmp_path / "exported"
    assert main(["export", str(saved), str(again)]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (again / name).read_bytes() == (saved / "model" / name).read_bytes()

    spilling = {"tiers.state": "nvme", "tiers.gpu": "768KiB", "output.savepoint_every": 2, "tiers.generations": 3}
    kept = ended_run(tmp_path / "savepoint", base, 5, **spilling)
    assert main(["resume", str(kept)]) == 0
    assert "savepoint step-00000004: weights and moments in place" in capsys.readouterr().out
    assert trained(kept) == whole


def test_resume_and_export_refuse_another_base_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_folder(tmp_path / "base")
    run = ended_run(tmp_path / "run", base, **{"output.checkpoint_every": 2})
    weights = base / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for words in (["resume", str(run)], ["export", str(run), str(tmp_path / "exported")]):
        assert main(words) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert "began with another model or tokenizer than" in message
        assert "model.safetensors of the base was" in message
    assert main(["resume", str(run), "--accept-changes"]) == 0


@pytest.mark.parametrize("saved", ["checkpoint", "nothing", pytest.param("savepoint", marks=pytest.mark.slow)])
def test_resume_and_export_over_a_base_that_was_moved_say_which_option_names_its_place(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: tuple[list[float], bytes]
) -> None:
    base_folder(tmp_path / "base")
    spilling = {"tiers.state": "nvme", "tiers.gpu": "768KiB", "output.savepoint_every": 2, "tiers.generations": 2}
    saves: dict[str, dict[str, Any]] = {"checkpoint": {"output.checkpoint_every": 2}, "savepoint": spilling}
    run = ended_run(tmp_path / "run", tmp_path / "base", **saves.get(saved, {}))
    moved = (tmp_path / "base").rename(tmp_path / "moved")

    resumes = ["resume", str(run)]
    exports = ["export", str(run), str(tmp_path / "exported")]
    for line, option in ((resumes, "--model.path"), (exports, "--base"), ([*exports, "--merge"], "--base")):
        if saved == "checkpoint" or line is resumes:
            capsys.readouterr()
            assert main(line) == 2
            message = " ".join(capsys.readouterr().err.split())
            assert f"no such model folder: {tmp_path / 'base'}." in message
            assert message.endswith(f"If it was moved, say with {option} where it is now.")

    other = base_folder(tmp_path / "other", intermediate_size=96)
    if saved == "checkpoint":
        assert main([*exports, "--base", str(other)]) == 2
        assert "intermediate_size was 64 and is 96" in " ".join(capsys.readouterr().err.split())
        assert main([*exports, "--base", str(moved)]) == 0
        assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "--base", str(moved)]) == 0
    assert main([*resumes, "--model.path", str(other)]) == 2
    assert "intermediate_size was 64 and is 96" in " ".join(capsys.readouterr().err.split())
    assert main([*resumes, "--model.path", str(moved)]) == 0
    assert trained(run) == whole
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved.resolve())


def test_resume_over_a_base_that_is_not_on_the_hub_any_more_says_which_option_names_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_folder(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    run = ended_run(tmp_path / "run", Path("base"), **{"output.checkpoint_every": 2})
    (tmp_path / "base").rename(tmp_path / "moved")
    assert main(["resume", str(run)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "base is no local folder, and the hub could not be read" in message
    assert message.endswith("If it was moved, say with --model.path where it is now.")


def trained(run: Path) -> tuple[list[float], bytes]:
    """Losses and adapters of a whole run."""
    return metrics_losses(run), (run / "model" / "adapter_model.safetensors").read_bytes()


def ended_run(folder: Path, base: Path, step: int = 4, **settings: Any) -> Path:
    def end() -> None:
        raise ConfigError("ended by the test")

    (folder / "drive").mkdir(parents=True)
    with after_step(step, end):
        assert main(words(folder, base, **{"tiers.nvme": f"{folder / 'drive'}:64MiB", **settings})) == 2
    return folder / "run"


def metrics_losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]
