"""Whatever is wrong with the input: one message that tells the remedy, exit code 2, nothing of the user's touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_commands import MODEL, command, leftovers, metrics, write_text
from test_train_trainer import saved_model

from megatier.cli import main
from megatier.errors import ConfigError, MegatierError, PlanError

MAIN = "import sys; from megatier.cli import main; sys.exit(main(sys.argv[1:]))"
RUN_AS_MAIN = [sys.executable, "-c", MAIN]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any]], str]:
    """Runs a command that must be refused; gives its message."""

    def run(settings: dict[str, Any]) -> str:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "notes.txt").write_text("mine")
        capsys.readouterr()
        words = command(tmp_path, settings)
        before = tree(tmp_path)
        assert main(words) == 2
        message = capsys.readouterr().err
        assert re.fullmatch(r"megatier: error: .+\n", message), message
        assert "Traceback" not in message
        assert list(leftovers(tmp_path)) == []
        after = tree(tmp_path)
        assert {path: after.get(path) for path in before} == before, "something of the user's was touched"
        return message

    return run


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train.learning_rte": 0.1}, "did you mean train.learning_rate?"),
        ({"train.steps": "many"}, "train.steps is 'many'; expected int"),
        ({"tiers.ram": "12 parsecs"}, "tiers.ram"),
        ({"train.batch": 3, "train.groups": 2}, "multiple of groups"),
        ({"tiers.state": "ram,cloud"}, "tiers.state"),
        ({"data.tokenizer": None}, "data.tokenizer"),
        ({"model.config.model_type": "llamma"}, "llamma"),
        ({"model.config.num_attention_heads": 5}, "5"),
        ({"model.config.hidden_size": "wide"}, "hidden_size"),
        ({"model.config.num_hidden_layers": 0}, "layer"),
        ({"model.config.hidden_act": "none such"}, "none such"),
        ({"model.config.vocab_size": 200}, "257 tokens"),
    ],
)
def test_train_bad_setting_is_refused(
    settings: dict[str, Any], expected: str, refused: Callable[[dict[str, Any]], str]
) -> None:
    assert expected in refused(settings)


@pytest.mark.parametrize("model_type", ["t5", "bert", "vit", "mamba", "rwkv", "clip"])
def test_train_unsupported_architecture_is_refused(model_type: str, tmp_path: Path, capsys: Any) -> None:
    given = {f"model.config.{key}": None for key in MODEL} | {"model.config.model_type": model_type}
    assert main(command(tmp_path, given)) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"megatier: error: .+\n", message), message
    assert list(leftovers(tmp_path)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_train_cuda_without_a_gpu_is_refused(refused: Callable[[dict[str, Any]], str]) -> None:
    assert "torch sees no GPU" in refused({"tiers.device": "cuda"})
