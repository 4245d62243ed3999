"""A frozen base on NVMe is read from the user's own files: equal bits, no copy, and nothing of it is written."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_commands import after_step, command, metrics
from tiny_adapters import base_folder
from tiny_models import tiny_config
from tiny_runs import plain_model
from transformers import AutoConfig, AutoModelForCausalLM

from megatier.adapters.in_place import InPlace, in_place, note_base_tensors
from megatier.adapters.lora import add_adapters
from megatier.cli import main
from megatier.config.lora import LoraConfig
from megatier.config.schema import TiersConfig
from megatier.drives.mounts import BLOCK_FILE
from megatier.models.decoder import build_skeleton, find_units
from megatier.models.dtypes import with_schemas
from megatier.session.session import Session

NVME: dict[str, Any] = {"tiers.state": "nvme", "tiers.gpu": "768KiB"}
SAID = "units is read from the model's own files"


def lora_run(folder: Path, base: Path, **settings: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    return command(folder, {"model.path": base, "model.lora.rank": 4, "model.compute_dtype": "bf16", **settings})


def adapter_outcome(folder: Path) -> tuple[list[float], bytes]:
    losses = [record["loss"] for record in metrics(folder) if "loss" in record]
    return losses, (folder / "run" / "model" / "adapter_model.safetensors").read_bytes()


def sharded(folder: Path) -> Path:
    """A base in several files, whose tensors begin at odd places, and none of which ends with a page."""
    model = AutoModelForCausalLM.from_pretrained(base_folder(folder / "whole"), dtype=torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="30KB")
    files = sorted((folder / "base").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size % 4096 for path in files)
    return folder / "base"


def states(base: Path) -> dict[str, tuple[int, int, bytes]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in base.glob("*.safetensors")}


def test_base_in_place_gives_the_bits_of_every_other_place_and_takes_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sharded(tmp_path)
    before = states(base)
    blocks: dict[str, int] = {}
    close = Session.close

    def closed(self: Session) -> None:
        blocks[name] = sum(path.stat().st_size for path in (tmp_path / name).rglob(BLOCK_FILE))
        close(self)

    monkeypatch.setattr(Session, "close", closed)
    places: dict[str, dict[str, Any]] = {
        "ram": {"tiers.state": "ram"},
        "copied": {**NVME, "tiers.checksums": False},
        "in place": NVME,
        "two mounts": NVME,
        "twice": {**NVME, "tiers.generations": 2},
    }
    found = {}
    for name, place in places.items():
        mounts = [tmp_path / name / mount for mount in (("one", "two") if name == "two mounts" else ("one",))]
        for mount in mounts:
            mount.mkdir(parents=True)
        nvme = ",".join(f"{mount}:4MiB" for mount in mounts)
        assert main(lora_run(tmp_path / name, base, **{"tiers.nvme": nvme, **place})) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert (SAID in said) == (name not in ("ram", "copied")), said
        assert ("copied to tiers.nvme: tiers.checksums is false" in said) == (name == "copied"), said
        found[name] = adapter_outcome(tmp_path / name)
        # At the end of the run, since a step may be recorded while the updates of it are still read ahead.
        moved = re.findall(r"│ (\w+_to_\w+) │ ([\d,]+) │ ([\d,]+) │", said)
        assert moved
        assert [queue for queue, bytes_moved, demanded in moved if bytes_moved != demanded] == [], name
    assert [name for name, result in found.items() if result != found["ram"]] == []

    # The files lie as they lay, and the block files are smaller by all of their tensors.
    assert states(base) == before
    tensors = 2 * sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(base).parameters())
    assert blocks["copied"] - blocks["in place"] >= tensors
    assert blocks["in place"] == blocks["two mounts"]


def test_budget_of_nvme_that_is_smaller_than_the_base_takes_a_base_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_folder(tmp_path / "base", vocab_size=12288, hidden_size=64)
    room = 2 << 20
    assert (base / "model.safetensors").stat().st_size > room
    place = {**NVME, "tiers.gpu": "8MiB", "tiers.ram": "16MiB", "tiers.nvme": f"{tmp_path}:{room}"}
    assert main(lora_run(tmp_path / "fits", base, **place)) == 0
    assert main(lora_run(tmp_path / "short", base, **place, **{"tiers.checksums": False})) == 2
    assert "state on NVMe: needs" in capsys.readouterr().err
    assert not list(tmp_path.rglob(BLOCK_FILE))


@pytest.mark.parametrize(("harm", "size"), [("cut", "bytes became"), ("written", "its size is the same")])
def test_file_of_the_base_that_changes_under_a_run_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str, size: str
) -> None:
    base = base_folder(tmp_path / "base")
    path = base / "model.safetensors"

    def change() -> None:
        if harm == "cut":
            os.truncate(path, path.stat().st_size // 2)
            return
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(bytes(4096))

    with after_step(2, change):
        assert main(lora_run(tmp_path / "run", base, **NVME, **{"tiers.nvme": tmp_path, "train.steps": 6})) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{path} was written while this run reads the frozen weights" in said
    assert size in said


class Stopped(BaseException):
    """Ends a run in the midst of it."""


def test_run_with_savepoints_over_a_base_in_place_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_folder(tmp_path / "base")
    settings = {**NVME, "tiers.nvme": tmp_path, "tiers.generations": 2, "output.savepoint_every": 1, "train.steps": 4}
    assert main(lora_run(tmp_path / "whole", base, **settings)) == 0

    def stop() -> None:
        raise Stopped

    with after_step(3, stop), pytest.raises(Stopped):
        main(lora_run(tmp_path / "stopped", base, **settings))
    assert main(["resume", str(tmp_path / "stopped" / "run")]) == 0
    assert "savepoint step-00000002: weights and moments in place" in " ".join(capsys.readouterr().out.split())
    assert adapter_outcome(tmp_path / "stopped")[1] == adapter_outcome(tmp_path / "whole")[1]


def chosen(folder: Path, dtype: str = "bf16", ranks: int = 1, **tiers: Any) -> InPlace:
    """What is read in place of a base in a folder."""
    model = build_skeleton(AutoConfig.from_pretrained(folder), "sdpa")
    note_base_tensors(model, folder)
    add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "v_proj")), "base")
    units = with_schemas(model, find_units(model), dtype)
    return in_place(model, units, replace(TiersConfig(nvme=(str(folder),)), **tiers), ranks)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "fp32"}, "is BF16 in its file and F32 in the run"),
        ({"ranks": 2}, "several ranks have shards of it"),
        ({"gpu_direct": True}, "tiers.gpu_direct reads block files alone"),
        ({"checksums": False}, "tiers.checksums is false"),
        ({"nvme": ("/proc",)}, "on different file systems"),
        ({"nvme": ("/no/such/mount",)}, "on different file systems"),
    ],
)
def test_base_that_a_run_cannot_read_in_place_is_copied_and_says_why(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    base = base_folder(tmp_path / "base")
    found = chosen(base, **options)
    assert not found.parts
    assert why in found.why_not
    assert chosen(base).why_not == ""


def test_unit_whose_tensors_are_put_together_from_short_pieces_is_copied_alone(tmp_path: Path) -> None:
    plain_model(tiny_config("mixtral")).bfloat16().save_pretrained(tmp_path)
    found = chosen(tmp_path)
    assert "is put together from short pieces of its file" in found.why_not
    assert found.parts
