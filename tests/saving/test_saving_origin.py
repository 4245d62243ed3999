"""A run goes on with the model and the tokenizer that it began with, or says what is another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crossed import crossed, some
from safetensors.torch import load_file, save_file
from small_commands import after_step, all_records, command, outcome
from tiny_models import tiny_config
from tiny_runs import plain_model

from megatier.checkpoint.manifest import digest_of
from megatier.checkpoint.run_directory import last_checkpoint
from megatier.cli import main
from megatier.data.tokenizer import byte_tokenizer
from megatier.errors import DataError
from megatier.saving.origin import find_changes
from megatier.train.start import Start

STEPS = 4
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
SAVED: dict[str, dict[str, Any]] = {
    "checkpoint": {"output.checkpoint_every": 1},
    "savepoint": {
        "output.checkpoint_every": 0,
        "output.savepoint_every": 1,
        "tiers.generations": 2,
        "tiers.nvme": "{}/mount:64MiB",
    },
    "nothing": {"output.checkpoint_every": 0},
}


def fail() -> None:
    raise DataError("this is where it stops")


def stopped(folder: Path, saved: str) -> Path:
    """The directory of a run on a stream that failed in its third step; model and tokenizer lie beside it."""
    config = tiny_config("glm4_moe", vocab_size=320, num_hidden_layers=2)
    plain_model(config).save_pretrained(folder / "given")
    byte_tokenizer().save_pretrained(folder / "tokens")
    (folder / "mount").mkdir()
    (folder / "rows").mkdir()
    rows = [{"text": f"{number * 7 % 31} and {number} and so on and on and on"} for number in range(200)]
    (folder / "rows" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model.path": folder / "given",
        "data.tokenizer": folder / "tokens",
        "data.files": None,
        "data.dataset": folder / "rows",
        "data.streaming": True,
        "data.holdout_fraction": None,
        "data.holdout_rows": 9,
        "data.window_rows": 16,
        "train.steps": STEPS,
        "tiers.gpu": "32MiB",
        "tiers.ram": "64MiB",
        **{name: str(value).format(folder) for name, value in SAVED[saved].items()},
    }

    with after_step(3, fail):
        assert main(command(folder, settings)) == 2
    return folder / "run"


def change_config(folder: Path) -> None:
    path = folder / "given" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    path.write_text(json.dumps(config))


def change_buffer(folder: Path) -> None:
    path = folder / "given" / "model.safetensors"
    tensors = load_file(path)
    tensors[BIAS][0] += 1
    save_file(tensors, path, {"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    """Two letters change places: the same number of tokens, another text."""
    path = folder / "tokens" / "tokenizer.json"
    found = json.loads(path.read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["n"] = vocabulary["n"], vocabulary["a"]
    path.write_text(json.dumps(found))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config": (change_config, "config.json of the model: rope_parameters.rope_theta was 10000.0 and is 500.0"),
    "buffer": (change_buffer, f"buffer {BIAS} of the model was checksum "),
    "tokenizer": (change_tokenizer, "tokenizer.json of the tokenizer was checksum "),
}


@pytest.mark.parametrize(("saved", "change"), crossed(SAVED, CHANGES, by=3))
def test_resume_over_changed_files_is_refused_by_name_unless_accepted(
    saved: str,
    change: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("datasets")
    run = stopped(tmp_path, saved)
    folders = {name: tmp_path / name for name in ("given", "tokens")}
    for folder in folders.values():
        shutil.copytree(folder, folder.with_suffix(".before"))
    make, name = CHANGES[change]
    make(tmp_path)
    capsys.readouterr()
    assert main(["resume", str(run)]) == 2
    complaint = capsys.readouterr().err
    assert name in complaint
    assert str(tmp_path / ("tokens" if "tokenizer" in name else "given")) in complaint
    assert "--accept-changes" in complaint
    for folder in folders.values():
        shutil.rmtree(folder)
        folder.with_suffix(".before").rename(folder)
    assert main(["resume", str(run)]) == 0
    assert len(outcome(run)["losses"]) == STEPS


@pytest.mark.parametrize("changed", ["buffer", pytest.param("config", marks=pytest.mark.slow)])
def test_changed_files_that_are_accepted_are_noted_and_asked_for_no_second_time(
    changed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    change, name = CHANGES[changed]
    run = stopped(tmp_path, "checkpoint")
    change(tmp_path)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert name in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "out"), "--accept-changes"]) == 0
    with after_step(3, fail):
        assert main(["resume", str(run), "--accept-changes"]) == 2
    assert name in json.dumps([record.get("changes") for record in all_records(tmp_path)])
    assert main(["resume", str(run)]) == 0
    shutil.rmtree(run / "model")
    assert main(["export", str(run), str(tmp_path / "again")]) == 0


def test_checkpoint_of_a_version_that_noted_no_files_goes_on_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    run = stopped(tmp_path, "checkpoint")
    checkpoint = last_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    path = checkpoint / "zarr.json"
    found = json.loads(path.read_text())
    stored = found["attributes"]["megatier"]
    del stored["state"]["origin"]
    stored["digest"] = digest_of({"state": stored["state"], "manifest": stored["manifest"]})
    path.write_text(json.dumps(found))
    change_buffer(tmp_path)
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert main(["resume", str(run)]) == 0
    assert capsys.readouterr().out.count("changes of config.json, buffers or tokenizer since then are not found") == 2


def test_resume_over_files_that_say_the_same_in_other_words_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run = stopped(tmp_path, "checkpoint")
    path = tmp_path / "given" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "1.0", "_name_or_path": "elsewhere"}))
    assert main(["resume", str(run)]) == 0


@pytest.mark.parametrize("saved", some(SAVED, by=2))
def test_resume_of_a_model_that_was_moved_needs_its_weights_in_what_was_saved(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    run = stopped(tmp_path, saved)
    moved = (tmp_path / "given").rename(tmp_path / "moved")
    if saved == "checkpoint":
        assert main(["export", str(run), str(tmp_path / "out"), "--base", str(moved)]) == 0
    capsys.readouterr()
    assert main(["resume", str(run), "--model.path", str(moved)]) == (2 if saved == "nothing" else 0)
    assert ("model.path was" in capsys.readouterr().err) == (saved == "nothing")


def test_differences_name_what_was_added_and_what_is_gone() -> None:
    assert find_changes({}, {"a": "1"}) == []
    assert find_changes({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == [
        "a was 1 and is missing",
        "c was missing and is 3",
    ]


@pytest.mark.parametrize(("change", "name"), [(change_config, "config.json"), (change_tokenizer, "tokenizer.json")])
def test_run_whose_files_change_while_it_is_opened_is_refused(
    change: Callable[[Path], None],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("datasets")
    run = stopped(tmp_path, "nothing")
    capsys.readouterr()

    def changed(*given: Any) -> list[str]:
        change(tmp_path)
        return []

    # Model and tokenizer are open by then, and what they were made of was noted.
    monkeypatch.setattr(Start, "check_origin", changed)
    assert main(["resume", str(run)]) == 2
    complaint = capsys.readouterr().err
    assert f"{name} was replaced or written while it was read" in complaint
