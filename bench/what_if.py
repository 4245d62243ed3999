"""Simulates, with the planner, models of 70B and 405B on machines that have more RAM and faster drives than ours.

python bench/what_if.py [--machine examples/machines/h200.yaml]        prints a Markdown table
python bench/what_if.py --search        the settings that the search chooses for 405B, and how long search and plan take
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.errors import PlanError
from megatier.planner.plan import make_plan
from megatier.planner.search import search
from megatier.schedule.budgets import Budgets
from megatier.schedule.drive_rates import DriveRates
from megatier.schedule.rates import Rates
from megatier.schedule.rates_file import read_rates
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import skeleton_of

GIB = 1 << 30
TIB = 1 << 40
DRIVE = DriveRates(directory="drive", read_bytes_per_s=14e9, write_bytes_per_s=12e9, mixed_bytes_per_s=20e9)
"""A PCIe 5 drive: it reads 14 GB/s and writes 12. When it does both, the sum is a little less."""
SEQUENCE = 4096
"""Tokens of a sequence."""
GPU = 60 * GIB
"""The budget for blocks on the GPU. The rest of its memory is left to activations."""
MODELS = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
RAM = (256 * GIB, 512 * GIB, 1 * TIB, 2 * TIB)
DRIVES = (1, 2, 4, 8)
TOKENS = 131_072
"""Tokens of a step."""


def config_of(model: str) -> RunConfig:
    """Settings of a run. Boundary activations are offloaded, and its one group has two slices, so that 405B fits."""
    settings = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    return RunConfig(
        model=ModelConfig(config=settings | MODELS[model]),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=SEQUENCE),
        tiers=TiersConfig(state=("ram", "nvme")),
        train=TrainConfig(batch=TOKENS // SEQUENCE, slices=2, activations="offload"),
    )


def rows(rates: Rates) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | tokens/step | RAM | drives | s/step | tokens/s | compute alone | bound by | written/step |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for model in MODELS:
        config = config_of(model)
        skeleton = skeleton_of(config.model)
        for ram in RAM:
            for count in DRIVES:
                machine = replace(rates, drives=(DRIVE,) * count)
                start = f"| {model} | {TOKENS:,} | {ram // GIB:,} GiB | {count} |"
                try:
                    # A tenth of RAM is left to the system and to what no budget counts.
                    budgets = Budgets(GPU, ram * 9 // 10, 16 * TIB)
                    there = Machine.elsewhere(config.tiers, machine, budgets)
                    plan = make_plan(Setup.of(config, skeleton, there))
                except PlanError as error:
                    # RAM is too small for what must lie there, so more drives change nothing.
                    yield f"{start} does not fit: {error} | | | | |"
                    break

                made = plan.forecast
                yield (
                    f"{start} {made.seconds:.1f} | {plan.tokens_per_s:,.0f} | {plan.bound_share:.2f} | {made.bound_by} "
                    f"| {plan.written_bytes_per_step / 1e9:,.0f} GB |"
                )

                # Nothing spills, so more drives change nothing.
                if not plan.written_bytes_per_step:
                    break


def search_rows(rates: Rates) -> Iterator[str]:
    """Yield the lines of the search's table. Its seconds are processor time, without that of building the skeleton."""
    yield "| RAM | drives | chosen | s/step | search took | plan took |"
    yield "|---|---|---|---|---|---|"
    config = config_of("405B")
    skeleton = skeleton_of(config.model)

    for ram in (1 * TIB, 2 * TIB):
        for count in DRIVES:
            machine = replace(rates, drives=(DRIVE,) * count)
            there = Machine.elsewhere(config.tiers, machine, Budgets(GPU, ram * 9 // 10, 16 * TIB))
            start = f"| {ram // GIB:,} GiB | {count} |"
            begun = time.process_time()

            try:
                setup = Setup.of(config, skeleton, there)
                choice = search(setup)
            except PlanError as error:
                yield f"{start} does not fit: {error} | | {time.process_time() - begun:.1f} s | |"
                continue

            found = time.process_time()
            make_plan(setup.changed(choice.settings))
            chosen = ", ".join(f"{name.partition('.')[2]} {value}" for name, value in choice.settings.items())
            took = f"{found - begun:.1f} s | {time.process_time() - found:.1f} s"
            yield f"{start} {chosen} | {choice.seconds:.1f} | {took} |"


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, default=Path("examples/machines/h200.yaml"))
    parser.add_argument("--search", action="store_true", help="what the search chooses, and how long it takes")
    options = parser.parse_args()
    for line in (search_rows if options.search else rows)(read_rates(options.machine)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
