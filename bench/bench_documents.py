"""Measures what it costs to keep the documents of a sequence apart, by steps of a Llama with its state on the device.

The variants take turns with the same tokens and documents of random lengths. In two of them documents may see each
other, by sdpa without a mask and by flex_attention. In the other two they are apart, by sdpa with a mask and by
flex_attention, whose mask goes by blocks. Flex attention needs a GPU. With several sequence lengths the tokens of a
step stay the same.

python bench/bench_documents.py [--layers 4] [--tokens 32768] [--sequences 8192] [--document 1024] [--steps 6]
    [--variants together apart together_flex apart_flex]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from peers.shapes import SHAPES, model_config
from record import facts, folder_of, write_row

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.session.process import make_repeatable, share_interpreter
from megatier.session.session import Session
from megatier.setup.setup import Setup

FLEX: Any = "flex_attention"
VARIANTS: dict[str, Any] = {"together": "sdpa", "apart": "sdpa", "together_flex": FLEX, "apart_flex": FLEX}
"""The attention of each variant."""
DEFAULTS = {"layers": 4, "tokens": 32768, "document": 1024, "warmup": 3, "steps": 6, "turns": 2, "gpu": 30}
"""Whole numbers among the arguments. Steps of the warm-up are not timed; `gpu` is in GiB."""


def batch_of(
    arguments: argparse.Namespace, sequence: int, vocabulary: int, step: int, *, apart: bool
) -> dict[str, torch.Tensor]:
    """Random tokens of a step. If documents are apart, positions start anew after about `document` tokens."""
    generator = torch.Generator().manual_seed(step)
    shape = arguments.tokens // sequence, sequence
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    if not apart:
        return {"input_ids": ids, "labels": ids}
    begins = torch.rand(shape, generator=generator) < 1 / arguments.document
    begins[:, 0] = True
    order = torch.arange(sequence).expand(shape)
    # A token's position is its distance from the last start before it.
    positions = order - torch.where(begins, order, 0).cummax(dim=1).values
    return {"input_ids": ids, "labels": ids.masked_fill(begins, -100), "position_ids": positions}


def measure(arguments: argparse.Namespace, sequence: int, variant: str) -> dict[str, Any]:
    """Measure the seconds of each step after the warm-up, and the most memory that torch held."""
    attention = VARIANTS[variant]
    apart = variant.startswith("apart")
    config = RunConfig(
        model=ModelConfig(config={"model_type": "llama"}, attention=attention),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=sequence),
        tiers=TiersConfig(state=("gpu",), gpu=arguments.gpu << 30, ram=1 << 30),
        train=TrainConfig(batch=arguments.tokens // sequence, learning_rate=1e-5),
    )
    make_repeatable(config)
    share_interpreter()
    shape = model_config(SHAPES[arguments.shape], sequence)
    shape.num_hidden_layers = arguments.layers
    model = build_skeleton(shape, attention)
    seconds = []
    setup = Setup.here(config, model)
    device = setup.machine.device

    with Session(setup) as session:
        session.seal()
        session.load(Initialiser(model, 0))
        for step in range(1, arguments.warmup + arguments.steps + 1):
            batch = batch_of(arguments, sequence, shape.vocab_size, step, apart=apart)
            # Compilation, in the first steps, takes memory that training does not.
            if device.type == "cuda" and step == arguments.warmup + 1:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            session.engine.train_step(step, 1e-5, [batch])
            seconds.append(time.perf_counter() - began)

        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    timed = seconds[arguments.warmup :]
    of_step = f"{statistics.median(timed):.3f} s a step, {(peak or 0) / 2**30:.2f} GiB"
    print(f"{sequence:,} tokens, {variant}: {of_step}", flush=True)
    return {"seconds": timed, "first_step_seconds": seconds[0], "peak_allocated_bytes": peak}


def main() -> None:
    """Measure each variant in turns, at one length after the other, and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8192])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path, help="default: bench/results/<machine>/documents.json")
    arguments = parser.parse_args()

    variants = [name for name in arguments.variants if torch.cuda.is_available() or VARIANTS[name] != FLEX]
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    known = facts()
    path = arguments.output or folder_of(known["machine"]) / "documents.json"
    found: dict[str, dict[str, Any]] = {}
    for sequence in arguments.sequences:
        runs = [(name, measure(arguments, sequence, name)) for _ in range(arguments.turns) for name in variants]
        found[str(sequence)] = {name: [run for other, run in runs if other == name] for name in variants}
        write_row(known | {"settings": settings, "sequences": found}, path)
    print(path)


if __name__ == "__main__":
    main()
