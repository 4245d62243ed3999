"""`megatier init`: a config for a model, a dataset and this machine, which loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_setups import ROUND
from tiny_processors import chats, model_folder

from megatier.cli import main
from megatier.config.file import load, load_given
from megatier.hardware import device_for
from megatier.measure.probe import cache_rates


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 512}))
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "bad.txt").write_bytes("Caf\xe9".encode("cp1252"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "record", "chat", "field"),
    [
        ("a.txt", None, None, "text"),
        ("a.jsonl", {"text": "words", "id": "a longer text than that"}, None, "text"),
        ("a.jsonl", {"body": "many words", "id": "1"}, None, "body"),
        ("a.jsonl", {"messages": []}, "messages", "text"),
        ("a.json", {"instruction": "a", "output": "b"}, "alpaca", "text"),
        ("a.jsonl", {"prompt": "a", "completion": "b"}, "prompt_completion", "text"),
    ],
)
def test_init_writes_a_config_for_the_shape_of_the_data_that_loads(
    name: str, record: object, chat: str | None, field: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if record is not None:
        (folder / name).write_text(json.dumps(record))
    assert main(["init", "model", name, "--output", "run.yaml", "--nvme", ".:4MiB"]) == 0
    assert "`megatier plan run.yaml`" in capsys.readouterr().out
    made = load(Path("run.yaml"))
    assert (made.model.path, made.data.files, made.data.chat, made.data.text_field) == ("model", (name,), chat, field)
    assert (made.data.sequence_length, made.train.epochs, made.tiers.nvme) == (512, 1.0, (".:4MiB",))
    assert made.tiers.gpu is not None
    assert made.tiers.ram is not None
    assert made.output.directory == "runs/run"

    lines = [line for line in Path("run.yaml").read_text().splitlines() if line.startswith("  ")]
    assert all("  # " in line and len(line) <= 120 for line in lines)
    assert len(lines) == len(load_given(Path("run.yaml"))[1])


@pytest.mark.parametrize("first", ["messages", "text"])
def test_init_for_a_folder_of_images_reads_them(first: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    model_folder("gemma3", folder / "vision")
    chats(folder / "pictures", (0, 1) if first == "text" else (1, 0))
    (folder / "pictures" / "README.md").write_text("pictures of noise")
    assert main(["init", "vision", "pictures", "--output", "run.yaml"]) == 0
    made = load(Path("run.yaml"))
    assert (made.data.files, made.data.chat, made.data.images) == (("pictures",), "messages", True)
    assert made.data.tokenizer is None
    assert made.data.sequence_length == 128, "the tiny model was made for no more"

    # A text model has no processor, and says so at once.
    assert main(["init", "model", "pictures", "--output", "other.yaml"]) == 2
    assert "no processor of images at model" in capsys.readouterr().err


def test_init_with_lora_trains_adapters_at_a_rate_of_theirs(folder: Path) -> None:
    assert main(["init", "model", "a.txt", "--output", "run.yaml", "--lora", "8"]) == 0
    made = load(Path("run.yaml"))
    assert made.model.lora is not None
    assert (made.model.lora["rank"], made.train.learning_rate) == (8, 1e-4)


def test_init_on_a_machine_that_was_measured_leaves_choices_to_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    cache_rates(replace(ROUND, drives=()), device_for("auto"))
    assert main(["init", "model", "a.txt", "--output", "run.yaml"]) == 0
    given = load_given(Path("run.yaml"))[1]
    assert "tiers.ram" in given
    assert not {"tiers.gpu", "train.activations"} & set(given)

    # A drive that was not measured leaves nothing to choose by.
    assert main(["init", "model", "a.txt", "--output", "other.yaml", "--nvme", ".:4MiB"]) == 0
    assert {"tiers.gpu", "train.activations"} <= set(load_given(Path("other.yaml"))[1])


def test_init_takes_ids_of_the_hub_without_looking_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "org/model", "org/dataset", "--output", "run.yaml"]) == 0
    assert "org/model is no folder here, so it is taken for a model on the hub" in capsys.readouterr().out
    made = load(Path("run.yaml"))
    assert (made.model.path, made.data.dataset, made.tiers.nvme) == ("org/model", "org/dataset", ())
    assert made.data.sequence_length == 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none/at/all", "a.txt"], "no such model folder"),
        (["bare", "a.txt"], "no tokenizer at bare: the folder has no tokenizer.json"),
        (["model", "none.txt"], "none.txt matches no file or folder"),
        (["model", "a.txt", "--nvme", "none"], "none is not a directory"),
        (["model", "bad.txt"], "bad.txt: no text in UTF-8: byte 0xe9 at byte 3"),
        (["model", "a.txt,bad.txt"], "bad.txt: no text in UTF-8: byte 0xe9 at byte 3"),
    ],
)
def test_init_of_what_is_not_there_writes_nothing(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *words, "--output", "run.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "none such"}, "none such"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ],
)
def test_init_for_a_model_that_train_refuses_writes_nothing(
    settings: dict[str, Any], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(settings))
    assert main(["init", "model", "a.txt", "--output", "run.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("run.yaml").exists()


def test_init_overwrites_nothing_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("mine")
    assert main(["init", "model", "a.txt", "--output", "run.yaml"]) == 2
    assert "run.yaml exists already" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"
    assert main(["init", "model", "a.txt", "--output", "run.yaml", "--overwrite"]) == 0
    assert load(Path("run.yaml")).model.path == "model"
