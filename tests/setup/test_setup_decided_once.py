"""A run is described once: whatever machine and model decide is decided in one place, whatever door it comes in by."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_commands import command
from small_setups import ROUND
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

import megatier
from megatier import hardware
from megatier.cli import main
from megatier.config.schema import OF_LOOP, ModelConfig, TiersConfig
from megatier.drives import mounts
from megatier.measure import probe
from megatier.models import decoder, expert_units
from megatier.schedule.drive_rates import DriveRates
from megatier.setup import attention_choice, machine, setup, skeleton
from megatier.setup.workload import Workload

RAM_BYTES = 64 << 20
NO_DECISION = {"megatier.optim.gradient_sums", "megatier.drives.gds", "torch"}
"""Modules that ask for a GPU for other reasons than to choose where a run computes."""


class Decisions(Counter[str]):
    """How often each part of a run was decided: the functions below are those by which it is looked up or made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patch = patch
        self._count("device", torch.cuda, "is_available", self._chooses_device)
        self._count("device", hardware, "gpus")
        self._count("budgets", hardware, "ram_available_bytes", given=RAM_BYTES)
        self._count("free bytes of mounts", mounts, "free_bytes")
        self._count("rates", probe, "_entries")
        self._count("instructions", machine, "cpu_has_bf16")
        for module in (setup, attention_choice):
            self._count("compiles", module, "should_compile", lambda model, *_: model.compile is None)
        self._count("config of the model", skeleton, "read_model_config")
        self._count("skeleton", decoder, "initialise_buffers")
        self._count("units", expert_units, "find_units")
        self._count("workload", Workload, "of")

    def _count(
        self, what: str, owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True, *, given: Any = None
    ) -> None:
        """Count the calls of a function, or those of them that decide; give a value instead of its own."""
        function = getattr(owner, name)

        def call(*args: Any, **names: Any) -> Any:
            self[what] += counts(*args)
            return function(*args, **names) if given is None else given

        self._patch.setattr(owner, name, call)

    @staticmethod
    def _chooses_device() -> bool:
        """Whether megatier asks for a GPU, and does so to choose the device."""
        asks = sys._getframe(2).f_globals["__name__"]
        return asks.startswith("megatier") and asks not in NO_DECISION


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount whose machine was measured, so that the planner chooses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "drive"
    folder.mkdir()
    drive = DriveRates(
        directory=str(folder), read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1e9, io_threads=1
    )
    probe.cache_rates(replace(ROUND, drives=(drive,)), "cpu")
    return folder


ONCE = ("device", "budgets", "rates", "instructions", "compiles", "skeleton", "units")


def test_train_decides_each_part_of_a_run_once(
    tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"tiers.gpu": None, "tiers.ram": None, "model.compile": None, "tiers.nvme": str(drive)}
    words = command(tmp_path, {**free, "output.export": "false", "train.steps": 1})
    with monkeypatch.context() as patch:
        decisions = Decisions(patch)
        assert main(words) == 0
    assert "planned, " in capsys.readouterr().out
    assert {what: decisions[what] for what in ONCE} == dict.fromkeys(ONCE, 1)
    assert decisions["config of the model"] == 1
    # Once more before torch is loaded, to refuse a drive that is not there.
    assert decisions["free bytes of mounts"] == 2


def test_plan_decides_each_part_of_a_run_once(
    tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"tiers.gpu": None, "tiers.ram": None, "model.compile": None, "tiers.nvme": str(drive)}
    (tmp_path / "empty.yaml").write_text("train: {}")
    words = [str(tmp_path / "empty.yaml"), *command(tmp_path, free)[1:]]
    with monkeypatch.context() as patch:
        decisions = Decisions(patch)
        assert main(["plan", *words]) == 0
    assert "chosen: " in capsys.readouterr().out
    assert {what: decisions[what] for what in ONCE} == dict.fromkeys(ONCE, 1)


@pytest.mark.parametrize("is_folder", [True, False])
def test_stream_decides_each_part_of_a_run_once(
    is_folder: bool, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.save_pretrained(tmp_path / "model")
    with monkeypatch.context() as patch:
        decisions = Decisions(patch)
        with megatier.stream(
            tmp_path / "model" if is_folder else model, tiers={"device": "cpu", "nvme": [str(drive)]}
        ) as streamed:
            tokens = torch.randint(64, (1, 8))
            streamed.model(input_ids=tokens, labels=tokens).loss.backward()
            streamed.optimizer.step()
    once = [what for what in (*ONCE, "workload", "free bytes of mounts") if what != "skeleton" or is_folder]
    assert {what: decisions[what] for what in once} == dict.fromkeys(once, 1)


def test_variant_of_a_run_decides_only_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = megatier.RunConfig(
        model=ModelConfig(config=tiny_config("qwen3_moe").to_dict()),
        data=OF_LOOP,
        tiers=TiersConfig(device="cpu"),
    )
    made = setup.Setup.of(config, skeleton.skeleton_of(config.model), machine.Machine.here(config.tiers))
    with monkeypatch.context() as patch:
        decisions = Decisions(patch)
        more = made.changed({"train.groups": 2, "tiers.gpu": 1 << 20, "model.saved_share": 0.5})
        assert decisions == {"workload": 1}
        assert (more.work.policy.groups, more.budgets.gpu, more.budgets.ram) == (2, 1 << 20, made.budgets.ram)
        assert more.units is made.units
        assert len(made.changed({"model.expert_parts": 2}).units) > len(made.units)
        assert decisions["units"] == 1
        with pytest.raises(AssertionError):
            made.changed({"model.attention": "eager"})
