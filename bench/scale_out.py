"""Simulates, with the planner, models of 8B to 405B on 1 to 64 GPUs, whose ranks share the state.

python bench/scale_out.py [--machine examples/machines/h200.yaml]        prints a Markdown table
python bench/scale_out.py --step        a step of 8B as rows 1 and 2 of the benchmarks have it, on one host
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import PlanError
from megatier.planner.plan import make_plan
from megatier.planner.search import Choice, search
from megatier.schedule.budgets import Budgets
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.schedule.rates_file import read_rates
from megatier.schedule.world import World
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import skeleton_of
from megatier.tier import Tier

GIB = 1 << 30
TIB = 1 << 40
GPUS = 8
"""GPUs of a host."""
RAM = 2 * TIB * 9 // 10
"""RAM of a host. A tenth is left to the system and to what no budget counts."""
DRIVE = DriveRates(directory="drive", read_bytes_per_s=14e9, write_bytes_per_s=12e9, mixed_bytes_per_s=20e9)
"""A PCIe 5 drive, as in what_if.py. A host has one for each GPU."""
NVME = 32 * TIB
"""NVMe of a host."""
HOST: dict[str, Any] = {"update_parameters_per_s": 8 * 3.8e9, "memory_bytes_per_s": 8 * 110e9}
"""AdamW and RAM of a host with 8 GPUs: estimates, since only hosts with one and two were measured."""
KERNELS: dict[str, Any] = {"gather_bytes_per_s": 262e9, "scatter_bytes_per_s": 288e9, "ranks_slowdown": 1.0}
"""NCCL's kernels between two H200 (NVLink), measured. Products that run at the same time nearly stand still."""
COPIES: dict[str, Any] = {"gather_bytes_per_s": 368e9, "scatter_bytes_per_s": 368e9, "ranks_slowdown": 0.2}
"""Copies by the GPUs' copy engines between two H200, measured. Products at the same time lose a fifth of their time."""
NETWORK = 50e9
"""A network of 400 Gbit/s for each GPU."""
SEQUENCE = 4096
"""Tokens of a sequence."""
TOKENS = 32_768
"""Tokens of a step for each GPU."""
LLAMA: dict[str, Any] = {"model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": False}
LLAMA |= {"vocab_size": 128256}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "vocab_size": 152064,
    },
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
WORLDS = tuple(World(ranks, max(1, ranks // GPUS)) for ranks in (1, 2, 4, 8, 16, 32, 64))


def config_of(model: str, world: World, *, sequence: int, tokens: int, **tiers: object) -> RunConfig:
    """Settings of a run, with so many tokens for each rank, which computes one group."""
    return RunConfig(
        model=ModelConfig(config=LLAMA | MODELS[model], loss_chunk=4096),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=sequence),
        tiers=TiersConfig(**tiers),  # type: ignore[arg-type]
        train=TrainConfig(batch=world.num_ranks * tokens // sequence, groups=world.num_ranks),
    )


def rows(rates: Rates) -> Iterator[str]:
    """Yield the lines of the table: for each model and number of GPUs, the settings that the search chooses."""
    yield "| model | GPUs | hosts | s/step | tokens/s | compute | GPU, RAM, NVMe hold | chosen |"
    yield "|---|---|---|---|---|---|---|---|"
    host = replace(rates, drives=(DRIVE,) * GPUS, network_bytes_per_s=NETWORK, **HOST, **KERNELS)

    for model in MODELS:
        skeleton = skeleton_of(config_of(model, World(), sequence=SEQUENCE, tokens=TOKENS).model)
        for world in WORLDS:
            config = config_of(model, world, sequence=SEQUENCE, tokens=TOKENS)
            start = f"| {model} | {world.num_ranks} | {world.num_hosts} |"
            try:
                # The GPU's budget is chosen; this one is not used.
                machine = Machine.elsewhere(config.tiers, host, Budgets(0, RAM, NVME), world)
                choice = search(Setup.of(config, skeleton, machine))
            except PlanError as error:
                yield f"{start} does not fit: {error} | | | | |"
                continue
            yield f"{start} {_row(choice, world.num_ranks * TOKENS)}"


def _row(choice: Choice, tokens: int) -> str:
    """Return the cells of a choice, whose steps have so many tokens."""
    placement = choice.placement
    world = choice.trial.world
    held = [placement.state_bytes.get(tier, 0) * world.num_ranks / 1e9 for tier in Tier]
    names = {"train.groups": "groups", "train.slices": "slices", "train.activations": "", "model.saved_share": "saved"}
    chosen = ", ".join(f"{words} {choice.settings[name]}".strip() for name, words in names.items())
    if placement.generations > 1:
        chosen += f", generations {placement.generations}"
    attained = choice.trial.compute_seconds / choice.seconds
    sizes = ", ".join(f"{size:,.0f}" for size in held)
    return f"{choice.seconds:.2f} | {tokens / choice.seconds:,.0f} | {attained:.2f} | {sizes} GB | {chosen} |"


def step_rows(rates: Rates) -> Iterator[str]:
    """Yield the lines of a step of 8B with 16,384 tokens for each GPU of one host."""
    yield "| 8B, 16,384 tokens a GPU | 1 GPU | 2 | 4 | 8 |"
    yield "|---|---|---|---|---|"
    free: dict[str, Any] = {"state": ("gpu", "ram"), "gpu": 83 * GIB, "ram": 116 * GIB}
    in_ram: dict[str, Any] = {"state": ("ram",), "gpu": 66 * GIB, "ram": 116 * GIB}

    half, most = ({**in_ram, "gpu": 69 * GIB, "streamed_share": share} for share in (0.54, 0.8))

    cases = (
        ("free, bytes between GPUs by copy engines", COPIES, free, False),
        ("free, by NCCL's kernels", KERNELS, free, False),
        ("no state on the GPU, by copy engines", COPIES, in_ram, False),
        ("the same, on a host that grows with its GPUs", COPIES, in_ram, True),
        ("no state on the GPU, 0.54 of it streamed, by copy engines", COPIES, half, False),
        ("the same, by NCCL's kernels", KERNELS, half, False),
        ("no state on the GPU, 0.8 of it streamed, by copy engines", COPIES, most, False),
        ("the same, by NCCL's kernels", KERNELS, most, False),
    )
    for name, links, tiers, grows in cases:
        seconds = [_step_seconds(replace(rates, **links), world, tiers, grows=grows) for world in WORLDS[:4]]
        yield f"| {name} | {' | '.join(f'{found:.3f}' for found in seconds)} |"


def _step_seconds(rates: Rates, world: World, tiers: Mapping[str, Any], *, grows: bool) -> float:
    """Return the seconds of a step of 8B.

    Args:
        rates: a host with one GPU.
        world: the ranks.
        tiers: settings.
        grows: whether a host with more GPUs has so many times the processors and the bandwidth of RAM.
    """
    times = world.num_ranks if grows else 1
    host = replace(
        rates,
        drives=(),
        update_parameters_per_s=times * rates.update_parameters_per_s,
        memory_bytes_per_s=times * rates.memory_bytes_per_s,
    )
    config = config_of("8B", world, sequence=1024, tokens=16_384, **tiers)
    budgets = Budgets(tiers["gpu"], tiers["ram"], 0)
    machine = Machine.elsewhere(config.tiers, host, budgets, world)
    return make_plan(Setup.of(config, skeleton_of(config.model), machine)).forecast.seconds


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, default=Path("examples/machines/h200.yaml"))
    parser.add_argument("--step", action="store_true", help="a step of 8B as the benchmarks have it, on one host")
    options = parser.parse_args()
    for line in (step_rows if options.step else rows)(read_rates(options.machine)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
