"""Copies the modules of a model in RAM into a skeleton with parameters on meta.

Classes, attributes, hooks, modes, buffers, config and loss function are those of the given model, not those that its
config would build. So whatever a user has changed on the model is trained as it is. What cannot be copied is refused.
`megatier.stream` calls this.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from megatier.compute.vector_math import warm_up
from megatier.errors import UnsupportedModelError
from megatier.foreign import first_sentence, reading
from megatier.guards.given_model import check_modules, check_parameters
from megatier.guards.hidden_parts import TREE, HiddenParts
from megatier.models.decoder import check_config, decoder_layers, is_adapter, tied_modules
from megatier.models.dtypes import names_in_fp32
from megatier.models.model_class import implementation_of, known_class


def copied_skeleton(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Copy a model. The copy's parameters lie on meta in their own dtypes, and its buffers on the CPU.

    Args:
        model: the model, which is not changed.
        attention: Hugging Face's name for how attention is computed.

    Raises:
        UnsupportedModelError: a part of the model cannot be copied or trained. The message names it.
    """
    warm_up()
    check_config(model.config)
    known = known_class(model)
    check_modules(model)
    check_parameters(model)
    _check_dtypes(model)
    _check_layers(model)
    hidden = HiddenParts(model)
    hidden.check()

    # deepcopy uses the memo's entry instead of copying an object, so no weight is ever copied.
    memo: dict[int, Any] = {id(parameter): _on_meta(parameter) for parameter in model.parameters()}
    skeleton = _copied(model, memo | hidden.shared)
    for module in skeleton.modules():
        for attribute, buffer in module._buffers.items():
            module._buffers[attribute] = None if buffer is None else buffer.to("cpu")

    # A cache of keys and values serves generation alone, and would keep activations alive.
    skeleton.config.use_cache = False

    # A model may have been built from another model's config, as a classifier from a language model's.
    skeleton.config.architectures = [known.__name__]
    _note_ties(skeleton)
    _set_attention(skeleton, implementation_of(known, attention))
    return skeleton


def _copied(model: PreTrainedModel, memo: dict[int, Any]) -> PreTrainedModel:
    """Copy a model, given the copies of some of its objects.

    Raises:
        UnsupportedModelError: an attribute cannot be copied. The message names it.
    """
    try:
        with reading(type(model).__name__, UnsupportedModelError):
            # With a copy of the memo, since a failed attempt leaves half-made objects in it.
            return copy.deepcopy(model, dict(memo))
    except UnsupportedModelError:
        # Try the attributes one by one, to name the one that fails. Modules are not copied as parts of each other here.
        apart = memo | {id(module): module for module in model.modules()}
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if attribute in TREE:
                    continue
                failure = f"{attribute} of {name or type(model).__name__} cannot be copied"
                remedy = "Take it out of the model, or write __deepcopy__ for it."
                with reading(failure, UnsupportedModelError, remedy=remedy):
                    copy.deepcopy(value, dict(apart))
        raise


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return the skeleton's meta parameter for a real one."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    placed = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    # Attributes that the model's code has set on a parameter are kept.
    placed.__dict__.update(parameter.__dict__)
    return placed


def _check_dtypes(model: PreTrainedModel) -> None:
    """Refuse a model whose weights have several dtypes, since all of them compute in one.

    Adapters may be in fp32 over a base in bf16, as PEFT makes them.

    Raises:
        UnsupportedModelError: they do. The message names a parameter.
    """
    parameters = dict(model.named_parameters())
    in_fp32 = names_in_fp32(model, parameters)
    in_adapters = tuple(f"{name}." for name, module in model.named_modules() if is_adapter(module))
    first_name = ""
    for name, parameter in parameters.items():
        is_of_adapter = parameter.requires_grad and name.startswith(in_adapters)
        if name in in_fp32 or is_of_adapter:
            continue

        first_name = first_name or name
        dtype = parameters[first_name].dtype
        if parameter.dtype is not dtype:
            raise UnsupportedModelError(
                f"the parameter {name} is {parameter.dtype}, and {first_name} is {dtype}; a streamed model computes "
                "in one dtype. Call float() or bfloat16() of the model, and set compute_dtype of megatier.stream."
            )


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse a model whose number of layers was changed since it was made.

    Raises:
        UnsupportedModelError: it has another number of layers than its config says.
    """
    num_layers = len(decoder_layers(model))
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", num_layers)
    if num_layers != wanted:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {num_layers} decoder layers, and its config says {wanted}. Set "
            "num_hidden_layers of the config to the number of layers."
        )


def _note_ties(skeleton: PreTrainedModel) -> None:
    """Record in the config whether embedding and head share a weight, which an export needs."""
    for module in (skeleton.get_input_embeddings(), skeleton.get_output_embeddings()):
        if getattr(module, "weight", None) is None:
            return

    is_tied = bool(tied_modules(skeleton))
    configs: list[PretrainedConfig] = [skeleton.config, skeleton.config.get_text_config()]
    says_tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    if is_tied != says_tied:
        for config in configs:
            config.tie_word_embeddings = is_tied


def _set_attention(skeleton: PreTrainedModel, attention: str) -> None:
    """Set a skeleton's attention implementation, which may differ from the model's.

    Raises:
        UnsupportedModelError: it cannot.
    """
    if skeleton.config._attn_implementation != attention:
        failure = f"{type(skeleton).__name__} does not take attention {attention}"
        remedy = f"Leave attention out, for that of the model ({skeleton.config._attn_implementation})."
        with reading(failure, UnsupportedModelError, first_sentence, remedy):
            skeleton.set_attn_implementation(attention)
    if skeleton.config._attn_implementation != attention:
        raise UnsupportedModelError(
            f"{type(skeleton).__name__} was made with attention {skeleton.config._attn_implementation}, which cannot "
            f"be changed to {attention} any more. Leave attention out, or make the model anew."
        )
