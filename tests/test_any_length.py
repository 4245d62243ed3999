"""Loops with batches of any length on a GPU: a batch has the same bits whichever came before, wherever weights lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import megatier

options, shapes, output = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=2112)
heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
found = {}
with megatier.stream(model, lr=0.0, weight_decay=0.0, **options) as streamed:
    for rows, length in shapes:
        ids = torch.randint(0, 2112, (rows, length), generator=torch.Generator().manual_seed(rows * 9999 + length))
        ids = ids.cuda()
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        for masked in ({}, {"attention_mask": mask}):
            loss = streamed.model(input_ids=ids, labels=ids, **masked).loss
            loss.backward()
            norm = streamed.grad_norm()
            streamed.optimizer.step()
            found[f"{rows} x {length}, {len(masked)} masks"] = [loss.item().hex(), float(norm).hex()]
json.dump(found, open(output, "w"))
"""
SHAPES = [(3, 129), (16, 1024), (4, 777), (2, 4096), (1, 1024), (1, 777), (16, 16), (64, 64), (7, 1023), (2, 1)]
ON_GPU: dict[str, Any] = {"tiers": {"gpu": "512MiB", "ram": "1GiB"}}
IN_RAM: dict[str, Any] = {"tiers": {"gpu": "64MiB", "ram": "1GiB"}, "activations": "recompute"}


@pytest.mark.gpu
def test_batch_of_any_length_has_the_same_bits_whichever_came_before_and_wherever_weights_lie(tmp_path: Path) -> None:
    runs = {
        "first": (ON_GPU, SHAPES),
        "backwards": (ON_GPU, SHAPES[::-1]),
        "in the middle": (IN_RAM, SHAPES[5:] + SHAPES[:5]),
        "in RAM": (IN_RAM, SHAPES[::-1]),
    }
    # Each has nothing that another one compiled. All at once, since to compile takes one core.
    processes = []
    for name, (options, shapes) in runs.items():
        environment = os.environ | {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"{name} code"),
        }
        command = [sys.executable, "-W", "error:.*uncompiled", "-c", SCRIPT]
        arguments = [json.dumps(options), json.dumps(shapes), str(tmp_path / name)]
        processes.append(subprocess.Popen([*command, *arguments], env=environment))
    assert [process.wait(timeout=300) for process in processes] == [0] * len(runs)

    found = {name: json.loads((tmp_path / name).read_text()) for name in runs}
    assert len(found["first"]) == 2 * len(SHAPES)
    for name in runs:
        assert found[name] == found["first"], name
