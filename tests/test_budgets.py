"""Budgets are real: a run whose state is several times the RAM budget, watched from the operating system."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_commands import MODEL, command, metrics
from transformers import AutoConfig, AutoModelForCausalLM
from warm_python import WarmPython

from megatier.cli import main
from megatier.report import report
from megatier.report.figures import TierState
from megatier.train import description

MIB, GIB = 1 << 20, 1 << 30
SLACK_BYTES = 256 * MIB
"""What Python, torch's temporaries and the allocator may take beyond imports and budgets."""


@dataclass(frozen=True)
class Watched:
    """A run in a process of its own, in bytes."""

    imported: int
    """Resident after imports."""
    peak: int
    """Highest resident figure since the process began, as the kernel counted it."""
    state: dict[str, int]
    """By tier."""
    others: dict[str, int]
    """Slots, gradients and activations, by tier."""

    @property
    def taken(self) -> int:
        return self.peak - self.imported


def watch(python: WarmPython, folder: Path, settings: dict[str, Any]) -> Watched:
    """Train in a process of its own."""
    done = python.run([__file__, *command(folder, settings)], timeout=540)
    assert done.returncode == 0, done.stderr
    return Watched(**json.loads(done.stdout.splitlines()[-1]))


def shape(hidden: int, layers: int) -> dict[str, Any]:
    """A Llama of bytes, whose layers have 12 times hidden² parameters or so."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 8 // 3, "num_hidden_layers": layers}
    return {f"model.config.{name}": value for name, value in {**sizes, "num_key_value_heads": 4}.items()}


def num_parameters(hidden: int, layers: int) -> int:
    layer = 4 * hidden * hidden + 3 * hidden * (hidden * 8 // 3) + 2 * hidden
    return 2 * 320 * hidden + layers * layer + hidden


@pytest.mark.parametrize(
    ("clip", "share", "hidden"),
    [
        pytest.param("null", 5, 384, id="clip-off-quarter"),
        pytest.param("null", 5, 768, id="clip-off", marks=pytest.mark.slow),
        pytest.param(1.0, 3, 384, id="exact-clip-quarter", marks=pytest.mark.slow),
        pytest.param(1.0, 3, 768, id="exact-clip", marks=pytest.mark.slow),
    ],
)
def test_train_state_many_times_the_ram_budget_stays_within_it(
    clip: object, share: int, hidden: int, tmp_path: Path, python: WarmPython
) -> None:
    layers = 13
    parameters = num_parameters(hidden, layers)
    state = 12 * parameters
    assert state >= (GIB if hidden == 768 else GIB // 4)
    gpu, ram = 8 * 2 * parameters // layers, state // share
    settings = {
        **shape(hidden, layers),
        "model.compute_dtype": "bf16",
        "tiers.gpu": gpu,
        "tiers.ram": ram,
        "tiers.nvme": f"{tmp_path}:{2 * state}",
        "tiers.state": "ram,nvme",
        "tiers.update_threads": 2,
        "train.clip": clip,
        "numerics.guard": clip != "null",
        "train.batch": 1,
        "train.steps": 2,
        "train.evaluate_batches": 1,
    }
    run = watch(python, tmp_path, settings)
    # Of each weight, remainder and both moments there is one copy, padded to pages; in RAM there are, besides, one
    # gradient of each parameter where clipping needs them all, and slots.
    assert state <= sum(run.state.values()) <= state + 5 * 4096 * 4 * (layers + 3)
    assert run.state["ram"] + run.others["ram"] <= ram
    assert run.state["nvme"] > state / 2
    assert run.others["gpu"] <= gpu
    assert run.others["ram"] <= (2 * parameters if clip != "null" else 0) + ram / 2
    assert run.taken <= gpu + ram + SLACK_BYTES, f"{run.taken / MIB:.0f} MiB"


@pytest.mark.parametrize(
    ("hidden", "layers", "ram"),
    [
        pytest.param(384, 13, 14 * MIB, id="base of 23M parameters"),
        pytest.param(2304, 20, GIB, id="base of 1.3B parameters", marks=[pytest.mark.slow, pytest.mark.nvme]),
    ],
)
def test_train_adapters_over_a_base_many_times_the_ram_budget_stays_within_it(
    hidden: int, layers: int, ram: int, tmp_path: Path, python: WarmPython
) -> None:
    pytest.importorskip("peft")
    base = num_parameters(hidden, layers)
    sizes = {name.removeprefix("model.config."): value for name, value in shape(hidden, layers).items()}
    config = AutoConfig.for_model(**{**MODEL, **sizes}, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    gpu = 6 * 2 * base // layers
    settings = {
        "model.path": tmp_path / "base",
        "model.lora.rank": 4,
        "model.compute_dtype": "bf16",
        "tiers.gpu": gpu,
        "tiers.ram": ram,
        "tiers.nvme": f"{tmp_path}:{base}",  # half of the base, which is read where it lies
        "tiers.state": "nvme",
        "tiers.update_threads": 2,
        "train.batch": 1,
        "train.steps": 2,
        "train.evaluate_batches": 1,
    }
    run = watch(python, tmp_path, settings)
    assert 2 * base > 2 * ram
    assert run.state["nvme"] < base
    assert run.others["ram"] <= ram
    assert run.taken <= gpu + ram + SLACK_BYTES, f"{run.taken / MIB:.0f} MiB"

    # A base is read and never written: a step writes as much as there is beside it, and no more.
    last = [record for record in metrics(tmp_path) if "loss" in record][-1]
    assert last["moved_bytes"] == last["demanded_bytes"]
    assert 0 < last["moved_bytes"]["ram_to_nvme"] <= run.state["nvme"]
    assert last["moved_bytes"]["nvme_to_ram"] >= 2 * (2 * base)


def resident(name: str) -> int:
    """A figure of this process in bytes: VmRSS, VmHWM."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def run_watched() -> None:
    """Run the command line; what it took, as one line of JSON."""
    placement: list[TierState] = []
    show = report.print_placement

    def note(console: Any, tiers: Any, num_ranks: int) -> None:
        placement.extend(tiers)
        show(console, tiers, num_ranks)

    description.__dict__["print_placement"] = note
    imported = resident("VmRSS")
    code = main(sys.argv[1:])
    state, others = ({tier.tier: getattr(tier, name) for tier in placement} for name in ("state_bytes", "other_bytes"))
    figures = {"imported": imported, "peak": resident("VmHWM"), "state": state, "others": others}
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    run_watched()
