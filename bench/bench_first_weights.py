"""Measures how fast the first weights of a model without weights are drawn and laid: by one core, and by all.

A session is opened, and its masters are drawn as `megatier train` does, in processes that may use so many cores. With
`--nvme` a share of the state is at home on a drive. The clock runs while weights are drawn, split into planes and
written; seconds of processors count it without what other programs take.

python bench/bench_first_weights.py --layers 4 --hidden 2048
python bench/bench_first_weights.py --layers 20 --hidden 8192 --ffn 28672 --nvme /mnt/a:40GiB --ram 100GiB --out DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from record import facts, folder_of
from transformers import AutoConfig

from megatier.config.schema import OF_LOOP, ModelConfig, NumericsConfig, RunConfig, TiersConfig, TrainConfig
from megatier.config.values import parse_bytes
from megatier.hardware import cores_usable
from megatier.models.decoder import build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.session.session import Session
from megatier.setup.setup import Setup
from megatier.tier import Kind, Tier

GIB = 1 << 30


def measure(options: argparse.Namespace) -> dict[str, float | str | int]:
    """Draw the weights with as many cores as this process may use."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 1024),
        num_hidden_layers=options.layers,
        vocab_size=32768,
        tie_word_embeddings=False,
    )
    skeleton = build_skeleton(config, "sdpa")
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    ram = parse_bytes(options.ram) if options.ram else 9 * size + 2 * GIB
    with TemporaryDirectory(dir=options.directory) as folder:
        nvme = options.nvme or f"{folder}:1GiB"
        tiers = TiersConfig(device="cpu", gpu=8 * GIB, ram=ram, nvme=(nvme,), state=("ram", "nvme"))
        train = TrainConfig(batch=1, moments="fp8", clip=None)
        model = ModelConfig(config={"model_type": "llama"})
        numerics = NumericsConfig(guard=False)
        run = RunConfig(model=model, data=OF_LOOP, tiers=tiers, train=train, numerics=numerics)
        with Session(Setup.here(run, skeleton)) as session:
            session.seal()
            began, spent = time.perf_counter(), time.process_time()
            session.load(Initialiser(skeleton, 0))
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - spent
            digest = hashlib.sha256()
            for unit in session.own_units[:2]:
                digest.update(session.read_master(unit, 0, min(unit.layout.num_elements, 1 << 24)).numpy().tobytes())
            spilled = sum(
                unit.layout.num_elements
                for unit in session.own_units
                if session.placement.homes[unit.name, Kind.WEIGHT] is Tier.NVME
            )
    return {
        "cores": cores_usable(),
        "num_parameters": size,
        "on_nvme": spilled,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "parameters_per_s": size / seconds,
        "parameters_per_cpu_s": size / cpu_seconds,
        "first_bits": digest.hexdigest()[:16],
    }


def main() -> None:
    """Measure with one core and with all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ram", help="bytes of RAM; all of the state has room if not given")
    parser.add_argument("--nvme", help="a mount, as DIRECTORY:SIZE")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="of block files without --nvme")
    parser.add_argument("--cores", type=int, nargs="*", help="numbers of cores; 1 and all if not given")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder of the result, instead of this machine's")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return

    all_cores = sorted(os.sched_getaffinity(0))
    rows = []
    for count in options.cores or sorted({1, cores_usable()}):
        os.sched_setaffinity(0, all_cores[:count])
        command = [sys.executable, *sys.argv, "--child"]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        os.sched_setaffinity(0, all_cores)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        row["ratio_to_first"] = row["parameters_per_s"] / rows[0]["parameters_per_s"]
    assert len({row["first_bits"] for row in rows}) == 1, "the bits depend on the number of cores"
    result = {"rows": rows, **facts()}
    out = (options.out or folder_of(result["machine"])) / "first_weights.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
