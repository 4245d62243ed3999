"""Measures what it costs to keep the documents of a sequence apart, by steps of a Llama with its state on the device.

Three variants take turns with the same tokens and documents of random lengths. In the first, documents may see each
other (sdpa without a mask). In the second they are apart by sdpa with a mask. In the third they are apart by
flex_attention, whose mask goes by blocks and which needs a GPU.

python bench/bench_documents.py [--layers 4] [--batch 4] [--sequence 8192] [--document 1024] [--steps 6]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peers.shapes import SHAPES, llama_config
from record import facts, folder_of, write_row

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.session.machine import choose_device
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session

VARIANTS: dict[str, Any] = {"together": "sdpa", "apart": "sdpa", "apart_flex": "flex_attention"}
"""The attention of each variant."""
WARMUP = 3
"""Steps that are not timed."""


def batch_of(arguments: argparse.Namespace, vocabulary: int, step: int, *, apart: bool) -> dict[str, torch.Tensor]:
    """Random tokens of a step. If documents are apart, positions start anew after about `document` tokens."""
    generator = torch.Generator().manual_seed(step)
    shape = arguments.batch, arguments.sequence
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    if not apart:
        return {"input_ids": ids, "labels": ids}
    begins = torch.rand(shape, generator=generator) < 1 / arguments.document
    begins[:, 0] = True
    order = torch.arange(arguments.sequence).expand(shape)
    # A token's position is its distance from the last start before it.
    positions = order - torch.where(begins, order, 0).cummax(dim=1).values
    return {"input_ids": ids, "labels": ids.masked_fill(begins, -100), "position_ids": positions}


def measure(arguments: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Measure the seconds of each step after the warm-up, and the most memory that torch held."""
    attention = VARIANTS[variant]
    apart = variant != "together"
    config = RunConfig(
        model=ModelConfig(config={"model_type": "llama"}, attention=attention),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=arguments.sequence),
        tiers=TiersConfig(state=("gpu",), gpu=arguments.gpu << 30, ram=1 << 30),
        train=TrainConfig(batch=arguments.batch, learning_rate=1e-5),
    )
    make_repeatable(config)
    share_interpreter()
    shape = llama_config(SHAPES[arguments.shape], arguments.sequence)
    shape.num_hidden_layers = arguments.layers
    model = build_skeleton(shape, attention)
    seconds = []
    device = choose_device(config.tiers)

    with Session(model, config.model, config.tiers, config.train, NumericsConfig(), arguments.sequence) as session:
        session.store.seal()
        session.load(Initialiser(model, 0))
        for step in range(1, WARMUP + arguments.steps + 1):
            batch = batch_of(arguments, shape.vocab_size, step, apart=apart)
            # Compilation, in the first steps, takes memory that training does not.
            if device.type == "cuda" and step == WARMUP + 1:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            session.engine.train_step(step, 1e-5, [batch])
            seconds.append(time.perf_counter() - began)

        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    print(f"{variant}: {statistics.median(seconds[WARMUP:]):.3f} s a step, {(peak or 0) / 2**30:.2f} GiB", flush=True)
    return {"seconds": seconds[WARMUP:], "first_step_seconds": seconds[0], "peak_allocated_bytes": peak}


def main() -> None:
    """Measure each variant twice, in turns, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    for name, value in {"layers": 4, "batch": 4, "sequence": 8192, "document": 1024, "steps": 6, "gpu": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path, help="default: bench/results/<machine>/documents.json")
    arguments = parser.parse_args()
    variants = [name for name in VARIANTS if torch.cuda.is_available() or name != "apart_flex"]
    runs = [(name, measure(arguments, name)) for _ in range(2) for name in variants]
    found = {name: [run for other, run in runs if other == name] for name in variants}
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    known = facts()
    path = arguments.output or folder_of(known["machine"]) / "documents.json"
    write_row(known | {"settings": settings, "variants": found}, path)
    print(path)


if __name__ == "__main__":
    main()
