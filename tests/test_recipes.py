"""The recipes in examples/recipes: each fits its card, RAM and drive, and says what its plan says."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_models import CONFIGS, PARAMETERS
from tiny_models import tiny_config
from tiny_runs import plain_model
from transformers import AutoModelForCausalLM

from megatier.cli import main
from megatier.config import file as config_file
from megatier.data.tokenizer import byte_tokenizer

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
HEAD = re.compile(
    r"# (?P<model>.+), (?P<trained>LoRA|GRPO|full training): a card of (?P<card>\d+) GB, (?P<ram>\d+) GB of RAM, "
    r"(?P<drive>\d+) GB of room on a drive\.\n"
    r"# Planned: (?P<seconds>\d+) s a step of (?P<tokens>[\d,]+) tokens, with state on (?P<state>[\w, ]+)\."
)
TIERS = {"gpu": "GPU", "ram": "RAM", "nvme": "NVMe"}
CACHE_SHARE = 0.8
"""The most of what is left beside the weights that keys and values of completions may take."""
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
    words = ["--machine", str(machine), "--model.path", str(tmp_path / "model")]

    # Of a recipe with images nothing is known of them here, and its plan says so.
    run = config_file.load(path, [])
    if not run.data.images:
        words += ["--data.tokenizer", "bytes"]
    assert main(["plan", str(path), *words, "--json", "--output", str(made)]) == 0
    plan = json.loads(made.read_text())

    adapters = plan["num_trained"] if run.model.lora is not None else 0
    assert plan["num_parameters"] - adapters == PARAMETERS[hub]
    assert (said["trained"] == "LoRA") == bool(adapters)

    assert run.tiers.ram is not None
    is_grpo = said["trained"] == "GRPO"
    loaned = plan["lent_room"]["state_bytes"] if is_grpo else 0
    assert run.tiers.ram + loaned <= FOR_THE_SYSTEM * int(said["ram"]) * 1e9
    if is_grpo:
        assert _cache_bytes(hub) * plan["tokens_per_step"] <= CACHE_SHARE * plan["lent_room"]["left_bytes"]
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
    assert len(rows) == 17


@pytest.mark.filterwarnings("default")  # of TRL and datasets
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_grpo_by_a_recipe_trains_in_lent_memory_and_writes_a_model(tmp_path: Path) -> None:
    recipe = ROOT / "examples/recipes/qwen2.5-7b-grpo-48gb.yaml"
    plain_model(tiny_config("llama", vocab_size=320)).save_pretrained(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {each}"}) for each in range(9)))
    (tmp_path / "reward.py").write_text(
        "def reward(completions, **_):\n    return [len(set(text)) for text in completions]"
    )
    sizes = {"train.batch": 16, "train.groups": 2, "train.steps": 2, "data.sequence_length": 16}
    tiers = {"tiers.gpu": "1MiB", "tiers.ram": "16MiB", "tiers.gpu_limit": "16MiB"}
    files = {"model.path": tmp_path / "model", "data.files": tmp_path / "prompts.jsonl", "output.directory": tmp_path}
    words = [f"--{name}={value}" for name, value in {**sizes, **tiers, **files}.items()]
    main_of = runpy.run_path(str(recipe.parent / "grpo.py"), run_name="example")["main"]
    rewards = main_of(recipe, str(tmp_path / "reward.py"), words)
    assert len(rewards) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")

    with pytest.raises(SystemExit, match=r"does not take train\.weight_decay\."):
        main_of(recipe, str(tmp_path / "reward.py"), [*words, "--train.weight_decay=0.5"])


def _cache_bytes(hub: str) -> int:
    """Return the bytes of keys and values of a token in bf16."""
    config: Any = CONFIGS[hub]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size: int = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    return size


def _bytes_in(plan: dict[str, dict[str, int]], tier: str) -> int:
    """Return the bytes of a plan in a tier."""
    state = sum(size for name, size in plan["state_bytes"].items() if name.startswith(tier))
    return state + plan["other_bytes"].get(tier, 0)
