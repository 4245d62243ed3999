"""`megatier convert`: the config that it writes, its account of the keys, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatier.cli import main
from megatier.config.file import load
from megatier.config.schema import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "convert"
MEGATRAIN = (EXAMPLES / "megatrain.yaml").read_text()
Z3_OFFLOAD = (EXAMPLES / "ds_z3_offload.json").read_text()
INFINITY = (EXAMPLES / "ds_z3_infinity.json").read_text()


def written(folder: Path, content: object) -> Path:
    """A file with text, or with JSON."""
    path = folder / "other.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def run(folder: Path, content: object, *overrides: str) -> RunConfig:
    """The config that the command writes."""
    output = folder / "run.yaml"
    assert main(["convert", str(written(folder, content)), "--output", str(output), *overrides]) == 0
    return load(output, ())


def test_convert_writes_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run(tmp_path, MEGATRAIN)
    assert (config.train.batch, config.train.learning_rate) == (128, 2e-5)
    text = capsys.readouterr().out
    assert f"{tmp_path / 'run.yaml'} is written, from MegaTrain's {tmp_path / 'other.json'}. Keys: 17 carried" in text
    assert text.endswith(f"next, `megatier plan {tmp_path / 'run.yaml'}` says whether it fits\n")
    assert len(text.splitlines()) == 9

    account = (tmp_path / "run.yaml").read_text()
    assert "# Carried over:\n#   model.name: Qwen/Qwen2.5-7B-Instruct -> model.path: Qwen" in account
    assert "# Not carried over:\n" in account


def test_convert_takes_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run(
        tmp_path, INFINITY, "--model.path=m", "--data.files", "a,b", "--tiers.ram", "3GiB", "--train.steps=9000"
    )
    assert (config.model.path, config.data.files, config.tiers.ram) == ("m", ("a", "b"), 3 << 30)
    assert (config.train.steps, config.train.groups) == (9000, 16)
    assert "still needed" not in capsys.readouterr().out
    assert "ram: 3GiB\n" in (tmp_path / "run.yaml").read_text()


def test_convert_takes_a_dataset_and_a_model_config_in_place_of_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.dataset=org/name", "--model.config.model_type=llama", "--data.tokenizer=bytes"]
    config = run(tmp_path, INFINITY, *words)
    assert (config.data.dataset, config.model.config) == ("org/name", {"model_type": "llama"})
    assert "still needed" not in capsys.readouterr().out


def test_convert_where_nothing_carries_over_writes_a_config_too(tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    assert main(["convert", str(written(tmp_path, {"zero_optimization": {"stage": 2}})), "--output", str(output)]) == 0
    assert load(output, ["--model.path=m", "--data.files=texts"]).train.batch == 8


def test_convert_says_what_is_still_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.yaml"
    assert main(["convert", str(written(tmp_path, Z3_OFFLOAD)), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "still needed, in the file or on the command line: model.path, data.files\n" in said
    assert "train.steps is at its default, 1,000: set it, or train.epochs\n" in said
    assert "# Still needed: model.path, data.files\n" in output.read_text()
    words = ["--model.config.model_type=llama", "--data.files=texts", "--data.tokenizer=bytes"]
    assert load(output, words).output.export_dtype == "bf16"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (MEGATRAIN.replace("max_grad_norm: 0.5", "max_grad_norm: -1"), "train.clip is -1.0; it must be above 0"),
        (
            {"fp16": {}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2000}}},
            "below train.steps 1000",
        ),
    ],
)
def test_convert_values_that_cannot_be_used_write_nothing(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(written(tmp_path, content)), "--output", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Settings on the command line may change that." in error
    assert not (tmp_path / "run.yaml").exists()


def test_convert_prints_differing_keys_alone_and_writes_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"train_batch_size": 8, "steps_per_print": 10, "gradient_clipping": "auto", "my\nown": "a\nb"}
    run(tmp_path, content, "--model.path=m", "--data.files=a")
    text = capsys.readouterr().out
    assert "Keys: 1 carried over, 1 left at megatier's default, 2 not carried over.\n" in text
    assert "gradient_clipping: auto - train.clip stays" in text
    assert r'"my\nown": "a\nb" - no key of DeepSpeed' in text
    assert "steps_per_print" not in text
    assert "2 others stand in the file, as comments at its end." in text

    lines = (tmp_path / "run.yaml").read_text().splitlines()
    assert {"#   steps_per_print: 10 - metrics.jsonl has every step", "#   train_batch_size: 8 -> train.batch: 8"} <= {
        *lines
    }


def test_convert_overwrites_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, MEGATRAIN)
    assert main(["convert", str(path), "--output", str(path)]) == 2
    assert "exists already. Add --overwrite to replace it, or name another --output" in capsys.readouterr().err
    assert main(["convert", str(path), "--output", str(path), "--overwrite"]) == 2
    assert "is the file that is converted. Name another --output" in capsys.readouterr().err
    assert path.read_text() == MEGATRAIN
    assert main(["convert", str(tmp_path / "none"), "--output", str(tmp_path / "run.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_convert_told_to_overwrite_replaces_the_config(tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    output.write_text("mine")
    assert main(["convert", str(written(tmp_path, MEGATRAIN)), "--output", str(output), "--overwrite"]) == 0
    assert load(output, ()).train.batch == 128


def test_convert_of_an_axolotl_config_names_the_keys_by_which_numbers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(tmp_path, (EXAMPLES / "axolotl.yaml").read_text())
    assert (config.data.chat, config.train.early_stopping_patience) == ("messages", 3)
    assert config.output.push_to_hub == "somebody/llama-1b-chats"
    said = capsys.readouterr().out
    assert "By these the numbers may differ from those of a run of Axolotl:\n" in said
    assert "  optimizer: adamw_bnb_8bit -> train.moments: bf16;" in said
    assert "  warmup" not in said


def test_convert_of_an_accelerate_config_says_what_is_still_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model.path=m", "--data.files=texts"]
    assert run(tmp_path, (EXAMPLES / "accelerate.yaml").read_text(), *words).train.clip == 0.5
    said = capsys.readouterr().out
    assert "train.steps is at its default" in said
    assert "deepspeed_config.gradient_accumulation_steps: 4 - set train.batch" in said
