"""Plans 8B and 32B on machines that are known from data sheets alone: an RTX 4090, a GB10 and a GH200.

python bench/data_sheets.py --output bench/results/data_sheets/plans.json        also prints a Markdown table

Nobody has run any of these. The planner chooses the settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig, TiersConfig, TrainConfig
from megatier.planner.plan import Plan, make_plan
from megatier.planner.search import search
from megatier.schedule.budgets import Budgets
from megatier.schedule.rates_file import read_rates
from megatier.setup.attention_choice import choose_kernel
from megatier.setup.machine import Machine
from megatier.setup.setup import Setup
from megatier.setup.skeleton import model_config_of, skeleton_of
from megatier.tier import Tier

MACHINES = Path("examples/machines")
GIB = 1 << 30
SEQUENCE = 2048
TOKENS = 65_536
"""Tokens of a step."""
MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""The shapes of Llama 3.1 8B and of Qwen3 32B."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run on a machine."""

    machine: str
    """The file of its rates."""
    model: str
    ram: int
    """Budget of RAM, in GiB."""
    nvme: int = 0
    """Budget of NVMe, in GiB."""
    moments: Literal["fp32", "bf16"] = "fp32"


CASES = (
    Case(machine="rtx-4090", model="8B", ram=200),
    Case(machine="rtx-4090", model="32B", ram=470),
    Case(machine="gb10", model="8B", ram=8, moments="bf16"),
    Case(machine="gb10", model="8B", ram=24, nvme=100),
    Case(machine="gb10", model="32B", ram=32, nvme=400),
    Case(machine="gh200", model="8B", ram=400),
    Case(machine="gh200", model="32B", ram=420),
)


def plan_of(case: Case) -> Plan:
    """Return the plan of a run with the settings that the search chooses."""
    config = RunConfig(
        model=ModelConfig(config=MODELS[case.model]),
        data=DataConfig(files=("random",), tokenizer="bytes", sequence_length=SEQUENCE),
        tiers=TiersConfig(),
        train=TrainConfig(batch=TOKENS // SEQUENCE, moments=case.moments),
    )
    rates = read_rates(MACHINES / f"{case.machine}.yaml")

    # The search chooses the GPU's budget.
    gpu = rates.gpu_bytes_beside(case.ram * GIB) or 0
    machine = Machine.elsewhere(config.tiers, rates, Budgets(round(gpu), case.ram * GIB, case.nvme * GIB))
    model = model_config_of(config.model)
    config, _ = choose_kernel(config, model, machine)
    setup = Setup.of(config, skeleton_of(config.model, model), machine)
    return make_plan(setup.changed(search(setup).settings))


def rows(found: dict[Case, Plan]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| machine | model | moments | GiB of state on GPU / RAM / NVMe | s/step | tokens/s | compute | bound by |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, plan in found.items():
        state = " / ".join(f"{plan.placement.state_bytes.get(tier, 0) / GIB:.0f}" for tier in Tier)
        yield (
            f"| {case.machine} | {case.model} | {case.moments} | {state} | {plan.forecast.seconds:.1f} | "
            f"{plan.tokens_per_s:,.0f} | {plan.bound_share:.0%} | {plan.forecast.bound_by} |"
        )


def main() -> None:
    """Plan all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the plans as JSON, without what each unit does")
    options = parser.parse_args()
    found = {}
    for case in CASES:
        found[case] = plan_of(case)
    print(*rows(found), sep="\n")
    if options.output is not None:
        plans = []
        for case, plan in found.items():
            document = plan.as_dict()
            del document["homes"], document["streamed"]
            plans.append({"case": asdict(case), "plan": document})
        options.output.write_text(json.dumps(plans, indent=1) + "\n")


if __name__ == "__main__":
    main()
