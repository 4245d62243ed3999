"""The recipes in examples/recipes: each fits its card, RAM and drive, and says what its plan says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from recipe_models import CONFIGS, PARAMETERS

from megatier.cli import main
from megatier.config import file as config_file

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
HEAD = re.compile(
    r"# (?P<model>.+), (?P<trained>LoRA|full training): a card of (?P<card>\d+) GB, (?P<ram>\d+) GB of RAM, "
    r"(?P<drive>\d+) GB of room on a drive\.\n"
    r"# Planned: (?P<seconds>\d+) s a step of (?P<tokens>[\d,]+) tokens, with state on (?P<state>[\w, ]+)\."
)
TIERS = {"gpu": "GPU", "ram": "RAM", "nvme": "NVMe"}
FOR_THE_SYSTEM = 0.9
"""Most of a host's RAM that a recipe may ask for: the system, libraries and texts take the rest."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_planned_as_it_says_and_fits_its_machine(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    said = HEAD.match(text)
    assert said is not None
    hub = yaml.safe_load(text)["model"]["path"]
    CONFIGS[hub].save_pretrained(tmp_path / "model")

    # The machine's file has the memory of the card, so what does not fit it is refused.
    (machine,) = (ROOT / "examples/machines").glob(f"*-{said['card']}gb.yaml")
    assert machine.name in text
    made = tmp_path / "plan.json"
    words = ["--machine", str(machine), "--model.path", str(tmp_path / "model"), "--data.tokenizer", "bytes"]
    assert main(["plan", str(path), *words, "--json", "--output", str(made)]) == 0
    plan = json.loads(made.read_text())

    run = config_file.load(path, [])
    adapters = plan["num_trained"] if run.model.lora is not None else 0
    assert plan["num_parameters"] - adapters == PARAMETERS[hub]
    assert (said["trained"] == "LoRA") == bool(adapters)

    assert run.tiers.ram is not None
    assert run.tiers.ram <= FOR_THE_SYSTEM * int(said["ram"]) * 1e9
    export = 0 if adapters else 2 * plan["num_parameters"]
    assert plan["budget_bytes"]["nvme"] + 3 * plan["checkpoint_bytes"] + export <= int(said["drive"]) * 1e9

    used = [word for tier, word in TIERS.items() if _bytes_in(plan, tier)]
    assert said["state"] == ", ".join(used)
    assert int(said["tokens"].replace(",", "")) == plan["tokens_per_step"]
    assert int(said["seconds"]) == pytest.approx(plan["seconds"], rel=0.25)


def test_index_of_recipes_has_a_row_for_each_with_its_figures() -> None:
    rows = [line for line in (ROOT / "examples/recipes/README.md").read_text().splitlines() if ".yaml) |" in line]
    made = []
    for path in RECIPES:
        said = HEAD.match(path.read_text())
        assert said is not None
        trained = said["trained"].split()[0]
        sizes = f"{said['card']} GB | {said['ram']} GB | {said['drive']} GB"
        step = f"{said['seconds']} s | {said['tokens']} | {said['state']}"
        made.append(f"| [{said['model']}]({path.name}) | {trained} | {sizes} | {step} |")
    assert sorted(rows) == sorted(made)
    assert len(rows) == 13


def _bytes_in(plan: dict[str, dict[str, int]], tier: str) -> int:
    """Return the bytes of a plan in a tier."""
    state = sum(size for name, size in plan["state_bytes"].items() if name.startswith(tier))
    return state + plan["other_bytes"].get(tier, 0)
