"""Takes over adapters that a user's program has made or described with PEFT's own classes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from megatier.adapters.lora import ADAPTER, check_made, inject, stored_names
from megatier.adapters.stored_adapters import checked_settings
from megatier.errors import ConfigError, UnsupportedModelError
from megatier.foreign import printable
from megatier.models.decoder import decoder_layers, is_adapter, tied_modules
from megatier.models.model_class import is_classifier

CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS")
"""PEFT's task types of classifiers."""
SCORES = ("classifier", "score")
"""Modules of a classifier that PEFT trains whole for these tasks."""


def unwrap_peft(model: nn.Module) -> tuple[nn.Module, Any | None]:
    """Return the model of transformers inside a `PeftModel`, and PEFT's config of the adapters in it.

    Args:
        model: a `PeftModel`, or a model of transformers with adapters or without.

    Returns:
        The model, and the config; None: it has no adapters.

    Raises:
        ConfigError: this kind of adapter is not supported.
        UnsupportedModelError: there are several adapters, or they are merged, not trained, or not inside modules.
    """
    inside: Any = model
    if is_adapter(model) and hasattr(model, "get_base_model"):
        inside = inside.get_base_model()

    # Trained prompts are in no module, so the inner model does not know of them.
    configs = getattr(inside, "peft_config", None) or getattr(model, "peft_config", None)
    if not configs:
        return inside, None

    # An adapter's name is a part of its parameters' names, by which they are recognised here.
    if list(configs) != [ADAPTER]:
        raise UnsupportedModelError(
            f"the model has adapters with the names {printable(', '.join(map(str, configs)))}; only one is streamed, "
            f"with the name {ADAPTER!r}."
        )

    # A merged base already contains what the adapters would add again.
    if any(getattr(module, "merged_adapters", None) for module in inside.modules()):
        raise UnsupportedModelError("the model's adapters are merged into its base. Call unmerge_adapter() first.")

    if not any(parameter.requires_grad for parameter in inside.parameters()):
        # Unsupported kinds of adapters are refused as such, whether they are trained or not.
        checked_settings(_settings_of(configs[ADAPTER]), "peft_config")
        raise UnsupportedModelError(
            "no parameter of the model and of its adapters requires a gradient. Load them with "
            "PeftModel.from_pretrained(..., is_trainable=True)."
        )
    return inside, configs[ADAPTER]


def add_given(model: PreTrainedModel, config: Any, base: str) -> None:  # noqa: ANN401 - PEFT's
    """Add the new adapters that a PEFT config describes to a skeleton, and freeze everything else.

    Args:
        model: the skeleton of the base.
        config: a `LoraConfig` of PEFT, which is not changed.
        base: the folder or name of the base, which is noted in the adapters' config.

    Raises:
        ConfigError: it is not a LoraConfig, of an unsupported kind, or for another task; see also `add_adapters`.
    """
    # By PEFT's own dictionary, so that settings of newer releases are noticed and refused by name.
    given = _settings_of(config)

    # Other initialisations depend on the weights of the base, which PEFT does not find in a skeleton.
    if given.get("init_lora_weights") not in (None, True):
        raise ConfigError(
            f"peft_config sets init_lora_weights to {printable(repr(given['init_lora_weights']))}; new adapters begin "
            "with PEFT's default values. Leave it out, or give a PeftModel."
        )
    if given.get("inference_mode"):
        raise ConfigError("peft_config sets inference_mode, by which PEFT trains no adapter: leave it out.")
    settings = checked_settings(given, "peft_config")
    if is_classifier(model.config):
        settings |= _of_classifier(model, given)
    inject(model, settings, base)


def check_adapters(model: PreTrainedModel, config: Any) -> None:  # noqa: ANN401 - PEFT's
    """Check the adapters of a model in RAM, which its skeleton has copied. The skeleton keeps their config.

    Args:
        model: the skeleton.
        config: PEFT's config of the adapters.

    Raises:
        ConfigError: they are of an unsupported kind, or would not do what their config says.
    """
    checked_settings(_settings_of(config), "peft_config")
    layers = decoder_layers(model)
    check_made(model, layers, tied_modules(model))
    if not hasattr(model, "peft_config"):
        model.peft_config = {ADAPTER: copy.deepcopy(config)}


def _settings_of(config: Any) -> dict[str, Any]:  # noqa: ANN401 - PEFT's
    """Return the settings of a PEFT config, with its kind as text.

    Raises:
        ConfigError: it is none.
    """
    settings = config.to_dict() if hasattr(config, "to_dict") else None
    if not isinstance(settings, Mapping) or "peft_type" not in settings:
        raise ConfigError(f"peft_config is a {type(config).__name__}; it must be a LoraConfig of PEFT.")
    kind = _text_of(settings["peft_type"])
    return {**settings, "peft_type": kind}


def _text_of(value: Any) -> Any:  # noqa: ANN401 - PEFT's
    """Return a setting as text, since PEFT's objects use enum members where files have text."""
    return getattr(value, "value", value)


def _of_classifier(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which PEFT also trains the score of a classifier.

    Args:
        model: the skeleton of the base.
        given: the config of the adapters.

    Raises:
        ConfigError: it is for another task.
    """
    task = _text_of(given.get("task_type"))
    if task not in (None, *CLASSIFYING):
        raise ConfigError(
            f"peft_config has the task_type {printable(str(task))}, and {type(model).__name__} is a classifier. Set it "
            f"to {' or '.join(CLASSIFYING)}."
        )

    # PEFT adds these names only in its `PeftModelForSequenceClassification`, which is not used here.
    saved = list(given.get("modules_to_save") or ())
    if task is not None:
        saved += [name for name in SCORES if name not in saved]
    return {"task_type": task, "modules_to_save": saved or None}


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable a skeleton's adapters inside, as PEFT's `disable_adapter` does.

    PEFT's own also changes which parameters require a gradient, which a skeleton's units have fixed.
    """
    # By the attribute, since PEFT has a layer class for each kind of module.
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True

    try:
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


def check_trained(model: PreTrainedModel) -> None:
    """Refuse a model that trains anything but its adapters, or not all of them, since its folder would be incomplete.

    Raises:
        ConfigError: names the first parameter.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    # By what PEFT would write, since the trained model is loaded from that.
    in_folder = set(stored_names(model).values())
    odd = sorted(trained ^ in_folder)
    if odd:
        defect = "is trained, but no part of" if odd[0] in trained else "is not trained, but a part of"
        raise ConfigError(
            f"{odd[0]} {defect} the adapters. Leave frozen out, and name what is trained beside them in "
            "modules_to_save."
        )
