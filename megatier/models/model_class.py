"""Finds the class that transformers builds for a model's config, and what that class supports."""

from __future__ import annotations

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from megatier.errors import UnsupportedModelError

AutoClass = type[
    AutoModelForCausalLM
    | AutoModelForImageTextToText
    | AutoModelForSequenceClassification
    | AutoModelForTokenClassification
]
"""An auto class, which builds a model from a config."""
CLASSIFIERS: tuple[AutoClass, ...] = (AutoModelForSequenceClassification, AutoModelForTokenClassification)
"""Auto classes of decoders with a score of the whole sequence or of each token, instead of a language model head."""


def auto_class(config: PretrainedConfig) -> AutoClass:
    """Return the auto class that builds a config's model: the one that its `architectures` name.

    If they name no class of transformers, it is the language model, with its vision tower if it has one.

    Raises:
        UnsupportedModelError: they name another class of transformers, or there is no language model of this config.
    """
    kinds = _classes(config)
    named = _architectures(config)
    for auto, kind in kinds.items():
        if kind.__name__ in named:
            return auto

    # Another class of transformers is named on purpose. Any other name is that of a user's class.
    for name in named:
        if name in vars(transformers)["__all__"]:
            raise _not_streamed(name, config)

    # For some multimodal models the causal class would leave out the vision tower.
    sees = config.get_text_config() is not config
    order: tuple[AutoClass, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for auto in reversed(order) if sees else order:
        if auto in kinds:
            return auto

    raise _not_streamed(f"The model of type {config.model_type}", config)


def known_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of transformers that a model's class is or derives from.

    Raises:
        UnsupportedModelError: it is neither a classifier nor the language model, with or without vision, that
            transformers loads for its config.
    """
    known = _classes(model.config).values()
    for kind in type(model).__mro__:
        if kind in known:
            return kind
    raise _not_streamed(type(model).__name__, model.config)


def _not_streamed(name: str, config: PretrainedConfig) -> UnsupportedModelError:
    """Return the error about an unsupported class of models."""
    # Each name once, since some configs have one class for both kinds of language model.
    known = dict.fromkeys(kind.__name__ for auto, kind in _classes(config).items() if auto not in CLASSIFIERS)
    loaded = " or ".join(known) or type(config).__name__
    return UnsupportedModelError(
        f"{name} is neither a classifier nor the language model, with or without vision, that transformers loads for "
        f"its config ({loaded}); only these are streamed."
    )


def implementation_of(model_class: object, attention: str) -> str:
    """Return the attention implementation that a model class supports: eager if it has no sdpa."""
    wanted = "sdpa" if attention == "auto" else attention
    return "eager" if wanted == "sdpa" and not getattr(model_class, "_supports_sdpa", True) else wanted


def is_classifier(config: PretrainedConfig) -> bool:
    """Return whether a config is that of a classifier, such as a reward model: its `architectures` name one."""
    named = _architectures(config)
    return any(kind.__name__ in named for auto, kind in _classes(config).items() if auto in CLASSIFIERS)


def supports_flex(config: PretrainedConfig) -> bool:
    """Return whether transformers supports flex attention for a config's model."""
    model_class = _model_class(auto_class(config), config)
    return bool(getattr(model_class, "_supports_flex_attn", False))


def _classes(config: PretrainedConfig) -> dict[AutoClass, type[PreTrainedModel]]:
    """Return the supported model classes of a config, by their auto classes."""
    autos: tuple[AutoClass, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, *CLASSIFIERS)
    classes = dict[AutoClass, type[PreTrainedModel]]()
    for auto in autos:
        # transformers' tables may have no class for a config, or a list of several.
        model_class = _model_class(auto, config)
        if isinstance(model_class, type):
            classes[auto] = model_class

    return classes


def _architectures(config: PretrainedConfig) -> list[str]:
    """Return the names of classes in a config."""
    # A downloaded config may have any value there.
    named = config.architectures
    return list(map(str, named)) if isinstance(named, list) else []


def _model_class(auto: AutoClass, config: PretrainedConfig) -> object:
    """Return the class that an auto class builds for a config; None if it has none."""
    return auto._model_mapping.get(type(config), None)
