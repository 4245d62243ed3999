"""The class of a folder's model: that of the model which was saved there, with the same parameters, or refused."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from composite_models import COMPOSITES, composite_config
from tiny_models import FAMILIES, known_config, tiny_config
from tiny_vision import VISION_FAMILIES, vision_config
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from megatier.config.schema import ModelConfig
from megatier.errors import UnsupportedModelError
from megatier.foreign import reason_of
from megatier.models.buffers import parameters_on_meta
from megatier.models.decoder import build_skeleton, check_config
from megatier.models.model_class import CLASSIFIERS, auto_class
from megatier.setup.skeleton import read_model_config

AUTOS: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, *CLASSIFIERS)
TABLES: list[dict[str, Any]] = [
    table for name, table in inspect.getmembers(modeling_auto) if name.endswith("_MAPPING_NAMES")
]
"""The names of classes by type of model, for each task."""


def config_of(name: str) -> PretrainedConfig:
    if name in VISION_FAMILIES:
        return vision_config(name)
    return composite_config(name) if name in COMPOSITES else tiny_config(name)


def shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def named(config: PretrainedConfig, *architectures: str) -> PretrainedConfig:
    found = copy.deepcopy(config)
    found.architectures = list(architectures)
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *VISION_FAMILIES, *COMPOSITES])
def test_folder_gives_the_class_and_parameters_of_the_model_that_was_saved_there(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    made: set[str] = set()
    for auto in AUTOS:
        if type(config) not in auto._model_mapping:
            continue
        with parameters_on_meta():
            model = auto.from_config(copy.deepcopy(config))
        kind = type(model).__name__
        if kind in made:
            continue
        made.add(kind)
        named(model.config, kind).save_pretrained(tmp_path)
        read = read_model_config(ModelConfig(path=""), tmp_path)
        if not any(type(read) in auto._model_mapping for auto in AUTOS):  # such as Emu 3's text model
            assert f"{kind} is neither a classifier nor" in str(unbuilt(read))
            continue
        if auto in CLASSIFIERS:  # theirs are compared in the tests of classifiers
            assert auto_class(read) is auto
            continue
        found = build_skeleton(read, "sdpa")
        assert type(found) is type(model)
        assert shapes(found) == shapes(model)

    # Any other class that transformers has for such a config is not the one that is streamed.
    others = {table.get(config.model_type) for table in TABLES} - {None} - made
    for other in (each for each in others if isinstance(each, str)):
        with pytest.raises(UnsupportedModelError, match=f"{other} is neither a classifier nor the language model"):
            auto_class(named(config, other))


def test_folder_that_names_no_class_of_transformers_gives_the_whole_language_model() -> None:
    for name, expected in (("llama", "LlamaForCausalLM"), ("emu3", "Emu3ForConditionalGeneration")):
        config = config_of(name)
        for architectures in ((), ("MyOwnForCausalLM",)):
            assert type(build_skeleton(named(config, *architectures), "sdpa")).__name__ == expected


# ---- what is refused, with what serves


def test_attention_that_a_model_does_not_have_is_refused_with_the_one_that_serves() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Flash ?Attention ?2.*\. Set attention to sdpa\.$"):
        build_skeleton(composite_config("paligemma"), "flash_attention_2")
    assert "Set attention" not in str(unbuilt(known_config("emu3", vocabulary_map=None), "flash_attention_2"))


def unbuilt(config: PretrainedConfig, attention: str = "sdpa") -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        build_skeleton(config, attention)
    return caught.value


@pytest.mark.parametrize("model_type", ["gemma3n", "perception_lm"])
def test_model_that_needs_missing_packages_names_all_of_them(model_type: str) -> None:
    try:
        import timm  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        assert str(unbuilt(known_config(model_type))).partition("pip install ")[2].split()[-1] == "timm."
    else:
        pytest.skip("timm is installed")


def test_reason_of_another_library_goes_on_to_what_its_first_line_announces() -> None:
    asked = "A requires the {0} library but it was not found. Install it with pip:\n`pip install {0}`. Then restart.\n"
    both = ImportError(f"\n{asked.format('pillow')}\n{asked.format('timm')}")
    assert reason_of(both) == "A needs packages that are not installed: pip install pillow timm"
    assert reason_of(ValueError("keys are missing:\n  a, b.\nmore")) == "keys are missing: a, b"
    assert reason_of(ValueError("nothing follows:\n")) == "nothing follows:"
    assert reason_of(ValueError("")) == "ValueError"


# ---- models that hear, or encode before they decode


REASONS = ("is an encoder-decoder", "is neither a classifier nor the language model")
TAKEN = {"gemma4": "Gemma4ForConditionalGeneration", "gemma4_unified": "Gemma4UnifiedForConditionalGeneration"}
"""Types that hear, whose models are streamed."""
REFUSED = {"florence2", "qwen2_audio", "voxtral", "whisper", "qwen2_5_omni", "granite_speech", "csm", "bark"}


def test_each_type_that_hears_speaks_or_encodes_has_its_class_or_is_refused_by_name() -> None:
    found = dict[str, str]()
    named = getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}).keys()  # transformers 5.6 has none
    more = {"florence2", "whisper", *TAKEN} & set(CONFIG_MAPPING)
    for model_type in sorted((named - modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()) | more):
        config = AutoConfig.for_model(model_type)
        try:
            check_config(config)
            auto: Any = auto_class(config)
            found[model_type] = auto._model_mapping[type(config)].__name__
        except UnsupportedModelError as refusal:
            found[model_type] = str(refusal)
            assert model_type in found[model_type]
    is_refused = {name: any(reason in said for reason in REASONS) for name, said in found.items()}
    assert [name for name, said in found.items() if not (is_refused[name] or said.isidentifier())] == []
    assert all(found[name] == TAKEN[name] for name in TAKEN.keys() & found.keys())
    assert all(is_refused.get(name, True) for name in REFUSED)
