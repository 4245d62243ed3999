"""The vector maths library is warm before anything computes, and a warm one gives the same bits at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

from megatier import TieredAdamW
from megatier.compute import vector_math
from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.models.decoder import build_skeleton
from megatier.session.process import make_repeatable

SCRIPT = Path(__file__).parents[1] / "support" / "first_calls.py"


def num_wrong(function: str, count: int) -> int:
    """Of so many warm processes, those whose first parallel call gives other bits than their second."""
    command = [sys.executable, str(SCRIPT), function, str(count), "warm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}  # with one thread no call is parallel
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return int(done.stdout)


@pytest.mark.parametrize("function", ["cos", "exp"])
def test_first_parallel_call_in_a_warm_process_gives_the_bits_of_the_second(function: str) -> None:
    assert num_wrong(function, 60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("function", ["cos", "sin", "exp", "log", "tanh", "erf", "sqrt", "erfinv"])
def test_first_parallel_call_in_many_warm_processes_gives_the_bits_of_the_second(function: str) -> None:
    assert num_wrong(function, 1000) == 0


class TestWhoWarms:
    """Each way into megatier does, before it computes."""

    @pytest.fixture(autouse=True)
    def cold(self) -> None:
        vector_math.warm_up.cache_clear()

    def test_skeleton_when_built_has_warmed_the_library(self) -> None:
        build_skeleton(tiny_config("llama"), "sdpa")
        assert vector_math.warm_up.cache_info().currsize == 1

    def test_run_when_made_repeatable_has_warmed_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
        make_repeatable(
            RunConfig(
                model=ModelConfig(config={"model_type": "llama"}), data=DataConfig(files=("x",), tokenizer="bytes")
            )
        )
        assert vector_math.warm_up.cache_info().currsize == 1

    def test_tiered_adamw_when_made_has_warmed_the_library(self) -> None:
        with TieredAdamW([torch.nn.Parameter(torch.zeros(4))], ram="8MiB"):
            assert vector_math.warm_up.cache_info().currsize == 1
