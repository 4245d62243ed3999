"""One sequence whose activations are ten times `tiers.ram`, watched from the operating system."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_config
from tiny_runs import MIB, Place, opened, outcome
from warm_python import WarmPython

from megatier.config.schema import TrainConfig
from megatier.tier import Tier

TOKENS, HIDDEN, LAYERS = 1024, 512, 40
ACTIVATION_BYTES = LAYERS * TOKENS * HIDDEN * 4
"""The inputs of all layers, in fp32: 80 MiB."""
PLACES = {
    "nvme": ("offload", Place(tiers=("gpu",), gpu=64 * MIB, activations=3)),
    "recompute": ("recompute", Place(tiers=("gpu",), gpu=64 * MIB)),
}


def watch(names: list[str], mount: Path, python: WarmPython) -> dict[str, dict[str, Any]]:
    """Train in a process of its own, whose allocator gives memory back as soon as a tensor is freed."""
    done = python.run([__file__, mount, *names])
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def status(name: str) -> int:
    """A figure of this process that the kernel keeps, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def train(name: str, mount: Path) -> dict[str, Any]:
    """One step."""
    activations, place = PLACES[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": LAYERS}
    config = tiny_config("llama", **sizes, num_attention_heads=2, num_key_value_heads=1)
    settings = TrainConfig(steps=1, batch=1, activations=activations, kept_attention=False)  # type: ignore[arg-type]
    with opened(config, mount, place, settings, tokens=TOKENS, compute_dtype="fp32", fused_loss=True) as session:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        results = [session.engine.train_step(1, 1e-2, [{"input_ids": ids, "labels": ids}])]
        grown = status("VmHWM") - before
        homes = [str(home) for home in session.placement.activation_homes.values()]
        ram = session.store.usage(Tier.RAM)["budget"]
        return {"grown": grown, "homes": homes, "ram": ram, "outcome": astuple(outcome(session, results))}


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Settings of the allocator, as malloc.h numbers them."""


if __name__ == "__main__":
    for setting in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        assert ctypes.CDLL(None).mallopt(setting, 65536)
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({name: train(name, Path(sys.argv[1])) for name in sys.argv[2:]}) + "\n")
