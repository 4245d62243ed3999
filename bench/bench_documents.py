"""What keeping the documents of a sequence apart costs: whole steps of a Llama whose state lies on the device.

Side by side, in turns: documents that may see each other (sdpa, without a mask), and documents apart by sdpa (a mask)
and by flex_attention (a mask by blocks; needs a GPU). The same tokens; documents of random lengths.

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
WARMUP = 3


def batch_of(arguments: argparse.Namespace, vocabulary: int, step: int, *, apart: bool) -> dict[str, torch.Tensor]:
    """Random tokens; where documents are apart, positions that start anew after about as many as asked for."""
    generator = torch.Generator().manual_seed(step)
    shape = arguments.batch, arguments.sequence
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    if not apart:
        return {"input_ids": ids, "labels": ids}
    begins = torch.rand(shape, generator=generator) < 1 / arguments.document
    begins[:, 0] = True
    order = torch.arange(arguments.sequence).expand(shape)
    positions = order - torch.where(begins, order, 0).cummax(dim=1).values
    return {"input_ids": ids, "labels": ids.masked_fill(begins, -100), "position_ids": positions}


def measure(arguments: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Seconds of each step after warming up, and the most memory that torch held."""
    attention, apart = VARIANTS[variant], variant != "together"
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
    model, seconds = build_skeleton(shape, attention), []
    device = choose_device(config.tiers)
    with Session(model, config.model, config.tiers, config.train, NumericsConfig(), arguments.sequence) as session:
        session.store.seal()
        session.load(Initialiser(model, 0))
        for step in range(1, WARMUP + arguments.steps + 1):
            batch = batch_of(arguments, shape.vocab_size, step, apart=apart)
            if device.type == "cuda" and step == WARMUP + 1:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            session.engine.train_step(step, 1e-5, [batch])
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    print(f"{variant}: {statistics.median(seconds[WARMUP:]):.3f} s a step, {(peak or 0) / 2**30:.2f} GiB", flush=True)
    return {"seconds": seconds[WARMUP:], "first_step_seconds": seconds[0], "peak_allocated_bytes": peak}


def main() -> None:
    """Each variant twice, in turns."""
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
