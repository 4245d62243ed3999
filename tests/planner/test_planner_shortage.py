"""A plan that finds nothing: the refusal of the nearest candidate, and what would let it fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatier.cli import main
from megatier.errors import PlanError
from megatier.planner.shortage import find_nearest

ROOT = Path(__file__).parents[2]
MACHINE = str(ROOT / "examples/machines/h200.yaml")
MODEL = """
model:
  saved_share: 0.0
  config: {model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32,
    num_key_value_heads: 8, num_hidden_layers: 32, vocab_size: 128256, tie_word_embeddings: false}
data: {files: [python-stdlib], tokenizer: bytes, sequence_length: 1024}
train: {batch: 16}
tiers: {ram: 20GiB}
"""
"""8B, whose state takes 90 GiB."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(MODEL)
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words, "--machine", MACHINE]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_plan_that_does_not_fit_names_the_least_machine_and_narrower_state(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = config, "--tiers.gpu", "16GiB", "--tiers.nvme"
    said = refusal(capsys, *words, f"{tmp_path}:55GiB")
    found = re.search(r"It fits with ([\d.]+) GiB more NVMe, with train.moments bf16", said)
    assert found, said
    assert "with train.moments fp8" in said

    # What it says is enough, and a GiB less is not.
    enough = 55 + int(float(found[1]))
    assert main(["plan", *words, f"{tmp_path}:{enough}GiB", "--machine", MACHINE]) == 0
    assert "more NVMe" in refusal(capsys, *words, f"{tmp_path}:{enough - 1}GiB")


def test_plan_search_that_finds_nothing_refuses_with_the_nearest_candidate(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, config, "--search", "--tiers.state", "nvme", "--tiers.nvme", f"{tmp_path}:60GiB")
    assert "state on NVMe: needs" in said
    assert re.search(r"It fits with [\d.]+ GiB more NVMe", said), said


def test_nearest_refusal_is_of_a_budget_that_can_be_raised() -> None:
    gpu, ram, nvme = (PlanError(t, 10 + more, 10, "", t) for t, more in (("gpu", 1), ("ram", 5), ("nvme", 3)))
    activations = PlanError("activations", 12, 10, "")
    assert find_nearest([gpu, ram, activations, nvme]) is nvme
    assert find_nearest([activations, gpu]) is gpu
