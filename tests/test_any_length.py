"""Loops with batches of any length on a GPU: a batch has the same bits whichever came before, wherever weights lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatier

SCRIPT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import megatier

options, shapes, output = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
before, after = options.pop("before", None), options.pop("after", None)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=2112)
heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
found = {}
with megatier.stream(model, **{"lr": 0.0, "weight_decay": 0.0, **options}) as streamed:
    if before is not None:
        streamed.restore(before)
    for rows, length in shapes:
        ids = torch.randint(0, 2112, (rows, length), generator=torch.Generator().manual_seed(rows * 9999 + length))
        ids = ids.to(streamed.device)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        for masked in ({}, {"attention_mask": mask}):
            loss = streamed.model(input_ids=ids, labels=ids, **masked).loss
            loss.backward()
            norm = streamed.grad_norm()
            streamed.optimizer.step()
            found[f"{rows} x {length}, {len(masked)} masks"] = [loss.item().hex(), float(norm).hex()]
    if after is not None:
        streamed.save(after)
json.dump(found, open(output, "w"))
"""
SHAPES = [(3, 129), (16, 1024), (4, 777), (2, 4096), (1, 1024), (1, 777), (16, 16), (64, 64), (7, 1023), (2, 1)]
ON_GPU: dict[str, Any] = {"tiers": {"gpu": "512MiB", "ram": "1GiB"}}
IN_RAM: dict[str, Any] = {"tiers": {"gpu": "64MiB", "ram": "1GiB"}, "activations": "recompute"}


def start(options: dict[str, Any], shapes: list[tuple[int, int]], output: Path) -> subprocess.Popen[bytes]:
    """Begin a process that has nothing of what another one compiled."""
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_CACHE_DIR": str(output.with_suffix(".code")),
    }
    command = [sys.executable, "-W", "error:.*uncompiled", "-c", SCRIPT]
    return subprocess.Popen([*command, json.dumps(options), json.dumps(shapes), str(output)], env=environment)


def wait(*processes: subprocess.Popen[bytes]) -> None:
    assert [process.wait(timeout=300) for process in processes] == [0] * len(processes)


@pytest.mark.gpu
def test_batch_of_any_length_has_the_same_bits_whichever_came_before_and_wherever_weights_lie(tmp_path: Path) -> None:
    runs = {
        "first": (ON_GPU, SHAPES),
        "backwards": (ON_GPU, SHAPES[::-1]),
        "in the middle": (IN_RAM, SHAPES[5:] + SHAPES[:5]),
        "in RAM": (IN_RAM, SHAPES[::-1]),
    }
    # All at once, since to compile takes one core.
    wait(*(start(options, shapes, tmp_path / name) for name, (options, shapes) in runs.items()))

    found = {name: json.loads((tmp_path / name).read_text()) for name in runs}
    assert len(found["first"]) == 2 * len(SHAPES)
    for name in runs:
        assert found[name] == found["first"], name


@pytest.mark.gpu
def test_loop_over_any_lengths_goes_on_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    options = IN_RAM | {"lr": 1e-3}
    saved = str(tmp_path / "saved")
    whole = start(options, SHAPES, tmp_path / "whole")
    wait(start(options | {"after": saved}, SHAPES[:4], tmp_path / "first part"))
    wait(start(options | {"before": saved}, SHAPES[4:], tmp_path / "second part"), whole)

    parts = [json.loads((tmp_path / name).read_text()) for name in ("first part", "second part")]
    assert json.loads((tmp_path / "whole").read_text()) == parts[0] | parts[1]


@pytest.mark.gpu
def test_layer_of_a_loop_takes_no_kernel_of_attention_that_plans_for_each_size() -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    seen: list[bool] = []
    options: dict[str, Any] = {"activations": "recompute", "compile": False, "fused_loss": False}
    with megatier.stream(model, tiers=ON_GPU["tiers"], **options) as streamed:
        streamed.model.get_submodule("model.layers.1.self_attn").register_forward_pre_hook(
            lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        )
        ids = torch.randint(320, (2, 77), device=streamed.device)
        with pytest.warns(UserWarning, match="so do the hooks inside of"):
            streamed.model(input_ids=ids, labels=ids).loss.backward()
        streamed.optimizer.step()
        with torch.no_grad():
            streamed.model(input_ids=ids)
    assert seen == [False] * 3  # forward, the same again in the backward, evaluation
    assert torch.backends.cuda.cudnn_sdp_enabled()
