"""Compares what a model of 113M parameters learns with products in bf16 and in FP8, on the source of Python's library.

Each run is `megatier train` in a process of its own. The two kinds have seeds in common: first weights, and the order
of the text. A line of JSON follows each run, so that runs may be made in several calls.

python bench/bench_fp8_loss.py [--products bf16 fp8] [--seeds 0 1 2] [--steps 2000] [--model DIR]
python bench/bench_fp8_loss.py --tiny --steps 4 --seeds 0     a smoke run without a GPU

With --model the last model of each run is kept there, for `bench_fp8.py gradients --model`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 12}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def settings_of(products: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a run."""
    sizes: dict[str, Any] = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 512}
    sizes |= {"num_key_value_heads": 4, "tie_word_embeddings": False, **(TINY if options.tiny else SIZES)}
    return {
        "model": {"config": sizes, "attention": "sdpa"},
        "data": {"files": ["python-stdlib"], "tokenizer": "bytes", "sequence_length": 64 if options.tiny else 512},
        "tiers": {"state": ["gpu"], "gpu": "256MiB" if options.tiny else "6GiB", "ram": "1GiB"},
        "train": {
            "steps": options.steps,
            "batch": 4 if options.tiny else 32,
            "learning_rate": 6e-4,
            "warmup_steps": options.steps // 20,
            "min_learning_rate_ratio": 0.1,
            "weight_decay": 0.1,
            "beta2": 0.95,
            "seed": seed,
            "evaluate_batches": 64,
        },
        "numerics": {"products": products},
        "output": {"directory": str(folder / "run"), "checkpoint_every": 0, "export": options.model is not None},
    }


def run(products: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make one run, and return what came of it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fp8-loss-") as name:
        folder = Path(name)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(settings_of(products, seed, folder, options)), encoding="utf-8")
        command = [sys.executable, "-m", "megatier", "train", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{products}, seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if options.model is not None:
            (folder / "run" / "model").rename(options.model / f"{products}-{seed}")

    records = [json.loads(line) for line in lines]
    losses = [record["loss"] for record in records if "loss" in record]
    every = max(1, len(losses) // 20)
    return {
        "products": products,
        "seed": seed,
        "heldout_loss": next(record["heldout_loss"] for record in reversed(records) if "heldout_loss" in record),
        "curve": [round(fmean(losses[start : start + every]), 5) for start in range(0, len(losses), every)],
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Make all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", nargs="+", choices=("bf16", "fp8"), default=("bf16", "fp8"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", type=Path, help="a folder for the last model of each run")
    parser.add_argument("--tiny", action="store_true", help="a model for a smoke run")
    options = parser.parse_args()
    for seed in options.seeds:
        for products in options.products:
            print(json.dumps(run(products, seed, options)), flush=True)


if __name__ == "__main__":
    main()
