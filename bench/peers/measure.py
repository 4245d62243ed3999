"""The parts that the scripts of all peers share: options, random tokens, the clock, and the row that they write."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import Row, default_output, failed_row, row, write_row

from peers.shapes import SHAPES, TFLOPS_FORMULA, peak_gpu_bytes, peak_ram_bytes, trained_shape

# The settings of AdamW, which are the same for every peer.
CLIP = 1.0
RATE = 1e-5
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01

Step = Callable[[Sequence[Tensor]], Tensor]
"""Runs forward, backward and update over a step's groups of ids [batch / groups, tokens], and returns a loss."""


def parser_of(description: str) -> argparse.ArgumentParser:
    """Make a parser of the options that every peer takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="model (default 3b)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (default 16)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a sequence (default 1024)")
    parser.add_argument("--groups", type=int, default=1, help="forward and backward passes a step (default 1)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after a first one (default 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a smoke run (default cuda)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in bench/results/<machine>/)")
    # A peer that trains adapters has an option for their rank.
    parser.set_defaults(rank=0)
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Make this process stand for a whole group of them, and torch's allocator one that does not fragment.

    Raises:
        SystemExit: the options do not go together, or there is no GPU.
    """
    if options.batch % options.groups or min(options.batch, options.groups, options.steps, options.seq) < 1:
        raise SystemExit("--batch must be a multiple of --groups, and all counts at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: --device cpu --shape tiny makes a smoke run")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def measure(system: str, options: argparse.Namespace, build: Callable[[], Step], **more: object) -> Row:
    """Build a peer, time it, print, and write its row. If it finds no memory, the row has the error."""
    try:
        result = _timed(system, options, build, more)
    except (MemoryError, RuntimeError) as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        shape = trained_shape(options.shape, options.rank)
        result = failed_row(system, shape, batch=options.batch, sequence_length=options.seq, error=text)
        _report(result, options.output)
        raise

    _report(result, options.output)
    return result


def _timed(system: str, options: argparse.Namespace, build: Callable[[], Step], more: dict[str, object]) -> Row:
    """Time each step, and make the row of them."""
    free_before = psutil.virtual_memory().available
    began = time.perf_counter()
    shape = SHAPES[options.shape]
    step = build()
    setup = time.perf_counter() - began
    print(f"{system}: {shape.num_parameters / 1e9:.3f}B parameters, ready after {setup:.1f} s", flush=True)
    generator = torch.Generator().manual_seed(1)
    seconds = []
    losses = []

    for index in range(options.steps + 1):
        # Every peer sees the same tokens, drawn outside the timed part.
        ids = torch.randint(0, shape.vocab, (options.batch, options.seq), generator=generator)
        groups = ids.chunk(options.groups)
        _wait(options.device)
        began = time.perf_counter()
        loss = step(groups)
        _wait(options.device)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        print(f"{system}: step {index + 1}  {seconds[-1]:.3f} s  loss {losses[-1]:.4f}", flush=True)

    return row(
        system,
        trained_shape(options.shape, options.rank),
        batch=options.batch,
        sequence_length=options.seq,
        num_parameters=shape.num_parameters,
        seconds=seconds[1:],
        first_step_seconds=seconds[0],
        model_flops=shape.model_flops(options.batch * options.seq, options.seq, options.rank),
        tflops_formula=TFLOPS_FORMULA,
        peak_ram_bytes=peak_ram_bytes(),
        peak_gpu_bytes=peak_gpu_bytes() if options.device == "cuda" else None,
        clip=True,
        master_dtype="float32",
        ram_taken_bytes=free_before - psutil.virtual_memory().available,  # of the machine: pinned pages for certain
        setup_seconds=setup,
        groups=options.groups,
        losses=losses,
        **more,
    )


def _wait(device: str) -> None:
    """Wait until the GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def _report(result: Row, output: Path | None) -> None:
    """Print a row's figures and write it."""
    if "error" in result:
        print(f"{result['system']}: could not run: {result['error']}", flush=True)
    else:
        gpu = result["peak_gpu_bytes"]
        print(
            f"{result['system']}: {result['tokens_per_s']:,.0f} tokens/s, {result['median_seconds']:.3f} s/step, "
            f"{result['model_tflops']:.1f} model TFLOP/s, RAM {result['peak_ram_bytes'] / 1e9:.1f} GB, "
            f"GPU {'-' if gpu is None else f'{gpu / 1e9:.1f} GB'}"
        )

    path = output or default_output(result)
    write_row(result, path)
    print(f"written to {path}", flush=True)
