"""Finds the units of any Hugging Face decoder, with or without a vision tower, and builds its skeleton.

A skeleton has Hugging Face's own modules and buffers, and its parameters stay on the meta device. Weights exist only in
blocks, and are bound into the modules while a unit runs. `setup` and `integrations` build skeletons, and `session` cuts
them into units.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from megatier.compute.quantised_linear import STANDS_FOR
from megatier.compute.vector_math import warm_up
from megatier.defaults import usual_defaults
from megatier.errors import UnsupportedModelError
from megatier.foreign import first_sentence, reading
from megatier.guards.documents import TOGETHER
from megatier.guards.token_rows import names_of_rows
from megatier.layout import Layout, TensorSlice
from megatier.models.buffers import initialise_buffers, parameters_on_meta
from megatier.models.limits import limiting_construction
from megatier.models.model_class import auto_class

NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parameters without weight decay in Hugging Face's Trainer, by lower-case name."""

JOINING = ("linear", "compressed", "heavily_compressed")
"""Prefixes of attention types that combine tokens before masking."""

INDEXER_MASKED = (5, 17)
"""The first release of transformers in which the indexer of GLM-MoE-DSA never selects masked tokens."""

LENT_ELEMENTS_MAX = 1 << 22
"""The most elements of a parameter of a module around the layers: 8 MiB in bf16."""

USUAL_ATTENTION = ("auto", "sdpa")
"""Names for PyTorch's attention, or eager attention where a part of a model does not support it."""

MIXES_ROWS = ("DogeCDMoE",)
"""Modules whose output for a row depends on other rows of the batch. Doge's router splits its logits across rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of a model that is loaded, bound and run at once."""

    name: str
    """Name of the owning module, such as `model.layers.0`."""
    module_names: tuple[str, ...]
    """The modules that use the parameters: two if an embedding is tied to the head, the embedding first. If a layer's
    experts are units of their own, the other modules of the layer."""
    layout: Layout
    is_layer: bool
    experts: tuple[int, int] | None = None
    """The range [start, stop) of a fused experts module that this unit is; None: the unit is whole modules."""
    is_lent: bool = False
    """Whether copies of it are lent for the whole forward of its module, which runs layers. It holds what that module
    owns itself, such as LLaVA-NeXT's `image_newline`, or what stays in fp32 inside bf16 units (`dtypes`)."""


Binding = tuple[dict[str, Tensor | None], str, TensorSlice]
"""A place for a tensor: a module's `_parameters`, the key in it, and the slice of the unit's layout."""


@usual_defaults()
def build_skeleton(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build the model of a config, with fp32 parameters on meta and real buffers on the CPU.

    Buffers have the values of a normally constructed model. The caller's config is not changed.

    Args:
        config: the config of a decoder-only model. The result is the classifier that the config names, or else the
            language model, with its vision tower if it has one.
        attention: Hugging Face's name, such as `sdpa`. Where a part of a model does not support `sdpa` (GPT-OSS,
            PaliGemma 2), `eager` replaces it. `auto` means `sdpa` here: a run's choice is made before its model is
            built.

    Raises:
        UnsupportedModelError: the model is not a causal decoder, is quantised, is larger than any known model
            (`models.limits`), or has a buffer that nothing initialises.
    """
    # Every streamed model passes through here before its first buffer is computed.
    warm_up()
    check_config(config)
    try:
        model = _built(config, attention)
    except UnsupportedModelError as error:
        if attention in USUAL_ATTENTION:
            raise
        # If it cannot be built with the usual attention either, this raises the real reason.
        _built(config, "sdpa")
        raise UnsupportedModelError(f"{first_sentence(error)}. Set attention to sdpa.") from error

    # A key-value cache serves generation only, and would keep activations alive.
    model.config.use_cache = False
    return model


def _built(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build the model of a config, with its buffers."""
    # transformers writes its choices into the config.
    config = copy.deepcopy(config)

    # A named implementation is required of every part. Without a name, transformers uses sdpa where it is supported.
    implementation = None if attention in USUAL_ATTENTION else attention
    with reading(f"{config.model_type} cannot be built from this config", UnsupportedModelError):
        if implementation is None:
            config._attn_implementation = None
        options = {"dtype": torch.float32, "attn_implementation": implementation}
        with parameters_on_meta(), limiting_construction():
            model = auto_class(config).from_config(config, **options)  # type: ignore[no-untyped-call]
        assert isinstance(model, PreTrainedModel)
        initialise_buffers(model)
    return model


def check_config(config: PretrainedConfig) -> None:
    """Refuse the config of a quantised model, or of an encoder-decoder.

    Raises:
        UnsupportedModelError: it is one.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type}: the config is quantised, so full-precision weights are missing. Train adapters over "
            "it (model.lora, or peft_config of megatier.stream), or use a bf16 or fp32 version of the model."
        )

    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder; only decoder-only models are streamed."
        )


def find_units(model: PreTrainedModel) -> tuple[Unit, ...]:
    """Cut a model into units in module order, such that each parameter is in exactly one.

    A decoder layer is one unit, and so is any other outermost module that owns parameters (embedding, norm, head).
    Outside the decoder, a unit is the outermost module without a module list in it: a block of a vision tower, its
    embeddings, a projector. The parameters that a module around the layers owns itself are a unit too. Parameters that
    require no gradient are frozen, and so is the base of a model with adapters.

    Raises:
        UnsupportedModelError: there are no decoder layers; or a parameter is shared other than between embedding and
            head, is not floating-point, or is large and owned by a module around the layers.
    """
    names = _first_owners(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    stands_for = {name: getattr(parameter, STANDS_FOR, 1) for name, parameter in model.named_parameters()}
    has_base = any(is_adapter(module) for module in model.modules())
    layers = {id(layer) for layer in decoder_layers(model)}
    units: dict[str, Unit] = {}
    unit_of: dict[str, str] = {}

    for module_name, module in _unit_modules(model, layers):
        is_around_layers = _is_around(module, layers)
        shapes = dict[str, tuple[int, ...]]()
        for parameter in module.parameters(recurse=not is_around_layers):
            name = names[id(parameter)]
            shapes[name] = _checked_shape(model, name, parameter)
        if is_around_layers:
            _refuse_large(model, shapes)

        # The first module that uses a parameter owns it. Only a head that is tied to the embedding may be a second one.
        shared = [name for name in shapes if name in unit_of]
        if shared:
            first = units[min(unit_of[name] for name in shared)]
            _check_tied(model, first, module_name, shapes, shared[0])
            units[first.name] = replace(first, module_names=(first.name, module_name))
            continue

        unit_of.update(dict.fromkeys(shapes, module_name))
        layout = Layout.of(shapes.items(), frozen, stands_for)
        units[module_name] = Unit(
            name=module_name or type(model).__name__,
            module_names=(module_name,),
            layout=replace(layout, has_base=has_base),
            is_layer=id(module) in layers,
            is_lent=is_around_layers,
        )

    return tuple(units.values())


def _is_around(module: nn.Module, layers: Set[int]) -> bool:
    """Return whether a module is not a layer but contains layers."""
    return id(module) not in layers and any(id(child) in layers for child in module.modules())


def _check_tied(
    model: PreTrainedModel, first: Unit, module_name: str, names: Collection[str], shared_name: str
) -> None:
    """Refuse a module that shares parameters with another unit, unless they are the embedding and a tied head.

    Args:
        model: the skeleton.
        first: the unit of the first module that uses them.
        module_name: the second module.
        names: all parameters of the second module.
        shared_name: a shared parameter, for the message.

    Raises:
        UnsupportedModelError: they are not.
    """
    # A head with its own bias has a parameter that the embedding lacks, so no unit could be bound whole in both.
    is_whole = set(names) == {tensor.name for tensor in first.layout.tensors}
    is_embedding = model.get_submodule(first.module_names[0]) is model.get_input_embeddings()
    is_head = model.get_submodule(module_name) is model.get_output_embeddings()
    if not (is_whole and is_embedding and is_head):
        raise _unsupported(
            model,
            shared_name,
            f"is used by {first.name} and by {module_name}; only a head tied to the embedding may share",
        )


def bindings(model: PreTrainedModel, unit: Unit, module_name: str) -> list[Binding]:
    """Return the places in a module where tensors must be put to bind a unit.

    Call this while the model is unbound, and keep the result, since it walks the whole model.

    Args:
        model: the skeleton.
        unit: one of `find_units(model)`.
        module_name: one of `unit.module_names`; or any module, to find the places below it of a unit that is lent.

    Returns:
        One binding for each place. A slice that is used twice inside the module is listed twice.
    """
    names = _first_owners(model)
    slices = {tensor.name: tensor for tensor in unit.layout.tensors}
    places = list[Binding]()
    for module in model.get_submodule(module_name).modules():
        # The dictionary itself, since torch's setattr accepts only nn.Parameter, and views of a slot are plain tensors.
        parameters = cast("dict[str, Tensor | None]", module._parameters)
        for attribute, parameter in parameters.items():
            if parameter is None:
                continue
            name = names[id(parameter)]
            if name in slices:
                places.append((parameters, attribute, slices[name]))

    return places


def tiled_names(unit: Unit, module: nn.Module) -> list[str]:
    """Return the names of a module's submodules that may run in tiles of tokens; "" is the module itself.

    They are norms, MLPs and experts of decoder layers.
    """
    if not (unit.is_layer or unit.experts is not None):
        return []

    # A layer whose experts are units of their own is bound module by module, so this module is not a whole layer.
    is_whole_layer = unit.is_layer and len(unit.module_names) == 1
    return names_of_rows(module, is_layer=is_whole_layer)


def decay_parameter_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters with weight decay, as Hugging Face's Trainer chooses them."""
    # A norm may have any name, such as `ln_f`, so its class counts as well.
    norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm))
    decayed = set[str]()
    for name, _ in model.named_parameters():
        # Biases and norms, by class or name, have no decay.
        is_bias_or_norm = NO_DECAY.search(name.lower()) is not None
        if not is_bias_or_norm and not name.startswith(norms):
            decayed.add(name)

    return frozenset(decayed)


def check_document_boundaries(model: PreTrainedModel) -> None:
    """Refuse a model that carries information from one document of a packed sequence to the next.

    Attention has a mask that keeps documents apart. But a recurrent layer carries its state on, and attention over
    blocks of tokens may combine the end of one document with the beginning of the next.

    Raises:
        UnsupportedModelError: a layer is not attention over single tokens.
    """
    config = model.config.get_text_config()

    # Hybrid models such as Jamba use the second name.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    crossing = {kind for kind in kinds if not kind.endswith("attention") or kind.startswith(JOINING)}
    others = sorted(crossing)
    if getattr(config, "indexer_compress_ratio", None):
        others.append("an indexer over blocks of tokens")

    # The indexer of old versions adds a boolean mask to its scores, so it may select masked tokens.
    major, minor = transformers.__version__.split(".")[:2]
    is_old = (int(major), int(minor)) < INDEXER_MASKED
    if config.model_type == "glm_moe_dsa" and is_old:
        others.append("an indexer that is right from transformers 5.17 on")
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers ({', '.join(others)}) that do not stop at the borders of documents. "
            f"{TOGETHER}"
        )


def check_rows_are_apart(model: PreTrainedModel, remedy: str) -> None:
    """Refuse a model in which rows of a batch depend on each other, so that groups and slices would change results.

    Raises:
        UnsupportedModelError: a module is of that kind. The message names it, and ends with the remedy.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in MIXES_ROWS:
            raise UnsupportedModelError(
                f"{type(model).__name__}: what {name} ({type(module).__name__}) makes of a row depends on the other "
                f"rows of its batch, which can therefore not be cut: {remedy}."
            )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the longest list of `*Layer` or `*Block` modules below the decoder.

    Raises:
        UnsupportedModelError: there is no decoder, or no such list.
    """
    if not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(f"{type(model).__name__} has no get_decoder(), so its layers cannot be found.")

    # A decoder may have other lists, such as several heads. The layers are the longest list.
    lists = [
        module
        for module in model.get_decoder().modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(child).__name__.endswith(("Layer", "Block")) for child in module)
    ]
    if not lists:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of *Layer or *Block modules below its decoder: nothing to stream."
        )
    return max(lists, key=len)


def tied_modules(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the embedding and the head if they share a weight."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    weight = getattr(embedding, "weight", None)

    # By identity, since two tensors that are merely equal are trained separately.
    if weight is None or weight is not getattr(head, "weight", None):
        return frozenset()

    names = set[str]()
    for name, module in model.named_modules():
        if module is embedding or module is head:
            names.add(name)
    return frozenset(names)


def _first_owners(model: PreTrainedModel) -> dict[int, str]:
    """Return the name of each parameter by its id. A tied one has the name in its first owner."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _unit_modules(model: PreTrainedModel, layers: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose parameters make up units, in order.

    These are the layers, the outermost other modules that own parameters and, outside the decoder, the outermost
    modules that contain no list.
    """
    # The prefix of the last yielded module, whose submodules are skipped.
    inside = None
    decoder = {id(module) for module in model.get_decoder().modules()}

    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        owns_parameters = any(parameter is not None for parameter in module._parameters.values())
        is_outside = id(module) not in decoder
        is_one_unit = id(module) in layers or is_adapter(module) or (is_outside and _has_no_list(module))
        if not owns_parameters and not is_one_unit:
            continue

        # A module that runs the layers contributes only what it owns itself. Its submodules follow.
        if not _is_around(module, layers):
            inside = f"{name}."
        yield name, module


def _refuse_large(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse large parameters of a module around the layers.

    They are copied for the whole forward, outside the budgets.

    Raises:
        UnsupportedModelError: there is one. The message names it.
    """
    for name, shape in shapes.items():
        if math.prod(shape) > LENT_ELEMENTS_MAX:
            raise _unsupported(
                model,
                name,
                f"belongs to a module around the decoder layers and has {math.prod(shape)} elements; there at most "
                f"{LENT_ELEMENTS_MAX} can be held while all layers run",
            )


def _has_no_list(module: nn.Module) -> bool:
    """Return whether a module has parameters, and no module list, whose members other code would call one by one."""
    for child in _own_modules(module):
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            return False
    return next(module.parameters(), None) is not None


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, except those inside adapters."""
    yield module
    if not is_adapter(module):
        for child in module.children():
            yield from _own_modules(child)


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper around a module of the model."""
    # By the package's name, since PEFT is slow to import and most runs do not need it.
    return type(module).__module__.startswith("peft.")


def _checked_shape(model: PreTrainedModel, name: str, parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, and check that it can be trained."""
    # Codes of a quantised weight have one byte, even those that torch counts as floats (fp8).
    is_code = parameter.element_size() == 1
    if is_code or not parameter.is_floating_point():
        raise _unsupported(model, name, f"is {parameter.dtype}; only full-precision weights are trained")
    return tuple(parameter.shape)


def _unsupported(model: PreTrainedModel, parameter_name: str, reason: str) -> UnsupportedModelError:
    """Return the error about a parameter."""
    return UnsupportedModelError(f"{type(model).__name__}: parameter {parameter_name} {reason}.")
