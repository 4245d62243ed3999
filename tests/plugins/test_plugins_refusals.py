"""Settings of other programs are refused by one message each, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatier.errors import ConfigError
from megatier.plugins.refusals import AXOLOTL, LLAMA_FACTORY, check_axolotl, check_llama_factory, read_plugin_section

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
TRAINING: dict[str, Any] = {"do_train": True}


@pytest.mark.parametrize("name", AXOLOTL)
def test_each_key_of_axolotl_in_the_table_is_refused_by_name(name: str) -> None:
    check_axolotl({name: None})
    with pytest.raises(ConfigError, match=rf"^{name}: .+\.$"):
        check_axolotl({name: True})


@pytest.mark.parametrize("name", LLAMA_FACTORY)
def test_each_argument_of_llama_factory_in_the_table_is_refused_by_name(name: str) -> None:
    check_llama_factory({**TRAINING, name: False})
    with pytest.raises(ConfigError, match=rf"^{name}: .+\.$"):
        check_llama_factory({**TRAINING, name: True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter": "qlora"}, "adapter is qlora: use lora, or none"),
        ({"optimizer": "adamw_torch_4bit"}, "optimizer: adamw_torch_4bit is an optimizer"),
        ({"optimizer": "adamw_bnb_8bit"}, r"optimizer: adamw_bnb_8bit is an optimizer .* megatier\.optimizer may be"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: places the weights"),
        ({"plugins": ["megatier.a.B", "axolotl.integrations.liger.LigerPlugin"]}, r"plugins: axolotl\..*LigerPlugin"),
    ],
)
def test_value_of_axolotl_that_cannot_be_followed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_axolotl(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stage": "dpo"}, "stage is dpo: only supervised fine-tuning and pretraining"),
        ({"finetuning_type": "oft"}, "finetuning_type is oft: use full, freeze or lora"),
        ({"optim": "adamw_torch_8bit"}, "optim: adamw_torch_8bit is an optimizer"),
        ({"optim": "adafactor"}, "optim: adafactor is an optimizer"),
        ({"do_train": None}, "do_train is not true"),
    ],
)
def test_value_of_llama_factory_that_cannot_be_followed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_llama_factory({**TRAINING, **given})


def test_common_settings_are_taken() -> None:
    check_axolotl({"adapter": "lora", "optimizer": "adamw_torch_fused", "tensor_parallel_size": 1, "bf16": "auto"})
    check_llama_factory({**TRAINING, "stage": "pt", "finetuning_type": "lora", "optim": "adamw_torch", "bf16": True})


@pytest.mark.parametrize("check", [check_axolotl, check_llama_factory])
def test_several_processes_are_refused(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started, and one trains here"):
        check(TRAINING)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("96GiB", "megatier is '96GiB'; it must be keys with values"),
        ({"compute_dtype": "bf16"}, r"megatier\.compute_dtype follows from the program's own settings"),
        ({"gradient_accumulation_steps": 2}, "Did you mean accumulation_steps"),
        ({"accumulation_steps": 2}, "accumulation_steps; the trainer takes it from TrainingArguments"),
        ({"tiers": {"rma": "1GiB"}}, "unknown setting tiers.rma"),
        ({"tiers": 3}, "tiers is 3; it must be"),
    ],
)
def test_section_with_a_mistake_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plugin_section(given)


def test_section_is_returned_as_it_is() -> None:
    assert read_plugin_section(None) == {}
    given = {"tiers": {"ram": "1GiB", "nvme": ["/mnt:4GiB"]}, "moments": "bf16"}
    assert read_plugin_section(given) == given


@pytest.mark.parametrize(
    ("name", "check"), [("axolotl.yaml", check_axolotl), ("llama_factory.yaml", check_llama_factory)]
)
def test_example_passes_the_checks(name: str, check: Any) -> None:
    given = yaml.safe_load((EXAMPLES / name).read_text())
    assert read_plugin_section(given["megatier"])["tiers"]
    check(given)
