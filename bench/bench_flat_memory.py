"""Looks at GPU memory over many steps of a streamed loop whose batches all have another length, with OOMs on the way.

Each batch has rows of one length (16 to 2,048) and about as many tokens. Now and then a batch comes that is far too
large: the GPU runs out of memory in the middle of it, the loop catches the error, drops the step, and goes on.

python bench/bench_flat_memory.py [--steps 2000]     writes bench/results/<machine>/flat_memory.json
python bench/bench_flat_memory.py --tiny             a tiny model on a CPU, where memory does not run out

Results: what tensors take, what torch has reserved, and what the driver says is in use, at the end of every 50th step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from peers.shapes import SHAPES, model_config, peak_gpu_bytes
from record import facts, folder_of
from transformers import AutoModelForCausalLM

import megatier
from megatier.compute.compile_clock import CLOCK

LONGEST = 2048
LOOK = 50
"""Steps between two looks at memory."""
OOM = 200
"""Steps between two batches that are too large."""
WARMUP = 100
"""Steps after which memory is compared. Two batches were too large by then, if the first of them counts."""


def sizes_of(steps: int, tokens: int) -> list[tuple[int, int]]:
    """Rows and length of the batch of each step."""
    draw = random.Random(0)
    lengths = [draw.randrange(16, LONGEST + 1) for _ in range(steps)]
    return [(max(1, tokens // length), length) for length in lengths]


def used_bytes() -> dict[str, int]:
    """What of the GPU is in use, once its work is done."""
    if not torch.cuda.is_available():
        return {"resident_set": psutil.Process().memory_info().rss}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "driver": total - free,
        "resident_set": psutil.Process().memory_info().rss,
    }


def measure(shape: str, steps: int, tokens: int, tiers: dict[str, Any]) -> dict[str, Any]:
    """Train for so many steps, and note memory and seconds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(SHAPES[shape], LONGEST), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"seconds": [], "losses": [], "memory": [], "caught_at": [], "compile_seconds": []}
    with megatier.stream(model, tiers=tiers, lr=1e-5) as streamed:
        del model
        streamed.model.train()

        def learn(rows: int, length: int) -> float:
            ids = torch.randint(0, SHAPES[shape].vocab, (rows, length), generator=generator).to(streamed.device)
            loss = streamed.model(input_ids=ids, labels=ids).loss
            loss.backward()
            streamed.optimizer.step()
            streamed.optimizer.zero_grad()
            value: float = loss.item()
            return value

        for step, (rows, length) in enumerate(sizes_of(steps, tokens)):
            if step % OOM == OOM // 4 and torch.cuda.is_available():
                with contextlib.suppress(torch.OutOfMemoryError):
                    learn(512, LONGEST)
                    raise SystemExit("A batch that should be too large was not.")
                streamed.abandon()
                found["caught_at"].append(step)
            began, compiled = time.perf_counter(), CLOCK.seconds
            found["losses"].append(learn(rows, length))
            found["seconds"].append(time.perf_counter() - began)
            found["compile_seconds"].append(CLOCK.seconds - compiled)
            if step % LOOK == LOOK - 1:
                found["memory"].append({"step": step + 1} | used_bytes())
                print(found["memory"][-1], f"{median(found['seconds'][-LOOK:]):.3f} s", flush=True)
    return found


def growth(memory: list[dict[str, int]]) -> dict[str, int]:
    """How much more each kind of memory is at most after the warm-up than at its end."""
    settled = [look for look in memory if look["step"] >= WARMUP]
    return {kind: max(look[kind] for look in settled) - settled[0][kind] for kind in settled[0] if kind != "step"}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="GPU memory of a loop with batches of any length and OOMs.")
    parser.add_argument("--steps", type=int, default=2000, help="steps (2000)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step, about (2048)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, help="the file of results")
    options = parser.parse_args()

    shape = "tiny" if options.tiny else "1b"
    tiers = {"gpu": "16MiB", "ram": "64MiB"} if options.tiny else {"gpu": "30GiB", "ram": "16GiB"}
    found = facts() | {"shape": shape, "tokens": options.tokens}
    found |= measure(shape, options.steps, options.tokens, tiers)
    found |= {"growth": growth(found["memory"]), "peak_gpu_bytes": peak_gpu_bytes()}
    output = options.output or folder_of(found["machine"]) / "flat_memory.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{len(found['caught_at'])} OOMs caught; growth after {WARMUP} steps: {found['growth']}")


if __name__ == "__main__":
    main()
