"""What all sections of a config have in common: their docstrings, and names and kinds that are refused."""

from __future__ import annotations

import copy
import pickle
import pydoc
from dataclasses import replace
from typing import Any

import pytest

import megatier
from megatier.config.lora import LoraConfig
from megatier.config.schema import CONFIG_SECTIONS, RunConfig, TiersConfig, TrainConfig
from megatier.config.section import field_docs
from megatier.errors import ConfigError


def test_help_of_a_section_explains_each_field() -> None:
    for section in (*CONFIG_SECTIONS.values(), LoraConfig):
        text = pydoc.plain(pydoc.render_doc(section))
        for key, doc in field_docs(section).items():
            assert f"{key}: {doc.split()[0]}" in text, (section, key)
    assert (megatier.TrainConfig.__doc__ or "").startswith("The steps and their optimizer.\n\nAttributes:\n    steps: ")


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        (TrainConfig, "lr", r"unknown setting train\.lr; did you mean train\.learning_rate\?"),
        (TrainConfig, "stesp", r"unknown setting train\.stesp; did you mean steps\?"),
        (TrainConfig, "zzzzzz", r"unknown setting train\.zzzzzz; known are steps, epochs"),
        (TiersConfig, "rma", r"unknown setting tiers\.rma; did you mean ram\?"),
        (LoraConfig, "r", r"unknown setting model\.lora\.r; did you mean model\.lora\.rank\?"),
        (RunConfig, "traim", r"unknown setting traim; did you mean train\?"),
        *[
            (section, "lr", r"unknown setting .*lr; did you mean train\.learning_rate\?")
            for section in CONFIG_SECTIONS.values()
        ],
    ],
)
def test_section_refuses_a_name_that_it_does_not_have(section: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**{name: 1e-4})


def test_section_knows_which_fields_were_given_and_is_copied_like_any_dataclass() -> None:
    made = TrainConfig(steps=1000, clip=None)
    assert made.given == {"steps", "clip"}
    assert TrainConfig().given == frozenset()
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))
    assert replace(made, clip=1.0) == TrainConfig()
